"""A server whose rounds run in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, Served, ask_all, hold_as_alone, openai, post, requests, serving
from helpers.serve_process import opened, unnamed
from helpers.training import small_target

from fastspec.errors import FastSpecError, Unsupported
from fastspec.programs.serving import remote
from fastspec.programs.serving.remote import BatchEnd, Remote

pytestmark = MARKS
GIVEN = {"model": NAME, "prompt": "w5", "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A process may take as long as it needs to end: one that a server kills for its users' sake has another status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PATIENCE", SECONDS)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Remote(opened) as batch, serving(batch, batch.tokenizer) as running:
        yield running
    assert batch.process.exitcode == 0 and not batch.alive


@pytest.fixture(scope="module")
def endless() -> Iterator[Served]:
    with (
        Remote(partial(opened, rows=1, max_length=480, endless=True)) as batch,
        serving(batch, batch.tokenizer) as running,
    ):
        yield running
    assert batch.process.exitcode == 0


def test_many_requests_give_what_generate_gives(server: Served) -> None:
    """Chats and completions, streamed and not, greedy and sampled, sixteen in flight; and the page of metrics is that
    of the process."""
    asked = requests(24, 2)
    hold_as_alone(small_target(peak=0.15), asked, ask_all(server, asked))
    server.wait(lambda: server.batch.running == server.batch.waiting == 0)
    assert server.metric("fastspec_acceptance_length") > 1 and server.metric("fastspec_rows") == 4
    server.wait(
        lambda: server.metric("fastspec_generated_tokens_total") > server.metric("fastspec_accepted_tokens_total") > 0
    )
    ended = [f'fastspec_requests_total{{outcome="{outcome}"}}' for outcome in ("stop", "length", "cancelled")]
    server.wait(lambda: sum(map(server.metric, ended)) == 24)
    assert server.metric("fastspec_time_to_first_token_seconds_count") == 24 and server.metric(ended[2]) == 0
    assert server.metric("fastspec_prompt_tokens_total") > 24


def test_stop_strings_are_made_where_no_round_waits_and_sent_once(
    endless: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    post_ = endless.batch.wire.post
    monkeypatch.setattr(endless.batch.wire, "post", lambda message: sent.append(message) or post_(message))
    monkeypatch.setattr(remote, "TOLD", 2)
    text = endless.client().completions.create(**GIVEN, max_tokens=12).choices[0].text.split()
    for word in (text[3], text[3], text[5], text[7], text[3]):  # the first is forgotten behind the third
        answer = endless.client().completions.create(**GIVEN, max_tokens=12, stop=word)
        assert answer.choices[0].text.split() == text[: text.index(word)] and answer.choices[0].finish_reason == "stop"
    told = [call.keywords["strings"] for call in sent if getattr(call, "func", None) is BatchEnd.know]
    assert told == [(text[at],) for at in (3, 5, 7, 3)]


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_batch_refuses_is_a_status_and_no_stream(server: Served, stream: bool) -> None:
    """The other process says so, after the request was handed to it."""
    before = server.metric('fastspec_requests_total{outcome="refused"}')
    settings = json.dumps({"do_sample": True, "temperature": 1e-38})
    with pytest.raises(openai.BadRequestError, match="too near 0"):
        server.client().completions.create(
            model=NAME, prompt="w5", max_tokens=4, stream=stream, extra_body={"generation_config": settings}
        )
    assert server.metric('fastspec_requests_total{outcome="refused"}') == before + 1 and server.batch.waiting == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_its_row(endless: Served, stream: bool) -> None:
    done = threading.Event()

    def leave() -> None:
        client = endless.client().with_options(timeout=0.5 if not stream else SECONDS)
        try:
            found = client.completions.create(**GIVEN, max_tokens=450, stream=stream)
            next(iter(found))
            found.close()
        except openai.APITimeoutError:
            pass
        done.set()

    thread = threading.Thread(target=leave)
    thread.start()
    endless.wait(lambda: done.is_set() and endless.batch.running == endless.batch.waiting == 0)
    thread.join()
    assert endless.client().completions.create(**GIVEN, max_tokens=5).usage.completion_tokens == 5


def test_clients_that_go_at_any_moment_leave_nothing_that_is_decoded(endless: Served) -> None:
    """Before their prompts are taken, before a stream has begun, and behind that: none is decoded to its end, which 450
    tokens are."""
    host, port = endless.url.removeprefix("http://").split(":")
    before, ended = (
        endless.metric(name)
        for name in ("fastspec_generated_tokens_total", 'fastspec_requests_total{outcome="length"}')
    )
    sent = json.dumps({**GIVEN, "max_tokens": 450, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(sent)}\r\n\r\n"
    )
    for number in range(24):
        with socket.create_connection((host, int(port)), SECONDS) as client:
            client.sendall(head.encode() + sent)
            time.sleep(0.002 * number)
    endless.wait(lambda: endless.batch.running == endless.batch.waiting == 0)
    assert endless.metric('fastspec_requests_total{outcome="length"}') == ended
    assert endless.metric("fastspec_generated_tokens_total") - before < 12 * 450


def test_signals_for_all_processes_leave_the_rounds_to_the_server(endless: Served) -> None:
    """A terminal sends SIGINT to both, a supervisor may send SIGTERM: who runs has the server's time to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(endless.batch.process.pid, number)
    assert endless.client().completions.create(**GIVEN, max_tokens=5).usage.completion_tokens == 5


