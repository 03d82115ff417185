"""Rounds over a text that is known: how many of them a drafter needs, by simulation and by really decoding it. For drafters.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from drafters_trees import BlockDrafts, Drafts, EagleDrafts, EagleText, Grown, accepted, chances, grow  # the script beside this one
from torch import Tensor

from fastspec.generation.drafters.block.draft import BlockDrafter
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.generation.heads.module import EagleHead
from fastspec.training.blocks import BlockAttention

ANCHORS = 128
"""Anchors whose trees grow at once, unless said otherwise."""

Head = BlockHead | EagleHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to draft: a chain of `drafts` tokens, or a tree of `nodes` with its root, `depth` deep, grown `width` wide.

    `by` is "edges" or "marginals"; "draws" is a chain whose tokens are drawn from the head's distribution.
    """

    name: str
    depth: int
    width: int = 1
    nodes: int = 0
    by: str = "edges"

    def tree(self, drafts: Drafts, anchors: Tensor) -> Grown:
        grown = grow(drafts, anchors, self.depth, self.width)
        return grown.cut(self.nodes) if self.nodes else grown


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of `start` tokens with its answer, ids [T] in all, what the target's layers say of it, features [T, F * H], and the
    log-probabilities [T] that it gives each token behind those before it (0 at the first)."""

    ids: Tensor
    start: int
    features: Tensor
    logprobs: Tensor

    @classmethod
    @torch.no_grad()
    def read(cls, model: Any, ids: list[int], start: int, taps: tuple[int, ...]) -> Text:
        row = torch.tensor([ids], device=model.device)
        out = model(row, output_hidden_states=True, use_cache=False)
        told = out.logits[0, :-1].float().log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1)
        return cls(row[0], start, features_of(out, taps)[0], torch.cat((told.new_zeros(1), told)))


def features_of(out: Any, taps: tuple[int, ...]) -> Tensor:
    return torch.cat([out.hidden_states[tap] for tap in taps], -1)


class Source:
    """What a head drafts behind any positions of one text."""

    @torch.no_grad()
    def __init__(self, head: Head, text: Text) -> None:
        self.head, self.text = head, text
        self.pairs = self.context = None
        if isinstance(head, EagleHead):
            self.pairs = EagleText(head, text.ids, text.features)
        else:
            positions = torch.arange(len(text.ids), device=text.ids.device)[None]
            self.context = head.context_keys_values(head.context(text.features.to(head.fc.weight.dtype)[None]), positions)

    @torch.no_grad()
    def behind(self, anchors: Tensor) -> Callable[[Way], Drafts]:
        """Fresh drafts behind positions [P] for any way."""
        if self.pairs is not None:
            pairs = self.pairs
            return lambda way: EagleDrafts(pairs, anchors, way.depth)
        head = self.head
        if not isinstance(head, BlockHead) or self.context is None:
            raise TypeError(f"no drafts are known of a {type(head).__name__}")
        states = head.states(self.text.ids[anchors][None], anchors[None], BlockAttention(self.context, anchors[None]))[0]
        unary = head.unary(states)
        return lambda way: BlockDrafts(head, states, unary, way.by == "marginals")


@torch.no_grad()
def rounds_of(head: Head, text: Text, ways: list[Way], anchors_at_once: int = ANCHORS) -> dict[str, tuple[float, int]]:
    """Of each way (rounds, tokens that they yield): the answer but for its first token, which the prefill gives.

    Where drafts are picked by rank the rounds are walked: accepting a child with its probability under the target, else the next, is to
    draw the target's token and to descend where it is a child, so that a text drawn from the target says what a round accepts. Where they
    are drawn, the expected number of rounds given the text: of a token that the text holds, min(1, q / p) is the probability that it came
    of an accepted draft.
    """
    first, size = text.start, len(text.ids)
    positions = torch.arange(first, size - 1, device=text.ids.device)
    if not len(positions):
        return {way.name: (0.0, 0) for way in ways}
    depth = max(way.depth for way in ways)
    padded = torch.cat((text.ids, text.ids.new_full((depth,), -1)))
    told = torch.cat((text.logprobs, text.logprobs.new_zeros(depth)))
    lengths: dict[str, list[Tensor]] = {way.name: [] for way in ways}
    source = Source(head, text)
    for anchors in positions.split(anchors_at_once):
        ahead = anchors[:, None] + 1 + torch.arange(depth, device=anchors.device)
        following, logprobs, tokens = padded[ahead], told[ahead], text.ids[anchors]
        drafts = source.behind(anchors)
        grown: dict[tuple[str, int, int], Grown] = {}
        for way in ways:
            if way.by == "draws":
                lengths[way.name].append(chances(drafts(way), tokens, following[:, : way.depth], logprobs[:, : way.depth]))
                continue
            alike = [w for w in ways if (w.by, w.width) == (way.by, way.width) and not (w.nodes or way.nodes)]
            longest = max(alike, key=lambda w: w.depth, default=way)  # a shorter chain is the longer one's beginning
            shape = (way.by, longest.depth, way.width)
            if shape not in grown:
                grown[shape] = grow(drafts(longest), tokens, longest.depth, way.width)
            tree = grown[shape].cut(way.nodes) if way.nodes else grown[shape]
            lengths[way.name].append(accepted(tree, following[:, : way.depth]))
    return {
        way.name: (counted(torch.cat(lengths[way.name]).double().cpu().numpy(), drawn=way.by == "draws"), len(positions)) for way in ways
    }


def counted(found: np.ndarray, *, drawn: bool) -> float:
    """Rounds over a text of len(found) + 1 tokens, the first given: found [P] drafts accepted behind each, or [P, D] chances of each."""
    size = len(found)
    if not drawn:
        at = rounds = 0
        while at < size:
            at, rounds = at + int(found[at]) + 1, rounds + 1
        return float(rounds)
    visits = np.zeros(size + 1)
    visits[0] = 1.0
    for at in range(size):
        reach = np.concatenate(([1.0], found[at].cumprod(), [0.0]))
        for count in range(found.shape[1] + 1):
            visits[min(size, at + count + 1)] += visits[at] * (reach[count] - reach[count + 1])
    return float(visits[:size].sum())


@torch.no_grad()
def decode(model: Any, head: Head, prompt: list[int], limit: int, ends: set[int], way: Way) -> tuple[list[int], int]:
    """(the target's greedy answer, rounds) by really drafting, scoring and accepting, in plain torch, one prompt, no target cache.

    Every round scores the tree in one pass of the whole text with a mask, and the head is fed what that pass says of accepted tokens."""
    ids = list(prompt)
    out = model(torch.tensor([ids], device=model.device), output_hidden_states=True, use_cache=False)
    features = features_of(out, head.config.taps)[0]
    ids.append(int(out.logits[0, -1].argmax()))
    drafter = BlockDrafter(head) if isinstance(head, BlockHead) else None
    if drafter is not None:
        drafter.append(features)
    rounds = 0
    while len(ids) - len(prompt) < limit and ids[-1] not in ends:
        anchor = torch.tensor([len(ids) - 1], device=model.device)
        drafts: Drafts
        if drafter is not None:
            block = drafter.draft(ids[-1])
            drafts = BlockDrafts(drafter.head, block.states[None], block.unary[None], way.by == "marginals")
        else:
            drafts = Source(head, Text(torch.tensor(ids, device=model.device), len(prompt), features, features)).behind(anchor)(way)
        path, new = _verified(model, ids, way.tree(drafts, torch.tensor([ids[-1]], device=model.device)), head.config.taps)
        rounds += 1
        if drafter is not None:
            drafter.append(new)
        features = torch.cat((features, new))
        for token in path:
            if len(ids) - len(prompt) < limit and ids[-1] not in ends:
                ids.append(token)
    return ids[len(prompt) :], rounds


def _verified(model: Any, ids: list[int], tree: Grown, taps: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """(accepted tokens and the bonus token, features of the anchor and of the accepted ones)."""
    device, size = model.device, len(ids)
    held = tree.held[0].nonzero().flatten()
    place = {int(node): size + row for row, node in enumerate(held)} | {-1: size - 1}
    parents = [place[int(p)] for p in tree.parents[0, held]]
    total = size + len(held)
    visible = torch.ones(total, total, dtype=torch.bool, device=device).tril()
    visible[size:, size:] = False
    for row, parent in enumerate(parents, size):
        visible[row, size:] = visible[parent, size:] if parent >= size else False
        visible[row, row] = True
    mask = torch.zeros(total, total, dtype=model.dtype, device=device).masked_fill(~visible, torch.finfo(model.dtype).min)
    text = torch.cat((torch.tensor(ids, device=device), tree.tokens[0, held]))
    positions = torch.cat((torch.arange(size, device=device), size - 1 + tree.depths[held]))
    out = model(text[None], attention_mask=mask[None, None], position_ids=positions[None], output_hidden_states=True, use_cache=False)
    picks = out.logits[0].argmax(-1).tolist()
    tokens, rows, path = text.tolist(), [size - 1], []
    while True:
        path.append(picks[rows[-1]])
        child = next((row for row, parent in enumerate(parents, size) if parent == rows[-1] and tokens[row] == path[-1]), None)
        if child is None:
            return path, features_of(out, taps)[0, rows]
        rows.append(child)


