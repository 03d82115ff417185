"""Sums of ordered attention on Hopper, which both kernels of ordered_hopper.py take alike.

Names are those of ordered_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from fastspec.kernels.attention import hopper
from fastspec.kernels.attention.hopper import BLOCK_N, load_lines
from fastspec.kernels.attention.parts import EMPTY, GRID, run_start

ONES = 8
"""Columns of ones that weights are added up by: the fewest of a product."""
SCORES, SUMS, TOTALS = (
    gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]))
    for columns in (BLOCK_N, hopper.SIZES[0], ONES)
)
"""Layouts of scores, sums and sums of weights, of four warps."""
ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
WEIGHTS, COUNTED = (
    gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=sums.value, k_width=2)) for sums in (SUMS, TOTALS)
)
"""Of weights as an operand of the two."""


@gluon.jit
def shared_memory(
    p_q, d_k, d_v, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP: gl.constexpr, sizes: gl.constexpr
):
    """Shared memory of a program: the tile's queries, ones, sums of the runs that have ended, and blocks."""
    BLOCK_M: gl.constexpr = sizes[0]
    BLOCK_N: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    STAGES: gl.constexpr = sizes[3]
    ONES: gl.constexpr = sizes[4]
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_smem = gl.allocate_shared_memory(
        dtype, [2, BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    )
    blocks = hopper.places(d_k, d_v, dtype, BLOCK_N, D, STAGES)
    text = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, D], gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))
    ones = gl.allocate_shared_memory(
        dtype, [ONES, BLOCK_N], gl.NVMMASharedLayout.get_default_for([ONES, BLOCK_N], dtype)
    )
    hopper.keep_queries(q_smem, p_q, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP)
    ones.store(gl.full([ONES, BLOCK_N], 1.0, dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    fence()
    return q_smem, ones, text, blocks


@gluon.jit
def _weigh(b_s, b_max, scale2, m_seen, MASKED: gl.constexpr):
    """Scores to weights, the new maximum, and what sums so far are worth by it."""
    b_t = gl.fma(b_s, gl.full_like(b_s, 1.0) * scale2, gl.full_like(b_s, GRID))
    if MASKED:
        b_t = gl.where(m_seen, b_t, float("-inf"))
    b_new = gl.maximum(b_max, gl.ceil(gl.max(b_t, 1) - GRID))
    return gl.exp2(b_t - (b_new + GRID)[:, None]), b_new, gl.exp2(b_max - b_new)


@gluon.jit
def _anew(turn):
    """Zero, which the compiler does not know of a loop's turn: offsets with it are computed in the loop, and take no
    registers from it."""
    return turn >> 30


@gluon.jit
def empty(M: gl.constexpr, D: gl.constexpr, ONES: gl.constexpr):
    """Sums, maxima and sums of weights of no key."""
    b_max = gl.full([M], EMPTY, gl.float32, gl.SliceLayout(1, SCORES))
    return gl.zeros([M, D], gl.float32, SUMS), b_max, gl.zeros([M, ONES], gl.float32, TOTALS)


@gluon.jit
def by_rows(b_max, b_sum):
    """Maxima, and sums of weights of one column, laid as the rows of the sums."""
    return gl.convert_layout(b_max, ROWS), gl.convert_layout(gl.max(b_sum, 1), ROWS)


@gluon.jit
def keep(place, at, turn, b_acc, b_max, b_sum):
    """Write sums, maxima and sums of weights to a place of the pair's."""
    p_part, p_state, first, rows = place
    BLOCK_M: gl.constexpr = b_acc.shape[0]
    D: gl.constexpr = b_acc.shape[1]
    o_m = first + gl.arange(0, BLOCK_M, ROWS) + _anew(turn)
    o_c = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    o_place = at.to(gl.int64) * rows
    gl.store(p_part + o_place * D + (o_m[:, None] * D + o_c[None, :]), b_acc, mask=(o_m < rows)[:, None])
    p_state += 2 * o_place
    gl.store(p_state + o_m, b_max, mask=o_m < rows)
    gl.store(p_state + rows + o_m, b_sum, mask=o_m < rows)


@gluon.jit
def _add_run(b_text, b_acc, b_max, b_sum, b_most, b_weights):
    """`ordered_sums.added` of the runs before, whose sums are kept in shared memory, and of one more."""
    b_new = gl.maximum(b_most, b_max)
    b_1, b_2 = gl.exp2(b_most - b_new), gl.exp2(b_max - b_new)
    b_text.store(b_text.load(SUMS) * b_1[:, None] + b_acc * b_2[:, None])
    return b_new, b_weights * b_1 + b_sum * b_2


@gluon.jit
def end_run(b_text, place, number, lead, b_acc, b_max, b_sum, b_most, b_weights, SHARED: gl.constexpr):
    """Add a run to those before it, or write it where it is none of the first `lead`."""
    b_max, b_sum = by_rows(b_max, b_sum)
    if SHARED:
        if number < lead:
            b_most, b_weights = _add_run(b_text, b_acc, b_max, b_sum, b_most, b_weights)
        else:
            keep(place, number - lead + 1, number, b_acc, b_max, b_sum)
    else:
        b_most, b_weights = _add_run(b_text, b_acc, b_max, b_sum, b_most, b_weights)
    return b_most, b_weights


@gluon.jit
def whole_blocks(
    HALF: gl.constexpr, shared, place, first, count, number, lead, scale2, SHARED: gl.constexpr, FINE: gl.constexpr
):
    """A half's sums with `count` full blocks from position `first` on, the begin of run `number`: of the run that they
    end in, which is told as well, and of those before it, which ended. A block's sums run while the weights of the next
    are taken, be it of the next run."""
    q_smem, ones, text, blocks = shared
    k_smem, v_smem, k_full, k_free, v_full, v_free = blocks
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    dtype: gl.constexpr = q_smem.dtype
    b_q, b_text = q_smem.index(HALF), text.index(HALF)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    b_acc, b_max, b_sum = empty(BLOCK_M, q_smem.shape[2], ones.shape[0])
    b_text.store(b_acc)
    b_most = gl.full([BLOCK_M], EMPTY, gl.float32, ROWS)
    b_weights = gl.zeros([BLOCK_M], gl.float32, ROWS)
    if count > 0:
        close = run_start(number + 1, FINE)
        mbarrier.wait(k_full.index(0), 0)
        b_s = mma(b_q, k_smem.index(0).permute((1, 0)), zero, use_acc=False)
        mbarrier.arrive(k_free.index(0), count=1)
        b_p, b_max, b_keep = _weigh(b_s, b_max, scale2, b_s, False)
        b_w = gl.convert_layout(b_p.to(dtype), WEIGHTS)
        for block in range(1, count):
            stage, before = block % STAGES, (block - 1) % STAGES
            mbarrier.wait(k_full.index(stage), block // STAGES & 1)
            b_s = mma(b_q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), (block - 1) // STAGES & 1)
            b_acc = mma(b_w, v_smem.index(before), b_acc, is_async=True)
            b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum, is_async=True)
            b_s = mma_wait(2, deps=(b_s,))  # the scores are there, the sums of the block before go on
            mbarrier.arrive(k_free.index(stage), count=1)
            begins = first + block * BLOCK_N == close
            b_p, b_new, b_keep = _weigh(b_s, gl.where(begins, EMPTY, b_max), scale2, b_s, False)
            b_next = gl.convert_layout(b_p.to(dtype), WEIGHTS)
            # They begin with other waits: ptxas would move what both begin with before the weights.
            if begins:
                b_run = mma_wait(1, deps=(b_acc,))
                b_worth = mma_wait(0, deps=(b_sum,))
                mbarrier.arrive(v_free.index(before), count=1)
                b_most, b_weights = end_run(
                    b_text, place, number, lead, b_run, b_max, b_worth, b_most, b_weights, SHARED
                )
                b_run, _none, b_worth = empty(BLOCK_M, q_smem.shape[2], ones.shape[0])
                number += 1
                close = run_start(number + 1, FINE)
            else:
                b_run, b_worth = mma_wait(0, deps=(b_acc, b_sum))
                mbarrier.arrive(v_free.index(before), count=1)
                b_run = b_run * gl.convert_layout(b_keep, ROWS)[:, None]
                b_worth = b_worth * gl.convert_layout(b_keep, gl.SliceLayout(1, TOTALS))[:, None]
            b_acc, b_sum, b_max, b_w = b_run, b_worth, b_new, b_next
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
        b_acc = mma(b_w, v_smem.index(before), b_acc)
        b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum)
        mbarrier.arrive(v_free.index(before), count=1)
    return b_acc, b_max, b_sum, b_most, b_weights, number


@gluon.jit
def block_at(
    HALF: gl.constexpr,
    shared,
    start,
    end,
    b_last,
    p_k,
    p_v,
    b_acc,
    b_max,
    b_sum,
    scale2,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
):
    """A run's sums with the block at `start`, of which nothing is read from `end` on and a row sees the keys up to
    b_last: by pointers, into the half's own place."""
    q_smem, ones, _text, blocks = shared
    k_own, v_own, b_q = blocks[0].index(HALF), blocks[1].index(HALF), q_smem.index(HALF)
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = k_own.shape[0]
    D: gl.constexpr = k_own.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    o_slot = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES)) + _anew(start)
    o_d = gl.arange(0, D, gl.SliceLayout(0, LINES))
    o_key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES)) + _anew(start)
    m_line = (start + o_slot < end)[:, None]
    o_first = start.to(gl.int64)
    load_lines(k_own, p_k + o_first * S_K + (o_slot[:, None] * S_K + o_d[None, :]), m_line)
    async_copy.commit_group()
    load_lines(v_own, p_v + o_first * S_V + (o_slot[:, None] * S_V + o_d[None, :]), m_line)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence()
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    b_s = mma(b_q, k_own.permute((1, 0)), zero, use_acc=False)
    b_p, b_max, b_keep = _weigh(b_s, b_max, scale2, o_key[None, :] <= b_last[:, None], True)
    b_w = gl.convert_layout(b_p.to(q_smem.dtype), WEIGHTS)
    b_acc = b_acc * gl.convert_layout(b_keep, ROWS)[:, None]
    b_sum = b_sum * gl.convert_layout(b_keep, gl.SliceLayout(1, TOTALS))[:, None]
    b_acc = mma(b_w, v_own, b_acc)
    b_sum = mma(gl.convert_layout(b_w, COUNTED), ones.permute((1, 0)), b_sum)
    return b_acc, b_max, b_sum


@gluon.jit
def wait_for_own(HALF: gl.constexpr, blocks, count):
    """Wait until both halves have left the place that a half then has to itself, `count` blocks having been brought."""
    k_smem, _v_smem, _k_full, k_free, _v_full, v_free = blocks
    STAGES: gl.constexpr = k_smem.shape[0]
    uses = (count - HALF + STAGES - 1) // STAGES
    mbarrier.wait(k_free.index(HALF), (uses - 1) & 1)
    mbarrier.wait(v_free.index(HALF), (uses - 1) & 1)
