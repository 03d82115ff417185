"""What a cascade keeps between its calls never shows in what it says: pad tokens in a text, and weights that changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_cascade import cascaded, stages

HIGH = 1e9
"""A price at which every request goes to the last stage."""
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def padded_text(length: int, seed: int) -> torch.Tensor:
    """A text [1, length] whose every fourth token or so is the pad token, 0, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 97, (1, length), generator=generator)
    ids[0, :-1][torch.rand(length - 1, generator=generator) < 0.25] = 0
    return ids


def said(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    """A greedy answer to one row, all of it text."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)[0].tolist()


@pytest.mark.parametrize("price", [0.0, HIGH])
def test_pad_tokens_within_a_text_are_text(price: float) -> None:
    """The answers without a memory, over three turns each, from a first stage and from a last one."""
    kept, plain = (cascaded(stages(2), price=price, memory=memory) for memory in (10_000_000, None))
    for seed in range(4):
        ids = padded_text(24, seed)
        for turn in range(3):
            answer = said(kept, ids, assistant="cascade")
            assert answer == said(plain, ids, assistant="cascade")
            ids = torch.cat((torch.tensor([answer]), padded_text(6, 10 * seed + turn)), 1)
