"""A head's draft phase as one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.generation.drafters.eagle.head_drafter import HeadDrafter

FUSED_TOP_K = 16
"""Children of a node that the draft phase in one launch expands at most."""


class FusedPhase:
    """The draft phase as one launch: it feeds the pairs that the last round accepted, and grows the tree."""

    def __init__(self, drafter: HeadDrafter, shape: TreeShape) -> None:
        kernel, program = drafter.ops.fused, drafter.program
        assert kernel is not None
        rows, width = drafter.root.shape[0], program.head.fc.in_features
        self.kernel = kernel
        packed = program.packed()
        assert packed is not None
        self.weights = kernel.draft_weights(program.head, *packed)
        self.space = kernel.draft_space(self.weights, rows=rows, pairs=shape.max_path, top_k=shape.top_k, depth=shape.depth)
        device = drafter.root.device
        self.tokens = torch.zeros(rows, shape.max_path, dtype=torch.long, device=device)
        self.features = torch.zeros(rows, shape.max_path, width, dtype=drafter.last.dtype, device=device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=device)

    @classmethod
    def of(cls, drafter: HeadDrafter, shape: TreeShape) -> FusedPhase | None:
        """The phase that grows trees of a shape, where the head, its weights and the backend allow it."""
        kernel, program = drafter.ops.fused, drafter.program
        fits = kernel is not None and shape.top_k <= FUSED_TOP_K and kernel.supports(program.config)
        plain = type(program.head.__dict__["_embed_tokens"]) is torch.nn.Embedding
        return cls(drafter, shape) if fits and plain and program.packed() is not None else None

    def run(self, drafter: HeadDrafter) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates, as `EagleDrafter._grow`."""
        k, v = drafter.attention.k[0], drafter.attention.v[0]
        return self.kernel.draft(
            self.weights, self.space, self.tokens, self.features, self.counts, drafter.last, drafter.readout, k, v,
            drafter.state.lengths, *drafter.tables, drafter.state.bound,
        )  # fmt: skip
