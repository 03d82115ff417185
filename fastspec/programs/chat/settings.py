"""Settings of a chat, their heads, draft models and cascades, and parts of one's own from a Python file."""

from __future__ import annotations

import dataclasses
import inspect
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import fastspec
from fastspec.config import BackendName
from fastspec.devices import use_device
from fastspec.errors import Unsupported, accepted, check_whole
from fastspec.models import SMOLLM2, SMOLLM2_HEADS, load_config, load_draft, load_model
from fastspec.patches.api import ASSISTANTS, cascade_of
from fastspec.programs.heads import fitting_heads, with_tokenizer

# processor -> the settings that it reads, in the order of its arguments
PROCESSORS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}
OLDER_STORAGES = {"basic": "ngram", "onelevel": "one_level"}
"""Names that storages had in the chat, which go on working -> their names."""
KEPT_FOR = ("answer", "chat")
"""Spans that nasd's storage is kept for."""
_TREES = fastspec.Eagle1, fastspec.Eagle2, fastspec.Eagle3, fastspec.Mtp
CONFIGS: dict[str, type] = {each.name: each for each in (fastspec.Nasd, fastspec.Speculative, *_TREES)}
"""Assistant -> its config class, whose fields `/set` takes."""
FIELDS = {f"{name}.{field.name}": field.default for name, each in CONFIGS.items() for field in fields(each)}
"""Assistant and field, such as "nasd.gamma" -> the class's default."""
TREE = ("total_tokens", "depth", "top_k")
COMMAND_FIELDS: dict[str, tuple[str, ...]] = {
    "gamma": ("nasd.gamma", "speculative.gamma"),
    "ngram": ("nasd.n",),
    "top_k_filler": ("nasd.top_k_filler",),
    "stop_if_unknown": ("nasd.stop_if_unknown",),
    "storage": ("nasd.storage",),
    "early_exit": ("speculative.early_exit",),
    "branches": ("speculative.branches",),
    "drafts": ("eagle.drafts",),
    **{f"tree_{name}": (f"eagle2.{name}", f"eagle3.{name}") for name in TREE},
}
"""Name of a command -> the fields that it sets. Chats were once saved with these names."""
# What else a model's generation config may add to sampling, with the value that switches it off.
_NEUTRAL = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


@dataclass(frozen=True)
class Settings:
    """Settings of a chat. `resources` are pairs (assistant, source), as `fastspec.patch` takes them; `max_new_tokens`
    are per answer. Raises `Unsupported` for values out of range."""

    model: str = SMOLLM2
    resources: tuple[tuple[str, str], ...] = SMOLLM2_HEADS
    assistants: tuple[str, ...] = ("eagle3",)
    device: str | None = None
    backend: BackendName = "auto"
    max_new_tokens: int = 128
    processor: str = "greedy"
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.9
    storage_per: str = "answer"
    cache: bool = False
    chat: bool = True
    beams: int = 1
    length_penalty: float = 1.0
    """Of the beam search: above 0 it favours long answers, below short ones."""
    logits_processors: tuple[str, ...] = ()
    """Names of processors of one's own, which change scores before the choice."""
    own_storage: str | None = None
    """Name of a storage of one's own, which nasd has in place of its `storage`."""
    seed: int | None = None
    debug: bool = False
    columns: bool = False
    given: tuple[tuple[str, Any], ...] = ()
    """Fields of the assistants' configs that differ from the classes' defaults: ("nasd.gamma", 3)."""

    def __post_init__(self) -> None:
        check_whole("the chat", 1, max_new_tokens=self.max_new_tokens, top_k=self.top_k, beams=self.beams)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise Unsupported(f"seed must lie between 0 and 2**63 - 1, not {self.seed}")
        if not 0 < self.temperature < float("inf"):
            raise Unsupported(
                f"temperature must be above 0 and finite, not {self.temperature:g}: /processor greedy does without "
                "sampling"
            )
        if not abs(self.length_penalty) < float("inf"):
            raise Unsupported(f"length_penalty must be finite, not {self.length_penalty:g}")
        longest = self.field("nasd.n")
        if self.own_storage is not None and longest is not None:
            raise Unsupported(
                f"nasd.n={longest} is of fastspec's own storages, and {self.own_storage!r} is yours: /ngram default "
                "takes it back"
            )
        if not 0 < self.top_p <= 1:
            raise Unsupported(f"top_p must lie above 0 and at most at 1, not {self.top_p:g}")
        for name, known in (("processor", PROCESSORS), ("storage_per", KEPT_FOR)):
            if getattr(self, name) not in known:
                raise Unsupported(f"{name} {getattr(self, name)!r} is unknown: {accepted(getattr(self, name), known)}")
        for name in CONFIGS:
            self.assistant(name)

    @property
    def greedy(self) -> bool:
        """True where answers are the target's most likely tokens, and so the same for every strategy."""
        return self.processor == "greedy"

    def replace(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)

    def at_temperature(self, value: float) -> dict[str, Any]:
        """Changes that make answers sampled at a temperature, or greedy at 0."""
        if value == 0:
            return {"processor": "greedy"}
        return {"processor": "multinomial" if self.greedy else self.processor, "temperature": value}

    def with_fields(self, changes: dict[str, Any]) -> Settings:
        """The same settings with fields of the assistants' configs changed, named as in `FIELDS`; checked."""
        for name in changes:
            if name not in FIELDS:
                raise Unsupported(f"{name!r} is unknown: {accepted(name, FIELDS)}")
        merged = {**dict(self.given), **changes}
        return self.replace(given=tuple((name, value) for name, value in merged.items() if value != FIELDS[name]))

    def field(self, name: str) -> Any:
        return dict(self.given).get(name, FIELDS[name])

    def assistant(self, name: str) -> Any:
        """The argument `assistant=` of a strategy: a config object where it has one, else the name."""
        if name not in CONFIGS:
            return name
        keys = [(key.partition("."), value) for key, value in self.given]
        given = {field: value for (owner, _, field), value in keys if owner == name}
        return CONFIGS[name](**given)

    def sampling(self, model: Any) -> dict[str, Any]:
        """Arguments of `generate` that follow the processor, whatever the model's generation config has."""
        config, read = model.generation_config, PROCESSORS[self.processor]
        off = {name: value for name, value in _NEUTRAL.items() if getattr(config, name, None) is not None}
        if self.greedy:  # the defaults, which transformers takes for "not given"
            return {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, **off}
        cuts = {"top_k": self.top_k if "top_k" in read else 0, "top_p": self.top_p if "top_p" in read else 1.0}
        return {"do_sample": True, "temperature": self.temperature, **cuts, **off}

    def processor_text(self) -> str:
        """The processor as its command takes it: "topk 0.8 50"."""
        return " ".join((self.processor, *(f"{getattr(self, name):g}" for name in PROCESSORS[self.processor])))


