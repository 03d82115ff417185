"""Candidates at a place: the launches of an op, and inputs of the shapes that were asked for, in copies that take
turns, so that weights do not come from the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.tree import TokenTree
from fastspec.kernels.attention import tree
from fastspec.kernels.attention.launches import TreeLaunch
from fastspec.kernels.attention.layout import attention_layout
from fastspec.kernels.attention.reference import attention_layout as plain_layout
from fastspec.kernels.attention.reference import tree_attention as plain_attention
from fastspec.kernels.linear import hopper, linear
from fastspec.kernels.linear import reference as products
from fastspec.kernels.linear.launches import HopperLaunch, Launch, RowLaunch
from fastspec.kernels.linear.reference import SILU
from fastspec.kernels.quantised import hopper as stored_hopper
from fastspec.kernels.quantised import linear as stored
from fastspec.kernels.quantised import reference as stored_products
from fastspec.kernels.quantised.launches import StoredKind, StoredLaunch, StoredRowLaunch
from fastspec.kernels.quantised.reference import Nested, Numbers, StoredWeight
from fastspec.kernels.quantised.row import launched
from fastspec.kernels.tuned_launches import Place, forced

KINDS: dict[str, Any] = {
    "rows": Launch,
    "row": RowLaunch,
    "hopper": HopperLaunch,
    "tree": TreeLaunch,
    "stored": StoredLaunch,
    "stored_row": StoredRowLaunch,
}
"""The names of launches in the file that keeps them."""
STORED = (*stored.OPS, "stored_parts")
"""Products of stored weights, whose launches all give the same bits."""
COPIES_OF = 128 << 20
"""Bytes that copies of what a launch reads make together, more than the L2 cache of any GPU."""
MOST_COPIES = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """A place, its launches, and how one runs on a copy's number; `reference` gives the first copy's result. With
    `same_bits` only launches that give the bits of the one in use are right."""

    op: str
    place: Place
    about: tuple[Any, ...]
    launches: tuple[Any, ...]
    run: Callable[[Any, int], Any]
    reference: Callable[[], Any]
    copies: int
    same_bits: bool = False


def normal(*shape: int, like: tuple[torch.dtype, torch.device], scale: float = 1.0) -> Tensor:
    """Normal numbers, drawn where they lie: an LM head has half a billion."""
    return torch.empty(shape, dtype=like[0], device=like[1]).normal_(0.0, scale)


def copies_of(size: int) -> int:
    """Number of copies of so many bytes that take turns."""
    return max(1, min(MOST_COPIES, -(-COPIES_OF // max(1, size))))


def trial(op: str, place: Place, about: Any, device: torch.device) -> Trial:
    """Trial at a place of an op."""
    if op in STORED:
        return _stored(op, place, about, device)
    return (_attention if op in ("tree_attention", "few_attention") else _product)(op, place, about, device)


def _product(op: str, place: Place, about: Any, device: torch.device) -> Trial:
    rows, channels, depth, dtype = about
    lines = channels * (2 if op == "gate_up" else 1)
    like, copies = (dtype, device), copies_of(bytes_of(op, about))
    x = normal(1, rows, depth, like=like)
    weights = [normal(lines, depth, like=like, scale=depth**-0.5)]
    weights += [weights[0].clone() for _ in range(copies - 1)]
    ops: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "linear": (linear.linear, products.linear),
        "gate_up": (linear.gate_up, products.gate_up),
        "linear_parts": (linear.linear_parts, products.linear),
    }
    run, wanted = ops[op]

    def once(launch: Any, copy: int) -> Any:
        with forced(op, device, place, launch):
            return run(x, weights[copy], None)

    on_hopper = hopper.takes(x[0], weights[0])
    parted = op == "linear_parts"
    launches = _of_parts(rows, depth, on_hopper) if parted else _of_rows(op, rows, channels, depth, on_hopper)
    return Trial(op, place, about, (None, *launches), once, partial(wanted, x, weights[0], None), copies)


def _of_rows(op: str, rows: int, channels: int, depth: int, on_hopper: bool) -> list[Any]:
    """Launches of a product [rows, depth] times so many channels."""
    if rows == 1:
        sizes = [(2, 512, 1), (2, 1024, 2), (2, 2048, 4), (8, 512, 4), (8, 1024, 8)]
        sizes += [(4, *each) for each in ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8))]
        whole = max(16, 1 << (depth - 1).bit_length())  # a line at once
        return [RowLaunch(*size) for size in sizes if size[1] <= whole] or [RowLaunch(4, whole, 1)]
    tiles = [(16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4)]
    found: list[Any] = [Launch(*tile, stages) for tile, stages in product(tiles, (3, 4, 6)) if tile[0] < 2 * channels]
    found += [Launch(64, 128, 4, stages, tma=True) for stages in (3, 4)]
    if on_hopper:
        ways = product((64, 128), (4, 6), (2, 4))
        found += [HopperLaunch(64, deep, stages, min(ahead, stages)) for deep, stages, ahead in ways]
        found += [HopperLaunch(64, 128, 8, 2)] if op == "linear" and rows <= 16 else []
    return found


def _of_parts(rows: int, depth: int, on_hopper: bool) -> list[Any]:
    """Launches that part the depth; a part has a step at least."""
    found: list[Any] = []
    for deep, count in product((64, 128), (2, 3, 4, 6, 8, 14)):
        if depth % deep == 0 and depth // deep >= 2 * count and rows > 1:
            found += [Launch(64, deep, 4, stages, parts=count) for stages in (4, 6)]
            found += [HopperLaunch(64, deep, min(4, depth // deep // count), 2, count)] if on_hopper else []
    return found


def _stored(op: str, place: Place, about: Any, device: torch.device) -> Trial:
    rows, channels, depth, dtype, kind = about
    copies, parted = copies_of(bytes_of(op, about)), op == "stored_parts"
    gate = SILU if op == "stored_gate_up" else None
    x = normal(rows, depth, like=(dtype, device))
    first = [stored_like(kind, count, depth, dtype, device) for count in channels]
    weights = [first, *([replace(each, codes=each.codes.clone()) for each in first] for _ in range(copies - 1))]
    biases = [normal(count, like=(dtype, device)) if kind.biased else None for count in channels]

    def once(launch: Any, copy: int) -> Any:
        with forced(op, device, place, launch):
            if parted:
                return stored.linear_parts(x, weights[copy], biases)
            return stored.linears(x, weights[copy], biases, gate)

    launches = _of_stored(x, first, gate is not None, parted)
    reference = partial(stored_products.linears, x, first, biases, gate)
    return Trial(op, place, about, tuple(launches), once, reference, copies, same_bits=True)


def stored_like(kind: StoredKind, channels: int, depth: int, dtype: torch.dtype, device: torch.device) -> StoredWeight:
    """Random weight [channels, depth] of a kind, whose products are as large as a row's numbers."""
    codes = kind.codes
    words = torch.randint(256, (channels, depth * codes.bits // 8), dtype=torch.uint8, device=device)
    if codes.numbers == Numbers.E4M3:
        words &= 0xBF  # numbers below 2, no NaN
    group = kind.block[1] or depth
    sizes = -(-channels // kind.block[0]), -(-depth // group)
    largest = 1.0 if codes.numbers in (Numbers.TABLE, Numbers.E4M3) else 2.0 ** (codes.bits - 1)
    scales = torch.rand(sizes, device=device).add_(0.5).mul_(depth**-0.5 / largest)
    nested, zeros = None, None
    if kind.nested:
        factors = scales.new_ones(-(-scales.numel() // kind.nested))
        nested = Nested(
            scales.flatten()[:256].repeat(-(-256 // scales.numel()))[:256], factors, scales.new_zeros(()), kind.nested
        )
        scales = torch.randint(256, sizes, dtype=torch.uint8, device=device)
    if kind.zeros == torch.int32:
        zeros = torch.randint(2**31 - 1, (-(-channels * codes.bits // 32), sizes[1]), dtype=torch.int32, device=device)
    elif kind.zeros is not None:
        zeros = torch.randint(-8, 8, (channels, sizes[1]), dtype=kind.zeros, device=device)
    return StoredWeight(
        words, codes, scales.to(kind.scales), (kind.block[0], group), depth, dtype, zeros, nested=nested
    )


def _of_stored(x: Tensor, weights: list[StoredWeight], gated: bool, parted: bool) -> list[Any]:
    """Launches of stored weights that keep the order of their sums: on Hopper by shares of a depth for one row and by
    stages, elsewhere by stages and warps, whose tiles follow from the weight."""
    rows = len(x)
    if not all(stored_hopper.takes(x, weight) for weight in weights):
        usual = stored.launch_of(weights[0], rows)
        warps = (4, 8) if usual.channels >= 64 else (2, 4, 8)
        return [StoredLaunch(*each) for each in product((2, 3, 4, 6, 8), warps)]
    found: dict[Any, Any] = {}  # a form -> its first launch
    for stages in range(2, stored_hopper.STAGES + 1):
        found.setdefault(stored_hopper.launch_of(weights, rows, gated, parted, stages), StoredLaunch(stages))
    if rows == 1 and x.dtype == torch.bfloat16 and not parted:
        for each in product((1, 2, 4, 8), (64, 128, 256), (2, 3, 4)):
            launch = StoredRowLaunch(*each)
            form = launched(weights, gated, tuned=launch)
            if form is not None:
                found.setdefault(form, launch)
    return list(found.values())


def _attention(op: str, place: Place, about: Any, device: torch.device) -> Trial:
    batch, nodes, heads, kv_heads, size, extent, chain, dtype = about
    like, copies = (dtype, device), copies_of(bytes_of(op, about))
    q = normal(batch, nodes, heads, size, like=like)
    k, v = (normal(batch, kv_heads, extent, size, like=like) for _ in "kv")
    caches = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    prefix = torch.full((batch,), max(0, extent - nodes), dtype=torch.int64, device=device)
    # the work of a tree does not depend on its form
    words = None if chain else TokenTree.chain(prefix[:, None].expand(-1, nodes)).ancestors
    laid = prefix, words, nodes, nodes, extent, heads // kv_heads
    layout, plain = attention_layout(*laid), plain_layout(*laid)

    def once(launch: Any, copy: int) -> Any:
        with forced(op, device, place, launch):
            return tree.tree_attention(q, *caches[copy], layout, size**-0.5)

    wide, blocks = (4 if dtype == torch.float32 else 2) * max(64, size), (16, 32, 64, 128)
    launches: list[Any]
    if op == "few_attention":
        launches = [
            TreeLaunch(16, *each) for each in product(blocks, (4, 8), (2, 3), (1, 2)) if each[0] * wide <= 128 * 256
        ]
    else:
        tiles = [*((*each, 4) for each in product((16, 32, 64), (32, 64))), (128, 64, 8), (128, 128, 8)]
        tiles = [tile for tile in tiles if tile[1] * wide <= 128 * 256]
        launches = [TreeLaunch(*tile, *more) for tile, *more in product(tiles, (2, 3), (1, 2))]
    reference = partial(plain_attention, q, k, v, plain, size**-0.5)
    return Trial(op, place, about, tuple(launches), once, reference, copies)


def bytes_of(op: str, about: Any) -> int:
    """Bytes that a run at a place reads at least."""
    if op in ("tree_attention", "few_attention"):
        batch, _, _, kv_heads, size, extent, _, dtype = about
        return int(2 * batch * kv_heads * extent * size * dtype.itemsize)
    if op in STORED:
        _, lines, depth, _, kind = about
        return int(sum(lines) * depth * kind.codes.bits // 8)
    _, channels, depth, dtype = about
    return int(channels * depth * (2 if op == "gate_up" else 1) * dtype.itemsize)
