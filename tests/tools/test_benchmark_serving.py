"""The benchmark of servers starts them, loads them in every way, and ends them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
FOLDER = Path(__file__).parents[2] / "benchmarks"
SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Server(BaseHTTPRequestHandler):
    def log_message(self, *args): ...

    asked = 0

    def do_GET(self):
        told = self.path == "/metrics" and sys.argv[2] != ""
        self.send_response(200 if told or self.path in ("/health", "/v1/models") else 404)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(b'{"data": [{"id": "/folder/m"}]}')
        if told:
            for name, count in (("drafts", 2), ("accepted_tokens", 3)):
                name = "vllm:spec_decode_num_" + name
                text = f"# TYPE {name} counter\\n" + "".join(f'{name}_total{{engine="{e}"}} {Server.asked * count}\\n' for e in "01")
                self.wfile.write(text.encode())
            name = "fastspec_stage_requests"
            rows = [("small", "answered", 1), ("small", "sent_on", 3), ("large", "answered", 3)]
            text = "".join(f'{name}_total{{stage="{s}",outcome="{o}"}} {Server.asked * c}\\n' for s, o, c in rows)
            self.wfile.write(f"# TYPE {name} counter\\n{text}".encode())

    def do_POST(self):
        Server.asked += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "/folder/m":
            self.send_error(400)
        text = asked["messages"][-1]["content"].split("\\n")[-1][: asked["max_tokens"]] + sys.argv[2]
        if "response_format" in asked and sys.argv[2] == "":
            text = '{"title": "' + text[:4] + '", "mood": "bad"}'
        usage = {"completion_tokens": len(text), "prompt_tokens": 1, "total_tokens": 1 + len(text)}
        common = {"id": "a", "created": 1, "model": "m"}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
        self.end_headers()
        if not asked.get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            self.wfile.write(json.dumps({**common, "object": "chat.completion", "choices": [choice], "usage": usage}).encode())
            return
        for place, letter in enumerate(text):
            delta = {"index": 0, "delta": {"content": letter}, "finish_reason": None}
            chunk = {**common, "object": "chat.completion.chunk", "choices": [delta]}
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        self.wfile.write(f"data: {json.dumps({**common, 'object': 'chat.completion.chunk', 'choices': [], 'usage': usage})}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

open(sys.argv[3], "a").write(f"{os.getpid()}\\n")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""  # noqa: E501


@pytest.fixture
def serving(monkeypatch):
    """The script as a module, with those beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("serving_script", FOLDER / "serving.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serving_script", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path):
    """(the server's script, prompts, what it notes its process in)."""
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    prompts = [{"question_id": number, "category": "a", "turns": [f"prompt {number}"]} for number in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    return tmp_path / "server.py", tmp_path / "prompts.jsonl", tmp_path / "pids"


def test_every_way_and_load_of_servers_that_are_started(serving, files, tmp_path):
    script, prompts, pids = files
    command = f"{sys.executable} {script} {{port}}"
    out = tmp_path / "rows.jsonl"
    serving.main(
        [
            "--start",
            f"one={command} '' {pids}",
            "--start",
            f"other={command} ' and more' {pids}",
            "--model",
            "m",
            "--prompts",
            str(prompts),
            "--ways",
            "streamed",
            "whole",
            "long",
            "--long",
            "8",
            "--in-flight",
            "1",
            "3",
            "--requests",
            "4",
            "--max-tokens",
            "7",
            "--out",
            str(out),
        ]
    )
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["server"], row["in_flight"], row["requests"]) for row in rows] == 3 * [
        ("one", 1, 6),
        ("other", 1, 6),
        ("one", 3, 18),
        ("other", 3, 18),
    ]
    assert [(row["streamed"], row["long"]) for row in rows] == [(True, 0)] * 4 + [(False, 0)] * 4 + [(True, 8)] * 4
    for row in rows:
        mine = row["server"] == "one"
        assert (
            row["equal"] == mine
            and row["new_tokens"] == row["requests"] * (7 if mine else 16)
            and row["tokens_per_second"] > 0
        )
        assert row["acceptance_length"] == (None if mine else 2.5)
        assert row["stages"] == (None if mine else {"small": 0.25, "large": 0.75})
        assert 0 < row["answer_ms"][1] <= row["answer_95_ms"] <= 1e3 * row["seconds"]
        assert row["first_token_ms"][1] <= row["first_token_95_ms"] <= row["answer_95_ms"]
        assert (row["first_token_ms"][1] > 0) == row["streamed"] and row["ready_s"] > 0
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_chats_of_ten_turns_and_answers_by_a_schema(serving, files, tmp_path):
    script, prompts, pids = files
    out = tmp_path / "rows.jsonl"
    command = f"{sys.executable} {script} {{port}}"
    serving.main(
        [
            *("--start", f"one={command} '' {pids}", "--start", f"other={command} ' and more' {pids}"),
            *("--model", "m", "--prompts", str(prompts), "--ways", "turns", "schema", "--long", "40"),
            *("--in-flight", "1", "3", "--requests", "4", "--max-tokens", "7", "--out", str(out)),
        ]
    )
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    told = [(row["way"], row["server"], row["in_flight"], row["requests"], row["streamed"]) for row in rows]
    servers = "one", "other"
    assert told == [
        *(("turns", name, in_flight, 10 * in_flight, True) for in_flight in (1, 3) for name in servers),
        *(("schema", name, in_flight, 6 * in_flight, False) for in_flight in (1, 3) for name in servers),
    ]
    for row in rows:
        mine = row["server"] == "one"
        assert row.get("valid") == ({True: 1.0, False: 0.0}[mine] if row["way"] == "schema" else None)
        assert len(row.get("first_token_by_turn_ms", ())) == (10 if row["way"] == "turns" else 0)
        assert row["equal"] == mine and all(value > 0 for value in row.get("first_token_by_turn_ms", ()))


