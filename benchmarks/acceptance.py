"""Acceptance length and speed of assistants, and equality with plain `generate`: a row per prompt file and assistant.

    python benchmarks/acceptance.py --prompts mt_bench.jsonl gsm8k.jsonl --batch 40 --tokens 256 --dtype float32 --out rows.jsonl
    python benchmarks/acceptance.py --prompts mt_bench.jsonl --no-plain --head one another --tree 60,7,10 60,9,10 --out rows.jsonl
    python benchmarks/acceptance.py --prompts mt_bench.jsonl --temperature 0.6 1 --tree 60,7,10 60,4,10 --dtype bfloat16 --out rows.jsonl

A prompt file has `prompt` or `turns` (the first is asked) in each row. Every batch is answered greedily by
transformers' own generate and by the assistants, and compared token by token; before that the assistants answer every
batch twice with a few tokens, untimed, and transformers the first batch. With --no-end no token ends an answer. With
--rows a call decodes so many of its batch's prompts at a time (`fastspec.ContinuousBatch`). Several heads and trees of
`eagle3` and `mtp` answer a batch one after another, so that a slow spell hits all of them. With --temperature answers are drawn,
with top-k and top-p of the model's generation config unless --top-p names one, and nothing is compared. A row holds

- `tokens_per_second` of all calls, prefill included, and its 20, 50 and 80 % quantiles over the calls;
- `rounds`, summed over the calls, `rows`, those of a round, and `rows_running`, the share that had not ended;
- `answers_sha256` of all answers' tokens in order, to compare two versions of the code; `backend`, the kernels that ran, `head`, the head that drafted, `head_bits`, the bits of its weights, `draft_vocab`, an MTP layer's tokens, and `drafter`, whether in one launch or one per step;
- `differences`: every answer that is not transformers', by prompt (its place among those taken from the file), position
  of the first new token that differs, the two tokens (transformers' first), and the gap of their logits in one forward
  pass over the common text. `near_ties` counts those whose gap is within `rounding_bound`, `other` all else: larger
  gaps, and answers of which one ends where the other goes on (token null, no gap).
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import device_here, parser_of, tree_of, write
from full_size import FUSED
from lossless import OwnLayers, on, untrained_head
from torch import Tensor

import fastspec
from fastspec.generation.stats import Stats
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.hf.ends import end_tokens
from fastspec.programs.bench.methods import twin
from fastspec.programs.bench.report import quantiles
from fastspec.programs.compare import environment, first_difference
from fastspec.programs.texts import padded_inputs, until_end
from fastspec.programs.training.data import encode_prompts, read_prompts

ASSISTANTS = {
    "autoregressive": fastspec.Autoregressive(),
    "eagle3": fastspec.Eagle3(),
    "mtp": fastspec.Mtp(),
    "eagle2": fastspec.Eagle2(),
    "eagle": fastspec.Eagle1(),
    "nasd": fastspec.Nasd(),
    "nasd, suffix": fastspec.Nasd(storage="suffix"),
    "speculative, early exit": fastspec.Speculative(early_exit=24),
    "speculative, early exit, branches": fastspec.Speculative(early_exit=24, gamma=3, branches=3),
    "speculative, draft model": OwnLayers(fastspec.Speculative(gamma=3), 24),
    "speculative, shared vocabulary": OwnLayers(fastspec.Speculative(gamma=3), 24, renamed=True),
}
OF_HEAD, PLAIN = ("eagle3", "mtp"), "transformers"


@dataclass(slots=True)
class Way:
    """Instance of the model, its assistant (None: transformers), and the columns of both."""

    model: Any
    assistant: Any = None
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Calls of one way: seconds, new tokens, and an assistant's statistics."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second of all calls."""
        return round(sum(self.tokens) / sum(self.seconds), 1)

    @property
    def speeds(self) -> list[float]:
        """20, 50 and 80 % quantiles of the calls' tokens per second."""
        speeds = [new / spent for new, spent in zip(self.tokens, self.seconds, strict=True)]
        return [round(value, 1) for value in quantiles(speeds)]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", nargs="+", default=[SMOLLM2], help="of `eagle3` or `mtp`, a row each")
    parser.add_argument("--head-bits", nargs="+", type=int, default=[16], help="of it: 16, 8 or both, a row each")
    parser.add_argument("--draft-vocab", nargs="+", type=int, help="tokens that `mtp` drafts, a row each")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--eagle-head", help="of `eagle` and `eagle2`; else random weights, mostly wrong drafts")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path, help="jsonl files")
    parser.add_argument("--each", type=int, default=80, help="prompts to take from each file")
    parser.add_argument("--longest", type=int, default=1400, help="leave out prompts of more tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rows", type=int, help="prompts of a batch that are decoded at a time; else all")
    parser.add_argument("--assistants", nargs="+", default=["eagle3"], choices=list(ASSISTANTS), help="one row each")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tree", nargs="+", default=["60,7,10"], help="total_tokens,depth,top_k or auto, a row each")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="0: greedy; a row each")
    parser.add_argument("--top-p", type=float, help="of drawn answers; 1 is the whole distribution")
    parser.add_argument("--drafter", default="auto", choices=FUSED, help="fused: one launch for the draft phase")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-plain", action="store_true", help="leave out transformers' generate and the comparison")
    parser.add_argument("--no-end", action="store_true", help="no token ends an answer: all have --tokens tokens")
    options = parser.parse_args(arguments)
    if any(options.temperature) and not options.no_plain:
        parser.error("answers that are drawn are not compared with transformers': give --no-plain with --temperature")

    model, tokenizer = load_model(options.model, device_here()[0], getattr(torch, options.dtype))
    if options.no_end:
        model.generation_config.eos_token_id = None
    chosen = {name: ASSISTANTS[name] for name in options.assistants}
    heads = dict.fromkeys(chosen.keys() & {"eagle", "eagle2"}, options.eagle_head or untrained_head(model))
    read = list(product(options.head, options.head_bits))
    models = [model, *(twin(model) for _ in read[1:])]  # before the patch
    for each, (source, bits) in zip(models, read, strict=True):
        given = heads | {name: source for name in OF_HEAD if name in chosen}
        fastspec.patch(each, backend=options.backend, head_bits=bits, **given)
    where = environment(model) | {"backend": fastspec.report(model).backend}
    ways = {}
    for name, assistant in chosen.items():
        if name in OF_HEAD:
            ways |= ways_of(name, models, options)
        else:
            head = (options.eagle_head or "random weights") if name in heads else None
            ways[name] = Way(model, on(assistant, model, tokenizer), {"assistant": name, "head": head})
    for way in ways.values() if options.rows else ():
        way.assistant = fastspec.ContinuousBatch(way.assistant, options.rows)
    for path in options.prompts:
        prompts = encode_prompts(tokenizer, read_prompts(path))
        prompts = [prompt for prompt in prompts if len(prompt) <= options.longest][: options.each]
        shared = {"prompts": path.stem, "count": len(prompts), "batch": options.batch, "max_new_tokens": options.tokens}
        shared["no_end"] = options.no_end
        for heat in options.temperature:
            drawn = {"temperature": heat, "top_p": options.top_p} if heat else {}
            for name, row in on_file(model, prompts, ways, options, heat).items():
                row = shared | ways[name].said | drawn | row | where
                if row.get("tree") == "auto":
                    row["choices"] = [asdict(choice) for choice in fastspec.report(ways[name].model).trees.values()]
                write(options.out, row)


