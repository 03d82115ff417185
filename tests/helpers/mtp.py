"""Checkpoints of tiny models with an MTP layer in their files, as publishers write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from fastspec.patches.assistants import mtp
from helpers.families import FULL, LINEAR
from helpers.models import tiny_model

mtp.PROBE_TOKENS = 64  # every checkpoint of a test is another one, and is probed

NAMES = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "fc", "post_norm": "norm", "mtp_block": "layer"}
"""Names of transformers' MTP layers -> those of `MtpHead`."""
FORMS = {
    "qwen": {
        "token_norm": "mtp.pre_fc_norm_embedding",
        "state_norm": "mtp.pre_fc_norm_hidden",
        "fc": "mtp.fc",
        "norm": "mtp.norm",
        "layer": "mtp.layers.0",
    },
    "speculators": {
        "token_norm": "mtp_layers.0.token_layernorm",
        "state_norm": "mtp_layers.0.hidden_layernorm",
        "fc": "mtp_layers.0.input_proj",
        "norm": "mtp_layers.0.final_layernorm",
        "layer": "mtp_layers.0",
    },
    "deepseek": {
        "token_norm": "model.layers.{n}.enorm",
        "state_norm": "model.layers.{n}.hnorm",
        "fc": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
        "layer": "model.layers.{n}",
    },
    "ernie": {
        "token_norm": "model.mtp_emb_norm.0",
        "state_norm": "model.mtp_hidden_norm.0",
        "fc": "model.mtp_linear_proj.0",
        "layer": "model.mtp_block.0",
    },
}
"""Form -> the published names of the parts of `MtpHead`."""


SETTINGS = {
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["sparse"],
    "moe_layer_start_index": 9,
}
"""What transformers reads to make such a layer; ERNIE's is dense."""


KINDS = {
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
    "qwen3_next": "qwen",
    "glm4_moe": "deepseek",
    "ernie4_5_moe": "ernie",
}
"""Family -> the form of its checkpoints."""


def oracle(model: Any, seed: int = 0, *, final: bool = True) -> MtpModel:
    """transformers' own MTP layer of a model, with random weights of the model's kind; without a `final` norm where the
    family has none."""
    config = model.config.get_text_config()
    before = {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
    for name, value in SETTINGS.items():
        setattr(config, name, value)
    try:
        made = MtpModel(model, 1)
    finally:
        for name in SETTINGS:
            setattr(config, name, before[name]) if name in before else delattr(config, name)
    if not final:
        made.layers[0].use_post_norm, made.layers[0].post_norm = False, None
    torch.manual_seed(seed)
    middle = float(
        model.get_decoder().layers[-1].input_layernorm.weight.detach().mean().round()
    )  # 0 of norms that add one
    for name, weight in made.layers.named_parameters():
        with torch.no_grad():
            weight.normal_(0.0, 0.3) if weight.dim() > 1 else weight.normal_(middle if "norm" in name else 0.0, 0.1)
    return made.to(model.device, model.dtype).eval()


def draft_by_token(made: MtpModel, model: Any) -> None:
    """Let an MTP layer draft by the token before alone: it then often meets a `target`."""
    layer = made.layers[0]
    width = layer.eh_proj.out_features
    with torch.no_grad():
        for weight in layer.mtp_block.parameters():
            if weight.dim() > 1:
                weight.mul_(0.1)
        layer.eh_proj.weight.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), 1))
        like = model.get_decoder().layers[-1].input_layernorm.weight
        layer.enorm.weight.copy_(like.mean().expand_as(like))
        if layer.post_norm is not None:
            layer.post_norm.weight.copy_(model.get_decoder().norm.weight)


def published(made: MtpModel, form: str, count: int, *, split: bool = False) -> dict[str, Tensor]:
    """The tensors of transformers' MTP layer under a form's names, for a target of `count` layers; with `split` experts
    one by one."""
    found: dict[str, Tensor] = {}
    for name, tensor in made.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        if NAMES[part] not in FORMS[form]:
            continue
        key = f"{FORMS[form][NAMES[part]].format(n=count)}.{rest}"
        if form == "ernie":
            key = key.replace("mlp.gate.moe_statics.", "mlp.moe_statics.")
        if split and (experts := re.match(r"(.*experts)\.(gate_up|down)_proj$", key)):
            for number, expert in enumerate(tensor):
                halves = expert.chunk(2) if experts[2] == "gate_up" else (expert,)
                for kind, half in zip(("gate", "up") if len(halves) > 1 else ("down",), halves, strict=True):
                    found[f"{experts[1]}.{number}.{kind}_proj.weight"] = half.clone()
        else:
            found[key] = tensor.clone()
    return found


def save_with(model: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    """Save a model with more tensors in its file."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return folder


def target(kind: str, seed: int = 0, **over: Any) -> Any:
    """A tiny model of a family with MTP layers, whose next token hangs mostly on the last one."""
    more = {"layer_types": [FULL, LINEAR, FULL]} if kind.startswith("qwen") else {}
    model = tiny_model(kind, seed, **{"num_hidden_layers": 3, **more, **over})
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            for name, weight in layer.named_parameters():
                if weight.dim() > 1 and "conv" not in name:
                    weight.mul_(0.1)
        model.lm_head.weight.mul_(2.0)
    return model


def loaded(kind: str, folder: Path, *, seed: int = 0, drafts_well: bool = True, **over: Any) -> tuple[Any, MtpModel]:
    """A target as `from_pretrained` gives it, with an MTP layer in its files, and transformers' own of these."""
    form = KINDS[kind]
    model = target(kind, seed, **over)
    made = oracle(model, seed, final=form != "ernie")
    if drafts_well:
        draft_by_token(made, model)
    save_with(model, published(made, form, model.config.num_hidden_layers, split=kind != "qwen3_5_moe_text"), folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), made
