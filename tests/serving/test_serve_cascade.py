"""A cascade that is served: answers of its own `generate` by every route, streams, prices, metrics and logs by stage,
and who goes away."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cascade import trained
from helpers.serve import MARKS, NAME, SECONDS, Asked, Served, ask_all, ids_of, post, serving, talk, words
from helpers.serve_process import cascaded_target, opened_cascade
from helpers.training import small_target, small_tokenizer
from transformers import GenerationConfig

import fastspec
from fastspec.cascade.predictor import Predictor
from fastspec.generation.stats import Stats
from fastspec.patches.call.processors import StreamedRound
from fastspec.patches.cascade.open_batch import StageRounds
from fastspec.patches.session import session_of
from fastspec.programs.serving.answers import RoundNames, TokenNames
from fastspec.programs.serving.batch import BatchPrompt, Here, TokenStreamer
from fastspec.programs.serving.metrics import Metrics
from fastspec.programs.serving.remote import Remote

pytestmark = MARKS
STAGES = "small", "large"
HIGH = 1e9
LOADS = "rows_running", "queue"


@pytest.fixture(scope="module")
def model() -> Any:
    return cascaded_target()


@contextmanager
def served(model: Any, cascade: Any = "cascade", **options: Any) -> Iterator[Served]:
    with (
        fastspec.continuous(model, cascade, rows=4, max_length=400, prefill_chunk=16) as batch,
        serving(batch, small_tokenizer(), **options) as running,
    ):
        yield running
    assert not batch.alive


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Served]:
    with served(model) as running:
        yield running


@pytest.fixture(scope="module")
def process() -> Iterator[Served]:
    """The same in a process of its own."""
    with Remote(opened_cascade) as batch, serving(batch, batch.tokenizer) as running:
        yield running
    assert batch.process.exitcode == 0


def wanted(model: Any, prompt: Any, count: int, price: float) -> tuple[str, int, Any]:
    """What the cascade's own `generate` answers: the text, its tokens, and the explanation."""
    ids = ids_of(prompt)
    cascade = replace(session_of(model).resources["cascade"].config, price=price)
    out = model.generate(ids, max_new_tokens=count, do_sample=False, assistant=cascade)
    new = out[0, ids.shape[1] :]
    return (
        small_tokenizer().decode(new, skip_special_tokens=True),
        len(new),
        fastspec.report(model).last.explanations[0],
    )


def soak(model: Any, server: Served, count: int, seed: int = 0) -> dict[str, int]:
    """So many mixed requests, sixteen in flight, each answered as by the cascade alone -> how many each stage
    answered."""
    rng = random.Random(seed)
    asked = [Asked(words(rng), rng.choice([1, 5, 24]), price=rng.choice([0.0, 3.0, 30.0, HIGH])) for _ in range(count)]
    asked = [replace(each, chat=rng.random() < 0.5, stream=rng.random() < 0.5) for each in asked]
    answered = dict.fromkeys(STAGES, 0)
    for got, each in zip(ask_all(server, asked), asked, strict=True):
        own, _, explanation = wanted(model, each.prompt, each.count, each.price)
        assert got == own
        answered[explanation.visits[-1].name] += 1
    return answered


def stage_metric(server: Served, name: str, **labels: str) -> float:
    told = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return server.metric(f"fastspec_stage_{name}{{{told}}}")


def counted(server: Served) -> dict[str, float]:
    return {name: stage_metric(server, "requests_total", stage=name, outcome="answered") for name in STAGES}


def test_chances_are_counted_by_tenths() -> None:
    metrics = Metrics(SimpleNamespace(stats=Stats(), running=0, waiting=0, loads={}), {})  # type: ignore[arg-type]
    metrics.stage_quality.labels("small").observe(0.85)
    name, chances = "fastspec_stage_expected_quality_bucket", [step / 10 for step in range(1, 11)]
    counts = [metrics.registry.get_sample_value(name, {"stage": "small", "le": str(chance)}) for chance in chances]
    assert counts == [float(chance > 0.85) for chance in chances]


