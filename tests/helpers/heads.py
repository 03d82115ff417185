"""Tiny drafting heads, and writers of each checkpoint dialect: what test_checkpoint.py and test_heads.py share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.assistants.probe import _causal

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
    # A mapped file's tensors lie at odd addresses, where a matrix product may round otherwise: the casts move them,
    # losslessly.
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
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    return {name: getattr(c, name) for name in names} | {
        "num_hidden_layers": c.num_hidden_layers,
        "model_type": "llama",
    }


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
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": config}, {
        f"model.{k}": v for k, v in state.items()
    }


def as_eagle3(head, embedding):
    return plain_config(head.config) | {"draft_vocab_size": head.config.draft_vocab_size, "head_dim": None}, midlayer(
        tensors(head)
    )


def as_specforge(head, embedding):
    c, (config, state) = head.config, as_eagle3(head, embedding)
    nested = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps], "use_aux_hidden_state": True}
    more = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "head_dim": c.head_dim,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | more | {"fc_norm": c.fc_norm, "norm_output": c.norm_output, "eagle_config": nested}, state


def as_speculators(head, embedding):
    c = head.config
    layer = plain_config(c) | {
        "model_type": "qwen3",
        "head_dim": c.head_dim,
        "rope_theta": c.rope_parameters["rope_theta"],
    }
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


def as_deepspec(head, embedding):
    """DeepSpec's export: a copy of the target's configuration, the layers named by their outputs, the whole vocabulary,
    and copies of the target's embedding and LM head."""
    c, state = head.config, tensors(head)
    more = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "head_dim": c.head_dim,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_parameters": c.rope_parameters,
        "tie_word_embeddings": False,
        "num_target_layers": LAYERS,
        "target_layer_ids": [tap - 1 for tap in c.taps],
        "draft_num_hidden_layers": 1,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
    }
    state = {key: tensor for key, tensor in state.items() if key not in ("d2t", "t2d")}
    return plain_config(c) | more, state | {"embed_tokens.weight": embedding}


EAGLE1 = {
    "kind": "eagle",
    "taps": (),
    "draft_vocab_size": 37,
    "fc_bias": True,
    "attention_bias": True,
    "own_lm_head": False,
}
SPECULATORS = {
    "qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "input_norm": True,
}
DEEPSPEC = {"qk_norm": True, "draft_vocab_size": 37, "taps": (2, 4, 6, 8, 10)}
DIALECTS = {
    "eagle": (as_eagle, EAGLE1),
    "vllm": (as_vllm, EAGLE1),
    "eagle3": (as_eagle3, {}),
    "specforge": (as_specforge, {"head_dim": 6, "fc_norm": True}),
    "speculators": (
        as_speculators,
        SPECULATORS | {"norm_before_residual": True, "norm_output": True, "target_hidden_size": 24},
    ),
    "angelslim": (as_angelslim, {}),
    "modelopt": (as_modelopt, {}),
    "nemo": (as_nemo, {"fc_norm": True}),
    "deepspec": (as_deepspec, DEEPSPEC),
}


def write(folder: Path, config: dict, state: dict[str, Tensor], form: str = "safetensors") -> Path:
    """config.json and the weights, as one file or as two shards, in either format."""
    (folder / "config.json").write_text(json.dumps(config))
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    kind, _, sharded = form.partition("-")
    save = (
        (lambda part, path: save_file(part, path))
        if kind == "safetensors"
        else (lambda part, path: torch.save(part, path))
    )
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


def save_eagle3(head: EagleHead, folder: Path, taps: Sequence[int] = (0, 2, 4)) -> None:
    """A head in a new folder, whose config.json names the layers that it reads."""
    config, state = as_eagle3(head, None)
    folder.mkdir(exist_ok=True)
    write(folder, config | {"eagle_aux_hidden_state_layer_ids": list(taps)}, state)


def published_by_yuhuili(head, embedding):
    """SafeAILab/EAGLE's own heads; the one of Vicuna 13B has the target's number of layers in its config.json."""
    config, state = as_eagle3(head, embedding)
    return config | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "torch_dtype": "float16"}, state


def published_by_yuhuili_before(head, embedding):
    """SafeAILab/EAGLE's EAGLE-1 and EAGLE-2 heads: `bias` says that fc has one, the embedding is saved along."""
    config, state = as_eagle(head, embedding)
    return config | {"architectures": ["LlamaForCausalLM"], "qkv_bias": False}, state


