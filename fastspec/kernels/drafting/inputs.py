"""Inputs of drafting passes, gathered in one launch each: tree nodes, the next frontier, and a head's first layer.

B rows (sequences), N nodes of a row's tree, M nodes that were expanded, C children of each, K nodes chosen among the M
* C children, V tokens, H width of the embeddings and of a head's states, W words of 64 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    for name, x, shape in (
        ("tokens", tokens, (batch, nodes)),
        ("depths", depths, (batch, nodes)),
        ("lengths", lengths, (batch,)),
    ):
        if x.shape != shape or x.dtype != torch.int64:
            raise ValueError(f"tree_input: {name} is {list(x.shape)} {x.dtype}; accepted is {list(shape)} int64")
    if table is not None and (table.dim() != 2 or table.stride(1) != 1):
        raise ValueError(
            f"tree_input: table is {list(table.shape)}, strides {table.stride()}; accepted is [V, H], rows contiguous"
        )
    positions, slots = torch.empty(2, batch, nodes, dtype=torch.int64, device=tokens.device)
    size, stride = (0, 0) if table is None else (table.shape[1], table.stride(0))
    out = None if table is None else table.new_empty(batch, nodes, size)
    if tokens.numel() > 0:
        block = max(16, min(NODE_BLOCK, triton.next_power_of_2(size)))
        _tree_input_kernel[(max(1, triton.cdiv(size, block)), nodes, batch)](
            tokens,
            depths,
            lengths,
            table,
            positions,
            slots,
            out,
            nodes,
            last,
            size,
            *tokens.stride(),
            *depths.stride(),
            lengths.stride(0),
            stride,
            table is not None,
            block,
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
    for name, tensor in (("tokens", tokens), ("index", index), ("hidden", hidden), ("words", words)):
        if not tensor.is_contiguous():
            raise ValueError(f"next_frontier: {name} has strides {tensor.stride()}; pass {name}.contiguous()")
    (rows, nodes, size), chosen, width = hidden.shape, index.shape[1], words.shape[2]
    out_tokens = tokens.new_empty(rows, chosen)
    out_hidden, out_words = hidden.new_empty(rows, chosen, size), words.new_empty(rows, chosen, width)
    _next_frontier_kernel[(rows, chosen)](
        tokens,
        index,
        hidden,
        words,
        out_tokens,
        out_hidden,
        out_words,
        nodes,
        tokens.shape[1] // nodes,
        chosen,
        size,
        width,
        slot,
        BH=min(4096, triton.next_power_of_2(size)),
        BW=triton.next_power_of_2(width),
        num_warps=4,
        **dependent(tokens.device),
    )
    return out_tokens, out_hidden, out_words


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
    PDL: tl.constexpr,
):
    """One half of a node's input: from its token, or from its state. With CHOOSE the nodes are children that p_index
    names."""
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
    tl.store(p_out + (2 * node + half) * SIZE + o_h, norm_row(b_x, b_weight, eps, SIZE), mask=m_h)


def head_input(
    tokens: Tensor, hidden: Tensor, table: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float
) -> Tensor:
    """`reference.head_input`: tokens [B, K] int64, their states hidden [B, K, H] -> [B, K, 2 * H].

    table [V, H], token_norm and hidden_norm [H] have hidden's dtype (fp32, fp16 or bf16), and H is at most 32768. All
    are contiguous, but the rows of tokens may lie any distance apart.
    """
    _check(tokens, hidden, table, token_norm, hidden_norm)
    if tokens.shape != hidden.shape[:2]:
        raise ValueError(f"tokens are {list(tokens.shape)}; [B, K] is accepted for hidden {list(hidden.shape)}")
    return _launch(tokens, None, hidden, None, 0, table, token_norm, hidden_norm, eps)[0]


def frontier_input(
    tokens: Tensor,
    index: Tensor,
    hidden: Tensor,
    words: Tensor,
    slot: int,
    table: Tensor,
    token_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.frontier_input`: `next_frontier` of tokens [B, M * C], index [B, K], hidden [B, M, H] and words [B, M,
    W], and `head_input` of what it gives -> x [B, K, 2 * H], and the nodes' states [B, K, H] and ancestors [B, K, W].

    As in `head_input`; words are contiguous too, and the rows of index may lie any distance apart.
    """
    _check(tokens, hidden, table, token_norm, hidden_norm, index=index[:1], words=words)
    return _launch(tokens, index, hidden, words, slot, table, token_norm, hidden_norm, eps)


def _check(
    tokens: Tensor, hidden: Tensor, table: Tensor, token_norm: Tensor, hidden_norm: Tensor, **more: Tensor
) -> None:
    size = hidden.shape[-1]
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"hidden has rows of {size}; 1 to {MAX_SIZE} are accepted")
    weights = {"table": table, "token_norm": token_norm, "hidden_norm": hidden_norm}
    for name, weight in weights.items():
        before = ["V"] if name == "table" else []
        if weight.dim() != len(before) + 1 or weight.shape[-1] != size or weight.dtype != hidden.dtype:
            shape = ", ".join((*before, str(size)))
            raise ValueError(f"{name} is {list(weight.shape)} {weight.dtype}; [{shape}] {hidden.dtype} is accepted")
    for name, tensor in {"tokens": tokens[:1], "hidden": hidden, **weights, **more}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")


def _launch(
    tokens: Tensor,
    index: Tensor | None,
    hidden: Tensor,
    words: Tensor | None,
    slot: int,
    table: Tensor,
    token_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, nodes, size), choose = hidden.shape, index is not None
    index, words = (
        tokens if index is None else index,
        tokens[:, :, None] if words is None else words,
    )  # not read where None
    fed, width, block = index.shape[1], words.shape[2], max(16, triton.next_power_of_2(size))
    x = hidden.new_empty(rows, fed, 2 * size)
    out_hidden, out_words = (
        (hidden.new_empty(rows, fed, size), words.new_empty(rows, fed, width)) if choose else (hidden, words)
    )
    if x.numel() > 0:
        _head_input_kernel[(fed, rows, 2)](
            tokens,
            index,
            hidden,
            words,
            table,
            token_norm,
            hidden_norm,
            x,
            out_hidden,
            out_words,
            fed,
            nodes,
            tokens.shape[1] // nodes,
            width,
            slot,
            tokens.stride(0),
            index.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            BW=triton.next_power_of_2(width),
            CHOOSE=choose,
            num_warps=row_warps(block, x.element_size()),  # as in rms_norm: the sums are added in the same order
            **dependent(x.device),
        )
    return x, out_hidden, out_words
