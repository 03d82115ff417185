"""Time whole calls of models with random weights at a given acceptance, beside plain decoding in the same run.

A head with random weights drafts, at its real cost; the target's own continuation then takes the place of a chain of
its drafts: draft token d of a round is right, with all before it, with the d-th probability of `--survival`, by numbers
that hang on the prompt and the position. All other drafts are wrong. The default is that of a 397B Qwen's MTP layer
(SPEED-Bench, coding). So tokens per second are those of a head that reaches this acceptance.

Embeddings are large and the LM head looks for the token STRIDE after the last one: which token is likeliest does not
hang on the rounding of a pass, so that trees of any size emit the same text. Mixtures choose experts for each token
independently.

    python benchmarks/oracle.py --shapes llama-8b --rows 1,8,32 --trees auto "60,7,10" --out rows.jsonl
    python benchmarks/oracle.py --serve 8001 --shapes llama-8b --rows 64 --trees default        # none: without drafts

With `--serve` one shape answers on a port as `fastspec serve` does, texts of `--prefix` + `--tokens` tokens at the
most, by SmolLM2's tokenizer with words for all other tokens, and no token ends an answer: serving.py measures it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import Row, device_here, free_memory, parser_of, place, timed, tree_of, write
from full_size import CALLS, EMBEDDED, SHAPES, make_heads, make_model, numbers, routers_of, wide_tokenizer
from torch import Tensor
from transformers import GenerationConfig

import fastspec
from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.base import Drafter
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree
from fastspec.kernels.verification.reference import uniform_at
from fastspec.patches.assistants.registry import EagleDecoding, resolve
from fastspec.patches.session import session_of
from fastspec.programs.bench.report import quantiles

WARM = 16
"""Calls before those that are timed: sizes of trees are captured in the first ones."""
STRIDE = 997
"""From a token to the likeliest next one: answers pass over bytes and special tokens."""
QWEN_MTP = (0.93, 0.80, 0.66, 0.58, 0.44, 0.39, 0.24)


@dataclass(eq=False, slots=True)
class Oracle:
    """Probabilities that the first d drafts are right, and continuations of prompts by the prompts' tokens, None of a
    steady model, of which they are known."""

    survival: Sequence[float] = QWEN_MTP
    answers: dict[tuple[int, ...], list[int]] | None = None

    def decoding(self, assistant: Any, model: Any) -> EagleDecoding:
        """The decoding of an EAGLE assistant with this oracle's drafts."""
        session = session_of(model)
        assert session is not None
        found = resolve(assistant, session.resources, model)
        return replace(found, drafts=partial(OracleDrafter, oracle=self))


@dataclass(slots=True)
class Held:
    """Prompts and continuations [B, T] of the rows, by position, which drafters of all sizes read."""

    texts: Tensor


