"""Rows of a bench: each method's timed answer to a batch of prompts, beside the baseline's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastspec.programs.bench.methods import Method
from fastspec.programs.bench.prompts import BenchPrompt, Row
from fastspec.programs.compare import MeasuredAnswer, beside, measured_answer, median_answer
from fastspec.programs.texts import padded_inputs


def on_part(
    part: list[BenchPrompt],
    methods: list[Method],
    max_new_tokens: int,
    *,
    untimed: int = 0,
    warmup: int | None = None,
    runs: int = 1,
) -> Iterator[tuple[Method, MeasuredAnswer, MeasuredAnswer]]:
    """(method, its answer, the baseline's answer) to one batch of prompts; the first method is the baseline.

    Every method answers `warmup` times before it is measured (None: `untimed` times where it compiles or captures),
    then `runs` times. Its answer is that of median time, or one that differs from the baseline's.
    """
    base: MeasuredAnswer | None = None
    for method in methods:
        for _ in range(warmup if warmup is not None else untimed if method.compiles else 0):
            ask(method, part, max_new_tokens)
        answers = [ask(method, part, max_new_tokens) for _ in range(runs)]
        base = base or median_answer(answers)
        other = [answer for answer in answers if answer.tokens != base.tokens]
        yield method, other[0] if other else median_answer(answers), base


def row_of(
    part: list[BenchPrompt], answer: MeasuredAnswer, base: MeasuredAnswer, tokenizer: Any, floor_ms: float = 0.0
) -> Row:
    """Figures of an answer to a batch of prompts, beside the baseline's."""
    stats, found = answer.stats, beside(answer, base)
    phases = {name: seconds for name, seconds in stats.phases.items() if name != "prefill"}
    prefill = stats.phases.get("prefill", 0.0)
    per_round = 1e3 * (stats.seconds - prefill) / stats.rounds if stats.rounds else None
    return {
        "category": part[0].category,
        "ids": [prompt.id for prompt in part],
        "batch": len(part),
        "prompt_tokens": sum(len(prompt.ids) for prompt in part),
        "new_tokens": sum(map(len, answer.tokens)),
        "seconds": round(answer.seconds, 4),
        "tokens_per_second": round(found["tokens_per_second"], 2),
        "ratio": round(found["ratio"], 3),
        "identical": found["identical"],
        "first_difference": found["first_difference"],
        "acceptance_length": round(stats.acceptance_length, 3) if stats.row_rounds else None,
        "accepted_counts": stats.lengths,
        "acceptance_by_position": [round(share, 3) for share in stats.acceptance_by_position],
        "rounds": stats.rounds,
        "prefill_ms": round(1e3 * prefill, 2),
        "ms_per_round": round(per_round, 3) if per_round else None,
        "phases_ms": {name: round(1e3 * seconds / stats.rounds, 3) for name, seconds in phases.items() if stats.rounds},
        "beside_ms": round(1e3 * (answer.seconds - stats.seconds), 2) if stats.seconds else None,
        "floor_share": round(floor_ms / per_round, 3) if per_round else None,
        "peak_mib": answer.peak_mib,
        "texts": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answer.tokens],
    }


def ask(method: Method, part: list[BenchPrompt], max_new_tokens: int) -> MeasuredAnswer:
    """One timed call on a left-padded batch."""
    model = method.model
    inputs = padded_inputs([prompt.ids for prompt in part], model.generation_config, model.device)
    return measured_answer(model, inputs, max_new_tokens, count=method.peer, **method.options)
