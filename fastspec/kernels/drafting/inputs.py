"""Inputs of drafting passes, gathered in one launch each: tree nodes, the next frontier, and a head's first layer.

B rows (sequences), N nodes of a row's tree, M nodes that were expanded, C children of each, K nodes chosen among the M
* C children, V tokens, H width of the embeddings and of a head's states, W words of 64 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.drafting.reference import InputWeights
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.layer.norms import MAX_SIZE, norm_row, row_warps

NODE_BLOCK = 4096  # channels that a program copies


@triton.jit(do_not_specialize=["nodes", "last", "s_tokens_b", "s_tokens_n", "s_depths_b", "s_depths_n", "s_lengths"])
def _tree_input_kernel(
    p_tokens,
    p_depths,
    p_lengths,
    p_table,
    p_positions,
    p_slots,
    p_out,
    nodes,
    last,
    size,
    s_tokens_b,
    s_tokens_n,
    s_depths_b,
    s_depths_n,
    s_lengths,
    s_table,
    EMBED: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one node's embedding; the first part writes its place."""
    wait_for_previous(PDL)
    part, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    node = row * nodes + place
    if part == 0:
        length = tl.load(p_lengths + row * s_lengths)
        depth = tl.load(p_depths + row * s_depths_b + place * s_depths_n)
        tl.store(p_positions + node, tl.minimum(length + depth, last))
        tl.store(p_slots + node, length + place)
    if EMBED:
        token = tl.load(p_tokens + row * s_tokens_b + place * s_tokens_n)
        o_h = part * BH + tl.arange(0, BH)
        m_h = o_h < size
        tl.store(p_out + node * size + o_h, tl.load(p_table + token * s_table + o_h, mask=m_h), mask=m_h)


