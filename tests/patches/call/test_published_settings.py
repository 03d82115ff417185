"""Settings of published generation configurations, read from saved files: an assistant heeds, or refuses by name, what
plain `generate` heeds, and ignores what it ignores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.generate import NEVER, prompts, shallow_model
from transformers import AutoModelForCausalLM, GenerationConfig

import fastspec
from fastspec import Unsupported

SECONDS = 300
SURE = 1e-4
"""A temperature at which sampling is greedy."""
BASE = {
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": NEVER,
    "max_new_tokens": 6,
    "transformers_version": "5.0.0",
}
EQUAL: dict[str, dict[str, Any]] = {
    # as families publish them, with sampling made sure
    "llama 3": {"bos_token_id": 90, "do_sample": True, "eos_token_id": [90, 91, 92], "temperature": SURE, "top_p": 0.9},
    "qwen 2.5": {
        "pad_token_id": 90,
        "do_sample": True,
        "eos_token_id": [91, 90],
        "repetition_penalty": 1.05,
        "temperature": SURE,
        "top_p": 0.8,
        "top_k": 20,
    },
    "qwen": {"chat_format": "chatml", "max_window_size": 6144, "do_sample": True, "top_k": 1, "top_p": 0.5},
    "gemma 2": {"_from_model_config": True, "cache_implementation": "hybrid", "eos_token_id": 90},
    "gemma 3": {
        "cache_implementation": "hybrid",
        "do_sample": True,
        "eos_token_id": [1, 90],
        "top_k": 1,
        "top_p": 0.95,
    },
    "baichuan": {"user_token_id": 3, "assistant_token_id": 4, "repetition_penalty": 1.1, "top_k": 1, "do_sample": True},
    # one by one
    "a growing cache": {"cache_implementation": "dynamic"},
    "a paged cache": {"cache_implementation": "paged"},
    "a cache's settings": {"max_cache_len": 64, "cache_config": {"backend": "quanto"}, "use_cache": True},
    "outputs without a dictionary": {
        "output_attentions": True,
        "output_hidden_states": True,
        "output_scores": True,
        "output_logits": True,
    },
    "one beam": {
        "num_beams": 1,
        "num_beam_groups": 4,
        "early_stopping": False,
        "length_penalty": 2.0,
        "diversity_penalty": 0.5,
        "low_memory": True,
        "penalty_alpha": 0.0,
        "use_mtp": False,
        "guidance_scale": 1,
    },
    "a contrast beside draws": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": True, "temperature": SURE},
    "an assistant's": {
        "is_assistant": False,
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_lookbehind": 10,
        "assistant_confidence_threshold": 0.4,
        "target_lookbehind": 10,
        "assistant_ensemble_weight": 0.5,
        "max_matching_ngram_size": 2,
        "speculation_type": "dflash",
    },
    "no healing, no compilation, prefill in parts": {
        "token_healing": False,
        "disable_compile": True,
        "prefill_chunk_size": 4,
    },
    "no padding": {"pad_token_id": None},
    "padding below 0": {"pad_token_id": -1, "bos_token_id": [1, 2]},
    "padding outside": {"pad_token_id": 500, "decoder_start_token_id": 1},
    "ends": {"eos_token_id": [93, 7, 7, 200]},
    "an end below 0": {"eos_token_id": -1},
    "no end": {"eos_token_id": None},
    "a length": {"max_new_tokens": None, "max_length": 14},
    "two lengths": {"max_length": 4096},
    "a least length": {"min_length": 14, "eos_token_id": list(range(50)), "max_time": 100.0},
    "least new tokens": {"min_new_tokens": 6, "eos_token_id": list(range(50))},
    "suppressed and cleaned": {
        "suppress_tokens": [7, 8, 9],
        "begin_suppress_tokens": [10, 20],
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
    "nothing suppressed": {"suppress_tokens": [], "begin_suppress_tokens": []},
    "forced": {"forced_bos_token_id": 3, "forced_eos_token_id": 2, "forced_decoder_ids": [[1, 2]]},
    "bad words": {"bad_words_ids": [[7], [8, 9]]},
    "a bias": {"sequence_bias": [[[7], -10.0], [[8, 9], 5.0]]},
    "a decay": {"exponential_decay_length_penalty": [3, 1.5], "eos_token_id": 7},
    "no repeats": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "warpers": {
        "typical_p": 0.9,
        "epsilon_cutoff": 3e-4,
        "eta_cutoff": 1e-3,
        "min_p": 0.05,
        "do_sample": True,
        "top_k": 1,
    },
    "warpers without draws": {"temperature": 0.0, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "typical_p": 0.5},
    "no top-k": {"do_sample": True, "top_k": 0, "top_p": None, "temperature": SURE},
    "unknown": {
        "trust_remote_code": True,
        "seed": 1,
        "stop_words_ids": [[3]],
        "architectures": ["X"],
        "model_type": "llama",
        "position_ids": 3,
        "attention_mask": 1,
        "tokenizer": "x",
        "_commit_hash": "abc",
        "custom_generate": "x",
        "rope_scaling": {"type": "linear"},
    },
}
ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "a dictionary": ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    "a watermark": ({"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}}, "WatermarkLogitsProcessor"),
    "the source's repeats": ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor"),
    "the source's penalty": ({"encoder_repetition_penalty": 1.3}, "EncoderRepetitionPenaltyLogitsProcessor"),
    "top-h": ({"top_h": 0.5, "do_sample": True, "temperature": SURE}, "TopHLogitsWarper"),
    "a length past a row's": ({"max_new_tokens": None, "max_length": 28}, r"\(max_length\)"),
}
"""What a call honours and an open batch refuses, and by which name."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    name: (settings, rf"{next(iter(settings))}={next(iter(settings.values()))!r}".replace("[", r"\["))
    for name, settings in {
        "a static cache": {"cache_implementation": "static"},
        "a static cache with chunks": {"cache_implementation": "hybrid_chunked"},
        "an offloaded cache": {"cache_implementation": "offloaded"},
        "a quantised cache": {"cache_implementation": "quantized"},
        "no cache": {"use_cache": False},
        "returned hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
        "beams": {"num_beams": 4},
        "groups of beams": {"num_beams": 4, "num_beam_groups": 2},
        "contrast": {"penalty_alpha": 0.6, "top_k": 4},
        "layers": {"dola_layers": "low"},
        "words": {"force_words_ids": [[7]]},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 2},
        "guidance": {"guidance_scale": 1.5},
        "MTP": {"use_mtp": True},
        "healing": {"token_healing": True},
    }.items()
}
RAISES: dict[str, dict[str, Any]] = {
    "temperature 0": {"do_sample": True, "temperature": 0.0},
    "top-k below 0": {"do_sample": True, "top_k": -1},
    "too short": {"max_new_tokens": None, "max_length": 3},
    "stop strings": {"stop_strings": ["x"]},
}
"""What plain `generate` itself does not take."""


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any, Any]]:
    """(the unpatched model, the same patched with a default assistant, an open batch of it)"""
    plain, model = (shallow_model(num_hidden_layers=2) for _ in range(2))
    fastspec.patch(model, assistant="nasd")
    with fastspec.continuous(model, "nasd", rows=1, max_length=24) as batch:
        yield plain, model, batch


