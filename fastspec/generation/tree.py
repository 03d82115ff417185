"""Draft trees as tensors, and the verdicts of walks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.cache.reference import emitted
from fastspec.kernels.drafting.reference import ancestor_words


@dataclass(frozen=True, slots=True)
class TokenTree:
    """N draft nodes for each of B rows; node 0 is the root, and parents come before their children.

    The root is the token already emitted but not yet in the target's cache. `tokens`, `parents`, `depths` are [B, N]
    int64 (the root is its own parent, at depth 0); `ancestors` [B, N, W] int64 holds one bit per node, self included.
    `max_path` bounds the longest path in nodes, and is the same for all trees of a run with the same N. `mask` and
    `retrieve_indices` are the forms that EAGLE's code has.

    Where the drafts were drawn at random, `q` [B, N, V] fp32 is the distribution of each node's token, given its prefix
    and its earlier siblings (the root's is not read); a node of zeros was not drawn, and is not accepted. Without q the
    tree must be a function of its prefix. `drafted` counts each row's draft nodes but for copies that fill the tree up;
    None: all of them, or the host does not know.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    max_path: int
    q: Tensor | None = None
    drafted: tuple[int, ...] | None = None

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, max_path: int | None = None) -> TokenTree:
        """Build a tree from tokens and parents [B, N]; raises ValueError for an orphan or a parent after its child."""
        nodes = tokens.shape[1]
        index = torch.arange(nodes, device=parents.device)
        if tokens.shape != parents.shape or bool((parents[:, 1:] >= index[1:]).any()) or bool((parents < 0).any()):
            raise ValueError(f"parents {parents.tolist()} must name an earlier node for every node but the root")
        depths = torch.zeros_like(parents)
        for node in range(1, nodes):
            depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
        parents = torch.cat((torch.zeros_like(parents[:, :1]), parents[:, 1:]), 1)
        return cls(tokens, parents, depths, ancestor_words(parents, nodes), max_path or int(depths.max()) + 1)

    @classmethod
    def chain(cls, tokens: Tensor, max_path: int | None = None, q: Tensor | None = None) -> TokenTree:
        """A chain of tokens [B, N], the root first; nothing is read back from the device."""
        rows, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device)
        parents, depths = ((index - shift).clamp(min=0).expand(rows, -1) for shift in (1, 0))
        return cls(tokens, parents, depths, ancestor_words(parents, nodes), max_path or nodes, q)

    @property
    def mask(self) -> Tensor:
        """The dense mask [B, N, N] bool, true where the node of a row sees that of a column: itself and its ancestors.
        EAGLE's code has it as `tree_mask`, [1, 1, N, N] in numbers."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.ancestors[:, :, place >> 6] >> (place & 63) & 1 == 1

    @property
    def retrieve_indices(self) -> Tensor:
        """The paths from the root to each leaf as node ids [B, L, P] int64, -1 after a path's end and in rows with
        fewer leaves, in the order of their nodes; EAGLE's code has them for one row ([L, P]). Waits for the device."""
        leaf = torch.ones_like(self.tokens, dtype=torch.bool).scatter(1, self.parents[:, 1:], False)
        paths = torch.full((*self.tokens.shape, int(self.depths.max()) + 1), -1, device=self.tokens.device)
        node = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        for _ in range(paths.shape[2]):  # one generation up each time; the root is its own parent
            paths.scatter_(2, self.depths.gather(1, node)[:, :, None], node[:, :, None])
            node = self.parents.gather(1, node)
        order = leaf.long().argsort(dim=1, descending=True, stable=True)[:, : int(leaf.sum(1).max())]
        found = paths.gather(1, order[:, :, None].expand(-1, -1, paths.shape[2]))
        return found.masked_fill(~leaf.gather(1, order)[:, :, None], -1)

    @classmethod
    def root_only(cls, root: Tensor) -> TokenTree:
        """The tree of plain decoding: one node per row, root [B]."""
        zero = torch.zeros_like(root)[:, None]
        return cls(root[:, None], zero, zero, torch.ones_like(zero)[:, :, None], 1)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tree of one row on the host: tokens and parents of its nodes, and the accepted path from root 0 on."""

    tokens: list[int]
    parents: list[int]
    path: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of a walk: `path` [B, P] node ids from the root on (the last one repeats), `accepted` [B] draft tokens on
    it, `bonus` [B] the target's own token after it, the next root; `emitted` [B, P] is `tokens`, if known."""

    path: Tensor
    accepted: Tensor
    bonus: Tensor
    emitted: Tensor | None = None

    def tokens(self, tree: TokenTree) -> Tensor:
        """The tokens this round emits, [B, P]: accepted draft tokens, then the bonus token; the rest is padding."""
        return emitted(tree.tokens, self.path, self.accepted, self.bonus) if self.emitted is None else self.emitted

    def read(self, tree: TokenTree, active: Tensor) -> list[list[int]]:
        """The tokens that each row emits, none of one that is not active [B]. Waits for the device, once."""
        told = torch.cat((active[:, None].long(), self.accepted[:, None], self.tokens(tree)), 1).tolist()
        return [tokens[: accepted + 1] if goes_on else [] for goes_on, accepted, *tokens in told]
