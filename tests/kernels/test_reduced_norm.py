"""The norm of a product whose addends lie in several processes: here all of them in one, one launch after another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers_examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.layer.rms_norm import rms_norm
from fastspec.kernels.linear.reference import Addends, Parts, joined
from fastspec.kernels.parallel import reduced_norm

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off"))
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])


def write(space: Tensor, row: Tensor, sender: int, index: int, count: int) -> None:
    """Put a process's message into another's space, as words of a row's bits and the count."""
    bits = row.view(torch.int32).long() & 0xFFFFFFFF
    space[count & 1, sender, index, : len(bits)] = bits | (count << 32)


class Group:
    """Spaces of several processes on one device, all but the last of which are written to before they launch."""

    def __init__(self, processes: int, size: int, dtype: torch.dtype, device: str) -> None:
        shape = 2, processes, reduced_norm.MAX_ROWS, reduced_norm._words(size, dtype)
        self.spaces = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(processes)]
        self.addresses = torch.tensor([space.data_ptr() for space in self.spaces], device=device)
        self.counts = [torch.zeros(reduced_norm.MAX_ROWS, dtype=torch.int32, device=device) for _ in range(processes)]

    def run(self, own: list[Tensor | Parts], weight: Tensor, residual: Tensor | None, offset: float | None) -> list[tuple[Tensor, Tensor]]:
        """Every process's launch. Whom a process waits for has been written, by its own launch or here, word for word as that will."""
        rows = [joined(each).flatten(0, -2) for each in own]
        made = []
        for rank in range(len(own)):
            for other in range(rank + 1, len(own)):
                for index, row in enumerate(rows[other]):
                    write(self.spaces[rank], row, other, index, int(self.counts[other][index]) + 1)
            before = [space.clone() for space in self.spaces]
            made.append(reduced_norm.reduced_norm(
                own[rank], weight, 1e-5, residual, None, None, offset, self.addresses, self.counts[rank], rank, len(own)
            ))  # fmt: skip
            for other, space in enumerate(self.spaces):
                if other != rank:
                    for index, row in enumerate(rows[rank]):
                        write(before[other], row, rank, index, int(self.counts[rank][index]))
                assert torch.equal(space, before[other]), (rank, other)
        return made


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 3), size=st.sampled_from([2, 24, 64, 130]), dtype=st.sampled_from([torch.float32, torch.float16]),
    parts=st.integers(0, 3), with_residual=st.booleans(), offset=st.sampled_from([None, 1.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
@examples(25)
def test_every_process_gets_the_norm_of_the_sum(device, processes, size, dtype, parts, with_residual, offset, seed):
    """Bit for bit, message after message, with other numbers of rows in turn; nothing but its own words are written to the others."""
    torch.manual_seed(seed)
    group = Group(processes, size, dtype, device)
    weight = torch.randn(size, device=device).to(dtype)
    for rows in ((1,), (2, 2), (1,), (1, 3), (2, 2)):
        shape = *rows, size
        if parts:
            own = [Parts(torch.randn(parts, *shape, device=device), dtype) for _ in range(processes)]
        else:
            own = [torch.randn(shape, device=device).to(dtype) for _ in range(processes)]
        residual = torch.randn(shape, device=device).to(dtype) if with_residual else None
        total = torch.zeros(shape, device=device)
        for each in own:
            total = total + joined(each).float()
        want = rms_norm(total.to(dtype), weight, 1e-5, residual, offset=offset)
        for normed, summed in group.run(own, weight, residual, offset):
            assert torch.equal(normed, want[0]) and torch.equal(summed, want[1])


def test_what_one_launch_takes():
    group, none = SimpleNamespace(size=lambda: 2), None
    shapes = {(1, 1, 4096): True, (1, 128, 4096): True, (1, 129, 64): False, (1, 61, 8192): True, (1, 65, 8192): False, (0, 3, 64): False}
    for shape, fit in shapes.items():
        assert reduced_norm.fits(Addends(torch.empty(shape, dtype=torch.bfloat16), group, none)) is fit, shape
    assert reduced_norm.fits(Addends(torch.empty(1, 1, 7), group, none))
    assert not reduced_norm.fits(Addends(torch.empty(1, 1, 7, dtype=torch.float16), group, none))
    assert not reduced_norm.fits(Addends(torch.empty(1, 1, 8, dtype=torch.float64), group, none))


def test_addends_that_do_not_reach_each_other_are_added_by_the_op():
    x, weight, asked = torch.randn(2, 3, 8), torch.randn(8), []

    def all_reduce(own: Tensor, group: object) -> Tensor:
        asked.append(group)
        return 3 * own

    found = reduced_norm.rms_norm(Addends(x, "group", all_reduce), weight, 1e-5, x)
    want = rms_norm(3 * x, weight, 1e-5, x)
    assert asked == ["group"] and all(map(torch.equal, found, want))
