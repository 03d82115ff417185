"""Training-time test: the head is unrolled on its own outputs for several steps, as it will run when it drafts
(EAGLE-3, section 3.2; for EAGLE-1/2 heads HASS, arXiv 2408.15766). Its module, its losses, and its attention.

Row t of step 0 is the pair (token t + 1, true features of t). At step i the same row takes token t + 1 + i and the
head's own state, and must predict what the target predicts at position t + 1 + i. Its query sees the step-0 keys of
rows <= t, one causal block, and of each later step the key of its own row alone, a diagonal: nothing of size T x T is
stored. Rows of the prompt matter in step 0 alone, as keys: later steps leave out those that lie before every judged
position of the batch.

Letters: B rows, T positions, H widths, M positions with a loss, V_d draft vocabulary; in attention S positions of later
steps, Hq / Hkv query / key heads, G queries of a key head, D head_dim, J later steps, N = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.generation.heads.module import EagleHead, Halves, Layer, MtpHead

FEATURE_LOSS = 0.1
"""Weight of the feature loss of an EAGLE-1/2 head beside its cross entropy. EAGLE-1 trains one step with weights of 1
and 0.1 instead."""


@dataclass(slots=True, kw_only=True)
class Teacher:
    """The target's features and distributions of one batch, for the M positions with a loss.

    features [B, T, taps * H_t], or [B, T, H_t] after the final norm where the head has no taps; where [M] flat
    positions b * T + u, u >= 1; probs [M, V_d] the target's distribution over the draft vocabulary, renormalised, and
    inside [M] fp32 the share of the whole that it had; best [M] the target's most likely token (any of the vocabulary),
    as a draft id or -1 when it is outside.
    """

    features: Tensor
    where: Tensor
    probs: Tensor
    inside: Tensor
    best: Tensor


class TrainingTimeTest(nn.Module):
    """Head with its unrolled loss, as one module so that data-parallel wrappers see one forward. To `loss`, a name of
    `LOSSES`, EAGLE-1/2 heads add FEATURE_LOSS times the distance from the features that their states stand for."""

    def __init__(
        self, head: EagleHead | MtpHead, steps: int, decay: float, *, loss: str = "kl", compile: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.decay = decay
        rows = partial(summed_rows, loss)
        self.loss = torch.compile(rows, dynamic=True) if compile else rows
        self.halves: Halves | None = (over_texts(Layer.before), over_texts(Layer.after)) if compile else None
        self.diagonals = Diagonals(*map(over_rows, EAGER)) if compile else EAGER

    def forward(self, ids: Tensor, teacher: Teacher, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T], right-padded -> the loss; losses of each step [steps]; whether the head's likeliest token is the
        target's, at each step and loss position [steps, M] (False where the row would start before the text).

        No position before `first` carries a loss in any row: later steps leave out the rows before it."""
        size = ids.shape[1]
        positions = torch.arange(size, device=ids.device).expand_as(ids)
        start, place, row = 0, teacher.where % size, teacher.where // size
        weight = (teacher.best >= 0).float()
        attend = UnrolledAttention(self.diagonals)
        hidden = self.head.fuse(teacher.features)
        goal = teacher.features.flatten(0, 1)[teacher.where] if self.head.config.kind == "eagle" else None
        total, losses, hits = hidden.new_zeros((), dtype=torch.float32), [], []
        following = torch.cat((ids, ids.new_zeros(ids.shape[0], self.steps)), 1)
        for step in range(self.steps):
            if step == 1:
                start = max(0, first - self.steps)
                hidden, positions = hidden[:, start:], positions[:, start:]
            hidden = self.head.step(
                following[:, start + step + 1 : step + 1 + size], hidden, positions + step, attend, self.halves
            )
            inside = place > step
            states = hidden.flatten(0, 1)[(row * (size - start) + place - start - 1 - step).clamp(min=0)]
            logits = self.head.logits(states)
            used = weight * inside
            loss = self.loss(logits, teacher.probs, teacher.inside, used) / used.sum().clamp(min=1)
            if goal is not None:
                apart = F.smooth_l1_loss(states.float(), goal.float(), reduction="none").mean(-1)
                loss = loss + FEATURE_LOSS * (apart * used).sum() / used.sum().clamp(min=1)
            total = total + self.decay**step * loss
            losses.append(loss.detach())
            with torch.no_grad():
                hits.append((logits.argmax(-1) == teacher.best) & inside)
        return total, torch.stack(losses), torch.stack(hits)


