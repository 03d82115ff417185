"""What first runs and captures take is told by a call's statistics, and is small."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from helpers.devices import CUDA
from helpers.generate import MAKERS, TREE, prompts
from helpers.models import tiny_model
from helpers.threads import in_threads

import fastspec
from fastspec.generation import capture
from fastspec.patches.backends import TORCH
from fastspec.patches.session import session_of

NAP = 0.02


class Graph:
    """A graph of which only the capture and the replay behind it happen, which is what ran while it was captured."""

    def replay(self) -> None:
        pass


@contextmanager
def slow(graph: Graph, stream: None, capture_error_mode: str) -> Iterator[None]:
    """A capture that takes NAP longer, of which other threads do not hear."""
    assert capture_error_mode == "thread_local"
    time.sleep(NAP)
    yield


def test_a_call_says_what_its_captures_took(monkeypatch) -> None:
    """Three new tokens: the prompt's pass and the first round are first runs, the second round is captured. The report
    says what memory graphs take, until they are freed."""
    taken = iter((5 << 20, 12 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(taken))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(capture, "_graphs", WeakSet())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", slow)
    monkeypatch.setattr(capture, "_stream", lambda: None)
    ops = replace(TORCH, name="stand-in", captures=True, packs=True)
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: ops)
    model, inputs = tiny_model(), prompts(9)
    options = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    fastspec.patch(model)
    assert model.generate(**inputs, **options, assistant="autoregressive").tolist() == expected.tolist()
    last = fastspec.report(model).last
    assert last.rounds == 2 and last.replays == 1
    assert NAP <= last.capture_seconds < last.seconds  # one capture, and the time of what ran meanwhile
    assert 0 < last.first_run_seconds < last.seconds - last.capture_seconds
    told = fastspec.report(model)
    assert f"captures {last.capture_seconds:.2f} s" in str(told)
    assert told.graph_bytes == 7 << 20 and "graphs on cpu: 7 MiB" in str(told)
    session_of(model).engines.clear()
    assert fastspec.report(model).graph_bytes == 0 and "graphs on" not in str(fastspec.report(model))


def test_a_call_that_captures_nothing_says_so() -> None:
    model = tiny_model()
    fastspec.patch(model)
    model.generate(**prompts(9), do_sample=False, max_new_tokens=4, assistant="autoregressive")
    report = fastspec.report(model)
    assert report.last.first_run_seconds == report.last.capture_seconds == 0.0 and "captures" not in str(report)


def test_a_thread_has_seconds_of_its_own() -> None:
    before, seen = capture.SPENT.captures, []

    def run() -> None:
        with capture.SPENT.on("captures"):
            time.sleep(NAP)
        seen.append(capture.SPENT.captures)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen[0] >= NAP and capture.SPENT.captures == before


def test_one_capture_runs_at_a_time_without_a_garbage_collection(monkeypatch) -> None:
    """Of all threads, whichever models they decode with."""
    inside: list[int] = []
    most: list[int] = []

    @contextmanager
    def counted(graph: Graph, stream: None, capture_error_mode: str) -> Iterator[None]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(NAP)
        yield
        inside.pop()

    def capture_one(_: int) -> None:
        with capture.recorded(Graph()):  # type: ignore[arg-type]
            assert not gc.isenabled()

    monkeypatch.setattr(torch.cuda, "graph", counted)
    monkeypatch.setattr(capture, "_stream", lambda: None)
    in_threads(capture_one, 4)
    assert most == [1] * 4 and gc.isenabled()


@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=["autoregressive", "eagle3", "nasd"])
@pytest.mark.parametrize("device", [CUDA])
def test_capturing_takes_less_than_two_seconds(assistant, device) -> None:
    """With compiled kernels: the first run and the capture of the prompt's passes and of the rounds, on a small
    model."""
    target, head = MAKERS["bigram"]
    model = target().to(device)
    fastspec.patch(model, eagle3=head(model).to(device))
    inputs = {name: tensor.to(device) for name, tensor in prompts(9).items()}
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "assistant": assistant}
    for _ in range(2):  # compiles
        model.generate(**inputs, **options)
    session_of(model).engines.clear()
    for _ in range(2):  # what runs once in a call, as the prompt's pass does, is captured by the next
        model.generate(**inputs, **options)
        made = fastspec.report(model).last
        assert made.capture_seconds > 0 and made.first_run_seconds + made.capture_seconds < 2.0
    model.generate(**inputs, **options)
    found = fastspec.report(model).last
    assert found.first_run_seconds == found.capture_seconds == 0.0
    assert (
        found.replays > 0 or assistant == "nasd"
    )  # whose host drafts: its graphs are not whole rounds, and are not counted
