"""PTX that makes numbers of 16 bits of four codes in a word: a fifth of the instructions that a compiler needs for it.

Each program turns the word `$n` of four bytes into words of two numbers: of 8 bits in their order, of 4 bits first
those of the bytes' first halves, then those of their second ones. All are exact but those of a table, which is rounded.
A code is put into the low bits of a number whose steps are 1 there (128 in bf16, 1024 in fp16), which is then taken
off; e4m3 is shifted to where the wider exponent and mantissa stand, and multiplied by what the exponents' biases
differ by. NaN of e4m3 comes out as 480.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastspec.kernels.quantised.reference import Codes, Numbers

BASE = {torch.bfloat16: 0x43, torch.float16: 0x64}
"""High byte of the number whose steps are 1."""
ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
TWO_HALVES = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
E4M3 = {torch.bfloat16: (4, 0x07F0, 120), torch.float16: (1, 0x3F80, 8)}
"""How far a code in a half's high byte is shifted down, the bits that it then takes, and the power of 2."""


def _twice(half: int) -> str:
    return f"{half << 16 | half:#010x}"


def _bits(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(torch.int16)) & 0xFFFF


def _float8(dtype: torch.dtype) -> list[str]:
    shift, bits, power = E4M3[dtype]
    lines = [f"mov.b32 m, {_twice(_bits(2.0**power, dtype))};", "mov.b32 n, 0x80008000;"]
    for out, order in enumerate(("0x1404", "0x3424")):
        lines += [
            f"prmt.b32 a, $2, 0, {order};",
            f"shr.u32 b, a, {shift};",
            f"and.b32 b, b, {_twice(bits)};",
            "lop3.b32 a, a, 0x80008000, b, 0xEA;",
            f"fma.rn.{TWO_HALVES[dtype]} ${out}, a, m, n;",
        ]
    return lines


def _whole8(dtype: torch.dtype, signed: bool) -> list[str]:
    """Whole numbers from -128 to 127: in two's complement, or from 0 less 128. bf16 has 7 bits below its 128, so the
    eighth becomes a number of its own, 128 or 256, and is taken off as such."""
    lines = [f"mov.b32 m, {_twice(_bits(-1.0, dtype))};", "mov.b32 w, $2;"]
    if signed == (dtype == torch.float16):
        lines.append("xor.b32 w, w, 0x80808080;")
    if dtype == torch.float16:
        less = _twice(_bits(-1152.0, dtype))
        lines += [f"mov.b32 n, {less};", f"mov.b32 o, {_twice(ONE[dtype])};", "mov.b32 b, 0x64646464;"]
        for out, order in enumerate(("0x4140", "0x4342")):
            lines += [f"prmt.b32 a, w, b, {order};", f"fma.rn.f16x2 ${out}, a, o, n;"]
        return lines
    lines.append("mov.b32 o, 0x43004300;")
    for out, order in enumerate(("0x4140", "0x4342")):
        lines += [
            f"prmt.b32 a, w, 0, {order};",
            "lop3.b32 b, a, 0x007F007F, o, 0xEA;",
            "lop3.b32 a, a, 0x00800080, o, 0xEA;",
            f"fma.rn.bf16x2 ${out}, a, m, b;",
        ]
    return lines


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


def _table4(dtype: torch.dtype, table: Sequence[float]) -> list[str]:
    """Four places of a word choose four low bytes of the table's numbers, then four high ones: a byte permutation of
    eight of them each, and the places' top bits choose between the lower and the upper eight."""
    numbers = [_bits(value, dtype) for value in table]
    lines = ["and.b32 w, $4, 0x77777777;", "shr.u32 b, $4, 3;", "and.b32 b, b, 0x11111111;"]
    for name, shift in (("l", 0), ("h", 8)):
        octets = [number >> shift & 0xFF for number in numbers]
        for i in range(4):
            word = sum(octet << 8 * place for place, octet in enumerate(octets[4 * i : 4 * i + 4]))
            lines.append(f"mov.b32 {name}{i}, {word:#010x};")
    for out in (0, 1):
        if out:
            lines += ["shr.u32 w, w, 16;", "shr.u32 b, b, 16;"]
        lines.append("prmt.b32 m, 0x0000FF00, 0, b;")
        for name, into in (("l", "a"), ("h", "o")):
            lines += [
                f"prmt.b32 {into}, {name}0, {name}1, w;",
                f"prmt.b32 n, {name}2, {name}3, w;",
                f"lop3.b32 {into}, m, n, {into}, 0xCA;",
            ]
        lines += [f"prmt.b32 ${out}, a, o, 0x7351;", f"prmt.b32 ${out + 2}, a, o, 0x6240;"]
    return lines


