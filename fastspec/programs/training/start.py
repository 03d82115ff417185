"""Head that a run begins with: made of the target's parts, or one that exists, whose sizes the run takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.generation.heads.module import EagleHead, HeadConfig, MtpHead
from fastspec.patches.assistants.heads import load_head
from fastspec.patches.assistants.mtp import load_mtp, new_mtp, saved_mtp
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import TextBatch
from fastspec.programs.training.save import checkpoint_tensors
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
        given = f"the target's states are {c.hidden_size} wide, its LM head reads {read}, and the head is to be {width}"
        raise Unsupported(f"share_lm_head needs one width: {given}")
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
        kinds = f"a head of kind {head.config.kind!r} and the run trains {config.kind!r}"
        raise Unsupported(f"{config.start_from} is {kinds}: give that kind")
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
        sizes |= {"draft_vocab_size": c.draft_vocab_size, "hidden_size": c.hidden_size, "taps": c.taps}
        sizes |= {"share_lm_head": c.target_rows, "norms": c.norm_output}
    given = {name: value for name in sizes if (value := getattr(config, name))}
    other = [f"{name} {value!r} (the head: {sizes[name]!r})" for name, value in given.items() if value != sizes[name]]
    if other:
        raise Unsupported(f"{config.start_from} has other sizes than the run: {', '.join(other)}; leave them out")
    return replace(config, **sizes)


def draft_vocabulary_of(head: EagleHead | MtpHead) -> Tensor:
    """The target's ids of the tokens that a head drafts, on the CPU."""
    return head.to_target(torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)).cpu()
