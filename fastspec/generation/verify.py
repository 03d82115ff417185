"""Choose one token per node and walk: lossless for every tree that is a function of its prefix, or that says what it was drawn from.

At a node with target distribution p, accepting child x with probability p(x), else removing x and renormalising, is the
same law as one draw y ~ p with a step to y where y is a child and y as the bonus token where it is not. So greedy and
sampled decoding differ in the pick alone. Randomness comes in as an argument: one uniform per node.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastspec.generation.protocols import Ops
from fastspec.generation.tree import TokenTree, Verdict

# processor(row, ids [T], scores [V]) -> scores [V]
RowProcessor = Callable[[int, Tensor, Tensor], Tensor]


def choose(scores: Tensor, uniform: Tensor | None, ops: Ops) -> Tensor:
    """Pick one token per node of scores [B, N, V]: the argmax, or a draw by uniform [B, N] -> [B, N]."""
    return scores.argmax(-1) if uniform is None else ops.categorical(scores, uniform)


def walk(tree: TokenTree, picks: Tensor, ops: Ops) -> Verdict:
    """Follow picks [B, N] down the tree."""
    return Verdict(*ops.posterior_walk(tree.tokens, tree.parents, picks, tree.max_path))


def walk_drawn(tree: TokenTree, scores: Tensor, q: Tensor, uniform: Tensor, ops: Ops) -> Verdict:
    """Walk a tree whose tokens were drawn at random: scores [B, N, V] processed, q [B, N, V] probabilities, uniform [B, N].

    At a node with target distribution p, its children are tried in order: x ~ q is accepted with probability min(1, p(x) / q(x)),
    else p becomes norm(max(p - q, 0)); what is left of p when no child was accepted gives the bonus token (Leviathan et al.,
    arXiv 2211.17192, theorem 1, applied child by child). uniform[:, 0] draws the bonus token, uniform[:, i] judges node i.
    """
    probs = torch.softmax(scores.float(), -1)
    rows, nodes = tree.tokens.shape
    p, node = probs[:, 0], torch.zeros(rows, dtype=torch.long, device=scores.device)
    accepted, path = torch.zeros_like(node), torch.zeros(rows, tree.max_path, dtype=torch.long, device=scores.device)
    for i in range(1, nodes):
        token = tree.tokens[:, i : i + 1]
        tried = tree.parents[:, i] == node
        taken = tried & (uniform[:, i] * q[:, i].gather(1, token)[:, 0] < p.gather(1, token)[:, 0])
        rest = (p - q[:, i]).clamp(min=0)
        total = rest.sum(-1, keepdim=True)
        p = torch.where((tried & ~taken)[:, None] & (total > 0), rest / total, p)
        p = torch.where(taken[:, None], probs[:, i], p)
        node, accepted = torch.where(taken, i, node), accepted + taken
        path = path.scatter(1, accepted[:, None], node[:, None])
    steps = torch.arange(tree.max_path, device=scores.device)
    path = torch.where(steps > accepted[:, None], node[:, None], path)
    return Verdict(path, accepted, ops.categorical(p.log(), uniform[:, 0]))


def walk_with_history(
    tree: TokenTree, logits: Tensor, uniform: Tensor | None, history: list[Tensor], process: RowProcessor, left: list[int],
    ends: frozenset[int], ops: Ops,
) -> tuple[Verdict, Tensor]:  # fmt: skip
    """Walk node by node, for processors that look at the tokens so far.

    logits [B, N, V]; history[b] [T_b] int64 ends with the root; row b may say left[b] more tokens, 0 where it has ended.
    `process` sees each visited node with that node's own prefix, and no prefix that plain decoding would not reach: a row's
    walk stops at a pick in `ends` and at its last token. Returns the verdict and the processed scores [B, P, V] along the path.
    """
    rows = tree.tokens.shape[0]
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths, accepted, bonus = [], [], []
    scores = torch.zeros(rows, tree.max_path, logits.shape[2], dtype=torch.float32, device=logits.device)
    for b in range(rows):
        node, path, ids, pick = 0, [0], history[b], tokens[b][0]
        while left[b] > 0:
            row = process(b, ids, logits[b, node].float())
            scores[b, len(path) - 1] = row
            pick = int(choose(row[None, None], None if uniform is None else uniform[b : b + 1, node : node + 1], ops))
            child = next((j for j in range(1, len(tokens[b])) if parents[b][j] == node and tokens[b][j] == pick), None)
            if child is None or pick in ends or len(path) == min(tree.max_path, left[b]):
                break
            node = child
            path.append(node)
            ids = torch.cat((ids, ids.new_tensor([pick])))
        paths.append(path + [path[-1]] * (tree.max_path - len(path)))
        accepted.append(len(path) - 1)
        bonus.append(pick)
    device = tree.tokens.device
    return Verdict(*(torch.tensor(x, device=device) for x in (paths, accepted, bonus))), scores
