"""Layers that see a window or a chunk of the text: calls go past it and give what the unpatched model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import CUDA
from helpers.families import KINDS, NEW, SPAN, windowed
from helpers.generate import OwnProcessor, conversation, free, prompts
from helpers.models import tiny_head
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

import fastspec
from fastspec.generation import layer_state
from fastspec.kernels.attention.layout import LEAST_RING
from fastspec.kernels.attention.reference import Span, attention_layout
from fastspec.patches.backends import TORCH
from fastspec.patches.hf import tree_check
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel

ROWS = prompts(5, 11)
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
ASSISTANTS = "autoregressive", "nasd", fastspec.Speculative(gamma=3, branches=3)
OWN = "mistral", "gemma2", "gpt_oss", "gemma4_unified_text", "llama4_text"
"""Windows in all layers and in some, with caps, with sinks, under heads of two sizes, and chunks: these are held to
every assistant. The others differ in what is around a window, and are held to rounds of one node and of a tree."""


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that the texts of these tests go round, some of them twice. The kernels take none shorter than a block."""
    monkeypatch.setattr(layer_state, "SLACK", 4)
    monkeypatch.setattr(layer_state, "STEP", LEAST_RING if torch.cuda.is_available() else 1)
    monkeypatch.setattr("fastspec.generation.target.NARROW", 4)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_outgrow_windows_and_chunks(kind: str, device: str) -> None:
    model, inputs = windowed(kind).to(device), {name: each.to(device) for name, each in ROWS.items()}
    new = NEW if device == "cpu" else 160
    expected = free(model, inputs, new)
    fastspec.patch(model, speculative=windowed(kind, 1).to(device), eagle3=tiny_head(model).to(device))
    for assistant in (*ASSISTANTS, TREE) if kind in OWN or device != "cpu" else ("autoregressive", TREE):
        assert free(model, inputs, new, assistant=assistant) == expected, assistant
    assert expected != free(wide(model), inputs, new)  # the window matters


@pytest.mark.some("gpt_oss", "llama4_text")
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_a_row_may_be_much_shorter_than_the_others(kind: str, device: str) -> None:
    """Than what a ring has room for beside the window: what fills the row up must not go round it."""
    model = windowed(kind).to(device)
    inputs = {
        name: each.to(device) for name, each in prompts(3, 2 * LEAST_RING if device == "cuda" else 45, 17).items()
    }
    expected = free(model, inputs, 6)
    with fastspec.patched(model, eagle3=tiny_head(model).to(device)):
        for assistant in ("autoregressive", TREE, fastspec.ContinuousBatch("nasd", rows=2)):
            assert free(model, inputs, 6, assistant=assistant) == expected, assistant


