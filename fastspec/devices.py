"""Device that a command runs on, and names of devices."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fastspec.errors import Unsupported

MEASURED = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
"""The devices, as torch names them, that the launch tables were measured on, and on which all kernels were tested."""
STORED = "NVIDIA H200"
"""The device that products of stored weights were timed on (stored_h200.jsonl)."""


def choose_device(name: str | None = None) -> str:
    """Device of a command: the one that was named, else "cuda" where there is a CUDA device and "cpu" elsewhere.

    Raises Unsupported for one that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if count else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (number.isdecimal() or name == "cuda")):
        raise Unsupported(f"device {name!r} is unknown: accepted are cpu, cuda and cuda:N")
    if name != "cpu" and int(number or 0) >= count:
        held = "torch finds no CUDA device here" if not count else f"this machine has cuda:0 to cuda:{count - 1}"
        raise Unsupported(
            f"device {name!r} is not there: {held}. A CUDA device needs a CUDA build of torch: see docs/install.md"
        )
    return name


def use_device(name: str | None = None) -> str:
    """`choose_device`; a GPU with a number is CUDA's current one from here on, as in a command's own process it may
    be."""
    import torch

    name = choose_device(name)
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)
    return name


def memory_of(device: str) -> int | None:
    """Bytes of memory that a device has in all; None where the system does not tell it."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no such function, others perhaps not these names
        return None


def free_memory(device: Any) -> int:
    """Bytes of a CUDA device's memory that are free, with those that torch holds and does not use."""
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def made_current(device: Any) -> AbstractContextManager[object]:
    """A block in which a torch device is CUDA's current one, which Triton launches on and torch captures on, whatever
    its tensors' is. Other devices need nothing."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_name(device: Any) -> str:
    """The name of a torch device: the GPU's, or the processor's."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def is_timed(device: Any) -> bool:
    """True of a torch device that products of stored weights were timed on."""
    return device_name(device) == STORED


def cpu_name() -> str:
    """The processor's name, by Linux' own account where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