def test_a_chat_goes_on_from_what_was_answered(serving, monkeypatch):
    """And no two texts begin alike, so that nothing but a chat's own turns is known to a server."""
    asked = []

    async def ask(client, model, messages, count, way):
        asked.append([message["content"] for message in messages])
        return serving.Answer(0.0, f"answer to {messages[-1]['content']}")

    monkeypatch.setattr(serving, "ask", ask)
    turns = [f"turn {number}" for number in range(20)]
    answers, _ = serving.asyncio.run(serving.load("http://127.0.0.1:1/v1", "m", turns, 1, 5, "turns"))
    assert [answer.text for answer in answers] == [f"answer to {turn}" for turn in turns]
    assert asked[1] == ["turn 0", "answer to turn 0", "turn 1"] and asked[10] == ["turn 10"] and len(asked[19]) == 19


def test_the_package_looks_through_no_messages(serving, monkeypatch):
    """What it does before it sends them would count as the server's time, and grow with a chat."""
    looked = []
    transform = openai.resources.chat.completions.completions.async_maybe_transform

    def noting(data, kind):
        looked.append(data["messages"])
        return transform(data, kind)

    monkeypatch.setattr(openai.resources.chat.completions.completions, "async_maybe_transform", noting)
    with pytest.raises(openai.APIConnectionError):
        serving.asyncio.run(serving.load("http://127.0.0.1:1/v1", "m", ["a"], 1, 5))
    assert looked == [[]]


def test_texts_of_chats_have_words_before_each_turn(serving, files):
    found = serving.texts(str(files[1]), 20, "turns", 40, "warm")
    assert len({text.split(" item ")[0] for text in found}) == 20 and all(len(text.split()) == 9 for text in found)
    assert serving.texts(str(files[1]), 20, "schema", 40, "8 0")[:6:5] == [
        "0 schema 8 0\nprompt 0",
        "5 schema 8 0\nprompt 0",
    ]
    long = serving.texts(str(files[1]), 20, "long", 40, "warm")
    assert [len(text.split()) for text in long] == [*[5] * 9, 45, *[5] * 9, 45]


