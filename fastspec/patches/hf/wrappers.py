"""Who has a say in a model's forward, and wrappers of trainers that leave it as it is when the model generates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def calls_original(model: nn.Module) -> bool:
    """Whether what stands in a model's own `__dict__` as `forward` calls the class's with the same arguments and returns its outputs.

    Followed by what is really called, since `functools.wraps` lets any decorator look like what it wraps: TRL's forward with a fused LM
    head, which computes its own loss in training alone, and accelerate's conversion of outputs to fp32, which generation does anyway. An
    autocast region is not followed: what it casts is the modules' own to say. Nor is a forward of transformers' tensor parallelism that
    changes what comes in or out. Where accelerate takes its wrappers off again, it goes down
    to the function inside the class's own decorators.
    """
    own = [type(model).forward]
    while hasattr(own[-1], "__wrapped__"):
        own.append(own[-1].__wrapped__)
    forward: Any = model.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if function in own:
            return True
        forward = _called(function)
    return False


def autocast_inside(model: nn.Module) -> torch.dtype | None:
    """The dtype of the autocast region that `forward` in a model's own `__dict__` opens, as accelerate's in mixed precision, or None."""
    forward: Any = model.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code = getattr(function, "__code__", None)
        if code is not None and (function.__globals__["__name__"], code.co_name) == ("torch.amp.autocast_mode", "decorate_autocast"):
            region = dict(zip(code.co_freevars, function.__closure__, strict=True))["autocast_instance"].cell_contents
            return region.fast_dtype if region._enabled else None
        forward = _called(function)
    return None


def where_defined(forward: Any) -> str:
    """A function's place in its file, which decorators do not change."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return type(forward).__name__ if code is None else f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"


def _called(function: Any) -> Any:
    """What a known wrapper calls, or None."""
    kind = type(function)
    if (kind.__module__, kind.__name__) == ("accelerate.utils.operations", "ConvertOutputsToFp32"):
        return function.model_forward
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    home = function.__globals__["__name__"], code.co_name
    if home == ("trl.trainer.utils", "_fused_forward"):
        return cells.get("original_forward")
    if home == ("transformers.distributed.tensor_parallel", "tp_forward"):
        # Styles that leave inputs and outputs as they are: of a norm within heads, and of a module that has a cut parameter of its own.
        leaves = "self" not in cells or type(cells["self"]).__name__ in ("LocalParamsParallel", "TensorParallelLayer")
        return cells["original_forward"] if leaves else None
    return cells.get("model_forward") if home == ("accelerate.utils.operations", "forward") else None
