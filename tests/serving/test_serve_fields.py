"""Fields of OpenAI's interface that evaluations and agents send: several prompts and answers, log-probabilities, echo,
samplers, stop strings, and how many drafts were accepted."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_head
from helpers.serve import MARKS, NAME, SECONDS, TREE, Served, alone, post, raw, served, talk, words
from helpers.serve_process import opened
from helpers.training import small_target, small_tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

import fastspec
from fastspec.programs.serving.batch import TextScorer
from fastspec.programs.serving.remote import Remote

pytestmark = MARKS
PROMPTS = ("w5 w6 w7", "w9", "w20 w21 w22 w23")
GREEDY = {"model": NAME, "temperature": 0}


@pytest.fixture(scope="module")
def plain() -> Any:
    return small_target(peak=0.15)


@pytest.fixture(scope="module", params=["this process", "another"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "another":
        from helpers.serve import serving

        with Remote(opened) as batch, serving(batch, batch.tokenizer) as running:
            yield running
        return
    model = small_target(peak=0.15)
    with served(fastspec.patch(model, eagle3=tiny_head(model)), assistant=TREE) as running:
        yield running


def logs(plain: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] behind each token."""
    with torch.no_grad():
        return plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def tokens_of(text: str) -> list[int]:
    found: list[int] = small_tokenizer()(text)["input_ids"]
    return found


@pytest.mark.some("another")
def test_prompts_come_as_texts_and_tokens_and_lists_of_them(plain: Any, server: Served) -> None:
    create = server.client().completions.create
    wanted = [alone(plain, prompt, 6)[0] for prompt in PROMPTS]
    ids = [tokens_of(prompt) for prompt in PROMPTS]
    for given, texts in (
        (list(PROMPTS), wanted),
        (ids, wanted),
        ([PROMPTS[0], ids[1]], wanted[:2]),
        (ids[2], wanted[2:]),
    ):
        answer = create(prompt=given, max_tokens=6, **GREEDY)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
        streamed = [""] * len(texts)
        for chunk in create(prompt=given, max_tokens=6, stream=True, **GREEDY):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == texts
        assert chunk.usage == answer.usage and answer.usage.prompt_tokens == sum(
            len(tokens_of(prompt))
            for prompt in (PROMPTS if len(texts) == 3 else PROMPTS[:2] if len(texts) == 2 else PROMPTS[2:])
        )


@pytest.mark.some("another")
def test_n_answers_are_those_of_the_seeds_from_the_given_one_on(server: Served) -> None:
    client = server.client()
    given = {"model": NAME, "max_tokens": 8, "temperature": 1.5}

    def completed(**more: Any) -> list[str]:
        return [choice.text for choice in client.completions.create(**given, **more).choices]

    one = [completed(prompt="w5 w6", seed=seed)[0] for seed in (7, 8, 9)]
    assert completed(prompt="w5 w6", seed=7, n=3) == one and len(set(one)) == 3
    other = completed(prompt="w9", seed=7)[0]
    assert completed(prompt=["w9", "w5 w6"], seed=7, n=2)[0::2] == [other, one[0]]
    assert len(set(completed(prompt="w5 w6", n=3))) == 3  # without a seed each has one of its own
    chats = client.chat.completions.create(messages=talk("w5"), seed=7, n=3, **given)
    said = [choice.message.content for choice in chats.choices]
    parts = [""] * 3
    chunks = list(client.chat.completions.create(messages=talk("w5"), seed=7, n=3, stream=True, **given))
    for chunk in chunks:
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == said and len(set(said)) == 3
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == chats.usage and chats.usage.prompt_tokens == 4
    ended = {choice.index: choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason}
    assert ended == {choice.index: choice.finish_reason for choice in chats.choices}


