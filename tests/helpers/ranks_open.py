"""Open batches of models that two processes hold together: the first takes prompts, and the other follows."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import timedelta
from functools import partial
from itertools import count as count_from
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig

import fastspec
from fastspec.config import BackendName
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.chain import ChainDrafter
from fastspec.generation.engine.engine import Engine
from fastspec.patches import open_ranks, open_turns
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.hf.compat import local_part
from helpers import ranks
from helpers.captured import stand_in
from helpers.cascade import trained
from helpers.generate import NEVER, bigram, seer
from helpers.grammars import END, SCHEMA, TOKENIZER
from helpers.open import SECONDS, texts
from helpers.ranks import Loader, at_call, end_or_fail, first, given, here, planted, sizes, why
from helpers.threads import in_threads

GREEDY = {"do_sample": False, "eos_token_id": NEVER, "max_new_tokens": 12}
DRAWN = {"do_sample": True, "eos_token_id": NEVER, "max_new_tokens": 12, "temperature": 0.8}
LONG = 60
"""Tokens of an answer of 7 rounds at the least: on no device has a round more than 9."""
COUNTS = "joined", "reused", "rounds", "row_rounds", "emitted", "round_tokens", "accepted", "drafted"
SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    {**DRAWN, "seed": 7},
    {**GREEDY, "repetition_penalty": 1.3},
    {**DRAWN, "top_k": 20, "top_p": 0.9, "seed": 8},
    {**GREEDY, "max_time": 1000.0},
    {**GREEDY, "drafts": False},
    {**DRAWN, "no_repeat_ngram_size": 2, "seed": 9},
    {**GREEDY, "max_new_tokens": 30, "eos_token_id": [50, 60, 70]},
]
"""Of prompts that run beside each other."""


def plain() -> BackendName:
    """Plain torch on the CPU, which compiles nothing."""
    return "torch" if ranks.HERE == "cpu" else "auto"


class Rounds(RoundStreamer):
    """A streamer that asks for all that there is of a round, or raises after so many."""

    logprobs, trees = 2, True

    def __init__(self, left: int = 1000) -> None:
        self.left, self.tokens = left, list[int]()

    def put_round(self, round: StreamedRound) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("nobody hears")
        assert round.logprobs is not None
        self.tokens += [each.token for each in round.logprobs]


def state(batch: Any) -> list[Any]:
    """What must be the same in all processes once a batch is closed."""
    held = [[None if text is None else text.ids.tolist() for text in texts] for texts in batch._prefixes.texts.values()]
    digest = 0 if batch.ranks is None else batch.ranks.digest
    counts = [getattr(batch.stats, name) for name in COUNTS]
    return [
        counts,
        batch.turns,
        digest,
        sorted(batch._widths.made),
        batch._widths.current.engine.target.lengths.tolist(),
        held,
    ]


def run(model: Any, assistant: Any, asked: Callable[[Any], list[Any]], **options: Any) -> list[Any]:
    """What the first process makes of a batch, and the batch's state: [answers, state]; the other follows."""
    made: list[Any] = []
    with fastspec.continuous(model, assistant, **{"rows": 3, "max_length": 96, **options}) as batch:
        if first():
            made = asked(batch)
    assert not batch.alive and batch.running == batch.waiting == 0
    assert (batch._gathering is None) == (batch.ranks is not None), "processes share no clock"
    return [made, state(batch)]


def answers(batch: Any, ids: list[Tensor], settings: list[dict[str, Any]]) -> list[list[int]]:
    with batch._changed:  # so that one process alone takes as many turns
        futures = [batch.submit(each, **more) for each, more in zip(ids, settings, strict=True)]
    return [future.result(SECONDS)[0].tolist() for future in futures]


def mixed(load: Loader, kind: str) -> list[Any]:
    """Prompts of every kind of settings beside each other, by several assistants."""
    del kind
    model, made = load("bigram"), []
    ids = texts(5, 9, 7, 12, 6, 8, 4, 10)
    with fastspec.patched(model, backend=plain(), eagle3=here(seer(bigram(**sizes())))):
        for assistant in ("eagle3", "autoregressive"):
            made += run(model, assistant, lambda batch: answers(batch, ids, SETTINGS), prefill_chunk=5)
    return made


def near_draft() -> Any:
    """A smaller draft model for a bigram target, which is right about some of its tokens, the same in every process."""
    target, draft = bigram(**sizes()), bigram(**{**sizes(), "num_hidden_layers": 1})
    draft.load_state_dict(target.state_dict(), strict=False)
    noise = torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        draft.lm_head.weight.add_(0.3 * noise)
    return here(draft)


