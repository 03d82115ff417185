"""Continuous batching: prompts begin in the rows of others that have ended, and each says what it says alone."""

from __future__ import annotations

from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.cascade import cascaded, stages
from helpers.devices import ON_CUDA
from helpers.fallback import soon_out
from helpers.generate import MAKERS, TREE, Recorder, free, prompts_on, stats, unpatched
from helpers.models import tiny_head
from helpers.seq2seq import sources, tiny_seq2seq

import fastspec
from fastspec import ContinuousBatch, Unsupported
from fastspec.generation import sequence_state as buffers
from fastspec.generation.drafters import nasd
from fastspec.generation.drafters.base import Decoding, Drafter
from fastspec.generation.engine import batching
from fastspec.generation.engine.engine import Engine
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH
from fastspec.patches.call import assembly
from fastspec.patches.call import processors as selection
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.session import session_of

COUNTS = (9, 3, 14, 5, 7, 2, 11, 6, 4)
THEIRS = SimpleNamespace(name="theirs", taps=None, drafter=lambda **_: None)
"""A decoding that does not say that prompts may join."""
ASSISTANTS = ["autoregressive", TREE, "eagle2", "eagle", "nasd", fastspec.Nasd(storage="suffix")]


@pytest.fixture(params=["torch", "stand-in", pytest.param("cuda", marks=ON_CUDA)])
def device(request, monkeypatch):
    """Where calls run; rounds are asynchronous from the first on, where they are captured."""
    if request.param == "stand-in":
        stand_in(monkeypatch)
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    return "cuda" if request.param == "cuda" else "cpu"


def made(kind: str, device: str) -> tuple[Any, Any]:
    """(the unpatched model, the same patched, with a head for every assistant)."""
    target, head = MAKERS[kind]
    plain, model = unpatched(kind).to(device), target()
    third, first = (
        each.to(device) for each in (head(model), tiny_head(model, kind="eagle", taps=(), own_lm_head=False))
    )
    return plain, fastspec.patch(model.to(device), eagle3=third, eagle2=first, eagle=first)


@cache
def said_of(kind: str, seed: int, device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[list[int]]]:
    """Prompts, the options of a call that ends some answers early, and what the unpatched model says in one batch."""
    plain, inputs = MAKERS[kind][0]().to(device), prompts_on(device, *COUNTS, seed=seed)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
    return inputs, options, plain.generate(**inputs, **options).tolist()