@pytest.mark.each_value  # a batch of another process sends what one of this tells
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions_and_what_is_echoed(plain: Any, server: Served, stream: bool) -> None:
    create = server.client().completions.create
    for prompt, count, top in ((PROMPTS[0], 8, 3), (tokens_of(PROMPTS[2]), 1, 1), (PROMPTS[1], 0, 0)):
        answer = create(prompt=prompt, max_tokens=count, logprobs=top, echo=True, stream=stream, **GREEDY)
        parts = list(answer) if stream else [answer]
        text = "".join(part.choices[0].text for part in parts)
        given = prompt if isinstance(prompt, str) else small_tokenizer().decode(prompt)
        before = tokens_of(given)
        assert text == given + (alone(plain, given, count)[0] if count else "")
        found: dict[str, list[Any]] = {}
        for part in parts:
            for name, values in part.choices[0].logprobs.model_dump().items():
                found[name] = found.get(name, []) + values
        ids = small_tokenizer().convert_tokens_to_ids(found["tokens"])
        assert ids[: len(before)] == before and len(ids) == len(before) + count
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        rows = logs(plain, ids)
        for place in range(1, len(ids)):
            row, own = rows[place - 1], found["tokens"][place]
            assert found["token_logprobs"][place] == pytest.approx(float(row[ids[place]]), abs=1e-4)
            likeliest = small_tokenizer().convert_ids_to_tokens(row.topk(top).indices.tolist()) if top else []
            assert set(found["top_logprobs"][place]) == {*likeliest, own}
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert text[offset:].lstrip(" ").startswith(token)
        assert parts[-1].usage.completion_tokens == count
    echoed = create(prompt=[*PROMPTS], max_tokens=2, echo=True, **GREEDY)
    assert [choice.text for choice in echoed.choices] == [f"{p}{alone(plain, p, 2)[0]}" for p in PROMPTS]
    assert all(choice.logprobs is None for choice in echoed.choices)


def test_the_thread_of_scores_ends_with_its_batch() -> None:
    model, before = fastspec.patch(small_target()), {*threading.enumerate()}
    scorer, rounds = TextScorer(SimpleNamespace(model=model)), []  # type: ignore[arg-type]
    scorer.score(tokens_of("w5 w6 w7"), 2, rounds.append).result(SECONDS)
    assert rounds
    (thread,) = {each for each in threading.enumerate() if each.name.startswith("fastspec-scores")} - before
    scorer.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats(plain: Any, server: Served, stream: bool) -> None:
    create = server.client().chat.completions.create
    given = {"messages": talk("w5 w6"), "max_tokens": 7, **GREEDY}
    answer = create(**given, logprobs=True, top_logprobs=2, stream=stream)
    kind = ChatCompletionChunk if stream else ChatCompletion
    choices = [kind.model_validate(each.model_dump()).choices[0] for each in (answer if stream else [answer])]
    found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    assert len(found) == (choices and len(text.split()) + 1 if choices[-1].finish_reason == "stop" else 7)
    prompt = small_tokenizer().apply_chat_template(talk("w5 w6"), add_generation_prompt=True)["input_ids"]
    ids = small_tokenizer().convert_tokens_to_ids([token.token for token in found])
    assert small_tokenizer().decode(ids, skip_special_tokens=True) == text
    for token, row in zip(found, logs(plain, [*prompt, *ids])[len(prompt) - 1 :], strict=False):
        assert bytes(token.bytes).decode() == token.token
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
    assert create(**given).choices[0].logprobs is None
    bare = create(**given, logprobs=True).choices[0].logprobs.content
    assert [token.token for token in bare] == [token.token for token in found]
    assert not any(token.top_logprobs for token in bare)