def test_a_processor_that_is_refused_is_never_made(models: Any) -> None:
    """One of n-grams makes n copies of the prompt: 10^9 of them take all memory."""
    with pytest.raises(Unsupported, match="encoder_no_repeat_ngram_size=1000000000"):
        models[2].submit(prompts(9)["input_ids"], max_new_tokens=2, encoder_no_repeat_ngram_size=10**9)


@pytest.fixture
def ways(models, monkeypatch, tmp_path) -> Callable[[dict[str, Any]], dict[str, Callable[[], Any]]]:
    """The ways to ask for an answer, with the settings of a file."""
    plain, model, batch = models
    inputs = prompts(9)

    def read(settings: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        (tmp_path / "generation_config.json").write_text(json.dumps({**BASE, **settings}))
        for each in (plain, model):
            monkeypatch.setattr(each, "generation_config", GenerationConfig.from_pretrained(tmp_path))
        return {
            "plain": lambda: plain.generate(**inputs),
            "named": lambda: model.generate(**inputs, assistant="nasd"),
            "default": lambda: model.generate(**inputs),
            "open": lambda: batch.submit(inputs["input_ids"]).result(SECONDS),
        }

    return read


def tokens(answer: Any) -> list[list[int]]:
    return getattr(answer, "sequences", answer).tolist()


def left(model: Any) -> int:
    return sum(fastspec.report(model).unassisted.values())


@pytest.mark.filterwarnings("ignore:Using the model-agnostic")
@pytest.mark.parametrize("name", EQUAL)
def test_these_are_honoured_or_ignored_as_by_plain_generate(ways, models, name):
    asked, before = ways(EQUAL[name]), left(models[1])
    want = tokens(asked.pop("plain")())
    for way, ask in asked.items():
        assert tokens(ask()) == want, way
    assert left(models[1]) == before


@pytest.mark.parametrize("name", ALONE)
def test_these_are_honoured_by_a_call_and_refused_by_an_open_batch(ways, models, name):
    settings, reason = ALONE[name]
    asked, before = ways(settings), left(models[1])
    want = tokens(asked["plain"]())
    assert tokens(asked["named"]()) == tokens(asked["default"]()) == want and left(models[1]) == before
    with pytest.raises(Unsupported, match=reason):
        asked["open"]()


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused_by_name(ways, name):
    settings, reason = REFUSED[name]
    asked = ways(settings)
    for way in ("named", "open"):
        with pytest.raises(Unsupported, match=reason):
            asked[way]()


@pytest.mark.parametrize("name", RAISES)
def test_these_raise_as_in_plain_generate(ways, name):
    asked = ways(RAISES[name])
    for ask in asked.values():
        with pytest.raises(ValueError) as raised:
            ask()
        assert not isinstance(raised.value, Unsupported)


def test_every_setting_of_transformers_is_tried():
    """But for what a file cannot hold, and what this model and machine cannot be asked for."""
    elsewhere = {
        "num_return_sequences",  # several rows, which a configuration may not ask for without draws
        "compile_config",
        "continuous_batching_config",  # no plain values, and deprecated
        "constraints",
        "assistant",
    }
    tried = {name for table in (EQUAL, RAISES) for settings in table.values() for name in settings} | set(BASE)
    tried |= {name for table in (ALONE, REFUSED) for settings, _ in table.values() for name in settings}
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} - tried <= elsewhere


