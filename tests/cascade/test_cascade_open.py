"""The cascade as open batches: answers of its own `generate`, whatever is decoded beside them, and who leaves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, Told, cascaded, stages, trained
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head
from helpers.open import Gate
from helpers.tokenizers import DRAFT, TARGET
from transformers import GenerationConfig

import fastspec
from fastspec.cascade.decisions import Visit
from fastspec.cascade.predictor import Predictor
from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.session import session_of

GREEDY = {"do_sample": False, "max_new_tokens": 24}
HIGH, SECONDS = 1e9, 120.0


@pytest.fixture(scope="module")
def model() -> Any:
    return cascaded(stages())


def config(model: Any, **over: Any) -> fastspec.Cascade:
    return replace(session_of(model).resources["cascade"].config, **over)


@contextmanager
def opened(model: Any, cascade: Any = "cascade", rows: int = 3, **options: Any) -> Iterator[Any]:
    with fastspec.continuous(model, cascade, rows=rows, **options) as batch:
        yield batch
    assert not batch.alive and not batch.running


class Heard(RoundStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.rounds: list[StreamedRound] = []
        self.visits: list[Visit] = []

    def put_round(self, round: StreamedRound) -> None:
        self.rounds.append(round)

    def put_visit(self, visit: Visit) -> None:
        self.visits.append(visit)

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


def soak(model: Any, count: int, seed: int = 0, **options: Any) -> list[Any]:
    """So many mixed requests at once, each beside the cascade's own `generate` -> their explanations."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        ids = prompts(rng.randint(1, 30), seed=seed + number)["input_ids"]
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": rng.choice([1, 2, 9, 24])}
        if rng.random() < 0.3:
            settings["repetition_penalty"] = 1.2
        if rng.random() < 0.7:
            settings["eos_token_id"] = rng.choice([5, [5, 9]])
        asked.append((ids, settings, rng.choice([0.0, 10.0, 40.0, 100.0, HIGH])))
    with opened(model, **options) as batch:
        heard = [Heard() if rng.random() < 0.5 else None for _ in asked]
        futures = [
            batch.submit(ids, streamer=streamer, price=price, **settings)
            for (ids, settings, price), streamer in zip(asked, heard, strict=True)
        ]
        got = [future.result(SECONDS) for future in futures]
    for (ids, settings, price), out, future, streamer in zip(asked, got, futures, heard, strict=True):
        wanted = model.generate(ids, **settings, assistant=config(model, price=price))
        assert out.tolist() == wanted.tolist()
        (own,) = fastspec.report(model).last.explanations
        told = future.explanation
        assert [(each.stage, each.new_tokens, each.kept_tokens, each.handed_tokens) for each in told.visits] == [
            (each.stage, each.new_tokens, each.kept_tokens, each.handed_tokens) for each in own.visits
        ]
        for mine, theirs in zip(told.visits, own.visits, strict=True):
            assert (mine.outcome, mine.cost, mine.cut) == (theirs.outcome, theirs.cost, theirs.cut)
            assert mine.quality == pytest.approx(theirs.quality, abs=1e-4)
        if streamer is not None:
            assert streamer.tokens == out[0, ids.shape[1] :].tolist() and streamer.visits == list(told.visits)
    return [future.explanation for future in futures]


def agreeing(model_type: str = "llama", assistant: Any = "nasd", **over: Any) -> Any:
    """A model with a head, and two stages with its weights and a noisy LM head: answers begin alike."""
    found = [shallow_model(model_type, **over) for _ in range(3)]
    for noise, stage in zip((0.06, 0.02), found, strict=False):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            stage.lm_head.weight.add_(noise * torch.randn(stage.lm_head.weight.shape, generator=generator))
    below = [fastspec.Stage(each, name=name) for each, name in zip(found[:-1], NAMED, strict=False)]
    cascade = fastspec.Cascade(
        stages=below, label="large", assistant=assistant, predictor=trained(), costs=[1.0, 2.0, 4.0]
    )
    return fastspec.patch(found[-1], eagle3=tiny_head(found[-1]), cascade=cascade)


def test_answers_are_those_of_the_cascades_own_generate(model: Any) -> None:
    assert {each.stage for each in soak(model, 24)} == {0, 1, 2}


