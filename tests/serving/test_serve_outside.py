"""What a server shows of its speed, which fields it names where it refuses a request, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, post, served, serving
from helpers.serve_process import opened
from helpers.training import small_target

import fastspec
from fastspec.programs.serving.metrics import WINDOW, Rate
from fastspec.programs.serving.remote import Remote, left_alone_by_the_collector, run_rounds
from fastspec.programs.serving.wire import Wire

pytestmark = MARKS


def test_tokens_a_second_are_those_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fastspec.programs.serving.metrics.time", SimpleNamespace(monotonic=lambda: now))
    rate, seen = Rate(), []
    for count, share in ((5, 0.0), (3, 0.6), (0, 0.5), (0, 0.6)):
        now += share * WINDOW
        rate.add(count)
        seen.append(rate.value() * WINDOW)
    assert seen == [5, 8, 3, 0]


def test_refusals_name_the_field_that_a_client_has_given() -> None:
    """Private fields of a generation_config are nobody's to set; tokens that the model has not are told by the field
    that has them, however that is kept."""
    with fastspec.patched(small_target()) as model, served(model, assistant="autoregressive") as server:
        for more, named in (
            ({"generation_config": json.dumps({"_from_model_config": True})}, "_from_model_config"),
            ({"logit_bias": {"9999": 1}}, "logit_bias"),
            ({"generation_config": json.dumps({"repetition_penalty": 1.1})}, ""),
        ):
            given = {"model": NAME, "prompt": "w5", "max_tokens": 2, **more}
            status, said = post(server, "/v1/completions", json.dumps(given).encode())
            assert status == (400 if named else 200) and named in json.dumps(said), said


def test_a_server_needs_none_of_transformers_own() -> None:
    """Whose programs bring fastapi."""
    program = "import sys; sys.modules['fastapi'] = None; from fastspec.programs.serving import app"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=SECONDS)


def test_a_row_whose_client_has_gone_is_not_decoded_to_its_end() -> None:
    """In a process of its own, which has to be told. Rounds of 4 tokens at most would be 112 for an answer."""
    count, tokens = 8, 450
    with (
        Remote(partial(opened, rows=1, max_length=480, endless=True)) as batch,
        serving(batch, batch.tokenizer) as server,
    ):
        for _ in range(count):
            stream = server.client().completions.create(model=NAME, prompt="w5", max_tokens=tokens, stream=True)
            next(iter(stream))
            stream.close()
        server.wait(lambda: batch.running == batch.waiting == 0)
        assert server.metric("fastspec_row_rounds_total") < 0.75 * count * tokens / 4


def test_the_process_of_the_rounds_looks_after_its_parent_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, codes = threading.Event(), list[int]()
    monkeypatch.setattr(signal, "signal", lambda *given: None)  # of this process they are pytest's
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(join=lambda: None))
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or ended.set())

    def loading() -> Any:
        assert ended.wait(30), "nobody looked"
        raise ValueError("over")

    here, there = Pipe()
    run_rounds(here, loading)
    (failure,), _ = next(Wire(there).parcels())
    assert str(failure) == "over" and codes == [1]


def test_the_collector_looks_at_everything_again_once_the_rounds_are_over() -> None:
    with left_alone_by_the_collector():
        assert gc.get_freeze_count() > 100_000
    assert not gc.get_freeze_count()
    gc.freeze()  # as it was


@pytest.mark.slow
def test_the_process_of_the_rounds_ends_with_a_server_that_was_killed_while_it_loaded() -> None:
    program = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
        "from helpers.serve_process import loading\n"
        "from fastspec.programs.serving.remote import Remote\n"
        "Remote(loading)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        server.kill()
    end = time.monotonic() + SECONDS
    while _is_there(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_there(process: int) -> bool:
    """Whether a process runs, one that has ended and that nobody has waited for apart."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
