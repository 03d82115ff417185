"""Cascades of models that two processes hold together, or of which the first alone holds some: the first decides."""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastspec
from fastspec.cascade.decisions import Visit
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.engine.engine import Engine
from fastspec.patches import open_ranks, open_turns
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.session import session_of
from helpers import ranks
from helpers.cascade import trained
from helpers.generate import bigram
from helpers.grammars import TOKENIZER
from helpers.open import SECONDS, texts
from helpers.ranks import Loader, at_call, end_or_fail, first, planted, sizes, why
from helpers.ranks_open import DRAWN, GREEDY, plain

NAMES = "small", "medium", "large"
NOISE = 0.06, 0.02, 0.0
IDS = texts(5, 9, 7, 12, 6, 8, 4, 10)
PRICES = 200.0, 150.0, 0.0, 1e9, 150.0, 400.0, 60.0, 200.0


def save(folder: Path) -> None:
    """Three models, each of which agrees with the next about most tokens."""
    for name, noise in zip(NAMES, NOISE, strict=True):
        model = bigram(**sizes())
        drawn = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(len(name)))
        with torch.no_grad():
            model.lm_head.weight.add_(noise * drawn)
        model.save_pretrained(folder / name)


def over() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def stage(folder: str, name: str, size: int | None, **more: Any) -> fastspec.Stage:
    return fastspec.Stage(f"{folder}/{name}", name=name, tensor_parallel=size, resources={"backend": plain()}, **more)


def cascade(folder: str, **more: Any) -> fastspec.Cascade:
    """A stage that one process holds, and one that all hold, below the large model."""
    below = stage(folder, "small", 1), stage(folder, "medium", over())
    settings = {"predictor": trained(NAMES), "costs": [1.0, 2.0, 4.0], "tokenizer": TOKENIZER, "label": "large"}
    return fastspec.Cascade(below, **{**settings, **more})


def held(model: Any) -> list[bool]:
    """Which of the stages are in this process's memory."""
    return [each.loaded for each in session_of(model).resources["cascade"].stages]


class Heard(RoundStreamer):
    """A streamer that keeps what it is given, and raises after so many rounds."""

    def __init__(self, left: int = 1000) -> None:
        self.left, self.tokens, self.visits = left, list[int](), list[Visit]()

    def put_round(self, round: StreamedRound) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("nobody hears")
        self.tokens += round.tokens

    def put_visit(self, visit: Visit) -> None:
        self.visits.append(visit)


def told(explanation: Any) -> list[Any]:
    return [
        (each.name, each.outcome, each.new_tokens, each.kept_tokens, each.handed_tokens) for each in explanation.visits
    ]


def served(load: Loader, kind: str) -> list[Any]:
    """Prompts at several prices beside each other, streamed, drawn, cancelled and refused; one process alone asks the
    cascade's own `generate`."""
    model, config, made = load("large"), cascade(kind), []
    drawn = [{**DRAWN, "seed": seed} for seed in range(3)]
    with fastspec.patched(model, backend=plain(), cascade=config):
        if not dist.is_initialized():
            for ids, price in zip(IDS, PRICES, strict=True):
                out = model.generate(ids[None].to(ranks.HERE), **GREEDY, assistant=replace(config, price=price))
                made += [out[0].tolist(), told(fastspec.report(model).last.explanations[0])]
            with fastspec.continuous(model, "cascade", rows=2, max_length=96) as batch:
                asked = [batch.submit(ids, **each) for ids, each in zip(IDS, drawn, strict=False)]
                return [*made, [each.result(SECONDS)[0].tolist() for each in asked]]
        with fastspec.continuous(model, "cascade", rows=2, max_length=96, prefill_chunk=5) as batch:
            if not first():
                assert held(model) == [False, True, True] and len(batch.batches) == 2
                return [why(lambda: batch.submit(IDS[0], **GREEDY)), list(batch.loads), str(batch.alive)]
            heard, failing = [Heard() for _ in IDS], Heard(0)
            futures = [
                batch.submit(ids, streamer=streamer, price=price, **GREEDY)
                for ids, price, streamer in zip(IDS, PRICES, heard, strict=True)
            ]
            ends = batch.submit(IDS[1], streamer=failing, price=1e9, **GREEDY)
            gone = batch.submit(IDS[3], price=1e9, **{**GREEDY, "max_new_tokens": 60})
            with pytest.raises(Unsupported, match="12 tokens and may be answered with 90, 102 together"):
                batch.submit(IDS[3], max_new_tokens=90)
            if gone.cancel():
                with pytest.raises(CancelledError):
                    gone.result(SECONDS)
            with pytest.raises(OSError, match="nobody hears"):
                ends.result(SECONDS)
            for ids, future, streamer in zip(IDS, futures, heard, strict=True):
                out = future.result(SECONDS)[0].tolist()
                assert streamer.tokens == out[len(ids) :] and streamer.visits == list(future.explanation.visits)
                made += [out, told(future.explanation)]
            asked = [batch.submit(ids, **each) for ids, each in zip(IDS, drawn, strict=False)]
            made += [[each.result(SECONDS)[0].tolist() for each in asked]]
            assert batch.alive and list(batch.loads) == list(NAMES) and batch.turns > 3
        assert not batch.alive and batch.running == batch.waiting == 0
        return made


