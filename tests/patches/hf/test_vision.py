"""Images in a prompt: assisted calls of vision-language models give what plain decoding gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.devices import CUDA
from helpers.generate import OwnProcessor, free
from helpers.models import tiny_head, tiny_model
from helpers.sweep import tiny
from helpers.vision import IMAGE, images, prompts_with_images, seeing
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForMultimodalLM

import fastspec
from fastspec import Unsupported
from fastspec.patches.backends import TORCH
from fastspec.patches.call.prompts import OwnPrefill
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.modes import decoder_of

NEW = 10
AROUND = (3, 4), (6, 9)
TREE = fastspec.Eagle3(depth=3, top_k=3, total_tokens=12)
ADAPTED = (
    "gemma3",
    "llava",
    "mistral3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "paligemma",
    "internvl",
    "llava_next",
    "gemma4",
    "gemma4_unified",
    "aya_vision",
    "llama4",
)
GENERIC = ("glm4v",)


def without_images(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 7),
        "attention_mask": inputs["attention_mask"],
    }


def skip_what_raises(kind: str) -> None:
    """Leave out a class whose own generate raises in the installed version."""
    if kind == "llama4" and Version(transformers.__version__) == Version("5.24.0"):
        pytest.skip(
            "transformers 5.24.0 reads image_outputs of an output that has none: every pass of a Llama 4 with images "
            "raises"
        )


EVERY = "autoregressive", "nasd", "speculative", TREE
WHOLE = "gemma3", "llava", "qwen2_5_vl", "qwen3_5", "paligemma", "gemma4", *GENERIC
"""Kinds that are held to every assistant in the fast suite: those that see and count otherwise. The others are held to
two; Qwen3.5's mixture sees as Qwen3.5, and its layers are in test_recurrent.py."""


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("kind", "assistants"),
    [
        *(
            pytest.param(
                kind,
                EVERY if kind in WHOLE else EVERY[1::2],
                id=kind,
                marks=pytest.mark.slow if kind == "qwen3_5_moe" else (),
            )
            for kind in ADAPTED + GENERIC
        ),
        *(
            pytest.param(kind, EVERY[::2], id=f"{kind}, the others", marks=pytest.mark.slow)
            for kind in ADAPTED
            if kind not in WHOLE
        ),
    ],
)
def test_prompts_with_images_and_without(kind: str, assistants: tuple[Any, ...], device: str) -> None:
    if kind in ("mistral3", "smolvlm") and Version(transformers.__version__) < Version("5.20"):
        pytest.skip(
            "these prompts are made as transformers 5.20 and later read them, whose plain generate raises before"
        )
    skip_what_raises(kind)
    model = seeing(kind).to(device)
    inputs = {name: each.to(device) for name, each in prompts_with_images(model, AROUND).items()}
    text, other = without_images(inputs), {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    expected, of_text = free(model, inputs, NEW), free(model, text, NEW)
    assert free(model, other, NEW) != expected
    fastspec.patch(model, speculative=tiny_model(num_hidden_layers=2).to(device), eagle3=tiny_head(model).to(device))
    for assistant in assistants:
        assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
    assert (
        free(model, text, NEW, assistant=TREE) == of_text
    )  # in turn with images; other files hold texts alone to every assistant
    assert fastspec.report(model).mode.startswith("adapter" if kind in ADAPTED else "generic")


@pytest.mark.some("llava", "qwen3_5", "paligemma", "gemma4")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in WHOLE else pytest.mark.slow) for kind in ADAPTED + GENERIC],
)
def test_a_single_prompt_without_padding(kind: str) -> None:
    """PaliGemma's tokens see all of such a prompt, and no other."""
    skip_what_raises(kind)
    model = seeing(kind)
    inputs = prompts_with_images(model, AROUND[:1])
    text = without_images(inputs)
    expected, of_text = free(model, inputs, NEW), free(model, text, NEW)
    with fastspec.patched(model):
        assert free(model, inputs, NEW, assistant="nasd") == expected
        assert free(model, text, NEW, assistant="nasd") == of_text
        if kind == "paligemma":
            with pytest.raises(Unsupported, match="ContinuousBatch takes no PaliGemmaForConditionalGeneration"):
                free(model, text, NEW, assistant=fastspec.ContinuousBatch("nasd", rows=1))


