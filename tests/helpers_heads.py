"""Tiny drafting heads, and writers of each checkpoint dialect: what test_checkpoint.py and test_heads.py share."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.assistants.heads import _causal

BASE = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=37,
    draft_vocab_size=11,
    target_hidden_size=16,
    taps=(2, 6, 9),
    rms_norm_eps=1e-5,
)
LAYERS = 12  # the target's, so that (2, 6, 9) are the default taps


def make_head(**changes) -> EagleHead:
    """A head with random weights and a random map of the draft vocabulary."""
    config = replace(BASE, **changes)
    head = EagleHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.3)
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head.d2t.copy_(ids - torch.arange(config.draft_vocab_size))
    return head


def logits(head: EagleHead, embedding: Tensor) -> Tensor:
    """Two steps of a head over seven positions, the second one on what the first fed back."""
    # A mapped file's tensors lie at odd addresses, where a matrix product may round otherwise: the casts move them, losslessly.
    head.to(torch.float64).to(torch.float32)
    c, generator = head.config, torch.Generator().manual_seed(7)
    lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
    lm_head.weight = nn.Parameter(torch.randn(lm_head.weight.shape, generator=generator))
    head.bind(nn.Embedding.from_pretrained(embedding), lm_head)
    tokens, positions = torch.arange(7)[None] % c.vocab_size, torch.arange(7)[None]
    features = torch.randn(1, 7, max(len(c.taps), 1) * c.target_hidden_size, generator=generator)
    with torch.no_grad():
        first = head.step(tokens, head.fuse(features), positions, _causal)
        second = head.step(tokens, first, positions + 1, _causal)
        return torch.stack((head.logits(first), head.logits(second)))


def plain_config(c: HeadConfig) -> dict:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
    return {name: getattr(c, name) for name in names} | {"num_hidden_layers": c.num_hidden_layers, "model_type": "llama"}


def midlayer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"^layers\.0\.", "midlayer.", key): tensor for key, tensor in state.items()}


def tensors(head: EagleHead) -> dict[str, Tensor]:
    c, state = head.config, {key: tensor.detach().clone() for key, tensor in head.state_dict().items()}
    t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
    t2d[torch.arange(c.draft_vocab_size) + head.d2t] = True
    return state | {"t2d": t2d}


def as_eagle(head, embedding):
    state = {key: value for key, value in tensors(head).items() if key not in ("d2t", "t2d")}
    return plain_config(head.config) | {"bias": True, "qkv_bias": True}, state | {"embed_tokens.weight": embedding}


def as_vllm(head, embedding):
    config, state = as_eagle(head, embedding)
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": config}, {f"model.{k}": v for k, v in state.items()}


def as_eagle3(head, embedding):
    return plain_config(head.config) | {"draft_vocab_size": head.config.draft_vocab_size, "head_dim": None}, midlayer(tensors(head))


def as_specforge(head, embedding):
    config, state = as_eagle3(head, embedding)
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}
    more = {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 6, "fc_norm": True, "norm_output": True, "rope_theta": 10000.0}
    return config | more | {"eagle_config": nested}, state


def as_speculators(head, embedding):
    c = head.config
    layer = plain_config(c) | {"model_type": "qwen3", "head_dim": c.head_dim, "rope_theta": c.rope_parameters["rope_theta"]}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "norm_output": c.norm_output,
        "norm_before_fc": c.input_norm,
    }
    state = tensors(head) | {"embed_tokens.weight": embedding, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    return config, state


def as_angelslim(head, embedding):
    config, state = as_eagle3(head, embedding)
    state["fc.weight"] = torch.cat((state["fc.weight"], torch.ones(2, state["fc.weight"].shape[1])))
    return config | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6, "tie_word_embeddings": True}, state


def as_modelopt(head, embedding):
    config, state = as_eagle3(head, embedding)
    state["d2t"] = state["d2t"] + torch.arange(head.config.draft_vocab_size)
    return config | {"eagle_config": {"use_last_layernorm": True, "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}}, state


def as_nemo(head, embedding):
    config, state = as_eagle3(head, embedding)
    state = {re.sub(r"^midlayer\.", "layers.0.", key): value for key, value in state.items() if key != "t2d"}
    return config, {key if key == "lm_head.weight" else f"model.{key}": value for key, value in state.items()}


EAGLE1 = {"kind": "eagle", "taps": (), "draft_vocab_size": 37, "fc_bias": True, "attention_bias": True, "own_lm_head": False}
SPECULATORS = {"qk_norm": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2, "head_dim": 8, "input_norm": True}
DIALECTS = {
    "eagle": (as_eagle, EAGLE1),
    "vllm": (as_vllm, EAGLE1),
    "eagle3": (as_eagle3, {}),
    "specforge": (as_specforge, {"head_dim": 6, "fc_norm": True}),
    "speculators": (as_speculators, SPECULATORS | {"norm_before_residual": True, "norm_output": True, "target_hidden_size": 24}),
    "angelslim": (as_angelslim, {}),
    "modelopt": (as_modelopt, {}),
    "nemo": (as_nemo, {"fc_norm": True}),
}


def write(folder: Path, config: dict, state: dict[str, Tensor], form: str = "safetensors") -> Path:
    """config.json and the weights, as one file or as two shards, in either format."""
    (folder / "config.json").write_text(json.dumps(config))
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    kind, _, sharded = form.partition("-")
    save = (lambda part, path: save_file(part, path)) if kind == "safetensors" else (lambda part, path: torch.save(part, path))
    stem, end = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    if not sharded:
        save(state, folder / f"{stem}.{end}")
        return folder
    keys = sorted(state)
    parts = {f"{stem}-00001-of-00002.{end}": keys[::2], f"{stem}-00002-of-00002.{end}": keys[1::2]}
    for name, part in parts.items():
        save({key: state[key] for key in part}, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
