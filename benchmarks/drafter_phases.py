"""Where the time of the fused draft phase goes: microseconds between its grid barriers, on a CUDA device.

    python benchmarks/drafter_phases.py --heads 8B 135M --out rows.jsonl

The barrier is replaced by one after which the first program notes the device's nanoseconds; a row has the median over launches of
every phase of the pass that feeds the accepted pairs, and of the passes over the tree's levels, and the time of a launch with the notes
(drafter.py has it without). Weights are random. `weights_us` is what a phase's weights take at --bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from drafter import HEADS, Fused, captured, checked, make_head, milliseconds, packed_weights
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.kernels.drafting import fused_phases as drafter_phases
from fastspec.programs.bench.device import environment

PASS = ("gather", "qkv", "attention", "join", "out", "norm", "gate_up", "down", "last norm", "head", "children")
"""The phases of a pass over a level, in order; the pass over the pairs has "keep" before the head."""
PAIRS = (*PASS[:9], "keep", *PASS[9:])
NOTES = tl.constexpr(16)  # words of the barrier's counter before the notes


plain_barrier = drafter_phases.grid_barrier


@triton.jit
def noting_barrier(p_count, goal):
    """The kernel's own barrier, after which the first program notes the time behind the counter."""
    following = plain_barrier(p_count, goal)
    if tl.program_id(0) == 0:
        now = tl.inline_asm_elementwise(
            "{ .reg .u64 t; add.s64 t, $1, 0; mov.u64 t, %globaltimer; cvt.u32.u64 $0, t; }", "=r,l", [p_count.to(tl.int64)], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        tl.store(p_count + NOTES + goal // tl.num_programs(0), now)
    return following


def weights_of(head: Any) -> dict[str, int]:
    """Bytes of weights that each phase reads."""
    layer: Any = head.layers[0]
    attn, mlp = layer.self_attn, layer.mlp
    parts = {
        "qkv": (attn.q_proj, attn.k_proj, attn.v_proj), "out": (attn.o_proj,), "gate_up": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,), "head": (head.lm_head,),
    }  # fmt: skip
    return {name: sum(module.weight.nbytes for module in modules) for name, modules in parts.items()}


def phases(fused: Fused, count: Tensor, depth: int, launches: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of the phases of the pass over the pairs, and of those over levels."""
    pairs: dict[str, list[float]] = {name: [] for name in PAIRS}
    levels: dict[str, list[float]] = {name: [] for name in PASS}
    for _ in range(launches):
        count.zero_()
        fused()
        notes = [note for note in count[NOTES.value :].tolist() if note]
        spent = [((after - before) & 0xFFFFFFFF) / 1e3 for before, after in pairwise(notes)]
        if len(spent) != len(PAIRS) + depth * len(PASS):
            raise SystemExit(f"{len(spent)} phases between barriers; {len(PAIRS) + depth * len(PASS)} were expected")
        for name, value in zip(PAIRS, spent, strict=False):
            pairs[name].append(value)
        for place, value in enumerate(spent[len(PAIRS) :]):
            levels[PASS[place % len(PASS)]].append(value)
    one, other = ({name: round(statistics.median(values), 2) for name, values in found.items()} for found in (pairs, levels))
    return one, other


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["8B", "135M"])
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=4.4, help="TB/s")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = TreeShape(total_tokens=60, depth=options.depth, top_k=options.top_k)
    drafter_phases.grid_barrier = noting_barrier  # before the kernel is compiled
    for name in options.heads:
        head = make_head(name, 10240 if name == "135M" else 32000, "cuda")
        fused = checked(head, shape, partial(Fused, head, packed_weights(head), shape, 1, options.prefix, {}, None))
        count = torch.zeros(4096, dtype=torch.int32, device="cuda")
        buffers = list(fused.space.buffers)
        buffers[-2] = count
        fused.space = dataclasses.replace(fused.space, buffers=tuple(buffers))
        fused()
        pairs, levels = phases(fused, count, options.depth, options.launches)
        row = {
            "head": name, "prefix": options.prefix, "depth": options.depth, "top_k": options.top_k, "ms": milliseconds(captured(fused), 30),
            "pairs_us": pairs, "level_us": levels, "level_sum_us": round(sum(levels.values()), 1),
            "weights_us": {part: round(size / options.bandwidth / 1e6, 2) for part, size in weights_of(head).items()},
        } | environment(head.fc.weight)  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
