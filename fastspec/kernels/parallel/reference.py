"""Sums and joins over the processes that share a model, by torch.distributed: the specification of `symmetric.py` beside it.

Every process of the group calls an op, with tensors of the same shape and dtype, and all get the same bits.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the processes' x [...], which is written over -> [...]."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def share(width: int, size: int) -> int:
    """Columns of a process where `width` are divided among `size` processes as `Tensor.chunk` does it; the last may have fewer."""
    return -(-width // size)


def all_gather(x: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """The processes' x [..., M], M at most `share(width, size)`, side by side in their order -> [..., width]."""
    size = group.size()
    part = share(width, size)
    padded = x.contiguous() if x.shape[-1] == part else F.pad(x, (0, part - x.shape[-1]))
    joined = x.new_empty(size, *padded.shape)
    dist.all_gather_into_tensor(joined.view(-1), padded.view(-1), group=group)
    return joined.movedim(0, -2).flatten(-2)[..., :width]
