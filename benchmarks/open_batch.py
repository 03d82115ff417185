"""An open batch under load without a server, trees of a head in batches of many rows, or the turns of a conversation.

    python benchmarks/open_batch.py --prompts humaneval.jsonl gsm8k.jsonl --assistant eagle3 --out rows.jsonl
    python benchmarks/open_batch.py --shape qwen2-1.5b --out rows.jsonl       # random weights, head and prompts
    python benchmarks/open_batch.py --prompts mt_bench.jsonl --trees plain 32,6,8 8,5,2 --rows 16 128 --out rows.jsonl
    python benchmarks/open_batch.py --shape smollm2-135m --turns 10 --asked 200 --tokens 32 --out rows.jsonl

A load is `--clients` clients, each with one prompt at a time and six in all. Each size of `--chunks`, in which prompts
are read, takes its turn `--repeats` times, in one batch whose rounds were captured before. `first_token_ms` is the
median from `submit` to the first token at the streamer. `parts` are calls and seconds of the batch's own thread:
`admit`, reading prompts; `wait`, for rounds that were launched asynchronously, and `run`, for others; `take`, handing
tokens out; all of these are within `turn`.

With `--trees` (total_tokens,depth,top_k; `plain`: no drafts) `--times` as many prompts as rows are answered in one
call of `generate` with `ContinuousBatch`, after a shorter call that captures. `tokens_per_second` and `round_ms`, a
call less its prompts over its rounds, are those of the fastest of `--repeats`. No end token ends an answer in either.

With `--turns` one client asks so many times, `--asked` tokens behind the text so far and its answer of `--tokens`, with
prefix caching and without: `first_token_ms` of every turn, the median of `--repeats` conversations after one that is
not counted. Loads have no prefix caching, since their prompts are asked again and again.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import FirstTokens, device_here, padded, parser_of, place, tree_of, write
from full_size import SHAPES, make_head, make_model

import fastspec
from fastspec.generation.engine import rounds, schedule
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.training.data import encode_prompts, read_prompts

EACH = 6
"""Prompts of a client."""
LONGEST = 400
"""Tokens of a prompt at most."""
PARTS = (("admit", rounds.Rounds, "_admit"), ("turn", rounds.Rounds, "turn"), ("take", rounds, "take"))
PARTS += (("wait", schedule.InFlightRound, "wait"), ("run", schedule.WholeGraph, "run"))


@contextmanager
def timed_parts() -> Iterator[dict[str, list[float]]]:
    """Calls and seconds of the parts of a batch's turns, meanwhile."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def found(*given: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return run(*given, **options)
            finally:
                calls, seconds = spent.get(name, (0, 0.0))
                spent[name] = [calls + 1, seconds + time.perf_counter() - begun]

        return found

    former = [(name, owner, attribute, getattr(owner, attribute)) for name, owner, attribute in PARTS]
    for name, owner, attribute, run in former:
        setattr(owner, attribute, timed(name, run))
    try:
        yield spent
    finally:
        for _, owner, attribute, run in former:
            setattr(owner, attribute, run)


