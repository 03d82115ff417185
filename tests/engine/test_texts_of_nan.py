"""Texts whose keys and values are NaN: what they leave in a cache reaches no other text, and no node that does not see
it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import Oracle, answer, prompts, shallow_model
from helpers.models import tiny_head
from helpers.open import GREEDY, texts, told

import fastspec
from fastspec.generation.tree import TokenTree

ODD = 3
"""A token whose embedding is NaN."""
BAD = torch.tensor([7, 8, ODD, *range(9, 30)])
GOOD = texts(5, 9, 6)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "qwen3_5_text": {},
}


def diverged(family: str = "llama") -> Any:
    model = shallow_model(family, **FAMILIES[family])
    model.get_input_embeddings().weight.data[ODD] = torch.nan
    return model


def patched(family: str = "llama", **options: Any) -> Any:
    model = diverged(family)
    first = tiny_head(model, kind="eagle", taps=(), own_lm_head=False)
    heads = {} if family == "qwen3_5_text" else {"eagle3": tiny_head(model), "eagle2": first}
    return fastspec.patch(model, **heads, **options)


@cache
def wanted(family: str) -> list[list[int]]:
    model = diverged(family)
    return [answer(model, {"input_ids": ids[None]}, max_new_tokens=8, **GREEDY)[0].tolist() for ids in GOOD]


@pytest.mark.some("llama", "qwen3_5_text", "mistral")
@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_row_keeps_nothing_of_a_text_of_nan(family, backend):
    """Prompts that take its row, which read alone and together, in an open batch and in a call of more prompts than
    rows."""
    model = patched(family, backend=backend)
    for assistant in ("autoregressive", "nasd", *(["eagle3", "eagle2"] if family == "llama" else [])):
        for rows in (1, 2):
            with fastspec.continuous(model, assistant, rows=rows, max_length=64) as batch:
                told([batch.submit(BAD, max_new_tokens=8, **GREEDY) for _ in range(rows)])
                assert told([batch.submit(ids, max_new_tokens=8, **GREEDY) for ids in GOOD]) == wanted(family), (
                    assistant,
                    rows,
                )


def test_a_call_keeps_nothing_of_a_text_of_nan(monkeypatch):
    """Prompts that wait for a row, the next call where what was captured is kept, and a cache that goes back to
    transformers."""
    stand_in(monkeypatch)
    model, inputs = patched(), prompts(len(BAD), 5, 9, 6)
    inputs["input_ids"][0] = BAD
    want = answer(diverged(), inputs, max_new_tokens=8, **GREEDY).tolist()
    for assistant in ("autoregressive", "nasd", "eagle3", "eagle2"):
        waiting = fastspec.ContinuousBatch(assistant, rows=1)
        assert (
            model.generate(**inputs, max_new_tokens=8, **GREEDY, pad_token_id=0, assistant=waiting).tolist() == want
        ), assistant
        for _ in range(2):
            model.generate(BAD[None], max_new_tokens=9, **GREEDY, assistant=assistant)
            for ids, said in zip(GOOD, wanted("llama"), strict=True):
                assert model.generate(ids[None], max_new_tokens=8, **GREEDY, assistant=assistant)[0].tolist() == said, (
                    assistant
                )


class Odd(Oracle):
    """Beside right drafts one whose keys and values are NaN, in every other round behind all of them."""

    name, nodes, max_path = "odd", 8, 7

    def propose(self, extent: int) -> TokenTree:
        chain, rows = super().propose(extent).tokens, len(self.texts)
        behind = int(self.place[0]) % 2
        tokens = torch.cat(
            (chain, torch.full((rows, 1), ODD)) if behind else (chain[:, :1], torch.full((rows, 1), ODD), chain[:, 1:]),
            1,
        )
        parents = [0, 0, 1, 2, 3, 4, 5, 0] if behind else [0, 0, 0, 2, 3, 4, 5, 6]
        return TokenTree.from_parents(tokens, torch.tensor(parents).expand(rows, -1), self.max_path)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_rejected_draft_of_nan_reaches_no_other_node(family, backend):
    """Neither in its own round nor in later ones, whose trees may end before its slot."""
    FAMILIES.setdefault(family, {})
    ids = GOOD[1][None]
    said = answer(diverged(family), {"input_ids": ids}, max_new_tokens=24, **GREEDY)
    assert ODD not in said[0, ids.shape[1] :]
    model = patched(family, backend=backend)
    found = model.generate(ids, max_new_tokens=24, **GREEDY, assistant=Odd([said[0, ids.shape[1] :].tolist()], {0}))
    assert torch.equal(found, said) and fastspec.report(model).last.acceptance_length > 3