@pytest.mark.some("llama-assistant0-options0", "qwen3_5_text")
@pytest.mark.parametrize(
    ("kind", "assistant", "options"),
    [
        ("llama", TREE, {}),
        ("llama", "autoregressive", {"rows": 2, "prefill_chunk": 4}),
        ("mistral", "nasd", {"sliding_window": 8}),
        ("qwen3_5_text", "nasd", {}),
    ],
)
def test_what_a_stage_keeps_of_an_answer_is_what_generate_keeps(
    kind: str, assistant: Any, options: dict[str, Any]
) -> None:
    over = {name: options.pop(name) for name in ("sliding_window",) if name in options}
    large = agreeing(kind, assistant, **over)
    visits = [visit for each in soak(large, 10, **options) for visit in each.visits if visit.handed_tokens]
    assert any(0 < visit.kept_tokens < visit.handed_tokens for visit in visits)
    assert any(visit.kept_tokens == visit.handed_tokens for visit in visits)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_a_hundred_mixed_requests_are_answered_as_by_generate(model: Any, rows: int) -> None:
    soak(model, 100, seed=100, rows=rows, prefill_chunk=8)
    soak(agreeing(assistant=TREE), 100, seed=100, rows=rows, prefill_chunk=8)


def foreign(**options: Any) -> tuple[Any, torch.Tensor]:
    """A large model whose stage has other tokens, and a prompt."""
    small = shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(DRAFT))
    large = shallow_model(vocab_size=len(TARGET))
    stage = fastspec.Stage(small, tokenizer=DRAFT, name="medium")
    settings = {"tokenizer": TARGET, "label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0]}
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[stage], **{**settings, **options}))
    return large, torch.tensor([TARGET("abcdxyz12bc", add_special_tokens=False)["input_ids"]])


@pytest.mark.parametrize("price", [0.0, HIGH])
def test_texts_go_from_stage_to_stage_where_tokens_differ(price: float) -> None:
    large, ids = foreign()
    heard = Heard()
    with opened(large) as batch:
        future = batch.submit(ids, streamer=heard, price=price, **GREEDY)
        out = future.result(SECONDS)
        with pytest.raises(Unsupported, match="sequence_bias speaks of the large model's tokens"):
            batch.submit(ids, sequence_bias={(3,): 1.0}, **GREEDY)
    assert out.tolist() == large.generate(ids, **GREEDY, assistant=config(large, price=price)).tolist()
    (own,) = fastspec.report(large).last.explanations
    assert [visit.cut for visit in future.explanation.visits] == [visit.cut for visit in own.visits]
    first = own.visits[0]  # its limit counts its own tokens, of which the large model has another number
    assert first.cut and (price > 0 or out.shape[1] - ids.shape[1] != first.new_tokens)
    assert future.explanation.stage == (1 if price else 0) and heard.tokens == out[0, ids.shape[1] :].tolist()


def test_a_sampled_answer_is_the_same_whatever_is_decoded_beside_it(model: Any) -> None:
    ids, other = prompts(6)["input_ids"], prompts(9, seed=3)["input_ids"]
    settings = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 12, "seed": 7, "eos_token_id": 5}
    with opened(model, config(model, price=HIGH)) as batch:
        alone = batch.submit(ids, **settings).result(SECONDS)
        futures = [batch.submit(other, **GREEDY), batch.submit(ids, **settings), batch.submit(other, **settings)]
        beside, unlike = futures[1].result(SECONDS), batch.submit(ids, **{**settings, "seed": 8}).result(SECONDS)
    assert alone.tolist() == beside.tolist() != unlike.tolist()


def test_a_stages_draws_are_its_own() -> None:
    """Twins with one seed: the second does not repeat the first, whose answer was not good enough."""
    twins = cascaded([shallow_model(), shallow_model()], price=HIGH)
    with opened(twins) as batch:
        future = batch.submit(prompts(7)["input_ids"], do_sample=True, max_new_tokens=24, seed=3)
        future.result(SECONDS)
    assert future.explanation.visits[1].kept_tokens < 24


def decided(stop: list[int]) -> Any:
    """What replaces `Predictor.score`, in a cascade of thresholds: the answers of these stages stop."""
    return lambda predictor, stage, features, risk=None: Told([(float(stage in stop), *[0.5] * (2 - stage))])(
        predictor, stage, features, risk
    )


@pytest.mark.parametrize(("stop", "at_once"), [([0], True), ([1], True), ([], False)])
def test_an_answer_streams_once_its_stage_has_been_decided_on(
    model: Any, monkeypatch: pytest.MonkeyPatch, stop: list[int], at_once: bool
) -> None:
    """A smaller stage's answer comes whole, the last one's in its rounds; a streamer of transformers hears the same."""
    monkeypatch.setattr(Predictor, "score", decided(stop))
    ids, heard, put = prompts(5)["input_ids"], Heard(), []

    class Plain:
        def put(self, value: torch.Tensor) -> None:
            put.extend(value.flatten().tolist())

        def end(self) -> None:
            put.append("end")

    with opened(model, config(model, thresholds=[0.5, 0.5])) as batch:
        with pytest.raises(Unsupported, match=r"price=3: this cascade decides by its thresholds"):
            batch.submit(ids, price=3, **GREEDY)
        out = batch.submit(ids, streamer=heard, **GREEDY).result(SECONDS)
        batch.submit(ids, streamer=Plain(), **GREEDY).result(SECONDS)
    assert (len(heard.rounds) == 1) == at_once and heard.tokens == out[0, 5:].tolist()
    assert put == [*out[0].tolist(), "end"]
    wanted = [*range(stop[0] + 1)] if stop else [0, 1, 2]
    assert [visit.stage for visit in heard.visits] == wanted


