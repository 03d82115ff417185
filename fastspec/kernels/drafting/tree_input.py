"""What a pass over the nodes of trees reads, in one launch: where they stand in the text and in the cache, and their tokens' embeddings.

B rows (sequences), N nodes of a row's tree, V tokens, H width of the embeddings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent

BLOCK = 4096  # channels that a program copies


@triton.jit(do_not_specialize=["nodes", "last", "s_tokens_b", "s_tokens_n", "s_depths_b", "s_depths_n", "s_lengths"])
def _tree_input_kernel(
    p_tokens, p_depths, p_lengths, p_table, p_positions, p_slots, p_out, nodes, last, size,
    s_tokens_b, s_tokens_n, s_depths_b, s_depths_n, s_lengths, s_table, EMBED: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of one node's embedding; the first part writes its place."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    """`reference.tree_input`: tokens, depths [B, N] and lengths [B] int64 of any strides, table [V, H] with a contiguous last
    dimension -> positions, slots [B, N] and embeddings [B, N, H] or None. Tokens must be below V: the kernel does not look."""
    batch, nodes = tokens.shape
    for name, x, shape in (("tokens", tokens, (batch, nodes)), ("depths", depths, (batch, nodes)), ("lengths", lengths, (batch,))):
        if x.shape != shape or x.dtype != torch.int64:
            raise ValueError(f"tree_input: {name} is {list(x.shape)} {x.dtype}; accepted is {list(shape)} int64")
    if table is not None and (table.dim() != 2 or table.stride(1) != 1):
        raise ValueError(f"tree_input: table is {list(table.shape)}, strides {table.stride()}; accepted is [V, H], rows contiguous")
    positions, slots = torch.empty(2, batch, nodes, dtype=torch.int64, device=tokens.device)
    size, stride = (0, 0) if table is None else (table.shape[1], table.stride(0))
    out = None if table is None else table.new_empty(batch, nodes, size)
    if tokens.numel() > 0:
        block = max(16, min(BLOCK, triton.next_power_of_2(size)))
        _tree_input_kernel[(max(1, triton.cdiv(size, block)), nodes, batch)](
            tokens, depths, lengths, table, positions, slots, out, nodes, last, size,
            *tokens.stride(), *depths.stride(), lengths.stride(0), stride, table is not None, block,
            num_warps=max(1, min(4, block // 256)), **dependent(tokens.device),
        )  # fmt: skip
    return positions, slots, out