@pytest.mark.parametrize(("where", "count"), [("server", 20), ("process", 24)])
def test_many_requests_give_what_the_cascades_own_generate_gives(
    model: Any, where: str, count: int, request: pytest.FixtureRequest
) -> None:
    """And the metrics by stage are what was answered and sent on."""
    server = request.getfixturevalue(where)
    before = counted(server)
    sent_on = stage_metric(server, "requests_total", stage="small", outcome="sent_on")
    answered = soak(model, server, count)
    assert all(answered.values())
    server.wait(lambda: sum(counted(server).values()) == sum(before.values()) + count)
    assert {name: value - before[name] for name, value in counted(server).items()} == answered
    assert stage_metric(server, "requests_total", stage="small", outcome="sent_on") - sent_on == answered["large"]
    page = server.get("/metrics")
    assert 'assistant="cascade"' in page and 'stages="small,large"' in page
    assert stage_metric(server, "expected_quality_count", stage="small") >= count
    assert 0 < stage_metric(server, "expected_quality_sum", stage="small") < count + before["small"] + sent_on
    assert stage_metric(server, "expected_quality_count", stage="large") == 0
    assert stage_metric(server, "cost_milliseconds_total", stage="large") > 0
    assert stage_metric(server, "seconds_count", stage="small") >= count
    assert stage_metric(server, "tokens_total", stage="large", kind="kept") > 0
    server.wait(lambda: server.metric("fastspec_rows_running") == server.metric("fastspec_queue") == 0)
    gauges = [f'fastspec_stage_{name}{{stage="{stage}"}} 0.0' for name in LOADS for stage in STAGES]
    server.wait(lambda: set(gauges) <= set(server.get("/metrics").splitlines()))


def test_a_price_is_a_requests_own_and_stages_are_in_the_log(
    model: Any, server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    client, text = server.client(), "w5 w6 w7"
    with caplog.at_level(logging.INFO, "fastspec.serve"):
        for price, name in ((0, "small"), (HIGH, "large")):
            given = {"max_tokens": 9, "temperature": 0, "extra_body": {"price": price}}
            answer = client.completions.create(model=NAME, prompt=text, **given)
            own, tokens, explanation = wanted(model, text, 9, price)
            assert (answer.choices[0].text, answer.usage.completion_tokens) == (own, tokens)
            assert explanation.visits[-1].name == name
            server.wait(lambda answer=answer: answer.id.split("-", 1)[1] in caplog.text)
    first, second = caplog.messages[-2:]
    assert re.search(r"; large: .* \(now [01] in its rows, 0 waiting\)$", second)
    assert "; small: answered, P(acceptable) 0." in first and "large" not in first
    assert "; small: sent on, P(acceptable) 0." in second and "; large: answered, cost " in second
    body = {"model": NAME, "max_tokens": 9, "messages": talk(text), "price": 0}
    assert post(server, "/v1/messages", json.dumps(body).encode())[0] == 200
    response = {"model": NAME, "max_output_tokens": 9, "input": text, "price": 0}
    assert post(server, "/v1/responses", json.dumps(response).encode())[0] == 200
    two = client.completions.create(model=NAME, prompt=[text, "w8"], n=2, max_tokens=5, temperature=0)
    assert [choice.text for choice in two.choices] == 2 * [wanted(model, text, 5, 1000.0)[0]] + 2 * [
        wanted(model, "w8", 5, 1000.0)[0]
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"price": -1}, "price='-1' is not accepted: it must be a number of milliseconds from 0 on"),
        ({"price": "dear"}, "price='dear' is not accepted"),
        ({"logprobs": 1}, "logprobs is not accepted: the answer of a cascade"),
        ({"structured_outputs": {"json_object": True}}, "response_format (text.format, structured_outputs) is not"),
        ({"assistant": "nasd"}, "assistant='nasd' is not accepted: all requests here are answered with 'cascade'"),
        ({"max_tokens": 399, "prompt": "w5 " * 20}, "a row of this batch has room for 400"),
    ],
)
def test_what_a_cascade_cannot_do_is_refused_by_name(server: Served, more: dict[str, Any], words: str) -> None:
    status, told = post(server, "/v1/completions", json.dumps({"model": NAME, "prompt": "w5", **more}).encode())
    assert status == 400 and words in told["error"]["message"], told