def load(batch: Any, prompts: Sequence[Sequence[int]], clients: int, tokens: int) -> dict[str, Any]:
    """The row of one load."""
    todo = [torch.tensor([prompts[number % len(prompts)]]) for number in range(EACH * clients)]
    firsts: list[float] = []
    failed: list[BaseException] = []

    def client(mine: Sequence[torch.Tensor]) -> None:
        try:
            for ids in mine:
                streamer = FirstTokens()
                options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
                batch.submit(ids, **options, streamer=streamer).result()
                firsts.append(1e3 * sum(streamer.seconds[:2]))  # to the prompt, and to the first token
        except BaseException as error:
            failed.append(error)

    with timed_parts() as parts:
        threads = [threading.Thread(target=client, args=(todo[number::clients],)) for number in range(clients)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
    if failed:
        raise failed[0]
    row = {"clients": clients, "requests": len(todo), "tokens": tokens, "seconds": round(seconds, 3)}
    row |= {"tokens_per_second": round(len(todo) * tokens / seconds, 1)}
    row |= {"first_token_ms": round(statistics.median(firsts), 1)}
    return row | {"parts": {name: [int(calls), round(spent, 3)] for name, (calls, spent) in parts.items()}}


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
        most = min(500, model.config.vocab_size)
        lengths = torch.randint(120, 250, (192,)).tolist()
        texts = [torch.randint(10, most, (length,)).tolist() for length in lengths]
        fastspec.patch(model, eagle3=make_head(model, args.draft_vocab))
    model.generation_config.eos_token_id = None
    return model, texts


def of_tree(model: Any, texts: Sequence[Sequence[int]], rows: int, tree: str, args: argparse.Namespace) -> dict:
    """The row of one tree in one number of rows."""
    assistant: Any = "autoregressive" if tree == "plain" else tree_of(tree)
    inputs = padded([texts[number % len(texts)] for number in range(args.times * rows)], model.device)
    given = {**inputs, "do_sample": False, "assistant": fastspec.ContinuousBatch(assistant, rows)}
    count, seconds = args.times * rows, []
    model.generate(**given, max_new_tokens=max(2, args.tokens // 8))
    for _ in range(args.repeats):
        begun = time.perf_counter()
        model.generate(**given, max_new_tokens=args.tokens)
        seconds.append(time.perf_counter() - begun)
    stats, best = fastspec.report(model).calls[-1], min(seconds)
    row = {"rows": rows, "tree": tree, "prompts": count, "tokens": args.tokens}
    row |= {"tokens_per_second": round(count * args.tokens / best, 1), "seconds": [round(each, 4) for each in seconds]}
    row |= {"acceptance_length": round(stats.acceptance_length, 3), "rounds": stats.rounds}
    return row | {"round_ms": round(1e3 * (best - stats.phases["prefill"]) / stats.rounds, 3)}


def loads(model: Any, texts: Sequence[Sequence[int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all loads of one batch."""
    assistant: Any = args.assistant if args.tree is None else tree_of(args.tree)
    with fastspec.continuous(model, assistant, rows=args.rows[0], max_length=2048, prefix_caching=False) as batch:
        batch.warmup()
        load(batch, texts, max(args.clients), max(1, args.tokens // 4))
        for chunk in args.chunks * args.repeats:
            batch.chunk = chunk
            for each in batch._widths.made.values():
                each.chunk = chunk
            for clients in args.clients:
                row = {"assistant": args.assistant, "tree": args.tree, "rows": args.rows[0], "chunk": chunk}
                yield row | load(batch, texts, clients, args.tokens)


def conversation(batch: Any, vocabulary: int, args: argparse.Namespace) -> list[tuple[int, int, float]]:
    """Tokens of the prompt, those of them that were not read, and milliseconds to the first token, of every turn."""
    text, found = torch.randint(10, vocabulary, (0,)), []
    for _ in range(args.turns):
        text = torch.cat((text, torch.randint(10, vocabulary, (args.asked,))))
        streamer, mask = FirstTokens(), torch.ones_like(text)[None]
        options = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
        future = batch.submit(text, **options, streamer=streamer)
        answer = future.result()[0].cpu()
        found.append((len(text), future.cached_tokens, 1e3 * sum(streamer.seconds[:2])))
        text = answer
    return found


def of_turns(model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the turns of conversations, with prefix caching and without."""
    assistant: Any = args.assistant if args.tree is None else tree_of(args.tree)
    longest, vocabulary = args.turns * (args.asked + args.tokens), min(500, model.config.vocab_size)
    for caching in (True, False):
        with fastspec.continuous(
            model, assistant, rows=args.rows[0], max_length=longest, prefix_caching=caching
        ) as batch:
            each = [conversation(batch, vocabulary, args) for _ in range(1 + args.repeats)][1:]
        for turn, same in enumerate(zip(*each, strict=True), 1):
            row = {"assistant": args.assistant, "rows": args.rows[0], "prefix_caching": caching, "turn": turn}
            row |= {"prompt_tokens": same[0][0], "cached_tokens": same[0][1], "tokens": args.tokens}
            yield row | {"first_token_ms": round(statistics.median(spent for *_, spent in same), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", help="of eagle3; by default the one of the model's name")
    parser.add_argument("--prompts", nargs="+", default=[], help="jsonl files")
    parser.add_argument("--each", type=int, default=64, help="prompts of a file at most")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights, instead of --model and --prompts")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--assistant", default="autoregressive")
    parser.add_argument("--tree", help="total_tokens,depth,top_k of eagle3 under load, instead of the default")
    parser.add_argument("--trees", nargs="+", default=[], help="measure these trees instead of loads")
    parser.add_argument("--turns", type=int, help="measure the turns of a conversation instead of loads")
    parser.add_argument("--asked", type=int, default=200, help="tokens that a turn asks")
    parser.add_argument("--rows", type=int, nargs="+", default=[32], help="a batch's; of trees each of these")
    parser.add_argument("--times", type=int, default=3, help="prompts for a row of a tree")
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--chunks", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.shape is None and not args.prompts:
        parser.error("name --prompts, or a --shape")
    model, texts = made(args)
    shared = {"model": args.shape or args.model, **place(model.device, model.dtype)}
    trees = (of_tree(model, texts, rows, tree, args) for rows in args.rows for tree in args.trees)
    others = loads(model, texts, args) if args.turns is None else of_turns(model, args)
    for row in trees if args.trees else others:
        write(args.out, shared | row, list(row))


if __name__ == "__main__":
    main()
