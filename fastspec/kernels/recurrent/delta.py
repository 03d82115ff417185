"""Gated DeltaNet over a few nodes of a tree, in one launch, and over a text: blocks of nodes, each a triangular system
that is solved level by level. Larger trees are in `tree.py`.

B rows (sequences), N nodes per row, Hk key heads, Hv value heads, Dk and Dv their sizes, C channels. A program has one
row, one value head and DV of its channels, whose updates do not depend on the others'.

A node's level is the number of its ancestors within its block. Those of one level do not depend on each other, so that
a block of a tree takes as many products as it is deep, and only finished updates are ever multiplied: an inverse by
squaring would take fewer, and loses all digits where keys of a long chain are alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.launch import INTERPRETED, dependent, wait_for_previous
from fastspec.kernels.recurrent.reference import DecayRates
from fastspec.kernels.recurrent.tree import (
    add_updates,
    decay_of,
    pairs_of,
    rates_of,
    scale_of,
    seen_by,
    through,
    tile_of,
    wide_tree,
)

FEW = 16
"""Nodes of a tree that are taken in one launch."""
BLOCK, WARPS = 32, 4
"""Tokens of a text's system, and warps of a program."""


@triton.jit
def _solve(b_system, b_wanted, b_level, DOT: tl.constexpr):
    """(1 + system) u = wanted, where system [N, N] has entries from nodes of a lower level only."""
    b_u = tl.where((b_level == 0)[:, None], b_wanted, 0.0)
    for level in range(1, tl.max(b_level, 0) + 1):
        b_next = b_wanted - tl.dot(b_system, b_u, input_precision=DOT)
        b_u = tl.where((b_level == level)[:, None], b_next, b_u)
    return b_u


@triton.jit(do_not_specialize=["nodes", "s_a_b", "s_b_b", "s_words_b", "s_words_n", "s_g_b"])
def _delta_tree(
    p_mixed,
    p_a,
    p_b,
    p_decay,
    p_bias,
    p_state,
    p_words,
    p_u,
    p_g,
    p_out,
    nodes,
    scale,
    root,
    s_mixed_b,
    s_mixed_n,
    s_a_b,
    s_a_n,
    s_b_b,
    s_b_n,
    s_words_b,
    s_words_n,
    s_u_b,
    s_u_n,
    s_g_b,
    s_g_n,
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
    head, row, first_q, first_k, o_v, m_v = tile_of(HK, HV, DK, DV, DV_BLOCK)
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_b += row * s_b_b + head
    p_words += row * s_words_b
    p_u += row * s_u_b + head * DV
    p_g += row * s_g_b + head
    p_state += (row * HV + head) * (DK * DV)
    o_n = tl.arange(0, BLOCK)
    rows = o_n.to(tl.int64)
    m_rows = rows < nodes
    m_out = m_rows[:, None] & m_v[None, :]
    b_g, b_beta = rates_of(p_a, p_b, s_a_n, s_b_n, rows, m_rows, log_decay, bias, scale)
    b_seen = seen_by(p_words, s_words_n, rows, m_rows, 0, BLOCK)
    b_sum = tl.sum(tl.where(b_seen, b_g[None, :], 0.0), 1)
    tl.store(p_g + rows * s_g_n, b_sum, mask=m_rows)
    b_unit = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_k, DK, STEP)
    b_v = tl.load(
        p_mixed + rows[:, None] * s_mixed_n + (2 * HK * DK + head * DV + o_v)[None, :], mask=m_out, other=0.0
    ).to(tl.float32)
    b_grown = tl.exp(b_sum)
    b_read = through(p_mixed, s_mixed_n, rows, m_rows, first_k, p_state, o_v, m_v, DV, DK, STEP, DOT)
    b_wanted = b_v - (b_grown * b_unit)[:, None] * b_read
    b_above = b_seen & (o_n[:, None] != o_n[None, :])
    b_system = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, rows, m_rows, first_k, DK, STEP, DOT)
    b_system *= decay_of(b_above, b_sum, b_sum) * (b_unit * b_beta)[:, None] * b_unit[None, :]
    b_u = _solve(b_system, b_wanted * b_beta[:, None], tl.sum(b_above.to(tl.int32), 1), DOT)
    tl.store(p_u + rows[:, None] * s_u_n + o_v[None, :], b_u, mask=m_out)
    b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, rows, m_rows, first_k, DK, STEP, DOT)
    b_out = tl.dot(b_pairs * decay_of(b_seen, b_sum, b_sum) * b_unit[None, :], b_u, input_precision=DOT)
    b_out += b_grown[:, None] * through(p_mixed, s_mixed_n, rows, m_rows, first_q, p_state, o_v, m_v, DV, DK, STEP, DOT)
    b_out *= (scale_of(p_mixed, s_mixed_n, rows, m_rows, first_q, DK, STEP) / root)[:, None]
    p_o = p_out + ((row * nodes + rows)[:, None] * HV + head) * DV + o_v[None, :]
    tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["tokens", "s_a_b", "s_b_b"])
