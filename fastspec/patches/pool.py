"""Buffers and captured rounds that are kept between calls: a bounded pool per patched model.

Engine, their target, their drafter and what these captured hold each other in one direction only, so that rounds which
are dropped give their memory back at once, without a garbage collection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from fastspec.generation.engine.engine import Engine
from fastspec.patches.hf.changes import ModuleSettings
from fastspec.patches.hf.compat import every_module

KEPT = 4


class Engines:
    """The rounds of the last few kinds of call, the least recently used dropped first. A deep copy starts empty."""

    def __init__(self) -> None:
        self.held: OrderedDict[Hashable, Engine[Any]] = OrderedDict()
        self.settings: OrderedDict[nn.Module, ModuleSettings] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engines:
        return Engines()

    def take(self, key: Hashable) -> Engine[Any] | None:
        """The rounds of a kind of call, taken out of the pool: a call that fails does not put them back."""
        return self.held.pop(key, None)

    def put(self, key: Hashable, engine: Engine[Any]) -> None:
        """Keep the rounds of a call that has ended."""
        self.held[key] = engine
        while len(self.held) > KEPT:
            self.held.popitem(last=False)

    def make_room(self) -> None:
        """Drop what is over the bound once another is made, before it is made: no more than the bound exist at a
        time."""
        while len(self.held) >= KEPT:
            self.held.popitem(last=False)

    def settings_of(self, module: nn.Module) -> Hashable:
        """What stands for a module's attributes and buffers in a key: the same object for as long as they are the
        same."""
        modules, known = every_module(module), self.settings.pop(module, None)
        if known is None or known.modules != modules or not known.hold():
            now = ModuleSettings(module, modules)
            now.mark = known.mark if known is not None and known.values == now.values else now.mark
            known = now
        self.settings[module] = known
        while len(self.settings) > KEPT:
            self.settings.popitem(last=False)
        return known.mark

    def clear(self) -> None:
        """Free everything."""
        self.held.clear()
        self.settings.clear()


def plain_value(value: Any) -> Hashable:
    """A processor's attribute as something that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.flatten().tolist()))
    return tuple(map(plain_value, value)) if isinstance(value, (list, tuple)) else value
