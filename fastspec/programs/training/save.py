"""Trained heads written in the original checkpoint formats (EAGLE-3's, or that of EAGLE-1 and EAGLE-2), with a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastspec.distribution import DISTRIBUTION
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.dialects import OWN
from fastspec.generation.heads.module import EagleHead, HeadConfig, MtpHead
from fastspec.patches.assistants.mtp import saved_mtp
from fastspec.programs.training.config import TrainConfig

SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
"""Fields of config.json under the names of `HeadConfig`."""


def checkpoint_config(head: EagleHead) -> dict[str, Any]:
    """The config.json of a head: Llama's field names, and the taps both as indices into `hidden_states` (top level,
    what speculators and vLLM read) and as 0-based layer outputs (nested, what SpecForge and SGLang read). EAGLE-3.1's
    norms have speculators' names. A head without taps has `bias`, which the EAGLE repository takes for true where it is
    absent."""
    c = head.config
    eagle3 = c.kind == "eagle3"
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if eagle3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "trained_by": OWN,
        **{name: getattr(c, name) for name in SIZES},
        "num_hidden_layers": 1,
        "rope_theta": c.rope_parameters.get("rope_theta", 10000.0),
        "rope_parameters": dict(c.rope_parameters),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if not eagle3:
        return found | {"bias": False}
    if c.norm_output:
        found |= {"fc_norm": True, "norm_output": True, "norm_before_residual": False}
    nested = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps], "use_aux_hidden_state": True}
    found |= {"draft_vocab_size": c.draft_vocab_size, "eagle_config": nested}
    return found | {"eagle_aux_hidden_state_layer_ids": list(c.taps)}


def checkpoint_tensors(head: EagleHead) -> dict[str, torch.Tensor]:
    """The tensors under their original names: bf16 weights, and for EAGLE-3 `d2t` (int64 offsets) and `t2d` (bool)."""
    c = head.config
    eagle3 = c.kind == "eagle3"
    plain = c.num_hidden_layers == 1 and (not eagle3 or ((c.own_lm_head or c.target_rows) and min(c.taps) > 0))
    more = c.attention_bias or c.mlp_bias or c.fc_bias or c.qk_norm or c.input_norm or c.fc_norm != c.norm_output
    if not plain or more:
        raise ValueError(
            "the original formats hold one plain layer, EAGLE-3's with its own LM head, and both of EAGLE-3.1's "
            f"norms or neither; this head is {c}"
        )
    if c.last_tap_before_norm:
        raise ValueError("a run trains on hidden_states, the last one after the final norm; this head reads it before")
    if c.norm_before_residual:
        raise ValueError("the original EAGLE-3 format has no norm_before_residual")
    named = {name.replace("layers.0.", "midlayer.") if eagle3 else name: x for name, x in head.state_dict().items()}
    tensors = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in named.items() if name != "d2t"}
    if not eagle3:
        return tensors
    d2t = head.d2t.cpu()
    t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
    t2d[torch.arange(c.draft_vocab_size) + d2t] = True
    return {**tensors, "d2t": d2t.contiguous(), "t2d": t2d}


def with_own_lm_head(head: EagleHead) -> EagleHead:
    """Copy of a bound head with an LM head of its own, or itself unless it has the target's rows."""
    if not head.config.target_rows:
        return head
    with torch.device("meta"):
        twin = EagleHead(replace(head.config, own_lm_head=True, target_rows=False))
    state = {name: value for name, value in head.state_dict().items() if name != "lm_head_map.weight"}
    twin.load_state_dict(state | {"lm_head.weight": BoundHead.of(head).readout().weight.detach().clone()}, assign=True)
    return twin


def save_head(head: EagleHead | MtpHead, directory: str | Path, card: str) -> None:
    """Write model.safetensors, config.json (of EAGLE heads) and README.md (`card`) into `directory`, which is made."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    tensors = saved_mtp(head) if isinstance(head, MtpHead) else checkpoint_tensors(head)
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
    if isinstance(head, EagleHead):
        (folder / "config.json").write_text(json.dumps(checkpoint_config(head), indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(
    config: TrainConfig,
    head: HeadConfig,
    *,
    steps: int,
    processes: int,
    coverage: float,
    texts: int,
    validation: dict[str, Any] | None,
) -> str:
    """Model card of a head: what it belongs to, how it was trained and is used. Its maker adds the licence."""
    name = Path(config.target).name if Path(config.target).exists() else config.target
    if head.kind == "eagle3":
        kind, assistant, taps = "EAGLE-3", "eagle3", f"taps (`hidden_states`) | {', '.join(map(str, head.taps))}"
        vocabulary = f"{head.draft_vocab_size} of {head.vocab_size}, {coverage:.1%} of the answers' tokens"
        form = "the original EAGLE-3 one (`midlayer.*`, `d2t` as offsets)"
    elif head.kind == "mtp":
        kind, assistant, taps = "MTP", "mtp", "feature | the last hidden state, after the norm"
        vocabulary, form = "the whole, through the LM head of the target", "that of Qwen's checkpoints (`mtp.*`)"
    else:
        kind, assistant, taps = "EAGLE-1/2", "eagle2", "feature | the last hidden state, after the norm"
        vocabulary, form = "the whole, through the LM head of the target", "the original EAGLE-1 and EAGLE-2 one"
    if head.norm_output:
        form += "; with EAGLE-3.1's norms (`fc_norm`, `norm_output`)"
    if head.target_rows:
        form += "; as LM head the target's rows of the drafted tokens after `lm_head_map.weight`, for fastspec alone"
    start = f"| start | the weights of {Path(config.start_from).name} |\n" if config.start_from else ""
    held = ""
    if validation is not None:
        held = f"| held-out chain of {config.ttt_steps}, tokens a round | {validation['top1']} |\n"
    of_hub = "/" in config.target and not Path(config.target).exists()
    base = f"base_model: {config.target}\n" if of_hub else ""
    tokens, rate = processes * config.batch_tokens, f"{config.learning_rate:g}"
    return f"""---
{base}library_name: fastspec
tags:
- speculative-decoding
- {assistant}
---

# {kind} head for {name}

A drafting head: with it the target generates several tokens per forward pass, the same ones as without it.

```python
import fastspec  # {DISTRIBUTION}, installed from a checkout; the package index's fastspec is another project's
fastspec.patch(model, {assistant}="path/of/this/folder")
model.generate(**inputs, assistant="{assistant}")
```

| | |
|---|---|
| hidden, intermediate | {head.hidden_size}, {head.intermediate_size} |
| {taps} |
| draft vocabulary | {vocabulary} |
| texts | {texts}, answers by the target itself |
{start}| steps | {steps} of {tokens} padded tokens, AdamW, peak learning rate {rate} |
| training-time test | {config.ttt_steps} steps, weights {config.decay:g}^i, loss {config.loss} |
{held}
Format: {form}.
"""
