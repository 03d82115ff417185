"""Attention of a head that is unrolled on its own states: one causal block, and one diagonal for each later step.

Row t of step 0 is a pair of the text. At step i the same row's query sees the step-0 keys of rows <= t and, of each
later step, only the key of its own row (EAGLE-3, section 3.2). Nothing of size T x T is stored.

Letters: B rows, T positions, S of them in later steps, Hq / Hkv query / key heads, G queries of a key head, D head_dim,
J later steps; N = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
