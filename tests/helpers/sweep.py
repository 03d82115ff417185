"""Tiny random models of every class that a mapping of transformers names, from its configuration class by the names of
settings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

LARGEST = 80_000_000
"""Weights of a model that counts as tiny."""
TOKENS, LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD = 97, 2, 64, 4, 2, 16
DEPTHS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "text_vocab_size", "entity_vocab_size", "n_tokens", "padded_vocab_size", "audio_vocab_size"),
        TOKENS,
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "emb_dim"),
        WIDTH,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), LAYERS
    ),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        HEADS,
    ),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads"), KEY_HEADS
    ),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "d_head", "d_kv", "attn_head_dim"), HEAD),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(
        ("encoder_ffn_dim", "decoder_ffn_dim", "ffn_embed_dim", "mlp_hidden_size", "intermediate_size_mlp"), 96
    ),
    "shared_expert_intermediate_size": 96,
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size", "dense_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_selected_experts", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts", "zero_expert_num"), 1
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": TOKENS,
    "hidden_size_per_layer_input": 16,
    "image_size": 32,
    "patch_size": 16,
    "window_size": 64,
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "router_jitter_noise": 0.0,
    "global_head_dim": HEAD,
    "num_global_key_value_heads": KEY_HEADS,
    "laurel_rank": 8,
    "d_embed": WIDTH,
    "d_conv": 4,
    "d_state": 8,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "input_jitter_noise": 0.0,
    "swa_num_key_value_heads": KEY_HEADS,
    "swa_head_dim": HEAD,
    "num_embeds": TOKENS,
    "max_seq_len": 512,
    "dim_model": WIDTH,
    "dim_head": HEAD,
    "dim_ff": 96,
    "num_quantizers": 2,
    "num_codebooks": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "attention_dropout": 0.0,
    "lru_width": WIDTH,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "audio_channels": 1,
    "cross_attention_hidden_size": WIDTH,
    "out_hidden_size": WIDTH,
    "projection_dim": WIDTH,
    "mm_hidden_size": WIDTH,
    "embed_dim_per_layer": 16,
    "qformer_hidden_size": WIDTH,
}
UNSET = {"head_dim": HEAD, "num_key_value_heads": KEY_HEADS}
"""Sizes that some classes derive from others, where these are of the class's own defaults."""
SECTIONS = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
        (2, 2, 4),
    ),
    "glm4v_moe": (1, 1, 2),
}
"""How three kinds of positions share a head, where the class's default is for larger ones."""
LEFT_OUT = "transformers_version", "architectures", "dtype", "torch_dtype", "per_layer_config"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {"num_key_value_heads": 1},
    "phi3": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mistral4": {"head_dim": 16},
    "gpt_neo": {"window_size": 512},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "blt": {"encoder_hash_byte_group_vocab": 502},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_output_size": WIDTH},
    },
    **{kind: {"vision_start_token_id": 92} for kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "hunyuan_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 4]}}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}},
    "inkling2": {"vision_config": {"text_hidden_size": WIDTH}},
    "glm5_next": {"text_config": {"num_key_value_heads": HEADS, "qk_rope_head_dim": 0}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}},
    "reformer": {"axial_pos_embds_dim": [32, 32]},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    **{kind: {"layer_types": ["conv", "full_attention"]} for kind in ("lfm2", "lfm2_moe")},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8, "head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "dots3_note_text": {"num_key_value_heads": 4},
}
"""What tiny models of a type need besides, or have to keep."""


WITHIN = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""The part of a type's configuration that its language model is made of."""


def shrink(held: dict[str, Any]) -> dict[str, Any]:
    """A configuration's settings with every size small; lists with an entry per layer keep one of each kind of
    layer."""
    many = next((held[name] for name in DEPTHS if isinstance(held.get(name), int)), None)
    kinds = held.get("layer_types") or held.get("layers_block_type") or held.get("attention_layers") or []
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)] if isinstance(kinds, list) else []
    kept = sorted(firsts) if len(firsts) > 1 else list(range(LAYERS))
    out: dict[str, Any] = {}
    for name, value in held.items():
        if name in LEFT_OUT:
            continue
        if not isinstance(name, str):
            return held  # a table of something else
        if name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            half = int(HEAD * value.get("partial_rotary_factor", 1.0)) // 2
            out[name] = {**value, "mrope_section": [half // 4, half // 4, half - 2 * (half // 4)]}
        elif isinstance(value, dict) and name not in (
            "rope_parameters",
            "rope_scaling",
            "id2label",
            "label2id",
            "task_specific_params",
        ):
            out[name] = shrink(value)
        elif isinstance(value, list) and many is not None and len(value) == many and many > LAYERS:
            out[name] = [value[index] for index in kept]
        elif value is None:
            out[name] = UNSET.get(name)
        elif isinstance(value, list | tuple) and name in SIZES:
            out[name] = [SIZES[name] if isinstance(each, int) and each > 100 else each for each in value]
        elif isinstance(value, bool) or name not in SIZES:
            out[name] = value
        else:
            out[name] = SIZES[name]
    for name in DEPTHS:
        if isinstance(held.get(name), int):
            out[name] = len(kept)
    if held.get("kv_lora_rank"):  # latent attention has no groups, and rotates channels of their own
        out |= {name: size for name, size in (("num_key_value_heads", HEADS), ("head_dim", 8)) if name in held}
    for name, value in held.items():
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and not isinstance(value, bool):
            out[name] = min(value, TOKENS - 1)
    return out


def settings_of(kind: str, config: PretrainedConfig) -> dict[str, Any]:
    """The settings of a tiny model of a type, from its configuration."""
    settings = shrink(config.to_dict())
    for name, value in SPECIFIC.get(kind, {}).items():
        settings[name] = settings[name] | value if name.endswith("_config") else value
    if kind in SECTIONS:
        settings["text_config"]["rope_parameters"]["mrope_section"] = list(SECTIONS[kind])
    return settings


def tiny(kind: str, auto: Any, **over: Any) -> Any:
    """A tiny random model in fp32 of the class that `auto` (AutoModelForCausalLM, say) gives a model type; `over`
    replaces settings.

    Raises as its classes do.
    """
    config: PretrainedConfig = CONFIG_MAPPING[kind]()
    settings = settings_of(kind, config) | over
    made = type(config).from_dict(settings)
    make = auto.from_config
    if kind in WITHIN:
        made, make = getattr(made, WITHIN[kind]), auto._model_mapping[type(config)]._from_config
    if hasattr(made, "is_decoder") and not made.is_encoder_decoder:
        made.is_decoder = True
    with torch.device("meta"):
        size = sum(weight.numel() for weight in make(made).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} M weights")
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = make(made, dtype=torch.float32).eval()
    torch.random.set_rng_state(state)
    return model
