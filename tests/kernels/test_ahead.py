"""Kernels are compiled before a program's first run: which, in how many processes, and what that leaves of the
program."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import Looked, stand_in
from helpers.generate import prompts, seer, shallow_model
from helpers.grammars import TOKENIZER, terse
from helpers.models import tiny_head, tiny_model
from helpers.processes import execute, spawn
from torch._subclasses.fake_tensor import FakeTensor

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation import capture, constraint
from fastspec.generation.constraint import unset_bits
from fastspec.kernels import ahead
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.conversions import pair_table
from fastspec.patches import backends
from fastspec.patches.assistants.fused import FusedDrafter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
SCRIPT = Path(__file__).parents[1] / "compile_ahead.py"
SMALL = fastspec.Eagle3(depth=2, top_k=2, total_tokens=6)


def rows_of(folder: Path, assistant: str, workers: int = 2) -> list[dict[str, Any]]:
    """What the script prints of a tiny model; in a process of its own, since Triton's interpreter is on in this one."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "FASTSPEC_PORTABLE")
    }
    environment |= {"TRITON_CACHE_DIR": str(folder), ahead.WORKERS: str(workers), "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), "90", "tiny", assistant]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]], compiled: int) -> None:
    """The programs' kernels were compiled, but for those of a prompt's choice and of what leads rounds; nothing
    without data is left, and a second look finds all of them."""
    *programs, last = rows
    assert sum(row["compiled"] for row in programs) >= compiled > 0 and set(last["outside"]) == {
        "_chunk_best_kernel",
        "_best_kernel",
        "_tree_input_kernel",
    }
    assert all(row["left"] == 0 and row["again"] == 0 for row in programs)
    assert [bool(row["said"]) for row in programs] == [row["compiled"] > 0 for row in programs]
    assert programs[0]["said"] == [f"compiling {programs[0]['compiled']} kernels, once for this machine"]


def test_a_call_s_kernels_compile_ahead(tmp_path):
    rows = rows_of(tmp_path / "cache", "autoregressive")
    check(rows, 12)
    made = [line.split() for line in (tmp_path / "cache.launchers").read_text().splitlines()]
    assert len(made) == sum(row["compiled"] for row in rows[:-1])  # and with every kernel what launches it
    assert str(rows[-1]["process"]) not in {process for process, _ in made}


@pytest.mark.slow
def test_a_draft_s_kernels_too(tmp_path):
    check(rows_of(tmp_path, "eagle3"), 20)
    assert not any(row["compiled"] for row in rows_of(tmp_path, "eagle3", workers=1)[:-1])
    check(rows_of(tmp_path / "other", "eagle3", workers=1), 20)


@pytest.mark.some("autoregressive", "Eagle3(depth=2, top_k=2, total_tokens=6, fused=None)-(3, 7)", "speculative")
@pytest.mark.parametrize(
    ("assistant", "lengths"),
    [("autoregressive", (5,)), ("nasd", (3, 7)), (SMALL, (5,)), (SMALL, (3, 7)), ("speculative", (3, 7))]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("autoregressive", (3, 7)), ("nasd", (5,)), ("speculative", (5,)))
    ],
    ids=str,
)
def test_a_look_leaves_nothing_behind(assistant, lengths, monkeypatch):
    """Every program is looked at before its first run, here without kernels; tokens stay, and so do the objects and all
    that tensors hold."""
    monkeypatch.setattr(ahead, "_warned", False)
    looked = []

    class Watched(Looked):
        def look(self, program: Any) -> None:
            held = [(each, each.clone()) for each in gc.get_objects() if type(each) is torch.Tensor]
            super().look(program)
            looked.append(program)
            assert not [each for each in gc.get_objects() if type(each) is FakeTensor]
            assert all(bool(((each == before) | (before != before)).all()) for each, before in held)

    stand_in(monkeypatch, Watched)
    model, inputs, options = shallow_model(), prompts(*lengths), {"do_sample": False, "max_new_tokens": 12}
    expected = model.generate(**inputs, **options).tolist()
    heads = {"eagle3": tiny_head(model), "speculative": tiny_model(num_hidden_layers=1)}
    with fastspec.patched(model, **heads), torch.inference_mode(len(lengths) == 1):
        assert model.generate(**inputs, **options, assistant=assistant).tolist() == expected
    assert len(looked) >= 2 and not ahead._warned


