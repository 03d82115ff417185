"""The draft phase of an EAGLE-3 head on a CUDA device: milliseconds for feeding one round's pairs and growing the next tree.

    python benchmarks/drafter.py --out rows.jsonl

Ways: the fused launch (the candidates alone, without the re-ranking), and `EagleDrafter` on the ops of a backend (with it), each as calls
from Python and, where rounds of the backend are captured, as the replay of a CUDA graph. They are made and measured one after another, each
with the MiB that it allocates at its peak beside the head's weights: the cache, its buffers, what a call and a graph need. Shapes are those
of heads for SmolLM2-135M, Llama-3.2-1B, 3.1-8B and 3.1-70B; weights are random. The fused launch is checked against the head's own forward
first. The floor is the time of reading every weight once a pass at --bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.config import TreeShape
from fastspec.generation.drafters.eagle.dynamic import EagleDrafter
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.tree import Verdict
from fastspec.kernels.drafting.fused import DraftSpace, DraftWeights, draft, draft_space, draft_weights
from fastspec.patches.backends import choose_backend
from fastspec.programs.bench.device import environment

HEADS: dict[str, dict[str, int]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1920, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
}
PAIRS, REAL = 9, 5  # slots for pairs, and how many of them are real


def make_head(name: str, vocabulary: int, device: str) -> EagleHead:
    """A random head whose logits spread over a few units."""
    sizes = HEADS[name] | {"target_hidden_size": HEADS[name]["hidden_size"], "vocab_size": vocabulary, "draft_vocab_size": vocabulary}
    with torch.device(device):
        head = EagleHead(HeadConfig(**sizes, taps=(2, 16, 29))).eval().requires_grad_(False).to(torch.bfloat16)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        embedding = nn.Embedding(vocabulary, sizes["hidden_size"]).to(torch.bfloat16).requires_grad_(False)
    head.lm_head.weight.mul_(2)
    head.bind(embedding, None)
    return head


def packed_weights(head: EagleHead) -> DraftWeights:
    """The weights as the fused launch reads them: copies here, where `EagleDrafter` makes the head's parameters views of them."""
    attn, mlp = head.layers[0].self_attn, head.layers[0].mlp
    qkv = torch.cat([part.weight for part in (attn.q_proj, attn.k_proj, attn.v_proj)])
    return draft_weights(head, qkv, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))


class Fused:
    """Launches of one kind on a cache with a random prefix."""

    def __init__(
        self, head: EagleHead, weights: DraftWeights, shape: TreeShape, rows: int, prefix: int, launch: dict[str, int], programs: int | None
    ) -> None:
        c, weight = head.config, head.fc.weight
        self.weights = weights
        self.space: DraftSpace = draft_space(
            self.weights, rows=rows, pairs=PAIRS, top_k=shape.top_k, depth=shape.depth, programs=programs, launch=launch
        )  # fmt: skip
        self.prefix, self.limit = prefix, prefix + 256
        slots = self.limit + max(PAIRS, shape.depth * shape.top_k)
        self.k, self.v = torch.randn(2, rows, c.num_key_value_heads, slots, c.head_dim, device=weight.device, dtype=weight.dtype)
        angle = torch.arange(slots, device=weight.device)[:, None] * head.inv_freq
        self.cos, self.sin = angle.cos(), angle.sin()
        self.last, self.readout = torch.zeros(2, rows, c.hidden_size, device=weight.device, dtype=weight.dtype)
        self.lengths = torch.full((rows,), prefix, device=weight.device)
        self.tokens = torch.randint(0, c.vocab_size, (rows, PAIRS), device=weight.device)
        self.features = torch.randn(rows, PAIRS, weight.shape[1], device=weight.device, dtype=weight.dtype)
        self.counts = torch.full((rows,), REAL, device=weight.device)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        self.lengths.fill_(self.prefix)
        state = (self.last, self.readout, self.k, self.v, self.lengths, self.cos, self.sin, self.limit)
        return draft(self.weights, self.space, self.tokens, self.features, self.counts, *state)


def checked(head: EagleHead, shape: TreeShape, make: Callable[[], Fused]) -> Fused:
    """A launch that was looked at: the root's children are the best of the head's own logits, and every frontier the best of the launch's
    own scores."""
    fused = make()
    scores, tokens, parents = fused()
    logp = head.logits(fused.last).float().log_softmax(-1)
    # bf16 logits of size 8 or less, rounded once by the head and not by the kernel, their inputs once more by both
    wrong = (logp.gather(1, tokens[:, : shape.top_k]) - scores[:, : shape.top_k]).abs().max()
    least = (logp.topk(shape.top_k).values - scores[:, : shape.top_k]).abs().max()
    k = shape.top_k
    for level in range(shape.depth):
        base = k + level * k * k
        first = 0 if level == 0 else base - k * k
        best = torch.sort(scores[:, first:base], dim=-1, descending=True, stable=True).indices[:, :k] + first
        if not torch.equal(parents[:, base : base + k * k], best.repeat_interleave(k, 1)):
            raise SystemExit(f"the frontier of level {level} is not the best of the level before")
    if not float(wrong) < 0.1 or not float(least) < 0.1 or not bool(scores.isfinite().all()):
        raise SystemExit(f"the root's children are off by {float(wrong)} and {float(least)}")
    return fused


