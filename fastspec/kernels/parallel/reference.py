"""Sums and joins over the processes that share a model, by torch.distributed: the specification of `symmetric.py`
beside it.

Every process of the group calls an op, with tensors of the same shape and dtype, and all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.verification.reference import best_key, key_token, pick


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the processes' x [...], which is written over -> [...]."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def ordered_sum(
    x: Tensor, group: dist.ProcessGroup, gather: Callable[[Tensor, int, dist.ProcessGroup], Tensor] | None = None
) -> Tensor:
    """`all_reduce` in fp32 in the order of the ranks, rounded once: the bits of a row do not depend on how many there
    are. `gather` joins what each has, `all_gather` where none is given."""
    size = group.size()
    told = (gather or all_gather)(x, size * x.shape[-1], group).unflatten(-1, (size, -1))
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(size):
        total += told[..., rank, :]
    return total.to(x.dtype)


def share(width: int, size: int) -> int:
    """Columns of a process where `width` are divided among `size` processes as `Tensor.chunk` does it; the last may
    have fewer."""
    return -(-width // size)


def all_gather(x: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """The processes' x [..., M], M at most `share(width, size)`, side by side in their order -> [..., width]."""
    size = group.size()
    part = share(width, size)
    padded = x.contiguous() if x.shape[-1] == part else F.pad(x, (0, part - x.shape[-1]))
    joined = x.new_empty(size, *padded.shape)
    dist.all_gather_into_tensor(joined.view(-1), padded.view(-1), group=group)
    return joined.movedim(0, -2).flatten(-2)[..., :width]


def look_up(
    tokens: Tensor, table: Tensor, first: int, group: dist.ProcessGroup, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The rows [..., H] of tokens [...] int64 in a table that the processes have cut by rows: this one has `table` [R,
    H], those of the tokens from `first` on. `total` adds up what each has, `all_reduce` where none is given."""
    other = (tokens < first) | (tokens >= first + len(table))
    held = table if len(table) else table.new_zeros(1, table.shape[1])
    own = F.embedding((tokens - first).clamp(0, len(held) - 1), held).masked_fill(other[..., None], 0)
    return all_reduce(own, group) if total is None else total(own)


def likeliest(scores: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The likeliest tokens [..., 1] int64 of a vocabulary that the processes have cut, of equally likely ones the
    lowest: this one has scores [..., M] in at most 32 bits, of the tokens from `first` on."""
    if scores.shape[-1]:
        own = best_key(scores, pick(scores, None), first)[..., None]
    else:  # below every key
        own = torch.full((*scores.shape[:-1], 1), torch.iinfo(torch.int64).min, device=scores.device)
    return key_token(all_gather(own, group.size(), group))[..., None]
