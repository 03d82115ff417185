"""Training-time test: the head is unrolled on its own outputs for several steps, as it will run when it drafts (EAGLE-3, section 3.2;
for EAGLE-1/2 heads HASS, arXiv 2408.15766).

Row t of step 0 is the pair (token t + 1, true features of t). At step i the same row takes token t + 1 + i and the head's own state,
and must predict what the target predicts at position t + 1 + i. Its query sees the step-0 keys of rows <= t and, of each later step,
only the key of its own row. So the scores are one causal block plus one diagonal per step, and nothing of size T x T is stored. Rows of the
prompt matter in step 0 alone, as keys: later steps leave out those that lie before every judged position of the batch.

Letters: B rows, T positions, Hq / Hkv query / key heads, D head_dim, H widths, M positions with a loss, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.generation.drafters.eagle.head import EagleHead
from fastspec.training.losses import LOSSES, Loss, summed_rows

FEATURE_LOSS = 0.1
"""Weight of the feature loss of an EAGLE-1/2 head beside its cross entropy. EAGLE-1 trains one step with weights of 1 and 0.1 instead."""


class UnrolledAttention:
    """The `attend` callback of one unrolled pass: keeps each step's keys and values and attends as described above.

    Rows must be right-padded or unpadded: the causal block needs no further mask. Steps behind the first may hold the last rows alone.
    """

    def __init__(self) -> None:
        self.history: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, Hq, D], k and v [B, S, Hkv, D] of the next step -> [B, S, Hq, D]; S is T in the first step, and one number at most T in
        all others."""
        if q.is_cuda and q.dtype == torch.float32:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        history = self.history.setdefault(layer, [])
        history += (k, v.to(k.dtype))
        return _CausalPlusDiagonals.apply(q, *history)


class _CausalPlusDiagonals(torch.autograd.Function):
    """Causal attention of the last S of T rows to the first pair (k, v) [B, T, ...] and diagonal attention to the later ones [B, S, ...],
    under one softmax.

    The first pair is two blocks: the T - S rows before, which every row sees, and the causal square behind. Forward merges the flash
    kernel's outputs with the diagonals by log-sum-exp. Backward gives the flash kernel the *merged* output and log-sum-exp: it rebuilds
    probabilities as exp(score - lse) and needs rowsum(dO * O), so with the merged values its gradients of q, k, v are exactly a block's
    share.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *kv: Tensor) -> Tensor:
        blocks = _blocks(q, kv)
        heads, scale = kv[0].shape[2], q.shape[-1] ** -0.5
        parts = [_flash_forward(q, k, v, causal) for k, v, causal in blocks]
        lse = parts[0][1]
        masses = [each[1].transpose(1, 2) for each in parts]
        scores = None
        if len(kv) > 2:
            grouped = _group(q, heads)
            scores = torch.stack([(grouped * k.unsqueeze(3)).sum(-1, dtype=torch.float32) * scale for k in kv[2::2]], -1).flatten(2, 3)
            masses = [*masses, scores.logsumexp(-1)]
        out, probs = parts[0][0], None
        if len(masses) > 1:
            total = torch.stack(masses, -1).logsumexp(-1)
            mixed = torch.zeros_like(out, dtype=torch.float32)
            for mass, each in zip(masses, parts, strict=False):
                mixed = mixed + (mass - total).exp()[..., None] * each[0]
            if scores is not None:
                probs = (scores - total[..., None]).exp()
                mixed = _group(mixed, heads)
                for j, v in enumerate(kv[3::2]):
                    mixed = mixed + _group(probs[..., j : j + 1], heads) * v.unsqueeze(3)
                mixed = mixed.flatten(2, 3)
            out = mixed.to(q.dtype)
            lse = lse.copy_(total.transpose(1, 2))
        ctx.save_for_backward(q, out, lse, probs, *kv)
        ctx.extras = [each[2] for each in parts]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, out, lse, probs, *kv = ctx.saved_tensors
        grad = grads[0].to(q.dtype).contiguous()
        found = [
            _flash_backward(grad, q, k, v, out, lse, extra, causal)
            for (k, v, causal), extra in zip(_blocks(q, kv), ctx.extras, strict=True)
        ]
        dq = found[0][0] if len(found) == 1 else found[0][0].float() + found[1][0]
        result = [torch.cat([each[side] for each in reversed(found)], 1) if len(found) > 1 else found[0][side] for side in (1, 2)]
        if probs is not None:
            heads, scale = kv[0].shape[2], q.shape[-1] ** -0.5
            g_grad, g_q = _group(grad, heads), _group(q, heads)
            delta = (grad.float() * out).sum(-1)
            dq = _group(dq, heads).float()
            for j, (k, v) in enumerate(zip(kv[2::2], kv[3::2], strict=True)):
                p = probs[..., j]
                ds = p * ((g_grad * v.unsqueeze(3)).sum(-1, dtype=torch.float32).flatten(2, 3) - delta) * scale
                g_ds, g_p = _group(ds[..., None], heads), _group(p[..., None], heads)
                dq = dq + g_ds * k.unsqueeze(3)
                result += ((g_ds * g_q).sum(3).to(k.dtype), (g_p * g_grad).sum(3).to(v.dtype))
            dq = dq.flatten(2, 3)
        return dq.to(q.dtype), *result


def _blocks(q: Tensor, kv: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, bool]]:
    """The blocks of the first pair as (k, v, causal): the square, and what lies before it."""
    before = kv[0].shape[1] - q.shape[1]
    square = (kv[0][:, before:], kv[1][:, before:], True)
    return [square, (kv[0][:, :before], kv[1][:, :before], False)] if before else [square]


def _group(x: Tensor, heads: int) -> Tensor:
    """[B, T, Hq, ...] -> [B, T, Hkv, Hq / Hkv, ...]."""
    return x.unflatten(2, (heads, -1))


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Attention to a block of keys, a square one if causal: output [B, S, Hq, D], log-sum-exp [B, Hq, S] fp32, and what the backward op
    needs besides."""
    aten = torch.ops.aten
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    if q.is_cuda:
        out, lse, *extra = aten._scaled_dot_product_flash_attention(q.transpose(1, 2), k, v, 0.0, causal, False)
        return out.transpose(1, 2), lse, tuple(extra[:6])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q.transpose(1, 2), k, v, 0.0, causal)
    return out.transpose(1, 2), lse, ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extra: tuple[Any, ...], causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    heads, groups = k.shape[2], q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    args = (grad.transpose(1, 2), q.transpose(1, 2), wide_k, wide_v, out.transpose(1, 2), lse)
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        found = aten._scaled_dot_product_flash_attention_backward(*args, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, causal)
    dq, dk, dv = (x.transpose(1, 2) for x in found[:3])
    return dq, _group(dk, heads).sum(3).to(k.dtype), _group(dv, heads).sum(3).to(v.dtype)


