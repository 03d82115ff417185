"""Prefix caching in open batches: a prompt that begins like a row's text is read from there on, and is answered as one
that is read whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import INTERPRETED
from helpers.families import recurrent, windowed
from helpers.generate import NEVER, TREE, shallow_model
from helpers.kernels import add_in_order
from helpers.models import tiny_head, tiny_model
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told
from torch import Tensor

import fastspec
from fastspec.generation import layer_state, sequence_state, target
from fastspec.generation.engine import batching, open_batch
from fastspec.generation.engine.engine import Engine
from fastspec.patches.hf.model import HFModel
from fastspec.programs.serving.batch import TokenStreamer

FAMILIES: dict[str, Any] = {
    "llama": shallow_model,
    "mistral": lambda **over: windowed("mistral", **over),
    "gemma2": lambda **over: windowed("gemma2", **over),
    "gemma3_text": lambda **over: windowed("gemma3_text", **over),
    "gpt_oss": lambda **over: windowed("gpt_oss", **over),
    "llama4_text": lambda **over: windowed("llama4_text", **over),
    "mixtral": lambda **over: windowed("mixtral", **over),
    "qwen3_5": lambda **over: recurrent(**over),
}
TURNS, ASKED, ANSWERED = 6, 5, 6
LENGTH = {"max_position_embeddings": 512}


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The tokens of every pass over prompts, once a batch is open."""
    found: list[int] = []
    prefill = HFModel.prefill

    def reading(self: Any, ids: Tensor, counts: Tensor) -> Any:
        found.append(int(counts.sum()))
        return prefill(self, ids, counts)

    monkeypatch.setattr(HFModel, "prefill", reading)
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    """Prefixes of few tokens are kept."""
    monkeypatch.setattr("fastspec.patches.open_turns.LEAST", 2)


def whole(text: Tensor) -> dict[str, Tensor]:
    """No token of a text is padding."""
    return {"attention_mask": torch.ones_like(text)[None]}


def talk(batch: Any, plain: Any, turns: int = TURNS) -> None:
    """A conversation, each answer of which is that of a cold start."""
    text = texts(12)[0]
    for turn in range(turns):
        text = torch.cat((text, texts(ASKED, seed=turn + 1)[0]))
        [answer] = told([batch.submit(text, max_new_tokens=ANSWERED, **GREEDY, **whole(text))])
        assert alone(plain, text, ANSWERED, **whole(text)) == answer
        text = torch.tensor(answer)


@pytest.mark.some("mistral", "gemma2", "gpt_oss", "llama4_text", "qwen3_5")  # which keep of a text what the others do
@pytest.mark.each_value  # what a family keeps is found again below drafting and capturing
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_conversation_is_answered_as_cold_and_read_once(monkeypatch, read, kind, assistant, captured):
    """Each turn reads what was asked, and the last token of the answer before it."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr("fastspec.patches.open_turns.LEAST_CAPTURED", 2)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = FAMILIES[kind](**LENGTH), FAMILIES[kind](**LENGTH)
    fastspec.patch(model, eagle3=tiny_head(model))
    with fastspec.continuous(model, assistant, rows=4, max_length=256) as batch:
        read.clear()
        talk(batch, plain)
        expected = [12 + ASKED] + [ASKED + 1] * (TURNS - 1)
        if kind != "qwen3_5":
            assert [count for count in read if count > 1] == expected


@pytest.mark.parametrize("captured", [False, True])
def test_n_grams_of_a_conversation_are_counted_once(monkeypatch, captured):
    """And not anew with each turn."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr("fastspec.patches.open_turns.LEAST_CAPTURED", 2)
    counted, feed = [0], fastspec.NgramStorage.feed

    def feeding(self: Any, cursor: Any, token: int, fillers: Any = ()) -> Any:
        counted[0] += 1
        return feed(self, cursor, token, fillers)

    monkeypatch.setattr(fastspec.NgramStorage, "feed", feeding)
    plain, model = shallow_model(**LENGTH), fastspec.patch(shallow_model(**LENGTH))
    with fastspec.continuous(model, "nasd", rows=4, max_length=256) as batch:
        counted[0] = 0
        talk(batch, plain)
    assert counted[0] <= 12 + TURNS * (ASKED + ANSWERED + fastspec.Nasd().gamma)


