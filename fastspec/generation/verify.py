"""Choose one token per node and walk: lossless for every tree that is a function of its prefix, or that says what it was drawn from.

At a node with target distribution p, accepting child x with probability p(x), else removing x and renormalising, is the
same distribution as one draw y ~ p with a step to y where y is a child and y as the bonus token where it is not. So greedy and
sampled decoding differ in the pick alone. Randomness comes in as an argument: one uniform per node.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.verification.reference import SamplingSettings

# processor(rows, ids [R, T], scores [R, V]) -> scores [R, V], for rows whose texts have the same length
RowProcessor = Callable[[list[int], Tensor, Tensor], Tensor]


def choose(scores: Tensor, uniform: Tensor | None, ops: Ops, settings: SamplingSettings | None = None) -> Tensor:
    """Pick one token per node of scores [B, N, V]: the argmax, or a draw by uniform [B, N], under settings where some are given -> [B,
    N], `NO_TOKEN` where there is no distribution. Scores of int64 [B, N, 1] are these tokens, see `Target.score`."""
    if scores.dtype == torch.int64:
        return scores[..., 0]
    return ops.pick(scores, uniform) if settings is None else ops.pick(scores, uniform, settings)


def pick_draft(scores: Tensor, uniform: Tensor | None, ops: Ops) -> Tensor:
    """A draft [...] of a draft model's scores [..., V], as `Ops.pick` does. A row without a distribution takes token 0, like any other
    guess: `walk_drawn` accepts no draft of a q that is NaN."""
    picked: Tensor = ops.pick(scores, uniform)
    return picked if uniform is None else picked.clamp(min=0)


def walk(tree: TokenTree, picks: Tensor, ops: Ops) -> Verdict:
    """Follow picks [B, N] down the tree."""
    return Verdict(*ops.posterior_walk(tree.tokens, tree.parents, picks, tree.max_path))


def walk_drawn(tree: TokenTree, scores: Tensor, q: Tensor, uniform: Tensor, ops: Ops) -> Verdict:
    """Walk a tree whose tokens were drawn at random: scores [B, N, V] processed, q [B, N, V] probabilities, uniform [B, N].

    At a node with target distribution p, its children are tried in order: x ~ q is accepted with probability min(1, p(x) / q(x)),
    else p becomes norm(max(p - q, 0)); what is left of p when no child was accepted gives the bonus token (Leviathan et al.,
    arXiv 2211.17192, theorem 1, applied child by child). A child with q(x) = 0 was not drawn and is not accepted; where all of
    its q is 0, p stays. uniform[:, 0] draws the bonus token, uniform[:, i] judges node i.
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
    tree: TokenTree, logits: Tensor, uniform: Tensor | None, history: list[Tensor], process: RowProcessor, left: list[int],
    over: Callable[[int, list[int]], bool], ops: Ops,
) -> tuple[Verdict, Tensor]:  # fmt: skip
    """Walk node by node, for processors that look at the tokens so far.

    logits [B, N, V]; history[b] [T_b] int64 ends with the root; row b may emit left[b] more tokens, 0 where it has ended.
    `process` sees each visited node with that node's own prefix, and no prefix that plain decoding would not reach: a row's
    walk stops at its last token, and where `over(b, picks so far)` says that it ends. Rows whose texts are equally long are
    processed together. Returns the verdict and the processed scores [B, P, V] along the path.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    texts, paths, picks = list(history), [[0] for _ in tokens], [[] for _ in tokens]  # type: tuple[list[Tensor], list[list[int]], list[list[int]]]
    scores = torch.zeros(len(tokens), tree.max_path, logits.shape[2], dtype=torch.float32, device=logits.device)
    going = [b for b, count in enumerate(left) if count > 0]
    while going:
        chosen = _pick([(b, paths[b][-1], texts[b]) for b in going], logits, uniform, process, ops, scores, len(paths[going[0]]) - 1)
        still = []
        for b, pick in zip(going, chosen, strict=True):
            picks[b].append(pick)
            child = next((j for j in range(1, len(tokens[b])) if parents[b][j] == paths[b][-1] and tokens[b][j] == pick), None)
            if child is None or len(paths[b]) == min(tree.max_path, left[b]) or over(b, picks[b]):
                continue
            paths[b].append(child)
            texts[b] = torch.cat((texts[b], texts[b].new_tensor([pick])))
            still.append(b)
        going = still
    full = [path + [path[-1]] * (tree.max_path - len(path)) for path in paths]
    bonus = [picked[-1] if picked else row[0] for picked, row in zip(picks, tokens, strict=True)]
    device = tree.tokens.device
    return Verdict(*(torch.tensor(x, device=device) for x in (full, [len(path) - 1 for path in paths], bonus))), scores


def _pick(
    at: list[tuple[int, int, Tensor]], logits: Tensor, uniform: Tensor | None, process: RowProcessor, ops: Ops, scores: Tensor, step: int
) -> list[int]:
    """One token for each (row, node, text) of `at`; what was processed is written to scores [B, P, V] at `step`."""
    picked: dict[int, int] = {}
    for length in sorted({len(text) for _, _, text in at}):
        rows, nodes, texts = zip(*(entry for entry in at if len(entry[2]) == length), strict=True)
        row, node = torch.tensor(rows, device=logits.device), torch.tensor(nodes, device=logits.device)
        processed = process(list(rows), torch.stack(texts), logits[row, node].float())
        scores[row, step] = processed
        draws = None if uniform is None else uniform[row, node][:, None]
        picked |= zip(rows, choose(processed[:, None], draws, ops)[:, 0].tolist(), strict=True)
    return [picked[row] for row, _, _ in at]


def measure(logits: Tensor, tokens: Tensor) -> Tensor:
    """What a model's raw logits [..., V] say of the tokens [...] that were emitted there -> [..., 3] fp32, in nats: a token's
    log-probability, the gap between the two largest log-probabilities, and the entropy of the distribution."""
    settings = torch.log_softmax(logits.float(), -1)
    best = settings.topk(2, -1).values
    entropy = -(settings.exp() * settings.clamp(min=torch.finfo(settings.dtype).min)).sum(-1)  # 0 * -inf is not 0
    return torch.stack((settings.gather(-1, tokens[..., None])[..., 0], best[..., 0] - best[..., 1], entropy), -1)
