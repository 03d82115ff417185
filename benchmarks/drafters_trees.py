"""Draft trees behind many anchors of one text at once, in plain torch, and how far the text follows them. For drafters.py.

Letters: P anchors, W nodes of a level that are expanded, C tokens that a node's children are picked from, M candidates in all, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.generation.drafters.block.head import BlockHead
from fastspec.generation.heads.module import EagleHead


class Drafts(Protocol):
    """What a head says behind P anchors. `expand` is called level by level, once each."""

    depth: int

    def expand(self, level: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Children of the W nodes of depth `level` (0: the anchor) whose tokens are [P, W] and whose parents [P, W] are places among the
        nodes expanded before -> log-probabilities [P, W, C] fp32 and target ids [P, W, C]; [P, 1, C] where they are the same for all."""
        ...


@dataclass(slots=True)
class BlockDrafts:
    """A block head's slots behind P anchors: states [P, D, H] and unary [P, D, V_d]. With `marginal` a slot's own distribution is every
    node's, whatever stands before it."""

    head: BlockHead
    states: Tensor
    unary: Tensor
    marginal: bool = False

    @property
    def depth(self) -> int:
        return self.states.shape[1]

    def expand(self, level: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        unary, states = self.unary[:, level], self.states[:, level]
        if self.marginal or self.head.config.kind == "dflash":
            scores, ids = unary.float().unsqueeze(-2), None
        else:
            scores, ids = self.head.edges(unary, states, tokens)
        wide = scores.log_softmax(-1)
        every = torch.arange(self.unary.shape[-1], device=tokens.device) if ids is None else ids.unsqueeze(-2)
        return wide, self.head.to_target(every).expand_as(wide)


class EagleText:
    """One text as an EAGLE head reads it: true pairs (token t + 1, features t), their keys, values and outputs. features [T, F * H]."""

    @torch.no_grad()
    def __init__(self, head: EagleHead, ids: Tensor, features: Tensor) -> None:
        self.head, self.memory = head, {}
        rows = len(ids) - 1
        positions = torch.arange(rows, device=ids.device)[None]
        self.states = head.step(ids[None, 1:], head.fuse(features[None, :rows].to(head.fc.weight.dtype)), positions, self._causal)[0]

    def _causal(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        self.memory[layer] = k[0].repeat_interleave(groups, 1), v[0].repeat_interleave(groups, 1)
        keys, values = (x.transpose(0, 1)[None] for x in self.memory[layer])
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys.to(q.dtype), values.to(q.dtype), is_causal=True).transpose(1, 2)


class EagleDrafts:
    """An EAGLE head behind the anchors [P] (positions) of a text: each level is a pass over its nodes, which see the pairs before the
    anchor and their own ancestors."""

    def __init__(self, text: EagleText, anchors: Tensor, depth: int) -> None:
        self.text, self.anchors, self.depth = text, anchors, depth
        self.hidden = text.states[anchors - 1][:, None]
        self.seen = torch.zeros(len(anchors), 1, 0, dtype=torch.bool, device=anchors.device)
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        head = text.head
        self.ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=anchors.device))

    @torch.no_grad()
    def expand(self, level: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if level:
            width = tokens.shape[1]
            past = self.seen.gather(1, parents[..., None].expand(-1, -1, self.seen.shape[-1]))
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
            self.seen = torch.cat((past, own), -1)
            parent = self.hidden.gather(1, parents[..., None].expand(-1, -1, self.hidden.shape[-1]))
            positions = (self.anchors - 1 + level)[:, None].expand_as(tokens)
            self.hidden = self.text.head.step(tokens, parent, positions, self._attend)
        wide = self.text.head.logits(self.hidden).float().log_softmax(-1)
        return wide, self.ids.expand_as(wide)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        if layer in self.memory:
            k, v = (torch.cat((old, new), 1) for old, new in zip(self.memory[layer], (k, v), strict=True))
        self.memory[layer] = k, v
        keys, values = self.text.memory[layer]
        before = torch.arange(len(keys), device=q.device) < self.anchors[:, None]
        wide = q.float()
        scores = torch.cat((torch.einsum("pwhd,thd->phwt", wide, keys.float()), torch.einsum("pwhd,pnhd->phwn", wide, k.float())), -1)
        visible = torch.cat((before[:, None].expand(-1, q.shape[1], -1), self.seen), -1)
        weights = (scores * q.shape[-1] ** -0.5).masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        old, new = weights.split((len(keys), k.shape[1]), -1)
        return (torch.einsum("phwt,thd->pwhd", old, values.float()) + torch.einsum("phwn,pnhd->pwhd", new, v.float())).to(q.dtype)


@dataclass(frozen=True, slots=True)
class Grown:
    """Candidates behind P anchors in order of growth, [P, M] each: tokens, parents (-1: the anchor), cumulative log-probabilities, and
    whether the tree holds them; depths [M] from 1."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    held: Tensor
    depths: Tensor

    def cut(self, nodes: int) -> Grown:
        """The tree of the best candidates, `nodes` with the anchor counted. A parent is never worse than its child and comes before it."""
        order = self.scores.argsort(dim=-1, descending=True, stable=True)[:, : nodes - 1]
        return replace(self, held=torch.zeros_like(self.held).scatter_(1, order, True))


@torch.no_grad()
def grow(drafts: Drafts, anchors: Tensor, depth: int, width: int) -> Grown:
    """`width` children of each of the `width` best nodes of every depth (EAGLE-2's rule), all held; a chain of first choices where `width`
    is 1. anchors [P] are target ids."""
    tokens, cumulated = anchors[:, None], torch.zeros(len(anchors), 1, device=anchors.device)
    places = torch.zeros_like(tokens)
    above = torch.full_like(tokens, -1)
    found: list[tuple[Tensor, Tensor, Tensor, int]] = []
    start = 0
    for level in range(min(depth, drafts.depth)):
        wide, ids = drafts.expand(level, places, tokens)
        best, at = wide.topk(min(width, wide.shape[-1]), -1)
        scores = (cumulated[..., None] + best).flatten(1)
        children = ids.gather(-1, at).expand(-1, tokens.shape[1], -1).flatten(1)
        found.append((children, above.repeat_interleave(best.shape[-1], 1), scores, level + 1))
        cumulated, chosen = scores.topk(min(width, scores.shape[-1]), -1)
        tokens, places, above = children.gather(1, chosen), chosen // best.shape[-1], start + chosen
        start += scores.shape[-1]
    depths = torch.cat([torch.full((part[0].shape[1],), part[3], device=anchors.device) for part in found])
    all_tokens, parents, all_scores = (torch.cat([part[i] for part in found], 1) for i in range(3))
    return Grown(all_tokens, parents, all_scores, torch.ones_like(parents, dtype=torch.bool), depths)


def accepted(tree: Grown, following: Tensor) -> Tensor:
    """How many of the tokens [P, D] that follow each anchor (-1 behind the text's end) are a path of its tree: [P]."""
    at = torch.full_like(following[:, 0], -1)
    count, alive = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    for depth in range(1, following.shape[1] + 1):
        match = (tree.parents == at[:, None]) & (tree.tokens == following[:, depth - 1 : depth]) & tree.held & (tree.depths == depth)
        alive = alive & match.any(-1)
        at = torch.where(alive, match.int().argmax(-1), at)
        count += alive
    return count


@torch.no_grad()
def chances(drafts: Drafts, anchors: Tensor, following: Tensor, target: Tensor) -> Tensor:
    """Where drafts are drawn from the head's distribution q: min(1, q / p) of the following tokens [P, D] one after another, each behind
    the text's own, 0 behind its end. target [P, D] are the target's log-probabilities of these tokens."""
    tokens, places, found = anchors[:, None], torch.zeros_like(anchors[:, None]), []
    for level in range(min(following.shape[1], drafts.depth)):
        wide, ids = drafts.expand(level, places, tokens)
        right = following[:, level, None, None]
        q = wide.masked_fill(ids != right, -torch.inf).amax((-1, -2))
        found.append((q - target[:, level]).clamp(max=0).exp())
        tokens = following[:, level, None].clamp(min=0)
    return torch.stack(found, -1)
