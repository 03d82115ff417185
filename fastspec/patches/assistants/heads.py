"""Drafting heads for a transformers model: `load_head` finds and binds one, `inspect_head` describes a checkpoint."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastspec.errors import CheckpointError, Unsupported, meant
from fastspec.generation.heads.bound import BoundHead, Sizes, TargetParts, no_rows
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.files import Flag
from fastspec.generation.heads.load import Reading, is_copy, load, misfits, read_checkpoint, with_taps
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.models import first_line
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.layers import ModelLayers
from fastspec.patches.hf.modes import adapter_for
from fastspec.patches.hf.parallel import is_spread
from fastspec.patches.hf.quantised import stored_whole

PATTERNS = ["*.json", "*.safetensors", "*.bin"]
SOURCES = "a directory, a hub id, the name of a head of an installed package, and (to patch or load) an EagleHead"


def sizes_of(target: PreTrainedModel | PretrainedConfig) -> Sizes:
    """Sizes of a target that a head must agree with; its config is enough."""
    config = target.config if isinstance(target, PreTrainedModel) else target
    text = config.get_text_config()
    width = getattr(text, "word_embed_proj_dim", text.hidden_size)
    if isinstance(target, PreTrainedModel):
        width = getattr(target.get_input_embeddings(), "embedding_dim", width)
    return Sizes(text.vocab_size, text.hidden_size, text.num_hidden_layers, width)


def parts_of(target: PreTrainedModel, *, layers: bool = False) -> TargetParts:
    """Parts of a target that heads are fitted and bound to; with `layers` also what runs layers of its kind."""
    lm_head, device = target.get_output_embeddings(), device_of(target)
    adapter = adapter_for(target) if layers else None
    weight = getattr(lm_head, "weight", None)
    held_on = weight.device if isinstance(weight, Tensor) else device
    return TargetParts(
        name=type(target).__name__,
        sizes=sizes_of(target),
        embedding=target.get_input_embeddings(),
        lm_head=lm_head,
        device=device,
        dtype=target.dtype,
        lm_head_device=held_on if held_on != device and is_spread(target) else device,
        family=None if adapter is None else ModelLayers(target, adapter),
        stored=stored_whole,
        has_adapter=bool(getattr(target, "peft_config", None)),  # PEFT's field, also after load_adapter
    )


def load_head(
    source: str | Path | EagleHead,
    target: PreTrainedModel,
    *,
    revision: str | None = None,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    rope_interleaved: bool | None = None,
    norm_before_residual: bool | None = None,
    norm_output: bool | None = None,
    own_embedding: bool | None = None,
) -> EagleHead:
    """A drafting head for `target`, bound to its embedding (and LM head where it has none), on its device and in its
    dtype.

    `source` is a directory, a hub id, the name of a head of an installed package, or an `EagleHead`, of which a copy is
    bound that shares its weights. `taps`, `rope_theta`, `rope_interleaved`, `norm_before_residual` and `norm_output`
    replace what the checkpoint says, and `own_embedding=False` takes the target's embedding; `probe_head` finds them.
    Warns of what the checkpoint leaves open, and of an adapter beside the head that the target does not have.

    Raises CheckpointError for a source that cannot be found or read, and a head that does not fit the target, and
    Unsupported for a target that is no model.

    >>> head = load_head("smollm2-135m-instruct", model)                                     # doctest: +SKIP
    >>> read = probe_head("path/or/hub-id", model)[0].overrides()                            # doctest: +SKIP
    >>> head = load_head("path/or/hub-id", model, **read)                                    # doctest: +SKIP
    """
    if not isinstance(target, nn.Module):
        raise Unsupported(f"load_head reads a head for a model, not {target!r}: load the model first")
    reading = Reading(
        taps=taps,
        rope_theta=rope_theta,
        rope_interleaved=rope_interleaved,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        own_embedding=own_embedding,
    )
    found = source if isinstance(source, EagleHead) else find_head(source, revision=revision)
    head, told = load(found, parts_of(target), reading, scaled_rope)
    for each in told:
        warnings.warn(each, stacklevel=2)
    module = head.as_module()
    assert isinstance(module, EagleHead)
    return module


_KINDS = {"eagle3": ("EAGLE-3", "eagle3=head"), "eagle": ("EAGLE-1/2", "eagle=head or eagle2=head")}


def load_heads(sources: Mapping[str, str | Path | EagleHead | None], target: PreTrainedModel) -> dict[str, BoundHead]:
    """Heads of "eagle", "eagle2" and "eagle3" that have a source, loaded once where they share one. Raises
    CheckpointError like `load_head`, and for a head of the other kind, naming the assistant that takes it."""
    made: dict[str | Path | EagleHead, BoundHead] = {}
    heads = {}
    for name, source in sources.items():
        if source is None:
            continue
        if not isinstance(source, (str, Path, EagleHead)):
            raise CheckpointError(f"{name}={_no_head(source)}")
        if source not in made:
            found = source if isinstance(source, EagleHead) else find_head(source)
            made[source], told = load(found, parts_of(target), Reading(), scaled_rope)
            for each in told:
                warnings.warn(each, stacklevel=3)
        head = heads[name] = made[source]
        kind = head.config.kind
        if (kind == "eagle3") != (name == "eagle3"):
            shown = "this EagleHead" if isinstance(source, EagleHead) else source
            raise CheckpointError(
                f"{name}={shown} is an {_KINDS[kind][0]} head: fastspec.patch(model, {_KINDS[kind][1]}) takes it"
            )
    return heads


def _no_head(source: object) -> str:
    """Message about an object that is no head, and a module that has one within; its own text may fill pages."""
    given = repr(source) if isinstance(source, (int, float)) else f"<{type(source).__name__}>"
    modules = source.named_modules() if isinstance(source, nn.Module) else ()
    part = next((name for name, each in modules if isinstance(each, EagleHead)), None)
    within = "" if part is None else f" (its {part} is one)"
    return f"{given} is no head{within}: accepted are {SOURCES}"


def is_hub_id(source: str | Path) -> bool:
    """True for a text of the form owner/name."""
    return isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None


def find_head(source: str | Path, *, revision: str | None = None) -> Path:
    """Directory of a head: one that exists, one of an installed package, or a hub repository's JSON and weights. Raises
    CheckpointError where there is none."""
    if not isinstance(source, (str, Path)):
        raise CheckpointError(_no_head(source))
    local = Path(source).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        raise CheckpointError(f"{source} is a file; give the directory that holds config.json and the weights")
    packaged = packaged_head(str(source))
    if packaged is not None:
        return packaged
    shipped = f"{meant(str(source), HEADS)}heads that have a name: {', '.join(HEADS)}"
    shipped += "" if _folder() else f" ({INSTALL})"
    if not is_hub_id(source):
        raise CheckpointError(f"{source} is no directory, and no hub id of the form owner/name; {shipped}")
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=PATTERNS, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{source} is no directory, and the hub does not give it ({first_line(error)}); {shipped}"
        ) from error


def scaled_rope(config: HeadConfig) -> tuple[Tensor, float]:
    """Rotary frequencies (fp32, [R / 2]) and the factor on cos and sin, of any RoPE type that transformers knows."""
    rope = config.rope_parameters
    compute = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    if compute is None:
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise CheckpointError(f"rope_parameters of the head: rope_type is {rope['rope_type']!r}; accepted are {known}")
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    try:
        stand_in = LlamaConfig(**{name: getattr(config, name) for name in sizes}, rope_parameters=dict(rope))
        inv_freq, scale = compute(stand_in, torch.device("cpu"))
    except KeyError as error:
        raise CheckpointError(
            f"rope_parameters of the head: {rope['rope_type']!r} is incomplete ({rope}): {error.args[0]}"
        ) from error
    return inv_freq, float(scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """Reading of a checkpoint. `misfits` is None without a target, and empty where the head fits it."""

    source: str
    dialect: str
    config: HeadConfig
    flags: dict[str, Flag]
    parameters: int
    has_embedding: bool
    copies_embedding: bool | None
    """True where the head's own embedding is the target's; None where one of them is not there."""
    notes: tuple[str, ...]
    misfits: tuple[str, ...] | None

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs to print, in reading order."""
        c = self.config
        attention = f"{c.num_attention_heads} query heads, {c.num_key_value_heads} key/value heads of {c.head_dim}"
        rows = [
            ("source", self.source),
            ("dialect", self.dialect),
            ("kind", "EAGLE-3" if c.kind == "eagle3" else "EAGLE-1/2"),
            ("parameters", f"{self.parameters / 1e6:.1f} M"),
            ("hidden size", f"{c.hidden_size}, made for a target of {c.target_hidden_size}"),
            ("layers", str(c.num_hidden_layers)),
            ("attention", attention),
            ("intermediate size", str(c.intermediate_size)),
            ("vocabulary", f"{c.draft_vocab_size} drafted of {c.vocab_size}"),
            ("RoPE", str(c.rope_parameters["rope_type"])),
            ("own embedding", _of_embedding(self.has_embedding, self.copies_embedding)),
        ]
        rows += [(name, str(flag)) for name, flag in sorted(self.flags.items())]
        rows += [("note", note) for note in self.notes]
        if self.misfits is not None:
            rows += [("does not fit", text) for text in self.misfits] or [("fits the target", "yes")]
        return rows


