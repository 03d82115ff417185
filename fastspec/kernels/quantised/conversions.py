"""PTX that makes numbers of 16 bits of codes: a fifth of the instructions that a compiler needs for it.

A code is put into the low bits of a number whose steps are 1 there (128 in bf16, 1024 in fp16), which is then taken
off; e4m3 is shifted to where the wider exponent and mantissa stand, and multiplied by what the exponents' biases
differ by. All are exact but those of a table, which is rounded. NaN of e4m3 comes out as 480. Kernels of Hopper take
whole numbers that are `fold` times smaller: the bits of a code are one of the dtype's smallest numbers already, which
its largest power of 2 makes a normal one.
tests/kernels/test_conversions.py runs the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fastspec.constants import constant
from fastspec.kernels.quantised.reference import Codes, Numbers

BASE = {torch.bfloat16: 0x43, torch.float16: 0x64}
"""High byte of the number whose steps are 1."""
ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
TWO_HALVES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
E4M3 = {torch.bfloat16: (4, 0x87F0, 120), torch.float16: (7, 0xBF80, 8)}
"""Shift of a code in a half's low byte, up, the bits of it and its sign, and the power of 2."""
SMALLEST, LARGEST = {torch.bfloat16: -133, torch.float16: -24}, {torch.bfloat16: 127, torch.float16: 15}
"""Exponents of the smallest power of 2 and of the largest one."""


def _twice(half: int) -> str:
    return f"{half << 16 | half:#010x}"


def _bits(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(torch.int16)) & 0xFFFF


def fold(kind: Codes, dtype: torch.dtype) -> float:
    """Power of 2 that numbers of `pair_assembly` and of row_programs.py are smaller by; scales are as much larger.

    No bit is lost. Numbers of at most 8 bits stay exact. The smallest product (2 ** -139 in bf16, 2 ** -33 in fp16) is
    a whole number of fp32's steps (2 ** -149), and so is every sum: those below its normal numbers are exact, others
    are rounded where they would be. A larger scale is exact, of any dtype, as long as it is finite: below 2 ** 122 in
    bf16, and below 2 ** 119 in fp16, whose weights end at 2 ** 16. No float16 scale reaches these.
    """
    whole = kind.numbers in (Numbers.UNSIGNED, Numbers.SIGNED)
    return 2.0 ** -(SMALLEST[dtype] + LARGEST[dtype]) if whole else 1.0


def _eight(kind: Codes, dtype: torch.dtype, puts: Sequence[str], folded: bool = False) -> list[str]:
    """Words `$0` and `$1` and so on of two codes of 8 bits, which each of `puts` puts into the low bytes of the halves
    of `a`; of e4m3 with its sign in each bit of the high ones, else whatever is there.

    Of whole numbers bf16 has 7 bits below its 128, so the eighth becomes a number of its own, 128 or 256, and is taken
    off as such.
    """
    signed = kind.numbers == Numbers.SIGNED
    if kind.numbers == Numbers.E4M3:
        shift, bits, power = E4M3[dtype]
        lines = [f"mov.b32 m, {_twice(_bits(2.0**power, dtype))};", "mov.b32 n, 0x80008000;"]
        each = [
            f"shl.b32 a, a, {shift};",
            f"and.b32 a, a, {_twice(bits)};",
            f"fma.rn.{TWO_HALVES[dtype]} $, a, m, n;",
        ]
    elif folded or dtype == torch.float16:
        base, times, less = BASE[dtype] << 8, 1.0, -1152.0
        if folded:
            base, times, less = 0, 2.0 ** LARGEST[dtype], -128 / fold(kind, dtype)
        lines = [f"mov.b32 n, {_twice(_bits(less, dtype))};", f"mov.b32 o, {_twice(_bits(times, dtype))};"]
        lines += [f"mov.b32 m, {_twice(base | 128 * signed)};"]
        each = ["lop3.b32 a, a, 0x00FF00FF, m, 0x6A;", f"fma.rn.{TWO_HALVES[dtype]} $, a, o, n;"]
    else:
        lines = [f"mov.b32 m, {_twice(_bits(-1.0, dtype))};", f"mov.b32 o, {_twice(BASE[dtype] << 8)};"]
        each = [
            "lop3.b32 b, a, 0x007F007F, o, 0xEA;",
            f"lop3.b32 a, a, 0x00800080, o, {'0xEA' if signed else '0xAE'};",
            "fma.rn.bf16x2 $, a, m, b;",
        ]
    return lines + [line.replace(" $,", f" ${out},") for out, put in enumerate(puts) for line in (put, *each)]