def test_a_look_at_choices_within_a_grammar_warns_of_nothing(monkeypatch):
    """In a tree of drafts, whose choices lie where the host brings others."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(ahead, "_warned", False)
    monkeypatch.setattr(constraint, "_without", lambda logits, kept: logits.masked_fill(kept, -torch.inf))  # as on CUDA
    looked, former = [], ahead._look
    monkeypatch.setattr(ahead, "_look", lambda *given: (looked.append(given[0]), former(*given)))
    stand_in(monkeypatch, Looked)
    model = terse()
    options = {
        **prompts(5),
        "do_sample": False,
        "max_new_tokens": 12,
        "logits_processor": [fastspec.Grammar(TOKENIZER, regex="[a-f]{20}")],
    }
    expected = model.generate(**options).tolist()
    with fastspec.patched(model, eagle3=seer(model)):
        assert model.generate(**options, assistant=SMALL).tolist() == expected
    assert any("choices" in str(program) for program in looked) and not ahead._warned


class Holder:
    """An object of fastspec's, as far as a look can tell."""

    __module__ = "fastspec.generation.tests"

    def __init__(self) -> None:
        self.buffer, self.rows, self.kept, self.inner = torch.zeros(2), [1], {"a": 1}, None

    def program(self, other: Any) -> None:
        self.buffer = self.buffer + 1
        self.rows.append(self.buffer)
        self.kept["b"] = other.inner = self.buffer
        self.new = self.buffer


class Drafter(Holder):
    """One where a drafter with a kernel of its own lives."""

    __module__ = FusedDrafter.__module__


class Server(Holder):
    """One that another thread changes."""

    __module__ = "fastspec.patches.server"


def test_what_another_thread_may_change_meanwhile_is_left():
    server = Server()
    ahead._look(capture.partial(server.program, Holder()), ahead.Collector())
    assert hasattr(server, "new")


@pytest.mark.parametrize("kind", [Holder, Drafter])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_look_sets_on_objects_is_put_back(fails, kind, monkeypatch):
    monkeypatch.setattr(ahead, "_warned", True)
    holder, other = kind(), Holder()
    buffer = holder.buffer

    def program() -> None:
        holder.program(other)
        assert type(other.inner) is FakeTensor and not fails

    for each in (program, capture.partial(holder.program, other)):
        ahead._look(each, ahead.Collector())
        assert holder.buffer is buffer and buffer.tolist() == [0, 0] and other.inner is None
        assert holder.rows == [1] and holder.kept == {"a": 1} and not hasattr(holder, "new")


def test_a_look_holds_no_tensor():
    """Buffers are freed with what holds them, without a garbage collection; in a process of its own, for the first
    look."""
    code = """
import gc, weakref
import torch
from fastspec.kernels import ahead
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.conversions import pair_table
gc.collect()
gc.disable()
def look():
    x, y = torch.zeros(5, 5), torch.nn.Parameter(torch.ones(5, 5))
    with torch.no_grad():
        ahead._look(lambda: (x[1:3].add_(1) @ y).sum(), ahead.Collector())
    return [weakref.ref(each) for each in (x, y)]
assert all(found() is None for found in look())
"""
    spawn(execute, (code,), 1)


