"""Acceptance length of a head and equality with plain `generate`, over prompt files, one row of JSON per file and assistant.

    python benchmarks/acceptance.py --prompts mt_bench.jsonl gsm8k.jsonl --batch 40 --tokens 256 --dtype float32 --out rows.jsonl

A prompt file has `prompt` or `turns` (the first is asked) in each row. Every batch is answered greedily by transformers' own generate and
by the assistants, and compared token by token; before that the assistants answer every batch twice with a few tokens, untimed. Where an
answer differs, the row says how close the two tokens were at the first difference: the gap of their logits in one forward pass over the
common text, in the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from drafts import OwnLayers, on  # the scripts beside this one
from lossless import untrained_head

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.training.data import encode_prompts, read_prompts

ASSISTANTS = {
    "autoregressive": fastspec.Autoregressive(),
    "eagle3": fastspec.Eagle3(),
    "eagle2": fastspec.Eagle2(),
    "eagle": fastspec.Eagle1(),
    "nasd": fastspec.Nasd(),
    "nasd, suffix": fastspec.Nasd(storage="suffix"),
    "speculative, early exit": fastspec.Speculative(early_exit=24),
    "speculative, early exit, branches": fastspec.Speculative(early_exit=24, gamma=3, branches=3),
    "speculative, draft model": OwnLayers(fastspec.Speculative(gamma=3), 24),
    "speculative, shared vocabulary": OwnLayers(fastspec.Speculative(gamma=3), 24, renamed=True),
}

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--eagle-head", help="of `eagle` and `eagle2`; random weights without one, whose drafts are mostly wrong")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path, help="jsonl files")
    parser.add_argument("--each", type=int, default=80, help="prompts to take from each file")
    parser.add_argument("--longest", type=int, default=1400, help="leave out prompts of more tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--assistants", nargs="+", default=["eagle3"], choices=list(ASSISTANTS), help="one row each")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tree", default="60,7,10", help="total_tokens,depth,top_k")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-plain", action="store_true", help="leave out transformers' generate and the comparison")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device, getattr(torch, options.dtype))
    nodes, depth, top_k = map(int, options.tree.split(","))
    chosen = {name: ASSISTANTS[name] for name in options.assistants}
    if "eagle3" in chosen:
        chosen["eagle3"] = fastspec.Eagle3(total_tokens=nodes, depth=depth, top_k=top_k)
    eagle = options.eagle_head or untrained_head(model)
    fastspec.patch(model, eagle3=options.head, eagle=eagle, eagle2=eagle)
    chosen = {name: on(assistant, model, tokenizer) for name, assistant in chosen.items()}
    for path in options.prompts:
        prompts = encode_prompts(tokenizer, read_prompts(path))
        prompts = [prompt for prompt in prompts if len(prompt) <= options.longest][: options.each]
        shared = {
            "prompts": path.stem, "count": len(prompts), "batch": options.batch, "max_new_tokens": options.tokens, "dtype": options.dtype,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__,
        }  # fmt: skip
        for row in on_file(model, prompts, chosen, options):
            row = shared | row | ({"tree": [nodes, depth, top_k]} if row["assistant"] == "eagle3" else {})
            row |= {"eagle_head": options.eagle_head} if row["assistant"] in ("eagle", "eagle2") else {}
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def on_file(model: Any, prompts: list[list[int]], chosen: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Acceptance, speed and equality of every assistant over one file."""
    pad = model.generation_config.pad_token_id or 0
    ways = ({} if options.no_plain else {"transformers": None}) | chosen
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    emitted, passes = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    gaps: dict[str, list[float]] = {name: [] for name in chosen}
    parts = [prompts[start : start + options.batch] for start in range(0, len(prompts), options.batch)]
    for assistant in chosen.values():
        for part in (*parts, *parts):  # untimed: the first run of a length compiles, the second captures
            generate(model, part, assistant, min(16, options.tokens), pad)
    for part in parts:
        answers: dict[str, list[list[int]]] = {}
        for name, assistant in ways.items():
            began = time.perf_counter()
            answers[name] = generate(model, part, assistant, options.tokens, pad)
            seconds[name] += time.perf_counter() - began
            tokens[name] += sum(map(len, answers[name]))
            if name in chosen:
                last = fastspec.report(model).last
                emitted[name], passes[name] = emitted[name] + last.round_tokens, passes[name] + last.row_rounds
        for name in () if options.no_plain else chosen:
            both = zip(part, answers["transformers"], answers[name], strict=True)
            gaps[name] += [gap(model, prompt, plain, ours) for prompt, plain, ours in both if plain != ours]
    rows = []
    for name in chosen:
        row: dict[str, Any] = {
            "assistant": name, "acceptance_length": round(emitted[name] / passes[name], 3),
            "tokens_per_second": round(tokens[name] / seconds[name], 1),
        }  # fmt: skip
        if not options.no_plain:
            apart = sorted(gaps[name])
            row["transformers_tokens_per_second"] = round(tokens["transformers"] / seconds["transformers"], 1)
            row["identical"] = len(prompts) - len(apart)
            row["logit_gap_where_different"] = {"median": round(apart[len(apart) // 2], 6), "max": round(apart[-1], 6)} if apart else None
        rows.append(row)
    return rows


def generate(model: Any, prompts: list[list[int]], assistant: Any, tokens: int, pad: int) -> list[list[int]]:
    """Greedy answers to prompts as one left-padded batch, each cut behind its end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    extra = {} if assistant is None else {"assistant": assistant}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, **extra)
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    answers = []
    for row in out[:, width:].tolist():
        end = next((at for at, token in enumerate(row) if token in ends), len(row))
        answers.append(row[: end + 1])
    return answers


@torch.no_grad()
def gap(model: Any, prompt: list[int], plain: list[int], ours: list[int]) -> float:
    """How far apart the logits of the two tokens are where two answers first differ."""
    at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b)
    logits = model(torch.tensor([prompt + plain[:at]], device=model.device)).logits[0, -1].float()
    return abs(float(logits[plain[at]] - logits[ours[at]]))


if __name__ == "__main__":
    main()
