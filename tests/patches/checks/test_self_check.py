"""The self-check: its rows say of every kernel whether it is right, a wrong one is named, and the verdict is kept."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.devices import CPU, CUDA
from helpers.generate import prompts
from helpers.models import tiny_head, tiny_model
from torch import Tensor

import fastspec
from fastspec import files
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.patches.assistants.fused import FusedDrafter
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.patches.checks import self_check
from fastspec.patches.checks.rows import CHECKS
from fastspec.patches.checks.self_check import REFERENCE, difference, has_kernel, phase_difference, unlike

HALVES = [pytest.param("cpu", torch.float16, marks=CPU.marks)]  # bf16 is wrong in the interpreter
HALVES += [pytest.param("cuda", dtype, marks=CUDA.marks) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
OTHERS_NEEDED = {
    "all_reduce",
    "all_gather",
    "look_up",
    "likeliest",
}  # of several processes: one alone has nothing to add up
OPS = [field.name for field in fields(TORCH) if callable(getattr(REFERENCE, field.name))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and nothing known yet."""
    monkeypatch.setenv(files.SETTING, str(tmp_path))
    monkeypatch.setattr(self_check, "_known", {})
    monkeypatch.setattr(files, "_told", set())
    return tmp_path


SETTINGS = {"name", "most_children", "most_candidates", "captures", "packs", "drafts_in", "drafts", "heads", "exact"}


def test_every_op_that_has_a_kernel_has_a_row():
    ops = triton_ops()
    wanted = {name for name in OPS if has_kernel(ops, name)} - OTHERS_NEEDED | {
        "stack",
        "topk_logprobs",
    }  # of the C++ kernels alone
    assert {check.op for check in CHECKS} == wanted and len(wanted) > 25
    assert {field.name for field in fields(ops)} - set(OPS) == SETTINGS
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(("device", "dtype"), HALVES)
@pytest.mark.parametrize("check", [check for check in CHECKS if check.op != "stack"], ids=lambda check: check.name)
def test_the_kernels_pass(check, device, dtype):
    assert difference(check, triton_ops(), dtype, torch.device(device)) is None


@pytest.mark.parametrize("drafts", [EagleDrafter, FusedDrafter])
@pytest.mark.parametrize(("device", "dtype"), HALVES)
def test_a_draft_phase_passes(device, dtype, drafts):
    assert phase_difference(triton_ops(), dtype, torch.device(device), drafts) is None


def spoiled(run: Any) -> Any:
    """An op one of whose results is off; one that gives none does nothing."""

    def wrong(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        if isinstance(result, Tensor):
            return off(result)
        return type(result)((*result[:-1], off(result[-1]))) if isinstance(result, tuple) else None

    return wrong


def off(x: Tensor) -> Tensor:
    x = x.clone().contiguous()
    x.view(-1)[-1] += 1
    return x


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_wrong_kernel_is_caught(check):
    if check.op in ("kv_block_copy", "keep_last", "keep_pair", "hold", "delta_commit"):
        ops = replace(REFERENCE, **{check.op: lambda *args, **options: None})
    elif check.op == "attention_layout":

        def shorter(*args: Any, **options: Any) -> Any:
            return REFERENCE.attention_layout(args[0] - 1, *args[1:], **options)

        ops = replace(REFERENCE, attention_layout=shorter)
    else:
        ops = replace(REFERENCE, **{check.op: spoiled(getattr(REFERENCE, check.op))})
    told = difference(check, ops, torch.float16, torch.device("cpu"))
    assert told is not None and ("off" in told or "others" in told)
    assert difference(check, REFERENCE, torch.float16, torch.device("cpu")) is None


def test_a_wrong_draft_phase_is_caught():
    class Wrong(EagleDrafter):
        def _grow(self, extent: int) -> Any:
            scores, tokens, parents = super()._grow(extent)
            return scores.flip(1), tokens, parents

    class Off(EagleDrafter):
        def _grow(self, extent: int) -> Any:
            scores, tokens, parents = super()._grow(extent)
            return scores.add_(0.2), tokens, parents

    device = torch.device("cpu")
    told = phase_difference(TORCH, torch.float32, device, Wrong)
    assert told is not None and "the tree's tokens are" in told
    assert list(self_check.problems(TORCH, torch.float32, device, (), Wrong)) == [
        self_check.Problem("Wrong (a small head)", told)
    ]
    assert "scores are off by up to 0.2" in str(phase_difference(TORCH, torch.float32, device, Off))
    late = replace(TORCH, tree_input=lambda *args: (TORCH.tree_input(*args)[0] + 9, *TORCH.tree_input(*args)[1:]))
    assert phase_difference(late, torch.float32, device, EagleDrafter) is not None
    assert phase_difference(TORCH, torch.float32, device, EagleDrafter) is None


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (torch.tensor([1.0, torch.nan]), "1 of 2 values are off, by up to inf"),
        (torch.tensor([1.0, 2.001]), "by up to 0.001"),
        (torch.zeros(2, 1), r"[2, 1], not torch.float32 [2]"),
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.tensor([1.0, 2.000001]), None),
    ],
)
def test_what_is_off_is_said(got, told):
    found = unlike(got, torch.tensor([1.0, 2.0]))
    assert found is None if told is None else told in str(found)


