"""Answers and speed under `patch(exact=True)` beside the fast kernels: how many equal those of `autoregressive`.

    python benchmarks/exact.py mt_bench.jsonl --prompts 40 --out rows.jsonl

Greedy, SmolLM2-135M-Instruct with its EAGLE-3 head, or another model; a row for each kernels, dtype, assistant and
batch: answers equal to those of `autoregressive`, one prompt at a time, by the same kernels; where the others first
differ (the median), new tokens a second, after two batches that compile, and the acceptance length of the last call.
`oracle` drafts by a head with random weights, and then as oracle.py does; `open` is `nasd` in a ContinuousBatch.
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
from full_size import make_head
from oracle import Oracle

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.compare import first_difference
from fastspec.programs.training.data import encode_prompts, read_prompts


def answers(model: Any, texts: list[list[int]], assistant: Any, batch: int, length: int) -> tuple[Any, float]:
    """The new tokens of every text, up to the end token, and the seconds of all calls."""
    found, began = [], time.perf_counter()
    if assistant == "open":
        with fastspec.continuous(model, "nasd", batch) as held:
            given = [held.submit(torch.tensor(text), max_new_tokens=length, do_sample=False) for text in texts]
            found = [each.result()[0, len(text) :].tolist() for each, text in zip(given, texts, strict=True)]
        return found, time.perf_counter() - began
    for first in range(0, len(texts), batch):
        found += generate(model, texts[first : first + batch], assistant, length, {"do_sample": False})
    return found, time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("prompts_files", nargs="+", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--prompts", type=int, default=40, help="of each file")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 40])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--assistants", nargs="+", default=["autoregressive", "eagle3", "nasd", "speculative"])
    parser.add_argument("--kernels", nargs="+", choices=["exact", "fast"], default=["exact", "fast"])
    asked = parser.parse_args(arguments)
    device, _ = device_here()
    model, tokenizer = load_model(asked.model)
    files = {path.stem: read_prompts(path)[: asked.prompts] for path in asked.prompts_files}
    texts = {name: encode_prompts(tokenizer, prompts) for name, prompts in files.items()}
    for dtype, kernels in product(asked.dtypes, asked.kernels):
        model = model.to(device, getattr(torch, dtype))
        head = SMOLLM2 if asked.model == SMOLLM2 else make_head(model, 32000)
        with fastspec.patched(model, eagle3=head, exact=kernels == "exact"):
            for name, rows in texts.items():
                plain = answers(model, rows, "autoregressive", 1, asked.new)[0]
                oracle = Oracle(answers=dict(zip(map(tuple, rows), plain, strict=True)))
                made_of: Row = {"speculative": fastspec.Speculative(early_exit=10)}
                made_of["oracle"] = oracle.decoding(fastspec.Eagle3(), model)
                for assistant, batch in product(asked.assistants, asked.batches):
                    made = made_of.get(assistant, assistant)
                    answers(model, rows[: 2 * batch], made, batch, asked.new)
                    said, seconds = answers(model, rows, made, batch, asked.new)
                    apart = [first_difference(a, b) for a, b in zip(said, plain, strict=True) if a != b]
                    last = fastspec.report(model).last
                    row: Row = {"exact": kernels == "exact", "model": asked.model, "prompts": name}
                    row |= {"assistant": assistant, "batch": batch}
                    row |= {"answers": len(plain), "equal": len(plain) - len(apart)}
                    row["first_difference"] = statistics.median(apart) if apart else None
                    row["tokens_per_second"] = round(sum(map(len, said)) / seconds, 1)
                    row["acceptance"] = None if last is None else round(last.acceptance_length, 2)
                    write(asked.out, row | place(device, dtype), [*row, "dtype"])


if __name__ == "__main__":
    main()
