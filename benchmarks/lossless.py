"""Sampled texts of every assistant against the unpatched model's exact law: chi-square per position, on a real model.

    python benchmarks/lossless.py --assistants eagle3 nasd --texts 50000 --out rows.jsonl

The law of the first token of one prompt is computed in one forward pass of the model, that of the second by one pass for every first token
that a text began with (plain passes, which a patch does not change); both are processed by transformers' own processors: temperature,
top-k, top-p, min-p and repetition penalty.
Texts are drawn in batches, each under its own seed. For each position the tokens are compared with their law by Pearson's chi-square:
the second given the first, summed over the firsts. Tokens expected fewer than five times are taken together. Significance: 0.001 for
each test, so one right assistant in five hundred fails one of two; a token of probability 0 fails at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

import fastspec
from fastspec.demo import encode
from fastspec.models import SMOLLM2, load_model

OPTIONS = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
SIGNIFICANCE = 0.001
PROMPT = "Name a colour, an animal and a city."
ASSISTANTS = {
    "autoregressive": fastspec.Autoregressive(),
    "eagle3": fastspec.Eagle3(total_tokens=6, depth=1, top_k=4),
    "nasd": fastspec.Nasd(),
    "speculative, early exit, drawn": fastspec.Speculative(early_exit=24, gamma=1),
    "speculative, early exit, branches": fastspec.Speculative(early_exit=24, gamma=1, branches=4),
}


def processors() -> LogitsProcessorList:
    """What transformers makes of OPTIONS, in its order."""
    return LogitsProcessorList([
        lp.RepetitionPenaltyLogitsProcessor(OPTIONS["repetition_penalty"]), lp.TemperatureLogitsWarper(OPTIONS["temperature"]),
        lp.TopKLogitsWarper(int(OPTIONS["top_k"])), lp.TopPLogitsWarper(OPTIONS["top_p"]), lp.MinPLogitsWarper(OPTIONS["min_p"]),
    ])  # fmt: skip


@torch.no_grad()
def law(model: Any, texts: Tensor) -> Tensor:
    """The processed distribution of what follows texts [R, T] -> [R, V] float64."""
    rows = [processors()(part, model(part).logits[:, -1].float()).double().softmax(-1) for part in texts.split(32)]
    return torch.cat(rows)


def draw(model: Any, inputs: dict[str, Tensor], assistant: Any, count: int, batch: int, seed: int) -> list[tuple[int, int]]:
    """`count` continuations of two tokens."""
    texts: list[tuple[int, int]] = []
    while len(texts) < count:
        torch.manual_seed(seed + len(texts))
        size = min(batch, count - len(texts))
        out = model.generate(
            **inputs, do_sample=True, num_return_sequences=size, max_new_tokens=2, min_new_tokens=0, eos_token_id=NEVER, pad_token_id=0,
            assistant=assistant, **OPTIONS,
        )  # fmt: skip
        texts += map(tuple, out[:, -2:].tolist())
    return texts


NEVER = 10**6  # no text ends early: every one has two tokens


def chi_square(seen: Counter[int], chances: Tensor, total: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite for a token of probability 0."""
    expected = chances * total
    if any(expected[token] == 0 for token in seen):
        return float("inf"), 1
    often = torch.nonzero(expected >= 5)[:, 0].tolist()
    cells = [(seen[token], float(expected[token])) for token in often]
    rest = total - sum(want for _, want in cells)
    if rest >= 5:
        cells.append((total - sum(have for have, _ in cells), rest))
    return sum((have - want) ** 2 / want for have, want in cells), max(0, len(cells) - 1)


def p_value(statistic: float, freedom: int) -> float:
    """The chance of a statistic at least as large."""
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)))


def judge(model: Any, ids: Tensor, texts: list[tuple[int, int]], first: Tensor, second: dict[int, Tensor]) -> dict[str, Any]:
    """Both positions of some texts against their law; `second` keeps the laws of the second token that are known."""
    firsts = Counter(a for a, _ in texts)
    new = [token for token in firsts if token not in second]
    if new:
        grown = torch.cat((ids.expand(len(new), -1), torch.tensor(new, device=ids.device)[:, None]), 1)
        second |= zip(new, law(model, grown).cpu(), strict=True)
    one = chi_square(firsts, first, len(texts))
    parts = [chi_square(Counter(b for a, b in texts if a == token), second[token], count) for token, count in firsts.items()]
    two = sum(value for value, _ in parts), sum(freedom for _, freedom in parts)
    return {"positions": [{"chi_square": round(v, 2), "freedom": f, "p": p_value(v, f)} for v, f in (one, two)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--assistants", nargs="+", default=list(ASSISTANTS), choices=list(ASSISTANTS))
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device, torch.float32)
    inputs = encode(tokenizer, PROMPT, device)
    first, second = law(model, inputs["input_ids"])[0].cpu(), dict[int, Tensor]()
    fastspec.patch(model, eagle3=options.head)
    failed = False
    for name in options.assistants:
        began = time.perf_counter()
        texts = draw(model, inputs, ASSISTANTS[name], options.texts, options.batch, options.seed)
        last = fastspec.report(model).calls
        mine = [call for call in last if call.assistant == last[-1].assistant]
        row = {
            "assistant": name, "texts": len(texts), "options": OPTIONS, "seed": options.seed, "batch": options.batch,
            "significance": SIGNIFICANCE,
            **judge(model, inputs["input_ids"], texts, first, second), "drafts_accepted": sum(c.accepted for c in mine),
            "rounds": sum(c.row_rounds for c in mine), "seconds": round(time.perf_counter() - began, 1),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__,
        }  # fmt: skip
        failed |= any(position["p"] < SIGNIFICANCE for position in row["positions"])
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
