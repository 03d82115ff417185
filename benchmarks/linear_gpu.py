"""Products of few rows on a CUDA device: cuBLAS against `fastspec.kernels.linear.linear`, by shape, rows and launch.

    python benchmarks/linear_gpu.py --out rows.jsonl            the launches that `launch_for` chooses, under a minute
    python benchmarks/linear_gpu.py --sweep --out rows.jsonl    many launches; ends with the best of each product

Each time is one replay of a CUDA graph of as many products as make 1 GB of different weights, so that none is found in L2. Every launch
of ours is checked on whole numbers, whose product is exact, before it is timed; one that fails is named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear import linear as kernel
from fastspec.kernels.linear import reference
from fastspec.kernels.linear.launches import Launch, RowLaunch, launch_for
from fastspec.kernels.linear.linear import linear
from fastspec.programs.bench.device import versions

MODELS = {  # name -> (layers, the layer's [M, K], the head's)
    "Llama-3.1-8B": (32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096)),
    "Qwen2-1.5B": (28, ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)), (151936, 1536)),
    "SmolLM2-135M": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)),
}
GATED = {(28672, 4096), (17920, 1536), (3072, 576)}
DTYPE = torch.bfloat16
AnyLaunch = Launch | RowLaunch
Way = tuple[str, AnyLaunch | None, Callable[[Tensor, Tensor], Tensor]]


def launches(text: str) -> list[Launch]:
    """Launches by "channels depth warps stages", and tma, pdl where it applies, parted by commas."""
    found = []
    for words in (entry.split() for entry in text.split(",")):
        channels, depth, warps, stages = map(int, words[:4])
        found.append(Launch(channels, depth, warps, stages, tma="tma" in words, pdl="pdl" in words))
    return found


def short(launch: AnyLaunch) -> str:
    if isinstance(launch, RowLaunch):
        return f"{launch.channels} {launch.depth} {launch.warps} row"
    marks = [name for name, on in (("tma", launch.tma), ("pdl", launch.pdl)) if on]
    return " ".join(map(str, (launch.channels, launch.depth, launch.warps, launch.stages, *marks)))


ROWS = [RowLaunch(*sizes) for sizes in ((4, 512, 2), (2, 512, 1), (2, 1024, 2), (4, 1024, 4), (2, 2048, 4), (4, 2048, 4), (4, 2048, 8))]
FEW = launches(
    "16 128 4 4, 16 256 4 4, 32 128 4 4, 16 128 2 6 pdl, 16 64 4 6 tma, 64 64 4 4, 64 128 4 4, 64 128 4 6, 64 64 4 6, 128 64 4 5,"
    "128 128 8 5, 64 256 4 5, 64 128 4 4 tma, 64 64 4 4 tma, 128 64 4 5 tma, 64 128 4 4 pdl, 64 128 4 4 tma pdl, 128 64 4 5 tma pdl"
)
MANY = launches(
    "16 128 4 3, 32 128 4 3, 64 64 4 4, 64 64 4 5, 64 128 4 3, 128 64 4 3, 128 64 4 4, 128 64 8 7, 128 128 8 3, 128 128 8 4, 256 64 8 4,"
    "64 64 4 4 tma, 128 64 4 4 tma, 128 128 8 4 tma, 256 64 8 5 tma, 64 64 4 5 pdl, 128 64 4 4 pdl, 128 64 4 4 tma pdl, 128 128 8 4 tma pdl"
)


def candidates(rows: int, shape: tuple[int, int], swiglu: bool, tried: list[AnyLaunch]) -> list[AnyLaunch]:
    """The launch that `launch_for` chooses (Hopper's own are not tried here) and, of those tried, what is worth timing; under SwiGLU a tile
    is two, so its channels are halved."""
    chosen = launch_for(rows, shape[0] >> swiglu, shape[1], DTYPE, swiglu)
    found: list[AnyLaunch] = [] if chosen is None else [chosen]
    if isinstance(chosen, Launch):
        found.append(replace(chosen, pdl=True))
    for launch in tried:
        halved = replace(launch, channels=launch.channels >> swiglu) if isinstance(launch, Launch) else launch
        wasteful = launch.channels <= 32 and rows > 16 and shape[0] * shape[1] > 2**23  # x would be read more often than the weights
        if halved not in found and not wasteful:
            found.append(halved)
    return found


def quantiles(calls: list[Callable[[], object]], times: int, stream: torch.cuda.Stream) -> list[float]:
    """20, 50 and 80 % quantiles of a graph of the calls, in microseconds each."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 3)]
        for mark in marks:
            mark.record()
            graph.replay()
    torch.cuda.synchronize()
    cuts = statistics.quantiles([1e3 * a.elapsed_time(b) / len(calls) for a, b in pairwise(marks[2:])], n=10, method="inclusive")
    return [round(cuts[i], 3) for i in (1, 4, 7)]


def check(got: Tensor, exact: Tensor, gated: bool) -> None:
    """`got` is the product of whole numbers, whose sums in fp32 are exact: rounded once, so equal; gated within an ulp or two."""
    want = reference.swiglu(exact.to(DTYPE)) if gated else exact.to(DTYPE)
    allowed = (2.01 * torch.finfo(DTYPE).eps if gated else 0) * want.float().abs()
    wrong = ~((got.float() - want.float()).abs() <= allowed)
    if bool(wrong.any()):
        raise ArithmeticError(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong")


def cublas(gated: bool, x: Tensor, weight: Tensor) -> Tensor:
    return reference.swiglu(F.linear(x, weight)) if gated else F.linear(x, weight)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 61])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sweep", action="store_true", help="time many launches, not the chosen one alone")
    parser.add_argument("--seconds", type=float, help="stop after that long (default: 55, 145 with --sweep)")
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()
    limit, start = options.seconds or (145 if options.sweep else 55), time.perf_counter()
    torch.manual_seed(0)
    stream = torch.cuda.Stream()
    pool = torch.empty(540_000_000, dtype=DTYPE, device="cuda").normal_()
    numbers = pool.view(torch.float32)
    read = pool.nbytes / quantiles([lambda: numbers.sum()] * 4, options.times, stream)[1] / 1e3
    where = {"device": torch.cuda.get_device_name(), "dtype": str(DTYPE)[6:], "read_gb_s": round(read), **versions()}
    print(f"{where}, {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, object]] = []
    tried: list[AnyLaunch] = []
    best: dict[tuple[tuple[int, int], int, bool], tuple[tuple[float, float], AnyLaunch]] = {}
    cells = [
        (name, count, shape, gated)
        for name in options.models
        for shape in (*MODELS[name][1], MODELS[name][2])
        for count in options.rows
        for gated in (False, True)[: 1 + (shape in GATED)]
    ]
    for name, count, shape, gated in cells:
        if time.perf_counter() - start > limit:
            print(f"{limit:.0f} s are over: left out from {name} {shape}, {count} rows on")
            break
        size = shape[0] * shape[1]
        weights = [pool[at : at + size].view(shape) for at in range(0, pool.numel() - size + 1, size)][:400]
        weights *= -(-12 // len(weights))
        x = torch.randn(count, shape[1], device="cuda", dtype=DTYPE) / shape[1] ** 0.5
        whole = [torch.randint(-3, 4, size, device="cuda").to(DTYPE) for size in (x.shape, shape)]
        whole[0] /= 64
        exact = F.linear(whole[0].float(), whole[1].float())
        ways: list[Way] = [("cuBLAS", None, partial(cublas, gated))]
        if not gated:
            tried = [*(ROWS if count == 1 else []), *(FEW if count <= 16 else MANY)] * options.sweep
        for launch in candidates(count, shape, gated, tried):
            ways.append((short(launch), launch, partial(linear, bias=None, swiglu=gated, launch=launch)))
        ours: list[tuple[float, str, AnyLaunch]] = []
        theirs = float("inf")
        for way, option, call in ways:
            try:
                if option is not None:  # cuBLAS may add parts in bfloat16
                    check(call(*whole), exact, gated)
                spent = quantiles([partial(call, x, weight) for weight in weights], options.times, stream)
            except Exception as error:  # whatever a launch dies of, the others are still wanted
                print(f"  FAILED {shape} {count} rows, {way}: {type(error).__name__} {str(error).strip()[:200]!r}", flush=True)
                continue
            gb_s = round(2 * size / spent[1] / 1e3)
            rows.append({"model": name, "shape": shape, "swiglu": gated, "rows": count, "way": way, "us": spent, "gb_s": gb_s})
            if option is None:
                theirs = spent[1]
            else:
                ours.append((spent[1], way, option))
        if not ours:
            continue
        ours.sort(key=lambda entry: entry[0])
        best[shape, count, gated] = ((theirs, ours[0][0]), ours[0][2])
        tried = [option for _, _, option in ours[:6]] * options.sweep  # the gated product comes next
        share = [f"{2 * size / 1e3 / us / read:4.0%}" for us in (theirs, ours[0][0])]
        ranking = "; ".join(f"{us:.2f} [{way}]" for us, way, _ in ours[: 6 if options.sweep else 2])
        cell = f"{time.perf_counter() - start:4.0f} s {shape!s:>14s} {count:3d}{' swiglu' * gated:7s}"
        print(f"{cell} cuBLAS {theirs:7.2f} us {share[0]} | {share[1]} {ranking}", flush=True)
    for name, (layers, shapes, head) in MODELS.items():
        for count in options.rows:
            if all((shape, count, False) in best for shape in (*shapes, head)):
                sums = [1e-3 * (layers * sum(best[s, count, False][0][i] for s in shapes) + best[head, count, False][0][i]) for i in (0, 1)]
                print(f"{name}, {count} rows, all products: cuBLAS {sums[0]:.3f} ms, the best launches {sums[1]:.3f} ms")
    if options.sweep:
        for (shape, count, gated), (_, launch) in best.items():
            print(f"    ({1 if count == 1 else kernel.padded(count)}, {shape[0] >> gated}, {shape[1]}, {gated}): {launch},")
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | where) + "\n" for row in rows)


if __name__ == "__main__":
    main()
