"""Each kernel of the Triton backend beside its torch reference and, for attention, torch's own kernels: milliseconds and bandwidth.

Every time is one call inside a CUDA graph of many, over enough different buffers that none is found in the L2 cache. What a kernel
gives is compared with its reference before it is timed. GB/s counts the bytes that the op has to move, each once.

    python benchmarks/kernel_times.py --out rows.jsonl

It is not named kernels.py: transformers looks for a package of that name, and would import the file into whatever runs in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fastspec.generation.tree import TokenTree
from fastspec.kernels.attention import layout as tree_layout
from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.attention import tree as tree_attention
from fastspec.kernels.cache import kv_block_copy
from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.drafting import head_input, topk_expand, tree_build
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.layer import rms_norm, rope_cache
from fastspec.kernels.linear import experts, swiglu
from fastspec.kernels.linear import parts as linear_parts
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.recurrent import commit as delta_commit
from fastspec.kernels.recurrent import conv, delta
from fastspec.kernels.recurrent import reference as recurrent_reference
from fastspec.kernels.recurrent.reference import DecayRates
from fastspec.kernels.verification import posterior_eval
from fastspec.kernels.verification import reference as verification_reference
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.programs.bench.device import versions

DTYPE = torch.bfloat16
DEVICE = "cuda"
HEADS = {"8B": (32, 8, 128), "1.5B": (12, 2, 128), "135M": (9, 3, 64)}  # query heads, key heads, head size
L2 = 2**28  # more than any cache of today


@dataclass
class Case:
    """One op at one size: how to make its inputs, the ways to compute it, and the bytes that it has to move."""

    name: str
    size: str
    make: Callable[[], tuple[Any, ...]]
    ways: dict[str, Callable[..., Any]]
    moved: int
    tolerance: float = 2e-2
    """Largest difference from the first way, relative to the largest value: bf16 results of fp32 sums in another order."""


def graph_ms(run: Callable[..., Any], inputs: list[tuple[Any, ...]], calls: int) -> float:
    """Median milliseconds of one call over replays of a graph of `calls` calls."""
    for each in inputs[:2]:
        run(*each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in islice(cycle(inputs), calls):
            run(*each)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in list(pairwise(marks))[1:]) / calls


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def result(run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """What a way returns or, where it returns nothing, what it left in its inputs."""
    out = run(*inputs)
    return inputs if out is None else out


def differs(one: Any, other: Any) -> float:
    """The largest difference of floats relative to the largest value, infinite where whole numbers differ."""
    worst = 0.0
    for a, b in zip(tensors(one), tensors(other), strict=True):
        if a.dtype.is_floating_point:
            worst = max(worst, float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1e-9)))
        elif not torch.equal(a, b):
            return float("inf")
    return worst


def random(*shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype or DTYPE) * scale


def tree_of(nodes: int, rows: int = 1) -> TokenTree:
    """A tree in which every node has three children, as far as the nodes go, for each row."""
    parents = torch.tensor([[max(0, (node - 1) // 3) for node in range(nodes)]] * rows, device=DEVICE)
    return TokenTree.from_parents(torch.randint(0, 1000, (rows, nodes), device=DEVICE), parents)


def flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attention_cases(prefixes: list[int], models: list[str], with_flex: bool) -> Iterator[Case]:
    for model in models:
        heads, kv_heads, size = HEADS[model]
        for nodes in (1, 60):
            tree = tree_of(nodes)
            for prefix in prefixes:
                extent = prefix + nodes
                lengths = torch.tensor([prefix], device=DEVICE)
                group = heads // kv_heads
                dense = attention_reference.attention_layout(lengths, tree.ancestors, nodes, nodes, extent, group)
                ours = tree_layout.attention_layout(lengths, tree.ancestors, nodes, nodes, extent, group)
                scale = size**-0.5

                def make(nodes=nodes, extent=extent, heads=heads, kv_heads=kv_heads, size=size) -> tuple[Any, ...]:
                    return random(1, nodes, heads, size), random(1, kv_heads, extent, size), random(1, kv_heads, extent, size)

                def sdpa(q, k, v, mask=dense.visible, scale=scale) -> Tensor:
                    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
                    return out.transpose(1, 2)

                ways = {
                    "reference": lambda q, k, v, layout=dense, scale=scale: attention_reference.tree_attention(q, k, v, layout, scale),
                    "fastspec": lambda q, k, v, layout=ours, scale=scale: tree_attention.tree_attention(q, k, v, layout, scale),
                    "sdpa with a mask": sdpa,
                }
                if with_flex and nodes == 60 and prefix == prefixes[-1]:
                    ways["flex attention"] = flex_way(dense.visible[0, 0], scale)
                yield Case("tree_attention", f"{model}, {nodes} nodes, prefix {prefix}", make, ways, 2 * 2 * kv_heads * extent * size)


def flex_way(visible: Tensor, scale: float) -> Callable[..., Any]:
    """FlexAttention with the tree as its mask; filled up to 128 queries, since torch has no kernel for 60 of them."""
    from torch.nn.attention.flex_attention import create_block_mask

    run, nodes = flex(), visible.shape[0]
    seen = F.pad(visible, (0, 0, 0, 128 - nodes))
    seen[nodes:, 0] = True
    blocks = create_block_mask(lambda b, h, q, k: seen[q, k], 1, 1, *seen.shape, device=DEVICE)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = F.pad(q.transpose(1, 2), (0, 0, 0, 128 - nodes))
        return run(wide, k, v, block_mask=blocks, scale=scale, enable_gqa=True)[:, :, :nodes].transpose(1, 2)

    return way


def small_cases() -> Iterator[Case]:
    for rows, hidden in ((1, 4096), (60, 4096), (60, 576)):
        weight = random(hidden)
        yield Case(
            "rms_norm", f"{rows} x {hidden}, with a residual", lambda r=rows, h=hidden: (random(r, h), random(r, h)),
            {way: lambda x, y, w=weight, op=op: op(x, w, 1e-5, y) for way, op in both(layer_reference.rms_norm, rms_norm.rms_norm)},
            2 * 4 * rows * hidden,
        )  # fmt: skip
    for rows, width in ((1, 14336), (60, 14336), (60, 1536)):
        yield Case(
            "swiglu", f"{rows} x {width}", lambda r=rows, w=width: (random(r, 2 * w),),
            dict(both(linear_reference.swiglu, swiglu.swiglu)), 2 * 3 * rows * width,
        )  # fmt: skip
    for model, (heads, kv_heads, size) in HEADS.items():
        for nodes in (1, 60):
            cos, sin = random(4096, size // 2, dtype=torch.float32), random(4096, size // 2, dtype=torch.float32)
            places = torch.arange(nodes, device=DEVICE)[None] + 100

            def make(n=nodes, h=heads, g=kv_heads, d=size) -> tuple[Any, ...]:
                return random(1, n, (h + 2 * g) * d), random(1, g, 256, d), random(1, g, 256, d)

            yield Case(
                "rope_cache", f"{model}, {nodes} nodes", make,
                {way: lambda x, k, v, op=op, c=cos, s=sin, p=places: op(x, c, s, p, k, v, p)
                 for way, op in both(layer_reference.rope_cache, rope_cache.rope_cache)},
                2 * 2 * nodes * (heads + 2 * kv_heads) * size,
            )  # fmt: skip
    path, steps = torch.tensor([[100, 103, 110, 120, 130, 140, 150, 151, 152]], device=DEVICE), torch.arange(100, 109, device=DEVICE)[None]
    yield Case(
        "kv_block_copy", "8B, 32 layers, 9 slots", lambda: (random(32, 1, 8, 256, 128), random(32, 1, 8, 256, 128)),
        {way: lambda k, v, op=op: op(k, v, path, steps) for way, op in both(cache_reference.kv_block_copy, kv_block_copy.kv_block_copy)},
        2 * 2 * 2 * 32 * 8 * 8 * 128,
    )  # fmt: skip
    for vocab, hidden in ((32000, 4096), (16384, 576)):
        d2t, scores = torch.zeros(vocab, dtype=torch.long, device=DEVICE), -torch.rand(1, 10, device=DEVICE)
        yield Case(
            "topk_expand", f"10 x {hidden}, vocabulary {vocab}, top 10",
            lambda v=vocab, h=hidden: (random(1, 10, h), random(v, h) * h**-0.5),  # logits of a few units
            {way: lambda x, w, op=op, s=scores, d=d2t: op(x, w, s, 10, d)[0]
             for way, op in both(drafting_reference.topk_expand, topk_expand.topk_expand)},
            2 * vocab * hidden,
        )  # fmt: skip
    index = torch.arange(710, device=DEVICE)
    depths = torch.where(index < 10, 1, 2 + (index - 10).clamp(min=0) // 100)
    above = torch.where(index < 10, -1, (index - 10).clamp(min=0) // 10)
    yield Case(
        "tree_build", "710 candidates, 60 nodes",
        lambda: (-torch.rand(1, 710, device=DEVICE).sort(1).values, torch.randint(0, 9, (1, 710), device=DEVICE)),
        {way: lambda s, t, op=op: op(s, t, above[None], depths, t[:, 0], 60)
         for way, op in both(drafting_reference.tree_build, tree_build.tree_build)},
        710 * 28,
    )  # fmt: skip
    for nodes, vocab in ((1, 128256), (60, 128256), (60, 49152)):
        tree, uniform, plain = tree_of(nodes), torch.rand(1, nodes, device=DEVICE), verification_reference.pick
        for kind, numbers in (("greedy", None), ("sampled", uniform)):
            yield Case(
                f"pick, {kind}", f"{nodes} x {vocab}", lambda n=nodes, v=vocab: (random(1, n, v),),
                {way: lambda x, op=op, u=numbers: op(x, u) for way, op in both(plain, posterior_eval.pick)} if numbers is None else
                {"reference": lambda x, u=numbers, op=plain: op(x, u), "fastspec": lambda x, u=numbers: posterior_eval.pick(x, u)},
                2 * nodes * vocab, float("inf") if numbers is not None else 0.0,
            )  # fmt: skip
        if nodes > 1:
            yield from distribution_cases(nodes, vocab, uniform)
            yield Case(
                "posterior_walk", f"{nodes} nodes", lambda t=tree: (torch.randint(0, 1000, t.tokens.shape, device=DEVICE),),
                {way: lambda p, op=op, t=tree: op(t.tokens, t.parents, p, 9)
                 for way, op in both(verification_reference.posterior_walk, posterior_eval.posterior_walk)},
                3 * 8 * nodes,
            )  # fmt: skip


def layer_cases() -> Iterator[Case]:
    """What a layer's product leaves to the norm behind it, what a head's first layer reads, and a mixture of experts."""
    for rows, depth, width in ((61, 14336, 4096), (61, 4096, 4096), (16, 14336, 4096), (61, 8960, 1536), (61, 1536, 576)):
        norm = random(width)

        def normed(product: Callable[..., Any], op: Callable[..., Any], norm: Tensor = norm) -> Callable[..., Any]:
            return lambda x, w, y: op(product(x, w, None), norm, 1e-5, y)

        yield Case(
            "linear_parts, then rms_norm", f"{rows} x {depth} to {width}",
            lambda r=rows, k=depth, m=width: (random(r, k), random(m, k, scale=k**-0.5), random(r, m)),
            {"reference": normed(linear_reference.linear, layer_reference.rms_norm),
             "cuBLAS, then fastspec": normed(linear_reference.linear, rms_norm.rms_norm),
             "fastspec": normed(linear_parts.linear_parts, rms_norm.rms_norm)},
            2 * depth * width,
        )  # fmt: skip
    for hidden in (576, 4096):
        table, weights = random(32000, hidden), (random(hidden), random(hidden))
        index, words = torch.randint(0, 100, (1, 10), device=DEVICE), torch.zeros(1, 10, 2, dtype=torch.long, device=DEVICE)
        ids = torch.randint(0, 32000, (1, 100), device=DEVICE)
        yield Case(
            "frontier_input", f"10 nodes x {hidden}", lambda h=hidden: (random(1, 10, h),),
            {way: lambda x, op=op, t=table, w=weights, i=index, s=words, n=ids: op(n, i, x, s, 10, t, *w, 1e-5)
             for way, op in both(drafting_reference.frontier_input, head_input.frontier_input)},
            2 * 10 * hidden * 5,
        )  # fmt: skip
    for count, choices, hidden, inner, turned, many in (
        (8, 2, 4096, 14336, False, (1, 60)), (128, 8, 2048, 768, False, (1, 60, 480)), (32, 4, 2880, 2880, True, (1, 60, 480)),
    ):  # fmt: skip
        gate_up, down = random(count, 2 * inner, hidden, scale=hidden**-0.5), random(count, hidden, inner, scale=inner**-0.5)
        if turned:  # outputs side by side, as gpt-oss has them
            gate_up, down = (weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (gate_up, down))
        for rows in many:
            chosen = torch.rand(rows, count, device=DEVICE).topk(choices).indices
            yield Case(
                "experts", f"{rows} x {hidden}, {choices} of {count} experts of {inner}{', outputs side by side' * turned}",
                lambda r=rows, h=hidden, k=choices: (random(r, h), torch.rand(r, k, device=DEVICE)),
                {way: lambda x, s, op=op, c=chosen, g=gate_up, d=down: op(x, g, d, c, s)
                 for way, op in both(linear_reference.experts, experts.experts)},
                2 * 3 * hidden * inner * int(chosen.unique().numel()),
            )  # fmt: skip


def recurrent_cases(sizes: tuple[int, int, int, int] = (16, 32, 128, 128), layers: int = 24, tokens: int = 512) -> Iterator[Case]:
    """Gated DeltaNet of (Hk, Hv, Dk, Dv) and so many layers, Qwen3.5-9B's: a layer's convolution and its system over a tree's nodes, the
    same over a part of a prompt, and what moves all layers' states behind the accepted path. The floor reads states and inputs once."""
    key_heads, heads, key_size, value_size = sizes
    channels, width, state_bytes = 2 * key_heads * key_size + heads * value_size, 4, 4 * heads * key_size * value_size
    weight, rates = random(channels, width), DecayRates(random(heads), random(heads))

    def state_of(rows: int) -> Tensor:
        return random(rows, heads, key_size, value_size, dtype=torch.float32)

    for rows, nodes in ((1, 1), (1, 60), (8, 60)):
        tree = tree_of(nodes, rows)
        moved = rows * nodes * channels * 2 * 2
        yield Case(
            "tree_conv", f"{rows} x {nodes} nodes, {channels} channels",
            lambda b=rows, n=nodes: (random(b, n, channels), random(b, width, channels)),
            {way: lambda x, held, op=op, t=tree: op(x, weight, held, t.parents)
             for way, op in both(recurrent_reference.tree_conv, conv.tree_conv)},
            moved + rows * width * channels * 2,
        )  # fmt: skip

        def make(b: int = rows, n: int = nodes) -> tuple[Any, ...]:
            space = random(b, n, heads, value_size, dtype=torch.float32), random(b, n, heads, dtype=torch.float32)
            return random(b, n, channels), random(b, n, heads), random(b, n, heads), state_of(b), *space

        yield Case(
            "delta_tree", f"{rows} x {nodes} nodes, {heads} heads of {key_size} x {value_size}", make,
            {way: lambda x, a, b, state, updates, gates, op=op, t=tree: op(x, a, b, rates, state, t.ancestors, updates, gates)
             for way, op in both(recurrent_reference.delta_tree, delta.delta_tree)},
            rows * state_bytes + rows * nodes * (2 * channels + 2 * heads * value_size + 4 * heads * value_size),
        )  # fmt: skip
    for rows in (1, 8):
        counts = torch.full((rows,), tokens, device=DEVICE)
        yield Case(
            "delta_chain", f"{rows} x {tokens} tokens",
            lambda b=rows: (random(b, tokens, channels), random(b, tokens, heads), random(b, tokens, heads), state_of(b)),
            {way: lambda x, a, b, state, op=op, c=counts: op(x, a, b, rates, state, c)
             for way, op in both(recurrent_reference.delta_chain, delta.delta_chain)},
            2 * rows * state_bytes + rows * tokens * 2 * (channels + heads * value_size),
        )  # fmt: skip
        for nodes, steps in ((1, 1), (60, 8)):
            path = torch.arange(steps, device=DEVICE).expand(rows, -1).contiguous()
            accepted, active = path[:, -1].contiguous(), torch.ones(rows, dtype=torch.bool, device=DEVICE)

            def kept(b: int = rows, n: int = nodes) -> tuple[Any, ...]:
                states = random(layers, b, heads, key_size, value_size, dtype=torch.float32)
                read = random(layers, b, n, channels), random(layers, b, n, channels)
                gates = -random(layers, b, n, heads, dtype=torch.float32).abs()
                updates = random(layers, b, n, heads, value_size, dtype=torch.float32)
                return states, random(layers, b, width, channels), *read, updates, gates

            yield Case(
                "delta_commit", f"{layers} layers, {rows} rows, {steps} of {nodes} nodes", kept,
                {way: lambda *given, op=op, p=path, c=accepted, on=active: op(*given, p, c, on)
                 for way, op in both(recurrent_reference.delta_commit, delta_commit.delta_commit)},
                layers * rows * (2 * state_bytes + steps * (2 * channels + 4 * heads * value_size)),
            )  # fmt: skip


