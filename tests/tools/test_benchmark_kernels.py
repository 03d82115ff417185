"""benchmarks/kernel_times.py: its cases of recurrent layers are computed alike by both ways, and count their bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

HEADS, SIZE = (1, 2), (16, 16)


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark as a module, on the CPU, in the dtype that kernels are interpreted in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        module = importlib.import_module("kernel_times")
        patch.setattr(module, "DEVICE", "cpu")
        patch.setattr(module, "DTYPE", torch.float16)
        yield module


@pytest.mark.slow  # of a script that is run by hand
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
def test_recurrent_cases_agree_with_their_references(script) -> None:
    torch.manual_seed(0)
    cases = list(script.recurrent_cases((*HEADS, *SIZE), layers=2, tokens=70))
    assert [case.name for case in cases] == [
        *("tree_conv", "delta_tree") * 3,
        *("delta_chain", *("delta_commit",) * 2) * 2,
    ]
    for case in cases:
        first = case.make()
        copies = [tuple(each.clone() for each in first) for _ in range(2)]
        ways = [
            script.result(case.ways[way], given) for way, given in zip(("reference", "fastspec"), copies, strict=True)
        ]
        assert script.differs(*ways) < case.tolerance, case
    channels, state = 2 * 16 + 2 * 16, 4 * 2 * 16 * 16
    assert [case.moved for case in cases[:2]] == [2 * (2 * channels + 4 * channels), state + 2 * channels + 6 * 2 * 16]
    assert cases[-1].moved == 2 * 8 * (2 * state + 8 * (2 * channels + 4 * 2 * 16))


@pytest.mark.slow  # of a script that is run by hand
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("attention", ("135M", 5, 40, False)),
        ("norm", (2, 64)),
        ("gated", (2, 64)),
        ("rotation", ("135M", 2)),
        ("copied", ()),
        ("expansion", (64, 32)),
        ("built", ()),
        ("picked", (3, 64, False)),
        ("walked", (5,)),
        ("frontier", (64,)),
        ("product_and_norm", (3, 64, 32)),
        ("mixture", (4, 2, 64, 32, False, 2)),
        ("mixture", (4, 2, 64, 32, True, 2)),
    ],
    ids=str,
)
def test_cases_agree_with_their_references(script, kind, sizes) -> None:
    torch.manual_seed(0)
    case = getattr(script, kind)(*sizes)
    first = case.make()
    for way in case.ways:
        copies = [tuple(each.clone() for each in first) for _ in range(2)]
        results = [
            script.result(case.ways[each], given) for each, given in zip(("reference", way), copies, strict=True)
        ]
        assert script.differs(*results) <= case.tolerance, (case.name, way)
