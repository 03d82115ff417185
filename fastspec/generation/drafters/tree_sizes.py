"""Sizes of the trees of a call's rounds: as many nodes as pay, a chain, or no drafts at all.

The size of a round has the most expected tokens over its milliseconds, as in DSpark's rule (arXiv 2607.05147): the
tokens by the acceptance seen so far at every depth, the milliseconds by those of earlier rounds. Drafts are paid from a
budget of target passes: `GRANTED` at the start of a call, `SHARE` of every round, and what was accepted. All that they
cost is taken from it as it was measured, changes of size included, so that no text costs a call more.

Both are read from what the host has anyway, so that no round waits, and no clock decides a token: a tree of any size
emits what plain decoding emits.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.acceptance import Acceptance
from fastspec.generation.drafters.base import Place

Milliseconds = dict[int, dict[int, float]]
"""Milliseconds of a round by the kind of round, as `bucket` counts it, and by the number of nodes."""
FED_KINDS = 32
"""Number that tells the kinds of rounds whose choices the host corrects from those that it has no part in."""
GRANTED, GRANTED_COLD = 1.8, 8.0
"""Target passes that drafts may lose at the start of a call, and where every other size has to be captured first."""
DOUBTED, DOUBT = 0.3, 0.4
"""Part of them where drafts are not thought to pay, as where they did in a smaller share of the last texts than DOUBT,
each of which counts for a half."""
CREDIT, PROVEN = 1.0, 0.9
"""Target passes by which the first rounds with drafts of a call may overdraw their budget; later ones pay them back.
A quarter more where they did in a larger share of the last texts than PROVEN."""
SHARE = 0.0075
"""Target passes that every round adds to what drafts may lose."""
SLACK = 1.0
"""Target passes at the most that a round is taken to cost beyond what is known of its size: others may hold it up."""
MOST_EARNED = 16.0
"""Target passes that drafts may lose at the most, however much they brought before."""
LONGEST_REST = 256
"""Rounds without drafts at the most before it is asked again what pays."""
BLOCK = 8
"""Rounds of one size before another may be chosen."""
EVIDENCE = 4
"""Rounds with drafts before a size is judged by what they accepted."""
CAUTION = 1.5
"""Prices of its own that must be left for drafts of another size to begin."""
SETTLED = 200
"""Rounds of one kind after which sizes are captured to try drafts again, and to learn what plain rounds cost."""
BETTER, WORTH_MAKING = 1.02, 1.06
"""A size replaces another that promises less by this factor; the second where it has to be captured first."""
DECAY = 0.98
"""Weight that a round keeps with every further one, with drafts or without: a text may have changed meanwhile."""
BETWEEN_CALLS = 0.5
"""Weight that the rounds of earlier calls keep."""
CURIOUS, ENOUGH = 0.08, 32.0
"""Part by which an untried size may promise less than another and be tried, and the rounds of texts that end this."""
RENEWED, HELD_UP = 0.25, 0.9
"""Weight of a block's milliseconds among those of its size, and the part of these below which several rounds are
believed whole: what held up the earlier ones is over. Believing every shorter block would keep the least of them."""
UNSEEN, SURE = (256, 4096), 2.0
"""Rounds with drafts of one kind after which a block of plain ones is timed again, at first and, doubled each time, at
most: where something had held up the first ones, drafts seemed to pay for ever. Drafts that seem to bring this many
times the tokens wait for the most at once."""
MOST_TRIES = 3
"""Rounds at the most that try drafts again: more where the changes of size before and after cost more than they do."""
CHANGES = 5
"""Changes of size whose median says what the next one costs."""


def bucket(length: int, place: Place = Place.DEVICE) -> int:
    """Rounds that count as one kind, by the place of their verdict, and by their texts: up to 1,024 tokens, 4,096,
    16,384, and so on; below zero where the host chooses tokens, from FED_KINDS on where it corrects what was chosen."""
    found = max(0, math.ceil(math.log2(max(1, length) / 1024) / 2))
    return ~found if place is Place.HOST else found + FED_KINDS * (place is Place.FED)


def split(kind: int) -> tuple[Place, int]:
    """The place of a kind's verdict, and the bucket of its texts."""
    if kind < 0:
        return Place.HOST, ~kind
    return (Place.DEVICE, kind) if kind < FED_KINDS else (Place.FED, kind - FED_KINDS)


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """Size of the rounds of one kind of call as it stands: nodes of each size (1: no drafts), milliseconds of a round
    and whether they were measured, expected tokens, and the nodes chosen; `print` shows a table."""

    sizes: tuple[int, ...]
    round_ms: tuple[float, ...]
    measured: tuple[bool, ...]
    expected: tuple[float, ...]
    chosen: int

    def __str__(self) -> str:
        lines = [f"{self.chosen} nodes chosen", "nodes  round ms  expected  tokens/ms"]
        for size, ms, measured, tokens in zip(self.sizes, self.round_ms, self.measured, self.expected, strict=True):
            told = f"{size:5} {ms:8.3f}{' ' if measured else '~'} {tokens:9.3f} {tokens / ms:10.4f}"
            lines.append(told + ("  <" if size == self.chosen else ""))
        return "\n".join(lines)


