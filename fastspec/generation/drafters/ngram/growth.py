"""How a tree of n-grams grows: the likeliest continuations first, as many as promise most for what a round costs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate

import torch

from fastspec.generation.drafters.ngram.ngrams import Cursor, Storage
from fastspec.generation.tree import TokenTree

DOUBT, DOUBT_OF_ONE = 1.0, 4.0
"""Of what follows a context so many counts are taken to belong to tokens that were not seen there yet: DOUBT / sqrt(l) for a context of l
tokens, DOUBT_OF_ONE for one of a single token."""
SURELY_NOT = 99.0
"""The same for a token that is drafted although nothing is known of what follows."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree before it is laid out: nodes in falling order of the chance to be reached, node 0 the root with chance 1."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


def grow(storage: Storage, cursor: Cursor, root: int, *, gamma: int, nodes: int, ends: frozenset[int], guess: bool = False) -> Growth:
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
            share = tree.chances[node] / (sum([times for _, times in known]) + doubt)
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
    if all(len(growth.tokens) == 1 for growth in growths):
        return min(costs)
    sums = [[0.0, *accumulate(growth.chances)] for growth in growths]
    promise = {size: sum([known[min(size, len(known) - 1)] for known in sums]) / cost for size, cost in costs.items()}
    return max(promise, key=promise.__getitem__)  # the first of the best: the smallest


def lay_out(growths: list[Growth], nodes: int, max_path: int, device: torch.device) -> TokenTree:
    """The first `nodes` nodes of every row as a TokenTree, in one transfer.

    All rows of a tree have the same number of nodes. A row that knows fewer gets copies of the root's first child (or of the root,
    where it has none) as further children of the root. That is exact: these too are functions of the prefix, and a walk scores them
    like any draft; a copy of a child is never walked, because the first of equal siblings is.
    """
    words = -(-nodes // 64)
    planes: tuple[list[int], ...] = ([], [], [], [])  # tokens, parents, depths, ancestors: each lies contiguous in the one tensor
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
        for plane, values in zip(planes, (tokens + [tokens[min(1, len(tokens) - 1)]] * spare, parents, depths, ancestors), strict=True):
            plane += values
    size = len(planes[0])
    packed = torch.tensor([value for plane in planes for value in plane], device="cpu").to(device)
    first, second, third = (packed[part * size : (part + 1) * size].view(-1, nodes) for part in range(3))
    drafted = tuple(min(nodes, len(growth.tokens)) - 1 for growth in growths)
    return TokenTree(first, second, third, packed[3 * size :].view(-1, nodes, words), max_path, drafted=drafted)


def _signed(bits: int, words: int) -> list[int]:
    """Bits as 64-bit words, the lowest first, in two's complement."""
    parts = [bits >> 64 * word & (1 << 64) - 1 for word in range(words)]
    return [part - (1 << 64) if part >> 63 else part for part in parts]
