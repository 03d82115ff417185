"""Acceptance of drafting heads over the target's own answers, by simulation, and the tokens per second that would follow; JSON rows.

    python benchmarks/drafters.py --heads runs/dspark runs/dflash2 smollm2-135m-instruct --prompts mt_bench.jsonl gsm8k.jsonl \\
        --answers runs/answers --dtype bfloat16 --out rows.jsonl
    python benchmarks/drafters.py --heads runs/dspark --prompts mt_bench.jsonl --answers runs/answers --each 4 --tokens 64 --check 2

A prompt file has `prompt` or `turns` (the first is asked) in each row; heads are folders of block heads or of EAGLE-3 heads, or the name of
one that ships. The target answers every prompt greedily (T = 0) and by draws from its distribution (T = 1) with transformers' own generate;
answers are kept in `--answers` and read from there the next time. For each head, file, temperature and way to draft there is one row:

- `chain 4`, `chain 8`: the head's first choices one after another;
- `tree 32`, `tree 60`: so many nodes, root counted, the best by the product of their edges' probabilities; `--width` best nodes of every
  depth are expanded, by as many children each: 16 for block heads, 10 for EAGLE-3, which pays for them. Trees of block heads are as deep
  as a block, EAGLE-3's `--depth`, eight by default;
- `tree 60, marginals`: the same with every slot's own distribution on all of its edges (block heads);
- `chain 8, drawn` (T = 1): tokens drawn from the head's distribution, accepted with min(1, p / q).

T = 0 and T = 1 differ in the text alone for all but the last: picked drafts are accepted where the target's own draw names them, which is
the engine's rule. The last is an expectation given the text, see `drafters_rounds.rounds_of`. `acceptance_length` is tokens over rounds,
bonus counted, the first token of an answer left out, which the prefill gives. `predicted` holds milliseconds and tokens per second
computed from measured parts of rounds (`drafters_time`): no round was timed here.

With --check N the first N prompts of each file are also decoded greedily round by round in plain torch. The answers must be transformers'
and the rounds those of the simulation; the script ends with an error where they are not, so use float32 there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafters_rounds import ANCHORS, Head, Text, Way, decode, rounds_of  # the scripts beside this one
from drafters_time import predicted

from fastspec.bench.device import environment
from fastspec.bench.measure import first_difference
from fastspec.generation.drafters.block.checkpoint import load_block_head
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.assistants.heads import load_head
from fastspec.training.data import encode_prompts, read_prompts
from fastspec.training.regenerate import end_tokens


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--heads", nargs="+", required=True, help="folders, or names of heads that ship")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path, help="jsonl files")
    parser.add_argument("--answers", type=Path, required=True, help="folder that keeps the target's answers")
    parser.add_argument("--each", type=int, default=80, help="prompts to take from each file")
    parser.add_argument("--longest", type=int, default=1400, help="leave out prompts of more tokens")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], choices=(0.0, 1.0))
    parser.add_argument("--batch", type=int, default=40, help="prompts that the target answers at a time")
    parser.add_argument("--width", type=int, default=0, help="nodes of a depth that are expanded; 0: 16, and 10 for EAGLE-3")
    parser.add_argument("--depth", type=int, default=8, help="of EAGLE-3's trees; chains are no longer")
    parser.add_argument("--anchors", type=int, default=ANCHORS, help="positions of a text whose trees grow at once; fewer take less memory")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--check", type=int, default=0, help="prompts of each file to decode round by round as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device, getattr(torch, options.dtype))
    ends = set(end_tokens(model, tokenizer))
    where = environment(model)
    sets = {path.stem: [p for p in encode_prompts(tokenizer, read_prompts(path)) if len(p) <= options.longest] for path in options.prompts}
    heads = {name: opened(name, model) for name in options.heads}
    for name, prompts in sets.items():
        prompts = prompts[: options.each]
        for temperature in options.temperatures:
            answers = answered(model, prompts, temperature, ends, options, name)
            for source, head in heads.items():
                began = time.perf_counter()
                shared = {
                    "head": Path(source).name, "kind": head.config.kind, "prompts": name, "count": len(prompts), "temperature": temperature,
                    "max_new_tokens": options.tokens,
                }  # fmt: skip
                ways = ways_of(head, options.width, options.depth, temperature)
                pairs = list(zip(prompts, answers, strict=True))
                for row in on_texts(model, head, pairs, ways, options.anchors):
                    seconds = round(time.perf_counter() - began, 1)
                    write(shared | row | {"seconds_of_all_ways": seconds} | where, options.out)
                if temperature == 0 and options.check:
                    found = checked(model, head, pairs[: options.check], ways, ends, options.tokens)
                    write(shared | {"way": "check"} | found | where, options.out)


def opened(source: str, model: Any) -> Head:
    """A head on the model's device and in its dtype, bound to it: a block head where config.json says so."""
    config = Path(source) / "config.json"
    if config.is_file() and "dflash_config" in json.loads(config.read_text(encoding="utf-8")):
        head = load_block_head(source).to(model.device, model.dtype)
        head.bind(model.get_input_embeddings(), model.get_output_embeddings())
        return head
    found = load_head(source, model)
    if found.config.kind != "eagle3":
        raise SystemExit(f"{source} is a head for eagle and eagle2: give a folder of a block head or of an EAGLE-3 head")
    return found