def _delta_chain(
    p_mixed,
    p_a,
    p_b,
    p_decay,
    p_bias,
    p_state,
    p_counts,
    p_out,
    tokens,
    scale,
    root,
    s_mixed_b,
    s_mixed_n,
    s_a_b,
    s_a_n,
    s_b_b,
    s_b_n,
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
    head, row, first_q, first_k, o_v, m_v = tile_of(HK, HV, DK, DV, DV_BLOCK)
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    count = tl.load(p_counts + row)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_b += row * s_b_b + head
    p_state += (row * HV + head) * (DK * DV)
    o_n = tl.arange(0, BLOCK)
    b_seen = o_n[:, None] >= o_n[None, :]
    for block in range(0, tl.cdiv(tokens, BLOCK)):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < tokens
        m_out = m_rows[:, None] & m_v[None, :]
        b_g, b_beta = rates_of(p_a, p_b, s_a_n, s_b_n, rows, m_rows & (rows < count), log_decay, bias, scale)
        b_sum = tl.sum(tl.where(b_seen, b_g[None, :], 0.0), 1)
        last = tl.sum(b_g, 0)
        b_unit = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_k, DK, STEP)
        b_v = tl.load(
            p_mixed + rows[:, None] * s_mixed_n + (2 * HK * DK + head * DV + o_v)[None, :], mask=m_out, other=0.0
        ).to(tl.float32)
        b_grown = tl.exp(b_sum)
        b_read = through(p_mixed, s_mixed_n, rows, m_rows, first_k, p_state, o_v, m_v, DV, DK, STEP, DOT)
        b_wanted = (b_v - (b_grown * b_unit)[:, None] * b_read) * b_beta[:, None]
        b_system = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, rows, m_rows, first_k, DK, STEP, DOT)
        b_system *= decay_of(o_n[:, None] > o_n[None, :], b_sum, b_sum) * (b_unit * b_beta)[:, None] * b_unit[None, :]
        b_u = _solve(b_system, b_wanted, o_n, DOT)
        b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, rows, m_rows, first_k, DK, STEP, DOT)
        b_out = tl.dot(b_pairs * decay_of(b_seen, b_sum, b_sum) * b_unit[None, :], b_u, input_precision=DOT)
        b_out += b_grown[:, None] * through(
            p_mixed, s_mixed_n, rows, m_rows, first_q, p_state, o_v, m_v, DV, DK, STEP, DOT
        )
        b_out *= (scale_of(p_mixed, s_mixed_n, rows, m_rows, first_q, DK, STEP) / root)[:, None]
        p_o = p_out + ((row * tokens + rows)[:, None] * HV + head) * DV + o_v[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_out)
        tl.debug_barrier()  # other threads may be about to read the state
        b_weight = b_unit * tl.exp(last - b_sum)
        add_updates(
            p_mixed, s_mixed_n, rows, m_rows, first_k, b_weight, b_u, tl.exp(last), p_state, o_v, m_v, DV, DK, STEP, DOT
        )
        tl.debug_barrier()