def chain_lengths(hits: Tensor, where: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Acceptance of a chain from every drafting position, teacher-forced: (counts [steps] of positions whose first i +
    1 drafts all hit, number of positions). hits [steps, M] as `TrainingTimeTest` returns them; shape (B, T). The i-th
    draft from row t is judged at position t + 1 + i; past the answer's end it counts as missed."""
    rows = where - 1
    alive = torch.ones_like(rows, dtype=torch.bool)
    counts = []
    for step in range(hits.shape[0]):
        dense = torch.zeros(shape[0] * shape[1] + hits.shape[0] + 1, dtype=torch.bool, device=hits.device)
        dense[where] = hits[step]
        alive = alive & dense[rows + 1 + step] & ((rows % shape[1]) + 1 + step < shape[1])
        counts.append(alive.sum())
    return torch.stack(counts), torch.tensor(rows.numel(), device=hits.device)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled for any dimension 0 of its arguments' tensors, alone or in sequences."""
    run = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for each in arguments:
            for x in each if isinstance(each, Sequence) else (each,):
                if isinstance(x, Tensor):
                    torch._dynamo.maybe_mark_dynamic(x, 0)
        return run(*arguments)

    return call


def over_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a module and of tensors [B, T, ...], which treats positions alike, compiled over the B * T."""
    run = over_rows(function)

    def call(module: Any, *tensors: Tensor) -> Any:
        shape = tensors[0].shape[:2]
        found = run(module, *(x.flatten(0, 1) for x in tensors))
        return found.unflatten(0, shape) if isinstance(found, Tensor) else tuple(x.unflatten(0, shape) for x in found)

    return call


LOSSES = ("kl", "tv", "nla", "hybrid")
"""Losses of drafting heads, a number per row (one prediction): `kl` is the cross entropy against p over the draft
vocabulary (their KL divergence but for p's entropy, which no head changes), `tv` 1 - alpha, `nla` -log alpha, `hybrid`
lambda * kl + (1 - lambda) * tv, lambda = exp(-3 alpha), not differentiated (LK losses, arXiv 2602.23881). p is the
target's distribution, q the draft's, alpha = sum over v of min(p, q)."""
SMALLEST = 1e-6
"""Overlaps below it count as it under the logarithm of `nla`."""
HYBRID_FALL = 3.0


def row_losses(loss: str, logits: Tensor, probs: Tensor, inside: Tensor) -> Tensor:
    """The loss of each row [M] fp32, by its name in `LOSSES`; logits [M, V_d], probs and inside as in `Teacher`."""
    wide = logits.float()
    whole = wide.logsumexp(-1)
    if loss == "kl":
        return whole - (wide * probs).sum(-1)
    alpha = torch.minimum(probs.float() * inside.float()[:, None], (wide - whole[:, None]).exp()).sum(-1)
    if loss == "tv":
        return 1 - alpha
    if loss == "nla":
        return -alpha.clamp_min(SMALLEST).log()
    share = (-HYBRID_FALL * alpha.detach()).exp()
    return share * (whole - (wide * probs).sum(-1)) + (1 - share) * (1 - alpha)


def summed_rows(loss: str, logits: Tensor, probs: Tensor, inside: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight [M] * loss."""
    return (row_losses(loss, logits, probs, inside) * weight).sum()


class Diagonals(NamedTuple):
    """The arithmetic of the diagonals, eager or compiled: `mixed` and `gradients` below."""

    mixed: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]


class UnrolledAttention:
    """The `attend` callback of one unrolled pass, which keeps each step's keys and values. Rows must be right-padded or
    unpadded. Steps after the first may hold the last rows alone."""

    def __init__(self, diagonals: Diagonals | None = None) -> None:
        self.history: dict[int, list[Tensor]] = {}
        self.diagonals = diagonals or EAGER

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, Hq, D], k and v [B, S, Hkv, D] of the next step -> [B, S, Hq, D]; S is T in the first step, and one
        number at most T in all others."""
        if q.is_cuda and q.dtype == torch.float32:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        history = self.history.setdefault(layer, [])
        history += (k, v.to(k.dtype))
        return _CausalPlusDiagonals.apply(self.diagonals, q, *history)


class _CausalPlusDiagonals(torch.autograd.Function):
    """Causal attention of the last S of T rows to the first pair (k, v) [B, T, ...] and diagonal attention to the later
    ones [B, S, ...], under one softmax.

    The first pair is two blocks: the T - S rows before, which every row sees, and the causal square behind. Forward
    merges the flash kernel's outputs with the diagonals by log-sum-exp. Backward gives the flash kernel the *merged*
    output and log-sum-exp: it rebuilds probabilities as exp(score - lse) and needs rowsum(dO * O), so with the merged
    values its gradients of q, k, v are exactly a block's share.
    """

    @staticmethod
    def forward(ctx: Any, diagonals: Diagonals, q: Tensor, *kv: Tensor) -> Tensor:
        parts = [_flash_forward(q, k, v, causal) for k, v, causal in _blocks(q, kv)]
        (out, lse, _), probs = parts[0], None
        if len(kv) > 2:
            outs = [each[0].flatten(0, 1) for each in parts]
            masses = [each[1].transpose(1, 2).flatten(0, 1) for each in parts]
            keys, values = _stacked(kv)
            flat, total, probs = diagonals.mixed(_grouped(q, kv), keys, values, outs, masses)
            out, total = flat.view(q.shape), total.view(q.shape[:-1])
            lse = lse.copy_(total.transpose(1, 2))
        ctx.save_for_backward(q, out, lse, probs, *kv)
        ctx.diagonals, ctx.extras = diagonals, [each[2] for each in parts]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, probs, *kv = ctx.saved_tensors
        grad = grads[0].to(q.dtype).contiguous()
        found = [
            _flash_backward(grad, q, k, v, out, lse, extra, causal)
            for (k, v, causal), extra in zip(_blocks(q, kv), ctx.extras, strict=True)
        ]
        dq = found[0][0] if len(found) == 1 else found[0][0].float() + found[1][0]
        sides = [[each[side] for each in reversed(found)] for side in (1, 2)]
        result = [torch.cat(each, 1) if len(each) > 1 else each[0] for each in sides]
        if len(kv) > 2:
            grouped = (_grouped(each, kv) for each in (q, grad, out, dq))
            dq, dk, dv = ctx.diagonals.gradients(*grouped, *_stacked(kv), probs)
            dq, pairs = dq.view(q.shape), zip(dk.unbind(1), dv.unbind(1), strict=True)
            result += [each.view(kv[2].shape) for pair in pairs for each in pair]
        return None, dq.to(q.dtype), *result


def mixed(
    q: Tensor, keys: Tensor, values: Tensor, outs: Sequence[Tensor], masses: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks' outputs, each [N, Hq, D] with its log-sum-exp [N, Hq] fp32, and the diagonals under one softmax: the
    output, the log-sum-exp of all, and the diagonals' probabilities [N, J, Hkv, G] fp32. q [N, Hkv, G, D]; keys and
    values [N, J, Hkv, D]."""
    scores = (q.unsqueeze(1) * keys.unsqueeze(3)).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5
    total = torch.stack([*masses, scores.logsumexp(1).flatten(1)]).logsumexp(0)
    probs = (scores - total.view(q.shape[:-1]).unsqueeze(1)).exp()
    out = (probs[..., None] * values.unsqueeze(3)).sum(1).flatten(1, 2)
    for mass, each in zip(masses, outs, strict=True):
        out = out + (mass - total).exp()[..., None] * each
    return out.to(q.dtype), total, probs


