"""Reading a drafting head from disk: every dialect into one form, with every check done before anything runs.

`read_checkpoint` reads and checks, `check_fit` compares with a target, `build_head` makes the module. Nothing is loaded loosely: a key
that is missing, unknown, misshapen or not finite is an error, and code that comes with a checkpoint is never executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.generation.drafters.eagle.dialects import Description, Flag, describe, normalise_key
from fastspec.generation.drafters.eagle.head import FLOATS, EagleHead, HeadConfig
from fastspec.reading import parse_json

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A head as read from disk.

    `state` holds exactly the entries of `EagleHead(config).state_dict()`, with `d2t` as offsets; `embedding` [V, H] is the head's own
    embedding, if it brought one. Where `taps_known` is False the checkpoint leaves the taps to the target's depth: `config.taps` then
    only counts them, and `with_taps` fills them in. `flags` maps a switch to its value and what decided it; `notes` are for a person.
    """

    where: str
    dialect: str
    config: HeadConfig
    state: dict[str, Tensor]
    embedding: Tensor | None
    taps_known: bool
    flags: dict[str, Flag]
    notes: tuple[str, ...]

    @property
    def has_embedding(self) -> bool:
        return self.embedding is not None

    @property
    def num_parameters(self) -> int:
        """Parameters of the head, its own embedding not counted."""
        return sum(tensor.numel() for name, tensor in self.state.items() if name != "d2t")


def read_checkpoint(directory: Path) -> HeadCheckpoint:
    """Read a drafting head of any dialect from `directory` (config.json beside safetensors or .bin files, sharded or not).

    Raises CheckpointError for a file that is missing, damaged or holds pickled code; keys that are missing or unknown; shapes that
    contradict config.json; NaN or infinite weights; a `d2t` that is no map into the target's vocabulary; and architectures that
    `EagleHead` does not cover.
    """
    where = str(directory)
    raw = _read_json(directory / "config.json")
    published = _read_weights(directory)
    state = _normalise(published, where)
    _check_values(state, where)
    notes: list[str] = []
    found = describe(raw, published, state, where)
    _trim_spec_exit(found, state, notes)
    embedding = _take_embedding(found, state, notes, where)
    _take_vocabulary_map(found.config, state, notes, where)
    _fill_output_bias(found.config, state, notes)
    _check_keys(found.config, state, where)
    return HeadCheckpoint(
        where=where,
        dialect=found.dialect,
        config=found.config,
        state=state,
        embedding=embedding,
        taps_known=found.taps_known,
        flags=found.flags,
        notes=(*found.notes, *notes),
    )


def with_taps(checkpoint: HeadCheckpoint, num_layers: int) -> HeadCheckpoint:
    """The checkpoint with EAGLE-3's default taps (2, L // 2, L - 3) for a target of `num_layers`, where it names none itself."""
    if checkpoint.taps_known:
        return checkpoint
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise CheckpointError(
            f"{checkpoint.where}: the head names no taps, and the default (2, L // 2, L - 3) needs a target of at least 7 layers, "
            f"not {num_layers}; give taps=(...) or add eagle_aux_hidden_state_layer_ids to config.json"
        )
    return override(checkpoint, taps=taps, source=f"default for {num_layers} layers")


def override(
    checkpoint: HeadCheckpoint,
    *,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    norm_before_residual: bool | None = None,
    source: str = "given",
) -> HeadCheckpoint:
    """The checkpoint read otherwise: what is not None replaces what the checkpoint says. Weights are shared, not copied."""
    config, flags = checkpoint.config, dict(checkpoint.flags)
    changes: dict[str, Any] = {}
    if taps is not None:
        if len(taps) != len(config.taps):
            raise CheckpointError(f"{checkpoint.where}: taps is {taps}; the head reads {len(config.taps)} layers of the target")
        changes["taps"] = tuple(taps)
        flags["taps"] = Flag(tuple(taps), source)
    if rope_theta is not None:
        changes["rope_parameters"] = config.rope_parameters | {"rope_theta": float(rope_theta)}
        flags["rope_theta"] = Flag(float(rope_theta), source)
    if norm_before_residual is not None:
        changes["norm_before_residual"] = norm_before_residual
        flags["norm_before_residual"] = Flag(norm_before_residual, source)
    try:
        config = replace(config, **changes)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.where}: {error}") from error
    return replace(checkpoint, config=config, flags=flags, taps_known=checkpoint.taps_known or taps is not None)


