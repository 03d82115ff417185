"""Choice of one token per node, and walks down the tree: row by row, by draws of a position, or in step for all rows.

A walk visits one node of a depth at most. So one uniform number per position is enough, which comes in as an argument,
and a row's tokens depend neither on its tree nor on the rows beside it.

At a node with target distribution p, accepting child x with probability p(x), else removing x and renormalising, is the
same distribution as one draw y ~ p with a step to y where y is a child and y as the bonus token where it is not. So
greedy and sampled decoding differ in the pick alone.

A user's own logits processor or stopping criterion may have a state. It gives plain decoding's output where it sees
plain decoding's calls: the whole batch [B, T], every step once, in order. So a round ends for all rows at the first
step at which any row leaves its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fastspec.generation.constraint import ConstrainedWalk, Held, Masks, raised, roots_of
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.verification.reference import SamplingSettings


def drawn_seed() -> int:
    """A seed from torch's own generator, for who gives none."""
    return int(torch.randint(0, 2**63 - 1, (1,), device="cpu"))


# processor(rows, ids [R, T], scores [R, V]) -> scores [R, V], for rows whose texts have the same length
RowProcessor = Callable[[list[int], Tensor, Tensor], Tensor]


def choose(scores: Tensor, uniform: Tensor | None, ops: Ops, settings: SamplingSettings | None = None) -> Tensor:
    """Pick one token per node of scores [B, N, V]: the argmax, or a draw by uniform [B, N], under settings where given
    -> [B, N], `NO_TOKEN` where there is no distribution. Scores of int64 [B, N, 1] are these tokens."""
    if scores.dtype == torch.int64:
        return scores[..., 0]
    return ops.pick(scores, uniform) if settings is None else ops.pick(scores, uniform, settings)


def pick_draft(scores: Tensor, uniform: Tensor | None, ops: Ops) -> Tensor:
    """A draft [...] of scores [..., V] by `Ops.pick`; token 0, never accepted, of a row without a distribution."""
    picked: Tensor = ops.pick(scores, uniform)
    return picked if uniform is None else picked.clamp(min=0)


def walk(tree: TokenTree, picks: Tensor, ops: Ops) -> Verdict:
    """Follow picks [B, N] down the tree."""
    return Verdict(*ops.posterior_walk(tree.tokens, tree.parents, picks, tree.max_path))


def pick_allowed(
    tree: TokenTree,
    logits: Tensor,
    picks: Tensor,
    held: Held,
    masks: Masks,
    ops: Ops,
    failed: Callable[[int, BaseException], None] = raised,
) -> Tensor:
    """Picks [B, N], the likeliest tokens of logits [B, N, V], with the likeliest that constraints allow in the rows
    that are held, at the nodes that their walks reach. `failed` takes what a row's constraint raises.
    """

    def ask(waiting: list[ConstrainedWalk]) -> list[int]:
        asked = [(place, each.constraint, each.text) for place, each in enumerate(waiting)]
        masks.fill(
            roots_of(len(asked)), logits.shape[-1], asked, lambda place, error: failed(waiting[place].row, error)
        )
        rows, nodes = torch.tensor([(each.row, each.at[0]) for each in waiting], device="cpu").to(logits.device).T
        found: list[int] = choose(masks.masked(logits[rows, nodes][:, None]), None, ops)[:, 0].tolist()
        return found

    told = torch.stack((tree.tokens, tree.parents, picks)).tolist()  # one wait for the device
    walk_allowed(told, [ConstrainedWalk(*each) for each in held], ask, failed)
    return torch.tensor(told[2], device="cpu").to(picks.device)


def walk_allowed(
    told: list[list[list[int]]],
    going: list[ConstrainedWalk],
    ask: Callable[[list[ConstrainedWalk]], list[int]],
    failed: Callable[[int, BaseException], None],
) -> None:
    """Walk rows down their trees, and correct their picks: `told` holds tokens, parents and picks [B][N].

    The likeliest token of all needs no mask where it is allowed. Of the other nodes that walks reach `ask` tells the
    likeliest allowed token, of one of each row at a time and of all rows together.
    """
    tokens, parents, picks = told
    while going:
        waiting = []
        for each in going:
            try:
                if each.run(tokens[each.row], parents[each.row], picks[each.row]):
                    waiting.append(each)
            except BaseException as error:
                failed(each.row, error)
        going = waiting
        for each, token in zip(going, ask(going) if going else (), strict=True):
            each.step(token, tokens[each.row], parents[each.row], picks[each.row])


