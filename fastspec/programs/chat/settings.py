"""What a chat is set to: one frozen object, replaced by the commands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import fastspec
from fastspec.errors import Unsupported
from fastspec.models import SMOLLM2, SMOLLM2_HEADS

# processor -> the settings that it reads, in the order of its arguments
PROCESSORS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
}
STORAGES = {"basic": "ngram", "onelevel": "one_level", "suffix": "suffix"}
"""Name in the chat -> name in fastspec.Nasd."""
KEPT_FOR = ("answer", "chat")
"""How long nasd's storage is kept."""
DRAFTS = ("greedy", "sampled")
"""How an EAGLE-1 head drafts in sampled answers."""

# assistant -> (config class, field of it -> setting); a setting left at None keeps the class's default
CONFIGS: dict[str, tuple[str, dict[str, str]]] = {
    "nasd": (
        "Nasd",
        {"n": "ngram", "gamma": "gamma", "top_k_filler": "top_k_filler", "stop_if_unknown": "stop_if_unknown", "storage": "storage"},
    ),
    "speculative": ("Speculative", {"gamma": "gamma", "branches": "branches", "early_exit": "early_exit"}),
    "eagle": ("Eagle1", {"drafts": "drafts"}),
    "eagle2": ("Eagle2", {"total_tokens": "tree_total_tokens", "depth": "tree_depth", "top_k": "tree_top_k"}),
    "eagle3": ("Eagle3", {"total_tokens": "tree_total_tokens", "depth": "tree_depth", "top_k": "tree_top_k"}),
}
# What else a model's generation config may add to sampling, with the value that switches it off.
_NEUTRAL = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


@dataclass(frozen=True)
class Settings:
    """Settings of a chat. `resources` are pairs (assistant, source), as `fastspec.patch` takes them; temperature in the target's logits,
    `max_new_tokens` per answer. Raises `Unsupported` for values out of range.
    """

    model: str = SMOLLM2
    resources: tuple[tuple[str, str], ...] = SMOLLM2_HEADS
    assistants: tuple[str, ...] = ("eagle3",)
    device: str | None = None
    backend: str = "auto"
    max_new_tokens: int = 128
    processor: str = "greedy"
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.9
    gamma: int | None = None
    ngram: int | None = None
    top_k_filler: int | None = None
    stop_if_unknown: bool = True
    storage: str | None = None
    storage_per: str = "answer"
    early_exit: int | None = None
    branches: int | None = None
    drafts: str | None = None
    tree_total_tokens: int | str | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    cache: bool = False
    chat: bool = True
    beams: int = 1
    seed: int | None = None
    debug: bool = False
    columns: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "gamma", "ngram", "top_k_filler", "early_exit", "branches", "beams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Unsupported(f"{name} must be at least 1, not {value}")
        if not 0 < self.temperature < float("inf"):
            raise Unsupported(f"temperature must be above 0 and finite, not {self.temperature:g}: /processor greedy does without sampling")
        if not 0 < self.top_p <= 1:
            raise Unsupported(f"top_p must lie above 0 and at most at 1, not {self.top_p:g}")
        for name, accepted in (("processor", PROCESSORS), ("storage", STORAGES), ("storage_per", KEPT_FOR), ("drafts", DRAFTS)):
            value = getattr(self, name)
            if value is not None and value not in accepted:
                raise Unsupported(f"{name} {value!r} is unknown: accepted are {', '.join(accepted)}")
        for name in CONFIGS:
            self.assistant(name)

    @property
    def greedy(self) -> bool:
        """Whether answers are the target's most likely tokens, and so the same for every strategy."""
        return self.processor == "greedy"

    def replace(self, **changes: Any) -> Settings:
        """The same settings with some changed; checked."""
        return dataclasses.replace(self, **changes)

    def at_temperature(self, value: float) -> Settings:
        """The same settings, but sampling at a temperature, or greedy at 0."""
        if value == 0:
            return self.replace(processor="greedy")
        return self.replace(processor="multinomial" if self.greedy else self.processor, temperature=value)

    def assistant(self, name: str) -> Any:
        """What `generate(assistant=...)` takes for a strategy: a config object where settings go into one, else the name."""
        if name not in CONFIGS:
            return name
        maker, fields = CONFIGS[name]
        given = {field: getattr(self, setting) for field, setting in fields.items()}
        given = {field: STORAGES.get(value, value) for field, value in given.items() if value is not None}
        return getattr(fastspec, maker)(**given)

    def sampling(self, model: Any) -> dict[str, Any]:
        """The arguments of `generate` that make it follow the processor, whatever the model's generation config says of sampling."""
        off = {name: value for name, value in _NEUTRAL.items() if getattr(model.generation_config, name, None) is not None}
        if self.greedy:  # the defaults, which transformers takes for "not given"
            return {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, **off}
        read = PROCESSORS[self.processor]
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k if "top_k" in read else 0,
            "top_p": self.top_p if "top_p" in read else 1.0,
            **off,
        }

    def processor_text(self) -> str:
        """The processor as its command takes it: "topk 0.8 50"."""
        return " ".join((self.processor, *(f"{getattr(self, name):g}" for name in PROCESSORS[self.processor])))
