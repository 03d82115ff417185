"""The small steps between the parts of a round in plain torch, as `reference.py` has the ops that the parts consist of.

B rows (sequences), N nodes of a row's tree, P nodes of the longest path, F width of the target's features, H of a head's states. All
whole numbers are int64 but `active` [B] bool, the rows that go on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def tree_input(
    tokens: Tensor, depths: Tensor, lengths: Tensor, last: int, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a pass over trees of tokens and depths [B, N] behind lengths [B] reads: positions [B, N], `last` at most, slots [B, N], and the
    tokens' rows of an embedding's table [V, H] where one is given -> [B, N, H]."""
    base = lengths[:, None]
    positions, slots = (base + depths).clamp(max=last), base + torch.arange(tokens.shape[1], device=tokens.device)
    return positions, slots, None if table is None else F.embedding(tokens, table)


def grow(lengths: Tensor, counts: Tensor, bound: int) -> None:
    """Count the next counts [B] slots of every row as committed, in place: lengths [B] int64, `bound` at most."""
    lengths.add_(counts).clamp_(max=bound)


def commit_slots(lengths: Tensor, path: Tensor, accepted: Tensor, active: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Where `kv_block_copy` moves the nodes of path [B, P] from and to, behind the lengths [B] as they were -> two [B, P].

    Then `grow` of the lengths by accepted [B] + 1 in the rows that are active [B] bool.
    """
    base = lengths[:, None]
    moves = base + path, base + torch.arange(path.shape[1], device=path.device)
    grow(lengths, (accepted + 1) * active, bound)
    return moves


def said(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """What a verdict emits of a tree's tokens [B, N], [B, P]: the accepted drafts' tokens, then the bonus token; the rest is filler."""
    following = torch.cat((path[:, 1:], path[:, -1:]), 1)
    return tokens.gather(1, following).scatter_(1, accepted[:, None], bonus[:, None])


def emit(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor, active: Tensor, root: Tensor) -> Tensor:
    """What the host reads of a round, [B, 1 + P]: accepted [B], then `said`. root [B] becomes the bonus token where active [B] is true."""
    packed = torch.cat((accepted[:, None], said(tokens, path, accepted, bonus)), 1)
    root.copy_(torch.where(active, bonus, root))
    return packed


def path_pairs(
    features: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor, active: Tensor, root: Tensor, lengths: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What a head is fed of a verdict beside its tokens: the features [B, N, F] of the nodes of path [B, P] -> [B, P, F], how many of
    them count [B], accepted [B] + 1 where active [B] bool and else 0, and their slots [B, P] behind lengths [B].

    root [B] becomes bonus [B] where active. `out` receives the features and the counts where it is given.
    """
    taken, counts = features[torch.arange(len(path), device=path.device)[:, None], path], (accepted + 1) * active
    root.copy_(torch.where(active, bonus, root))
    slots = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    return (taken, counts, slots) if out is None else (out[0].copy_(taken), out[1].copy_(counts), slots)


def keep_last(
    hidden: Tensor, readout: Tensor, counts: Tensor, last_hidden: Tensor, last_readout: Tensor, lengths: Tensor, bound: int
) -> None:
    """Keep what a pass made of each row's last pair: of hidden and readout [B, T, H], what is at place counts [B] - 1, in last_hidden and
    last_readout [B, H], in rows that have pairs. Then `grow` of the lengths [B] by counts."""
    row = torch.arange(len(counts), device=counts.device)
    for kept, states in ((last_hidden, hidden), (last_readout, readout)):
        kept.copy_(torch.where((counts > 0)[:, None], states.detach()[row, counts - 1], kept))
    grow(lengths, counts, bound)
