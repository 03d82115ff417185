"""A whole draft phase of a backend against the same head drafting op by op in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fastspec.config import TreeShape
from fastspec.generation.drafters.eagle.dynamic import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH
from fastspec.patches.checks.inputs import Draw

SHAPE = TreeShape(total_tokens=6, depth=2, top_k=2)
SEED, ROUNDING = 5, 0.12
"""The candidates of the head that this seed draws are 0.188 apart and more, and in bfloat16 off by up to 0.04 of those in fp32: a tree that
is another, or scores that are off by more than this, are wrong."""


def small_head(draw: Draw) -> EagleHead:
    """A head whose candidates are far apart."""
    config = HeadConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=40, draft_vocab_size=24,
        target_hidden_size=32, taps=(0, 1, 2),
    )  # fmt: skip
    with draw.device:
        head, embedding = EagleHead(config).eval(), nn.Embedding(config.vocab_size, config.hidden_size)
    for module in (head, embedding):
        for name, parameter in list(module.named_parameters()):  # set, not moved: this runs on tensors without data too
            scale = 0.5 if name.startswith("lm_head") else parameter.shape[-1] ** -0.5 if module is head else 1.0
            ones = torch.ones(parameter.shape, dtype=draw.dtype, device=draw.device)
            value = draw.floats(*parameter.shape, scale=scale) if parameter.dim() > 1 else ones
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    assert head.inv_freq is not None
    head.set_rope(head.inv_freq, head.rope_scale)  # follows the weights, which were not moved
    head.bind(embedding, None)
    return head


def small_drafter(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter]) -> EagleDrafter:
    """A drafter with a small head, outside of graphs."""
    head = small_head(Draw(dtype, device, SEED))
    return drafts(BoundHead.of(head), SHAPE, rows=1, capacity=16, ops=replace(ops, captures=False))


@torch.no_grad()
def drafted(drafter: EagleDrafter) -> tuple[TokenTree, Tensor]:
    """The tree that the small head drafts after a prompt, and the scores of its candidates."""
    draw = Draw(drafter.last.dtype, drafter.last.device, SEED)
    ids, features = draw.whole(40, 1, 5), draw.floats(1, 5, 3 * 32)
    drafter.begin(ids, draw.fixed([5]), features, draw.fixed([7]))
    return drafter.propose(5), drafter.scores


def phase_difference(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter]) -> str | None:
    """How the tree of a small head differs from that of plain torch; None where it does not."""
    got, scores = drafted(small_drafter(ops, dtype, device, drafts))
    wanted, expected = drafted(small_drafter(TORCH, dtype, device, EagleDrafter))
    for name in ("tokens", "parents", "depths", "ancestors"):
        if not torch.equal(getattr(got, name), getattr(wanted, name)):
            return f"the tree's {name} are {getattr(got, name).tolist()}, not {getattr(wanted, name).tolist()}"
    off = float((scores - expected).abs().max())
    return None if off <= ROUNDING else f"scores are off by up to {off:.3g}, where {ROUNDING} is rounding"
