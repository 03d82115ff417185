"""The recipes that need other programs, as they stand, on SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.clients import HEAD, MARKS, QUESTIONS, answers, asked, drafting
from helpers.pages import snippets
from transformers import AutoModelForCausalLM

import fastspec
from fastspec.patches.assistants import heads

pytestmark = MARKS
RECIPES = {
    word: each
    for each in snippets(Path("docs/recipes.md"))
    for word in ("BitsAndBytesConfig", "peft", "Grammar")
    if word in each.text
}


def test_there_is_one_of_each() -> None:
    marked = [each for each in snippets(Path("docs/recipes.md")) if "clients" in each.needs]
    assert [*RECIPES.values()] == marked and len(marked) == 3


@pytest.mark.parametrize("word", RECIPES)
def test_a_recipe_leaves_a_model_that_drafts_and_says_what_it_would(
    smollm2, folder, tokenizer, monkeypatch, word: str
) -> None:
    """4-bit weights and their config, and an adapter, whose own weights are 0 at first."""
    load, find = AutoModelForCausalLM.from_pretrained, heads.find_head
    places = {"org/model": folder}
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda name, **options: load(places.get(name, name), **options)
    )
    monkeypatch.setattr(
        heads, "find_head", lambda source, **options: find(HEAD if source == "org/head" else source, **options)
    )
    names: dict[str, Any] = {}
    exec(compile(RECIPES[word].text, RECIPES[word].name, "exec"), names)
    model, inputs = names["model"], asked(tokenizer, *QUESTIONS[:1])
    with drafting(model, calls=1):
        found = answers(model, inputs, 12)
    fastspec.unpatch(model)
    assert found == answers(model, inputs, 12)
