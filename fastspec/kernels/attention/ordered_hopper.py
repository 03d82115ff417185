"""The runs of `ordered.py` on Hopper, at the speed of its tensor cores: warps that load, and two groups of warps that
compute, as in hopper.py.

Names and the order of sums are those of ordered.py. A tile has two halves of BLOCK_M matrix rows, each with a group of
four warps; one more warp brings the full blocks of a text through tensor descriptors, and both halves read them from
shared memory. The end of a text that is no full block each half loads by pointers: slots behind it may hold anything.
In bf16 alone, where a maximum may be raised at every block. Gluon has no interpreter: tested on the GPU alone, beside
`_runs` of ordered_tree.py, to the bit.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from fastspec.kernels.attention import hopper
from fastspec.kernels.attention.hopper import BLOCK_M, BLOCK_N, STAGES, TILE, descriptor, load_lines, produce
from fastspec.kernels.attention.ordered_sums import OrderedPass
from fastspec.kernels.attention.parts import EMPTY, GRID, run_of, run_start
from fastspec.kernels.launch import dependent

ONES = 8
"""Columns of ones that weights are added up by: the fewest of a product."""


@gluon.jit
def _weigh(b_s, b_max, scale2, m_seen, MASKED: gl.constexpr):
    """Scores to weights, the new maximum, and what sums so far are worth by it."""
    b_t = gl.fma(b_s, gl.full_like(b_s, 1.0) * scale2, gl.full_like(b_s, GRID))
    if MASKED:
        b_t = gl.where(m_seen, b_t, float("-inf"))
    b_new = gl.maximum(b_max, gl.ceil(gl.max(b_t, 1) - GRID))
    return gl.exp2(b_t - (b_new + GRID)[:, None]), b_new, gl.exp2(b_max - b_new)


@gluon.jit
def _half(
    HALF: gl.constexpr,
    q_smem,
    ones,
    blocks,
    pointers,
    numbers,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    FOLD: gl.constexpr,
    FINE: gl.constexpr,
):
    """One half of a tile: the runs from `run` on, before `past`, of a text that ends at `end`, of which the producer
    brings full blocks. Pointers are those of the program's pair and first part."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = blocks
    p_k, p_v, p_part, p_state = pointers
    scale2, run, past, end, i_tile, rows = numbers
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    ONES: gl.constexpr = ones.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    TOTALS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ONES, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    COUNTED: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TOTALS, k_width=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = q_smem.dtype
    b_q = q_smem.index(HALF)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    b_acc = gl.zeros([BLOCK_M, D], gl.float32, SUMS)
    b_max = gl.full([BLOCK_M], EMPTY, gl.float32, gl.SliceLayout(1, SCORES))
    b_sum = gl.zeros([BLOCK_M, ONES], gl.float32, TOTALS)
    o_m = i_tile * (2 * BLOCK_M) + HALF * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
    o_c = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    m_m = o_m < rows
    p_sums = p_part + o_m.to(gl.int64)[:, None] * D + o_c[None, :]

    done, folded = 0, 0
    for number in range(run, past):
        stop = gl.minimum(end, run_start(number + 1, FINE))
        last = done + stop // BLOCK_N - run_start(number, FINE) // BLOCK_N
        if last > done:
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
            b_s = mma(b_q, k_smem.index(done % STAGES).permute((1, 0)), zero, use_acc=False)
            mbarrier.arrive(k_free.index(done % STAGES), count=1)
            b_p, b_max, b_keep = _weigh(b_s, b_max, scale2, b_s, False)
            b_w = gl.convert_layout(b_p.to(dtype), WEIGHTS)
            for block in range(done + 1, last):
                stage, before = block % STAGES, (block - 1) % STAGES
                mbarrier.wait(k_full.index(stage), block // STAGES & 1)
                b_s = mma(b_q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), (block - 1) // STAGES & 1)
                b_acc = mma(b_w, v_smem.index(before), b_acc, is_async=True)
                b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum, is_async=True)
                b_s = mma_wait(2, deps=(b_s,))  # the scores are there, the sums of the block before go on
                mbarrier.arrive(k_free.index(stage), count=1)
                b_p, b_max, b_keep = _weigh(b_s, b_max, scale2, b_s, False)
                b_next = gl.convert_layout(b_p.to(dtype), WEIGHTS)
                b_acc, b_sum = mma_wait(0, deps=(b_acc, b_sum))
                mbarrier.arrive(v_free.index(before), count=1)
                b_acc = b_acc * gl.convert_layout(b_keep, ROWS)[:, None]
                b_sum = b_sum * gl.convert_layout(b_keep, gl.SliceLayout(1, TOTALS))[:, None]
                b_w = b_next
            before = (last - 1) % STAGES
            mbarrier.wait(v_full.index(before), (last - 1) // STAGES & 1)
            b_acc = mma(b_w, v_smem.index(before), b_acc)
            b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum)
            mbarrier.arrive(v_free.index(before), count=1)
            done = last
        if FOLD:  # noqa: SIM102 - known when it is compiled
            if stop == run_start(number + 1, FINE):
                b_most, b_weights = gl.convert_layout(b_max, ROWS), gl.convert_layout(gl.max(b_sum, 1), ROWS)
                if folded > 0:
                    b_most2 = gl.load(p_state + o_m, mask=m_m, other=0.0)
                    b_new = gl.maximum(b_most2, b_most)
                    b_1, b_2 = gl.exp2(b_most2 - b_new), gl.exp2(b_most - b_new)
                    b_acc = gl.load(p_sums, mask=m_m[:, None], other=0.0) * b_1[:, None] + b_acc * b_2[:, None]
                    b_weights = gl.load(p_state + rows + o_m, mask=m_m, other=0.0) * b_1 + b_weights * b_2
                    b_most = b_new
                gl.store(p_sums, b_acc, mask=m_m[:, None])
                gl.store(p_state + o_m, b_most, mask=m_m)
                gl.store(p_state + rows + o_m, b_weights, mask=m_m)
                folded = 1
                b_acc = gl.zeros([BLOCK_M, D], gl.float32, SUMS)
                b_max = gl.full([BLOCK_M], EMPTY, gl.float32, gl.SliceLayout(1, SCORES))
                b_sum = gl.zeros([BLOCK_M, ONES], gl.float32, TOTALS)

    left = end % BLOCK_N if end < run_start(past, FINE) else 0
    if left > 0:  # each half into a place of its own, once both have left it
        uses = (done - HALF + STAGES - 1) // STAGES
        mbarrier.wait(k_free.index(HALF), (uses - 1) & 1)
        mbarrier.wait(v_free.index(HALF), (uses - 1) & 1)
        o_slot = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
        o_d = gl.arange(0, D, gl.SliceLayout(0, LINES))
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        m_line = (o_slot < left)[:, None]
        o_first = (end - left).to(gl.int64)
        load_lines(k_smem.index(HALF), p_k + o_first * S_K + (o_slot[:, None] * S_K + o_d[None, :]), m_line)
        async_copy.commit_group()
        load_lines(v_smem.index(HALF), p_v + o_first * S_V + (o_slot[:, None] * S_V + o_d[None, :]), m_line)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence()
        b_s = mma(b_q, k_smem.index(HALF).permute((1, 0)), zero, use_acc=False)
        b_p, b_max, b_keep = _weigh(b_s, b_max, scale2, (o_n < left)[None, :], True)
        b_w = gl.convert_layout(b_p.to(dtype), WEIGHTS)
        b_acc = b_acc * gl.convert_layout(b_keep, ROWS)[:, None]
        b_sum = b_sum * gl.convert_layout(b_keep, gl.SliceLayout(1, TOTALS))[:, None]
        b_acc = mma(b_w, v_smem.index(HALF), b_acc)
        b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum)
    if FOLD:  # behind the sum of the runs that have ended
        p_sums += rows.to(gl.int64) * D
        p_state += 2 * rows
    gl.store(p_sums, b_acc, mask=m_m[:, None])
    gl.store(p_state + o_m, gl.convert_layout(b_max, ROWS), mask=m_m)
    gl.store(p_state + rows + o_m, gl.convert_layout(gl.max(b_sum, 1), ROWS), mask=m_m)


