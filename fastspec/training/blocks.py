"""Training a block head: many blocks of a text in one pass, each behind an anchor drawn from the answer.

A block's rows see the context before its anchor and the block itself, nothing else: neither the anchor's own features, which do not
exist when it drafts, nor another block. The text's own tokens stand in as the predecessors that a correction reads.

Letters as in `generation/drafters/block/head.py`: R texts of T positions, N blocks of a text, K rows and D drafts of a block, S context
tokens (here T), M positions where the target was read, V_d draft vocabulary; Q = R * N * D predictions.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fastspec.generation.drafters.block.head import BlockHead
from fastspec.training.losses import Loss, row_losses, slot_weights
from fastspec.training.ttt import Teacher

MASK_ELEMENTS = 1 << 26
"""Most (query, key) pairs of one attention call; more texts or blocks than that go in pieces."""
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of CUDA's attention kernels those that take any mask."""
LOGITS = 1 << 27
"""Most logits of one piece of the loss. Where there are several, each is computed again in the backward pass."""


def draw_anchors(where: np.ndarray, shape: tuple[int, int], count: int, rng: np.random.Generator | None) -> np.ndarray:
    """Anchors [R, N] int64 ascending, then -1 where a text has fewer: of the positions `where` [M] (flat, b * T + u, see `Batch`) up to
    `count` of each text, drawn without replacement; all of them where `rng` is None, with N the most that a text has."""
    texts, positions = np.divmod(where, shape[1])
    keys = np.arange(len(where), dtype=np.float64) if rng is None else rng.random(len(where))
    order = np.lexsort((keys, texts))
    counts = np.bincount(texts, minlength=shape[0])
    rank = np.arange(len(where)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=1)) if rng is None else count
    keep = rank < width
    found = np.full((shape[0], width), np.iinfo(np.int64).max, dtype=np.int64)
    found[texts[order][keep], rank[keep]] = positions[order][keep]
    found.sort(axis=1)
    return np.where(found == np.iinfo(np.int64).max, -1, found)