def published_by_tengyunw(head, embedding):
    """Trained by the original code under SpecForge's class name: no ids of layers, and the head's own head_dim."""
    config, state = as_eagle3(head, embedding)
    return config | {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": head.config.head_dim}, state


def published_by_lmsys(head, embedding):
    """SpecForge's heads for gpt-oss, before it knew fc_norm and norm_output."""
    config, state = as_specforge(head, embedding)
    return {name: value for name, value in config.items() if name not in ("fc_norm", "norm_output")}, state


def published_by_nvidia(head, embedding):
    """ModelOpt's export: nested fields, a norm before fc, and layers named by boundary, the last one included."""
    c, (config, state) = head.config, as_eagle3(head, embedding)
    nested = {
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "norm_before_fc": c.input_norm,
        "parallel_draft_step": 1,
    }
    nested |= {"use_input_layernorm_in_first_layer": True, "eagle_aux_hidden_state_layer_ids": list(c.taps)}
    return config | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested, "num_hidden_layers": 1}, state


def published_by_nvidia_for_llama4(head, embedding):
    """ModelOpt's export for Llama 4: the target's class of configuration, in whose words a dense feed-forward has a
    size of its own."""
    c, (config, state) = head.config, as_eagle3(head, embedding)
    sizes = {
        "intermediate_size": c.intermediate_size * 2,
        "intermediate_size_mlp": c.intermediate_size,
        "head_dim": c.head_dim,
    }
    return config | sizes | {"model_type": "llama4_text", "use_qk_norm": False, "no_rope_layers": [1]}, state


def published_by_angelslim(head, embedding):
    config, state = as_angelslim(head, embedding)
    return config | {"target_model_type": "qwen3", "head_dim": head.config.head_dim}, state


def published_by_red_hat(head, embedding):
    """speculators' export of today: the layer's RoPE by type of layer."""
    config, state = as_speculators(head, embedding)
    layer = dict(config["transformer_layer_config"])
    theta = layer.pop("rope_theta")
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 2048, "max_position_embeddings": 2048}
    layer["rope_parameters"] = {"sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    verifier = {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]}
    return config | {
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
    }, state


def published_by_thoughtworks(head, embedding):
    """SpecForge's heads with a copy of the target's embedding, rounded to bf16."""
    config, state = as_specforge(head, embedding)
    return config | {"dtype": "bfloat16"}, state | {"embed_tokens.weight": embedding.to(torch.bfloat16)}


def published_by_amazon(head, embedding):
    """P-EAGLE: several layers, and a learned placeholder in place of hidden states."""
    config, state = as_eagle3(head, embedding)
    more = {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "ptd_token_id": 5}
    return config | more, state | {"mask_hidden": torch.zeros(1, 1, state["fc.weight"].shape[1])}


SPECFORGE = {"head_dim": 6}
PUBLISHED = {
    "yuhuili, EAGLE-3": (published_by_yuhuili, {}, "eagle3"),
    "yuhuili, EAGLE-1/2": (published_by_yuhuili_before, EAGLE1 | {"attention_bias": False}, "eagle"),
    "SpecForge, EAGLE-3": (as_specforge, SPECFORGE, "specforge"),
    "SpecForge, EAGLE-3.1": (as_specforge, SPECFORGE | {"fc_norm": True, "norm_output": True}, "specforge"),
    "lmsys": (published_by_lmsys, SPECFORGE, "specforge"),
    "Tengyunw": (published_by_tengyunw, {}, "specforge"),
    "RedHatAI": (
        published_by_red_hat,
        {"norm_before_residual": True, "norm_output": True, "input_norm": True},
        "speculators",
    ),
    "nvidia": (published_by_nvidia, {"input_norm": True, "taps": (4, 8, 12), "last_tap_before_norm": True}, "modelopt"),
    "AngelSlim": (published_by_angelslim, {}, "angelslim"),
    "deepseek-ai": (as_deepspec, DEEPSPEC, "deepspec"),
    "thoughtworks": (published_by_thoughtworks, SPECFORGE | {"fc_norm": True}, "specforge"),
}
"""Publisher -> a writer of its exporter's files, what its heads have beside the usual, and the dialect that they are
read as."""
