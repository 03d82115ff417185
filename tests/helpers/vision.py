"""Tiny random vision-language models, and prompts with random images for them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from helpers.sweep import settings_of

IMAGE = 90
"""The token in whose places features of an image stand."""
GRID = (1, 4, 6)
"""Patches of an image in time, height and width, for models that take images of any shape."""
SQUARE = 64
"""Pixels along an image, for the others."""
TOKENS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
FIXED = (
    "gemma3",
    "llava",
    "mistral3",
    "smolvlm",
    "idefics3",
    "aya_vision",
    "paligemma",
    "cohere2_vision",
    "llava_next",
    "llava_onevision",
    "vipllava",
    "lighton_ocr",
    "llama4",
)
"""Models that take images of one size."""
PATCHED = "gemma4", "gemma4_unified"
"""Models that take an image as its patches and where they are, and have no vision tower of their own accord."""
SIZED = "mistral3", "llava_next", "llava_onevision", "lighton_ocr"
"""Those that ask how large an image was."""
OVER: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "boi_token_index": 94, "eoi_token_index": 95},
    "internvl": {"image_seq_length": 4},
    **{kind: {"image_grid_pinpoints": [[SQUARE, SQUARE]]} for kind in ("llava_next", "llava_onevision")},
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
    "internvl": {"image_size": [SQUARE, SQUARE]},
    **{kind: {"image_size": SQUARE} for kind in FIXED},
    "llama4": {
        "image_size": SQUARE,
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "gemma4_unified": {"pooling_kernel_size": 1, "mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 8},
}


def seeing(kind: str, seed: int = 0, **text: Any) -> Any:
    """A tiny random vision-language model in fp32; `text` replaces settings of its decoder."""
    config = CONFIG_MAPPING[kind](**{"vision_config": CONFIG_MAPPING[f"{kind}_vision"]()} if kind in PATCHED else {})
    settings = settings_of(kind, config) | OVER.get(kind, {})
    settings |= {name: token for name, token in TOKENS.items() if name in settings}
    settings["tie_word_embeddings"] = settings["text_config"]["tie_word_embeddings"] = (
        False  # tied, random weights repeat themselves
    )
    settings["vision_config"] |= VISION.get(kind, {})
    settings["text_config"] |= text
    made = type(config).from_dict(settings)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(made, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # Gemma 3 begins with zeros, which see nothing
            weight.data.normal_(std=0.2)
    torch.random.set_rng_state(state)
    return model


def images(model: Any, count: int, seed: int = 0) -> dict[str, Tensor]:
    """Random images as a model's processor would give them."""
    vision, generator = model.config.vision_config, torch.Generator().manual_seed(seed)
    if hasattr(vision, "temporal_patch_size"):
        grid = torch.tensor([GRID] * count)
        size = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.randn(int(grid.prod(1).sum()), size, generator=generator), "image_grid_thw": grid}
    pixels = torch.randn(count, 3, SQUARE, SQUARE, generator=generator)
    if model.config.model_type in PATCHED:
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).view(1, 36, 2)
        flat = torch.rand(count, 36, 3 * vision.patch_size**2, generator=generator)
        return {"pixel_values": flat, "image_position_ids": places.expand(count, -1, -1)}
    if model.config.model_type in ("smolvlm", "idefics3"):
        return {"pixel_values": pixels[:, None]}  # a row of images for every prompt
    if model.config.model_type in ("llava_next", "llava_onevision"):
        pixels = pixels[:, None].expand(-1, 2, -1, -1, -1)  # the whole image, and its only tile
    sizes = {"image_sizes": torch.tensor([[SQUARE, SQUARE]] * count)} if model.config.model_type in SIZED else {}
    return {"pixel_values": pixels, **sizes}


def prompts_with_images(model: Any, around: tuple[tuple[int, int], ...], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of an image each, with so many random tokens before it and behind it."""
    given = {name: each.to(model.device) for name, each in images(model, len(around), seed).items()}
    with torch.no_grad():
        read, name = model.get_image_features, "vision_feature_select_strategy"
        asked = inspect.signature(read).parameters.get(name)
        if asked is not None and asked.default is asked.empty:  # Llama 4 in transformers 5.17
            given = {**given, name: getattr(model.config.vision_config, name)}
        found = read(**given, return_dict=True)
        given.pop(name, None)
    features = found.pooler_output if found.get("pooler_output") is not None else found.last_hidden_state
    held = torch.cat(tuple(features)) if isinstance(features, (list, tuple)) else features.flatten(0, -2)
    per, generator = held.shape[0] // len(around), torch.Generator().manual_seed(seed)
    rows = [
        [
            *torch.randint(3, 89, (before,), generator=generator),
            *[IMAGE] * per,
            *torch.randint(3, 89, (behind,), generator=generator),
        ]
        for before, behind in around
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + [int(token) for token in row] for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ids, mask = ids.to(model.device), mask.to(model.device)
    given |= {"input_ids": ids, "attention_mask": mask}
    if "image_grid_thw" in given or model.config.model_type in PATCHED:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    return given
