"""Targets: models with buffers of their own, and the parts in which they read prompts.

Wide parts fill a GPU and read the weights seldom; narrow ones keep the activations of many rows, and the rings of
windowed layers, small. The last is padded to one of a few widths (`fastspec.generation.capture.padded_width`), whose
graphs serve all prompts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.generation.capture import NARROWEST
from fastspec.generation.tree import TokenTree, Verdict


class Buffered:
    """Buffers of the rows of a call, which may grow; without any there is always room."""

    def reserve(self, committed: int) -> int:
        """Make room for this many committed tokens a row -> how many of them are in bounds."""
        return committed

    def fits(self, committed: int) -> bool:
        """True where there is room for so many already."""
        return True

    def bytes(self, committed: int) -> int:
        """Memory of the buffers with room for so many committed tokens a row, whatever there is room for now."""
        return 0

    @property
    def buffers(self) -> Hashable:
        """A value that changes when the buffers are replaced by others, which makes captured graphs void."""
        return None


class Target(Buffered, ABC):
    """A model with a cache that nobody else writes to; draft models are targets too, of trees that are chains."""

    captures: bool = False
    """True where `score` and `commit` may be captured: they work on tensors that stay, and wait for nothing."""

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """[B] int64: committed tokens of each row, on the device."""

    @abstractmethod
    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Append ids [B, T], of which the first counts [B] of a row are real -> logits of each row's last real token
        [B, V] and the features of all of them [B, T, F]."""

    @abstractmethod
    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        """Score every node after the committed tokens and its ancestors -> logits [B, N, V], features [B, N, F]. No row
        has more than `extent` committed tokens, for which `reserve` has made room.

        Where several processes hold the target and the likeliest token alone is read, the logits may be that token [B,
        N, 1] int64, here and in `prefill`."""

    @abstractmethod
    def commit(self, verdict: Verdict, active: Tensor) -> None:
        """Keep the accepted path of the active [B] rows in the cache and drop the rest of the tree."""

    @abstractmethod
    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each."""

    @abstractmethod
    def rewind(self, lengths: Tensor) -> None:
        """Forget every row's committed tokens from lengths [B] on."""

    @property
    def bound(self) -> int:
        """Committed tokens a row that there is room for: what a captured program is bounded by."""
        raise NotImplementedError(f"{type(self).__name__} has no buffers, and is not captured")

    def reusable(self, row: int, known: int, most: int, reached: int) -> int:
        """The number of a row's first tokens that another text can go on from: no more than the `known` ones that it
        committed, and than `most`. The row was written up to slot `reached`. 0 where there is nothing to go on from."""
        return 0

    def copy_row(self, row: int, other: Target, count: int, source: int = 0) -> None:
        """Begin a row anew with the `count` committed tokens of row `source` of another target of the same model."""
        raise NotImplementedError(f"{type(self).__name__} cannot take another prompt in place of a row")


def compact(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's real tokens to the front -> ids [B, max count], counts [B]; keep [B, T] may lie on the host."""
    counts = keep.sum(1)
    if bool(keep.all()):
        return ids.clone(), counts.to(ids.device)
    order = torch.argsort((~keep).int(), dim=1, stable=True)[:, : int(counts.max())]
    return ids.gather(1, order.to(ids.device)), counts.to(ids.device)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An encoder's reading of a call's rows: `states` [B, S, D], and the `mask` [B, S] and tokens `ids` [B, S] that the
    call brought, or None. `shared` says whether they are the decoder's tokens too."""

    states: Tensor
    mask: Tensor | None
    ids: Tensor | None
    shared: bool = True

    def text(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """The source's tokens and then the decoder's ids [B, T], without padding: tokens [B, S + T at most], counts
        [B]; None without tokens that the decoder knows."""
        if self.ids is None or not self.shared:
            return None
        keep = torch.ones_like(self.ids) if self.mask is None else self.mask.to(self.ids.device)
        whole, real = torch.cat((self.ids, ids), 1), torch.cat((keep.bool(), torch.ones_like(ids, dtype=torch.bool)), 1)
        return compact(whole, real)


NARROW = 512
WIDE = 2048
MOST = 2**15
"""Tokens of all rows together that a captured pass reads, so that its activations stay below gigabytes."""


def widest_part(rows: int, *, captures: bool, windows: bool = False) -> int:
    """The most tokens of each of `rows` prompts that a pass reads: NARROW where the device does not capture. Where it
    does, WIDE in all rows together, but NARROW of each at least, and MOST in all at most, where that leaves each
    NARROWEST. With `windows`, whose rings hold a part beside the window, NARROW at most."""
    if not captures:
        return NARROW
    widest = NARROW if windows else max(NARROW, _power_below(max(1, WIDE // rows)))
    return min(widest, _power_below(max(NARROWEST, MOST // rows)))


def prompt_parts(length: int, widest: int) -> Iterator[tuple[int, int]]:
    """Begin and width of a prompt's parts: powers of two above NARROW, `widest` at most, then the rest."""
    begin, narrow = 0, min(NARROW, widest)
    while begin < length:
        left = length - begin
        width = left if left <= narrow else min(widest, _power_below(left))
        yield begin, width
        begin += width


def _power_below(number: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (number.bit_length() - 1)
