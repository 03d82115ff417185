"""Fields of a head's config.json, on three levels, and the switches that they decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastspec.errors import CheckpointError


def _list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _list_of_layers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a list of names", _list_of_names, "architectures layer_types"),
    ("a list of layer numbers", _list_of_layers, "eagle_aux_hidden_state_layer_ids"),
    (
        "an object of fields",
        lambda value: isinstance(value, Mapping),
        "eagle_config transformer_layer_config rope_parameters rope_scaling",
    ),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "norm_before_residual norm_output return_hidden_post_norm fc_norm norm_before_fc use_aux_hidden_state "
        "use_last_layernorm",
    ),
    (
        "a positive number",
        _positive,
        "rope_theta rms_norm_eps partial_rotary_factor original_max_position_embeddings factor",
    ),
    ("a name", lambda value: isinstance(value, str), "model_type hidden_act rope_type type"),
)
"""Kinds of fields: in words, as a test, and the names of the fields."""


class Flag(NamedTuple):
    """A switch of the head and what decided it."""

    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True)
class Fields:
    """config.json by level: `top` is the file, `layer` describes the transformer layer, `nested` is `eagle_config`."""

    top: Mapping[str, Any]
    layer: Mapping[str, Any]
    nested: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str) -> Fields:
        check_kinds(raw, where)
        layer = raw
        for name in ("transformer_layer_config", "model"):
            inner = raw.get(name)
            if isinstance(inner, Mapping):
                layer = {**raw, **inner}
        check_kinds(layer, where)
        nested = layer.get("eagle_config") or {}
        check_kinds(nested, where)
        return cls(raw, layer, nested, where)

    def error(self, message: str) -> CheckpointError:
        """The error of a field."""
        return CheckpointError(f"{self.where}/config.json: {message}")

    def find(self, name: str) -> Flag | None:
        """A field of the top, else of `eagle_config`, else of the layer's config; None where absent or null."""
        for level, source in ((self.top, "config"), (self.nested, "eagle_config"), (self.layer, "layer config")):
            if level.get(name) is not None:
                return Flag(level[name], source)
        return None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer from the layer's config, or `eagle_config`; CheckpointError for anything else."""
        value = self.layer.get(name)
        value = self.nested.get(name) if value is None else value
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{name} is {value!r}; expected a positive integer")
        return value


def check_kinds(level: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a known field of another kind than its own; null stands for absent."""
    for kind, fits, names in KINDS:
        for name in names.split():
            if level.get(name) is not None and not fits(level[name]):
                raise CheckpointError(f"{where}/config.json: {name} is {level[name]!r}; expected {kind}")
