"""The kernels of a backend as one value: what a round computes with, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.linear.reference import Parts


@dataclass(frozen=True, slots=True)
class Ops:
    """The kernels of one backend; the reference of their group in `fastspec.kernels` says what each computes."""

    name: str
    attention_layout: Callable[..., object]
    tree_attention: Callable[..., Tensor]
    cache_write: Callable[..., None]
    kv_block_copy: Callable[..., None]
    tree_input: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    commit_slots: Callable[..., tuple[Tensor, Tensor]]
    emit: Callable[..., Tensor]
    path_pairs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    keep_last: Callable[..., None]
    keep_pair: Callable[..., None]
    linear: Callable[..., Tensor]
    linears: Callable[..., Tensor]
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_cache: Callable[..., Tensor]
    gate_up: Callable[..., Tensor]
    gate_heads: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    tree_conv: Callable[..., Tensor]
    hold: Callable[..., None]
    delta_tree: Callable[..., Tensor]
    delta_chain: Callable[..., Tensor]
    delta_commit: Callable[..., None]
    gated_norm: Callable[..., Tensor]
    topk_logprobs: Callable[..., tuple[Tensor, Tensor]]
    topk_expand: Callable[..., tuple[Tensor, ...]]
    next_frontier: Callable[..., tuple[Tensor, Tensor, Tensor]]
    head_input: Callable[..., Tensor]
    frontier_input: Callable[..., tuple[Tensor, Tensor, Tensor]]
    tree_build: Callable[..., tuple[Tensor, ...]]
    draws: Callable[..., Tensor]
    pick: Callable[..., Tensor]
    posterior_walk: Callable[..., tuple[Tensor, Tensor, Tensor]]
    all_reduce: Callable[..., Tensor]
    all_gather: Callable[..., Tensor]
    look_up: Callable[..., Tensor]
    likeliest: Callable[..., Tensor]
    linear_parts: Callable[..., Tensor | Parts] | None = None
    """`linear` where a norm follows: it may give the parts of its sum. None: `linear` itself."""
    stack: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    """Whole layers in one call, where nothing stands in its way: else it gives None. None: layer by layer."""
    experts: Callable[..., Tensor] | None = None
    """A mixture of experts; None leaves it to the model's own module."""
    stored_linears: Callable[..., Tensor] | None = None
    """`linears` of weights as a quantiser stored them; None leaves these layers to their own forward."""
    stored_parts: Callable[..., Tensor | Parts] | None = None
    """`stored_linears` where a norm or `rope_cache` follows: it may give the parts of its sums. None: the former."""
    stored_experts: Callable[..., Tensor] | None = None
    """`experts` of weights as stored; None leaves them to the model's own module."""
    most_children: int | None = None
    """The most children of a node that `topk_expand` takes; None: any number."""
    most_candidates: int | None = None
    """The most candidates that `tree_build` takes; None: any number."""
    drafts_in: torch.dtype | None = None
    """The dtype in which an EAGLE head drafts for a model in fp32; None: the model's."""
    captures: bool = False
    """True where passes and rounds are captured as CUDA graphs."""
    packs: bool = False
    """True where weights that read one input are laid one after another, and multiplied as one."""
    drafts: Ops | None = None
    """The ops that drafters run with, on whose sums no token depends; None: these."""
    heads: Ops | None = None
    """The ops that heads in 8 bits run with, which multiply stored weights; None: those of drafters."""
    exact: bool = False
    """True where products and attention sum in an order that neither other rows nor the way a text was read changes."""