def test_n_grams_of_a_conversation_go_on_where_its_row_is_given_away_meanwhile(monkeypatch):
    """The row that its next turn takes held another text, which takes the place of its own."""
    monkeypatch.setattr(open_batch, "PATIENCE", 1)
    plain, model = made()
    options = {**GREEDY, "max_new_tokens": 10}
    with fastspec.continuous(model, "nasd", rows=2, max_length=128) as batch:
        with batch._changed:
            futures = [batch.submit(each, **options) for each in texts(30, 40)]
        _, said = told(futures)
        told([batch.submit(texts(50, seed=1)[0], **options)])  # of a length that the next prompt's might be
        assert len(batch._batch.prompts) == 1
        more = torch.tensor([*said, 7, 8, 9])
        assert told([batch.submit(more, **options)]) == [alone(plain, more, 10)]
        assert batch.stats.reused == len(said) - 1
        storage = batch._widths.current.engine.drafter.storages[0]
    assert storage.look((said[2], said[1], said[0])) == (3, [(said[3], 1)])


@pytest.fixture
def small_rings(monkeypatch) -> None:
    """Rings of 48 slots, which texts go round in."""
    monkeypatch.setattr(layer_state, "SLACK", 24)
    monkeypatch.setattr(layer_state, "STEP", 4)
    monkeypatch.setattr(target, "NARROW", 16)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_window_is_read_again_where_its_ring_was_written_over(small_rings, kind):
    plain, model = FAMILIES[kind](**LENGTH), FAMILIES[kind](**LENGTH)
    fastspec.patch(model, eagle3=tiny_head(model))
    with fastspec.continuous(model, TREE, rows=2, max_length=256) as batch:
        first = texts(90)[0]
        whole_text = torch.tensor(told([batch.submit(first, max_new_tokens=9, **GREEDY, **whole(first))])[0])
        for begin, cached in ((97, 96), (60, 0)):
            text = torch.cat((whole_text[:begin], texts(3, seed=begin)[0]))
            again = batch.submit(text, max_new_tokens=4, **GREEDY, **whole(text))
            assert told([again]) == [alone(plain, text, 4, **whole(text))] and again.cached_tokens == cached


@pytest.mark.some("gemma3_text", "gpt_oss", "qwen3_5")
@pytest.mark.parametrize(
    "kind, assistant",
    [("llama", TREE), ("gemma3_text", "nasd"), ("gpt_oss", TREE), ("qwen3_5", "autoregressive"), ("mixtral", TREE)],
    ids=str,
)
def test_random_prompts_with_shared_prefixes_are_answered_as_alone(monkeypatch, small_rings, kind, assistant):
    """In few rows of buffers that grow, with cancels, each drawn or greedy."""
    monkeypatch.setattr(sequence_state, "FIRST_SLOTS", 16)
    cold, model = FAMILIES[kind](**LENGTH), FAMILIES[kind](**LENGTH)
    for each in (cold, model):
        fastspec.patch(each, eagle3=tiny_head(each))
    draw, known = random.Random(0), [texts(40, seed=3)[0]]
    with (
        fastspec.continuous(model, assistant, rows=3, max_length=200, prefill_chunk=8) as batch,
        fastspec.continuous(cold, "autoregressive", rows=1, max_length=200, prefix_caching=False) as alone,
    ):
        for step in range(4):
            asked = []
            for which in range(4):
                base = draw.choice(known)
                text = torch.cat(
                    (base[: draw.randint(1, len(base))], texts(draw.randint(1, 20), seed=7 * step + which)[0])
                )
                options = {**GREEDY, "do_sample": draw.random() < 0.5, "seed": draw.randint(0, 99), **whole(text)}
                options["max_new_tokens"] = draw.randint(1, 12)
                future = batch.submit(text[:150], **{**options, **whole(text[:150])})
                asked.append((future, text[:150], {**options, **whole(text[:150])}, draw.random() < 0.2))
            for future, text, options, leaves in asked:
                if leaves and future.cancel():
                    continue
                answer = future.result(SECONDS)[0]
                assert answer.tolist() == told([alone.submit(text, **options)])[0]
                known.append(answer)
        if kind != "qwen3_5":
            assert batch.stats.reused > 20


