"""PTX that makes numbers of codes, run by an interpreter of its few instructions: every code, in each place."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from fastspec.kernels.launch import runs_ptx
from fastspec.kernels.quantised import mxfp4, reference
from fastspec.kernels.quantised.conversions import assembly, fold, group_assembly, pair_assembly, pair_table
from fastspec.kernels.quantised.reference import E4M3, FP4, INT8, MXFP4, NF4, PACKED4, PACKED8, Codes, StoredWeight

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


def run(program: str, outputs: int, given: Sequence[int], dtype: torch.dtype, memory: Sequence[int] = ()) -> list[int]:
    """What a program makes of its operands, which come after its outputs. Words of shared memory lie 128 bytes
    apart."""
    held = {f"${outputs + at}": word & MASK for at, word in enumerate(given)}
    values = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "mad.lo.u32": lambda a, b, c: a * b + c & MASK,
        "ld.shared.u32": lambda a: memory[a // 128],
        "xor.b32": lambda a, b: a ^ b,
        "shl.b32": lambda a, b: a << b & MASK,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b & MASK,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
        "fma.rn.bf16x2": lambda *abc: fma(*abc, dtype),
        "fma.rn.f16x2": lambda *abc: fma(*abc, dtype),
    }
    for line in re.sub(r"^\{[^;]*;|\}$", "", program).strip().splitlines():
        op, rest = line.rstrip(";").split(" ", 1)
        into, *operands = re.sub(r"[\[\]]", "", rest).split(", ")
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
    codes = KINDS[kind]
    wanted = numbers(codes, dtype) / fold(codes, dtype)
    program = pair_assembly(codes, dtype, zeros=False)
    table = pair_table(codes, dtype, torch.device("cpu")).tolist() if codes.table else []
    assert program is not None
    for octet in range(256):
        units = [(octet + 11) * odd & 255 for odd in range(1, 17, 2)]  # each place has every code
        words = struct.unpack("<2I", bytes(units))
        if codes.bits == 4:  # the lane's copy of a table begins at 20
            for at, unit in enumerate(units[:4]):
                (made,) = run(program, 1, [words[0], at, *([20] if table else [])], dtype, table)
                assert halves(made & MASK, dtype).tolist() == wanted[unit].tolist()
        else:
            for at in range(4):
                (word,) = run(program, 1, [*words, at], dtype)
                expected = [*wanted[units[2 * at]].tolist(), *wanted[units[2 * at + 1]].tolist()]
                assert halves(word, dtype).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero", range(16))
def test_zero_points_are_taken_off(zero: int, dtype: torch.dtype) -> None:
    less = torch.full((2,), zero * (-1.0 / fold(PACKED4, dtype)), dtype=dtype)
    word = struct.unpack("<I", less.view(torch.int16).numpy().tobytes())[0]
    program = pair_assembly(PACKED4, dtype, zeros=True)
    assert program is not None
    for octet in range(256):
        for at in range(4):
            given = [octet << 8 * at | 0xAB0000CD & ~(255 << 8 * at), at, word]
            made = halves(*run(program, 1, given, dtype), dtype) * fold(PACKED4, dtype)
            assert made.tolist() == [(octet & 15) - zero, (octet >> 4) - zero]


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_scales_are_exact_up_to_a_limit(dtype: torch.dtype, scale: torch.dtype) -> None:
    """Each power of 2 that a scale's dtype has, and the numbers beside it; products of smaller numbers stay whole steps
    of fp32."""
    largest, limit = fold(INT8, dtype), 2.0**122 if dtype == torch.bfloat16 else 2.0**119
    info, steps = torch.finfo(scale), {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[scale]
    first, last = round(math.log2(info.tiny)) - steps, round(math.log2(info.max))
    powers = torch.tensor([2.0**each for each in range(first, last)], dtype=torch.float64).to(scale)
    scales = torch.cat([powers, *((powers.double() * (1 + sign * info.eps)).to(scale) for sign in (1, -1))])
    larger = scales.float() * largest
    assert torch.equal(larger.double() == scales.double() * largest, scales.double() < limit)
    smallest = float(torch.tensor(1, dtype=torch.int16).view(dtype)) / largest
    assert smallest / 2.0**-149 == round(smallest / 2.0**-149) > 0


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


@triton.jit
def _factors(p_scales, p_first, p_second, DTYPE: tl.constexpr):
    o_scale = tl.arange(0, 256)
    b_first, b_second = mxfp4.factors(tl.load(p_scales + o_scale), DTYPE)
    tl.store(p_first + o_scale, b_first)
    tl.store(p_second + o_scale, b_second)


def powers(first: int) -> StoredWeight:
    """Every code of e2m1 with each scale, the eight codes of a word in turn from `first`: [256, 32] of four words."""
    codes = (torch.arange(8) + first) % 16
    octets = (codes[::2] | codes[1::2] << 4).to(torch.uint8).repeat(256, 4)
    scales = torch.arange(256).to(torch.uint8)[:, None].view(torch.float8_e8m0fnu)
    return StoredWeight(octets, MXFP4, scales, (1, 32), 32, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_times_every_power_of_2_are_the_reference(dtype: torch.dtype) -> None:
    """What a program makes of a word and of the factors of its scale, overflow, subnormal numbers and NaN included."""
    program, device = group_assembly(dtype), "cuda" if torch.cuda.is_available() else "cpu"
    assert program is not None
    factors = torch.zeros(2, 256, dtype=torch.int32, device=device)
    scales = torch.arange(256, device=device).to(torch.uint8)
    _factors[(1,)](scales, *factors, DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype])
    for first in (0, 8):
        weight = powers(first)
        wanted = reference.dequantised(weight, dtype).double()[:, :8]
        word = struct.unpack("<I", bytes(weight.codes[0, :4].tolist()))[0]
        for scale, (one, other) in enumerate(factors.T.tolist()):
            made = torch.stack([halves(each, dtype) for each in run(program, 4, [word, one, other], dtype)])
            assert torch.equal(made.T.flatten().nan_to_num(777), wanted[scale].nan_to_num(777)), scale


@triton.jit
def _numbers(p_words, p_scales, p_placed, p_wide, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Lines of 128 channels, by both orders of their numbers."""
    o_line, o_k = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    b_words = tl.load(p_words + o_line * 16 + tl.arange(0, 16)[None, :])
    b_scales = tl.load(p_scales + o_line * 4 + tl.arange(0, 4)[None, :])
    tl.store(p_placed + o_line * 128 + mxfp4.channel_of(o_k), mxfp4.numbers(b_words, b_scales, DTYPE, ASSEMBLY))
    tl.store(p_wide + o_line * 128 + o_k, mxfp4.wide_numbers(b_words, b_scales, DTYPE, ASSEMBLY))


