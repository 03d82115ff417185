"""Prompts that one pass reads together, on models: each says what it says alone."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import ON_CUDA
from helpers.families import recurrent, windowed
from helpers.generate import TREE, stats
from helpers.models import tiny_model
from helpers.open import GREEDY, NEVER, alone, made, texts, told

import fastspec
from fastspec.generation.drafters.head_drafter import HeadDrafter
from fastspec.generation.engine import joining, rounds
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.joining import Joining
from fastspec.generation.engine.rounds import Rounds

ASSISTANTS = ["autoregressive", TREE, "eagle2", "eagle", "nasd"]
COUNTS = (9, 3, 14, 5, 40, 2, 11, 6)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=ON_CUDA)])
def device(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def groups(monkeypatch) -> list[int]:
    """The numbers of prompts that were read together."""
    found: list[int] = []
    read = Rounds._read_together
    monkeypatch.setattr(Rounds, "_read_together", lambda self, taken: found.append(len(taken)) or read(self, taken))
    return found


@pytest.mark.some("autoregressive", "bigram", "eagle-random", "nasd")
@pytest.mark.parametrize(("assistant", "kind"), [*((each, "random") for each in ASSISTANTS), (TREE, "bigram")], ids=str)
def test_prompts_that_come_together_say_what_each_says_alone(device, groups, assistant, kind):
    """Of many lengths, in an idle batch and beside rows that go on, greedy and drawn; graphs of earlier groups are
    taken up."""
    plain, model = (each.to(device) for each in made(kind))
    ids, drawn = (
        texts(*COUNTS),
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": NEVER, "max_new_tokens": 6},
    )
    greedy = {**GREEDY, "max_new_tokens": 6}
    want = [alone(plain, each.to(device), 6) for each in ids]
    with fastspec.continuous(model, assistant, rows=1, max_length=80) as batch:
        sampled = told([batch.submit(each, seed=at, **drawn) for at, each in enumerate(ids)])
    assert not groups
    with fastspec.continuous(model, assistant, rows=8, max_length=80) as batch:
        for _ in range(2):
            with batch._changed:
                futures = [batch.submit(each, **greedy) for each in ids]
            assert told(futures) == want
        with batch._changed:
            futures = [batch.submit(each, seed=at, **drawn) for at, each in enumerate(ids)]
        assert told(futures) == sampled
        first = batch.submit(ids[0], **{**greedy, "max_new_tokens": 30})
        later = [batch.submit(each, **greedy) for each in ids * 2]
        assert told(later) == want * 2 and told([first])[0][: len(want[0])] == want[0]
        assert batch.stats.joined == 5 * len(ids) + 1
    assert 8 in groups


@pytest.mark.parametrize("count", [1, 2])
def test_first_tokens_go_to_the_host_before_the_drafter_reads_and_rows_are_copied(monkeypatch, device, count):
    """So that who waits for them does not wait for these."""
    _, model = (each.to(device) for each in made())
    order: list[str] = []

    def noting(owner, name, told):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: order.append(told) or function(*given))

    with fastspec.continuous(model, TREE, rows=count, max_length=80) as batch:
        noting(joining if count == 1 else rounds, "HostCopy", "copy")
        noting(HeadDrafter, "begin", "draft")
        noting(Engine, "admit", "row")
        noting(Rounds, "_seat", "read")
        with batch._changed:
            futures = [batch.submit(each, **GREEDY, max_new_tokens=1) for each in texts(*[9] * count)]
        told(futures)
    assert order == ["copy", "draft", *["row"] * count, *["read"] * count]


@pytest.mark.parametrize(("length", "waits"), [(80, 0), (3000, 1)], ids=["whole", "growing"])
def test_a_prompt_is_read_at_once_where_buffers_need_not_grow(monkeypatch, device, length, waits):
    """After a prefix whose copy is on its way, say: without a look at how many tokens there are."""
    _, model = (each.to(device) for each in made())
    read, to_int, looks = Joining.read, torch.Tensor.__int__, list[int]()

    def noting(self: Joining, most: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "__int__", lambda tensor: looks.append(1) or to_int(tensor))
            read(self, most)

    with fastspec.continuous(model, rows=1, max_length=length) as batch:
        told([batch.submit(texts(9)[0], **GREEDY, max_new_tokens=1)])
        monkeypatch.setattr(Joining, "read", noting)
        told([batch.submit(texts(9)[0], **GREEDY, max_new_tokens=1)])
    assert len(looks) == waits


def test_a_batch_that_does_not_narrow_reads_prompts_alone(device, groups):
    """Then a text's rounding does not depend on the load."""
    plain, model = (each.to(device) for each in made())
    ids = texts(*COUNTS)
    with fastspec.continuous(model, TREE, rows=8, max_length=80, narrows=False) as batch:
        with batch._changed:
            futures = [batch.submit(each, max_new_tokens=12, **GREEDY) for each in ids]
        assert told(futures) == [alone(plain, each.to(device), 12) for each in ids] and not groups


