"""Fitting of a head to a target: switches that a caller sets, taps by the target's depth, sizes that must agree."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import Sizes
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.dialects import DIALECTS, counted
from fastspec.generation.heads.files import Flag

ADDED = 1024
"""Rows, of added tokens and padding, that a target's vocabulary may have more or fewer than a head was made for."""


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
    before = max(checkpoint.config.taps, default=0) == num_layers and not checkpoint.last_tap_normed
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
    config, shared, found = checkpoint.config, sizes.embedding_size, []
    another = "use the head made for this target"
    if config.target_hidden_size != sizes.hidden_size:
        found.append(
            f"the head reads hidden states of size {config.target_hidden_size}, the target's have size "
            f"{sizes.hidden_size}: {another}"
        )
    found.extend(_of_vocabulary(checkpoint, sizes))
    if max(config.taps, default=0) > sizes.num_layers:
        found.append(
            f"the head taps hidden_states{list(config.taps)}, the target has {sizes.num_layers} layers: {another}"
        )
    if checkpoint.embedding is None and config.hidden_size != shared:
        found.append(
            f"the head is {config.hidden_size} wide and has no embedding of its own, the target's is {shared} wide: "
            "export it with its embed_tokens.weight, which a head of another width than its target needs"
        )
    if (config.kind == "eagle" or not config.own_lm_head) and config.hidden_size != shared:
        found.append(
            f"the head is {config.hidden_size} wide and has no LM head of its own, the target's reads states {shared} "
            "wide: export it with its lm_head.weight"
        )
    return tuple(found)


def _of_vocabulary(checkpoint: HeadCheckpoint, sizes: Sizes) -> list[str]:
    """Check that a head's drafts are among a target's tokens, and that it can read the added ones."""
    config, apart = checkpoint.config, sizes.vocab_size - checkpoint.config.vocab_size
    if apart == 0:
        return []
    made = f"the head was made for a vocabulary of {config.vocab_size}, the target's has {sizes.vocab_size}"
    if abs(apart) > ADDED:
        return [f"{made}: use the head made for this target"]
    if config.kind == "eagle" or not (config.own_lm_head or config.target_rows):
        return [f"{made}, and it drafts with the target's whole LM head: use the head made for this target"]
    if checkpoint.last_drafted >= sizes.vocab_size:
        return [f"{made}, and it drafts tokens up to {checkpoint.last_drafted}: use the head made for this target"]
    if checkpoint.own_embedding is not None and checkpoint.own_embedding.shape[0] < sizes.vocab_size:
        return [
            f"{made}, and the head's own embedding has no rows for the tokens from {config.vocab_size} on: "
            "fastspec.load_head(..., own_embedding=False) takes the target's"
        ]
    return []
