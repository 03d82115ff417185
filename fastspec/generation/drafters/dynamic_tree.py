"""Dynamic trees: their candidates grown level by level and re-ranked, whatever model drafts them.

EAGLE-2 (arXiv 2406.16858, section 4): `top_k` children of the root, then `depth` passes that expand the `top_k` best
nodes of the last level, then a re-ranking of all candidates by cumulative log-probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from fastspec.default_trees import TreeShape, for_rows, sampled
from fastspec.errors import Unsupported
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.ops import Ops
from fastspec.generation.stats import unmarked
from fastspec.generation.tree import TokenTree
from fastspec.kernels.drafting.reference import Candidates

Expand = Callable[[Tensor, Tensor, int, Candidates], tuple[Tensor, Tensor, Tensor, Tensor]]
"""`Ops.topk_expand` of what an LM head reads [B, M, H], scores [B, M], a count and the place of the children."""


class TreeGrowth:
    """Candidates of the trees of one `shape`, written anew for every tree."""

    def __init__(self, shape: TreeShape, *, rows: int, device: torch.device) -> None:
        self.shape, k = shape, shape.top_k
        index = torch.arange(shape.candidates, device=device)
        self.depths = torch.where(index < k, 1, 2 + (index - k).clamp(min=0) // k**2)
        self.tokens = torch.zeros(rows, shape.candidates, dtype=torch.long, device=device)
        self.parents = torch.full((rows, shape.candidates), -1, device=device)
        """The candidate above each of the last tree's candidates [B, M], -1 for the root."""
        self.start = torch.zeros(rows, 1, dtype=torch.float32, device=device)
        self.no_words = torch.zeros(rows, 1, (max(1, shape.depth * k) + 63) // 64, dtype=torch.long, device=device)
        """The ancestors of the root among the nodes that passes read: none."""
        self.scores = torch.zeros(rows, shape.candidates, dtype=torch.float32, device=device)
        """Of the last tree's candidates [B, M] fp32: cumulative log-probabilities, in order of growth."""
        edges = [0, *(k + passes * k * k for passes in range(shape.depth + 1))]  # k nodes, then k * k a level
        levels = [slice(*edge) for edge in pairwise(edges)]
        self.levels = [
            Candidates(
                self.scores[:, at], self.tokens[:, at], None if below is None else self.parents[:, below], at.start
            )
            for at, below in zip_longest(levels, levels[1:])
        ]

    def grow(
        self,
        expand: Expand,
        readout: Tensor,
        deeper: Callable[[int, Tensor, Tensor], Tensor],
        mark: Callable[[str], None] = unmarked,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates in order of growth: scores [B, M] fp32, tokens [B, M], parents [B, M] (the root: -1).

        The LM head reads `readout` [B, 1, H] of the root, and what `deeper` gives of a level, counted from 0: a pass
        over those of the children tokens [B, M * C] that index [B, K] names -> [B, K, H].
        """
        shape, k = self.shape, self.shape.top_k
        _, tokens, scores, index = expand(readout, self.start, k, self.levels[0])
        mark("draft 0")
        for level in range(shape.depth):
            readout = deeper(level, tokens, index)
            _, tokens, scores, index = expand(readout, scores, k, self.levels[level + 1])
            mark(f"draft {level + 1}")
        return self.scores, self.tokens, self.parents

    def tree(
        self, ops: Ops, grown: tuple[Tensor, Tensor, Tensor], root: Tensor, nodes: int, max_path: int
    ) -> TokenTree:
        """The tree of root [B] and the best candidates, of this many nodes."""
        tokens, parents, depths, ancestors = ops.tree_build(*grown, self.depths, root, nodes)
        return TokenTree(tokens, parents, depths, ancestors, max_path)


def refuse_wide(shape: TreeShape, ops: Ops) -> None:
    """Raise Unsupported for a tree that the backend's kernels cannot grow."""
    if ops.most_children is not None and shape.top_k > ops.most_children:
        told = f"top_k={shape.top_k}, and its kernels draft at most {ops.most_children} children of a node"
    elif ops.most_candidates is not None and shape.candidates > ops.most_candidates:
        told = (
            f"depth={shape.depth} and top_k={shape.top_k}, which grow {shape.candidates} candidates (top_k + depth * "
            f"top_k ** 2), and its kernels rank at most {ops.most_candidates}"
        )
    else:
        return
    raise Unsupported(
        f'backend {ops.name!r} was given a tree of {told}: ask for a smaller tree, or patch with backend="torch"'
    )


@dataclass(frozen=True, kw_only=True)
class SizedDecoding(Decoding):
    """Decoding whose rounds may choose how many nodes their trees have."""

    name: str
    steps: tuple[Any, str] | None = None
    """A config, and the type of device for which it names the trees to choose from; None where all rounds have one."""
    temperature: float | None = None
    """The temperature of calls that sample."""
    device_steps: tuple[Any, str] | None = None
    """The same as `steps` of a device's own trees, for calls that take them where nothing else was asked for."""
    chooses_fed: bool = False
    """True where no rounds choose but those that the host corrects (`Place.FED`); others have the first tree."""

    def sampled(self, temperature: float) -> SizedDecoding:
        """The same for calls that sample at this temperature."""
        return self

    def sizes(self, rows: int, ops: Ops) -> tuple[tuple[TreeShape, ...], TreeShape]:
        """The trees that rounds choose from, ascending, and the first one, where they do."""
        assert self.steps is not None
        config, device_type = self.steps
        found: tuple[tuple[TreeShape, ...], TreeShape] = config.steps(device_type, rows)
        return found


@dataclass(frozen=True, kw_only=True)
class DynamicDecoding(SizedDecoding):
    """Decoding with dynamic trees, of a size that the call may choose."""

    shape: TreeShape
    batched: tuple[tuple[int, TreeShape], ...] = ()
    """(rows, the tree in batches of so many and more), ascending; `shape` in smaller ones."""
    cpp: TreeShape | None = None
    """The tree on the C++ kernels of the CPU; None: `shape` there too."""
    default: bool = False
    """True where the trees are the device's own, which are shallower in calls that sample."""

    def sampled(self, temperature: float) -> DynamicDecoding:
        if not self.default:
            return self
        batched = tuple((rows, sampled(shape, temperature)) for rows, shape in self.batched)
        return replace(self, shape=sampled(self.shape, temperature), batched=batched, temperature=temperature)

    def tree(self, rows: int, ops: Ops) -> TreeShape:
        """The tree of each of so many rows, the largest where rounds choose."""
        if self.steps is not None:
            return self.sizes(rows, ops)[0][-1]
        return self.cpp if self.cpp is not None and ops.name == "cpp" else for_rows(self.shape, self.batched, rows)

    def sizes(self, rows: int, ops: Ops) -> tuple[tuple[TreeShape, ...], TreeShape]:
        shapes, first = super().sizes(rows, ops)
        if self.cpp is not None and ops.name == "cpp":
            first = next((each for each in shapes if each.total_tokens == self.cpp.total_tokens), first)
        if self.temperature is None:
            return shapes, first
        return tuple(sampled(each, self.temperature) for each in shapes), sampled(first, self.temperature)


def trees_of(config: Any, device_type: str) -> tuple[dict[str, Any], int]:
    """Fields of a decoding by a config with the sizes of `Eagle3`, on this type of device; most children of a node."""
    shape, batched = config.shape(device_type), config.batched(device_type)
    steps = config, device_type
    fields = {
        "name": config.name,
        "shape": shape,
        "steps": steps if config.total_tokens == "auto" else None,
        "device_steps": steps if config.is_default and not config.fused else None,
        "batched": batched,
        "default": config.depth is None and config.top_k is None and not isinstance(config.total_tokens, int),
    }
    return fields, max(each.top_k for each in (shape, *(tree for _, tree in batched)))
