"""What `backend="auto"` is on the CPU: the C++ kernels where they are built and pass, else plain torch and the
reason."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.errors import Unsupported
from fastspec.files import cache_folder
from fastspec.kernels.native import build
from fastspec.patches import backends, on_cpu

needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


@pytest.fixture(scope="module")
def library() -> bytes:
    """The compiled library, for the tests that are not about compiling."""
    assert not isinstance(backends.cpp_native(), str)
    return (cache_folder() / "kernels" / build.library_name()).read_bytes()


@pytest.fixture
def compiled(library, nothing_known, tmp_path):
    """The library is there, and nothing is known of it."""
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (folder / build.library_name()).write_bytes(library)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """As in a new process on a new machine."""
    monkeypatch.delenv("FASTSPEC_CPU")
    monkeypatch.setattr(on_cpu, "_tried", {})
    monkeypatch.setattr("fastspec.patches.checks.self_check._known", {})
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path / "cache"))
    backends.cpp_ops.cache_clear()
    yield
    backends.cpp_ops.cache_clear()


def chosen(model) -> fastspec.Report:
    """What a patched model reports; it is unpatched again."""
    with fastspec.patched(model):
        return fastspec.report(model)


@needs_compiler
def test_a_compiler_is_enough_for_the_kernels(capsys, monkeypatch):
    """They are compiled and checked once, with a line on stderr for each, and the model says what it says without.
    Without optimisation, which the library of the other tests has."""
    compile = build.subprocess.run
    monkeypatch.setattr(build.subprocess, "run", lambda command, **given: compile([*command, "-O0"], **given))
    plain, model = tiny_model(), tiny_model()
    fastspec.patch(model, eagle3=tiny_head(model))
    inputs = prompts(9)
    want = plain.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=TREE), want)
    report = fastspec.report(model)
    assert (report.backend, report.why_torch) == ("cpp", None) and "plain torch" not in str(report)
    told = capsys.readouterr().err
    assert told.count("compiling the kernels of the CPU") == 1
    assert [told.count(f"in {dtype}, once") for dtype in ("float32", "bfloat16")] == [
        1,
        1,
    ]  # the model's, and the head's
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    monkeypatch.setattr(on_cpu, "_tried", {})  # another process, the same folder
    assert chosen(tiny_model()).backend == "cpp" and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: tiny_model().half(), "the C++ kernels compute in float32 and bfloat16, and the model is in float16"),
        (lambda: tiny_model("gpt2"), "this one runs in generic mode"),
    ],
)
def test_models_that_they_do_not_take_run_plain_torch(model, why):
    report = chosen(model())
    assert (
        report.backend.startswith("torch")
        and why in report.why_torch
        and f"plain torch on the CPU: {report.why_torch}" in str(report)
    )


def test_the_setting_keeps_plain_torch(monkeypatch):
    monkeypatch.setenv("FASTSPEC_CPU", "torch")
    report = chosen(tiny_model())
    assert report.backend.startswith("torch") and report.why_torch == "FASTSPEC_CPU=torch in the environment"
    monkeypatch.setenv("FASTSPEC_CPU", "cpp")
    with pytest.raises(Unsupported, match="FASTSPEC_CPU='cpp' in the environment: accepted are auto, torch"):
        fastspec.patch(tiny_model())


def test_a_backend_that_is_named_is_taken(monkeypatch):
    monkeypatch.setattr(on_cpu, "cpp_native", lambda: pytest.fail("built"))
    with fastspec.patched(tiny_model(), backend="torch") as model:
        assert fastspec.report(model).backend == "torch" and fastspec.report(model).why_torch is None


@needs_compiler
def test_a_compiler_that_is_not_there_is_told_once(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match='backend="auto" takes plain torch on the CPU.*install one') as told:
        reports = [chosen(tiny_model()) for _ in range(2)]
    assert len(told) == 1
    assert all(report.backend.startswith("torch") and "cannot be built here" in report.why_torch for report in reports)


@pytest.mark.parametrize(("setting", "machine"), [("torch", "x86_64"), ("auto", "arm64")])
def test_plain_torch_is_taken_in_silence_where_it_is_asked_for_or_no_compiler_would_help(
    monkeypatch, capsys, setting, machine
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FASTSPEC_CPU", setting)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = chosen(tiny_model())
    assert report.backend.startswith("torch") and report.why_torch and not capsys.readouterr().err


@needs_compiler
def test_a_compiler_that_fails_is_told_once(monkeypatch, tmp_path):
    failing = tmp_path / "compiler"
    failing.write_text(f"#!/bin/sh\necho called >> {tmp_path / 'calls'}\necho out of order >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.warns(RuntimeWarning, match='backend="auto" takes plain torch on the CPU.*out of order') as told:
        reports = [chosen(tiny_model()) for _ in range(2)]
    assert len(told) == 1 and (tmp_path / "calls").read_text() == "called\n"
    assert all(
        report.backend.startswith("torch") and "ended with 3: out of order" in report.why_torch for report in reports
    )


@needs_compiler
def test_a_folder_that_cannot_be_looked_into_is_said(monkeypatch, tmp_path, capsys):
    """Its path is too long, for which the system answers as it does for a folder of someone else's."""
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path / ("x" * 300)))
    another = "FASTSPEC_CACHE in the environment names another folder"
    with pytest.warns(RuntimeWarning, match=another):
        assert chosen(tiny_model()).backend.startswith("torch")
    assert backends.ngram_counter.__wrapped__() is None
    told = capsys.readouterr().err
    assert "n-grams are counted in Python: " in told and another in told


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_said(compiled, monkeypatch):
    def refused(path):
        raise OSError("no room")

    monkeypatch.setattr(build, "library", refused)
    with pytest.warns(RuntimeWarning, match="cannot be loaded: no room"):
        assert chosen(tiny_model()).backend.startswith("torch")
    with pytest.raises(Unsupported, match="the compiled library cannot be loaded: no room"):
        fastspec.patch(tiny_model(), backend="cpp")


