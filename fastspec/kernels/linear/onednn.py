"""The linear layer on the CPU, through oneDNN: torch gives fp32 products to MKL, which takes two to three times as long for a few rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 64


def available() -> bool:
    """Whether this torch carries oneDNN and the operator that takes a plain weight. Delete when `F.linear` takes this path itself."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.linear` for x [..., K] and weight [M, K]; what is not fp32, or needs gradients, is multiplied by torch as ever.

    Up to 64 rows are multiplied as weight @ x^T, so that the weight is read once, row by row, and only x is repacked: the
    result [..., M] is then a transposed view.
    """
    fp32 = x.dtype == weight.dtype == torch.float32
    if not fp32 or x.device.type != "cpu" or x.numel() == 0 or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    product = torch.ops.mkldnn._linear_pointwise
    if len(rows) > FEW_ROWS:
        many: Tensor = product(rows, weight, bias, "none", [], "").view(*x.shape[:-1], -1)
        return many
    out: Tensor = product(weight, rows, None, "none", [], "").t().view(*x.shape[:-1], -1)
    return out if bias is None else out + bias
