"""From packed projections to attention's inputs in one launch: head norms, rotation, the cache's new keys and values,
the queries.

B rows, N nodes per row, Hq query heads, Hkv key heads, D head size, C cache slots, R rotated channels, P positions of
the table. A program takes up to HEADS heads of one node, all queries, all keys or all values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.layer.norms import laid_out, whole
from fastspec.kernels.linear.reference import Parts

HEADS = 8


@triton.jit
def _turn_heads(
    p_in,
    p_out,
    p_cos,
    p_sin,
    p_weight,
    p_factor,
    eps,
    o_head,
    m_head,
    stride_part,
    stride_in,
    stride_out,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Norm and rotate heads that lie stride_in apart at p_in, as PARTS of a sum where there are any, and write them
    stride_out apart at p_out.

    A head is read as its two rotated halves, or with PAIRS as its even and its odd channels, and the REST that is not
    rotated (REST_BLOCK = 0: none). With FACTOR all of it is multiplied by the number at p_factor once it is rounded.
    """
    STEP: tl.constexpr = 2 if PAIRS else 1
    OTHER: tl.constexpr = 1 if PAIRS else HALF
    o_half = tl.arange(0, HALF_BLOCK)
    m_half = o_half < HALF
    m_turn = m_head[:, None] & m_half[None, :]
    p_a = p_in + o_head[:, None] * stride_in + o_half[None, :] * STEP
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_a = whole(p_a, m_turn, stride_part, dtype, PARTS)
    b_b = whole(p_a + OTHER, m_turn, stride_part, dtype, PARTS)
    b_cos = tl.load(p_cos + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + o_half, mask=m_half, other=0.0).to(tl.float32)[None, :]
    b_a = b_a.to(tl.float32)
    b_b = b_b.to(tl.float32)
    if REST_BLOCK > 0:
        o_rest = 2 * HALF + tl.arange(0, REST_BLOCK)
        m_rest = m_head[:, None] & (o_rest < SIZE)[None, :]
        p_rest = p_in + o_head[:, None] * stride_in + o_rest[None, :]
        b_rest = whole(p_rest, m_rest, stride_part, dtype, PARTS).to(tl.float32)
    if NORM:
        b_square = tl.sum(b_a * b_a + b_b * b_b, 1)
        if REST_BLOCK > 0:
            b_square += tl.sum(b_rest * b_rest, 1)
        b_scale = tl.rsqrt(b_square / SIZE + eps)[:, None]
        b_wa = tl.load(p_weight + o_half * STEP, mask=m_half, other=0.0).to(tl.float32)[None, :]
        b_wb = tl.load(p_weight + OTHER + o_half * STEP, mask=m_half, other=0.0).to(tl.float32)[None, :]
        if OFFSET is not None:
            b_a = (b_a * b_scale * (OFFSET + b_wa)).to(dtype).to(tl.float32)
            b_b = (b_b * b_scale * (OFFSET + b_wb)).to(dtype).to(tl.float32)
        else:
            b_a = ((b_a * b_scale).to(dtype).to(tl.float32) * b_wa).to(dtype).to(tl.float32)
            b_b = ((b_b * b_scale).to(dtype).to(tl.float32) * b_wb).to(dtype).to(tl.float32)
        if REST_BLOCK > 0:
            b_wr = tl.load(p_weight + o_rest, mask=o_rest < SIZE, other=0.0).to(tl.float32)[None, :]
            b_rest = (
                (b_rest * b_scale).to(dtype).to(tl.float32) * b_wr
                if OFFSET is None
                else b_rest * b_scale * (OFFSET + b_wr)
            )
    p_a_out = p_out + o_head[:, None] * stride_out + o_half[None, :] * STEP
    b_one = (b_a * b_cos - b_b * b_sin).to(dtype)
    b_two = (b_b * b_cos + b_a * b_sin).to(dtype)
    if FACTOR:
        b_factor = tl.load(p_factor)
        b_one = (b_one.to(tl.float32) * b_factor).to(dtype)
        b_two = (b_two.to(tl.float32) * b_factor).to(dtype)
    tl.store(p_a_out, b_one, mask=m_turn)
    tl.store(p_a_out + OTHER, b_two, mask=m_turn)
    if REST_BLOCK > 0:
        if FACTOR:
            b_rest = b_rest.to(dtype).to(tl.float32) * b_factor
        tl.store(p_out + o_head[:, None] * stride_out + o_rest[None, :], b_rest.to(dtype), mask=m_rest)


