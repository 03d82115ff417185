"""Rounds without the drafter: of one token, captured whole and asynchronous; the drafter catches up behind the last."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import ON_CUDA
from helpers.fallback import soon_out
from helpers.generate import MAKERS, answer, bigram, prompts_on, same, stats, unpatched
from helpers.models import tiny_model
from helpers.tokenizers import DRAFT, TARGET

import fastspec
from fastspec import Speculative
from fastspec.generation.drafters import nasd as nasd
from fastspec.generation.engine import batching
from fastspec.generation.engine.call import Fallback
from fastspec.generation.engine.schedule import WholeGraph
from fastspec.patches.session import session_of

NEVER = 1000


KINDS = {
    "draft model": lambda: tiny_model(seed=3, num_hidden_layers=1),
    "early exit": lambda: None,
    "another tokenizer": lambda: (tiny_model(seed=2, vocab_size=93), DRAFT, TARGET),
    "nasd": lambda: None,
}


@pytest.fixture(params=["torch", "stand-in", pytest.param("cuda", marks=ON_CUDA)])
def ahead(request, monkeypatch):
    """Rounds are asynchronous from the first on, where they are captured; how many were, and the rounds without
    drafts."""
    device = "cuda" if request.param == "cuda" else "cpu"
    if request.param == "stand-in":
        stand_in(monkeypatch)
    soon_out(monkeypatch)
    seen = {"launched": 0, "fallback": 0, "captures": request.param != "torch", "device": device}
    launch, sit = WholeGraph.launch, Fallback.count

    def launching(self, verifier):
        seen["launched"] += 1
        return launch(self, verifier)

    def sitting(self, *given):
        seen["fallback"] += 1
        return sit(self, *given)

    monkeypatch.setattr(WholeGraph, "launch", launching)
    monkeypatch.setattr(Fallback, "count", sitting)
    return seen


def moved(draft: Any, device: str) -> Any:
    """A draft model, or one with its tokenizers, on a device."""
    return (draft[0].to(device), *draft[1:]) if isinstance(draft, tuple) else draft.to(device)


def drafting(kind: str, device: str) -> tuple[Any, Any]:
    """(the unpatched model, the same patched) with drafts that are mostly wrong."""
    model, draft = MAKERS["random"][0]().to(device), KINDS[kind]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        return unpatched("random").to(device), fastspec.patch(
            model, **({} if draft is None else {"speculative": moved(draft, device)})
        )


def config(kind: str) -> Any:
    return fastspec.Nasd() if kind == "nasd" else Speculative(most=3, early_exit=1 if kind == "early exit" else None)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_the_targets_wherever_rows_end(ahead, kind):
    """By an end token, by length and by a user's criterion, in calls one after another."""
    pair = drafting(kind, ahead["device"])
    plain, model = pair
    for seed in range(3):
        inputs = prompts_on(ahead["device"], 9, 5, 7, seed=seed)
        options: dict[str, Any] = {"max_new_tokens": 40 + seed, "pad_token_id": 0, "eos_token_id": None}
        if seed:
            free = answer(plain, inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
            options["eos_token_id"] = [int(free[0, 9 + 11]), int(free[1, 9 + 17])]
        if seed == 2:
            options["stopping_criteria"] = [lambda ids, scores, **_: (ids[:, 9:] == 0).sum(1) > 2]
        same(pair, config(kind), inputs, **options)
        assert all(not held.in_flight for held in session_of(model).engines.held.values())
    assert ahead["fallback"] > 40
    assert (ahead["launched"] > 20) == ahead["captures"]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"output_scores": True, "output_logits": True}, {}], ids=str
)
def test_what_else_a_call_asks_for_is_that_of_its_rounds(ahead, kind, options):
    """Processors that look at the history decide in these rounds too, and scores and logits are theirs."""
    plain, model = drafting(kind, ahead["device"])
    given = {**prompts_on(ahead["device"], 9, 5), "do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    given |= {"return_dict_in_generate": True, **options}
    want = plain.generate(**given)
    for _ in range(2):
        got = model.generate(**given, assistant=config(kind))
        assert got.sequences.tolist() == want.sequences.tolist()
        for name in ("scores", "logits"):
            if given.get(f"output_{name}"):
                torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]), rtol=1e-4, atol=1e-4)
    assert ahead["fallback"] > 10 and (ahead["launched"] == 0 or not options)