@pytest.mark.parametrize("stream", [False, True])
def test_rounds_and_stages_are_told_whichever_stage_answers(model: Any, process: Served, stream: bool) -> None:
    """What the page at `/` asks for."""
    for price, names in ((0, ["small"]), (HIGH, ["small", "large"])):
        body = {"messages": talk("w5 w6 w7"), "fastspec": {"rounds": True}, "max_tokens": 40, "temperature": 0}
        content = json.dumps({"model": NAME, "price": price, "stream": stream, **body}).encode()
        asked = urllib.request.Request(
            f"{process.url}/v1/chat/completions", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            lines = answer.read().decode().removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = [chunk["choices"][0]["fastspec"] for chunk in chunks]
        rounds = [each for part in told for each in part["rounds"]]
        own, count, explanation = wanted(model, talk("w5 w6 w7"), 40, price)
        assert "".join(text for each in rounds for text in each["texts"]) == own
        assert sum(len(each["tokens"]) for each in rounds) == count
        drafts = chunks[-1]["usage"]["completion_tokens_details"]
        marks = [mark for each in rounds for mark in each["marks"]]
        assert marks.count("accepted") == drafts["accepted_prediction_tokens"]
        assert sum(each["drafted"] for each in rounds) == sum(drafts.values())
        assert all(each["tree"] is not None or each["drafted"] == 0 for each in rounds), rounds
        stages = [each for part in told for each in part.get("stages", [])]
        assert [each["name"] for each in stages] == names
        assert [each["outcome"] for each in stages] == [*["sent_on"] * (len(names) - 1), "answered"]
        for each, visit in zip(stages, explanation.visits, strict=True):
            assert each["cost"] == visit.cost
            assert each["acceptable"] == (pytest.approx(visit.quality[0], abs=1e-4) if visit.quality else None)


def test_a_round_of_other_tokens_tells_of_no_drafts() -> None:
    tokenizer = small_tokenizer()
    told = RoundNames(tokenizer, TokenNames(tokenizer)).named(StreamedRound([5, 6], accepted=1, drafted=9)).told
    assert (told["marks"], told["drafted"], told["tree"]) == (["own", "own"], 0, None)


def test_a_price_needs_a_cascade_and_no_thresholds(model: Any) -> None:
    plain = fastspec.patch(small_target())
    body = json.dumps({"model": NAME, "prompt": "w5", "price": 1}).encode()
    with fastspec.continuous(plain, "nasd", rows=1) as batch, serving(batch, small_tokenizer()) as running:
        status, told = post(running, "/v1/completions", body)
        assert status == 400 and "this server has no cascade" in told["error"]["message"]
        assert "fastspec_stage_requests_total{" not in running.get("/metrics")
    cascade = replace(session_of(model).resources["cascade"].config, thresholds=[0.5])
    with served(model, cascade) as running:
        status, told = post(running, "/v1/completions", body)
        assert status == 400 and "decides by its thresholds" in told["error"]["message"]


@pytest.mark.some("lossless")
@pytest.mark.parametrize("mode", ["lossless", "token"])
def test_modes_that_go_token_by_token_are_served(model: Any, mode: str) -> None:
    """As one batch, without stages of its own: log-probabilities and drafts are there, and a price is not."""
    cascade = replace(session_of(model).resources["cascade"].config, mode=mode, rule="diff", alpha=0.02)
    tokenizer, given = small_tokenizer(), {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    with served(model, cascade) as running:
        for text in ("w5 w6 w7", "w9", "w20 w21 w22 w23"):
            answer = running.client().completions.create(model=NAME, prompt=text, **given)
            ids = tokenizer(text, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=12, do_sample=False, assistant=cascade)
            assert answer.choices[0].text == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens
        endless = {"generation_config": json.dumps({"eos_token_id": 127, "max_new_tokens": 200})}
        chunks = running.client().completions.create(
            model=NAME, prompt="w5 w6 w7", max_tokens=200, temperature=0, stream=True, extra_body=endless
        )
        assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].text]) > 1
        assert running.metric("fastspec_accepted_tokens_total") > 0 and "fastspec_stage_queue{" not in running.get(
            "/metrics"
        )
        for more, words in (
            ({"price": 1}, "no cascade that decides by it"),
            ({"assistant": "nasd"}, "all rows here have 'cascade', or 'none'"),
            *([({"frequency_penalty": 1}, "takes no processors")] if mode == "token" else []),
        ):
            body = {"model": NAME, "prompt": "w5", "max_tokens": 2, **more}
            status, told = post(running, "/v1/completions", json.dumps(body).encode())
            assert status == 400 and words in told["error"]["message"], told