@pytest.mark.some("gemma3_text")
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_padded_chunks_end_where_the_buffers_of_a_ring_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are captured are padded, to more than a text has slots for; also of a turn that begins in the middle
    of them."""
    stand_in(monkeypatch)
    model = windowed(kind)
    expected, turns = free(model, ROWS, NEW), texts_and_shapes(model, (5, 11), {})
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("autoregressive", TREE):
            assert free(model, ROWS, NEW, assistant=assistant) == expected, assistant
            assert texts_and_shapes(model, (5, 11), {"assistant": assistant}) == turns, assistant


def test_a_draft_keeps_no_more_of_a_text_than_its_window() -> None:
    model = windowed("mistral")
    draft = language_model(model, None, rows=1, capacity=400, tail=2, taps=None, ops=TORCH, drafts=True)
    draft.reserve(400)
    assert all(each.k.shape[3] < 400 for each in draft.state.kinds)


def wide(model: Any) -> Any:
    """The model with windows that no text goes past."""
    fastspec.unpatch(model)
    config = model.config
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 400)
    return model


@pytest.mark.some("mistral", "gemma2")
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "gemma2"])
def test_trees_of_a_head_keep_to_the_window(kind: str) -> None:
    model = windowed(kind)
    expected = free(model, ROWS, NEW)
    fastspec.patch(model, eagle3=tiny_head(model))
    assert free(model, ROWS, NEW, assistant=TREE) == expected
    assert free(model, ROWS, NEW, assistant=fastspec.ContinuousBatch("nasd", rows=1)) == expected
    if kind != "gemma2":  # needs an adapter
        assert free(model, ROWS, NEW, assistant=fastspec.Speculative(early_exit=2)) == expected


def test_calls_in_lockstep_keep_to_the_window() -> None:
    model = windowed("gemma2")
    expected = free(model, ROWS, NEW, logits_processor=[OwnProcessor()])
    fastspec.patch(model)
    assert free(model, ROWS, NEW, logits_processor=[OwnProcessor()], assistant="nasd") == expected


@pytest.mark.some("mistral", "gpt_oss", "llama4_text")
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        pytest.param(
            kind, lengths, marks=pytest.mark.slow if (kind in ("mistral", "gpt_oss")) == (len(lengths) == 1) else ()
        )
        for kind in ("mistral", "gemma2", "gpt_oss", "llama4_text")
        for lengths in ((5,), (5, 11))
    ],
    ids=str,
)
def test_turns_go_on_from_caches_that_dropped_what_is_out_of_sight(kind: str, lengths: tuple[int, ...]) -> None:
    model = windowed(kind)
    expected = texts_and_shapes(model, lengths, {})
    fastspec.patch(model, speculative=windowed(kind, 1))
    for assistant in ASSISTANTS:
        assert texts_and_shapes(model, lengths, {"assistant": assistant}) == expected, assistant
    fastspec.unpatch(model)
    assert texts_and_shapes(model, lengths, {}) == expected


def texts_and_shapes(model: Any, lengths: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """Texts and the shapes of the cache after each of three turns; the second is transformers' own."""
    return [
        (out.sequences.tolist(), [tuple(layer.keys.shape) for layer in kept_cache(out).layers])
        for out in conversation(model, prompts(*lengths), [options, {}, options])
    ]


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "granite_swa"])
def test_a_cache_that_was_not_told_of_windows_comes_back_whole(kind: str) -> None:
    """It keeps every token of a layer: a text that the caller makes shorter again sees more of them."""
    model = windowed(kind)

    def called(**options: Any) -> list[Tensor]:
        cache = DynamicCache()
        model.generate(**ROWS, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **{CACHE: cache}, **options)
        real = torch.cat((ROWS["attention_mask"], torch.ones(2, NEW - 1, dtype=torch.long)), 1)[:, None, :, None]
        return [states * real for layer in cache.layers for states in (layer.keys, layer.values)]

    expected = called()
    fastspec.patch(model)
    for mine, theirs in zip(called(assistant="nasd"), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "granite_swa"])
def test_what_is_kept_does_not_grow_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    kept = HFModel.__init__
    monkeypatch.setattr(
        HFModel, "__init__", lambda self, *args, **more: (kept(self, *args, **more), made.append(self))[0]
    )
    model = windowed(kind)
    with fastspec.patched(model):
        free(model, ROWS, 60, assistant="nasd")
    slots = {None if state.ring is None else "ring": state.k.shape[3] for state in made[-1].state.kinds}
    assert slots["ring"] == SPAN + 4 + made[-1].state.tail < 40 and slots.get(None, 71) >= 71


def test_a_tree_is_cut_by_positions_and_not_by_slots() -> None:
    """Two branches behind a prefix of three: slots 3, 4, 5, 6 stand at positions 3, 4, 4, 5."""
    words, depths = torch.tensor([[[0b0001], [0b0011], [0b0101], [0b1101]]]), torch.tensor([[0, 1, 1, 2]])
    layout = attention_layout(torch.tensor([3]), words, 4, 4, 7, span=Span(3), depths=depths)
    assert layout.visible[0, 0].int().tolist() == [
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 1, 1],
    ]
    layout = attention_layout(torch.tensor([3]), words, 4, 4, 7, span=Span(4, chunk=True), depths=depths)
    assert layout.visible[0, 0].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_a_model_that_looks_past_its_window_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written of a window in the configuration, and not in the model, is found by the check with a short
    one."""
    model = windowed("phi3")
    whole = type(model).generate

    def without(self: Any, *args: Any, **options: Any) -> Any:
        held, self.config.sliding_window = self.config.sliding_window, None
        try:
            return whole(self, *args, **options)
        finally:
            self.config.sliding_window = held

    monkeypatch.setattr(type(model), "generate", without)
    monkeypatch.setattr(tree_check, "_VERDICTS", {})
    with pytest.raises(fastspec.Unsupported, match="standard deviations apart"):
        tree_check.check_trust(model)
    assert model.config.sliding_window == SPAN


def test_the_mapping_of_kinds_names_real_families() -> None:
    assert all(CONFIG_MAPPING[kind] in AutoModelForCausalLM._model_mapping for kind in KINDS)
