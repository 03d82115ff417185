"""Answers and speed under `patch(exact=True)` beside the fast kernels: how many equal those of `autoregressive`.

    python benchmarks/exact.py mt_bench.jsonl --prompts 40 --out rows.jsonl

Greedy, SmolLM2-135M-Instruct with its EAGLE-3 head, or another model; a row for each kernels, dtype, assistant and
batch: answers equal to those of `autoregressive`, one prompt at a time, by the same kernels; where the others first
differ (the median), new tokens a second, after two batches that compile, and the acceptance length of all calls.
`oracle` drafts as oracle.py does, `speculative` with all layers but two; `known` is `nasd` whose n-grams have read the
answers before, `open` `nasd` in a ContinuousBatch.
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


def answers(model: Any, texts: list[list[int]], assistant: Any, batch: int, length: int) -> tuple[Any, float, float]:
    """The new tokens of every text, up to the end token, the seconds of all calls, and their acceptance length."""
    found, began, tokens, rounds = [], time.perf_counter(), 0, 0
    if assistant == "open":
        with fastspec.continuous(model, "nasd", batch) as held:
            given = [held.submit(torch.tensor(text), max_new_tokens=length, do_sample=False) for text in texts]
            found = [each.result()[0, len(text) :].tolist() for each, text in zip(given, texts, strict=True)]
            return found, time.perf_counter() - began, held.stats.acceptance_length
    for first in range(0, len(texts), batch):
        found += generate(model, texts[first : first + batch], assistant, length, {"do_sample": False})
        last = fastspec.report(model).last
        tokens, rounds = tokens + last.round_tokens, rounds + last.row_rounds
    return found, time.perf_counter() - began, tokens / max(1, rounds)


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
    device, (model, tokenizer) = device_here()[0], load_model(asked.model)
    texts = {path.stem: encode_prompts(tokenizer, read_prompts(path)[: asked.prompts]) for path in asked.prompts_files}
    for dtype, exact in product(asked.dtypes, [each == "exact" for each in asked.kernels]):
        model = model.to(device, getattr(torch, dtype))
        head = SMOLLM2 if asked.model == SMOLLM2 else make_head(model, 32000)
        with fastspec.patched(model, eagle3=head, exact=exact):
            for name, rows in texts.items():
                plain = answers(model, rows, "autoregressive", 1, asked.new)[0]
                oracle = Oracle(answers=dict(zip(map(tuple, rows), plain, strict=True)))
                made_of: Row = {"known": fastspec.Nasd(storage=fastspec.NgramStorage())}
                made_of |= {"oracle": oracle.decoding(fastspec.Eagle3(), model)}
                made_of["speculative"] = fastspec.Speculative(gamma=3, early_exit=model.config.num_hidden_layers - 2)
                for assistant, batch in product(asked.assistants, asked.batches):
                    made = made_of.get(assistant, assistant)
                    answers(model, rows if assistant == "known" else rows[: 2 * batch], made, batch, asked.new)
                    said, seconds, acceptance = answers(model, rows, made, batch, asked.new)
                    apart = [first_difference(a, b) for a, b in zip(said, plain, strict=True) if a != b]
                    row: Row = {"exact": exact, "model": asked.model, "prompts": name, "assistant": assistant}
                    row |= {"batch": batch, "answers": len(plain), "equal": len(plain) - len(apart)}
                    row["first_difference"] = statistics.median(apart) if apart else None
                    row["tokens_per_second"] = round(sum(map(len, said)) / seconds, 1)
                    row["acceptance"] = round(acceptance, 2)
                    write(asked.out, row | place(device, dtype), [*row, "dtype"])


if __name__ == "__main__":
    main()
