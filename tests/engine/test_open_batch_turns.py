"""Open batches over time: prompts join between rounds, are cancelled and fail, and the batch is closed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import TREE
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told
from helpers.seq2seq import tiny_seq2seq
from helpers.threads import in_threads
from helpers.training import small_tokenizer
from torch import Tensor
from transformers import TextIteratorStreamer

import fastspec
from fastspec import FastSpecError, PatchConflict, Unsupported
from fastspec.generation import sequence_state as buffers
from fastspec.generation.drafters.head_drafter import HeadDrafter
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import Rounds
from fastspec.patches.hf.model import HFModel
from fastspec.patches.session import Turn, session_of

CPU = torch.device("cpu")

COUNTS = (9, 3, 14, 5, 7, 2, 11, 6, 4)


def test_what_one_prompt_raises_ends_that_one_alone(monkeypatch):
    """In its streamer, its criterion, its processors, or while it is read."""
    plain, model = made()
    ids = texts(5, 6, 7, 8, 9, 10)
    streaming, gate = Gate(OSError("gone")), Gate()
    streaming.go.release(9)

    def raising(*given: Any) -> Any:
        raise ArithmeticError("no")

    prefill = HFModel.prefill

    def failing(self: Any, tokens: Tensor, counts: Tensor) -> Any:
        if tokens.shape[1] == 10:
            raise MemoryError("too long")
        return prefill(self, tokens, counts)

    monkeypatch.setattr(HFModel, "prefill", failing)
    with fastspec.continuous(model, TREE, rows=3, max_length=64) as batch:
        futures = [
            batch.submit(ids[0], streamer=gate, max_new_tokens=12, **GREEDY),
            batch.submit(ids[1], streamer=streaming, max_new_tokens=12, **GREEDY),
            batch.submit(ids[2], max_new_tokens=12, max_time=60.0, **GREEDY),
            batch.submit(ids[3], max_new_tokens=12, repetition_penalty=1.3, **GREEDY),
            batch.submit(ids[4], max_new_tokens=14, **GREEDY),
            batch.submit(ids[5], max_new_tokens=12, **GREEDY),
        ]
        for held in (*batch._arrived, *batch._batch.queue, *batch._batch.prompts):
            if held is not None and held.stop is not None:
                held.stop = raising
            if held is not None and held.rule.process_at is not None:
                object.__setattr__(held.rule, "process_at", raising)
        gate.go.release(99)
        for future, kind in zip(futures[1:4], (OSError, ArithmeticError, ArithmeticError), strict=True):
            with pytest.raises(kind):
                future.result(SECONDS)
        with pytest.raises(MemoryError):
            futures[5].result(SECONDS)
        assert told([futures[0], futures[4]]) == [alone(plain, ids[at], count) for at, count in ((0, 12), (4, 14))]
        assert told([batch.submit(ids[1], max_new_tokens=5, **GREEDY)])[0] == alone(plain, ids[1], 5)


def test_prompts_are_cancelled_while_they_wait_are_read_and_run(monkeypatch):
    plain, model = made()
    ids = texts(5, 6, 20, 8)
    gate = Gate()
    with fastspec.continuous(model, TREE, rows=2, max_length=64, prefill_chunk=4) as batch:
        running = batch.submit(ids[0], streamer=gate, max_new_tokens=30, **GREEDY)
        assert gate.seen.acquire(timeout=SECONDS)  # its first token; the batch stands still
        beside = batch.submit(ids[1], max_new_tokens=9, **GREEDY)
        read, waits = (batch.submit(ids[at], max_new_tokens=4, **GREEDY) for at in (2, 3))
        assert batch.running == 1 and batch.waiting == 3 and waits.cancel()
        turn, at = Rounds.turn, []

        def watched(self: Any, *stays: bool) -> None:
            turn(self, *stays)
            if self.joining is not None and self.joining.ids.shape[1] == 20:
                at.append(self.joining.done)
                read.cancel()

        monkeypatch.setattr(Rounds, "turn", watched)
        gate.go.release(99)
        assert told([running, beside]) == [alone(plain, ids[row], count) for row, count in ((0, 30), (1, 9))]
        assert len(at) == 1 and 0 < at[0] < 20  # no more of it was read
        for future in (read, waits):
            with pytest.raises(CancelledError):
                future.result(SECONDS)
        slow = Gate()
        third = batch.submit(ids[3], streamer=slow, max_new_tokens=30, **GREEDY)
        assert slow.seen.acquire(timeout=SECONDS) and third.cancel()
        slow.go.release(99)
        assert told([batch.submit(ids[3], max_new_tokens=4, **GREEDY)])[0] == alone(plain, ids[3], 4)
        assert batch.running == 0 and batch.stats.emitted < 30 + 9 + 30


def test_prompts_are_counted_as_waiting_before_and_after_the_batch_has_seen_them():
    _, model = made()
    ids, gate = texts(5, 6, 7, 8), Gate()
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=64) as batch:
        batch.submit(ids[0], streamer=gate, max_new_tokens=4, **GREEDY)
        assert gate.seen.acquire(timeout=SECONDS)  # the batch stands still
        for each in ids[1:3]:
            batch.submit(each, max_new_tokens=2, **GREEDY)
        gate.go.release(2)
        assert gate.seen.acquire(timeout=SECONDS) and gate.seen.acquire(timeout=SECONDS)  # in the next turn
        batch.submit(ids[3], max_new_tokens=2, **GREEDY)
        assert (batch.running, batch.waiting) == (1, 3)
        gate.go.release(99)


def test_who_reads_a_cancelled_answer_is_told_its_end(caplog):
    """While it runs and while it waits, by transformers' streamer that another thread reads; what a streamer raises
    there is logged."""

    class Raising(Gate):
        def end(self) -> None:
            raise ArithmeticError("no luck")

    _, model = made()
    ids, gate = texts(5, 6, 7, 8), Gate()
    readers = [TextIteratorStreamer(small_tokenizer(), timeout=SECONDS) for _ in range(2)]
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=64) as batch:
        batch.submit(ids[0], streamer=gate, max_new_tokens=12, **GREEDY)
        assert gate.seen.acquire(timeout=SECONDS)  # the batch stands still
        told_of = [*readers, Raising()]
        cancelled = [
            batch.submit(row, streamer=each, max_new_tokens=40, **GREEDY)
            for row, each in zip(ids[1:], told_of, strict=True)
        ]
        assert all(future.cancel() for future in cancelled)
        gate.go.release(99)
        assert [len(list(reader)) > 0 for reader in readers] == [True, True]  # their prompts
    assert "the streamer of a cancelled prompt" in caplog.text and "no luck" in caplog.text


def test_a_long_prompt_is_read_between_the_rounds_of_the_others(monkeypatch):
    """No more than a chunk between two rounds while any row goes on, and all at once when none does."""
    plain, model = made()
    log: list[Any] = []
    prefill, step = HFModel.prefill, Engine.step

    def reading(self: Any, tokens: Tensor, counts: Tensor) -> Any:
        log.append(tokens.shape[1])
        return prefill(self, tokens, counts)

    def stepping(self: Any, *rest: Any) -> Any:
        log.append("round")
        return step(self, *rest)

    ids, gate = texts(5, 31, 3, 2), Gate()
    with fastspec.continuous(model, "autoregressive", rows=4, max_length=64, prefill_chunk=8, narrows=False) as batch:
        monkeypatch.setattr(HFModel, "prefill", reading)
        monkeypatch.setattr(Engine, "step", stepping)
        first = batch.submit(ids[0], streamer=gate, max_new_tokens=12, **GREEDY)
        assert gate.seen.acquire(timeout=SECONDS)
        others = [batch.submit(each, max_new_tokens=3, **GREEDY) for each in ids[1:]]
        gate.go.release(99)
        generated = told([first, *others])
        shorter = told([batch.submit(ids[1], max_new_tokens=2, **GREEDY)])
    wants = zip(ids, (12, 3, 3, 3), strict=True)
    assert generated == [alone(plain, each, count) for each, count in wants]
    assert log[:12] == [5, "round", 8, "round", 8, "round", 8, "round", 7, 1, "round", 2]
    assert log[-2:] == [31, "round"] and shorter[0] == generated[1][:-1]


def test_rounds_that_fail_end_the_prompts_in_them_and_others_go_on(monkeypatch):
    plain, model = made()
    ids, gate, step = texts(5, 6, 7), Gate(), Engine.step

    def failing(self: Any, *rest: Any) -> Any:
        monkeypatch.setattr(Engine, "step", step)
        raise RuntimeError("out of luck")

    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        first = batch.submit(ids[0], streamer=gate, max_new_tokens=9, **GREEDY)
        assert gate.seen.acquire(timeout=SECONDS)
        monkeypatch.setattr(Engine, "step", failing)
        gate.go.release(99)
        with pytest.raises(RuntimeError, match="out of luck"):
            first.result(SECONDS)
        assert told([batch.submit(ids[1], max_new_tokens=9, **GREEDY)])[0] == alone(plain, ids[1], 9)
        monkeypatch.setattr(Engine, "step", failing)
        monkeypatch.setattr(type(batch), "_rounds", failing)
        last = batch.submit(ids[2], max_new_tokens=9, **GREEDY)
        with pytest.raises(RuntimeError, match="out of luck"):
            last.result(SECONDS)
        batch._thread.join(SECONDS)
        assert not batch.alive
        with pytest.raises(FastSpecError, match="has stopped"):
            batch.submit(ids[2], max_new_tokens=9)


def test_many_threads_and_generate_beside_them():
    """Calls of `generate` take turns with the rounds, and neither changes the other's answers."""
    plain, model = made("bigram")
    ids = texts(*COUNTS)
    want = [alone(plain, each, 10) for each in ids]
    got: dict[tuple[int, int], list[int]] = {}
    with fastspec.continuous(model, TREE, rows=3, max_length=64, prefill_chunk=5) as batch:

        def ask(which: int) -> None:
            for at in range(len(ids)):
                if which == 0:
                    generated = model.generate(ids[at][None], max_new_tokens=10, assistant=TREE, **GREEDY)
                else:
                    generated = batch.submit(ids[at], max_new_tokens=10, **GREEDY).result(SECONDS)
                got[which, at] = generated[0].tolist()

        in_threads(ask, 4)
    assert got == {(which, at): generated for which in range(4) for at, generated in enumerate(want)}