def test_a_mistral_3_around_a_ministral_3() -> None:
    """As the released ones are; the images take its texts past the positions of a first training, behind which queries
    grow."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.7,
    }
    model = seeing("mistral3", model_type="ministral3", rope_parameters=rope)
    inputs = prompts_with_images(model, AROUND)
    expected = free(model, inputs, NEW)
    assert inputs["input_ids"].shape[1] > 16 and expected != free(seeing("mistral3"), inputs, NEW)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert fastspec.report(model).mode == "adapter ministral3"
        for assistant in ("nasd", TREE):
            assert free(model, inputs, NEW, assistant=assistant) == expected, assistant


@pytest.mark.some("gemma4")
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_last_layers_that_read_the_keys_of_others(kind: str) -> None:
    """As in Gemma 4's E2B and E4B: the cache of the model's own pass over an image holds nothing of them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = seeing(kind, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=kinds)
    inputs = prompts_with_images(model, AROUND)
    text = without_images(inputs)
    expected, of_text = free(model, inputs, NEW), free(model, text, NEW)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("nasd", TREE):
            assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
            assert free(model, text, NEW, assistant=assistant) == of_text, assistant


def test_a_llama_4_whose_images_outgrow_its_scale() -> None:
    """Prompts of one length: what comes behind an image stands where queries are scaled."""
    skip_what_raises("llama4")
    model = seeing(
        "llama4",
        floor_scale=24,
        attn_scale=0.7,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    )
    inputs = prompts_with_images(model, ((9, 14), (16, 7)))
    expected = free(model, inputs, NEW)
    for layer in decoder_of(model).layers:
        layer.self_attn.attn_temperature_tuning = False
    assert inputs["input_ids"].shape[1] > 24 and expected != free(model, inputs, NEW)
    for layer in decoder_of(model).layers:
        layer.self_attn.attn_temperature_tuning = True
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert fastspec.report(model).mode == "adapter llama4_text"
        for assistant in ("nasd", TREE):
            assert free(model, inputs, NEW, assistant=assistant) == expected, assistant


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "llava"])
def test_early_layers_draft_behind_images(kind: str) -> None:
    """They count positions as the whole model does, which images may have moved."""
    model = seeing(kind)
    last = decoder_of(model).layers[-1]
    with torch.no_grad():  # the layers above add nothing
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    inputs = prompts_with_images(model, AROUND)
    text = without_images(inputs)
    expected, of_text = free(model, inputs, NEW), free(model, text, NEW)
    layers = fastspec.Speculative(early_exit=model.config.get_text_config().num_hidden_layers - 1, gamma=3)
    with fastspec.patched(model):
        for given, wanted in ((inputs, expected), (text, of_text)):
            assert free(model, given, NEW, assistant=layers) == wanted
            assert fastspec.report(model).last.acceptance_length > 2


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_text_with_an_images_token_and_no_image(kind: str) -> None:
    """Where a model says such a token itself: some show their decoder padding in its place."""
    skip_what_raises(kind)
    model = seeing(kind)
    ids = torch.tensor([[5, 9, IMAGE, 12, 33, IMAGE, IMAGE, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = free(model, inputs, NEW)
    with fastspec.patched(model):
        assert free(model, inputs, NEW, assistant="nasd") == expected


@pytest.mark.some("gemma3", "qwen2_5_vl", "paligemma", "glm4v")
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_5", "paligemma", "glm4v"])
def test_turns_go_on_with_more_images(kind: str) -> None:
    """A turn with an image, one of text alone, and one with another image where transformers takes one behind a cache:
    models that give images positions in rows and columns count those of the whole text from the images of this turn."""
    plain = conversation(seeing(kind), {})
    model = seeing(kind)
    fastspec.patch(model, eagle3=tiny_head(model))
    for assistant in ("nasd", TREE):
        found = conversation(model, {"assistant": assistant})
        for (text, cache), (wanted, wanted_cache) in zip(found, plain, strict=True):
            assert text == wanted, assistant
            for mine, theirs in zip(cache, wanted_cache, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def conversation(model: Any, options: dict[str, Any]) -> list[Any]:
    inputs, past, found = prompts_with_images(model, AROUND), None, []
    types = {name: inputs.pop(name) for name in ("mm_token_type_ids", "token_type_ids") if name in inputs}
    for turn in range(3):
        out = model.generate(
            **inputs,
            **types,
            max_new_tokens=7,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=list(range(0, 80, 9)),
            return_dict_in_generate=True,
            **{CACHE: past},
            **options,
        )
        past = kept_cache(out)
        held = [
            (layer.conv_states[0], layer.recurrent_states[0]) for layer in past.layers if hasattr(layer, "conv_states")
        ]
        new = out.sequences.shape[1] - inputs["input_ids"].shape[1] - 1
        real = torch.cat((inputs["attention_mask"], torch.ones(2, new, dtype=torch.long)), 1)[:, None, :, None]
        for layer in past.layers:
            if hasattr(layer, "keys"):  # what stands in place of padding is never seen
                seen = real[:, :, -layer.keys.shape[2] :]
                held.append((layer.keys * seen, layer.values * seen))
        found.append((out.sequences.tolist(), [each.clone() for pair in held for each in pair]))
        more = prompts_with_images(model, ((2, 3), (2, 3)), seed=turn)
        again = turn == 1 and "image_grid_thw" not in more
        ids = more.pop("input_ids") if again else torch.full((2, 3), 11)
        whole = torch.cat((out.sequences, ids), 1)
        added = whole.shape[1] - inputs["attention_mask"].shape[1]
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, added, dtype=torch.long)), 1)
        for name in types:
            fresh = more[name] if again else ids * 0
            types[name] = torch.cat((types[name], fresh.new_zeros(2, added - ids.shape[1]), fresh), 1)
        pictures = {name: each for name, each in more.items() if name.startswith(("pixel", "image"))} if again else {}
        inputs = {"input_ids": whole, "attention_mask": mask, **pictures}
    return found


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-4},
        {"logits_processor": [OwnProcessor()]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"eos_token_id": list(range(0, 97, 9))},
    ],
)
@pytest.mark.parametrize("kind", ["llava", "qwen3_5"])
def test_settings_of_a_call(kind: str, options: dict[str, Any]) -> None:
    model = seeing(kind)
    inputs = prompts_with_images(model, AROUND)
    given: dict[str, Any] = {
        **inputs,
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }
    expected = model.generate(**given).tolist()
    fastspec.patch(model)
    assert model.generate(**given, assistant="nasd").tolist() == expected


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "gemma3"])
@torch.no_grad()
def test_the_first_pass_leaves_what_a_pass_of_tokens_leaves(kind: str) -> None:
    """Of a prompt without images the model's own pass and fastspec's give the same logits, features and keys, padding
    removed."""
    model = seeing(
        kind, **({"sliding_window": 64} if kind == "gemma3" else {})
    )  # what a window has dropped is nobody's
    inputs = without_images(prompts_with_images(model, AROUND))
    ids, keep = inputs["input_ids"], inputs["attention_mask"].bool()
    counts = keep.sum(1)
    texts = torch.stack([torch.cat((row[kept], row[~kept])) for row, kept in zip(ids, keep, strict=True)])
    for taps in (None, (), (0, 1, 2)):
        mine, own = (language_model(model, None, rows=2, capacity=40, tail=4, taps=taps, ops=TORCH) for _ in range(2))
        logits, features = mine.prefill(texts, counts)
        prepared = {
            "attention_mask": inputs["attention_mask"],
            "position_ids": (keep.cumsum(1) - 1).clamp(min=0),
            "use_cache": True,
        }
        own_logits, own_features = OwnPrefill(model, model.generation_config, ids, keep, prepared)(own)
        torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-4)
        assert own_features.shape == features.shape and own.lengths.tolist() == mine.lengths.tolist() == counts.tolist()
        for row, count in enumerate(counts.tolist()):
            torch.testing.assert_close(own_features[row, :count], features[row, :count], rtol=1e-4, atol=1e-4)
            for one, other in zip(own.state.kinds, mine.state.kinds, strict=True):
                torch.testing.assert_close(one.k[:, row, :, :count], other.k[:, row, :, :count], rtol=1e-4, atol=1e-4)