@pytest.mark.some("stop2")
@pytest.mark.parametrize("stop", [[0], [1], []])
def test_rounds_come_with_their_trees_whichever_stage_has_answered(
    monkeypatch: pytest.MonkeyPatch, stop: list[int]
) -> None:
    """Tokens that are taken over are accepted drafts of the stage that has them verified."""
    monkeypatch.setattr(Predictor, "score", decided(stop))
    large = agreeing()
    asked = [(prompts(9, seed=seed)["input_ids"], Heard()) for seed in range(6)]
    with opened(large, config(large, thresholds=[0.5, 0.5])) as batch:
        for _, heard in asked:
            heard.trees = True
        futures = [batch.submit(ids, streamer=heard, **GREEDY) for ids, heard in asked]
        answers = [future.result(SECONDS)[0, 9:].tolist() for future in futures]
    taken_over = [future.explanation.visits[-1].kept_tokens for future in futures]
    assert any(taken_over) == (stop != [0])
    for answer, kept, (_, heard) in zip(answers, taken_over, asked, strict=True):
        assert heard.tokens == answer and len(heard.rounds) > 1
        assert len(heard.visits) == (stop[0] + 1 if stop else 3)
        last = answer[0]
        for each in heard.rounds[1:]:
            assert each.tree is not None or each.accepted == each.drafted == 0
            if each.tree is not None:
                path = [each.tree.tokens[node] for node in each.tree.path]
                assert path[: each.accepted + 1] == [last, *each.tokens[: each.accepted]]
            last = each.tokens[-1]
        assert sum(each.accepted for each in heard.rounds) >= kept // 2  # a pass of verifying ends with a bonus token


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("prompt", [None, lambda text: f"{text}{text}"])
def test_tokens_that_were_read_before_are_told_of_the_large_models_prompt(trees: bool, prompt: Any) -> None:
    """Not of a prompt that a stage rewrites, which may have more."""
    small, large = (shallow_model(vocab_size=len(TARGET)) for _ in range(2))
    settings = {"tokenizer": TARGET, "label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0]}
    stage = fastspec.Stage(small, name="medium", prompt=prompt)
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[stage], **settings))
    ids, heard = torch.tensor([TARGET("abcdxyz12bc" * 4, add_special_tokens=False)["input_ids"]]), (Heard(), Heard())
    with opened(large, rows=1) as batch:
        for streamer in heard:
            streamer.trees = trees
            batch.submit(ids, streamer=streamer, price=0.0, **GREEDY).result(SECONDS)
    assert heard[0].rounds[-1].cached == 0
    assert (16 <= heard[1].rounds[-1].cached < ids.shape[1]) if prompt is None else heard[1].rounds[-1].cached == 0


def test_the_rounds_of_other_tokens_are_told_as_one() -> None:
    large, ids = foreign()
    heard = Heard()
    heard.trees = True
    with opened(large) as batch:
        out = batch.submit(ids, streamer=heard, price=0.0, **GREEDY).result(SECONDS)
    [told] = heard.rounds
    assert told.tokens == out[0, ids.shape[1] :].tolist() and told.tree is None


