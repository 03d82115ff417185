"""The adaptive cascade, request by request: what reuse of the earlier stage's answer saves, and that each stage says
what it alone says.

    python benchmarks/cascade.py --stage small=smollm2-135m-instruct --head small=smollm2-135m-instruct --model large=qwen.gguf \\
        --predictor p.safetensors --answers answers.jsonl --prompts gsm8k.jsonl --device cuda --out rows.jsonl

Held-out items go through the cascade one at a time at one price, with the earlier stage's answer verified and with
every stage from scratch ("reuse" and "scratch", in turn, so that drift of the machine falls on both), and a row is
written of each way, and of the difference.
"""  # noqa: E501

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import parser_of, write

from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.patches.cascade.loop import AdaptiveCascade
from fastspec.programs.cli.cascade import models_of
from fastspec.programs.training.cascade import held_out, stops
from fastspec.programs.training.cascade_answers import Item, encode, place, read_items

COUNTS = ("handed_tokens", "kept_tokens", "new_tokens")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stage", action="append", required=True)
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--model", required=True)
    parser.add_argument("--predictor", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--items", type=int, default=20, help="held-out items of each set")
    parser.add_argument("--price", type=float, help="ms a bad answer; else that at which half of the items go on")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    models, tokenizer = models_of(given.stage, given.model, given.head, given.device, given.dtype)
    predictor = Predictor.load(given.predictor)
    table = records.table(records.read(given.answers), predictor.stages, "held-out")
    items: list[Item] = []
    for path in given.prompts:
        found = [item for item in read_items(path) if item.name in set(table.ids)]
        items += random.Random(given.seed).sample(found, min(given.items, len(found)))
    config = replace(models.config, mode="adaptive", predictor=predictor)
    models.rates[None] = predictor.rates
    price = given.price if given.price is not None else balanced(models, config, table)
    priced = replace(config, price=price)
    ways = {name: AdaptiveCascade(models, priced, reuse=name == "reuse") for name in ("reuse", "scratch")}
    # once untimed: what a prompt needs is compiled and captured then
    runs = [run(models, tokenizer, item, ways, given.tokens) for item in [*items, *items]][len(items) :]
    for row in rows(items, runs, price, given):
        write(given.out, {**row, **place(models.large)}, list(row))


def balanced(models: Any, config: Any, table: records.Table) -> float:
    """The price at which half of the held-out items go beyond stage 0."""
    solver, scored, low, high = models.solver(config, []), held_out(config.predictor, table), 1.0, 1e7
    for _ in range(40):
        middle = (low * high) ** 0.5
        going_on = float((stops(solver, scored, middle) > 0).double().mean())
        low, high = (middle, high) if going_on < 0.5 else (low, middle)
    return high


def run(models: Any, tokenizer: Any, item: Item, ways: dict[str, AdaptiveCascade], tokens: int) -> dict[str, Any]:
    """One request both ways -> their explanations and sequences."""
    ids = torch.tensor([encode(tokenizer, item)], device=models.large.device)
    options = {"do_sample": False, "max_new_tokens": tokens, "return_dict_in_generate": True}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        torch.cuda.synchronize() if ids.is_cuda else None
        out = models.large.generate(ids, attention_mask=torch.ones_like(ids), assistant=way, **options)
        found[name] = out.fastspec.explanations[0], out.sequences.tolist(), 1000 * out.fastspec.seconds
    return found


def rows(items: list[Any], runs: list[dict[str, Any]], price: float, given: Any) -> list[dict[str, Any]]:
    """A row of all requests, of those that went on, and of each set."""
    found = []
    for name in ("all", *sorted({item.set for item in items})):
        mine = [each for item, each in zip(items, runs, strict=True) if name in ("all", item.set)]
        on = [each for each in mine if 0 < each["reuse"][0].stage == each["scratch"][0].stage]
        times = {way: [each[way][2] for each in on] for way in ("reuse", "scratch")}
        ratios = [scratch / reuse for reuse, scratch in zip(*times.values(), strict=True)]
        last = [each["reuse"][0].visits[-1] for each in on]
        row = {"kind": "reuse", "set": name, "price": price, "requests": len(mine), "went_on": len(on)}
        row |= {"seed": given.seed, "reuse_ms": sum(times["reuse"]), "scratch_ms": sum(times["scratch"])}
        row["median_ratio"] = statistics.median(ratios) if ratios else None
        row |= {count: sum(getattr(visit, count) for visit in last) for count in COUNTS}
        found.append(row | {"identical": sum(each["reuse"][1] == each["scratch"][1] for each in on)})
    return found


if __name__ == "__main__":
    main()
