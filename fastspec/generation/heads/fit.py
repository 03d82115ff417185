"""A head fitted to a target: the switches that a caller sets, the taps that the target's depth decides, and the sizes that must agree."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import Sizes
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.dialects import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Switches of a head that a caller sets in place of what its checkpoint says; None leaves the checkpoint's."""

    taps: tuple[int, ...] | None = None
    rope_theta: float | None = None
    norm_before_residual: bool | None = None

    def given(self) -> dict[str, Any]:
        """The switches that are set."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) is not None}


def fitted(checkpoint: HeadCheckpoint, sizes: Sizes, reading: Reading) -> HeadCheckpoint:
    """A checkpoint as a target of these sizes reads it. Raises CheckpointError, naming the sizes that disagree, where it does not fit."""
    checkpoint = with_taps(override(checkpoint, reading), sizes.num_layers)
    found = misfits(checkpoint, sizes)
    if found:
        raise CheckpointError(f"{checkpoint.where} does not fit this target: {'; '.join(found)}. Use the head made for this target")
    return checkpoint


def override(checkpoint: HeadCheckpoint, reading: Reading, source: str = "given") -> HeadCheckpoint:
    """The checkpoint with other switches. Weights are shared, not copied. Raises CheckpointError for switches that no head has."""
    given = reading.given()
    if not given:
        return checkpoint
    if checkpoint.module is not None:
        raise CheckpointError(f"{', '.join(given)}: these read a checkpoint, and an EagleHead has its switches in its config already")
    config, changes = checkpoint.config, dict(given)
    if reading.taps is not None:
        if len(reading.taps) != len(config.taps):
            raise CheckpointError(f"{checkpoint.where}: taps is {reading.taps}; the head reads {len(config.taps)} layers of the target")
        changes["taps"] = given["taps"] = tuple(reading.taps)
    if reading.rope_theta is not None:
        given["rope_theta"] = float(changes.pop("rope_theta"))
        changes["rope_parameters"] = config.rope_parameters | {"rope_theta": given["rope_theta"]}
    try:
        config = replace(config, **changes)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.where}: {error}") from error
    flags = checkpoint.flags | {name: Flag(value, source) for name, value in given.items()}
    return replace(checkpoint, config=config, flags=flags, taps_known=checkpoint.taps_known or reading.taps is not None)


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
    return override(checkpoint, Reading(taps=taps), source=f"default for {num_layers} layers")


def misfits(checkpoint: HeadCheckpoint, sizes: Sizes) -> tuple[str, ...]:
    """Sizes in which a head disagrees with a target, one sentence each; empty where the head fits."""
    config, shared, found = checkpoint.config, sizes.embedding_size, []
    if config.target_hidden_size != sizes.hidden_size:
        found.append(f"the head reads hidden states of size {config.target_hidden_size}, the target's have size {sizes.hidden_size}")
    if config.vocab_size != sizes.vocab_size:
        found.append(f"the head was made for a vocabulary of {config.vocab_size}, the target's has {sizes.vocab_size}")
    if max(config.taps, default=0) > sizes.num_layers:
        found.append(f"the head taps hidden_states{list(config.taps)}, the target has {sizes.num_layers} layers")
    if not checkpoint.has_embedding and config.hidden_size != shared:
        found.append(f"the head is {config.hidden_size} wide and has no embedding of its own, the target's is {shared} wide")
    if (config.kind == "eagle" or not config.own_lm_head) and config.hidden_size != shared:
        found.append(f"the head is {config.hidden_size} wide and has no LM head of its own, the target's reads states {shared} wide")
    return tuple(found)
