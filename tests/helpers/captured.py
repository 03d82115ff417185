"""A stand-in for a captured graph on the CPU: it replays a program as a graph does, in place and without its Python.

What surrounds a graph is then that of CUDA; only the graph itself is not.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastspec.generation import capture
from fastspec.generation.drafters import head_drafter as drafter
from fastspec.generation.engine import schedule
from fastspec.patches.backends import TORCH
from fastspec.patches.hf import model as hf_model


def owners(run: Any) -> list[Any]:
    """The objects whose attributes a program may set: those of its methods and their arguments, and the target and
    drafter of rounds."""
    found, runs = [], [run]
    while runs:
        run = runs.pop()
        found.append(getattr(run, "__self__", None))
        runs += [getattr(run, "func", None), *getattr(run, "args", ())] if isinstance(run, partial) else []
    programs = [getattr(owner, "program", None) for owner in found]
    parts = [getattr(owner, name, None) for owner in found + programs for name in ("target", "drafter")]
    return [owner for owner in found + parts if hasattr(owner, "__dict__")]


def overwrite(old: Any, new: Any) -> None:
    """Copy the tensors of one result into those of another, as a replay does."""
    if isinstance(old, Tensor):
        old.copy_(new)
    elif isinstance(old, dict):
        for name in old:
            overwrite(old[name], new[name])
    elif isinstance(old, (tuple, list)):
        for a, b in zip(old, new, strict=True):
            overwrite(a, b)
    elif is_dataclass(old):
        for field in fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))


class Stand(capture.Captured):
    """Runs the program; from the second time on what it returns stays in place, and the third leaves no trace on Python
    objects."""

    def __call__(self, program: Any, key: Any) -> Any:
        if key != self.key:
            self.key, self.graph, self.result = key, None, None
            self.keys += 1
            with capture.SPENT.on("first_runs"):
                return program()
        self.replays += 1
        if self.graph is None:
            with capture.SPENT.on("captures"):
                self.graph, self.result = True, program()
            return self.result
        before = [(owner, dict(vars(owner))) for owner in owners(program)]
        result = program()
        for owner, held in before:
            vars(owner).clear()
            vars(owner).update(held)
        overwrite(self.result, result)
        return self.result


class Fixed(Stand):
    """One that replays the program that was captured, on its own tensors, whatever it is called with."""

    def __call__(self, program: Any, key: Any) -> Any:
        if key == self.key and self.graph is None:
            self.kept = program
        return super().__call__(self.kept if key == self.key else program, key)


class Recording(TorchDispatchMode):
    """The operations of torch that a program runs, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is not torch.ops.aten._local_scalar_dense.default:  # references look for NaN on the CPU
            self.made.append((op, args, kwargs or {}, out))
        return out


class Recorded(Stand):
    """One that replays the operations of its capture, and none of the program's Python, as a graph does: what the
    program would read of a changed model stays as it was."""

    def __call__(self, program: Any, key: Any) -> Any:
        if key != self.key or self.graph is None:
            with Recording() as recording:
                result = super().__call__(program, key)
            self.made = recording.made
            return result
        self.replays += 1
        with torch.autocast("cpu", enabled=False):  # a recorded operation has its dtypes
            for op, args, kwargs, out in self.made:
                for old, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        return self.result


class Looked(Stand):
    """One whose program is looked at before its first run, as on CUDA, where its kernels are compiled then."""

    def __call__(self, program: Any, key: Any) -> Any:
        if self.key is None:
            self.look(program)
        return super().__call__(program, key)

    def look(self, program: Any) -> None:
        """Run it without data."""
        from fastspec.kernels import ahead  # of Triton, which is for Linux

        ahead._look(program, ahead.Collector())


def what_no_graph_served(monkeypatch: Any) -> list[Any]:
    """The programs that run for the first or second time from here on, on CUDA or with stand-ins."""
    found: list[Any] = []
    former: Any = capture.Captured

    class Told(former):
        def __call__(self, program: Any, key: Any) -> Any:
            if not self.ready(key):
                found.append(program)
            return super().__call__(program, key)

    for module in (capture, schedule):
        monkeypatch.setattr(module, "Captured", Told)
    return found


def stand_in(monkeypatch: Any, stand: type[Stand] = Stand, **more: Any) -> None:
    """Let every model have a backend of plain torch that captures, with `more` ops."""
    for module in (capture, schedule):
        monkeypatch.setattr(module, "Captured", stand)
    captures = more.pop("captures", True)
    ops = replace(TORCH, name="stand-in", captures=captures, packs=captures, **more)
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: ops)
    assert drafter.CapturedByShape is hf_model.CapturedByShape is capture.CapturedByShape
