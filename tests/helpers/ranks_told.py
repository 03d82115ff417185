"""What two processes that hold a model together tell each other beside its tokens: what is refused, and what the first
one does for all."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessorList
from transformers.distributed import DistributedConfig

import fastspec
from fastspec import files
from fastspec.kernels import tuned_launches
from fastspec.kernels.linear.launches import RowLaunch
from fastspec.patches.assistants import mtp as own_layers
from fastspec.patches.assistants import smaller_heads
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.session import PatchSession, session_of
from fastspec.patches.tuning import candidates, store, tune
from helpers.cascade import cascaded
from helpers.models import tiny_model
from helpers.ranks import GREEDY, OWN_LAYER, SIZE, SMALL, Loader, Other, first, given, small_model, why


def refusals(load: Loader, kind: str) -> list[str]:
    """What processes that were called differently hear, and calls that are refused."""
    del kind
    model = cascaded([small_model(), load("llama")], memory=1 << 20)
    told = [why(lambda: model.generate(**given(5), **GREEDY, assistant="cascade"))]
    told += [why(lambda: model.generate(**given(5, 9, seed=dist.get_rank()), **GREEDY, assistant="nasd"))]
    told += [why(lambda: model.generate(**given(5), **GREEDY, assistant=fastspec.Nasd(gamma=3 if first() else 4)))]
    with fastspec.profile(model) if dist.get_rank() else nullcontext():
        told += [why(lambda: model.generate(**given(5), **GREEDY, assistant="nasd"))]
    other = LogitsProcessorList([Other()])
    told += [
        why(
            lambda: model.generate(
                **given(5), **GREEDY, eos_token_id=None, logits_processor=other, assistant="autoregressive"
            )
        )
    ]
    older, many, more = tiny_model("llama", **SMALL), load("llama"), load("llama")
    older._tp_size, many._tp_size = 2, 4
    more.config.distributed_config = DistributedConfig(tp_size=SIZE, fsdp_size=2, tp_plan="auto")
    return [*told, *(why(partial(fastspec.patch, each)) for each in (older, many, more))]


def tuned(load: Loader, kind: str) -> list[Any]:
    """Launches of a model's parts that the first process finds alone, and all use; then one whose search fails."""
    model, launch = load(kind).half(), RowLaunch(8, 64, 1)
    spent: list[Any] = []

    def clock(run: Any, copies: int, device: torch.device) -> float:
        spent.append(run.args[0])
        return 0.5 if run.args[0] == launch else 1.0

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        fastspec.patched(model, backend="triton"),
    ):
        patch.setenv(files.SETTING, folder)
        short = partial(model.generate, **given(3), max_new_tokens=2, do_sample=False, assistant="autoregressive")
        patch.setattr(tune, "seconds_of", clock)
        patch.setattr(tune, "warmup", lambda model, rows, length: short())
        patch.setattr(candidates, "COPIES_OF", 0)
        patch.setattr(tune, "call_times", lambda *given: [1.0])
        patch.setattr(candidates, "_of_rows", lambda op, rows, *rest: [launch] if rows == 1 else [])
        before, found = short(), fastspec.tune(model)
        used = tuned_launches.installed("cpu")
        kept = [[str(each.op), *map(str, each.shape)] for each in found.places if each.kept]
        assert bool(spent) == first() and set(used.values()) == {launch} and len(used) == len(kept), (spent, used)
        made = [kept, before.tolist(), short().tolist(), fastspec.report(model).tables]
        patch.setattr(candidates, "trial", lambda *given: 1 / 0)
        try:
            fastspec.tune(model)
        except ZeroDivisionError as error:
            made.append(str(error))
        store.forget()
    return made


def by_first(load: Loader, kind: str) -> list[Any]:
    """What the first process does for all, and how the others hear of its end; tables of launches, and a dtype of
    drafts, that are not those of the others."""
    del kind
    model, made = load("llama"), []
    ranks = Ranks(group_of(model), torch.device("cpu"))  # type: ignore[arg-type]

    class Local(Exception):
        """It cannot be sent."""

    class Wordy(Exception):
        """It can be sent, and not read."""

        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    for error in (ValueError("plain"), Local("of this place"), Wordy("two ", "words"), KeyboardInterrupt()):

        def run(error: BaseException = error) -> int:
            assert first()
            raise error

        try:
            ranks.by_first(run)
        except BaseException as raised:
            made.append(f"{type(raised).__name__}: {raised}")
    made.append(ranks.by_first(lambda: 5))
    with fastspec.patched(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_launches, "_launches", {("cpu", "linear", (dist.get_rank(),)): None})
        made.append(why(lambda: model.generate(**given(5), **GREEDY, assistant="autoregressive")))
    with fastspec.patched(model), pytest.MonkeyPatch.context() as patch:
        ops = PatchSession.ops
        drafts_in = torch.bfloat16 if first() else None
        patch.setattr(PatchSession, "ops", lambda *given: replace(ops(*given), drafts_in=drafts_in))
        made.append(why(lambda: model.generate(**given(5), **GREEDY, assistant="autoregressive")))
    return made


def verdicts(load: Loader, kind: str) -> list[Any]:
    """Readings of an MTP layer that processes have after each patch, and how often each has probed it: without a kept
    verdict, with one that the first alone finds, and with another that the first alone does not find."""
    del kind
    model, probes, made = load(f"glm4_moe{OWN_LAYER}"), [], list[Any]()
    ranks, agreements = Ranks(group_of(model), torch.device("cpu")), own_layers._agreements  # type: ignore[arg-type]

    def probing(*given: Any) -> list[float]:
        probes.append(1)
        return agreements(*given)

    def reading() -> tuple[int, bool]:
        with fastspec.patched(model, mtp=True):
            return len(probes), session_of(model).resources["mtp"].config.last_tap_before_norm  # type: ignore[union-attr]

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(own_layers, "PROBE_TOKENS", 8)
        patch.setattr(own_layers, "_agreements", probing)
        for name in "full" if first() else "empty", "full" if first() else "other", "other" if first() else "full":
            patch.setenv(files.SETTING, f"{folder}/{name}")
            made += [reading(), len(list(files.kept("mtp")))]
            name, row = ranks.first_value([(each.name, files.read(each)) for each in files.kept("mtp")])[0]
            if not first():
                files.write(Path(folder) / "full" / "mtp" / name, {**row, "before": not row["before"]})
    return made


def vocabularies(load: Loader, kind: str) -> list[Any]:
    """Drafted tokens of an MTP layer in processes whose lists of them differ, their answer, and rounds."""
    del kind
    model = load(f"glm4_moe{OWN_LAYER}")
    with pytest.MonkeyPatch.context() as patch, fastspec.patched(model, mtp=True):
        patch.setattr(smaller_heads, "_ids", lambda path: torch.arange(0, 40) if first() else torch.arange(20, 60))
        few = fastspec.Mtp(draft_vocab="list.json")
        answer, again = (model.generate(**given(5, 9), **GREEDY, assistant=few) for _ in range(2))
        assert torch.equal(answer, again)
        _, twin = session_of(model).resources["mtp"].derived.narrowed  # type: ignore[union-attr]
        return [twin.drafted().tolist(), answer, fastspec.report(model).last.rounds]
