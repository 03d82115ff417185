"""Probe of a drafting head: which reading of an ambiguous checkpoint drafts best, measured on its target.

Formats in circulation contradict each other about the tapped layers, the RoPE base and one residual
(docs/train/formats.md), and a wrong guess costs speed without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, check_range
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.dialects import TRAINED_THETA
from fastspec.generation.heads.load import Reading, bound, fitted, override, read_checkpoint, with_taps
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants.heads import copies_embedding, find_head, parts_of, scaled_rope, sizes_of
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.modes import adapter_for, decoder_of

PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """One reading of a checkpoint: `agreement` is the share of `tokens` whose draft from the target's states is the
    target's choice, `second` that of the draft after it, from the state that the head feeds back to itself.
    `own_embedding` and `rope_interleaved` are None where they leave nothing to choose."""

    rope_theta: float
    taps: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool
    own_embedding: bool | None = None
    rope_interleaved: bool | None = None
    agreement: float
    second: float
    tokens: int
    declared: bool

    @property
    def score(self) -> float:
        """Rank of a reading: the mean of both shares."""
        return (self.agreement + self.second) / 2

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments that make `load_head` read the checkpoint this way."""
        names = ["rope_theta", "rope_interleaved", "own_embedding"]
        names += ["taps", "norm_before_residual", "norm_output"] if self.taps else []
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@torch.no_grad()
def probe_head(
    source: str | Path, target: PreTrainedModel, input_ids: Tensor | None = None, *, revision: str | None = None
) -> list[ProbeRow]:
    """Measure the plausible readings of a checkpoint, best first; equal ones in the order declared, then nearest to it.

    `input_ids` [1, T] is a prompt (by default the BOS token alone). The target continues it greedily for 64 tokens and
    is run once over the result; each reading then drafts every next token from true features, and the one after it from
    what it feeds back to itself. Its row says how often each met the target's choice.
    """
    parts = parts_of(target)
    checkpoint = _moved(fitted(read_checkpoint(find_head(source, revision=revision)), parts.sizes, Reading()), target)
    prompt = default_prompt(target) if input_ids is None else input_ids.to(device_of(target))
    if prompt.ndim != 2 or prompt.shape[0] != 1 or prompt.shape[1] == 0:
        raise ValueError(f"input_ids has shape {list(prompt.shape)}; expected one prompt, [1, T]")
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=PROBE_TOKENS, do_sample=False)
    if ids.shape[1] < 3:
        raise ValueError(
            "the target ended its answer at once, so nothing can be measured; give a longer prompt as input_ids"
        )
    states, picks = states_of(target, ids)
    rows = []
    for index, (given, reading) in enumerate(_readings(checkpoint, target)):
        config = reading.config
        if config.last_tap_before_norm and states[-1] is None:
            continue
        first, second = _draft(bound(reading, parts, scaled_rope), ids, states)
        # The pair (token t + 1, hidden state t) drafts token t + 2, which the target picks at t + 1, and its state with
        # token t + 2 drafts token t + 3; only the target's own answer counts.
        start = min(max(prompt.shape[1] - 2, 0), len(second) - 1)
        hits, more = (drafts[start:] == picks[at:][start:] for at, drafts in ((1, first), (2, second)))
        row = ProbeRow(
            rope_theta=config.rope_parameters["rope_theta"],
            taps=config.taps,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            own_embedding=given.own_embedding,
            rope_interleaved=given.rope_interleaved,
            agreement=float(hits.float().mean()),
            second=float(more.float().mean()),
            tokens=len(hits),
            declared=index == 0,
        )
        rows.append(row)
    if not rows or not rows[0].declared:
        raise CheckpointError(
            f"{checkpoint.where} reads the last layer's output before the final norm, which cannot be measured on "
            f"{type(target).__name__}: it has no adapter"
        )
    return sorted(rows, key=lambda row: -row.score)


