"""Loading of a head: read, translate, fit, build, bind, each a module below."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, TargetParts, bind, check_range
from fastspec.generation.heads.checkpoint import HeadCheckpoint, translate
from fastspec.generation.heads.files import read_files
from fastspec.generation.heads.fit import Reading, fitted
from fastspec.generation.heads.module import EagleHead, HeadConfig

ScaledRope = Callable[[HeadConfig], tuple[Tensor, float]]
"""Rotary frequencies (fp32, [R / 2]) and the factor on cos and sin of a RoPE type that `EagleHead` does not know."""


def read_checkpoint(source: Path | EagleHead) -> HeadCheckpoint:
    """A head's directory or module as a checkpoint. Raises CheckpointError for one that cannot be read."""
    return HeadCheckpoint.of(source) if isinstance(source, EagleHead) else translate(read_files(source))


def load(
    source: Path | EagleHead, target: TargetParts, reading: Reading, scaled_rope: ScaledRope
) -> tuple[BoundHead, tuple[str, ...]]:
    """A head for a target, on its device and in its dtype, and what a user is warned of: `HeadCheckpoint.assumed`, and
    `adapter` where the target has none. A module is bound as it is. Raises CheckpointError where it does not fit."""
    checkpoint = fitted(read_checkpoint(source), target.sizes, reading)
    told = (checkpoint.assumed, None if target.has_adapter else checkpoint.adapter)
    return bound(checkpoint, target, scaled_rope), tuple(each for each in told if each is not None)


def bound(checkpoint: HeadCheckpoint, target: TargetParts, scaled_rope: ScaledRope) -> BoundHead:
    """A fitted checkpoint, built and bound."""
    if checkpoint.module is None:
        check_range(checkpoint.state, target.dtype, checkpoint.where)
        module = build_head(checkpoint).to(target.device, target.dtype).requires_grad_(False).eval()
    else:
        module = _placed(checkpoint.module, target)
    if module.inv_freq is None:
        module.set_rope(*scaled_rope(module.config))
    return bind(module, _embedding(checkpoint, target), target)


def build_head(checkpoint: HeadCheckpoint) -> EagleHead:
    """The module, not bound yet, in the dtype of `fc.weight`; its parameters are the checkpoint's tensors."""
    if not checkpoint.taps_known:
        raise CheckpointError(
            f"{checkpoint.where} names no taps: call with_taps(checkpoint, num_layers) with the target's depth first"
        )
    with torch.device("meta"):
        head = EagleHead(checkpoint.config)
    state = _in_halves(checkpoint) if checkpoint.rope_interleaved else checkpoint.state
    head.load_state_dict(state, strict=True, assign=True)
    return head.to(checkpoint.state["fc.weight"].dtype)


def _in_halves(checkpoint: HeadCheckpoint) -> dict[str, Tensor]:
    """Weights of a head that rotates neighbouring channels, in the order of rotated halves, with the same products."""
    config = checkpoint.config
    size = config.head_dim
    turned = int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))
    channels = torch.arange(size, device="cpu")
    order = torch.cat((channels[:turned:2], channels[1:turned:2], channels[turned:]))
    state = dict(checkpoint.state)
    for name, tensor in state.items():
        if re.search(r"self_attn\.[qk]_(proj|norm)\.", name):
            state[name] = tensor.unflatten(0, (-1, size))[:, order.to(tensor.device)].flatten(0, 1)
    return state


def _placed(module: EagleHead, target: TargetParts) -> EagleHead:
    weight = module.like
    if (weight.device, weight.dtype) != (target.device, target.dtype):
        raise CheckpointError(
            f"this EagleHead is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}: "
            "call head.to(target.device, target.dtype) first"
        )
    return module


def _embedding(checkpoint: HeadCheckpoint, target: TargetParts) -> nn.Module | None:
    """The embedding that a head brought, None where it brought none, or a copy of the target's."""
    own = checkpoint.embedding
    if own is None:
        return None
    if checkpoint.module is not None:
        binding = checkpoint.module.bound
        return binding.embedding if binding.own_embedding or own.shape[1] != target.sizes.embedding_size else None
    shared = target.embedding.weight
    assert isinstance(shared, Tensor)
    if is_copy(own, shared):
        return None
    check_range({"embed_tokens.weight": own}, target.dtype, checkpoint.where)
    kept: nn.Embedding = nn.Embedding.from_pretrained(own.to(target.device, target.dtype), freeze=True)
    return kept


def is_copy(own: Tensor, shared: Tensor) -> bool:
    """True where a head's embedding is the target's, in whichever of the two dtypes it was rounded to."""
    own, shared = own.to(shared.device), shared.detach()
    if own.shape != shared.shape:
        return False
    return torch.equal(own.to(shared.dtype), shared) or torch.equal(own, shared.to(own.dtype))