def test_buffers_grow_with_the_texts_and_idle_rows_do_not(monkeypatch):
    monkeypatch.setattr(buffers, "FIRST_SLOTS", 16)
    plain, model = made()
    longest: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, length, *rest: longest.append(length) or step(self, length, *rest))
    ids = texts(4, 50)
    with fastspec.continuous(model, TREE, rows=2, max_length=90) as batch:
        for count in (30, 8):
            generated = told([batch.submit(each, max_new_tokens=count, **GREEDY) for each in ids])
            assert generated == [alone(plain, each, count) for each in ids]
        for _ in range(3):
            told([batch.submit(ids[0], max_new_tokens=20, **GREEDY)])
    assert max(longest) <= 50 + 30 + 6


def test_what_is_closed_and_what_cannot_be_opened(monkeypatch):
    plain, model = made()
    with pytest.raises(Unsupported, match="is not patched"):
        fastspec.continuous(plain)
    for words, assistant, options in (
        ("cannot take a new prompt", SimpleNamespace(name="theirs", taps=None, drafter=lambda **_: None), {}),
        ("unknown", "eagle4", {}),
        ("rows", TREE, {"rows": 0}),
        ("prefill_chunk=0", TREE, {"prefill_chunk": 0}),
    ):
        with pytest.raises(Unsupported, match=words):
            fastspec.continuous(model, assistant, **options)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        fastspec.continuous(fastspec.patch(tiny_seq2seq("t5")), "nasd")
    batch = fastspec.continuous(model, TREE, rows=2, max_length=40)
    with pytest.raises(PatchConflict, match="close that batch first"):
        fastspec.unpatch(model)
    gate = Gate()
    running = batch.submit(texts(5)[0], streamer=gate, max_new_tokens=9, **GREEDY)
    assert gate.seen.acquire(timeout=SECONDS)
    queued = [batch.submit(each, max_new_tokens=9, **GREEDY) for each in texts(5, 6, 7)]
    closer = threading.Thread(target=batch.close, kwargs={"cancel": True})
    closer.start()
    while not running.cancelled():
        time.sleep(0.001)
    gate.go.release(99)
    closer.join(SECONDS)
    assert not closer.is_alive() and not batch.alive and all(future.cancelled() for future in (running, *queued))
    with pytest.raises(FastSpecError, match="is closed"):
        batch.submit(texts(5)[0], max_new_tokens=4)
    batch.close()
    assert session_of(model).batches == 0
    fastspec.unpatch(model)


