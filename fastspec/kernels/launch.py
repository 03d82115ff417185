"""Programmatic dependent launch: a kernel's programs are scheduled while the kernel before it drains, which hides the
gap between launches.

Every kernel takes PDL as its last parameter and begins, in every program, one that returns early too, with
`wait_for_previous(PDL)`; kernels in Gluon write the two calls out. Before it there may only be index arithmetic, and
loads or prefetches of weights and of other tables, which no kernel of a stream of launches writes. (The norm of a sum
also looks at a count there, as a guess that it checks behind the wait. Two kernels of ordered attention read the
committed text there, and two of Gated DeltaNet ancestors, gates, keys and states: the kernel in front of them lets
nobody start before it has waited for that, and writes none of it.)

Why that is enough. The wait ends when the grid before has completed and what it wrote can be seen. That grid could only
complete after a wait of its own, so by induction all earlier grids have completed as well; a kernel launched without
PDL waits for the whole of the grid before it, so both kinds mix. All reads and writes come after the wait: when a
buffer is used again, those who read or wrote it before are done, and counters that a kernel sets back are zero for the
next.

Dependents may start once every program of the grid has called for them, which is after its wait: at most two grids
share the chip, and those that wait never take the place of one that they wait for. A kernel that calls for dependents
before its own wait, as the products and norms of one row do, lets more of them queue up, each behind grids whose
programs have all begun; what they see after their waits is the same.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PDL = True
"""True where kernels start before the kernel in front of them has finished, where the device can."""

PORTABLE = os.environ.get("FASTSPEC_PORTABLE", "") not in ("", "0")
"""True where the kernels run as on a device that has nothing of Hopper's and the least shared memory (the environment's
FASTSPEC_PORTABLE=1): without programmatic dependent launch, without the kernels in Gluon, and in LEAST_SHARED bytes."""

LEAST_SHARED = 99 << 10
"""Bytes of shared memory that a program may use on the devices that have the least of it: compute capability 8.6, 8.9
and 12.0 (CUDA C++ Programming Guide, technical specifications per compute capability). 8.0 has 163 KiB; 9.0 and 10.0
have 227."""
_RESERVED = 2 << 10
"""Left free of them for what a kernel keeps beside its pipeline."""

INTERPRETED = triton.knobs.runtime.interpret  # as it is when the kernels are defined


def dependent(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch on a device: with PDL on CUDA from compute capability 9.0 on while the switch is
    on, else without.

    A kernel launched with them must keep the rule at the top of this file.
    """
    return {"PDL": True, "launch_pdl": True} if PDL and _capable(device) else {"PDL": False}


def spread(device: torch.device) -> dict[str, Any]:
    """`dependent` of a launch that begins when the kernel before has ended, and is spread over all multiprocessors:
    programs that compute for long and wait for a product crowd those where its first programs end."""
    given = dependent(device)
    return given | {"launch_pdl": False} if given["PDL"] else given


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    """A CUDA device's compute capability, (0, 0) of others and where kernels run as on any."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia and not PORTABLE else (0, 0)


def _capable(device: torch.device) -> bool:
    return not INTERPRETED and _capability(device) >= (9, 0)


def runs_ptx(device: torch.device) -> bool:
    """True where kernels may hold instructions of PTX: from compute capability 8.0 on."""
    return not INTERPRETED and _capability(device) >= (8, 0)


def has_descriptors(device: torch.device) -> bool:
    """True where a device reads tiles through tensor descriptors itself, from compute capability 9.0 on; elsewhere
    Triton makes pointers of them, which take many registers."""
    return INTERPRETED or _capable(device)


def is_hopper(device: torch.device) -> bool:
    """True where a device has Hopper's tensor cores, for which some kernels are written out in Gluon."""
    return _capability(device) == (9, 0)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a device; without a GPU as many as on Hopper."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    limit: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return min(limit, LEAST_SHARED) if PORTABLE else limit


def stages_within(stages: int, stage: int, device: torch.device, fixed: int = 0) -> int:
    """The stages of a pipeline, at most `stages` and at least 2, that fit a device's shared memory: `stage` bytes each,
    and `fixed` beside them. The launch tables were measured on a Hopper GPU, where all of theirs fit."""
    return max(2, min(stages, (shared_memory(device) - _RESERVED - fixed) // max(1, stage)))


def padded(rows: int) -> int:
    """The power of two that rows are padded to, at least the 16 columns of a product on tensor cores."""
    return max(16, 1 << (rows - 1).bit_length())


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """With PDL wait for the kernel before, then let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(p, size):
    """Ask for `size` bytes (a multiple of 16) from each of p, aligned to 16 bytes, into L2."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [p.to(tl.int64), size],
        tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetched(weight: Tensor, most: int) -> int:
    """Bytes of each line of weight [M, K] that may be prefetched, at most `most`: none where lines are not aligned
    to 16 bytes."""
    size = weight.element_size()
    line = weight.shape[1] * size
    return 0 if (weight.data_ptr() | weight.stride(0) * size | line) % 16 else min(line, most)
