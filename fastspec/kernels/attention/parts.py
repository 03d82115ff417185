"""What the attention kernels share: a block of the online softmax, and the sum of the parts that programs left of one query's attention.

A pair is one key head of one row of the batch; R matrix rows (nodes times G query heads of the key head), S parts, D head size, Hkv key
heads. Parts are normed sums [pair, R, S, D] in fp32 with their log-sum-exp [pair, R, S] (base 2): -inf where nothing was seen, and then
the part may hold anything.

Split attention with a merge by log-sum-exp: Dao et al., Flash-Decoding (2023); the online softmax: Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent

LOG2E = 1.4426950408889634
MAX_SPLITS = 64  # parts that a merge holds at once


@triton.jit
def update(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, MASKED: tl.constexpr):
    """One block of the online softmax; maxima are in units of log2."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale2)
    b_off = b_new
    if MASKED:  # a row that has seen nothing yet: -inf - -inf is not a number
        b_off = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale2 - b_off[:, None])
    b_keep = tl.exp2(b_max - b_off)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["splits", "kv_heads"])
def _merge_kernel(
    p_part, p_lse, p_out, splits, kv_heads, s_ob,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, i_pair = tl.program_id(0), tl.program_id(1)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_s, m_d = o_s < splits, o_d < D
    o_part = (i_pair.to(tl.int64) * tl.num_programs(0) + row) * splits
    b_lse = tl.load(p_lse + o_part + o_s, mask=m_s, other=float("-inf"))
    # All parts are asked for at once, before it is known which of them hold something.
    b_part = tl.load(p_part + o_part * D + (o_s[:, None] * D + o_d[None, :]), mask=m_s[:, None] & m_d[None, :], other=0.0)
    b_max = tl.max(b_lse, 0)
    b_weight = tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max))
    b_total = tl.sum(b_weight, 0)
    b_sum = tl.sum(tl.where((b_weight > 0.0)[:, None], b_part * b_weight[:, None], 0.0), 0)
    b_out = b_sum / tl.where(b_total > 0.0, b_total, 1.0)
    o_head = (i_pair % kv_heads) * GROUP + row % GROUP
    o_out = (i_pair // kv_heads).to(tl.int64) * s_ob + ((row // GROUP).to(tl.int64) * (kv_heads * GROUP) + o_head) * D
    tl.store(p_out + o_out + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def merge(part: Tensor, lse: Tensor, out: Tensor, kv_heads: int) -> None:
    """Fill out [B, N, Hq, D], contiguous, with the sums of part [B * Hkv, R, S, D] by lse [B * Hkv, R, S]; S is at most MAX_SPLITS."""
    pairs, rows, splits, size = part.shape
    block_s, block_d = triton.next_power_of_2(splits), triton.next_power_of_2(size)
    _merge_kernel[(rows, pairs)](
        part, lse, out, splits, kv_heads, out.stride(0), GROUP=out.shape[2] // kv_heads, D=size, BLOCK_D=block_d, BLOCK_S=block_s,
        num_warps=max(1, min(8, block_s * block_d // 2048)), **dependent(out.device),
    )  # fmt: skip
