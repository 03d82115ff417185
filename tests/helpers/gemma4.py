"""Tiny Gemma 4 models with assistants of known quality, and transformers' own module run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers.models import tiny_model

SIZES: dict[str, Any] = {"vocab_size": 98, "vocab_size_per_layer_input": 98}
PAIR = ["sliding_attention", "full_attention"]
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 14, "centroid_intermediate_top_k": 3}
"""An assistant that scores the tokens of 3 of 14 centroids, 21 of 98."""
DEEP = ["sliding_attention"] * 3 + ["full_attention"]


def gemma4(seed: int = 0, kind: str = "gemma4_text", **over: Any) -> Any:
    """A target of four layers, the last two of which read the keys of the first two."""
    sizes = {"num_hidden_layers": 4, "layer_types": PAIR * 2, "num_kv_shared_layers": 2}
    return tiny_model(kind, seed, **{**SIZES, **sizes, **over})


def bigram_gemma4(**over: Any) -> Any:
    """A target whose next token depends on the last one alone."""
    model = gemma4(**over)
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.per_layer_projection):
            module.weight.detach().zero_()
    model.lm_head.weight.detach().mul_(2.0)
    return model


def assistant_for(model: Any, seed: int = 1, *, text: dict[str, Any] | None = None, **over: Any) -> Any:
    """A random assistant that fits a target, of four layers; `text` replaces settings of its decoder."""
    own = model.config.get_text_config()
    sizes = own.to_dict() | {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": DEEP,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    wide = own.per_layer_config[own.layer_types.index("full_attention")]
    sizes["per_layer_config"] = {3: {"head_dim": wide.head_dim, "num_key_value_heads": wide.num_key_value_heads}}
    kind = own.model_type.replace("text", "assistant")
    config = CONFIG_MAPPING[kind](text_config=sizes | (text or {}), backbone_hidden_size=own.hidden_size, **over)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    assistant = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(own.vocab_size))
    for layer in assistant.model.layers:
        layer.layer_scalar.fill_(0.7)
    torch.random.set_rng_state(state)
    return assistant


def knowing(model: Any, noise: float = 0.0) -> Any:
    """An assistant that knows a target of bigrams, the less the more noise there is."""
    width = model.config.hidden_size
    assistant = assistant_for(model, text={"hidden_size": width})
    for layer in assistant.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layer.layer_scalar.fill_(1.0)
    assistant.pre_projection.weight.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
    assistant.model.norm.weight.copy_(model.model.norm.weight.detach())
    told = model.lm_head.weight.detach()
    generator = torch.Generator().manual_seed(0)
    assistant.lm_head.weight.copy_(told + noise * told.std() * torch.randn(told.shape, generator=generator))
    return assistant


class StepByStep:
    """transformers' assistant behind a committed text [1, T]."""

    def __init__(self, model: Any, assistant: Any, text: Tensor) -> None:
        self.assistant, self.embed, self.position = assistant, model.get_input_embeddings(), text.shape[1]
        out = model(text, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        self.held, self.last = dict(out.shared_kv_states), out.hidden_states[-1][:, -1:]

    def __call__(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [V] behind a path of tokens, the root first, and the state [H] that is fed back."""
        hidden, logits = self.last, self.last
        for token in tokens:
            out = self.assistant(
                inputs_embeds=torch.cat((self.embed(torch.tensor([[token]])), hidden), -1),
                position_ids=torch.tensor([[self.position]]),
                shared_kv_states=self.held,
                use_cache=False,
            )
            hidden, logits = out.last_hidden_state, out.logits
        return logits[0, 0], hidden[0, 0]
