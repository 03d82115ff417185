"""Continuous batching: prompts begin in the rows of others that have ended, and each says what it says alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers_captured import stand_in
from helpers_cascade import cascaded, stages
from helpers_generate import MAKERS, TREE, free, stats
from helpers_generate import prompts as make_prompts
from helpers_models import tiny_head
from test_sitting_out import ON_CUDA

import fastspec
from fastspec import ContinuousBatch, Unsupported
from fastspec.generation import cache, draft_length, loop, nasd
from fastspec.patches.session import session_of

COUNTS = (9, 3, 14, 5, 7, 2, 11, 6, 4)
ASSISTANTS = ["autoregressive", TREE, "eagle2", "eagle", "nasd", fastspec.Nasd(storage="suffix")]


@pytest.fixture(params=["torch", "stand-in", pytest.param("cuda", marks=ON_CUDA)])
def device(request, monkeypatch):
    """Where calls run; rounds are launched ahead from the first on, where they are captured."""
    if request.param == "stand-in":
        stand_in(monkeypatch)
    monkeypatch.setattr(loop, "AHEAD_AFTER", 0)
    return "cuda" if request.param == "cuda" else "cpu"


def prompts(device: str, *lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in make_prompts(*lengths, seed=seed).items()}


def made(kind: str, device: str) -> tuple[Any, Any]:
    """(the unpatched model, the same patched, with a head for every assistant)."""
    target, head = MAKERS[kind]
    plain, model = target().to(device), target()
    third, first = (each.to(device) for each in (head(model), tiny_head(model, kind="eagle", taps=(), own_lm_head=False)))
    return plain, fastspec.patch(model.to(device), eagle3=third, eagle2=first, eagle=first)


def ends_of(plain: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    """End tokens that end some answers early, and not all at once."""
    said = free(plain, inputs, 24)
    return [said[0][3], said[3][9], said[4][1], said[6][0]]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
def test_every_prompt_says_what_it_says_in_one_batch(device, kind, assistant):
    """Whatever the number of rows, in calls one after another that share what was captured."""
    plain, model = made(kind, device)
    for rows in (3, 1, 3, 8):
        inputs = prompts(device, *COUNTS, seed=rows)
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
        want = plain.generate(**inputs, **options)
        assert model.generate(**inputs, **options, assistant=ContinuousBatch(assistant, rows=rows)).tolist() == want.tolist()
        seen = stats(model)
        assert seen.joined == len(COUNTS) - rows and seen.rows == rows
        assert seen.row_rounds <= rows * seen.rounds
        assert all(not held.ahead for held in session_of(model).engines.held.values())
    assert len(session_of(model).engines.held) in (0, 3)  # rows of 3, 1 and 8, where they are kept


def test_rows_are_seldom_idle(device):
    """A batch of all prompts goes on until the longest answer ends, with ever fewer rows; here others begin in their places."""
    plain, model = made("random", device)
    inputs = prompts(device, *range(3, 27))
    said = free(plain, inputs, 24)
    options = {**inputs, "max_new_tokens": 24, "do_sample": False, "eos_token_id": [row[index] for index, row in enumerate(said)]}
    model.generate(**options, assistant="autoregressive")
    whole = stats(model)
    model.generate(**options, assistant=ContinuousBatch("autoregressive", rows=4))
    turns = stats(model)
    assert turns.row_rounds == whole.row_rounds and turns.joined == 20
    assert turns.row_rounds / (turns.rows * turns.rounds) > 0.7 > whole.row_rounds / (whole.rows * whole.rounds)


@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"output_scores": True, "output_logits": True}, {"do_sample": True, "top_k": 1}], ids=str
)
def test_what_else_a_call_asks_for_is_that_of_its_prompt(device, assistant, options):
    """Processors look at the prompt's own text, and scores and logits are its own."""
    plain, model = made("random", device)
    inputs = prompts(device, *COUNTS)
    given = {**inputs, "max_new_tokens": 16, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0, "return_dict_in_generate": True}
    given |= {"do_sample": False, **options}
    want, got = plain.generate(**given), model.generate(**given, assistant=ContinuousBatch(assistant, rows=2))
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.past_key_values is None
    for name in ("scores", "logits"):
        if given.get(f"output_{name}"):
            for step, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                before = want.sequences[:, inputs["input_ids"].shape[1] :][:, :step]
                live = ~torch.isin(before, torch.tensor(given["eos_token_id"], device=device)).any(1)
                torch.testing.assert_close(a[live], b[live], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_criteria_without_end_tokens_stop_a_batch_as_ever(assistant):
    """Where nothing but a criterion stops them, answers go on until all were stopped once."""
    plain, model = made("random", "cpu")
    inputs = prompts("cpu", *COUNTS)
    width = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["stopping_criteria"] = [lambda ids, scores, **_: (ids[:, width:] % 7 == 0).sum(1) > 1]
    want = plain.generate(**inputs, **options)
    assert model.generate(**inputs, **options, assistant=ContinuousBatch(assistant, rows=3)).tolist() == want.tolist()


def test_a_streamer_gets_the_columns_of_all_prompts():
    plain, model = made("bigram", "cpu")

    class Columns:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append([])

    inputs, told = prompts("cpu", *COUNTS), Columns()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
    out = model.generate(**inputs, **options, streamer=told, assistant=ContinuousBatch(TREE, rows=2))
    columns = out[:, inputs["input_ids"].shape[1] :].T.tolist()
    assert told.seen[-1] == [] and told.seen[1:-1] == columns  # the first is the prompt


@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
def test_the_law_of_sampled_answers_is_the_targets(assistant):
    """The second and third token of 800 answers, which end at different places, against the products of the model's own chances."""
    plain, model = made("bigram", "cpu")
    inputs, count = prompts("cpu", 4), 800
    law = {"do_sample": True, "temperature": 1.0, "top_k": 3, "eos_token_id": [1000]}
    logits = [plain(torch.tensor([[token]])).logits[0, -1] for token in range(97)]
    chances: list[dict[int, float]] = []
    for row in logits:
        best = row.topk(3)
        chances.append(dict(zip(best.indices.tolist(), torch.softmax(best.values, 0).tolist(), strict=True)))
    start = int(inputs["input_ids"][0, -1])
    want = {
        (a, b, c): chances[start][a] * chances[a][b] * chances[b][c] for a in chances[start] for b in chances[a] for c in chances[b]
    }  # fmt: skip
    torch.manual_seed(5)
    out = model.generate(**inputs, **law, max_new_tokens=3, num_return_sequences=count, assistant=ContinuousBatch(assistant, rows=50))
    found = Counter(tuple(row[4:].tolist()) for row in out)
    assert stats(model).joined == count - 50 and set(found) <= set(want)
    likely = {text: chance for text, chance in want.items() if chance * count >= 5}
    rest = 1 - sum(likely.values())
    off = sum((found[text] - count * chance) ** 2 / (count * chance) for text, chance in likely.items())
    off += (sum(found[text] for text in want if text not in likely) - count * rest) ** 2 / (count * rest) if rest * count >= 1 else 0.0
    freedom = len(likely)
    assert off < freedom + 4.5 * (2 * freedom) ** 0.5  # five standard deviations or so of a chi-square of that many degrees of freedom


def test_a_drafter_that_sits_rounds_out_is_told_before_a_prompt_begins(monkeypatch):
    """And goes on with the storage of the row's new prompt."""
    stand_in(monkeypatch)
    monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])
    monkeypatch.setattr(loop, "AHEAD_AFTER", 0)
    monkeypatch.setattr(draft_length, "CREDIT", 0.5)
    monkeypatch.setattr(nasd, "GRANTED", 0.5)
    monkeypatch.setattr(draft_length, "LONGEST_PAUSE", 7)
    plain, model = made("random", "cpu")
    begun: list[tuple[int, list[int]]] = []
    join = nasd.NasdDrafter.join
    monkeypatch.setattr(nasd.NasdDrafter, "join", lambda self, row, *rest: (join(self, row, *rest), begun.append((row, self.roots[:]))))
    for seed in range(3):
        inputs = prompts("cpu", *COUNTS, seed=seed)
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
        want = plain.generate(**inputs, **options)
        assert model.generate(**inputs, **options, assistant=ContinuousBatch("nasd", rows=3)).tolist() == want.tolist()
    held = next(iter(session_of(model).engines.held.values()))
    assert held.aside.plain is not None and len(begun) == 3 * (len(COUNTS) - 3)  # rounds were sat out
    width, firsts = inputs["input_ids"].shape[1], {int(row[inputs["input_ids"].shape[1]]) for row in want}
    assert width and all(roots[row] in firsts for row, roots in begun[-(len(COUNTS) - 3) :])


