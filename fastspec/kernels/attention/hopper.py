"""Tree attention over a long prefix on Hopper, at the speed of its tensor cores: warps that load, and two groups of
warps that compute.

Names are those of tree.py. A tile has two halves of BLOCK_M matrix rows, each with a group of four warps; one more warp
brings the full blocks of the prefix through tensor descriptors (a line is a slot, so a cache of any strides that are
multiples of a slot's will do), and both halves read them from shared memory. Within a half the sums of the block before
run while the softmax of this one is taken. What is masked, the end of the prefix and the tail, goes to the last program
of a tile, whose halves load it by pointers: slots that nobody sees may hold anything, and 0 * nan is nan.

The division of work is that of Shah et al., FlashAttention-3 (2024), without its turns between the groups; Triton alone
waits for a block's scores before it does anything else. Gluon has no interpreter: this kernel is tested on the GPU
alone, tree.py is its reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastspec.kernels.launch import dependent, is_hopper

BLOCK_M, BLOCK_N, STAGES = 64, 128, 2  # of a half; registers and shared memory hold no more
TILE = 2 * BLOCK_M
MIN_BLOCKS = 2  # of a share
MASKED_COST = 3  # what a masked block takes, in the time of a full one
LONG = 8192  # slots from which this kernel is the faster one
SIZES = (128,)  # head sizes

# Triton has renamed them since 3.6.
load_lines = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_VARYING = ["nodes", "tail", "extent", "splits", "kv_heads", "r_kb", "r_kh", "r_vb", "r_vh", "s_wb", "s_wn"]


@gluon.jit
def _softmax(b_s, b_max, b_sum, scale2, MASKED: gl.constexpr):
    """Scores to weights, the new maximum (in units of log2), what the sums so far are worth by it, and the new sum."""
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale2)
    b_off = b_new
    if MASKED:  # a row that has seen nothing yet: -inf - -inf is not a number
        b_off = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale2 - b_off[:, None])
    b_keep = gl.exp2(b_max - b_off)
    return b_p, b_new, b_keep, b_sum * b_keep + gl.sum(b_p, 1)


@gluon.jit
def places(d_k, d_v, dtype: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for STAGES blocks of keys and of values, and their barriers: the producer fills a place, and both
    halves free it."""
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], d_k.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], d_v.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    return k_smem, v_smem, k_full, k_free, v_full, v_free


