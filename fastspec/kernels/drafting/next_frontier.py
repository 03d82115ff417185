"""The nodes that a growing tree expands next: their tokens, the states they are fed with and what they may see, gathered in one launch.

B rows, M nodes that were expanded, C children of each, K nodes chosen among the M * C children, H width, W words of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent


@triton.jit
def _next_frontier_kernel(
    p_tokens, p_index, p_hidden, p_words, p_out_tokens, p_out_hidden, p_out_words, nodes, children, chosen, size, words, slot,
    BH: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chosen node."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    tl.store(p_out_words + out * words + o_w, tl.load(p_words + above * words + o_w, mask=m_w, other=0) | b_bit, mask=m_w)


def next_frontier(tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.next_frontier`; all tensors contiguous (ValueError otherwise)."""
    for name, tensor in (("tokens", tokens), ("index", index), ("hidden", hidden), ("words", words)):
        if not tensor.is_contiguous():
            raise ValueError(f"next_frontier: {name} has strides {tensor.stride()}; pass {name}.contiguous()")
    (rows, nodes, size), chosen, width = hidden.shape, index.shape[1], words.shape[2]
    out_tokens = tokens.new_empty(rows, chosen)
    out_hidden, out_words = hidden.new_empty(rows, chosen, size), words.new_empty(rows, chosen, width)
    _next_frontier_kernel[(rows, chosen)](
        tokens, index, hidden, words, out_tokens, out_hidden, out_words, nodes, tokens.shape[1] // nodes, chosen, size, width, slot,
        BH=min(4096, triton.next_power_of_2(size)), BW=triton.next_power_of_2(width), num_warps=4, **dependent(tokens.device),
    )  # fmt: skip
    return out_tokens, out_hidden, out_words