def drafted(load: Loader, kind: str) -> list[Any]:
    """Prompts of every kind of settings beside each other, with drafts of another model and of a chain of models."""
    del kind
    return _drafted(load, ("speculative", fastspec.Speculative(gamma=3, branches=2)), "lossless")


def mixtures(load: Loader, kind: str) -> list[Any]:
    """The same with drafts of the target's own layers, and by a mixture of two models."""
    del kind
    return _drafted(load, (fastspec.Speculative(early_exit=1, gamma=2),), "token")


def _drafted(load: Loader, assistants: tuple[Any, ...], mode: str) -> list[Any]:
    model, made = load("bigram"), []
    ids = texts(5, 9, 7, 12, 6, 8, 4, 10)
    blind = [each for each in SETTINGS if not {"repetition_penalty", "no_repeat_ngram_size", "drafts"} & each.keys()]
    with fastspec.patched(model, backend=plain(), speculative=near_draft()):
        for assistant in assistants:
            made += run(model, assistant, lambda batch: answers(batch, ids, SETTINGS), prefill_chunk=5)
    names = ("small", "large") if mode == "token" else ("small", "medium", "large")
    below = [fastspec.Stage(near_draft(), name=name) for name in names[:-1]]
    more = {"rule": "diff", "alpha": 0.2} if mode == "token" else {}
    cascade = fastspec.Cascade(
        stages=below,
        label="large",
        predictor=trained(names),
        costs=[1.0, 2.0, 4.0][: len(names)],
        mode=mode,
        gamma=3,
        **more,
    )
    asked = SETTINGS if mode == "lossless" else (blind * 2)[: len(ids)]
    with fastspec.patched(model, backend=plain(), cascade=cascade):
        made += run(model, "cascade", lambda batch: answers(batch, ids, asked), prefill_chunk=5)
    return made


def followed(load: Loader, kind: str) -> list[Any]:
    """Conversations whose texts a draft model has read, too, and rows that move; the draft model is cut over the
    processes itself, and raises in one round."""
    del kind
    model, draft = load("bigram"), load("bigram")
    calls: list[int] = []

    def asked(batch: Any) -> list[Any]:
        found = talked(batch)
        for each in texts(*range(4, 16)):
            future = batch.submit(each, **GREEDY)
            try:
                found.append(future.result(SECONDS)[0].tolist())
            except (ArithmeticError, FastSpecError) as error:
                assert "planted" in str(error)
        assert len(calls) > 20
        return found + talked(batch)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        patch.setattr(ChainDrafter, "propose", at_call(20, planted, ChainDrafter.propose, calls))
        with fastspec.patched(model, backend=plain(), speculative=draft):
            return run(model, fastspec.Speculative(gamma=2), asked, rows=4)


def ended(load: Loader, kind: str) -> list[Any]:
    """Prompts that are refused, cancelled, whose streamer raises, and one that is streamed beside them."""
    del kind
    model, ids = load("bigram"), texts(5, 9, 7, 12, 6)

    class Unsent(GenerationConfig):  # type: ignore[misc]
        """Of a local class, which pickle does not find."""

    def asked(batch: Any) -> list[Any]:
        heard = Rounds()
        with pytest.raises(Unsupported, match="12 tokens and may be answered with 90, 102 together"):
            batch.submit(ids[3], max_new_tokens=90)
        with pytest.raises(ValueError, match=r"tokens from .*5000"):
            batch.submit(torch.tensor([7, 5000]), max_new_tokens=4)
        if batch.ranks is not None:
            with pytest.raises(Unsupported, match="cannot be sent to the other processes"):
                batch.submit(ids[0], max_new_tokens=4, generation_config=Unsent())
        with batch._changed:
            futures = [
                batch.submit(ids[0], streamer=heard, **GREEDY),
                batch.submit(ids[1], streamer=Rounds(0), **GREEDY),
                batch.submit(ids[2], streamer=Rounds(2), **{**GREEDY, "max_new_tokens": LONG}),
                batch.submit(ids[3], **{**GREEDY, "max_new_tokens": LONG}),
                batch.submit(ids[4], **GREEDY),
            ]
            waits = batch.submit(ids[4], **GREEDY)
        assert waits.cancel()
        for future in futures[1:3]:
            with pytest.raises(OSError, match="nobody hears"):
                future.result(SECONDS)
        if futures[3].cancel():
            with pytest.raises(CancelledError):
                futures[3].result(SECONDS)
        found = [futures[place].result(SECONDS)[0].tolist() for place in (0, 4)]
        assert heard.tokens == found[0][5:]
        return found

    with fastspec.patched(model, backend=plain(), eagle3=here(seer(bigram(**sizes())))):
        return run(model, "eagle3", asked)