def ways_of(name: str, models: list[Any], options: argparse.Namespace) -> dict[str, Way]:
    """Every tree with every head and number of drafted tokens, each head on its instance of the model."""
    ways = {}
    fused, heads = FUSED[options.drafter], list(product(options.head, options.head_bits))
    vocabularies = [{"draft_vocab": count} for count in options.draft_vocab or [] if name == "mtp"] or [{}]
    for text, (model, (source, bits)), few in product(options.tree, zip(models, heads, strict=True), vocabularies):
        sizes: Any = "auto" if text == "auto" else [int(size) for size in text.split(",")]
        said = {"assistant": name, "head": source, "head_bits": bits, "tree": sizes, **few}
        said["drafter"] = "fused" if fused else "kernels"
        ways[f"{name} {text} {source} {bits} {few}"] = Way(model, tree_of(text, name, fused=fused, **few), said)
    return ways


def on_file(
    model: Any, prompts: list[list[int]], chosen: dict[str, Way], options: argparse.Namespace, heat: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Acceptance, speed and equality of every way over one file at one temperature, by its name."""
    settings: dict[str, Any] = {"do_sample": bool(heat)} | ({"temperature": heat} if heat else {})
    settings |= {"top_p": options.top_p} if heat and options.top_p is not None else {}
    torch.manual_seed(0)
    ways = ({} if options.no_plain else {PLAIN: Way(model)}) | chosen
    tallies = {name: Tally() for name in ways}
    parts = [prompts[start : start + options.batch] for start in range(0, len(prompts), options.batch)]
    for name, way in ways.items():  # untimed: the first run of a length compiles, the second captures
        for part in parts[:1] if name == PLAIN else (*parts, *parts):
            generate(way.model, part, way.assistant, min(16, options.tokens), settings)
    for number, part in enumerate(parts):
        answers: dict[str, list[list[int]]] = {}
        for name, way in ways.items():
            tally, began = tallies[name], time.perf_counter()
            answers[name] = generate(way.model, part, way.assistant, options.tokens, settings)
            tally.seconds.append(time.perf_counter() - began)
            tally.tokens.append(sum(map(len, answers[name])))
            tally.answers += answers[name]
            if name in chosen:
                tally.stats.append(fastspec.report(way.model).last)
        for name in () if options.no_plain else chosen:
            both = zip(part, answers[PLAIN], answers[name], strict=True)
            tallies[name].differences += [
                {"prompt": number * options.batch + place} | difference(model, prompt, plain, ours)
                for place, (prompt, plain, ours) in enumerate(both)
                if plain != ours
            ]
    return {name: row_of(tallies[name], tallies.get(PLAIN), len(prompts)) for name, way in chosen.items()}


def row_of(mine: Tally, plain: Tally | None, count: int) -> dict[str, Any]:
    """The figures of an assistant, beside transformers' where that was asked."""
    running, room = sum(each.row_rounds for each in mine.stats), sum(each.rows * each.rounds for each in mine.stats)
    row: dict[str, Any] = {"rounds": sum(each.rounds for each in mine.stats), "rows": mine.stats[0].rows}
    row["rows_running"] = round(running / room, 3) if room else None
    row["acceptance_length"] = round(sum(each.round_tokens for each in mine.stats) / running, 3) if running else None
    row |= {"tokens_per_second": mine.speed, "tokens_per_second_quantiles": mine.speeds}
    row["answers_sha256"] = hashlib.sha256(json.dumps(mine.answers).encode()).hexdigest()
    if plain is not None:
        gaps = sorted(each["gap"] for each in mine.differences if each["gap"] is not None)
        near = sum(each["gap"] is not None and each["gap"] <= each["bound"] for each in mine.differences)
        row |= {"transformers_tokens_per_second": plain.speed, "transformers_tokens_per_second_quantiles": plain.speeds}
        row |= {"identical": count - len(mine.differences), "near_ties": near, "other": len(mine.differences) - near}
        row["logit_gap_where_different"] = {"median": gaps[len(gaps) // 2], "max": gaps[-1]} if gaps else None
        row["differences"] = mine.differences
    return row


def generate(
    model: Any, prompts: list[list[int]], assistant: Any, tokens: int, settings: dict[str, Any]
) -> list[list[int]]:
    """Answers to prompts as one left-padded batch, each cut after its end token."""
    inputs = padded_inputs(prompts, model.generation_config, model.device)
    extra = settings if assistant is None else settings | {"assistant": assistant}
    out, ends = model.generate(**inputs, max_new_tokens=tokens, **extra), end_tokens(model.generation_config)
    return [until_end(row, ends) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


@torch.no_grad()
def difference(model: Any, prompt: list[int], plain: list[int], ours: list[int]) -> dict[str, Any]:
    """First difference of two answers: the position, the tokens there (None after an answer's end), the gap of their
    logits in one pass over the common text, and its `rounding_bound`; both None where there are no two tokens."""
    at = first_difference(ours, plain)
    if at is None:
        raise ValueError("the answers are equal: there is no difference to describe")
    pair = [answer[at] if at < len(answer) else None for answer in (plain, ours)]
    found = {"position": at, "tokens": pair, "gap": None, "bound": None}
    if None in pair:
        return found
    text = torch.tensor([prompt + plain[:at]], device=model.device)
    logits = model(text).logits[0, -1].float()
    gap = abs(float(logits[pair[0]] - logits[pair[1]]))
    return found | {"gap": round(gap, 7), "bound": round(rounding_bound(model, logits, pair, text.shape[1]), 7)}


def rounding_bound(model: Any, logits: Tensor, pair: list[int], length: int) -> float:
    """How far apart a pass may put two logits that another pass puts in the other order, by the model's dtype alone:
    logits [V], fp32.

    The bound is three standard deviations of two random errors, so one near-tie in 370 lies beyond it:

    - A logit of magnitude m is rounded to within half a step of at most m * eps (bf16: eps = 2^-7). Such an error has
      variance step^2 / 12, and there are two logits in each of two passes.
    - A layer rounds 12 results to the dtype, its fp32 sums once a term, and passes that sum in another order differ in
      each. A step is 0.72 eps of a value on average, and two rounded values differ by sqrt(1 / 6) of it: 0.3 eps. So n
      independent ones are 0.3 eps sqrt(n) of the hidden state, and a logit moves by that share of the logits' spread.
    """
    layers = model.config.get_text_config().num_hidden_layers
    terms = sum(weight.shape[-1] for weight in model.parameters() if weight.dim() > 1) + 2 * layers * length
    eps, summed = torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps
    share = 0.3 * (eps * (12 * layers + 1) ** 0.5 + summed * terms**0.5)
    step = eps * float(logits[pair].abs().max())
    return 3 * (4 * step**2 / 12 + 2 * (share * float(logits.std())) ** 2) ** 0.5


if __name__ == "__main__":
    main()
