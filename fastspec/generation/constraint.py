"""Constraints on an answer's tokens, such as a grammar: bit masks of the tokens that may follow each node of a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fastspec.constants import constant
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

    def allows(self, answer: list[int], token: int) -> bool:
        """True where a token may follow an answer. False says nothing: a mask may have it still."""

    @staticmethod
    def fill_rows(states: Sequence[tuple[Any, int]], masks: Tensor) -> None:
        """Write the masks of constraints of this class that stand behind their answers, each to its place in masks
        [B, words]. `check` says what went wrong."""

    def check(self) -> None:
        """Raise what went wrong in `fill_rows`."""


@dataclass(frozen=True, slots=True)
class AnyToken:
    """Constraint that allows every token, by masks of so many words."""

    words: int

    def fill(self, masks: Tensor, answer: list[int], tokens: list[int], parents: list[int]) -> None:
        allow_all(masks)

    def follow(self, answer: list[int]) -> None:
        """Nothing depends on the answer."""

    def allows(self, answer: list[int], token: int) -> bool:
        return False  # so that masks are made

    @staticmethod
    def fill_rows(states: Sequence[tuple[AnyToken, int]], masks: Tensor) -> None:
        for _, row in states:
            masks[row] = -1

    def check(self) -> None:
        """Nothing goes wrong."""


Held: TypeAlias = Sequence[tuple[int, Constraint, list[int]]]
"""Rows with a constraint and the answer so far."""


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


def allow_all(masks: Tensor) -> None:
    """Set all bits of masks [..., words] on the host. Not by torch, which wakes a thread for every core from 32,768
    words on: beside other programs a round would wait for the slowest of them, for longer than its pass takes."""
    masks.numpy()[...] = -1


def raised(row: int, error: BaseException) -> None:
    """Raise what a row's constraint has raised."""
    raise error


@constant
def unset_bits(device: torch.device) -> Tensor:
    """Of each byte of a mask eight bytes [256] int64, which are 1 where its bits are 0."""
    unset = [sum((~byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)]
    return torch.tensor(unset, dtype=torch.int64, device="cpu").to(device)


class Masks:
    """Masks of the rows of one round after another, filled on the host and brought to a device by one copy, which the
    host does not wait for. Where they lie there stays the same from round to round, so that a captured round may read
    them: `key` is another where it does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.int32, device="cpu")
        self.there = self.memory.to(device)
        """The memory's copy on the device, which is the memory itself on the CPU."""
        self.unset = unset_bits(device)
        self.wide = 0
        """Words of the widest mask so far, which all have."""
        self.copied: torch.cuda.Event | None = None
        """Passed when the device has read the memory."""

    @property
    def key(self) -> Hashable:
        """Key of where the masks lie, and of their shape."""
        return self.there.data_ptr(), self.words.shape

    def fill(
        self,
        nodes: Nodes,
        size: int,
        held: Held,
        failed: Callable[[int, BaseException], None] = raised,
        at: Sequence[int] = (),
    ) -> None:
        """Fill the masks of rows with a constraint and an answer, for logits of `size` tokens; other rows may take any
        token, and these none past a mask's last bit. `failed` takes what a row's constraint raises. Where masks are of
        one node a row, `at` may name these nodes, which the same copy brings."""
        tokens, parents = nodes
        most = max(constraint.words for _, constraint, _ in held)
        self.wide = max(self.wide, most, -(-size // 32))
        here = self._open(len(tokens), len(tokens[0]), self.wide)
        if at:
            self.memory.numpy()[here.numel() : here.numel() + len(at)] = at
        alike = len({(type(constraint), constraint.words) for _, constraint, _ in held}) == 1
        together: list[tuple[Constraint, int]] = []
        for row, constraint, answer in held:
            try:
                if constraint.words < here.shape[2]:
                    here[row, :, constraint.words :] = 0
                if alike and len(tokens[0]) == 1:
                    constraint.follow(answer)
                    together.append((constraint, row))
                else:
                    constraint.fill(here[row, :, : constraint.words], answer, tokens[row], parents[row])
            except BaseException as error:
                failed(row, error)
        if together:
            roots = here[:, 0].numpy()
            packed = roots if most == roots.shape[1] else roots[:, :most].copy()
            together[0][0].fill_rows(together, torch.from_numpy(packed))
            if packed is not roots:
                roots[:, :most] = packed
        for constraint, row in together:
            try:
                constraint.check()
            except BaseException as error:
                failed(row, error)
        self._bring()

    def _open(self, rows: int, nodes: int, words: int) -> Tensor:
        """Masks [B, N, W] on the host that allow every token."""
        shape, count = (rows, nodes, words), rows * nodes * words
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.memory) < count + rows:
            pinned = self.device.type == "cuda"
            self.memory = torch.empty(count + rows, dtype=torch.int32, device="cpu", pin_memory=pinned)
            self.there = self.memory if self.device.type == "cpu" else self.memory.to(self.device)
        self.words = self.there[:count].view(shape)
        """The round's masks [B, N, W] on the device."""
        self.at = self.there[count : count + rows]
        """The nodes [B] that `fill` was told of, on the device."""
        found = self.memory[:count].view(shape)
        allow_all(found)
        return found

    def _bring(self) -> None:
        if self.device.type != "cpu":
            count = self.words.numel() + len(self.at)
            self.there[:count].copy_(self.memory[:count], non_blocking=True)
        if self.device.type == "cuda":
            self.copied = self.copied or torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(self.device))

    def masked(self, logits: Tensor) -> Tensor:
        """logits [B, N, V] with -inf at the tokens that masks forbid; it launches work on the device alone."""
        forbidden = self.unset.index_select(0, self.words.view(torch.uint8).flatten().int())
        forbidden = forbidden.view(torch.bool).view(*self.words.shape[:2], -1)[..., : logits.shape[-1]]
        return _without(logits, forbidden) if logits.device.type == "cpu" else logits.masked_fill(forbidden, -torch.inf)


class ConstrainedWalk:
    """Walk of one row down its tree along the likeliest tokens that a constraint allows. `text` is the answer so far,
    and all nodes `at` stand for it: trees may hold a draft twice."""

    def __init__(self, row: int, constraint: Constraint, answer: list[int]) -> None:
        self.row, self.constraint, self.text, self.at = row, constraint, list(answer), [0]

    def step(self, token: int, tokens: list[int], parents: list[int], picks: list[int]) -> None:
        """Pick a token here, and go on to the drafts of it, if any."""
        for node in self.at:
            picks[node] = token
        drafts = range(self.at[0] + 1, len(tokens))
        self.text.append(token)
        self.at = [node for node in drafts if tokens[node] == token and parents[node] in self.at]

    def run(self, tokens: list[int], parents: list[int], picks: list[int]) -> bool:
        """Go on while picks are allowed -> True where a mask has to say what is."""
        while self.at:
            token = picks[self.at[0]]
            if not self.constraint.allows(self.text, token):
                return True
            self.step(token, tokens, parents, picks)
        return False


def _without(logits: Tensor, forbidden: Tensor) -> Tensor:
    """Logits on the CPU with -inf where they are forbidden, in half the time of torch's `masked_fill`."""
    kept, bits = logits.detach().clone(), INTEGERS[logits.element_size()]
    least = torch.tensor(-torch.inf, dtype=logits.dtype, device="cpu").view(bits).item()
    kept.view(bits).numpy()[forbidden.numpy()] = least
    return kept
