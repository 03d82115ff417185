"""PTX that makes numbers of codes, run by an interpreter of its few instructions: every code, in each place."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import pytest
import torch

from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.conversions import assembly, pair_assembly, table_words
from fastspec.kernels.quantised.reference import E4M3, FP4, INT8, NF4, PACKED4, PACKED8, Codes, StoredWeight

KINDS = {"int8": INT8, "8 bits": PACKED8, "e4m3": E4M3, "4 bits": PACKED4, "nf4": NF4, "fp4": FP4}
DTYPES = torch.bfloat16, torch.float16
MASK = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    octets, out = (a | b << 32).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        octet = octets[nibble & 7]
        out |= (0xFF if octet & 0x80 else 0) << 8 * i if nibble & 8 else octet << 8 * i
    return out


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """Two numbers of a word, float64."""
    pair = struct.unpack("<2h", struct.pack("<I", word))
    return torch.tensor(pair, dtype=torch.int16).view(dtype).double()


def fma(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    made = (halves(a, dtype) * halves(b, dtype) + halves(c, dtype)).to(dtype)
    return struct.unpack("<I", made.view(torch.int16).numpy().tobytes())[0]


def run(program: str, outputs: int, given: Sequence[int], dtype: torch.dtype) -> list[int]:
    """What a program makes of its operands, which come after its outputs."""
    held = {f"${outputs + at}": word & MASK for at, word in enumerate(given)}
    values = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b & MASK,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
        "fma.rn.bf16x2": lambda *abc: fma(*abc, dtype),
        "fma.rn.f16x2": lambda *abc: fma(*abc, dtype),
    }
    for line in re.sub(r"^\{[^;]*;|\}$", "", program).strip().splitlines():
        op, rest = line.rstrip(";").split(" ", 1)
        into, *operands = rest.split(", ")
        held[into] = values[op](*(held[each] if each in held else int(each, 0) for each in operands))
    return [held[f"${at}"] for at in range(outputs)]


def numbers(kind: Codes, dtype: torch.dtype) -> torch.Tensor:
    """What all bytes stand for, one number each of 8 bits or two of 4; NaN of e4m3 is 480."""
    octets = torch.arange(256).to(torch.uint8)[:, None]
    weight = StoredWeight(octets, kind, torch.ones(256, 1), (1, 2), 8 // kind.bits, torch.float32)
    found = reference.numbers(weight)
    return torch.where(found.isnan(), octets.ge(128).float() * -960 + 480, found).to(dtype).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_of_two_codes_becomes_a_word_of_two_numbers(kind: str, dtype: torch.dtype) -> None:
    codes, wanted = KINDS[kind], numbers(KINDS[kind], dtype)
    program, table = pair_assembly(codes, dtype, zeros=False), table_words(codes, dtype)
    assert program is not None and len(table) == (8 if codes.table else 0)
    for octet in range(256):
        other = octet * 37 + 11 & 255
        if table:  # two units at once, and each word of the table twice
            doubled = [word for word in table for _ in range(2)]
            made = run(program, 2, [octet, other, *doubled], dtype)
            for word, unit in zip(made, (octet, other), strict=True):
                assert halves(word, dtype).tolist() == wanted[unit].tolist()
        elif codes.bits == 4:
            assert halves(*run(program, 1, [octet], dtype), dtype).tolist() == wanted[octet].tolist()
        else:
            (word,) = run(program, 1, [octet | other << 8], dtype)
            assert halves(word, dtype).tolist() == [*wanted[octet].tolist(), *wanted[other].tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero", [0, 7, 15])
def test_zero_points_are_taken_off(zero: int, dtype: torch.dtype) -> None:
    base = -(128 if dtype == torch.bfloat16 else 1024) - zero
    word = struct.unpack("<I", torch.full((2,), base, dtype=dtype).view(torch.int16).numpy().tobytes())[0]
    program = pair_assembly(PACKED4, dtype, zeros=True)
    assert program is not None
    for octet in range(256):
        assert halves(*run(program, 1, [octet, word], dtype), dtype).tolist() == [
            (octet & 15) - zero,
            (octet >> 4) - zero,
        ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_four_bytes_becomes_words_of_two_numbers(kind: str, dtype: torch.dtype) -> None:
    codes, wanted = KINDS[kind], numbers(KINDS[kind], dtype)
    program, count = assembly(codes, dtype), 32 // codes.bits
    assert program is not None
    for octet in range(256):
        four = [octet, octet * 37 + 11 & 255, octet * 91 + 5 & 255, 255 - octet]
        made = run(program, count // 2, [int.from_bytes(bytes(four), "little")], dtype)
        found = torch.cat([halves(word, dtype) for word in made])
        even = torch.cat([wanted[each, :1] for each in four])
        expected = even if codes.bits == 8 else torch.cat((even, *(wanted[each, 1:] for each in four)))
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("make", [assembly, lambda kind, dtype: pair_assembly(kind, dtype, zeros=False)])
def test_there_is_none_for_other_codes_and_dtypes(make) -> None:
    assert make(INT8, torch.float32) is None
    assert make(Codes(8, reference.Numbers.UNSIGNED, less=3), torch.bfloat16) is None
    assert make(Codes(4, reference.Numbers.UNSIGNED, high_first=True), torch.bfloat16) is None
