"""Session of a patched model: the undo log (instances only, undone in reverse, refused when someone else has patched
over it), and the rounds that are kept between calls."""

from __future__ import annotations

import copy
import enum
import re
import threading
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.config import HeadBits
from fastspec.devices import made_current
from fastspec.errors import FastSpecError, PatchConflict, Unsupported
from fastspec.forks import at_fork
from fastspec.generation.decoder_layer import is_packed, unpack
from fastspec.generation.drafters.policy import MeasuredCosts
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine.engine import Engine
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Profile, Stats
from fastspec.patches.assistants.smaller_heads import may_round
from fastspec.patches.backends import choose_backend, counted, exact_ops
from fastspec.patches.checks.self_check import self_check
from fastspec.patches.hf.changes import Identities
from fastspec.patches.hf.compat import (
    device_of,
    every_module,
    hooks_of,
    is_autocast,
    is_unpacking_hook,
    local_part,
    unpack_weights,
)
from fastspec.patches.hf.exact import Defaults, refuse_device
from fastspec.patches.hf.layer_weights import pack_model, reads_packed
from fastspec.patches.hf.modes import Mode, mode_for, not_patched
from fastspec.patches.on_cpu import named, why_torch
from fastspec.patches.tuning.store import use_tuned

KEPT = 4


class Engines:
    """Pool of the rounds of the last few kinds of call, the least recently used dropped first.

    An engine, its target, its drafter and what these captured hold each other in one direction only, so that rounds
    which are dropped give their memory back at once, without a garbage collection.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[Hashable, Engine[Any]] = OrderedDict()
        """Key of a kind of call -> its rounds, which a call takes out, and puts back where it does not fail."""
        self.seen: OrderedDict[nn.Module, Identities] = OrderedDict()

    def make_room(self) -> None:
        """Drop what is over the bound once another is made, before it is made: no more than the bound exist at a
        time."""
        while len(self.held) >= KEPT:
            self.held.popitem(last=False)

    def key_of(self, module: nn.Module) -> Hashable:
        """Value that stands for a module's weights, attributes and buffers in a key: equal for as long as they are the
        same."""
        known = self.seen.pop(module, None)
        if known is None or not known.holds():
            known = Identities(module, known)
        self.seen[module] = known
        while len(self.seen) > KEPT:
            self.seen.popitem(last=False)
        return known.key

    def clear(self) -> None:
        """Free everything."""
        self.held.clear()
        self.seen.clear()


def plain_value(value: Any) -> Hashable:
    """A processor's attribute as something that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.flatten().tolist()))
    return tuple(map(plain_value, value)) if isinstance(value, (list, tuple)) else value


