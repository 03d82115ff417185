"""The snippets of docs/guide/serving.md for the openai client and for uvicorn run as they stand, with a small model
behind their address."""

from __future__ import annotations

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
from helpers.grammars import TOKENIZER, terse
from helpers.models import tiny_head
from helpers.pages import ROOT, snippets
from helpers.serve import MARKS, openai, served, uvicorn
from helpers.training import save_with_tokenizer, small_target, small_tokenizer

import fastspec
from fastspec.programs.serving.app import PATHS
from fastspec.programs.serving.middleware import RequestMiddleware
from fastspec.programs.serving.requests import SAMPLING
from fastspec.programs.training.heads import save_head

pytestmark = MARKS
CLIENT, ROUNDS, STRUCTURED, PROGRAM, APART = [
    each.text for each in snippets(Path("docs/guide/serving.md")) if each.needs == {"clients"}
]
PAGE = (ROOT / "docs" / "guide" / "serving.md").read_text(encoding="utf-8")
MODEL, ADDRESS = "smollm2-135m-instruct", "http://127.0.0.1:8000/v1"


def lead_to(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pages' clients ask this server."""
    client = openai.OpenAI

    def here(base_url: str, **given: Any) -> Any:
        assert base_url == ADDRESS
        return client(base_url=f"{server.url}/v1", **given)

    monkeypatch.setattr(openai, "OpenAI", here)


def test_the_page_names_every_route_and_every_metric() -> None:
    with served(fastspec.patch(small_target()), assistant="nasd", name=MODEL) as server:
        told = re.findall(r"^# TYPE (\w+) ", server.get("/metrics"), re.MULTILINE)
    metrics = [name for name in told if not name.endswith("_created")]
    assert len(metrics) > 15
    for name in metrics:
        assert any(f"`{name.removeprefix(prefix)}" in PAGE for prefix in ("", "fastspec", "fastspec_stage")), name
    assert not [path for path in PATHS if f"`{path}" not in PAGE]


def test_the_comparison_has_what_agents_and_evaluations_send() -> None:
    table = PAGE.partition("\n## Beside other servers\n")[2].partition("\n## ")[0]
    fields = SAMPLING - {
        "generation_config",
        "structured_outputs",
        "price",
    }  # transformers' settings, vLLM's, a cascade's
    more = "echo", "n", "tool_choice", "parallel_tool_calls", "frequency_penalty", "presence_penalty", "stop", "timings"
    assert not [name for name in (*fields, *more) if f"`{name}" not in table]


def test_the_clients_snippet_prints_an_answer_as_it_comes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert MODEL in CLIENT
    with served(fastspec.patch(small_target(peak=0.15)), assistant="nasd", name=MODEL) as server:
        lead_to(server, monkeypatch)
        exec(compile(CLIENT, "docs/guide/serving.md", "exec"), {})
        whole = server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Why is the sky blue?"}], temperature=0
        )
    assert capsys.readouterr().out == whole.choices[0].message.content != ""


def test_the_rounds_snippet_prints_the_rounds_of_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with served(fastspec.patch(small_target(peak=0.15)), assistant="nasd", name=MODEL) as server:
        lead_to(server, monkeypatch)
        exec(compile(ROUNDS.replace("The capital of France is", "w5 w9"), "docs/guide/serving.md", "exec"), {})
        whole = server.client().completions.create(model=MODEL, prompt="w5 w9", temperature=0)
    lines = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    rounds = [literal_eval(pairs) for _, pairs in lines]
    assert "".join(text for each in rounds for text, _ in each) == whole.choices[0].text != ""
    assert {"accepted", "bonus"} <= {mark for each in rounds for _, mark in each} and int(lines[-1][0]) > 0


def test_the_structured_snippet_prints_what_its_class_holds(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages[0].content }}", raising=False)
    with served(fastspec.patch(terse()), assistant="nasd", name=MODEL, tokenizer=TOKENIZER) as server:
        lead_to(server, monkeypatch)
        exec(compile(STRUCTURED, "docs/guide/serving.md", "exec", dont_inherit=True), {"__name__": "page"})
    assert re.fullmatch(r"mood='(good|bad)' recommended=(True|False)\n", capsys.readouterr().out)


def test_the_programs_snippet_makes_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = small_target(), []
    fastspec.patch(model, eagle3=tiny_head(model))
    monkeypatch.setattr(uvicorn, "run", ran.append)
    exec(
        compile(PROGRAM, "docs/guide/serving.md", "exec"),
        {"fastspec": fastspec, "model": model, "tokenizer": small_tokenizer()},
    )
    assert [type(app) for app in ran] == [RequestMiddleware]


@pytest.mark.slow
def test_the_program_with_rounds_in_a_process_of_their_own_makes_a_server(tmp_path: Path) -> None:
    """As a script, with a small model and its head in the place of SmolLM2's."""
    model = small_target()
    save_with_tokenizer(model, tmp_path / "model")
    save_head(tiny_head(model, taps=(1, 2, 3)), tmp_path / "head", "a card")
    text = APART
    for form, folder in (("load_model({!r})", "model"), ("eagle3={!r}", "head")):
        meant = form.format(MODEL).replace("'", '"')
        assert meant in text
        text = text.replace(meant, form.format(str(tmp_path / folder)))
    assert "uvicorn.run(build_app(" in text
    (tmp_path / "server.py").write_text(text.replace("uvicorn.run(build_app(", "print(build_app("))
    done = subprocess.run([sys.executable, "server.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "RequestMiddleware object" in done.stdout, done.stderr