def _of_embedding(brought: bool, copied: bool | None) -> str:
    if not brought:
        return "no"
    if copied is None:
        return "yes"
    differs = "differs from the target's, which own_embedding=False takes: probe it"
    return "a copy of the target's" if copied else differs


def inspect_head(
    source: str | Path, target: PreTrainedModel | PretrainedConfig | None = None, *, revision: str | None = None
) -> HeadReport:
    """Report of how each switch of a head was decided and, given a target (or its config), whether the head fits.

    Raises CheckpointError like `load_head`, but for a head that does not fit."""
    checkpoint = read_checkpoint(find_head(source, revision=revision))
    found = None
    if target is not None:
        sizes = sizes_of(target)
        checkpoint = with_taps(checkpoint, sizes.num_layers)
        found = misfits(checkpoint, sizes)
        if checkpoint.config.target_rows and isinstance(target, PreTrainedModel):
            reason = no_rows(target.get_output_embeddings(), checkpoint.state["d2t"], checkpoint.config.hidden_size)
            found += () if reason is None else (reason,)
    return HeadReport(
        source=str(source),
        dialect=checkpoint.dialect,
        config=checkpoint.config,
        flags=checkpoint.flags,
        parameters=checkpoint.num_parameters,
        has_embedding=checkpoint.embedding is not None,
        copies_embedding=copies_embedding(checkpoint, target) if isinstance(target, PreTrainedModel) else None,
        notes=(*checkpoint.notes, *(each for each in (checkpoint.assumed, checkpoint.adapter) if each is not None)),
        misfits=found,
    )


