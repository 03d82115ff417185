"""What equality means for Gated DeltaNet: transformers reads a prompt in chunks of 64 tokens and a new token step by
step, which round otherwise. Plain `generate` is the measure; fastspec is no further from it than its own two forms are
from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import NEVER, prompts
from helpers.models import tiny_head, tiny_model
from torch import Tensor

import fastspec

NEW = 48
KINDS = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
OPTIONS = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": NEVER,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def drawn(seed: int) -> tuple[int, ...]:
    """Lengths of four prompts, 33 to 200 tokens."""
    return tuple(torch.randint(33, 201, (4,), generator=torch.Generator().manual_seed(seed)).tolist())


CASES = [(kind, 0, (33, 65)) for kind in KINDS] + [
    pytest.param(kind, seed, drawn(seed), marks=pytest.mark.slow) for kind in KINDS for seed in range(1, 9)
]


@pytest.mark.some("qwen3_next", "olmo_hybrid")
@pytest.mark.parametrize(("kind", "seed", "lengths"), CASES)
def test_texts_part_at_near_ties_alone(kind: str, seed: int, lengths: tuple[int, ...]) -> None:
    """At a first token that differs, the plain model's two logits are no further apart than its own two forms of that
    text."""
    model = tiny_model(
        kind, seed, layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3
    )
    inputs = prompts(*lengths, seed=seed)
    out = model.generate(**inputs, **OPTIONS)
    texts, plain = out.sequences[:, -NEW:], torch.stack(out.logits, 1)
    forms = float((whole(model, inputs, out.sequences) - plain).abs().max())
    assert 0.0 < forms < 0.01  # rounding, of logits whose standard deviation is 2.4
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("nasd", TREE):
            got = model.generate(**inputs, **OPTIONS, assistant=assistant)
            emitted, logits = got.sequences[:, -NEW:], torch.stack(got.logits, 1)
            same = (emitted == texts).long().cumprod(1).bool()  # up to the first token that differs
            for row, place in enumerate(same.sum(1).tolist()):
                if place < NEW:
                    gap = float(plain[row, place, texts[row, place]] - plain[row, place, emitted[row, place]])
                    assert gap <= forms, (assistant, row, place)
            # All are roundings of one formula, in three orders of its sums: maxima of such differences are of one size,
            # seldom twice another. A token that is missed in a state shows at 0.1.
            assert float((logits - plain)[same].abs().max()) <= 4 * forms, assistant


@torch.no_grad()
def whole(model: Any, inputs: dict[str, Tensor], texts: Tensor) -> Tensor:
    """The logits [B, NEW, V] that chose the new tokens of texts [B, T], where the model reads all of a text in one
    pass, as a prompt."""
    mask = torch.cat((inputs["attention_mask"], torch.ones(len(texts), NEW, dtype=torch.long)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=texts, attention_mask=mask, position_ids=positions).logits[:, -NEW - 1 : -1]
