"""Going on from a head that exists: its weights, and the sizes that a run takes from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.drafters.block.checkpoint import load_block_head
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants.heads import load_head
from fastspec.training.config import TrainConfig
from fastspec.training.save import checkpoint_tensors


def opened(config: TrainConfig, target: Any) -> EagleHead | BlockHead | None:
    """The head that `config.start_from` names, in fp32 and bound to the target; None where a run starts afresh.

    Raises `Unsupported` for a head of another kind, and for one that the formats a run writes cannot hold; CheckpointError for what
    cannot be read or does not fit the target.
    """
    if not config.start_from:
        return None
    raw = Path(config.start_from).expanduser() / "config.json"
    if raw.is_file() and "dflash_config" in json.loads(raw.read_text(encoding="utf-8")):
        head: EagleHead | BlockHead = load_block_head(raw.parent).to(target.device)
        head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    else:
        head = load_head(config.start_from, target)
    if head.config.kind != config.kind:
        raise Unsupported(f"{config.start_from} is a head of kind {head.config.kind!r} and the run trains {config.kind!r}: give that kind")
    if isinstance(head, EagleHead):
        try:
            checkpoint_tensors(head)
        except ValueError as error:
            raise Unsupported(f"{config.start_from} cannot be trained on: {error}") from error
    return head.float().requires_grad_(True).train()


def with_sizes_of(config: TrainConfig, head: EagleHead | BlockHead) -> TrainConfig:
    """The settings of a run with the sizes of the head that it goes on from. Raises `Unsupported` for sizes that were given otherwise."""
    c = head.config
    sizes: dict[str, Any] = {"intermediate_size": c.intermediate_size}
    if isinstance(head, BlockHead):
        b = head.config
        sizes |= {"layers": b.num_hidden_layers, "block_size": b.block_size, "taps": b.taps, "mask_token": b.mask_token_id}
        sizes |= {"rank": b.rank} if b.kind != "dflash" else {}
        sizes |= {"draft_vocab_size": b.draft_vocab_size} if b.own_lm_head else {}
    elif head.config.kind == "eagle3":
        c = head.config
        sizes |= {"draft_vocab_size": c.draft_vocab_size, "hidden_size": c.hidden_size, "taps": c.taps}
        sizes |= {"share_lm_head": c.target_rows, "norms": c.norm_output}
    left_out = {"taps": (), "mask_token": -1, "share_lm_head": False, "norms": False}
    other = [f"{name} {getattr(config, name)!r} (the head: {size!r})" for name, size in sizes.items()
             if getattr(config, name) not in (left_out.get(name, 0), size)]  # fmt: skip
    if other:
        raise Unsupported(f"{config.start_from} has other sizes than the run: {', '.join(other)}; leave them out")
    return replace(config, **sizes)


def vocabulary_of(head: EagleHead | BlockHead) -> Tensor:
    """The target's ids of the tokens that a head drafts, on the CPU."""
    return head.to_target(torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)).cpu()