@pytest.mark.some("draft model", "nasd", "early exit")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tokens_whether_rounds_are_asynchronous_or_not(ahead, kind, monkeypatch):
    model, emitted = drafting(kind, ahead["device"])[1], []
    for after in (0, 10**9, 0):
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", after)
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 0.3, "max_new_tokens": 40, "eos_token_id": None}
        emitted.append(model.generate(**prompts_on(ahead["device"], 6, 4), **options, assistant=config(kind)).tolist())
    assert emitted[0] == emitted[1] == emitted[2] and ahead["fallback"] > 20


def test_drafts_behind_them_go_on_from_the_whole_text(ahead):
    """The draft model is the target: whatever it drafts behind rounds without it is right."""
    plain, model, draft = (bigram().to(ahead["device"]) for _ in range(3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        fastspec.patch(model, speculative=(draft, TARGET, TARGET))
    rest = fastspec.generation.drafters.retokenized.RetokenizingDrafter.pause
    asked = []

    def now_and_then(self):
        asked.append(rest(self))
        return 3 if len(asked) % 2 == 0 else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastspec.generation.drafters.retokenized.RetokenizingDrafter, "pause", now_and_then)
        same(
            (plain, model),
            Speculative(gamma=3),
            prompts_on(ahead["device"], 4, 6),
            max_new_tokens=60,
            eos_token_id=NEVER,
        )
    last = stats(model)
    assert ahead["fallback"] > 12 and last.draft_rounds < last.row_rounds
    assert (
        last.accepted > 1.5 * last.draft_rounds
    )  # less than 3 only where a text does not encode to the tokens it came from


def test_a_profile_has_every_round(ahead):
    model = drafting("draft model", ahead["device"])[1]
    with fastspec.profile(model) as profile:
        model.generate(
            **prompts_on(ahead["device"], 5),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=None,
            assistant=Speculative(most=3),
        )
    assert len(profile.rounds) == stats(model).rounds and ahead["fallback"] > 5


def test_a_pause_is_cut_short_by_the_end_of_the_call_and_not_remembered(ahead):
    pair = drafting("draft model", ahead["device"])
    for limit in (*range(2, 12), 13, 16, 19, 22, 23):
        same(pair, Speculative(most=2), prompts_on(ahead["device"], 6, 4), max_new_tokens=limit, eos_token_id=None)
    assert ahead["fallback"] > 20


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_storage_counts_what_was_emitted_all_the_same(ahead, kind, monkeypatch):
    """Every token of every row up to its end, in rounds without drafts and in others."""
    make = {"ngram": lambda: fastspec.NgramStorage(3), "suffix": fastspec.SuffixStorage}[kind]
    plain, model = drafting("nasd", ahead["device"])
    for seed in range(3):
        inputs = prompts_on(ahead["device"], 9, 5, 7, seed=seed)
        free = plain.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
        options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
        options["eos_token_id"] = [int(free[0, 9 + 11]), int(free[1, 9 + 17])]
        want = plain.generate(**inputs, **options).tolist()
        told, before = [], ahead["fallback"]
        for least in (0.1, 10.0):  # with pauses, and without
            monkeypatch.setattr(nasd, "LEAST_LOOK", least)
            storage = make()
            assistant = fastspec.Nasd(storage=storage, top_k_filler=1)
            assert model.generate(**inputs, **options, assistant=assistant).tolist() == want
            rests = ahead["fallback"] - before
            assert (rests > 0) == (least < 1)
            before = ahead["fallback"]
            told.append(sorted(map(sorted, (storage.tallies.entries(each) for each in range(len(storage.tallies))))))
        assert told[0] == told[1]


def test_a_storage_that_knows_the_answer_is_asked_on(ahead):
    """What is accepted pays for the look-ups."""
    plain, model = drafting("nasd", ahead["device"])
    storage = fastspec.NgramStorage()
    for _ in range(3):
        same(
            (plain, model),
            fastspec.Nasd(storage=storage),
            prompts_on(ahead["device"], 9),
            max_new_tokens=60,
            eos_token_id=NEVER,
        )
        sat, ahead["fallback"] = ahead["fallback"], 0
    assert sat < 20 and stats(model).acceptance_length > 2