def copies_embedding(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> bool | None:
    """True where a head's own embedding is the target's; None where the head or the target has none to compare."""
    shared = getattr(target.get_input_embeddings(), "weight", None)
    if checkpoint.embedding is None or not isinstance(shared, Tensor):
        return None
    return is_copy(checkpoint.embedding, shared)


HEADS = "smollm2-135m-instruct", "smollm2-135m-instruct-eagle"
PACKAGE, DISTRIBUTION = "fastspec_smollm2_heads", "fastspec-smollm2-heads"
"""Heads that have a name, and the package with a folder of each one's."""
INSTALL = f"pip install ./packages/{DISTRIBUTION}"
LEFT = {
    "smollm2-135m-instruct-wide": "the commit `c0f133b` of fastspec's repository keeps it: check out "
    "fastspec/heads/smollm2-135m-instruct-wide of it and give that path"
}
"""Head that was removed -> how to get it."""


def packaged_head(name: str) -> Path | None:
    """Folder of the head `name`, None where the package, which is not imported, has none. Raises CheckpointError where
    the package is missing, with the command that installs it, and for a head that was removed."""
    if name in LEFT:
        raise CheckpointError(f"the head {name} was removed from fastspec: {LEFT[name]}")
    if name not in HEADS:
        return None
    folder = _folder()
    if folder is None:
        raise CheckpointError(
            f"the head {name} comes with the package {DISTRIBUTION}, which is not installed: in a checkout of "
            f"fastspec, {INSTALL}"
        )
    return folder / name


def _folder() -> Path | None:
    """The package's folder, where it is installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return next(map(Path, spec.submodule_search_locations or ()), None) if spec else None
