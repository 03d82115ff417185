"""Snapshots of a model, from the cheapest look to the whole: each says whether the model is still what it was.

| part | reads | who asks |
|---|---|---|
| `ModuleSettings` | attributes and buffers of modules, configurations | the two below |
| `weight_places` | addresses of weights, kinds, hooks and forwards of modules | the two below |
| `Identities` | the objects that modules hold, compared by identity | pools: keys of captured rounds |
| `Snapshot` | all of these, and the mode | sessions before every call, open batches before every prompt |
| `WeightSample` | torch's counts of changes of the weights, and a few bytes of each | open batches: kept prefixes |
| `fingerprint` | every byte of the weights | cascades: keys and values kept between calls |
| `weights_digest` | the same, in every process | answers that a cascade's predictor is trained on |
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from fastspec.errors import Unsupported
from fastspec.patches.hf.compat import (
    CAPTURING_FLAG,
    MODULE_PARTS,
    OWN_PARTS,
    PEFT_SWITCHES,
    change_count,
    device_of,
    every_module,
    has_global_hooks,
    held_tensors,
    hooks_of,
    is_capturing_hook,
    local_part,
    own_buffers,
    own_parameters,
)
from fastspec.patches.hf.modes import Mode, mode_for
from fastspec.patches.hf.replaced import has_replaced_methods, replaced_functions

PLAIN = frozenset((bool, int, float, str, type(None)))
HOLDERS = frozenset((list, tuple, dict, set))
SMALL = 1 << 16
"""Elements up to which a tensor's values are read; a larger one is known by its place and count of changes."""
_read: Any = WeakIdKeyDictionary()
"""Tensors on a device -> (place, changes, values): they are read once for each change."""


class ModuleSettings:
    """Attributes and buffers of a model's modules and its configurations now, of which rounds are made; they live on as
    long as this does. Left out are `training` and names that begin with an underscore, torch's and transformers'
    own."""

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        self.modules, self.mark = modules, object()
        """The mark stands for what is here; another snapshot of the same may take it over."""
        self.owners = [vars(module) for module in modules]
        self.owners += [own_buffers(module) for module in modules]
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
        """True where all of it is as it was. False may be wrong, for an equal value in another object, True is not."""
        now = [held.get(name) for held, name in self.places]
        return (
            all(map(is_, now, self.plain))
            and list(map(len, self.owners)) == self.sizes
            and self._others() == self.other
        )

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
    """Values of a small tensor; on a device those of torch's last counted change, which `.data` is not."""
    if tensor.is_meta:
        return tuple(tensor.shape)
    state = tensor.data_ptr(), change_count(tensor)
    if tensor.numel() > SMALL:
        return state
    if tensor.device.type == "cpu":
        return _bytes(tensor)
    known = _read.get(tensor)
    if known is None or known[:2] != state:
        _read[tensor] = known = (*state, _bytes(tensor))
    return known[2]


def _bytes(tensor: Tensor) -> Hashable:
    whole = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tensor.shape, whole.view(torch.uint8).numpy().tobytes() if len(whole) else b""


def weight_places(model: nn.Module) -> Hashable:
    """Addresses of a model's weights, and of each module its kind, hooks but those that transformers leaves behind, a
    forward of its own, and PEFT's active adapters: a captured round is good for these alone.

    Other attributes are `ModuleSettings`. Raises RuntimeError where another thread adds a module meanwhile.
    """
    places: list[int] = []
    changed: list[Hashable] = []
    kinds: list[type[nn.Module]] = []
    for index, module in enumerate(every_module(model)):
        places += [held.data_ptr() for each in own_parameters(module).values() for held in held_tensors(each)]
        kinds.append(type(module))
        held = module.__dict__
        hooks = not all(map(is_capturing_hook, hooks_of(module)))
        if hooks or "forward" in held:
            changed.append((index, hooks, id(held.get("forward"))))
        if PEFT_SWITCHES[0] in held:
            changed.append((index, *(str(held.get(name)) for name in PEFT_SWITCHES)))
    methods = frozenset((kind, kind.forward, has_replaced_methods(kind)) for kind in set(kinds))
    return tuple(places), tuple(kinds), tuple(changed), methods


