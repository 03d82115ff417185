"""Drafts from a storage of n-grams: a tree of the likeliest continuations, as large as pays.

NASD (github.com/romsto/Speculative-Decoding) drafts a chain of the likeliest continuations and counts, for every
accepted token, the target's likeliest tokens besides; without these it is ANPD (Ou et al., NAACL 2024 industry track).
Here a chain has branches where several continuations are known, as in the trees of SuffixDecoding (arXiv 2411.04975,
section 3).
"""

from __future__ import annotations

import copy
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fastspec.config import Cursor, Nasd, Storage
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.base import Decoding, Drafter, HostDrafter, Process, Traits
from fastspec.generation.drafters.ngram_rounds import IN_VAIN, MARGIN, RESTS, TimedDrafts
from fastspec.generation.drafters.ngram_storage import NgramStorage, SuffixStorage
from fastspec.generation.drafters.policy import COSTS, SMOLLM2_BYTES, MeasuredCosts
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree, Verdict

DOUBT, DOUBT_OF_ONE = 1.0, 4.0
"""Counts given to tokens not seen after a context yet: DOUBT / sqrt(l) for l tokens, DOUBT_OF_ONE for a single one."""
SURELY_NOT = 99.0
"""The same for a token that is drafted although nothing is known of what follows."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree before it is laid out: nodes by falling chance to be reached, node 0 the root with chance 1."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


def grow(
    storage: Storage,
    cursor: Cursor,
    root: int,
    *,
    gamma: int,
    nodes: int,
    ends: frozenset[int],
    guess: bool = False,
    least: float = 0.0,
    grower: Callable[..., int] | None = None,
) -> Growth:
    """The likeliest tree of at most `nodes` nodes, `gamma` drafts deep, after the cursor, which stands after root; with
    `least` of drafts that are reached with such a chance at least.

    A node's chance is its parent's times its share of what was counted after the longest known context. Best first, and
    among equals the one found first, so each prefix of the list is a tree. Nothing is drafted after an end token. Where
    nothing is known nothing is drafted either or, with `guess`, the last token again. `grower` does so for n-grams
    (`NgramStorage.tree`); None: Python does.
    """
    if grower is not None and type(storage) is NgramStorage:
        doubts = DOUBT, DOUBT_OF_ONE, SURELY_NOT
        return Growth(*storage.tree(grower, cursor, root, gamma, nodes, ends, guess, least, doubts))
    tree = Growth([root], [0], [1.0])
    cursors, depths = [cursor], [0]
    queue: list[tuple[float, int, int, int]] = []  # (-chance, number, parent, token)
    found = 0
    while True:
        node = len(tree.tokens) - 1
        if depths[node] < gamma and tree.tokens[node] not in ends:
            length, known = storage.look(cursors[node])
            doubt = DOUBT_OF_ONE if length <= 1 else DOUBT / length**0.5
            if not known and guess:
                known, doubt = [(tree.tokens[node], 1)], SURELY_NOT
            share = tree.chances[node] / (sum([times for _, times in known]) + doubt)
            for token, times in known:
                if share * times >= least:
                    heapq.heappush(queue, (-share * times, found, node, token))
                    found += 1
        if not queue or len(tree.tokens) == nodes:
            return tree
        chance, _, parent, token = heapq.heappop(queue)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.chances.append(-chance)
        cursors.append(storage.step(cursors[parent], token))
        depths.append(depths[parent] + 1)


def best_size(growths: list[Growth], costs: dict[int, float], trust: float = 1.0) -> int:
    """Number of nodes that promises most tokens per cost to all rows, where the share `trust` of promises is kept."""
    if all(len(growth.tokens) == 1 for growth in growths):
        return min(costs)
    sums = [
        [0.0, *accumulate((growth.chances[0], *(trust * chance for chance in growth.chances[1:])))]
        for growth in growths
    ]
    promise = {size: sum([known[min(size, len(known) - 1)] for known in sums]) / cost for size, cost in costs.items()}
    return max(promise, key=promise.__getitem__)  # the first of the best: the smallest


def lay_out(growths: list[Growth], nodes: int, max_path: int, device: torch.device) -> TokenTree:
    """The first `nodes` nodes of every row as a TokenTree, in one transfer.

    A row that knows fewer gets copies of the root's first child (or of the root, where it has none) as further children
    of the root. That is exact: a walk scores them like any draft, and takes the first of equal siblings.
    """
    words = -(-nodes // 64)
    # tokens, parents, depths, ancestors: each lies contiguous in the one tensor
    planes: tuple[list[int], ...] = ([], [], [], [])
    for growth in growths:
        tokens, parents = growth.tokens[:nodes], growth.parents[:nodes]
        spare = nodes - len(tokens)
        parents = parents + [0] * spare
        depths, seen = [0], [1]
        for node in range(1, nodes):
            parent = parents[node]
            depths.append(depths[parent] + 1)
            seen.append(seen[parent] | 1 << node)
        ancestors = [word for bits in seen for word in _signed(bits, words)] if nodes > 63 else seen
        tokens = tokens + [tokens[min(1, len(tokens) - 1)]] * spare
        for plane, values in zip(planes, (tokens, parents, depths, ancestors), strict=True):
            plane += values
    size = len(planes[0])
    packed = torch.tensor([value for plane in planes for value in plane], device="cpu").to(device)
    first, second, third = (packed[part * size : (part + 1) * size].view(-1, nodes) for part in range(3))
    drafted = tuple(min(nodes, len(growth.tokens)) - 1 for growth in growths)
    return TokenTree(first, second, third, packed[3 * size :].view(-1, nodes, words), max_path, drafted=drafted)


def _likeliest(logits: Tensor, path: Tensor, count: int) -> Tensor:
    """[B, S, count]: the tokens of the largest logits [B, N, V] at the nodes of a path [B, S], the best first. A CPU
    takes a node's row at a time where it lies, once, since a path's last node repeats: a copy of all is a loop of
    torch's threads, which wait milliseconds for a core where the threads of the kernels or other programs have it."""
    if logits.device.type == "cpu":
        best = list[Tensor]()
        for row, nodes in enumerate(path.tolist()):
            found = {node: logits[row, node].topk(count).indices for node in {*nodes}}
            best += [found[node] for node in nodes]
        return torch.stack(best).view(*path.shape, count)
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    return logits[rows, path].topk(count).indices


