"""Which tree an EAGLE-3 head should draft in batches of many rows: tokens per second and the time of a round, by rows and tree.

    python benchmarks/batch_trees.py --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --rows 16 32 128 --out rows.jsonl
    python benchmarks/batch_trees.py --shape qwen2-1.5b --rows 16 32 128 --trees plain 32,6,8 8,5,2 --out rows.jsonl

A tree is total_tokens,depth,top_k; `plain` are tokens without drafts. All prompts, `--times` as many as rows, are answered in one call of
`generate` with `ContinuousBatch`; a shorter call before captures, and no end token ends an answer. `tokens_per_second` and `round_ms`, a
call less its prompts over its rounds, are those of the fastest of `--repeats`. A shape has random weights and a random head, whose drafts
are wrong: there the time of a round tells.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, make_head, make_model  # the script beside this one
from torch import Tensor

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.bench.device import device_name, versions
from fastspec.programs.training.data import encode_prompts, read_prompts

LONGEST = 400
"""Tokens of a prompt at most."""
PLAIN = "plain"


def padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(ids, mask) [B, T] of texts, padded on the left."""
    width = max(map(len, texts))
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = torch.tensor(text), 1
    return ids, mask


def made(args: argparse.Namespace, device: str) -> tuple[Any, list[list[int]]]:
    """(the patched model, prompts)."""
    if args.shape is None:
        model, tokenizer = load_model(args.model, device)
        rows = [row for path in args.prompts for row in read_prompts(path)[: args.each]]
        random.Random(0).shuffle(rows)
        texts = [ids for ids in encode_prompts(tokenizer, rows) if len(ids) < LONGEST]
        fastspec.patch(model, eagle3=args.head or args.model)
    else:
        torch.manual_seed(0)
        model = make_model(args.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
        vocabulary = model.config.vocab_size
        texts = [torch.randint(10, min(500, vocabulary), (length,)).tolist() for length in torch.randint(120, 250, (192,)).tolist()]
        fastspec.patch(model, eagle3=make_head(model, args.draft_vocab))
    model.generation_config.eos_token_id = None
    return model, texts


def measured(model: Any, texts: Sequence[Sequence[int]], rows: int, tree: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one tree in one number of rows."""
    assistant: Any = "autoregressive"
    if tree != PLAIN:
        assistant = fastspec.Eagle3(**dict(zip(("total_tokens", "depth", "top_k"), map(int, tree.split(",")), strict=True)))
    ids, mask = padded([texts[place % len(texts)] for place in range(args.times * rows)])
    given = {"attention_mask": mask.to(model.device), "do_sample": False, "assistant": fastspec.ContinuousBatch(assistant, rows)}
    ids, seconds = ids.to(model.device), []
    model.generate(ids, max_new_tokens=max(2, args.tokens // 8), **given)
    for _ in range(args.repeats):
        begun = time.perf_counter()
        model.generate(ids, max_new_tokens=args.tokens, **given)
        seconds.append(time.perf_counter() - begun)
    stats, best = fastspec.report(model).calls[-1], min(seconds)
    return {
        "rows": rows, "tree": tree, "prompts": len(ids), "tokens": args.tokens,
        "tokens_per_second": round(len(ids) * args.tokens / best, 1), "seconds": [round(each, 4) for each in seconds],
        "acceptance_length": round(stats.acceptance_length, 3), "rounds": stats.rounds,
        "round_ms": round(1e3 * (best - stats.phases["prefill"]) / stats.rounds, 3),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", help="by default the one that ships for the model")
    parser.add_argument("--prompts", nargs="+", default=[], help="jsonl files")
    parser.add_argument("--each", type=int, default=64, help="prompts of a file at most")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights, in place of --model and --prompts")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--trees", nargs="+", default=[PLAIN, "32,6,8", "16,5,4", "8,5,2", "4,3,1"])
    parser.add_argument("--times", type=int, default=3, help="prompts for a row")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.shape is None and not args.prompts:
        parser.error("name --prompts, or a --shape")
    model, texts = made(args, "cuda" if torch.cuda.is_available() else "cpu")
    shared = {"model": args.shape or args.model, "device": device_name(model.device)}
    shared |= {"dtype": str(model.dtype).removeprefix("torch."), **versions()}
    for rows in args.rows:
        for tree in args.trees:
            row = measured(model, texts, rows, tree, args)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**shared, **row}) + "\n")


if __name__ == "__main__":
    main()
