"""What `fastspec serve` does not answer, and how it says so: by name, in OpenAI's form, and without harm to who asks
next."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, Served, openai, post, served
from helpers.training import small_target, small_tokenizer
from transformers import GenerationConfig

import fastspec
from fastspec.programs.serving import app
from fastspec.programs.serving import server as serving
from fastspec.programs.serving.requests import parse
from fastspec.programs.serving.server import finish_reason

pytestmark = MARKS

ONE, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TALK = [{"role": "user", "content": "w5 w6"}]
CALL = {"function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}
MALFORMED: list[tuple[str, bytes, int, str]] = [
    (ONE, b"{not json", 400, "JSON"),
    (ONE, b"[1, 2]", 400, "JSON"),
    (ONE, b"", 400, "JSON"),
    (ONE, b"[" * 3000, 400, "body"),
    (ONE, b'{"metadata": ' + b"[" * 600 + b"]" * 600 + b"}", 400, "inside each other"),
    (ONE, b'{"prompt": "w5 \\ud800"}', 400, "surrogates"),
    (ONE, b'{"prompt": "w5", "user": "\\udfff"}', 400, "surrogates"),
    (ONE, b'{"prompt": "w5", "user": ["\\uDBFF"]}', 400, "surrogates"),
    (ONE, b"\xff\xfe", 400, "JSON"),
    (ONE, b'{"prompt": "' + b"w" * 5000 + b'"}', 413, "longer"),
    (ONE, b'{"prompt": "w5", "temperature": NaN}', 400, "temperature"),
    ("/reset", b"{}", 404, "/reset is not served"),
    ("/load_model", b"{}", 404, "not served"),
    ("/v1/models", b"{}", 405, "Method Not Allowed"),
]
FIELDS: list[tuple[str, dict[str, Any], int, str]] = [
    (ONE, {}, 400, "prompt is missing"),
    (ONE, {"prompt": None}, 400, "prompt is missing"),
    (ONE, {"model": "other"}, 404, "the model 'other' does not exist"),
    (CHAT, {"parallel_tool_calls": 0}, 400, "parallel_tool_calls"),
    (CHAT, {"verbosity": "low"}, 400, "verbosity"),
    (CHAT, {"prediction": {"type": "content", "content": "w5"}}, 400, "prediction"),
    (CHAT, {"moderation": {"model": "x"}}, 400, "moderation"),
    (CHAT, {"stream_options": {"include_usage": 1}}, 400, "stream_options"),
    (RESPONSE, {"text": {"verbosity": "high"}}, 400, "verbosity"),
    (RESPONSE, {"context_management": [{"type": "x"}]}, 400, "context_management"),
    (ONE, {"prompt": []}, 400, "a text, a list of token numbers"),
    (ONE, {"prompt": [5, "w6"]}, 400, "a text, a list of token numbers"),
    (ONE, {"prompt": [[]]}, 400, "a text, a list of token numbers"),
    (ONE, {"prompt": [True]}, 400, "a text, a list of token numbers"),
    (ONE, {"prompt": ["w5"] * 129}, 400, "a list of up to 128"),
    (ONE, {"prompt": ["w5", [5, 9999]]}, 400, "prompt names a token that the model has not"),
    (ONE, {"prompt": ""}, 400, "one token"),
    (ONE, {"prompt": ["w5", ""], "echo": True, "logprobs": 1}, 400, "one token"),
    (ONE, {"prompt": "w6 " * 91}, 400, "has 91 tokens"),
    (ONE, {"prompt": "w6 " * 60, "max_tokens": 30}, 400, "max_length"),
    (ONE, {"max_tokens": 0}, 400, "max_tokens"),
    (ONE, {"max_tokens": 10**30}, 400, "max_tokens"),
    (ONE, {"max_tokens": 60}, 400, "at most 50"),
    (ONE, {"n": 129}, 400, "from 1 on to 128"),
    (ONE, {"n": 3}, 400, "3 answers are asked for at once, and this server has 1 rows and lets 1 wait"),
    (ONE, {"best_of": 2}, 400, "must be 1"),
    (ONE, {"temperature": 10**400}, 400, "must be a number from 0 to 100"),
    (ONE, {"price": 10**400}, 400, "must be a number of milliseconds"),
    (ONE, {"logprobs": 21}, 400, "logprobs"),
    (ONE, {"logprobs": True}, 400, "logprobs"),
    (ONE, {"echo": 1}, 400, "echo"),
    (ONE, {"top_k": -2}, 400, "top_k"),
    (ONE, {"min_p": 1.5}, 400, "min_p"),
    (ONE, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (ONE, {"frequency_penalty": 2.5}, 400, "from -2 to 2"),
    (ONE, {"suffix": "w"}, 400, "suffix"),
    (ONE, {"temperature": -1}, 400, "temperature"),
    (ONE, {"seed": 1.5}, 400, "seed"),
    (ONE, {"seed": 2**63}, 400, "to 9223372036854775807"),
    (ONE, {"nonsense": 1}, 422, "nonsense"),
    (ONE, {"stop": [""]}, 400, "stop"),
    (ONE, {"stop": ["w" * 300]}, 400, "256 characters"),
    (ONE, {"logit_bias": {"w5": 1}}, 400, "logit_bias"),
    (ONE, {"logit_bias": {"5": 1000}}, 400, "logit_bias"),
    (CHAT, {"logit_bias": {"5": 1, "9999": 1}}, 400, "tokens are 0 to"),
    (ONE, {"logit_bias": {"9" * 3000: 1}}, 400, "tokens are 0 to"),
    (ONE, {"presence_penalty": 3}, 400, "from -2 to 2"),
    (ONE, {"generation_config": "{"}, 400, "no JSON text"),
    (ONE, {"generation_config": {"top_k": 5}}, 400, "JSON text of an object"),
    (ONE, {"generation_config": '{"num_beams": 4}'}, 400, "num_beams"),
    (ONE, {"generation_config": '{"nonsense": 4}'}, 400, "'nonsense'"),
    (ONE, {"generation_config": '{"max_new_tokens": 60}'}, 400, "at most 50"),
    (ONE, {"generation_config": '{"max_length": 62}'}, 400, "at most 50"),
    (ONE, {"generation_config": '{"max_length": 1}'}, 400, "max_new_tokens"),
    (ONE, {"generation_config": '{"max_length": "a"}'}, 400, "max_length of generation_config must be a whole number"),
    *(
        (ONE, {"generation_config": text}, 400, words)
        for text, words in (
            ('{"max_new_tokens": NaN}', "max_new_tokens of generation_config must be a whole number"),
            ('{"max_length": Infinity}', "max_length of generation_config must be a whole number"),
            (f'{{"bad_words_ids": {"[" * 600}{"]" * 600}}}', "inside each other"),
            ('{"stop_strings": ["\\ud800"]}', "surrogates"),
            ('{"max_new_tokens": 1.5}', "max_new_tokens"),
            ('{"max_new_tokens": true}', "max_new_tokens"),
            ('{"max_time": "x"}', "max_time"),
            ('{"do_sample": true, "temperature": 1e-38}', "too near 0"),
            ('{"top_p": -1}', "top_p"),
        )
    ),
    *(
        (ONE, {"generation_config": json.dumps(given)}, 400, words)
        for given, words in (
            (
                {"suppress_tokens": [5, 9999]},
                "suppress_tokens of generation_config names a token that the model has not: its tokens are 0 to",
            ),
            ({"begin_suppress_tokens": [-1]}, "tokens are 0 to"),
            ({"bad_words_ids": [[5, 9999]]}, "tokens are 0 to"),
            ({"forced_eos_token_id": 9999}, "tokens are 0 to"),
            ({"forced_bos_token_id": "w5"}, "must be a token number, not 'w5'"),
            *(
                ({name: value}, f"{name} of generation_config")
                for name, value in (
                    ("encoder_no_repeat_ngram_size", 10**9),
                    ("encoder_repetition_penalty", 1.5),
                    ("watermarking_config", {"bias": 2.0}),
                    ("top_h", 0.5),
                    ("penalty_alpha", 0.6),
                    ("num_return_sequences", 2),
                    ("guidance_scale", 2),
                    ("use_cache", 5),
                    ("do_sample", "yes"),
                    ("eos_token_id", "w5"),
                    ("no_repeat_ngram_size", 10**9),
                    ("exponential_decay_length_penalty", "w5"),
                    ("renormalize_logits", [1]),
                    ("bad_words_ids", [5]),
                )
            ),
            ({"suppress_tokens": {"5": 1}}, "must be a list of token numbers"),
            ({"suppress_tokens": [True]}, "must be a list of token numbers"),
            ({"begin_suppress_tokens": 5}, "must be a list of token numbers"),
            ({"sequence_bias": [[[5, 9999], 1.0]]}, "sequence_bias of generation_config names"),
            ({"sequence_bias": 5}, "with a bias"),
            ({"sequence_bias": [[5]]}, "with a bias"),
            ({"sequence_bias": {"5": 1.0}}, "with a bias"),
            ({"sequence_bias": [[["w5"], 1.0]]}, "with a bias"),
        )
    ),
    (ONE, {"logit_bias": {"\u0663": 1}}, 400, "logit_bias"),
    (ONE, {"generation_config": '{"stop_strings": [""]}'}, 400, "stop_strings"),
    (CHAT, {"messages": "w5"}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"content": "w5"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "arguments"),
    *(
        (CHAT, {"messages": [*TALK, {"role": "assistant", "tool_calls": [CALL, {"function": function}]}]}, 400, words)
        for function, words in (
            ({"name": "f", "arguments": '{"a": '}, "messages[1].tool_calls[1].function.arguments is no JSON"),
            ({"name": "f", "arguments": "[1]"}, "messages[1].tool_calls[1].function.arguments must be a JSON text"),
            ({"name": "f", "arguments": r'{"a": ["\ud83d"]}'}, r"tool_calls[1].function.arguments has '\ud83d' at"),
            ({"arguments": "{}"}, "messages[1].tool_calls[1] must be an object with a function that has a name"),
        )
    ),
    (CHAT, {"top_logprobs": 3}, 400, "without logprobs"),
    (CHAT, {"logprobs": 3}, 400, "true or false"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "from 0 on to 20"),
    (CHAT, {"echo": True}, 422, "echo"),
    (RESPONSE, {"top_logprobs": 21}, 400, "from 0 on to 20"),
    (RESPONSE, {"include": ["file_search_call.results"]}, 400, "include[0]='file_search_call.results'"),
    (CHAT, {"reasoning_effort": "low"}, 400, "no variable reasoning_effort"),
    (CHAT, {"reasoning_effort": "none"}, 400, "no variable enable_thinking"),
    (CHAT, {"web_search_options": {}}, 400, "web_search_options"),
    (CHAT, {"audio": {"voice": "x"}}, 400, "audio"),
    (CHAT, {"function_call": "f"}, 400, "tool_choice"),
    (CHAT, {"response_format": {"type": "grammar"}}, 400, "response_format"),
    (CHAT, {"tool_choice": "required"}, 400, "needs tools"),
    (CHAT, {"tools": [{}]}, 400, "tools"),
    (CHAT, {"chat_template_kwargs": 5}, 400, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}, 400, "no variable"),
    (CHAT, {"chat_template_kwargs": {"truncation": True, "max_length": 2}}, 400, "no variable"),
    (RESPONSE, {"input": 5}, 400, "input"),
    (RESPONSE, {"input": [5]}, 400, "input"),
    (RESPONSE, {"input": [IMAGE]}, 400, "input"),
    (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input"),
    (RESPONSE, {"input": [{"type": "function_call_output"}]}, 400, "input"),
    (RESPONSE, {"previous_response_id": "x"}, 400, "previous_response_id"),
    (RESPONSE, {"background": True}, 400, "background"),
    (RESPONSE, {"text": {"format": {"type": "json_object"}}}, 400, "llguidance"),
    (RESPONSE, {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}, 400, "tools[1]="),
    (RESPONSE, {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom"}]}]}, 400, "tools[0]="),
    (CHAT, {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]}]}, 400, "tools"),
    (RESPONSE, {"reasoning": {"effort": "low"}}, 400, "chat_template_kwargs"),
    (RESPONSE, {"reasoning": {"mode": "pro"}}, 400, "reasoning"),
    (RESPONSE, {"instructions": 5}, 400, "instructions"),
    (RESPONSE, {"truncation": "auto"}, 400, "truncation"),
]
GIVEN: dict[str, dict[str, Any]] = {ONE: {"prompt": "w5"}, CHAT: {"messages": TALK}, RESPONSE: {"input": "w5"}}


@pytest.fixture(scope="module")
def server() -> Any:
    from fastspec.programs.serving.requests import Limits

    with served(
        fastspec.patch(small_target(peak=0.15)), rows=1, max_length=80, assistant="nasd", limits=Limits(50, 1, 4000)
    ) as running:
        yield running


def test_every_refusal_names_what_is_wrong_and_the_next_request_is_answered(server: Served) -> None:
    asked = [
        *MALFORMED,
        *((path, json.dumps({**GIVEN[path], **more} if more else {}).encode(), *told) for path, more, *told in FIELDS),
    ]
    for path, body, status, words in asked:
        got, answer = post(server, path, body)
        error = answer["error"]
        assert (
            got == status
            and error["code"] in (status, "model_not_found")
            and words in error["message"]
            and error["type"] == "invalid_request_error"
        ), (body, answer)
    assert post(server, ONE, b'{"prompt": "w5", "max_tokens": 2}')[0] == 200


def test_settings_of_tokens_that_the_model_has_are_taken(server: Served) -> None:
    for given in (
        {"suppress_tokens": [5, 6]},
        {"bad_words_ids": [[5, 6], [7]]},
        {"sequence_bias": [[[5, 6], 1.0]]},
        {"forced_eos_token_id": 5},
        {"suppress_tokens": None},
        {"bad_words_ids": [[5]], "do_sample": True},
    ):
        body = {"prompt": "w5", "max_tokens": 3, "generation_config": json.dumps(given)}
        got, answer = post(server, ONE, json.dumps(body).encode())
        assert got == 200, (given, answer)


def test_a_model_s_own_settings_are_not_held_to_its_tokens() -> None:
    """Some suppress the places of images, which their vocabulary may not count."""
    model = small_target(peak=0.15)
    model.generation_config.suppress_tokens = [10**6]
    with served(fastspec.patch(model), rows=1, max_length=80, assistant="nasd") as running:
        assert post(running, ONE, b'{"prompt": "w5", "max_tokens": 2}')[0] == 200


def test_null_is_not_given_and_what_changes_nothing_is_taken(server: Served) -> None:
    nothing = {
        "logprobs": False,
        "n": 1,
        "presence_penalty": 0,
        "stop": [],
        "logit_bias": {},
        "stream": None,
        "stream_options": {"include_usage": None, "include_obfuscation": False},
        "parallel_tool_calls": True,
        "verbosity": "medium",
        "store": False,
        "metadata": {"a": "b"},
        "generation_config": json.dumps({"num_beams": 1, "use_cache": True, "encoder_no_repeat_ngram_size": 0}),
        "user": "me",
        "tools": None,
    }
    messages = [{**TALK[0], "tool_calls": None, "name": None}]
    got, answer = post(server, CHAT, json.dumps({"messages": messages, "max_tokens": 4, **nothing}).encode())
    assert got == 200 and answer["usage"]["completion_tokens"] == 4
    more = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": "auto"},
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "max_output_tokens": 4,
    }
    assert post(server, RESPONSE, json.dumps({"input": "w5", **more}).encode())[0] == 200


def test_a_configuration_says_how_long_an_answer_may_get(server: Served) -> None:
    def ends(**config: Any) -> tuple[int, str]:
        body = {
            "prompt": "w5 w6",
            "generation_config": json.dumps({"do_sample": False, "eos_token_id": 1000, **config}),
        }
        got, answer = post(server, ONE, json.dumps(body).encode())
        assert got == 200
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert (
        ends(max_length=20) == (18, "length") and ends(max_new_tokens=7) == (7, "length") and ends() == (50, "length")
    )


def test_logit_bias_holds_for_both_routes(server: Served) -> None:
    for path, more in GIVEN.items():
        if path != RESPONSE:
            body = {**more, "max_tokens": 3, "temperature": 0, "logit_bias": {"9": 100}}
            choice = post(server, path, json.dumps(body).encode())[1]["choices"][0]
            assert (choice["text"] if path == ONE else choice["message"]["content"]) == "w9 w9 w9"


def test_stop_strings_are_prepared_beside_the_servers_own_thread(server: Served, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(serving, "stop_criterion", lambda *given: seen.append((threading.current_thread(), given[1])))
    for more in ({"stop": "w9"}, {"generation_config": '{"stop_strings": ["w9"], "max_new_tokens": 3}'}):
        post(server, ONE, json.dumps({"prompt": "w5", "max_tokens": 3, **more}).encode())
    assert [strings for _, strings in seen] == [("w9",), ("w9",)] and not any(
        thread is server.thread for thread, _ in seen
    )


@pytest.mark.parametrize("path", [ONE, CHAT, RESPONSE])
def test_a_prompt_far_above_the_room_is_refused_by_its_first_tokens(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whatever part of the request it comes from; texts are read beside the server's own thread."""
    threads: list[threading.Thread] = []
    read = serving.Server.ids
    monkeypatch.setattr(
        serving.Server,
        "ids",
        lambda *given, **more: threads.append(threading.current_thread()) or read(*given, **more),
    )

    def asked(text: str) -> list[dict[str, Any]]:
        talk = [{"role": "user", "content": text}]
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        bodies = {
            ONE: [{"prompt": text}],
            CHAT: [{"messages": talk}, {"messages": parts}],
            RESPONSE: [{"input": text}, {"input": talk}, {"input": "w5", "instructions": text}],
        }
        return [{**body, "max_output_tokens" if path == RESPONSE else "max_tokens": 2} for body in bodies[path]]

    for body in asked("w6 " * 600):
        got, answer = post(server, path, json.dumps(body).encode())
        assert got == 400 and "tokens or more, and this server takes 79 at most" in answer["error"]["message"]
    for body in asked("w6" + " " * 2000):
        assert post(server, path, json.dumps(body).encode())[0] == 200
    assert len(threads) == 2 * len(asked("")) and server.thread not in threads


