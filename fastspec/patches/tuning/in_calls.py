"""Which launches that are the fastest by themselves make no call slower: in a pass kernels overlap, and one uses what another leaves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby, product
from typing import Any, TypeAlias

import torch

from fastspec.patches.hf.compat import device_of
from fastspec.patches.session import session_of

Key: TypeAlias = tuple[str, tuple[Hashable, ...]]
"""An op and a place."""
HARM = 1.003
"""Launches are dropped with which calls take more than this share of their time without them; less is noise."""
NEW = 48
"""Tokens of a call."""
ATTENTION = ("few_attention", "tree_attention")


def call_times(model: Any, names: Sequence[str], rows: Sequence[int], length: int) -> list[float]:
    """Seconds of a round of every assistant with every number of rows, behind `length` tokens that mean nothing, or as many as there is
    room for: the median of three calls, behind two that compile and capture."""
    session, device, config, found = session_of(model), device_of(model), model.config.get_text_config(), []
    assert session is not None
    width = max(1, min(length, (getattr(config, "max_position_embeddings", None) or length + NEW) - NEW))
    for name, count in product(names, rows):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # in all processes
            ids = torch.randint(config.vocab_size, (count, width), device=device)
        times = []
        for _ in range(5):
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), assistant=name, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
                do_sample=False,
            )  # fmt: skip
            last = session.calls[-1]
            times.append((last.seconds - last.phases["prefill"]) / max(1, last.rounds))
        found.append(statistics.median(times[2:]))
    return found


def in_rounds(op: str, about: Sequence[Any]) -> bool:
    """Whether rounds ask for a place, as `candidates.trial` describes it, and not prompts alone."""
    return op not in ATTENTION or about[1] == 1 or not about[6]


def kind_of(key: Key) -> tuple[str, bool]:
    """Places whose launches are judged together: of an op, with one row or more."""
    op, place = key
    return op, op not in ATTENTION and place[0] == 1


def harmless(
    found: Mapping[Key, Any], use: Callable[[Mapping[Key, Any]], None], times: Callable[[], list[float]],
    agreed: Callable[[float], float], late: Callable[[], bool],
) -> set[Key]:  # fmt: skip
    """Those of the launches with which calls take no longer.

    They are tried kind by kind, and of a kind with which calls are slower one by one, what is `late` not at all. `use` lets launches be
    used, `times` measures calls with them, and `agreed` is the first of the processes' word for a number.
    """
    use({})
    before, kept = times(), set[Key]()
    best = 1.0

    def slows(more: Sequence[Key]) -> bool:
        nonlocal best
        use({key: found[key] for key in (*kept, *more)})
        ratio = agreed(statistics.mean(now / then for now, then in zip(times(), before, strict=True)))
        if ratio > best * HARM:
            return True
        best = min(best, ratio)
        kept.update(more)
        return False

    for _, group in groupby(sorted(found, key=lambda key: (kind_of(key), str(key))), key=kind_of):
        keys = list(group)
        if slows(keys) and len(keys) > 1:
            for key in keys:
                if agreed(float(late())):
                    break
                slows([key])
    return kept