@pytest.mark.parametrize("inferring", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.add_(1),
        lambda x, y: x.sub_(y),
        lambda x, y: x.mul_(3).clamp_(max=5),
        lambda x, y: x.floor_divide_(2),
        lambda x, y: x.copy_(y),
        lambda x, y: x.__setitem__(0, y[0]),
        lambda x, y: x[1:].add_(y[1:]),
        lambda x, y: torch.add(x, y, out=x),
        lambda x, y: torch._foreach_add_([x], [y]),
        lambda x, y: x.zero_(),
    ],
)
def test_a_look_writes_no_tensor(write, inferring):
    """A counter of rounds on the device, for one, which the host counts too."""
    with torch.inference_mode(inferring):
        x, y = torch.full((3,), 7.0), torch.full((3,), 2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ahead._look(lambda: write(x, y), ahead.Collector())
        assert x.tolist() == [7.0] * 3 and y.tolist() == [2.0] * 3


def test_tables_that_a_look_makes_first_have_data():
    """Numbers of codes, pairs of them, and bits of masks are kept between calls: a look is the first that asks."""
    kind, here = replace(reference.NF4, less=1.0), torch.device("cpu", 0)  # which nobody has asked for
    for make, given in (
        (reference.table, (kind, here)),
        (pair_table, (kind, torch.bfloat16, here)),
        (unset_bits, (here,)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ahead._look(lambda make=make, given=given: make(*given), ahead.Collector())
        found = make(*given)
        assert type(found) is torch.Tensor and make(*given) is found


def test_what_cannot_be_looked_at_compiles_as_it_runs(monkeypatch):
    monkeypatch.setattr(ahead, "_warned", False)
    x = torch.ones(3)
    with pytest.warns(UserWarning, match=r"one after another.*DataDependent"):
        assert ahead.compile_ahead(lambda: x.sum().item(), pytest.fail) == 0
    assert ahead.compile_ahead(lambda: x.sum().item(), pytest.fail) == 0  # said once


def jobs(folder: Path, count: int, run: Any = None) -> list[ahead.Job]:
    def write(number: int) -> None:
        if run is not None:
            run(number)
        with (folder / str(number)).open("a") as file:
            file.write(f"{os.getpid()}\n")

    return [ahead.Job(number, lambda number=number: write(number)) for number in range(count)]


def test_every_job_is_done_once_and_elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    ahead._compile(jobs(tmp_path, 300), 3)
    lines = [path.read_text().split() for path in tmp_path.iterdir()]
    assert len(lines) == 300 and {len(each) for each in lines} == {1}
    workers = {each[0] for each in lines}
    assert 1 <= len(workers) <= 3 and str(os.getpid()) not in workers
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_process_that_fails_leaves_its_jobs_to_the_caller(tmp_path):
    def fail(number: int) -> None:
        if number == 1:
            raise ValueError("no such instruction")

    made = jobs(tmp_path, 3, fail)
    ahead._compile(made, 2)
    for job in made:
        job.finish()
    assert [job.future.exception() is None for job in made] == [True, False, True]
    with pytest.raises(ValueError, match="no such instruction"):
        made[1].future.result()


def test_processes_that_hang_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE", 0.2)
    with pytest.warns(UserWarning, match=r"2 processes that compile kernels were ended after 0.2 s"):
        ahead._compile(jobs(tmp_path, 2, lambda number: time.sleep(60)), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "wanted"), [("1", 1), ("0", 0), ("40", 40), ("", None)])
def test_the_number_of_processes_is_a_setting(given, wanted, monkeypatch):
    monkeypatch.setenv(ahead.WORKERS, given)
    assert ahead.worker_setting() == wanted if given else 1 <= ahead.worker_setting() <= ahead.MOST_WORKERS
    monkeypatch.setenv(ahead.WORKERS, "many")
    with pytest.raises(Unsupported, match=r"FASTSPEC_COMPILE_WORKERS='many'"):
        ahead.worker_setting()


def test_a_triton_without_its_private_parts_compiles_at_the_first_launch():
    """The backend is made all the same, and a program is not looked at; in a process of its own, for the imports."""
    code = """
import sys, warnings
import torch
from triton.runtime import _async_compile
assert "fastspec.kernels.ahead" not in sys.modules
del _async_compile.active_mode
from fastspec.kernels import ahead
from fastspec.patches.backends import triton_ops
assert triton_ops().name == "triton"
with warnings.catch_warnings(record=True) as told:
    looked = lambda: sys.exit("looked at")
    assert ahead.compile_ahead(looked, print) == ahead.compile_ahead(looked, print) == 0
[message] = [str(each.message) for each in told]
assert "at their first launch" in message and "_async_compile" in message, message
"""
    spawn(execute, (code,), 1)


def test_the_installed_triton_has_all_private_parts():
    assert ahead.LACKS is None


def test_with_no_process_nothing_is_looked_at(monkeypatch):
    monkeypatch.setenv(ahead.WORKERS, "0")
    assert ahead.compile_ahead(lambda: pytest.fail("looked at"), pytest.fail) == 0


def test_a_program_is_prepared_once_and_not_again_in_larger_buffers(monkeypatch):
    monkeypatch.setattr(capture, "FORESIGHT", capture.Foresight())
    done: list[str] = []
    capture.FORESIGHT.prepare = lambda program: done.append("prepared") or 1
    captured: capture.Captured[None] = capture.Captured()
    captured(lambda: done.append("run"), 1)
    captured(lambda: done.append("run"), 2)
    assert done == ["prepared", "run", "run"]
    capture.Captured[None]()(lambda: done.append("another"), 1)
    assert done[3:] == ["prepared", "another"]


def test_programs_are_looked_through_while_kernels_are_missing(monkeypatch):
    """Until some in a row lacked none, and again behind a run that took as long as one that compiles."""
    monkeypatch.setattr(capture, "FORESIGHT", capture.Foresight())
    looked: list[int] = []
    missing = iter([3, 0, 0, 2, 0, 0, 0, 0, 0])
    capture.FORESIGHT.prepare = lambda program: looked.append(program()) or next(missing)
    for number in range(10):
        capture.Captured[int]()(lambda number=number: number, 1)
    assert looked == list(range(4 + capture.UNNEEDED))
    seconds = iter([0.0, 9.0])
    monkeypatch.setattr(capture.time, "perf_counter", lambda: next(seconds, 9.0))
    capture.FORESIGHT.first_run(lambda: 10, True)
    assert capture.FORESIGHT.first_run(lambda: 11, True) == 11 and looked[-1] == 11 and 10 not in looked


def test_the_backend_compiles_ahead_where_there_is_a_device(monkeypatch):
    monkeypatch.setattr(backends, "FORESIGHT", capture.Foresight())
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        backends.triton_ops.__wrapped__()
        assert (backends.FORESIGHT.prepare is not None) == there
    assert backends.FORESIGHT.prepare.func is ahead.compile_ahead
