"""A preallocated KV cache with a length per row on the device and room for a tree behind the committed tokens."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.protocols import Ops
from fastspec.generation.tree import Verdict


def _machine_memory() -> float:
    """Bytes of memory in this machine, or infinity where the system does not tell."""
    known = hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else float("inf")


class TreeCache:
    """Keys and values [L, B, Hkv, C, D] and `lengths` [B] int64, all on one device.

    Slots below a row's length hold its committed tokens; the slots after it are the provisional tail, written by every
    forward pass and moved or forgotten by `commit`. Raises FastSpecError, with the size, when memory does not suffice.
    """

    def __init__(
        self, layers: int, rows: int, kv_heads: int, capacity: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, rows, kv_heads, capacity, size)
        need = 2 * dtype.itemsize * layers * rows * kv_heads * capacity * size
        try:
            if device.type == "cpu" and need > _machine_memory():
                raise MemoryError("more than this machine has")  # the system may grant it, and kill the process later
            self.k = torch.zeros(shape, dtype=dtype, device=device)
            self.v = torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            raise FastSpecError(
                f"out of memory: a KV cache of {capacity} tokens for {rows} rows needs {need / 2**30:.2f} GiB on {device}. "
                "Ask for fewer new tokens (max_new_tokens), a shorter prompt or a smaller batch."
            ) from error
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.capacity = capacity

    def write(self, ops: Ops, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v [B, N, Hkv, D] of one layer at slots [B, N]."""
        ops.cache_write(self.k[layer], self.v[layer], k, v, slots)

    def attend(self, ops: Ops, layer: int, q: Tensor, layout: object, scale: float) -> Tensor:
        """Attention of q [B, N, Hq, D] over one layer -> [B, N, Hq, D]."""
        return ops.tree_attention(q, self.k[layer], self.v[layer], layout, scale)

    def commit(self, ops: Ops, verdict: Verdict, active: Tensor) -> None:
        """Move the accepted path of every row to the end of its tokens; lengths grow where active [B] is true."""
        steps = torch.arange(verdict.path.shape[1], device=self.lengths.device)
        if verdict.path.shape[1] > 1:
            ops.kv_block_copy(self.k, self.v, self.lengths[:, None] + verdict.path, self.lengths[:, None] + steps)
        self.lengths += (verdict.accepted + 1) * active
