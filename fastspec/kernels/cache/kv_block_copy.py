"""Move accepted slots to their places, in every layer and both caches, in one launch.

L layers, B rows, Hkv key heads, C cache slots, D and Dv sizes of a key and a value, P slots moved per row. A program moves the P vectors
of one layer, row and head (a slice of their channels where P is large): keys and values are all read before any is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent

BLOCK_ELEMENTS = 4096  # of keys, and as many of values, in the registers of a program
MAX_SLOTS = 512


@triton.jit(do_not_specialize=["count", "heads", "stride_source_b", "stride_source_p", "stride_target_b", "stride_target_p"])
def _kv_block_copy(
    p_k, p_v, p_source, p_target, count, heads, stride_source_b, stride_source_p, stride_target_b, stride_target_p,
    stride_k_l, stride_k_b, stride_k_h, stride_k_c, stride_v_l, stride_v_b, stride_v_h, stride_v_c,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, SLOTS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    layer = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    o_p = tl.arange(0, SLOTS_BLOCK)
    m_p = o_p < count
    b_source = tl.load(p_source + row * stride_source_b + o_p * stride_source_p, mask=m_p, other=0)
    b_target = tl.load(p_target + row * stride_target_b + o_p * stride_target_p, mask=m_p, other=0)
    m_p = m_p & (b_source != b_target)  # a slot that stays costs no traffic
    o_d = tl.program_id(2) * SIZE_BLOCK + tl.arange(0, SIZE_BLOCK)
    m_keys = m_p[:, None] & (o_d < SIZE)[None, :]
    m_values = m_p[:, None] & (o_d < VALUE_SIZE)[None, :]
    p_keys = p_k + layer * stride_k_l + row * stride_k_b + head * stride_k_h
    p_values = p_v + layer * stride_v_l + row * stride_v_b + head * stride_v_h
    b_k = tl.load(p_keys + b_source[:, None] * stride_k_c + o_d[None, :], mask=m_keys)
    b_v = tl.load(p_values + b_source[:, None] * stride_v_c + o_d[None, :], mask=m_values)
    tl.debug_barrier()  # another thread may be about to read what this one overwrites
    tl.store(p_keys + b_target[:, None] * stride_k_c + o_d[None, :], b_k, mask=m_keys)
    tl.store(p_values + b_target[:, None] * stride_v_c + o_d[None, :], b_v, mask=m_values)


def kv_block_copy(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """`reference.kv_block_copy`: move slots source [B, P] to target [B, P] of k_cache [L, B, Hkv, C, D] and v_cache
    [L, B, Hkv, C, Dv], in place.

    Overlap of source and target is safe; the targets of a row must differ from each other. The caches are views of any strides and dtype
    whose last dimension is contiguous; source and target are int64 of any strides, P at most 512. A slot whose source is its target is
    neither read nor written.
    """
    layers, batch, heads, _, size = k_cache.shape
    if v_cache.shape[:-1] != k_cache.shape[:-1] or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype} {list(k_cache.shape)} and v_cache {v_cache.dtype} {list(v_cache.shape)}; they must be alike but "
            "for the last size"
        )
    if source.dim() != 2 or source.shape != target.shape or len(source) != batch or source.shape[1] > MAX_SLOTS:
        raise ValueError(f"source is {list(source.shape)} and target {list(target.shape)}; both must be [{batch}, P] with P <= {MAX_SLOTS}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name} has strides {cache.stride()}: its last dimension must be contiguous")
    if k_cache.numel() == 0 or source.numel() == 0:
        return
    slots_block = triton.next_power_of_2(source.shape[1])
    wide = max(size, v_cache.shape[-1])
    size_block = min(max(8, triton.next_power_of_2(wide)), max(8, BLOCK_ELEMENTS // slots_block))
    _kv_block_copy[(layers, batch * heads, triton.cdiv(wide, size_block))](
        k_cache, v_cache, source, target, source.shape[1], heads, *source.stride(), *target.stride(),
        *k_cache.stride()[:4], *v_cache.stride()[:4], SIZE=size, VALUE_SIZE=v_cache.shape[-1], SLOTS_BLOCK=slots_block,
        SIZE_BLOCK=size_block,
        num_warps=min(4, max(1, slots_block * size_block // 256)), **dependent(k_cache.device),
    )  # fmt: skip