@gluon.jit
def keep_queries(q_smem, p_q, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP: gl.constexpr):
    """Bring the queries of both halves of a tile into shared memory."""
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_line = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LINES))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LINES))
    for i in gl.static_range(2):
        o_m = i_tile * (2 * BLOCK_M) + i * BLOCK_M + o_line
        o_q = (o_m // GROUP).to(gl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(gl.int64) * s_qh
        b_q = gl.load(
            p_q + i_row.to(gl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=(o_m < rows)[:, None], other=0.0
        )
        q_smem.index(i).store(b_q)


@gluon.jit
def produce(d_k, d_v, blocks, k_line, v_line, count):
    """Bring `count` blocks, each as soon as both halves have left its place."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = blocks
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    BYTES: gl.constexpr = BLOCK_N * k_smem.shape[2] * 2
    for block in range(count):
        stage, phase = block % STAGES, block // STAGES & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BYTES)
        _load_block(d_k, [k_line + block * BLOCK_N, 0], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BYTES)
        _load_block(d_v, [v_line + block * BLOCK_N, 0], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _half(
    HALF: gl.constexpr,
    q_smem,
    blocks,
    pointers,
    numbers,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    CHAIN: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One half of a tile: `count` full blocks that the producer brings, then `masked` blocks that it loads itself.
    Pointers are those of the program's pair (p_out, p_words: of its row). To a chain's tile the `passed` slots of the
    tail before its first node are prefix."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = blocks
    p_k, p_v, p_out, p_part, p_lse, p_words = pointers
    scale2, count, masked, prefix, width, passed, i_tile, i_split, i_head, nodes, splits, s_on, s_wn = numbers
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = q_smem.dtype
    b_q = q_smem.index(HALF)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    b_acc = gl.zeros([BLOCK_M, D], gl.float32, SUMS)
    b_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    b_sum = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))

    if count > 0:
        mbarrier.wait(k_full.index(0), 0)
        b_s = mma(b_q, k_smem.index(0).permute((1, 0)), zero, use_acc=False)
        mbarrier.arrive(k_free.index(0), count=1)
        b_p, b_max, b_keep, b_sum = _softmax(b_s, b_max, b_sum, scale2, False)
        b_w = gl.convert_layout(b_p.to(dtype), WEIGHTS)
        for block in range(1, count):
            stage, before = block % STAGES, (block - 1) % STAGES
            mbarrier.wait(k_full.index(stage), block // STAGES & 1)
            b_s = mma(b_q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), (block - 1) // STAGES & 1)
            b_acc = mma(b_w, v_smem.index(before), b_acc, is_async=True)
            b_s = mma_wait(1, deps=(b_s,))  # the scores are there, the sums of the block before go on
            mbarrier.arrive(k_free.index(stage), count=1)
            b_p, b_max, b_keep, b_sum = _softmax(b_s, b_max, b_sum, scale2, False)
            b_next = gl.convert_layout(b_p.to(dtype), WEIGHTS)
            b_acc = mma_wait(0, deps=(b_acc,))
            mbarrier.arrive(v_free.index(before), count=1)
            b_acc = b_acc * gl.convert_layout(b_keep, ROWS)[:, None]
            b_w = b_next
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
        b_acc = mma(b_w, v_smem.index(before), b_acc)
        mbarrier.arrive(v_free.index(before), count=1)

    first = i_tile * (2 * BLOCK_M) + HALF * BLOCK_M
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    o_node = (first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))) // GROUP
    m_node = o_node < nodes
    o_slot = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LINES))
    if masked > 0:  # each half into a place of its own, once both have left it
        uses = (count - HALF + STAGES - 1) // STAGES
        mbarrier.wait(k_free.index(HALF), (uses - 1) & 1)
        mbarrier.wait(v_free.index(HALF), (uses - 1) & 1)
    full = prefix // BLOCK_N
    ragged = (prefix % BLOCK_N + BLOCK_N - 1) // BLOCK_N
    for block in range(masked):
        turn = block - ragged  # -1: the end of the prefix; then the tail
        start = gl.where(turn < 0, full * BLOCK_N, prefix + turn * BLOCK_N)
        seen = gl.where(turn < 0, prefix, prefix + width) - start
        m_line = (o_slot < seen)[:, None]
        load_lines(k_smem.index(HALF), p_k + start.to(gl.int64) * S_K + (o_slot[:, None] * S_K + o_d[None, :]), m_line)
        async_copy.commit_group()
        load_lines(v_smem.index(HALF), p_v + start.to(gl.int64) * S_V + (o_slot[:, None] * S_V + o_d[None, :]), m_line)
        async_copy.commit_group()
        if CHAIN:
            m_tail = turn * BLOCK_N + o_n[None, :] + passed <= o_node[:, None]
        else:
            b_bits = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, SCORES)
            for part in gl.static_range(BLOCK_N // 32):
                o_bit = turn * BLOCK_N + part * 32
                word = (
                    gl.maximum(gl.minimum(o_bit, width - 1), 0) >> 6
                )  # outside the tail any word will do: other masks decide
                b_word = gl.load(p_words + o_node.to(gl.int64) * s_wn + word, mask=m_node, other=0)
                b_bits = gl.where(
                    (o_n // 32 == part)[None, :], (b_word >> (o_bit & 63).to(gl.int64)).to(gl.int32)[:, None], b_bits
                )
            m_tail = ((b_bits >> (o_n % 32)[None, :]) & 1) == 1
        async_copy.wait_group(1)
        fence()
        b_s = mma(b_q, k_smem.index(HALF).permute((1, 0)), zero, use_acc=False)
        b_s = gl.where((o_n < seen)[None, :] & ((turn < 0) | m_tail), b_s, float("-inf"))
        b_p, b_max, b_keep, b_sum = _softmax(b_s, b_max, b_sum, scale2, True)
        b_acc = b_acc * gl.convert_layout(b_keep, ROWS)[:, None]
        async_copy.wait_group(0)
        fence()
        b_acc = mma(gl.convert_layout(b_p.to(dtype), WEIGHTS), v_smem.index(HALF), b_acc)

    b_max, b_sum = gl.convert_layout(b_max, ROWS), gl.convert_layout(b_sum, ROWS)
    b_total = gl.where(
        b_sum > 0.0, b_sum, 1.0
    )  # nothing seen: the sum is zero and stays so, its logarithm -inf through the maximum
    b_acc = b_acc / b_total[:, None]
    o_m = first + gl.arange(0, BLOCK_M, ROWS)
    o_c = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    m_m = o_m < nodes * GROUP
    if SPLIT:
        o_part = o_m.to(gl.int64) * splits + i_split
        gl.store(p_part + o_part[:, None] * D + o_c[None, :], b_acc, mask=m_m[:, None])
        gl.store(p_lse + o_part, b_max + gl.log2(b_total), mask=m_m)
    else:
        o_out = (o_m // GROUP).to(gl.int64) * s_on + (i_head * GROUP + o_m % GROUP) * D
        gl.store(p_out + o_out[:, None] + o_c[None, :], b_acc.to(dtype), mask=m_m[:, None])


@gluon.jit(do_not_specialize=_VARYING)
def _hopper_kernel(
    p_q,
    p_k,
    p_v,
    d_k,
    d_v,
    p_out,
    p_part,
    p_lse,
    p_prefix,
    p_words,
    scale2,
    nodes,
    tail,
    extent,
    splits,
    kv_heads,
    r_kb,
    r_kh,
    r_vb,
    r_vh,
    s_qb,
    s_qn,
    s_qh,
    s_ob,
    s_on,
    s_p,
    s_wb,
    s_wn,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    MASKED_COST: gl.constexpr,
    CHAIN: gl.constexpr,
    SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = p_q.dtype.element_ty
    i_tile, i_split, i_pair = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if CHAIN:  # the tiles that have the most to do first
        i_tile = gl.num_programs(0) - 1 - i_tile
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    prefix = gl.minimum(gl.load(p_prefix + i_row.to(gl.int64) * s_p), extent).to(gl.int32)
    width = gl.minimum(tail, extent - prefix)
    if CHAIN:  # nothing behind the tile's last node is seen
        width = gl.minimum(width, (gl.minimum((i_tile + 1) * (2 * BLOCK_M), rows) - 1) // GROUP + 1)
    STEP: gl.constexpr = 2 * BLOCK_M if CHAIN else 0
    passed = gl.minimum(
        i_tile * STEP // GROUP, width
    )  # of a chain all rows of the tile see what lies before its first node
    prefix, width = prefix + passed, width - passed
    full = prefix // BLOCK_N
    masked = (prefix % BLOCK_N + BLOCK_N - 1) // BLOCK_N + (width + BLOCK_N - 1) // BLOCK_N
    active = gl.maximum(gl.minimum((full + masked + MIN_BLOCKS - 1) // MIN_BLOCKS, splits), 1)
    p_part += i_pair.to(gl.int64) * rows * splits * D
    p_lse += i_pair.to(gl.int64) * rows * splits
    if SPLIT and i_split >= active:
        o_m = i_tile * (2 * BLOCK_M) + gl.arange(0, 2 * BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(
            p_lse + o_m.to(gl.int64) * splits + i_split,
            gl.full_like(o_m, float("-inf"), dtype=gl.float32),
            mask=o_m < rows,
        )
        return
    # The last program has the masked blocks, and fewer others for them.
    cost = full + MASKED_COST * masked
    first, last = gl.minimum(cost * i_split // active, full), gl.minimum(cost * (i_split + 1) // active, full)
    count = last - first
    masked = gl.where(i_split == active - 1, masked, 0)

    q_smem = gl.allocate_shared_memory(
        dtype, [2, BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    )
    blocks = places(d_k, d_v, dtype, BLOCK_N, D, STAGES)
    keep_queries(q_smem, p_q, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP)
    fence()
    k_line, v_line = i_row * r_kb + i_head * r_kh, i_row * r_vb + i_head * r_vh
    p_k += k_line.to(gl.int64) * S_K
    p_v += v_line.to(gl.int64) * S_V
    p_out += i_row.to(gl.int64) * s_ob
    p_words += i_row.to(gl.int64) * s_wb
    pointers = p_k, p_v, p_out, p_part, p_lse, p_words
    numbers = scale2, count, masked, prefix, width, passed, i_tile, i_split, i_head, nodes, splits, s_on, s_wn
    gl.warp_specialize(
        [
            (_half, (0, q_smem, blocks, pointers, numbers, S_K, S_V, GROUP, CHAIN, SPLIT)),
            (_half, (1, q_smem, blocks, pointers, numbers, S_K, S_V, GROUP, CHAIN, SPLIT)),
            (produce, (d_k, d_v, blocks, k_line + first * BLOCK_N, v_line + first * BLOCK_N, count)),
        ],
        [4, 1],
        [240, 24],
    )


def fits(q: Tensor, k: Tensor, v: Tensor, rows: int, extent: int, least: int = LONG) -> bool:
    """True where this kernel takes q [B, N, Hq, D], k, v [B, Hkv, C, D] with so many matrix rows and slots, `least` of
    these: by device, dtype and strides.

    Of spans, sinks and caps it knows nothing: attention with any of these is the kernel's of tree.py, and is not to be
    asked for here.
    """
    if q.element_size() != 2 or q.shape[3] not in SIZES or rows <= BLOCK_M or extent < least or not is_hopper(q.device):
        return False
    return all(
        (x.data_ptr() | x.stride(2) * 2) % 16 == 0 and x.stride(0) % x.stride(2) == x.stride(1) % x.stride(2) == 0
        for x in (k, v)
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    part: Tensor,
    lse: Tensor,
    prefix: Tensor,
    words: Tensor | None,
    tail: int,
    extent: int,
    splits: int,
    scale2: float,
) -> None:
    """Fill part and lse with `splits` parts, or out where there is one; operands as `fits` takes them, words None for a
    chain."""
    batch, nodes, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    s_wb, s_wn = words.stride()[:2] if words is not None else (0, 0)
    (r_kb, r_kh), (r_vb, r_vh) = ((x.stride(0) // x.stride(2), x.stride(1) // x.stride(2)) for x in (k, v))
    _hopper_kernel[(-(-nodes * group // TILE), splits, batch * kv_heads)](
        *(q, k, v, descriptor(k), descriptor(v), out, part, lse, prefix, prefix if words is None else words),
        *(scale2, nodes, tail, extent, splits, kv_heads, r_kb, r_kh, r_vb, r_vh, *q.stride()[:3], *out.stride()[:2]),
        *(prefix.stride(0), s_wb, s_wn),
        S_K=k.stride(2),
        S_V=v.stride(2),
        GROUP=group,
        D=size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        MIN_BLOCKS=MIN_BLOCKS,
        MASKED_COST=MASKED_COST,
        CHAIN=words is None,
        SPLIT=splits > 1,
        num_warps=4,
        **dependent(q.device),
    )


def descriptor(x: Tensor) -> Any:
    """x [B, Hkv, C, D] as lines of a slot each."""
    batch, heads, capacity, size = x.shape
    slots = ((batch - 1) * x.stride(0) + (heads - 1) * x.stride(1)) // x.stride(2) + capacity
    block, dtype = [BLOCK_N, size], gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(
        x, [slots, size], [x.stride(2), 1], block, gl.NVMMASharedLayout.get_default_for(block, dtype)
    )