def gradients(
    q: Tensor, grad: Tensor, out: Tensor, dq: Tensor, keys: Tensor, values: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of q [N, Hkv, G, D] fp32, and those of the diagonals' keys and values [N, J, Hkv, D]; `dq` is the
    blocks' share of the first. q, grad (of the output) and out are [N, Hkv, G, D] too."""
    delta = (grad.float() * out).sum(-1)
    wanted = (grad.unsqueeze(1) * values.unsqueeze(3)).sum(-1, dtype=torch.float32)
    scores = probs * (wanted - delta.unsqueeze(1)) * q.shape[-1] ** -0.5
    dq = dq.float() + (scores[..., None] * keys.unsqueeze(3)).sum(1)
    dk = (scores[..., None] * q.unsqueeze(1)).sum(3)
    dv = (probs[..., None] * grad.unsqueeze(1)).sum(3)
    return dq, dk.to(keys.dtype), dv.to(values.dtype)


EAGER = Diagonals(mixed, gradients)


def _stacked(kv: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [N, J, Hkv, D] of the later steps."""
    keys, values = (torch.stack([x.flatten(0, 1) for x in kv[side::2]], 1) for side in (2, 3))
    return keys, values


def _grouped(x: Tensor, kv: Sequence[Tensor]) -> Tensor:
    """[B, S, Hq, D] -> [N, Hkv, G, D]."""
    return _group(x, kv[0].shape[2]).flatten(0, 1)


def _blocks(q: Tensor, kv: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, bool]]:
    """The blocks of the first pair as (k, v, causal): the square, and what lies before it."""
    before = kv[0].shape[1] - q.shape[1]
    square = (kv[0][:, before:], kv[1][:, before:], True)
    return [square, (kv[0][:, :before], kv[1][:, :before], False)] if before else [square]


def _group(x: Tensor, heads: int) -> Tensor:
    """[B, T, Hq, ...] -> [B, T, Hkv, Hq / Hkv, ...]."""
    return x.unflatten(2, (heads, -1))


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Attention to a block of keys, a square one if causal: output [B, S, Hq, D], log-sum-exp [B, Hq, S] fp32, and what
    the backward op needs besides."""
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
        found = aten._scaled_dot_product_flash_attention_backward(
            *args, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, causal)
    dq, dk, dv = (x.transpose(1, 2) for x in found[:3])
    return dq, _group(dk, heads).sum(3).to(k.dtype), _group(dv, heads).sum(3).to(v.dtype)
