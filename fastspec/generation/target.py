"""The target of a call as the engine sees it: a model with key and value buffers of its own, which scores trees of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from torch import Tensor

from fastspec.generation.tree import TokenTree, Verdict


class Target(ABC):
    """A model with a cache that nobody else writes to; draft models are targets too, of trees that are chains.

    `score` and `commit` are programs on tensors that stay where they are, and wait for nothing: where `captures` is true the engine
    may run them inside a CUDA graph. They never capture anything themselves.
    """

    captures: bool = False
    """Whether `score` and `commit` may be captured."""

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
        """Score every node after the committed tokens and its ancestors -> logits [B, N, V], features [B, N, F]. No row has more than
        `extent` committed tokens, and there is room for them: see `reserve`.

        Where several processes hold the target and nobody reads more of the logits than the likeliest token, these may be that token
        [B, N, 1] int64, here and in `prefill`."""

    @abstractmethod
    def commit(self, verdict: Verdict, active: Tensor) -> None:
        """Keep the accepted path of the active [B] rows in the cache and drop the rest of the tree."""

    @abstractmethod
    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each."""

    @abstractmethod
    def rewind(self, lengths: Tensor) -> None:
        """Forget every row's committed tokens from lengths [B] on."""

    def reserve(self, committed: int) -> int:
        """Make room for this many committed tokens a row -> how many of them are in bounds. Without a buffer there is always room."""
        return committed

    def fits(self, committed: int) -> bool:
        """Whether there is room for so many already."""
        return True

    @property
    def bound(self) -> int:
        """Committed tokens a row that there is room for: what a captured program is bounded by."""
        raise NotImplementedError(f"{type(self).__name__} has no buffers, and is not captured")

    @property
    def buffers(self) -> Hashable:
        """What changes when the buffers are replaced by others; graphs that were captured before are no good then."""
        return None

    def copy_row(self, row: int, other: Target, count: int, source: int = 0) -> None:
        """Begin a row anew with the `count` committed tokens of row `source` of another target of the same model."""
        raise NotImplementedError(f"{type(self).__name__} cannot take another prompt in place of a row")