def _whole4(dtype: torch.dtype, less: int) -> list[str]:
    base = BASE[dtype]
    taken = _twice(_bits(-(128.0 if dtype == torch.bfloat16 else 1024.0) - less, dtype))
    lines = [
        f"mov.b32 m, {base * 0x01010101:#010x};",
        f"mov.b32 n, {taken};",
        f"mov.b32 o, {_twice(ONE[dtype])};",
        "and.b32 w, $4, 0x0F0F0F0F;",
        "shr.u32 b, $4, 4;",
        "and.b32 b, b, 0x0F0F0F0F;",
    ]
    for first, word in ((0, "w"), (2, "b")):
        for out, order in enumerate(("0x4140", "0x4342"), start=first):
            lines += [f"prmt.b32 a, {word}, m, {order};", f"fma.rn.{TWO_HALVES[dtype]} ${out}, a, o, n;"]
    return lines


def _chosen(low: Sequence[str], high: Sequence[str]) -> list[str]:
    """Low bytes `a` and high bytes `o` of what four places `w` of a table without their top bits stand for: a byte
    permutation of eight bytes each, and one that takes from the two what places `b` of four bytes each say."""
    lines = []
    for words, into in ((low, "a"), (high, "o")):
        lines += [
            f"prmt.b32 m, {words[0]}, {words[1]}, w;",
            f"prmt.b32 n, {words[2]}, {words[3]}, w;",
            f"prmt.b32 {into}, m, n, b;",
        ]
    return lines


def _table4(kind: Codes, dtype: torch.dtype) -> list[str]:
    names = [f"{name}{i}" for name in "lh" for i in range(4)]
    lines = [*_places("$4", 0x11111111), "and.b32 w, $4, 0x77777777;"]
    words = table_words(kind, dtype)
    lines += [f"mov.b32 {name}, {word & 0xFFFFFFFF:#010x};" for name, word in zip(names, words, strict=True)]
    for out in (0, 1):
        lines += ["shr.u32 w, w, 16;", "shr.u32 b, b, 16;"] if out else []
        lines += _chosen(names[:4], names[4:])
        lines += [f"prmt.b32 ${out}, a, o, 0x7351;", f"prmt.b32 ${out + 2}, a, o, 0x6240;"]
    return lines


def _places(word: str, ones: int) -> list[str]:
    """Places `b` of bytes, by the top bits of a word's codes: in turn in the first four of eight, or in the others."""
    turn = 0x32103210 & 15 * ones
    return [f"mov.b32 m, {turn:#x};", f"shr.u32 b, {word}, 1;", f"lop3.b32 b, b, {4 * ones:#x}, m, 0xEA;"]


def _known(kind: Codes, dtype: torch.dtype) -> bool:
    if dtype not in BASE:
        return False
    if kind.numbers == Numbers.UNSIGNED:
        return kind.less == 128 if kind.bits == 8 else not kind.high_first
    return kind.bits == 8 or (kind.numbers == Numbers.TABLE and kind.high_first)


@lru_cache
def assembly(kind: Codes, dtype: torch.dtype) -> str | None:
    """The program that makes numbers of 16 bits of four bytes of codes, or None where there is none: `$0` and `$1` of
    the word `$2` in their order, or of 4 bits `$0` to `$3` of `$4`, first those of the bytes' first halves."""
    if not _known(kind, dtype):
        return None
    if kind.bits == 8:
        places = ("0x9180", "0xB3A2") if kind.numbers == Numbers.E4M3 else ("0x4140", "0x4342")
        return _program(_eight(kind, dtype, [f"prmt.b32 a, $2, 0, {each};" for each in places]))
    return _program(_table4(kind, dtype) if kind.table else _whole4(dtype, kind.less))