def test_references_are_exact_whatever_the_user_has_set(monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        seen: list[str] = []
        for name in ("difference", "phase_difference"):
            monkeypatch.setattr(
                self_check, name, lambda *given, **more: seen.append(torch.backends.cuda.matmul.fp32_precision)
            )
        list(self_check.problems(triton_ops(), torch.float32, torch.device("cpu"), CHECKS[:1]))
        assert torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["ieee", "ieee"]


def test_an_error_ends_the_checks():
    def broken(*args: Any) -> Any:
        raise RuntimeError("no such instruction")

    ops = replace(triton_ops(), linear=broken, emit=broken)
    few = [check for check in CHECKS if check.op in ("linear", "emit")]
    found = list(self_check.problems(ops, torch.float16, torch.device("cpu"), few))
    assert found == [("linear (one row)", "RuntimeError: no such instruction", True)]

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):  # says nothing of the kernel
        list(self_check.problems(replace(ops, linear=full), torch.float16, torch.device("cpu"), few))


def check(dtype: torch.dtype = torch.float16) -> None:
    self_check.self_check(triton_ops(), dtype, torch.device("cpu"))


@pytest.fixture
def runs(folder, monkeypatch):
    """On a device that was never measured: every run of the checks, and what they find."""
    made: dict[str, Any] = {"count": 0, "found": []}

    def problems(*args: Any) -> Any:
        made["count"] += 1
        torch.rand(3)  # draws what a user's seed would give
        return iter(made["found"])

    monkeypatch.setattr(self_check, "problems", problems)
    monkeypatch.setattr(self_check, "launcher", lambda *args: lambda: None)
    monkeypatch.setenv(self_check.SETTING, "always")
    return made


def forget_process(monkeypatch):
    monkeypatch.setattr(self_check, "_known", {})


def unmeasured(monkeypatch):
    """A CUDA device of another name, as far as the self-check looks."""
    monkeypatch.setenv(self_check.SETTING, "auto")
    monkeypatch.setattr(self_check, "device_name", lambda device: "NVIDIA A100")
    return torch.device("cuda")


def test_a_device_is_checked_once_for_its_versions_and_dtype(runs, folder, monkeypatch, capsys):
    device = unmeasured(monkeypatch)
    for _ in range(2):
        self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 1 and capsys.readouterr().err.count("checking the kernels on NVIDIA A100") == 1
    [path] = folder.rglob("*.json")
    assert (
        json.loads(path.read_text())["failures"] == [] and "A100" in path.name and str(torch.__version__) in path.name
    )
    forget_process(monkeypatch)
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 1
    self_check.self_check(triton_ops(), torch.float16, device)
    monkeypatch.setattr(fastspec, "__version__", "9.9")
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 3


