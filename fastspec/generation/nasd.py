"""N-gram assisted decoding: trees read off a storage of what followed what, on the host, without a draft model.

NASD (github.com/romsto/Speculative-Decoding) drafts a chain of the likeliest continuations and counts, for every accepted
token, the target's likeliest tokens besides; without these it is ANPD (Ou et al., NAACL 2024 industry track). Here a chain has
branches where several continuations are known, as in the trees of SuffixDecoding (arXiv 2411.04975, section 3).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.config import Nasd
from fastspec.generation.ngram import NgramStorage, Storage
from fastspec.generation.protocols import Ops
from fastspec.generation.suffix import SuffixStorage
from fastspec.generation.tree import TokenTree, Verdict

# device type -> (nodes of the largest tree, cost of a pass over more than one node, what each node adds); a pass over one node is 1.
# "cpu" is fitted to benchmarks/results/cpu_tree.jsonl; "cuda" is an estimate.
COSTS = {"cpu": (16, 1.19, 0.0075), "cuda": (32, 1.0, 0.002)}
DOUBT, DOUBT_OF_ONE = 1.0, 4.0
"""Counts taken to have gone to tokens not seen yet: after a context of l tokens (over the root of l), and of one token."""
SURELY_NOT = 99.0
"""The same for a token that is drafted although nothing is known."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree before it is laid out: nodes in falling order of the chance to be reached, node 0 the root with chance 1."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


def grow(storage: Storage, cursor: Any, root: int, *, gamma: int, nodes: int, ends: frozenset[int], guess: bool = False) -> Growth:
    """The likeliest tree of at most `nodes` nodes, `gamma` drafts deep, behind the cursor, which stands behind root.

    A node's chance is its parent's times its share of what was counted after the longest known context. Best first, and among
    equals the one found first, so the tree is a function of the text and the storage, and each prefix of the list is a tree.
    Nothing is drafted after an end token. Where nothing is known nothing is drafted either or, with `guess`, the last token again.
    """
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
            share = tree.chances[node] / (sum(times for _, times in known) + doubt)
            for token, times in known:
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


def best_size(growths: list[Growth], costs: dict[int, float]) -> int:
    """The number of nodes that promises most tokens per cost to all rows together."""
    promise = {size: sum(sum(growth.chances[:size]) for growth in growths) / cost for size, cost in costs.items()}
    return max(promise, key=promise.__getitem__)  # the first of the best: the smallest