class TreeSizes:
    """Chooser of the size of rounds of one kind, `rows` at a time: `size` is that of the next round, 0 without drafts,
    else a place in `shapes`, ascending, counted from 1.

    `prior` has milliseconds of a round of every size, by which sizes are compared that were not measured, and `known`
    what was measured before. With `timed=False` what the rounds of a call take is used from the next call on, as
    processes do that must choose alike. With `fed` no rounds choose but those that the host corrects; others have the
    `first` trees. `captures` says that a size has to be captured before it runs, and `switch`
    what a change costs, in milliseconds, beside the rounds, before one was measured: none is in flight then, and a
    drafter reads what was emitted without it.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        first: TreeShape,
        prior: Sequence[float],
        *,
        known: Milliseconds | None = None,
        captures: bool = False,
        switch: float = 0.0,
        timed: bool = True,
        fed: bool = False,
        keep: Callable[[Milliseconds], object] | None = None,
    ) -> None:
        self.shapes, self.prior, self.captures, self.timed, self.keep = tuple(shapes), prior, captures, timed, keep
        self.switch, self.fed = switch, fed
        self.changes = deque[float](maxlen=CHANGES), deque[float](maxlen=CHANGES)
        """Target passes that the last changes of size cost beside their rounds: of rounds with drafts to others or to
        none, and of rounds without to some."""
        self.first = 1 + self.shapes.index(first)
        self.acceptance = Acceptance(self.shapes)
        self.known: Milliseconds = {} if known is None else known
        self.unkept = False
        """True where something was measured that is not in `known` as it was kept."""
        self.pending: dict[int, dict[int, tuple[float, bool]]] = {}
        """Milliseconds of this call's rounds, where it is used by the next one, and whether they were several."""
        self.left, self.paid, self.net = 0.0, 0.75, 0.0
        """Target passes that drafts may still lose, below zero where they have lost more; the share of the last texts
        whose drafts brought more than they cost; and what this one's have brought so far."""
        self.length, self.rounds, self.drafted = 0, 0, 0
        """The bucket of the rounds, how many there were since the beginning, and those with drafts."""
        self.share = 1.0
        """Share of the running rows that take drafts."""
        self.drafting = defaultdict[int, int](int)
        """Rounds with drafts of each kind since plain ones were timed, and how many there may be."""
        self.unseen = defaultdict[int, int](lambda: UNSEEN[0])
        self.samples: list[float] = []
        self.made: frozenset[int] = frozenset()
        """The sizes that need not be captured, as far as is known."""
        self.size, self.due, self.probes, self.waits = self.first, 0, False, False
        """Size of the next round, rounds of this block that are left, whether it tries drafts again, and whether it
        waits until it may."""
        self.sees = False
        """True in a block of plain rounds that run to be timed."""
        self.least = 0.0
        """Target passes that the rounds of this block were measured to cost more than plain ones, at the least."""
        self.begin()

    def at(self, place: Place) -> list[int]:
        """Sizes of rounds whose verdict is there, 0 of those that no row takes drafts in, too."""
        return [*range(len(self.shapes) + 1)] if not self.fed or place is Place.FED else [0, self.first]

    def nodes(self, size: int) -> int:
        """Nodes of a tree of this size."""
        return self.shapes[size - 1].total_tokens if size else 1

    def begin(self) -> None:
        """A call begins, on a text of its own."""
        self._renew(1.0)
        self.acceptance.part()
        self.gain, self.since = 0.0, 0
        """Tokens that the last round with drafts accepted, and rounds since sizes were compared."""
        self.last: int | None = None
        """The size of the round before, in this call."""
        self.credit = self._credit()
        """Target passes by which drafts may overdraw what is left."""
        self._measured()
        self._start()

    def _start(self) -> None:
        """The size of the first rounds of a text, or of another kind."""
        if self._is_fixed or (self.drafted < EVIDENCE and self._affords(self.first)):
            self._use(self.first, BLOCK)
        else:
            self._choose(begins=True)

    def expect(self, length: int, place: Place) -> None:
        """The next round has its verdict there, and this longest text: where such rounds choose and the last ones did
        not, or the other way round, its size is another question."""
        if self.fed and (place is Place.FED) == self._is_fixed:
            self._of_kind(bucket(length, place))
            self._start()

    def join(self, share: float) -> None:
        """A new text takes the place of one that was so large a `share` of the rows': as `begin`, for that share."""
        if share == 1:
            self.begin()
            return
        self._renew(share)
        self.credit = max(self.credit, min(self._credit(), self.credit + share * self._credit()))
        if not (self.size or self.sees):  # whose drafts may pay
            self.due = min(self.due, 1)

    def _renew(self, share: float) -> None:
        """A text that so large a `share` of the rows had is over, and another begins."""
        self.acceptance.fade(BETWEEN_CALLS**share)
        self.share = max(self.share, share)  # the next one takes drafts, as far as is known
        if self.net:
            self.paid += (1 - 0.5**share) * ((self.net > 0) - self.paid)
        self.net = 0.0
        self.left = self._granted(share)

    def _granted(self, share: float) -> float:
        """Target passes that drafts may lose, where so large a share of the rows has another text. What was saved in
        texts whose drafts were not thought to pay tries them again."""
        granted = GRANTED_COLD if self._is_cold() else GRANTED
        if self._trusts():
            return (1 - share) * self.left + share * granted
        kept = self.left + share * max(0.0, -self.left)
        return min(kept + share * DOUBTED * granted, granted + CREDIT)

    def _credit(self) -> float:
        """Target passes that a text's drafts may overdraw."""
        return CREDIT * (1.25 if self.paid > PROVEN else 1.0) if self._trusts() else 0.0

    def _trusts(self) -> bool:
        """True where drafts are thought to pay: by what was seen of some size, and of the last texts."""
        if self.drafted < EVIDENCE or self._is_cold():
            return True
        plain, *rates = self.rates()
        return self.paid >= DOUBT and max(rates) > plain

    def end(self) -> None:
        """A call is over: keep what was measured."""
        if self.unkept and self.keep is not None:
            self.unkept = False
            self.keep(self.known)

    def agree(self, first: Callable[[Milliseconds], Milliseconds]) -> None:
        """Use what the rounds of earlier calls took, in all processes what they took in the first one."""
        for length, spent in self.pending.items():
            for nodes, (ms, several) in spent.items():
                self._take(length, nodes, ms, several)
        self.pending = {}
        self.known = first(self.known)

    @property
    def goes_on(self) -> bool:
        """True where the round after the next one has the same size, as far as is known."""
        if self._is_fixed:
            return True
        return self.due > 1 if self.probes or not self.size else self._affords(self.size, 2)

    @property
    def tries_next(self) -> bool:
        """True where the next round is the last one before drafts are tried again, as far as is known."""
        return self.waits and self.due == 1

    @property
    def _is_fixed(self) -> bool:
        """True where rounds as the last one have the first trees."""
        return self.fed and split(self.length)[0] is not Place.FED

    def ms(self, size: int) -> float:
        """Milliseconds of a round of this size: measured, or by the prior's ratio to the nearest that was."""
        spent = self.known[self._nearest()] if self.known else {}
        if (found := spent.get(self.nodes(size))) is not None:
            return found
        sizes = [each for each in range(len(self.prior)) if self.nodes(each) in spent]
        if not sizes:
            return self.prior[size]
        near = min(sizes, key=lambda each: abs(each - size))
        return self.prior[size] * spent[self.nodes(near)] / self.prior[near]

    def price(self, size: int) -> float:
        """Target passes that a round of this size costs more than one without drafts."""
        return max(0.0, self.ms(size) / self.ms(0) - 1)

    def change(self, former: int) -> float:
        """Target passes that a change from this size to another costs beside the rounds."""
        seen = self.changes[not former]
        return median(seen) if seen else self.switch / self.ms(0)

    def rates(self) -> list[float]:
        """Expected tokens a millisecond of every size."""
        expected = [1.0, *self.acceptance.expected()]
        rest = 1.0 - self.share
        return [(rest + self.share * tokens) / self.ms(size) for size, tokens in enumerate(expected)]

    def count(
        self,
        size: int,
        accepted: Sequence[int],
        ms: float | None,
        length: int,
        made: Collection[int],
        share: float = 1.0,
        place: Place = Place.DEVICE,
    ) -> None:
        """Take a round of this size: the drafts that each running row accepted of those that take some, its
        milliseconds where these say something, and the longest text. `made` are the sizes that have run before in these
        rounds, `share` is that of the running rows that take drafts, and `place` that of the verdict on trees: rounds
        without drafts, which may have theirs elsewhere, are compared with those."""
        self.expect(length, place)
        self._of_kind(bucket(length, place))
        self.made, self.share = frozenset(made), share
        if self._is_fixed:
            self.last = size
            self._use(self.first, BLOCK)
            return
        self.rounds += 1
        self.since += 1
        self.drafting[self.length] += size > 0
        former, self.last = self.last, size
        changed = former is not None and former != size
        spent = self._spent(size, ms, former if changed else None)
        self.left += SHARE - spent
        self.net -= spent
        if size and accepted:
            self.drafted += 1
            self.acceptance.count(size - 1, accepted)
            self.gain = share * sum(accepted) / len(accepted)
            self.left = min(MOST_EARNED, self.left + self.gain)
            self.net += self.gain
        if size != self.size:  # it was in flight when another was chosen
            return
        if ms is not None and not changed:
            self.samples.append(ms)
            self.least = min(self.least or spent, spent)
        self.due -= 1
        if self.due <= 0 or (size and not self.probes and not self._affords(size)):
            self._measured()
            self.acceptance.learn()
            self.acceptance.fade(DECAY**self.since)
            self.since = 0
            self._choose()

    def try_out(
        self, size: int, ms: float | None, length: int, made: Collection[int], place: Place = Place.DEVICE
    ) -> None:
        """Take a round of a size that a warm-up asks for, whose text says nothing of acceptance: `count` without it."""
        if size != self.size:
            self._measured()
            self.size = size
        self._of_kind(bucket(length, place))
        self.made = frozenset(made)
        if ms is not None:
            self.samples.append(ms)

    def tried(self) -> None:
        """A warm-up is over: know what it measured."""
        self._measured()
        self.last = None

    def _of_kind(self, kind: int) -> None:
        """Rounds from here on are of this bucket."""
        if kind != self.length:
            self._measured()
            self.length = kind

    def choice(self) -> TreeChoice:
        """The choice as it stands."""
        sizes = range(len(self.prior))
        spent = self.known.get(self.length, {})
        return TreeChoice(
            tuple(map(self.nodes, sizes)),
            tuple(map(self.ms, sizes)),
            tuple(self.nodes(size) in spent for size in sizes),
            (1.0, *self.acceptance.expected()),
            self.nodes(self.size),
        )

    def _affords(self, size: int, rounds: int = 1) -> bool:
        """True where so many rounds of this size may bring nothing, and the change to rounds without drafts may follow,
        or the last one, of this size, brought what it cost."""
        price = self.price(size) if size != self.size else max(self.price(size), self.least)
        if size == self.size and price <= self.gain:
            return True
        if self.last is None or size <= self.size:
            change = self.change(size) + (0.0 if self.last is None or size == self.size else self.change(self.size))
            return rounds * price + change <= self.left + self.credit
        return CAUTION * price + self.change(self.size) <= self.left

    def _spent(self, size: int, ms: float | None, former: int | None) -> float:
        """Target passes that a round, after one of size `former` where that was another, has cost more than one without
        drafts: as measured, or by what is known."""
        price = self.price(size)
        known = price if former is None else price + self.change(former)
        if ms is None or not self.timed or (size == 0 and former is None):
            return known
        cost = min(max(0.0, ms / self.ms(0) - 1), known + SLACK)
        if former is not None:
            self.changes[not former].append(max(0.0, cost - price))
        return cost

    def _measured(self) -> None:
        """Take the milliseconds of a block, which the few rounds that something disturbed do not change; of a size that
        was not measured one round says more than what others take."""
        nodes = self.nodes(self.size)
        if len(self.samples) > (nodes in self.known.get(self.length, ())):
            spent, several = median(self.samples), len(self.samples) >= EVIDENCE
            if self.timed:
                self._take(self.length, nodes, spent, several)
            else:
                self.pending.setdefault(self.length, {})[nodes] = spent, several
        self.samples.clear()

    def _nearest(self, kind: int | None = None) -> int:
        """The bucket that is known and most like this one, or that of the rounds."""
        place, length = split(self.length if kind is None else kind)

        def distance(other: int) -> tuple[bool, int]:
            there, its = split(other)
            return there is not place, abs(its - length)

        return min(self.known, key=distance)

    def _take(self, length: int, nodes: int, ms: float, several: bool) -> None:
        if length not in self.known and self.known:  # as elsewhere, and so much more or less for all sizes
            near = self._nearest(length)
            other, alike = self.known[near], split(near)[0] is split(length)[0]
            more = ms - other.get(nodes, ms)
            self.known[length] = {  # what a verdict takes the host in rounds with drafts says nothing of those without
                each: max(0.5 * spent, spent + more)
                for each, spent in other.items()
                if alike or (each > 1) == (nodes > 1)
            }
        table = self.known.setdefault(length, {})
        before = table.get(nodes)
        if before is None or (several and ms < HELD_UP * before):
            table[nodes] = ms
        else:
            table[nodes] = before + RENEWED * (ms - before)
        self.unkept = self.unkept or before is None or abs(table[nodes] - before) > 0.1 * before

    def _use(self, size: int, rounds: int) -> None:
        self.size, self.due, self.probes, self.waits, self.sees = size, rounds, False, False, False
        self.least = 0.0
        if not size:
            self.credit = 0.0
            self.acceptance.part()

    def _choose(self, begins: bool = False) -> None:
        """The size of the next rounds, and how many they are."""
        rates, former = self.rates(), self.size
        paying = [size for size in range(1, len(rates)) if self._affords(size)]
        best = max((0, *paying), key=rates.__getitem__)
        if near := [size for size in paying if best and size != best and self._may_try(size, rates[best], rates)]:
            self._use(max(near, key=rates.__getitem__), EVIDENCE)
            return
        if former in paying and best:
            wanted = WORTH_MAKING if self.captures and best not in self.made else BETTER
            if rates[best] < wanted * rates[former] or self.drafted < EVIDENCE:
                best = former
        place = split(self.length)[0]
        known: list[tuple[int, Collection[int]]] = [*self.known.items(), *self.pending.items()]
        measured = any(1 in spent for kind, spent in known if split(kind)[0] is place)
        most = self.unseen[self.length] if rates[best] < SURE * rates[0] else UNSEEN[1]
        unseen = self.drafting[self.length] >= most
        if best and not begins and (unseen or not measured) and not self._is_cold():
            self.drafting[self.length] = 0
            self.unseen[self.length] = min(UNSEEN[1], (1 + measured) * self.unseen[self.length])
            self._use(0, BLOCK if measured else EVIDENCE)
            self.sees = True
        elif best:
            self._use(best, BLOCK)
        else:
            probe = self._probe()
            price = self.price(probe)
            changes = self.change(0) + self.change(probe)
            tries = 1 + int(min(MOST_TRIES - 1, changes / 2 / price)) if price else MOST_TRIES
            lacks = tries * price + changes - self.left
            if lacks <= 0 and former == 0 and not begins:
                self._use(probe, tries)
                self.probes = True
            else:
                rounds = max(EVIDENCE, math.ceil(lacks / SHARE))
                self._use(0, min(LONGEST_REST, rounds))
                self.waits = rounds <= LONGEST_REST

    def _may_try(self, size: int, best: float, rates: Sequence[float]) -> bool:
        """True where a size may promise too little, of which little was seen while others have brought much."""
        if self.left < MOST_EARNED / 2 or (self.captures and size not in self.made):
            return False
        return rates[size] * (1 + CURIOUS * max(0.0, 1 - self.acceptance.seen[size - 1] / ENOUGH)) > best

    def _probe(self) -> int:
        """The size that drafts are tried again with: the cheapest."""
        sizes = range(1, len(self.prior))
        there = [size for size in sizes if size in self.made] if self._is_cold() else []
        return min(there or sizes, key=self.price)

    def _is_cold(self) -> bool:
        """True where sizes have to be captured first, and too few rounds have run to pay for it."""
        return self.captures and self.rounds < SETTLED and len(self.made) <= len(self.shapes)
