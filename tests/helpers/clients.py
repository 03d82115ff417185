"""What the tests of other programs share: prompts, the count of assisted calls, and training settings that stay on the
CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fastspec
from fastspec.generation.stats import Stats

MARKS = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"),  # other programs' own
]
HEAD = "smollm2-135m-instruct"
QUESTIONS = ("Why is the sky blue?", "Name three fruits.", "What is 2+2?", "Give me a person as JSON.")


def chats(*questions: str) -> list[list[dict[str, str]]]:
    """A conversation of one question each."""
    return [[{"role": "user", "content": question}] for question in questions]


def asked(tokenizer: Any, *questions: str) -> dict[str, Tensor]:
    """Left-padded prompts [B, T] in the tokenizer's chat format."""
    tokenizer.padding_side = "left"
    made = tokenizer.apply_chat_template(
        chats(*questions), add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    return dict(made)


def answers(model: Any, inputs: dict[str, Tensor], count: int = 24, **options: Any) -> list[list[int]]:
    """The new tokens of each row, greedy."""
    emitted = model.generate(**inputs, max_new_tokens=count, do_sample=False, **options)
    return emitted[:, inputs["input_ids"].shape[1] :].tolist()


def drafted(calls: Sequence[Stats]) -> bool:
    """There are assisted calls, and their rounds took more than one token on average."""
    return sum(call.round_tokens for call in calls) > sum(call.row_rounds for call in calls)


@contextmanager
def drafting(model: Any, calls: int | None = None) -> Iterator[None]:
    """The block's generate calls are all assisted, `calls` of them where it is given, and take more than one token a
    round on average."""
    before = fastspec.report(model)
    yield
    after = fastspec.report(model)
    made = after.calls[len(before.calls) :]
    assert after.unassisted == before.unassisted
    assert len(made) == calls if calls is not None else made
    assert drafted(made)


@contextmanager
def plain(model: Any, why: str) -> Iterator[None]:
    """The block's generate calls are left to transformers, with a warning that says why."""
    before = fastspec.report(model)
    with pytest.warns(UserWarning, match=why):
        yield
    after = fastspec.report(model)
    assert len(after.calls) == len(before.calls)
    assert any(why in reason for reason in after.unassisted)


def agree(model: Any, inputs: dict[str, Tensor], count: int = 24, **options: Any) -> float:
    """A patched model's answer to a prompt of one row is plain decoding's up to where the model does not know its own
    mind.

    In low precision a pass over several tokens rounds otherwise than a pass over each, in transformers too. Where the
    answers part, it is between tokens whose logits lie no further apart than twice what the model's own passes differ
    by, each of which may be off by that. Returns this difference.
    """
    spread, emitted = own_spread(model, inputs, count)
    bound = float(spread.max())
    assert bound > 0.01  # in fp32 it is 1e-4, and equality is what is asked
    with drafting(model, calls=1):
        got = answers(model, inputs, count, **options)[0]
    parted = next((place for place, (a, b) in enumerate(zip(emitted.tolist(), got, strict=False)) if a != b), None)
    if parted is not None:
        with torch.no_grad():
            logits = model(torch.cat((inputs["input_ids"][0], emitted[:parted]))[None]).logits[0, -1].float()
        assert float((logits[emitted[parted]] - logits[got[parted]]).abs()) <= 2 * bound
    return bound


def own_spread(model: Any, inputs: dict[str, Tensor], count: int = 24) -> tuple[Tensor, Tensor]:
    """How far a model's logits depend on how many tokens a pass has, for a prompt of one row: its plain greedy answer,
    decoded token by token, against one pass over the same text. Returns the largest difference per step [count], and
    the tokens that it said."""
    out = model.generate(
        **inputs,
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        assistant=None,
    )
    width = inputs["input_ids"].shape[1]
    with torch.no_grad():
        once = model(out.sequences).logits[0, width - 1 : -1].float()
    return (once - torch.stack(out.logits)[:, 0].float()).abs().amax(-1), out.sequences[0, width:]