def _signed(bits: int, words: int) -> list[int]:
    """Bits as 64-bit words, the lowest first, in two's complement."""
    parts = [bits >> 64 * word & (1 << 64) - 1 for word in range(words)]
    return [part - (1 << 64) if part >> 63 else part for part in parts]


LEAST_LOOK = 0.03
"""Rounds go without look-ups only where one costs more than this, in target passes."""
QUICKER = 10
"""Times as many tokens that a counter counts in the time that Python takes."""
BATCHED = 8
"""Tokens from which a counter is asked, as a call of it takes as long as Python for a few."""
LAG = 16
"""Tokens of a row at most that its drafts go on from although they are not counted yet."""
KNOWN = 7 / 8
"""Share of the rows that go on whose tokens have to be counted before rounds without drafts end."""
BEYOND = 32
"""Tokens of a row's text at most that are no part of a prompt which begins like it, for its counts to be taken over:
the last token, and what a round emitted behind an answer's limit. A text of which more is left is another one."""
NONE_BESIDE: Iterable[Sequence[int]] = repeat(())
"""Likeliest tokens beside each of those that were counted without any."""
AHEAD = 4
"""Tokens by which a row may be ahead of the last one, for its drafts to count where a call ends with the last row."""
SPARSE = 1.15
"""Cost of a tree, over that of a smaller one, for which both are captured."""
UNTRIED = 1.5
"""Drafts that count as promised and accepted before any were."""
KEPT = 0.99
"""Weight that what was promised and accepted keeps with every further round: the text may repeat more later."""


class Arrival(NamedTuple):
    """Text that a row begins with, and what is known of it: arguments of `HostDrafter.join`."""

    text: Tensor
    prefix: tuple[Drafter, int, int] | None
    hint: Sequence[int]


