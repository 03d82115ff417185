"""Constraints on an answer's tokens, such as a grammar: bit masks of the tokens that may follow each node of a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec.generation.tree import TokenTree

Nodes = tuple[list[list[int]], list[list[int]]]
"""Tokens and parents of the nodes of each row's tree."""


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a number has."""


class Constraint(Protocol):
    """Constraint on the tokens of one answer, whose state it holds. A mask has 32 tokens to a word."""

    @property
    def words(self) -> int:
        """Words of a mask."""

    def fill(self, masks: Tensor, answer: list[int], tokens: list[int], parents: list[int]) -> None:
        """Write masks [N, words] int32, on the CPU, of the tokens that may follow each node of a tree.

        Node 0 stands for all of `answer`; the others are drafts behind it, parents before their children. Where a draft
        itself is not allowed, all bits of it and of what is below it are 1: no walk gets there.
        """

    def follow(self, answer: list[int]) -> None:
        """Go to the end of an answer, for `fill_rows`."""

    @staticmethod
    def fill_rows(states: Sequence[tuple[Any, int]], masks: Tensor) -> None:
        """Write the masks of constraints of this class that stand behind their answers, each to its place in masks
        [B, words]. `check` says what went wrong."""

    def check(self) -> None:
        """Raise what went wrong in `fill_rows`."""


def nodes_of(tree: TokenTree) -> Nodes:
    """Tokens and parents of a tree's nodes, row by row. Of roots alone both are 0, which stands for the answer: masks
    are then made while a device scores them."""
    if tree.tokens.shape[1] == 1:
        return roots_of(len(tree.tokens))
    return tree.tokens.tolist(), tree.parents.tolist()


def roots_of(rows: int) -> Nodes:
    """`nodes_of` of roots alone."""
    roots = [[0]] * rows
    return roots, roots


def raised(row: int, error: BaseException) -> None:
    """Raise what a row's constraint has raised."""
    raise error


@cache
def unset_bits(device: torch.device) -> Tensor:
    """Of each byte of a mask eight bytes [256] int64, which are 1 where its bits are 0."""
    unset = [sum((~byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)]
    return torch.tensor(unset, dtype=torch.int64, device="cpu").to(device)


class Masks:
    """Masks of the rows of one round after another, filled on the host and brought to a device by one copy, which the
    host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.int32, device="cpu")
        """Masks of all nodes, and behind them a word for each row, which is not 0 where the row is constrained."""
        self.unset = unset_bits(device)
        self.copied: torch.cuda.Event | None = None
        """Passed when the device has read the memory."""

    def fill(
        self,
        nodes: Nodes,
        held: Sequence[tuple[int, Constraint, list[int]]],
        failed: Callable[[int, BaseException], None] = raised,
    ) -> None:
        """Fill the masks of rows with a constraint and an answer; other rows may take any token. `failed` takes what a
        row's constraint raises: its masks then say nothing."""
        tokens, parents = nodes
        self._open(len(tokens), len(tokens[0]), max(constraint.words for _, constraint, _ in held))
        alike = len({(type(constraint), constraint.words) for _, constraint, _ in held}) == 1
        together: list[tuple[Constraint, int]] = []
        for row, constraint, answer in held:
            try:
                self.constrained[row] = 1
                if alike and len(tokens[0]) == 1:
                    constraint.follow(answer)
                    together.append((constraint, row))
                else:
                    self.words[row, :, constraint.words :] = 0
                    constraint.fill(self.words[row, :, : constraint.words], answer, tokens[row], parents[row])
            except BaseException as error:
                failed(row, error)
        if together:
            together[0][0].fill_rows(together, self.words[:, 0])
        for constraint, row in together:
            try:
                constraint.check()
            except BaseException as error:
                failed(row, error)

    def _open(self, rows: int, nodes: int, words: int) -> None:
        """Masks [B, N, W] that allow every token."""
        count = rows * nodes * words
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.memory) < count + rows:
            pinned = self.device.type == "cuda"
            self.memory = torch.empty(count + rows, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.words = self.memory[:count].view(rows, nodes, words).fill_(-1)
        self.constrained = self.memory[count : count + rows].zero_()

    def masked(self, logits: Tensor) -> Tensor:
        """logits [B, N, V] with -inf at the tokens that masks forbid, and at those past a mask's last bit. Rows without
        a constraint stay as they are."""
        words, constrained = self.words, self.constrained
        if self.device.type != "cpu":
            count = words.numel()
            memory = self.memory[: count + len(constrained)].to(self.device, non_blocking=self.device.type == "cuda")
            words, constrained = memory[:count].view(words.shape), memory[count:]
        if self.device.type == "cuda":
            self.copied = self.copied or torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(self.device))
        forbidden = self.unset.index_select(0, words.view(torch.uint8).flatten().int())
        forbidden = forbidden.view(torch.bool).view(*words.shape[:2], -1)
        lacking = logits.shape[-1] - forbidden.shape[-1]
        if lacking > 0:
            rest = constrained.bool()[:, None, None].expand(-1, forbidden.shape[1], lacking)
            forbidden = torch.cat((forbidden, rest), -1)
        forbidden = forbidden[..., : logits.shape[-1]]
        return _without(logits, forbidden) if logits.device.type == "cpu" else logits.masked_fill(forbidden, -torch.inf)


def _without(logits: Tensor, forbidden: Tensor) -> Tensor:
    """Logits on the CPU with -inf where they are forbidden, in half the time of torch's `masked_fill`."""
    kept, bits = logits.detach().clone(), INTEGERS[logits.element_size()]
    least = torch.tensor(-torch.inf, dtype=logits.dtype, device="cpu").view(bits).item()
    kept.view(bits).numpy()[forbidden.numpy()] = least
    return kept
