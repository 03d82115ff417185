"""What the tests of open batches share: models, prompts, what is said to one alone, and a streamer that holds the
batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

import fastspec
from helpers.generate import MAKERS, NEVER, answer, unpatched
from helpers.models import tiny_head

SECONDS = 300  # only what hangs waits as long


def made(kind: str = "random", **options: Any) -> tuple[Any, Any]:
    """(the unpatched model, the same patched, with heads)."""
    target, head = MAKERS[kind]
    plain, model = unpatched(kind, **options), target(**options)
    first = tiny_head(model, kind="eagle", taps=(), own_lm_head=False)
    return plain, fastspec.patch(model, eagle3=head(model), eagle2=first, eagle=first)


def texts(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 97, (length,), generator=generator) for length in lengths]


def told(futures: list[Future[Tensor]]) -> list[list[int]]:
    return [future.result(SECONDS)[0].tolist() for future in futures]


GREEDY = {"do_sample": False, "eos_token_id": NEVER}


def alone(plain: Any, ids: Tensor, count: int, **options: Any) -> list[int]:
    """What the unpatched model says to one prompt."""
    return answer(plain, {"input_ids": ids[None]}, max_new_tokens=count, **{**GREEDY, **options})[0].tolist()


class Gate:
    """A streamer that lets the batch go on one token at a time, or raises in its place."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen, self.go, self.error = threading.Semaphore(0), threading.Semaphore(0), error
        self.prompt = True

    def put(self, value: Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        self.seen.release()
        assert self.go.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        pass
