"""Cases that some of the processes do not end well."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from helpers.ranks import Loader


def summed(load: Loader, kind: str) -> list[Any]:
    """A case that all run: the sum of their numbers, and the process."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return [total, os.getpid()]


def parted(load: Loader, kind: str) -> list[Any]:
    """The second process raises or ends, or asks nobody, where the first waits for it."""
    if dist.get_rank() == 1 and kind == "raises":
        raise ArithmeticError("planted")
    if dist.get_rank() == 1 and kind == "ends":
        os._exit(3)
    if dist.get_rank() == 0:
        dist.barrier()
    return []
