"""Each kernel of the Triton backend beside its torch reference and, for attention, torch's own kernels.

    python benchmarks/kernel_times.py --out rows.jsonl

Every time is one call inside a CUDA graph of many, over enough different buffers that none is found in the L2 cache.
What a kernel gives is compared with its reference before it is timed. GB/s counts the bytes that the op has to move,
each once. The file is not named kernels.py: transformers looks for a package of that name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch
from common import captured, milliseconds, parser_of, place, write
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import logits_process as lp

from fastspec.generation.tree import TokenTree
from fastspec.kernels.attention import layout as tree_layout
from fastspec.kernels.attention import ordered as ordered_attention
from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.attention import tree as tree_attention
from fastspec.kernels.cache import commit
from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.drafting import inputs as head_input
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.drafting import topk_expand, tree_build
from fastspec.kernels.layer import norms, rope_cache
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import experts, linear, ordered, swiglu
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.recurrent import conv, delta
from fastspec.kernels.recurrent import reference as recurrent_reference
from fastspec.kernels.verification import posterior_eval
from fastspec.kernels.verification import reference as verification_reference
from fastspec.kernels.verification.reference import SamplingSettings

DTYPE = torch.bfloat16
DEVICE = "cuda"
HEADS = {"8B": (32, 8, 128), "1.5B": (12, 2, 128), "135M": (9, 3, 64)}
"""Query heads, key heads, head size."""
L2 = 2**28
"""Bytes, more than any cache of today."""
Make = Callable[[], tuple[Any, ...]]


@dataclass
class Case:
    """One op at one size: how to make its inputs, the ways to compute it, and the bytes that it has to move."""

    name: str
    size: str
    make: Make
    ways: dict[str, Callable[..., Any]]
    moved: int
    tolerance: float = 2e-2
    """Largest difference from the first way, relative to the largest value: bf16 results of sums in another order."""


def both(call: Callable[..., Any], reference: Any, ours: Any) -> dict[str, Callable[..., Any]]:
    """A call of an op, which is its first argument, by the reference and by the kernel."""
    return {"reference": partial(call, reference), "fastspec": partial(call, ours)}


def graph_ms(run: Callable[..., Any], inputs: list[tuple[Any, ...]], calls: int) -> float:
    """Median milliseconds of one call over replays of a graph of `calls` calls."""
    for each in inputs[:2]:
        run(*each)
    graph = captured([partial(run, *each) for each in islice(cycle(inputs), calls)])
    return statistics.median(milliseconds(graph.replay, 11)[1:]) / calls


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def result(run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """A way's value or, where it returns nothing, its inputs, which it wrote."""
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


def randoms(*shapes: tuple[int, ...]) -> Make:
    """Random inputs of these shapes, anew at every call."""
    return lambda: tuple(random(*shape) for shape in shapes)


