"""Gated DeltaNet over a tree of more than a few nodes, in two launches.

B rows (sequences), N nodes per row, P = N rounded up to whole blocks, Hk key heads, Hv value heads, Dk and Dv their sizes.

The first launch, a program for a row's value head, makes what does not depend on the values: which share of a node's update every
ancestor takes (`pulls` [B, Hv, P, P]), and with which weight a node reads the ancestors' updates (`reads`, the same shape). On the
diagonal blocks the triangular system is solved there for all values at once: `pulls` holds its inverse, each column times the column's
beta. A node's level is the number of its ancestors within its block, and the inverse is made level by level, from finished rows only:
by squaring it would take fewer products, and lose all digits where keys of a long chain are alike.

The second, a program for DV of a value head's channels, reads the state once and multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent
from fastspec.kernels.recurrent.blocks import decay_of, pairs_of, rates_of, scale_of, seen_by, through_both
from fastspec.kernels.recurrent.reference import DecayRates

SYSTEM = {32: (4, 32), 64: (8, 64)}
"""Nodes of a block -> warps of a program of the first launch, and channels of keys that it takes at a time (the fastest on an H200)."""
UPDATE_WARPS, UPDATE_STEP = 4, 32
"""Those of the second. With 8 warps Triton 3.6 makes a kernel of it that reads beyond its buffers on Hopper."""


@triton.jit
def _inverse(b_system, b_level, o_n, DOT: tl.constexpr):
    """(1 + system)^-1, where system [N, N] has entries from nodes of a lower level only."""
    b_one = tl.where(o_n[:, None] == o_n[None, :], 1.0, 0.0)
    b_inverse = tl.where((b_level == 0)[:, None], b_one, 0.0)
    for level in range(1, tl.max(b_level, 0) + 1):
        b_next = b_one - tl.dot(b_system, b_inverse, input_precision=DOT)
        b_inverse = tl.where((b_level == level)[:, None], b_next, b_inverse)
    return b_inverse


@triton.jit(do_not_specialize=["nodes", "s_mixed_b", "s_a_b", "s_b_b", "s_words_b", "s_words_n", "s_g_b"])
def _tree_system(
    p_mixed, p_a, p_b, p_decay, p_bias, p_words, p_g, p_pulls, p_reads, nodes, scale, root,
    s_mixed_b, s_mixed_n, s_a_b, s_a_n, s_b_b, s_b_n, s_words_b, s_words_n, s_g_b, s_g_n,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_q = (head // (HV // HK)) * DK
    first_k = first_q + HK * DK
    blocks = tl.cdiv(nodes, BLOCK)
    whole = blocks * BLOCK
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_b += row * s_b_b + head
    p_words += row * s_words_b
    p_g += row * s_g_b + head
    p_pulls += (row * HV + head) * whole * whole
    p_reads += (row * HV + head) * whole * whole
    o_n = tl.arange(0, BLOCK)
    for block in range(0, blocks):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < nodes
        b_g, b_beta = rates_of(p_a, p_b, s_a_n, s_b_n, rows, m_rows, log_decay, bias, scale)
        b_seen = seen_by(p_words, s_words_n, rows, m_rows, block, BLOCK)
        b_sum = tl.sum(tl.where(b_seen, b_g[None, :], 0.0), 1)
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            g_other, _ = rates_of(p_a, p_b, s_a_n, s_b_n, others, others < nodes, log_decay, bias, scale)
            b_sum += tl.sum(tl.where(seen_by(p_words, s_words_n, rows, m_rows, before, BLOCK), g_other[None, :], 0.0), 1)
        tl.store(p_g + rows * s_g_n, b_sum, mask=m_rows)
        b_unit = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_k, DK, STEP)
        b_asked = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_q, DK, STEP) / root
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            m_others = others < nodes
            b_seen_there = seen_by(p_words, s_words_n, rows, m_rows, before, BLOCK)
            b_decay = decay_of(b_seen_there, b_sum, tl.load(p_g + others * s_g_n))
            b_decay *= scale_of(p_mixed, s_mixed_n, others, m_others, first_k, DK, STEP)[None, :]
            p_tile = rows[:, None] * whole + others[None, :]
            b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, others, m_others, first_k, DK, STEP, DOT)
            tl.store(p_pulls + p_tile, b_pairs * b_decay * b_unit[:, None])
            b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, others, m_others, first_k, DK, STEP, DOT)
            tl.store(p_reads + p_tile, b_pairs * b_decay * b_asked[:, None])
        p_tile = rows[:, None] * whole + rows[None, :]
        b_decay = decay_of(b_seen, b_sum, b_sum) * b_unit[None, :]
        b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, rows, m_rows, first_k, DK, STEP, DOT)
        tl.store(p_reads + p_tile, b_pairs * b_decay * b_asked[:, None])
        b_above = b_seen & (o_n[:, None] != o_n[None, :])
        b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, rows, m_rows, first_k, DK, STEP, DOT)
        b_system = tl.where(b_above, b_pairs * b_decay * (b_unit * b_beta)[:, None], 0.0)
        b_inverse = _inverse(b_system, tl.sum(b_above.to(tl.int32), 1), o_n, DOT)
        tl.store(p_pulls + p_tile, b_inverse * b_beta[None, :])
        tl.debug_barrier()  # the next block reads the gates that this one wrote


@triton.jit(do_not_specialize=["nodes", "s_mixed_b", "s_u_b", "s_g_b"])
def _tree_updates(
    p_mixed, p_state, p_g, p_pulls, p_reads, p_u, p_out, nodes, root, s_mixed_b, s_mixed_n, s_u_b, s_u_n, s_g_b, s_g_n,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = (DV + DV_BLOCK - 1) // DV_BLOCK
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1).to(tl.int64)
    first_q = (head // (HV // HK)) * DK
    first_k = first_q + HK * DK
    o_v = (tl.program_id(0) % PARTS) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    m_v = o_v < DV
    blocks = tl.cdiv(nodes, BLOCK)
    whole = blocks * BLOCK
    p_mixed += row * s_mixed_b
    p_u += row * s_u_b + head * DV
    p_g += row * s_g_b + head
    p_pulls += (row * HV + head) * whole * whole
    p_reads += (row * HV + head) * whole * whole
    p_state += (row * HV + head) * (DK * DV)
    o_n = tl.arange(0, BLOCK)
    for block in range(0, blocks):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < nodes
        m_out = m_rows[:, None] & m_v[None, :]
        b_grown = tl.exp(tl.load(p_g + rows * s_g_n, mask=m_rows, other=0.0))
        b_read, b_asked = through_both(p_mixed, s_mixed_n, rows, m_rows, first_k, first_q, p_state, o_v, m_v, DV, DK, STEP, DOT)
        b_wanted = tl.load(p_mixed + rows[:, None] * s_mixed_n + (2 * HK * DK + head * DV + o_v)[None, :], mask=m_out, other=0.0)
        b_wanted = b_wanted.to(tl.float32) - b_grown[:, None] * b_read
        b_out = (b_grown / root)[:, None] * b_asked
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            p_tile = rows[:, None] * whole + others[None, :]
            u_other = tl.load(p_u + others[:, None] * s_u_n + o_v[None, :], mask=m_v[None, :], other=0.0)
            b_wanted -= tl.dot(tl.load(p_pulls + p_tile), u_other, input_precision=DOT)
            b_out += tl.dot(tl.load(p_reads + p_tile), u_other, input_precision=DOT)
        p_tile = rows[:, None] * whole + rows[None, :]
        b_u = tl.dot(tl.load(p_pulls + p_tile), b_wanted, input_precision=DOT)
        tl.store(p_u + rows[:, None] * s_u_n + o_v[None, :], b_u, mask=m_out)
        b_out += tl.dot(tl.load(p_reads + p_tile), b_u, input_precision=DOT)
        p_o = p_out + ((row * nodes + rows)[:, None] * HV + head) * DV + o_v[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_out)
        tl.debug_barrier()  # the next block reads the updates that this one wrote


def wide_tree(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    rates: DecayRates,
    state: Tensor,
    words: Tensor,
    updates: Tensor,
    gates: Tensor,
    sizes: dict[str, Any],
) -> Tensor:
    """`delta.delta_tree` of checked arguments, and of sizes HK, HV, DK, DV, DV_BLOCK and DOT."""
    batch, nodes = mixed.shape[:2]
    block = 32 if nodes <= 32 else 64
    whole = triton.cdiv(nodes, block) * block
    pulls, reads = torch.empty((2, batch, sizes["HV"], whole, whole), dtype=torch.float32, device=mixed.device)
    out = mixed.new_empty(batch, nodes, sizes["HV"], sizes["DV"])
    root, parts = sizes["DK"] ** 0.5, triton.cdiv(sizes["DV"], sizes["DV_BLOCK"])
    (warps, step), wide = SYSTEM[block], max(16, triton.next_power_of_2(sizes["DK"]))
    shared = {"BLOCK": block, "DOT": sizes["DOT"], "HK": sizes["HK"], "HV": sizes["HV"], "DK": sizes["DK"]}
    _tree_system[(sizes["HV"], batch)](
        mixed, a, b, rates.log_decay, rates.bias, words, gates, pulls, reads, nodes, rates.scale, root,
        *mixed.stride()[:2], *a.stride()[:2], *b.stride()[:2], *words.stride()[:2], *gates.stride()[:2],
        **shared, STEP=min(step, wide), num_warps=warps, num_stages=1, **dependent(mixed.device),
    )  # fmt: skip
    _tree_updates[(sizes["HV"] * parts, batch)](
        mixed, state, gates, pulls, reads, updates, out, nodes, root, *mixed.stride()[:2], *updates.stride()[:2], *gates.stride()[:2],
        **shared, DV=sizes["DV"], DV_BLOCK=sizes["DV_BLOCK"], STEP=min(UPDATE_STEP, wide), num_warps=UPDATE_WARPS, num_stages=1,
        **dependent(mixed.device),
    )  # fmt: skip
    return out
