"""PTX of one row's products with stored weights (row.py): each thread runs a program on its own registers.

Of 16 codes of a line the lane t of four makes two words of two numbers, which stand in columns 2t, 2t + 1, 2t + 8 and
2t + 9 of the tile that tensor cores multiply. Any 16 codes may stand there in any order, as long as the row's numbers
stand in the same: they are added at once. Whole numbers are those of conversions.py, 64 times smaller: of the bits of a
code, which are its number times 2 ** -133, one multiplication and addition makes it, and takes off its base.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from fastspec.kernels.quantised.reference import Codes, Numbers

PAD = 16
"""Bytes behind a line of a stage, so that eight lines lie in banks of their own."""
ENTRY = 128
"""Bytes of an entry of a table: a word for each bank."""


def _constants(kind: Codes) -> tuple[int, int, int]:
    """Factors of two words' numbers and what is added, twice in a word."""
    if kind.numbers == Numbers.E4M3:
        return 0x7B807B80, 0, 0x80008000  # 2 ** 120; -0
    if kind.bits == 8:
        return 0x7F007F00, 0, 0xC000C000  # 2 ** 127; -128 / 64
    return 0x7F007F00, 0x7D007D00, 0xBE00BE00  # 2 ** 127 and, of a high half, 2 ** 123; -8 / 64


def _numbers(kind: Codes, words: Sequence[str], low: str, high: str, zero: str | None) -> list[str]:
    """Words `low` and `high` of a lane's four of 16 codes: of 4 bits from two words, of 8 from its own."""
    if kind.table:
        return [
            line
            for word, out in zip(words, (low, high), strict=True)
            for line in (
                f"prmt.b32 u, {word}, 0, sel;",
                f"mad.lo.u32 u, u, {ENTRY}, own;",
                f"ld.shared.u32 {out}, [u];",
            )
        ]
    if kind.bits == 4:
        return [
            f"prmt.b32 u, {words[0]}, {words[1]}, sel;",
            "and.b32 v, u, 0x000F000F;",
            "and.b32 u, u, 0x00F000F0;",
            f"fma.rn.bf16x2 {low}, v, m, {zero or 'n'};",
            f"fma.rn.bf16x2 {high}, u, o, {zero or 'n'};",
        ]
    if kind.numbers == Numbers.E4M3:
        return [
            line
            for places, out in (("0x9180", low), ("0xB3A2", high))  # codes, with the sign of each in a byte's every bit
            for line in (
                f"prmt.b32 u, {words[0]}, 0, {places};",
                "shl.b32 u, u, 4;",
                "and.b32 u, u, 0x87F087F0;",
                f"fma.rn.bf16x2 {out}, u, m, n;",
            )
        ]
    return [
        f"xor.b32 u, {words[0]}, {0x80808080 if kind.numbers == Numbers.SIGNED else 0:#x};",
        "prmt.b32 v, u, 0, 0x4140;",
        "prmt.b32 u, u, 0, 0x4342;",
        f"fma.rn.bf16x2 {low}, v, m, n;",
        f"fma.rn.bf16x2 {high}, u, m, n;",
    ]


def _product(half: int, first: bool) -> str:
    old = "z, z, z, z" if first else "c0, c1, c2, c3"
    return (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, {w0, w1, w2, w3}, "
        f"{{b{2 * half}, b{2 * half + 1}}}, {{{old}}};"
    )


