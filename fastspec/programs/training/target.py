"""Frozen target as a teacher: a head's sizes and start, and the target's distributions of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import is_plain
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.hf.compat import stack_of
from fastspec.programs.training.data import TextBatch
from fastspec.programs.training.ttt import Teacher

SOFTEN = 0.3
"""Factor on the final norm at the start: a tap read through the target's LM head names the token before."""
RIDGE = 0.01
"""Share of the mean square added to the diagonal of the least squares that EAGLE-1/2 heads start from."""


def freeze(target: Any) -> Any:
    """The target in eval mode and without gradients. Raises `Unsupported` where its weights are packed integers."""
    packed = [name for name, parameter in target.named_parameters() if not parameter.is_floating_point()]
    if packed:
        raise Unsupported(f"the target has packed weights ({packed[0]}); training needs one in plain floating point")
    return target.eval().requires_grad_(False)


def head_for(
    target: Any,
    *,
    draft_vocab_size: int,
    hidden_size: int | None,
    intermediate_size: int | None,
    taps: tuple[int, ...],
    kind: str = "eagle3",
    target_rows: bool = False,
    norms: bool = False,
) -> HeadConfig:
    """A head with the target's attention shape; for EAGLE-3, `taps` empty means hidden_states[2], [L // 2] and [L - 3],
    as published, and `norms` are those of EAGLE-3.1."""
    c = target.config.get_text_config()
    heads, layers, width = c.num_attention_heads, c.num_hidden_layers, hidden_size or c.hidden_size
    read = target.get_output_embeddings().weight.shape[1]
    if target_rows and not width == c.hidden_size == read:
        raise Unsupported(
            f"share_lm_head needs one width: the target's states are {c.hidden_size} wide, its LM head reads {read}, "
            f"and the head is to be {width}"
        )
    theta = (getattr(c, "rope_parameters", None) or {}).get("rope_theta", getattr(c, "rope_theta", 10000.0))
    if kind == "eagle3":
        taps = taps or tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)}))
    return HeadConfig(
        kind=kind,
        own_lm_head=kind == "eagle3" and not target_rows,
        target_rows=target_rows,
        fc_norm=norms,
        norm_output=norms,
        hidden_size=width,
        intermediate_size=intermediate_size or c.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocab_size=target.get_input_embeddings().weight.shape[0],
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=c.hidden_size,
        taps=taps,
        rms_norm_eps=getattr(c, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": float(theta)},
        max_position_embeddings=c.max_position_embeddings,
    )


def decoder(target: Any) -> Any:
    """The target without its LM head."""
    if hasattr(target, "get_decoder"):
        return stack_of(target.get_decoder())
    return getattr(target, target.base_model_prefix)


@torch.no_grad()
def start_from_target(head: EagleHead, target: Any, vocabulary: Tensor) -> None:
    """Start an EAGLE-3 head from the target's own parts; docs/training.md has the loss measured from it.

    LM head and final norm are the target's, the norm times SOFTEN; `fc` passes the highest tap through; attention and
    feed-forward begin near zero. Only where the widths agree: otherwise all matrices start at random.
    """
    c = head.config
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    _random(head)
    weight = target.get_output_embeddings().weight
    if head.norm is None or not c.hidden_size == c.target_hidden_size == weight.shape[1]:
        return
    if head.lm_head is not None:
        head.lm_head.weight.copy_(weight[vocabulary.to(weight.device)])
    if head.lm_head_map is not None:
        nn.init.eye_(head.lm_head_map.weight)
    weight = getattr(getattr(decoder(target), "norm", None), "weight", None)
    if isinstance(weight, Tensor) and weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(weight)
    head.norm.weight.mul_(SOFTEN)
    head.fc.weight.zero_()
    head.fc.weight[:, -c.hidden_size :] = torch.eye(c.hidden_size)


@torch.no_grad()
def start_from_features(head: EagleHead, target: Any, texts: Iterable[TextBatch]) -> None:
    """Start an EAGLE-1/2 head as the best linear guess of the next feature, from a few batches; docs/training.md has
    the loss measured.

    `fc` solves the least squares of a position's feature on its token's embedding and the feature before, over the
    positions with a loss; attention and feed-forward begin near zero.
    """
    _random(head)
    base, embed = decoder(target), target.get_input_embeddings()
    square = cross = torch.zeros((), dtype=torch.float64, device=embed.weight.device)
    for batch in texts:
        batch = batch.to(embed.weight.device)
        features = base(input_ids=batch.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        known = torch.cat((embed(batch.ids.flatten()[batch.where]), features[batch.where - 1]), -1).double()
        square, cross = square + known.T @ known, cross + known.T @ features[batch.where].double()
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    head.fc.weight.copy_(torch.linalg.solve(square, cross).T)


def _random(head: EagleHead) -> None:
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=(0.1 if small else 1.0) * parameter.shape[1] ** -0.5)


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