def walk_drawn(tree: TokenTree, scores: Tensor, q: Tensor, uniform: Tensor, ops: Ops) -> Verdict:
    """Walk a tree whose tokens were drawn at random: scores [B, N, V] processed, q [B, N, V] probabilities, uniform [B,
    N].

    At a node with target distribution p, its children are tried in order: x ~ q is accepted with probability min(1,
    p(x) / q(x)), else p becomes norm(max(p - q, 0)); what is left of p when no child was accepted gives the bonus token
    (Leviathan et al., arXiv 2211.17192, theorem 1, applied child by child). A child with q(x) = 0 was not drawn and is
    not accepted; where all of its q is 0, p stays. uniform[:, 0] draws the bonus token, uniform[:, i] judges node i.
    """
    probs = torch.softmax(scores.float(), -1)
    rows, nodes = tree.tokens.shape
    p, node = probs[:, 0], torch.zeros(rows, dtype=torch.long, device=scores.device)
    accepted, path = torch.zeros_like(node), torch.zeros(rows, tree.max_path, dtype=torch.long, device=scores.device)
    for i in range(1, nodes):
        token = tree.tokens[:, i : i + 1]
        tried = tree.parents[:, i] == node
        chance = q[:, i].gather(1, token)[:, 0]
        taken = tried & (chance > 0) & (uniform[:, i] * chance < p.gather(1, token)[:, 0])
        rest = (p - q[:, i]).clamp(min=0)
        total = rest.sum(-1, keepdim=True)
        p = torch.where((tried & ~taken)[:, None] & (total > 0), rest / total, p)
        p = torch.where(taken[:, None], probs[:, i], p)
        node, accepted = torch.where(taken, i, node), accepted + taken
        path = path.scatter(1, accepted[:, None], node[:, None])
    steps = torch.arange(tree.max_path, device=scores.device)
    path = torch.where(steps > accepted[:, None], node[:, None], path)
    return Verdict(path, accepted, ops.pick(p.log(), uniform[:, 0]))


def walk_with_history(
    tree: TokenTree,
    logits: Tensor,
    uniform: Tensor | None,
    history: list[Tensor],
    process: RowProcessor,
    left: list[int],
    over: Callable[[int, list[int]], bool],
    ops: Ops,
) -> tuple[Verdict, Tensor]:
    """Walk node by node, for processors that look at the tokens so far.

    logits [B, N, V]; history[b] [T_b] int64 ends with the root; row b may emit left[b] more tokens, 0 where it has
    ended. `process` sees the prefixes that plain decoding reaches: a row's walk stops at its last token, and where
    `over(b, picks so far)` says that it ends. Rows whose texts are equally long are processed together. Returns the
    verdict and the processed scores [B, P, V] along the path.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    texts, paths, picks = list(history), [[0] for _ in tokens], [[] for _ in tokens]  # type: tuple[list[Tensor], list[list[int]], list[list[int]]]
    scores = torch.zeros(len(tokens), tree.max_path, logits.shape[2], dtype=torch.float32, device=logits.device)
    going = [b for b, count in enumerate(left) if count > 0]
    while going:
        chosen: dict[int, int] = {}
        for length in sorted({len(texts[b]) for b in going}):
            rows = [b for b in going if len(texts[b]) == length]
            row, node = (torch.tensor(x, device=logits.device) for x in (rows, [paths[b][-1] for b in rows]))
            processed = process(rows, torch.stack([texts[b] for b in rows]), logits[row, node].float())
            scores[row, len(paths[going[0]]) - 1] = processed
            draws = None if uniform is None else uniform[row, node][:, None]
            chosen |= zip(rows, choose(processed[:, None], draws, ops)[:, 0].tolist(), strict=True)
        still = []
        for b in going:
            pick, nodes = chosen[b], range(1, len(tokens[b]))
            picks[b].append(pick)
            child = next((j for j in nodes if parents[b][j] == paths[b][-1] and tokens[b][j] == pick), None)
            if child is None or len(paths[b]) == min(tree.max_path, left[b]) or over(b, picks[b]):
                continue
            paths[b].append(child)
            texts[b] = torch.cat((texts[b], texts[b].new_tensor([pick])))
            still.append(b)
        going = still
    bonus = [picked[-1] if picked else row[0] for picked, row in zip(picks, tokens, strict=True)]
    return _verdict(paths, bonus, tree.max_path, tree.tokens.device), scores


def _verdict(paths: list[list[int]], bonus: list[int], max_path: int, device: torch.device) -> Verdict:
    """The verdict of every row's path, which its last node fills up, and its bonus token."""
    full = [path + [path[-1]] * (max_path - len(path)) for path in paths]
    made = full, [len(path) - 1 for path in paths], bonus
    return Verdict(*(torch.tensor(values, device=device) for values in made))