def assembly(kind: Codes, dtype: torch.dtype) -> str | None:
    """The program of codes of this kind for bf16 or fp16, or None where there is none."""
    if dtype not in BASE:
        return None
    match kind.bits, kind.numbers:
        case 8, Numbers.E4M3:
            lines = _float8(dtype)
        case 8, Numbers.SIGNED:
            lines = _whole8(dtype, signed=True)
        case 8, Numbers.UNSIGNED if kind.less == 128:
            lines = _whole8(dtype, signed=False)
        case 4, Numbers.UNSIGNED if not kind.high_first:
            lines = _whole4(dtype, kind.less)
        case 4, Numbers.TABLE if kind.high_first:
            lines = _table4(dtype, kind.table)
        case _:
            return None
    registers = "a, b, m, n, o, w, " + ", ".join(f"{name}{i}" for name in "lh" for i in range(4))
    return "{ .reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"


def pair_assembly(kind: Codes, dtype: torch.dtype, zeros: bool) -> str | None:
    """The program that makes the word `$0` of two numbers from the two codes in the low bits of `$1`; with zeros less
    what the word `$2` has twice, a code's base and its zero point, negative."""
    if dtype not in BASE:
        return None
    two, magic = TWO_HALVES[dtype], _twice(BASE[dtype] << 8)
    match kind.bits, kind.numbers:
        case 8, Numbers.E4M3:
            shift, bits, power = E4M3[dtype]
            lines = [
                f"mov.b32 m, {_twice(_bits(2.0**power, dtype))};",
                "mov.b32 n, 0x80008000;",
                "prmt.b32 a, $1, 0, 0x1404;",
                f"shr.u32 b, a, {shift};",
                f"and.b32 b, b, {_twice(bits)};",
                "lop3.b32 a, a, 0x80008000, b, 0xEA;",
                f"fma.rn.{two} $0, a, m, n;",
            ]
        case 8, Numbers.SIGNED | Numbers.UNSIGNED if kind.numbers == Numbers.SIGNED or kind.less == 128:
            signed = kind.numbers == Numbers.SIGNED
            if dtype == torch.float16:
                flip = ["xor.b32 w, w, 0x8080;"] if signed else []
                lines = [
                    f"mov.b32 n, {_twice(_bits(-1152.0, dtype))};",
                    f"mov.b32 o, {_twice(ONE[dtype])};",
                    f"mov.b32 m, {magic};",
                    "mov.b32 w, $1;",
                    *flip,
                    "prmt.b32 a, w, m, 0x5150;",
                    "fma.rn.f16x2 $0, a, o, n;",
                ]
            else:
                lines = [
                    f"mov.b32 m, {_twice(_bits(-1.0, dtype))};",
                    f"mov.b32 o, {magic};",
                    "prmt.b32 a, $1, 0, 0x4140;",
                    "lop3.b32 b, a, 0x007F007F, o, 0xEA;",
                    f"lop3.b32 a, a, 0x00800080, o, {'0xEA' if signed else '0xAE'};",
                    "fma.rn.bf16x2 $0, a, m, b;",
                ]
        case 4, Numbers.UNSIGNED if not kind.high_first:
            base = 128.0 if dtype == torch.bfloat16 else 1024.0
            taken = "$2" if zeros else _twice(_bits(-base - kind.less, dtype))
            lines = [
                f"mov.b32 n, {taken};",
                f"mov.b32 o, {_twice(ONE[dtype])};",
                f"mov.b32 m, {magic};",
                "mul.lo.u32 a, $1, 4097;",
                "lop3.b32 a, a, 0x000F000F, m, 0xEA;",
                f"fma.rn.{two} $0, a, o, n;",
            ]
        case 4, Numbers.TABLE if kind.high_first:
            lines = [
                "prmt.b32 w, $2, $3, 0x5540;",
                "shr.u32 b, w, 3;",
                "and.b32 b, b, 0x1111;",
                "and.b32 w, w, 0x7777;",
                "prmt.b32 m, 0x0000FF00, 0, b;",
            ]
            for first, into in ((4, "a"), (12, "o")):
                lines += [
                    f"prmt.b32 {into}, ${first}, ${first + 2}, w;",
                    f"prmt.b32 n, ${first + 4}, ${first + 6}, w;",
                    f"lop3.b32 {into}, m, n, {into}, 0xCA;",
                ]
            lines += ["prmt.b32 $0, a, o, 0x4051;", "prmt.b32 $1, a, o, 0x6273;"]
        case _:
            return None
    return "{ .reg .b32 a, b, m, n, o, w;\n" + "\n".join(lines) + "\n}"


def table_words(kind: Codes, dtype: torch.dtype) -> tuple[int, ...]:
    """What the program of a table's codes takes as `$2` to `$9`: the low bytes of its 16 numbers, four to a word, and
    the high ones. Empty where there is no table."""
    numbers = [_bits(value, dtype) for value in kind.table]
    octets = [number >> shift & 0xFF for shift in (0, 8) for number in numbers]
    words = [sum(octet << 8 * i for i, octet in enumerate(octets[at : at + 4])) for at in range(0, len(octets), 4)]
    return tuple(word - (word >> 31 << 32) for word in words)
