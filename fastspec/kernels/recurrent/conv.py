"""The convolution of Gated DeltaNet along every node's ancestors, and accepted paths taken into the states of all
layers.

L layers, B rows (sequences), N nodes of a row's tree, P of its longest path, C channels, K width of the convolution;
heads and sizes as in `delta.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.recurrent.reference import sizes_of
from fastspec.kernels.recurrent.tree import add_updates, scale_of

BLOCK = 512
"""Channels of a program."""


@triton.jit(do_not_specialize=["s_parents_b", "s_parents_n"])
def _tree_conv(
    p_x,
    p_weight,
    p_held,
    p_parents,
    p_kept,
    p_out,
    channels,
    s_x_b,
    s_x_n,
    s_held_b,
    s_held_k,
    s_parents_b,
    s_parents_n,
    s_kept_b,
    s_kept_n,
    s_out_b,
    s_out_n,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
    KEEP: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    node = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < channels
    dtype: tl.constexpr = p_out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    place = node.to(tl.int64)  # below 0: -1 is the last of the inputs that are held
    for step in tl.static_range(WIDTH):
        b_w = tl.load(p_weight + o_c * WIDTH + (WIDTH - 1 - step), mask=m_c, other=0.0).to(tl.float32)
        p_node = p_x + row * s_x_b + tl.maximum(place, 0) * s_x_n
        p_before = p_held + row * s_held_b + (WIDTH + tl.minimum(place, -1)) * s_held_k
        b_x = tl.load(tl.where(place < 0, p_before, p_node) + o_c, mask=m_c, other=0.0)
        if KEEP and step == 0:
            tl.store(p_kept + row * s_kept_b + place * s_kept_n + o_c, b_x, mask=m_c)
        total += b_x.to(tl.float32) * b_w
        if CHAIN:
            place -= 1
        else:
            above = tl.load(p_parents + row * s_parents_b + tl.maximum(place, 0) * s_parents_n)
            place = tl.where(place > 0, above, tl.minimum(place, 0) - 1)
    b_sum = total.to(dtype).to(tl.float32)
    if SILU:
        b_sum *= tl.sigmoid(b_sum)
    tl.store(p_out + row * s_out_b + node.to(tl.int64) * s_out_n + o_c, b_sum.to(dtype), mask=m_c)


def tree_conv(
    x: Tensor,
    weight: Tensor,
    held: Tensor,
    parents: Tensor | None,
    kept: Tensor | None = None,
    out: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """`reference.tree_conv`. x, kept and out [B, N, C] and held [B, K, C] are of one dtype, with a contiguous last
    dimension and any other strides; weight [C, K] is contiguous."""
    batch, nodes, channels = x.shape
    out = x.new_empty(x.shape) if out is None else out
    width = weight.shape[1]
    expect("tree_conv", (channels, width), None, CONTIGUOUS, weight=weight)
    expect("tree_conv", (batch, width, channels), x.dtype, PACKED, held=held)
    expect("tree_conv", x.shape, x.dtype, PACKED, x=x, kept=kept, out=out)
    expect("tree_conv", (batch, nodes), torch.int64, parents=parents)
    if out.numel():
        above, into = x if parents is None else parents, out if kept is None else kept
        _tree_conv[(nodes, triton.cdiv(channels, BLOCK), batch)](
            *(x, weight, held, above, into, out),
            *(channels, *strides(2, x, held, above, into, out)),
            WIDTH=width,
            BLOCK=BLOCK,
            CHAIN=parents is None,
            KEEP=kept is not None,
            SILU=silu,
            num_warps=4,
            **dependent(x.device),
        )
    return out


@triton.jit(do_not_specialize=["s_x_l", "s_x_b", "s_held_l", "s_held_b", "s_path_b", "s_path_p"])
def _hold(
    p_x,
    p_held,
    p_counts,
    p_path,
    p_active,
    channels,
    s_x_l,
    s_x_b,
    s_x_n,
    s_held_l,
    s_held_b,
    s_held_k,
    s_path_b,
    s_path_p,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PATH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(p_counts + row)
    if PATH:
        count = tl.where(tl.load(p_active + row) != 0, count + 1, 0)
    o_k = tl.arange(0, WIDTH_BLOCK)
    m_k = o_k < WIDTH
    place = count + o_k - WIDTH  # below 0: held before
    node = tl.maximum(place, 0)
    if PATH:
        node = tl.load(p_path + row * s_path_b + node * s_path_p, mask=m_k & (place >= 0), other=0)
    p_before = p_held + layer * s_held_l + row * s_held_b
    p_old = p_before + (WIDTH + tl.minimum(place, -1)) * s_held_k
    p_new = p_x + layer * s_x_l + row * s_x_b + node * s_x_n
    m = m_k[:, None] & (o_c < channels)[None, :]
    b = tl.load(tl.where(place < 0, p_old, p_new)[:, None] + o_c[None, :], mask=m, other=0.0)
    tl.debug_barrier()  # another thread may be about to read what is held
    tl.store(p_before + o_k[:, None] * s_held_k + o_c[None, :], b, mask=m)


def hold(x: Tensor, held: Tensor, counts: Tensor) -> None:
    """`reference.hold`; x [B, T, C], held [B, K, C] with a contiguous last dimension, counts [B] int64 contiguous."""
    _launch(x[None], held[None], counts, None, None)


def _launch(x: Tensor, held: Tensor, counts: Tensor, path: Tensor | None, active: Tensor | None) -> None:
    """`hold` for L layers, x [L, B, N, C] and held [L, B, K, C], and with path [B, P] and active [B] bool of the
    counts + 1 nodes of accepted paths."""
    layers, batch, width, channels = held.shape
    expect("hold", (batch,), torch.int64, CONTIGUOUS, counts=counts)
    way = counts if path is None else path
    on = counts if active is None else active.view(torch.uint8)
    block = BLOCK // 2
    _hold[(triton.cdiv(channels, block), batch, layers)](
        *(x, held, counts, way, on),
        *(channels, *strides(3, x, held), way.stride(0), way.stride(-1)),
        WIDTH=width,
        WIDTH_BLOCK=max(2, triton.next_power_of_2(width)),
        BLOCK=block,
        PATH=path is not None,
        num_warps=4,
        **dependent(x.device),
    )


STEP, VALUES, WARPS = 64, 64, 4
"""Channels of keys that a program takes at a time, of values that it takes in all, and its warps: the fastest of eight
on an H200."""


@triton.jit(do_not_specialize=["s_path_b", "s_path_p"])
def _delta_commit(
    p_state,
    p_mixed,
    p_u,
    p_g,
    p_path,
    p_accepted,
    p_active,
    s_state_l,
    s_mixed_l,
    s_mixed_b,
    s_mixed_n,
    s_u_l,
    s_u_b,
    s_u_n,
    s_g_l,
    s_g_b,
    s_g_n,
    s_path_b,
    s_path_p,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    STEP: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    PARTS: tl.constexpr = (DV + DV_BLOCK - 1) // DV_BLOCK
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    if tl.load(p_active + row) == 0:
        return
    count = tl.load(p_accepted + row) + 1
    first = (HK + head // (HV // HK)) * DK
    o_v = (tl.program_id(0) % PARTS) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    m_v = o_v < DV
    p_mixed += layer * s_mixed_l + row * s_mixed_b
    p_u += layer * s_u_l + row * s_u_b + head * DV
    p_g += layer * s_g_l + row * s_g_b + head
    p_path += row * s_path_b
    p_state += layer * s_state_l + (row * HV + head) * (DK * DV)
    last = tl.load(p_g + tl.load(p_path + (count - 1) * s_path_p) * s_g_n)
    decay = tl.exp(last)
    o_p = tl.arange(0, BLOCK)
    for block in range(0, tl.cdiv(count, BLOCK)):
        steps = block * BLOCK + o_p
        m_p = steps < count
        nodes = tl.load(p_path + steps * s_path_p, mask=m_p, other=0)
        b_g = tl.load(p_g + nodes * s_g_n, mask=m_p, other=0.0)
        b_weight = tl.exp(tl.where(m_p, last - b_g, float("-inf"))) * scale_of(
            p_mixed, s_mixed_n, nodes, m_p, first, DK, STEP
        )
        b_u = tl.load(p_u + nodes[:, None] * s_u_n + o_v[None, :], mask=m_p[:, None] & m_v[None, :], other=0.0)
        add_updates(p_mixed, s_mixed_n, nodes, m_p, first, b_weight, b_u, decay, p_state, o_v, m_v, DV, DK, STEP, DOT)
        tl.debug_barrier()  # the next block reads what this one wrote
        decay = decay * 0.0 + 1.0


def delta_commit(
    states: Tensor,
    held: Tensor,
    inputs: Tensor,
    mixed: Tensor,
    updates: Tensor,
    gates: Tensor,
    path: Tensor,
    accepted: Tensor,
    active: Tensor,
) -> None:
    """`reference.delta_commit`; all tensors contiguous, but for the strides of path [B, P]."""
    layers, batch, value_heads, key_size, value_size = states.shape
    kept = {"states": states, "held": held, "inputs": inputs, "mixed": mixed, "updates": updates, "gates": gates}
    for name, each in kept.items():
        expect("delta_commit", (layers, batch, *each.shape[2:]), None, CONTIGUOUS, **{name: each})
    expect("delta_commit", (batch, "P"), torch.int64, path=path)
    expect("delta_commit", (batch,), torch.int64, accepted=accepted)
    expect("delta_commit", (batch,), torch.bool, active=active)
    key_heads = sizes_of(mixed, states)[0]
    step, value_block = (
        min(most, max(16, triton.next_power_of_2(size))) for most, size in ((STEP, key_size), (VALUES, value_size))
    )
    _delta_commit[(value_heads * triton.cdiv(value_size, value_block), batch, layers)](
        *(states, mixed, updates, gates, path, accepted, active.view(torch.uint8)),
        *(states.stride(0), *strides(3, mixed, updates, gates), *path.stride()),
        HK=key_heads,
        HV=value_heads,
        DK=key_size,
        DV=value_size,
        STEP=step,
        DV_BLOCK=value_block,
        BLOCK=16,
        DOT="ieee" if mixed.dtype == torch.float32 else "tf32x3",
        num_warps=WARPS,
        **dependent(states.device),
    )
    _launch(inputs, held, accepted.contiguous(), path, active)