def test_a_round_that_fails_and_a_process_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """The requests of a round are told its error, by name where it cannot be pickled; the log has its trace in the
    other process. Those that a killed process leaves are told that, and so is whoever asks for the server's health."""
    with (
        Remote(partial(opened, rows=1, max_length=480, endless=True, fails="once")) as batch,
        serving(batch, batch.tokenizer) as server,
    ):
        with pytest.raises(openai.InternalServerError, match="Odd: 1 and 2"):
            server.client().completions.create(**GIVEN, max_tokens=4)
        assert "in failing" in caplog.text and json.loads(server.get("/health")) == {"status": "ok"}
        assert (
            server.client().completions.create(**GIVEN, max_tokens=4).usage.completion_tokens == 4
        )  # by rounds that were made anew
        told: list[Any] = []

        def ask(stream: bool) -> None:
            try:
                told.append(list(server.client().completions.create(**GIVEN, max_tokens=450, stream=stream)))
            except openai.APIError as error:
                told.append(error)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        server.wait(lambda: batch.running == batch.waiting == 1)
        os.kill(batch.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(SECONDS)
        assert len(told) == 2 and all(isinstance(error, openai.APIError) for error in told)
        assert any("the process of the rounds has ended with status -9" in str(error) for error in told)
        assert not batch.alive and post(server, "/v1/completions", json.dumps(GIVEN).encode())[0] == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/health")


@pytest.mark.slow
def test_rounds_that_fail_for_good_are_unhealthy() -> None:
    with Remote(partial(opened, fails="for good")) as batch, serving(batch, batch.tokenizer) as server:
        with pytest.raises(openai.InternalServerError):
            server.client().completions.create(**GIVEN, max_tokens=4)
        server.wait(lambda: not batch.alive)
        assert post(server, "/v1/completions", json.dumps(GIVEN).encode())[0] == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/health")


def test_a_batch_that_cannot_be_opened_raises_what_it_raised() -> None:
    with pytest.raises(Unsupported, match="no such model") as told:
        Remote(partial(opened, fails="opening"))
    assert "in opened" in str(told.value.__cause__)


@pytest.mark.slow
def test_a_process_that_ends_or_cannot_say_what_it_has_opened_is_told():
    with pytest.raises(FastSpecError, match="ended with status 3 before its batch was open"):
        Remote(partial(os._exit, 3))
    with pytest.raises(ValueError, match="cannot be handed to another process"):
        Remote(unnamed)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_a_program_that_closes_nothing_ends_in_a_folder_of_unlucky_names(tmp_path: Path) -> None:
    """Its other process looks for modules where the program does, and not in the current folder before."""
    for name in ("multiprocessing", "signal", "pickle", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('unlucky')")
    program = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
        "from helpers.serve_process import opened\n"
        "from fastspec.programs.serving.remote import Remote\n"
        "batch = Remote(opened)\n"
        "print(batch.alive)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
