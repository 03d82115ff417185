"""The parts of a round and how they meet: a map for the reader, checked by the type checker.

    tree            = drafter.propose(extent)
    logits, feats   = target.score(tree, extent)
    picks           = choose(logits)                 argmax, or one draw per node
    verdict         = walk(tree, picks)
    target.commit(verdict, active); drafter.observe(tree, verdict, logits, feats, active, extent)

All tensors are static in shape and stay on the device; `extent` is a host integer, an upper bound of the cache slots that
any row may read, so that a captured round is shared by every length in one bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fastspec.generation.tree import TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class Ops:
    """The kernels of one backend; see `fastspec.kernels.reference` and `reference_round` for what each computes."""

    name: str
    attention_layout: Callable[..., Any]
    tree_attention: Callable[..., Tensor]
    cache_write: Callable[..., None]
    kv_block_copy: Callable[..., None]
    tree_input: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    commit_slots: Callable[..., tuple[Tensor, Tensor]]
    emit: Callable[..., Tensor]
    path_pairs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    keep_last: Callable[..., None]
    linear: Callable[..., Tensor]
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_cache: Callable[..., Tensor]
    gate_up: Callable[..., Tensor]
    topk_logprobs: Callable[..., tuple[Tensor, Tensor]]
    topk_expand: Callable[..., tuple[Tensor, ...]]
    next_frontier: Callable[..., tuple[Tensor, Tensor, Tensor]]
    head_input: Callable[..., Tensor]
    frontier_input: Callable[..., tuple[Tensor, Tensor, Tensor]]
    tree_build: Callable[..., tuple[Tensor, ...]]
    pick: Callable[..., Tensor]
    posterior_walk: Callable[..., tuple[Tensor, Tensor, Tensor]]
    linear_parts: Callable[..., Any] | None = None
    """`linear` where a norm follows: it may give the parts of its sum (`fastspec.kernels.reference.Parts`). None: `linear` itself."""
    experts: Callable[..., Tensor] | None = None
    """A mixture of experts; None leaves it to the model's own module."""
    fused: Any = None
    """The module `fastspec.kernels.drafter`, where the backend can run a whole draft phase in one launch."""
    captures: bool = False
    """Whether passes and rounds are captured as CUDA graphs, and weights that read one input packed."""


class LanguageModel(Protocol):
    """A model with its own KV cache, which nobody else sees."""

    @property
    def lengths(self) -> Tensor:
        """[B] int64: committed tokens of each row, on the device."""

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Append ids [B, T], of which the first counts [B] of a row are real -> logits of each row's last real token
        [B, V] and the features of all of them [B, T, F]."""

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        """Score every node after the committed tokens and its ancestors -> logits [B, N, V], features [B, N, F]."""

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        """Keep the accepted path of the active [B] rows in the cache and drop the rest of the tree."""

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each."""

    def rewind(self, lengths: Tensor) -> None:
        """Forget every row's committed tokens from lengths [B] on."""


class Drafter(Protocol):
    """Proposes a tree after the last emitted token and learns from what the target said of it.

    A tree has at most `nodes` nodes, and at most `max_path` on a path. Drafts that were drawn at random say so: `tree.q`.
    One that has an attribute `ends` finds the call's end tokens in it from `begin` on (frozenset of int). One with `open(capacity)` may
    be kept for later calls of its kind, each of which begins with it; the others are made anew. One with `static = True` keeps its tensors
    in place and waits for nothing in `propose` and `observe`: its rounds are captured, where the backend captures; it also has `open`,
    `reserve(committed)` and a `cache`, as `HeadState` has. What `observe` is given is valid until the next pass.
    One that fills its trees up with copies has the nodes of the last tree that are none, root left out, in `drafted` (an int per row).
    One that the host drives may have `digest(tree, verdict, logits, active)` -> [B, D] int64 and `take(digest, max_path)`: a captured round
    then computes the digest, reads it back with its own result, and hands it to `take` in place of `observe`.
    One with `join(row, other, count)` can take a new prompt of `count` tokens in place of a row that has ended: from `other`, another
    drafter of the same decoding and of one row, which has begun with it. Such a decoding says so: `joins = True`.
    One that goes without drafts at times has `rest()` -> for how many rounds from here on, asked before each that may have some, and
    `sat_out(tokens, counts)`: what the rows said meanwhile, [B, n] int64, of which a row that ended said the first counts[b] (int).
    """

    nodes: int
    max_path: int

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the prompt: ids [B, T] with counts [B] real tokens, the target's features of them [B, T, F], and the first
        emitted token root [B]."""

    def propose(self, extent: int) -> TokenTree:
        """The next tree; its root is the last emitted token."""

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Take the verdict on the last tree, and the target's raw logits [B, N, V] and features [B, N, F] of its nodes."""


class Decoding(Protocol):
    """A strategy as an object: what `generate(assistant=...)` accepts from third parties.

    For an encoder-decoder model, one with a method `reading(source)` is asked for the decoding of a call with this source
    (`fastspec.patches.seq2seq.Source`), and its drafter is given the decoder's tokens alone.
    """

    name: str
    taps: tuple[int, ...] | None
    """Which of transformers' hidden states the drafter reads; None for no features, () for the last one after the norm."""

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Callable[[Tensor], Tensor] | None) -> Drafter | None:
        """Make the drafter of one generate call; None decodes token by token. A decoding that `joins` is asked for one of a single row
        besides, and again for every prompt where that one has no `open`: each is an object of its own.

        `process` maps scores [R, V] as the call's processors do, where the call samples and they look at no history: drafts
        may then be drawn from a distribution of the drafter's own, given as `tree.q`. Where it is None they are not.
        """
