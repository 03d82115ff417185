"""Routes beside the answers: the model, tokens of texts, pages of other origins, and keys."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, Served, openai, post, served, talk
from helpers.training import small_target, small_tokenizer

import fastspec
from fastspec.programs.serving.structured import takes_notes

pytestmark = MARKS
PAGE = "http://page.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    model = fastspec.patch(small_target(peak=0.15))
    told = {"api_key": "k", "origins": [PAGE], "draft_model": "small"}
    with served(model, rows=1, max_length=80, assistant="nasd", **told) as running:
        yield running


def asked(server: Served, path: str, key: str = "k", **fields: Any) -> tuple[int, Any]:
    return post(server, path, json.dumps(fields).encode(), Authorization=f"Bearer {key}")


def test_a_model_says_how_long_its_texts_may_be(server: Served) -> None:
    client = server.client(key="k")
    model = client.models.retrieve(NAME)
    assert model.id == NAME and model.max_model_len == 80 and model == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'other/one' does not exist"):
        client.models.retrieve("other/one")


def test_texts_and_conversations_are_tokenized_and_back(server: Served) -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer("w5 w6")["input_ids"]
    names = tokenizer.convert_ids_to_tokens(ids)
    wanted = {"count": len(ids), "max_model_len": 80, "tokens": ids, "token_strs": None}
    assert asked(server, "/tokenize", prompt="w5 w6", model=NAME) == (200, wanted)
    assert asked(server, "/tokenize", prompt="w5 w6", return_token_strs=True)[1]["token_strs"] == names
    for flag in (True, False):
        chat = tokenizer.apply_chat_template(talk("w5"), add_generation_prompt=flag)["input_ids"]
        assert asked(server, "/tokenize", messages=talk("w5"), add_generation_prompt=flag)[1]["tokens"] == chat
    assert asked(server, "/detokenize", tokens=ids) == (200, {"prompt": "w5 w6"})
    for path, fields, status, said in (
        ("/tokenize", {}, 400, "one of prompt and messages"),
        ("/tokenize", {"prompt": 5}, 400, "must be a text"),
        ("/tokenize", {"prompt": "w5", "stream": True}, 422, "stream"),
        ("/tokenize", {"prompt": "w5", "model": "other"}, 404, "does not exist"),
        ("/tokenize", {"prompt": "w5 " * 900}, 400, "tokens or more"),
        ("/detokenize", {}, 400, "tokens is missing"),
        ("/detokenize", {"tokens": "w5"}, 400, "a list of token numbers"),
        ("/detokenize", {"tokens": [5, 9999]}, 400, "its tokens are 0 to"),
    ):
        got, answer = asked(server, path, **fields)
        assert got == status and said in answer["error"]["message"], (fields, answer)


STRICT = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
"""As Qwen 3.5's."""
SILENT = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"


@pytest.mark.parametrize(("rule", "takes"), [("", True), (STRICT, False), (SILENT, False)])
def test_a_system_s_notes_reach_models_whose_template_takes_none(rule: str, takes: bool) -> None:
    tokenizer = small_tokenizer()
    names = "{{ {'system': 'w20', 'user': 'w21', 'assistant': 'w22'}[m.role] }} {{ m.content }} "
    tokenizer.chat_template = "{% for m in messages %}" + rule + names + "{% endfor %}"
    assert takes_notes(tokenizer) == takes
    talk = [
        {"role": "system", "content": "w4"},
        {"role": "developer", "content": "w5"},
        {"role": "user", "content": "w6"},
        {"role": "system", "content": "w7"},
        {"role": "assistant", "content": "w8"},
        {"role": "system", "content": "w9"},
    ]
    with served(fastspec.patch(small_target()), rows=1, assistant="nasd", tokenizer=tokenizer) as server:
        tokens = post(server, "/tokenize", json.dumps({"messages": talk}).encode())[1]["tokens"]
    told = "w20 w4 w20 w5 w21 w6 w20 w7 w22 w8 w20 w9" if takes else "w20 w4 w5 w21 w6 w7 w22 w8 w21 w9"
    assert tokens == tokenizer(told, add_special_tokens=False)["input_ids"]


def test_pages_of_named_origins_may_ask(server: Served) -> None:
    """Their browsers ask first, without the key, and read errors too."""

    def headers(method: str, origin: str, **more: str) -> tuple[int, Any]:
        request = urllib.request.Request(f"{server.url}/v1/models", method=method, headers={"Origin": origin, **more})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, told = headers("OPTIONS", PAGE, **first)
    assert status == 200 and told["Access-Control-Allow-Origin"] == PAGE
    assert "POST" in told["Access-Control-Allow-Methods"] and "authorization" in told["Access-Control-Allow-Headers"]
    assert headers("OPTIONS", "http://other.example", **first)[0] == 400
    for more, wanted in (({}, 401), ({"Authorization": "Bearer k"}, 200)):
        status, told = headers("GET", PAGE, **more)
        assert status == wanted and told["Access-Control-Allow-Origin"] == PAGE
        assert "Access-Control-Allow-Origin" not in headers("GET", "http://other.example", **more)[1]


def test_a_key_comes_in_anthropics_way_too(server: Served) -> None:
    body = json.dumps({"messages": talk("w5"), "max_tokens": 2}).encode()
    for headers, wanted in (({"x-api-key": "k"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
        got, answer = post(server, "/v1/messages", body, **headers)
        assert got == wanted and (wanted == 200 or answer["error"]["type"] == "authentication_error")


def test_what_is_served_is_told(server: Served) -> None:
    """In the metrics; a request that names another assistant is refused."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": "Bearer k"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        (line,) = [line for line in answer.read().decode().split("\n") if line.startswith("fastspec_info{")]
    told = {"model": NAME, "assistant": "nasd", "draft_model": "small", "rows": 1, "max_length": 80, "dtype": "float32"}
    for name, value in told.items():
        assert f'{name}="{value}"' in line
    assert "head=" not in line
    assert 'device="cpu"' in line and 'kernels="' in line and line.endswith(" 1.0")
    given = {"prompt": "w5", "max_tokens": 2}
    assert asked(server, "/v1/completions", assistant="nasd", **given)[0] == 200
    status, answer = asked(server, "/v1/completions", assistant="eagle3", **given)
    assert status == 400 and "all rows here have 'nasd', or 'none'" in answer["error"]["message"]