def clocked(load: Loader, kind: str) -> list[Any]:
    """An answer that the first process's clock ends, beside one that goes on; the other process's clock stands."""
    del kind
    model, ids, seconds = load("bigram"), texts(5, 9), count_from(1)
    clock = SimpleNamespace(time=lambda: next(seconds) if first() else 0)

    def asked(batch: Any) -> list[Any]:
        found = answers(batch, ids, [{**GREEDY, "max_time": 5.5}, GREEDY])
        assert [len(each) for each in found] == [5 + 6, 9 + 12]
        return found

    with pytest.MonkeyPatch.context() as patch, fastspec.patched(model, backend=plain()):
        patch.setattr("transformers.generation.stopping_criteria.time", clock)
        return run(model, "nasd", asked)


def cancelled(load: Loader, kind: str) -> list[Any]:
    """A batch that is closed while prompts run and wait; another one after it."""
    del kind
    model, ids = load("bigram"), texts(5, 9, 7, 12, 6)
    going = threading.Event()

    class Going(Rounds):
        def put_round(self, round: StreamedRound) -> None:
            going.set()

    def asked(batch: Any) -> list[Any]:
        futures = [batch.submit(each, streamer=Going(), **{**GREEDY, "max_new_tokens": 80}) for each in ids]
        assert going.wait(SECONDS)
        batch.close(cancel=True)
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(SECONDS)
        return []

    with fastspec.patched(model, backend=plain(), eagle3=here(seer(bigram(**sizes())))):
        return [
            *run(model, "eagle3", asked),
            *run(model, "eagle3", lambda batch: answers(batch, ids[:2], SETTINGS[:2])),
        ]


def talked(batch: Any) -> list[Any]:
    """Turns of two conversations, each read from the end of the one before, and prompts that begin alike."""
    talks, more, made = texts(20, 24, seed=2), texts(6, 7, seed=3), []
    for _ in range(2):
        with batch._changed:
            futures = [batch.submit(talk, **GREEDY) for talk in talks]
        made += [future.result(SECONDS)[0].tolist() for future in futures]
        made += [[future.cached_tokens for future in futures]]
        talks = [torch.cat((future.result()[0].cpu(), each)) for future, each in zip(futures, more, strict=True)]
    begun = [torch.cat((talks[0][:40], each)) for each in more]
    return [*made, *answers(batch, begun, [GREEDY] * 2), batch.stats.reused]


def chat(load: Loader, kind: str) -> list[Any]:
    """Conversations by n-grams of what was said."""
    del kind
    model = load("llama")
    with fastspec.patched(model, backend=plain()):
        return run(model, "nasd", talked, rows=2)


def warmed(load: Loader, kind: str) -> list[Any]:
    """The same after a warm-up, with more rows than are needed."""
    del kind
    model = load("llama")

    def asked(batch: Any) -> list[Any]:
        batch.warmup(30)
        return talked(batch)

    with fastspec.patched(model, backend=plain()):
        return run(model, "autoregressive", asked, rows=4)


def turned(load: Loader, kind: str) -> list[Any]:
    """Captured rounds of sizes that a warm-up has tried, one launched before the one in front is read."""
    del kind
    model, ids, auto = load("bigram"), texts(5, 9, 7, 12, 6, 8), fastspec.Eagle3(total_tokens="auto")

    def asked(batch: Any) -> list[Any]:
        batch.warmup(30)
        return answers(batch, ids, [{**GREEDY, "max_new_tokens": 40}] * 6)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.HERE == "cpu":
            stand_in(patch)
        with fastspec.patched(model, eagle3=here(seer(bigram(**sizes())))):
            return run(model, auto, asked, max_length=128)


