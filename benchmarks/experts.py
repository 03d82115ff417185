"""Times of the two products of a mixture of experts, by launch, shape and number of tokens.

Every row is one launch: `gate_up_ms` and `down_ms` are medians of `--runs` launches one after another, events on the stream around each,
which off CUDA, in Triton's interpreter (TRITON_INTERPRET=1), are the host's clock; `difference` is the largest one to the first
launch's answer. Tokens are spread evenly over the experts, or with `--routing alike` all go to the same few. A launch is written as
TILE,DEPTH,SMALL,MEDIUM,LARGE,WARPS,STAGES (`ExpertsLaunch`).

    python benchmarks/experts.py --out rows.jsonl
    python benchmarks/experts.py --shapes gpt-oss-20b --tokens 2048 32768 --launches 128,64,32,128,256,8,4 128,64,32,64,128,8,4
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fastspec.devices import device_name
from fastspec.kernels.linear import experts as kernels
from fastspec.kernels.linear.launches import EXPERTS, EXPERTS_HOPPER, ExpertsLaunch
from fastspec.kernels.linear.reference import SWIGLU, Expert, Gate
from fastspec.programs.bench.device import versions

GPT_OSS = Expert(interleaved=True, gate=Gate(1.702), offset=1.0, limit=7.0)
SHAPES: dict[str, tuple[int, int, int, int, bool, Expert]] = {
    "gpt-oss-20b": (32, 4, 2880, 2880, True, GPT_OSS), "qwen3-30b-a3b": (128, 8, 2048, 768, False, SWIGLU),
    "tiny": (4, 2, 32, 48, True, GPT_OSS),
}  # fmt: skip
"""Experts, those of a token, hidden and expert size, whether weights lie with their outputs side by side, and what gates."""
LAUNCHES = (EXPERTS_HOPPER, EXPERTS[False][-1][1])
"""Those that ship for many tokens: Hopper's, and the others'."""
TIMED = ("_gate_up", "_down")


class Timed:
    """A kernel, each of whose launches is timed."""

    def __init__(self, kernel: Any, cuda: bool) -> None:
        self.kernel, self.cuda, self.spans = kernel, cuda, list[tuple[Any, Any]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*given: Any, **options: Any) -> None:
            began = self.now()
            self.kernel[grid](*given, **options)
            self.spans.append((began, self.now()))

        return run

    def now(self) -> Any:
        """An event on the stream, or the host's clock in milliseconds."""
        if not self.cuda:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def median(self, behind: int) -> float:
        """Milliseconds of the launches behind the first so many."""
        if self.cuda:
            torch.cuda.synchronize()
        spans = self.spans[behind:]
        return round(statistics.median(a.elapsed_time(b) if self.cuda else b - a for a, b in spans), 4)


def weights_of(shape: str, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """gate_up [E, 2 * I, H], down [E, H, I], and biases where the shape's mixture has them."""
    count, _, size, inner, turned, kind = SHAPES[shape]

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype) * sizes[-1] ** -0.5

    gate_up, down = random(count, 2 * inner, size), random(count, size, inner)
    if turned:
        gate_up, down = (weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (gate_up, down))
    return gate_up, down, {"gate_up_bias": random(count, 2 * inner), "down_bias": random(count, size)} if kind is GPT_OSS else {}


def measure(shape: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a shape."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float16)
    torch.manual_seed(0)
    count, choices, size, _, _, kind = SHAPES[shape]
    gate_up, down, biases = weights_of(shape, device, dtype)
    for tokens in options.tokens:
        x = torch.randn(tokens, size, device=device, dtype=dtype)
        shares, chosen = torch.rand(1 if options.routing == "alike" else tokens, count, device=device).topk(choices)
        shares, chosen = (each.expand(tokens, choices).contiguous() for each in (shares / shares.sum(-1, keepdim=True), chosen))
        first = None
        for launch in options.launches:
            timed = {name: Timed(getattr(kernels, name), cuda) for name in TIMED}
            with patch.multiple(kernels, experts_launch_for=lambda *given, launch=launch: launch, **timed):
                for _ in range(1 + options.runs):
                    out = kernels.experts(x, gate_up, down, chosen, shares, kind, **biases)
            first = out if first is None else first
            yield {
                "shape": shape, "tokens": tokens, "routing": options.routing, **{name: getattr(launch, name) for name in launch.__slots__},
                **{f"{name.strip('_')}_ms": kernel.median(1) for name, kernel in timed.items()},
                "difference": float((out.float() - first.float()).abs().max()), "runs": options.runs,
                "dtype": str(dtype).removeprefix("torch."), "device": device_name(torch.device(device)), **versions(),
            }  # fmt: skip


def launch_of(text: str) -> ExpertsLaunch:
    """TILE,DEPTH,SMALL,MEDIUM,LARGE,WARPS,STAGES, the stages of small and of larger tiles alike."""
    *sizes, stages = map(int, text.split(","))
    return ExpertsLaunch(*sizes, stages, stages)


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure, and append the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["gpt-oss-20b", "qwen3-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 1024, 2048, 8192, 32768])
    parser.add_argument("--launches", nargs="+", type=launch_of, default=LAUNCHES)
    parser.add_argument("--routing", default="even", choices=["even", "alike"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    for shape in options.shapes:
        for row in measure(shape, options):
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
