"""The round that the page on internals opens with, against transformers' own greedy decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import shallow_model
from helpers.pages import snippets


class Counted:
    """A model that counts its passes."""

    def __init__(self, model: Any) -> None:
        self.model, self.passes = model, 0

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.passes += 1
        return self.model(*given, **more)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's snippet makes."""
    names: dict[str, Any] = {}
    first = next(each for each in snippets(Path("docs/maintainers/internals.md")) if each.language == "python")
    exec(compile(first.text, first.name, "exec"), names)
    assert first.text.count("\n") < 55
    return names


@pytest.mark.some("llama")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_pages_round_gives_the_tokens_of_generate(page: dict[str, Any], kind: str) -> None:
    target, other = shallow_model(kind), shallow_model(kind, seed=1)
    generator = torch.Generator().manual_seed(0)
    for length in (2, 5, 9):
        ids = torch.randint(0, 97, (1, length), generator=generator)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        for draft, most in (
            (other, 25),
            (target, 6),
        ):  # the prompt's pass, then one a round: five tokens where all drafts are right
            counted = Counted(target)
            assert torch.equal(page["decode"](counted, draft, ids, 24), plain)
            assert counted.passes <= most
