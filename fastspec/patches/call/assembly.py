"""The engine that decodes a call: from the pool, or made anew of a target and a drafter."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.errors import Unsupported
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.base import Decoding, Drafter, Place, Process, adopt
from fastspec.generation.drafters.given_text import CHUNKS
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import TOGETHER_TOKENS
from fastspec.generation.layer_state import LayerCache
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Clock
from fastspec.generation.target import Source
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.assistants.registry import EagleDecoding
from fastspec.patches.assistants.tree_size import choose_tree
from fastspec.patches.call.processors import CAPTURABLE, signature, temperature_of
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.hf.cache import import_past
from fastspec.patches.hf.changes import weight_places
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel
from fastspec.patches.session import PatchSession


@dataclass(slots=True)
class Assembly:
    """What the engine of a call is made of.

    `rows` sequences of at most `capacity` tokens; `ends` are the call's end tokens. The call samples or not, under
    `process`, which maps scores [R, V] as its `processors` do where these look at no history, or under `settings`
    alone. `answers` tells whether given texts are verified first; `measures` and `pad_token` are those of
    `RoundProgram`. The target begins behind `past`, keys and values [B, Hkv, T, D] of each layer, where keep [B, T]
    bool is True for what is real; positions begin shift [B] further than tokens are counted. Where it is `bounded`,
    layers keep no more of a text than they can see again.
    """

    model: PreTrainedModel
    session: PatchSession
    decoding: Decoding
    source: Source | None
    ops: Ops
    _: KW_ONLY
    rows: int
    capacity: int
    ends: frozenset[int]
    sample: bool
    process: Process | None
    processors: LogitsProcessorList
    settings: SamplingSettings | None
    answers: bool
    measures: bool
    pad_token: int | None
    past: list[LayerCache] | None
    keep: Tensor
    shift: Tensor | None
    bounded: bool
    ranks: Ranks | None = None
    """The processes that hold the model together."""
    dropped: tuple[Span | None, ...] | None = None
    """What transformers' cache of the call leaves of layers that see the whole text, see `HFModel`."""
    likeliest: bool = False
    """Whether the call reads no more of the target's logits than which tokens they make the likeliest."""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return device_of(self.model)

    def size_trees(self, request: Request) -> Decoding:
        """The call's decoding, with its trees: their depth where it is left to the temperature, and their size where it
        is left to a measurement, once for calls of one kind."""
        decoding, trees = self.decoding, self.session.trees
        if isinstance(decoding, EagleDecoding) and self.sample:
            self.decoding = decoding = decoding.sampled(temperature_of(self.processors))
        if isinstance(decoding, EagleDecoding) and decoding.auto is not None:
            key = decoding.auto, self.rows, self.device, self.model.dtype
            if key not in trees:
                self.session.engines.make_room()
                choice = choose_tree(self._fresh, self.ops, request.begins(), decoding.auto.sizes(self.device.type))
                trees[key] = choice if self.ranks is None else self.ranks.first_value(choice)
            self.decoding = decoding.sized(trees[key].chosen)
        return self.decoding

    def engine(self) -> tuple[Engine[HFModel], Hashable]:
        """The engine of the call, and the key to keep it under; None for one that is not kept."""
        engines, key = self.session.engines, self._key() if self.ops.captures else None
        engine: Engine[HFModel] | None = None if key is None else engines.take(key)
        if engine is None:
            engine = self.new_engine()
            key = None if key is None else self._key()  # making the drafter may have packed its head's weights
        else:
            engine.drafter = self._opened(engine.target, engine.drafter, self.rows)
        self._restore(engine.target)
        engine.profile(None if self.session.profile is None else Clock(self.session.profile, self.device))
        return engine, key

    def new_engine(self) -> Engine[HFModel]:
        """An engine that no other call has had."""
        self.session.engines.make_room()
        target, drafter = self._made(self.rows, self._drawn)
        waits = self.process is not None and not all(type(each) in CAPTURABLE for each in self.processors)
        return Engine(
            target,
            drafter,
            self.ops,
            rows=self.rows,
            sample=self.sample,
            process=self.process,
            settings=self.settings,
            place=Place.HOST if waits else Place.DEVICE,
            measures=self.measures,
            pad_token=self.pad_token,
        )

    def entry(self, engine: Engine[HFModel], rows: int) -> tuple[HFModel, Drafter | None]:
        """A target and a drafter of so many rows, for prompts to begin in: the same ones for all prompts."""
        known = engine.entries.get(rows)
        if known is None:
            with SPENT.making():  # longer prompts are not read together
                made = self._made(rows, self._drawn, TOGETHER_TOKENS // rows if rows > 1 else None)
        else:
            made = known[0], self._opened(*known, rows)
        engine.entries[rows] = target, drafter = made
        if self.shift is not None:
            target.move(self.shift[:1].expand(rows))
        if engine.drafter is not None and drafter is engine.drafter:
            raise Unsupported(
                f"assistant {self.decoding.name!r} is continuous, and made one drafter twice: each must be its own"
            )
        return made

    @property
    def _drawn(self) -> Process | None:
        """What drafts are drawn under."""
        return self.process if self.sample else None

    def _key(self) -> Hashable:
        """What calls that can share captured rounds agree in, or None for a decoding that cannot be compared."""
        drawn = signature(self.processors) if self.process is not None else None
        settings_of = self.session.engines.settings_of
        weights = tuple((weight_places(module), settings_of(module)) for module in (self.model, *self.decoding.modules))
        measured = self.answers, self.measures, self.pad_token, self.bounded, self.dropped, self.likeliest
        key = self.decoding, self.rows, self.sample, drawn, self.settings, measured, weights
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _made(self, rows: int, process: Process | None, first: int | None = None) -> tuple[HFModel, Drafter | None]:
        """A target, whose buffers have `first` slots at first, and a drafter; drafts may be drawn under `process`."""
        drafter = self._drafter(rows, process)
        nodes = 1 if drafter is None else max(drafter.nodes, drafter.max_path)
        nodes = max(nodes, *CHUNKS.get(self.device.type, CHUNKS["cuda"])) if self.answers else nodes
        target = language_model(
            self.model,
            self.source,
            rows=rows,
            capacity=self.capacity,
            tail=nodes,
            taps=self.decoding.taps,
            ops=self.ops,
            bounded=self.bounded,
            likeliest=self.likeliest and (drafter is None or not drafter.traits.reads_logits),
            first=first,
            dropped=self.dropped,
            before_norm=self.decoding.before_norm,
        )
        if drafter is not None:
            drafter.bind(target)
        return target, drafter

    def _drafter(self, rows: int, process: Process | None) -> Drafter | None:
        drafter = self.decoding.drafter(
            rows=rows, capacity=self.capacity, device=self.device, ops=self.ops, process=process
        )
        drafter = adopt(drafter, may_draw=process is not None)
        if drafter is not None:
            drafter.ends = self.ends
        return drafter

    def _opened(self, target: HFModel, drafter: Drafter | None, rows: int) -> Drafter | None:
        """Begin a call on a target and a drafter that were kept -> the drafter, which may be another."""
        target.open(self.capacity)
        if drafter is None:
            return None
        if not drafter.traits.reusable:
            drafter = self._drafter(rows, self._drawn)
            if drafter is not None:
                drafter.bind(target)
            return drafter
        drafter.open(self.capacity)
        drafter.ends = self.ends
        return drafter

    def _fresh(self) -> tuple[HFModel, Drafter | None]:
        """A target that stands behind the past, and a drafter whose drafts are not drawn."""
        target, drafter = self._made(self.rows, None)
        self._restore(target)
        return target, drafter

    def _restore(self, target: HFModel) -> None:
        """Begin where the caller's cache ends, and count positions as behind the prompt: the pass over images counts
        its own."""
        if self.past is not None:
            import_past(target.state, self.past, self.keep)
        if self.shift is not None:
            target.move(
                self.shift[: len(target.lengths)]
            )  # with fewer rows than prompts these are tokens alone, all of one shift