def test_measured_devices_and_other_backends_are_not_checked(runs, monkeypatch):
    monkeypatch.setenv(self_check.SETTING, "auto")
    check()
    monkeypatch.setattr(self_check, "device_name", lambda device: "NVIDIA H200")
    self_check.self_check(triton_ops(), torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv(self_check.SETTING, "always")
    self_check.self_check(TORCH, torch.bfloat16, torch.device("cpu"))
    assert runs["count"] == 0
    self_check.self_check(triton_ops(), torch.bfloat16, torch.device("cuda"))
    assert runs["count"] == 1
    monkeypatch.setenv(self_check.SETTING, "never")
    check()
    monkeypatch.setenv(self_check.SETTING, "yes")
    with pytest.raises(Unsupported, match=r"FASTSPEC_SELF_CHECK='yes'.*auto, always, never"):
        check()


def test_a_failure_is_kept_and_names_the_kernel_and_the_way_out(runs, monkeypatch):
    device = unmeasured(monkeypatch)
    runs["found"] = [self_check.Problem("linear (one row)", "3 of 96 values are off")]
    for _ in range(2):
        with pytest.raises(
            FastSpecError, match=r'on NVIDIA A100 in bfloat16.*linear \(one row\): 3 of 96.*backend="torch"'
        ):
            self_check.self_check(triton_ops(), torch.bfloat16, device)
        forget_process(monkeypatch)
    assert runs["count"] == 1
    runs["found"] = []
    monkeypatch.setenv(self_check.SETTING, "always")
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 2


def test_an_error_is_not_kept(runs, folder, monkeypatch):
    """A device that an earlier kernel has broken fails every check; the next process finds it whole."""
    device = unmeasured(monkeypatch)
    runs["found"] = [
        self_check.Problem("linear (one row)", "RuntimeError: CUDA error: device-side assert triggered", raised=True)
    ]
    with pytest.raises(FastSpecError, match=r"device-side assert.*nothing of it is kept"):
        self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert not list(folder.rglob("*.json"))
    runs["found"] = []
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 2 and len(list(folder.rglob("*.json"))) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"about": {}, "failures": []}', '{"failures": [1]}'])
def test_a_damaged_verdict_is_named_and_made_anew(content, runs, folder, monkeypatch):
    device = unmeasured(monkeypatch)
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    [path] = folder.rglob("*.json")
    path.write_text(content)
    forget_process(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"{re.escape(path.name)} cannot be read"):
        self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 2 and json.loads(path.read_text())["failures"] == []


def test_a_folder_that_cannot_be_written_to_is_said_once(runs, folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv(files.SETTING, str(folder / "file"))
    device = unmeasured(monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"cannot keep what it measured in .*FASTSPEC_CACHE"):
        self_check.self_check(triton_ops(), torch.bfloat16, device)
    forget_process(monkeypatch)
    self_check.self_check(triton_ops(), torch.bfloat16, device)
    assert runs["count"] == 2


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(files.SETTING)
    for setting, found in (("XDG_CACHE_HOME", tmp_path / "fastspec"), (files.SETTING, tmp_path)):
        monkeypatch.setenv(setting, str(tmp_path))
        assert files.cache_folder() == found
    for setting in ("XDG_CACHE_HOME", files.SETTING):
        monkeypatch.delenv(setting)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "fastspec"


def test_a_model_is_not_patched_on_a_device_whose_kernels_fail(runs):
    runs["found"] = [self_check.Problem("rms_norm (alone)", "wrong")]
    model = tiny_model(num_hidden_layers=1)
    before = set(vars(model))
    with pytest.raises(FastSpecError, match=r"rms_norm \(alone\)"):
        fastspec.patch(model, backend="triton")
    assert set(vars(model)) == before
    fastspec.patch(model, backend="torch")
    model.generate(**prompts(3), max_new_tokens=2, assistant="autoregressive")


def test_the_one_launch_is_checked_when_it_is_first_chosen(runs, monkeypatch):
    checked: list[Any] = []
    monkeypatch.setattr(self_check, "problems", lambda *args: checked.append(args[3:]) or iter(runs["found"]))
    model = tiny_model(num_hidden_layers=1)
    fastspec.patch(model, eagle3=tiny_head(model, taps=(0, 1)), backend="triton")
    assistant = fastspec.Eagle3(depth=1, top_k=2, total_tokens=3)
    model.generate(**prompts(3), max_new_tokens=2, assistant=assistant)
    assert checked == [()], "the backend's ops and its ordinary drafter"
    runs["found"] = [self_check.Problem("FusedDrafter (a small head)", "wrong")]
    for _ in range(2):
        with pytest.raises(
            FastSpecError, match=r"FusedDrafter \(a small head\): wrong\. An assistant without FusedDrafter runs"
        ):
            model.generate(**prompts(3), max_new_tokens=2, assistant=replace(assistant, fused=True))
    assert checked == [(), ((), FusedDrafter)]
    model.generate(**prompts(3), max_new_tokens=2, assistant=assistant)


def test_the_check_leaves_the_user_s_random_numbers_alone(runs):
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    check()
    assert runs["count"] == 1 and torch.equal(torch.rand(2), wanted)


@pytest.mark.parametrize(("setting", "lines"), [("", 1), ("1", 0)])
def test_the_line_can_be_silenced(setting, lines, runs, monkeypatch, capsys):
    monkeypatch.setenv("FASTSPEC_QUIET", setting)
    check()
    assert capsys.readouterr().err.count("fastspec:") == lines


def test_transformers_verbosity_silences_the_line(runs, capsys):
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        check()
    finally:
        logging.set_verbosity(before)
    assert runs["count"] == 1 and "fastspec:" not in capsys.readouterr().err