def test_log_probabilities_of_responses(plain: Any, server: Served) -> None:
    """In a stream with the text that each brings; together, and whole, those of the text."""
    create = server.client().responses.create
    given = {"model": NAME, "input": "w5 w6", "max_output_tokens": 7, "temperature": 0}
    included = {"include": ["message.output_text.logprobs"]}
    whole = Response.model_validate(create(**given, **included, top_logprobs=2).model_dump())
    part = whole.output[0].content[0]
    prompt = small_tokenizer().apply_chat_template(talk("w5 w6"), add_generation_prompt=True)["input_ids"]
    ids = small_tokenizer().convert_tokens_to_ids([token.token for token in part.logprobs])
    assert len(ids) >= 4 and small_tokenizer().decode(ids) == part.text
    for token, row in zip(part.logprobs, logs(plain, [*prompt, *ids])[len(prompt) - 1 :], strict=False):
        assert bytes(token.bytes).decode() == token.token
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
    events = list(create(**given, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    scored = [token.to_dict() for event in deltas for token in event.logprobs]
    assert all(event.logprobs for event in deltas)
    assert scored == [token.to_dict() for token in part.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [token.to_dict() for token in done.logprobs] == scored
    assert events[-1].response.output[0].content[0].to_dict() == part.to_dict()
    bare = create(**given, **included).output[0].content[0].logprobs
    assert [token.token for token in bare] == [token.token for token in part.logprobs]
    assert not any(token.top_logprobs for token in bare)
    assert create(**given, include=[]).output[0].content[0].logprobs is None


def test_an_answer_tells_its_times_and_counts(server: Served) -> None:
    """As llama.cpp's server does; of several answers the sums, and the times of all together."""
    client, text = server.client(), words(random.Random(3), 40)
    began = time.perf_counter()
    answer = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0)
    took, usage, found = 1e3 * (time.perf_counter() - began), answer.usage, answer.timings
    assert found["predicted_n"] == usage.completion_tokens and found["cache_n"] == 0
    assert found["prompt_n"] == usage.prompt_tokens
    details = usage.completion_tokens_details
    assert found["draft_n_accepted"] == details.accepted_prediction_tokens
    assert found["draft_n"] - found["draft_n_accepted"] == details.rejected_prediction_tokens > 0
    assert found["prompt_ms"] > 0 and found["predicted_ms"] > 0
    assert found["prompt_ms"] + found["predicted_ms"] < took
    again = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0, n=2)
    told = again.timings
    assert told["cache_n"] > 0 and told["prompt_n"] + told["cache_n"] == again.usage.prompt_tokens
    assert told["predicted_n"] == again.usage.completion_tokens == 2 * found["predicted_n"]
    (*_, before, last) = client.chat.completions.create(
        model=NAME, messages=talk(text), max_tokens=5, temperature=0, stream=True
    )
    assert last.timings["predicted_n"] == last.usage.completion_tokens and not hasattr(before, "timings")
    none = client.completions.create(model=NAME, prompt=text, max_tokens=0, echo=True).timings
    assert none["predicted_n"] == none["predicted_ms"] == 0


def test_every_route_tells_times_and_counts(server: Served) -> None:
    given: Any = {"model": NAME, "temperature": 0}
    text = words(random.Random(5), 40)
    chat = server.client().chat.completions.create(**given, messages=talk(text), max_tokens=9).timings
    create = partial(server.client().responses.create, **given, input=text, max_output_tokens=9)
    *_, ended = create(stream=True)
    asked = {**given, "messages": talk(text), "max_tokens": 9}
    message = post(server, "/v1/messages", json.dumps(asked).encode())[1]
    streamed = raw(server, "/v1/messages", {**asked, "stream": True})
    (delta,) = (
        json.loads(line[6:]) for line in streamed.split("\n") if line.startswith('data: {"type": "message_delta"')
    )
    for found in (create().timings, ended.response.timings, message["timings"], delta["timings"]):
        assert found.keys() == chat.keys() and found["predicted_n"] == chat["predicted_n"] > 3
        assert found["cache_n"] + found["prompt_n"] == chat["cache_n"] + chat["prompt_n"]
        assert found["draft_n"] > 0 <= found["draft_n_accepted"] and found["predicted_ms"] > 0


def test_samplers_are_fields(plain: Any, server: Served) -> None:
    create = server.client().completions.create
    text, greedy = "w5 w6 w7", alone(plain, "w5 w6 w7", 9)[0]
    hot = {"model": NAME, "prompt": text, "max_tokens": 9, "temperature": 9, "seed": 3}
    for more in ({"top_k": 1}, {"min_p": 1}, {"top_k": -1, "min_p": 1.0}):
        assert create(**hot, extra_body=more).choices[0].text == greedy
    assert create(**hot, extra_body={"top_k": -1}).choices[0].text != greedy


@pytest.mark.some("this process")
def test_drafts_are_counted_for_each_answer(server: Served) -> None:
    client = server.client()
    given = {"prompt": [words(random.Random(seed)) for seed in range(4)], "max_tokens": 30, **GREEDY}
    before = [server.metric(f"fastspec_{name}_tokens_total") for name in ("accepted", "drafted")]
    whole = client.completions.create(**given).usage.completion_tokens_details
    *_, last = client.completions.create(**given, stream=True)
    assert last.usage.completion_tokens_details == whole and whole.accepted_prediction_tokens > 0
    drafted = whole.accepted_prediction_tokens + whole.rejected_prediction_tokens
    server.wait(lambda: server.metric("fastspec_drafted_tokens_total") - before[1] >= 2 * drafted)
    assert server.metric("fastspec_accepted_tokens_total") - before[0] >= 2 * whole.accepted_prediction_tokens


def test_cached_tokens_are_counted_for_each_prompt(server: Served) -> None:
    client = server.client()
    given = {"prompt": words(random.Random(77), 30), "max_tokens": 4, **GREEDY}
    first, again = (client.completions.create(**given, n=2, extra_body={"top_k": 1}).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    made = client.responses.create(model=NAME, input=words(random.Random(78), 30), max_output_tokens=4)
    made = client.responses.create(model=NAME, input=words(random.Random(78), 30), max_output_tokens=4)
    assert 0 < made.usage.input_tokens_details.cached_tokens < made.usage.input_tokens
