"""Caches that a caller hands in: of another model, of other rows or lengths, and those that change what they keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import recurrent
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

import fastspec
from fastspec.patches.hf.cache import CACHE

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
HELD = 9
ASSISTANTS = ["autoregressive", "nasd", TREE]


def filled(model: Any, rows: int = 1, cache: Any = None) -> Any:
    """A cache, or the one given, after the first tokens of the prompt."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(prompts(12)["input_ids"][:, :HELD].expand(rows, -1), use_cache=True, **{CACHE: cache})
    return cache


def ask(model: Any, cache: Any, rows: int = 1, **options: Any) -> Any:
    inputs = {name: value.expand(rows, -1) for name, value in prompts(12).items()}
    return model.generate(**inputs, **{CACHE: cache}, **OPTIONS, **options).tolist()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    patched = shallow_model()
    return shallow_model(), fastspec.patch(patched, eagle3=tiny_head(patched))


def cut(cache: Any, *names: str, layer: int = 1) -> Any:
    """The cache, of which a layer holds fewer keys or values, as what compresses layers by themselves leaves it."""
    for name in names:
        setattr(cache.layers[layer], name, getattr(cache.layers[layer], name)[:, :, :5])
    return cache


class Halves(DynamicCache):
    """A cache of a user's own, which gives back other values than it is given."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(keys, values, *args, **kwargs)
        return keys, values * 0.5


class HalvingLayer(DynamicLayer):
    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(keys, values, *args, **kwargs)
        return keys, values * 0.5


def of_layers(kind: type) -> Any:
    cache = DynamicCache()
    cache.layer_class_to_replicate = kind
    return cache


MISFITS: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    "fewer layers": (lambda _: filled(shallow_model(num_hidden_layers=2)), 1, "holds 2 layers.*keeps 3"),
    "more heads": (lambda _: filled(shallow_model(num_key_value_heads=4)), 1, r"\(4, 16\).*in layer 0.*\(2, 16\)"),
    "wider heads": (lambda _: filled(shallow_model(hidden_size=128)), 1, r"\(2, 32\).*in layer 0.*\(2, 16\)"),
    "fewer rows": (filled, 2, "holds 1 rows for 2 of input_ids"),
    "more rows": (lambda model: filled(model, rows=2), 1, "holds 2 rows for 1 of input_ids"),
    "a shorter layer": (lambda model: cut(filled(model), "keys", "values"), 1, "5 keys and 5 values in layer 1, and 9"),
    "fewer values": (lambda model: cut(filled(model), "values"), 1, "9 keys and 5 values in layer 1, and 9"),
    "a shorter first layer": (
        lambda model: cut(filled(model), "keys", "values", layer=0),
        1,
        "9 keys and 9 values in layer 1, and 5",
    ),
    "no layers": (
        lambda _: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        1,
        "EncoderDecoderCache, which has no",
    ),
    "nothing yet": (lambda model: QuantizedCache("fp8", model.config), 1, "QuantizedCache: Fp8QuantizedLayer may keep"),
    "eight bits": (
        lambda model: filled(model, cache=QuantizedCache("fp8", model.config)),
        1,
        "QuantizedCache: Fp8QuantizedLayer may keep",
    ),
    "an update of its own": (lambda model: Halves(config=model.config), 1, "a Halves: Halves may keep"),
    "layers of its own": (lambda _: of_layers(HalvingLayer), 1, "a DynamicCache: HalvingLayer may keep"),
    "the whole prompt": (
        lambda model: (
            cache := filled(model),
            model(prompts(12)["input_ids"][:, HELD:], use_cache=True, **{CACHE: cache}),
        )[0],
        1,
        r"holds 12 tokens.*no further ones.*crop\(-1\)",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_cache_that_rounds_would_read_otherwise_is_refused(models, misfit):
    make, rows, match = MISFITS[misfit]
    for assistant in ASSISTANTS:
        with pytest.raises(fastspec.Unsupported, match=match):
            ask(models[1], make(models[1]), rows, assistant=assistant)


class Counts(DynamicCache):
    """A cache of a user's own that keeps what it is given."""

    def tokens(self) -> int:
        return int(self.get_seq_length())