@pytest.mark.parametrize("dtype", (torch.float32, *DTYPES), ids=str)
def test_numbers_stand_where_their_channels_do(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds to bf16 in another way")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (256, 64), generator=generator).to(torch.uint8)
    scales = torch.arange(1024).view(256, 4).to(torch.uint8)
    weight = StoredWeight(codes, MXFP4, scales.view(torch.float8_e8m0fnu), (1, 32), 128, None)
    wanted = reference.dequantised(weight, dtype).to(device)
    placed, wide = torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.float32)
    kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    program = group_assembly(dtype) if runs_ptx(torch.device(device)) else None
    _numbers[(4,)](codes.to(device).view(torch.int32), scales.to(device), placed, wide, DTYPE=kind, ASSEMBLY=program)
    assert torch.equal(placed.nan_to_num(777), wanted.nan_to_num(777))
    assert torch.equal(wide.nan_to_num(777), wanted.float().nan_to_num(777))


def test_places_are_those_of_channels() -> None:
    """Each of a block's once; `place_of` finds what `channel_of` put there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = torch.zeros(2, 256, dtype=torch.int32, device=device)
    _places[(1,)](places)
    assert places[1].tolist() == list(range(256)) and sorted(places[0, 128:].tolist()) == list(range(128, 256))
    assert places[0, :34].tolist() == [32 * (at // 2 % 4) + 4 * (at % 2) + at // 8 for at in range(32)] + [8, 12]


@triton.jit
def _places(p_out):
    o_place = tl.arange(0, 256)
    tl.store(p_out + o_place, mxfp4.channel_of(o_place))
    tl.store(p_out + 256 + o_place, mxfp4.place_of(mxfp4.channel_of(o_place)))


@pytest.mark.parametrize("make", [assembly, lambda kind, dtype: pair_assembly(kind, dtype, zeros=False)])
def test_there_is_none_for_other_codes_and_dtypes(make) -> None:
    assert make(INT8, torch.float32) is None and group_assembly(torch.float32) is None
    assert make(Codes(8, reference.Numbers.UNSIGNED, less=3), torch.bfloat16) is None
    assert make(Codes(4, reference.Numbers.UNSIGNED, high_first=True), torch.bfloat16) is None
