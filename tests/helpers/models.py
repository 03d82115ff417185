"""Makers of tiny random models and heads: fp32, evaluated on the CPU, with logits peaked enough for texts to vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.hf.families import ADAPTERS

torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores

FAMILIES = tuple(kind for kind in ADAPTERS if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The families with an adapter that come as a language model of their own; the others stand in vision-language
models."""
DISTINCT = tuple({replace(ADAPTERS[kind], model_type=""): kind for kind in reversed(FAMILIES)}.values())[::-1]
"""The first family of each row that differs from the others in more than its name."""
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 5,
}
GROUPED = {"num_key_value_heads": 2, "sliding_window": None}
MOE = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARED = {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96, **MOE}
GROUPED_EXPERTS = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    **MOE,
}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 1.7}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    **MOE,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, **MOE},
    "mixtral": {"num_local_experts": 4, **MOE},
    "gemma": {"head_dim": 16, "tie_word_embeddings": False},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 64, "tie_word_embeddings": False},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "sliding_window": 64,
        "tie_word_embeddings": False,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "sliding_window": 64,
        "tie_word_embeddings": False,
    },
    "gemma2": {"head_dim": 16, "sliding_window": 64, "tie_word_embeddings": False},
    "gpt_oss": {"head_dim": 16, "sliding_window": 64, "num_local_experts": 4, "rope_parameters": PLAIN_ROPE, **MOE},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 64},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 64, "tie_word_embeddings": False},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 64},
    "ministral": {"head_dim": 16, "sliding_window": 64},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.7,
        },
    },
    "cwm": {"head_dim": 16, "sliding_window": 64},
    "seed_oss": {"head_dim": 16},
    "glm4_moe": {**GROUPED_EXPERTS, "use_qk_norm": True},
    "dots1": {**GROUPED_EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True},
    "solar_open": GROUPED_EXPERTS,
    "olmoe": {"num_experts": 4, **MOE},
    "flex_olmo": {"num_experts": 4, "norm_topk_prob": True, **MOE},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, **MOE},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": False,
    },
    "granitemoe": {**SCALED, "num_local_experts": 4, **MOE},
    "qwen2_moe": SHARED,
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": {**RECURRENT, **SHARED},
    "qwen3_next": {**RECURRENT, **SHARED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmo_hybrid": {**RECURRENT, "linear_num_key_heads": 4, "linear_value_head_dim": 8},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 3, "tie_word_embeddings": False},
    "starcoder2": {"tie_word_embeddings": False},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "vaultgemma": {"head_dim": 16, "sliding_window": 64, "tie_word_embeddings": False},
    "cohere": {"tie_word_embeddings": False},
    "ernie4_5": {"head_dim": 16, "tie_word_embeddings": False},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "granite": SCALED,
    "hyperclovax": {**SCALED, "use_post_norm": True},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "hy_v3": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 48, **MOE},
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "sliding_window": 64,
        **MOE,
    },
    "llama4_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": None,
        "no_rope_layer_interval": 3,
        "tie_word_embeddings": False,
        "router_jitter_noise": 0.0,
    },
    "phi3": {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}},
}
"""model_type -> what its configuration needs besides COMMON and GROUPED."""


def tiny_config(model_type: str = "llama", **over: Any) -> PretrainedConfig:
    """A configuration 64 wide, over 97 tokens, of three layers or as many as the family needs for one of each kind;
    `over` replaces any of it."""
    config = AutoConfig.for_model(model_type)
    wanted = {**COMMON, **GROUPED, **SPECIFIC.get(model_type, {}), **over}
    known = {*config.to_dict(), *config.attribute_map, *SPECIFIC.get(model_type, {}), *over}
    layers = {"layer_types": None} if "layer_types" in known and "layer_types" not in over else {}
    return type(config)(**{config.attribute_map.get(k, k): v for k, v in (wanted | layers).items() if k in known})


def tiny_model(model_type: str = "llama", seed: int = 0, **over: Any) -> Any:
    """A random model of a family; the same seed and sizes give the same weights. The global generator is left as it
    was."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **over), dtype=torch.float32).eval()
    torch.random.set_rng_state(state)
    return model


def tiny_head(model: Any, seed: int = 0, *, copy_lm_head: bool = True, **over: Any) -> EagleHead:
    """A random EAGLE-3 head that fits a model and is not bound to it; its LM head is a copy of the target's where sizes
    allow."""
    config = model.config.get_text_config()
    depth, width = config.num_hidden_layers, config.hidden_size
    taps = (2, depth // 2, depth - 3) if depth >= 6 else (0, depth // 2, depth)
    vocabulary = config.vocab_size
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "target_hidden_size": width,
        "taps": taps,
    }
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    head = EagleHead(HeadConfig(**{**sizes, **over})).eval().requires_grad_(False)
    torch.random.set_rng_state(state)
    target = model.get_output_embeddings().weight
    if copy_lm_head and head.lm_head is not None and head.lm_head.weight.shape == target.shape:
        head.lm_head.weight.copy_(target.detach())
    return head
