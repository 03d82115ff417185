"""The draft phase of an EAGLE-3 head on a CUDA device: milliseconds to feed a round's pairs and to grow the next tree.

    python benchmarks/drafter.py --heads llama-8b smollm2-135m --rows 1 4 --out rows.jsonl

Ways: the one launch (the candidates alone, without the re-ranking), and `EagleDrafter` on the ops of a backend (with
it), each as calls from Python and, where rounds of the backend are captured, as the replay of a CUDA graph, with the
MiB at the peak beside the head's weights. Heads have the sizes of full_size.py's shapes and random weights. The one
launch is checked against the head's own forward first. The floor is reading every weight once a pass, at --bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import captured, free_memory, milliseconds, parser_of, place, write
from full_size import SHAPES, config_of, head_config
from torch import Tensor, nn

from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead
from fastspec.generation.tree import Verdict
from fastspec.kernels.drafting.fused.draft import DraftWeights, draft, draft_space, draft_weights
from fastspec.patches.backends import choose_backend
from fastspec.programs.bench.report import quantiles

PAIRS, REAL = 9, 5
"""Slots for pairs, and how many of them are real."""


def make_head(name: str, vocabulary: int) -> EagleHead:
    """A random head of a shape's sizes, whose logits spread over a few units."""
    config = head_config(config_of(name), vocabulary, vocab_size=vocabulary)
    with torch.device("cuda"):
        head = EagleHead(config).eval().requires_grad_(False).to(torch.bfloat16)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        embedding = nn.Embedding(vocabulary, config.hidden_size).to(torch.bfloat16).requires_grad_(False)
    head.lm_head.weight.mul_(2)
    head.bind(embedding, None)
    return head


def packed_weights(head: EagleHead) -> DraftWeights:
    """The weights as the one launch reads them: copies here, where `EagleDrafter` makes the head's parameters views."""
    attn, mlp = head.layers[0].self_attn, head.layers[0].mlp
    parts = (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)
    qkv, gate_up = (torch.cat([each.weight for each in part]) for part in parts)
    return draft_weights(BoundHead.of(head), qkv, gate_up)


class Fused:
    """One launch on a cache with a random prefix."""

    def __init__(self, head: EagleHead, weights: DraftWeights, shape: TreeShape, rows: int, prefix: int) -> None:
        c, like = head.config, head.fc.weight
        sizes = {"rows": rows, "pairs": PAIRS, "top_k": shape.top_k, "depth": shape.depth}
        self.weights, self.space = weights, draft_space(weights, **sizes, programs=None)
        self.prefix, self.limit = prefix, prefix + 256
        slots = self.limit + max(PAIRS, shape.depth * shape.top_k)
        self.k, self.v = like.new_empty(2, rows, c.num_key_value_heads, slots, c.head_dim).normal_()
        angle = torch.arange(slots, device=like.device)[:, None] * head.inv_freq
        self.cos, self.sin = angle.cos(), angle.sin()
        self.last, self.readout = like.new_zeros(2, rows, c.hidden_size)
        self.lengths = torch.full((rows,), prefix, device=like.device)
        self.tokens = torch.randint(0, c.vocab_size, (rows, PAIRS), device=like.device)
        self.features = like.new_empty(rows, PAIRS, like.shape[1]).normal_()
        self.counts = torch.full((rows,), REAL, device=like.device)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        self.lengths.fill_(self.prefix)
        state = (self.last, self.readout, self.k, self.v, self.lengths, self.cos, self.sin, self.limit)
        return draft(self.weights, self.space, self.tokens, self.features, self.counts, *state)


def checked(head: EagleHead, weights: DraftWeights, shape: TreeShape, rows: int, prefix: int) -> Fused:
    """A launch that was looked at: the root's children are the best of the head's own logits, and every frontier the
    best of the launch's own scores."""
    fused, k = Fused(head, weights, shape, rows, prefix), shape.top_k
    scores, tokens, parents = fused()
    logp = head.logits(fused.last).float().log_softmax(-1)
    # bf16 logits of size 8 or less, rounded once by the head and not by the kernel, their inputs once more by both
    wrong = float((logp.gather(1, tokens[:, :k]) - scores[:, :k]).abs().max())
    least = float((logp.topk(k).values - scores[:, :k]).abs().max())
    for level in range(shape.depth):
        base = k + level * k * k
        first = 0 if level == 0 else base - k * k
        best = torch.sort(scores[:, first:base], dim=-1, descending=True, stable=True).indices[:, :k] + first
        if not torch.equal(parents[:, base : base + k * k], best.repeat_interleave(k, 1)):
            raise SystemExit(f"the frontier of level {level} is not the best of the level before")
    if not wrong < 0.1 or not least < 0.1 or not bool(scores.isfinite().all()):
        raise SystemExit(f"the root's children are off by {wrong} and {least}")
    return fused


