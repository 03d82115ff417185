"""Acceptance length of a head and equality with plain `generate`, over prompt files, one row of JSON per file.

    python benchmarks/acceptance.py --prompts mt_bench.jsonl gsm8k.jsonl --batch 40 --tokens 256 --dtype float32 --out rows.jsonl

A prompt file has `prompt` or `turns` (the first is asked) in each row. Every batch is answered greedily by transformers' own generate and
by `eagle3`, and compared token by token. Where an answer differs, the row says how close the two tokens were at the first difference: the
gap of their logits in one forward pass over the common text, in the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.training.data import encode_prompts, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--prompts", nargs="+", required=True, type=Path, help="jsonl files")
    parser.add_argument("--each", type=int, default=80, help="prompts to take from each file")
    parser.add_argument("--longest", type=int, default=1400, help="leave out prompts of more tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tree", default="60,7,10", help="total_tokens,depth,top_k")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-plain", action="store_true", help="leave out transformers' generate and the comparison")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device, getattr(torch, options.dtype))
    nodes, depth, top_k = map(int, options.tree.split(","))
    assistant = fastspec.Eagle3(total_tokens=nodes, depth=depth, top_k=top_k)
    fastspec.patch(model, eagle3=options.head)
    for path in options.prompts:
        prompts = encode_prompts(tokenizer, read_prompts(path))
        prompts = [prompt for prompt in prompts if len(prompt) <= options.longest][: options.each]
        row = {
            "prompts": path.stem, "count": len(prompts), "batch": options.batch, "tree": [nodes, depth, top_k],
            "max_new_tokens": options.tokens, **on_file(model, prompts, assistant, options),
            "dtype": options.dtype, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def on_file(model: Any, prompts: list[list[int]], assistant: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Acceptance, speed and equality over one file."""
    pad = model.generation_config.pad_token_id or 0
    seconds, emitted, passes = {"transformers": 0.0, "eagle3": 0.0}, 0, 0
    tokens = {"transformers": 0, "eagle3": 0}
    gaps: list[float] = []
    for start in range(0, len(prompts), options.batch):
        part = prompts[start : start + options.batch]
        answers: dict[str, list[list[int]]] = {}
        for name, chosen in (("transformers", None), ("eagle3", assistant))[int(options.no_plain) :]:
            began = time.perf_counter()
            answers[name] = generate(model, part, chosen, options.tokens, pad)
            seconds[name] += time.perf_counter() - began
            tokens[name] += sum(map(len, answers[name]))
        last = fastspec.report(model).last
        emitted, passes = emitted + last.round_tokens, passes + last.row_rounds
        if not options.no_plain:
            both = zip(part, answers["transformers"], answers["eagle3"], strict=True)
            gaps += [gap(model, prompt, plain, ours) for prompt, plain, ours in both if plain != ours]
    row: dict[str, Any] = {
        "acceptance_length": round(emitted / passes, 3),
        "tokens_per_second": round(tokens["eagle3"] / seconds["eagle3"], 1),
    }
    if not options.no_plain:
        row["transformers_tokens_per_second"] = round(tokens["transformers"] / seconds["transformers"], 1)
        row["identical"] = len(prompts) - len(gaps)
        row["logit_gap_where_different"] = {"median": round(sorted(gaps)[len(gaps) // 2], 6), "max": round(max(gaps), 6)} if gaps else None
    return row


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
