"""The one-launch drafter: an EAGLE-3 head whose whole draft phase is one cooperative Triton kernel
(`fastspec/kernels/drafting/fused/`), which `Eagle3(fused=True)` and `frontier_generate(backend="triton")` choose.

It drafts the trees of `EagleDrafter`: the pairs that a round accepted wait in buffers for the next launch, which feeds
them and grows the next tree, level by level, with a barrier over the whole chip between two phases. Launched from
Python a phase takes 0.5 ms instead of 13; in a CUDA graph the separate kernels were faster with every head that was
measured, 0.46 ms instead of 0.50 at best (benchmarks/results/drafter_h200.jsonl and drafter_h100.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastspec.default_trees import TreeShape
from fastspec.devices import made_current
from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import is_plain
from fastspec.generation.drafters.base import Drafter
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.drafters.head_program import Cut
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import choose_backend, triton_ops
from fastspec.patches.checks.self_check import self_check

MOST_CHILDREN = 16
"""Children of a node that the kernel expands."""


def fused_drafter(
    head: BoundHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops, cut: Cut | None = None
) -> EagleDrafter:
    """`FusedDrafter`, whose kernel is checked first on a device that it was never measured on."""
    drafter = FusedDrafter(head, shape, rows=rows, capacity=capacity, ops=ops, cut=cut)
    self_check(triton_ops(), drafter.last.dtype, drafter.last.device, FusedDrafter)
    return drafter


class FusedDrafter(EagleDrafter):
    """`EagleDrafter` in one launch a phase. Raises Unsupported, with the reason, where that cannot be."""

    def __init__(
        self, head: BoundHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops, cut: Cut | None = None
    ) -> None:
        if ops.name != "triton":
            raise _refused(
                f'the backend {ops.name!r} has no kernel for it: fastspec.patch(model, backend="triton") has'
            )
        from fastspec.kernels.drafting.fused.draft import draft, draft_space, draft_weights, supports

        if shape.top_k > MOST_CHILDREN:
            raise _refused(f"it expands up to {MOST_CHILDREN} children of a node, not top_k={shape.top_k}")
        if not supports(head.config):
            raise _refused(
                "it runs one-layer EAGLE-3 heads with an LM head of their own, without biases and norms of queries, "
                "keys or features, of "
                f"widths in multiples of 16 and a head size that is a power of 2, and this head is {head.config}"
            )
        super().__init__(head, shape, rows=rows, capacity=capacity, ops=replace(ops, packs=True), cut=cut)
        self.draft = draft
        self.weights = draft_weights(head, *self._packed())
        self.space = draft_space(self.weights, rows=rows, pairs=shape.max_path, top_k=shape.top_k, depth=shape.depth)
        device, pairs = self.root.device, (rows, shape.max_path)
        self.pair_tokens = torch.zeros(pairs, dtype=torch.long, device=device)
        self.pair_features = torch.zeros(*pairs, head.module.fc.in_features, dtype=self.last.dtype, device=device)
        self.pair_counts = torch.zeros(rows, dtype=torch.long, device=device)
        """Pairs that wait for the next launch: tokens [B, P], features [B, P, F], how many count [B]."""

    def _packed(self) -> tuple[Tensor, Tensor]:
        """The layer's packed weights, where the kernel can read all that the head and its target hold."""
        program = self.program
        if program.cut is not None:
            raise _refused("its weights are read whole, and several processes have this head together")
        embedding = program.binding.embedding
        if not is_plain(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
            raise _refused(
                "it reads the table of a plain torch.nn.Embedding, without hooks and max_norm, and the target's is "
                f"{embedding}"
            )
        if program.weight is None:
            raise _refused(
                "it reads the weight of a plain LM head, a torch.nn.Linear without hooks, and this head's is "
                f"{program.vocabulary}"
            )
        packed = program.packed()
        if packed is None:
            raise _refused("the head's weights do not lie together in memory: load it anew")
        return packed

    def open(self, capacity: int) -> None:
        super().open(capacity)
        self.pair_counts.zero_()

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        """Go on with a row of another state: pairs that wait there are fed first, and none wait here."""
        assert isinstance(other, FusedDrafter)
        if bool(other.pair_counts.any()):
            other._extend(other.pair_tokens, other.pair_features, other.pair_counts.clone())
            other.pair_counts.zero_()
        super().move_row(row, other, source, count)
        self.pair_counts[row] = 0

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Keep the accepted path's pairs for the launch that drafts the next tree."""
        self.pair_tokens.copy_(verdict.tokens(tree))
        self._pairs(features, verdict, active, (self.pair_features, self.pair_counts))

    def _grow(self, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        """`EagleDrafter._grow`, by one launch that feeds the pairs that wait first."""
        pairs = self.pair_tokens, self.pair_features, self.pair_counts
        cache = self.attention.k[0], self.attention.v[0], self.state.lengths
        out = self.growth.scores, self.growth.tokens, self.growth.parents
        return self.draft(
            self.weights, self.space, *pairs, self.last, self.readout, *cache, *self.tables, self.state.bound, out
        )


def _refused(reason: str) -> Unsupported:
    return Unsupported(f"a draft phase cannot be one launch (fused=True): {reason}")


@torch.no_grad()
def frontier_generate(
    head: EagleHead,
    input_ids: Tensor,
    features: Tensor | Sequence[Tensor],
    *,
    shape: TreeShape | None = None,
    backend: str = "torch",
) -> TokenTree:
    """Grow the draft tree that follows a prompt and its first new token -> `shape.total_tokens` nodes: node 0 the root,
    the re-ranked nodes in breadth-first order (EAGLE-2, arXiv 2406.16858, section 4).

    input_ids [B, T+1] int64: the prompt and the root token. features [B, T, taps * H_t]: the target's hidden states of
    the first T tokens, in the order of the head's taps (EAGLE-1/2: [B, T, H], after the final norm), or one tensor [B,
    T, H_t] for each tap. backend "triton" grows the tree in one launch, on CUDA. Raises Unsupported for shapes or a
    backend that do not fit.
    """
    shape = shape or TreeShape()
    if backend not in ("torch", "triton"):
        raise Unsupported(f'frontier_generate: backend={backend!r}; accepted are "torch" and "triton"')
    features = features if isinstance(features, Tensor) else torch.cat(tuple(features), -1)
    config = head.config
    width = len(config.taps) * config.target_hidden_size if config.kind == "eagle3" else config.hidden_size
    rows, tokens = input_ids.shape
    if rows == 0 or tokens < 2 or features.shape != (rows, tokens - 1, width):
        raise Unsupported(
            f"frontier_generate: input_ids {tuple(input_ids.shape)} and features {tuple(features.shape)} do not fit: "
            f"[B, T+1] with T >= 1 and [B, T, {width}] are expected"
        )
    if shape.top_k > config.draft_vocab_size:
        raise Unsupported(
            f"frontier_generate: top_k={shape.top_k} exceeds the draft vocabulary of {config.draft_vocab_size}"
        )
    with made_current(input_ids.device):
        ops = choose_backend(backend, input_ids.device)
        self_check(ops, head.fc.weight.dtype, input_ids.device)
        drafts = fused_drafter if backend == "triton" else EagleDrafter
        try:
            drafter = drafts(BoundHead.of(head), shape, rows=rows, capacity=tokens, ops=ops)
        except Unsupported as error:
            raise Unsupported(f'frontier_generate(backend="{backend}"): {error}: use backend="torch"') from error
        counts = torch.full((rows,), tokens - 1, dtype=torch.long, device=input_ids.device)
        drafter.begin(input_ids[:, :-1], counts, features, input_ids[:, -1])
        return drafter.propose(tokens)
