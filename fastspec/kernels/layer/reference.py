"""Norms and rotary embedding in plain torch: what the kernels beside it compute, and their specification.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.attention.reference import AttentionLayout, tree_attention
from fastspec.kernels.cache.reference import cache_write
from fastspec.kernels.linear.reference import DeferredSum, Parts, joined, linears, swiglu


def rms_norm(
    x: Tensor | Parts | DeferredSum,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
    offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm of x [..., H], or of x + residual [..., H], by weight [H] -> the norm, and what was normed.

    The sum is rounded to x's dtype before it is normed; the norm is computed in fp32 and rounded before the weight is
    applied, as the Llama family does. With an `offset` weight + offset is applied, in fp32 before the norm is rounded,
    as Gemma does (1; 0 from Gemma 4 on). `out` and `total` [..., H], whose last dimension is contiguous, receive the
    norm and what was normed where given.
    """
    x = joined(x)
    summed = x if residual is None else x + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(x.dtype) if offset is None else (wide * (offset + weight.float())).to(x.dtype)
    return normed if out is None else out.copy_(normed), summed if total is None else total.copy_(summed)


def rope_cache(
    qkv: Tensor | Parts,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float | None = None,
    gated: bool = False,
    norms_values: bool = False,
    ties_values: bool = False,
    interleaved: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into the cache -> queries [B, N, Hq, D].

    qkv [B, N, (Hq + 2 * Hkv) * D] holds queries, keys, values; k_cache, v_cache [B, Hkv, C, D] of one layer take row
    b's node n at slots [B, N] int64. cos, sin [P, R / 2] are tables by position, positions [B, N] int64 index them: the
    first R channels are rotated, in neox halves or, with `interleaved`, in neighbouring pairs, computed in fp32 and
    rounded once. q_norm, k_norm [D] are the weights of an RMS norm over each head, with `rms_norm`'s numerics and its
    `offset`, before the rotation. With `gated` every head's queries are followed by D gates, which `gate_heads` reads:
    qkv is [B, N, (2 * Hq + 2 * Hkv) * D]. With `ties_values` qkv holds queries and keys, and values are the keys before
    all else; with `norms_values` they are normed without a weight, rounded once. Hkv may be 0: queries alone are
    rotated. `factor` [P] fp32, a table by position, multiplies queries once they are rotated and rounded, which rounds
    them once more.
    """
    kv_heads, size = k_cache.shape[1], k_cache.shape[3]
    heads = joined(qkv).unflatten(-1, (-1, size))
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


def gate_heads(x: Tensor, qkv: Tensor | Parts) -> Tensor:
    """Values that heads have read, x [B, N, Hq, D], times the sigmoid of their gates [B, N, Hq * D], which stand behind
    the queries of each head at the beginning of qkv [B, N, ...]; the sigmoid is rounded to x's dtype."""
    heads, size = x.shape[2:]
    gates = joined(qkv)[..., : 2 * heads * size].unflatten(-1, (heads, 2, size))[..., 1, :]
    return (x * torch.sigmoid(gates)).flatten(-2)


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """Settings of an `rms_norm`."""

    weight: Tensor
    eps: float
    offset: float | None = None


@dataclass(frozen=True, slots=True)
class Weighted:
    """Linear layers over one input, their outputs side by side: weights [M, K] and biases [M] or None."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A decoder layer of norms, linear layers, attention and a feed-forward gated by SiLU, and nothing else."""

    norm: RootMeanSquare | None
    """None in a first layer whose input is normed already."""
    qkv: Weighted
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    offset: float | None
    """Of the norms of heads, as in `rope_cache`."""
    scale: float
    out: Weighted
    mlp_norm: RootMeanSquare
    gate_up: Weighted
    down: Weighted


@dataclass(slots=True, eq=False)
class PlainLayers:
    """Layers that follow each other, and what a backend has made of them for itself."""

    rows: tuple[PlainLayer, ...]
    prepared: object = None


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Place of a layer in one pass: layer `index` of caches k, v [L, B, Hkv, C, D], its rotary tables, the slots
    [B, N] of its nodes, and what they see."""

    k: Tensor
    v: Tensor
    index: int
    cos: Tensor
    sin: Tensor
    slots: Tensor
    layout: AttentionLayout


def stack(
    layers: PlainLayers,
    places: Sequence[LayerPlace],
    total: Tensor,
    positions: Tensor,
    taps: Mapping[int, Tensor],
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Layers one after another over hidden states total [B, N, H] of nodes at positions [B, N] -> what the last
    feed-forward adds, and the sum before it, [B, N, H] each; their sum is the hidden states behind the layers.

    Keys and values are written to the caches. taps: the number of a layer -> [B, N, H], whose last dimension is
    contiguous, which receives the hidden states in front of it. `x` [B, N, K] is what the first layer reads where it
    has no norm of its own.
    """
    change: Tensor | None = None
    for number, (layer, place) in enumerate(zip(layers.rows, places, strict=True)):
        if layer.norm is not None:
            norm, given = layer.norm, (total, None) if change is None else (change, total)
            x, total = rms_norm(given[0], norm.weight, norm.eps, given[1], offset=norm.offset)
        if number in taps:
            taps[number].copy_(total)
        assert x is not None
        k, v = place.k[place.index], place.v[place.index]
        qkv = linears(x, layer.qkv.weights, layer.qkv.biases)
        q = rope_cache(
            qkv, place.cos, place.sin, positions, k, v, place.slots, layer.q_norm, layer.k_norm, layer.eps, layer.offset
        )
        mixed = tree_attention(q, k, v, place.layout, layer.scale).flatten(-2)
        change, norm = linears(mixed, layer.out.weights, layer.out.biases), layer.mlp_norm
        x, total = rms_norm(change, norm.weight, norm.eps, total, offset=norm.offset)
        opened = swiglu(linears(x, layer.gate_up.weights, layer.gate_up.biases))
        change = linears(opened, layer.down.weights, layer.down.biases)
    assert change is not None
    return change, total
