"""`patch(head_bits=...)`: which heads draft with weights of 8 bits, and which are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from fastspec.config import HEAD_BITS, HeadBits
from fastspec.devices import is_timed
from fastspec.errors import Unsupported, accepted
from fastspec.generation.heads.bound import BoundHead, rounded
from fastspec.generation.ops import Ops
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.modes import Mode, mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.on_cpu import named

HINT = "patch with head_bits=16"
WIDE = 2560
"""Hidden size from which heads are read in 8 bits by themselves (stored_h200.jsonl)."""


def bits_of(asked: Any) -> HeadBits | None:
    """Bits that `head_bits=` asks for. Raises Unsupported for others than it takes."""
    if asked is None:
        return None
    if type(asked) is not int or asked not in HEAD_BITS:
        raise Unsupported(f"head_bits={asked!r}: {accepted(repr(asked), map(repr, (None, *HEAD_BITS)))}")
    return asked  # type: ignore[return-value]  # one of them


def refuse_bits(model: Any, backend: str) -> None:
    """Raise Unsupported where heads of a model cannot be read in 8 bits."""
    if group_of(model) is not None:
        raise Unsupported(f"head_bits=8: several processes hold this model and cut its head between them; {HINT}")
    mode = mode_for(model)
    if named(backend, device_of(model), mode.dtype, mode.adapter is not None) == "cpp":
        raise _on_cpp()


def may_round(model: Any, mode: Mode, backend: str) -> bool:
    """True where wide heads are read in 8 bits unasked: 16-bit models of one process where that was faster."""
    kernels = named(backend, device_of(model), mode.dtype, mode.adapter is not None)
    return (
        mode.dtype in (torch.bfloat16, torch.float16)
        and kernels in ("auto", "triton")
        and group_of(model) is None
        and is_timed(device_of(model))
    )


def in_bits(head: Any, bits: HeadBits | None, name: str, model: Any, backend: str) -> Any:
    """A head as an assistant reads it. Raises Unsupported where 8 bits were asked for and cannot be."""
    if bits is None:
        if not isinstance(head, BoundHead) or head.config.hidden_size < WIDE:
            return head
        with suppress(ValueError):  # of a layer that has no 8 bits
            return rounded(head) if may_round(model, mode_for(model), backend) else head
    if bits != 8:
        return head
    if not isinstance(head, BoundHead):
        raise Unsupported(
            f"head_bits=8 is for EAGLE heads and MTP layers, and {name}= is a {type(head).__name__}, a model of its "
            f"own: {HINT}"
        )
    try:
        return rounded(head)
    except ValueError as error:
        raise Unsupported(f"head_bits=8: of the head of {name!r} {error}; {HINT}") from error


def all_in_bits(heads: dict[str, Any], bits: HeadBits | None, model: Any, backend: str) -> dict[str, Any]:
    """`in_bits` of the heads of assistants, once of one that several share."""
    names = {head: name for name, head in heads.items()}
    made = {head: in_bits(head, bits, name, model, backend) for head, name in names.items()}
    return {name: made[head] for name, head in heads.items()}


def ops_of(head: BoundHead, ops: Ops) -> Ops:
    """The ops that a head drafts with. Raises Unsupported for a head in 8 bits on the C++ kernels."""
    if not head.module.is_rounded:
        return ops
    if ops.name == "cpp":
        raise _on_cpp()
    return ops.heads or ops


def refuse_fused(head: BoundHead) -> None:
    """Raise Unsupported for a head in 8 bits whose draft phase is to be one launch."""
    if head.module.is_rounded:
        raise Unsupported(f"fused=True reads weights of 16 bits, and this head is read in 8: {HINT}")


def _on_cpp() -> Unsupported:
    return Unsupported(
        "head_bits=8 has no C++ kernels, which draft in bfloat16 and are faster on the CPU than what would dequantise "
        f'each weight: {HINT}, with backend="torch", or once the model is on a GPU'
    )