@dataclass(slots=True, kw_only=True)
class Teacher:
    """What the target says of one batch, for the M positions with a loss.

    features [B, T, taps * H_t], or [B, T, H_t] after the final norm where the head has no taps; where [M] flat positions b * T + u,
    u >= 1; probs [M, V_d] the target's distribution over the draft vocabulary, renormalised, and inside [M] fp32 the share of the whole
    that it had; best [M] the target's most likely token (any of the vocabulary), as a draft id or -1 when it is outside. probs is [M, 0]
    where the loss asks for no distribution.
    """

    features: Tensor
    where: Tensor
    probs: Tensor
    inside: Tensor
    best: Tensor


def feature_loss(states: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight * mean smooth L1 distance; the head's states and the target's features [M, H], weight [M]."""
    return (F.smooth_l1_loss(states.float(), features.float(), reduction="none").mean(-1) * weight).sum()


class TrainingTimeTest(nn.Module):
    """The head with its unrolled loss, as one module so that data-parallel wrappers see one forward.

    A step's loss is `loss`, by default the cross entropy against the target's distribution, for EAGLE-1/2 heads with FEATURE_LOSS times
    the distance from the features that they stand for.
    """

    def __init__(self, head: EagleHead, steps: int, decay: float, *, loss: Loss = LOSSES["kl"], compile: bool = False) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.decay = decay
        rows = partial(summed_rows, loss)
        self.loss = torch.compile(rows, dynamic=True) if compile else rows

    def forward(self, ids: Tensor, teacher: Teacher, rank: int = 1, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T], right-padded -> the loss; losses of each step [steps]; whether the target's token is among the head's `rank`
        best, at each step and loss position [steps, M] (False where the row would start before the text).

        No position before `first` carries a loss, in any row: steps behind the first leave out the rows that none is judged by."""
        size = ids.shape[1]
        positions = torch.arange(size, device=ids.device).expand_as(ids)
        start, place, row = 0, teacher.where % size, teacher.where // size
        weight = (teacher.best >= 0).float()
        attend = UnrolledAttention()
        hidden = self.head.fuse(teacher.features)
        goal = teacher.features.flatten(0, 1)[teacher.where] if self.head.config.kind == "eagle" else None
        total, losses, hits = hidden.new_zeros((), dtype=torch.float32), [], []
        following = torch.cat((ids, ids.new_zeros(ids.shape[0], self.steps)), 1)
        for step in range(self.steps):
            if step == 1:
                start = max(0, first - self.steps)
                hidden, positions = hidden[:, start:], positions[:, start:]
            hidden = self.head.step(following[:, start + step + 1 : step + 1 + size], hidden, positions + step, attend)
            inside = place > step
            states = hidden.flatten(0, 1)[(row * (size - start) + place - start - 1 - step).clamp(min=0)]
            logits = self.head.logits(states)
            used = weight * inside
            loss = self.loss(logits, teacher.probs, teacher.inside, used) / used.sum().clamp(min=1)
            if goal is not None:
                loss = loss + FEATURE_LOSS * feature_loss(states, goal, used) / used.sum().clamp(min=1)
            total = total + self.decay**step * loss
            losses.append(loss.detach())
            with torch.no_grad():
                found = logits.argmax(-1, keepdim=True) if rank == 1 else logits.topk(rank, -1).indices
                hits.append((found == teacher.best[:, None]).any(-1) & inside)
        return total, torch.stack(losses), torch.stack(hits)


def chain_lengths(hits: Tensor, where: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Acceptance of a chain from every drafting position, teacher-forced: (counts [steps] of positions whose first i + 1 drafts all
    hit, number of positions). hits [steps, M] as `TrainingTimeTest` returns them; shape (B, T).

    A chain starts at row t; its i-th draft is judged at position t + 1 + i. Chains that run over the answer's end count as missed
    there, which a real decoder would not notice either: it stops.
    """
    rows = where - 1
    alive = torch.ones_like(rows, dtype=torch.bool)
    counts = []
    for step in range(hits.shape[0]):
        dense = torch.zeros(shape[0] * shape[1] + hits.shape[0] + 1, dtype=torch.bool, device=hits.device)
        dense[where] = hits[step]
        alive = alive & dense[rows + 1 + step] & ((rows % shape[1]) + 1 + step < shape[1])
        counts.append(alive.sum())
    return torch.stack(counts), torch.tensor(rows.numel(), device=hits.device)
