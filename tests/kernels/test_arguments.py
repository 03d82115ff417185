"""Kernels' host functions name the op and the tensor that they do not take."""

from __future__ import annotations

import re

import pytest
import torch

from fastspec.kernels.arguments import ANYHOW, CONTIGUOUS, FLOATS, PACKED, expect, packed, strides

X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("x", "shape", "dtype", "lies"),
    [
        (X, (2, 3, 4), torch.float32, CONTIGUOUS),
        (X, ("B", 3, "D"), None, ANYHOW),
        (X[:, :2], (2, 2, 4), None, PACKED),
        (X.transpose(1, 2), (2, 4, 3), None, ANYHOW),
        (X.transpose(1, 2)[..., :1], (2, 4, 1), None, PACKED),
        (X[:0], (0, 3, 4), torch.float32, CONTIGUOUS),
        (X, (2, 3, 4), FLOATS, ANYHOW),
    ],
)
def test_what_fits_is_taken(x, shape, dtype, lies):
    expect("op", shape, dtype, lies, x=x, absent=None)


@pytest.mark.parametrize(
    ("shape", "dtype", "lies", "accepted"),
    [
        ((2, 3), None, ANYHOW, "[2, 3]"),
        ((2, 3, 4, 1), None, ANYHOW, "[2, 3, 4, 1]"),
        (("B", 5, "D"), None, ANYHOW, "[B, 5, D]"),
        ((2, 3, 4), torch.int64, ANYHOW, "[2, 3, 4] torch.int64"),
        ((2, 3, 4), (torch.int64, torch.int32), ANYHOW, "[2, 3, 4] torch.int64 or torch.int32"),
        ((2, 3, 4), None, PACKED, "[2, 3, 4], with a contiguous last dimension"),
        ((2, 3, 4), torch.float32, CONTIGUOUS, "[2, 3, 4] torch.float32, contiguous"),
    ],
)
def test_what_does_not_fit_is_named(shape, dtype, lies, accepted):
    x = X.transpose(1, 2).contiguous().transpose(1, 2)
    told = f"op: second is [2, 3, 4] torch.float32, strides (12, 1, 3); accepted is {accepted}"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        expect("op", shape, dtype, lies, second=x)


def test_strides_of_several_tensors():
    assert strides(2, X, X[0]) == [12, 4, 4, 1] and strides(1, X[0, 0]) == [1]
    assert packed(X[:, :, :1]) and packed(X[:, :2]) and not packed(X.transpose(1, 2))