class Identities:
    """Cheap check whether a model's modules, hooks, weights or settings changed; what modules held lives on with it.

    Attributes that replace others are seen by OWN_PARTS or `ModuleSettings`. With PEFT's adapters it never `holds`.
    """

    def __init__(self, model: nn.Module, former: Identities | None = None) -> None:
        self.model, self.modules = model, every_module(model)
        self.kinds, self.owns = list(map(type, self.modules)), list(map(vars, self.modules))
        self.settings = ModuleSettings(model, self.modules)
        self.dicts = self._dicts()
        self.empty = [held for held in self.dicts if not held]
        self.filled = [held for held in self.dicts if held]
        self.sizes, self.held = list(map(len, self.filled)), self._held()
        self.own = [(own, name, own[name]) for own in self.owns for name in OWN_PARTS if name in own]
        weights = (each for module in self.modules for each in own_parameters(module).values())
        self.parameters = [held for each in weights for held in held_tensors(each)]
        self.places = list(map(Tensor.data_ptr, self.parameters))
        self.each = list(dict(zip(self.kinds, self.modules, strict=True)).values())
        self.switched = any(PEFT_SWITCHES[0] in own for own in self.owns)
        self.outside = self._outside()
        if former is not None and former.settings.values == self.settings.values:
            self.settings.mark = former.settings.mark
        self.key: Hashable = weight_places(model), self.settings.mark
        """Value that stands for the weights and settings: equal to that of a `former` look where they are."""

    def holds(self) -> bool:
        """True where the model is surely as it was. Raises RuntimeError where another thread adds a module."""
        same = (
            not self.switched
            and list(map(type, self.modules)) == self.kinds
            and self.settings.hold()
            and all(map(is_, self._dicts(), self.dicts))
            and not any(self.empty)
            and list(map(len, self.filled)) == self.sizes
            and all(map(is_, self._held(), self.held))
            and all(own.get(name) is before for own, name, before in self.own)
        )
        return same and list(map(Tensor.data_ptr, self.parameters)) == self.places and self._outside() == self.outside

    def _dicts(self) -> list[dict[str, Any]]:
        return [own[name] for own in self.owns for name in MODULE_PARTS]

    def _held(self) -> list[Any]:
        return [each for held in self.filled for each in held.values()]

    def _outside(self) -> Hashable:
        """Everything else that has a say in passes: global hooks, classes' methods, functions that these call."""
        # themselves: an address may be used again
        functions = tuple(replaced_functions(self.model, self.each) if isinstance(self.model, PreTrainedModel) else ())
        kinds = tuple((type(module).forward, has_replaced_methods(type(module))) for module in self.each)
        return has_global_hooks(), kinds, functions


class Snapshot:
    """Snapshot of what rounds are made of: mode, settings and addresses of weights. `differs()` is true once one
    changed, and `changed()` says the same at less cost."""

    def __init__(self, model: PreTrainedModel, former: Snapshot | None = None) -> None:
        self.model: PreTrainedModel = model
        self._identities: Identities = Identities(model, None if former is None else former._identities)
        self._parts = self._parts_now()
        self._training = self._training_now()

    @property
    def mode(self) -> Mode:
        """Mode that the model ran in then, outside autocast."""
        return self._parts[0] if isinstance(self._parts, tuple) else mode_for(self.model)

    @property
    def key(self) -> Hashable:
        """`Identities.key`, which is equal to that of a `former` snapshot where weights and settings are."""
        return self._identities.key

    def differs(self) -> bool:
        """True where rounds made at this moment would be made of something else."""
        return self._parts_now() != self._parts

    def changed(self) -> bool:
        """The answer of `differs`, at little cost where nothing changed; True too where the model cannot be read."""
        try:
            if self._identities.holds() and self._training_now() == self._training:
                return False
            identities = Identities(self.model, self._identities)
            changed = self.differs()
        except Exception:
            return True
        if not changed:
            self._identities = identities
            self._training = self._training_now()
        return changed

    def _training_now(self) -> list[bool]:
        """Modules that are in train mode, where a pass may add noise."""
        return [module.training for module in self._identities.modules]

    def _parts_now(self) -> Hashable:
        """Equal to nothing else where another thread adds modules to the model just now."""
        # no autocast of the thread that asks; the batch's own has none
        with torch.autocast(device_of(self.model).type, enabled=False):
            try:
                settings = ModuleSettings(self.model, every_module(self.model)).values
                return mode_for(self.model), weight_places(self.model), settings
            except RuntimeError as error:
                if "during iteration" not in str(error):  # of a dictionary of modules or hooks
                    raise
                return object()


SAMPLED = 16
"""Bytes that are read of a weight."""


