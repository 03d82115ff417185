"""Loading of a head: read, translate, fit to a target, build and bind.

A head fits a target by the switches that a caller sets, taps by the target's depth, and sizes that must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, Sizes, TargetParts, bind, check_range
from fastspec.generation.heads.checkpoint import HeadCheckpoint, translate
from fastspec.generation.heads.dialects import DIALECTS, counted
from fastspec.generation.heads.files import Flag, read_files
from fastspec.generation.heads.module import EagleHead, HeadConfig, drafted_ids

ADDED = 1024
"""Rows, of added tokens and padding, that a target's vocabulary may have more or fewer than a head was made for."""
ScaledRope = Callable[[HeadConfig], tuple[Tensor, float]]
"""Rotary frequencies (fp32, [R / 2]) and the factor on cos and sin of a RoPE type that `EagleHead` does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Switches of a head that a caller sets in place of its checkpoint's, where they are not None. `own_embedding`
    False takes the target's embedding in place of the one that the head brought."""

    taps: tuple[int, ...] | None = None
    rope_theta: float | None = None
    rope_interleaved: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    own_embedding: bool | None = None

    def given(self) -> dict[str, Any]:
        """The switches that are set."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) is not None}


def read_checkpoint(source: Path | EagleHead) -> HeadCheckpoint:
    """A head's directory or module as a checkpoint. Raises CheckpointError for one that cannot be read."""
    return HeadCheckpoint.of(source) if isinstance(source, EagleHead) else translate(read_files(source))


def load(
    source: Path | EagleHead, target: TargetParts, reading: Reading, scaled_rope: ScaledRope
) -> tuple[BoundHead, tuple[str, ...]]:
    """A head for a target, on its device and in its dtype, and what a user is warned of: `HeadCheckpoint.assumed`, and
    `adapter` where the target has none. A module is bound as it is. Raises CheckpointError where it does not fit."""
    checkpoint = fitted(read_checkpoint(source), target.sizes, reading)
    told = (checkpoint.assumed, None if target.has_adapter else checkpoint.adapter)
    return bound(checkpoint, target, scaled_rope), tuple(each for each in told if each is not None)


def bound(checkpoint: HeadCheckpoint, target: TargetParts, scaled_rope: ScaledRope) -> BoundHead:
    """A fitted checkpoint, built and bound."""
    if checkpoint.module is None:
        check_range(checkpoint.state, target.dtype, checkpoint.where)
        module = build_head(checkpoint).to(target.device, target.dtype).requires_grad_(False).eval()
    else:
        module = _placed(checkpoint.module, target)
    if module.inv_freq is None:
        module.set_rope(*scaled_rope(module.config))
    return bind(module, _embedding(checkpoint, target), target)


def build_head(checkpoint: HeadCheckpoint) -> EagleHead:
    """The module, not bound yet, in the dtype of `fc.weight`; its parameters are the checkpoint's tensors."""
    if not checkpoint.taps_known:
        raise CheckpointError(
            f"{checkpoint.where} names no taps: call with_taps(checkpoint, num_layers) with the target's depth first"
        )
    with torch.device("meta"):
        head = EagleHead(checkpoint.config)
    state = _in_halves(checkpoint) if checkpoint.rope_interleaved else checkpoint.state
    head.load_state_dict(state, strict=True, assign=True)
    return head.to(checkpoint.state["fc.weight"].dtype)


def _in_halves(checkpoint: HeadCheckpoint) -> dict[str, Tensor]:
    """Weights of a head that rotates neighbouring channels, in the order of rotated halves, with the same products."""
    config = checkpoint.config
    size = config.head_dim
    turned = int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))
    channels = torch.arange(size, device="cpu")
    order = torch.cat((channels[:turned:2], channels[1:turned:2], channels[turned:]))
    state = dict(checkpoint.state)
    for name, tensor in state.items():
        if re.search(r"self_attn\.[qk]_(proj|norm)\.", name):
            state[name] = tensor.unflatten(0, (-1, size))[:, order.to(tensor.device)].flatten(0, 1)
    return state


