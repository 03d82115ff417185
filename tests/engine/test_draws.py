"""Random numbers by seed and position, against the generator that they are of, in whole numbers."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import EVERYWHERE

from fastspec.generation.verify import drawn_seed
from fastspec.kernels.verification.reference import MASK, STEP, draws, stream_of, uniform_at

kernel = pytest.importorskip("fastspec.kernels.verification.posterior_eval").draws


def mixed(x: int) -> int:
    """SplitMix64's output function."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_output_function_is_splitmix64s():
    """The first outputs for seed 1234567, which its implementations are commonly checked by."""
    assert [mixed((1234567 + n * STEP) & MASK) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]


def test_a_number_is_a_function_of_seed_and_position():
    seeds, positions = [0, 1, -1, 7, 2**63 - 1, -(2**63)], [0, 1, 2, 63, 4095, 2**31]
    want = [
        [(mixed((mixed((seed + STEP) & MASK) + place * STEP) & MASK) >> 40) * 2.0**-24 for place in positions]
        for seed in seeds
    ]
    got = uniform_at(torch.tensor(seeds)[:, None], torch.tensor(positions))
    assert got.dtype == torch.float32 and got.tolist() == want
    assert torch.equal(uniform_at(torch.tensor(7), torch.tensor(positions)[None])[0], got[3])


def test_numbers_are_uniform_over_positions_and_over_seeds():
    """Sixteen equal bins, and pairs that follow each other, by chi-squared tests at five standard deviations."""
    index = torch.arange(1 << 16)
    for numbers in (uniform_at(torch.tensor(3), index), uniform_at(index, torch.tensor(5))):
        assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
        bins = (numbers * 16).long()
        for which, count in ((bins, 16), (bins[1:] * 16 + bins[:-1], 256)):
            want = len(which) / count
            chi = ((torch.bincount(which, minlength=count) - want) ** 2 / want).sum()
            assert chi < count + 5 * (2 * count) ** 0.5


def test_a_seed_is_drawn_from_torchs_own_generator():
    torch.manual_seed(3)
    seeds = [drawn_seed() for _ in range(3)]
    torch.manual_seed(3)
    assert [drawn_seed() for _ in range(3)] == seeds and len(set(seeds)) == 3


@EVERYWHERE
def test_a_trees_numbers_are_those_of_its_depths_in_an_answer(device):
    """Of a kernel too: the first token of an answer has number 0, wherever it begins."""
    seeds, begun = torch.tensor([5, -(2**63), 2**63 - 1]), torch.tensor([0, 7, 2**31])
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3], [0, 0, 9, 63]])
    for further in (0, 1, 4095):
        want = uniform_at(seeds[:, None], depths + 1 + further)
        given = [each.to(device) for each in (stream_of(seeds, begun), begun + further, depths)]
        for op in (draws, kernel):
            assert torch.equal(op(*given).cpu(), want)
            assert torch.equal(op(*given[:2], given[2].T.contiguous().T).cpu(), want)