FITS: dict[str, Callable[[Any], Any]] = {
    "deeper": lambda _: filled(shallow_model(num_hidden_layers=5)),
    "derived": lambda model: filled(model, cache=Counts(config=model.config)),
    "without a configuration": lambda model: filled(model, cache=DynamicCache()),
    "static": lambda model: filled(model, cache=StaticCache(config=model.config, max_cache_len=64)),
    "static, empty": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "copied": lambda model: copy.deepcopy(filled(model)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
def test_a_cache_that_keeps_what_it_is_given_is_read(models, fit, assistant):
    plain, patched = models
    assert ask(patched, FITS[fit](patched), assistant=assistant) == ask(plain, FITS[fit](plain))


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "qwen3_next"])
def test_caches_of_windows_and_recurrent_layers_fit(family):
    over = {"num_hidden_layers": 6} | ({} if family == "qwen3_next" else {"sliding_window": 6})
    plain, patched = (shallow_model(family, **over) for _ in range(2))
    fastspec.patch(patched)
    assert ask(patched, filled(patched), assistant="nasd") == ask(plain, filled(plain))
    with pytest.raises(fastspec.Unsupported, match="holds 1 rows for 2"):
        ask(patched, filled(patched), 2, assistant="nasd")


def recording(model: Any, *, first: bool) -> Any:
    """A cache that records the past from its `first` token on, or after the prompt's first ones."""
    cache = DynamicCache(config=model.config)
    if first:
        cache.activate_past_recording()
        return cache
    filled(model, cache=cache)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_a_cache_that_records_windows_or_recurrent_states_is_refused_and_one_that_keeps_all_is_read(family, first):
    plain, patched = (shallow_model(family, **({"sliding_window": 6} if family == "mistral" else {})) for _ in range(2))
    fastspec.patch(patched)
    if family == "llama":
        caches = [recording(model, first=first) for model in (plain, patched)]
        assert ask(patched, caches[1], assistant="nasd") == ask(plain, caches[0])
        for cache in caches:
            cache.crop(-3)
        assert all(torch.allclose(a.keys, b.keys, atol=1e-4) for a, b in zip(*(c.layers for c in caches), strict=True))
        return
    with pytest.raises(fastspec.Unsupported, match=r"records what its windows.*\(activate_past_recording"):
        ask(patched, recording(patched, first=first), assistant="nasd")


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("assistant", ["nasd", TREE], ids=["nasd", "eagle3"])
def test_a_cache_of_padding_alone_holds_no_token(kind: str, assistant: Any) -> None:
    """Columns that a mask hides in every row, filled before the texts begin."""
    model = shallow_model(kind, **({"sliding_window": 8} if kind == "mistral" else {}))
    inputs = prompts(3, 4)
    inputs = {name: torch.nn.functional.pad(value, (2, 0)) for name, value in inputs.items()}
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**{name: value[:, :2] for name, value in inputs.items()}, use_cache=True, **{CACHE: cache})
    options = OPTIONS | {"max_new_tokens": 20, "eos_token_id": None}
    expected = model.generate(**inputs, **options, **{CACHE: copy.deepcopy(cache)})
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert torch.equal(model.generate(**inputs, **options, **{CACHE: cache}, assistant=assistant), expected)


@pytest.mark.parametrize("cuts", [(1,), (4, 5), (4,), (8, 9)])
def test_recurrent_states_that_have_seen_padding_are_refused_while_it_goes_on(cuts: tuple[int, ...]) -> None:
    """transformers hides padding from them in passes of several tokens, and not in those of one."""
    model = recurrent("qwen3_5_text", 3)
    inputs = prompts(3, 12)
    inputs["input_ids"][0, :9] = 5
    cache, done = DynamicCache(config=model.config), 0
    for end in cuts:
        taken = {"input_ids": inputs["input_ids"][:, done:end], "attention_mask": inputs["attention_mask"][:, :end]}
        with torch.no_grad():
            model(**taken, use_cache=True, **{CACHE: cache})
        done = end
    expected = model.generate(**inputs, **OPTIONS, **{CACHE: copy.deepcopy(cache)})
    with fastspec.patched(model):
        if cuts in ((1,), (4, 5)):
            with pytest.raises(fastspec.Unsupported, match=r"rows \[0\] begin with padding that the recurrent states"):
                model.generate(**inputs, **OPTIONS, **{CACHE: cache}, assistant="nasd")
        else:  # none seen, and none that goes on
            assert torch.equal(model.generate(**inputs, **OPTIONS, **{CACHE: cache}, assistant="nasd"), expected)
        with pytest.raises(fastspec.Unsupported, match="prefill_chunk_size=1"):
            model.generate(**inputs, **OPTIONS, prefill_chunk_size=1, assistant="nasd")
