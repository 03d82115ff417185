"""Log-probabilities of given texts, beside the model's own pass and beside what generation returned for the texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.models import tiny_model
from helpers.seq2seq import tiny_seq2seq
from torch import Tensor

import fastspec
from fastspec.errors import Unsupported


def by_the_model(model: Any, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Row by row, without padding."""
    found = torch.zeros(len(ids), ids.shape[1] - 1)
    for row, (text, keep) in enumerate(zip(ids, mask.bool(), strict=True)):
        with torch.no_grad():
            logits = model(text[keep][None]).logits[0, :-1].float() / temperature
        at = keep.nonzero()[1:, 0] - 1
        found[row, at] = logits.log_softmax(-1).gather(-1, text[keep][1:, None])[:, 0]
    return found


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen3_5_text", "gpt2"])
def test_a_text_scores_as_in_the_models_own_pass(kind: str) -> None:
    """Past a window, in several passes, with padding on both sides; of recurrent layers and in generic mode too."""
    model = tiny_model(kind)
    given = prompts(90, 3, 71, 1)
    ids = torch.nn.functional.pad(given["input_ids"], (0, 4), value=5)
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 4), value=0)
    mask[2, -4:-1] = 1
    wanted = {temperature: by_the_model(model, ids, mask, temperature) for temperature in (1.0, 0.7)}
    with fastspec.patched(model):
        for temperature, each in wanted.items():
            assert (fastspec.log_probs(model, ids, mask, temperature=temperature) - each).abs().max() < 1e-3
        assert fastspec.log_probs(model, ids[:, :1], mask[:, :1]).shape == (4, 0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_text_may_be_as_long_as_the_model_takes(kind: str) -> None:
    name = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    model, given = tiny_model(kind, **{name: 70}), prompts(70, 66)
    wanted = by_the_model(model, **{"ids": given["input_ids"], "mask": given["attention_mask"]})
    with fastspec.patched(model):
        assert (fastspec.log_probs(model, **given) - wanted).abs().max() < 1e-3


def test_what_was_generated_scores_as_when_it_was() -> None:
    """In fp32 but for rounding: tests on a GPU compare bits."""
    model, given = tiny_model(), prompts(8, 5)
    with fastspec.patched(model):
        torch.manual_seed(0)
        said = model.generate(
            **given,
            assistant="nasd",
            do_sample=True,
            top_k=0,
            temperature=0.8,
            max_new_tokens=20,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        mask = torch.nn.functional.pad(given["attention_mask"], (0, 20), value=1)
        scored = fastspec.log_probs(model, said.sequences, mask, temperature=0.8)[:, -20:]
    drawn = (torch.stack(said.logits, 1) / 0.8).log_softmax(-1).gather(-1, said.sequences[:, -20:, None])[..., 0]
    assert (scored - drawn).abs().max() < 1e-4


def test_what_cannot_be_scored_is_refused() -> None:
    model, ids = tiny_model(), torch.arange(6)[None] + 7
    with pytest.raises(Unsupported, match=r"after fastspec\.patch"):
        fastspec.log_probs(model, ids)
    with fastspec.patched(model), pytest.raises(Unsupported, match="side by side"):
        fastspec.log_probs(model, ids, torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with fastspec.patched(model), pytest.raises(Unsupported, match="above 0"):
        fastspec.log_probs(model, ids, temperature=0.0)
    for wrong in ("a text", ids[0], ids.float()):
        with fastspec.patched(model), pytest.raises(Unsupported, match=r"pass whole numbers of shape \[rows, tokens\]"):
            fastspec.log_probs(model, wrong)
    with fastspec.patched(model), pytest.raises(Unsupported, match="attention_mask must be a tensor"):
        fastspec.log_probs(model, torch.tensor([[7, 8]]), [[1, 1]])  # type: ignore[arg-type]
    with fastspec.patched(tiny_seq2seq("t5")) as other, pytest.raises(Unsupported, match="tokens alone"):
        fastspec.log_probs(other, ids)