def test_videos_and_images_in_one_prompt() -> None:
    model = seeing("qwen2_5_vl")
    grid, generator = torch.tensor([[2, 4, 4]]), torch.Generator().manual_seed(3)
    size = 3 * model.config.vision_config.temporal_patch_size * model.config.vision_config.patch_size**2
    ids = torch.tensor([[5, *[91] * 8, 6, *[IMAGE] * 6, 7, 8]])
    inputs = {
        **images(model, 1),
        "pixel_values_videos": torch.randn(32, size, generator=generator),
        "video_grid_thw": grid,
        "second_per_grid_ts": torch.tensor([1.0]),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == 91).int(),
    }
    expected = free(model, inputs, NEW)
    with fastspec.patched(model):
        assert free(model, inputs, NEW, assistant="nasd") == expected


def test_sound_goes_through_the_first_pass_too() -> None:
    model = tiny("qwen2_audio", AutoModelForMultimodalLM)
    sizes, frames = model.config.audio_config, torch.tensor([40, 56])
    seen = torch.arange(2 * sizes.max_source_positions) < frames[:, None]
    rows = [[3, 5, *[96] * 10, 7, 8, 9], [11, *[96] * 14, 12, 13]]  # four frames make a token
    ids = torch.tensor([[0] * (17 - len(row)) + row for row in rows])
    sound = torch.randn(
        2, sizes.num_mel_bins, 2 * sizes.max_source_positions, generator=torch.Generator().manual_seed(0)
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "input_features": sound,
        "feature_attention_mask": seen.long(),
    }
    expected = free(model, inputs, NEW)
    assert free(model, {**inputs, "input_features": sound.flip(-1)}, NEW) != expected
    fastspec.patch(model, eagle3=tiny_head(model))
    for assistant in ("nasd", TREE):
        assert free(model, inputs, NEW, assistant=assistant) == expected


