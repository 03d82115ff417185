"""A head's draft phase as one launch.

It runs where a user asks for it (`Eagle3(fused=True)`), and gives what the separate kernels give. These are what fastspec takes otherwise:
in a captured graph they were faster with every head that was measured, of 15 MiB to 2.6 GiB (docs/assistants.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.generation.drafters.eagle.head_drafter import HeadDrafter
from fastspec.generation.layers.decoder import is_plain

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
        return cls(drafter, shape) if why_separate(drafter, shape) is None else None

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs that wait for the next launch, which it will not feed: tokens [B, P], features [B, P, F], how many count [B]."""
        counts = self.counts.clone()
        self.counts.zero_()
        return self.tokens, self.features, counts

    def run(self, drafter: HeadDrafter) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates, as `EagleDrafter._grow`."""
        k, v = drafter.attention.k[0], drafter.attention.v[0]
        return self.kernel.draft(
            self.weights, self.space, self.tokens, self.features, self.counts, drafter.last, drafter.readout, k, v,
            drafter.state.lengths, *drafter.tables, drafter.state.bound,
        )  # fmt: skip


def why_separate(drafter: HeadDrafter, shape: TreeShape) -> str | None:
    """Why a drafter's phase cannot be one launch, and what would let it; None where it can."""
    kernel, program = drafter.ops.fused, drafter.program
    if kernel is None:
        return f'the backend {drafter.ops.name!r} has no kernel for it: fastspec.patch(model, backend="triton") has'
    if shape.top_k > FUSED_TOP_K:
        return f"it expands up to {FUSED_TOP_K} children of a node, not top_k={shape.top_k}"
    if not kernel.supports(program.config):
        return (
            "it runs one-layer EAGLE-3 heads with an LM head of their own, without biases and norms of queries, keys or features, of "
            f"widths in multiples of 16 and a head size that is a power of 2, and this head is {program.config}"
        )
    if program.cut is not None:
        return "its weights are read whole, and several processes have this head together"
    embedding = program.head.__dict__["_embed_tokens"]
    if embedding is None or not is_plain(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
        return f"it reads the table of a plain torch.nn.Embedding, without hooks and max_norm, and the target's is {embedding}"
    if program.weight is None:
        return f"it reads the weight of a plain LM head, a torch.nn.Linear without hooks, and this head's is {program.vocabulary}"
    return "the head's weights do not lie together in memory: load it anew" if program.packed() is None else None
