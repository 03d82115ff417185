"""What a kernel costs where kernels overlap: a stack of decoder layers with random weights, whole and with one kernel left out.

A token a row, or `--nodes` of them, goes through all layers and the head as one captured graph of the Triton kernels; a row of JSON for
each way has the median time of a replay. Ways: "base" is everything, in "base no pdl" no kernel starts before the one in front of it has
ended, "without X" leaves out all launches of a kernel (KERNELS has its X), "base again" tells the drift since "base".

    python benchmarks/stack.py --shapes qwen2-1.5b llama-8b --prefix 2048 --out rows.jsonl
    python benchmarks/stack.py --shapes smollm2-135m --prefix 256 --slots 1088 --without attention norms
    python benchmarks/stack.py --shapes tiny --prefix 65 --times 3     # also without CUDA

The output is compared with plain torch's first, and of every way that leaves nothing out with that of "base". Without CUDA the program
runs in fp32, not bf16, under Triton's interpreter, not captured, by the host's clock: that shows that it works, no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from full_size import SHAPES as FULL_SIZE

from fastspec.generation.ops import Ops
from fastspec.kernels import launch
from fastspec.kernels.linear import launches
from fastspec.kernels.linear.reference import Parts
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.programs.bench.device import versions

SHAPES = {name: sizes | {"bias": kind == "qwen2"} for name, (kind, sizes) in FULL_SIZE.items() if kind in ("llama", "qwen2")}
KERNELS = {"attention": "attn", "rope": "rope", "norms": "rms", "qkv": "qkv", "out": "o", "gate_up": "gu", "down": "down", "head": "head"}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights [M, K] of a layer, and its keys and values [B, Hkv, C, D]."""

    norms: tuple[Tensor, Tensor]
    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor
    cache: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers and a head, hidden states x [B, N, H] and their slots [B, N], and what stands in for a product left out."""

    layers: list[Layer]
    norm: Tensor
    head: Tensor
    x: Tensor
    tables: tuple[Tensor, Tensor]
    slots: Tensor
    spares: tuple[Tensor, Tensor]


def make_stack(sizes: dict[str, Any], batch: int, nodes: int, prefix: int, slots: int, device: str, dtype: torch.dtype) -> Stack:
    """Random weights of a shape, which keep a state's size, and a cache of so many slots, `prefix` of them seen."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    hidden, inner, heads, kv_heads = (sizes[name] for name in names)
    size, packed = hidden // heads, hidden + 2 * kv_heads * (hidden // heads)

    def normal(*shape: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(mean, scale)

    def weight(channels: int, depth: int) -> Tensor:
        return normal(channels, depth, scale=depth**-0.5)

    norm, cache = partial(normal, hidden, mean=1.0, scale=0.1), partial(normal, batch, kv_heads, slots, size)
    layers = [
        Layer((norm(), norm()), weight(packed, hidden), normal(packed) if sizes["bias"] else None, weight(hidden, hidden),
              weight(2 * inner, hidden), weight(hidden, inner), (cache(), cache()))
        for _ in range(sizes["num_hidden_layers"])
    ]  # fmt: skip
    angles = 7 * torch.rand(prefix + nodes, size // 2, device=device)
    x, spares = normal(batch, nodes, hidden), (normal(batch, nodes, packed), normal(batch, nodes, inner))
    slots = torch.full((batch, 1), prefix, device=device) + torch.arange(nodes, device=device)
    return Stack(layers, norm(), weight(sizes["vocab_size"], hidden), x, (angles.cos(), angles.sin()), slots, spares)


def step(ops: Ops, stack: Stack, without: str | None = None) -> Tensor:
    """Logits [B, N, V] of N tokens, one after another, behind the prefix; `without` names a kernel that is not launched, without the head's
    they are [B, N, H]."""
    nodes = stack.x.shape[1]
    width, (kv_heads, capacity, size) = stack.layers[0].out.shape[1], stack.layers[0].cache[0].shape[1:]
    layout = ops.attention_layout(stack.slots[:, 0], None, nodes, nodes, capacity, width // size // kv_heads)
    norm = ops.rms_norm if without != "norms" else lambda x, weight, eps, residual: (stack.x if isinstance(x, Parts) else x, residual)
    split = ops.linear_parts or ops.linear
    x, residual, slots = stack.x, None, stack.slots
    for layer in stack.layers:
        x, residual = norm(x, layer.norms[0], 1e-5, residual)
        qkv = stack.spares[0] if without == "qkv" else ops.linear(x, layer.qkv, layer.bias)
        q = qkv[..., :width].unflatten(-1, (-1, size))
        if without != "rope":
            q = ops.rope_cache(qkv, *stack.tables, slots, *layer.cache, slots)
        seen = q if without == "attention" else ops.tree_attention(q, *layer.cache, layout, size**-0.5)
        x = x if without == "out" else split(seen.flatten(2), layer.out, None)
        x, residual = norm(x, layer.norms[1], 1e-5, residual)
        wide = stack.spares[1] if without == "gate_up" else ops.gate_up(x, layer.gate_up, None)
        x = x if without == "down" else split(wide, layer.down, None)
    x, _ = norm(x, stack.norm, 1e-5, residual)
    return x if without == "head" else ops.linear(x, stack.head, None)


def tolerance(stack: Stack) -> float:
    """How far two orders of summing may lie apart, as a share of the output's norm.

    A layer rounds 12 results to the dtype (each norm before and after its weight, both sums with the residual, qkv, rotation, attention,
    out, the gated product, down), and its fp32 sums once a term. Two ways that round differently are up to an eps apart each time; the
    layers neither grow nor shrink a difference much, and independent ones add up as the root of their number.
    """
    layer, count = stack.layers[0], len(stack.layers)
    terms = sum(weight.shape[1] for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)) + 2 * layer.cache[0].shape[2]
    summed = torch.finfo(torch.float32).eps * (terms * count + stack.head.shape[1]) ** 0.5
    return torch.finfo(stack.x.dtype).eps * (12 * count + 1) ** 0.5 + summed


def compare(name: str, got: Tensor, want: Tensor, allowed: float) -> float:
    """The distance as a share of the norm, to two digits. Raises ArithmeticError where it is more than allowed, or no number."""
    off = float((got - want).norm() / want.norm())
    if not off <= allowed:
        raise ArithmeticError(f"the output of {name} is {off:.1e} away, {allowed:.1e} is allowed: there is nothing to time")
    return float(f"{off:.1e}")


def measure(run: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    """Median milliseconds of a replay of run's graph and its output in fp32; without CUDA of a call."""
    out = run()  # compiled
    if not out.is_cuda:
        ends = [time.perf_counter(), *((run(), time.perf_counter())[1] for _ in range(times))]
        return 1e3 * statistics.median(b - a for a, b in pairwise(ends)), out.float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 3)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks[2:])), out.float()


