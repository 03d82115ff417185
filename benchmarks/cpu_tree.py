"""Which tree suits a device: tokens per second of `eagle3` over tree shapes, one row of JSON per shape and prompt.

    python benchmarks/cpu_tree.py --shapes 6,2,3 10,3,4 16,4,4 --out rows.jsonl

A shape is total_tokens,depth,top_k. Each prompt's output is first compared with transformers' own generate, in the same run; a row
whose output differs says so. The last lines printed give the median over prompts, which is what `DEFAULT_TREES` is chosen by.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers

import fastspec
from fastspec.demo import PROMPTS, encode
from fastspec.models import SMOLLM2, load_model

SHAPES = ("4,2,2", "6,3,2", "8,3,3", "10,3,4", "12,4,4", "16,4,4", "24,5,6", "32,5,8", "60,7,10")


def measure(model, inputs, assistant, tokens: int) -> tuple[list[int], float]:
    """New tokens of one greedy call and its seconds."""
    kwargs = {} if assistant is None else {"assistant": assistant}
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return out[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device)
    inputs = [encode(tokenizer, text, device) for _, text in PROMPTS]
    measure(model, inputs[0], None, 8)
    base = [measure(model, batch, None, options.tokens) for batch in inputs]
    where = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    fastspec.patch(model, eagle3=options.head)
    for text in options.shapes:
        nodes, depth, top_k = map(int, text.split(","))
        shape = fastspec.Eagle3(total_tokens=nodes, depth=depth, top_k=top_k)
        measure(model, inputs[0], shape, 8)
        rows = []
        for (category, _), batch, (expected, plain) in zip(PROMPTS, inputs, base, strict=True):
            tokens, seconds = measure(model, batch, shape, options.tokens)
            last = fastspec.report(model).last
            phases = {name: round(1e3 * spent / max(1, last.rounds), 3) for name, spent in last.phases.items() if name != "prefill"}
            rows.append({
                "total_tokens": nodes, "depth": depth, "top_k": top_k, "category": category, "tokens": len(tokens), "seconds": seconds,
                "tokens_per_second": len(tokens) / seconds, "ratio": len(tokens) / seconds / (len(expected) / plain),
                "acceptance_length": last.acceptance_length, "identical": tokens == expected, "ms_per_round": phases, **where,
            })  # fmt: skip
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        middle = {name: statistics.median(row[name] for row in rows) for name in ("tokens_per_second", "ratio", "acceptance_length")}
        cost, same = statistics.median(sum(row["ms_per_round"].values()) for row in rows), all(row["identical"] for row in rows)
        print(
            f"{text:>8}: {middle['tokens_per_second']:6.1f} tokens/s, {middle['ratio']:.2f}x, "
            f"acceptance {middle['acceptance_length']:.2f}, {cost:.1f} ms a round, identical {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