def separate(backend: str, head: EagleHead, shape: TreeShape, rows: int, prefix: int) -> Callable[[], Any]:
    """One round of `EagleDrafter` on the ops of a backend."""
    like, ops = head.fc.weight, choose_backend(backend, head.fc.weight.device)
    drafter = EagleDrafter(BoundHead.of(head), shape, rows=rows, capacity=prefix + 256, ops=ops)
    drafter.reserve(prefix + 256)
    for state in (drafter.attention.k, drafter.attention.v, drafter.last, drafter.readout):
        state.normal_()
    drafter.state.lengths.fill_(prefix)
    tree = drafter.propose(prefix + 64)
    path = torch.zeros(rows, tree.max_path, dtype=torch.long, device=like.device)
    accepted = torch.full((rows,), min(REAL, tree.max_path) - 1, device=like.device)
    verdict = Verdict(path, accepted, torch.zeros(rows, dtype=torch.long, device=like.device))
    features = like.new_empty(rows, shape.total_tokens, like.shape[1]).normal_()
    active = torch.ones(rows, dtype=torch.bool, device=like.device)

    def call() -> Any:
        drafter.state.lengths.fill_(prefix)
        drafter.observe(tree, verdict, features, features, active, prefix + 64)
        return drafter.propose(prefix + 64)

    return call


def measured(make: Callable[[], Callable[[], Any]], captures: bool, times: int) -> Iterator[dict[str, Any]]:
    """A way as calls and, where it is captured, as a graph: milliseconds, and MiB at the peak."""
    free_memory()
    held = torch.cuda.memory_allocated()
    call = make()
    torch.cuda.reset_peak_memory_stats()  # making it, such as laying weights out anew, is no part of it
    for kind in ("calls", "graph") if captures else ("calls",):
        call()
        run = captured([call]).replay if kind == "graph" else call
        ms = quantiles(milliseconds(run, times + 3)[3:])
        yield {"kind": kind, "ms": ms, "mib": round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", nargs="+", choices=list(SHAPES), default=["smollm2-135m", "llama-8b", "llama-70b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--backends", nargs="*", default=["torch", "triton"], help="backends of the separate kernels")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--tree", default="60,7,10", help="total_tokens,depth,top_k")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floor")
    parser.add_argument("--times", type=int, default=30)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape = TreeShape(*map(int, args.tree.split(",")))
    for name in args.heads:
        head = make_head(name, args.vocabulary)
        weights, sizes = packed_weights(head), {key: weight.nbytes for key, weight in head.named_parameters()}
        read = sum(sizes.values()) * (1 + shape.depth) - shape.depth * sizes["fc.weight"]
        shared = {"head": name, "prefix": args.prefix, "tree": args.tree, "vocabulary": args.vocabulary}
        shared |= {"weights_mib": round(sum(sizes.values()) / 2**20, 1), "floor": round(read / args.bandwidth / 1e9, 3)}
        shared |= place("cuda", torch.bfloat16)
        for rows in args.rows:
            fused = partial(checked, head, weights, shape, rows, args.prefix)
            ways: dict[str, tuple[Callable[[], Callable[[], Any]], bool]] = {"fused": (fused, True)}
            for backend in args.backends:
                captures = choose_backend(backend, torch.device("cuda")).captures
                ways[backend] = partial(separate, backend, head, shape, rows, args.prefix), captures
            for way, (make, captures) in ways.items():
                for found in measured(make, captures, args.times):
                    row = shared | {"rows": rows, "way": f"{way}, {found.pop('kind')}"} | found
                    write(args.out, row, ("head", "rows", "way", "ms", "mib", "floor"))


if __name__ == "__main__":
    main()
