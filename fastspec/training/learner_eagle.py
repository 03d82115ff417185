"""EAGLE heads in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastspec.generation.heads.module import EagleHead
from fastspec.training.config import TrainConfig
from fastspec.training.data import Batch, Texts, batches, plan_batches
from fastspec.training.losses import LOSSES
from fastspec.training.target import TargetReader, head_for, start_from_features, start_from_target
from fastspec.training.ttt import Teacher, TrainingTimeTest, chain_lengths


class EagleLearner:
    """An EAGLE head, unrolled. See `Learner`."""

    def __init__(
        self, config: TrainConfig, target: Any, vocabulary: Tensor, first: Iterable[Batch] | None, began: EagleHead | None = None
    ) -> None:
        """`first` are batches to start an EAGLE-1/2 head from, None for one whose weights are loaded; `began` is a head to go on from."""
        self.steps = config.ttt_steps
        self.head = began or _started(config, target, vocabulary, first)
        self.reader = TargetReader(target, self.head.config.taps, vocabulary)
        loss = LOSSES[config.loss_name]
        self.module = TrainingTimeTest(self.head, config.ttt_steps, config.slot_decay, loss=loss, compile=config.compile)

    def prepared(self, batch: Batch, key: tuple[int, ...]) -> Batch:
        return batch

    def inputs(self, batch: Batch, teacher: Teacher) -> tuple[Tensor | Teacher | int, ...]:
        return batch.ids, teacher, 1, batch.first

    def acceptance(self, texts: Texts, limit: int) -> dict[str, Any]:
        return acceptance(self.head, self.reader, texts, steps=self.steps, limit=limit)


def _started(config: TrainConfig, target: Any, vocabulary: Tensor, first: Iterable[Batch] | None) -> EagleHead:
    """A head that starts from the target's parts."""
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


@torch.no_grad()
def acceptance(
    head: EagleHead, reader: TargetReader, texts: Texts, *, steps: int = 7, limit: int = 400, ranks: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    """How many tokens a round yields (bonus counted), teacher-forced over the target's own answers.

    For each rank r: `chain` as if every draft among the head's r best at its depth were in the tree, and nothing else had to be
    pruned. Rank 1 is a real chain of `steps` drafts; the others bound what a tree can reach. `accuracy` is per depth, rank 1.
    """
    chosen = texts if len(texts) <= limit else texts.select(np.arange(len(texts)) < limit)
    unrolled = TrainingTimeTest(head, steps, 1.0)
    device = head.fc.weight.device
    found: dict[str, Any] = {}
    for rank in ranks:
        counts = torch.zeros(steps, device=device, dtype=torch.float64)
        right = torch.zeros(steps, device=device, dtype=torch.float64)
        total = 0
        for batch in batches(chosen, plan_batches(chosen.lengths, 16384, 64, None), 64):
            batch = batch.to(device)
            teacher = reader.read(batch.ids, batch.where)
            _, _, hits = unrolled(batch.ids, teacher, rank, batch.first)
            alive, rows = chain_lengths(hits, teacher.where, batch.ids.shape)
            counts += alive
            right += hits.sum(1)
            total += int(rows)
        found[f"top{rank}"] = round(1 + float(counts.sum()) / max(1, total), 3)
        if rank == 1:
            found["accuracy"] = [round(x, 4) for x in (right / max(1, total)).tolist()]
    return found