def called(load: Loader, kind: str) -> list[Any]:
    """`generate` of the same, at rates that are given and at measured ones, in all processes; and an open batch after
    it, at measured rates and after a warm-up."""
    model, config, made = load("large"), cascade(kind), []
    ids = torch.nn.utils.rnn.pad_sequence([each.flip(0) for each in IDS], batch_first=True).flip(1)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in IDS], batch_first=True).flip(1)
    ids, mask = ids.to(ranks.HERE), mask.to(ranks.HERE)
    with fastspec.patched(model, backend=plain(), cascade=config):
        for price in (150.0, 1e9, 200.0):
            out = model.generate(ids, attention_mask=mask, **GREEDY, assistant=replace(config, price=price))
            made += [out.tolist(), [told(each) for each in fastspec.report(model).last.explanations]]
        if dist.is_initialized():
            assert held(model) == [first(), True, True]
            measured = replace(config, costs=None)
            out = model.generate(ids, attention_mask=mask, **GREEDY, assistant=measured)
            found: list[Any] = [None] * over()
            dist.all_gather_object(found, (out.tolist(), session_of(model).resources["cascade"].rates[None]))
            assert all(each == found[0] for each in found)
            with fastspec.continuous(model, measured, rows=2, max_length=96) as batch:
                batch.warmup(8)
                if first():
                    answers = [batch.submit(each, price=1e9, **GREEDY).result(SECONDS) for each in IDS]
                    assert [each[0, -12:].tolist() for each in answers] == torch.tensor(made[2])[:, -12:].tolist()
            assert held(model) == [first(), True, True]
    return made


