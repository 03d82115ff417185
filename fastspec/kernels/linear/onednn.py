"""The linear layer on the CPU, by whichever of torch's two libraries is quicker on this machine: MKL, which torch gives fp32 products to,
or oneDNN. Which one is quicker depends on the processor and on the number of rows: for a few rows one may take three times as long as
the other, and for a single row the other way round. So it is measured (`quickest.py`), once for each size of a weight and group of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear.quickest import Measured

FEW_ROWS = 64
SMALL = 2**20
"""Multiplications below which oneDNN's own overhead, some 20 us a call, outweighs what it could gain."""
def available() -> bool:
    """Whether this torch carries oneDNN and the operator that takes a plain weight. Delete when `F.linear` takes this path itself."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.linear` for x [..., K] and weight [M, K]; what is not fp32, or needs gradients, is multiplied by torch as ever.

    Through oneDNN up to 64 rows are multiplied as weight @ x^T, so that the weight is read once, row by row, and only x is repacked: the
    result [..., M] is then a transposed view.
    """
    fp32 = x.dtype == weight.dtype == torch.float32
    if not fp32 or x.device.type != "cpu" or x.numel() == 0 or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) * weight.numel() < SMALL:
        return F.linear(x, weight, bias)
    multiply = through_onednn if len(rows) > FEW_ROWS else MEASURED.fastest(rows, weight)
    return multiply(rows, weight, bias).view(*x.shape[:-1], -1)


def through_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of fp32 rows [R, K] and weight [M, K] -> [R, M], by oneDNN."""
    product = torch.ops.mkldnn._linear_pointwise
    if len(rows) > FEW_ROWS:
        many: Tensor = product(rows, weight, bias, "none", [], "")
        return many
    out: Tensor = product(weight, rows, None, "none", [], "").t()
    return out if bias is None else out + bias


MEASURED = Measured(F.linear, through_onednn)