def resource_names() -> list[str]:
    """The assistants that `fastspec.patch` takes a resource for."""
    return [name for name in inspect.signature(fastspec.patch).parameters if name in ASSISTANTS]


def checked_resources(settings: Settings) -> dict[str, str]:
    """Sources of resources by assistant. Raises Unsupported for an assistant that takes none."""
    for name, _ in settings.resources:
        if name not in resource_names():
            raise Unsupported(f"{name!r} takes no resource: {accepted(name, resource_names())}")
    return dict(settings.resources)


def load(settings: Settings) -> tuple[Any, Any]:
    """The settings' model, patched, and its tokenizer; bf16 on CUDA, fp32 on the CPU."""
    if fastspec.Speculative.name in (given := checked_resources(settings)):
        load_config(given[fastspec.Speculative.name])  # a mistyped name is told before the target is loaded
    model, tokenizer = load_model(settings.model, use_device(settings.device))
    return fastspec.patch(model, **read_resources(settings, model, tokenizer), backend=settings.backend), tokenizer


def heads_of(model: str, heads: Sequence[str] | None) -> dict[str, str]:
    """Heads by assistant: those that come with SmolLM2, and those that are given, which fit the model."""
    return dict(SMOLLM2_HEADS if model == SMOLLM2 else ()) | fitting_heads(heads, model)


def read_resources(settings: Settings, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Resources for `fastspec.patch`: draft models are loaded, and cascades read. Raises Unsupported for an assistant
    that takes none, and for what cannot be read."""
    given: dict[str, Any] = checked_resources(settings)
    for name, source in settings.resources:
        if name == "speculative":
            given[name] = load_draft(source, model, tokenizer)
        if name == fastspec.Cascade.name:
            config = with_tokenizer(fastspec.Cascade.from_yaml(source), tokenizer, source)
            given[name] = replace(config, explain=False)  # the chat itself shows the decisions
    return given


def forget_cascade(model: Any) -> None:
    """Drop the keys and values that the stages of a model's cascade keep between calls, where they keep any."""
    models = cascade_of(model)
    if models is not None and models.memory is not None:
        models.memory.clear()


TABLES = {"ASSISTANTS": "own", "PROCESSORS": "processors", "STORAGES": "storages"}
"""Dictionary in the file -> the argument of `session.Chat` that takes it."""


def read_own(path: str | Path) -> dict[str, dict[str, Any]]:
    """Arguments of `session.Chat` from the dictionaries of a Python file, which is run. Raises Unsupported for a file
    that is not there or holds none of them, and whatever the file raises."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise Unsupported(f"--own {path}: no such file")
    found = runpy.run_path(str(place))
    given = {argument: found[name] for name, argument in TABLES.items() if name in found}
    if not given or not all(isinstance(each, dict) for each in given.values()):
        raise Unsupported(
            f"--own {path} must assign dictionaries to {', '.join(TABLES)}, or to one of them: a name -> an assistant, "
            "a logits processor or its class, a class or function that makes a storage"
        )
    return given
