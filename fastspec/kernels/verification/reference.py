"""The choice at every node and the walk down the tree in plain torch: the specification of the kernels beside it.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def posterior_walk(tokens: Tensor, parents: Tensor, picks: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follow picks from the root while they are children.

    tokens, parents, picks [B, N]; steps is the longest path in nodes. Returns path [B, steps] (node ids; past the end
    the last node repeats), accepted [B] (draft tokens on the path, root not counted) and bonus [B] (the pick at its
    end).
    """
    batch, nodes = tokens.shape
    row = torch.arange(batch, device=tokens.device)
    index = torch.arange(nodes, device=tokens.device)
    node = torch.zeros(batch, dtype=torch.long, device=tokens.device)
    accepted = torch.zeros_like(node)
    path = [node]
    for _ in range(steps - 1):
        child = (parents == node[:, None]) & (tokens == picks[row, node][:, None]) & (index > 0)
        found = child.any(1)
        node = torch.where(found, child.int().argmax(1), node)
        accepted = accepted + found
        path.append(node)
    return torch.stack(path, 1), accepted, picks[row, node]


LAST_ID = 2**31 - 1


def best_key(scores: Tensor, best: Tensor, first: int) -> Tensor:
    """Key of the likeliest token of a part of a vocabulary, of which the first token is `first`:
    scores [..., M] in at most 32 bits, best [...] the place of the highest of them -> [...] int64.

    The highest of all parts' keys is that of the highest score, and of equal ones that of the lowest token: `key_token`
    reads it.
    """
    value = scores.gather(-1, best[..., None])[..., 0].float() + 0.0  # -0.0 is 0.0
    bits = value.view(torch.int32).masked_fill(value.isnan(), LAST_ID)  # above all, whatever its sign
    ordered = bits ^ ((bits >> 31) & LAST_ID)
    return (ordered.long() << 32) | (LAST_ID - first - best)


def key_token(keys: Tensor) -> Tensor:
    """The token [...] of the highest of keys [..., R]."""
    return LAST_ID - (keys.amax(-1) & LAST_ID)


MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def uniform_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers [...] fp32 in [0, 1), multiples of 2^-24, for seeds and positions [...] int64 (shapes that broadcast).

    Position n of a seed is the n-th output of SplitMix64 (Steele et al., OOPSLA 2014) begun at a hash of the seed.
    int64 arithmetic wraps around.
    """
    return _uniform(_mixed(seeds + signed(STEP)) + positions * signed(STEP))


def stream_of(seeds: Tensor, begun: Tensor) -> Tensor:
    """Streams [B] int64 of rows whose answers are drawn by seeds [B] int64 and begin after `begun` [B] committed
    tokens, as `draws` reads them."""
    return _mixed(seeds + signed(STEP)) - begun * signed(STEP)


def draws(streams: Tensor, lengths: Tensor, depths: Tensor) -> Tensor:
    """Numbers [B, N] of the tokens that are chosen at the nodes of a tree: depths [B, N] int64, after lengths [B] int64
    committed tokens. Of an answer's first token the number is `uniform_at(seed, 0)`, of the root of its first round, at
    depth 0, `uniform_at(seed, 1)`."""
    return _uniform(streams[:, None] + (lengths[:, None] + depths + 1) * signed(STEP))


def _uniform(x: Tensor) -> Tensor:
    return _shifted(_mixed(x), 40).float() * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in MIXERS:
        x = (x ^ _shifted(x, shift)) * signed(factor)
    return x ^ _shifted(x, LAST_SHIFT)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A shift to the right that fills up with zeros: torch's own repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def signed(value: int) -> int:
    """The int64 of the same 64 bits as a whole number below 2^64."""
    return value - (1 << 64) if value > MASK >> 1 else value


NO_TOKEN = -1
"""The draw of a row without a distribution: one of its scores is NaN or +inf, or all are -inf."""


def categorical(logits: Tensor, uniform: Tensor) -> Tensor:
    """One draw per row of logits [..., V] by inversion with uniform [...] in [0, 1): never a token of probability 0,
    and `NO_TOKEN` of a row without a distribution."""
    mass = torch.softmax(logits.float(), dim=-1).double().cumsum(-1)
    total = mass[..., -1:]  # NaN where there is no distribution
    level = uniform.double()[..., None] * total
    index = torch.searchsorted(mass, level.contiguous(), right=True).squeeze(-1)
    last = logits.shape[-1] - 1 - torch.isfinite(logits).int().flip(-1).argmax(-1)
    return torch.where(total[..., 0] > 0, torch.minimum(index, last), NO_TOKEN)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Temperature, then top-k, top-p and min-p as transformers' warpers define them; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """True where it removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def under_settings(scores: Tensor, settings: SamplingSettings) -> Tensor:
    """scores [..., V] in fp32 as transformers' warpers leave them: divided by the temperature, and -inf where a filter
    removes them.

    Top-k keeps all that are equal to the k-th. Top-p removes the lowest first while their mass is at most 1 - top_p,
    and of equal ones the lowest ids; the best stays. Min-p removes what has less than min_p times the best one's
    probability.
    """
    x = scores.float() / settings.temperature
    if settings.top_k > 0:
        x = x.masked_fill(x < x.topk(min(settings.top_k, x.shape[-1])).values[..., -1:], -torch.inf)
    if settings.top_p < 1:
        values = x.sort(-1).values
        removed = (values.softmax(-1).cumsum(-1) <= 1 - settings.top_p).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
        low = values.gather(-1, removed)
        below, equal = x < low, x == low
        x = x.masked_fill(below | (equal & (equal.cumsum(-1) <= removed - below.sum(-1, keepdim=True))), -torch.inf)
    if settings.min_p > 0:
        probs = x.softmax(-1)
        x = x.masked_fill(probs < settings.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return x


def pick(scores: Tensor, uniform: Tensor | None, settings: SamplingSettings | None = None) -> Tensor:
    """One token per row of scores [..., V] -> [...] int64: the argmax, the lowest id among equals, or a draw by uniform
    [...] in [0, 1).

    A draw is from the softmax of the scores, with settings from that of what these leave of them (`under_settings`);
    the argmax is the same under all settings. NaN is above all numbers for the argmax, and leaves nothing to draw from:
    see `NO_TOKEN`.
    """
    if uniform is None:
        return scores.argmax(-1)
    return categorical(scores if settings is None else under_settings(scores, settings), uniform)