def rows_of(ops: Ops, stack: Stack, without: list[str], times: int) -> Iterator[dict[str, Any]]:
    """Each way's name, time and distance from "base" (None where something is left out)."""
    compare("the kernels beside plain torch", step(ops, stack).float(), step(TORCH, stack).float(), tolerance(stack))
    base = None
    for way in ("base", "base no pdl", *without, "base again"):
        left_out = way if way in KERNELS else None
        launch.PDL = launches.PDL = way != "base no pdl"
        try:
            ms, out = measure(partial(step, ops, stack, left_out), times)
        finally:
            launch.PDL = launches.PDL = True
        base = out if base is None else base
        # when a kernel starts changes no sum's order: equal, to the bit
        off = None if left_out else compare(f'"{way}" beside "base"', out, base, 0.0)
        yield {"way": f"without {KERNELS[way]}" if left_out else way, "replay_ms": round(ms, 4), "difference": off}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2-1.5b"])
    parser.add_argument("--without", nargs="*", choices=KERNELS, default=list(KERNELS), help="what to leave out, one by one")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--slots", type=int, help="of the cache, more than --prefix; default: 2 * prefix + 64 + nodes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1, help="tokens of a row in one pass, a chain")
    parser.add_argument("--times", type=int, default=50, help="replays of a graph")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    args = parser.parse_args(arguments)
    slots = 2 * args.prefix + 64 + args.nodes if args.slots is None else args.slots
    if args.prefix < 0 or args.prefix + args.nodes > slots or min(args.batch, args.nodes, args.times) < 1:
        parser.error(f"prefix {args.prefix} and {args.nodes} nodes need as many slots ({slots}); batch, nodes and times are at least 1")
    cuda = torch.cuda.is_available()
    device, dtype, where = ("cuda", torch.bfloat16, torch.cuda.get_device_name()) if cuda else ("cpu", torch.float32, "cpu")
    sizes = args.batch, args.nodes, args.prefix, slots, device, dtype
    shared = {"device": where, "dtype": str(dtype)[6:], "batch": args.batch, "nodes": args.nodes, "prefix": args.prefix, **versions()}
    for name in args.shapes:
        torch.manual_seed(0)
        for row in rows_of(triton_ops(), make_stack(SHAPES[name], *sizes), args.without, args.times):
            print(f"{row['replay_ms']:9.4f} ms  {name} {row['way']}", flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(shared | {"shape": name} | row) + "\n")


if __name__ == "__main__":
    main()
