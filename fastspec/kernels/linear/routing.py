"""A router's choice in one launch: each program takes a token's logits, picks its experts one by one, and weighs them.

T tokens, E experts in G groups of equal size, K choices. A program lays a token's logits out as G rows, both sides padded to powers of
two, so that a group's best are a row's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent
from fastspec.kernels.linear.reference import Routing

WARP_BLOCK = 512
"""Logits that one warp takes."""
FLOATS = torch.float32, torch.float16, torch.bfloat16


@triton.jit
def _kept(b_order, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr):
    """What experts are ordered by, with those outside the best groups at minus infinity."""
    b_rows = tl.reshape(b_order, (GROUP_BLOCK, SIZE_BLOCK))
    b_best = tl.max(b_rows, 1)
    if SIZE > 1:
        m_first = tl.arange(0, SIZE_BLOCK)[None, :] == tl.argmax(b_rows, 1)[:, None]
        b_best += tl.max(tl.where(m_first, -float("inf"), b_rows), 1)
    o_group = tl.arange(0, GROUP_BLOCK)
    m_kept = o_group < 0
    for _ in range(KEPT):
        m_at = o_group == tl.argmax(b_best, 0)
        m_kept = m_kept | m_at
        b_best = tl.where(m_at, -float("inf"), b_best)
    return tl.reshape(tl.where(m_kept[:, None], b_rows, -float("inf")), (GROUP_BLOCK * SIZE_BLOCK,))


@triton.jit
def _route(
    p_logits, p_correction, p_chosen, p_shares, stride, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHOICE_BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr, CORRECTED: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    o_all = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    o_expert = (o_all // SIZE_BLOCK) * SIZE + o_all % SIZE_BLOCK
    m_real = (o_all // SIZE_BLOCK < GROUPS) & (o_all % SIZE_BLOCK < SIZE)
    b_logits = tl.load(p_logits + token * stride + o_expert, mask=m_real, other=-float("inf")).to(tl.float32)
    top = tl.max(b_logits, 0)
    whole = tl.sum(tl.exp(b_logits - top), 0)
    b_order = b_logits
    if CORRECTED:
        b_score = 1.0 / (1.0 + tl.exp(-b_logits)) if SIGMOID else tl.exp(b_logits - top) / whole
        b_order = tl.where(m_real, b_score + tl.load(p_correction + o_expert, mask=m_real, other=0.0).to(tl.float32), -float("inf"))
    if GROUPS > 1:
        b_order = _kept(b_order, GROUP_BLOCK, SIZE_BLOCK, SIZE, KEPT)
    o_choice = tl.arange(0, CHOICE_BLOCK)
    b_chosen = tl.zeros((CHOICE_BLOCK,), tl.int32)
    b_picked = tl.full((CHOICE_BLOCK,), -float("inf"), tl.float32)
    for k in range(CHOICES):
        # Not tl.argmax: of a tensor that was reshaped and that nothing but reductions read, Triton 3.6 mixes up the order.
        m_at = o_all == tl.min(tl.where(b_order == tl.max(b_order, 0), o_all, GROUP_BLOCK * SIZE_BLOCK), 0)
        expert = tl.minimum(tl.sum(tl.where(m_at, o_expert, 0), 0), EXPERTS - 1)  # in bounds, whatever NaNs compare as
        b_chosen = tl.where(o_choice == k, expert, b_chosen)
        b_picked = tl.where(o_choice == k, tl.sum(tl.where(m_at, b_logits, 0.0), 0), b_picked)
        b_order = tl.where(m_at, -float("inf"), b_order)
    if SIGMOID:
        b_share = tl.where(o_choice < CHOICES, 1.0 / (1.0 + tl.exp(-b_picked)), 0.0)
        if NORMALISED:
            b_share = b_share / (tl.sum(b_share, 0) + 1e-20)
    elif NORMALISED:
        b_share = tl.exp(b_picked - tl.max(b_picked, 0))
        b_share = b_share / tl.sum(b_share, 0)
    else:
        b_share = tl.exp(b_picked - top) / whole
    o_out = token * CHOICES + o_choice
    tl.store(p_chosen + o_out, b_chosen.to(tl.int64), mask=o_choice < CHOICES)
    tl.store(p_shares + o_out, (b_share * SCALE).to(p_shares.dtype.element_ty), mask=o_choice < CHOICES)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`reference.route`: logits [T, E], correction [E] or None -> chosen [T, K] int64 and their shares [T, K], contiguous.

    Logits and correction are fp32, fp16 or bf16, an expert's next to the other's. Of equal experts the first is chosen.
    """
    tokens, count = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: a token's must lie side by side; pass logits.contiguous()")
    if correction is not None and (correction.shape != (count,) or correction.dtype not in FLOATS or not correction.is_contiguous()):
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
        raise ValueError(f"correction is {correction.dtype} {list(correction.shape)}; contiguous [{count}] of {kinds} is accepted")
    if count % routing.groups or not 1 <= routing.kept <= routing.groups:
        raise ValueError(f"{count} experts in {routing.groups} groups of which {routing.kept} are kept: groups of equal size are accepted")
    most = count // routing.groups * (routing.kept if routing.groups > 1 else 1)
    if not 1 <= routing.choices <= most:
        raise ValueError(f"{routing.choices} choices of {most} experts: 1 to {most} are accepted")
    chosen = torch.empty((tokens, routing.choices), dtype=torch.int64, device=logits.device)
    shares = torch.empty_like(chosen, dtype=logits.dtype if routing.rounded else torch.float32)
    if tokens == 0:
        return chosen, shares
    group_block, size_block = triton.next_power_of_2(routing.groups), triton.next_power_of_2(count // routing.groups)
    _route[(tokens,)](
        logits, correction, chosen, shares, logits.stride(0), EXPERTS=count, CHOICES=routing.choices, GROUPS=routing.groups,
        KEPT=routing.kept, GROUP_BLOCK=group_block, SIZE_BLOCK=size_block, CHOICE_BLOCK=triton.next_power_of_2(routing.choices),
        SIGMOID=routing.sigmoid, NORMALISED=routing.normalised, CORRECTED=correction is not None, SCALE=float(routing.scale),
        num_warps=max(1, min(8, group_block * size_block // WARP_BLOCK)), **dependent(logits.device),
    )  # fmt: skip
    return chosen, shares