@pytest.mark.some("Eagle3", "nasd")
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "eagle", "nasd"], ids=str)
def test_drawn_answers_are_those_of_a_cold_start(assistant):
    plain, model = made()
    fastspec.patch(plain)
    with (
        fastspec.continuous(model, assistant, rows=2, max_length=64) as batch,
        fastspec.continuous(plain, "autoregressive", rows=1, max_length=64, prefix_caching=False) as cold,
    ):
        text = texts(9)[0]
        for seed in range(4):
            drawn = {"do_sample": True, "eos_token_id": NEVER, "max_new_tokens": 6, "seed": seed, **whole(text)}
            [answer] = told([batch.submit(text, **drawn)])
            assert told([cold.submit(text, **drawn)]) == [answer]
            text = torch.tensor([*answer, 5, 6, 7])
        assert batch.stats.reused > 3 * 9 and cold.stats.reused == 0


@pytest.mark.slow
@INTERPRETED
def test_an_exact_model_goes_on_by_the_bits_of_a_cold_start(monkeypatch):
    """In Triton's interpreter, whose products are made to add up in order: tokens and their log-probabilities."""
    add_in_order(monkeypatch)
    model, found = tiny_model("llama", num_hidden_layers=1).half(), dict[bool, list[Any]]()
    with fastspec.patched(model, backend="triton", exact=True, eagle3=tiny_head(model).half()):
        for kept in (True, False):
            with fastspec.continuous(model, TREE, rows=1, max_length=64, prefix_caching=kept) as batch:
                text, cached, found[kept] = texts(9)[0], [], []
                for turn in range(3):
                    streamer = TokenStreamer(found[kept].append, 3, False)
                    sent = batch.submit(text, streamer=streamer, max_new_tokens=3, **GREEDY, **whole(text))
                    text = torch.cat((sent.result(SECONDS)[0], texts(3, seed=turn + 1)[0]))
                    cached.append(sent.cached_tokens)
                assert cached == ([0, 11, 17] if kept else [0, 0, 0])
    scored = [[each for round in rounds for each in round.logprobs] for rounds in found.values()]
    assert scored[0] == scored[1]


@pytest.mark.some("mistral", "gemma2", "gpt_oss", "llama4_text", "qwen3_5")
@pytest.mark.each_value
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_of_one_call_go_on_from_what_rows_have_read(monkeypatch, read, kind, assistant, captured):
    """Those of the first rows read what all begin with, the others what is their own; one goes on with an answer."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr("fastspec.generation.engine.prefix_cache.LEAST_CAPTURED", 2)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = FAMILIES[kind](**LENGTH), FAMILIES[kind](**LENGTH)
    fastspec.patch(model, eagle3=tiny_head(model))
    [common] = texts(20)
    asked = [torch.cat((common, own)) for own in texts(3, 7, 4, 6, 5)]
    asked.append(torch.tensor(alone(plain, asked[0], 8, **whole(asked[0]))))
    ids = torch.nn.utils.rnn.pad_sequence(asked, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, asked)), batch_first=True, padding_side="left")
    read.clear()
    batch = fastspec.ContinuousBatch(assistant, rows=2)
    told = model.generate(ids, attention_mask=mask, assistant=batch, max_new_tokens=8, pad_token_id=0, **GREEDY)
    for row, text in enumerate(asked):
        want = alone(plain, text, 8, **whole(text))[len(text) :]
        assert told[row, ids.shape[1] :].tolist()[: len(want)] == want
    reused = fastspec.report(model).last.reused
    assert reused == sum(map(len, asked)) - sum(read)
    assert reused >= 4 * 19 or kind == "qwen3_5"


def test_a_prompt_begins_like_a_row_that_runs(read):
    """As several answers to one prompt do, and prompts with the same instructions."""
    plain, model = made()
    [same], gate = texts(20), Gate()
    tails = [torch.cat((same, tail)) for tail in texts(3, 4, seed=1)]
    with fastspec.continuous(model, TREE, rows=4, max_length=64) as batch:
        read.clear()
        first = batch.submit(same, streamer=gate, max_new_tokens=20, **GREEDY, **whole(same))
        assert gate.seen.acquire(timeout=SECONDS)
        others = [batch.submit(each, max_new_tokens=6, **GREEDY, **whole(each)) for each in (same, *tails)]
        gate.go.release(99)
        assert told([first]) == [alone(plain, same, 20, **whole(same))]
        assert told(others) == [alone(plain, each, 6, **whole(each)) for each in (same, *tails)]
        assert [count for count in read if count > 1] == [20, 4, 5] and [each.cached_tokens for each in others] == 3 * [
            19
        ]
        assert first.cached_tokens == 0 and batch.stats.reused == 3 * 19


def test_conversations_that_take_turns_are_kept_as_long_as_there_are_rows(read):
    """One prompt runs at a time, in one row; what that row held goes to others, the oldest first."""
    plain, model = made()
    begun = [text for seed in range(6) for text in texts(20, seed=seed)]
    with fastspec.continuous(model, TREE, rows=2, max_length=120) as batch:
        for text in begun:
            told([batch.submit(text, max_new_tokens=4, **GREEDY, **whole(text))])
        assert set(batch._widths.made) == {1, 2}
        for text, count in ((begun[0], 0), (begun[5], 19), (begun[4], 19), (begun[1], 0), (begun[5], 19)):
            future = batch.submit(text, max_new_tokens=4, **GREEDY, **whole(text))
            assert told([future]) == [alone(plain, text, 4, **whole(text))] and future.cached_tokens == count


def test_no_prefix_of_another_model_is_gone_on_from(read):
    """Weights changed in place, counted by torch and by `.data`; a hook; an adapter's switch is one of modules."""

    def scaled(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight *= 3

    def by_data(model: Any) -> None:
        model.model.layers[1].self_attn.q_proj.weight.data *= -2

    def hooked(model: Any) -> None:
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 2)

    plain, model = made()
    [text] = texts(20)
    asked = {"max_new_tokens": 6, **GREEDY, **whole(text)}
    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        told([batch.submit(text, **asked)])
        for change in (scaled, by_data, hooked):
            again = batch.submit(text, **asked)
            again.result(SECONDS)
            assert again.cached_tokens == 19
            for each in (plain, model):
                change(each)
            after = batch.submit(text, **asked)
            assert told([after]) == [alone(plain, text, 6, **whole(text))] and after.cached_tokens == 0, change


