"""How many kernels of torch's own a round launches between the ops of its backend: each costs its time and the start of
the next one."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.generate import MAKERS, NEVER, prompts
from torch.utils._python_dispatch import TorchDispatchMode

import fastspec
from fastspec.generation import capture
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine import round_program, schedule
from fastspec.patches.backends import TORCH

MAKES_NOTHING = {"empty", "new_empty", "empty_strided", "empty_like", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts what runs as a kernel on a device; what is called inside of an op counts as that op."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and not func.is_view and name not in MAKES_NOTHING:
            self.torch[name] += 1
        return func(*args, **kwargs or {})

    def watched(self, name: str, op: Any) -> Any:
        """An op that is counted by its name."""

        def run(*args: Any, **options: Any) -> Any:
            self.ops[name] += not self.inside
            self.inside += 1
            try:
                out = op(*args, **options)
                return out.contiguous() if isinstance(out, torch.Tensor) else out  # as the kernels' are
            finally:
                self.inside -= 1

        return run


class Uncaptured(capture.Captured[Any]):
    """Runs the program every time."""

    def __call__(self, program: Any, key: Any) -> Any:
        return program()


@pytest.fixture
def launches(monkeypatch):
    """The launches of a call's last round, as a backend that captures has it: weights are packed, and nothing is read
    back."""
    seen = Launches()
    for module in (capture, schedule):
        monkeypatch.setattr(module, "Captured", Uncaptured)
    held = {field.name: getattr(TORCH, field.name) for field in fields(TORCH)}
    watched = {name: seen.watched(name, op) for name, op in held.items() if callable(op)}
    ops = replace(TORCH, name="watched", captures=True, packs=True, **watched)
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: ops)
    run = round_program.RoundProgram.round

    def counted(self: Any, verifier: Any) -> Any:
        seen.torch.clear()
        seen.ops.clear()
        with seen:
            return run(self, verifier)

    monkeypatch.setattr(round_program.RoundProgram, "round", counted)
    return seen


def test_a_round_of_a_head_with_separate_kernels(launches):
    target, head = MAKERS["bigram"]
    model = target()
    tree = fastspec.Eagle3(total_tokens=12, depth=3, top_k=4)
    with fastspec.patched(model, eagle3=head(model)):
        model.generate(**prompts(9), do_sample=False, max_new_tokens=20, assistant=tree)
    assert launches.ops["commit_slots"] == launches.ops["emit"] == 1
    assert launches.ops["path_pairs"] == launches.ops["keep_last"] == 1
    assert launches.ops["tree_input"] == 2, "the drafts' places, and the target's nodes"
    assert not launches.torch


@pytest.mark.parametrize("lengths", [(9,), (9, 3, 5)])
def test_a_round_without_drafts_launches_one_kernel_more_than_plain_decoding(launches, monkeypatch, lengths):
    """Where sizes are chosen: what the head reads later is kept."""
    monkeypatch.setattr(TreeSizes, "_choose", lambda self, begins=False: self._use(0, 50))
    monkeypatch.setattr(TreeSizes, "_affords", lambda self, size: False)
    target, head = MAKERS["bigram"]
    model, found = target(), []
    with fastspec.patched(model, eagle3=head(model)):
        for assistant in ("autoregressive", fastspec.Eagle3(total_tokens="auto")):
            options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": NEVER, "pad_token_id": 0}
            model.generate(**prompts(*lengths), **options, assistant=assistant)
            assert not launches.torch
            found.append(launches.ops.copy())
    assert found[1] == found[0] + Counter(keep_pair=1)
