"""A head of every variant, drawn inputs for it, and its forward pass with a dense mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from helpers.examples import examples
from helpers.models import tiny_head, tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small vocabulary": {"draft_vocab_size": 41},
    "two layers": {"num_hidden_layers": 2, "qk_norm": True},
    "norm_output": {"norm_output": True, "norm_before_residual": True},
    "fc_norm": {"fc_norm": True, "attention_bias": True, "mlp_bias": True},
    "input_norm": {"input_norm": True, "num_key_value_heads": 1},
    "target's LM head": {"own_lm_head": False},
    "eagle": {"kind": "eagle", "taps": (), "fc_bias": True, "own_lm_head": False},
    "eagle of two layers": {"kind": "eagle", "taps": (), "num_hidden_layers": 2, "own_lm_head": False},
}
EXACT = examples(8, derandomize=True)  # drawn shapes, the same in every run: scores may come close


@cache
def head_of(variant: str) -> Any:
    model = tiny_model()
    head = tiny_head(model, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        elif not name.startswith("lm_head"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    if "draft_vocab_size" in VARIANTS[variant]:
        head.d2t.copy_(torch.arange(41) + torch.arange(41) // 3)
    head.bind(model.get_input_embeddings(), model.get_output_embeddings())
    return head


def drawn(head: Any, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids [rows, length] and features [rows, length, F]."""
    generator = torch.Generator().manual_seed(seed)
    width = 64 * max(1, len(head.config.taps))
    return torch.randint(0, 97, (rows, length), generator=generator), torch.randn(
        rows, length, width, generator=generator
    )


def forward(head: Any, tokens: list[int], hidden: Tensor, positions: list[int], mask: Tensor) -> Tensor:
    """The head over all pairs at once with a dense mask [T, T] -> [T, H]."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = (x[0].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = (q[0].transpose(0, 1) @ k.transpose(1, 2)) * head.config.head_dim**-0.5
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)[None]

    return head.step(torch.tensor([tokens]), hidden[None], torch.tensor([positions]), attend)[0]