def delta_tree(
    mixed: Tensor, a: Tensor, b: Tensor, rates: DecayRates, state: Tensor, words: Tensor, updates: Tensor, gates: Tensor
) -> Tensor:
    """`reference.delta_tree`. mixed [B, N, C], a, b [B, N, Hv], updates [B, N, Hv, Dv] and gates [B, N, Hv] are
    contiguous but for their rows' and nodes' strides; state [B, Hv, Dk, Dv] and `rates` are contiguous; words [B, N, W]
    with a contiguous last dimension."""
    sizes = _checked(mixed, a, b, rates, state)
    batch, nodes = mixed.shape[:2]
    expect("delta_tree", (batch, nodes, "W"), torch.int64, PACKED, words=words)
    if words.shape[2] * 64 < nodes:
        raise ValueError(f"delta_tree: {words.shape[2]} words of 64 bits do not cover {nodes} nodes")
    expect("delta_tree", (batch, nodes, *sizes[1::2]), torch.float32, updates=updates)
    expect("delta_tree", (batch, nodes, sizes[1]), torch.float32, gates=gates)
    for name, each in (("updates", updates), ("gates", gates)):
        expect("delta_tree", each.shape[2:], None, CONTIGUOUS, **{f"{name} of a node": each[0, 0]})
    options, parts = _launch(mixed, sizes)
    if nodes > FEW:
        return wide_tree(mixed, a, b, rates, state, words, updates, gates, options)
    out = mixed.new_empty(batch, nodes, sizes[1], sizes[3])
    _delta_tree[(sizes[1] * parts, batch)](
        *(mixed, a, b, rates.log_decay, rates.bias, state, words, updates, gates, out),
        *(nodes, rates.scale, sizes[2] ** 0.5, *strides(2, mixed, a, b, words, updates, gates)),
        **options,
        BLOCK=FEW,
        num_warps=WARPS,
        **dependent(mixed.device),
    )
    return out


def delta_chain(mixed: Tensor, a: Tensor, b: Tensor, rates: DecayRates, state: Tensor, counts: Tensor) -> Tensor:
    """`reference.delta_chain`, with the layouts of `delta_tree`; counts [B] int64 contiguous."""
    sizes = _checked(mixed, a, b, rates, state)
    batch, tokens = mixed.shape[:2]
    expect("delta_chain", (batch,), torch.int64, CONTIGUOUS, counts=counts)
    out = mixed.new_empty(batch, tokens, sizes[1], sizes[3])
    options, parts = _launch(mixed, sizes)
    _delta_chain[(sizes[1] * parts, batch)](
        *(mixed, a, b, rates.log_decay, rates.bias, state, counts, out),
        *(tokens, rates.scale, sizes[2] ** 0.5, *strides(2, mixed, a, b)),
        **options,
        BLOCK=BLOCK if tokens > 16 else 16,
        num_warps=WARPS,
        **dependent(mixed.device),
    )
    return out


def _launch(mixed: Tensor, sizes: tuple[int, int, int, int]) -> tuple[dict[str, int | str], int]:
    """The compile-time numbers of both kernels, and how many programs share a head."""
    key_heads, value_heads, key_size, value_size = sizes
    value_block = min(32, max(16, triton.next_power_of_2(value_size)))
    options: dict[str, int | str] = {
        "HK": key_heads,
        "HV": value_heads,
        "DK": key_size,
        "DV": value_size,
        "STEP": min(32, max(16, triton.next_power_of_2(key_size))),
        "DV_BLOCK": value_block,
        "DOT": "ieee" if mixed.dtype == torch.float32 or INTERPRETED else "tf32x3",
    }
    return options, triton.cdiv(value_size, value_block)


def _checked(mixed: Tensor, a: Tensor, b: Tensor, rates: DecayRates, state: Tensor) -> tuple[int, int, int, int]:
    """(Hk, Hv, Dk, Dv). Raises ValueError for what the kernels do not accept."""
    batch, tokens, channels = mixed.shape
    _, value_heads, key_size, value_size = state.shape
    key_heads, rest = divmod(channels - value_heads * value_size, 2 * key_size)
    if rest or key_heads < 1 or value_heads % key_heads or len(state) != batch:
        raise ValueError(
            f"mixed is {list(mixed.shape)}, state {list(state.shape)}; [B, N, 2 Hk Dk + Hv Dv], [B, Hv, Dk, Dv] are "
            "accepted"
        )
    expect("delta", state.shape, torch.float32, CONTIGUOUS, state=state)
    expect("delta", mixed.shape, None, PACKED, mixed=mixed)
    expect("delta", (batch, tokens, value_heads), None, PACKED, a=a, b=b)
    expect("delta", (value_heads,), None, CONTIGUOUS, log_decay=rates.log_decay, bias=rates.bias)
    return key_heads, value_heads, key_size, value_size
