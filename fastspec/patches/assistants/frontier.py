"""Draft one tree from a head alone: for research, tests and comparison with other implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.devices import made_current
from fastspec.errors import Unsupported
from fastspec.generation.drafters.eagle.dynamic import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead
from fastspec.generation.tree import TokenTree
from fastspec.patches.assistants.fused import fused_drafter
from fastspec.patches.backends import choose_backend
from fastspec.patches.checks.verdict import self_check


@torch.no_grad()
def frontier_generate(
    head: EagleHead, input_ids: Tensor, features: Tensor | Sequence[Tensor], *, shape: TreeShape | None = None, backend: str = "torch"
) -> TokenTree:
    """Grow the draft tree that follows a prompt and its first new token.

    input_ids [B, T+1] int64: the prompt and the root token. features [B, T, taps * H_t]: the target's hidden states of the
    first T tokens, concatenated in the order of the head's taps (EAGLE-1/2: [B, T, H], after the final norm), or one tensor
    [B, T, H_t] for each tap in that order. backend "triton" grows the tree in one launch (`fastspec.patches.assistants.fused`), on CUDA.
    Returns a TokenTree of `shape.total_tokens` nodes: node 0 the root, the re-ranked nodes in breadth-first order
    (EAGLE-2, arXiv 2406.16858, section 4). Raises Unsupported for shapes or a backend that do not fit.
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
        raise Unsupported(f"frontier_generate: top_k={shape.top_k} exceeds the draft vocabulary of {config.draft_vocab_size}")
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