def test_a_mask_with_holes_and_padding_is_a_text_of_its_own():
    plain, model = made()
    [text] = texts(20)
    mask = torch.ones_like(text)[None]
    mask[0, 8] = 0
    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        told([batch.submit(text, max_new_tokens=6, **GREEDY, **whole(text))])
        holed = batch.submit(text, max_new_tokens=6, attention_mask=mask, **GREEDY)
        assert told([holed]) == [alone(plain, text, 6, attention_mask=mask)] and holed.cached_tokens == 7


def test_cancelled_rows_keep_what_they_committed_and_caching_can_be_left_out(read):
    plain, model = made()
    [text] = texts(20)
    for caching in (True, False):
        gate = Gate()
        with fastspec.continuous(model, TREE, rows=2, max_length=64, prefix_caching=caching) as batch:
            running = batch.submit(text, streamer=gate, max_new_tokens=30, **GREEDY, **whole(text))
            assert gate.seen.acquire(timeout=SECONDS) and running.cancel()
            gate.go.release(99)
            again = batch.submit(text, max_new_tokens=6, **GREEDY, **whole(text))
            assert told([again]) == [alone(plain, text, 6, **whole(text))]
            assert again.cached_tokens == (19 if caching else 0) and batch.stats.reused == again.cached_tokens


def test_a_row_that_was_written_in_part_holds_no_text(monkeypatch):
    plain, model = made()
    [text, other], admit = texts(20, 20), Engine.admit

    def failing(self: Any, row: int, *rest: Any) -> None:
        admit(self, row, *rest)
        raise ArithmeticError("no")

    with fastspec.continuous(model, TREE, rows=1, max_length=64) as batch:
        told([batch.submit(text, max_new_tokens=4, **GREEDY, **whole(text))])
        monkeypatch.setattr(Engine, "admit", failing)
        with pytest.raises(ArithmeticError):
            told([batch.submit(other, max_new_tokens=4, **GREEDY, **whole(other))])
        monkeypatch.setattr(Engine, "admit", admit)
        again = batch.submit(text, max_new_tokens=4, **GREEDY, **whole(text))
        assert told([again]) == [alone(plain, text, 4, **whole(text))] and again.cached_tokens == 0
