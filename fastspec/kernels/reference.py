"""The ops in plain torch: the specification that the kernels are held to, and the backend on the CPU.

The small steps between the parts of a round are in `reference_round.py`.

B rows (sequences), N query nodes per row, Hq query heads, Hkv key heads, D head size, C cache slots, M tail slots,
W 64-bit words. All lengths are tensors on the device; no op waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What N queries of each row may see, made once per forward pass and shared by its layers.

    `visible` [B, 1, N, E] bool over the first E cache slots; `stacked` [B, 1, group * N, E] is the same, once for each of the
    query heads that share a key head. `extent` is E.
    """

    visible: Tensor
    stacked: Tensor
    extent: int


def attention_layout(
    prefix: Tensor, words: Tensor | None, nodes: int, tail: int, extent: int, group: int = 1
) -> AttentionLayout:
    """Lay out tree attention: prefix [B] int64 slots are seen by all, then `tail` slots by ancestor bits.

    Bit j of words [B, N, W] int64 says whether the node sees tail slot j; words=None means a chain (slot j is seen by
    nodes j, j+1, ...). Slots from `extent` on are not read; the caller keeps prefix + tail <= extent. `group` is the number
    of query heads per key head.
    """
    slot = torch.arange(extent, device=prefix.device)
    rel = slot[None, :] - prefix[:, None]  # [B, E], negative in the prefix
    in_tail = (rel >= 0) & (rel < tail)
    if words is None:
        seen = rel[:, None, :] <= torch.arange(nodes, device=prefix.device)[None, :, None]
    else:
        where = rel.clamp(0, 64 * words.shape[2] - 1)[:, None, :].expand(-1, nodes, -1)
        seen = (words.gather(2, where >> 6) >> (where & 63)) & 1 == 1
    visible = ((rel < 0)[:, None, :] | (in_tail[:, None, :] & seen))[:, None]
    return AttentionLayout(visible, visible.repeat(1, 1, group, 1) if group > 1 else visible, extent)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """Attention of q [B, N, Hq, D] over cached k, v [B, Hkv, C, D] under a layout made for Hq / Hkv -> [B, N, Hq, D].

    Grouped query heads are stacked as rows, so no key or value is repeated.
    """
    batch, nodes, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * nodes, size)
    keys, values = k[:, :, : layout.extent], v[:, :, : layout.extent]
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=layout.stacked, scale=scale)
    return out.view(batch, kv_heads, group, nodes, size).permute(0, 3, 1, 2, 4).reshape(batch, nodes, heads, size)


def cache_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k, v [B, N, Hkv, D] into one layer's cache [B, Hkv, C, D] at slots [B, N] int64."""
    row = torch.arange(k.shape[0], device=k.device)[:, None]
    k_cache[row, :, slots] = k.to(k_cache.dtype)  # under autocast they come in another
    v_cache[row, :, slots] = v.to(v_cache.dtype)