def test_nearly_no_temperature_is_none(server: Served) -> None:
    bodies = [{"prompt": "w5 w6", "max_tokens": 6, "temperature": value} for value in (0, 1e-38, 1e-7)]
    (first, *others) = [post(server, ONE, json.dumps(body).encode())[1]["choices"] for body in bodies]
    assert others == [first, first]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_over_where_its_room_ends_was_not_cut_off(server: Served, stream: bool) -> None:
    client = server.client()

    def asked(**config: Any) -> Any:
        given = {"generation_config": json.dumps({"do_sample": False, "max_new_tokens": 3, **config})}
        answer = client.completions.create(model=NAME, prompt="w5 w6", stream=stream, extra_body=given)
        parts = [each.choices[0] for each in answer] if stream else [answer.choices[0]]
        return "".join(part.text for part in parts), parts[-1].finish_reason

    def counts() -> list[float]:
        return [server.metric(f'fastspec_requests_total{{outcome="{outcome}"}}') for outcome in ("length", "stop")]

    before = counts()
    text, reason = asked()
    assert reason == "length" and len(set(text.split())) == 3
    assert asked(eos_token_id=small_tokenizer().convert_tokens_to_ids(text.split()[-1])) == (text, "stop")
    server.wait(lambda: [now - was for now, was in zip(counts(), before, strict=True)] == [1, 1])


