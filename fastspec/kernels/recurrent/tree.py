"""Gated DeltaNet over a tree of more than a few nodes, in two launches, and the tiles that its kernels share.

`mixed` [B, N, C] holds a row's queries, keys and values of all heads side by side; a tile is some of its rows (nodes)
and channels.

B rows (sequences), N nodes per row, Hk key heads, Hv value heads, Dk and Dv their sizes. Nodes are taken in blocks of
32; a node's level is the number of its ancestors within its block.

The first launch, a program for a block of a row's value head, inverts the block's triangular system: which share of a
node's update every ancestor takes. It goes by halves of levels, and so from finished rows only; by squaring it would
take as few products, and lose all digits where keys of a long chain are alike. The second, a program for DV of a value
head's channels, reads the state once a block, and multiplies.

Both read before they wait what stands when the launch in front lets them start, and nothing that this one writes. The
first takes gates and ancestors while the convolution runs, which itself waited for the product that the gates are from;
the second reads the state and the keys while the first runs, which has waited for the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import strides
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.recurrent.reference import DecayRates

TINY = tl.constexpr(1e-6)


@triton.jit
def tile_of(HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr):
    """The value head and the row of a program, the first channels of the head's queries and keys, and the values of the
    head that the program takes, with which of them there are."""
    PARTS: tl.constexpr = (DV + DV_BLOCK - 1) // DV_BLOCK
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1).to(tl.int64)
    first_q = (head // (HV // HK)) * DK
    first_k = first_q + HK * DK
    o_v = (tl.program_id(0) % PARTS) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    return head, row, first_q, first_k, o_v, o_v < DV


@triton.jit
def keys_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """STEP channels of rows of one head, from `first` on, of which SIZE are the head's: [len(rows), STEP]."""
    o_d = tl.arange(0, STEP)
    return tl.load(
        p_mixed + rows[:, None] * stride + (first + o_d)[None, :],
        mask=m_rows[:, None] & (o_d < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def scale_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Factors that make rows of one head vectors of length 1."""
    b_square = tl.zeros(rows.shape, tl.float32)
    for at in range(0, SIZE, STEP):
        b = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP).to(tl.float32)
        b_square += tl.sum(b * b, 1)
    return tl.rsqrt(b_square + TINY)


@triton.jit
def pairs_of(
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    others,
    m_others,
    second,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Products of rows from `first` on with others from `second` on, in the precision that they lie in: [len(rows),
    len(others)]."""
    b_pairs = tl.zeros((rows.shape[0], others.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        b_one = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP)
        b_two = keys_of(p_mixed, stride, others, m_others, second + at, SIZE - at, STEP)
        b_pairs += tl.dot(b_one, tl.trans(b_two), input_precision=DOT)
    return b_pairs


@triton.jit
def parts_of(b):
    """fp32 numbers as three of bf16 that hold all their digits, by 8 of them each."""
    b_high = b.to(tl.uint32, bitcast=True) & 0xFFFF0000
    b_rest = b - b_high.to(tl.float32, bitcast=True)
    b_middle = b_rest.to(tl.uint32, bitcast=True) & 0xFFFF0000
    b_low = (b_rest - b_middle.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)
    return _upper(b_high), _upper(b_middle), _upper(b_low)


@triton.jit
def _upper(b_bits):
    return (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def times(b_one, b_two, DOT: tl.constexpr, ALL: tl.constexpr):
    """A product of fp32 matrices: of parts in bf16, but for products of parts below 2^-21 of it or, where not ALL are
    wanted, below 2^-14; by DOT "ieee" in fp32."""
    if DOT == "ieee":
        b = tl.dot(b_one, b_two, input_precision="ieee")
    else:
        b_high, b_middle, b_low = parts_of(b_one)
        b_tall, b_half, b_short = parts_of(b_two)
        b = tl.dot(b_middle, b_tall)
        if ALL:
            b = tl.dot(b_low, b_tall, b)
            b = tl.dot(b_high, b_short, b)
            b = tl.dot(b_middle, b_half, b)
        b = tl.dot(b_high, b_half, b)
        b = tl.dot(b_high, b_tall, b)
    return b


@triton.jit
def times_small(b_one, b_two, DOT: tl.constexpr):
    """A product of matrices of numbers of size 1 or less, but for 2^-22 of that: of parts in fp16, by DOT "ieee" in
    fp32."""
    if DOT == "ieee":
        b = tl.dot(b_one, b_two, input_precision="ieee")
    else:
        b_high, b_tall = b_one.to(tl.float16), b_two.to(tl.float16)
        b_rest, b_short = (b_one - b_high.to(tl.float32)).to(tl.float16), (b_two - b_tall.to(tl.float32)).to(tl.float16)
        b = tl.dot(b_rest, b_tall)
        b = tl.dot(b_high, b_short, b)
        b = tl.dot(b_high, b_tall, b)
    return b


@triton.jit
def times_state(b_keys, b_state, DOT: tl.constexpr, ALL: tl.constexpr):
    """Keys or queries times a tile of the state, fp32. For keys in bf16 it is cut into three parts in bf16, which hold
    all its digits; two of them are taken where not ALL are wanted."""
    if b_keys.dtype == tl.bfloat16:
        b_high, b_middle, b_low = parts_of(b_state)
        b_read = tl.dot(b_keys, b_middle)
        if ALL:
            b_read = tl.dot(b_keys, b_low, b_read)
        b_read = tl.dot(b_keys, b_high, b_read)
    else:
        b_read = times(b_keys.to(tl.float32), b_state, DOT, ALL)
    return b_read


@triton.jit
def through(
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    p_state,
    o_v,
    m_v,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Rows from `first` on times the state [Dk, Dv] at p_state: [len(rows), len(o_v)]."""
    b_read = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        b_state = tl.load(
            p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < SIZE)[:, None] & m_v[None, :], other=0.0
        )
        b_read += times_state(keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP), b_state, DOT, True)
    return b_read


@triton.jit
def add_updates(
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    b_weight,
    b_u,
    decay,
    p_state,
    o_v,
    m_v,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """The state at p_state becomes decay times itself and the sum of the rows' weighted keys times their updates."""
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        p_s = p_state + o_k[:, None] * DV + o_v[None, :]
        m_s = (o_k < SIZE)[:, None] & m_v[None, :]
        b_k = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP).to(tl.float32) * b_weight[:, None]
        b_state = tl.load(p_s, mask=m_s, other=0.0) * decay + tl.dot(tl.trans(b_k), b_u, input_precision=DOT)
        tl.store(p_s, b_state, mask=m_s)


@triton.jit
def rates_of(p_a, p_b, s_a, s_b, rows, m_rows, log_decay, bias, scale):
    """g and beta of rows of one head, as of `gate_of` and `beta_of`."""
    b_a = tl.load(p_a + rows * s_a, mask=m_rows, other=0.0)
    return gate_of(b_a, m_rows, log_decay, bias), beta_of(
        tl.load(p_b + rows * s_b, mask=m_rows, other=0.0), m_rows, scale
    )


@triton.jit
def gate_of(b_a, m_rows, log_decay, bias):
    """g, the logarithm of the decay, of rows of one head; 0 where m_rows is false."""
    b_a = b_a.to(tl.float32) + bias
    softplus = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
    return tl.where(m_rows, -tl.exp(log_decay) * softplus, 0.0)


@triton.jit
def beta_of(b_b, m_rows, scale):
    """beta of rows of one head, rounded to b's dtype on its way; 0 where m_rows is false."""
    beta = (tl.sigmoid(b_b.to(tl.float32)).to(b_b.dtype).to(tl.float32) * scale).to(b_b.dtype).to(tl.float32)
    return tl.where(m_rows, beta, 0.0)


@triton.jit
def word_of(p_words, stride, rows, m_rows, block, BLOCK: tl.constexpr):
    """Ancestors of rows from a block's first node on, as bits."""
    return tl.load(p_words + rows * stride + ((block * BLOCK) >> 6), mask=m_rows, other=0) >> ((block * BLOCK) & 63)


@triton.jit
def seen_by(p_words, stride, rows, m_rows, block, BLOCK: tl.constexpr):
    """Nodes of a block that are ancestors of rows, or they themselves: [len(rows), BLOCK] bool."""
    b_word = word_of(p_words, stride, rows, m_rows, block, BLOCK)
    return ((b_word[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1) != 0


@triton.jit
def decay_of(b_seen, b_sum, b_other):
    """e^(G_i - G_j) where j is seen, else 0."""
    return tl.exp(tl.where(b_seen, b_sum[:, None] - b_other[None, :], float("-inf")))


@triton.jit
def gates_of(
    b_word,
    b_a,
    b_b,
    p_a,
    p_words,
    s_a,
    s_words,
    rows,
    m_rows,
    nodes,
    block,
    log_decay,
    bias,
    scale,
    BLOCK: tl.constexpr,
):
    """Of a block's nodes, with their words, a and b: which of them each sees, itself too, [BLOCK, BLOCK] bool, the sums
    of g over all that it sees, and the betas."""
    # zeros that lie as products do: what is added to them does, and is not moved before it meets a product
    b_zero = tl.dot(tl.zeros((BLOCK, 16), tl.float16), tl.zeros((16, BLOCK), tl.float16))
    o_n = tl.arange(0, BLOCK)
    b_seen = ((b_word[:, None] >> o_n[None, :]) & 1) != 0
    b_g = gate_of(b_a, m_rows, log_decay, bias)
    b_sum = tl.sum(tl.where(b_seen, b_g[None, :], b_zero), 1)
    for before in range(0, block):
        others = (before * BLOCK + o_n).to(tl.int64)
        m_others = others < nodes
        b_g = gate_of(tl.load(p_a + others * s_a, mask=m_others, other=0.0), m_others, log_decay, bias)
        b_there = seen_by(p_words, s_words, rows, m_rows, before, BLOCK)
        b_sum += tl.sum(tl.where(b_there, b_g[None, :], b_zero), 1)
    return b_seen, b_sum, beta_of(b_b, m_rows, scale)


@triton.jit
def _inverse(b_system, b_level, o_n, DOT: tl.constexpr):
    """(1 + system)^-1, where system [N, N] has entries from nodes of a lower level only: of every two levels, every
    four, and so on. With inverses X of the lower and Y of the upper half of so many levels, and entries E of the upper
    nodes from the lower, the whole's inverse is X, Y and -Y E X."""
    b_row, b_column = b_level[:, None], b_level[None, :]
    b_across = ((b_row & 1) == 1) & (b_column == b_row - 1)
    b_inverse = tl.where(o_n[:, None] == o_n[None, :], 1.0, tl.where(b_across, -b_system, 0.0))
    bits = 1
    while (tl.max(b_level, 0) >> bits) > 0:
        b_across = (((b_row >> bits) & 1) == 1) & ((b_column >> bits) == (b_row >> bits) - 1)
        b_lower = times_small(tl.where(b_across, b_system, 0.0), b_inverse, DOT)
        b_inverse -= times_small(b_inverse, b_lower, DOT)
        bits += 1
    return b_inverse


BLOCK = 32
"""Nodes of a block. Tiles of 64 rows would be multiplied by warp groups on Hopper."""
WARPS, STEP = 4, 32
"""Warps of a program of both launches, and channels of keys that it takes at a time."""


@triton.jit(do_not_specialize=["nodes", "s_a_b", "s_b_b", "s_words_b", "s_words_n", "s_g_b"])
def _tree_inverse(
    p_mixed,
    p_a,
    p_b,
    p_decay,
    p_bias,
    p_words,
    p_g,
    p_inverse,
    nodes,
    scale,
    s_mixed_b,
    s_mixed_n,
    s_a_b,
    s_a_n,
    s_b_b,
    s_b_n,
    s_words_b,
    s_words_n,
    s_g_b,
    s_g_n,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    head, block = tl.program_id(0), tl.program_id(1) if BLOCKS > 1 else 0
    row = tl.program_id(2).to(tl.int64)
    first = (HK + head // (HV // HK)) * DK
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_words += row * s_words_b
    o_n = tl.arange(0, BLOCK)
    rows = (block * BLOCK + o_n).to(tl.int64)
    m_rows = rows < nodes
    b_word = word_of(p_words, s_words_n, rows, m_rows, block, BLOCK)
    b_a = tl.load(p_a + rows * s_a_n, mask=m_rows, other=0.0)
    b_b = tl.load(p_b + row * s_b_b + head + rows * s_b_n, mask=m_rows, other=0.0)
    b_seen, b_sum, b_beta = gates_of(
        *(b_word, b_a, b_b, p_a, p_words, s_a_n, s_words_n, rows, m_rows, nodes, block, log_decay, bias, scale, BLOCK)
    )
    b_above = b_seen & (o_n[:, None] != o_n[None, :])
    b_level = tl.sum(b_above.to(tl.int32), 1)
    b_decay = decay_of(b_above, b_sum, b_sum) * b_beta[:, None]
    wait_for_previous(PDL)
    b_system = tl.zeros((BLOCK, BLOCK), tl.float32)
    b_square = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, DK, STEP):
        b_k = keys_of(p_mixed, s_mixed_n, rows, m_rows, first + at, DK - at, STEP)
        b_square += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
        b_system += tl.dot(b_k, tl.trans(b_k), input_precision=DOT)
    tl.store(p_g + row * s_g_b + head + rows * s_g_n, b_sum, mask=m_rows)
    b_unit = tl.rsqrt(b_square + TINY)
    b_system = b_system * b_decay * b_unit[:, None] * b_unit[None, :]
    p_inverse += ((row * HV + head) * BLOCKS + block) * (BLOCK * BLOCK)
    tl.store(p_inverse + o_n[:, None] * BLOCK + o_n[None, :], _inverse(b_system, b_level, o_n, DOT))


@triton.jit(do_not_specialize=["nodes", "s_a_b", "s_b_b", "s_words_b", "s_words_n", "s_g_b"])
def _tree_updates(
    p_mixed,
    p_a,
    p_b,
    p_decay,
    p_bias,
    p_state,
    p_words,
    p_g,
    p_inverse,
    p_u,
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
    s_g_b,
    s_g_n,
    s_u_b,
    s_u_n,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    STEP: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    head, row, first_q, first_k, o_v, m_v = tile_of(HK, HV, DK, DV, DV_BLOCK)
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_b += row * s_b_b + head
    p_words += row * s_words_b
    p_g += row * s_g_b + head
    p_u += row * s_u_b + head * DV
    p_state += (row * HV + head) * (DK * DV)
    p_inverse += (row * HV + head) * (BLOCKS * BLOCK * BLOCK)
    o_n = tl.arange(0, BLOCK)
    for block in range(0, BLOCKS):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < nodes
        m_out = m_rows[:, None] & m_v[None, :]
        b_v = tl.load(
            p_mixed + rows[:, None] * s_mixed_n + (2 * HK * DK + head * DV + o_v)[None, :], mask=m_out, other=0.0
        ).to(tl.float32)
        b_word = word_of(p_words, s_words_n, rows, m_rows, block, BLOCK)
        b_a = tl.load(p_a + rows * s_a_n, mask=m_rows, other=0.0)
        b_b = tl.load(p_b + rows * s_b_n, mask=m_rows, other=0.0)
        b_read = tl.zeros((BLOCK, DV_BLOCK), tl.float32)
        b_asked = tl.zeros((BLOCK, DV_BLOCK), tl.float32)
        b_pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
        b_square_k = tl.zeros((BLOCK,), tl.float32)
        b_square_q = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, DK, STEP):
            o_k = at + tl.arange(0, STEP)
            b_state = tl.load(
                p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < DK)[:, None] & m_v[None, :], other=0.0
            )
            b_k = keys_of(p_mixed, s_mixed_n, rows, m_rows, first_k + at, DK - at, STEP)
            b_q = keys_of(p_mixed, s_mixed_n, rows, m_rows, first_q + at, DK - at, STEP)
            b_square_k += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
            b_square_q += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
            b_read += times_state(b_k, b_state, DOT, True)
            b_asked += times_state(b_q, b_state, DOT, False)
            b_pairs += tl.dot(b_q, tl.trans(b_k), input_precision=DOT)
        b_seen, b_sum, b_beta = gates_of(
            *(b_word, b_a, b_b, p_a, p_words, s_a_n, s_words_n, rows, m_rows, nodes, block, log_decay, bias, scale),
            BLOCK,
        )
        b_unit = tl.rsqrt(b_square_k + TINY)
        b_query = tl.rsqrt(b_square_q + TINY) / root
        b_grown = tl.exp(b_sum)
        b_decay = decay_of(b_seen, b_sum, b_sum) * b_unit[None, :]
        b_wanted = b_v - (b_grown * b_unit)[:, None] * b_read
        b_pairs *= b_decay * b_query[:, None]
        b_out = (b_grown * b_query)[:, None] * b_asked
        if block == 0:
            wait_for_previous(PDL)
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            m_others = others < nodes
            b_there = seen_by(p_words, s_words_n, rows, m_rows, before, BLOCK)
            b_decay = decay_of(b_there, b_sum, tl.load(p_g + others * s_g_n, mask=m_others, other=0.0))
            b_decay *= scale_of(p_mixed, s_mixed_n, others, m_others, first_k, DK, STEP)[None, :]
            u_other = tl.load(
                p_u + others[:, None] * s_u_n + o_v[None, :], mask=m_others[:, None] & m_v[None, :], other=0.0
            )
            b_pulls = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, others, m_others, first_k, DK, STEP, DOT)
            b_wanted -= times(b_pulls * b_decay * b_unit[:, None], u_other, DOT, True)
            b_reads = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, others, m_others, first_k, DK, STEP, DOT)
            b_out += times(b_reads * b_decay * b_query[:, None], u_other, DOT, False)
        b_inverse = tl.load(p_inverse + (block * BLOCK + o_n)[:, None] * BLOCK + o_n[None, :])
        b_u = times(b_inverse, b_wanted * b_beta[:, None], DOT, True)
        tl.store(p_u + rows[:, None] * s_u_n + o_v[None, :], b_u, mask=m_out)
        b_out += times(b_pairs, b_u, DOT, False)
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
    blocks, heads = triton.cdiv(nodes, BLOCK), sizes["HV"]
    inverse = torch.empty(batch, heads, blocks, BLOCK, BLOCK, dtype=torch.float32, device=mixed.device)
    out = mixed.new_empty(batch, nodes, heads, sizes["DV"])
    given, scales = (mixed, a, b, words, gates), (rates.log_decay, rates.bias)
    options = {name: sizes[name] for name in ("HK", "HV", "DK", "DOT")} | {"BLOCK": BLOCK, "BLOCKS": blocks}
    options |= {"STEP": min(STEP, max(16, triton.next_power_of_2(sizes["DK"]))), "num_warps": WARPS, "num_stages": 1}
    options |= dependent(mixed.device)
    _tree_inverse[(heads, blocks, batch)](
        *(mixed, a, b, *scales, words, gates, inverse), *(nodes, rates.scale, *strides(2, *given)), **options
    )
    _tree_updates[(heads * triton.cdiv(sizes["DV"], sizes["DV_BLOCK"]), batch)](
        *(mixed, a, b, *scales, state, words, gates, inverse, updates, out),
        *(nodes, rates.scale, sizes["DK"] ** 0.5, *strides(2, *given, updates)),
        **options,
        DV=sizes["DV"],
        DV_BLOCK=sizes["DV_BLOCK"],
    )
    return out
