"""Progress of long commands: bars in a terminal, lines elsewhere; and what is missing is said before the work."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from helpers.training import settings, small_target, small_tokenizer, write_prompts
from rich.console import Console

from fastspec.programs.terminal import counting, training_bars
from fastspec.programs.training import train


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140)


def test_counting_is_a_bar_in_a_terminal_and_lines_elsewhere() -> None:
    shown, plain = terminal(), Console(file=io.StringIO())
    for console in (shown, plain):
        with counting("items answered", console) as tell:
            tell(2, 8)
            tell(8, 8)
    assert plain.file.getvalue() == "2 of 8 items answered\n8 of 8 items answered\n"  # type: ignore[attr-defined]
    assert "8/8" in shown.file.getvalue() and "━" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_training_run_shows_its_answers_and_its_steps(tmp_path: Path) -> None:
    console = terminal()
    rows: list[dict[str, Any]] = []
    config = settings(
        tmp_path / "head", prompts=write_prompts(tmp_path / "p.jsonl", 40), answers=(), epochs=1.0, new_tokens=8
    )
    shares: list[float] = []
    with training_bars(console) as bars:

        def report(row: dict[str, Any]) -> None:
            rows.append(row)
            bars["report"](row)

        def tick(share: float) -> None:
            shares.append(share)
            bars["tick"](share)

        train(config, target=small_target(), tokenizer=small_tokenizer(), report=report, tick=tick)
    answered = [row["answered"] for row in rows if row.get("answering") == "prompts"]
    assert answered == sorted(answered) and answered[0] < answered[-1] == 40
    assert any("loss" in row for row in rows) and shares == sorted(shares) and len(shares) > 1 and shares[-1] == 1
    emitted = console.file.getvalue()  # type: ignore[attr-defined]
    assert "answering prompts" in emitted and "40 of 40" in emitted and "training" in emitted and "loss" in emitted


def test_without_a_terminal_rows_are_printed_and_answers_are_not_counted(tmp_path: Path, capsys) -> None:
    with training_bars(Console(file=io.StringIO())) as bars:
        assert not bars
    prompts = write_prompts(tmp_path / "p.jsonl", 20)
    config = settings(tmp_path / "head", prompts=prompts, answers=(), epochs=1.0, new_tokens=8, progress=True)
    train(config, target=small_target(), tokenizer=small_tokenizer())
    emitted = capsys.readouterr().out
    assert '"loss"' in emitted and "answered" not in emitted