def _placed(module: EagleHead, target: TargetParts) -> EagleHead:
    weight = module.like
    if (weight.device, weight.dtype) != (target.device, target.dtype):
        raise CheckpointError(
            f"this EagleHead is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}: "
            "call head.to(target.device, target.dtype) first"
        )
    return module


def _embedding(checkpoint: HeadCheckpoint, target: TargetParts) -> nn.Module | None:
    """The embedding that a head brought, None where it brought none, or a copy of the target's."""
    own = checkpoint.embedding
    if own is None:
        return None
    if checkpoint.module is not None:
        binding = checkpoint.module.bound
        return binding.embedding if binding.own_embedding or own.shape[1] != target.sizes.embedding_size else None
    shared = target.embedding.weight
    assert isinstance(shared, Tensor)
    if is_copy(own, shared):
        return None
    check_range({"embed_tokens.weight": own}, target.dtype, checkpoint.where)
    kept: nn.Embedding = nn.Embedding.from_pretrained(own.to(target.device, target.dtype), freeze=True)
    return kept


def is_copy(own: Tensor, shared: Tensor) -> bool:
    """True where a head's embedding is the target's, in whichever of the two dtypes it was rounded to."""
    own, shared = own.to(shared.device), shared.detach()
    if own.shape != shared.shape:
        return False
    return torch.equal(own.to(shared.dtype), shared) or torch.equal(own, shared.to(own.dtype))


def fitted(checkpoint: HeadCheckpoint, sizes: Sizes, reading: Reading) -> HeadCheckpoint:
    """A checkpoint as a target of these sizes reads it. Raises CheckpointError, naming the sizes that disagree."""
    checkpoint = with_taps(override(checkpoint, reading), sizes.num_layers)
    found = misfits(checkpoint, sizes)
    if found:
        raise CheckpointError(f"{checkpoint.where} does not fit this target: {'; '.join(found)}")
    return checkpoint


def override(checkpoint: HeadCheckpoint, reading: Reading, source: str = "given") -> HeadCheckpoint:
    """The checkpoint with other switches and the same weights. Raises CheckpointError for switches no head has."""
    given = reading.given()
    if not given:
        return checkpoint
    if checkpoint.module is not None:
        raise CheckpointError(
            f"{', '.join(given)}: these read a checkpoint, and an EagleHead has its switches in its config already"
        )
    config, changes, rest = checkpoint.config, dict(given), dict[str, Any]()
    if reading.taps is not None:
        if len(reading.taps) != len(config.taps):
            raise CheckpointError(
                f"{checkpoint.where}: taps is {reading.taps}; the head reads {len(config.taps)} layers of the target"
            )
        changes["taps"] = given["taps"] = tuple(reading.taps)
        rest |= {"taps_known": True, "nested_taps": None}
    if reading.rope_theta is not None:
        given["rope_theta"] = float(changes.pop("rope_theta"))
        changes["rope_parameters"] = config.rope_parameters | {"rope_theta": given["rope_theta"]}
    if reading.rope_interleaved is not None:
        rest["rope_interleaved"] = changes.pop("rope_interleaved")
    if reading.own_embedding is not None:
        if changes.pop("own_embedding") and checkpoint.embedding is None:
            raise CheckpointError(
                f"{checkpoint.where}: own_embedding=True, and the head brought no embedding of its own"
            )
        rest["embedding"] = checkpoint.embedding if reading.own_embedding else None
    try:
        config = replace(config, **changes)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.where}: {error}") from error
    flags = checkpoint.flags | {name: Flag(value, source) for name, value in given.items()}
    return replace(checkpoint, config=config, flags=flags, **rest)


def with_taps(checkpoint: HeadCheckpoint, num_layers: int) -> HeadCheckpoint:
    """The checkpoint with what a target of `num_layers` decides: EAGLE-3's default taps (2, L // 2, L - 3) where none
    are named, the counting of those of `eagle_config`, and the side of the final norm that a last tap is on."""
    if checkpoint.module is not None:
        return checkpoint
    if not checkpoint.taps_known:
        checkpoint = _with_default(checkpoint, num_layers)
    elif checkpoint.nested_taps is not None:
        checkpoint = _with_counted(checkpoint, checkpoint.nested_taps, num_layers)
    before = max(checkpoint.config.taps, default=0) == num_layers and not DIALECTS[checkpoint.dialect].last_tap_normed
    if before == checkpoint.config.last_tap_before_norm:
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, last_tap_before_norm=before))


