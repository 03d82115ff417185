"""Attention that sums in an order given by positions alone: a query has the same bits in a tree, in a chain and by
itself, wherever a round began, and whatever stands beside it.

What is fixed, for a query at position p that sees the keys at positions 0 to p (or those of its span):

- Scores are taken in units of log2 on a grid (`GRID`), so that taking off a whole number is exact. Maxima are rounded
  up to whole numbers: what weights and sums are scaled by is a power of two, and changes no bit of them. So nothing
  hangs on where the maximum was raised, or on how many keys a block has.
- The weights, rounded to the values' dtype, meet the values in groups of 16 aligned positions, which tensor cores add
  up at once, group after group. A key that is not seen has weight zero, and adds nothing. Weights are added up by a
  product with ones, in the same order.
- A text is cut into runs (`run_start`): 256 positions each up to 2,048, 512 up to 4,096, then 1,024; where there are
  few key heads, half as long. Sums over a run are a chain; runs are added in their order.

float16 has no room for small weights, so that there the maximum is raised at multiples of 64 positions alone.

B rows (sequences), N query nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, C cache slots. A
pair is one key head of one row; its N * G queries are the rows of a matrix, row n * G + g. In ordered_chain.py `_chain`
takes tiles of a prompt's rows, each from the first key to the last; of few rows `_few` takes the runs apart, and
`_add_runs` adds them up. In ordered_tree.py `_runs` leaves the sums of the runs of the committed text, up to the last
multiple of 16 (of 64 in float16), for tiles of rows; `_tail` goes on from these for each node: the keys that are left,
the node's ancestors among them, wherever they lie, and then the sum of all runs; over a short text it does all.
ordered_hopper.py is `_runs` and `_chain` for long texts on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.layout import attention_layout as tree_layout
from fastspec.kernels.attention.ordered_chain import LONG_CHAIN, chain_attention
from fastspec.kernels.attention.ordered_sums import FEW_HEADS, OrderedLaunch, OrderedPass, runs_of
from fastspec.kernels.attention.ordered_tree import nodes_attention, paths_of
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.launch import is_hopper

SHORT, CROWDED = 512, 100_000
"""Slots up to which one launch does all, and how many the nodes of all pairs then read together."""
LONG = 8192
"""Slots from which blocks are wider."""
MANY = 4096
"""Matrix rows of all pairs from which a node's tail is a single warp's."""
MULTIPROCESSORS = 132
"""Of the GPU that the launches were measured on."""


@dataclass(frozen=True, slots=True)
class OrderedLayout:
    """A `TreeLayout`, and for the nodes of a tree the slots of the tail that each sees [B, N, tail] and how many these
    are [B, N], int32; None of a chain, where node n sees the first n + 1."""

    tree: TreeLayout
    slots: Tensor | None
    counts: Tensor | None


def attention_layout(
    prefix: Tensor,
    words: Tensor | None,
    nodes: int,
    tail: int,
    extent: int,
    group: int = 1,
    *,
    span: Span | None = None,
    depths: Tensor | None = None,
    ring: int | None = None,
) -> OrderedLayout:
    """`layout.attention_layout` of trees in which parents come before their children: what a node sees of the tail
    stands at the positions after the prefix, in the order of the slots."""
    tree = tree_layout(prefix, words, nodes, tail, extent, group, span=span, depths=depths, ring=ring)
    if tree.chain or words is None or nodes == tail == 1:  # a tree of its root is a chain
        return OrderedLayout(tree, None, None)
    return OrderedLayout(tree, *paths_of(words, nodes, tail))


@dataclass(frozen=True, slots=True)
class OrderedLaunches:
    """The launches of a tree's `_runs` and `_tail`, and of a chain's kernels."""

    runs: OrderedLaunch
    tail: OrderedLaunch
    chain: OrderedLaunch


def launches_for(
    element: int, block_d: int, rows: int, reach: int, whole: bool, pairs: int, fine: bool, hopper: bool
) -> OrderedLaunches:
    """The launches of so many rows of each of the pairs: found on an H100 over keys that were not in the L2."""
    few = rows <= 16
    if block_d > 128 or element == 4:
        block = 32 if block_d <= 256 else 16
        small, tall = OrderedLaunch(16, block, 4, 2), OrderedLaunch(32, block, 4, 2)
        return OrderedLaunches(small if few else tall, OrderedLaunch(16, 16, 2, 2), small if few else tall)
    long = reach >= LONG
    if few:
        crowded = not long and pairs * runs_of(reach, fine) > MULTIPROCESSORS
        runs = OrderedLaunch(16, 128, 4, 2 if crowded else 3)
        some = pairs * runs_of(reach, fine) <= 2 * MULTIPROCESSORS
        chain = OrderedLaunch(16, 64 if crowded else 128, 4, 3 if long and some else 2)
    else:
        runs = OrderedLaunch(128, 64, 8, 3) if long else OrderedLaunch(64, 32, 4, 3)
        chain = OrderedLaunch(64, 32, 8, 3)
        if rows > LONG_CHAIN:
            chain = OrderedLaunch(128, 64 if hopper else 32, 8, 3)  # wider blocks take more registers than there are
    tail = OrderedLaunch(16, 64 if whole else 16, 1 if pairs * rows > MANY and not whole else 4, 2)
    return OrderedLaunches(runs, tail, chain)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: OrderedLayout,
    scale: float,
    *,
    sinks: Tensor | None = None,
    cap: float | None = None,
    launches: OrderedLaunches | None = None,
    short: int | None = None,
    shares: int | None = None,
) -> Tensor:
    """`tree.tree_attention`, in the order that this module's docstring gives. `launches`, `short` and `shares` override
    how the work is cut, which changes no bit."""
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    tree, kv_heads = layout.tree, k.shape[1]
    extent = tree.extent if tree.ring else min(tree.extent, k.shape[2])
    fine = kv_heads <= FEW_HEADS
    given = OrderedPass(q, k, v, out, tree, scale, cap, sinks, extent, runs_of(extent, fine), fine)
    reach, rows, pairs = tree.reach(extent), given.rows, given.pairs
    whole = reach <= SHORT and reach * q.shape[1] * pairs <= CROWDED if short is None else reach <= short
    found = launches or launches_for(
        q.element_size(), given.block_d, rows, reach, whole, pairs, fine, is_hopper(q.device)
    )
    if layout.slots is None or layout.counts is None:
        chain_attention(given, found.chain)
    else:
        nodes_attention(given, layout.slots, layout.counts, found.runs, found.tail, whole, shares)
    return out
