"""Acceptance of a head in training, over texts that the target wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastspec.generation.heads.module import EagleHead
from fastspec.programs.training.data import Texts, batches, plan_batches
from fastspec.programs.training.target import TargetReader
from fastspec.programs.training.ttt import TrainingTimeTest, chain_lengths


@torch.no_grad()
def acceptance(
    head: EagleHead,
    reader: TargetReader,
    texts: Texts,
    *,
    steps: int = 7,
    limit: int = 400,
    ranks: tuple[int, ...] = (1,),
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
