"""An open batch under load without a server, or trees of a head in batches of many rows.

    python benchmarks/open_batch.py --prompts humaneval.jsonl gsm8k.jsonl --loads plain eagle3 32,6,8 --out rows.jsonl
    python benchmarks/open_batch.py --shape qwen2-1.5b --out rows.jsonl       # random weights, head and prompts
    python benchmarks/open_batch.py --prompts mt_bench.jsonl --trees plain 32,6,8 8,5,2 --rows 16 128 --out rows.jsonl

A load is `--clients` clients, each with one prompt at a time and six in all, decoded by each of `--loads`, `--repeats`
times in one batch that was warmed up before. `first_token_ms` is the median from `submit` to the first token at the
streamer.

With `--trees` (total_tokens,depth,top_k; `plain`: no drafts) `--times` as many prompts as rows are answered in one
call of `generate` with `ContinuousBatch`, after a shorter call that captures. `tokens_per_second` and `round_ms`, a
call less its prompts over its rounds, are those of the fastest of `--repeats`. No end token ends an answer in either.
Loads have no prefix caching, since their prompts are asked again and again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import torch
from common import device_here, parser_of, place, timed, tree_of, write
from full_size import SHAPES, make_head, make_model

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.texts import padded_inputs
from fastspec.programs.training.data import encode_prompts, read_prompts

EACH = 6
"""Prompts of a client."""
LONGEST = 400
"""Tokens of a prompt at most."""


class Times(list[float]):
    """Streamer that takes the times at which it is made, given the prompt and given new tokens."""

    def put(self, value: Any) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(batch: Any, prompts: Sequence[Sequence[int]], clients: int, tokens: int) -> dict[str, Any]:
    """The row of one load."""
    todo = [torch.tensor([prompts[number % len(prompts)]]) for number in range(EACH * clients)]

    def client(mine: Sequence[torch.Tensor]) -> list[float]:
        firsts = []
        for ids in mine:
            streamer = Times([time.perf_counter()])
            options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
            batch.submit(ids, **options, streamer=streamer).result()
            firsts.append(1e3 * (streamer[2] - streamer[0]))
        return firsts

    with ThreadPoolExecutor(clients) as pool:
        begun = time.perf_counter()
        firsts = list(chain(*pool.map(client, (todo[number::clients] for number in range(clients)))))
        seconds = time.perf_counter() - begun
    row = {"clients": clients, "requests": len(todo), "tokens": tokens, "seconds": round(seconds, 3)}
    row |= {"tokens_per_second": round(len(todo) * tokens / seconds, 1)}
    return row | {"first_token_ms": round(statistics.median(firsts), 1)}


def made(args: argparse.Namespace) -> tuple[Any, list[list[int]]]:
    """(the patched model, prompts)."""
    device, dtype = device_here()
    if args.shape is None:
        model, tokenizer = load_model(args.model, device)
        prompts = [row for path in args.prompts for row in read_prompts(path)[: args.each]]
        random.Random(0).shuffle(prompts)
        texts = [ids for ids in encode_prompts(tokenizer, prompts) if len(ids) < LONGEST]
        fastspec.patch(model, eagle3=args.head or args.model)
    else:
        torch.manual_seed(0)
        model = make_model(args.shape, device, dtype)
        most, lengths = min(500, model.config.vocab_size), torch.randint(120, 250, (192,)).tolist()
        texts = [torch.randint(10, most, (length,)).tolist() for length in lengths]
        fastspec.patch(model, eagle3=make_head(model, args.draft_vocab))
    model.generation_config.eos_token_id = None
    return model, texts


def assistant_of(text: str) -> Any:
    """An assistant by its name, "plain", "auto" or total_tokens,depth,top_k of `eagle3`."""
    return tree_of(text) if text == "auto" or text[0].isdigit() else {"plain": "autoregressive"}.get(text, text)


def of_tree(model: Any, texts: Sequence[Sequence[int]], rows: int, tree: str, args: argparse.Namespace) -> dict:
    """The row of one tree in one number of rows."""
    chosen = [texts[number % len(texts)] for number in range(args.times * rows)]
    given = {**padded_inputs(chosen, model.generation_config, model.device), "do_sample": False}
    given["assistant"] = fastspec.ContinuousBatch(assistant_of(tree), rows)
    model.generate(**given, max_new_tokens=max(2, args.tokens // 8))
    call, count = partial(model.generate, **given, max_new_tokens=args.tokens), args.times * rows
    seconds = [timed(call) for _ in range(args.repeats)]
    stats, best = fastspec.report(model).last, min(seconds)
    row = {"rows": rows, "tree": tree, "prompts": count, "tokens": args.tokens}
    row |= {"tokens_per_second": round(count * args.tokens / best, 1), "seconds": [round(each, 4) for each in seconds]}
    row |= {"acceptance_length": round(stats.acceptance_length, 3), "rounds": stats.rounds}
    return row | {"round_ms": round(1e3 * (best - stats.phases["prefill"]) / stats.rounds, 3)}


def loads(model: Any, texts: Sequence[Sequence[int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all loads, a batch for each assistant."""
    for name in args.loads:
        assistant = assistant_of(name)
        with fastspec.continuous(model, assistant, rows=args.rows[0], max_length=2048, prefix_caching=False) as batch:
            row = {"load": name, "rows": args.rows[0], "warmup_seconds": round(batch.warmup(), 2)}
            load(batch, texts, max(args.clients), max(1, args.tokens // 4))
            for clients in args.clients * args.repeats:
                yield row | load(batch, texts, clients, args.tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", help="of eagle3; by default the one of the model's name")
    parser.add_argument("--prompts", nargs="+", default=[], help="jsonl files")
    parser.add_argument("--each", type=int, default=64, help="prompts of a file at most")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights, instead of --model and --prompts")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--loads", nargs="+", default=["plain"], help="plain, auto, an assistant's name, or its tree")
    parser.add_argument("--trees", nargs="+", default=[], help="measure these trees instead of loads")
    parser.add_argument("--rows", type=int, nargs="+", default=[32], help="a batch's; of trees each of these")
    parser.add_argument("--times", type=int, default=3, help="prompts for a row of a tree")
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.shape is None and not args.prompts:
        parser.error("name --prompts, or a --shape")
    model, texts = made(args)
    shared = {"model": args.shape or args.model, **place(model.device, model.dtype)}
    trees = (of_tree(model, texts, rows, tree, args) for rows in args.rows for tree in args.trees)
    for row in trees if args.trees else loads(model, texts, args):
        write(args.out, shared | row, list(row))


if __name__ == "__main__":
    main()
