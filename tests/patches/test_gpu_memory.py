"""On CUDA: how much memory a patched model takes beside its weights and caches, and that all of it is given back.

What is counted are the bytes that tensors asked for: `memory_allocated` counts the blocks that they were given, each up
to 1 MiB larger by what happened to be free. cuBLAS keeps a workspace for each stream that it was called on, the
capturing one too, and the products' counters stay on the device: a small model's whole life has made them before
anything is counted.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.generate import MAKERS, TREE, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.generation.sequence_state import FIRST_SLOTS
from fastspec.patches.session import session_of

pytestmark = ON_CUDA
DEVICE = "cuda"
SMALL_CHANGE = 2**16
"""Bytes: a hundred of the device's smallest blocks, for what a library may keep of a call. The smallest thing that
fastspec could have left, one layer's query, key and value weights below, has four times as many, and the cache of one
kind of call twenty-four times."""


def held() -> int:
    """Bytes that the tensors on the device asked for."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def peak() -> int:
    """The most of them since the last `reset_peak_memory_stats`."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


@pytest.fixture(scope="module")
def lived():
    """A model has lived on the device before."""
    calls_of_every_kind(0)


@pytest.fixture
def uncollected(lived):
    """No garbage is collected: what is dropped must be free by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls_of_every_kind(seed: int) -> None:
    """A model's whole life: patched, asked in more kinds of call than are kept, unpatched and gone."""
    make, head = MAKERS["random"]
    model = make(seed=seed).to(DEVICE)
    fastspec.patch(model, eagle3=head(model).to(DEVICE))
    options = {"do_sample": False, "max_new_tokens": 30}
    auto = fastspec.Eagle3(depth=4, top_k=3, total_tokens="auto")
    kinds: list[tuple[Any, dict[str, Any]]] = [(name, {}) for name in ("autoregressive", "nasd", TREE, auto)]
    kinds += [
        (fastspec.Speculative(early_exit=1), {}),
        (TREE, {"do_sample": True}),
        (TREE, {"repetition_penalty": 1.2}),
    ]
    for lengths in ((9,), (3, 7), (9,)):
        for assistant, more in kinds:
            model.generate(
                **{name: ids.to(DEVICE) for name, ids in prompts(*lengths).items()},
                **{**options, **more},
                assistant=assistant,
            )
    assert len(session_of(model).engines.held) == 4
    fastspec.unpatch(model)


def test_nothing_is_left_of_a_model_that_is_unpatched_and_deleted(uncollected):
    before = held()
    for seed in (1, 2):
        calls_of_every_kind(seed)
        assert abs(held() - before) <= SMALL_CHANGE


def test_unpatch_frees_what_the_calls_took(uncollected):
    """With the model alive: the captured rounds, their graphs and their caches go, the weights stay."""
    make, head = MAKERS["random"]
    model = make().to(DEVICE)
    drafts = head(model).to(DEVICE)
    inputs = {name: ids.to(DEVICE) for name, ids in prompts(9).items()}
    before = held()
    for _ in range(2):
        fastspec.patch(model, eagle3=drafts)
        for assistant in (TREE, "autoregressive", "nasd"):
            for _ in range(2):
                model.generate(**inputs, do_sample=False, max_new_tokens=20, assistant=assistant)
        assert held() > before + 2**20  # three caches of 6 layers
        fastspec.unpatch(model)
        assert abs(held() - before) <= SMALL_CHANGE


# 91 MiB in half precision. A layer is so thin that the copy of its gate and up, made while patch lays them side by
# side, is 0.8 % of the weights, and there are so many that a second copy of all query, key and value weights is 5 %
# (Mixtral) or 18 %, of all gate and up 48 %.
WIDE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "num_hidden_layers": 64,
}
FAMILIES = {"llama": WIDE, "qwen3": WIDE, "mixtral": {**WIDE, "num_hidden_layers": 20}}
QUERY_KEY_VALUE = 2 * 256 * (4 + 2 * 2) * 64
"""Bytes of one layer's."""


def cache_bytes(config: Any, tail: int) -> int:
    """Of keys and values of one row with `tail` nodes behind, in half precision."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * (FIRST_SLOTS + tail) * config.head_dim


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=["autoregressive", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patch_and_a_call_take_two_percent_beside_weights_and_caches(family, assistant, uncollected):
    """At the peak; and after the patch exactly, where one layer's query, key and value held twice would be more than is
    allowed.

    What a call allocates beside the caches: the rotary tables, made in fp32 from angles of 1,036 positions and 64
    channels, 265 kB each, of which four exist at once (1.1 %), and later 133 kB of each; in the graphs' pools what a
    prompt's chunk of 32 nodes and a round of 12 compute on the way (at most 32 * 2 * 704 values in a layer, 90 kB, and
    some 300 kB of partial sums of attention in fp32) and leave behind (logits over 1,024 tokens, features); the
    drafter's buffers, of six rows of 256 values.
    """
    model = tiny_model(family, **FAMILIES[family]).to(DEVICE, torch.bfloat16)
    head = tiny_head(model, taps=(2, 7, 11)).to(DEVICE, torch.bfloat16) if assistant is TREE else None
    weights = sum(p.nbytes for p in model.parameters())
    assert 90 * 2**20 < weights < 92 * 2**20 and QUERY_KEY_VALUE > 3 * SMALL_CHANGE
    inputs = {name: ids.to(DEVICE) for name, ids in prompts(9).items()}

    def call() -> None:
        model.generate(**inputs, do_sample=False, max_new_tokens=40, eos_token_id=None, assistant=assistant)

    plain = held()
    torch.cuda.reset_peak_memory_stats()
    fastspec.patch(model, eagle3=head, backend="triton")
    assert peak() - plain <= 0.02 * weights
    assert abs(held() - plain) <= SMALL_CHANGE
    caches = cache_bytes(model.config, 1 if head is None else TREE.total_tokens)
    caches += 0 if head is None else cache_bytes(head.config, TREE.depth * TREE.top_k)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        call()
        assert peak() - plain - caches <= 0.02 * weights
    assert fastspec.report(model).last.replays > 10
    (engine,) = session_of(model).engines.held.values()
    parts = [kept for part in (engine.target, engine.drafter) if part is not None for kept in part.state.kinds]
    assert sum(kept.k.nbytes + kept.v.nbytes for kept in parts) == caches
    del engine, parts
    fastspec.unpatch(model)
    assert abs(held() - plain) <= SMALL_CHANGE
