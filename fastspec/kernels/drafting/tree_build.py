"""Re-rank grown candidates and lay the best out as a tree: one launch, one program per row.

B rows (sequences), M candidates, N = nodes of the tree, W = ceil(N / 64) words of ancestor bits. The score of the last
candidate to be kept is found digit by digit from the top, by counting; one running sum then gives every candidate its
place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.drafting.topk_expand import order_bits
from fastspec.kernels.launch import dependent, wait_for_previous

MAX_CANDIDATES, MAX_NODES = 16384, 256  # what fits in registers


@triton.jit
def _tree_build_kernel(
    p_scores,
    p_tokens,
    p_parents,
    p_depths,
    p_root,
    p_tree_tokens,
    p_tree_parents,
    p_tree_depths,
    p_words,
    count,
    nodes,
    width,
    doublings,
    s_scores,
    s_tokens,
    s_parents,
    s_root,
    MP: tl.constexpr,
    NP: tl.constexpr,
    WP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_m = tl.arange(0, MP)
    m_m = o_m < count
    b_score = tl.load(p_scores + row * s_scores + o_m, mask=m_m, other=0.0)
    b_token = tl.load(p_tokens + row * s_tokens + o_m, mask=m_m, other=0)
    b_parent = tl.load(p_parents + row * s_parents + o_m, mask=m_m, other=-1).to(tl.int32)
    b_depth = tl.load(p_depths + o_m, mask=m_m, other=0)
    root = tl.load(p_root + row * s_root)

    keep = nodes - 1
    b_order = tl.where(m_m, order_bits(b_score).to(tl.int64), -(2**40))  # padding is below every limit
    limit = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**30, tl.int64)
    # two bits a time: the highest limit that at least `keep` candidates reach; three counts in one sum
    for _ in range(16):
        b_hits = (b_order >= limit + step).to(tl.int64)
        b_hits += (b_order >= limit + 2 * step).to(tl.int64) << 16
        b_hits += (b_order >= limit + 3 * step).to(tl.int64) << 32
        hits = tl.sum(b_hits, 0)
        reached = ((hits & 0xFFFF) >= keep).to(tl.int64) + (((hits >> 16) & 0xFFFF) >= keep).to(tl.int64)
        reached += ((hits >> 32) >= keep).to(tl.int64)
        limit += step * reached
        step = step >> 2

    m_above, m_tie = b_order > limit, b_order == limit
    b_seen = tl.cumsum(m_above.to(tl.int32) + (m_tie.to(tl.int32) << 16), 0)
    room = keep - tl.sum(m_above.to(tl.int32), 0)  # for this many of those that equal the limit, lowest index first
    b_ties = b_seen >> 16
    m_kept = m_above | (m_tie & (b_ties <= room))
    b_place = (b_seen & 0xFFFF) + tl.minimum(b_ties, room)  # the root is node 0
    b_node = b_place + 1 - m_kept.to(tl.int32)
    b_up = tl.where(b_parent < 0, 0, tl.gather(b_node, tl.maximum(b_parent, 0), 0))

    o_out = row * nodes + b_place
    tl.store(p_tree_tokens + o_out, b_token, mask=m_kept)
    tl.store(p_tree_parents + o_out, b_up.to(tl.int64), mask=m_kept)
    tl.store(p_tree_depths + o_out, b_depth, mask=m_kept)
    zero = tl.full([], 0, tl.int64)
    tl.store(p_tree_tokens + row * nodes, root)
    tl.store(p_tree_parents + row * nodes, zero)
    tl.store(p_tree_depths + row * nodes, zero)

    tl.debug_barrier()  # the parents are read back in the order of the nodes
    o_n, o_w = tl.arange(0, NP), tl.arange(0, WP)
    m_n = o_n < nodes
    b_above = tl.load(p_tree_parents + row * nodes + o_n, mask=m_n, other=0).to(tl.int32)
    b_bit = tl.full([NP], 1, tl.int64) << (o_n & 63).to(tl.int64)
    b_words = tl.where((o_n >> 6)[:, None] == o_w[None, :], b_bit[:, None], 0)
    for _ in range(doublings):  # after s steps a node knows 2**s generations
        b_words = b_words | tl.gather(b_words, tl.broadcast_to(b_above[:, None], [NP, WP]), 0)
        b_above = tl.gather(b_above, b_above, 0)
    o_words = (row * nodes + o_n)[:, None] * width + o_w[None, :]
    tl.store(p_words + o_words, b_words, mask=m_n[:, None] & (o_w < width)[None, :])


def tree_build(
    scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, root: Tensor, nodes: int
) -> tuple[Tensor, ...]:
    """`reference.tree_build`: scores [B, M] fp32, tokens, parents [B, M], depths [M], root [B] int64, 1 <= nodes <= M +
    1.

    Rows may be strided; the last dimension of scores, tokens and parents must be contiguous, and depths too. M is at
    most 16,384, nodes at most 256. Returns tokens, parents, depths [B, nodes] and ancestors [B, nodes, W], all int64.
    """
    batch, count = scores.shape
    nodes = int(nodes)
    expect("tree_build", scores.shape, torch.float32, PACKED, scores=scores)
    expect("tree_build", scores.shape, torch.int64, PACKED, tokens=tokens, parents=parents)
    expect("tree_build", (count,), torch.int64, CONTIGUOUS, depths=depths)
    expect("tree_build", (batch,), torch.int64, root=root)
    if not 1 <= nodes <= min(count + 1, MAX_NODES) or count > MAX_CANDIDATES:
        raise ValueError(
            f"tree_build: nodes={nodes} of {count} candidates; accepted are at most {MAX_CANDIDATES} candidates, and "
            f"1 to {MAX_NODES} nodes, at most one more than candidates"
        )
    width = triton.cdiv(nodes, 64)
    tree_tokens, tree_parents, tree_depths = torch.empty(3, batch, nodes, dtype=torch.int64, device=scores.device)
    words = torch.empty(batch, nodes, width, dtype=torch.int64, device=scores.device)
    grown, tree = (scores, tokens, parents, depths, root), (tree_tokens, tree_parents, tree_depths, words)
    padded, doublings = max(64, triton.next_power_of_2(count)), max(1, (nodes - 1).bit_length())
    _tree_build_kernel[(batch,)](
        *(*grown, *tree, count, nodes, width, doublings, *strides(1, scores, tokens, parents, root), padded),
        *(max(16, triton.next_power_of_2(nodes)), triton.next_power_of_2(width)),
        num_warps=warps_of(padded),
        **dependent(scores.device),
    )
    return tree


def warps_of(padded: int) -> int:
    """Few warps: the sums over all candidates are what takes the time."""
    return 4 if padded <= 1024 else 8 if padded <= 4096 else 16