def distribution_cases(nodes: int, vocab: int, uniform: Tensor) -> Iterator[Case]:
    """Draws under sampling settings, beside transformers' warpers and a plain draw from what they leave."""
    for drawn in (SamplingSettings(0.8, 50, 0.95), SamplingSettings(top_p=0.95)):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(drawn.temperature)] if drawn.temperature != 1 else [])
        warpers += [TopKLogitsWarper(drawn.top_k)] if drawn.top_k else []
        warpers += [TopPLogitsWarper(drawn.top_p)]
        yield Case(
            f"pick, temperature {drawn.temperature}, top-k {drawn.top_k or 'off'}, top-p {drawn.top_p}", f"{nodes} x {vocab}",
            lambda n=nodes, v=vocab: (random(1, n, v, scale=3.0),),
            {"reference": lambda x, w=warpers, u=uniform: verification_reference.pick(w(None, x[0].float())[None], u),
             "fastspec": lambda x, drawn=drawn, u=uniform: posterior_eval.pick(x, u, drawn)},
            2 * nodes * vocab, float("inf"),
        )  # fmt: skip


def both(one: Any, other: Any) -> tuple[tuple[str, Any], ...]:
    return ("reference", one), ("fastspec", other)


def read_bandwidth() -> float:
    block = random(2**30, dtype=torch.float32)
    return block.numel() * 4 / (graph_ms(lambda x: x.sum(), [(block,)], 4) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", default="1024,8192,32768,131072")
    parser.add_argument("--models", default="8B")
    parser.add_argument("--only", default="", help="names of ops, with commas between")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, at the longest prefix: it compiles for a while")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    shared = {"device": torch.cuda.get_device_name(), "dtype": str(DTYPE)[6:], "read_gb_per_s": round(bandwidth / 1e9), **versions()}
    print(f"{shared['device']}: {bandwidth / 1e12:.2f} TB/s read")
    prefixes = [int(prefix) for prefix in args.prefixes.split(",")]
    cases = [
        *attention_cases(prefixes, args.models.split(","), args.flex), *small_cases(), *layer_cases(), *recurrent_cases(),
    ]  # fmt: skip
    for case in (c for c in cases if not args.only or c.name.split(",")[0] in args.only.split(",")):
        first = case.make()
        size = sum(x.numel() * x.element_size() for x in tensors(first))
        inputs = [first, *(case.make() for _ in range(min(200, max(1, L2 // size))))]
        for way, run in case.ways.items():
            row: dict[str, Any] = shared | {"kernel": case.name, "size": case.size, "way": way}
            try:
                copies = [tuple(x.clone() if isinstance(x, Tensor) else x for x in first) for _ in range(2)]
                off = differs(result(case.ways["reference"], copies[0]), result(run, copies[1])) if way != "reference" else 0.0
                spent = graph_ms(run, inputs, max(20, min(200, len(inputs))))
            except Exception as error:  # one that cannot run is named, and the rest goes on
                row |= {"error": f"{type(error).__name__}: {error}"[:200]}
            else:
                speed = case.moved / spent / 1e6
                row |= {"us": round(1e3 * spent, 2), "gb_per_s": float(f"{speed:.4g}"), "share": float(f"{speed * 1e9 / bandwidth:.3g}"),
                        "difference": off}  # fmt: skip
                row |= {} if off <= case.tolerance else {"wrong": True}
            shown = ("kernel", "size", "way", "us", "gb_per_s", "share", "difference", "wrong", "error")
            print(*(row.get(name, "") for name in shown), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        del inputs, first


if __name__ == "__main__":
    main()
