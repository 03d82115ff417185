"""What `backend="auto"` is on the CPU: the C++ kernels for fp32 models with an adapter, where this machine can build them and they pass the
self-check; plain torch else, and why.

The environment's FASTSPEC_CPU says "auto" (that) or "torch" (plain torch).
"""

from __future__ import annotations

import os
import warnings

import torch

from fastspec.errors import FastSpecError, Unsupported
from fastspec.kernels.native import build
from fastspec.patches.backends import build_cpp, cpp_ops
from fastspec.patches.checks.verdict import self_check

SETTING = "FASTSPEC_CPU"
CHOICES = ("auto", "torch")
_tried: dict[str, str | None] = {}
"""What this process found: the name of a library -> why it is not used, or None."""


def named(backend: str, device: torch.device, dtype: torch.dtype, adapted: bool) -> str:
    """The backend of a model of a dtype on a device: "cpp" for "auto" on the CPU where the C++ kernels run, compiled and checked first
    where that was not done on this machine; else the name as given. `adapted` says whether the model has an adapter. Raises Unsupported
    for an unknown FASTSPEC_CPU."""
    if backend != "auto" or device.type != "cpu":
        return backend
    return "cpp" if why_torch(dtype, adapted) is None else backend


def why_torch(dtype: torch.dtype, adapted: bool) -> str | None:
    """Why "auto" on the CPU is plain torch for a model, or None. Raises Unsupported for an unknown FASTSPEC_CPU."""
    chosen = os.environ.get(SETTING) or "auto"
    if chosen not in CHOICES:
        raise Unsupported(f"{SETTING}={chosen!r} in the environment: accepted are {', '.join(CHOICES)}")
    if chosen == "torch":
        return f"{SETTING}=torch in the environment"
    if not adapted:
        return "the C++ kernels need a model with an adapter, and this one runs in generic mode"
    if dtype is not torch.float32:
        return f"the C++ kernels compute in float32, and the model is in {str(dtype).removeprefix('torch.')}"
    why = build.missing()
    if why is not None:
        return f"the C++ kernels cannot be built here: {why}"
    name = build.library_name()
    if name not in _tried:
        _tried[name] = _try()
        if _tried[name] is not None:
            warnings.warn(f'backend="auto" takes plain torch on the CPU: {_tried[name]}', RuntimeWarning, stacklevel=2)
    return _tried[name]


def _try() -> str | None:
    """Build the kernels and check them -> None, or what went wrong."""
    why = build_cpp()
    if why is not None:
        return f"the C++ kernels cannot be built here: {why}"
    try:
        self_check(cpp_ops(), torch.float32, torch.device("cpu"))
    except FastSpecError as error:
        return str(error)
    return None