HOW = "`fastspec inspect --probe` measures which drafts best, and fastspec.load_head(..., taps=(...)) takes others"


def _with_default(checkpoint: HeadCheckpoint, num_layers: int) -> HeadCheckpoint:
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise CheckpointError(
            f"{checkpoint.where}: the head names no taps, and the default (2, L // 2, L - 3) needs a target of at "
            f"least 7 layers, not {num_layers}; give taps=(...) or add eagle_aux_hidden_state_layer_ids to config.json"
        )
    assumed = (
        f"{checkpoint.where} does not say which hidden states it reads, and EAGLE-3's default {taps} is assumed: {HOW}"
    )
    by_rule = DIALECTS[checkpoint.dialect].taps_by_rule
    return replace(
        override(checkpoint, Reading(taps=taps), source=f"default for {num_layers} layers"),
        assumed=None if by_rule else assumed,
    )


def _with_counted(checkpoint: HeadCheckpoint, ids: tuple[int, ...], num_layers: int) -> HeadCheckpoint:
    taps, flag = counted(ids, num_layers)
    assumed = (
        f"{checkpoint.where} reads the layers {ids} by eagle_config, which programs count in two ways; hidden_states "
        f"{taps} are assumed: {HOW}"
    )
    return replace(
        checkpoint,
        config=replace(checkpoint.config, taps=taps),
        flags=checkpoint.flags | {"taps": flag},
        assumed=None if ids[0] in (1, 2) else assumed,
    )


def misfits(checkpoint: HeadCheckpoint, sizes: Sizes) -> tuple[str, ...]:
    """Reasons why a head does not fit a target, one sentence each."""
    config, shared = checkpoint.config, sizes.embedding_size
    another = "use the head made for this target"
    vocabulary = _misfit_of_vocabulary(checkpoint, sizes)
    reasons = (
        (
            config.target_hidden_size != sizes.hidden_size,
            f"the head reads hidden states of size {config.target_hidden_size}, the target's have size "
            f"{sizes.hidden_size}: {another}",
        ),
        (vocabulary is not None, vocabulary),
        (
            max(config.taps, default=0) > sizes.num_layers,
            f"the head taps hidden_states{list(config.taps)}, the target has {sizes.num_layers} layers: {another}",
        ),
        (
            checkpoint.embedding is None and config.hidden_size != shared,
            f"the head is {config.hidden_size} wide and has no embedding of its own, the target's is {shared} wide: "
            "export it with its embed_tokens.weight, which a head of another width than its target needs",
        ),
        (
            (config.kind == "eagle" or not config.own_lm_head) and config.hidden_size != shared,
            f"the head is {config.hidden_size} wide and has no LM head of its own, the target's reads states {shared} "
            "wide: export it with its lm_head.weight",
        ),
    )
    return tuple(str(reason) for holds, reason in reasons if holds)


def _misfit_of_vocabulary(checkpoint: HeadCheckpoint, sizes: Sizes) -> str | None:
    """Reason why a head's drafts are not among a target's tokens, or why it cannot read the added ones."""
    config, own, size = checkpoint.config, checkpoint.own_embedding, sizes.vocab_size
    if config.vocab_size == size:
        return None
    last = int(drafted_ids(checkpoint.state["d2t"]).max())
    another = "use the head made for this target"
    reasons = (
        (abs(size - config.vocab_size) > ADDED, f": {another}"),
        (
            config.kind == "eagle" or not (config.own_lm_head or config.target_rows),
            f", and it drafts with the target's whole LM head: {another}",
        ),
        (last >= size, f", and it drafts tokens up to {last}: {another}"),
        (
            own is not None and own.shape[0] < size,
            f", and the head's own embedding has no rows for the tokens from {config.vocab_size} on: "
            "fastspec.load_head(..., own_embedding=False) takes the target's",
        ),
    )
    made = f"the head was made for a vocabulary of {config.vocab_size}, the target's has {size}"
    return next((made + reason for holds, reason in reasons if holds), None)