@pytest.mark.parametrize("parts", [1, 3])
def test_every_load_has_texts_of_its_own_the_same_for_all_servers(serving, files, monkeypatch, parts):
    """So that no server's cache of prefixes knows a prompt, whatever was asked before."""
    asked: dict[str, list[str]] = {"one": [], "other": []}

    turns = list[str]()

    async def load(url, model, prompts, in_flight, count, way):
        asked[url] += prompts
        turns.append(url)
        assert way != "turns" or len(prompts) % 10 == 0  # whole chats
        return [serving.Answer(0.0, text, 1, [1.0], 2.0) for text in prompts], 1.0

    for name, found in (("load", load), ("name_at", str), ("counted", lambda url: {})):
        monkeypatch.setattr(serving, name, found)
    given = serving.argparse.Namespace(
        ways=["whole", "turns"], in_flight=[2, 3, 2], requests=4, max_tokens=7, long=40, note="", model="m", parts=parts
    )
    given.prompts = str(files[1])
    rows = list(serving.rows_of(given, {name: serving.Started(name) for name in asked}))
    assert asked["one"] == asked["other"] and all(row["equal"] == 1 for row in rows)
    firsts = [text.split("\n")[0] for text in asked["one"]]
    assert len({*firsts}) == len(firsts) == 20 + sum(row["requests"] for row in rows) // 2
    assert turns == ["one", "other"] * (len(turns) // 2) and (len(turns) > 16) == (parts > 1)
    assert {row["seconds"] for row in rows} == ({1.0} if parts == 1 else {2.0, 3.0})


def test_a_server_that_ends_or_is_never_ready_is_told_with_its_own_words(serving, files):
    script, prompts, pids = files
    given = ["--model", "m", "--prompts", str(prompts)]
    with pytest.raises(SystemExit, match=r"(?s)bad ended with status 3.*no such model"):
        serving.main(
            [
                *given,
                "--start",
                f"good={sys.executable} {script} {{port}} '' {pids}",
                "--start",
                f"bad={sys.executable} -c 'import sys; print(\"no such model\"); sys.exit(3)'",
            ]
        )
    with pytest.raises(SystemExit, match=r"slow was not ready within 0.5 s"):
        serving.main(
            [*given, "--patience", "0.5", "--start", f"slow={sys.executable} -c 'import time; time.sleep(60)'"]
        )
    for pid in map(int, pids.read_text().split() if pids.exists() else []):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(SystemExit):
        serving.main(given)


@pytest.mark.slow
def test_servers_end_with_a_benchmark_that_is_told_to(files):
    script, prompts, pids = files
    start = (
        f"one={sys.executable} {script} {{port}} '' {pids}",
        f"never={sys.executable} -c 'import time; time.sleep(600)'",
    )
    command = [sys.executable, FOLDER / "serving.py", "--model", "m", "--prompts", prompts, "--start", start[0]]
    process = subprocess.Popen([*command, "--start", start[1]])
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_a_command_gets_the_folders_of_the_model_and_of_its_head(serving, files, tmp_path, monkeypatch):
    script, _, pids = files
    beside = serving
    monkeypatch.setattr(beside, "load_model", lambda name, dtype: (name, "tokenizer"))
    monkeypatch.setattr(beside, "saved", lambda name, model, tokenizer: contextlib.nullcontext(f"/folder of {model}"))
    monkeypatch.setattr(beside, "find_head", lambda name: f"/head of {name}")
    with beside.started([f"one={sys.executable} {script} {{port}} '{{model}}, {{head}}' {pids}"], "m", 30) as found:
        (answer,), _ = serving.asyncio.run(serving.load(found["one"].url, "/folder/m", ["prompt"], 1, 0))
    assert answer.text == "/folder of m, /head of m"
