"""Block heads in training: their sizes and start from the target, the anchors of a batch, and their acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.training.blocks import BlockTraining, draw_anchors
from fastspec.training.config import TrainConfig
from fastspec.training.data import Batch, Texts, batches, plan_batches
from fastspec.training.losses import LOSSES
from fastspec.training.target import SOFTEN, TargetReader, final_norm
from fastspec.training.ttt import Teacher

TAPS = 5
"""Layers that a head reads, unless said otherwise."""
LAYERS, BLOCK, RANK = 2, 8, 256
"""Sizes of a head, unless said otherwise."""
JUDGED_TOKENS = 8192
"""Padded tokens of a batch in which every position is an anchor."""


class BlockLearner:
    """A block head. See `Learner`."""

    def __init__(self, config: TrainConfig, target: Any, vocabulary: Tensor, texts: Texts, began: BlockHead | None = None) -> None:
        """`began` is a head to go on from."""
        self.anchors, self.multiple = config.anchors, config.length_multiple
        self.head = began or _started(config, target, vocabulary, texts)
        loss = LOSSES[config.loss_name]
        compared = loss.compares or self.head.confidence_head is not None
        self.reader = TargetReader(target, self.head.config.taps, vocabulary, distributions=compared)
        self.module = BlockTraining(self.head, loss, config.slot_decay, self.reader.draft_id, compile=config.compile)

    def prepared(self, batch: Batch, key: tuple[int, ...]) -> Batch:
        shape = (batch.ids.shape[0], batch.ids.shape[1])
        anchors = draw_anchors(batch.where.numpy(), shape, self.anchors, np.random.default_rng(key))
        return replace(batch, anchors=torch.from_numpy(anchors))

    def inputs(self, batch: Batch, teacher: Teacher) -> tuple[Tensor | Teacher, ...]:
        if batch.anchors is None:
            raise ValueError("a block head learns behind anchors: call prepared(batch, key) first")
        return batch.ids, teacher, batch.anchors

    @torch.no_grad()
    def acceptance(self, texts: Texts, limit: int) -> dict[str, Any]:
        """As for other heads, with a block behind every position of the answers. A chain ends with the answer."""
        chosen = texts if len(texts) <= limit else texts.select(np.arange(len(texts)) < limit)
        drafts, device = self.head.config.drafts, self.head.fc.weight.device
        alive, right = (torch.zeros(drafts, dtype=torch.float64, device=device) for _ in range(2))
        blocks = 0
        for batch in batches(chosen, plan_batches(chosen.lengths, JUDGED_TOKENS, self.multiple, None), self.multiple):
            anchors = torch.from_numpy(draw_anchors(batch.where.numpy(), (batch.ids.shape[0], batch.ids.shape[1]), 0, None))
            batch = Batch(batch.ids, batch.where, anchors).to(device)
            teacher = self.reader.read(batch.ids, batch.where)
            hits = self.module(*self.inputs(batch, teacher))[2].nan_to_num(0.0)
            alive += hits.cumprod(0).sum(1)
            right += hits.sum(1)
            blocks += int((anchors >= 0).sum())
        return {
            "top1": round(1 + float(alive.sum()) / max(1, blocks), 3),
            "accuracy": [round(x, 4) for x in (right / max(1, blocks)).tolist()],
        }


def _started(config: TrainConfig, target: Any, vocabulary: Tensor, texts: Texts) -> BlockHead:
    """A head that starts from the target's parts."""
    head = BlockHead(block_for(config, target, len(vocabulary), texts))
    start_block(head, target, vocabulary)
    head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return head


def block_for(config: TrainConfig, target: Any, draft_vocab_size: int, texts: Texts) -> BlockConfig:
    """A block head with the target's width and attention shape, for the settings of a run."""
    c = target.config.get_text_config()
    heads, layers = c.num_attention_heads, c.num_hidden_layers
    vocab = target.get_input_embeddings().weight.shape[0]
    rope = getattr(c, "rope_parameters", None) or {}
    kind = config.kind
    return BlockConfig(
        kind=kind,
        hidden_size=c.hidden_size,
        intermediate_size=config.intermediate_size or c.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab_size,
        num_target_layers=layers,
        taps=config.taps or default_taps(layers),
        mask_token_id=config.mask_token if config.mask_token >= 0 else unused_token(texts, vocab),
        num_hidden_layers=config.layers or LAYERS,
        block_size=config.block_size or BLOCK,
        sample_from_anchor=kind == "dspark",
        rank=0 if kind == "dflash" else config.rank or RANK,
        candidates=min(16, vocab),
        confidence=kind == "dspark",
        rms_norm_eps=getattr(c, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", getattr(c, "rope_theta", 10000.0))),
        max_position_embeddings=c.max_position_embeddings,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """Indices into hidden_states of TAPS layers spread evenly over 1 to layers - 3 (0-based), as the published heads have them."""
    last = max(1, layers - 3)
    return tuple(sorted({min(layers, 2 + (last - 1) * i // (TAPS - 1)) for i in range(TAPS)}))


def unused_token(texts: Texts, vocab_size: int) -> int:
    """The last token of the vocabulary that no text holds: its embedding stands for "to be drafted"."""
    free = np.flatnonzero(np.bincount(texts.tokens, minlength=vocab_size)[:vocab_size] == 0)
    if not len(free):
        raise Unsupported("the texts hold every token of the vocabulary: name one that drafts never need, mask_token=...")
    return int(free[-1])


@torch.no_grad()
def start_block(head: BlockHead, target: Any, vocabulary: Tensor) -> None:
    """Start a head: LM head (where it has its own) and final norm are the target's, the norm times SOFTEN; attention and feed-forward
    begin small, convolutions as the identity, and corrections at zero."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=(0.1 if small else 1.0) * parameter.shape[1] ** -0.5)
        if name.endswith(("markov_w2.weight", "successor_codebook", "kernel_projection.weight", "confidence_head.proj.weight")):
            parameter.zero_()
    weight = getattr(final_norm(target), "weight", None)
    if isinstance(weight, Tensor) and weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(weight)
    head.norm.weight.mul_(SOFTEN)
    if head.lm_head is not None:
        weight = target.get_output_embeddings().weight
        head.lm_head.weight.copy_(weight[vocabulary.to(weight.device)])
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