def kv_block_copy(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Move slots source [B, P] to target [B, P] in every layer of k_cache, v_cache [L, B, Hkv, C, D]; overlap is safe."""
    row = torch.arange(source.shape[0], device=source.device)[:, None]
    for cache in (k_cache, v_cache):
        cache[:, row, :, target] = cache[:, row, :, source]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M]."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Parts:
    """A product [..., M] as S sums, each over a part of its inner size: `values` [S, ..., M] fp32, contiguous.

    Their sum, in their order and rounded to `dtype`, is the product.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The product's."""
        return self.values.shape[1:]


def joined(x: Tensor | Parts) -> Tensor:
    """A product as a tensor: itself, or the sum of its parts."""
    if isinstance(x, Tensor):
        return x
    total = x.values[0]
    for part in x.values[1:]:
        total = total + part
    return total.to(x.dtype)


def rms_norm(
    x: Tensor | Parts, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm of x [..., H], or of x + residual [..., H], by weight [H] -> the norm, and what was normed.

    The sum is rounded to x's dtype before it is normed; the norm is computed in fp32 and rounded before the weight is applied, as the
    Llama family does. `out` and `total` [..., H], whose last dimension is contiguous, receive the norm and what was normed where given.
    """
    x = joined(x)
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if out is None else out.copy_(normed), summed if total is None else total.copy_(summed)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2 * I], the gate first -> [..., I]; silu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, *, product: Callable[..., Tensor] = linear) -> Tensor:
    """`swiglu` of x [..., K] times a packed weight [2 * I, K], the gate's rows first, plus bias [2 * I] -> [..., I]."""
    return swiglu(product(x, weight, bias))


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys, write keys and values into the cache -> queries [B, N, Hq, D].

    qkv [B, N, (Hq + 2 * Hkv) * D] holds queries, keys, values; k_cache, v_cache [B, Hkv, C, D] of one layer take row b's node n at
    slots [B, N] int64. cos, sin [P, R / 2] are tables by position, positions [B, N] int64 index them: the first R channels are
    rotated in neox halves, computed in fp32 and rounded once. q_norm, k_norm [D] are the weights of an RMS norm over each head, with
    `rms_norm`'s numerics, before the rotation.
    """
    kv_heads, size = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.unflatten(-1, (-1, size))
    q, k, v = heads.split((heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads), 2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps)[0], rms_norm(k, k_norm, eps)[0]
    c, s = cos[positions][:, :, None].float(), sin[positions][:, :, None].float()
    q, k = _rotate(q, c, s), _rotate(k, c, s)
    cache_write(k_cache, v_cache, k, v, slots)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A mixture of SwiGLU experts: x [T, H], gate_up [E, 2 * I, H], down [E, H, I], chosen [T, K] int64, weights [T, K] -> [T, H].

    Row t is the sum over its K experts of weights[t, k] * down(silu(gate) * up), each product rounded to x's dtype, the weighted sum in
    fp32 and rounded once.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        share = (weights.float() * (chosen == expert)).sum(1, keepdim=True)  # no index is read back: a round waits for nothing
        out += share * F.linear(swiglu(F.linear(x, gate_up[expert])), down[expert]).float()
    return out.to(x.dtype)


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
    """Where an expansion by K of M nodes a row writes what it grows: `scores` fp32 and `tokens` int64 [B, M * K].

    `parents` [B, K * K] int64 is for the children of the K best, which the next expansion grows: each gets its parent's place plus
    `first`. None where none follows. All may be views whose last dimension is contiguous.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor | None = None
    first: int = 0


def topk_expand(
    hidden: Tensor, weight: Tensor | None, scores: Tensor, count: int, d2t: Tensor, out: Candidates | None = None, *,
    product: Callable[..., Tensor] = linear,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Expand every node of a frontier by its `count` likeliest tokens, and rank the children.

    hidden [B, M, H] times the LM head weight [V, H] gives the logits (weight=None: hidden [B, M, V] are the logits); scores [B, M]
    fp32 are the nodes' cumulative log-probabilities; d2t [V] int64 is what a draft id adds to itself to become the target's.
    Returns the children's cumulative scores and target ids [B, M * count], each node's in falling order, and the `count` best of them,
    the next frontier: scores in falling order and indices into the children [B, count], the lower index first among equals.
    `out` receives the children where it is given.
    """
    logp, ids = topk_logprobs(hidden if weight is None else product(hidden, weight, None), count)
    children = (scores[:, :, None] + logp).flatten(1)
    best, index = stable_topk(children, count)
    tokens = (ids + d2t[ids]).flatten(1)
    if out is None:
        return children, tokens, best, index
    if out.parents is not None:
        out.parents.copy_((index + out.first).repeat_interleave(count, 1))
    return out.scores.copy_(children), out.tokens.copy_(tokens), best, index


def next_frontier(tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes to expand next: those of the children tokens [B, M * C] that index [B, K] names.

    hidden [B, M, H] and words [B, M, W] int64 are the states and ancestors of the M nodes that were expanded. Returns the chosen
    children's tokens [B, K], their parents' states [B, K, H], and their ancestors [B, K, W]: their parents' and bit slot + i of the i-th.
    """
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    above = index // (tokens.shape[1] // hidden.shape[1])
    own = own_bits(slot + index.shape[1], tokens.device)[slot:]
    own = F.pad(own, (0, words.shape[2] - own.shape[1]))
    return tokens.gather(1, index), hidden[row, above], words[row, above] | own


def head_input(tokens: Tensor, hidden: Tensor, table: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float) -> Tensor:
    """What the first layer of an EAGLE-3 head reads of tokens [B, K] and their states hidden [B, K, H] -> [B, K, 2 * H].

    The first half is `rms_norm` by token_norm [H] of the tokens' rows of the embedding's table [V, H], the second that of the states by
    hidden_norm [H].
    """
    return torch.cat((rms_norm(F.embedding(tokens, table), token_norm, eps)[0], rms_norm(hidden, hidden_norm, eps)[0]), -1)


def frontier_input(
    tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int,
    table: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`head_input` of the nodes that `next_frontier` makes of the first five -> [B, K, 2 * H], and the nodes' states [B, K, H] and
    ancestors [B, K, W]."""
    fed, states, ancestors = next_frontier(tokens, index, hidden, words, slot)
    return head_input(fed, states, table, token_norm, hidden_norm, eps), states, ancestors


def tree_build(scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, root: Tensor, nodes: int) -> tuple[Tensor, ...]:
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


def posterior_walk(tokens: Tensor, parents: Tensor, picks: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follow picks from the root while they are children.

    tokens, parents, picks [B, N]; steps is the longest path in nodes. Returns path [B, steps] (node ids; past the end the
    last node repeats), accepted [B] (draft tokens on the path, root not counted) and bonus [B] (the pick at its end).
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


def categorical(logits: Tensor, uniform: Tensor) -> Tensor:
    """One draw per row of logits [..., V] by inversion with uniform [...] in [0, 1): never a token of probability 0."""
    mass = torch.softmax(logits.float(), dim=-1).double().cumsum(-1)
    level = uniform.double()[..., None] * mass[..., -1:]
    index = torch.searchsorted(mass, level.contiguous(), right=True).squeeze(-1)
    last = logits.shape[-1] - 1 - torch.isfinite(logits).int().flip(-1).argmax(-1)
    return torch.minimum(index, last)


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """Temperature, then top-k, top-p and min-p as transformers' warpers define them; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """Whether it removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def under_law(scores: Tensor, law: SamplingLaw) -> Tensor:
    """scores [..., V] in fp32 as transformers' warpers leave them: divided by the temperature, and -inf where a filter removes them.

    Top-k keeps all that are equal to the k-th. Top-p removes the lowest first while their mass is at most 1 - top_p, and of equal ones the
    lowest ids; the best stays. Min-p removes what has less than min_p times the best one's probability.
    """
    x = scores.float() / law.temperature
    if law.top_k > 0:
        x = x.masked_fill(x < x.topk(min(law.top_k, x.shape[-1])).values[..., -1:], -torch.inf)
    if law.top_p < 1:
        values = x.sort(-1).values
        removed = (values.softmax(-1).cumsum(-1) <= 1 - law.top_p).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
        low = values.gather(-1, removed)
        below, equal = x < low, x == low
        x = x.masked_fill(below | (equal & (equal.cumsum(-1) <= removed - below.sum(-1, keepdim=True))), -torch.inf)
    if law.min_p > 0:
        probs = x.softmax(-1)
        x = x.masked_fill(probs < law.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return x


def pick(scores: Tensor, uniform: Tensor | None, law: SamplingLaw | None = None) -> Tensor:
    """One token per row of scores [..., V] -> [...] int64: the argmax, the lowest id among equals, or a draw by uniform [...] in [0, 1).

    A draw is from the softmax of the scores, with a law from that of what it leaves of them (`under_law`); the argmax is the same under
    every law.
    """
    if uniform is None:
        return scores.argmax(-1)
    return categorical(scores if law is None else under_law(scores, law), uniform)