def ends_of(plain: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    """End tokens that end some answers early, and not all at once."""
    emitted = free(plain, inputs, 16)
    return [emitted[0][3], emitted[3][9], emitted[4][1], emitted[6][0]]


@pytest.mark.some("autoregressive", "eagle", "nasd", "Nasd", "stand-in")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
def test_every_prompt_gives_what_it_gives_in_one_batch(device, kind, assistant, monkeypatch):
    """Whatever the number of rows, in calls one after another that share what was captured."""
    monkeypatch.setattr(assembly, "_chooses_sizes", lambda plan: False)  # by a clock, which no two calls share
    _, model = made(kind, device)
    alone = assistant in ASSISTANTS[:4] and device == "cpu"  # what it drafts for a row does not depend on the others
    captured = not fastspec.report(model).backend.startswith("torch")
    for rows in (3, 1, 3) if captured else (3, 1):  # the third call takes up what the first one captured
        inputs, options, want = said_of(kind, rows, device)
        assert model.generate(**inputs, **options, assistant=ContinuousBatch(assistant, rows=rows)).tolist() == want
        seen = stats(model)
        assert seen.joined == len(COUNTS) - rows and seen.rows == rows
        assert seen.row_rounds <= rows * seen.rounds
        if alone:  # then drafts are as good in a row that was another's before
            model.generate(**inputs, **options, assistant=assistant)
            assert (seen.row_rounds, seen.accepted) == (stats(model).row_rounds, stats(model).accepted)
        assert all(not held.in_flight for held in session_of(model).engines.held.values())
    assert len(session_of(model).engines.held) in (0, 3 if alone else 2)  # rows of 3, 1 and all, where they are kept


def test_rows_are_seldom_idle(device):
    """A batch of all prompts goes on until the longest answer ends, with ever fewer rows; here others begin in their
    places."""
    plain, model = made("random", device)
    inputs = prompts_on(device, *range(3, 27))
    emitted = free(plain, inputs, 24)
    options = {
        **inputs,
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": [row[index] for index, row in enumerate(emitted)],
    }
    model.generate(**options, assistant="autoregressive")
    whole = stats(model)
    model.generate(**options, assistant=ContinuousBatch("autoregressive", rows=4))
    turns = stats(model)
    assert turns.row_rounds == whole.row_rounds and turns.joined == 20
    assert turns.row_rounds / (turns.rows * turns.rounds) > 0.65 > whole.row_rounds / (whole.rows * whole.rounds)


@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"output_scores": True, "output_logits": True}, {"do_sample": True, "top_k": 1}],
    ids=str,
)
def test_what_else_a_call_asks_for_is_that_of_its_prompt(device, assistant, options):
    """Processors look at the prompt's own text, and scores and logits are its own."""
    plain, model = made("random", device)
    inputs = prompts_on(device, *COUNTS)
    given = {
        **inputs,
        "max_new_tokens": 16,
        "eos_token_id": ends_of(plain, inputs),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    given |= {"do_sample": False, **options}
    want, got = plain.generate(**given), model.generate(**given, assistant=ContinuousBatch(assistant, rows=2))
    assert got.sequences.tolist() == want.sequences.tolist()
    assert kept_cache(got) is None
    for name in ("scores", "logits"):
        if given.get(f"output_{name}"):
            for step, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                before = want.sequences[:, inputs["input_ids"].shape[1] :][:, :step]
                live = ~torch.isin(before, torch.tensor(given["eos_token_id"], device=device)).any(1)
                torch.testing.assert_close(a[live], b[live], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("storage", ["ngram", "suffix"])
def test_a_row_that_begins_anew_drafts_from_its_own_prompt(storage):
    """The tree that the prompt's own drafter would grow, and nothing of the prompt before; the other row goes on with
    its own."""
    config, device = fastspec.Nasd(storage=storage, stop_if_unknown=False, gamma=3, total_tokens=4), torch.device("cpu")
    texts = torch.tensor([[7, 8, 9, 7, 8, 9], [5, 6, 5, 6, 5, 6], [7, 8, 3, 4, 7, 8]])
    after = torch.tensor([7, 5, 3])

    def begun(*rows: int) -> nasd.NasdDrafter:
        drafter = nasd.NasdDecoding(config).drafter(rows=len(rows), capacity=32, device=device, ops=TORCH, process=None)
        at = list(rows)
        drafter.begin(texts[at], torch.full((len(at),), 6), torch.empty(len(at), 6, 0), after[at])
        return drafter

    many, one = begun(0, 1), begun(2)
    before = many.propose(32).tokens.tolist()
    many.copy_row(0, one, 6)
    assert many.propose(32).tokens.tolist() == [*begun(2).propose(32).tokens.tolist(), before[1]]
    assert before[0] == [7, 8, 9, 7] and before[1] == [5, 6, 5, 6]


@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_a_criterion_ends_an_answer_where_there_are_no_end_tokens(monkeypatch, assistant, options):
    """Each by itself: it is filled up, and its row given away. The criterion counts as one of the known, that keep
    nothing."""
    plain, model = made("random", "cpu")
    inputs = prompts_on("cpu", *COUNTS)
    width = inputs["input_ids"].shape[1]
    given = {**inputs, "max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    free = plain.generate(**given)
    given["stopping_criteria"] = [lambda ids, scores, **_: (ids[:, width:] % 7 == 0).sum(1) > 1]
    monkeypatch.setattr(selection, "CRITERIA", (*selection.CRITERIA, FunctionType))
    want = []
    for row in free.tolist():
        sevens = [place for place in range(width, len(row)) if row[place] % 7 == 0]
        want.append(row[: sevens[1] + 1] if len(sevens) > 1 else row)
    longest = max(map(len, want))
    assert len(set(map(len, want))) > 3
    got = model.generate(**given, assistant=ContinuousBatch(assistant, rows=3))
    assert got.tolist() == [row + [0] * (longest - len(row)) for row in want]
    assert stats(model).row_rounds <= sum(len(row) - width for row in want)


def test_a_streamer_gets_the_columns_of_all_prompts():
    plain, model = made("bigram", "cpu")
    inputs, told = prompts_on("cpu", *COUNTS), Recorder()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
    out = model.generate(**inputs, **options, streamer=told, assistant=ContinuousBatch(TREE, rows=2))
    columns = out[:, inputs["input_ids"].shape[1] :].T.tolist()
    assert told.events == [inputs["input_ids"].tolist(), *columns, "end"]


def test_a_drafter_that_sits_rounds_out_is_told_before_a_prompt_begins(monkeypatch):
    """And rests on."""
    stand_in(monkeypatch)
    soon_out(monkeypatch)
    plain, model = made("bigram", "cpu")
    rests: list[int] = []
    admit = Engine.admit

    def admitting(self: Any, row: int, *rest: Any) -> None:
        left = self.fallback.left
        assert not self.fallback.missed
        admit(self, row, *rest)
        assert self.fallback.left == left
        rests.append(left)

    monkeypatch.setattr(Engine, "admit", admitting)
    for seed in range(6):
        inputs = prompts_on("cpu", *COUNTS, seed=seed)
        options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
        want = plain.generate(**inputs, **options)
        assert model.generate(**inputs, **options, assistant=ContinuousBatch("nasd", rows=3)).tolist() == want.tolist()
    assert len(rests) == 6 * (len(COUNTS) - 3) and any(rests) and not all(rests)


def test_buffers_grow_for_a_longer_prompt(monkeypatch):
    """One that needs more room than the rows before it had."""
    monkeypatch.setattr(buffers, "FIRST_SLOTS", 16)
    plain, model = made("bigram", "cpu")
    longest: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, length, *rest: longest.append(length) or step(self, length, *rest))
    inputs = prompts_on("cpu", 3, 4, 60, 5, 40, 2, 3, seed=3)
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "eos_token_id": ends_of(plain, prompts_on("cpu", *COUNTS)),
        "pad_token_id": 0,
    }
    want = plain.generate(**inputs, **options)
    assert model.generate(**inputs, **options, assistant=ContinuousBatch(TREE, rows=2)).tolist() == want.tolist()
    assert max(longest) > 60 > longest[-1]  # and less where it has ended


def test_as_many_rows_as_prompts_are_an_ordinary_batch():
    _, model = made("random", "cpu")
    out = model.generate(
        **prompts_on("cpu", 4, 5),
        max_new_tokens=4,
        assistant=ContinuousBatch("autoregressive", rows=2),
        return_dict_in_generate=True,
    )
    assert kept_cache(out) is not None and out.fastspec.joined == 0


@pytest.mark.parametrize("count", [2, 3])
def test_what_cannot_begin_in_a_running_batch_is_refused(count):
    """Whether a call has more prompts than rows or not."""
    _, model = made("random", "cpu")
    inputs = prompts_on("cpu", 4, 5, 3)
    inputs = {name: tensor[:count] for name, tensor in inputs.items()}

    def refused(words: str, assistant: Any, **options: Any) -> None:
        with pytest.raises(Unsupported, match=words):
            model.generate(**{**inputs, **options}, max_new_tokens=4, assistant=assistant)

    refused("'theirs' cannot take a new prompt", ContinuousBatch(THEIRS, rows=2))
    refused(
        CACHE,
        ContinuousBatch("nasd", rows=2),
        **{CACHE: kept_cache(model(**inputs))},
        **{
            "input_ids": torch.cat((inputs["input_ids"], torch.full((count, 1), 9)), 1),
            "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(count, 1, dtype=torch.long)), 1),
        },
    )
    refused("unknown", ContinuousBatch("eagle4", rows=2))
    for arguments, words in (({"rows": 0}, "at least 1"), ({"assistant": ContinuousBatch()}, "ContinuousBatch itself")):
        with pytest.raises(Unsupported, match=words):
            ContinuousBatch(**arguments)


def test_a_refused_call_keeps_what_was_captured(monkeypatch):
    stand_in(monkeypatch)
    _, model = made("random", "cpu")
    early = fastspec.Speculative(early_exit=1)
    model.generate(**prompts_on("cpu", 4, 5), max_new_tokens=6, assistant=early)
    held = dict(session_of(model).engines.held)
    with pytest.raises(Unsupported):
        model.generate(**prompts_on("cpu", 4, 5, 3), max_new_tokens=6, assistant=ContinuousBatch(THEIRS, rows=2))
    assert dict(session_of(model).engines.held) == held and held


def test_cascades_and_encoder_decoder_models_are_refused():
    model = cascaded(stages(2))
    with pytest.raises(Unsupported, match="'cascade' cannot take a new prompt"):
        model.generate(**prompts_on("cpu", 4, 5, 3), max_new_tokens=4, assistant=ContinuousBatch("cascade", rows=2))
    with pytest.raises(Unsupported, match="takes turns"):
        fastspec.Stage(model, assistant=ContinuousBatch("nasd"))
    reader = fastspec.patch(tiny_seq2seq("t5"))
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration is an encoder-decoder model"):
        reader.generate(**sources(3, 4), max_new_tokens=4, assistant=ContinuousBatch("nasd", rows=2))


@pytest.mark.parametrize("reads", [None, ()], ids=str)
def test_a_third_partys_drafters_are_objects_of_their_own(reads):
    """One that joins is made anew for every prompt, whether it reads features or not; the same object twice is
    refused."""

    class Said(Decoding, Drafter):
        name, taps, continuous, nodes, max_path = "said", reads, True, 1, 1

        def __init__(self, shared: bool) -> None:
            self.shared, self.made = shared, []

        def drafter(self, *, rows: int, **_: Any) -> Any:
            self.made.append(rows)
            return self if self.shared else Said(False)

        def begin(self, ids: Any, counts: Any, features: Any, root: Any) -> None:
            self.root = root.clone()

        def copy_row(self, row: int, other: Any, count: int) -> None:
            self.root[row] = other.root[0]

        def propose(self, extent: int) -> TokenTree:
            return TokenTree.root_only(self.root)

        def observe(self, tree: Any, verdict: Any, *_: Any) -> None:
            self.root = verdict.bonus.clone()

    plain, model = made("random", "cpu")
    inputs = prompts_on("cpu", *COUNTS)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ends_of(plain, inputs), "pad_token_id": 0}
    own = Said(False)
    got = model.generate(**inputs, **options, assistant=ContinuousBatch(own, rows=3))
    assert got.tolist() == plain.generate(**inputs, **options).tolist() and own.made == [3] + [1] * (len(COUNTS) - 3)
    with pytest.raises(Unsupported, match="made one drafter twice"):
        model.generate(**inputs, **options, assistant=ContinuousBatch(Said(True), rows=3))
