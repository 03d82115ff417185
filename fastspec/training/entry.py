"""`train`: from a TrainConfig to a head in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from fastspec.training.config import TrainConfig
from fastspec.training.data import Texts, join_answers, read_prompts
from fastspec.training.regenerate import answer_prompts
from fastspec.training.target import load_target, load_tokenizer
from fastspec.training.trainer import Trainer


def train(
    config: TrainConfig, *, target: Any = None, tokenizer: Any = None, report: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """Train a head as `config` says and return the folder that holds it.

    `target` and `tokenizer` may be given when they are already loaded. `report` is called with a row of numbers (step, loss, accuracy
    of each draft step, tokens per second) from time to time; without it, rows are printed where `config.progress` is set.
    """
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    if target is None:
        target = load_target(config.target, dtype, accelerator.device)
    with accelerator.main_process_first():
        texts = load_texts(config, target, tokenizer)
        heldout, texts = _heldout(config, texts, target, tokenizer)
    trainer = Trainer(config, target, texts, heldout, accelerator)
    trainer.run(report=report or (_print if config.progress else None))
    if len(trainer.heldout):
        row = {"step": trainer.progress.step, "validation": trainer.validate()}
        trainer.progress.history.append(row)
        trainer.checkpoint()
    return Path(config.output)


def load_texts(config: TrainConfig, target: Any, tokenizer: Any = None) -> Texts:
    """The texts to train on: read from `config.answers`, or made by letting the target answer `config.prompts`."""
    if config.answers:
        return Texts.join([_read_answers(path, config, tokenizer) for path in config.answers])
    tokenizer = tokenizer or load_tokenizer(config.target)
    return answer_prompts(target, tokenizer, read_prompts(config.prompts), config, Path(config.output) / "answers")


def _read_answers(path: str, config: TrainConfig, tokenizer: Any) -> Texts:
    with np.load(path) as z:
        whole = "answer" in z
    if whole:
        return Texts.load(path)
    if not config.prompts:
        raise ValueError(f"{path} holds answers without their prompts: give the prompts' jsonl file as `prompts`")
    return join_answers(tokenizer or load_tokenizer(config.target), read_prompts(config.prompts), path)


def _heldout(config: TrainConfig, texts: Texts, target: Any, tokenizer: Any) -> tuple[Texts, Texts]:
    """(held-out texts, the texts left for training)."""
    if config.heldout.endswith(".npz"):
        return Texts.load(config.heldout), texts
    if config.heldout:
        tokenizer = tokenizer or load_tokenizer(config.target)
        rows = read_prompts(config.heldout)[: config.heldout_texts]
        return answer_prompts(target, tokenizer, rows, config, Path(config.output) / "heldout", greedy=True), texts
    keep = np.zeros(len(texts), dtype=bool)
    keep[np.random.default_rng(config.seed).permutation(len(texts))[: max(1, min(config.heldout_texts, len(texts) // 100))]] = True
    return texts.select(keep), texts.select(~keep)


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