def lay_out(growths: list[Growth], nodes: int, max_path: int, device: torch.device) -> TokenTree:
    """The first `nodes` nodes of every row as a TokenTree, in one transfer.

    All rows of a tree have the same number of nodes. A row that knows fewer gets copies of the root's first child (or of the root,
    where it has none) as further children of the root. That is exact: these too are functions of the prefix, and a walk scores them
    like any draft; a copy of a child is never walked, because the first of equal siblings is.
    """
    words = -(-nodes // 64)
    rows = []
    for growth in growths:
        tokens, parents = growth.tokens[:nodes], growth.parents[:nodes]
        spare = nodes - len(tokens)
        tokens, parents = tokens + [tokens[min(1, len(tokens) - 1)]] * spare, parents + [0] * spare
        depths, seen, laid = [0], [1], [[tokens[0], 0, 0, 1, *[0] * (words - 1)]]
        for node in range(1, nodes):
            parent = parents[node]
            depths.append(depths[parent] + 1)
            seen.append(seen[parent] | 1 << node)
            laid.append([tokens[node], parent, depths[node], *_signed(seen[node], words)])
        rows.append(laid)
    packed = torch.tensor(rows, dtype=torch.long).to(device)
    first, second, third, rest = (packed[..., part].contiguous() for part in (0, 1, 2, slice(3, None)))
    return TokenTree(first, second, third, rest, max_path)


def _signed(bits: int, words: int) -> list[int]:
    """Bits as 64-bit words, the lowest first, in two's complement."""
    parts = [bits >> 64 * word & (1 << 64) - 1 for word in range(words)]
    return [part - (1 << 64) if part >> 63 else part for part in parts]


class NasdDrafter:
    """Draft state of one generate call: a storage and a cursor per row, on the host.

    `storages` holds one storage per row, or the same one for every row. A tree has 1, 4, 8, ... or `nodes` nodes: the number that promises
    most in this round. With `stop_if_unknown=False` it always has `nodes`.
    """

    def __init__(self, config: Nasd, storages: list[Storage], device: torch.device) -> None:
        largest, base, slope = COSTS.get(device.type, COSTS["cuda"])
        self.config, self.storages, self.device = config, storages, device
        self.nodes = largest if config.total_tokens is None else config.total_tokens
        self.max_path = min(config.gamma + 1, self.nodes)
        smaller = (1, 4, 8, 16, 32, 64, 128) if config.stop_if_unknown else ()
        sizes = [*(size for size in smaller if size < self.nodes), self.nodes]
        rows = len(storages)
        self.costs = {size: base + slope * size * rows if size * rows > 1 else 1.0 for size in sizes}
        self.ends: frozenset[int] = frozenset()
        self.cursors: list[Any] = [storage.start() for storage in storages]
        self.roots, self.active = [0] * rows, [True] * rows

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Count a text per row that is no part of what the row says, such as another model's answer."""
        for storage, text in zip(self.storages, texts, strict=True):
            cursor = storage.start()
            for token in text:
                cursor = storage.feed(cursor, token)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Count the prompt and the first new token: ids [B, T], counts [B] real tokens, root [B]."""
        self.roots = root.tolist()
        for row, (text, real) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
            for token in (*text[:real], self.roots[row]):
                self.cursors[row] = self.storages[row].feed(self.cursors[row], token)

    def propose(self, extent: int) -> TokenTree:
        """Draft from what is known; the tree of a row that has ended is filled up with copies of its root."""
        config = self.config
        growths = [
            grow(storage, cursor, root, gamma=config.gamma, nodes=self.nodes, ends=self.ends, guess=not config.stop_if_unknown)
            if active else Growth([root], [0], [0.0])
            for storage, cursor, root, active in zip(self.storages, self.cursors, self.roots, self.active, strict=True)
        ]  # fmt: skip
        size = best_size(growths, self.costs)
        return lay_out(growths, size, min(size, self.max_path), self.device)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Count the emitted tokens of the active rows, each with the target's likeliest tokens in its place (logits [B, N, V], raw)."""
        steps = tree.max_path
        if logits.device.type == "cpu":  # no wait for a device: rank what was accepted alone
            steps = int(verdict.accepted.max()) + 1
        parts = [active[:, None].long(), verdict.accepted[:, None], verdict.tokens(tree)[:, :steps]]
        likely = min(self.config.top_k_filler, logits.shape[2]) if self.config.top_k_filler > 1 else 0
        if likely:
            row = torch.arange(logits.shape[0], device=logits.device)[:, None]
            parts.append(logits[row, verdict.path[:, :steps]].topk(likely).indices.flip(-1).flatten(1))  # the likeliest last
        read_back = torch.cat(parts, 1).tolist()  # the drafter's only one
        for b, (goes_on, accepted, *rest) in enumerate(read_back):
            self.active[b] = bool(goes_on)
            if goes_on:
                self.roots[b] = rest[accepted]
                self._count(b, rest[: accepted + 1], rest[steps:], likely)

    def _count(self, row: int, tokens: list[int], likeliest: list[int], likely: int) -> None:
        """Count tokens of a row, the k-th with the k-th group of the likeliest, up to its end token."""
        storage, cursor = self.storages[row], self.cursors[row]
        for place, token in enumerate(tokens):
            cursor = storage.feed(cursor, token, likeliest[place * likely : (place + 1) * likely])
            if token in self.ends:
                break
        self.cursors[row] = cursor


@dataclass(frozen=True, slots=True)
class NasdDecoding:
    """Decoding with n-grams; by default every row of every call has a storage of its own."""

    config: Nasd
    name: str = "nasd"
    taps: None = None

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Callable[[Tensor], Tensor] | None) -> NasdDrafter:
        """The drafter of one call."""
        return NasdDrafter(self.config, [self._storage() for _ in range(rows)], torch.device(device))

    def _storage(self) -> Storage:
        kind, n = self.config.storage, self.config.n
        if kind == "ngram":
            return NgramStorage(4 if n is None else n)
        if kind == "one_level":
            return NgramStorage(3 if n is None else n, back_off=False)
        return SuffixStorage(max_match=32 if n is None else n - 1) if kind == "suffix" else kind