def states_of(target: PreTrainedModel, ids: Tensor) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Hidden states of ids [1, T], with an adapter also the last layer's output before the final norm (else None), and
    what the target picks after each token [T]."""
    adapter, before = adapter_for(target), list[Tensor]()
    hook = None
    if adapter is not None:
        norm = getattr(decoder_of(target), adapter.norm)
        hook = norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
    try:
        out = target(ids, output_hidden_states=True, use_cache=False)
    finally:
        if hook is not None:
            hook.remove()
    return (*out.hidden_states, before[-1] if before else None), out.logits[0].argmax(-1)


def _moved(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> HeadCheckpoint:
    """The checkpoint with its weights where the target is, so that all readings share one copy."""
    check_range(checkpoint.state, target.dtype, checkpoint.where)
    state, device = {}, device_of(target)
    for name, each in checkpoint.state.items():
        state[name] = each.to(device, target.dtype if each.is_floating_point() else each.dtype)
    return replace(checkpoint, state=state)


def default_prompt(target: PreTrainedModel) -> Tensor:
    """The BOS token alone [1, 1]."""
    bos = target.config.get_text_config().bos_token_id
    return torch.tensor([[bos if isinstance(bos, int) else 0]], device=device_of(target))


def _readings(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> Iterator[tuple[Reading, HeadCheckpoint]]:
    """The checkpoint as declared, then its variants: embedding x rotation x taps x residual x fed state x theta."""
    config, layers = checkpoint.config, target.config.get_text_config().num_hidden_layers
    theta = config.rope_parameters["rope_theta"]
    thetas = [theta] if theta == TRAINED_THETA else [theta, TRAINED_THETA]
    if config.kind == "eagle":
        for base in thetas:
            given = Reading(rope_theta=base)
            yield given, override(checkpoint, given)
        return
    may_share = config.hidden_size == sizes_of(target).embedding_size and copies_embedding(checkpoint, target) is False
    embeddings = (True, False) if may_share else (None,)
    rotations = (True, False) if checkpoint.rope_interleaved else (None,)
    shifts = [tuple(i + step for i in config.taps) for step in (0, -1, 1)]
    shifts = [taps for taps in shifts if min(taps) >= 0 and max(taps) <= layers]
    residual, output = config.norm_before_residual, config.norm_output
    for own, turned, taps, flag, fed, base in product(
        embeddings, rotations, shifts, (residual, not residual), (output, not output), thetas
    ):
        given = Reading(
            taps=taps,
            rope_theta=base,
            rope_interleaved=turned,
            norm_before_residual=flag,
            norm_output=fed,
            own_embedding=own,
        )
        yield given, with_taps(override(checkpoint, given), layers)


def _draft(bound_head: BoundHead, ids: Tensor, states: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """The head's first choice after every pair (token t + 1, hidden state t) of ids [1, T], and after the state that it
    makes of the pair and the token behind it: target ids [T - 1] and [T - 2]. `states` are as from `states_of`."""
    head = cast(EagleHead, bound_head.as_module())
    config = head.config
    last = len(states) - 2
    read = [last + 1 if tap == last and config.last_tap_before_norm else tap for tap in config.taps or (last,)]
    features = torch.cat([cast(Tensor, states[tap]) for tap in read], -1)[:, :-1].to(head.fc.weight.device)
    positions = torch.arange(ids.shape[1] - 1, device=features.device)[None]
    true: dict[int, tuple[Tensor, Tensor]] = {}

    def first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        true[layer] = k[:, :-1], v[:, :-1]
        return _causal(layer, q, k, v)

    def second(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _one_step_on(q, k, v, *true[layer])

    fed = head.step(ids[:, 1:], head.fuse(features), positions, first)
    after = head.step(ids[:, 2:], fed[:, :-1], positions[:, 1:], second)
    drafts = [head.to_target(head.logits(each)[0].argmax(-1)) for each in (fed, after)]
    return drafts[0], drafts[1]


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _one_step_on(q: Tensor, k: Tensor, v: Tensor, k_true: Tensor, v_true: Tensor) -> Tensor:
    """Attention of drafted nodes [B, T, heads, D]: node t sees the true pairs up to t, and itself."""
    count = q.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool, device=q.device)
    mask = torch.cat((seen.tril(), torch.eye(count, dtype=torch.bool, device=q.device)), 1)
    q, k, v = (x.transpose(1, 2) for x in (q, torch.cat((k_true, k), 1), torch.cat((v_true, v), 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
