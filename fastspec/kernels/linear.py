"""Linear layers of few rows, as fast as their weights can be read, in Triton.

R rows, K input channels, M output channels, T tiles of BM output channels, P programs. A tile [BM, BK] of the weights is the left operand
of the product, so that the tensor cores' 64 (or 16) lines are output channels and their narrow side is BR, the rows padded to a power of 2.
One row has a kernel of its own, linear_row.py, and so have a few rows on Hopper, hopper_linear.py.

The work is T times cdiv(K, BK) steps, one weight tile each, cut into P runs that differ by at most one step: whatever the shape, no
multiprocessor is left over in a last wave. A run that holds only part of a tile's depth writes its sum to scratch, and the last of the
tile's programs to arrive adds the parts up in their order, so the result does not depend on who that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from fastspec.kernels import swiglu as swiglu_kernel
from fastspec.kernels.hopper_linear import MOST_ROWS, HopperLaunch, hopper_launch_for, hopper_linear, takes
from fastspec.kernels.launch import dependent, padded, prefetch
from fastspec.kernels.linear_row import RowLaunch, linear_row, row_launch_for


@triton.jit
def _owner(step, base, extra):
    """The program whose run holds a step: the first `extra` runs have base + 1 steps, the others base."""
    long = extra * (base + 1)
    return tl.where(step < long, step // (base + 1), extra + (step - long) // base)


@triton.jit
def _weights(p_w, d_w, first, o_m, o_k, lines, K, stride_w, BK: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr):
    """Weights [BM, BK] from lines first + o_m, columns o_k on; past the last line they are any of them or zero, past K zero."""
    if TMA:
        b_w = d_w.load([first, o_k])
    else:
        o_rows = tl.minimum(first + o_m, lines - 1).to(tl.int64)
        o_cols = o_k + tl.arange(0, BK)
        p_tile = p_w + o_rows[:, None] * stride_w + o_cols[None, :]
        if EVEN_K:  # noqa: SIM108
            b_w = tl.load(p_tile)
        else:
            b_w = tl.load(p_tile, mask=o_cols[None, :] < K, other=0.0)
    return b_w


@triton.jit(do_not_specialize=["R", "base", "extra"])
def _linear_kernel(
    p_x, p_w, d_w, p_bias, p_out, p_parts, p_arrived, R, M, K, stride_x, stride_w, base, extra,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWIGLU: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out [R, M] of x [R, K] and w [M, K], or [2 * M, K] under SWIGLU; d_w is w's descriptor under TMA and None otherwise."""
    program = tl.program_id(0)
    begin = program * base + tl.minimum(program, extra)
    end = begin + base
    if program < extra:
        end += 1
    depth = tl.cdiv(K, BK)
    lines = M
    if SWIGLU:
        lines = 2 * M
    o_m = tl.arange(0, BM)
    o_r = tl.arange(0, BR)
    o_bk = tl.arange(0, BK)
    m_r = o_r < R
    o_part = o_m[:, None] * BR + o_r[None, :]
    GATES: tl.constexpr = 2 if SWIGLU else 1

    if PDL:
        gdc_launch_dependents()
        # no earlier kernel writes weights, so the first of them may be on their way while the one before is still running
        o_k = (begin % depth) * BK
        o_first = tl.minimum((begin // depth) * BM + o_m, M - 1).to(tl.int64)
        size = tl.minimum(tl.minimum(K - o_k, (end - begin) * BK) * (p_w.dtype.element_ty.primitive_bitwidth // 8), PREFETCH)
        prefetch(p_w + o_first * stride_w + o_k, size)
        if SWIGLU:
            prefetch(p_w + (o_first + M) * stride_w + o_k, size)
        gdc_wait()

    p_rows = p_x + o_r[:, None].to(tl.int64) * stride_x
    for tile in range(begin // depth, (end - 1) // depth + 1):
        from_step = tl.maximum(begin - tile * depth, 0)
        to_step = tl.minimum(end - tile * depth, depth)
        first = tile * BM
        b_sum = tl.zeros([BM, BR], tl.float32)
        b_up = tl.zeros([BM, BR], tl.float32)
        for step in tl.range(from_step, to_step, num_stages=STAGES):
            o_k = step * BK
            m_x = m_r[:, None]
            if not EVEN_K:
                m_x = m_x & ((o_k + o_bk) < K)[None, :]
            b_x = tl.load(p_rows + (o_k + o_bk)[None, :], mask=m_x, other=0.0)
            b_w = _weights(p_w, d_w, first, o_m, o_k, lines, K, stride_w, BK, EVEN_K, TMA)
            b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
            if SWIGLU:
                b_w = _weights(p_w, d_w, first + M, o_m, o_k, lines, K, stride_w, BK, EVEN_K, TMA)
                b_up = tl.dot(b_w, tl.trans(b_x), b_up, input_precision="ieee")

        done = to_step - from_step == depth
        if SPLIT:  # noqa: SIM102 (known when compiled; the other is not)
            if to_step - from_step < depth:
                # only a run's first tile can begin past step 0 (part 0), only its last can end before the last step (part 1)
                starts = (from_step == 0).to(tl.int32)
                p_part = p_parts + (program * 2 + starts).to(tl.int64) * (GATES * BM * BR)
                tl.store(p_part + o_part, b_sum)
                if SWIGLU:
                    tl.store(p_part + BM * BR + o_part, b_up)
                head = _owner(tile * depth, base, extra)
                tail = _owner(tile * depth + depth - 1, base, extra)
                tl.debug_barrier()  # every thread's part is written before one of them says so
                arrived = tl.atomic_add(p_arrived + tile, 1, sem="acq_rel", scope="gpu")
                done = arrived == tail - head
                if done:
                    tl.debug_barrier()
                    b_sum = tl.zeros([BM, BR], tl.float32)
                    b_up = tl.zeros([BM, BR], tl.float32)
                    for other in range(head, tail + 1):
                        starts = (other == head).to(tl.int32)
                        p_part = p_parts + (other * 2 + starts).to(tl.int64) * (GATES * BM * BR)
                        b_sum += tl.load(p_part + o_part, cache_modifier=".cg")
                        if SWIGLU:
                            b_up += tl.load(p_part + BM * BR + o_part, cache_modifier=".cg")
                    tl.store(p_arrived + tile, 0)  # for the next launch
        if done:
            o_i = first + o_m
            m_i = o_i < M
            if BIAS:
                b_sum += tl.load(p_bias + o_i, mask=m_i, other=0.0).to(tl.float32)[:, None]
            b_out = b_sum.to(p_out.dtype.element_ty)
            if SWIGLU:
                if BIAS:
                    b_up += tl.load(p_bias + M + o_i, mask=m_i, other=0.0).to(tl.float32)[:, None]
                b_gate = b_out.to(tl.float32)
                b_gate = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_out.dtype.element_ty)
                b_out = (b_gate.to(tl.float32) * b_up.to(p_out.dtype.element_ty).to(tl.float32)).to(p_out.dtype.element_ty)
            tl.store(p_out + o_r[None, :].to(tl.int64) * M + o_i[:, None], b_out, mask=m_i[:, None] & m_r[None, :])


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is launched: weight tiles of channels x depth; `programs` share the work evenly, 0 means one per tile of channels.

    `tma` reads the weights through a tensor descriptor, which wants lines of a multiple of 16 bytes. `pdl` lets the kernel start while
    the one before it in the stream still runs (programmatic dependent launch): it then fetches at most `prefetch` bytes (a multiple of
    16) of each line of its first weight tile into L2, and waits before it touches anything else.
    """

    channels: int
    depth: int
    programs: int
    warps: int
    stages: int
    tma: bool = False
    pdl: bool = False
    prefetch: int = 512


MAX_ROWS = MOST_ROWS
"""From here on the products are bound by the tensor cores, where cuBLAS is at home; between 64 and it none but small ones have a launch."""

PDL = True
"""Whether launches that `launch_for` chooses start before the kernel in front of them has finished."""

_SMALL = 3 * 2**19
"""A number of weights that parts the launches below, which were measured on an H200 (linear_h200.jsonl and stack_steps_h200.jsonl in
benchmarks/results)."""
_TILES = 16384  # that can be split: more than any vocabulary's output channels make
_SERVED = ({torch.bfloat16}, {torch.float16}, {torch.float32})


_arrived: dict[torch.device, Tensor] = {}


def launch_for(rows: int, channels: int, depth: int, dtype: torch.dtype, swiglu: bool = False) -> Launch | RowLaunch | None:
    """The launch of x [rows, depth] times `channels` output channels (twice as many weights with swiglu); None: torch is as good."""
    if dtype == torch.float32 or not 0 < rows <= 64:
        return None
    size = channels * depth * (1 + swiglu)
    launch: Launch | None = None
    if rows == 1:
        return row_launch_for(channels, depth, swiglu)
    if rows <= 16:
        if swiglu:
            launch = Launch(64, 128, 0, 4, 3, tma=True) if depth > 1024 else Launch(32, 64, 0, 4, 4)
        elif size <= _SMALL:
            launch = Launch(16, 128, 0, 4, 4)
        elif channels >= 65536 and depth > 1024:
            launch = Launch(64, 128, 0, 4, 4)
        elif depth >= 4096 or 1024 < depth < channels:
            launch = Launch(64, 128, 0, 4, 6)
    elif swiglu:
        if depth >= 4096:
            launch = Launch(128, 64, 0, 4, 4, tma=True)
        else:
            launch = Launch(64, 64, 0, 4, 4) if depth > 1024 else Launch(32, 64, 0, 4, 4)
    elif channels >= 65536 and depth >= 4096:
        launch = Launch(128, 64, 0, 4, 4)
    return replace(launch, pdl=True) if launch is not None and PDL else launch


def _chosen(x: Tensor, weight: Tensor, rows: int, channels: int, swiglu: bool) -> Launch | RowLaunch | HopperLaunch | None:
    """The launch of x [..., K] in so many rows, by its device too."""
    depth, launch = weight.shape[1], None
    if rows and x.shape[-1] == depth and takes(x.reshape(rows, depth), weight):
        launch = hopper_launch_for(rows, channels, depth, swiglu)
    return launch_for(rows, channels, depth, x.dtype, swiglu) if launch is None else launch


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.gate_up`: silu(gate) * up of x [..., K] times a packed weight [2 * M, K], plus bias [2 * M] -> [..., M]."""
    rows = x.numel() // max(1, x.shape[-1])
    launch = _chosen(x, weight, rows, weight.shape[0] // 2, swiglu=True)
    if launch is None:
        return swiglu_kernel.swiglu(linear(x, weight, bias))
    return linear(x, weight, bias, swiglu=True, launch=launch)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, swiglu: bool = False, launch: Launch | RowLaunch | HopperLaunch | None = None
) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M] in x's dtype, summed in fp32 and rounded once.

    With swiglu the weight [2 * M, K] and the bias [2 * M] hold a gate, then an up-projection, and the result [..., M] is silu(gate) * up,
    rounded where `reference.gate_up` rounds. dtype is bfloat16, float16 or float32, the same for all.
    The last dimension of x, weight and bias must be contiguous (ValueError otherwise); the lines of x and weight may lie apart.

    More than MAX_ROWS rows, empty products, other dtypes, gradients and what `launch_for` has no launch for go to F.linear. `launch`
    overrides the table. Split launches of one device share counters: they must not run at the same time on two streams. The first call on
    a device makes the counters and cannot be captured in a graph (RuntimeError).
    """
    channels, depth = weight.shape
    if x.shape[-1] != depth or (swiglu and channels % 2):
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}: wants [..., K] and [M, K], M even for swiglu")
    if any(operand is not None and operand.stride(-1) != 1 < operand.shape[-1] for operand in (x, weight, bias)):
        raise ValueError(f"strides of x {x.stride()} and weight {weight.stride()}: the last, and bias's, must be 1; call .contiguous()")
    rows = x.numel() // depth if depth else 0
    width = channels // 2 if swiglu else channels
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if graded or {operand.dtype for operand in operands} not in _SERVED or not 0 < rows <= MAX_ROWS or not width:
        launch = None
    elif launch is None:
        launch = _chosen(x, weight, rows, width, swiglu)
    if launch is None:
        out = F.linear(x, weight, bias)
        return F.silu(out[..., :width]) * out[..., width:] if swiglu else out
    flat = x.reshape(rows, depth)
    out = x.new_empty(*x.shape[:-1], width)
    if isinstance(launch, RowLaunch):
        if rows > 1:
            raise ValueError(f"{launch} multiplies one row, not {rows}: give a Launch")
        linear_row(flat, weight, bias, out, launch, swiglu)
    elif isinstance(launch, HopperLaunch):
        hopper_linear(flat, weight, bias, out, launch, swiglu)
    else:
        _launch(flat, weight, bias, out, launch, swiglu)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, launch: Launch, swiglu: bool) -> None:
    """Fill out [..., M], contiguous, with the product of x [R, K]."""
    rows, depth = x.shape
    width = out.shape[-1]
    tiles, steps = -(-width // launch.channels), -(-depth // launch.depth)
    programs = min(launch.programs or tiles, tiles * steps)
    if tiles > _TILES and programs != tiles:
        programs = tiles  # more tiles than counters: enough of them to fill a device unsplit
    base, extra = divmod(tiles * steps, programs)
    split = bool(extra or base % steps)
    wide = padded(rows)
    parts = torch.empty(2 * programs * (1 + swiglu) * launch.channels * wide if split else 1, dtype=torch.float32, device=x.device)
    lined_up = (weight.data_ptr() | weight.stride(0) * weight.element_size() | depth * weight.element_size()) % 16 == 0
    tma, pdl = launch.tma and lined_up, launch.pdl and lined_up and dependent(x.device)["PDL"]
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages} | ({"launch_pdl": True} if pdl else {})
    _linear_kernel[(programs,)](
        x, weight, TensorDescriptor.from_tensor(weight, [launch.channels, launch.depth]) if tma else None,
        bias, out, parts, _counters(x.device), rows, width, depth, x.stride(0), weight.stride(0), base, extra,
        BM=launch.channels, BK=launch.depth, BR=wide, SWIGLU=swiglu, BIAS=bias is not None, EVEN_K=depth % launch.depth == 0,
        SPLIT=split, TMA=tma, PREFETCH=launch.prefetch, PDL=pdl, STAGES=launch.stages, **options,
    )  # fmt: skip


def _counters(device: torch.device) -> Tensor:
    """Arrivals by tile, all zero between launches."""
    if device not in _arrived:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first linear on a device cannot be captured in a CUDA graph: call it once before the capture")
        _arrived[device] = torch.zeros(_TILES, dtype=torch.int32, device=device)
    return _arrived[device]
