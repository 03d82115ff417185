"""Marks of the tokens of a round: accepted drafts, and the target's own."""

from __future__ import annotations

from collections.abc import Sequence

ACCEPTED, RECOVERED, BONUS, OWN = "accepted", "recovered", "bonus", "own"
"""OWN is a token of the target with no draft beside it: the first of an answer, and all of plain decoding."""


def own_mark(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], last: int) -> str:
    """Mark of the target's own token `last` behind the accepted path of a draft tree: recovered in a rejected draft's
    place, a bonus after the path's end."""
    beside = [tokens[node] for node in range(1, len(tokens)) if parents[node] == path[-1]]
    if len(tokens) == 1:
        return OWN
    # an end token ends the walk although it was drafted
    return RECOVERED if beside and last not in beside else BONUS
