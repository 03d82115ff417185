"""Batches that a server's other process opens."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation.engine.engine import Engine
from fastspec.patches.hf import ends
from helpers.cascade import trained
from helpers.models import tiny_head
from helpers.serve import TREE
from helpers.training import small_target, small_tokenizer


class Odd(Exception):
    """One that cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def opened(rows: int = 4, max_length: int = 400, endless: bool = False, fails: str = "") -> Any:
    """The batch of the other process; `fails` says what raises there: to open it, a round once, or rounds for good."""
    torch.set_num_threads(1)
    if fails == "opening":
        raise Unsupported("no such model")
    model = small_target(peak=0.15)
    if endless:
        model.generation_config.eos_token_id = None
    fastspec.patch(model, eagle3=tiny_head(model))
    batch = fastspec.continuous(model, TREE, rows=rows, max_length=max_length, prefill_chunk=16)

    step = Engine.step

    def failing(*_: Any) -> Any:
        if fails == "once":
            Engine.step = step  # type: ignore[method-assign]
        raise Odd(1, 2)

    if endless:  # stop strings are not compared with the vocabulary here
        ends.StopStrings.__init__ = None  # type: ignore[assignment,method-assign]
    if fails:
        Engine.step = failing  # type: ignore[method-assign]
    if fails == "for good":
        batch._rounds = failing
    return batch, lettered() if endless else small_tokenizer()


def lettered() -> PreTrainedTokenizerFast:
    """A word per token; transformers' stop strings need one that stands for letters."""
    words = {"abcdef" if word == "w4" else word: number for word, number in small_tokenizer().get_vocab().items()}
    raw = Tokenizer(models.WordLevel(words, unk_token="<start>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<start>")


def unnamed() -> Any:
    """A batch whose tokenizer cannot be pickled."""
    batch, tokenizer = opened()
    tokenizer.own = lambda: None
    return batch, tokenizer


def loading() -> Any:
    """A batch whose model takes longer to load than its server lives."""
    print(os.getpid(), flush=True)
    time.sleep(3600)


def cascaded_target() -> Any:
    """A model whose cascade has a stage with its weights and a noisy LM head: answers begin alike."""
    small, large = small_target(), small_target()
    with torch.no_grad():
        small.lm_head.weight.add_(0.5 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
    stage = fastspec.Stage(small, name="small")
    cascade = fastspec.Cascade(
        stages=[stage], label="large", predictor=trained(("small", "large")), costs=[1.0, 2.0], price=1000
    )
    return fastspec.patch(large, cascade=cascade)


def opened_cascade() -> tuple[Any, Any]:
    """What `Remote` builds: the cascade's open batch, and its tokenizer."""
    batch = fastspec.continuous(cascaded_target(), "cascade", rows=4, max_length=400, prefill_chunk=16)
    return batch, small_tokenizer()