def tree_of(nodes: int, rows: int = 1) -> TokenTree:
    """A tree in which every node has three children, as far as the nodes go, for each row."""
    parents = torch.tensor([[max(0, (node - 1) // 3) for node in range(nodes)]] * rows, device=DEVICE)
    return TokenTree.from_parents(torch.randint(0, 1000, (rows, nodes), device=DEVICE), parents)


def attention(model: str, nodes: int, prefix: int) -> Case:
    heads, kv_heads, size = HEADS[model]
    extent, scale = prefix + nodes, size**-0.5
    given = torch.tensor([prefix], device=DEVICE), tree_of(nodes).ancestors, nodes, nodes, extent, heads // kv_heads
    dense, ours = attention_reference.attention_layout(*given), tree_layout.attention_layout(*given)
    exact = ordered_attention.attention_layout(*given)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = {"attn_mask": dense.visible, "scale": scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, **mask).transpose(1, 2)

    ways: dict[str, Callable[..., Any]] = {
        "reference": lambda q, k, v: attention_reference.tree_attention(q, k, v, dense, scale),
        "fastspec": lambda q, k, v: tree_attention.tree_attention(q, k, v, ours, scale),
        "exact": lambda q, k, v: ordered_attention.tree_attention(q, k, v, exact, scale),
        "sdpa with a mask": sdpa,
    }
    make = randoms((1, nodes, heads, size), *[(1, kv_heads, extent, size)] * 2)
    return Case("tree_attention", f"{model}, {nodes} nodes, prefix {prefix}", make, ways, 4 * kv_heads * extent * size)


def norm(rows: int, hidden: int) -> Case:
    weight = random(hidden)
    ways = both(lambda op, x, y: op(x, weight, 1e-5, y), layer_reference.rms_norm, norms.rms_norm)
    size, make = f"{rows} x {hidden}, with a residual", randoms(*[(rows, hidden)] * 2)
    return Case("rms_norm", size, make, ways, 8 * rows * hidden)


def gated(rows: int, width: int) -> Case:
    ways = {"reference": linear_reference.swiglu, "fastspec": swiglu.swiglu}
    return Case("swiglu", f"{rows} x {width}", randoms((rows, 2 * width)), ways, 6 * rows * width)


def rotation(model: str, nodes: int) -> Case:
    heads, kv_heads, size = HEADS[model]
    cos, sin = (random(4096, size // 2, dtype=torch.float32) for _ in range(2))
    at = torch.arange(nodes, device=DEVICE)[None] + 100
    make = randoms((1, nodes, (heads + 2 * kv_heads) * size), *[(1, kv_heads, 256, size)] * 2)
    reference, ours = layer_reference.rope_cache, rope_cache.rope_cache
    ways = both(lambda op, x, k, v: op(x, cos, sin, at, k, v, at), reference, ours)
    return Case("rope_cache", f"{model}, {nodes} nodes", make, ways, 4 * nodes * (heads + 2 * kv_heads) * size)


def copied() -> Case:
    path = torch.tensor([[100, 103, 110, 120, 130, 140, 150, 151, 152]], device=DEVICE)
    steps = torch.arange(100, 109, device=DEVICE)[None]
    reference, ours = cache_reference.kv_block_copy, commit.kv_block_copy
    ways = both(lambda op, k, v: op(k, v, path, steps), reference, ours)
    make = randoms(*[(32, 1, 8, 256, 128)] * 2)
    return Case("kv_block_copy", "8B, 32 layers, 9 slots", make, ways, 2 * 2 * 2 * 32 * 8 * 8 * 128)


def expansion(vocab: int, hidden: int) -> Case:
    d2t, scores = torch.zeros(vocab, dtype=torch.long, device=DEVICE), -torch.rand(1, 10, device=DEVICE)
    reference, ours = drafting_reference.topk_expand, topk_expand.topk_expand
    ways = both(lambda op, x, w: op(x, w, scores, 10, d2t)[0], reference, ours)

    def make() -> tuple[Any, ...]:
        return random(1, 10, hidden), random(vocab, hidden, scale=hidden**-0.5)  # logits of a few units

    return Case("topk_expand", f"10 x {hidden}, vocabulary {vocab}, top 10", make, ways, 2 * vocab * hidden)


def built() -> Case:
    index = torch.arange(710, device=DEVICE)
    later = (index - 10).clamp(min=0)
    depths, above = torch.where(index < 10, 1, 2 + later // 100), torch.where(index < 10, -1, later // 10)[None]
    reference, ours = drafting_reference.tree_build, tree_build.tree_build
    ways = both(lambda op, s, t: op(s, t, above, depths, t[:, 0], 60), reference, ours)

    def make() -> tuple[Any, ...]:
        return -torch.rand(1, 710, device=DEVICE).sort(1).values, torch.randint(0, 9, (1, 710), device=DEVICE)

    return Case("tree_build", "710 candidates, 60 nodes", make, ways, 710 * 28)


def picked(nodes: int, vocab: int, drawn: bool) -> Case:
    uniform = torch.rand(1, nodes, device=DEVICE) if drawn else None
    ways = both(lambda op, x: op(x, uniform), verification_reference.pick, posterior_eval.pick)
    kind, tolerance = ("sampled", float("inf")) if drawn else ("greedy", 0.0)
    return Case(f"pick, {kind}", f"{nodes} x {vocab}", randoms((1, nodes, vocab)), ways, 2 * nodes * vocab, tolerance)


def processed(nodes: int, vocab: int, drawn: SamplingSettings) -> Case:
    """Draws under sampling settings, beside transformers' warpers and a plain draw from what they leave."""
    uniform = torch.rand(1, nodes, device=DEVICE)
    warpers = lp.LogitsProcessorList([lp.TemperatureLogitsWarper(drawn.temperature)] if drawn.temperature != 1 else [])
    warpers += [lp.TopKLogitsWarper(drawn.top_k)] if drawn.top_k else []
    warpers += [lp.TopPLogitsWarper(drawn.top_p)]
    ways: dict[str, Callable[..., Any]] = {
        "reference": lambda x: verification_reference.pick(warpers(None, x[0].float())[None], uniform),
        "fastspec": lambda x: posterior_eval.pick(x, uniform, drawn),
    }
    name = f"pick, temperature {drawn.temperature}, top-k {drawn.top_k or 'off'}, top-p {drawn.top_p}"
    moved, make = 2 * nodes * vocab, lambda: (random(1, nodes, vocab, scale=3.0),)
    return Case(name, f"{nodes} x {vocab}", make, ways, moved, float("inf"))


def walked(nodes: int) -> Case:
    tree = tree_of(nodes)
    reference, ours = verification_reference.posterior_walk, posterior_eval.posterior_walk
    ways = both(lambda op, picks: op(tree.tokens, tree.parents, picks, 9), reference, ours)
    make = lambda: (torch.randint(0, 1000, tree.tokens.shape, device=DEVICE),)  # noqa: E731
    return Case("posterior_walk", f"{nodes} nodes", make, ways, 3 * 8 * nodes)


def multiplied(rows: int, channels: int, depth: int, gates: bool) -> Case:
    """A linear layer, or gate and up-projection at once."""
    name = "gate_up" if gates else "linear"
    ways = both(lambda op, x, w: getattr(op, name)(x, w, None), linear_reference, linear)
    ways["exact"] = partial(lambda op, x, w: getattr(op, name)(x, w, None), ordered)
    lines = channels * (1 + gates)
    make = randoms((rows, depth), (lines, depth))
    return Case(name, f"{rows} x {depth} to {channels}", make, ways, 2 * lines * depth)


def product_and_norm(rows: int, depth: int, width: int) -> Case:
    """A product whose sum the norm behind it finishes."""
    weight = random(width)

    def way(product: Callable[..., Any], op: Callable[..., Any], x: Tensor, w: Tensor, y: Tensor) -> Any:
        return op(product(x, w, None), weight, 1e-5, y)

    ways = {
        "reference": partial(way, linear_reference.linear, layer_reference.rms_norm),
        "cuBLAS, then fastspec": partial(way, linear_reference.linear, norms.rms_norm),
        "fastspec": partial(way, linear.linear_parts, norms.rms_norm),
    }
    make = lambda: (random(rows, depth), random(width, depth, scale=depth**-0.5), random(rows, width))  # noqa: E731
    return Case("linear_parts, then rms_norm", f"{rows} x {depth} to {width}", make, ways, 2 * depth * width)


def frontier(hidden: int) -> Case:
    table, weights = random(32000, hidden), (random(hidden), random(hidden))
    index, words = torch.randint(0, 100, (1, 10), device=DEVICE), torch.zeros(1, 10, 2, dtype=torch.long, device=DEVICE)
    ids = torch.randint(0, 32000, (1, 100), device=DEVICE)
    reference, ours = drafting_reference.frontier_input, head_input.frontier_input
    ways = both(lambda op, x: op(ids, index, x, words, 10, table, *weights, 1e-5), reference, ours)
    return Case("frontier_input", f"10 nodes x {hidden}", randoms((1, 10, hidden)), ways, 2 * 10 * hidden * 5)


def mixture(count: int, choices: int, hidden: int, inner: int, turned: bool, rows: int) -> Case:
    """A mixture of experts; `turned`: outputs side by side, as gpt-oss has them."""
    gate_up = random(count, 2 * inner, hidden, scale=hidden**-0.5)
    down = random(count, hidden, inner, scale=inner**-0.5)
    if turned:
        gate_up, down = (weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (gate_up, down))
    chosen = torch.rand(rows, count, device=DEVICE).topk(choices).indices
    ways = both(lambda op, x, s: op(x, gate_up, down, chosen, s), linear_reference.experts, experts.experts)
    size = f"{rows} x {hidden}, {choices} of {count} experts of {inner}{', outputs side by side' * turned}"
    make = lambda: (random(rows, hidden), torch.rand(rows, choices, device=DEVICE))  # noqa: E731
    return Case("experts", size, make, ways, 2 * 3 * hidden * inner * int(chosen.unique().numel()))


def recurrent_cases(
    sizes: tuple[int, int, int, int] = (16, 32, 128, 128), layers: int = 24, tokens: int = 512
) -> Iterator[Case]:
    """Gated DeltaNet of (Hk, Hv, Dk, Dv) and so many layers, Qwen3.5-9B's: a layer over a tree's nodes and over a part
    of a prompt, and the commit of all layers' states. The floor reads states and inputs once."""
    key_heads, heads, key_size, value_size = sizes
    channels, width, state_bytes = 2 * key_heads * key_size + heads * value_size, 4, 4 * heads * key_size * value_size
    weight, fp32 = random(channels, width), torch.float32
    rates = recurrent_reference.DecayRates(random(heads), random(heads))
    reference, of_heads = recurrent_reference, f"{heads} heads of {key_size} x {value_size}"

    def state_of(*rows: int) -> Tensor:
        return random(*rows, heads, key_size, value_size, dtype=fp32)

    def convolution(rows: int, nodes: int) -> Case:
        tree, moved = tree_of(nodes, rows), rows * channels * 2 * (2 * nodes + width)
        ways = both(lambda op, x, held: op(x, weight, held, tree.parents), reference.tree_conv, conv.tree_conv)
        make = randoms((rows, nodes, channels), (rows, width, channels))
        return Case("tree_conv", f"{rows} x {nodes} nodes, {channels} channels", make, ways, moved)

    def system(rows: int, nodes: int) -> Case:
        tree, gates = tree_of(nodes, rows), (rows, nodes, heads)
        moved = rows * state_bytes + rows * nodes * (2 * channels + 6 * heads * value_size)

        def make() -> tuple[Any, ...]:
            space = random(*gates, value_size, dtype=fp32), random(*gates, dtype=fp32)
            return random(rows, nodes, channels), random(*gates), random(*gates), state_of(rows), *space

        def way(op: Any, x: Tensor, a: Tensor, b: Tensor, state: Tensor, *space: Tensor) -> Any:
            return op(x, a, b, rates, state, tree.ancestors, *space)

        ways = both(way, reference.delta_tree, delta.delta_tree)
        return Case("delta_tree", f"{rows} x {nodes} nodes, {of_heads}", make, ways, moved)

    def chain(rows: int) -> Case:
        counts, gates = torch.full((rows,), tokens, device=DEVICE), (rows, tokens, heads)

        def way(op: Any, x: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Any:
            return op(x, a, b, rates, state, counts)

        ways = both(way, reference.delta_chain, delta.delta_chain)
        moved = 2 * rows * state_bytes + rows * tokens * 2 * (channels + heads * value_size)
        make = lambda: (random(rows, tokens, channels), random(*gates), random(*gates), state_of(rows))  # noqa: E731
        return Case("delta_chain", f"{rows} x {tokens} tokens", make, ways, moved)

    def committed(rows: int, nodes: int, steps: int) -> Case:
        path = torch.arange(steps, device=DEVICE).expand(rows, -1).contiguous()
        verdict = path, path[:, -1].contiguous(), torch.ones(rows, dtype=torch.bool, device=DEVICE)
        all_nodes = layers, rows, nodes

        def make() -> tuple[Any, ...]:
            read = random(*all_nodes, channels), random(*all_nodes, channels)
            gates = -random(*all_nodes, heads, dtype=fp32).abs()
            updates = random(*all_nodes, heads, value_size, dtype=fp32)
            return state_of(layers, rows), random(layers, rows, width, channels), *read, updates, gates

        ways = both(lambda op, *given: op(*given, *verdict), reference.delta_commit, conv.delta_commit)
        moved = layers * rows * (2 * state_bytes + steps * (2 * channels + 4 * heads * value_size))
        return Case("delta_commit", f"{layers} layers, {rows} rows, {steps} of {nodes} nodes", make, ways, moved)

    for rows, nodes in ((1, 1), (1, 60), (8, 60)):
        yield convolution(rows, nodes)
        yield system(rows, nodes)
    for rows in (1, 8):
        yield chain(rows)
        yield committed(rows, 1, 1)
        yield committed(rows, 60, 8)


WEIGHTS = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)]
WEIGHTS += [(2048, 1536, False), (1536, 1536, False), (8960, 1536, True), (1536, 8960, False)]
WEIGHTS += [(960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False)]
"""Output channels, depth, and whether with a gate: a layer of 8B, 1.5B and 135M."""
PRODUCTS = ((61, 14336, 4096), (61, 4096, 4096), (16, 14336, 4096), (61, 8960, 1536), (61, 1536, 576))
MIXTURES = ((8, 2, 4096, 14336, False), (128, 8, 2048, 768, False), (32, 4, 2880, 2880, True))
DRAWN = (SamplingSettings(0.8, 50, 0.95), SamplingSettings(top_p=0.95))


def cases(prefixes: list[int], models: list[str]) -> Iterator[Case]:
    """All cases, each made when the one before it was measured."""
    for model, nodes, prefix in product(models, (1, 60), prefixes):
        yield attention(model, nodes, prefix)
    for rows, hidden, inner in ((1, 4096, 14336), (60, 4096, 14336), (60, 576, 1536)):
        yield norm(rows, hidden)
        yield gated(rows, inner)
    for model, nodes in product(HEADS, (1, 60)):
        yield rotation(model, nodes)
    yield from (copied(), expansion(32000, 4096), expansion(16384, 576), built(), walked(60))
    for nodes, vocab in ((1, 128256), (60, 128256), (60, 49152)):
        yield picked(nodes, vocab, False)
        yield picked(nodes, vocab, True)
        yield from (processed(nodes, vocab, drawn) for drawn in DRAWN if nodes > 1)
    yield from (multiplied(rows, *weight) for rows, weight in product((1, 8, 60, 2048), WEIGHTS))
    yield from (product_and_norm(*sizes) for sizes in PRODUCTS)
    yield from (frontier(576), frontier(4096))
    for sizes in MIXTURES:
        yield from (mixture(*sizes, rows) for rows in ((1, 60, 480) if sizes[0] > 8 else (1, 60)))
    yield from recurrent_cases()


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prefixes", default="1024,8192,32768,131072")
    parser.add_argument("--models", default="8B")
    parser.add_argument("--only", default="", help="names of ops, with commas between")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    block = random(2**30, dtype=torch.float32)
    bandwidth = block.numel() * 4e3 / graph_ms(torch.sum, [(block,)], 4)
    del block
    shared = place(DEVICE, DTYPE) | {"read_gb_per_s": round(bandwidth / 1e9)}
    only = args.only.split(",") if args.only else None
    for case in cases([int(prefix) for prefix in args.prefixes.split(",")], args.models.split(",")):
        if only is not None and case.name.split(",")[0] not in only:
            continue
        first = case.make()
        size = sum(x.numel() * x.element_size() for x in tensors(first))
        inputs = [first, *(case.make() for _ in range(min(200, max(1, L2 // size))))]
        for way, run in case.ways.items():
            row: dict[str, Any] = shared | {"kernel": case.name, "size": case.size, "way": way}
            try:
                copies = [tuple(x.clone() if isinstance(x, Tensor) else x for x in first) for _ in range(2)]
                results = (result(case.ways[each], copy) for each, copy in zip(("reference", way), copies, strict=True))
                off = differs(*results) if way != "reference" else 0.0
                spent = graph_ms(run, inputs, max(20, min(200, len(inputs))))
            except Exception as error:  # one that cannot run is named, and the rest goes on
                row |= {"error": f"{type(error).__name__}: {error}"[:200]}
            else:
                speed = case.moved / spent / 1e6
                row |= {"us": round(1e3 * spent, 2), "gb_per_s": float(f"{speed:.4g}")}
                row |= {"share": float(f"{speed * 1e9 / bandwidth:.3g}"), "difference": off}
                row |= {} if off <= case.tolerance else {"wrong": True}
            write(args.out, row, [name for name in row if name not in shared])
        del inputs, first


if __name__ == "__main__":
    main()