def failing(load: Loader, kind: str) -> list[Any]:
    """A round of a cut stage that raises in all processes ends the prompts in its rows, and those that come go on."""
    model, calls = load("large"), list[int]()
    config = cascade(kind, thresholds=[1.0, 1.0])
    cut = [stage(kind, "small", over()), stage(kind, "medium", over())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", at_call(5, planted, Engine.step, calls))
        with fastspec.patched(model, backend=plain(), cascade=replace(config, stages=cut)):
            failed, made = 0, []
            with fastspec.continuous(model, "cascade", rows=1, max_length=96) as batch:
                for ids in IDS if first() else ():
                    try:
                        batch.submit(ids, **GREEDY).result(SECONDS)
                    except (ArithmeticError, FastSpecError) as error:
                        assert "planted" in str(error)
                        failed += 1
                made = [batch.submit(ids, **GREEDY).result(SECONDS)[0].tolist() for ids in IDS if first()]
            assert failed == first() and len(calls) > 5
            return made


def drafted(load: Loader, kind: str) -> list[Any]:
    """The modes that go token by token, whose stages every process runs: whole ones, and cut ones."""
    model, made = load("large"), []
    for size in (1, over()):
        for mode, names, more in (("lossless", NAMES[:2], {}), ("token", NAMES[:1], {"rule": "diff", "alpha": 0.2})):
            below = [stage(kind, name, size) for name in names]
            config = fastspec.Cascade(below, mode=mode, label="large", gamma=3, tokenizer=TOKENIZER, **more)
            with fastspec.patched(model, backend=plain(), cascade=config):
                made += [model.generate(IDS[0][None].to(ranks.HERE), **GREEDY, assistant="cascade")[0].tolist()]
                with fastspec.continuous(model, "cascade", rows=2, max_length=96) as batch:
                    futures = [batch.submit(ids, **GREEDY) for ids in (IDS if first() else ())]
                    answers = [future.result(SECONDS)[0].tolist() for future in futures]
                made += [answers if first() else None]
    return made


def refused(load: Loader, kind: str) -> list[str]:
    """What is refused of a cascade over processes, in all of them; a stage that only the first one opens fails in
    all."""
    model, config = load("large"), cascade(kind)

    def patched(**more: Any) -> str:
        def make() -> None:
            with fastspec.patched(model, backend=plain(), cascade=replace(config, **more)):
                pass

        return why(make)

    def asked(what: Any, **more: Any) -> str:
        with fastspec.patched(model, backend=plain(), cascade=replace(config, **more)):
            return why(what)

    def answered() -> Tensor:
        return model.generate(IDS[0][None], **GREEDY, assistant="cascade")

    def opened() -> None:
        fastspec.continuous(model, "cascade", rows=2, max_length=96).close()

    medium = stage(kind, "medium", over())
    missing = {"stages": [stage(f"{kind}/none", "small", 1), medium]}
    told = [
        patched(stages=[stage(kind, "small", 3), medium]),
        patched(stages=[fastspec.Stage(load("small"), name="small", tensor_parallel=1), medium]),
        asked(opened, memory=1 << 20),
        asked(answered, memory=1 << 20),
        asked(opened, **missing),
        asked(answered, **missing),
        asked(opened, stages=[stage(kind, "small", 1, assistant="speculative"), medium]),
        asked(opened, stages=[stage(kind, "small", 1), replace(medium, assistant="speculative")]),
        asked(opened, assistant="speculative"),
        asked(answered, stages=[stage(kind, "small", 1), replace(medium, assistant="speculative")], price=1e9),
        asked(opened),
    ]
    with fastspec.patched(model, backend=plain(), cascade=config):
        with fastspec.continuous(model, "cascade", rows=2, max_length=64):
            told += [why(opened), why(answered)]
        told += [why(answered)]
    return told


def lost(load: Loader, kind: str) -> None:
    """A process that ends while a cascade decodes, fails alone in a round, or makes other tokens: what both tell."""
    how, folder = kind.split(" in ")
    model = load("large")
    config = cascade(folder, thresholds=[1.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_turns, "BEAT", 0.2)
        patch.setattr(open_ranks, "FAILED", timedelta(seconds=1))
        batch = fastspec.continuous(
            fastspec.patch(model, backend=plain(), cascade=config), "cascade", rows=1, max_length=64
        )
        if not first():
            if how == "parts":
                batch.batches[0].model.generation_config.repetition_penalty = 5.0
            else:
                patch.setattr(Engine, "step", at_call(3, partial(end_or_fail, how), Engine.step, []))
            torch.save([why(batch.close)], f"{folder}/told1.pt")
            os._exit(0)
        began = time.perf_counter()
        told: list[Any] = [why(lambda: batch.submit(IDS[0], **{**GREEDY, "max_new_tokens": 50}).result(SECONDS))]
        for each in batch.batches[1:]:
            each._thread.join(SECONDS)
        told += [why(lambda: batch.submit(IDS[0], **GREEDY).result(SECONDS)), str(batch.alive)]
        batch.close()
    torch.save([*told, time.perf_counter() - began], f"{folder}/told0.pt")
    os._exit(0)
