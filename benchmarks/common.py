"""The common part of the benchmarks: options, the device, prompts as batches, times, and rows."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.programs.compare import device_name, versions

Row = dict[str, Any]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with a script's own description and `--out`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    return parser


def device_here(dtype: str | None = None) -> tuple[str, torch.dtype]:
    """("cuda", bf16) where there is CUDA, else ("cpu", fp32); or the device and a dtype by name."""
    device, usual = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return device, usual if dtype is None else getattr(torch, dtype)


def place(device: Any, dtype: torch.dtype | str) -> Row:
    """The columns of every row: device, dtype, versions and commit."""
    return {"device": device_name(torch.device(device)), "dtype": str(dtype).removeprefix("torch."), **versions()}


def write(out: Path | None, row: Row, shown: Sequence[str] | None = None) -> None:
    """Append a row to a file, and print it, or those of its columns that are `shown` (none: nothing)."""
    told = row if shown is None else {name: row[name] for name in shown if name in row}
    if told:
        print(json.dumps(told), flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tree_of(text: str, head: str = "eagle3", **more: Any) -> Any:
    """`Eagle3` of "total_tokens,depth,top_k", of "auto", or of "default"; for a head "mtp" `Mtp` of these."""
    known: dict[str, list[Any]] = {"auto": ["auto"], "default": []}
    sizes = known[text] if text in known else [int(size) for size in text.split(",")]
    kind = fastspec.Mtp if head == "mtp" else fastspec.Eagle3
    return kind(**dict(zip(("total_tokens", "depth", "top_k"), sizes, strict=False)), **more)


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a run, the device's work included."""
    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    wait()
    begun = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begun


def free_memory() -> None:
    """Give the device's memory that nothing holds back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def captured(runs: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some runs, each of which has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def milliseconds(run: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of each of some runs, by CUDA events between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in pairwise(marks)]
