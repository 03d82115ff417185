"""A cascade whose small stage lies on the large model's GPU, on another GPU or on the CPU: milliseconds of a request,
by who answers.

    python benchmarks/cascade_devices.py --small qwen2-1.5b --large qwen3-8b --places cuda:0 cuda:1 --out rows.jsonl

Two models of one vocabulary with random weights, in the adaptive mode, one request at a time: `stopped` is answered by
the small stage, `sent on` by the large one, which reads the small one's answer first. `alone` is the model that
answers, called by itself where it lies. Random models seldom agree, so that nothing of the answer is kept, and all of
it is read for nothing: the dearest case. `ms` are the 20, 50 and 80 % quantiles over `--requests` requests behind as
many that compile and capture; `equal` is the share of answers that are the model's own, which in bf16 need not be 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import parser_of, timed, write
from common import place as columns
from full_size import SHAPES, make_model  # the script beside this one

import fastspec
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import NAMES
from fastspec.programs.bench.report import quantiles

ITEMS = 64
WAYS = {"stopped": 0.0, "sent on": 1.0}
"""Way -> the probability from which the small stage's answer is good enough."""


def predictor() -> Predictor:
    """One that has seen random features and labels: where thresholds are 0 and 1 it has no say."""
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(ITEMS, len(NAMES), generator=generator) for _ in range(2)]
    labels = (torch.rand(ITEMS, 2, generator=generator) < 0.5).float()
    tokens = torch.full((ITEMS, 2), 20.0)
    return Predictor.fit(("small", "large"), features, labels, tokens, torch.zeros(ITEMS, 2), seed=0)


def milliseconds(
    run: Callable[[torch.Tensor], torch.Tensor], prompts: list[torch.Tensor]
) -> tuple[list[float], list[list[int]]]:
    """(the quantiles of all prompts' times, the answers), after a first turn through them."""
    found: list[list[int]] = []
    times = [1e3 * timed(lambda ids=ids: found.append(run(ids)[0, ids.shape[1] :].tolist())) for ids in prompts * 2]
    return [round(each, 2) for each in quantiles(times[len(prompts) :])], found[len(prompts) :]


def rows_of(args: argparse.Namespace, place: str, settled: Predictor) -> Iterator[dict[str, Any]]:
    """The rows of one place of the small stage."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    small, large = make_model(args.small, place, dtype), make_model(args.large, args.places[0], dtype)
    size = large.config.vocab_size
    prompts = [torch.randint(10, size, (1, args.prefix), device=large.device) for _ in range(args.requests)]
    given: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}

    def asked(model: Any, assistant: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: model.generate(ids, **given, attention_mask=torch.ones_like(ids), assistant=assistant)

    alone: dict[str, tuple[list[float], list[list[int]]]] = {}
    for name, model in (("small", small), ("large", large)):
        with fastspec.patched(model):
            alone[name] = milliseconds(asked(model, "autoregressive"), [ids.to(model.device) for ids in prompts])
    for way, threshold in WAYS.items():
        cascade = fastspec.Cascade(
            stages=[fastspec.Stage(small, name="small", assistant="autoregressive")],
            assistant="autoregressive",
            label="large",
            predictor=settled,
            costs=[1.0, 2.0],
            thresholds=[threshold],
        )
        with fastspec.patched(large, cascade=cascade):
            times, answers = milliseconds(asked(large, "cascade"), prompts)
            reached = len(fastspec.report(large).last.explanations[0].visits) - 1
        own, wanted = alone["large" if reached else "small"]
        equal = sum(mine == theirs for mine, theirs in zip(answers, wanted, strict=True)) / len(answers)
        row = {"small_on": place, "way": way, "reached": reached, "ms": times, "alone_ms": own}
        yield row | {"small_alone_ms": alone["small"][0], "equal": equal}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--small", default="qwen2-1.5b", choices=list(SHAPES))
    parser.add_argument("--large", default="qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--places", nargs="+", default=["cuda:0", "cuda:1"], help="the first is the large stage's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args(arguments)
    settled = predictor()
    shared = {name: getattr(args, name) for name in ("small", "large", "prefix", "tokens", "requests")}
    shared |= {"large_on": args.places[0], **columns(args.places[0], args.dtype)}
    for place in args.places:
        for row in rows_of(args, place, settled):
            write(args.out, {**shared, **row}, list(row))


if __name__ == "__main__":
    main()
