"""Checks of the tensors that a kernel's host function is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ANYHOW, PACKED, CONTIGUOUS = "", ", with a contiguous last dimension", ", contiguous"
"""How a tensor has to lie."""
FLOATS = torch.float32, torch.float16, torch.bfloat16
"""dtypes that most kernels take."""


def packed(x: Tensor) -> bool:
    """True where the last dimension is contiguous."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def dtypes_of(*operands: Tensor | None) -> set[torch.dtype]:
    """The dtypes of a product's operands; none where gradients are wanted, which torch's product gives."""
    given = [operand for operand in operands if operand is not None]
    graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in given)
    return set() if graded else {operand.dtype for operand in given}


def strides(most: int, *tensors: Tensor) -> list[int]:
    """The first `most` strides of each of these tensors, one tensor after another."""
    return [stride for each in tensors for stride in each.stride()[:most]]


def expect(
    op: str,
    shape: Sequence[int | str],
    dtype: torch.dtype | Sequence[torch.dtype] | None,
    lies: str = ANYHOW,
    /,
    **given: Tensor | None,
) -> None:
    """Raise ValueError, naming the op and the tensor, for one that is there and has not this shape, in which a name
    stands for any size, or not this dtype or one of these (None: any), or does not lie so."""
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype or ()
    for name, x in given.items():
        if x is None:
            continue
        sizes = zip(x.shape, shape, strict=False)
        fits = x.dim() == len(shape) and all(want == size or isinstance(want, str) for size, want in sizes)
        laid = packed(x) if lies == PACKED else lies == ANYHOW or x.is_contiguous()
        if not fits or not laid or (dtypes and x.dtype not in dtypes):
            accepted = f"[{', '.join(map(str, shape))}]{' ' * bool(dtypes)}{' or '.join(map(str, dtypes))}{lies}"
            raise ValueError(f"{op}: {name} is {list(x.shape)} {x.dtype}, strides {x.stride()}; accepted is {accepted}")
