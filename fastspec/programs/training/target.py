"""Frozen target as a teacher: its features and distributions of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import is_plain
from fastspec.patches.hf.compat import stack_of
from fastspec.programs.training.ttt import Teacher


def freeze(target: Any) -> Any:
    """The target in eval mode and without gradients. Raises `Unsupported` where its weights are packed integers."""
    packed = [name for name, parameter in target.named_parameters() if not parameter.is_floating_point()]
    if packed:
        raise Unsupported(f"the target has packed weights ({packed[0]}); training needs one in plain floating point")
    return target.eval().requires_grad_(False)


def decoder(target: Any) -> Any:
    """The target without its LM head."""
    if hasattr(target, "get_decoder"):
        return stack_of(target.get_decoder())
    return getattr(target, target.base_model_prefix)


class TeacherLogits(NamedTuple):
    """Logits of M states, reduced: `probs` [M, V_d] and `inside` [M] as in `Teacher`, `whole` [M] fp32 the log-sum-exp
    of all, and `best` [M] the most likely token's id."""

    probs: Tensor
    inside: Tensor
    whole: Tensor
    best: Tensor


class TargetReader:
    """Reads a `Teacher` from the target; full-vocabulary logits exist only `chunk` rows at a time."""

    def __init__(self, target: Any, taps: tuple[int, ...], vocabulary: Tensor, *, chunk: int = 4096) -> None:
        self.base = decoder(target)
        self.lm_head = target.get_output_embeddings()
        self.taps = taps
        self.chunk = chunk
        size = self.lm_head.weight.shape[0]
        device = self.lm_head.weight.device
        self.vocabulary = vocabulary.to(device)
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self.draft_id = torch.full((size,), -1, device=device).index_copy_(
            0, self.vocabulary, torch.arange(len(vocabulary), device=device)
        )

    @torch.no_grad()
    def read(self, ids: Tensor, where: Tensor) -> Teacher:
        """ids [B, T] right-padded, where [M] flat positions as in `TextBatch` -> the teacher there."""
        features, _, judged = self.said(ids, where)
        return self.teacher(features, where, judged)

    @torch.no_grad()
    def said(self, ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor, TeacherLogits]:
        """One pass of the target over ids [B, T]: features [B, T, F], and at `where` the states that the LM head reads
        [M, H] with their reduced logits."""
        if not len(where):
            raise ValueError("the batch holds no answer token; leave conversations without an answer out")
        out = self.base(input_ids=ids, output_hidden_states=bool(self.taps), use_cache=False)
        features = torch.cat([out.hidden_states[tap] for tap in self.taps], -1) if self.taps else out.last_hidden_state
        states = out.last_hidden_state.flatten(0, 1)[where]
        return features, states, self.judged(states)

    @torch.no_grad()
    def judged(self, states: Tensor, known: tuple[Tensor, Tensor] | None = None) -> TeacherLogits:
        """Reduced logits of states [M, H]. `known` are `whole` and `best` of before, which spare the logits outside the
        draft vocabulary."""
        size = self.lm_head.weight.shape[0]
        parts = []
        for start in range(0, len(states), self.chunk):
            rows = states[start : start + self.chunk]
            if known is None or not self.drafted_bytes:
                logits = self.lm_head(rows)
                whole, best = logits.float().logsumexp(-1), logits.argmax(-1)
                kept = logits if len(self.vocabulary) == size else logits[:, self.vocabulary]
            else:
                whole, best = (each[start : start + self.chunk] for each in known)
                kept = self._drafted(rows)
            share = torch.zeros_like(whole) if len(self.vocabulary) == size else kept.float().logsumexp(-1) - whole
            parts.append(TeacherLogits(kept.float().softmax(-1).to(rows.dtype), share.clamp(max=0).exp(), whole, best))
        return TeacherLogits(*(torch.cat(each) for each in zip(*parts, strict=True)))

    @property
    def drafted_bytes(self) -> int:
        """Bytes of a copy of the LM head's rows for the draft vocabulary; 0 where none is made."""
        part = len(self.vocabulary) < self.lm_head.weight.shape[0] and is_plain(self.lm_head)
        return len(self.vocabulary) * self.lm_head.weight.shape[1] * self.lm_head.weight.itemsize if part else 0

    def _drafted(self, rows: Tensor) -> Tensor:
        """Logits [M, V_d] of the draft vocabulary alone, of a plain LM head."""
        if self._rows is None:
            bias = self.lm_head.bias
            self._rows = self.lm_head.weight[self.vocabulary], None if bias is None else bias[self.vocabulary]
        return F.linear(rows, *self._rows)

    def teacher(self, features: Tensor, where: Tensor, judged: TeacherLogits) -> Teacher:
        """The teacher of a batch, from its features and reduced logits."""
        best = self.draft_id[judged.best]
        return Teacher(features=features, where=where, probs=judged.probs, inside=judged.inside, best=best)
