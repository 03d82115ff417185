"""One timed call, by any method, and the row of figures that it gives beside the baseline's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastspec
from fastspec.models import prompt_width
from fastspec.programs.bench.methods import Method
from fastspec.programs.bench.prompts import BenchPrompt, Row

if TYPE_CHECKING:
    from fastspec.generation.stats import Stats

@dataclass(slots=True)
class MeasuredAnswer:
    """What one call gave: new tokens of each row up to the end token, seconds, counts and phases, peak memory in MiB on CUDA."""

    tokens: list[list[int]]
    seconds: float
    stats: Stats
    peak_mib: float | None


def on_part(
    part: list[BenchPrompt], methods: list[Method], tokenizer: Any, max_new_tokens: int, floor_ms: float, untimed: int = 0,
    warmup: int | None = None, runs: int = 1, bases: list[MeasuredAnswer] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """The rows of one batch of prompts; the first method is the baseline that the others are compared with, and its answer is put behind
    `bases`.

    Every method answers `warmup` times before it is measured (None: `untimed` times where it compiles or captures), then `runs` times, of
    which the call of median time makes the row.
    """
    base: MeasuredAnswer | None = None
    for method in methods:
        for _ in range(warmup if warmup is not None else untimed if method.compiles else 0):
            ask(method, part, max_new_tokens)
        answers = sorted((ask(method, part, max_new_tokens) for _ in range(runs)), key=lambda answer: answer.seconds)
        if base is None:
            base = answers[(runs - 1) // 2]
            if bases is not None:
                bases.append(base)
        other = next((answer for answer in answers if answer.tokens != base.tokens), None)  # one that differs must not go unseen
        answer = other or answers[(runs - 1) // 2]
        yield row_of(part, method.name, method.drafted_by, answer, base, floor_ms, tokenizer, runs)


def row_of(
    part: list[BenchPrompt],
    name: str,
    drafted_by: Row,
    answer: MeasuredAnswer,
    base: MeasuredAnswer,
    floor_ms: float,
    tokenizer: Any,
    runs: int,
) -> Row:
    """The row of a method's answer to a batch of prompts, beside the baseline's."""
    return {
        "category": part[0].category, "ids": [prompt.id for prompt in part], "method": name, **drafted_by,
        "batch": len(part), "runs": runs, "prompt_tokens": sum(len(prompt.ids) for prompt in part), **figures(answer, base, floor_ms),
        "texts": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answer.tokens],
    }  # fmt: skip


def figures(answer: MeasuredAnswer, base: MeasuredAnswer, floor_ms: float) -> Row:
    """What a row says of an answer, beside the baseline's answer to the same prompts."""
    stats, new = answer.stats, sum(map(len, answer.tokens))
    speed, base_speed = new / answer.seconds, sum(map(len, base.tokens)) / base.seconds
    phases = {name: seconds for name, seconds in stats.phases.items() if name != "prefill"}
    prefill = stats.phases.get("prefill", 0.0)
    per_round = 1e3 * (stats.seconds - prefill) / stats.rounds if stats.rounds else None
    parted = [first_difference(ours, plain) for ours, plain in zip(answer.tokens, base.tokens, strict=True)]
    return {
        "new_tokens": new, "seconds": round(answer.seconds, 4), "tokens_per_second": round(speed, 2),
        "ratio": round(speed / base_speed, 3), "identical": all(at is None for at in parted), "first_difference": parted,
        "acceptance_length": round(stats.acceptance_length, 3) if stats.row_rounds else None,
        "accepted_counts": stats.lengths, "acceptance_by_position": [round(share, 3) for share in stats.acceptance_by_position],
        "rounds": stats.rounds, "prefill_ms": round(1e3 * prefill, 2), "ms_per_round": round(per_round, 3) if per_round else None,
        "phases_ms": {name: round(1e3 * seconds / stats.rounds, 3) for name, seconds in phases.items() if stats.rounds},
        "beside_ms": round(1e3 * (answer.seconds - stats.seconds), 2) if stats.seconds else None,
        "floor_share": round(floor_ms / per_round, 3) if per_round else None, "peak_mib": answer.peak_mib,
    }  # fmt: skip


def first_difference(ours: list[int], plain: list[int]) -> int | None:
    """Index of the first new token that differs, None where there is none; an answer that ends early differs behind its end."""
    if ours == plain:
        return None
    return next((at for at, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))


def left_padded(batch: Sequence[list[int]], config: Any, device: Any) -> dict[str, Any]:
    """Prompts as what `generate` takes: `input_ids` and `attention_mask` [B, T] and the `pad_token_id` of a generation config, an end token
    where it has none."""
    import torch

    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    width = max(map(len, batch))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}


def ask(method: Method, part: list[BenchPrompt], max_new_tokens: int) -> MeasuredAnswer:
    """One timed call on a left-padded batch."""
    import torch

    model = method.model
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    inputs = left_padded([prompt.ids for prompt in part], config, model.device)
    ids = inputs["input_ids"]
    cuda = ids.is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    clock = TimedStreamer(len(part))
    extra = {"streamer": clock} if method.peer else {}
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **method.options, **extra)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - clock.began
    last = clock.stats if method.peer else fastspec.report(model).last
    assert last is not None
    tokens = [until_end(row, ends) for row in out[:, prompt_width(model, ids) :].tolist()]
    return MeasuredAnswer(tokens, seconds, last, round(torch.cuda.max_memory_allocated() / 2**20, 1) if cuda else None)


def until_end(tokens: list[int], ends: Sequence[int | None]) -> list[int]:
    """New tokens up to the first end token, that one included."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in ends), len(tokens)) + 1]


class TimedStreamer:
    """A streamer that only counts and takes the time: what a peer's `generate` did, in the form in which the loop tells of an assistant.

    The first tokens end the prefill; every later hand-over is one round, in which all tokens of a row but one were drafted.
    """

    def __init__(self, rows: int) -> None:
        from fastspec.generation.stats import Stats

        self.rows, self.puts, self.stats = rows, 0, Stats(rows=rows)
        self.began = time.perf_counter()

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first hand-over is the prompt
            self.stats.phases["prefill"] = time.perf_counter() - self.began
        elif self.puts > 2:
            tokens = value.numel() // self.rows
            self.stats.rounds += 1
            self.stats.row_rounds += self.rows
            self.stats.round_tokens += tokens * self.rows
            for _ in range(self.rows):
                self.stats.count_accepted(tokens - 1)

    def end(self) -> None:
        self.stats.seconds = time.perf_counter() - self.began
        self.stats.phases["pass"] = self.stats.seconds - self.stats.phases.get("prefill", 0.0)