class WeightSample:
    """Sample of the weights and buffers of modules, as they are now. `holds()` is false once one of them was changed in
    place: where torch counted it, or where a byte of the sample is another. A change by `.data` is seen by these bytes
    alone, SAMPLED of each tensor, far from each other."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [each for module in modules for each in every_module(module)]
        held = [each for owner in owners for each in (*own_parameters(owner).values(), *own_buffers(owner).values())]
        self.tensors = [local_part(each) for each in held if each is not None and not each.is_meta]
        plain = [each for each in self.tensors if type(each) in (Tensor, nn.Parameter)]
        whole = [each.detach().view(-1) for each in plain if each.numel() and each.is_contiguous()]
        self.places: dict[torch.device, list[Tensor]] = {}
        for each in (elements.view(torch.uint8) for elements in whole):
            self.places.setdefault(each.device, []).append(each[:: len(each) // SAMPLED + 1])
        self.counts, self.bytes = self._counts(), self._bytes()

    def holds(self) -> bool:
        """True where nothing is seen to have changed."""
        return self._counts() == self.counts and all(map(torch.equal, self._bytes(), self.bytes))

    def _counts(self) -> list[int]:
        return list(map(change_count, self.tensors))

    def _bytes(self) -> list[Tensor]:
        return [torch.cat(places) for places in self.places.values()]


BLOCK = 63
"""Words of 8 bytes that are summed up in a large tensor. Odd: a bit that flips in all changes the sum too."""
WORDS = 1 << 14
"""Words up to which every one counts by itself."""
SKIPPED = frozenset(vars(nn.Module())) - {"training"} | {CAPTURING_FLAG}
"""Attributes that torch gives every module and transformers some, which say nothing of what it computes."""
GOLDEN, FACTOR = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd numbers of 64 bits from splitmix64, as signed ones


def fingerprint(model: nn.Module) -> Hashable:
    """Key of what passes follow from: names, shapes, dtypes, device types and bytes of parameters and buffers, hooks,
    replaced forwards, and the modules' own switches. Equal for equal models, wherever the weights lie.

    Any one value that changes is seen, and any change of many but by a chance of about 2^-64, or where values of a
    tensor of more than 128 KiB change places within 504 bytes. Raises `Unsupported` for weights that are not in
    memory.
    """
    tensors = _tensors(model)
    layout = tuple((name, tuple(each.shape), str(each.dtype), each.device.type) for name, each in tensors.items())
    places = sorted({each.device for each in tensors.values()}, key=str)
    with torch.inference_mode():
        sums = tuple(_checksum([each for each in tensors.values() if each.device == place]) for place in places)
    return layout, sums, tuple(_switches(name, module) for name, module in model.named_modules())


def weights_digest(model: nn.Module) -> str:
    """Text for a model's weights, the same in every process, as sure as `fingerprint` and refused as there."""
    held = hashlib.sha256()
    with torch.inference_mode():
        for name, tensor in _tensors(model).items():
            held.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum([tensor])};".encode())
    return held.hexdigest()[:16]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Raises as `check_present`."""
    check_present(model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_present(model: nn.Module) -> None:
    """Raise `Unsupported` for a model whose weights are not in memory between its passes."""
    absent = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if absent is not None:
        raise Unsupported(
            f"the weights of {type(model).__name__} are not in memory between passes ({absent} is on the device "
            "meta), so that a change of "
            "them would not be seen: load it without offloading, or keep nothing between calls (Cascade: memory=None)"
        )


def _checksum(tensors: list[Tensor]) -> int:
    """One number of 64 bits for the bytes of tensors on one device, and their places."""
    sums = torch.cat([part for each in tensors for part in _sums(each)])
    mixed = sums + torch.arange(1, len(sums) + 1, device=sums.device) * GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * FACTOR
    return int((mixed ^ (mixed >> 29)).sum())


def _sums(tensor: Tensor) -> list[Tensor]:
    """Words of a tensor, or sums over blocks, and the bytes behind its last word, int64, in as few calls as can be."""
    held = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat, ends = held.view(-1), tensor.nbytes % 8
    if held.data_ptr() % 8 or held.storage_offset() * held.itemsize % 8:
        flat = flat.clone()
    if ends:
        octets = flat.view(torch.uint8)
        words, rest = octets[:-ends].view(torch.int64), [octets[-ends:].long()]
    else:
        words, rest = flat.view(torch.int64), []
    count = tensor.nbytes // 8
    if count <= WORDS:
        return [words, *rest]
    blocks = count // BLOCK
    return [words[: blocks * BLOCK].view(blocks, BLOCK).sum(1), words[blocks * BLOCK :], *rest]


def _switches(name: str, module: nn.Module) -> Hashable:
    """A module's class, what hooks into it, and its plain attributes."""
    hooks = [hook for hook in hooks_of(module) if not is_capturing_hook(hook)]
    own = module.__dict__.get("forward")
    told = [(key, value) for key, value in vars(module).items() if key not in SKIPPED and _is_plain(value)]
    return name, type(module).__qualname__, *map(id, (*hooks, own)), repr(told)


def _is_plain(value: Any) -> bool:
    """True where a value is a number, a text, or lists and dictionaries of these."""
    if isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, (list, tuple, set)) and all(map(_is_plain, value))
