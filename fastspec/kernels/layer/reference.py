"""Norms and rotary embedding in plain torch: what the kernels beside it compute, and their specification.

Letters: B rows (sequences), N nodes of a row's tree, P of its longest path, Hq query heads, Hkv key heads, D head size, C cache slots, W
64-bit words, V tokens, H width. Whole numbers are int64. Lengths are tensors on the device, and no op waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.cache.reference import cache_write
from fastspec.kernels.linear.reference import Addends, Parts, joined


def rms_norm(
    x: Tensor | Parts | Addends, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None,
    total: Tensor | None = None, offset: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Root-mean-square norm of x [..., H], or of x + residual [..., H], by weight [H] -> the norm, and what was normed.

    The sum is rounded to x's dtype before it is normed; the norm is computed in fp32 and rounded before the weight is applied, as the Llama
    family does. With an `offset` weight + offset is applied, in fp32 before the norm is rounded, as Gemma does (1; 0 from Gemma 4 on).
    `out` and `total` [..., H], whose last dimension is contiguous, receive the norm and what was normed where given.
    """
    x = joined(x)
    summed = x if residual is None else x + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(x.dtype) if offset is None else (wide * (offset + weight.float())).to(x.dtype)
    return normed if out is None else out.copy_(normed), summed if total is None else total.copy_(summed)


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, offset: float | None = None, gated: bool = False,
    norms_values: bool = False, ties_values: bool = False, interleaved: bool = False, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys, write keys and values into the cache -> queries [B, N, Hq, D].

    qkv [B, N, (Hq + 2 * Hkv) * D] holds queries, keys, values; k_cache, v_cache [B, Hkv, C, D] of one layer take row b's node n at
    slots [B, N] int64. cos, sin [P, R / 2] are tables by position, positions [B, N] int64 index them: the first R channels are
    rotated, in neox halves or, with `interleaved`, in neighbouring pairs, computed in fp32 and rounded once. q_norm, k_norm [D] are the
    weights of an RMS norm over each head, with `rms_norm`'s numerics and its `offset`, before the rotation. With `gated` every head's
    queries are followed by D gates, which `gate_heads` reads: qkv is [B, N, (2 * Hq + 2 * Hkv) * D]. With `ties_values` qkv holds queries
    and keys, and values are the keys before all else; with `norms_values` they are normed without a weight, rounded once. Hkv may be 0:
    queries alone are rotated. `factor` [P] fp32, a table by position, multiplies queries once they are rotated and rounded, which rounds
    them once more.
    """
    kv_heads, size = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.unflatten(-1, (-1, size))
    of_values = 0 if ties_values else kv_heads
    q, k, v = heads.split((heads.shape[2] - kv_heads - of_values, kv_heads, of_values), 2)
    q, v = q[:, :, ::2] if gated else q, k if ties_values else v
    if norms_values:
        v = rms_norm(v, torch.zeros_like(v[0, 0, 0]), eps, offset=1.0)[0] if v.numel() else v
    if q_norm is not None and k_norm is not None:
        q, k = (rms_norm(x, norm, eps, offset=offset)[0] for x, norm in ((q, q_norm), (k, k_norm)))
    c, s = cos[positions][:, :, None].float(), sin[positions][:, :, None].float()
    q, k = _rotate(q, c, s, interleaved), _rotate(k, c, s, interleaved)
    cache_write(k_cache, v_cache, k, v, slots)
    return q if factor is None else (q * factor[positions][:, :, None, None]).to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    wide = x[..., : 2 * half].float()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.split(half, -1)
    both = a * cos - b * sin, b * cos + a * sin
    turned = (torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def gate_heads(x: Tensor, qkv: Tensor) -> Tensor:
    """What heads have read, x [B, N, Hq, D], times the sigmoid of their gates [B, N, Hq * D], which stand behind the queries of each head
    at the beginning of qkv [B, N, ...]; the sigmoid is rounded to x's dtype."""
    heads, size = x.shape[2:]
    gates = qkv[..., : 2 * heads * size].unflatten(-1, (heads, 2, size))[..., 1, :]
    return (x * torch.sigmoid(gates)).flatten(-2)