def test_penalties_are_refused_where_a_stage_counts_other_tokens() -> None:
    body = {"model": NAME, "prompt": "w5 w6", "max_tokens": 24, "temperature": 0, "frequency_penalty": 2}
    stage = fastspec.Stage(small_target(), name="small", prompt=lambda text: f"w4 {text}")
    rewriting = fastspec.patch(
        small_target(),
        cascade=fastspec.Cascade(
            stages=[stage], tokenizer=small_tokenizer(), label="large", predictor=trained(STAGES), costs=[1, 2]
        ),
    )
    with served(rewriting) as running:
        status, told = post(running, "/v1/completions", json.dumps(body).encode())
        assert status == 400 and "frequency_penalty is not accepted: it counts" in told["error"]["message"]


def test_a_smaller_stages_answer_streams_at_once_and_the_last_ones_in_rounds(server: Served) -> None:
    client = server.client()
    for price, whole in ((0, True), (HIGH, False)):
        chunks = client.completions.create(
            model=NAME,
            prompt="w5 w6 w7",
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"price": price, "generation_config": json.dumps({"eos_token_id": 127, "max_new_tokens": 200})},
        )
        texts = [chunk.choices[0].text for chunk in chunks if chunk.choices and chunk.choices[0].text]
        assert (len(texts) == 1) == whole and len("".join(texts).split()) > 100


@pytest.mark.parametrize("stage", [0, 1])
def test_a_client_that_goes_away_frees_the_rows_of_any_stage(
    model: Any, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    cascade = replace(session_of(model).resources["cascade"].config, price=HIGH)
    with served(model, cascade) as running:
        at = running.batch.batches[stage]
        with at.session.turn.taken(torch.device("cpu")):  # no round of this stage ends meanwhile
            body = {"model": NAME, "prompt": "w5 w6", "max_tokens": 300, "stream": True, "temperature": 0}
            asked = urllib.request.Request(
                f"{running.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = urllib.request.urlopen(asked)
            running.wait(lambda: at.running + at.waiting == 1)
            answer.close()
            running.wait(lambda: running.batch.waiting == 0)
        running.wait(lambda: running.batch.running == 0 and at.waiting == 0)
        assert running.metric('fastspec_requests_total{outcome="cancelled"}') == 1
        done = {"model": NAME, "prompt": "w5", "max_tokens": 2}
        assert post(running, "/v1/completions", json.dumps(done).encode())[0] == 200


@pytest.mark.parametrize(("stage", "streamer"), [("small", StageRounds), ("large", TokenStreamer)])
def test_rows_in_use_and_requests_that_wait_are_counted_by_stage(
    model: Any, monkeypatch: pytest.MonkeyPatch, stage: str, streamer: type
) -> None:
    reached, goes_on, put = threading.Event(), threading.Event(), streamer.put_round

    def held(self: Any, round: Any) -> None:
        reached.set()
        assert goes_on.wait(60)
        put(self, round)

    monkeypatch.setattr(streamer, "put_round", held)
    cascade = replace(session_of(model).resources["cascade"].config, price=HIGH)
    with served(model, cascade) as running:
        ids = small_tokenizer()("w5 w6", return_tensors="pt").input_ids
        prompt, took = BatchPrompt(ids[0].tolist(), GenerationConfig(max_new_tokens=3)), lambda round: None
        sent = [Here(running.batch, small_tokenizer()).send(prompt, took) for _ in range(6)]
        try:
            assert reached.wait(60)  # in the first token of the first prompt that joined
            running.wait(lambda: stage_metric(running, "queue", stage=stage) == 5)
            assert stage_metric(running, "rows_running", stage=stage) == 1
            assert [
                stage_metric(running, name, stage=other) for name in LOADS for other in STAGES if other != stage
            ] == [0, 0]
        finally:
            goes_on.set()
        for each in sent:
            each.answer.result(60)
        running.wait(lambda: not any(stage_metric(running, name, stage=each) for name in LOADS for each in STAGES))


def test_an_answer_that_a_stage_fails_to_give_is_an_error_of_its_own(
    model: Any, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no scores")

    given = {"model": NAME, "prompt": "w5", "max_tokens": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "score", fail)
        status, told = post(server, "/v1/completions", json.dumps(given).encode())
    assert status == 500 and "no scores" in told["error"]["message"]
    assert post(server, "/v1/completions", json.dumps(given).encode())[0] == 200


def test_a_model_whose_process_opens_a_cascade_says_so(process: Served) -> None:
    assert json.loads(process.get("/health")) == {"status": "ok"}
    (model,) = json.loads(process.get("/v1/models"))["data"]
    assert model["id"] == NAME and model["max_model_len"] == 400