class OracleDrafter(EagleDrafter):
    """`EagleDrafter` of which a chain of the drafts is exchanged for the target's continuation.

    The continuation lies on the device and is looked up by the committed tokens of a row, so that rounds are captured
    as any head's. Prompts that begin like others are read whole.
    """

    resume = Drafter.resume

    def __init__(self, *given: Any, oracle: Oracle, capacity: int, rows: int, **more: Any) -> None:
        super().__init__(*given, capacity=capacity, rows=rows, **more)
        self.oracle, device = oracle, self.root.device
        self.held = Held(torch.zeros(rows, capacity, dtype=torch.long, device=device))
        self.streams = torch.zeros(rows, 1, dtype=torch.long, device=device)
        """Seeds [B, 1] of the numbers that say which drafts are right."""
        self.survival = torch.zeros(256, device=device)
        self.survival[1 : len(oracle.survival) + 1] = torch.tensor(oracle.survival)
        self.vocabulary = self.head.config.vocab_size
        self._lay_out()

    def sized(self, shape: TreeShape) -> Drafter:
        other = super().sized(shape)
        assert isinstance(other, OracleDrafter)
        other._lay_out()
        return other

    def _lay_out(self) -> None:
        """Nodes 1 to D are a chain; the others are further children of its nodes but the last."""
        depth = min(self.max_path, self.nodes) - 1
        index = torch.arange(self.nodes, device=self.root.device)
        parents = torch.where(index <= depth, index - 1, (index - depth - 1) % max(1, depth)).clamp(min=0)
        parents = parents.expand(len(self.root), -1).contiguous()
        self.chain = (index > 0) & (index <= depth)
        self.tree = TokenTree.from_parents(torch.zeros_like(parents), parents, self.max_path)

    def bind(self, target: Target) -> None:
        self.target = target

    def open(self, capacity: int) -> None:
        super().open(capacity)
        if self.held.texts.shape[1] < capacity:
            self.held.texts = self.held.texts.new_zeros(len(self.held.texts), capacity)

    @property
    def buffers(self) -> Any:
        return super().buffers, self.held.texts.data_ptr()

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        super().begin(ids, counts, features, root)
        if self.oracle.answers is None:
            self.streams[: len(ids)] = (ids * torch.arange(1, 1 + ids.shape[1], device=ids.device)).sum(1, keepdim=True)
            return
        known = [tuple(text[:count]) for text, count in zip(ids.tolist(), counts.tolist(), strict=True)]
        room = self.held.texts.shape[1]  # all rows at once: every copy to the device is a call's time
        whole = [(*text, *self.oracle.answers.get(text, []), *[0] * room)[:room] for text in known]
        self.held.texts[: len(ids)] = torch.tensor(whole, device="cpu")
        self.streams[: len(ids)] = torch.tensor([[hash(text)] for text in known], device="cpu")

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        super().move_row(row, other, source, count)
        assert isinstance(other, OracleDrafter)
        self.streams[row] = other.streams[source]
        width = min(self.held.texts.shape[1], other.held.texts.shape[1])
        self.held.texts[row, :width] = other.held.texts[source, :width]

    def propose(self, extent: int) -> TokenTree:
        drafted = super().propose(extent).tokens
        shape, lengths = self.tree, self.target.lengths[:, None]
        if self.oracle.answers is None:
            right = (drafted[:, :1] + STRIDE * shape.depths) % self.vocabulary
        else:
            right = self.held.texts.gather(1, (lengths + shape.depths).clamp(max=self.held.texts.shape[1] - 1))
        agrees = self.chain & (uniform_at(self.streams, lengths) < self.survival[shape.depths])
        wrong = torch.where(drafted == right, (right + 1) % self.vocabulary, drafted)
        tokens = torch.cat((drafted[:, :1], torch.where(agrees, right, wrong)[:, 1:]), 1)
        return replace(shape, tokens=tokens)


def steady(model: Any, collapsed: bool = False) -> Any:
    """Let the likeliest token be the one STRIDE after the last, by a margin that no rounding reaches; `collapsed` lets
    a mixture's tokens all choose its first experts, by a direction that no row of the LM head has."""
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings()
    embedding.normal_(0.0, EMBEDDED)
    common = torch.nn.functional.normalize(torch.randn_like(embedding[0]), dim=0)
    embedding.addr_(embedding @ common, common, alpha=-1)
    lm_head.weight = torch.nn.Parameter(embedding.roll(STRIDE, 0) / EMBEDDED, requires_grad=False)
    if collapsed:
        embedding.add_(common, alpha=EMBEDDED * len(common) ** 0.5)
        for router in routers_of(model):
            router.weight[: router.top_k] += common
    return model


def whole_calls(model: Any, prompts: Tensor, assistant: Any, tokens: int, calls: int) -> tuple[Tensor, list[float]]:
    """Answers of `generate`, and the seconds of each of so many calls, after some that compile and capture."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(prompts), "max_new_tokens": tokens}
    run = partial(model.generate, prompts, assistant=assistant, **options)
    answers: Tensor = [run() for _ in range(WARM)][-1]
    return answers, [timed(run) for _ in range(calls)]


def in_flight(model: Any, prompts: Tensor, assistant: Any, rows: int, tokens: int, calls: int) -> tuple[Any, Row]:
    """Seconds in which an open batch of so many rows answers all prompts, given at once, after a warm-up."""
    length, config = prompts.shape[1] + tokens, GenerationConfig(max_new_tokens=tokens, do_sample=False)
    rows_of = [(row[None], torch.ones_like(row[None])) for row in prompts.cpu()]  # as a server has them
    with fastspec.continuous(model, assistant, rows, max_length=length + 32, prefix_caching=False) as batch:

        def run() -> None:
            for future in [batch.submit(ids, config, attention_mask=mask) for ids, mask in rows_of]:
                future.result()

        told = {"warmup_seconds": round(batch.warmup(length), 2), "graph_mib": fastspec.report(model).graph_bytes >> 20}
        seconds = [timed(run) for _ in range(1 + calls)][1:]
        return seconds, told | {"acceptance_length": round(batch.stats.acceptance_length, 3)}


def opened(name: str, tree: str, survival: Sequence[float], args: argparse.Namespace) -> tuple[Any, Any]:
    """(an open batch of a shape, its tokenizer), in the process of a server's rounds."""
    torch.manual_seed(0)
    model, length = steady(make_model(name, *device_here(args.dtype))), args.prefix + args.tokens
    heads = {} if tree == "none" else make_heads(model, [args.head], args.draft_vocab)
    fastspec.patch(model, backend=args.backend, **heads)
    decoding = Oracle(survival).decoding(tree_of(tree, args.head), model) if heads else "autoregressive"
    batch = fastspec.continuous(model, decoding, args.rows[0], max_length=length)
    batch.warmup(length)
    return batch, wide_tokenizer(model.config.vocab_size)