@pytest.mark.some("2")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_is_cancelled_leaves_the_rows_of_the_stage_that_it_is_at(
    model: Any, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(Predictor, "score", decided([]))
    with opened(model, config(model, thresholds=[0.5, 0.5])) as batch:
        ids, at = prompts(5)["input_ids"], batch.batches[stage]
        with at.session.turn.taken(torch.device("cpu")):  # no round of this stage ends meanwhile
            future = batch.submit(ids, streamer=Heard(), **GREEDY)
            end = time.monotonic() + SECONDS
            while at.running + at.waiting == 0:
                assert time.monotonic() < end
                time.sleep(0.001)
            assert batch.waiting + batch.running == 1
            future.cancel()
        assert batch.waiting == 0
        while batch.running or at.waiting:
            assert time.monotonic() < end
            time.sleep(0.001)
        after = batch.submit(ids, **GREEDY).result(SECONDS)
    assert after.tolist() == model.generate(ids, **GREEDY).tolist() and future.cancelled()


def test_what_a_streamer_raises_ends_one_answer_alone(model: Any) -> None:
    ids, gate = prompts(5)["input_ids"], Gate(ValueError("no more"))
    gate.go.release()
    with opened(model) as batch:
        failed = batch.submit(ids, streamer=gate, price=HIGH, **GREEDY)
        other = batch.submit(ids, price=0.0, **GREEDY)
        with pytest.raises(ValueError, match="no more"):
            failed.result(SECONDS)
        assert other.result(SECONDS).shape == (1, 29) and batch.waiting == 0


@pytest.mark.parametrize("longest", [None, 100])
def test_a_stage_without_room_is_left_out_as_by_generate(longest: int | None) -> None:
    """Its positions bound its rows, whatever those of the large model have room for."""
    large = cascaded([shallow_model(num_hidden_layers=1, max_position_embeddings=24), shallow_model()], price=0.0)
    with opened(large, max_length=longest) as batch:
        asked = [prompts(count)["input_ids"] for count in (5, 20, 21, 23, 24, 30)]
        futures = [batch.submit(ids, max_new_tokens=4) for ids in asked]
        answers = [each.result(SECONDS) for each in futures]
        assert batch.max_length == batch.batches[1].max_length > 24
    for ids, future, answer in zip(asked, futures, answers, strict=True):
        assert answer.tolist() == large.generate(ids, max_new_tokens=4, assistant="cascade").tolist()
        (own,) = fastspec.report(large).last.explanations
        for visits in (future.explanation.visits, own.visits):
            assert [visit.stage for visit in visits] == ([0] if ids.shape[1] <= 20 else [0, 1])
            assert (visits[0].outcome == "left_out") == (ids.shape[1] > 20)
            assert ids.shape[1] <= 20 or f"the prompt has {ids.shape[1]} tokens and 4 of an answer" in visits[0].why


def test_a_closed_batch_takes_nothing_and_lets_go_of_what_runs(model: Any) -> None:
    ids = prompts(5)["input_ids"]
    batch = fastspec.continuous(model, "cascade", rows=1)
    futures = [batch.submit(ids, price=HIGH, **GREEDY) for _ in range(5)]
    batch.close()
    assert len({tuple(each.result(0)[0].tolist()) for each in futures}) == 1
    with pytest.raises(FastSpecError, match="this batch is closed"):
        batch.submit(ids, **GREEDY)
    batch = fastspec.continuous(model, "cascade", rows=1)
    with batch.batches[2].session.turn.taken(torch.device("cpu")):
        left = batch.submit(ids, price=HIGH, **GREEDY)
        threading.Thread(target=batch.close, kwargs={"cancel": True}).start()
        end = time.monotonic() + SECONDS
        while not left.cancelled():
            assert time.monotonic() < end
            time.sleep(0.001)
    batch.close(cancel=True)
    assert not batch.alive and batch.stats.rows == 3


def test_what_a_cascade_does_not_decode_is_refused_before_a_stage_is_asked(model: Any) -> None:
    ids = prompts(5)["input_ids"]
    streamer = Heard()
    streamer.logprobs = 2
    cases: list[tuple[dict[str, Any], str]] = [
        ({"streamer": streamer}, "log-probabilities: the answer of a cascade"),
        ({"output_scores": True}, "output_scores"),
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "one row, and this call has 2"),
        ({"max_new_tokens": 9000}, "a row of this batch has room for"),
        ({"price": -1.0}, "price=-1.0 must be finite and not negative"),
        ({"generation_config": GenerationConfig(do_sample=True, top_h=0.5)}, "top_h"),
    ]
    with opened(model) as batch:
        for options, why in cases:
            given = options if "generation_config" in options else {**GREEDY, **options}
            with pytest.raises((Unsupported, ValueError), match=why):
                batch.submit(ids, **given)
        assert batch.waiting == batch.running == 0 and batch.turns == 0
    with pytest.raises(Unsupported, match="prefix_caching"):
        fastspec.continuous(cascaded(stages(2), memory=1 << 30), "cascade")


def test_a_warm_up_is_forgotten_and_counts_are_of_all_stages(model: Any) -> None:
    with opened(model, rows=2) as batch:
        batch.warmup(8)
        assert batch.stats.rounds == 0 and batch.stats.rows == 6
        batch.submit(prompts(5)["input_ids"], price=HIGH, **GREEDY).result(SECONDS)
        assert batch.stats.rounds >= 3 and batch.info["stages"] == "small,medium,large"
        assert batch.info["assistant"] == "cascade" and batch.info["rows"] == "2"
