"""Answers and speed under `patch(exact=True)` beside the fast kernels: how many equal those of `autoregressive`.

    python benchmarks/exact.py mt_bench.jsonl --prompts 40 --out rows.jsonl

Greedy, SmolLM2-135M-Instruct with its EAGLE-3 head, one row for each kernels, dtype, assistant and batch: answers equal
to those of `autoregressive`, one prompt at a time, by the same kernels; where the others first differ (the median), new
tokens a second of the second of two runs, and the acceptance length of the last call.
"""

from __future__ import annotations

import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from acceptance import generate
from common import Row, device_here, parser_of, place, write

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.compare import first_difference
from fastspec.programs.training.data import encode_prompts, read_prompts


def answers(
    model: Any, texts: list[list[int]], assistant: Any, batch: int, length: int
) -> tuple[list[list[int]], float]:
    """The new tokens of every text, up to the end token, and the seconds of all calls."""
    found: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(texts), batch):
        found += generate(model, texts[first : first + batch], assistant, length, {"do_sample": False})
    return found, time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    """Time and compare, and write the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("prompts_files", nargs="+", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--prompts", type=int, default=40, help="of each file")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 40])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--assistants", nargs="+", default=["autoregressive", "eagle3", "nasd", "speculative"])
    parser.add_argument("--kernels", nargs="+", choices=["exact", "fast"], default=["exact", "fast"])
    asked = parser.parse_args(arguments)
    device, _ = device_here()
    model, tokenizer = load_model(SMOLLM2)[:2]
    files = {path.stem: read_prompts(path)[: asked.prompts] for path in asked.prompts_files}
    texts = {name: encode_prompts(tokenizer, prompts) for name, prompts in files.items()}
    for dtype, kernels in product(asked.dtypes, asked.kernels):
        model = model.to(device, getattr(torch, dtype))
        with fastspec.patched(model, eagle3=SMOLLM2, exact=kernels == "exact"):
            for name, rows in texts.items():
                plain = answers(model, rows, "autoregressive", 1, asked.new)[0]
                for assistant, batch in product(asked.assistants, asked.batches):
                    made = fastspec.Speculative(early_exit=10) if assistant == "speculative" else assistant
                    answers(model, rows[: 2 * batch], made, batch, asked.new)
                    said, seconds = answers(model, rows, made, batch, asked.new)
                    apart = [first_difference(a, b) for a, b in zip(said, plain, strict=True) if a != b]
                    last = fastspec.report(model).last
                    row: Row = {"exact": kernels == "exact", "model": SMOLLM2, "prompts": name, "assistant": assistant}
                    row |= {"batch": batch, "answers": len(plain), "equal": len(plain) - len(apart)}
                    row["first_difference"] = statistics.median(apart) if apart else None
                    row["tokens_per_second"] = round(sum(map(len, said)) / seconds, 1)
                    row["acceptance"] = None if last is None else round(last.acceptance_length, 2)
                    write(asked.out, row | place(device, dtype), [*row, "dtype"])


if __name__ == "__main__":
    main()
