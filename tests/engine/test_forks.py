"""Forked processes, to which no other thread of their parent comes: what one of these held must not stay locked."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.cascade import cascaded, stages
from helpers.generate import TREE
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts

import fastspec
from fastspec.generation.drafters import ngram_storage
from fastspec.generation.drafters.nasd import grow
from fastspec.patches.backends import ngram_grower

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def in_a_fork(work: Callable[[], object]) -> int | None:
    """Exit code of a forked process that does this work; None for one that hangs."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(30)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def refused(submit: Callable[[], object]) -> None:
    with pytest.raises(fastspec.FastSpecError, match="forked"):
        submit()


@contextmanager
def held(ask: Callable[[Any], object]) -> Iterator[None]:
    """Another thread is in the middle of an answer, which `ask` asks for with a streamer."""
    gate = Gate()
    thread = threading.Thread(target=ask, args=(gate,))
    thread.start()
    assert gate.seen.acquire(timeout=SECONDS)
    try:
        yield
    finally:
        for _ in range(100):
            gate.go.release()
        thread.join()


@pytest.mark.parametrize("assistant", [TREE, "nasd", "autoregressive"], ids=str)
def test_a_fork_decodes_while_another_thread_of_its_parent_does(assistant):
    plain, model = made()
    (ids,) = texts(5)
    wanted, given = alone(plain, ids, 6), {"max_new_tokens": 6, "assistant": assistant, **GREEDY}

    def check() -> None:
        assert model.generate(ids[None], **given)[0].tolist() == wanted

    with held(lambda gate: model.generate(ids[None], streamer=gate, **given)):
        assert in_a_fork(check) == 0
    check()


def test_a_fork_counts_while_another_thread_of_its_parent_does():
    storage, grower = fastspec.NgramStorage(4), ngram_grower()

    def works() -> None:
        cursor = storage.feed(storage.feed(storage.start(), 5), 6)
        assert grow(storage, cursor, 6, gamma=3, nodes=4, ends=frozenset(), grower=grower).tokens == [6]

    with ngram_storage.GROWING.lock:
        assert in_a_fork(works) == 0
    works()


def test_an_open_batch_is_over_in_a_fork_and_the_model_is_not():
    plain, model = made()
    (ids,) = texts(5)
    wanted, given = alone(plain, ids, 6), {"max_new_tokens": 6, **GREEDY}
    with fastspec.continuous(model, TREE, rows=2) as batch:

        def check() -> None:
            assert not batch.alive
            refused(lambda: batch.submit(ids, **given))
            batch.close()
            with fastspec.continuous(model, TREE, rows=2) as own:
                assert own.submit(ids, **given).result(SECONDS)[0].tolist() == wanted

        with held(lambda gate: batch.submit(ids, streamer=gate, **given).result(SECONDS)):
            assert in_a_fork(check) == 0
        assert batch.submit(ids, **given).result(SECONDS)[0].tolist() == wanted


def test_an_open_cascade_is_over_in_a_fork():
    model = cascaded(stages(2))
    (ids,) = texts(5)
    given = {"max_new_tokens": 6, **GREEDY}
    with fastspec.continuous(model, "cascade", rows=2) as batch:
        wanted = batch.submit(ids, **given).result(SECONDS)

        def check() -> None:
            refused(lambda: batch.submit(ids, **given))
            batch.close()

        with held(lambda gate: batch.submit(ids, streamer=gate, **given).result(SECONDS)):
            assert in_a_fork(check) == 0
        assert torch.equal(batch.submit(ids, **given).result(SECONDS), wanted)
