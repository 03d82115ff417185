"""Taking accepted paths into the states of all layers: one launch for the states, one for the convolutions' inputs.

L layers, B rows, N nodes of a row's tree, P of its longest path; heads and sizes as in `delta.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent
from fastspec.kernels.recurrent.blocks import add_updates, scale_of
from fastspec.kernels.recurrent.conv import hold_paths
from fastspec.kernels.recurrent.reference import sizes_of

STEP, VALUES, WARPS = 64, 64, 4
"""Channels of keys that a program takes at a time, of values that it takes in all, and its warps: the fastest of eight on an H200."""


@triton.jit(do_not_specialize=["s_path_b", "s_path_p"])
def _delta_commit(
    p_state, p_mixed, p_u, p_g, p_path, p_accepted, p_active, s_state_l, s_mixed_l, s_mixed_b, s_mixed_n, s_u_l, s_u_b, s_u_n,
    s_g_l, s_g_b, s_g_n, s_path_b, s_path_p,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
        b_weight = tl.exp(tl.where(m_p, last - b_g, float("-inf"))) * scale_of(p_mixed, s_mixed_n, nodes, m_p, first, DK, STEP)
        b_u = tl.load(p_u + nodes[:, None] * s_u_n + o_v[None, :], mask=m_p[:, None] & m_v[None, :], other=0.0)
        add_updates(p_mixed, s_mixed_n, nodes, m_p, first, b_weight, b_u, decay, p_state, o_v, m_v, DV, DK, STEP, DOT)
        tl.debug_barrier()  # the next block reads what this one wrote
        decay = decay * 0.0 + 1.0


def delta_commit(
    states: Tensor, held: Tensor, inputs: Tensor, mixed: Tensor, updates: Tensor, gates: Tensor, path: Tensor, accepted: Tensor,
    active: Tensor,
) -> None:  # fmt: skip
    """`reference.delta_commit`; all tensors contiguous, but for the strides of path [B, P]."""
    layers, batch, value_heads, key_size, value_size = states.shape
    for name, each in (("states", states), ("held", held), ("inputs", inputs), ("mixed", mixed), ("updates", updates), ("gates", gates)):
        if not each.is_contiguous() or each.shape[:2] != (layers, batch):
            raise ValueError(f"{name} is {list(each.shape)}, strides {each.stride()}; contiguous of [{layers}, {batch}, ...] is accepted")
    if path.dtype != torch.int64 or accepted.shape != (batch,) or active.shape != (batch,) or active.dtype != torch.bool:
        raise ValueError(f"path is {path.dtype}, accepted {list(accepted.shape)}, active {active.dtype}: int64, [{batch}], bool is right")
    key_heads = sizes_of(mixed, states)[0]
    step, value_block = (min(most, max(16, triton.next_power_of_2(size))) for most, size in ((STEP, key_size), (VALUES, value_size)))
    _delta_commit[(value_heads * triton.cdiv(value_size, value_block), batch, layers)](
        states, mixed, updates, gates, path, accepted, active.view(torch.uint8), states.stride(0), *mixed.stride()[:3],
        *updates.stride()[:3], *gates.stride()[:3], *path.stride(),
        HK=key_heads, HV=value_heads, DK=key_size, DV=value_size, STEP=step, DV_BLOCK=value_block, BLOCK=16,
        DOT="ieee" if mixed.dtype == torch.float32 else "tf32x3", num_warps=WARPS, **dependent(states.device),
    )  # fmt: skip
    hold_paths(inputs, held, path, accepted.contiguous(), active)