@needs_compiler
def test_kernels_that_fail_the_self_check_are_not_taken(compiled, monkeypatch):
    ops = backends.cpp_ops()
    wrong = replace(ops, pick=lambda scores, *rest: ops.pick(scores, *rest) + 1)
    monkeypatch.setattr(on_cpu, "cpp_ops", lambda: wrong)
    with pytest.warns(RuntimeWarning, match=r"pick \(the likeliest\)"):
        report = chosen(tiny_model())
    assert report.backend.startswith("torch") and "pick (the likeliest)" in report.why_torch


@needs_compiler
@pytest.mark.parametrize("ours", [1.0, 2.0])
def test_bf16_models_take_them_where_they_are_quicker(compiled, monkeypatch, ours):
    monkeypatch.setattr(on_cpu, "times", lambda *_: [ours, 1.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = chosen(tiny_model().bfloat16())
    if ours < 1.5:
        assert (report.backend, report.why_torch) == ("cpp", None)
    else:
        assert report.backend.startswith("torch") and "3000.0 ms against 4000.0" in report.why_torch
    assert chosen(tiny_model()).backend == "cpp"


@needs_compiler
def test_bf16_kernels_are_checked_in_bf16(compiled, monkeypatch):
    ops = backends.cpp_ops()

    def wrong(scores, *rest):
        return ops.pick(scores, *rest) + (scores.dtype is torch.bfloat16)

    monkeypatch.setattr(on_cpu, "cpp_ops", lambda: replace(ops, pick=wrong))
    with pytest.warns(RuntimeWarning, match=r"in bfloat16 .* pick \(the likeliest\)"):
        assert chosen(tiny_model().bfloat16()).backend.startswith("torch")
    assert chosen(tiny_model()).backend == "cpp"
