"""Snapshot of what a model's passes read besides parameters and modules: plain attributes of modules and configurations, and small tensors.

Rounds are made of some of these: tables of a rotary embedding's frequencies, the epsilon of a norm, the scale of attention.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from fastspec.patches.hf.shards import local_part

PLAIN = frozenset((bool, int, float, str, type(None)))
HOLDERS = frozenset((list, tuple, dict, set))
SMALL = 1 << 16
"""Elements up to which a tensor's values are read; a larger one is known by its place and torch's count of its changes."""
_read: Any = WeakIdKeyDictionary()
"""Tensors on a device -> (place, changes, values): they are read once for each change."""


class Settings:
    """The attributes and buffers of a model's modules and its configurations, as they are now; they live on as long as this does.

    Left out are names that begin with an underscore, which are torch's and transformers' own, and `training`, which dropout alone reads.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        self.modules, self.mark = modules, object()
        """The mark stands for what is here; another snapshot of the same may take it over."""
        self.owners = [vars(module) for module in modules]
        self.owners += [module._buffers for module in modules]
        if isinstance(model, PreTrainedModel):
            self.owners += {id(each): vars(each) for each in (model.config, model.config.get_text_config())}.values()
        self.sizes = list(map(len, self.owners))
        plain: list[tuple[dict[str, Any], str, Any]] = []
        self.others: list[tuple[dict[str, Any], str]] = []
        for held in self.owners:
            for name, value in held.items():
                if name[0] == "_" or name == "training":
                    continue
                kind = type(value)
                if kind in PLAIN:
                    plain.append((held, name, value))
                elif kind in HOLDERS or isinstance(value, Tensor):
                    self.others.append((held, name))
        self.places = [(held, name) for held, name, _ in plain]
        self.plain = [value for *_, value in plain]
        self.other = self._others()

    def hold(self) -> bool:
        """Whether all of it is as it was. False may be wrong, for an equal value in another object, True is not."""
        now = [held.get(name) for held, name in self.places]
        return all(map(is_, now, self.plain)) and list(map(len, self.owners)) == self.sizes and self._others() == self.other

    @property
    def values(self) -> Hashable:
        """Equal where all of it is."""
        return tuple(name for _, name in self.places), tuple(self.plain), self.other

    def _others(self) -> tuple[Hashable, ...]:
        return tuple([_value(held.get(name)) for held, name in self.others])


def _value(value: Any) -> Hashable:
    """Something equal for equal values, which changes with a holder or a tensor that is changed in place."""
    return _tensor_value(local_part(value)) if isinstance(value, Tensor) else repr(value)


def _tensor_value(tensor: Tensor) -> Hashable:
    """The values of a small tensor. On another device than the CPU they are those of the last change that torch counts, which one by
    `.data` is not."""
    if tensor.is_meta:
        return tuple(tensor.shape)
    state = tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
    if tensor.numel() > SMALL:
        return state
    if tensor.device.type == "cpu":
        return _bytes(tensor)
    known = _read.get(tensor)
    if known is None or known[:2] != state:
        _read[tensor] = known = (*state, _bytes(tensor))
    values: Hashable = known[2]
    return values


def _bytes(tensor: Tensor) -> Hashable:
    whole = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tensor.shape, whole.view(torch.uint8).numpy().tobytes() if len(whole) else b""
