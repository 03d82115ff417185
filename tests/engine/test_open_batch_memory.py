"""An open batch keeps nothing of prompts that were answered: hundreds of them leave as many objects and bytes as there
were."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import ON_CUDA
from helpers.open import GREEDY, made, texts, told

import fastspec

TREE = fastspec.Eagle3(depth=1, top_k=2, total_tokens=4)
SMALL_CHANGE = 2**12
"""Bytes of tensors: what the prompts that rows held last have. The ids alone of two hundred take three times as
many."""


def kept(device: str) -> tuple[int, int]:
    """Objects that the garbage collector sees, and bytes of tensors: on the CPU of those among them."""
    gc.collect()
    found = gc.get_objects()
    if device == "cpu":
        return len(found), sum(each.nbytes for each in found if type(each) in (torch.Tensor, torch.nn.Parameter))
    torch.cuda.synchronize()
    return len(found), torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(
    "assistant, device, captured",
    [
        ("autoregressive", "cpu", False),
        (TREE, "cpu", True),
        pytest.param("autoregressive", "cuda", True, marks=ON_CUDA),
        pytest.param(TREE, "cuda", True, marks=ON_CUDA),
    ],
    ids=["plain", "captured", "plain on cuda", "eagle3 on cuda"],
)
def test_a_hundred_prompts_leave_nothing_behind(assistant, device, captured, monkeypatch):
    """Of several lengths, some cancelled, in rounds that narrow and widen."""
    if captured and device == "cpu":
        stand_in(monkeypatch)
    _, model = made()
    model.to(device)
    ids = texts(9, 3, 14, 5, 7, 2, 11, 6)

    def ask(batch: Any, count: int) -> None:
        futures = [batch.submit(ids[at % len(ids)], **{**GREEDY, "max_new_tokens": 1 + at % 4}) for at in range(count)]
        gone = [future for future in futures[::7] if future.cancel()]
        told([future for future in futures if future not in gone])
        for at in range(4):  # two at a time, and one
            told([batch.submit(each, **{**GREEDY, "max_new_tokens": 12}) for each in ids[at : at + 2 - at % 2]])

    with fastspec.continuous(model, assistant, rows=4, max_length=64) as batch:
        batch.warmup()  # every number of rows, and of prompts that one pass reads: which of them come about is chance
        ask(batch, 16)
        assert set(batch._widths.made) == {1, 2, 4}
        assert set(batch._widths.made[4].engine.entries) == ({1, 2, 4} if captured else {1})
        objects, tensors = kept(device)
        ask(batch, 100)
        more, same = kept(device)
    assert same - tensors < SMALL_CHANGE and more - objects < 100  # a prompt has a hundred of its own
