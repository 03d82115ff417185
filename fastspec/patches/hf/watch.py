"""Whether a model is what it was when it was looked at, in a fraction of the time that it takes to say what it is."""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import Any

from torch import Tensor, nn

from fastspec.patches.hf.changes import Settings
from fastspec.patches.hf.compat import has_global_hooks
from fastspec.patches.hf.replaced import has_replaced_methods, replaced_functions
from fastspec.patches.hf.shards import local_part
from fastspec.patches.hf.walk import every_module

HELD = "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"
"""What modules hold that has a say in their passes, by the names of `torch.nn.Module`."""
OWN = "forward", "_hf_hook"
"""What an instance may have of its own: someone's forward, accelerate's hook."""


class Watch:
    """A model as it is now; what its modules held lives on as long as this does.

    Of attributes that take another's place those of OWN are seen, and `Settings`. Where PEFT's adapters are, whose switches are others,
    nothing `holds`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, every_module(model)
        self.kinds, self.owns = list(map(type, self.modules)), list(map(vars, self.modules))
        self.settings = Settings(model, self.modules)
        self.dicts = self._dicts()
        self.empty = [held for held in self.dicts if not held]
        self.filled = [(held, tuple(held.values())) for held in self.dicts if held]
        self.own = [(own, name, own[name]) for own in self.owns for name in OWN if name in own]
        self.parameters = [local_part(each) for own in self.owns for each in own["_parameters"].values() if each is not None]
        self.places = list(map(Tensor.data_ptr, self.parameters))
        self.each = list(dict(zip(self.kinds, self.modules, strict=True)).values())
        self.switched = any("_active_adapter" in own for own in self.owns)
        self.outside = self._outside()

    def holds(self) -> bool:
        """Whether the model is as it was. False may be wrong, True is not. Raises RuntimeError where another thread adds a module."""
        same = (
            not self.switched and list(map(type, self.modules)) == self.kinds and self.settings.hold()
            and all(map(is_, self._dicts(), self.dicts)) and not any(self.empty)
            and all(len(held) == len(before) and all(map(is_, held.values(), before)) for held, before in self.filled)
            and all(own.get(name) is before for own, name, before in self.own)
        )  # fmt: skip
        return same and list(map(Tensor.data_ptr, self.parameters)) == self.places and self._outside() == self.outside

    def _dicts(self) -> list[dict[str, Any]]:
        return [own[name] for own in self.owns for name in HELD]

    def _outside(self) -> Hashable:
        """What has a say in passes and is not the modules' own: global hooks, classes' methods, what these call."""
        functions = tuple(replaced_functions(self.model, self.each))  # themselves: an address may be used again
        kinds = tuple((type(module).forward, has_replaced_methods(type(module))) for module in self.each)
        return has_global_hooks(), kinds, functions
