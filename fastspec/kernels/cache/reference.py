"""The cache's moves, and what a round commits and emits, in plain torch: the specification of the kernels beside it.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cache_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k, v [B, N, Hkv, D] into a layer's cache [B, Hkv, C, D] at slots [B, N]; they may differ in D."""
    row = torch.arange(k.shape[0], device=k.device)[:, None]
    k_cache[row, :, slots] = k.to(k_cache.dtype)  # under autocast they come in another
    v_cache[row, :, slots] = v.to(v_cache.dtype)


def kv_block_copy(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Move slots source [B, P] to target [B, P] in every layer of k_cache [L, B, Hkv, C, D] and v_cache [L, B, Hkv, C,
    Dv]; overlap is safe."""
    row = torch.arange(source.shape[0], device=source.device)[:, None]
    for cache in (k_cache, v_cache):
        cache[:, row, :, target] = cache[:, row, :, source]


def grow(lengths: Tensor, counts: Tensor, bound: int) -> None:
    """Count the next counts [B] slots of every row as committed, in place: lengths [B] int64, `bound` at most."""
    lengths.add_(counts).clamp_(max=bound)


def commit_slots(lengths: Tensor, path: Tensor, accepted: Tensor, active: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Slots that `kv_block_copy` moves the nodes of path [B, P] from and to, behind the lengths [B] as they were -> two
    [B, P].

    Then `grow` of the lengths by accepted [B] + 1 in the rows that are active [B] bool.
    """
    base = lengths[:, None]
    moves = base + path, base + torch.arange(path.shape[1], device=path.device)
    grow(lengths, (accepted + 1) * active, bound)
    return moves


def emitted(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """Tokens [B, P] that a verdict emits of a tree's tokens [B, N]: the accepted drafts' tokens, then the bonus token;
    the rest is filler."""
    following = torch.cat((path[:, 1:], path[:, -1:]), 1)
    return tokens.gather(1, following).scatter_(1, accepted[:, None], bonus[:, None])


def emit(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor, active: Tensor, root: Tensor) -> Tensor:
    """Numbers that the host reads of a round, [B, 1 + P]: accepted [B], then `emitted`. root [B] becomes the bonus
    token where active [B] is true.

    A bonus below 0 says that there was no token to draw behind the accepted ones. The host then reads -1 - accepted,
    and all that goes on upon the device gets token 0: `bonus` itself becomes that.
    """
    missing = bonus >> 63  # -1 or 0
    bonus.clamp_(min=0)
    packed = torch.cat(((accepted ^ missing)[:, None], emitted(tokens, path, accepted, bonus)), 1)
    root.copy_(torch.where(active, bonus, root))
    return packed