def ways_of(head: Head, width: int, eagle_depth: int, temperature: float) -> list[Way]:
    """What is measured of a head; chains no longer than its block, or than EAGLE-3's trees are deep."""
    block = isinstance(head, BlockHead)
    depth = head.config.drafts if isinstance(head, BlockHead) else eagle_depth
    width = width or (16 if block else 10)
    ways = [Way(name=f"chain {n}", depth=min(n, depth)) for n in (4, 8)]
    ways += [Way(name=f"tree {n}", depth=depth, width=width, nodes=n) for n in (32, 60)]
    ways += [Way(name="tree 60, marginals", depth=depth, width=width, nodes=60, by="marginals")] if block else []
    return [*ways, Way(name="chain 8, drawn", depth=min(8, depth), by="draws")] if temperature else ways


def answered(
    model: Any, prompts: list[list[int]], temperature: float, ends: set[int], options: argparse.Namespace, name: str
) -> list[list[int]]:
    """The target's answers, by transformers' generate, each with its end token where it has one; from the folder if they are there."""
    asked = json.dumps([prompts, options.tokens, options.seed, str(model.dtype), options.model])
    asked = hashlib.sha256(asked.encode()).hexdigest()[:12]
    path = options.answers / f"{name}_t{temperature:g}_{asked}.npz"
    if not path.exists():
        options.answers.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        parts = [prompts[at : at + options.batch] for at in range(0, len(prompts), options.batch)]
        found = [row for part in parts for row in generated(model, part, temperature, ends, options.tokens)]
        np.savez_compressed(path, lengths=np.array([len(row) for row in found]), tokens=np.concatenate([np.array(row) for row in found]))
    with np.load(path) as kept:
        return [part.tolist() for part in np.split(kept["tokens"], np.cumsum(kept["lengths"])[:-1])]


def generated(model: Any, prompts: list[list[int]], temperature: float, ends: set[int], tokens: int) -> list[list[int]]:
    """Answers to left-padded prompts, greedy or drawn from the whole distribution at temperature 1."""
    pad, width = model.generation_config.pad_token_id or 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=pad, eos_token_id=sorted(ends), **drawn
    )[:, width:].tolist()  # fmt: skip
    lasts = [next((at for at, token in enumerate(row) if token in ends), len(row) - 1) for row in out]
    return [row[: last + 1] for row, last in zip(out, lasts, strict=True)]


def on_texts(
    model: Any, head: Head, pairs: list[tuple[list[int], list[int]]], ways: list[Way], anchors: int
) -> Iterator[dict[str, Any]]:
    """One row per way over all texts."""
    rounds, tokens = dict.fromkeys((way.name for way in ways), 0.0), dict.fromkeys((way.name for way in ways), 0)
    for prompt, answer in pairs:
        text = Text.read(model, prompt + answer, len(prompt), head.config.taps)
        for name, (count, yielded) in rounds_of(head, text, ways, anchors).items():
            rounds[name] += count
            tokens[name] += yielded
    for way in ways:
        acceptance = tokens[way.name] / rounds[way.name] if rounds[way.name] else 1.0
        yield {
            "way": way.name, "depth": way.depth, "width": way.width, "acceptance_length": round(acceptance, 4),
            "rounds": round(rounds[way.name], 2), "tokens": tokens[way.name],
            "predicted": predicted(head.config, acceptance, way.depth, way.nodes or way.depth + 1),
        }  # fmt: skip


def checked(
    model: Any, head: Head, pairs: list[tuple[list[int], list[int]]], ways: list[Way], ends: set[int], tokens: int
) -> dict[str, Any]:
    """Really decode prompts and compare. Raises RuntimeError for an answer that is not the target's and for other rounds than simulated."""
    counted: dict[str, int] = {}
    for number, (prompt, answer) in enumerate(pairs):
        simulated = rounds_of(head, Text.read(model, prompt + answer, len(prompt), head.config.taps), ways)
        for way in ways:
            found, rounds = decode(model, head, prompt, tokens, ends, way)
            if found != answer:
                at = first_difference(found, answer)
                raise RuntimeError(f"prompt {number}, {way.name}: the decoded answer differs from transformers' at token {at}")
            if rounds != simulated[way.name][0]:
                raise RuntimeError(f"prompt {number}, {way.name}: {rounds} rounds, and {simulated[way.name][0]:g} in the simulation")
            counted[way.name] = counted.get(way.name, 0) + rounds
    return {"checked": len(pairs), "rounds": counted}


def write(row: dict[str, Any], path: Path | None) -> None:
    print(json.dumps(row), flush=True)
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