def test_who_waits_for_a_turn_is_next():
    """Though another takes one turn after the other."""
    turn, taken, stop = Turn(), [], threading.Event()

    def again_and_again() -> None:
        while not stop.is_set():
            with turn.taken(CPU):
                taken.append(sum(range(20000)))

    thread = threading.Thread(target=again_and_again)
    thread.start()
    waited = []
    for _ in range(20):
        time.sleep(0.01)
        before = len(taken)
        with turn.taken(CPU):
            waited.append(len(taken) - before)
    stop.set()
    thread.join(SECONDS)
    assert (
        sorted(waited)[len(waited) // 2] <= 4 and len(taken) > 5
    )  # a busy machine may stop this thread before it begins to wait


def test_a_prompt_that_is_read_in_parts_of_one_width_keeps_the_features_of_each(monkeypatch):
    """A captured pass writes over those of the one before."""
    stand_in(monkeypatch)
    held: list[Tensor] = []
    begin = HeadDrafter.begin

    def watched(self: HeadDrafter, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        held.append(features.clone())
        begin(self, ids, counts, features, root)

    monkeypatch.setattr(HeadDrafter, "begin", watched)
    monkeypatch.setattr("fastspec.patches.continuous_batch.CHUNKS", {"cpu": 32})
    _, model = made("random")
    other, text = texts(5, 100)
    with fastspec.continuous(model, fastspec.Eagle3(total_tokens=8), rows=2, max_length=400, narrows=False) as batch:
        want = told([batch.submit(text, **GREEDY, max_new_tokens=4)])
        whole = held[-1]
        for _ in range(2):
            gate = Gate()
            futures = [batch.submit(other, **GREEDY, max_new_tokens=12, streamer=gate)]
            assert gate.seen.acquire(timeout=SECONDS)
            futures += [batch.submit(each, **GREEDY, max_new_tokens=4) for each in (text.flip(0), text)]
            gate.go.release(20)
            assert told(futures)[2:] == want
        assert torch.allclose(held[-1][:, :100], whole[:, :100], atol=1e-5)
