"""Tiny models with windows, and with recurrent layers."""

from __future__ import annotations

from typing import Any

from helpers.generate import SHALLOW
from helpers.models import tiny_model

LINEAR, FULL = "linear_attention", "full_attention"


def recurrent(kind: str = "qwen3_5_text", seed: int = 0, **over: Any) -> Any:
    return tiny_model(kind, seed, **{"layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3, **over})


SPAN, NEW = 8, 20
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "mixtral": {},
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3": {**MIXED, "use_sliding_window": True},
    "phi3": {},
    "starcoder2": {},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "cohere2": MIXED,
    "olmo3": MIXED,
    "exaone4": MIXED,
    "granite_swa": MIXED,
    "ministral": {**MIXED, "head_dim": 16},
    "smollm3": {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    "gpt_oss": {
        **MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": SPAN,
    },
}
"""Model type -> what makes its layers see SPAN positions, all of them or some."""
SEEDS = {"gemma2": 4}
"""Weights whose texts have no near-tie that fp32 on a GPU decides otherwise."""


def windowed(kind: str, seed: int | None = None, **over: Any) -> Any:
    seed = SEEDS.get(kind, 0) if seed is None else seed
    own = {} if kind == "llama4_text" else {"sliding_window": SPAN}
    return tiny_model(kind, seed, **{**SHALLOW, "tie_word_embeddings": False, **own, **KINDS[kind], **over})