@gluon.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads", "r_kb", "r_kh", "r_vb", "r_vh"])
def _hopper_runs(
    p_q,
    p_k,
    p_v,
    d_k,
    d_v,
    p_part,
    p_state,
    p_prefix,
    scale2,
    nodes,
    extent,
    runs,
    kv_heads,
    r_kb,
    r_kh,
    r_vb,
    r_vh,
    s_qb,
    s_qn,
    s_qh,
    s_p,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ONES: gl.constexpr,
    GRAIN: gl.constexpr,
    FOLD: gl.constexpr,
    FINE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`ordered_tree._runs` without spans and caps."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = p_q.dtype.element_ty
    i_tile, i_pair = gl.program_id(0), gl.program_id(1)
    run = runs - 1 - gl.program_id(2)  # the longest first
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    end = gl.minimum(gl.load(p_prefix + i_row.to(gl.int64) * s_p), extent).to(gl.int32) // GRAIN * GRAIN
    o_part = (i_pair * runs + run).to(gl.int64) * rows
    past = run + 1
    if FOLD:
        run = 0
        o_part = (i_pair * 2).to(gl.int64) * rows
        past = run_of(gl.maximum(end, 1) - 1, FINE) + 1
    if run_start(run, FINE) >= end:
        return
    first = run_start(run, FINE)
    count = gl.minimum(end, run_start(past, FINE)) // BLOCK_N - first // BLOCK_N

    q_smem = gl.allocate_shared_memory(
        dtype, [2, BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    )
    blocks = hopper.places(d_k, d_v, dtype, BLOCK_N, D, STAGES)
    ones = gl.allocate_shared_memory(
        dtype, [ONES, BLOCK_N], gl.NVMMASharedLayout.get_default_for([ONES, BLOCK_N], dtype)
    )
    hopper.keep_queries(q_smem, p_q, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP)
    ones.store(gl.full([ONES, BLOCK_N], 1.0, dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    fence()
    k_line, v_line = i_row * r_kb + i_head * r_kh, i_row * r_vb + i_head * r_vh
    p_k += k_line.to(gl.int64) * S_K
    p_v += v_line.to(gl.int64) * S_V
    p_part += o_part * D
    p_state += 2 * o_part
    pointers = p_k, p_v, p_part, p_state
    numbers = scale2, run, past, end, i_tile, rows
    gl.warp_specialize(
        [
            (_half, (0, q_smem, ones, blocks, pointers, numbers, S_K, S_V, FOLD, FINE)),
            (_half, (1, q_smem, ones, blocks, pointers, numbers, S_K, S_V, FOLD, FINE)),
            (produce, (d_k, d_v, blocks, k_line + first, v_line + first, count)),
        ],
        [4, 1],
        [240, 24],
    )


def fits(q: Tensor, k: Tensor, v: Tensor, rows: int, reach: int) -> bool:
    """`hopper.fits`, and bf16."""
    return q.dtype == torch.bfloat16 and hopper.fits(q, k, v, rows, reach)


def launch(given: OrderedPass, part: Tensor, state: Tensor, fold: bool) -> None:
    """Fill part [pairs, runs, rows, D] and state [pairs, runs, 2, rows], or with `fold` two parts of each, as `_runs`
    of ordered_tree.py does; operands as `fits` takes them."""
    q, k, v, prefix = given.q, given.k, given.v, given.tree.prefix
    nodes, kv_heads, size = q.shape[1], k.shape[1], q.shape[3]
    group = q.shape[2] // kv_heads
    (r_kb, r_kh), (r_vb, r_vh) = ((x.stride(0) // x.stride(2), x.stride(1) // x.stride(2)) for x in (k, v))
    _hopper_runs[(-(-nodes * group // TILE), len(q) * kv_heads, 1 if fold else given.runs)](
        q,
        k,
        v,
        descriptor(k),
        descriptor(v),
        part,
        state,
        prefix,
        given.scale2,
        nodes,
        given.extent,
        given.runs,
        kv_heads,
        r_kb,
        r_kh,
        r_vb,
        r_vh,
        *q.stride()[:3],
        prefix.stride(0),
        S_K=k.stride(2),
        S_V=v.stride(2),
        GROUP=group,
        D=size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        ONES=ONES,
        GRAIN=given.grain,
        FOLD=fold,
        FINE=given.fine,
        num_warps=4,
        **dependent(q.device),
    )
