"""Open batches whose rows are held to grammars of their own, or to none."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.devices import ON_CUDA
from helpers.generate import TREE, seer
from helpers.grammars import END, SCHEMA, SIZE, TOKENIZER, terse
from helpers.open import alone, texts, told

import fastspec

pytest.importorskip("llguidance")

FORMS: list[dict[str, Any]] = [{}, {"json_schema": SCHEMA}, {"regex": "[ab/]{9}c"}, {"choice": ["true", "12 a"]}]
HOW: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "typical_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.3},
]


def asked(number: int) -> dict[str, Any]:
    """Settings of one prompt: every form with every way to choose."""
    form, how = FORMS[number % 4], HOW[number // 4 % 4]
    held = {"logits_processor": [fastspec.Grammar(TOKENIZER, **form)]} if form else {}
    return {"max_new_tokens": 24, "eos_token_id": END, **held, **how}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("assistant", ["autoregressive", "nasd", TREE], ids=str)
def test_rows_with_and_without_grammars_answer_as_by_themselves(assistant: Any, device: str) -> None:
    """Greedy ones as the unpatched model, sampled ones as their seed alone without drafts."""
    plain, model = terse().to(device), terse().to(device)
    prompts = [ids.to(device) for ids in texts(*range(3, 19))]
    with fastspec.patched(model, eagle3=seer(model).to(device)):
        with fastspec.continuous(model, assistant, rows=3, max_length=64) as batch:
            futures = [batch.submit(ids, seed=number, **asked(number)) for number, ids in enumerate(prompts)]
            found = told(futures)
        with fastspec.continuous(model, "autoregressive", rows=1, max_length=64) as batch:
            one = told([batch.submit(ids, seed=number, **asked(number)) for number, ids in enumerate(prompts)])
    assert found == one
    for number, ids in enumerate(prompts):
        options = asked(number)
        if not options["do_sample"]:
            assert found[number] == alone(plain, ids, options.pop("max_new_tokens"), **options)


def test_what_a_grammar_raises_ends_its_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, prompts = terse(), terse(), texts(4, 5)
    grammar = fastspec.Grammar(TOKENIZER, regex="[ab]{40}")
    with fastspec.patched(model), fastspec.continuous(model, "nasd", rows=2, max_length=64) as batch:
        make = grammar.matcher

        def broken() -> Any:
            matcher = make()
            matcher.try_consume_tokens([SIZE + 5])  # from then on it is in an error
            return matcher

        monkeypatch.setattr(grammar, "matcher", broken)
        bad = batch.submit(prompts[0], max_new_tokens=9, logits_processor=[grammar])
        good = batch.submit(prompts[1], max_new_tokens=9, do_sample=False)
        with pytest.raises(fastspec.Unsupported, match="cannot be followed any further"):
            bad.result(30)
        assert told([good]) == [alone(plain, prompts[1], 9, eos_token_id=END)]