def test_what_cannot_be_combined_is_refused_by_name() -> None:
    model = seeing("llava")
    inputs = prompts_with_images(model, AROUND)
    with fastspec.patched(model):
        with pytest.raises(
            Unsupported,
            match=r"ContinuousBatch takes prompts of tokens alone, without (mm_encoder_outputs|pixel_values)",
        ):
            free(model, inputs, NEW, assistant=fastspec.ContinuousBatch("nasd", rows=1))
        assert free(model, without_images(inputs), NEW, assistant=fastspec.ContinuousBatch("nasd", rows=1))
    text = tiny_model()
    with fastspec.patched(text), pytest.raises(Unsupported, match="pixel_values cannot be combined"):
        free(text, inputs, NEW, assistant="nasd")


@pytest.mark.parametrize("padding", [4, 100])
def test_a_cache_of_a_model_whose_positions_count_padding(padding: int) -> None:
    """Texts do not show where they begin, but the keys that one call leaves to the next do."""
    model = tiny("exaone4_5", AutoModelForMultimodalLM)
    ids = torch.randint(6, 90, (2, padding + 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    fastspec.patch(model)
    texts = []
    for first, second in ((None, None), ("autoregressive", None), (None, "autoregressive")):
        options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        out = model.generate(ids, attention_mask=mask, assistant=first, **options)
        more = torch.cat((mask, torch.ones_like(out.sequences[:, ids.shape[1] :])), 1)
        options |= {"attention_mask": more, CACHE: kept_cache(out)}
        texts.append(model.generate(out.sequences, assistant=second, **options).sequences.tolist())
    assert texts[1] == texts[0] and texts[2] == texts[0]
