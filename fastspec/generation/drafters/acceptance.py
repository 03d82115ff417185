"""Acceptance of drafts by the depth and the size of a tree, as the rounds of a call have it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastspec.default_trees import TreeShape

USUAL, PRIOR = 0.6, 4.0
"""Chance that a chain's first draft is accepted, before any was seen, and the rounds that it counts as."""
TRUST = 16.0
"""Rounds of a size that count as much as what those of other sizes say of it."""
WIDTH, SURE, SUREST = 0.43, 16.0, 64.0
"""Growth of a level's chances with the logarithm of its width, fitted to trees of 16 and 32 nodes and chains of 1 and 3
of an EAGLE-1 head for SmolLM2 on MT-bench and HumanEval; the information (Fisher's) that this counts as beside what is
seen, and that all of it counts as at the most, so that later rounds have a say."""
FORGOTTEN = 0.997
"""Weight that the rounds of a size keep with every further round of any, where they count as its being known."""


def breadth(shape: TreeShape) -> float:
    """Logarithm of a level's mean number of nodes."""
    return math.log(max(1.0, (shape.total_tokens - 1) / (shape.max_path - 1)))


class Acceptance:
    """Counts of accepted drafts by size and depth, later ones with more weight.

    A level is passed with probability 1 - exp(-c w): c belongs to the text, the head and the depth, and w to the
    tree, so that the rounds of one size say what another would accept. A size's own rounds count besides. How w
    grows with the tree is learned where one size follows another on the same texts.
    """

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        self.levels = [shape.max_path - 1 for shape in shapes]
        self.breadths = list(map(breadth, shapes))
        self.growth, self.sure = WIDTH, SURE
        """Growth of w with a tree's breadth, and the information that it rests on."""
        self.tried = [[0.0] * levels for levels in self.levels]
        self.passed = [[0.0] * levels for levels in self.levels]
        self.rounds, self.gained = [0.0] * len(shapes), [0.0] * len(shapes)
        self.seen = [0.0] * len(shapes)
        """Rounds of texts of every size, whichever texts these were."""
        self.size: int | None = None
        self.before: tuple[int, list[tuple[float, float]]] | None = None
        """The size before this one, with the tries and -log(1 - chance) of its levels."""
        self.fresh: list[list[int]] = []
        """Tries of this size's levels since then, and those that passed."""

    @property
    def widths(self) -> list[float]:
        """w of every size."""
        return [1 + self.growth * breadth for breadth in self.breadths]

    def count(self, size: int, accepted: Sequence[int]) -> None:
        """Take how many drafts each running row accepted in a round of this size."""
        if size != self.size:
            self._follow(size)
        tried, passed = self.tried[size], self.passed[size]
        for drafts in accepted:
            for depth in range(min(drafts + 1, self.levels[size])):
                tried[depth] += 1
                passed[depth] += drafts > depth
                self.fresh[depth][0] += 1
                self.fresh[depth][1] += drafts > depth
        self.rounds[size] += len(accepted)
        self.gained[size] += sum(accepted)
        self.seen = [FORGOTTEN * seen for seen in self.seen]
        self.seen[size] += len(accepted)

    def part(self) -> None:
        """Compare no round that comes next with those before: it is of another text, or without drafts."""
        self.size = self.before = None

    def _follow(self, size: int) -> None:
        if self.size is not None:
            levels = zip(self.tried[self.size], self.passed[self.size], strict=True)
            told = [(tried, -math.log((tried - passed + 0.5) / (tried + 1))) for tried, passed in levels]
            self.before = self.size, told
        self.size, self.fresh = size, [[0, 0] for _ in range(self.levels[size])]

    def learn(self) -> None:
        """Compare the rounds of this size with those of the one before, once: a step of Newton's method for `growth`
        on the likelihood of what passed."""
        if self.before is None or self.size is None:
            return
        (former, told), self.before = self.before, None
        mine, other = self.breadths[self.size], self.breadths[former]
        width = 1 + self.growth * other
        ratio, slope = (1 + self.growth * mine) / width, (mine - other) / width**2
        score = information = 0.0
        for (tries, passes), (known, chance) in zip(self.fresh, told, strict=False):
            if not tries or known < 1:
                continue
            weight, failed = known / (known + tries), math.exp(-chance * ratio)
            score += weight * chance * slope * (passes * failed / (1 - failed) - (tries - passes))
            information += weight * tries * (chance * slope) ** 2 * failed / (1 - failed)
        self.sure = min(SUREST, self.sure + information)
        self.growth = min(1.0, max(0.0, self.growth + score / self.sure))

    def fade(self, weight: float) -> None:
        """Let all that was counted weigh less."""
        for table in (*self.tried, *self.passed, self.rounds, self.gained):
            table[:] = [weight * value for value in table]

    def chances(self) -> list[float]:
        """c at every depth: the mean of what the sizes say, and of the depth above it."""
        found, before = [], -math.log(1 - USUAL)
        for depth in range(max(self.levels)):
            total, weight = PRIOR * before, PRIOR
            for tried, passed, width in zip(self.tried, self.passed, self.widths, strict=True):
                if depth < len(tried) and tried[depth]:
                    failed = (tried[depth] - passed[depth] + 0.5) / (tried[depth] + 1)
                    total -= tried[depth] * math.log(failed) / width
                    weight += tried[depth]
            before = total / weight
            found.append(before)
        return found

    def expected(self) -> list[float]:
        """Tokens of a round of every size, the bonus token included."""
        chances, found = self.chances(), []
        for levels, width, rounds, gained in zip(self.levels, self.widths, self.rounds, self.gained, strict=True):
            reached, told = 1.0, 0.0
            for chance in chances[:levels]:
                reached *= 1 - math.exp(-chance * width)
                told += reached
            found.append(1 + (TRUST * told + gained) / (TRUST + rounds))
        return found