@lru_cache
def stage(kind: Codes, size: int, group: int | None, zeros: bool, pitch: int) -> str:
    """Products of a stage, 16 lines of `size` bytes, with the row. Operands behind the outputs: places of the lane's
    codes, of its row, of its groups' sums and of its table or zero points, and the lane among four. A group's sums go
    to shared memory, those of lines 8 further `pitch` times 8 bytes further; without groups `$0` to `$3` are the four
    sums of before, the last operands, and these products."""
    outs = 1 if group else 4
    codes, row, sums, own, lane = (f"${outs + i}" for i in range(5))
    m, o, n = _constants(kind)
    lines = [
        "{ .reg .b32 u, v, sel, m, n, o, own, r<4>, s<4>, b<4>, w<4>, y<2>; .reg .f32 z, q, c<4>; .reg .pred p, odd;",
        f"mov.f32 z, 0f00000000; mov.b32 m, {m:#x}; mov.b32 o, {o:#x}; mov.b32 n, {n:#x}; mov.b32 own, {own};",
        f"mad.lo.u32 sel, {lane}, 0x2222, 0x1100;"  # bytes 2t and 2t + 1, each twice
        if kind.bits == 4 and not kind.table
        else f"or.b32 sel, {lane}, 0x4440;",
        f"setp.lt.u32 p, {lane}, 2; setp.eq.u32 odd, {lane}, 1;",
    ]
    if not group:
        lines += [f"mov.f32 c{i}, ${outs + 5 + i};" for i in range(4)]
    for step in range(0, size * 8 // kind.bits // 16, 2):
        at, word = step * 2 * kind.bits, 2 if kind.bits == 4 else 1
        lines.append(f"ld.shared.v4.u32 {{b0, b1, b2, b3}}, [{row}+{step * 32}];")
        if kind.bits == 4:
            lines.append(f"ld.shared.v4.u32 {{r0, r1, r2, r3}}, [{codes}+{at}];")
            lines.append(f"ld.shared.v4.u32 {{s0, s1, s2, s3}}, [{codes}+{at + 8 * (size + PAD)}];")
        else:
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{r0, s0, r1, s1}}, [{codes}+{at}];")
        if group and zeros and step * 16 % group == 0:
            of_group = step * 16 // group * 4
            lines.append(f"ld.shared.u32 y0, [own+{of_group}]; ld.shared.u32 y1, [own+{of_group + 8 * pitch}];")
        for half in range(2):
            part, done = range(half * word, half * word + word), (step + half + 1) * 16
            lines += _numbers(kind, [f"r{i}" for i in part], "w0", "w2", "y0" if zeros else None)
            lines += _numbers(kind, [f"s{i}" for i in part], "w1", "w3", "y1" if zeros else None)
            lines.append(_product(half, bool(group) and (done - 16) % (group or 1) == 0))
            if group and done % group == 0:
                lines.append(f"selp.f32 q, c2, c0, odd; @p st.shared.f32 [{sums}+{(done // group - 1) * 4}], q;")
    lines += ["mov.u32 $0, 0;"] if group else [f"mov.f32 ${i}, c{i};" for i in range(4)]
    return "\n".join(lines) + " }"