@triton.jit(do_not_specialize=["nodes", "stride_positions_b", "stride_positions_n", "stride_slots_b", "stride_slots_n"])
def _rope_cache(
    p_qkv,
    p_cos,
    p_sin,
    p_positions,
    p_slots,
    p_q,
    p_k,
    p_v,
    p_q_norm,
    p_k_norm,
    p_factor,
    eps,
    nodes,
    stride_part,
    stride_qkv_b,
    stride_qkv_n,
    stride_cos,
    stride_sin,
    stride_positions_b,
    stride_positions_n,
    stride_slots_b,
    stride_slots_n,
    stride_k_b,
    stride_k_h,
    stride_k_c,
    stride_v_b,
    stride_v_h,
    stride_v_c,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    TIES_VALUES: tl.constexpr,
    PAIRS: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    node = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    Q_PARTS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (HKV + HEADS - 1) // HEADS
    o_block = tl.arange(0, HEADS).to(tl.int64)
    stride_part = tl.cast(stride_part, tl.int64)
    position = tl.load(p_positions + row * stride_positions_b + node * stride_positions_n)
    slot = tl.load(p_slots + row * stride_slots_b + node * stride_slots_n)
    p_in = p_qkv + row * stride_qkv_b + node * stride_qkv_n
    p_keys = p_in + HQ * SIZE * (2 if GATED else 1)
    p_c = p_cos + position * stride_cos
    p_s = p_sin + position * stride_sin
    if part < Q_PARTS:
        o_head = part * HEADS + o_block
        p_out = p_q + (row * nodes + node) * (HQ * SIZE)
        heads = p_in, p_out, p_c, p_s, p_q_norm, p_factor + position, eps, o_head, o_head < HQ, stride_part
        _turn_heads(
            *heads,
            SIZE * (2 if GATED else 1),
            SIZE,
            SIZE,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
            NORM,
            OFFSET,
            PAIRS,
            FACTOR,
            PARTS,
        )
    elif part < Q_PARTS + KV_PARTS:
        o_head = (part - Q_PARTS) * HEADS + o_block
        p_out = p_k + row * stride_k_b + slot * stride_k_c
        heads = p_keys, p_out, p_c, p_s, p_k_norm, p_factor, eps, o_head, o_head < HKV, stride_part
        _turn_heads(*heads, SIZE, stride_k_h, SIZE, HALF, HALF_BLOCK, REST_BLOCK, NORM, OFFSET, PAIRS, False, PARTS)
    else:
        o_head = (part - Q_PARTS - KV_PARTS) * HEADS + o_block
        o_d = tl.arange(0, SIZE_BLOCK)
        m_v = (o_head < HKV)[:, None] & (o_d < SIZE)[None, :]
        p_values = p_keys if TIES_VALUES else p_keys + HKV * SIZE
        p_read = p_values + o_head[:, None] * SIZE + o_d[None, :]
        b_v = whole(p_read, m_v, stride_part, p_v.dtype.element_ty, PARTS)
        if NORMS_VALUES:
            b_wide = b_v.to(tl.float32)
            b_v = (b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, 1) / SIZE + eps)[:, None]).to(b_v.dtype)
        tl.store(
            p_v + row * stride_v_b + slot * stride_v_c + o_head[:, None] * stride_v_h + o_d[None, :], b_v, mask=m_v
        )