def separate(backend: str, head: EagleHead, shape: TreeShape, rows: int, prefix: int) -> Callable[[], Any]:
    """One round of `EagleDrafter` on the ops of a backend."""
    device = head.fc.weight.device
    drafter = EagleDrafter(head, shape, rows=rows, capacity=prefix + 256, ops=choose_backend(backend, device))
    drafter.reserve(prefix + 256)
    drafter.attention.k.normal_()
    drafter.attention.v.normal_()
    drafter.state.lengths.fill_(prefix)
    drafter.last.normal_()
    drafter.readout.normal_()
    tree = drafter.propose(prefix + 64)
    path = torch.zeros(rows, tree.max_path, dtype=torch.long, device=device)
    accepted = torch.full((rows,), min(REAL, tree.max_path) - 1, device=device)
    verdict = Verdict(path, accepted, torch.zeros(rows, dtype=torch.long, device=device))
    features = torch.randn(rows, shape.total_tokens, head.fc.weight.shape[1], device=device, dtype=head.fc.weight.dtype)
    active = torch.ones(rows, dtype=torch.bool, device=device)

    def call() -> Any:
        drafter.state.lengths.fill_(prefix)
        drafter.observe(tree, verdict, features, features, active, prefix + 64)
        return drafter.propose(prefix + 64)

    return call


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measured(make: Callable[[], Callable[[], Any]], captures: bool, times: int) -> Iterator[tuple[str, list[float], float]]:
    """A way as calls and, where it is captured, as a graph: (name, milliseconds, MiB at the peak)."""
    held = settled()
    call = make()
    torch.cuda.reset_peak_memory_stats()  # what it took to make it, such as weights laid out anew, is no part of it
    call()
    yield "calls", milliseconds(call, times), (torch.cuda.max_memory_allocated() - held) / 2**20
    if captures:
        graph = captured(call)
        yield "graph", milliseconds(graph, times), (torch.cuda.max_memory_allocated() - held) / 2**20


def settled() -> int:
    """Bytes that are allocated once everything dropped is freed."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def milliseconds(call: Callable[[], Any], times: int) -> list[float]:
    """20, 50 and 80 % quantiles by CUDA events."""
    for _ in range(3):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    cuts = statistics.quantiles([start.elapsed_time(end) for start, end in marks], n=10, method="inclusive")
    return [round(cuts[i], 4) for i in (1, 4, 7)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--backends", nargs="*", default=["torch", "triton"], help="backends of the separate kernels")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--launch", nargs="+", default=[""], help="entries of the launch table to try, such as BN=128,BK=64,STAGES=4")
    parser.add_argument("--programs", type=int, help="programs of the fused launch (default: two per multiprocessor)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floor")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = TreeShape(total_tokens=60, depth=options.depth, top_k=options.top_k)
    for name in options.heads:
        head = make_head(name, options.vocabulary, "cuda")
        sizes = {key: weight.nbytes for key, weight in head.named_parameters()}
        read = sum(sizes.values()) + options.depth * (sum(sizes.values()) - sizes["fc.weight"])
        weights = packed_weights(head)
        for rows in options.rows:
            ways: dict[str, tuple[Callable[[], Callable[[], Any]], bool]] = {}
            for entries in options.launch:
                launch = {key: int(value) for key, value in (entry.split("=") for entry in entries.split(",") if entry)}
                way = f"fused {entries}".strip()
                fused = partial(Fused, head, weights, shape, rows, options.prefix, launch, options.programs)
                ways[way] = partial(checked, head, shape, fused), True
            for backend in options.backends:
                captures = choose_backend(backend, torch.device("cuda")).captures
                ways[backend] = partial(separate, backend, head, shape, rows, options.prefix), captures
            for way, kind, ms, mib in (
                (way, *result) for way, (make, captures) in ways.items() for result in measured(make, captures, options.times)
            ):
                row = {"head": name, "rows": rows, "way": f"{way}, {kind}", "ms": ms, "mib": round(mib, 1)}
                row["weights_mib"] = round(sum(sizes.values()) / 2**20, 1)
                row |= {"floor": round(read / options.bandwidth / 1e9, 3), "prefix": options.prefix, "depth": options.depth}
                row |= {"top_k": options.top_k, "vocabulary": options.vocabulary} | environment(head.fc.weight)
                print(f"{name:4s} {rows} rows  {row['way']:36s} {row['ms'][1]:8.3f} ms (floor {row['floor']:.3f})", flush=True)
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
