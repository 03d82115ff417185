"""An open batch under load without a server: so many clients, each with one prompt at a time, and chunks of prompts of several sizes.

    python benchmarks/open_batch.py --prompts humaneval.jsonl gsm8k.jsonl mt_bench.jsonl --assistant eagle3 --out rows.jsonl
    python benchmarks/open_batch.py --shape qwen2-1.5b --out rows.jsonl       # random weights and prompts

Every load is six prompts a client, each with `--tokens` new tokens; no end token ends an answer. Chunks take turns, `--repeats` times, in
one batch whose rounds were captured before. `first_token_ms` is the median from `submit` to the first token at the streamer. `parts` are
calls and seconds of the batch's own thread: `admit`, reading prompts; `wait`, for rounds that were launched ahead, and `run`, for those
that were not; `take`, handing tokens out; all of these are within `turn`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, make_model  # the script beside this one

import fastspec
from fastspec.generation.engine import rounds, schedule
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.bench.device import device_name, versions
from fastspec.programs.training.data import encode_prompts, read_prompts

EACH = 6
PARTS = (
    ("admit", rounds.Rounds, "_admit"), ("turn", rounds.Rounds, "turn"), ("wait", schedule.InFlightRound, "wait"),
    ("run", schedule.WholeGraph, "run"), ("take", rounds, "take"),
)  # fmt: skip


class First:
    """A streamer that notes when the first token comes."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the prompt was the first
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


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

    former = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in PARTS]
    for (name, _, _), (owner, attribute, run) in zip(PARTS, former, strict=True):
        setattr(owner, attribute, timed(name, run))
    try:
        yield spent
    finally:
        for owner, attribute, run in former:
            setattr(owner, attribute, run)


def load(batch: Any, prompts: Sequence[torch.Tensor], clients: int, tokens: int) -> dict[str, Any]:
    """The row of one load."""
    todo = [prompts[place % len(prompts)] for place in range(EACH * clients)]
    firsts: list[float] = []
    failed: list[BaseException] = []

    def client(mine: Sequence[torch.Tensor]) -> None:
        try:
            for ids in mine:
                streamer, asked = First(), time.perf_counter()
                batch.submit(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, streamer=streamer).result()
                firsts.append(1e3 * (streamer.at - asked))
        except BaseException as error:
            failed.append(error)

    with timed_parts() as parts:
        threads = [threading.Thread(target=client, args=(todo[place::clients],)) for place in range(clients)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
    if failed:
        raise failed[0]
    return {
        "clients": clients, "requests": len(todo), "tokens": tokens, "seconds": round(seconds, 3),
        "tokens_per_second": round(len(todo) * tokens / seconds, 1), "first_token_ms": round(statistics.median(firsts), 1),
        "parts": {name: [int(calls), round(spent, 3)] for name, (calls, spent) in parts.items()},
    }  # fmt: skip


def made(args: argparse.Namespace, device: str) -> tuple[Any, list[torch.Tensor]]:
    """(the patched model, prompts)."""
    if args.shape is None:
        model, tokenizer = load_model(args.model, device)
        rows = [row for path in args.prompts for row in read_prompts(path)]
        fastspec.patch(model, eagle3=args.head or args.model)
        model.generation_config.eos_token_id = None
        return model, [torch.tensor([ids]) for ids in encode_prompts(tokenizer, rows)]
    torch.manual_seed(0)
    model = make_model(args.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    model.generation_config.eos_token_id = None
    lengths = torch.randint(120, 250, (EACH * max(args.clients),)).tolist()
    return fastspec.patch(model), [torch.randint(10, 500, (1, length)) for length in lengths]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", help="of eagle3; by default the one that ships for the model")
    parser.add_argument("--prompts", nargs="+", default=[], help="jsonl files")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights, in place of --model and --prompts")
    parser.add_argument("--assistant", default="autoregressive")
    parser.add_argument("--tree", help="total_tokens,depth,top_k of eagle3, in place of the default")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--chunks", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.shape is None and not args.prompts:
        parser.error("name --prompts, or a --shape")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, prompts = made(args, device)
    assistant: Any = args.assistant
    if args.tree is not None:
        assistant = fastspec.Eagle3(**dict(zip(("total_tokens", "depth", "top_k"), map(int, args.tree.split(",")), strict=True)))
    shared = {"model": args.shape or args.model, "assistant": args.assistant, "tree": args.tree, "rows": args.rows}
    shared |= {"device": device_name(model.device), "dtype": str(model.dtype).removeprefix("torch."), **versions()}
    with fastspec.continuous(model, assistant, rows=args.rows, max_length=2048) as batch:
        batch.warmup()
        load(batch, prompts, max(args.clients), max(1, args.tokens // 4))
        for _ in range(args.repeats):
            for chunk in args.chunks:
                batch.chunk = chunk
                for each in batch._widths.made.values():
                    each.chunk = chunk
                for clients in args.clients:
                    row = {"chunk": chunk, **load(batch, prompts, clients, args.tokens)}
                    print(json.dumps(row), flush=True)
                    if args.out is not None:
                        with args.out.open("a", encoding="utf-8") as file:
                            file.write(json.dumps({**shared, **row}) + "\n")


if __name__ == "__main__":
    main()
