"""Dtypes and allocations full of NaN for the tests of kernels, and the bounds of a draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers.devices import CPU, CUDA, HAS_CUDA

EVERYWHERE = pytest.mark.parametrize("device", [CPU, CUDA])
ON_CUDA = pytest.mark.parametrize("device", [CUDA])
ON_CUDA_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}
SEEDS = st.integers(0, 2**31)
FLOATS = st.sampled_from([torch.float32, torch.float16])


Outputs = TypeVar("Outputs")


def captured(run: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """A graph of a run, and its outputs."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    return graph, outs


class poisoned:
    """Fills what torch.empty gives with NaN, or with the largest integer: results and scratch alike."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all() and torch.utils.deterministic.fill_uninitialized_memory

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def moved_as_is(x: Tensor, device: str) -> Tensor:
    """x on the device with the same strides: `to` alone makes some views contiguous."""
    if x.device.type == device:
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    flat = torch.as_strided(x, (span,), (1,), x.storage_offset()).to(device)
    return torch.as_strided(flat, x.shape, x.stride())


def strided(scores: Tensor) -> Tensor:
    """The same scores as part of a wider tensor: NaN before them, +inf behind them."""
    wide = torch.cat((torch.full_like(scores, torch.nan), scores, torch.full_like(scores, torch.inf)), -1)
    return wide[..., scores.shape[-1] : 2 * scores.shape[-1]]


def check_draws(scores: Tensor, uniform: Tensor, got: Tensor) -> None:
    """Each token's share of the running mass in float64 holds its level.

    The mass is off by at most 2^-18 of the whole: exp is good to 2^-22, and a chunk's sum of fp32 numbers takes fewer
    than 60 roundings in a row, each of 2^-24. A token of probability 0 has an empty share, but must not be taken within
    that tolerance either.
    """
    probs = scores.double().softmax(-1).reshape(-1, scores.shape[-1])
    mass = probs.cumsum(-1)
    ids, level = got.reshape(-1, 1).to(probs.device), uniform.reshape(-1, 1).double() * mass[:, -1:]
    assert ids.min() >= 0 and ids.max() < scores.shape[-1]
    chance, upper = probs.gather(1, ids), mass.gather(1, ids)
    assert (chance > 0).all()
    assert ((upper - chance <= level + 2**-18) & (level <= upper + 2**-18)).all()
    passed = (probs * (torch.arange(scores.shape[-1], device=probs.device) < ids)).sum(-1, keepdim=True)
    assert (passed[level == 0] < 2**-120).all()  # a draw of 0 skips only what fp32 cannot tell from 0


def add_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of tiles in the interpreter add up their depth in order, as a GPU's do, whatever the tile: those of
    numpy follow the tile."""
    if HAS_CUDA:
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.astype(np.float32)
        for left, right in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            total += left[:, None] * right[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
