"""What a device is called."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any


def device_name(device: Any) -> str:
    """The name of a torch device: the GPU's, or the processor's."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The processor's name, by Linux' own account where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