def sized(load: Loader, kind: str) -> list[Any]:
    """Sizes of trees by clocks that differ, of which the first process's counts."""
    del kind
    model, ids, auto = load("bigram"), texts(5, 9, 7, 12), fastspec.Eagle3(total_tokens="auto")
    seconds = count_from(1)
    clock = SimpleNamespace(perf_counter=lambda: (at := next(seconds)) * (0.001 if first() else 0.1 * (1 + at % 7)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastspec.generation.engine.engine.time", clock)
        patch.setattr(open_turns, "AGREED_EVERY", 4)
        with fastspec.patched(model, backend=plain(), eagle3=here(seer(bigram(**sizes())))):
            settings = [{**GREEDY, "max_new_tokens": 60}] * 4
            made, told = run(model, auto, lambda batch: answers(batch, ids, settings), rows=2, max_length=128)
            known = [each.known for each in fastspec.patches.session.session_of(model).trees.values()]
    assert any(known)
    return [made, [told, known]]


def changed(load: Loader, kind: str) -> list[Any]:
    """A module that is replaced in all processes while the batch is open, and weights that one of them sees change."""
    del kind
    model, ids = load("llama"), texts(20, 9)

    @torch.no_grad()
    def touch() -> None:
        """Write weights, of which the first process hears nothing."""
        local_part(model.lm_head.weight).add_(0.0)

    def alter() -> None:
        layer = model.model.layers[1]
        layer.mlp = Halved(layer.mlp)
        if dist.is_initialized():
            dist.barrier()

    with fastspec.patched(model, backend=plain()):
        if not first():
            with fastspec.continuous(model, "nasd", rows=3, max_length=96) as batch:
                while batch.stats.emitted < 24:
                    time.sleep(0.01)
                alter()
                while batch.stats.emitted < 48:
                    time.sleep(0.01)
                touch()
                dist.barrier()
            return [[], state(batch)]

        def asked(batch: Any) -> list[Any]:
            found = answers(batch, ids, [GREEDY] * 2)
            alter()
            found += answers(batch, ids, [GREEDY] * 2)
            if dist.is_initialized():
                dist.barrier()
            else:
                touch()
            reused = batch.stats.reused
            return [*found, *answers(batch, ids[:1], [GREEDY]), batch.stats.reused - reused]

        return run(model, "nasd", asked)


def crowded(load: Loader, kind: str) -> list[Any]:
    """Prompts of several threads at times of their own, of which some are cancelled and some have a streamer that
    raises; the answers of the others, by their number."""
    del kind
    model, threads, each = load("bigram"), 4, 6
    ids = texts(*(3 + number % 23 for number in range(threads * each)))

    def asked(batch: Any) -> list[Any]:
        found: dict[int, list[int]] = {}

        def ask(thread: int) -> None:
            numbers = random.Random(thread)
            for number in range(thread * each, (thread + 1) * each):
                settings = SETTINGS[number % len(SETTINGS)]
                streamer = Rounds(numbers.randint(0, 3)) if number % 5 == 1 else None
                settings = settings if streamer is None else {**settings, "max_new_tokens": LONG}
                future = batch.submit(ids[number], streamer=streamer, **settings)
                time.sleep(0.03 * numbers.random())
                if number % 5 == 2:
                    future.cancel()
                if number % 5 == 1:
                    with pytest.raises(OSError, match="nobody hears"):
                        future.result(SECONDS)
                elif not future.cancelled():
                    answer = future.result(SECONDS)[0].tolist()
                    if number % 5 != 2:
                        found[number] = answer

        in_threads(ask, threads)
        return [found[number] for number in sorted(found)]

    with fastspec.patched(model, backend=plain(), eagle3=here(seer(bigram(**sizes())))):
        made = run(model, "eagle3", asked, rows=5, prefill_chunk=7)
        return [*made, *run(model, "nasd", asked, rows=2, narrows=False, prefix_caching=True)]


class Halved(nn.Module):
    """A feed-forward of half its answer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.inner(x)


def failing(load: Loader, kind: str) -> list[Any]:
    """A round that raises in all processes ends the prompts in its rows, and those that wait go on."""
    del kind
    model, ids = load("bigram"), texts(5, 9, 7)

    def asked(batch: Any) -> list[Any]:
        with batch._changed:
            futures = [batch.submit(each, **GREEDY) for each in ids]
        for future in futures[:2]:
            with pytest.raises((ArithmeticError, FastSpecError), match="planted"):
                future.result(SECONDS)
        return [futures[2].result(SECONDS)[0].tolist(), *answers(batch, ids, [GREEDY] * 3)]

    with pytest.MonkeyPatch.context() as patch, fastspec.patched(model, backend=plain()):
        patch.setattr(Engine, "step", at_call(2, planted, Engine.step, []))
        return run(model, "autoregressive", asked, rows=2, narrows=False)


def structured(load: Loader, kind: str) -> list[Any]:
    """Answers that a grammar holds, and that stop strings end, of a tokenizer that is sent once."""
    del kind
    pytest.importorskip("llguidance")
    model, ids = load("terse"), texts(5, 9, 7, 6, 8)
    grammars = [fastspec.Grammar(TOKENIZER, **form) for form in ({"regex": "[ab/]{9}c"}, {"json_schema": SCHEMA})]
    held = {"max_new_tokens": 24, "eos_token_id": END}
    settings = [
        {**held, "do_sample": False, "logits_processor": [grammars[0]]},
        {**held, "do_sample": True, "seed": 4, "temperature": 0.7, "logits_processor": [grammars[1]]},
        {**held, "do_sample": False, "repetition_penalty": 1.3, "logits_processor": [grammars[1]]},
        {**GREEDY, "max_new_tokens": 30, "stop_strings": ["a", "12"], "tokenizer": TOKENIZER},
        {**GREEDY, "max_new_tokens": 30, "tokenizer": TOKENIZER},
    ]

    def asked(batch: Any) -> list[Any]:
        found = answers(batch, ids, settings) + answers(batch, ids, settings)
        assert batch.ranks is None or len(batch._mail.write((grammars, TOKENIZER))) < 300
        return found

    with fastspec.patched(model, backend=plain()):
        return run(model, "nasd", asked)


def idle(load: Loader, kind: str) -> list[Any]:
    """A batch for which nobody has anything, which sleeps, and hears of prompts again."""
    del kind
    model, ids = load("bigram"), texts(5)
    with pytest.MonkeyPatch.context() as patch, fastspec.patched(model, backend=plain()):
        patch.setattr(open_turns, "BEAT", 0.05)

        with fastspec.continuous(model, "nasd", rows=3, max_length=96) as batch:
            began, cpu = time.perf_counter(), time.process_time()
            time.sleep(0.4)
            assert time.process_time() - cpu < 0.5 * (time.perf_counter() - began)
            made = answers(batch, ids, [GREEDY]) if first() else []
        return [made, state(batch)]


def refused(load: Loader, kind: str) -> list[str]:
    """What is refused of an open batch over processes, and beside one."""
    del kind
    model = load("llama")
    with fastspec.patched(model, backend=plain()):
        told = [why(lambda: fastspec.continuous(model, "nasd", rows=2 + dist.get_rank()))]
        batch = fastspec.continuous(model, "nasd", rows=2, max_length=64)
        told += [why(lambda: fastspec.continuous(model, "nasd"))]
        told += [why(lambda: model.generate(**given(5), max_new_tokens=3))]
        told += [why(lambda: model.generate(**given(5), max_new_tokens=3, assistant="nasd"))]
        told += [why(lambda: fastspec.unpatch(model))]
        told += [why(lambda: batch.submit(texts(5)[0], max_new_tokens=3).result(SECONDS))]
        told += [str(batch.alive), str(first() or batch.warmup(8))]
        if not first():
            batch.close(cancel=True)
            told += [str(batch._thread.is_alive())]
        batch.close()
        told += [why(lambda: batch.submit(texts(5)[0], max_new_tokens=3))]
        return [*told, why(lambda: model.generate(**given(5), max_new_tokens=3, assistant="nasd"))]


def parted(load: Loader, kind: str) -> list[str]:
    """Processes that make different tokens of a prompt: the other one ends, and says so."""
    model = fastspec.patch(load("bigram"), backend=plain())
    model.generation_config.repetition_penalty = 1.0 if first() else 5.0
    batch = fastspec.continuous(model, "autoregressive", rows=1, max_length=64)
    if first():
        told = [why(lambda: batch.submit(texts(5)[0], **{**GREEDY, "max_new_tokens": 50}).result(SECONDS))]
    else:
        told = [why(batch.close)]
    torch.save(told, f"{kind}/told{dist.get_rank()}.pt")
    os._exit(0)


def lost(load: Loader, kind: str) -> list[str]:
    """A process that ends while a batch decodes or is idle, or fails alone in a round: what both tell."""
    how, folder = kind.split(" in ")
    model = load("bigram")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_turns, "BEAT", 0.2)
        patch.setattr(open_ranks, "FAILED", timedelta(seconds=1))
        batch = fastspec.continuous(fastspec.patch(model, backend=plain()), "autoregressive", rows=1, max_length=64)
        if not first():
            patch.setattr(Engine, "step", at_call(3, partial(end_or_fail, how), Engine.step, []))
            if how == "ends idle":
                os._exit(0)
            torch.save([why(batch.close)], f"{folder}/told1.pt")
            os._exit(0)
        told, began = [], time.perf_counter()
        if how != "ends idle":
            told += [why(lambda: batch.submit(texts(5)[0], **GREEDY).result(SECONDS))]
        batch._thread.join(SECONDS)
        told += [why(lambda: batch.submit(texts(5)[0], **GREEDY)), str(batch.alive)]
        batch.close()
    torch.save([*told, time.perf_counter() - began], f"{folder}/told0.pt")
    os._exit(0)
