"""Whole layers in one call of the C++ kernels: what `fastspec.kernels.layer.reference.stack` computes, from a table
that `stack.h` reads.

A layer's operations take less time than Python's call of each where a token or a small tree is decoded. The table holds
addresses: it is made anew when a weight lies elsewhere than before, and holds on to the tensors that it was made of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.layer.reference import LayerPlace, PlainLayer, PlainLayers, RootMeanSquare, Weighted

P, N, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
MOST_SIZE = 1024
"""Of a head that is rotated."""


def at(x: Tensor | None) -> int | None:
    """The address of a tensor's first value."""
    return None if x is None else x.data_ptr()


class CWeight(ctypes.Structure):
    """`Weight` of vectors.h."""

    _fields_ = [("w", P), ("bias", P), ("M", N)]


class CLayer(ctypes.Structure):
    """`Layer` of stack.h."""

    _fields_ = [
        *((name, P) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        ("qkv", CWeight * 3),
        ("out", CWeight),
        ("gate_up", CWeight * 2),
        ("down", CWeight),
        *((name, N) for name in ("qkv_count", "gate_up_count")),
        *((name, P) for name in ("k", "v")),
        *((name, N) for name in ("k_row", "k_head", "v_row", "v_head")),
        *((name, P) for name in ("cos", "sin")),
        ("half", N),
        *((name, P) for name in ("slots", "visible")),
        ("extent", N),
        ("tap", P),
        *((name, F) for name in ("eps", "offset", "mlp_eps", "mlp_offset", "heads_eps", "heads_offset", "scale")),
        *((name, N) for name in ("has_offset", "mlp_has_offset", "heads_have_offset")),
    ]


def tensors_of(layer: PlainLayer) -> Iterator[Tensor]:
    """The weights, biases and norms of a layer."""
    for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
        yield from part.weights
        yield from (bias for bias in part.biases if bias is not None)
    norms = (None if layer.norm is None else layer.norm.weight, layer.mlp_norm.weight, layer.q_norm, layer.k_norm)
    yield from (norm for norm in norms if norm is not None)


class StackTable:
    """Table of what is the same in every pass over layers; `fits` is false where the kernels do not compute them."""

    def __init__(self, layers: PlainLayers) -> None:
        self.tensors = [tensor for layer in layers.rows for tensor in tensors_of(layer)]
        self.held = [tensor.detach() for tensor in self.tensors]  # so that an address that is read is one that is there
        self.seen = self.now()
        first = layers.rows[0]
        self.dtype, self.width = first.mlp_norm.weight.dtype, len(first.mlp_norm.weight)
        self.inner, self.heads = first.down.weights[0].shape[-1], first.out.weights[0].shape[-1]
        self.channels = sum(len(weight) for weight in first.qkv.weights)
        self.depth = first.qkv.weights[0].shape[-1]
        """Of what the first layer reads."""
        self.fits = all(self._takes(layer, number) for number, layer in enumerate(layers.rows))
        self.rows = (CLayer * len(layers.rows))(*map(c_layer, layers.rows)) if self.fits else None
        parts = [part for layer in layers.rows for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.products = list({weight.shape: weight for part in parts for weight in part.weights}.values())
        """A weight of every shape."""
        self.by_kernel: dict[tuple[int, int], bool] = {}
        """(rows, threads) -> whether the kernel is the quickest way to multiply so many by all of these."""

    def now(self) -> list[tuple[int, int, tuple[int, ...], torch.dtype]]:
        """Addresses and strides of all tensors."""
        return [(tensor.data_ptr(), tensor.numel(), tensor.stride(), tensor.dtype) for tensor in self.tensors]

    def _takes(self, layer: PlainLayer, number: int) -> bool:
        """True where a layer has the sizes of the first, and each of its tensors the shape that the kernels read."""
        depth = self.depth if number == 0 and layer.norm is None else self.width
        shaped = [
            self._shaped(layer.qkv, self.channels, depth, 3),
            self._shaped(layer.out, self.width, self.heads, 1),
            self._shaped(layer.gate_up, 2 * self.inner, self.width, 2),
            self._shaped(layer.down, self.width, self.inner, 1),
        ]
        halves = len(layer.gate_up.weights) == 1 or len(layer.gate_up.weights[0]) == self.inner
        norms = [norm for norm in (layer.norm, layer.mlp_norm) if norm is not None]
        plain = all(each.dtype is self.dtype and each.is_cpu and each.is_contiguous() for each in tensors_of(layer))
        alike = all(norm.weight.shape == (self.width,) for norm in norms) and (layer.q_norm is None) == (
            layer.k_norm is None
        )
        return plain and alike and halves and all(shaped) and (layer.norm is not None or number == 0)

    @staticmethod
    def _shaped(part: Weighted, channels: int, depth: int, most: int) -> bool:
        biased = zip(part.weights, part.biases, strict=True)
        return (
            len(part.weights) <= most
            and sum(len(weight) for weight in part.weights) == channels
            and all(weight.shape == (len(weight), depth) for weight in part.weights)
            and all(bias is None or bias.shape == weight.shape[:1] for weight, bias in biased)
        )


def c_weights(part: Weighted) -> tuple[CWeight, ...]:
    """Linear layers as the kernels read them."""
    biased = zip(part.weights, part.biases, strict=True)
    return tuple(CWeight(weight.data_ptr(), at(bias), len(weight)) for weight, bias in biased)


def c_layer(layer: PlainLayer) -> CLayer:
    """Part of a layer that is the same in every pass."""
    row = CLayer(
        qkv=c_weights(layer.qkv),
        out=c_weights(layer.out)[0],
        gate_up=c_weights(layer.gate_up),
        down=c_weights(layer.down)[0],
        qkv_count=len(layer.qkv.weights),
        gate_up_count=len(layer.gate_up.weights),
        scale=layer.scale,
        heads_eps=layer.eps,
        heads_offset=layer.offset or 0.0,
        heads_have_offset=layer.offset is not None,
        q_norm=at(layer.q_norm),
        k_norm=at(layer.k_norm),
    )
    norm, behind = layer.norm, layer.mlp_norm
    if norm is not None:
        row.norm, row.eps, row.offset, row.has_offset = _normed(norm)
    row.mlp_norm, row.mlp_eps, row.mlp_offset, row.mlp_has_offset = _normed(behind)
    return row


def _normed(norm: RootMeanSquare) -> tuple[int, float, float, bool]:
    return norm.weight.data_ptr(), norm.eps, norm.offset or 0.0, norm.offset is not None


def table_of(layers: PlainLayers) -> StackTable | None:
    """The layers' table, made where there is none or a weight has moved; None where the kernels do not compute them."""
    table = layers.prepared
    if not isinstance(table, StackTable) or table.seen != table.now():
        table = layers.prepared = StackTable(layers)
    return table if table.fits else None


def placed(
    table: StackTable, layers: PlainLayers, places: Sequence[LayerPlace], taps: Mapping[int, Tensor]
) -> list[Tensor] | None:
    """Write the layers' places in a pass into the table -> tensors that must outlive it; None where they do not fit."""
    kept: list[Tensor] = []
    seen: dict[int, Tensor] = {}
    assert table.rows is not None
    heads, size = places[0].k.shape[2], places[0].k.shape[4]
    if any(tap.stride(-1) != 1 or tap.stride(0) != tap.shape[1] * tap.stride(1) for tap in taps.values()):
        return None

    def held(tensor: Tensor) -> int:
        """The address of a tensor without gaps."""
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor.contiguous()
            kept.append(seen[id(tensor)])
        return seen[id(tensor)].data_ptr()

    for number, (row, layer, place) in enumerate(zip(table.rows, layers.rows, places, strict=True)):
        k, v, index = place.k, place.v, place.index
        if id(k) not in seen:  # the caches of most layers are the same tensors
            lies = k.stride(3) == v.stride(3) == size and k.stride(4) == v.stride(4) == 1 and v.shape == k.shape
            if not lies or k.dtype is not table.dtype or v.dtype is not table.dtype or size > MOST_SIZE:
                return None
            sized = (k.shape[2], k.shape[4]) == (heads, size) and table.heads + 2 * heads * size == table.channels
            if not sized or table.heads % size:
                return None
            seen[id(k)] = k
        normed = all(norm is None or norm.shape == (size,) for norm in (layer.q_norm, layer.k_norm))
        if not normed or place.cos.dtype is not place.sin.dtype:
            return None
        row.k, row.v = (x.data_ptr() + index * x.stride(0) * x.element_size() for x in (k, v))
        row.k_row, row.k_head, row.v_row, row.v_head = k.stride(1), k.stride(2), v.stride(1), v.stride(2)
        row.cos, row.sin, row.half = held(place.cos), held(place.sin), place.cos.shape[-1]
        row.slots, row.visible, row.extent = held(place.slots), held(place.layout.visible), place.layout.extent
        row.tap = taps[number].data_ptr() if number in taps else None
    return kept


def run(
    kernel: Callable[..., None],
    table: StackTable,
    places: Sequence[LayerPlace],
    total: Tensor,
    positions: Tensor,
    taps: Mapping[int, Tensor],
    x: Tensor | None,
    pairs: bool,
) -> tuple[Tensor, Tensor]:
    """The pass itself."""
    batch, nodes, width = total.shape
    heads, size = places[0].k.shape[2], places[0].k.shape[4]
    summed, change = total.clone(memory_format=torch.contiguous_format), total.new_empty(total.shape)
    where = positions.contiguous()
    given = None if x is None else x.contiguous()
    scratch = total.new_empty(batch * nodes * (width + table.channels + 2 * table.heads + 3 * table.inner))
    tap_row: Any = next((tap.stride(-2) for tap in taps.values()), 0)
    addresses = [at(x) for x in (summed, change, given)]
    sizes = batch, nodes, table.heads // size, heads, size, width, table.inner, tap_row
    kernel(
        table.rows,
        len(places),
        *addresses,
        table.depth,
        scratch.data_ptr(),
        where.data_ptr(),
        *sizes,
        torch.get_num_threads(),
        pairs,
    )
    return change, summed