def serve(build: Callable[[], tuple[Any, Any]], port: int, name: str) -> None:
    """Answer on a port until a signal ends it."""
    from fastspec.programs.serving.app import bound, build_app, run_server
    from fastspec.programs.serving.remote import Remote, left_alone_by_the_collector
    from fastspec.programs.serving.requests import Limits

    with bound("127.0.0.1", port) as listener, Remote(build) as batch, left_alone_by_the_collector():
        run_server(build_app(batch, batch.tokenizer, name, limits=Limits(4096, 256, 1 << 20)), listener)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help="answer requests there, one shape with one tree")
    parser.add_argument("--shapes", default="llama-8b", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="rows, with commas between")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a call")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--trees", nargs="+", default=["auto"], help='auto, default, or "nodes,depth,top_k"')
    parser.add_argument("--survival", default=",".join(map(str, QWEN_MTP)), help="P(the first d drafts are right)")
    parser.add_argument("--head", default="eagle3", choices=("eagle3", "mtp"), help="what drafts")
    parser.add_argument("--collapsed", action="store_true", help="all tokens choose the same experts")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="of eagle3")
    parser.add_argument("--open", action="store_true", help="answer 4 prompts a row in an open batch besides")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args(arguments)
    survival = [float(each) for each in args.survival.split(",")]
    if args.serve is not None:
        serve(partial(opened, args.shapes, args.trees[0], survival, args), args.serve, args.shapes)
        return
    device, dtype = device_here(args.dtype)
    shown = ("shape", "rows", "way", "method", "tree", "tokens_per_second", "over_plain", "acceptance_length", "equal")

    def tell(base: Row, seconds: list[float], count: int, plain: float | None = None, **more: Any) -> float:
        rate = count / statistics.median(seconds)
        found = {"tokens_per_second": round(rate, 1), "seconds_quantiles": quantiles(seconds), **more}
        found |= {} if plain is None else {"over_plain": round(rate / plain, 3)}
        write(args.out, place(device, dtype) | base | found, shown)
        return rate

    for name in args.shapes.split(","):
        torch.manual_seed(0)
        model = steady(make_model(name, device, dtype), args.collapsed)
        heads, oracle = make_heads(model, [args.head], args.draft_vocab), Oracle(survival)
        base = {"shape": name, "prefix": args.prefix, "new_tokens": args.tokens, "survival": survival}
        base["collapsed"] = args.collapsed
        with fastspec.patched(model, backend=args.backend, **heads):
            for rows in args.rows:
                many = torch.randint(10, model.config.vocab_size, (4 * rows, args.prefix), device=device)
                ids, here = many[:rows], base | {"rows": rows, "way": "generate"}
                plain, seconds = whole_calls(model, ids, "autoregressive", args.tokens, args.calls)
                first = tell(here | {"method": "autoregressive"}, seconds, plain[:, args.prefix :].numel())
                decodings = {text: oracle.decoding(tree_of(text, args.head), model) for text in args.trees}
                for text, decoding in decodings.items():
                    found, seconds = whole_calls(model, ids, decoding, args.tokens, args.calls)
                    last, count = fastspec.report(model).last, found[:, args.prefix :].numel()
                    told = {"acceptance_length": round(last.acceptance_length, 3), "rounds": last.rounds}
                    phases = {"prepare": last.prepare_seconds, **last.phases}
                    told["phases_ms"] = {name: round(1e3 * spent, 2) for name, spent in phases.items()}
                    told["drafted"] = round(last.drafted / last.row_rounds, 1)
                    told["equal"] = round(float((found == plain).all(1).float().mean()), 3)
                    tell(here | {"method": args.head, "tree": text}, seconds, count, first, **told)
                if args.open:
                    here["way"], count = "open", many.shape[0] * args.tokens
                    for text, decoding in {"": "autoregressive", **decodings}.items():
                        seconds, told = in_flight(model, many, decoding, rows, args.tokens, args.calls)
                        way = {"method": args.head, "tree": text} if text else {"method": decoding}
                        found = tell(here | way, seconds, count, first if text else None, **told)
                        first = first if text else found
        del model, heads
        free_memory()


if __name__ == "__main__":
    main()
