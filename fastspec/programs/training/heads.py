"""Heads of a run: how one starts, or goes on from another, and how it is written in the original formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastspec.distribution import DISTRIBUTION
from fastspec.errors import Unsupported
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.dialects import OWN
from fastspec.generation.heads.module import EagleHead, HeadConfig, MtpHead
from fastspec.patches.assistants.heads import load_head
from fastspec.patches.assistants.mtp import load_mtp, new_mtp, saved_mtp
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import TextBatch
from fastspec.programs.training.target import decoder

SOFTEN = 0.3
"""Factor on the final norm at the start: a tap read through the target's LM head names the token before."""
RIDGE = 0.01
"""Share of the mean square added to the diagonal of the least squares that EAGLE-1/2 heads start from."""


def started(
    config: TrainConfig, target: Any, vocabulary: Tensor, first: Iterable[TextBatch] | None
) -> EagleHead | MtpHead:
    """A head made of the target's parts and bound to it; an EAGLE-1/2 head starts from `first`, batches, if any."""
    if config.kind == "mtp":
        return _trainable(new_mtp(target))
    head = EagleHead(head_for(config, target, len(vocabulary)))
    if config.kind == "eagle3":
        start_from_target(head, target, vocabulary)
    elif first is not None:
        start_from_features(head, target, first)
    head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return head


def head_for(config: TrainConfig, target: Any, draft_vocab_size: int) -> HeadConfig:
    """A head with the target's attention shape; empty `taps` mean hidden_states[2], [L // 2], [L - 3], as published."""
    c, taps, eagle3 = target.config.get_text_config(), config.taps, config.kind == "eagle3"
    heads, layers, width = c.num_attention_heads, c.num_hidden_layers, config.hidden_size or c.hidden_size
    read = target.get_output_embeddings().weight.shape[1]
    if config.share_lm_head and not width == c.hidden_size == read:
        raise Unsupported(
            f"share_lm_head needs one width: the target's states are {c.hidden_size} wide, its LM head reads {read}, "
            f"and the head is to be {width}"
        )
    theta = (getattr(c, "rope_parameters", None) or {}).get("rope_theta", getattr(c, "rope_theta", 10000.0))
    if eagle3 and not taps:
        taps = tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)}))
    return HeadConfig(
        kind=config.kind,
        own_lm_head=eagle3 and not config.share_lm_head,
        target_rows=config.share_lm_head,
        fc_norm=config.norms,
        norm_output=config.norms,
        hidden_size=width,
        intermediate_size=config.intermediate_size or c.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocab_size=target.get_input_embeddings().weight.shape[0],
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=c.hidden_size,
        taps=taps,
        rms_norm_eps=getattr(c, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": float(theta)},
        max_position_embeddings=c.max_position_embeddings,
    )


@torch.no_grad()
def start_from_target(head: EagleHead, target: Any, vocabulary: Tensor) -> None:
    """Start an EAGLE-3 head from the target's own parts: its LM head, its final norm times SOFTEN; `fc` passes the
    highest tap through; attention and feed-forward begin near zero. Where widths do not agree, matrices are random."""
    c = head.config
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    _random(head)
    weight = target.get_output_embeddings().weight
    if head.norm is None or not c.hidden_size == c.target_hidden_size == weight.shape[1]:
        return
    if head.lm_head is not None:
        head.lm_head.weight.copy_(weight[vocabulary.to(weight.device)])
    if head.lm_head_map is not None:
        nn.init.eye_(head.lm_head_map.weight)
    weight = getattr(getattr(decoder(target), "norm", None), "weight", None)
    if isinstance(weight, Tensor) and weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(weight)
    head.norm.weight.mul_(SOFTEN)
    head.fc.weight.zero_()
    head.fc.weight[:, -c.hidden_size :] = torch.eye(c.hidden_size)


@torch.no_grad()
def start_from_features(head: EagleHead, target: Any, texts: Iterable[TextBatch]) -> None:
    """Start an EAGLE-1/2 head as the best linear guess of the next feature: `fc` solves the least squares of a feature
    on its token's embedding and the feature before; attention and feed-forward begin near zero."""
    _random(head)
    base, embed = decoder(target), target.get_input_embeddings()
    square = cross = torch.zeros((), dtype=torch.float64, device=embed.weight.device)
    for batch in texts:
        batch = batch.to(embed.weight.device)
        features = base(input_ids=batch.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        known = torch.cat((embed(batch.ids.flatten()[batch.where]), features[batch.where - 1]), -1).double()
        square, cross = square + known.T @ known, cross + known.T @ features[batch.where].double()
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    head.fc.weight.copy_(torch.linalg.solve(square, cross).T)


def _random(head: EagleHead) -> None:
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=(0.1 if small else 1.0) * parameter.shape[1] ** -0.5)


def _trainable(head: MtpHead) -> MtpHead:
    """An MTP layer in fp32, with gradients. Raises Unsupported for one that a run cannot write."""
    saved_mtp(head)
    return head.float().requires_grad_(True).train()


def opened(config: TrainConfig, target: Any) -> EagleHead | MtpHead | None:
    """The head that `config.start_from` names, in fp32 and bound to the target; None where a run starts afresh. Raises
    `Unsupported` for a head of another kind, and for one that the formats a run writes cannot hold; CheckpointError
    for what cannot be read or does not fit the target."""
    if not config.start_from:
        return None
    if config.kind == "mtp":
        layer = load_mtp(config.start_from, target).as_module()
        assert isinstance(layer, MtpHead)
        return _trainable(layer)
    head = load_head(config.start_from, target)
    if head.config.kind != config.kind:
        raise Unsupported(
            f"{config.start_from} is a head of kind {head.config.kind!r} and the run trains {config.kind!r}: give that "
            "kind"
        )
    try:
        checkpoint_tensors(head)
    except ValueError as error:
        raise Unsupported(f"{config.start_from} cannot be trained on: {error}") from error
    return head.float().requires_grad_(True).train()


def with_sizes_of(config: TrainConfig, head: EagleHead | MtpHead) -> TrainConfig:
    """The settings of a run with the sizes of the head that it goes on from. Raises `Unsupported` for others."""
    c = head.config
    if c.kind == "mtp":
        return config
    sizes: dict[str, Any] = {"intermediate_size": c.intermediate_size}
    if c.kind == "eagle3":
        sizes |= {
            **{"draft_vocab_size": c.draft_vocab_size, "hidden_size": c.hidden_size, "taps": c.taps},
            **{"share_lm_head": c.target_rows, "norms": c.norm_output},
        }
    given = {name: value for name in sizes if (value := getattr(config, name))}
    other = [f"{name} {value!r} (the head: {sizes[name]!r})" for name, value in given.items() if value != sizes[name]]
    if other:
        raise Unsupported(f"{config.start_from} has other sizes than the run: {', '.join(other)}; leave them out")
    return replace(config, **sizes)


def draft_vocabulary_of(head: EagleHead | MtpHead) -> Tensor:
    """The target's ids of the tokens that a head drafts, on the CPU."""
    return head.to_target(torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)).cpu()


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
)
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
