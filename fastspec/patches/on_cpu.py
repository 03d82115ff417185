"""Choice of `backend="auto"` on the CPU: the C++ kernels, where this machine can build them and they pass the
self-check, for adapted models in fp32, and in bf16 where they are quicker than torch; plain torch else, and why, with
a warning where that can be mended. The environment's FASTSPEC_CPU says "auto" (that) or "torch" (plain torch)."""

from __future__ import annotations

import warnings

import torch
from torch.nn import functional as F

from fastspec.errors import FastSpecError
from fastspec.kernels.linear.cpu import times
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import ENDINGS, Native
from fastspec.patches.backends import cpp_native, cpp_ops
from fastspec.patches.checks.self_check import chosen, self_check

SETTING = "FASTSPEC_CPU"
CHOICES = ("auto", "torch")
_tried: dict[tuple[str, torch.dtype], str | None] = {}
"""What this process found: the name of a library or why there is none, a dtype -> why it is not used, or None."""
SAMPLE, ROWS = (1536, 576), (1, 8)
"""The weight, and the rows of a token and of a small tree, whose products tell whether bf16 models gain."""


def named(backend: str, device: torch.device, dtype: torch.dtype, adapted: bool) -> str:
    """Backend of a model: "cpp" for "auto" on the CPU where the C++ kernels run, compiled and checked first if need be;
    else the name as given. Raises Unsupported for an unknown FASTSPEC_CPU."""
    if backend != "auto" or device.type != "cpu":
        return backend
    return "cpp" if why_torch(dtype, adapted) is None else backend


def why_torch(dtype: torch.dtype, adapted: bool) -> str | None:
    """Reason for which "auto" is plain torch for a model, or None. Raises Unsupported for an unknown FASTSPEC_CPU."""
    if chosen(SETTING, CHOICES) == "torch":
        return f"{SETTING}=torch in the environment"
    if not adapted:
        return "the C++ kernels need a model with an adapter, and this one runs in generic mode"
    if dtype not in ENDINGS:
        return (
            f"the C++ kernels compute in float32 and bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
        )
    why = build.missing()
    key = why or build.library_name(), dtype
    if key not in _tried:
        _tried[key] = _try(dtype) if why is None else f"the C++ kernels cannot be built here: {why}"
        if _tried[key] is not None and build.unfit() is None:
            warnings.warn(f'backend="auto" takes plain torch on the CPU: {_tried[key]}', RuntimeWarning, stacklevel=2)
        elif _tried[key] is None and dtype is torch.bfloat16:
            _tried[key] = _slower()
    return _tried[key]


def _try(dtype: torch.dtype) -> str | None:
    """Build the kernels and check them in a dtype -> None, or what went wrong."""
    native = cpp_native()
    if isinstance(native, str):
        return f"the C++ kernels cannot be built here: {native}"
    try:
        self_check(cpp_ops(), dtype, torch.device("cpu"))
    except FastSpecError as error:
        return str(error)
    return None


@torch.no_grad()
def _slower() -> str | None:
    """None where the kernels' products in bf16 are quicker than torch's here, else what was measured."""
    native, weight = cpp_native(), torch.zeros(SAMPLE, dtype=torch.bfloat16, device="cpu")
    assert isinstance(native, Native)  # `_try` has it
    spent = [times((native.product, F.linear), weight.new_zeros(rows, SAMPLE[1]), weight) for rows in ROWS]
    ours, torchs = (sum(each[way] for each in spent) for way in (0, 1))
    if ours < torchs:
        return None
    return (
        f"torch's own products in bfloat16 are quicker on this machine, {1e3 * torchs:.1f} ms against "
        f"{1e3 * ours:.1f} in a measurement"
    )