def misfits(
    config: HeadConfig, embedding: Tensor | None, *, vocab_size: int, hidden_size: int, num_layers: int, embedding_size: int | None = None
) -> tuple[str, ...]:  # fmt: skip
    """What of a head disagrees with a target of these sizes, one sentence each; empty where the head fits. `embedding_size` is the width of
    the target's embedding and of its LM head's input, None: `hidden_size`."""
    shared = hidden_size if embedding_size is None else embedding_size
    found = []
    if config.target_hidden_size != hidden_size:
        found.append(f"the head reads hidden states of size {config.target_hidden_size}, the target's have size {hidden_size}")
    if config.vocab_size != vocab_size:
        found.append(f"the head was made for a vocabulary of {config.vocab_size}, the target's has {vocab_size}")
    if max(config.taps, default=0) > num_layers:
        found.append(f"the head taps hidden_states{list(config.taps)}, the target has {num_layers} layers")
    if embedding is None and config.hidden_size != shared:
        found.append(f"the head is {config.hidden_size} wide and has no embedding of its own, the target's is {shared} wide")
    if (config.kind == "eagle" or not config.own_lm_head) and config.hidden_size != shared:
        found.append(f"the head is {config.hidden_size} wide and has no LM head of its own, the target's reads states {shared} wide")
    return tuple(found)


def check_fit(
    checkpoint: HeadCheckpoint, *, vocab_size: int, hidden_size: int, num_layers: int, embedding_size: int | None = None
) -> None:  # fmt: skip
    """Raise CheckpointError, naming the sizes that disagree, unless the head fits a target of these sizes."""
    config = with_taps(checkpoint, num_layers).config
    found = misfits(
        config, checkpoint.embedding, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, embedding_size=embedding_size
    )
    if found:
        raise CheckpointError(f"{checkpoint.where} does not fit this target: {'; '.join(found)}. Use the head made for this target")


def build_head(checkpoint: HeadCheckpoint) -> EagleHead:
    """The module, in the dtype of `fc.weight`, its parameters being the checkpoint's tensors; it still has to be bound."""
    if not checkpoint.taps_known:
        raise CheckpointError(f"{checkpoint.where} names no taps: call with_taps(checkpoint, num_layers) with the target's depth first")
    with torch.device("meta"):
        head = EagleHead(checkpoint.config)
    head.load_state_dict(checkpoint.state, strict=True, assign=True)
    return head.to(checkpoint.state["fc.weight"].dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; a head is a directory with config.json and its weights") from error
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
            raise CheckpointError(f"{directory} holds {len(present)} weight files without an index; expected one of {', '.join(FILES)}")
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
        raise CheckpointError(f"{index} and its shards disagree about {_some(lost)}; download the head again")
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
            f"{path} cannot be read as plain tensors: it is damaged, or holds pickled code, which fastspec never executes; "
            "download it again, or convert it to safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise CheckpointError(f"{path} holds something else than named tensors; expected a plain state dict")
    for name, tensor in state.items():
        kind = "on the device meta, without values" if tensor.is_meta else str(tensor.layout)
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: {name} is {'quantised' if tensor.is_quantized else kind}; accepted are dense tensors with their values: save the "
                "head from a loaded model, as safetensors"
            )
    return state


def _normalise(published: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for key, tensor in published.items():
        name = normalise_key(key)
        if name is None:
            continue
        if name in state:
            raise CheckpointError(f"{where}: two keys mean {name!r}, one of them {key!r}; keep one")
        state[name] = tensor
    return state


def _check_values(state: dict[str, Tensor], where: str) -> None:
    for name, tensor in state.items():
        if name in ("d2t", "t2d"):
            continue
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}; quantised heads are not supported, use the 16- or 32-bit one")
        if tensor.ndim not in (1, 2):
            raise CheckpointError(f"{where}: {name} has shape {list(tensor.shape)}; weights are vectors and matrices")
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{where}: {name} contains NaN or infinite values; the file is damaged or training diverged")