def rope_cache(
    qkv: Tensor | Parts,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float | None = None,
    gated: bool = False,
    norms_values: bool = False,
    ties_values: bool = False,
    interleaved: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """`reference.rope_cache`: norm and rotate queries and keys, write keys and values into the cache -> queries [B, N,
    Hq, D], contiguous.

    qkv [B, N, (Hq + 2 * Hkv) * D], with `gated` twice as many queries, with `ties_values` half as many keys and values,
    and one layer's k_cache, v_cache [B, Hkv, C, D], all of one dtype (fp32, fp16, bf16), are views of any strides whose
    last dimension is contiguous; so are the tables cos, sin [P, R / 2] (fp32, fp16, bf16). qkv may be the parts of a
    product, which are added up on the way. positions, slots [B, N] int64 are of any strides. q_norm, k_norm [D]
    contiguous, of qkv's dtype, are given together or not at all; factor is [P] fp32. Positions must be below P, slots
    below C and different within a row: the kernel does not look.
    """
    batch, nodes, width = qkv.shape
    kv_heads, size, half = k_cache.shape[1], k_cache.shape[3], cos.shape[-1]
    q_heads, odd = divmod(width // size - (1 if ties_values else 2) * kv_heads, 2 if gated else 1)
    if width % size or q_heads < 1 or odd:
        accepted = f"({'2 * ' if gated else ''}Hq + {'' if ties_values else '2 * '}Hkv) * D"
        raise ValueError(
            f"qkv has rows of {width}; {accepted} is accepted, with Hkv = {kv_heads} and D = {size} of k_cache"
        )
    if not 0 < 2 * half <= size:
        raise ValueError(f"cos is {list(cos.shape)}; accepted is [P, R / 2] with 0 < R <= {size}")
    read, summands, apart = laid_out("rope_cache", qkv, tuple(qkv.shape), None)
    expect("rope_cache", (batch, "Hkv", "C", "D"), qkv.dtype, PACKED, k_cache=k_cache)
    expect("rope_cache", k_cache.shape, qkv.dtype, PACKED, v_cache=v_cache)
    expect("rope_cache", ("P", half), None, PACKED, cos=cos)
    expect("rope_cache", cos.shape, None, PACKED, sin=sin)
    expect("rope_cache", (batch, nodes), torch.int64, positions=positions, slots=slots)
    norm = q_norm is not None and k_norm is not None
    if q_norm is not None and k_norm is not None:
        expect("rope_cache", (size,), qkv.dtype, CONTIGUOUS, q_norm=q_norm, k_norm=k_norm)
    if factor is not None:
        expect("rope_cache", cos.shape[:1], torch.float32, CONTIGUOUS, factor=factor)
    q = read.new_empty((batch, nodes, q_heads, size), dtype=qkv.dtype)
    if q.numel() == 0:
        return q
    half_block, rest = max(4, triton.next_power_of_2(half)), size - 2 * half
    parts = triton.cdiv(q_heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
    given, written = (read, cos, sin, positions, slots), (q, k_cache, v_cache)
    weights = q_norm if norm else read, k_norm if norm else read, read if factor is None else factor
    _rope_cache[(nodes, parts, batch)](
        *(*given, *written, *weights),
        *(eps, nodes, *apart, *strides(1, cos, sin), *strides(2, positions, slots), *strides(3, k_cache, v_cache)),
        HQ=q_heads,
        HKV=kv_heads,
        SIZE=size,
        SIZE_BLOCK=max(4, triton.next_power_of_2(size)),
        HALF=half,
        HALF_BLOCK=half_block,
        REST_BLOCK=max(4, triton.next_power_of_2(rest)) if rest else 0,
        HEADS=HEADS,
        NORM=norm,
        OFFSET=offset,
        GATED=gated,
        NORMS_VALUES=norms_values,
        TIES_VALUES=ties_values,
        PAIRS=interleaved,
        FACTOR=factor is not None,
        PARTS=summands,
        num_warps=_warps(size),
        **dependent(q.device),
    )
    return q


def _warps(size: int) -> int:
    """16 bytes of half precision per thread in each half of HEADS heads."""
    return min(8, max(1, HEADS * int(triton.next_power_of_2(size)) // 2 // 256))
