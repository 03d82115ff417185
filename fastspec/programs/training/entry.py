"""`train`: from a TrainConfig to a head in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast

from fastspec.devices import choose_device, use_device
from fastspec.errors import Unsupported
from fastspec.models import load_config, load_model
from fastspec.programs.heads import read_heads
from fastspec.programs.training.config import ENLARGEMENTS, TrainConfig
from fastspec.programs.training.data import OutOfTime, Row, Texts, TimeLimit, differing, join_answers, read_prompts
from fastspec.programs.training.heads import opened, with_sizes_of
from fastspec.programs.training.regenerate import Enlarger, answer_prompts, end_tokens, follow_up
from fastspec.programs.training.target import freeze
from fastspec.programs.training.trainer import Trainer

Report = Callable[[dict[str, Any]], None]
Tick = Callable[[float], None]
RECORD = "data.json"
TEXT_SETTINGS = (
    *("new_tokens", "max_length", "sampled_share", "temperature", "top_p", "seed"),
    *("shard_texts", "heldout_texts", *ENLARGEMENTS, "enlarge_minutes"),
)
"""Settings that the texts of a run depend on."""


def train(
    config: TrainConfig,
    *,
    target: Any = None,
    tokenizer: Any = None,
    device: str | None = None,
    report: Report | None = None,
    tick: Tick | None = None,
) -> Path | None:
    """Train a head as `config` says and return the folder that holds it, or None where `config.stop_after` ended the
    call before the run's end: the same call goes on from there.

    `target` and `tokenizer` may be given, both, when they are already loaded. `device` is "cpu", "cuda" or "cuda:N", by
    default accelerate's; a run may go on on another one. `report` is called with rows: prompts answered ("answering",
    "answered", "of"); texts added; step, share that is done, loss, accuracy of each draft step, tokens per second.
    Without it, all but the first kind are printed where `config.progress` is set. `tick` is called with the share of
    the training that is done, 0 to 1, after every step.
    """
    clock = TimeLimit(config.stop_after)
    if Path(config.output).exists() and not Path(config.output).is_dir():
        raise Unsupported(f"{config.output} is no folder: a head is one")
    waits = InitProcessGroupKwargs(timeout=timedelta(days=1))  # while the main process makes texts
    on_cpu = _use(device) == "cpu"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=config.mixed_precision, kwargs_handlers=[waits])
    if accelerator.is_main_process:  # the others need no files of texts
        for path in filter(None, (config.prompts, config.heldout)):
            (_existing if path.endswith(".npz") else _rows)(path)
        for path in config.answers:
            _existing(path)
    if config.start_from and config.kind != "mtp" and target is None:  # before weights are loaded
        read_heads([config.start_from], load_config(config.target))
    if target is None:
        dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
        target, tokenizer = load_model(config.target, str(accelerator.device), dtype)
    target = freeze(target)
    if (began := opened(config, target)) is not None:  # what is wrong with it is told before the target answers
        with_sizes_of(config, began)
    told = report or (_print if config.progress else None)
    shown: Report = told if told is not None and accelerator.is_main_process else lambda row: None
    material = _shared(accelerator, lambda: prepare(config, target, tokenizer, clock, shown))
    if material is None:
        return None
    trainer = Trainer(config, target, *material, accelerator)
    trainer.run(clock.left(), shown, tick if accelerator.is_main_process else None)
    if trainer.progress.done(config) < 1:
        return None
    trainer.finish()
    return Path(config.output)


def _use(device: str | None) -> str | None:
    """The named device, current from here on. Raises Unsupported for one GPU where several processes train."""
    if device is None:
        return None
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if choose_device(device).startswith("cuda:") and processes > 1:
        raise Unsupported(f"device {device!r} is one GPU, and {processes} processes train: give --device cuda, or none")
    return use_device(device)


def _shared(accelerator: Accelerator, make: Callable[[], tuple[Texts, Texts]]) -> tuple[Texts, Texts] | None:
    """Texts on every process: the main one makes them, the others read what it saved. None where its time was up."""
    made = None
    if accelerator.is_main_process:
        with contextlib.suppress(OutOfTime):
            made = make()
    there = int(broadcast(torch.tensor([int(made is not None)], device=accelerator.device))[0])
    return made or (make() if there else None)


def prepare(config: TrainConfig, target: Any, tokenizer: Any, clock: TimeLimit, report: Report) -> tuple[Texts, Texts]:
    """(the texts to train on, held-out texts): read from `config.answers` or made by the target and kept in
    `config.output`. Raises `OutOfTime` where `clock` ends first, and `Unsupported` for input that does not fit."""
    folder, ends = Path(config.output), end_tokens(target, tokenizer)
    if config.follow_ups:
        follow_up(tokenizer, ".", ends)
    rows = _rows(config.prompts) if config.prompts else []
    _record(config, folder)

    def answered(rows: list[Row], name: str, what: str, greedy: bool = False) -> Texts:
        def tell(done: int, of: int) -> None:
            report({"answering": what, "answered": done, "of": of})

        return answer_prompts(target, tokenizer, rows, ends, config, folder / name, clock, greedy=greedy, tell=tell)

    if config.answers:
        texts = Texts.join([_read_answers(_existing(path), rows, tokenizer) for path in config.answers])
    else:
        texts = answered(rows, "answers", "prompts")
    if config.heldout.endswith(".npz"):
        heldout = Texts.load(config.heldout)
    elif config.heldout:
        few = _rows(config.heldout)[: config.heldout_texts]
        heldout = answered(few, "heldout", "held-out prompts", greedy=True)
    else:
        keep, count = np.zeros(len(texts), dtype=bool), max(1, min(config.heldout_texts, len(texts) // 100))
        keep[np.random.default_rng(config.seed).permutation(len(texts))[:count]] = True
        heldout, texts = texts.select(keep), texts.select(~keep)
    return Enlarger(
        target=target, tokenizer=tokenizer, ends=ends, rows=rows, config=config, clock=clock, report=report
    ).run(texts), heldout


def _record(config: TrainConfig, folder: Path) -> None:
    """Write the settings of the texts beside them, and refuse to go on with others."""
    found: dict[str, Any] = {name: getattr(config, name) for name in TEXT_SETTINGS}
    for name, paths in (("prompts", [config.prompts]), ("heldout", [config.heldout]), ("answers", config.answers)):
        found[name] = [hashlib.sha256(_existing(path).read_bytes()).hexdigest() for path in paths if path]
    path = folder / RECORD
    if path.exists():
        if was := differing(json.loads(path.read_text(encoding="utf-8")), found):
            raise Unsupported(
                f"the texts in {folder} were made with {was}: go on with the same settings, or choose another output "
                "folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise Unsupported(f"{path}: no such file")
    return Path(path)


def _rows(path: str) -> list[Row]:
    """The rows of a file of prompts. Raises Unsupported where it has none."""
    if not (rows := read_prompts(_existing(path))):
        raise Unsupported(f"there are no prompts in {path}")
    return rows


def _read_answers(path: Path, rows: list[Row], tokenizer: Any) -> Texts:
    with np.load(path) as arrays:
        if "answer" in arrays:
            return Texts.load(path)
    if not rows:
        raise Unsupported(f"{path} holds answers without their prompts: give the prompts' jsonl file as `prompts`")
    return join_answers(tokenizer, rows, path)


def _print(row: dict[str, Any]) -> None:
    if "answered" not in row:  # one for every batch: for a bar, not for a log
        print(json.dumps(row), flush=True)