@lru_cache
def ask(size: int, stride: int) -> str:
    """Asks for a stage of 16 lines, `stride` bytes apart, if `$3` is not zero: from a lane's first piece of 16 bytes
    `$2` on, to `$1`."""
    lines = ["{ .reg .pred p; setp.ne.u32 p, $3, 0;"]
    for line in range(0, 16, 32 * 16 // size):
        lines.append(f"@p cp.async.cg.shared.global [$1+{line * (size + PAD)}], [$2+{line * stride}], 16;")
    return "\n".join(lines) + "\ncp.async.commit_group; mov.u32 $0, 0; }"


@lru_cache
def wait(stages: int) -> str:
    """Waits for a warp's oldest stage."""
    return f"cp.async.wait_group {stages - 2}; bar.warp.sync 0xffffffff; mov.u32 $0, 0;"


@lru_cache
def row(kind: Codes) -> str:
    """Puts a lane's numbers of 32 input channels, from `$2` on, where `$1` says, in the order of its codes."""
    if kind.table:
        lines = [f"ld.global.b32 {each}, [$2+{16 * i}];" for i, each in enumerate("abcd")]
    else:
        lines = ["ld.global.v2.b32 {a, b}, [$2]; ld.global.v2.b32 {c, d}, [$2+32];"]
    if kind.bits == 4 and not kind.table:
        for first, second in ("ab", "cd"):
            lines += [f"prmt.b32 e, {first}, {second}, 0x7632; prmt.b32 {first}, {first}, {second}, 0x5410;"]
            lines += [f"mov.b32 {second}, e;"]
    return "\n".join(["{ .reg .b32 a, b, c, d, e;", *lines, "st.shared.v4.b32 [$1], {a, b, c, d}; mov.u32 $0, 0; }"])


@lru_cache
def opened(dtype: torch.dtype, limit: int, fold: float) -> str:
    """Puts four neighbouring scales from `$2` on, `fold` times larger, where `$1` says, in fp32, for the first `limit`
    places `$3`; codes by the table `$4`, times `$5`, plus `$6`."""
    lines = [
        "{ .reg .pred p; .reg .b16 h<2>; .reg .b32 a, b, c, d, u; .reg .b64 q; .reg .f32 x<4>;",
        f"setp.lt.u32 p, $3, {limit}; mov.f32 x0, 0f00000000; mov.f32 x1, x0; mov.f32 x2, x0; mov.f32 x3, x0;",
    ]
    if dtype == torch.uint8:
        lines += ["mov.b32 u, 0; @p ld.global.b32 u, [$2];"]
        for i, each in enumerate("abcd"):
            lines += [f"prmt.b32 {each}, u, 0, 0x444{i}; mad.wide.u32 q, {each}, 4, $4; @p ld.global.f32 x{i}, [q];"]
        lines += [f"mul.rn.f32 x{i}, x{i}, $5; add.rn.f32 x{i}, x{i}, $6;" for i in range(4)]
    elif dtype == torch.float32:
        lines += ["@p ld.global.v4.f32 {x0, x1, x2, x3}, [$2];"]
    else:
        lines += ["mov.b32 a, 0; mov.b32 b, 0; @p ld.global.v2.b32 {a, b}, [$2];"]
        for i, each in enumerate("ab"):
            if dtype == torch.bfloat16:
                lines += [f"shl.b32 c, {each}, 16; and.b32 d, {each}, 0xFFFF0000;"]
                lines += [f"mov.b32 x{2 * i}, c; mov.b32 x{2 * i + 1}, d;"]
            else:
                lines += [f"mov.b32 {{h0, h1}}, {each}; cvt.f32.f16 x{2 * i}, h0; cvt.f32.f16 x{2 * i + 1}, h1;"]
    if fold > 1:
        lines += [f"mul.rn.f32 x{i}, x{i}, 0f{struct.pack('>f', fold).hex()};" for i in range(4)]
    return "\n".join([*lines, "@p st.shared.v4.f32 [$1], {x0, x1, x2, x3}; mov.u32 $0, 0; }"])


@lru_cache
def scaled(count: int, threads: int) -> str:
    """Sum of `count` groups' sums, from `$1` on, times their scales, from `$2` on, in their order, in warps whose first
    thread `$3` is one of so many."""
    lines = [f"{{ .reg .pred p; .reg .f32 a<4>, b<4>, s; mov.f32 s, 0f00000000; setp.ge.u32 p, $3, {threads};"]
    lines.append("@p bra DONE;")
    for i in range(0, count, 4):
        lines.append(f"ld.shared.v4.f32 {{a0, a1, a2, a3}}, [$1+{4 * i}];")
        lines.append(f"ld.shared.v4.f32 {{b0, b1, b2, b3}}, [$2+{4 * i}];")
        lines += [f"fma.rn.f32 s, a{j}, b{j}, s;" for j in range(4)]
    return "\n".join(lines) + "\nDONE: mov.f32 $0, s; }"


SHARED = "mov.u32 $0, global_smem;"
"""Where Triton's shared memory begins."""
LOAD = "ld.shared.f32 $0, [$1];"
STORE = "st.shared.f32 [$1], $2; mov.u32 $0, 0;"
STORE_SOME = "{ .reg .pred p; setp.lt.u32 p, $3, $4; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }"
"""Stores of the places `$3` below `$4`."""
TIMES = "mul.rn.f32 $0, $1, $2;"
