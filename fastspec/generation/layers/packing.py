"""Linear layers that read the same input, as one product: their weights lie one after another in one buffer.

The parameters stay the model's own and become views of the buffer, so nothing is held twice. Experts' weights that lie with their outputs
side by side are turned: a kernel reads those of one output as a line of memory. Whether weights lie so is read from their storages
whenever a product is made: those of a model that was moved, cast or copied since lie apart again, and are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """A linear layer, or a part of one: weight [M, K] and bias [M]."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


def joint(parts: Sequence[Tensor]) -> Tensor | None:
    """One view [sum of rows, ...] of tensors [rows, ...] that lie one after another in one storage, or None."""
    first, at = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or part.storage_offset() != at or not part.is_contiguous() or part.shape[1:] != first.shape[1:]:
            return None
        at += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def pack(layers: Sequence[Weights]) -> list[Tensor]:
    """Lay the weights, and the biases, of these layers one after another; returns the tensors that were moved.

    Nothing is done where some have a bias and some have none, or the layers differ in input width, dtype or device.
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    if len(kinds) > 1 or len(biases) not in (0, len(layers)):
        return []
    moved: list[Tensor] = []
    for group in (weights, biases):
        if group and joint(group) is None:
            whole = torch.cat([parameter.detach() for parameter in group])
            for parameter, part in zip(group, whole.split([parameter.shape[0] for parameter in group]), strict=True):
                parameter.data = part
            moved += group
    return moved


def turn(weight: Tensor) -> list[Tensor]:
    """Lay a weight [..., in, out] so that the inputs of an output are neighbours in memory, which its shape does not show; returns it in a
    list if it was moved."""
    if weight.transpose(-1, -2).is_contiguous():
        return []
    weight.data = weight.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    return [weight]


def is_packed(parameter: Tensor) -> bool:
    """Whether a parameter is a part of a larger storage, or lies turned in its own."""
    return parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size() or not parameter.is_contiguous()


def unpack(parameter: Tensor) -> None:
    """Give a parameter a storage of its own again, in the order of its shape."""
    if is_packed(parameter):
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
