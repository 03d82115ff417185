"""`fastspec demo`: one model answers a few prompts three ways, and the answers are compared token by token."""

from __future__ import annotations

import os
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape

import fastspec
from fastspec.config import BackendName
from fastspec.devices import use_device
from fastspec.errors import Unsupported
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.hf.config_fields import position_limit
from fastspec.programs.compare import BASELINE, ROUNDING, MeasuredAnswer, beside, measured_answer
from fastspec.programs.heads import fitting_heads
from fastspec.programs.terminal import counting, table
from fastspec.programs.texts import Detokenizer, encode

PENS = (
    "A shop sells pens at 3 dollars each. Tom buys 4 pens and pays with a 20 dollar bill. How much change does he get?"
)
PROMPTS = (
    ("chat", "What are three good habits for learning a new language?"),
    ("code", "Write a Python function that returns the n-th Fibonacci number, and explain how it works."),
    ("arithmetic", PENS),
    ("chat", "Explain to a child why the sky is blue."),
)
"""(category, prompt) of the demo when the caller gives no prompt of their own."""

NEW_TOKENS, NEW_TOKENS_ON_CUDA = 96, 48
"""Of an answer, at the most. On CUDA transformers' own answers take most of the time."""
WARM_UP = 8
"""New tokens of transformers' warm-up."""
METHODS = (BASELINE, "autoregressive", "eagle3")
BUSY = 1.0
"""Load average per processor from which on a machine is busy."""


@dataclass
class Result:
    """Measurements of one demo: `runs[method]` holds one run per prompt, in the order of `prompts`; `load` is the
    machine's load average over the minute before, per processor, None where the system does not tell it."""

    model: str
    device: str
    dtype: str
    prompts: list[str]
    runs: dict[str, list[MeasuredAnswer]] = field(default_factory=dict)
    load: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per method, medians over the prompts; `ratio` pairs each prompt with transformers' own run of it."""
        rows = []
        for method, runs in self.runs.items():
            found = [beside(ours, plain) for ours, plain in zip(runs, self.runs[BASELINE], strict=True)]
            speed, ratio = (statistics.median(each[name] for each in found) for name in ("tokens_per_second", "ratio"))
            length = statistics.median(run.stats.acceptance_length if run.stats.row_rounds else 1.0 for run in runs)
            row = {"method": method, "tokens_per_second": round(speed, 2), "ratio": round(ratio, 3)}
            row["acceptance_length"] = round(length, 3)
            rows.append(row | {"identical": all(each["identical"] for each in found)})
        return rows

    def as_json(self) -> dict[str, Any]:
        names = ("model", "device", "dtype", "load", "prompts")
        return {name: getattr(self, name) for name in names} | {"rows": self.rows()}


class MarkedStreamer:
    """Streamer that prints accepted draft tokens in colour; `on_round` comes before `put` of the same tokens."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.texts, self.console = Detokenizer(tokenizer, skip_special_tokens=True), console
        self.styles: deque[str | None] = deque()
        """Styles of the tokens that were announced and not yet put."""
        self.ids: list[int] = []
        self.prompt_seen = False

    def on_round(self, tokens: list[int], accepted: int) -> None:
        """`tokens` of one round, the first `accepted` of them drafted."""
        self.styles.extend("bold green" if index < accepted else None for index in range(len(tokens)))

    def put(self, value: Any) -> None:
        """Token ids as a tensor; the first call is the prompt, which is not printed."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            self.ids.append(token)
            text, style = self.texts.add([token]), self.styles.popleft() if self.styles else None
            if text:
                self.console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        self.console.print()