KINDS = (
    partial(recurrent, "qwen3_next"),
    partial(windowed, "gemma2"),
    partial(windowed, "gpt_oss"),
    partial(tiny_model, "qwen3_moe"),
)


@pytest.mark.some("qwen3_next", "gpt_oss")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.args[0])
def test_models_of_other_kinds_read_prompts_together_too(device, groups, make, monkeypatch):
    """With a recurrent state, with windows, with experts; also where their passes wait for the host and are not
    captured."""
    init = Rounds.__init__

    def together(self: Any, *given: Any) -> None:
        init(self, *given)
        self.together = 8

    monkeypatch.setattr(Rounds, "__init__", together)
    plain, model = make().to(device), fastspec.patch(make().to(device))
    ids = texts(*COUNTS)
    want = [alone(plain, each.to(device), 8) for each in ids]
    with fastspec.continuous(model, "nasd", rows=8, max_length=80) as batch:
        for _ in range(2):
            with batch._changed:
                futures = [batch.submit(each, max_new_tokens=8, **GREEDY) for each in ids]
            assert told(futures) == want
    assert 8 in groups


@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
def test_a_call_of_many_prompts_reads_those_that_wait_together(device, groups, assistant):
    """With 32 rows two of them."""
    plain, model = (each.to(device) for each in made("bigram"))
    ids = [each.tolist() for each in texts(*(3 + place % 9 for place in range(50)))]
    width = max(map(len, ids))
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(each)) + each for each in ids], device=device),
        "attention_mask": torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids], device=device),
    }
    want: Any = plain.generate(**inputs, do_sample=False, max_new_tokens=24)
    emitted = want[:, width:]
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": emitted[::5, 7].tolist(), "pad_token_id": 0}
    want = plain.generate(**inputs, **options).tolist()
    for _ in range(2):
        assert (
            model.generate(**inputs, **options, assistant=fastspec.ContinuousBatch(assistant, rows=32)).tolist() == want
        )
        assert stats(model).joined == 18
    assert groups and set(groups) <= {2, 4, 8}


def test_where_prompts_begin_together_there_is_room_for_what_one_pass_reads(device, groups):
    _, model = made()
    with fastspec.continuous(model.to(device), "autoregressive", rows=8, max_length=2000) as batch:
        with batch._changed:
            futures = [batch.submit(each, **GREEDY, max_new_tokens=2) for each in texts(*[100] * 15)]
        told(futures)
        slots = {count: target.state.bound for count, (target, _) in batch._widths.made[8].engine.entries.items()}
    assert groups == [8, 4, 2] and slots == {1: 1024, 2: 512, 4: 256, 8: 128}


def test_while_more_prompts_wait_than_rows_go_on_four_chunks_are_read_between_two_rounds(device, monkeypatch):
    """Of whole prompts; one chunk otherwise."""
    read, found = Rounds._read, []
    monkeypatch.setattr(
        Rounds,
        "_read",
        lambda self, room: found.append((self.batch.stats.rounds, sum(self.batch.running), room)) or read(self, room),
    )
    plain, model = (each.to(device) for each in made())
    first, *others = texts(4, *[20] * 8)
    with fastspec.continuous(model, "autoregressive", rows=16, max_length=80, prefill_chunk=40) as batch:
        with batch._changed:
            running = batch.submit(first, **GREEDY, max_new_tokens=60)
        while not batch.running:
            time.sleep(0.001)
        found.clear()
        with batch._changed:
            futures = [batch.submit(each, **GREEDY, max_new_tokens=8) for each in others]
        assert told([running, *futures]) == [alone(plain, first, 60), *(alone(plain, each, 8) for each in others)]
    reads = Counter(rounds for rounds, _, _ in found)
    assert [reads[rounds] for rounds in sorted(reads)][:3] == [4, 2, 2] and all(room <= 40 for *_, room in found)


def test_a_batch_of_which_nobody_waits_for_one_answer(device, groups):
    """Prompts are read whole beside rows that go on, and with 32 rows two at a time."""
    plain, model = (each.to(device) for each in made())
    ids = texts(*(3 + place % 9 for place in range(40)))
    with fastspec.continuous(model, "autoregressive", rows=32, max_length=80, prefill_chunk=None) as batch:
        with batch._changed:
            futures = [batch.submit(each, max_new_tokens=3 + place % 5, **GREEDY) for place, each in enumerate(ids)]
        assert told(futures) == [alone(plain, each.to(device), 3 + place % 5) for place, each in enumerate(ids)]
    assert groups and set(groups) <= {2, 4, 8}
    with pytest.raises(fastspec.Unsupported, match='prefill_chunk=0 must be at least 1, None or "auto"'):
        fastspec.continuous(model, prefill_chunk=0)
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=80) as batch:
        assert batch.chunk == batch._widths.current.chunk == (1024 if device == "cuda" else 256)