class NasdDrafter(HostDrafter):
    """Draft state of one generate call: a storage and a cursor per row, on the host.

    `storages` holds one storage per row, or the same one for every row. A tree has 1, 4, 8, ... or `nodes` nodes: the
    number that promises most in this round, by the share of earlier promises that was kept. With
    `stop_if_unknown=False` it always has `nodes`.

    A round whose drafts come from the host waits for the host. Where this costs much, `TimedDrafts` decides which
    rounds have some. Tokens of the others are counted without the target's likeliest ones beside them. Tokens are
    counted while the device is busy then (`work`), those of the shortest backlogs first.
    """

    traits = Traits(reusable=True)
    observes_roots = True

    def __init__(
        self,
        config: Nasd,
        storages: list[Storage],
        device: torch.device,
        weight_bytes: int = SMOLLM2_BYTES,
        vocabulary: int | None = None,
        measured: dict[tuple[int, int], MeasuredCosts] | None = None,
        counter: Callable[..., None] | None = None,
        grower: Callable[..., int] | None = None,
    ) -> None:
        self.counter, self.grower = counter, grower
        cost = COSTS.get(device.type, COSTS["cuda"])
        self.config, self.device, self.vocabulary = config, device, vocabulary
        self.nodes = cost.nodes if config.total_tokens is None else config.total_tokens
        self.max_path = min(config.gamma + 1, self.nodes)
        smaller = (1, 4, 8, 16, 32, 64, 128) if config.stop_if_unknown else ()
        sizes = [*(size for size in smaller if size < self.nodes), self.nodes]
        rows = len(storages)
        costs = {size: cost.of(size * rows, weight_bytes, rows) + cost.node * rows * (size - 1) for size in sizes}
        plain = cost.of(rows, weight_bytes) - (cost.host if cost.asynchronous else 0.0)
        self.prices = {size: (whole + cost.wait) / plain - 1 for size, whole in costs.items()}
        self.look, self.wait = cost.look(weight_bytes, rows), cost.look(weight_bytes)
        self.dear = config.stop_if_unknown and self.look >= LEAST_LOOK
        if self.dear:
            costs = {size: costs[size] for size in spread(costs)}
            costs[1] /= MARGIN
        self.measured = None
        if measured is not None and len(costs) > 1:
            self.measured = measured.setdefault((rows, self.nodes), MeasuredCosts(costs))
        self.estimated, self.smallest = costs, min(sizes)
        self.least = cost.node * rows / plain
        """Chance of a draft for which the host takes as long as for what it promises."""
        self.quick = counter is not None and all(type(storage) is NgramStorage for storage in storages)
        """True where a counter counts, and not Python."""
        self.quota = int(plain / (cost.count / QUICKER if self.quick else cost.count)) if cost.asynchronous else None
        """Tokens that are counted while a pass runs; None: all, at once."""
        self._begin_call(storages)

    def open(self, capacity: int) -> None:
        self._begin_call([storage_of(self.config) for _ in self.storages])

    def _begin_call(self, storages: list[Storage]) -> None:
        """Know nothing but the storages, and what was measured."""
        self.storages, self.listens, self.hosted = storages, True, False
        self.costs = self.estimated if self.measured is None else self.measured.costs()
        self.rule = TimedDrafts(self.costs, self.prices, self.look, self.wait, len(storages), self.config.gamma)
        """Decides which rounds have drafts, where these are dear."""
        self.began = 0.0
        """Second in which the last tree was asked for."""
        self.promised, self.delivered, self.hoped, self.size = 0.0, 0.0, 0.0, self.smallest
        """Drafts promised and accepted so far, later ones with more weight; drafts and nodes of the last round."""
        self.growths: list[Growth] | None = None
        """The trees of the next round, where they were looked up."""
        self.tried = 0
        """Place among the sizes of the last round that tried one, counted from 1; 0: it drafted nothing."""
        self.vain = False
        """True where the next round has waited for a look-up in vain."""
        self.cursors: list[Cursor] = [storage.start() for storage in storages]
        """Places up to which the rows are counted; `unread` has the tokens after each, with the likeliest beside."""
        self.unread: list[deque[tuple[int, Sequence[int]]]] = [deque() for _ in storages]
        self.roots, self.active = [0] * len(storages), [True] * len(storages)
        self.heard, self.begun = [0] * len(storages), [0] * len(storages)
        """Tokens of each row's text, those in `unread` included, and of its prompt."""
        self.fresh: list[list[int]] = [[] for _ in storages]
        """The last tokens in `unread` of each row, which `rule` has not heard."""
        self.counted = False
        """True where nothing is left to count until more is heard."""
        self.arrived: dict[int, Arrival] = {}
        """Texts of rows that have joined, by row, until the next round was launched."""

    def hint(self, texts: Sequence[Sequence[int]]) -> None:
        for storage, text in zip(self.storages, texts, strict=True):
            self._feed(storage, storage.start(), [(token, ()) for token in text])

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        known = torch.stack((root.to(ids.device), counts.to(ids.device)), 1)  # layers may lie on several devices
        for row, (first, real, *text) in enumerate(torch.cat((known, ids), 1).tolist()):
            self.rule.recurrence.begin(row)
            self.roots[row], self.fresh[row] = first, []
            self._hear(row, [*text[:real], first])
        self.begun = self.heard.copy()
        if self.ends_at_once:
            self.rule.begin_call()
        self._heard()

    def _hear(self, row: int, tokens: Sequence[int], likeliest: Iterable[Sequence[int]] = NONE_BESIDE) -> None:
        """Take tokens of a row, with the target's likeliest ones beside each."""
        self.unread[row].extend(zip(tokens, likeliest))  # noqa: B905
        self.heard[row] += len(tokens)

    def join(
        self,
        row: int,
        text: Tensor,
        first: int,
        prefix: tuple[Drafter, int, int] | None = None,
        hint: Sequence[int] = (),
    ) -> None:
        """The row drafts nothing before its text is taken in, after the next launch: now the device would wait for it.
        What is taken over of another drafter is taken at once: its rows may change."""
        if row in self.arrived:
            self._seat()
        self.roots[row], self.active[row], self.fresh[row] = first, True, []
        self.rule.recurrence.begin(row)
        self.arrived[row] = Arrival(text, prefix, hint)
        self.growths, self.counted = None, False
        if self.quota is None or (prefix is not None and prefix[0] is not self):
            self._seat()

    def held(self) -> NasdDrafter:
        self._seat()
        held = copy.copy(self)  # what these lists hold is replaced, and changes in rounds alone
        held.storages, held.cursors = self.storages.copy(), self.cursors.copy()
        held.unread, held.heard = self.unread.copy(), self.heard.copy()
        return held

    def _seat(self) -> None:
        """Take in the texts of rows that have joined, in their order."""
        arrived, self.arrived = self.arrived, {}
        for row, (text, prefix, hint) in arrived.items():
            self._leave(row)
            took = 0 if prefix is None else self._take_prefix(row, *prefix)
            if not took:
                self.storages[row] = storage_of(self.config)
                self.cursors[row], self.unread[row], self.heard[row] = self.storages[row].start(), deque(), 0
            if hint:
                self._feed(self.storages[row], self.storages[row].start(), [(token, ()) for token in hint])
            self._hear(row, [*text[took:].tolist(), self.roots[row]])
        if arrived:
            self._heard()

    def _take_prefix(self, row: int, other: Drafter, source: int, count: int) -> int:
        """Go on in a row with a copy of another's storage, where the prompt goes on with that one's whole text: the
        next turn of a conversation, whose tokens were counted -> how many of its tokens are known."""
        assert isinstance(other, NasdDrafter)
        beyond = other.heard[source] - count
        if not isinstance(self.config.storage, str) or not 0 <= beyond <= BEYOND:
            return 0
        storage, unread, cursor = other.storages[source], deque(other.unread[source]), other.cursors[source]
        if other is not self or source != row:
            storage = copy.deepcopy(storage)
        if beyond > len(unread):  # some of these tokens were counted: the prompt's own follow them as another text's
            cursor = storage.start()
        for _ in range(min(beyond, len(unread))):
            unread.pop()
        self.storages[row], self.cursors[row], self.unread[row], self.heard[row] = storage, cursor, unread, count
        return count

    def _leave(self, row: int) -> None:
        """Count what is left of a row's text in a storage that others read too, and that outlives the text."""
        if not isinstance(self.config.storage, str):
            self._feed(self.storages[row], self.cursors[row], [*self.unread[row]])

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        assert isinstance(other, NasdDrafter)
        self._seat()
        other._seat()
        self._leave(row)
        self.storages[row], self.cursors[row] = other.storages[source], other.cursors[source]
        self.roots[row], self.active[row] = other.roots[source], other.active[source]
        self.unread[row], self.heard[row] = deque(other.unread[source]), other.heard[source]
        self.fresh[row] = other.fresh[source].copy()
        self.rule.recurrence.move(row, other.rule.recurrence, source)
        self._heard()

    @property
    def trust(self) -> float:
        """The share of what drafts promised that was accepted, 1 at the most."""
        return min(1.0, (self.delivered + UNTRIED) / (self.promised + UNTRIED))

    @property
    def ruled(self) -> bool:
        """True where `rule` decides."""
        return self.dear and not self.tries

    @property
    def counting(self) -> list[bool]:
        """Rows whose drafts bring an end nearer: where a call ends with its last row, those that are not ahead."""
        if not self.ends_at_once:
            return self.active
        emitted = [heard - begun for heard, begun in zip(self.heard, self.begun, strict=True)]
        least = min((count for count, on in zip(emitted, self.active, strict=True) if on), default=0)
        return [on and count <= least + AHEAD for count, on in zip(emitted, self.active, strict=True)]

    def _spared(self, gains: dict[int, int]) -> float:
        """Rounds that are spared where rows have accepted so many drafts: a call those that its last row is further."""
        if not self.ends_at_once:
            return self.rule.shared(gains)
        emitted = {row: self.heard[row] - self.begun[row] for row in gains}
        further = [emitted[row] + accepted for row, accepted in gains.items()]
        return min(further, default=0) - min(emitted.values(), default=0)

    def _foretell(self) -> None:
        """Learn from new tokens of the rows whether they were those that their storages have next."""
        for row, tokens in enumerate(self.fresh):
            known = not tokens or self.rule.hear(row, self.storages[row], tokens)
            if not known and len(self.unread[row]) - len(tokens) <= LAG:
                self.rule.recurrence.stand(row, self.storages[row], self._place(row))
            self.fresh[row] = []

    def _place(self, row: int) -> Cursor:
        """Place of a row after its last token."""
        cursor = self.cursors[row]
        for token, _ in self.unread[row]:
            cursor = self.storages[row].step(cursor, token)
        return cursor

    def _heard(self) -> None:
        """Rows have new tokens: what was looked up no longer holds."""
        self.growths, self.counted = None, False
        if self.quota is None:
            self.work(all_of_it=True)

    def work(self, all_of_it: bool = False) -> None:
        """Count what was put off, once `rule` has heard it: in rounds without drafts that of rows with enough for a
        counter, and while no drafts are near that of watched rows alone."""
        looked_up = self.growths is not None
        self._seat()
        if self.counted and not all_of_it:
            return
        self._foretell()
        left = sum(map(len, self.unread)) if all_of_it or self.quota is None else self.quota
        least = 1 if all_of_it or self.counter is None or looked_up else BATCHED
        near = all_of_it or self.listens or not self.quick or not self.ruled
        put_off = [(len(self.unread[row]), row) for row in (range(len(self.unread)) if near else self.rule.watched)]
        for most, row in sorted(each for each in put_off if each[0] >= least):
            unread, count = self.unread[row], min(left, most)
            if count >= least:
                steps = [unread.popleft() for _ in range(count)]
                self.cursors[row] = self._feed(self.storages[row], self.cursors[row], steps)
                left -= count
        self.counted = left >= least

    def _feed(self, storage: Storage, cursor: Cursor, steps: Sequence[tuple[int, Sequence[int]]]) -> Cursor:
        """Count tokens, with the target's likeliest ones beside each -> the cursor after them."""
        if self.counter is not None and type(storage) is NgramStorage and len(steps) >= BATCHED:
            return storage.feed_all(cursor, steps, self.counter)
        for token, fillers in steps:
            cursor = storage.feed(cursor, token, fillers)
        return cursor

    def come(self) -> None:
        self.rule.times.come()

    def interrupt(self) -> None:
        self.rule.times.leave()

    def finish(self) -> None:
        if not isinstance(self.config.storage, str):  # those of its own are not read again
            self.work(all_of_it=True)

    def pause(self) -> int:
        if self.tries:
            self.tried = (self.tried + 1) % (1 + len(self.costs))
            return int(self.tried == 0)
        self._listen(True)
        self._foretell()
        rests = self.rule.rests(self.counting, self.timed) if self.dear else 0
        if rests or not self.dear:
            return rests
        self._look_up()
        self.vain = self.size == 1
        return RESTS if self.vain else 0

    def rests_on(self) -> int:
        if not self.ruled:
            return 0
        self._foretell()
        more = self.rule.rests_on(self.counting)
        self._listen(more <= 1)
        return more or int(self.quick and self._lags())

    def _listen(self, listens: bool) -> None:
        """Hear every round, or the next ones together: meanwhile only tokens of rows that are watched are counted."""
        self.counted, self.listens = self.counted and listens == self.listens, listens

    def _lags(self) -> bool:
        """True where drafts would bring less than the watched rows say, since too few of the others are counted."""
        return sum(map(self._knows, range(len(self.active)))) < KNOWN * sum(self.active)

    def _knows(self, row: int) -> bool:
        return self.active[row] and row not in self.arrived and len(self.unread[row]) <= LAG

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        ruled, rounds = self.ruled, tokens.shape[1]
        self._seat()
        if ruled:
            self.rule.ran(IN_VAIN if self.vain else 1, self.hosted, rounds=rounds)
        self.vain = False
        self.promised, self.delivered = KEPT**rounds * self.promised, KEPT**rounds * self.delivered
        for row, (emitted, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            if heard := emitted[:count]:
                self._hear(row, heard)
                self.roots[row] = heard[-1]
                if ruled:
                    self.fresh[row] += heard
            self.active[row] = self.active[row] and count == rounds and self.roots[row] not in self.ends
        self._heard()

    def _look_up(self) -> list[Growth]:
        """Trees of what is known, and how much of them promises most; that of a row that has ended is its root."""
        gamma, guess = self.config.gamma, not self.config.stop_if_unknown
        found = partial(
            grow, gamma=gamma, nodes=self.nodes, ends=self.ends, guess=guess, least=self.least, grower=self.grower
        )
        growths = self.growths = []
        for row, (storage, root) in enumerate(zip(self.storages, self.roots, strict=True)):
            if not self._knows(row):
                growths.append(Growth([root], [0], [float(self.active[row])]))
                continue
            growths.append(found(storage, self._place(row), root))
            if self.vocabulary is not None:
                check_drafts(storage, growths[-1].tokens, self.vocabulary)
        if self.tries:
            self.size = sorted(self.costs)[self.tried - 1]
        else:
            costs = self.rule.behind_look_up() if self.dear else self.costs
            self.size = best_size(growths, costs, self.trust)
        return growths

    def propose(self, extent: int) -> TokenTree:
        """Draft from what is known; the tree of a row that has ended is filled up with copies of its root."""
        self.began = time.perf_counter()
        growths = self._look_up() if self.growths is None else self.growths
        size = self.size
        self.hoped = sum(sum(growth.chances[1:size]) for growth in growths)
        return lay_out(growths, size, min(size, self.max_path), self.device)

    def digest(self, tree: TokenTree, verdict: Verdict, logits: Tensor, active: Tensor, steps: int) -> Tensor:
        """[B, 2 + steps * (1 + likely)]: whether a row goes on, its accepted tokens, and for each step the likeliest
        tokens, the best of them last, and the token emitted."""
        emitted = verdict.tokens(tree)[:, :steps, None]
        likely = min(self.config.top_k_filler, logits.shape[2]) if self.config.top_k_filler > 1 else 0
        if likely:
            best = _likeliest(logits, verdict.path[:, :steps], likely)
            emitted = torch.cat((best.flip(-1), emitted), 2)
        return torch.cat((active[:, None].long(), verdict.accepted[:, None], emitted.flatten(1)), 1)

    def update(self, digest: list[list[int]], steps: int) -> None:
        """Count the emitted tokens of the active rows up to their end tokens, and the target's likeliest ones."""
        self._seat()
        gains = {row: accepted for row, (goes_on, accepted, *_) in enumerate(digest) if goes_on}
        if self.ruled:
            self.rule.ran(self.size, self.hosted, self._spared(gains))
        if gains and not self.tries:  # what a try accepts says nothing of a text
            self.promised = KEPT * self.promised + self.hoped
            self.delivered = KEPT * self.delivered + sum(gains.values())
        for row, (goes_on, accepted, *emitted) in enumerate(digest):
            self.active[row] = bool(goes_on)
            if not goes_on:
                continue
            width = len(emitted) // steps
            for start in range(0, width * (accepted + 1), width):
                *likeliest, token = emitted[start : start + width]
                self._hear(row, [token], [likeliest])
                if self.ruled:
                    self.fresh[row].append(token)
                if token in self.ends:
                    break
            self.roots[row] = emitted[width * (accepted + 1) - 1]
        self._heard()
        if self.measured is not None:
            self.measured.take(self.size, 1e3 * (time.perf_counter() - self.began))
            self.costs = self.measured.costs()


def spread(costs: dict[int, float]) -> list[int]:
    """Sizes that are worth a graph of their own: 1, the largest, and smaller ones that cost much less than the next."""
    first, *sizes = sorted(costs)
    kept = sizes[-1:]
    for size in reversed(sizes[:-1]):
        if costs[kept[0]] > SPARSE * costs[size]:
            kept = [size, *kept]
    return [first, *kept]


def check_tokens(storage: Storage | str, vocabulary: int) -> None:
    """Raise Unsupported where a storage of ours would draft tokens that a model of so many does not have."""
    if isinstance(storage, (NgramStorage, SuffixStorage)) and storage.tallies.largest() >= vocabulary:
        raise Unsupported(
            f"Nasd: storage={storage!r} holds the token {storage.tallies.largest()}, and the model's tokens end at "
            f"{vocabulary - 1}: it was filled with another model's texts; load the one made with this model, or make a "
            "new one"
        )


def check_drafts(storage: Storage, tokens: list[int], vocabulary: int) -> None:
    """Raise FastSpecError where a storage that is not one of ours drafts tokens that a model of so many lacks."""
    if isinstance(storage, (NgramStorage, SuffixStorage)):  # what they hold was checked, what they are fed is real
        return
    for token in tokens:
        if not 0 <= token < vocabulary:
            who = f"{type(storage).__name__}.look gave the token {token}"
            raise FastSpecError(f"Nasd: {who}, and the model's tokens end at {vocabulary - 1}")


def storage_of(config: Nasd) -> Storage:
    """The storage of a config: that which was given, else an empty one of the named kind."""
    kind, n = config.storage, config.n
    if kind == "ngram":
        return NgramStorage(4 if n is None else n)
    if kind == "one_level":
        return NgramStorage(3 if n is None else n, back_off=False)
    return SuffixStorage(max_match=32 if n is None else n - 1) if kind == "suffix" else kind


@dataclass(frozen=True, slots=True)
class NasdDecoding(Decoding):
    """Decoding with n-grams; by default every row of every call has a storage of its own. `weight_bytes` are those
    that a pass of the target reads: what several nodes cost beside one depends on them. `vocabulary` bounds the tokens
    of storages that are not ours. `measured` has what rounds of so many rows and largest trees took; None where no
    clock may decide. `counter` counts in our storages' arrays (`NgramStorage.feed_all`), and `grower` grows trees from
    them (`NgramStorage.tree`); None: Python does."""

    continuous: ClassVar[bool] = True
    config: Nasd
    weight_bytes: int = SMOLLM2_BYTES
    vocabulary: int | None = None
    measured: dict[tuple[int, int], MeasuredCosts] | None = field(default=None, compare=False)
    counter: Callable[..., None] | None = field(default=None, compare=False)
    grower: Callable[..., int] | None = field(default=None, compare=False)
    name: str = "nasd"
    taps: None = None

    def drafter(
        self, *, rows: int, capacity: int, device: torch.device, ops: Ops, process: Process | None
    ) -> NasdDrafter:
        storages = [storage_of(self.config) for _ in range(rows)]
        known = self.weight_bytes, self.vocabulary, self.measured, self.counter, self.grower
        return NasdDrafter(self.config, storages, torch.device(device), *known)
