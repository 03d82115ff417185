"""A model on a GPU that is not CUDA's current one says there what it says on the current one, in graphs of that GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.generate import TREE, bigram, prompts, seer
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.devices import use_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]
FIRST, SECOND = "cuda:0", "cuda:1"
GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _the_first_is_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(0)


def on(device: str, *lengths: int) -> dict[str, torch.Tensor]:
    return {name: each.to(device) for name, each in prompts(*lengths).items()}


def everything(model: Any, head: Any, draft: Any, device: str) -> list[Any]:
    """Calls of all kinds, each twice, so that the second replays what the first has captured."""
    made: list[Any] = []
    model, head, draft = (copy.deepcopy(each).to(device) for each in (model, head, draft))
    inputs = on(device, 5, 9)
    with fastspec.patched(model, eagle3=head, speculative=draft):
        for each in (
            "autoregressive",
            "eagle3",
            TREE,
            "nasd",
            "speculative",
            fastspec.ContinuousBatch("eagle3", rows=1),
        ) * 2:
            made.append(model.generate(**inputs, **GREEDY, assistant=each))
        report = fastspec.report(model)
        assert report.backend == "triton" and all(call.replays > 1 for call in report.calls[-3:])
        for _ in range(2):
            torch.manual_seed(3)
            made.append(
                model.generate(
                    **inputs, max_new_tokens=24, do_sample=True, top_k=20, temperature=0.7, assistant="eagle3"
                )
            )
        with fastspec.continuous(model, "eagle3", rows=2, max_length=64) as batch:
            batch.warmup(length=16)
            found = [batch.submit(inputs["input_ids"][1:], **GREEDY) for _ in range(3)]
            made += [each.result(60) for each in found]
        with fastspec.profile(model) as profile:
            made.append(model.generate(**inputs, **GREEDY, assistant="eagle3"))
        assert profile.quantiles("score")[0] > 0
    assert all(each.device == torch.device(device) for each in made)
    return [each.tolist() for each in made]


def test_a_model_on_the_second_says_what_it_says_on_the_first() -> None:
    """One after the other in one process, and back again: nothing that is kept of one device is used on the other."""
    model, draft = bigram(), bigram()
    head = seer(model)
    first = everything(model, head, draft, FIRST)
    assert everything(model, head, draft, SECOND) == first
    assert everything(model, head, draft, FIRST) == first


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_5_text", "gpt_oss"])
def test_families_on_the_second(kind: str) -> None:
    model = tiny_model(kind)
    head = tiny_head(model)
    made = []
    for device in (SECOND, FIRST):
        there, own = copy.deepcopy(model).to(device), copy.deepcopy(head).to(device)
        with fastspec.patched(there, eagle3=own):
            made.append(
                [
                    there.generate(**on(device, 5, 9), **GREEDY, assistant=each).tolist()
                    for each in ("autoregressive", TREE) * 2
                ]
            )
    assert made[0] == made[1]


def test_a_tree_grows_on_the_second() -> None:
    model, shape, grown = tiny_model("llama"), fastspec.TreeShape(depth=3, top_k=3, total_tokens=8), []
    for device in (SECOND, FIRST):
        head = tiny_head(model).to(device)
        head.bind(copy.deepcopy(model.get_input_embeddings()).to(device), None)
        ids = on(device, 6)["input_ids"]
        width = len(head.config.taps) * head.config.target_hidden_size
        features = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(device)
        for backend in ("torch", "triton"):
            tree = fastspec.frontier_generate(head, ids, features, shape=shape, backend=backend)
            grown.append(tree.tokens.tolist())
    assert grown[0] == grown[1] == grown[2] == grown[3]


def test_a_device_that_a_command_names_becomes_the_current_one() -> None:
    assert use_device("cuda:1") == "cuda:1" and torch.cuda.current_device() == 1
    assert use_device("cuda:0") == "cuda:0" and torch.cuda.current_device() == 0