class Absent(enum.Enum):
    """The value of an attribute that an object's own `__dict__` did not have; a deep copy is the same object."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT
STATE = "_fastspec"
CALLS_KEPT = 1000


@dataclass(slots=True)
class Change:
    """One entry of the log: `owner.__dict__[name]` went from `before` (or ABSENT) to `after`."""

    owner: Any
    name: str
    before: Any
    after: Any

    @property
    def ours(self) -> bool:
        """True where the attribute still holds what we put there."""
        return self.owner.__dict__.get(self.name, ABSENT) is self.after

    def undo(self) -> None:
        """Put the former value back, or remove the attribute that was not there."""
        if self.before is ABSENT:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = self.before


class Turn:
    """One generate call at a time per model; a second thread waits, a nested call is refused.

    Who waits first comes first, so that an open batch, which takes a turn for every round, leaves others theirs.
    """

    def __init__(self) -> None:
        self.lock, self.gate = threading.Lock(), threading.Lock()
        self.owner: int | None = None
        at_fork(self)

    def forked(self) -> None:
        """Be free in a forked process, unless the thread that forked holds the turn."""
        self.gate = threading.Lock()
        if self.owner != threading.get_ident():
            self.lock, self.owner = threading.Lock(), None

    def refuse_nested(self) -> None:
        """Raise Unsupported when this thread holds the turn already."""
        if self.owner == threading.get_ident():
            raise Unsupported(
                "generate(assistant=...) was called inside another such call on the same model, from a streamer or "
                "criterion"
            )

    @contextmanager
    def taken(self, device: torch.device) -> Iterator[None]:
        """Hold the turn, and let the model's device be the current one; raises Unsupported when this thread holds it
        already."""
        self.refuse_nested()
        with self.gate:  # held by the one who is next
            self.lock.acquire()
        self.owner = threading.get_ident()
        try:
            with made_current(device):
                yield
        finally:
            self.owner = None
            self.lock.release()


@dataclass
class PatchSession:
    """Everything that fastspec knows of one patched model. It lives in the model's own `__dict__`, outside its modules.

    A deep copy of the model is patched too, by a session of its own (`deep_copy`). A pickle, such as
    `torch.save(model)`, and a shallow copy hold the model as it was before the patch (`state_before`): an ordinary one,
    with or without fastspec.
    """

    backend: str
    resources: dict[str, Any]
    exact: bool | None = None
    """True where every assistant is held to the bits of plain decoding; None where that costs little."""
    stored: bool | None = None
    """True where weights that a quantiser stored are multiplied as they are; None where that is measured to be
    faster."""
    head_bits: HeadBits | None = None
    """Bits of the weights that heads multiply: 8, or 16 for those of their dtype; None for what is measured to be
    faster."""
    captured: bool = False
    """True where transformers had its capturing hooks on the model before the patch; else they go with it."""
    log: list[Change] = field(default_factory=list)
    turn: Turn = field(default_factory=Turn)
    calls: deque[Stats] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    default: Any = None
    """The assistant of calls that name none, as `patch` was given it."""
    unassisted: Counter[str] = field(default_factory=Counter)
    """Why calls that a default assistant could not serve ran transformers' own decoding -> how many did."""
    defaults: Defaults = field(default_factory=Defaults)
    told: set[str] = field(default_factory=set)
    """Why calls ran in generic mode, as the user was told."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Number of calls of each op from Python; a captured round repeats its calls without Python."""
    _counted: tuple[Ops, Ops] | None = None
    """The kernels of the last call, and the same as they count their calls."""
    profile: Profile | None = None
    """Profile that the parts of every round are taken down in, inside `fastspec.profile`."""
    engines: Engines = field(default_factory=Engines)
    trees: dict[Any, TreeSizes] = field(default_factory=dict)
    """(decoding's steps, rows, device, dtype, temperature) -> the sizes of its trees, where rounds choose them."""
    pinned: int | None = None
    """The size that a warm-up asks of the rounds of calls, in place of the one that they choose."""
    ngram_costs: dict[tuple[int, int], MeasuredCosts] = field(default_factory=dict)
    """(rows, nodes of the largest tree) -> the costs of rounds with n-gram drafts, where they are measured."""
    warned: bool = False
    """True where the user was warned that the draft model's drafts are not accepted."""
    batches: int = 0
    """Open batches (`fastspec.continuous`), whose threads run the model."""
    packed: list[Tensor] = field(default_factory=list)
    """Parameters, or what lies here of them, that became views of a packed buffer, or were turned in their own."""
    laid: Tensor | tuple[Any, ...] | None = None
    """Where laying the weights together moved none: one that lay so already, of a model that shares its weights with a
    patched one; else device, dtype, mode and number of modules of a model that has nothing to lay together."""

    def mode(self, model: Any) -> Mode:
        """Mode that a model runs in now: what was last seen of it, where nothing has changed since."""
        seen = self.defaults.look(model)
        return mode_for(model) if is_autocast(device_of(model)) else seen

    def ops(self, model: Any, mode: Mode) -> Ops:
        """The backend's kernels for a model that runs in this mode now: it may have moved, or been hooked, since it was
        patched. Raises FastSpecError where they fail the self-check of a device that they were not tested on."""
        device, ops = device_of(model), self._backend_ops(model, mode)
        rounds = self.head_bits == 8 or (self.head_bits is None and may_round(model, mode, self.backend))
        reads = self.reads_stored(model, mode, ops)
        stored: dict[str, Any] = {} if reads else dict.fromkeys(("stored_linears", "stored_parts", "stored_experts"))
        ops = replace(ops, **stored, heads=ops if rounds else None)
        if self.exact:
            refuse_device(ops, mode.dtype)
        if self.why_inexact(model, mode, ops) is None:
            ops = replace(exact_ops(), **stored, drafts=ops)
        if ops.name == "triton":
            use_tuned(device)
        with made_current(device):
            for each in filter(None, (ops, ops.drafts, (ops.drafts or ops).heads)):
                self_check(each, mode.dtype, device)
            # an EAGLE-3 head, the only kind that drafts in a dtype of its own
            heads = (each.config.kind for each in self.resources.values() if isinstance(each, BoundHead))
            if ops.drafts_in is not None and "eagle3" in heads:
                try:
                    self_check(ops, ops.drafts_in, device)
                except FastSpecError as error:
                    warnings.warn(f"heads draft in the model's dtype: {error}", RuntimeWarning, stacklevel=2)
                    ops = replace(ops, drafts_in=None)
        if self._counted is None or self._counted[0] != ops:
            self._counted = ops, counted(ops, self.kernels)
        return self._counted[1]

    def _backend_ops(self, model: Any, mode: Mode) -> Ops:
        device, adapted = device_of(model), mode.adapter is not None
        name = named(self.backend, device, mode.dtype, adapted)
        ops = choose_backend(name, device, adapted=adapted)
        # chosen for the user, whose model is saved and copied as it was: its weights stay where they are
        return ops if name == self.backend else replace(ops, packs=False)

    def reads_stored(self, model: Any, mode: Mode, ops: Ops) -> bool:
        """True where quantised weights are multiplied as they are stored by the kernels of a backend."""
        return self.defaults.reads_stored(model, mode, ops) if self.stored is None else self.stored

    def why_inexact(self, model: Any, mode: Mode, ops: Ops) -> str | None:
        """Reason for which drafts may change a near-tie of a model that runs on these kernels; None where they do
        not."""
        if self.exact is None:
            return self.defaults.why_inexact(model, mode, ops)
        return None if self.exact else "patch(model, exact=False) asked for the fast kernels"

    def why_torch(self, model: Any, mode: Mode) -> str | None:
        """Reason for which backend="auto" runs a model on the CPU without the C++ kernels, or None."""
        on_cpu = self.backend == "auto" and device_of(model).type == "cpu"
        return why_torch(mode.dtype, mode.adapter is not None) if on_cpu else None

    def unpack(self, model: Any) -> None:
        """Let compressed-tensors unpack a model's weights, unless passes read all of them as stored."""
        if self._is_to_unpack(model):
            unpack_weights(model)

    def pack(self, model: Any, mode: Mode, ops: Ops | None = None) -> bool:
        """Lay the model's weights together, on a backend that wants it, where they are not: at first, and when the
        model was moved -> whether it was tried. Those that compressed-tensors has yet to unpack wait for that. `ops`
        are the session's for this mode, where they are known."""
        if self._is_to_unpack(model):
            return False
        ops = ops or self.ops(model, mode)
        lies = self.packed[0] if self.packed else self.laid
        apart = ops.packs and not (is_packed(lies) if isinstance(lies, Tensor) else lies == _kind(model, mode))
        if apart:
            self.packed += pack_model(model, experts=ops.experts is not None)
            if not self.packed:
                there = next((part for part in map(local_part, model.parameters()) if is_packed(part)), None)
                self.laid = _kind(model, mode) if there is None else there
        return apart

    def _is_to_unpack(self, model: Any) -> bool:
        if not any(map(is_unpacking_hook, hooks_of(model))):
            return False
        mode = mode_for(model)
        return not (self.reads_stored(model, mode, self._backend_ops(model, mode)) and reads_packed(model))

    def tell_mode(self, mode: Mode) -> None:
        """Warn once of each reason why a model of a known family runs in generic mode."""
        why = mode.why
        if why is not None and why not in self.told:
            self.told.add(why)
            warnings.warn(f"assisted calls run in generic mode, which is slower: {why}", stacklevel=4)

    def leave(self, reason: Exception) -> None:
        """Leave a call to transformers that the default assistant cannot serve: count it, and warn once of each
        reason."""
        text = str(reason)
        kind = re.sub(r"\d+", "N", text)
        if not any(re.sub(r"\d+", "N", told) == kind for told in self.unassisted):
            warnings.warn(
                f"the default assistant cannot serve this call, and transformers' own generate runs: {text}",
                stacklevel=4,
            )
        self.unassisted[text] += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchSession:
        twin = memo[id(self)] = object.__new__(type(self))  # known before the log, which leads back here
        own: dict[str, Any] = {"trees": {}, "ngram_costs": {}, "batches": 0, "_counted": None}
        own |= {"turn": Turn(), "engines": Engines(), "defaults": Defaults()}
        copied = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in own}
        twin.__dict__.update(copied | own)
        return twin

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.__dict__[name]` and log what was there."""
        self.log.append(Change(owner, name, owner.__dict__.get(name, ABSENT), value))
        owner.__dict__[name] = value

    def original(self, model: Any, name: str) -> Any:
        """Method of a model as it was before the patch."""
        before = next(change.before for change in self.log if change.owner is model and change.name == name)
        return getattr(type(model), name).__get__(model) if before is ABSENT else before

    def undo(self, force: bool = False) -> list[str]:
        """Undo every change in reverse. Where someone else has written over one: PatchConflict before anything is
        undone, or, with `force`, theirs stays and its name is returned."""
        if self.batches:
            raise PatchConflict(
                "fastspec.continuous still decodes with this model: close that batch first, batch.close()"
            )
        foreign = [change for change in self.log if not change.ours]
        names = [f"{type(change.owner).__name__}.{change.name}" for change in foreign]
        if foreign and not force:
            raise PatchConflict(
                f"{', '.join(names)} was changed by someone else after fastspec.patch: undo that change first, or call "
                "fastspec.unpatch(model, force=True), which leaves it in place and undoes the rest"
            )
        for change in reversed(self.log):
            if change.ours:
                change.undo()
        self.log.clear()
        self.engines.clear()
        self.defaults = Defaults()
        self.trees.clear()
        self.ngram_costs.clear()
        if "cascade" in self.resources:
            self.resources["cascade"].close()
        for parameter in self.packed:
            unpack(parameter)
        self.packed.clear()
        return names


def _kind(model: Any, mode: Mode) -> tuple[Any, ...]:
    return device_of(model), mode.dtype, mode.adapter is not None, len(every_module(model))


def session_of(model: Any) -> PatchSession | None:
    """The session of a patched model, or None; None too where another object has taken the model's attributes."""
    found = getattr(model, "__dict__", {}).get(STATE)
    return found if isinstance(found, PatchSession) and any(change.owner is model for change in found.log) else None


def patched_session(model: Any, then: str) -> PatchSession:
    """The session of a patched model. Raises Unsupported for another, with `then`: what comes before the call."""
    session = session_of(model)
    if session is None:
        raise Unsupported(not_patched(model, then))
    return session


def state_before(self: Any) -> Any:
    """A patched model's `__getstate__`: the attributes that it had before the patch, which is what a pickle and a
    shallow copy take."""
    session = session_of(self)
    kind: Any = type(self)
    state: dict[str, Any] = dict(kind.__getstate__(self))
    for change in reversed([] if session is None else session.log):
        if change.owner is self and state.get(change.name) is change.after:
            state.pop(change.name)
            state.update({} if change.before is ABSENT else {change.name: change.before})
    return state


def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
    """A patched model's `__deepcopy__`: all attributes, so that the copy is patched too."""
    kind: Any = type(self)
    twin = memo[id(self)] = kind.__new__(kind)
    twin.__setstate__(copy.deepcopy(kind.__getstate__(self), memo))
    return twin
