"""The steps of the draft phase in plain torch: what the kernels beside it compute, and their specification.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.cache.reference import grow
from fastspec.kernels.layer.reference import rms_norm
from fastspec.kernels.linear.reference import linear


def stable_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of scores [B, M] in falling order; among equals the lower index comes first."""
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def topk_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (fp32) and ids of the `count` likeliest tokens of logits [..., V] -> two [..., count]."""
    values, ids = torch.topk(logits.float(), count, dim=-1)
    return (values - torch.logsumexp(logits.float(), dim=-1, keepdim=True)).clamp(max=0.0), ids


@dataclass(frozen=True, slots=True)
class Candidates:
    """Buffers where an expansion by K of M nodes a row writes what it grows: `scores` fp32 and `tokens` int64 [B, M *
    K].

    `parents` [B, K * K] int64 is for the children of the K best, which the next expansion grows: each gets its parent's
    place plus `first`. None where none follows. All may be views whose last dimension is contiguous.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor | None = None
    first: int = 0


def topk_expand(
    hidden: Tensor,
    weight: Tensor | None,
    scores: Tensor,
    count: int,
    d2t: Tensor,
    out: Candidates | None = None,
    *,
    product: Callable[..., Tensor] = linear,
    likeliest: Callable[[Tensor, int], tuple[Tensor, Tensor]] = topk_logprobs,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expand every node of a frontier by its `count` likeliest tokens, and rank the children.

    hidden [B, M, H] times the LM head weight [V, H] gives the logits (weight=None: hidden [B, M, V] are the logits);
    scores [B, M] fp32 are the nodes' cumulative log-probabilities; d2t [V] int64 is what a draft id adds to itself to
    become the target's. Returns the children's cumulative scores and target ids [B, M * count], each node's in falling
    order, and the `count` best of them, the next frontier: scores in falling order and indices into the children [B,
    count], the lower index first among equals. `out` receives the children where it is given.
    """
    logp, ids = likeliest(hidden if weight is None else product(hidden, weight, None), count)
    children = (scores[:, :, None] + logp).flatten(1)
    best, index = stable_topk(children, count)
    tokens = (ids + d2t[ids]).flatten(1)
    if out is None:
        return children, tokens, best, index
    if out.parents is not None:
        out.parents.copy_((index + out.first).repeat_interleave(count, 1))
    return out.scores.copy_(children), out.tokens.copy_(tokens), best, index


def next_frontier(
    tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes to expand next: those of the children tokens [B, M * C] that index [B, K] names.

    hidden [B, M, H] and words [B, M, W] int64 are the states and ancestors of the M nodes that were expanded. Returns
    the chosen children's tokens [B, K], their parents' states [B, K, H], and their ancestors [B, K, W]: their parents'
    and bit slot + i of the i-th.
    """
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    above = index // (tokens.shape[1] // hidden.shape[1])
    own = own_bits(slot + index.shape[1], tokens.device)[slot:]
    own = F.pad(own, (0, words.shape[2] - own.shape[1]))
    return tokens.gather(1, index), hidden[row, above], words[row, above] | own


@dataclass(frozen=True, slots=True)
class InputWeights:
    """An embedding's table [V, H], and the `rms_norm` of what it gives and of hidden states, weights [H]."""

    table: Tensor
    token_norm: Tensor
    hidden_norm: Tensor
    eps: float
    offset: float | None = None


def head_input(tokens: Tensor, hidden: Tensor, weights: InputWeights) -> Tensor:
    """Input of an EAGLE-3 head's first layer, or of an MTP layer's fusion, of tokens [B, K] and their states hidden [B,
    K, H] -> [B, K, 2 * H]: the tokens' normed rows of the table, then the normed states."""
    both = (F.embedding(tokens, weights.table), weights.token_norm), (hidden, weights.hidden_norm)
    return torch.cat([rms_norm(x, norm, weights.eps, offset=weights.offset)[0] for x, norm in both], -1)


def frontier_input(
    tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int, weights: InputWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_input` of the nodes that `next_frontier` makes of the first five -> [B, K, 2 * H], and the nodes' states
    [B, K, H] and ancestors [B, K, W]."""
    fed, states, ancestors = next_frontier(tokens, index, hidden, words, slot)
    return head_input(fed, states, weights), states, ancestors


def tree_build(
    scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, root: Tensor, nodes: int
) -> tuple[Tensor, ...]:
    """Re-rank grown candidates and lay the kept ones out breadth first.

    scores [B, M] fp32 cumulative log-probabilities, tokens [B, M], parents [B, M] (candidate index, -1 for the root),
    depths [M] (root's children: 1), root [B]. Keeps nodes - 1 candidates by score, lower index first among equals: a
    parent scores at least as much as its child and comes before it, so a kept child's parent is kept.
    Returns tokens, parents, depths [B, nodes] (parent of the root: 0) and ancestors [B, nodes, W] int64, self included.
    """
    batch = scores.shape[0]
    kept = stable_topk(scores, nodes - 1)[1].sort(dim=-1).values
    above = parents.gather(1, kept)
    place = torch.where(above < 0, 0, torch.searchsorted(kept, above.clamp(min=0).contiguous()) + 1)
    zero = torch.zeros(batch, 1, dtype=torch.long, device=scores.device)
    tree_parents = torch.cat((zero, place), 1)
    tree_depths = torch.cat((zero, depths.expand(batch, -1).gather(1, kept)), 1)
    tree_tokens = torch.cat((root[:, None], tokens.gather(1, kept)), 1)
    return tree_tokens, tree_parents, tree_depths, ancestor_words(tree_parents, int(nodes))


def own_bits(count: int, device: torch.device) -> Tensor:
    """Row i has bit i set: [count, W] int64 with W = ceil(count / 64)."""
    index = torch.arange(count, device=device)
    words = torch.zeros(count, (count + 63) // 64, dtype=torch.long, device=device)
    return words.scatter_(1, (index >> 6)[:, None], (torch.ones_like(index) << (index & 63))[:, None])


def ancestor_words(parents: Tensor, nodes: int) -> Tensor:
    """Ancestors (self included) of a tree with parents [B, N] before their children -> [B, N, W] int64."""
    bits = own_bits(nodes, parents.device).expand(parents.shape[0], -1, -1)
    words, up = bits.clone(), parents
    width = bits.shape[2]
    steps = max(1, (nodes - 1).bit_length())
    for _ in range(steps):  # pointer doubling: after s steps a node knows 2**s generations
        words = words | words.gather(1, up[:, :, None].expand(-1, -1, width))
        up = up.gather(1, up)
    return words


def tree_input(
    tokens: Tensor, depths: Tensor, lengths: Tensor, last: int, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input of a pass over trees of tokens and depths [B, N] behind lengths [B]: positions [B, N], `last` at
    most, slots [B, N], and the tokens' rows of an embedding's table [V, H] where one is given -> [B, N, H]."""
    base = lengths[:, None]
    positions, slots = (base + depths).clamp(max=last), base + torch.arange(tokens.shape[1], device=tokens.device)
    return positions, slots, None if table is None else F.embedding(tokens, table)


def path_pairs(
    features: Tensor,
    path: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    active: Tensor,
    root: Tensor,
    lengths: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
    heard: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs that a head is fed of a verdict beside its tokens: the features [B, N, F] of the nodes of path [B, P] ->
    [B, P, F], how many of them count [B], accepted [B] + 1 where active [B] bool and else 0, and their slots [B, P]
    behind lengths [B].

    root [B] becomes bonus [B] where active. `out` receives the features and the counts where it is given. `heard` are
    tokens [B, P], occurrences [V] of all tokens, and what those of the pairs that count add to them each.
    """
    taken, counts = features[torch.arange(len(path), device=path.device)[:, None], path], (accepted + 1) * active
    root.copy_(torch.where(active, bonus, root))
    places = torch.arange(path.shape[1], device=path.device)
    slots = lengths[:, None] + places
    if heard is not None:
        tokens, occurrences, unit = heard
        occurrences.index_add_(0, tokens.flatten(), (places < counts[:, None]).flatten() * unit)
    return (taken, counts, slots) if out is None else (out[0].copy_(taken), out[1].copy_(counts), slots)


def keep_last(
    hidden: Tensor,
    readout: Tensor,
    counts: Tensor,
    last_hidden: Tensor,
    last_readout: Tensor,
    lengths: Tensor,
    bound: int,
) -> None:
    """Keep what a pass made of each row's last pair: of hidden and readout [B, T, H], what is at place counts [B] - 1,
    in last_hidden and last_readout [B, H], in rows that have pairs. Then `grow` of the lengths [B] by counts."""
    row = torch.arange(len(counts), device=counts.device)
    for kept, states in ((last_hidden, hidden), (last_readout, readout)):
        kept.copy_(torch.where((counts > 0)[:, None], states.detach()[row, counts - 1], kept))
    grow(lengths, counts, bound)


def keep_pair(features: Tensor, bonus: Tensor, active: Tensor, counts: Tensor, held: Tensor, tokens: Tensor) -> None:
    """Keep the pair of a round without drafts: in rows that are active [B] bool and have kept fewer than C, the root's
    features [B, N, F] go to held [B, C, F], the token bonus [B] to tokens [B, C], at place counts [B], which grows."""
    takes = active & (counts < tokens.shape[1])
    at = torch.arange(len(counts), device=counts.device), counts.clamp(max=tokens.shape[1] - 1)
    held[at] = torch.where(takes[:, None], features[:, 0].to(held.dtype), held[at])
    tokens[at] = torch.where(takes, bonus, tokens[at])
    counts += takes