def _trim_spec_exit(found: Description, state: dict[str, Tensor], notes: list[str]) -> None:
    """AngelSlim's SpecExit adds one to three rows to fc, for signals that drafting does not use."""
    hidden = found.config.hidden_size
    extra = state["fc.weight"].shape[0] - hidden if found.dialect == "angelslim" else 0
    if extra not in (1, 2, 3):
        return
    notes.append(f"fc.weight has {extra} extra output row(s), SpecExit's signals; the first {hidden} rows are used")
    for name in ("fc.weight", "fc.bias"):
        if name in state:
            state[name] = state[name][:hidden].clone()


def _take_embedding(found: Description, state: dict[str, Tensor], notes: list[str], where: str) -> Tensor | None:
    """Remove embed_tokens from `state`, and the frozen copy of the target's LM head that some EAGLE-1/2 files carry."""
    config, embedding = found.config, state.pop("embed_tokens.weight", None)
    size = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding.shape != size:
        raise CheckpointError(f"{where}: embed_tokens.weight has shape {list(embedding.shape)}; config.json wants {list(size)}")
    if config.kind == "eagle3":
        return embedding
    lm_head = state.get("lm_head.weight")
    if lm_head is not None and lm_head.shape == size:
        del state["lm_head.weight"]
        notes.append("lm_head.weight is a copy of the target's in EAGLE-1/2 heads: the target's is used")
    if embedding is not None:
        notes.append("embed_tokens.weight is a copy of the target's in EAGLE-1/2 heads: the target's is used")
    return None


def _take_vocabulary_map(config: HeadConfig, state: dict[str, Tensor], notes: list[str], where: str) -> None:
    """Check d2t against the sizes and t2d, turn absolute tables into offsets, drop t2d, and supply the identity where it is implied."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    draft, vocab = config.draft_vocab_size, config.vocab_size
    if d2t is None:
        if draft == vocab:
            state["d2t"] = torch.zeros(draft, dtype=torch.int64, device="cpu")
        return
    if d2t.shape != (draft,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t is {d2t.dtype} of shape {list(d2t.shape)}; expected integers of shape [{draft}]")
    if t2d is not None and t2d.shape != (vocab,):
        raise CheckpointError(f"{where}: t2d has shape {list(t2d.shape)}; expected [{vocab}], the target's vocabulary")
    rank, offsets = torch.arange(draft, device="cpu"), d2t.to(torch.int64)
    mask = None if t2d is None or draft == vocab else t2d.bool()
    wrong = _not_a_map(rank + offsets, mask, vocab)
    if wrong is None:
        state["d2t"] = offsets
    elif _not_a_map(offsets, mask, vocab) is None:
        state["d2t"] = offsets - rank
        notes.append("d2t holds token ids where offsets are usual; converted")
    else:
        raise CheckpointError(f"{where}: d2t (target id = draft id + d2t[draft id]) is not a map into the target's vocabulary: {wrong}")


def _not_a_map(ids: Tensor, mask: Tensor | None, vocab: int) -> str | None:
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if len(falls):
        return f"target ids do not increase at draft id {int(falls[0]) + 1}"
    if ids[0] < 0 or ids[-1] >= vocab:
        return f"target ids reach from {int(ids[0])} to {int(ids[-1])}, the vocabulary has {vocab}"
    if mask is not None and not (bool(mask[ids].all()) and int(mask.sum()) == len(ids)):
        return "it disagrees with t2d"
    return None


def _fill_output_bias(config: HeadConfig, state: dict[str, Tensor], notes: list[str]) -> None:
    """Qwen2-style layers have biases on q, k and v only; a zero bias on o is the same layer."""
    if config.kind != "eagle3" or not config.attention_bias or any(re.search(r"o_proj\.bias$", key) for key in state):
        return
    notes.append("o_proj has no bias while q, k and v do; read as zero")
    for i in range(config.num_hidden_layers):
        state[f"layers.{i}.self_attn.o_proj.bias"] = state["fc.weight"].new_zeros(config.hidden_size)


def _check_keys(config: HeadConfig, state: dict[str, Tensor], where: str) -> None:
    with torch.device("meta"):
        expected = EagleHead(config).state_dict()
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unknown:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"unknown {_some(unknown)}"] * bool(unknown)
        raise CheckpointError(f"{where}: the weights are not those of the head that config.json describes: {'; '.join(parts)}")
    wrong = [
        f"{name} has shape {list(state[name].shape)} where config.json wants {list(tensor.shape)}"
        for name, tensor in expected.items()
        if state[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{where}: {'; '.join(wrong[:4])}; weights and config.json do not belong together")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
