"""Texts that outgrow the buffers in the middle of a call: what a round commits has room before it begins."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.captured import stand_in
from helpers.generate import Oracle, OwnProcessor, bigram, free, prompts, seer
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.generation import sequence_state
from fastspec.generation.engine.round_program import EXTENT_BUCKET
from fastspec.generation.layer_state import FullAttentionState

NEW = 18
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
FIRST = sequence_state.FIRST_SLOTS
KINDS = "llama", "mistral", "gemma3_text", "qwen3_5_text", "gpt2"


def made(kind: str, seed: int = 0) -> Any:
    return tiny_model(kind, seed, num_hidden_layers=3, max_position_embeddings=2048)


@pytest.mark.some("mistral", "gemma3_text", "qwen3_5_text")
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("rows", "captured"),
    [
        ((FIRST,), False),
        ((FIRST - 9, FIRST - 60), True),
        pytest.param((FIRST,), True, marks=pytest.mark.slow),
        pytest.param((FIRST - 9, FIRST - 60), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_buffers_are_outgrown(
    kind: str, rows: tuple[int, ...], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        stand_in(monkeypatch)
    model, inputs = made(kind), prompts(*rows)
    expected = free(model, inputs, 14)
    fastspec.patch(model, eagle3=tiny_head(model))
    for assistant in ("autoregressive", TREE):
        assert free(model, inputs, 14, assistant=assistant) == expected, assistant


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers whose end is met as the room that a round asks for is rounded."""
    monkeypatch.setattr(sequence_state, "FIRST_SLOTS", EXTENT_BUCKET)


@pytest.mark.some("120", "123", "126", "127", "128")
@pytest.mark.parametrize(
    ("begin", "captured"),
    [
        pytest.param(begin, captured, marks=pytest.mark.slow if captured == begin % 2 else ())
        for begin in range(EXTENT_BUCKET - 8, EXTENT_BUCKET + 1)
        for captured in (False, True)
    ],
)
@pytest.mark.usefixtures("small")
def test_whatever_a_round_accepts(begin: int, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's tokens are right, several a round, so that some round's path goes over the end."""
    if captured:
        stand_in(monkeypatch)
    model, inputs = bigram(), prompts(begin, begin - 3)
    expected = free(model, inputs, NEW)
    with fastspec.patched(model, eagle3=seer(model), speculative=bigram()):
        for assistant in (TREE, "speculative", fastspec.Speculative(early_exit=1), Oracle(expected, {0, 1})):
            assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
            assert fastspec.report(model).last.acceptance_length > 1.5, assistant


@pytest.mark.usefixtures("small")
def test_in_every_kind_of_call() -> None:
    model, inputs = made("llama"), prompts(EXTENT_BUCKET, EXTENT_BUCKET - 7, EXTENT_BUCKET - 20)
    expected, strict = free(model, inputs, NEW), free(model, inputs, NEW, logits_processor=[OwnProcessor()])
    fastspec.patch(model, speculative=made("llama", 1), eagle3=tiny_head(model))
    for assistant in ("nasd", fastspec.Speculative(gamma=3, branches=3), fastspec.ContinuousBatch(TREE, rows=2)):
        assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
    assert free(model, inputs, NEW, logits_processor=[OwnProcessor()], assistant=TREE) == strict


@pytest.mark.usefixtures("small")
def test_a_prompt_that_is_read_in_parts_makes_the_buffers_grow_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a call reads it or a batch that runs, whose parts are turns: a pass is captured anew whenever its buffers
    have grown."""
    monkeypatch.setattr("fastspec.generation.target.NARROW", 16)
    grown: list[int] = []
    resize = FullAttentionState.resize
    monkeypatch.setattr(FullAttentionState, "resize", lambda self, slots: grown.append(slots) or resize(self, slots))
    plain = made("llama")
    length = 9 * EXTENT_BUCKET
    inputs = prompts(length)
    expected = free(plain, inputs, 4)
    model = fastspec.patch(made("llama"), eagle3=tiny_head(made("llama")))
    first = 2 * EXTENT_BUCKET
    assert free(model, inputs, 4, assistant=TREE) == expected
    assert max(grown) > length and not [slots for slots in grown if first < slots <= length]
    grown.clear()
    with fastspec.continuous(model, TREE, rows=2, max_length=length + 40, prefill_chunk=16) as batch:
        running = batch.submit(inputs["input_ids"][0, :5], do_sample=False, max_new_tokens=60, eos_token_id=-1)
        future = batch.submit(inputs["input_ids"][0], do_sample=False, max_new_tokens=4, eos_token_id=-1)
        assert future.result(300)[0, length:].tolist() == expected[0] and len(running.result(300)[0]) == 65
    assert max(grown) > length and not [slots for slots in grown if first < slots <= length]