class BlockAttention:
    """The `attend` callback of a pass over many blocks, in pieces of bounded memory.

    `context` holds keys and values [R, S, Hkv, E] of every layer, `anchors` [R, N] the position of each block's first row.
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, elements: int = MASK_ELEMENTS) -> None:
        self.context, self.anchors, self.elements = context, anchors, elements
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, N, K, Hq, E], k and v [R, N, K, Hkv, E] -> [R, N, K, Hq, E]."""
        keys, values = self.context[layer]
        texts, blocks, rows = q.shape[:3]
        size = keys.shape[1]
        few = min(blocks, max(1, int(self.elements**0.5) // rows))  # blocks of a piece: their rows are each other's keys too
        many = max(1, self.elements // (few * rows * (size + few * rows)))
        out = []
        for a in range(0, texts, many):
            parts = [self._piece(slice(a, a + many), slice(b, b + few), q, k, v, keys, values) for b in range(0, blocks, few)]
            out.append(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        return torch.cat(out) if len(out) > 1 else out[0]

    def _piece(self, texts: slice, blocks: slice, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = q[texts, blocks].shape
        groups = q.shape[3] // k.shape[3]
        mine = q[texts, blocks].flatten(1, 2).transpose(1, 2)
        k, v = (
            torch.cat((old[texts], new[texts, blocks].flatten(1, 2).to(old.dtype)), 1).repeat_interleave(groups, 2).transpose(1, 2)
            for old, new in ((keys, k), (values, v))
        )
        mask = self._mask(texts, blocks, keys.shape[1], shape[2])
        with sdpa_kernel(MASKED) if mask.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(mine.to(keys.dtype), k, v, mask)
        return out.transpose(1, 2).reshape(shape)

    def _mask(self, texts: slice, blocks: slice, size: int, rows: int) -> Tensor:
        """[r, 1, n * K, S + n * K]: context before the anchor, and the rows of the same block."""
        name = (texts.start, blocks.start)
        if name not in self._masks:
            anchors = self.anchors[texts, blocks].repeat_interleave(rows, 1)
            before = torch.arange(size, device=anchors.device) < anchors[..., None]
            block = torch.arange(anchors.shape[1], device=anchors.device) // rows
            same = (block[:, None] == block).expand(len(anchors), -1, -1)
            self._masks[name] = torch.cat((before, same), -1)[:, None]
        return self._masks[name]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the predictions of blocks stand, each [R, N, D]: `previous` token ids, `truth` draft ids of the right tokens (0 where there is
    none), `teacher` rows of the target's answers, `used` whether the slot and all before it lie in the answer, `known` whether the truth
    is in the draft vocabulary too."""

    previous: Tensor
    truth: Tensor
    teacher: Tensor
    used: Tensor
    known: Tensor


def places_of(ids: Tensor, where: Tensor, anchors: Tensor, drafts: int, draft_id: Tensor) -> Places:
    """ids [R, T], where [M] flat positions that the target was read at, anchors [R, N] (-1: no block), draft_id [V] (-1: outside)."""
    texts, size = ids.shape
    rows = torch.full((texts * size,), -1, dtype=torch.int64, device=ids.device)
    rows[where] = torch.arange(len(where), device=ids.device)
    at = anchors.clamp(min=0)[..., None] + torch.arange(drafts, device=ids.device)  # the position whose next token is drafted
    flat = at.clamp(max=size - 1) + size * torch.arange(texts, device=ids.device)[:, None, None]
    teacher = rows[flat]
    used = ((teacher >= 0) & (at + 1 < size) & (anchors >= 0)[..., None]).int().cumprod(-1).bool()
    following = torch.cat((ids.flatten(), ids.new_zeros(1)))[flat + 1]
    truth = draft_id[following]
    return Places(ids.flatten()[flat], truth.clamp(min=0), teacher.clamp(min=0), used, used & (truth >= 0))


class BlockTraining(nn.Module):
    """A block head with its loss, as one module so that data-parallel wrappers see one forward.

    The loss is the weighted mean over slots of `loss`, plus the same mean of the binary cross entropy of the confidence head against
    alpha, and of the cross entropy over the selector's candidates where the right token is one of them.
    """

    draft_id: Tensor

    def __init__(self, head: BlockHead, loss: Loss, decay: float, draft_id: Tensor, *, compile: bool = False) -> None:
        super().__init__()
        self.head, self.loss, self.decay = head, loss, decay
        self.register_buffer("draft_id", draft_id, persistent=False)
        self.rows = torch.compile(judged_rows, dynamic=True) if compile else judged_rows

    def forward(self, ids: Tensor, teacher: Teacher, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [R, T] right-padded, anchors [R, N] -> the loss; losses of each slot [D]; whether the draft's first choice is the target's
        [D, R * N] fp32, NaN where the slot has no loss. Choices are made behind the text's own tokens."""
        places = places_of(ids, teacher.where, anchors, self.head.config.drafts, self.draft_id)
        states = self.states(ids, teacher.features, anchors)
        found = self._in_pieces(states, places, teacher)
        right, hits = found[1].detach(), found[2]
        weight = slot_weights(self.loss, self.decay, places.known, right)
        mass = weight.sum().clamp(min=1e-6)
        total = (found[0] * weight).sum() / mass
        if self.head.candidate_selector is not None:
            chosen = weight * found[4]
            total = total + (found[3] * chosen).sum() / chosen.sum().clamp(min=1e-6)
        elif self.head.confidence_head is not None:
            total = total + (found[3] * weight).sum() / mass
        with torch.no_grad():
            known = places.known.flatten(0, 1)
            losses = (found[0].flatten(0, 1) * known).sum(0) / known.sum(0).clamp(min=1)
            seen = torch.where(places.used, hits, torch.nan).flatten(0, 1)
        return total, losses, seen.T

    def states(self, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Final states of every block's slots [R, N, D, H]."""
        at = anchors.clamp(min=0)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        context = self.head.context(features)
        attend = BlockAttention(self.head.context_keys_values(context, positions), at)
        return self.head.states(ids.gather(1, at), at, attend)

    def _in_pieces(self, states: Tensor, places: Places, teacher: Teacher) -> list[Tensor]:
        """What `_piece` gives for every prediction, each [R, N, D], a bounded number of logits at a time."""
        flat = (states.flatten(0, 2), *(x.flatten() for x in (places.previous, places.truth, places.teacher, places.known)))
        size = max(1, LOGITS // self.head.config.draft_vocab_size)
        run = partial(checkpoint, self._piece, use_reentrant=False, preserve_rng_state=False) if len(flat[0]) > size else self._piece
        parts = [run(teacher, *piece) for piece in zip(*(x.split(size) for x in flat), strict=True)]
        return [torch.cat(column).view(places.used.shape) for column in zip(*parts, strict=True)]

    def _piece(self, teacher: Teacher, states: Tensor, previous: Tensor, truth: Tensor, at: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """Of Q predictions: loss, the draft's probability of the truth (zero for a loss that does not ask, where no selector has it), hit,
        the loss of what stands behind the head, its weight."""
        head, best = self.head, teacher.best[at]
        judged, chosen = head.confidence_head is not None, head.candidate_selector is None
        unary, said = head.unary(states), (teacher.probs, teacher.inside, at)
        added = None if head.markov_head is None else head.markov_head(previous)
        loss, alpha, right, choice = self.rows(self.loss, unary, added, said, truth, overlap=judged, chosen=chosen)
        if head.candidate_selector is not None:
            scores, ids = head.edges(unary, states, previous[:, None])
            assert ids is not None
            scores = scores.squeeze(1)
            there = torch.eq(ids, truth[:, None])
            extra = -(scores.log_softmax(-1) * there).sum(-1)
            right = (scores.detach().softmax(-1) * there).sum(-1)
            hit = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1) == best
            return loss, right, hit.float(), extra, (there.any(-1) & known).float()
        extra = torch.zeros_like(loss)
        if judged:
            sure = head.confidence(states, previous).float()
            extra = F.binary_cross_entropy_with_logits(sure, alpha.detach().clamp(max=1), reduction="none")
        return loss, right, (choice == best).float(), extra, torch.ones_like(loss)


def judged_rows(
    loss: Loss, logits: Tensor, added: Tensor | None, said: tuple[Tensor, Tensor, Tensor], truth: Tensor, *, overlap: bool, chosen: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits [Q, V_d], with `added` [Q, V_d] on top where there is something: loss and alpha as `row_losses` has them, the probability
    of `truth` [Q] for a loss that weighs slots by it, else zeros, and the first choices [Q]; the last two are zeros where a selector
    chooses, not these logits (`chosen` False). One function, so that it compiles as one.

    `said` is the target's: probs [M, V_d], inside [M], and which of these rows each prediction has [Q].
    """
    wide = logits.float() if added is None else logits.float() + added.float()
    probs, inside, at = said
    if loss.compares or overlap:
        probs, inside = probs[at], inside[at]
    found, alpha = row_losses(loss, wide, probs, inside, truth, overlap=overlap)
    right = torch.zeros_like(found)
    if not chosen:
        return found, alpha, right, truth.new_zeros(truth.shape)
    if loss.dpace:
        right = (wide.detach().gather(-1, truth[:, None]).squeeze(-1) - wide.detach().logsumexp(-1)).exp()
    return found, alpha, right, wide.detach().argmax(-1)