def test_paged_as_an_argument_is_transformers_own_continuous_batching(models):
    with pytest.raises(Unsupported, match=r"cache_implementation='paged'.*continuous batching"):
        models[1].generate(**prompts(9), assistant="nasd", cache_implementation="paged")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_gemma_as_it_is_published(kind, tmp_path: Path):
    shallow_model(kind).save_pretrained(tmp_path)
    shipped = {
        "cache_implementation": "hybrid",
        "bos_token_id": 2,
        "eos_token_id": [1, 90],
        "pad_token_id": 0,
        "top_p": 0.95,
    }
    shipped |= {"do_sample": True, "top_k": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(shipped))
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    fastspec.patch(model, assistant="nasd")
    want = plain.generate(**prompts(9, 5), max_new_tokens=8).tolist()
    assert model.generate(**prompts(9, 5), max_new_tokens=8).tolist() == want and left(model) == 0
    for assistant in ("autoregressive", fastspec.ContinuousBatch("nasd", 1)):
        assert model.generate(**prompts(9, 5), max_new_tokens=8, assistant=assistant).tolist() == want
    with fastspec.continuous(model, "nasd", rows=2) as batch:
        assert batch.submit(prompts(9)["input_ids"], max_new_tokens=8).result(SECONDS).tolist() == want[:1]