@lru_cache
def pair_assembly(kind: Codes, dtype: torch.dtype, zeros: bool) -> str | None:
    """The program of a unit of two neighbouring codes, or None where there is none: the word `$0` of two numbers, of 8
    bits from the unit `$3` of the words `$1` and `$2`, of 4 bits from the byte `$2` of the word `$1`; with zeros less
    what the word `$3` has twice, a zero point, negative. Whole numbers and these are `fold` times smaller. With a table
    `$3` is where the lane's copy of it begins."""
    if not _known(kind, dtype):
        return None
    if kind.bits == 8:
        each, first = (0x2222, 0x9180) if kind.numbers == Numbers.E4M3 else (0x202, 0x100)
        places = f"mad.lo.u32 w, $3, {each:#x}, {first:#x};"
        return _program([places, *_eight(kind, dtype, ["prmt.b32 a, $1, $2, w;"], folded=True)])
    if kind.table:
        lines = ["or.b32 b, $2, 0x4440;", "prmt.b32 a, $1, 0, b;"]
        return _program([*lines, "mad.lo.u32 a, a, 128, $3;", "ld.shared.u32 $0, [a];"])
    low, high = (_bits(2.0 ** (LARGEST[dtype] - shift), dtype) for shift in (0, 4))
    return _program(
        [
            "mul.lo.u32 w, $2, 0x1111;",
            "prmt.b32 a, $1, 0, w;",
            "and.b32 a, a, 0x00F0000F;",
            f"mov.b32 m, {high << 16 | low:#010x};",
            f"mov.b32 n, {'$3' if zeros else _twice(_bits(-kind.less / fold(kind, dtype), dtype))};",
            f"fma.rn.{TWO_HALVES[dtype]} $0, a, m, n;",
        ]
    )


ROOM = ".shared .align 1024 .b8 stored_table[32768];\nmov.u32 $0, 0;"
"""Makes room for 256 words, each 32 times, once in every bank. (Gluon reads shared memory by places that registers hold
since Triton 3.7 alone.)"""
PLACE = "{ .reg .b32 a, b; mov.u32 a, %laneid; mov.u32 b, stored_table; mad.lo.u32 $0, a, 4, b; }"
"""Says where the lane's copy of the first word is."""
FILL = (
    "{ .reg .b32 a, b; mov.u32 a, %laneid; mov.u32 b, stored_table; mad.lo.u32 b, a, 4, b; "
    "mad.lo.u32 b, $1, 128, b; st.shared.u32 [b], $2; mov.u32 $0, 0; }"
)
"""Writes the lane's copy of the word `$1`, which is `$2`."""


@constant
def pair_table(kind: Codes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Words of the two numbers of each byte of a table's codes, the high half first: [256] int32."""
    numbers = torch.tensor(kind.table, device="cpu").to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF
    octets = torch.arange(256, device="cpu")
    return (numbers[octets >> 4] | numbers[octets & 15] << 16).to(device)


@lru_cache
def group_assembly(dtype: torch.dtype) -> str | None:
    """The program of a word of eight e2m1 codes, or None where there is none: words `$0` to `$3` of the numbers of
    codes four apart, from the bits of `$4` times the two numbers of 16 bits in `$5` and `$6` (`mxfp4.factors`)."""
    if dtype not in BASE:
        return None
    lines = ["mov.b32 n, 0x80008000;", "shr.u32 w, $4, 8;"]
    for out, word in enumerate(("$4", "$4", "w", "w")):
        shift = 4 * (out % 2)
        if dtype == torch.bfloat16:  # a sum of two shifts, which share no bit
            up = (1 << 12 | 1 << 6) >> shift
            lines += [f"and.b32 a, {word}, {_twice(15 << shift)};", f"mul.lo.u32 a, a, {up};"]
            lines += ["and.b32 a, a, 0x81C081C0;"]
        else:
            lines += [f"and.b32 a, {word}, {_twice(7 << shift)};", f"mul.lo.u32 a, a, {1 << 9 >> shift};"]
            lines += [f"mul.lo.u32 b, {word}, {1 << 12 >> shift};", "lop3.b32 a, b, 0x80008000, a, 0xEA;"]
        lines += [f"fma.rn.{TWO_HALVES[dtype]} a, a, $5, n;", f"fma.rn.{TWO_HALVES[dtype]} ${out}, a, $6, n;"]
    return _program(lines)


def table_words(kind: Codes, dtype: torch.dtype) -> tuple[int, ...]:
    """The low bytes of a table's 16 numbers, four to a word, and the high ones, as int32. Empty where there is no
    table."""
    numbers = [_bits(value, dtype) for value in kind.table]
    octets = [number >> shift & 0xFF for shift in (0, 8) for number in numbers]
    words = [sum(octet << 8 * i for i, octet in enumerate(octets[at : at + 4])) for at in range(0, len(octets), 4)]
    return tuple(word - (word >> 31 << 32) for word in words)


def _program(lines: Sequence[str]) -> str:
    registers = ", ".join(["a", "b", "m", "n", "o", "w", *(f"{name}{i}" for name in "lh" for i in range(4))])
    return "{ .reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"
