"""Messages between processes, of which all are one here: their spaces, and what another would have written there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastspec.kernels.parallel.words import BLANK, ROWS, Space, words_of


def write(space: Tensor, row: Tensor, sender: int, index: int, count: int) -> None:
    """Put a process's message into another's space, as words of a row's bits."""
    bits = row.view(torch.int32)
    space[count & 1, sender, index, : len(bits)] = bits


class Group:
    """Spaces of several processes on one device, all but the last of which are written to before they launch."""

    def __init__(self, processes: int, size: int, dtype: torch.dtype, device: str) -> None:
        shape = 2, processes, ROWS, words_of(size, dtype)
        self.spaces = [torch.full(shape, BLANK.value, dtype=torch.int32, device=device) for _ in range(processes)]
        addresses = torch.tensor([space.data_ptr() for space in self.spaces], device=device)
        self.counts = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in range(processes)]
        self.seen = [Space(addresses, counts, rank, processes, shape[-1]) for rank, counts in enumerate(self.counts)]

    def launch(self, rank: int, rows: list[Tensor], run: Callable[[Space], Tensor]) -> Tensor:
        """What a process's launch makes, when whom it waits for has written: rows [R, H] of every process are its
        messages. Nothing but its own may be written, to the others, and its own space is blank behind it."""
        for other, theirs in enumerate(rows):
            if other != rank:
                for index, row in enumerate(theirs):
                    write(self.spaces[rank], row, other, index, int(self.counts[rank][index]) + 1)
        made = run(self.seen[rank])
        wanted = self.blank()
        for other, want in enumerate(wanted):
            if other != rank:
                for index, row in enumerate(rows[rank]):
                    write(want, row, rank, index, int(self.counts[rank][index]))
        self.compare(rank, wanted)
        return made

    def blank(self) -> list[Tensor]:
        return [torch.full_like(space, BLANK.value) for space in self.spaces]

    def compare(self, rank: int, wanted: list[Tensor]) -> None:
        """Hold the spaces to what they should be, and make them blank for the next process."""
        for other, (space, want) in enumerate(zip(self.spaces, wanted, strict=True)):
            assert torch.equal(space, want), (rank, other)
            space.fill_(BLANK.value)

    def launch_with_owners(self, rank: int, rows: list[Tensor], sums: Tensor, run: Callable[[Space], Tensor]) -> Tensor:
        """The same where a row has an owner, who gets the others' addends, and writes the row [H] of the sums to
        them."""
        size = len(self.spaces)
        for index in range(len(sums)):
            count, owner = int(self.counts[rank][index]) + 1, index % size
            for other in range(size):
                if other != rank and owner == rank:
                    write(self.spaces[rank], rows[other][index], other, index, count)
            if owner != rank:
                write(self.spaces[rank], sums[index], owner, index, count)
        made = run(self.seen[rank])
        wanted = self.blank()
        for index in range(len(sums)):
            count, owner = int(self.counts[rank][index]), index % size
            for other in range(size):
                if owner == rank and other != rank:
                    write(wanted[other], sums[index], rank, index, count)
            if owner != rank:
                write(wanted[owner], rows[rank][index], rank, index, count)
        self.compare(rank, wanted)
        return made


def near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Sums to the bit. Norms, whose squares another kernel may add in another order, to what that changes in fp32, or
    to how it is rounded elsewhere, twice."""
    (norm, total), (want, added) = found, wanted
    most = float(torch.finfo(want.dtype).eps) * (8 if want.dtype == torch.float32 else 2)
    return torch.equal(total, added) and torch.allclose(
        norm.float(), want.float(), rtol=most, atol=torch.finfo(want.dtype).tiny
    )
