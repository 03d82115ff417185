"""The adaptive cascade, request by request: what reuse of the earlier stage's answer saves, and that each stage says
what it alone says.

    python benchmarks/cascade.py --stage small=smollm2-135m-instruct --head small=smollm2-135m-instruct --model large=qwen.gguf \\
        --predictor p.safetensors --answers answers.jsonl --prompts gsm8k.jsonl --device cuda --out rows.jsonl

Held-out items go through the cascade one at a time at one price, with the earlier stage's answer verified and with
every stage from scratch ("reuse" and "scratch", in turn, so that drift of the machine falls on both), and a row is
written of each way, and of the difference.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.patches.cascade.loop import AdaptiveCascade
from fastspec.programs.cli.cascade import models_of
from fastspec.programs.training.cascade_answers import Item, encode, place, read_items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", required=True)
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--model", required=True)
    parser.add_argument("--predictor", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--items", type=int, default=20, help="held-out items of each set")
    parser.add_argument(
        "--price", type=float, help="ms a bad answer; by default the one at which half of the items go on"
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    models, tokenizer = models_of(given.stage, given.model, given.head, given.device, given.dtype)
    predictor = Predictor.load(given.predictor)
    table = records.table(records.read(given.answers), predictor.stages, "held-out")
    held = set(table.ids)
    items = [
        each
        for path in given.prompts
        for each in drawn([i for i in read_items(path) if i.name in held], given.items, given.seed)
    ]
    config = replace(models.config, mode="adaptive", predictor=predictor)
    models.rates[None] = predictor.rates
    price = given.price if given.price is not None else balanced(models, config, table)
    ways = {
        name: AdaptiveCascade(models, replace(config, price=price), reuse=name == "reuse")
        for name in ("reuse", "scratch")
    }
    # once untimed: what a prompt needs is compiled and captured then
    runs = [run(models, tokenizer, item, ways, given.tokens) for item in [*items, *items]][len(items) :]
    with given.out.open("a", encoding="utf-8") as file:
        for row in rows(items, runs, price, given):
            file.write(json.dumps({**row, **place(models.large)}) + "\n")
            print({name: value for name, value in row.items() if name != "requests"})


def drawn(items: list[Any], most: int, seed: int) -> list[Any]:
    return random.Random(seed).sample(items, min(most, len(items)))


def balanced(models: Any, config: Any, table: records.Table) -> float:
    """The price at which half of the held-out items go beyond stage 0."""
    from fastspec.programs.training.cascade import held_out, stops

    solver, scored, low, high = models.solver(config, []), held_out(config.predictor, table), 1.0, 1e7
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high) if float((stops(solver, scored, middle) > 0).double().mean()) < 0.5 else (low, middle)
        )
    return high


def run(models: Any, tokenizer: Any, item: Item, ways: dict[str, AdaptiveCascade], tokens: int) -> dict[str, Any]:
    """One request both ways -> their explanations and sequences."""
    ids = torch.tensor([encode(tokenizer, item)], device=models.large.device)
    found: dict[str, Any] = {}
    for name, way in ways.items():
        torch.cuda.synchronize() if ids.is_cuda else None
        out = models.large.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            assistant=way,
            return_dict_in_generate=True,
        )
        found[name] = out.fastspec.explanations[0], out.sequences.tolist(), 1000 * out.fastspec.seconds
    return found


def rows(items: list[Any], runs: list[dict[str, Any]], price: float, given: Any) -> list[dict[str, Any]]:
    """A row of all requests, of those that went on, and of each set."""
    found = []
    for name in ("all", *sorted({item.set for item in items})):
        mine = [each for item, each in zip(items, runs, strict=True) if name in ("all", item.set)]
        on = [
            each for each in mine if each["reuse"][0].stage > 0 and each["scratch"][0].stage == each["reuse"][0].stage
        ]
        times = {way: [each[way][2] for each in on] for way in ("reuse", "scratch")}
        last = [each["reuse"][0].visits[-1] for each in on]
        found.append(
            {
                "kind": "reuse",
                "set": name,
                "price": price,
                "requests": len(mine),
                "went_on": len(on),
                "seed": given.seed,
                "reuse_ms": sum(times["reuse"]),
                "scratch_ms": sum(times["scratch"]),
                "median_ratio": statistics.median([b / a for a, b in zip(*times.values(), strict=True)])
                if on
                else None,
                "handed_tokens": sum(v.handed_tokens for v in last),
                "kept_tokens": sum(v.kept_tokens for v in last),
                "new_tokens": sum(v.new_tokens for v in last),
                "identical": sum(each["reuse"][1] == each["scratch"][1] for each in on),
            }
        )
    return found


if __name__ == "__main__":
    main()
