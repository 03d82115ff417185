"""Buffers and captured rounds that are kept between calls: a bounded pool per patched model.

Engine, their target, their drafter and what these captured hold each other in one direction only, so that rounds which are dropped give
their memory back at once, without a garbage collection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from fastspec.generation.engine.engine import Engine
from fastspec.patches.hf.changes import Settings
from fastspec.patches.hf.compat import is_capturing_hook
from fastspec.patches.hf.replaced import has_replaced_methods
from fastspec.patches.hf.shards import local_part
from fastspec.patches.hf.walk import every_module

KEPT = 4
ADAPTERS_OF_PEFT = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
"""Attributes of PEFT's layers by which they choose what they add: Python's, so that a graph holds what they were at its capture."""


class Engines:
    """The rounds of the last few kinds of call, the least recently used dropped first. A deep copy starts empty."""

    def __init__(self) -> None:
        self.held: OrderedDict[Hashable, Engine[Any]] = OrderedDict()
        self.settings: OrderedDict[nn.Module, Settings] = OrderedDict()

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
        """Drop what is over the bound once another is made, before it is made: no more than the bound exist at a time."""
        while len(self.held) >= KEPT:
            self.held.popitem(last=False)

    def settings_of(self, module: nn.Module) -> Hashable:
        """What stands for a module's attributes and buffers in a key: the same object for as long as they are the same."""
        modules, known = every_module(module), self.settings.pop(module, None)
        if known is None or known.modules != modules or not known.hold():
            now = Settings(module, modules)
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


def weights_of(model: nn.Module) -> Hashable:
    """Where a model's weights lie and what has a say in its modules: a captured round is good for these alone.

    Of each module its kind, hooks but those that transformers leaves behind, a forward of its own, and which of PEFT's adapters it adds.
    Buffers and other attributes are not among it: those are `Settings`. Raises RuntimeError where another thread adds a module meanwhile.
    """
    places: list[int] = []
    changed: list[Hashable] = []
    kinds: list[type[nn.Module]] = []
    for index, module in enumerate(every_module(model)):
        places += [local_part(parameter).data_ptr() for parameter in module._parameters.values() if parameter is not None]
        kinds.append(type(module))
        held = module.__dict__
        hooks = bool(module._forward_hooks or module._forward_pre_hooks) and any(
            not is_capturing_hook(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        if hooks or "forward" in held:
            changed.append((index, hooks, id(held.get("forward"))))
        if "_active_adapter" in held:
            changed.append((index, *(str(held.get(name)) for name in ADAPTERS_OF_PEFT)))
    methods = frozenset((kind, kind.forward, has_replaced_methods(kind)) for kind in set(kinds))
    return tuple(places), tuple(kinds), tuple(changed), methods


def plain_value(value: Any) -> Hashable:
    """A processor's attribute as something that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.flatten().tolist()))
    return tuple(map(plain_value, value)) if isinstance(value, (list, tuple)) else value
