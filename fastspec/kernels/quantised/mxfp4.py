"""Numbers of MXFP4 in registers, for the kernels of experts: e2m1 codes, two in a byte, the low half first, and a power
of 2 (e8m0) for each group of GROUP.

A thread takes a whole group, four words of eight codes each, from which it makes pairs of numbers that are four
channels apart: so the channels of a BLOCK change places, those of rows as well. r word of a group, i pair of a word, t
group of a block, h half of a pair: channel 32 t + 8 r + 4 h + i stands at place 32 r + 8 i + 2 t + h, which is where
tensor cores read what a thread holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
BLOCK = tl.constexpr(128)


@triton.jit
def channel_of(o_place):
    """Channels that stand at places."""
    o_in = o_place % 128
    return o_place - o_in + o_in // 2 % 4 * 32 + o_in // 32 * 8 + o_in % 2 * 4 + o_in // 8 % 4


@triton.jit
def place_of(o_channel):
    """Places of channels."""
    o_in = o_channel % 128
    return o_channel - o_in + o_in // 8 % 4 * 32 + o_in % 4 * 8 + o_in // 32 * 2 + o_in // 4 % 2


@triton.jit
def e2m1(b_code):
    """Numbers of codes of 4 bits, fp32: the bits of an fp16 number of an exponent that is 14 too small."""
    b_wide = b_code.to(tl.uint16)
    return (((b_wide & 8) << 12) | ((b_wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(b_scale):
    """Powers of 2, fp32; that of 0 has no exponent of its own, and 255 is NaN."""
    b_power = b_scale.to(tl.int32)
    return (tl.maximum(b_power << 23, 1 << 22) | _bit_of_nan(b_power, 22)).to(tl.float32, bitcast=True)


@triton.jit
def _bit_of_nan(b_power, AT: tl.constexpr):
    """The bit AT of scales 255, none of others."""
    return (b_power + 1 << AT) >> 8 & 1 << AT


@triton.jit
def factors(b_scale, DTYPE: tl.constexpr):
    """Two numbers of 16 bits, each twice in a word, by which one after the other a code's bits are multiplied."""
    b_power = b_scale.to(tl.int32)
    if tl.bfloat16 == DTYPE:
        b_first = tl.full(b_scale.shape, 0x7E80, tl.int32)  # 2^126
        b_second = tl.maximum(b_power << 7, 0x40) | _bit_of_nan(b_power, 6)
    else:  # 2^15 at most, then the rest; what no code but 0 is finite with is taken for two numbers that overflow
        b_float = (tl.minimum(b_power, 128) + 14 << 23).to(tl.float32, bitcast=True)
        b_first = b_float.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b_first = tl.where(b_power > 143, 0x7BFF, b_first)
        b_second = tl.minimum(tl.maximum(b_power - 113, 15) << 10, 0x7BFF) | _bit_of_nan(b_power, 10)
    return b_first * 0x10001, b_second * 0x10001


@triton.jit
def halves(b_words, b_scales, DTYPE: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers of words [M, W] of eight codes, whose scales are [M, W / 4]: of those of codes four apart, in order, the
    first ones and the second ones, [M, W] four times each, in DTYPE, or with WIDE rounded to it and in fp32."""
    M: tl.constexpr = b_words.shape[0]
    W: tl.constexpr = b_words.shape[1]
    if ASSEMBLY is not None:
        b_first, b_second = factors(b_scales, DTYPE)
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            ASSEMBLY,
            "=r,=r,=r,=r,r,r,r",
            [b_words, _of_words(b_first, M, W), _of_words(b_second, M, W)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        b_low = (
            _half(b_0, False, DTYPE, WIDE),
            _half(b_1, False, DTYPE, WIDE),
            _half(b_2, False, DTYPE, WIDE),
            _half(b_3, False, DTYPE, WIDE),
        )
        b_high = (
            _half(b_0, True, DTYPE, WIDE),
            _half(b_1, True, DTYPE, WIDE),
            _half(b_2, True, DTYPE, WIDE),
            _half(b_3, True, DTYPE, WIDE),
        )
    else:
        b_power = _of_words(e8m0(b_scales), M, W)
        b_low = (
            _one(b_words, 0, b_power, DTYPE),
            _one(b_words, 1, b_power, DTYPE),
            _one(b_words, 2, b_power, DTYPE),
            _one(b_words, 3, b_power, DTYPE),
        )
        b_high = (
            _one(b_words, 4, b_power, DTYPE),
            _one(b_words, 5, b_power, DTYPE),
            _one(b_words, 6, b_power, DTYPE),
            _one(b_words, 7, b_power, DTYPE),
        )
    return b_low, b_high


@triton.jit
def _one(b_words, AT: tl.constexpr, b_power, DTYPE: tl.constexpr):
    """A number of words' eight."""
    return (e2m1((b_words >> 4 * AT) & 15) * b_power).to(DTYPE)


@triton.jit
def _half(b_word, HIGH: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """One number of a word's two."""
    if WIDE and tl.bfloat16 == DTYPE:
        b_out = (b_word & -65536 if HIGH else b_word << 16).to(tl.float32, bitcast=True)
    else:
        b_out = (b_word >> 16 if HIGH else b_word).to(tl.int16).to(DTYPE, bitcast=True)
    return b_out


@triton.jit
def _of_words(b_groups, M: tl.constexpr, W: tl.constexpr):
    return tl.reshape(tl.broadcast_to(b_groups[:, :, None], (M, W // 4, 4)), (M, W))


@triton.jit
def numbers(b_words, b_scales, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers [M, 8 W], in their places, of words [M, W] of eight codes and scales [M, W / 4]."""
    M: tl.constexpr = b_words.shape[0]
    W: tl.constexpr = b_words.shape[1]
    b_low, b_high = halves(b_words, b_scales, DTYPE, False, ASSEMBLY)
    b_all = tl.join(_joined(b_low), _joined(b_high))  # t and r are a word's, then i, h
    b_all = tl.permute(tl.reshape(b_all, (M, W // 16, 4, 4, 4, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(b_all, (M, 8 * W))


@triton.jit
def _joined(b_four):
    return tl.reshape(
        tl.join(tl.join(b_four[0], b_four[2]), tl.join(b_four[1], b_four[3])),
        (b_four[0].shape[0], b_four[0].shape[1], 4),
    )


@triton.jit
def wide_numbers(b_words, b_scales, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers [M, 8 W], in the order of their channels, rounded to DTYPE, fp32."""
    M: tl.constexpr = b_words.shape[0]
    W: tl.constexpr = b_words.shape[1]
    b_low, b_high = halves(b_words, b_scales, DTYPE, True, ASSEMBLY)
    b_all = tl.permute(tl.join(_joined(b_low), _joined(b_high)), (0, 1, 3, 2))
    return tl.reshape(b_all, (M, 8 * W)).to(tl.float32)
