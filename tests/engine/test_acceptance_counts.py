"""The acceptance length counts the tokens that rounds emit: none behind an end token, a limit or a stop, whichever way
the call runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from helpers.chat import screen, tokenizer
from helpers.generate import NEVER, Oracle, bigram, free, prompts, seer
from helpers.open import told
from helpers.tokenizers import worded
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TemperatureLogitsWarper

import fastspec
from fastspec.programs.bench.peers import _stats
from fastspec.programs.chat.view import AnswerStreamer

INPUTS = prompts(4, 6, 5)
LIMIT = 17


@cache
def texts() -> list[list[int]]:
    """What each row says when nothing ends it."""
    return free(bigram(), INPUTS, LIMIT + 10)


@cache
def patched() -> Any:
    model = bigram()
    return fastspec.patch(model, eagle3=seer(model))


def counted(assistant: Any, **options: Any) -> Any:
    """The counts of a call, which are those of its tokens."""
    call = {"max_new_tokens": LIMIT, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0, **options}
    out = patched().generate(**INPUTS, **call, assistant=assistant)
    stats = fastspec.report(patched()).last
    assert stats.round_tokens == stats.emitted - len(out)  # the first token of a row comes from the prefill
    assert stats.acceptance_length == stats.round_tokens / stats.row_rounds
    assert stats.accepted == sum(count * rounds for count, rounds in enumerate(stats.lengths)) <= stats.round_tokens
    assert stats.accepted >= stats.round_tokens - stats.row_rounds == stats.round_tokens - sum(stats.lengths)
    return stats


def oracle() -> Oracle:
    """Chains of six right drafts."""
    return Oracle(texts(), {0, 1, 2})


ASSISTANTS: dict[str, Any] = {
    "right": oracle,
    "eagle3": lambda: "eagle3",
    "nasd": lambda: "nasd",
    "speculative": lambda: fastspec.Speculative(early_exit=1, gamma=4),
    "autoregressive": lambda: "autoregressive",
    "waiting": lambda: fastspec.ContinuousBatch("eagle3", rows=2),
}


@pytest.mark.some("right", "nasd", "speculative", "waiting")
@pytest.mark.parametrize("make", ASSISTANTS.values(), ids=ASSISTANTS)
def test_tokens_behind_an_answers_end_are_not_counted(make):
    for limit in (2, 5, LIMIT):
        counted(make(), max_new_tokens=limit)
    for at in (1, 3, 8):
        counted(make(), eos_token_id=[row[at] for row in texts()])
        counted(make(), eos_token_id=[row[at] for row in texts()], repetition_penalty=1.0001)


def test_a_round_that_ends_in_its_drafts_counts_what_it_emits():
    """Three tokens of a round of seven."""
    assert counted(oracle(), max_new_tokens=4).acceptance_length == 3.0
    assert counted(oracle(), max_new_tokens=8).acceptance_length == 7.0
    stats = counted(oracle(), max_new_tokens=11)
    assert (stats.row_rounds, stats.round_tokens, stats.accepted, stats.lengths) == (6, 30, 27, [0, 0, 0, 3, 0, 0, 3])


class Stops(StoppingCriteria):
    """Ends each row at a length of its own, by its first token; transformers' own types are asked row by row, this one
    in lockstep."""

    def __call__(self, ids: Any, scores: Any, **more: Any) -> Any:
        return (ids[:, -1:] == ids.new_tensor([texts()[row][3 + 4 * row] for row in range(len(ids))])[:, None])[:, 0]


@pytest.mark.parametrize("make", [ASSISTANTS["right"], ASSISTANTS["eagle3"]], ids=["right", "eagle3"])
@pytest.mark.parametrize("ends", [NEVER, None])
def test_stops_are_ends(make, ends):
    """Also where rows that are stopped go on until all were, since there are no end tokens, and what they said
    meanwhile is cut."""
    strings = {"stop_strings": [f"w{row[3 + 2 * number]}" for number, row in enumerate(texts())], "tokenizer": worded()}
    for stops in ({"stopping_criteria": StoppingCriteriaList([Stops()])}, strings):
        assert counted(make(), eos_token_id=ends, **stops).emitted < 3 * LIMIT


def test_draws_and_lockstep():
    for make in (ASSISTANTS["right"], ASSISTANTS["eagle3"], ASSISTANTS["nasd"]):
        counted(make(), do_sample=True, top_k=1, max_new_tokens=6)

    class Own(TemperatureLogitsWarper):
        """Another type, so that the call decodes in lockstep."""

    own = LogitsProcessorList([Own(0.5)])
    counted(oracle(), logits_processor=own, max_new_tokens=6)
    counted(oracle(), logits_processor=own, eos_token_id=[row[3] for row in texts()])


def test_an_open_batch_counts_alike():
    with fastspec.continuous(patched(), "eagle3", rows=2) as batch:
        rows = [row[mask.bool()] for row, mask in zip(INPUTS["input_ids"], INPUTS["attention_mask"], strict=True)]
        futures = [
            batch.submit(row, max_new_tokens=6 + 3 * at, do_sample=False, eos_token_id=NEVER)
            for at, row in enumerate(rows)
        ]
        told(futures)
    assert (batch.stats.emitted, batch.stats.round_tokens) == (27, 24)


def test_a_streamed_answer_counts_alike():
    """The chat's own streamer, by what it is told of each round."""
    for limit in (4, 9):
        streamer = AnswerStreamer(tokenizer(), screen())
        ids = INPUTS["input_ids"][1:2]
        patched().generate(
            ids, max_new_tokens=limit, do_sample=False, eos_token_id=NEVER, assistant="eagle3", streamer=streamer
        )
        stats = fastspec.report(patched()).last
        assert (
            streamer.stats.acceptance_length == stats.acceptance_length == (limit - 1) / stats.rounds
            and streamer.stats.accepted == stats.accepted
        )


def test_a_peers_drafts_behind_the_end_are_left_out():
    """vLLM counts them: two rounds that accepted three drafts each, of which the last was cut to one token."""
    answer = {"tokens": [[1, 2, 3, 4, 5, 6]], "seconds": 1.0, "drafts": 2, "accepted": 6, "accepted_at": [2, 2, 2]}
    assert _stats(answer).acceptance_length == 2.5
