"""A long prompt on a model of full size: seconds of the prefill, peak memory beside what weights and cache need, and the round after it.

    python benchmarks/long_prompt.py --shape llama-8b --prompts 8192 32768 131008 --out rows.jsonl

Weights are random. Every prompt length is one call of so many new tokens, after a call on the shortest prompt that compiles, a second
call for the time of a round, in which nothing is captured any more (rows of earlier versions are of the first), and a third whose prefill
finds its graphs (`prefill_again_s`); transformers' own generate answers those of up to --peer-most tokens in the same run.
`keys_and_values_mib` is what the layers can see of the text at its end. `--parts 512 1024 2048` measures all of it with prompts that are
read in parts of so many tokens, or of 512 where layers see windows; by default those that fastspec takes of one row there. The rows say
which (`part`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, kept_bytes, make_head, make_model, timed

import fastspec
from fastspec.generation import prompt_parts
from fastspec.programs.bench.device import environment


def call(model: Any, prompt: int, tokens: int, assistant: str | None) -> dict[str, Any]:
    """One call on a random prompt: its seconds and its peak of allocated memory above what was there before it."""
    ids = torch.randint(10, model.config.vocab_size, (1, prompt), device=model.device)
    extra = {} if assistant is None else {"assistant": assistant}
    cuda = model.device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens, **extra}
    seconds = timed(lambda: model.generate(ids, **options))
    row: dict[str, Any] = {"prompt": prompt, "method": assistant or "transformers", "new_tokens": tokens, "seconds": round(seconds, 3)}
    if cuda:
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    if assistant is not None:
        last = fastspec.report(model).last
        phases = dict(last.phases)
        prefill = phases.pop("prefill")
        row |= {"prefill_s": round(prefill, 3), "rounds": last.rounds, "round_ms": round(1e3 * sum(phases.values()) / last.rounds, 3)}
    row["keys_and_values_mib"] = round(kept_bytes(model, prompt + tokens, 1) / 2**20)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[8192, 32768, 131008])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--methods", nargs="+", default=["autoregressive", "eagle3"], choices=["autoregressive", "eagle3"])
    parser.add_argument("--peer-most", type=int, default=32768, help="longest prompt for transformers' own generate; 0: none")
    parser.add_argument("--parts", nargs="+", type=int, help="tokens of a prompt that are read at once")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model(args.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    shared = {"shape": args.shape, "weights_mib": round(sum(p.nbytes for p in model.parameters()) / 2**20), **environment(model)}

    def write(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(shared | row) + "\n")

    prompts = sorted(args.prompts)
    asked = [prompt for prompt in prompts if prompt <= args.peer_most]
    for prompt in asked[:1]:
        call(model, prompt, args.tokens, None)  # compiles
    for prompt in asked:
        write(call(model, prompt, args.tokens, None))
    head = make_head(model, 32000)
    narrow = prompt_parts.NARROW
    for part in args.parts or [prompt_parts.widest_part(1, captures=device == "cuda")]:
        prompt_parts.NARROW, prompt_parts.WIDE = min(part, narrow) if device == "cuda" else part, part
        with fastspec.patched(model, eagle3=head):
            for method in args.methods:
                call(model, prompts[0], args.tokens, method)
                for prompt in prompts:
                    row, again = (call(model, prompt, args.tokens, method) for _ in range(2))
                    last = call(model, prompt, args.tokens, method)
                    write(row | {"part": part, "prefill_again_s": last["prefill_s"], "round_ms": again["round_ms"]})


if __name__ == "__main__":
    main()
