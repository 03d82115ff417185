"""Moves of a commit: accepted slots of every layer's keys and values, the slots of the accepted path, and the emitted
tokens.

L layers, B rows (sequences), Hkv key heads, C cache slots, D and Dv sizes of a key and a value, N nodes of a row's
tree, P of its longest path, and so slots moved. A program moves the P vectors of one layer, row and head (a slice of
their channels where P is large): keys and values are all read before any is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import PACKED, expect, strides
from fastspec.kernels.launch import dependent, wait_for_previous

BLOCK_ELEMENTS = 4096  # of keys, and as many of values, in the registers of a program
MAX_SLOTS = 512
STRIDES = ["s_tokens_b", "s_tokens_n", "s_path_b", "s_path_p", "s_accepted", "s_bonus", "s_active", "s_root"]


@triton.jit(
    do_not_specialize=["count", "heads", "stride_source_b", "stride_source_p", "stride_target_b", "stride_target_p"]
)
def _kv_block_copy(
    p_k,
    p_v,
    p_source,
    p_target,
    count,
    heads,
    stride_source_b,
    stride_source_p,
    stride_target_b,
    stride_target_p,
    stride_k_l,
    stride_k_b,
    stride_k_h,
    stride_k_c,
    stride_v_l,
    stride_v_b,
    stride_v_h,
    stride_v_c,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
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

    Overlap of source and target is safe; the targets of a row must differ from each other. The caches are views of any
    strides and dtype whose last dimension is contiguous; source and target are int64 of any strides, P at most 512. A
    slot whose source is its target is neither read nor written.
    """
    layers, batch, heads, slots, size = k_cache.shape
    expect("kv_block_copy", k_cache.shape, None, PACKED, k_cache=k_cache)
    expect("kv_block_copy", (layers, batch, heads, slots, "Dv"), k_cache.dtype, PACKED, v_cache=v_cache)
    expect("kv_block_copy", (batch, "P"), torch.int64, source=source)
    expect("kv_block_copy", source.shape, torch.int64, target=target)
    if source.shape[1] > MAX_SLOTS:
        raise ValueError(f"kv_block_copy: source is {list(source.shape)}; accepted are {MAX_SLOTS} slots a row at most")
    if k_cache.numel() == 0 or source.numel() == 0:
        return
    slots_block = triton.next_power_of_2(source.shape[1])
    wide = max(size, v_cache.shape[-1])
    size_block = min(max(8, triton.next_power_of_2(wide)), max(8, BLOCK_ELEMENTS // slots_block))
    _kv_block_copy[(layers, batch * heads, triton.cdiv(wide, size_block))](
        *(k_cache, v_cache, source, target),
        *(source.shape[1], heads, *source.stride(), *target.stride(), *k_cache.stride()[:4], *v_cache.stride()[:4]),
        SIZE=size,
        VALUE_SIZE=v_cache.shape[-1],
        SLOTS_BLOCK=slots_block,
        SIZE_BLOCK=size_block,
        num_warps=min(4, max(1, slots_block * size_block // 256)),
        **dependent(k_cache.device),
    )


@triton.jit(do_not_specialize=["steps", "bound", "s_lengths", *STRIDES])
def _commit_slots_kernel(
    p_lengths,
    p_path,
    p_accepted,
    p_active,
    p_source,
    p_target,
    steps,
    bound,
    s_lengths,
    s_path_b,
    s_path_p,
    s_accepted,
    s_active,
    SP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, SP)
    m_p = o_p < steps
    length = tl.load(p_lengths + row * s_lengths)
    accepted = tl.load(p_accepted + row * s_accepted)
    active = tl.load(p_active + row * s_active)
    b_path = tl.load(p_path + row * s_path_b + o_p * s_path_p, mask=m_p, other=0)
    tl.store(p_source + row * steps + o_p, length + b_path, mask=m_p)
    tl.store(p_target + row * steps + o_p, length + o_p, mask=m_p)
    tl.debug_barrier()  # another thread may be about to read the length
    tl.store(p_lengths + row * s_lengths, tl.minimum(length + tl.where(active != 0, accepted + 1, 0), bound))


def commit_slots(lengths: Tensor, path: Tensor, accepted: Tensor, active: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """`reference.commit_slots`: lengths [B], path [B, P], accepted [B] int64, active [B] bool, of any strides."""
    batch, steps = path.shape
    expect("commit_slots", (batch,), torch.int64, lengths=lengths, path=path[:, 0], accepted=accepted)
    expect("commit_slots", (batch,), torch.bool, active=active)
    source, target = torch.empty(2, batch, steps, dtype=torch.int64, device=path.device)
    if batch > 0:
        _commit_slots_kernel[(batch,)](
            *(lengths, path, accepted, active.view(torch.uint8), source, target),
            *(steps, bound, lengths.stride(0), *path.stride(), *strides(1, accepted, active)),
            max(2, triton.next_power_of_2(steps)),
            num_warps=1,
            **dependent(path.device),
        )
    return source, target


@triton.jit(do_not_specialize=["steps", *STRIDES])
def _emit_kernel(
    p_tokens,
    p_path,
    p_accepted,
    p_bonus,
    p_active,
    p_root,
    p_packed,
    steps,
    s_tokens_b,
    s_tokens_n,
    s_path_b,
    s_path_p,
    s_accepted,
    s_bonus,
    s_active,
    s_root,
    SP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, SP)
    m_p = o_p < steps
    accepted = tl.load(p_accepted + row * s_accepted)
    drawn = tl.load(p_bonus + row * s_bonus)
    bonus = tl.maximum(drawn, 0)
    active = tl.load(p_active + row * s_active)
    b_next = tl.load(p_path + row * s_path_b + tl.minimum(o_p + 1, steps - 1) * s_path_p, mask=m_p, other=0)
    b_token = tl.load(p_tokens + row * s_tokens_b + b_next * s_tokens_n, mask=m_p, other=0)
    p_out = p_packed + row * (steps + 1)
    tl.store(p_out, tl.where(drawn < 0, -1 - accepted, accepted))
    tl.store(p_out + 1 + o_p, tl.where(o_p == accepted, bonus, b_token), mask=m_p)
    # the tokens of a tree of roots alone are the root's own memory, and other threads may be about to read the bonus
    tl.debug_barrier()
    tl.store(p_bonus + row * s_bonus, bonus)
    tl.store(p_root + row * s_root, bonus, mask=active != 0)


def emit(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor, active: Tensor, root: Tensor) -> Tensor:
    """`reference.emit`: tokens [B, N], path [B, P], accepted, bonus, root [B] int64, active [B] bool, any strides ->
    [B, 1 + P]. A bonus below 0 becomes 0 in place."""
    batch, steps = path.shape
    columns = {"tokens": tokens[:, 0], "path": path[:, 0], "accepted": accepted, "bonus": bonus, "root": root}
    expect("emit", (batch,), torch.int64, **columns)
    expect("emit", (batch,), torch.bool, active=active)
    packed = torch.empty(batch, 1 + steps, dtype=torch.int64, device=path.device)
    if batch > 0:
        _emit_kernel[(batch,)](
            *(tokens, path, accepted, bonus, active.view(torch.uint8), root, packed),
            *(steps, *strides(2, tokens, path), *strides(1, accepted, bonus, active, root)),
            max(2, triton.next_power_of_2(steps)),
            num_warps=1,
            **dependent(path.device),
        )
    return packed
