"""A model's linear layers over a few rows: milliseconds of one pass over all weights, by rows and by how they are multiplied.

    python benchmarks/linear.py --out rows.jsonl

Shapes are SmolLM2-135M's, 538 MB in fp32, far more than a cache holds. Every product is checked against float64 first. The floor printed is
the time of summing the same weights, which reads each of them once.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear import onednn as cpu
from fastspec.kernels.native import build
from fastspec.patches.backends import cpp_ops

LAYER = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
LM_HEAD = (49152, 576)
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch x @ W^T (MKL)": lambda x, w: F.linear(x, w),
    "torch W @ x^T (MKL), 16 columns": lambda x, w: (w @ F.pad(x, (0, 0, 0, -len(x) % 16)).t().contiguous()).t()[: len(x)],
    "oneDNN": lambda x, w: cpu.through_onednn(x.view(-1, x.shape[-1]), w, None),
}
if build.missing() is None:
    WAYS["C++"] = lambda x, w: cpp_ops().linear.__self__.product(x.view(-1, x.shape[-1]), w, None)


def milliseconds(call: Callable[[], object], times: int) -> list[float]:
    """20, 50 and 80 % quantiles."""
    call()
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - start))
    cuts = statistics.quantiles(spent, n=10, method="inclusive")
    return [round(cuts[i], 2) for i in (1, 4, 7)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 17, 32, 60, 128])
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()
    torch.manual_seed(0)
    weights = [torch.randn(shape) for _ in range(30) for shape in LAYER] + [torch.randn(LM_HEAD)]
    where = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    where["isa"] = torch.backends.cpu.get_cpu_capability()
    rows = [{"way": "sum of the weights", "rows": 0, "ms": milliseconds(lambda: [w.sum() for w in weights], options.times)}]
    for count in options.rows:
        inputs = {size: torch.randn(count, size) for size in (576, 1536)}
        for name, multiply in WAYS.items():
            for x, w in ((inputs[w.shape[1]], w) for w in weights[:7]):
                exact, bound = x.double() @ w.double().t(), 2**-23 * w.shape[1] * (x.abs() @ w.abs().t())
                if not bool(((multiply(x, w).double() - exact).abs() <= bound).all()):
                    raise SystemExit(f"{name}: wrong at {count} rows, weight {tuple(w.shape)}")
            spent = milliseconds(lambda go=multiply, x=inputs: [go(x[w.shape[1]], w) for w in weights], options.times)
            rows.append({"way": name, "rows": count, "ms": spent})
    for row in rows:
        print(f"{row['rows']:4d} rows  {row['way']:34s} {row['ms'][1]:8.1f} ms")
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | where) + "\n" for row in rows)


if __name__ == "__main__":
    main()
