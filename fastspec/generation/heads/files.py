"""Files of a drafting head: config.json beside safetensors or .bin files, sharded or not. Code is never executed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.files import parse_json

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


class HeadFiles(NamedTuple):
    """Contents of a head's directory: the fields of config.json, the tensors under their published names, and the names
    of the tensors of an adapter of PEFT beside them."""

    where: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    adapter: tuple[str, ...]


def read_files(directory: Path) -> HeadFiles:
    """Read a head's directory. Raises CheckpointError for a file that is missing, damaged, or holds pickled code."""
    adapter = [name for each in ADAPTERS if (directory / each).is_file() for name in _read_file(directory / each)]
    return HeadFiles(str(directory), _read_json(directory / "config.json"), _read_weights(directory), tuple(adapter))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist; a head is a directory with config.json and its weights"
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the head again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; expected an object of fields")
    return found


def _read_weights(directory: Path) -> dict[str, Tensor]:
    present = [directory / name for name in FILES if (directory / name).is_file()]
    if not present:
        present = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
        if len(present) != 1:
            raise CheckpointError(
                f"{directory} holds {len(present)} weight files without an index; expected one of {', '.join(FILES)}"
            )
    return _read_shards(present[0]) if present[0].suffix == ".json" else _read_file(present[0])


def _read_shards(index: Path) -> dict[str, Tensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from keys to file names; download the head again")
    state: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}; shards must lie beside their index")
        state |= _read_file(index.with_name(name))
    lost = sorted(set(weight_map) ^ set(state))
    if lost:
        raise CheckpointError(f"{index} and its shards disagree about {some(lost)}; download the head again")
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the head again")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short ({error}); download it again") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: it is damaged, or holds pickled code, which fastspec never "
            "executes; download it again, or convert it to safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise CheckpointError(f"{path} holds something else than named tensors; expected a plain state dict")
    for name, tensor in state.items():
        kind = "on the device meta, without values" if tensor.is_meta else str(tensor.layout)
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: {name} is {'quantised' if tensor.is_quantized else kind}; accepted are dense tensors with "
                "their values: save the head from a loaded model, as safetensors"
            )
    return state


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise CheckpointError for a weight with values that are no finite numbers."""
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"{where}: {name} contains NaN or infinite values; the file is damaged or training diverged"
        )


def some(names: Iterable[str]) -> str:
    """The first eight names, for a message."""
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "architectures layer_types",
    ),
    (
        "a list of layer numbers",
        lambda value: isinstance(value, list) and all(type(item) is int and item >= 0 for item in value),
        "eagle_aux_hidden_state_layer_ids target_layer_ids",
    ),
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
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"),
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
    """config.json by level: `top` is the file, `layer` describes the transformer layer, `nested` is `eagle_config`.

    What is read of the fields adds to `flags`, a switch -> its value and what decided it, and to `notes`, for a person.
    """

    top: Mapping[str, Any]
    layer: Mapping[str, Any]
    nested: Mapping[str, Any]
    where: str
    flags: dict[str, Flag] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str) -> Fields:
        check_kinds(raw, where)
        layer = raw
        around = () if "hidden_size" in raw else ("text_config",)  # beside sizes of its own it is the target's
        for name in ("transformer_layer_config", "model", *around):
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
