"""Compilation of what a training step runs many times over: functions of rows, compiled once for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled. Of its arguments' tensors, alone or in sequences, dimension 0 is the one that calls differ in; the others
    are part of what is compiled, so that a number of rows which happens to be another size is not taken for it."""
    run = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for each in arguments:
            for x in each if isinstance(each, Sequence) else (each,):
                if isinstance(x, Tensor):
                    torch._dynamo.maybe_mark_dynamic(x, 0)
        return run(*arguments)

    return call


def over_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a module and of tensors [B, T, ...], which treats positions alike, compiled over the B * T of them."""
    run = over_rows(function)

    def call(module: Any, *tensors: Tensor) -> Any:
        shape = tensors[0].shape[:2]
        found = run(module, *(x.flatten(0, 1) for x in tensors))
        return found.unflatten(0, shape) if isinstance(found, Tensor) else tuple(x.unflatten(0, shape) for x in found)

    return call