def test_a_stop_string_at_the_end_of_the_room_ends_an_answer() -> None:
    class Words:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    asked = GenerationConfig(max_new_tokens=3), frozenset((7, 8)), Words()
    ends = {(1, 2, 5): "length", (2, 3, 4): "stop", (1, 2, 8): "stop", (1, 2): "stop"}
    assert all(finish_reason(*asked, ("3 4",), [*tokens]) == wanted for tokens, wanted in ends.items())
    assert finish_reason(*asked, (), [2, 3, 4]) == "length"


def test_times_count_from_when_a_request_arrived(server: Served, monkeypatch) -> None:
    """What it waits for until it is read, too."""
    names = "fastspec_time_to_first_token_seconds_sum", "fastspec_request_seconds_sum"
    before = [server.metric(name) for name in names]
    monkeypatch.setattr(app.requests, "parse", lambda text: time.sleep(0.5) or parse(text))
    assert post(server, ONE, b'{"prompt": "w5", "max_tokens": 2}')[0] == 200
    for name, earlier in zip(names, before, strict=True):
        server.wait(lambda name=name, earlier=earlier: server.metric(name) > earlier)
        assert server.metric(name) - earlier >= 0.5


def test_an_error_of_our_own_is_openais_json_too_and_keeps_the_connection(server: Served, monkeypatch) -> None:
    def failing(self: Any, *rest: Any, **more: Any) -> Any:
        raise AttributeError("no luck")

    monkeypatch.setattr(type(server.batch), "submit", failing)
    got, answer = post(server, ONE, b'{"prompt": "w5"}')
    assert got == answer["error"]["code"] == 500 and answer["error"]["message"] == "AttributeError: no luck"
    with pytest.raises(openai.InternalServerError, match="no luck"):
        server.client().completions.create(model=NAME, prompt="w5")
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), SECONDS)
    for status in (500, 500, 200):
        if status == 200:
            monkeypatch.undo()
        connection.request("POST", ONE, b'{"prompt": "w5", "max_tokens": 2}', {"Content-Type": "application/json"})
        answered = connection.getresponse()
        answered.read()
        assert answered.status == status and not answered.will_close
    connection.close()