def tree_input(
    tokens: Tensor, depths: Tensor, lengths: Tensor, last: int, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`reference.tree_input`: tokens, depths [B, N] and lengths [B] int64 of any strides, table [V, H] with a
    contiguous last dimension -> positions, slots [B, N] and embeddings [B, N, H] or None. Tokens must be below V: the
    kernel does not look."""
    batch, nodes = tokens.shape
    expect("tree_input", (batch, nodes), torch.int64, tokens=tokens, depths=depths)
    expect("tree_input", (batch,), torch.int64, lengths=lengths)
    if table is not None:
        expect("tree_input", ("V", "H"), None, PACKED, table=table)
    positions, slots = torch.empty(2, batch, nodes, dtype=torch.int64, device=tokens.device)
    size, stride = (0, 0) if table is None else (table.shape[1], table.stride(0))
    out = None if table is None else table.new_empty(batch, nodes, size)
    if tokens.numel() > 0:
        block = max(16, min(NODE_BLOCK, triton.next_power_of_2(size)))
        grid = max(1, triton.cdiv(size, block)), nodes, batch
        _tree_input_kernel[grid](
            *(tokens, depths, lengths, table, positions, slots, out),
            *(nodes, last, size, *strides(2, tokens, depths), lengths.stride(0), stride, table is not None, block),
            num_warps=max(1, min(4, block // 256)),
            **dependent(tokens.device),
        )
    return positions, slots, out


@triton.jit
def _next_frontier_kernel(
    p_tokens,
    p_index,
    p_hidden,
    p_words,
    p_out_tokens,
    p_out_hidden,
    p_out_words,
    nodes,
    children,
    chosen,
    size,
    words,
    slot,
    BH: tl.constexpr,
    BW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chosen node."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(PDL)
    index = tl.load(p_index + row * chosen + place)
    above = row * nodes + index // children
    out = row * chosen + place
    tl.store(p_out_tokens + out, tl.load(p_tokens + row * nodes * children + index))
    for start in range(0, size, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < size
        tl.store(p_out_hidden + out * size + o_h, tl.load(p_hidden + above * size + o_h, mask=m_h), mask=m_h)
    o_w = tl.arange(0, BW)
    m_w = o_w < words
    own = slot + place
    b_bit = tl.where(o_w == own // 64, tl.full([BW], 1, tl.int64) << (own % 64), 0)
    tl.store(
        p_out_words + out * words + o_w, tl.load(p_words + above * words + o_w, mask=m_w, other=0) | b_bit, mask=m_w
    )


def next_frontier(
    tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.next_frontier`; all tensors contiguous (ValueError otherwise)."""
    expect("next_frontier", tokens.shape, torch.int64, CONTIGUOUS, tokens=tokens)
    expect("next_frontier", index.shape, torch.int64, CONTIGUOUS, index=index)
    expect("next_frontier", words.shape, torch.int64, CONTIGUOUS, words=words)
    expect("next_frontier", hidden.shape, None, CONTIGUOUS, hidden=hidden)
    (rows, nodes, size), chosen, width = hidden.shape, index.shape[1], words.shape[2]
    found = tokens.new_empty(rows, chosen), hidden.new_empty(rows, chosen, size), words.new_empty(rows, chosen, width)
    sizes = nodes, tokens.shape[1] // nodes, chosen, size, width
    _next_frontier_kernel[(rows, chosen)](
        *(tokens, index, hidden, words),
        *(*found, *sizes, slot),
        BH=min(4096, triton.next_power_of_2(size)),
        BW=triton.next_power_of_2(width),
        num_warps=4,
        **dependent(tokens.device),
    )
    return found


@triton.jit(do_not_specialize=["fed", "nodes", "children", "words", "slot", "stride_tokens", "stride_index"])
def _head_input_kernel(
    p_tokens,
    p_index,
    p_hidden,
    p_words,
    p_table,
    p_weight_token,
    p_weight_hidden,
    p_out,
    p_out_hidden,
    p_out_words,
    fed,
    nodes,
    children,
    words,
    slot,
    stride_tokens,
    stride_index,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BW: tl.constexpr,
    CHOOSE: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of a node's input: from its token, or its state. With CHOOSE nodes are children that p_index names."""
    place, row, half = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    p_weight = p_weight_token if half == 0 else p_weight_hidden
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)  # no kernel writes it
    wait_for_previous(PDL)
    node = row * fed + place
    index, above = place, node
    if CHOOSE:
        index = tl.load(p_index + row * stride_index + place).to(tl.int32)  # a division in 64 bits is a long one
        above = row * nodes + index // children
    if half == 0:
        token = tl.load(p_tokens + row * stride_tokens + index)
        b_x = tl.load(p_table + token * SIZE + o_h, mask=m_h, other=0.0)
    else:
        b_x = tl.load(p_hidden + above * SIZE + o_h, mask=m_h, other=0.0)
        if CHOOSE:
            tl.store(p_out_hidden + node * SIZE + o_h, b_x, mask=m_h)
            o_w = tl.arange(0, BW)
            m_w = o_w < words
            own = slot + place
            b_bit = tl.where(o_w == own // 64, tl.full([BW], 1, tl.int64) << (own % 64).to(tl.int64), 0)
            tl.store(
                p_out_words + node * words + o_w,
                tl.load(p_words + above * words + o_w, mask=m_w, other=0) | b_bit,
                mask=m_w,
            )
    tl.store(p_out + (2 * node + half) * SIZE + o_h, norm_row(b_x, b_weight, eps, SIZE, OFFSET), mask=m_h)


def head_input(tokens: Tensor, hidden: Tensor, weights: InputWeights) -> Tensor:
    """`reference.head_input`: tokens [B, K] int64, their states hidden [B, K, H] -> [B, K, 2 * H].

    The weights have hidden's dtype (fp32, fp16 or bf16), and H is at most 32768. All are contiguous, but the rows of
    tokens may lie any distance apart.
    """
    expect("head_input", hidden.shape[:2], torch.int64, PACKED, tokens=tokens)
    _check("head_input", hidden, weights)
    return _launch(tokens, None, hidden, None, 0, weights)[0]


def frontier_input(
    tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int, weights: InputWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.frontier_input`: `next_frontier` of tokens [B, M * C], index [B, K], hidden [B, M, H] and words [B, M,
    W], and `head_input` of what it gives -> x [B, K, 2 * H], and the nodes' states [B, K, H] and ancestors [B, K, W].

    As in `head_input`; words are contiguous too, and the rows of index may lie any distance apart.
    """
    expect("frontier_input", ("B", "N"), torch.int64, PACKED, tokens=tokens, index=index)
    expect("frontier_input", words.shape, torch.int64, CONTIGUOUS, words=words)
    _check("frontier_input", hidden, weights)
    return _launch(tokens, index, hidden, words, slot, weights)


def _check(op: str, hidden: Tensor, weights: InputWeights) -> None:
    size = hidden.shape[-1]
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"{op}: hidden has rows of {size}; 1 to {MAX_SIZE} are accepted")
    expect(op, hidden.shape, hidden.dtype, CONTIGUOUS, hidden=hidden)
    expect(op, ("V", size), hidden.dtype, CONTIGUOUS, table=weights.table)
    norms = {"token_norm": weights.token_norm, "hidden_norm": weights.hidden_norm}
    expect(op, (size,), hidden.dtype, CONTIGUOUS, **norms)


def _launch(
    tokens: Tensor, index: Tensor | None, hidden: Tensor, words: Tensor | None, slot: int, weights: InputWeights
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, nodes, size), choose = hidden.shape, index is not None
    if index is None or words is None:  # not read
        index, words = tokens, tokens[:, :, None]
    fed, width, block = index.shape[1], words.shape[2], max(16, triton.next_power_of_2(size))
    x, out_hidden, out_words = hidden.new_empty(rows, fed, 2 * size), hidden, words
    if choose:
        out_hidden, out_words = hidden.new_empty(rows, fed, size), words.new_empty(rows, fed, width)
    if x.numel() > 0:
        held, written = (weights.table, weights.token_norm, weights.hidden_norm), (x, out_hidden, out_words)
        sizes = fed, nodes, tokens.shape[1] // nodes, width
        _head_input_kernel[(fed, rows, 2)](
            *(tokens, index, hidden, words, *held, *written),
            *(*sizes, slot, tokens.stride(0), index.stride(0), weights.eps),
            SIZE=size,
            BLOCK=block,
            BW=triton.next_power_of_2(width),
            CHOOSE=choose,
            OFFSET=weights.offset,
            num_warps=row_warps(block, x.element_size()),  # as in rms_norm: the sums are added in the same order
            **dependent(x.device),
        )
    return x, out_hidden, out_words