def run_demo(
    *,
    prompts: list[str] | None = None,
    model: str = SMOLLM2,
    head: str | None = None,
    max_new_tokens: int | None = None,
    device: str | None = None,
    backend: BackendName = "auto",
    console: Console | None = None,
) -> Result:
    """Answer `prompts` with transformers' own generate, with `autoregressive` and with `eagle3`, greedily.

    `model` and `head` are names as in `load_model` and `fastspec.patch`; `device` as in `use_device`, `backend` as in
    `fastspec.patch`; on CUDA the model is bf16, on the CPU fp32. Answers have up to `max_new_tokens`, by default 96, on
    CUDA 48. With a `console` the eagle3 answers are streamed to it. Each method has one warm-up that is not timed.
    Raises `Unsupported` for bad arguments and whatever loading and patching raise.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise Unsupported(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if head is None and model != SMOLLM2:
        raise Unsupported(f"no head is known for {model!r}: name one with --head (a directory or a hub id)")
    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2) if hasattr(os, "getloadavg") else None
    streams, console = console is not None, console or Console(quiet=True)
    say = console.print
    device = use_device(device)
    count = max_new_tokens or (NEW_TOKENS_ON_CUDA if device.startswith("cuda") else NEW_TOKENS)
    head = head or SMOLLM2
    if "eagle3" not in fitting_heads([head], model):
        raise Unsupported(f"the demo decodes with EAGLE-3, and {head} is an EAGLE-1/2 head: fastspec bench takes it")
    target, tokenizer = load_model(model, device)
    texts = prompts or [text for _, text in PROMPTS]
    labels = ["prompt"] * len(texts) if prompts else [category for category, _ in PROMPTS]
    inputs = [encode(tokenizer, text, device) for text in texts]
    bound, longest = position_limit(target.config), max(batch["input_ids"].shape[1] for batch in inputs) + count
    if bound is not None and longest > bound:
        raise Unsupported(
            f"a prompt and {count} new tokens are {longest} tokens, and {model} has positions for {bound}: shorten the "
            "prompt, or give a smaller --max-new-tokens"
        )
    result = Result(model, device, str(target.dtype).removeprefix("torch."), texts, load=load)

    def timed(method: str) -> list[MeasuredAnswer]:
        options: dict[str, Any] = {} if method == BASELINE else {"assistant": method}
        runs: list[MeasuredAnswer] = []
        with counting(f"prompts answered by {method}", console, per_second=1) as tell:  # more pictures would take time
            tell(0, len(inputs))
            measured_answer(target, inputs[0], min(count, WARM_UP) if method == BASELINE else count, **options)
            for batch in inputs:
                runs.append(measured_answer(target, batch, count, **options))
                tell(len(runs), len(inputs))
        return runs

    say(f"{model} on {device}, {result.dtype}, {torch.get_num_threads()} threads, greedy, {count} new tokens at most")
    if load is not None and load >= BUSY:
        say(f"[yellow]This machine is busy (load average {load:.1f} per processor): times and ratios will be off.[/]")
    with fastspec.patched(target, eagle3=head, backend=backend):
        pass  # what cannot be patched is refused before transformers answers, which takes most of the time
    result.runs[BASELINE] = timed(BASELINE)  # unpatched: this is the model as transformers made it
    with fastspec.patched(target, eagle3=head, backend=backend):
        if streams:
            colours = " [bold green]Green[/]: drafted and accepted. Plain: the model's own token of each round."
            say("\nEAGLE-3 answers." + colours * (console.color_system is not None))
            for label, text, batch in zip(labels, texts, inputs, strict=True):
                say(f"\n[bold]{label}[/] [dim]{escape(text)}[/]")
                streamer = MarkedStreamer(tokenizer, console)
                measured_answer(target, batch, count, assistant="eagle3", streamer=streamer)
            say()
        for method in METHODS[1:]:
            result.runs[method] = timed(method)
    return result


def print_table(result: Result, console: Console) -> None:
    """The closing table, with a note where something needs one."""
    title = f"{result.model}, {result.device}, {result.dtype}: median of {len(result.prompts)} prompts"
    rows, cells = result.rows(), []
    for row in rows:
        method = "transformers generate" if row["method"] == BASELINE else row["method"]
        figures = (f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}x", f"{row['acceptance_length']:.2f}")
        cells.append((method, *figures, "[green]yes[/]" if row["identical"] else "[red]no[/]"))
    titles = ("method", "tokens/s", "ratio", "acceptance length", "identical output")
    console.print(table(titles, cells, title=title, box=box.HEAVY_HEAD, pad_edge=True))
    if result.dtype != "float32" and not all(row["identical"] for row in rows):
        console.print(f"In {result.dtype} {ROUNDING}.")
    if result.load is not None and result.load >= BUSY:
        console.print(
            f"This machine was busy when the demo began (load average {result.load:.1f} per processor). Run it again "
            "on an idle one before you compare these times and ratios."
        )
