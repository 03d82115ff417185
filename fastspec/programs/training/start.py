"""Head that a run begins with: one of the target's parts, or one that exists, whose sizes the run takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants.heads import load_head
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import TextBatch
from fastspec.programs.training.save import checkpoint_tensors
from fastspec.programs.training.target import head_for, start_from_features, start_from_target


def started(config: TrainConfig, target: Any, vocabulary: Tensor, first: Iterable[TextBatch] | None) -> EagleHead:
    """A head made of the target's parts and bound to it. `first` are batches that an EAGLE-1/2 head starts from, None
    for a head whose weights are loaded next."""
    shape = head_for(
        target,
        kind=config.kind,
        draft_vocab_size=len(vocabulary),
        hidden_size=config.hidden_size or None,
        intermediate_size=config.intermediate_size or None,
        taps=config.taps,
        target_rows=config.share_lm_head,
        norms=config.norms,
    )
    head = EagleHead(shape)
    if config.kind == "eagle3":
        start_from_target(head, target, vocabulary)
    elif first is not None:
        start_from_features(head, target, first)
    head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return head


def opened(config: TrainConfig, target: Any) -> EagleHead | None:
    """The head that `config.start_from` names, in fp32 and bound to the target; None where a run starts afresh.

    Raises `Unsupported` for a head of another kind, and for one that the formats a run writes cannot hold;
    CheckpointError for what cannot be read or does not fit the target.
    """
    if not config.start_from:
        return None
    head = load_head(config.start_from, target)
    if head.config.kind != config.kind:
        kinds = f"a head of kind {head.config.kind!r} and the run trains {config.kind!r}"
        raise Unsupported(f"{config.start_from} is {kinds}: give that kind")
    try:
        checkpoint_tensors(head)
    except ValueError as error:
        raise Unsupported(f"{config.start_from} cannot be trained on: {error}") from error
    return head.float().requires_grad_(True).train()


def with_sizes_of(config: TrainConfig, head: EagleHead) -> TrainConfig:
    """The settings of a run with the sizes of the head that it goes on from. Raises `Unsupported` for sizes that were
    given otherwise."""
    c = head.config
    sizes: dict[str, Any] = {"intermediate_size": c.intermediate_size}
    if c.kind == "eagle3":
        sizes |= {"draft_vocab_size": c.draft_vocab_size, "hidden_size": c.hidden_size, "taps": c.taps}
        sizes |= {"share_lm_head": c.target_rows, "norms": c.norm_output}
    given = {name: value for name in sizes if (value := getattr(config, name))}
    other = [f"{name} {value!r} (the head: {sizes[name]!r})" for name, value in given.items() if value != sizes[name]]
    if other:
        raise Unsupported(f"{config.start_from} has other sizes than the run: {', '.join(other)}; leave them out")
    return replace(config, **sizes)


def draft_vocabulary_of(head: EagleHead) -> Tensor:
    """The target's ids of the tokens that a head drafts, on the CPU."""
    return head.to_target(torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)).cpu()