def test_buffers_grow_for_a_longer_prompt(monkeypatch):
    """One that needs more room than the rows before it had."""
    monkeypatch.setattr(cache, "FIRST_SLOTS", 16)
    plain, model = made("bigram", "cpu")
    inputs = prompts("cpu", 3, 4, 60, 5, 40)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends_of(plain, prompts("cpu", *COUNTS)), "pad_token_id": 0}
    want = plain.generate(**inputs, **options)
    assert model.generate(**inputs, **options, assistant=ContinuousBatch(TREE, rows=2)).tolist() == want.tolist()


def test_as_many_rows_as_prompts_are_an_ordinary_batch():
    _, model = made("random", "cpu")
    out = model.generate(
        **prompts("cpu", 4, 5), max_new_tokens=4, assistant=ContinuousBatch("autoregressive", rows=2), return_dict_in_generate=True,
    )  # fmt: skip
    assert out.past_key_values is not None and out.fastspec.joined == 0


def test_what_cannot_begin_in_a_running_batch_is_refused():
    _, model = made("random", "cpu")
    inputs = prompts("cpu", 4, 5, 3)

    def refused(words: str, assistant: Any, **options: Any) -> None:
        with pytest.raises(Unsupported, match=words):
            model.generate(**{**inputs, **options}, max_new_tokens=4, assistant=assistant)

    refused("'speculative' cannot take a new prompt", ContinuousBatch(fastspec.Speculative(early_exit=1), rows=2))
    refused("past_key_values", ContinuousBatch("nasd", rows=2), past_key_values=model(**inputs).past_key_values, **{
        "input_ids": torch.cat((inputs["input_ids"], torch.full((3, 1), 9)), 1),
        "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)), 1),
    })  # fmt: skip
    refused("unknown", ContinuousBatch("eagle4", rows=2))
    for arguments, words in (({"rows": 0}, "at least 1"), ({"assistant": ContinuousBatch()}, "ContinuousBatch itself")):
        with pytest.raises(Unsupported, match=words):
            ContinuousBatch(**arguments)


def test_a_cascade_is_refused():
    model = cascaded(stages(2))
    with pytest.raises(Unsupported, match="one model after another"):
        model.generate(**prompts("cpu", 4, 5, 3), max_new_tokens=4, assistant=ContinuousBatch("cascade", rows=2))