def measure(logits: Tensor, tokens: Tensor) -> Tensor:
    """Measures of emitted tokens [...] by raw logits [..., V] -> [..., 3] fp32, in nats: a token's log-probability, the
    gap between the two largest log-probabilities, and the entropy of the distribution."""
    logs = torch.log_softmax(logits.float(), -1)
    best = logs.topk(2, -1).values
    entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)  # 0 * -inf is not 0
    return torch.stack((logs.gather(-1, tokens[..., None])[..., 0], best[..., 0] - best[..., 1], entropy), -1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token, in nats, and the likeliest tokens in its place with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def top_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens by raw logits [N, V], each with the `count` likeliest."""
    logs = torch.log_softmax(logits[: len(tokens)].float(), -1)
    own = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    best, places = (part.tolist() for part in logs.topk(min(count, logs.shape[-1]), -1))
    found = zip(tokens, own, places, best, strict=True)
    return [TokenLogprob(token, value, tuple(zip(at, top, strict=True))) for token, value, at, top in found]


class Steps(Protocol):
    """Plain decoding's own step: it processes scores, chooses a token per row and asks the criteria."""

    over: bool
    """True where the call has ended."""
    lengths: list[int | None]
    """Tokens of each row when it ended, from when on it emits `pad_token`; None for a row that goes on."""
    pad_token: int

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        """Take the next step from raw logits [B, V] -> the token of every row, or from processed `scores`."""


def fill_ended(tree: TokenTree, root: Tensor, ended: Tensor, pad_token: int) -> TokenTree:
    """The tree with `pad_token`, which rows that have ended [B] bool emit, at their draft nodes below root [B]."""
    tokens = torch.where(ended[:, None], pad_token, tree.tokens)
    return replace(tree, tokens=torch.cat((torch.where(ended, root, tokens[:, 0])[:, None], tokens[:, 1:]), 1))


def walk_in_step(tree: TokenTree, logits: Tensor, steps: Steps, scores: Tensor | None = None) -> Verdict:
    """Walk all rows down their trees together, a step of plain decoding at a time; logits and scores are [B, N, V]."""
    rows = torch.arange(len(tree.tokens), device=logits.device)
    children = _children(tree)
    paths = [[0] for _ in children]
    while True:
        at = torch.tensor([path[-1] for path in paths], device=logits.device)
        chosen = steps(logits[rows, at], None if scores is None else scores[rows, at])
        found = [below.get((path[-1], token)) for below, path, token in zip(children, paths, chosen, strict=True)]
        below = [node for node in found if node is not None]
        if steps.over or len(below) < len(found) or len(paths[0]) == tree.max_path:
            break
        for path, node in zip(paths, below, strict=True):
            path.append(node)
    return _verdict(paths, chosen, tree.max_path, logits.device)


def _children(tree: TokenTree) -> list[dict[tuple[int, int], int]]:
    """Per row, (node, token) -> the child of this token; of several the one with the longest path below it."""
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        heights = [0] * len(tokens)
        for node in range(len(tokens) - 1, 0, -1):
            heights[parents[node]] = max(heights[parents[node]], heights[node] + 1)
        row: dict[tuple[int, int], int] = {}
        for node in range(1, len(tokens)):
            key = parents[node], tokens[node]
            if key not in row or heights[node] > heights[row[key]]:
                row[key] = node
        found.append(row)
    return found


def until_end(tokens: Sequence[int], length: int | None, before: int) -> list[int]:
    """The tokens up to a row's end at `length`, of which `before` were there already."""
    return list(tokens if length is None else tokens[: max(0, length - before)])
