"""The page at `/`: how it is served, what its file holds, and the rounds that requests may ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, Served, post, served, serving, talk
from helpers.serve_process import opened
from helpers.training import save_with_tokenizer, small_target, small_tokenizer
from typer.testing import CliRunner

import fastspec
from fastspec.programs.cli.app import app
from fastspec.programs.serving import app as program
from fastspec.programs.serving import remote
from fastspec.programs.serving.remote import Remote

pytestmark = MARKS
PAGE = files("fastspec.programs.serving").joinpath("page.html").read_text(encoding="utf-8")
MARKED = "own", "accepted", "recovered", "bonus"
GREEDY = {"temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module", params=["n-grams in this process", "a head in another"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    if "another" in request.param:
        with Remote(opened) as batch, serving(batch, batch.tokenizer) as running:
            yield running
        return
    with served(fastspec.patch(small_target(peak=0.15)), assistant="nasd") as running:
        yield running


def got(server: Served, path: str, **headers: str) -> tuple[int, Any, str]:
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def part(tag: str) -> str:
    """The one element of this name."""
    [found] = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return found


def test_the_page_needs_no_key_and_all_else_does() -> None:
    with served(fastspec.patch(small_target()), rows=1, assistant="nasd", api_key="k") as server:
        status, headers, text = got(server, "/")
        assert status == 200 and text == PAGE and headers["Content-Type"] == "text/html; charset=utf-8"
        for path in ("/metrics", "/v1/models", "/index.html", "//", "/page.html"):
            assert got(server, path)[0] == (401 if path in ("/metrics", "/v1/models") else 404), path
        server.server.config.app.loopback = True
        assert got(server, "/", Host="evil.example")[0] == 200  # as all that has a key


def test_its_policy_lets_nothing_run_but_its_own_script() -> None:
    with served(fastspec.patch(small_target()), rows=1, assistant="nasd") as server:
        _, headers, _ = got(server, "/")
        gate = server.server.config.app
        gate.loopback = True
        assert [got(server, "/", Host=name)[0] for name in ("localhost", "evil.example")] == [200, 403]
    rules = dict(rule.split(" ", 1) for rule in program.policy_of(PAGE).split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256(part(tag).encode()).digest()
        assert rules.pop(name) == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert rules.pop("connect-src") == "'self'" and rules.pop("img-src") == "data:"
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules) == {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"}
    assert set(rules.values()) == {"'none'"}
    assert headers["Content-Security-Policy"] == program.policy_of(PAGE)
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"


def test_its_file_asks_nobody_else_and_makes_no_markup_of_texts() -> None:
    assert "//" not in re.sub(r"\s// .*", "", PAGE)  # an address, with or without a scheme
    assert not re.search(r"\b(src|srcset|action|ping|formaction)=|@import|url\(|<(iframe|object|embed|base)\b", PAGE)
    assert set(re.findall(r'href="([^"]*)"', PAGE)) == {"data:,", "#prompt"}
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    assert not re.search(rf"{sinks}|\beval\b|\bFunction\(|import\(|localStorage|\bcookie\b", PAGE)
    assert not re.search(r"setTimeout\([\"'`]|\bon[a-z]+=|javascript:|style=", PAGE)
    assert set(re.findall(r'call\("([^"]*)"', PAGE)) == {"/metrics", "/v1/chat/completions"}
    assert PAGE.count("fetch(") == 1


def test_its_fields_are_labelled() -> None:
    for name in re.findall(r'<(?:input|textarea)[^>]*\bid="(\w+)"', PAGE):
        assert f'<label for="{name}"' in PAGE or re.search(rf'<label[^>]*>[^<]*<input id="{name}"', PAGE), name


@pytest.mark.parametrize("flag", ["--page", "--no-page"])
def test_a_command_may_leave_it_out(flag: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_tokenizer(small_target(), tmp_path)
    found: dict[str, Any] = {}

    class Near(Remote):
        def __init__(self, build: Any) -> None:
            self.batch, self.tokenizer = pickle.loads(pickle.dumps(build))()

        def __exit__(self, *_: Any) -> None:
            self.batch.close(cancel=True)

    build = program.build_app
    monkeypatch.setattr(remote, "Remote", Near)
    monkeypatch.setattr(program, "build_app", lambda near, *given, **more: build(near.batch, *given, **more))
    monkeypatch.setattr(program, "run_server", lambda gate, listener, **_: found.update(paths=gate.paths))
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", "--device", "cpu", flag])
    assert done.exit_code == 0, done.output
    assert ("/" in found["paths"]) == (flag == "--page")


def test_without_it_there_is_nothing() -> None:
    with served(fastspec.patch(small_target()), rows=1, assistant="nasd", page=False) as server:
        assert got(server, "/")[0] == 404


def rounds_of(server: Served, path: str, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], str, Any]:
    """(the rounds of an answer, its text, its counts)."""
    body = json.dumps({"model": NAME, "stream": stream, "fastspec": {"rounds": True}, **GREEDY, **fields}).encode()
    if not stream:
        status, answer = post(server, path, body)
        assert status == 200, answer
        [choice] = answer["choices"]
        return choice["fastspec"]["rounds"], choice.get("text") or choice["message"]["content"], answer["usage"]
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices)
    return [one for each in choices for one in each["fastspec"]["rounds"]], text, chunks[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_rounds_are_the_tokens_of_the_answer(server: Served, stream: bool) -> None:
    """With their texts and marks, and trees that the accepted ones are a path of."""
    tokenizer, seen = small_tokenizer(), set[str]()
    for path, prompt in (("/v1/completions", {"prompt": "w5 w9"}), ("/v1/chat/completions", {"messages": talk("w7")})):
        rounds, text, usage = rounds_of(server, path, stream, **prompt)
        tokens = [token for each in rounds for token in each["tokens"]]
        assert len(tokens) == usage["completion_tokens"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
        assert "".join(piece for each in rounds for piece in each["texts"]) == text
        marks = [mark for each in rounds for mark in each["marks"]]
        details = usage["completion_tokens_details"]
        assert marks.count("accepted") == details["accepted_prediction_tokens"]
        assert sum(each["drafted"] for each in rounds) == sum(details.values())
        assert marks[0] == "own" and rounds[0]["tree"] is None and set(marks) <= {*MARKED}
        seen |= set(marks)
        last = tokens[0]
        for each in rounds[1:]:
            tree, accepted = each["tree"], each["marks"].count("accepted")
            if tree is None:
                assert each["drafted"] == 0 and each["marks"] == ["own"]
                last = each["tokens"][-1]
                continue
            assert each["marks"] == ["accepted"] * accepted + [each["marks"][-1]] * (len(each["tokens"]) - accepted)
            assert len(each["tokens"]) == len(each["texts"]) == len(each["marks"])
            assert tree["tokens"][0] == last and len(tree["tokens"]) == len(tree["texts"]) == each["drafted"] + 1
            assert [tree["tokens"][node] for node in tree["path"][1 : accepted + 1]] == each["tokens"][:accepted]
            below = [node for node, parent in enumerate(tree["parents"]) if node and parent == tree["path"][-1]]
            beside = {tree["tokens"][node] for node in below}
            if each["marks"][-1] == "recovered":
                assert beside and each["tokens"][-1] not in beside
            last = each["tokens"][-1]
    assert seen >= ({*MARKED} if server.batch.stats.assistant == "nasd" else {"own", "recovered"})


def test_a_request_may_take_no_drafts(server: Served) -> None:
    """Its tokens are the same, each in a round of its own, alone and beside others."""
    given = {"path": "/v1/completions", "stream": True, "prompt": "w5 w9"}
    drafted, text, _ = rounds_of(server, **given)
    for name in ("none", "autoregressive"):
        rounds, same, usage = rounds_of(server, **given, assistant=name)
        assert same == text and [len(each["tokens"]) for each in rounds] == [1] * len(rounds)
        assert sum(usage["completion_tokens_details"].values()) == 0
        assert {mark for each in rounds for mark in each["marks"]} == {"own"} and len(rounds) >= len(drafted)


def test_plain_rounds_have_no_trees_and_wait_for_nothing() -> None:
    """A server that drafts nothing tells the rounds, each a token, and need not read a tree back."""
    with served(fastspec.patch(small_target()), rows=1, assistant="autoregressive") as server:
        rounds, text, usage = rounds_of(server, "/v1/completions", True, prompt="w5 w9")
        assert "".join(piece for each in rounds for piece in each["texts"]) == text
        assert all(each["tree"] is None and each["marks"] == ["own"] for each in rounds)
        assert len(rounds) == usage["completion_tokens"]


def test_who_asks_for_no_rounds_gets_none(server: Served) -> None:
    for more in ({}, {"fastspec": {}}, {"fastspec": {"rounds": False}}, {"fastspec": None}):
        status, answer = post(server, "/v1/completions", json.dumps({"prompt": "w5", "max_tokens": 4, **more}).encode())
        assert status == 200 and "fastspec" not in answer["choices"][0]
    for odd in (True, {"rounds": 1}, {"rounds": True, "more": True}, []):
        status, answer = post(server, "/v1/completions", json.dumps({"prompt": "w5", "fastspec": odd}).encode())
        assert status == 400 and "an object with rounds" in answer["error"]["message"], odd
    for path in ("/v1/responses", "/v1/messages"):
        body = {"input" if "resp" in path else "messages": "w5", "fastspec": {"rounds": True}, "max_tokens": 4}
        assert post(server, path, json.dumps(body).encode())[0] == 422
