"""Checks of a third party's drafter: a mistake in one raises an error that names it, before it can change the generated text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.tree import TokenTree


def why_uncallable(method: Callable[..., object], positions: Sequence[str], names: Sequence[str] = ()) -> str | None:
    """Why a method cannot be called with these arguments by position and by name; None where it can, or where nobody can tell."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*positions, **dict.fromkeys(names))
    except TypeError as error:
        takes = ", ".join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())
        name = getattr(method, "__name__", type(method).__name__)
        return f"{name}({takes}) is called with ({', '.join(positions or names)}): {error}"
    return None


def is_size(value: object) -> bool:
    """Whether a value can be a number of nodes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_taps(taps: object, layers: int, name: str) -> None:
    """Raise Unsupported for what are no hidden states of a model of so many layers."""
    if taps is None:
        return
    if not isinstance(taps, (tuple, list)) or not all(tap in range(layers + 1) and not isinstance(tap, bool) for tap in taps):
        raise Unsupported(
            f"assistant {name!r} has taps={taps!r}: accepted are None for no features, () for the last hidden state after the norm, and "
            f"a tuple of hidden states, from 0, the embeddings, to {layers}"
        )


def check_tree(tree: object, root: Tensor, *, nodes: int, max_path: int, draws: bool, who: str) -> None:
    """Raise Unsupported for what is no tree of at most `nodes` nodes and `max_path` nodes a path, a row for every root [B], or brings the
    distributions of its drafts where `draws` does not say so. Nothing is read back from the device."""
    if not isinstance(tree, TokenTree):
        kind = type(tree).__name__
        raise Unsupported(f"{who}.propose gave a {kind}: fastspec.TokenTree.chain(tokens) and .from_parents(...) make trees")
    tokens = tree.tokens
    if tokens.dim() != 2 or len(tokens) != len(root):
        raise Unsupported(f"{who}.propose gave tokens of shape {list(tokens.shape)} for {len(root)} rows: they are [{len(root)}, N]")
    if tokens.dtype != root.dtype or tokens.device != root.device:
        raise Unsupported(f"{who}.propose gave tokens in {tokens.dtype} on {tokens.device}: they are {root.dtype} on {root.device}")
    if not 1 <= tokens.shape[1] <= max(nodes, max_path) or tree.max_path > max_path:
        raise Unsupported(
            f"{who}.propose gave a tree of {tokens.shape[1]} nodes and up to {tree.max_path} a path, and it says nodes={nodes} and "
            f"max_path={max_path}: room was made for these, the root counted"
        )
    if tree.q is not None and not draws:
        raise Unsupported(
            f"{who}.propose gave drafts with the distributions that they were drawn from (TokenTree.q): they are drawn only where "
            "Decoding.drafter was given a `process`, and by a drafter whose traits say Traits(draws=True)"
        )


def check_roots(tokens: Tensor, root: Tensor, going: Tensor, who: str) -> None:
    """Raise Unsupported where a tree's root, tokens [B, N] at node 0, is not the last emitted token root [B] of a row that is going [B]."""
    wrong = ((tokens[:, 0] != root) & going).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise Unsupported(
            f"{who}.propose gave a tree that begins with token {int(tokens[row, 0])} in row {row}, where {int(root[row])} was emitted "
            "last: its root is `root` of `begin`, and then `verdict.bonus` of each `observe` for the rows that are `active`"
        )
