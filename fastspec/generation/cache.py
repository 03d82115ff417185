"""A KV cache in static buffers, with a length per row on the device and room for a tree behind the committed tokens."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.ops import Ops
from fastspec.generation.tree import Verdict
from fastspec.kernels.reference_round import grow


def _memory(device: torch.device) -> float:
    """Bytes of memory of a device, or infinity where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    known = hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else float("inf")


def _too_large(tokens: int, rows: int, need: int, device: torch.device) -> FastSpecError:
    return FastSpecError(
        f"out of memory: a KV cache of {tokens} tokens for {rows} rows needs {need / 2**30:.2f} GiB on {device}. "
        "Ask for fewer new tokens (max_new_tokens), a shorter prompt or a smaller batch."
    )


FIRST_SLOTS = 1024
WIDE_STEP = 16384
"""Long buffers grow by as many slots on CUDA, shorter ones by powers of two."""


class TreeCache:
    """Keys and values [L, B, Hkv, C, D] and `lengths` [B] int64, all on one device.

    Slots below a row's length hold its committed tokens, `capacity` of them at most; the `tail` slots after it are
    provisional, written by every forward pass and moved or forgotten by `commit`. The buffers start small and double when
    `reserve` asks for more. Raises FastSpecError, with the size, when memory cannot hold the capacity.
    """

    def __init__(
        self, layers: int, rows: int, kv_heads: int, capacity: int, tail: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tail = tail
        self.k = torch.zeros((layers, rows, kv_heads, 0, size), dtype=dtype, device=device)
        self.v = self.k.clone()
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.open(capacity)

    def open(self, capacity: int) -> None:
        """Begin a call of at most `capacity` tokens a row on the buffers that are there, with every row empty."""
        self.limit = capacity
        layers, rows, heads, _, size = self.k.shape
        need = 2 * self.k.element_size() * layers * rows * heads * (capacity + self.tail) * size
        if need > _memory(self.k.device):  # the system may grant it, and kill the process later
            raise _too_large(capacity, rows, need, self.k.device)
        self.lengths.zero_()
        self.reserve(min(capacity, FIRST_SLOTS))

    @property
    def slots(self) -> int:
        """Slots per row that the buffers hold now."""
        return self.k.shape[3]

    @property
    def bound(self) -> int:
        """Committed tokens per row that the buffers have room for now."""
        return self.slots - self.tail

    def fits(self, committed: int) -> bool:
        """Whether the buffers have room for this many committed tokens per row, or for all that the call may reach."""
        return min(committed, self.limit) <= self.bound

    def reserve(self, committed: int) -> int:
        """Make room for this many committed tokens per row, the call's capacity at most, and the tail; returns how many of them are
        in bounds."""
        if not self.fits(committed):
            wanted = self._wanted(committed) + self.tail
            layers, rows, heads, held, size = self.k.shape
            try:
                for name in ("k", "v"):
                    grown = torch.zeros((layers, rows, heads, wanted, size), dtype=self.k.dtype, device=self.k.device)
                    grown[:, :, :, :held] = getattr(self, name)
                    setattr(self, name, grown)
            except (MemoryError, RuntimeError) as error:
                need = 2 * self.k.element_size() * layers * rows * heads * wanted * size
                raise _too_large(wanted, rows, need, self.k.device) from error
        return min(committed, self.bound)

    def _wanted(self, committed: int) -> int:
        """Committed tokens to make room for: twice what there is, the call's capacity at most; on CUDA a round number whatever the
        capacity is, so that calls of any length share the graphs that were captured on these buffers."""
        if self.k.is_cuda:
            return max(FIRST_SLOTS, min(1 << (committed - 1).bit_length(), -(-committed // WIDE_STEP) * WIDE_STEP))
        return min(max(committed, 2 * self.bound), self.limit)

    def write(self, ops: Ops, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v [B, N, Hkv, D] of one layer at slots [B, N]."""
        ops.cache_write(self.k[layer], self.v[layer], k, v, slots)

    def attend(self, ops: Ops, layer: int, q: Tensor, layout: object, scale: float) -> Tensor:
        """Attention of q [B, N, Hq, D] over one layer -> [B, N, Hq, D]."""
        return ops.tree_attention(q, self.k[layer], self.v[layer], layout, scale)

    def commit(self, ops: Ops, verdict: Verdict, active: Tensor) -> None:
        """Move the accepted path of every row to the end of its tokens; lengths grow where active [B] is true."""
        moves = ops.commit_slots(self.lengths, verdict.path, verdict.accepted, active, self.bound)
        if verdict.path.shape[1] > 1:
            ops.kv_block_copy(self.k, self.v, *moves)

    def join(self, row: int, other: TreeCache, count: int) -> None:
        """Begin a row anew with the `count` committed tokens of another cache's only row; there must be room for them."""
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            mine[:, row, :, :count] = theirs[:, 0, :, :count]
        self.lengths[row] = count

    def grow(self, counts: Tensor) -> None:
        """Count the next counts [B] slots of every row as committed. A row whose last round went beyond them
        has ended: it stays at the bound, so that the trees still written behind it stay inside the buffers."""
        grow(self.lengths, counts, self.bound)


class LayerView(TreeCache):
    """The first layers of another cache, with lengths of its own: what a model's own early layers draft with.

    It writes into the other's provisional tail, which the next pass over all layers writes anew, and never grows it.
    """

    def __init__(self, whole: TreeCache, layers: int) -> None:
        self.whole, self.layers, self.tail = whole, layers, whole.tail
        self.lengths = whole.lengths.clone()

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        """Keys [layers, B, Hkv, C, D], as they are now."""
        return self.whole.k[: self.layers]

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        """Values [layers, B, Hkv, C, D], as they are now."""
        return self.whole.v[: self.layers]

    @property
    def limit(self) -> int:  # type: ignore[override]
        """The capacity of the whole cache."""
        return self.whole.limit

    def reserve(self, committed: int) -> int:
        """As of the whole cache."""
        return self.whole.reserve(committed)
