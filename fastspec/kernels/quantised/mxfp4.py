"""Numbers of MXFP4 in registers, for the kernels of experts: e2m1 codes, two in a byte, the low half first, and a power
of 2 (e8m0) for each group of GROUP."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)


@triton.jit
def e2m1(b_code):
    """Numbers of codes of 4 bits, fp32: the bits of an fp16 number of an exponent that is 14 too small."""
    b_wide = b_code.to(tl.uint16)
    return (((b_wide & 8) << 12) | ((b_wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(b_scale):
    """Powers of 2, fp32; that of 0 has no exponent of its own."""
    return tl.maximum(b_scale.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
