"""Devices of tests: which of them are there, and marks and parameters by device."""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]
INTERPRETED = pytest.mark.skipif(HAS_CUDA, reason="the interpreter is off where there is a CUDA device")
CPU = pytest.param("cpu", marks=INTERPRETED)
"""The CPU for kernels, which run there in Triton's interpreter."""
CUDA = pytest.param("cuda", marks=ON_CUDA)
