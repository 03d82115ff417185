"""The acceptance rules, enumerated exactly: whatever was drafted, the emitted tokens have the target's own
distribution.

A rule is written twice. `spoken` is its distribution in rational arithmetic, over drawn shapes, targets and drafters,
and must be the target's own for the first three tokens; `walk_drawn` is then held to it draft by draft, by integrating
over its uniforms. The walk is piecewise constant in them, so one midpoint per interval with the interval's exact length
as its weight makes the integral exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation import verify
from fastspec.generation.drafters.head_drafter import draw_distinct
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import walk_drawn
from fastspec.patches.backends import TORCH

VOCAB, LENGTH = 3, 3
ZERO, ONE = Fraction(0), Fraction(1)
Prefix = tuple[int, ...]
Chances = list[Fraction]
Distribution = dict[Prefix, Fraction]
NARROW = Fraction(1, 10**5)  # intervals that fp32 (6e-8) may not tell apart after a few roundings

SHAPES = {"chain": [0, 0, 1, 2], "siblings": [0, 0, 0, 0], "both": [0, 0, 0, 1, 1], "late": [0, 0, 0, 2, 2]}


def normed(weights: list[Any]) -> Chances:
    total = sum(weights, ZERO)
    return [Fraction(w) / total for w in weights] if total else [ZERO] * len(weights)


class World:
    """A target and a drafter: a rational distribution each after every prefix, zeros among them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tables: dict[tuple[str, Prefix], Chances] = {}

    def after(self, who: str, prefix: Prefix) -> Chances:
        if (who, prefix) not in self.tables:
            weights = [0] * VOCAB
            while not any(weights):
                weights = self.random.choices([0, 0, 1, 2, 3], k=VOCAB)
            self.tables[who, prefix] = normed(weights)
        return self.tables[who, prefix]

    def target(self, prefix: Prefix) -> Chances:
        return self.after("target", prefix)

    def distribution(self) -> Distribution:
        """The target's own distribution of the first tokens."""
        found: Distribution = {(): ONE}
        for _ in range(LENGTH):
            found = {(*text, t): chance * p for text, chance in found.items() for t, p in enumerate(self.target(text))}
        return found


@dataclass(frozen=True)
class Draft:
    """What was drafted and how likely that was: per node its parent, its token and the q recorded for it."""

    parents: list[int]
    tokens: list[int]
    q: list[Chances]
    chance: Fraction

    def prefix(self, node: int) -> Prefix:
        return () if node == 0 else (*self.prefix(self.parents[node]), self.tokens[node])

    def children(self, node: int) -> list[int]:
        return [c for c in range(1, len(self.parents)) if self.parents[c] == node]


Scheme = Callable[[Chances, list[int]], tuple[Chances, Chances]]
"""(the drafter's distribution, tokens of earlier siblings) -> what the token is drawn from, what is recorded as q."""


def with_replacement(d: Chances, earlier: list[int]) -> tuple[Chances, Chances]:
    return d, d


def without_replacement(d: Chances, earlier: list[int]) -> tuple[Chances, Chances]:
    left = normed([ZERO if token in earlier else chance for token, chance in enumerate(d)])
    return left, left


def not_renormalised(d: Chances, earlier: list[int]) -> tuple[Chances, Chances]:
    return without_replacement(d, earlier)[0], [ZERO if token in earlier else chance for token, chance in enumerate(d)]


def siblings_forgotten(d: Chances, earlier: list[int]) -> tuple[Chances, Chances]:
    return without_replacement(d, earlier)[0], d


def drafts(world: World, parents: list[int], scheme: Scheme) -> Iterator[Draft]:
    """Every draft that a shape can hold, with its chance. A node that nothing is left for has an arbitrary token and q
    of zeros."""

    def grow(draft: Draft) -> Iterator[Draft]:
        node = len(draft.tokens)
        if node == len(parents):
            yield draft
            return
        earlier = [draft.tokens[c] for c in range(1, node) if parents[c] == parents[node]]
        drawn, q = scheme(world.after("drafter", draft.prefix(parents[node])), earlier)
        for token, chance in enumerate(drawn) if any(drawn) else [(VOCAB - 1, ONE)]:
            if chance:
                yield from grow(Draft(parents, [*draft.tokens, token], [*draft.q, q], draft.chance * chance))

    yield from grow(Draft(parents, [0], [[ZERO] * VOCAB], ONE))


def excess(p: Chances, q: Chances) -> Chances:
    return [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]


@dataclass(frozen=True)
class Rule:
    """Leviathan et al. (arXiv 2211.17192), child by child: accept x ~ q with min(1, p / q), else go on with norm(max(p
    - q, 0))."""

    accept: Callable[[Fraction, Fraction], Fraction] = lambda p, q: min(ONE, p / q) if q else ZERO
    residual: Callable[[Chances, Chances], Chances] = lambda p, q: normed(excess(p, q))
    bonus: Callable[[Chances, Chances], Chances] = lambda p, whole: p


def steps(world: World, draft: Draft, node: int, rule: Rule) -> tuple[list[tuple[int, Fraction]], Chances]:
    """The children of a node with the chance to be accepted when it is their turn, and what the bonus token is drawn
    from."""
    p, turns = world.target(draft.prefix(node)), []
    for child in draft.children(node):
        turns.append((child, rule.accept(p[draft.tokens[child]], draft.q[child][draft.tokens[child]])))
        p = rule.residual(p, draft.q[child])
    return turns, rule.bonus(p, world.target(draft.prefix(node)))


def spoken(world: World, draft: Draft, rule: Rule, node: int = 0) -> Distribution:
    """The distribution of what is emitted from a node on, given the draft."""
    distribution: Distribution = {}
    left = ONE
    turns, bonus = steps(world, draft, node, rule)
    for child, accepted in turns:
        if not ZERO <= accepted <= ONE:
            raise ValueError(f"accepted with {accepted}, which is no probability")
        below = spoken(world, draft, rule, child) if left * accepted else {}
        for text, chance in below.items():
            generated = (draft.tokens[child], *text)
            distribution[generated] = distribution.get(generated, ZERO) + left * accepted * chance
        left *= 1 - accepted
    for token, chance in enumerate(bonus):
        distribution[token,] = distribution.get((token,), ZERO) + left * chance
    return distribution


def continued(world: World, distribution: Distribution) -> Distribution:
    """The distribution of the first tokens where the next round, by induction, goes on as the target does."""
    found = dict.fromkeys(product(range(VOCAB), repeat=LENGTH), ZERO)
    for emitted, chance in distribution.items():
        for text in found:
            if text[: len(emitted)] == emitted[:LENGTH]:
                share = chance
                for place in range(len(emitted), LENGTH):
                    share *= world.target(text[:place])[text[place]]
                found[text] += share
    return found


def lossless(world: World, parents: list[int], scheme: Scheme, rule: Rule) -> bool:
    total: Distribution = {}
    try:
        for draft in drafts(world, parents, scheme):
            for text, chance in spoken(world, draft, rule).items():
                total[text] = total.get(text, ZERO) + draft.chance * chance
    except ValueError:
        return False
    return continued(world, total) == world.distribution()


@pytest.mark.parametrize("scheme", [with_replacement, without_replacement])
@pytest.mark.parametrize("shape", SHAPES)
@given(seed=st.integers(0, 10**6))
@examples(8)
def test_the_rule_is_lossless(shape, scheme, seed):
    assert lossless(World(seed), SHAPES[shape], scheme, Rule())


@st.composite
def shapes(draw: st.DrawFn) -> list[int]:
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(2, 5)))]


@given(shapes(), st.sampled_from([with_replacement, without_replacement]), st.integers(0, 10**6))
@examples(30)
def test_the_rule_is_lossless_on_drawn_trees(parents, scheme, seed):
    assert lossless(World(seed), parents, scheme, Rule())


@given(shapes(), st.integers(0, 10**6), st.data())
@examples(40)
def test_one_draw_per_node_is_the_rule_for_drafts_that_are_certain(parents, seed, data):
    """A deterministic child is a point mass q; then the rule and a single draw y ~ p, followed while y is a child, have
    one distribution. Of equal siblings the first is followed, and the others are never accepted."""
    world = World(seed)
    tokens = [0, *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(parents) - 1, max_size=len(parents) - 1))]
    draft = Draft(
        parents, tokens, [[ZERO] * VOCAB] + [[Fraction(t == token) for t in range(VOCAB)] for token in tokens[1:]], ONE
    )

    def followed(node: int) -> Distribution:
        distribution: Distribution = {}
        below = {draft.tokens[child]: child for child in reversed(draft.children(node))}
        for token, chance in enumerate(world.target(draft.prefix(node))):
            for text, share in (followed(below[token]) if token in below else {(): ONE}).items():
                generated = (token, *text)
                distribution[generated] = distribution.get(generated, ZERO) + chance * share
        return distribution

    one, two = (
        {text: chance for text, chance in each.items() if chance}
        for each in (followed(0), spoken(world, draft, Rule()))
    )
    assert one == two
    assert continued(world, followed(0)) == continued(world, spoken(world, draft, Rule())) == world.distribution()


WRONG: dict[str, tuple[Scheme, Rule]] = {
    "accepts with p / q and no min": (with_replacement, replace(Rule(), accept=lambda p, q: p / q if q else ZERO)),
    "accepts with p": (with_replacement, replace(Rule(), accept=lambda p, q: p)),
    "accepts with q / p": (with_replacement, replace(Rule(), accept=lambda p, q: min(ONE, q / p) if p else ONE)),
    "goes on with p": (with_replacement, replace(Rule(), residual=lambda p, q: p)),
    "goes on with q - p": (with_replacement, replace(Rule(), residual=lambda p, q: normed(excess(q, p)))),
    "residual not renormalised": (with_replacement, replace(Rule(), residual=lambda p, q: excess(p, q))),
    "bonus from the whole p": (with_replacement, replace(Rule(), bonus=lambda p, whole: whole)),
    "bonus from unprocessed scores": (
        without_replacement,
        replace(Rule(), bonus=lambda p, whole: normed([c * c for c in p])),
    ),
    "q not renormalised": (not_renormalised, Rule()),
    "q with the earlier siblings": (siblings_forgotten, Rule()),
    "accepts what was not drawn": (
        without_replacement,
        replace(Rule(), accept=lambda p, q: min(ONE, p / q) if q else Fraction(p > 0)),
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_planted_bugs_are_found(bug):
    scheme, rule = WRONG[bug]
    right = without_replacement if scheme in (not_renormalised, siblings_forgotten) else scheme
    for shape in SHAPES.values():
        assert all(lossless(World(seed), shape, right, Rule()) for seed in range(3))
    assert not all(lossless(World(seed), SHAPES["siblings"], scheme, rule) for seed in range(60))


Walk = Callable[..., Any]


def cells(points: set[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """(midpoint, length) of the intervals of [0, 1) between these points."""
    edges = sorted({ZERO, ONE, *(p for p in points if 0 < p < 1)})
    return [((a + b) / 2, b - a) for a, b in pairwise(edges)]


def integrated(world: World, draft: Draft, walk: Walk) -> tuple[Distribution, Fraction]:
    """The distribution of what a walk in torch emits, and the weight of the intervals too narrow for fp32, which are
    left out."""
    grid = [set[Fraction]() for _ in draft.tokens]
    for node in range(len(draft.tokens)):
        turns, bonus = steps(world, draft, node, Rule())
        for child, accepted in turns:
            grid[child].add(accepted)
        grid[0] |= {sum(bonus[: token + 1], ZERO) for token in range(VOCAB)}
    points, weights, lost = [], [], ZERO
    for point in product(*map(cells, grid)):
        weight = ONE
        for _, length in point:
            weight *= length
        if min(length for _, length in point) < NARROW:
            lost += weight
            continue
        points.append([float(middle) for middle, _ in point])
        weights.append(weight)
    rows = len(points)
    tree = TokenTree.from_parents(
        *(torch.tensor(x).expand(rows, -1) for x in (draft.tokens, draft.parents)), max_path=len(draft.tokens)
    )
    p = torch.tensor([[float(c) for c in world.target(draft.prefix(node))] for node in range(len(draft.tokens))])
    q = torch.tensor([[float(c) for c in row] for row in draft.q])
    verdict = walk(tree, p.log().expand(rows, -1, -1), q.expand(rows, -1, -1), torch.tensor(points), TORCH)
    distribution: Distribution = {}
    for generated, accepted, weight in zip(
        verdict.tokens(tree).tolist(), verdict.accepted.tolist(), weights, strict=True
    ):
        text = tuple(generated[: accepted + 1])
        distribution[text] = distribution.get(text, ZERO) + weight
    return distribution, lost


def follows_the_rule(world: World, draft: Draft, walk: Walk) -> bool:
    found, lost = integrated(world, draft, walk)
    want = spoken(world, draft, Rule())
    return lost < Fraction(1, 1000) and all(
        abs(found.get(text, ZERO) - want.get(text, ZERO)) <= lost for text in {*found, *want}
    )


@given(
    shapes(),
    st.sampled_from([with_replacement, without_replacement]),
    st.integers(0, 10**6),
    st.randoms(use_true_random=False),
)
@examples(40)
def test_walk_drawn_follows_the_rule(parents, scheme, seed, random):
    world = World(seed)
    every = list(drafts(world, parents, scheme))
    for draft in random.sample(every, min(4, len(every))):
        assert follows_the_rule(world, draft, walk_drawn)


def test_walk_drawn_never_accepts_what_was_not_drawn():
    """One token of any probability and three children: two of them were not drawn, whatever the target thinks of their
    tokens."""
    for seed in range(6):
        world = World(seed)
        world.tables["drafter", ()] = normed([0, 1, 0])
        (draft,) = drafts(world, SHAPES["siblings"], without_replacement)
        assert draft.q[2] == draft.q[3] == [ZERO] * VOCAB
        assert follows_the_rule(world, draft, walk_drawn)


MUTANTS = {
    "goes on with p": ("(p - q[:, i]).clamp(min=0)", "p"),
    "residual not renormalised": ("rest / total", "rest"),
    "accepts with p": ("uniform[:, i] * chance <", "uniform[:, i] <"),
    "forgets the new node's p": ("torch.where(taken[:, None], probs[:, i], p)", "p"),
    "bonus from the whole p": ("ops.pick(p.log(),", "ops.pick(probs[torch.arange(rows), node].log(),"),
    "accepts what was not drawn": ("tried & (chance > 0)", "tried"),
    "tries every node": ("tree.parents[:, i] == node", "tree.parents[:, i] >= 0"),
    "one uniform for all": ("uniform[:, i] * chance", "uniform[:, 0] * chance"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_planted_bugs_in_walk_drawn_are_found(bug):
    source, (right, wrong) = inspect.getsource(walk_drawn), MUTANTS[bug]
    assert source.count(right) == 1
    scope = dict(vars(verify))
    exec(source.replace(right, wrong), scope)
    cases = []
    for seed in range(12):
        world = World(seed)
        cases += [(world, draft) for draft in list(drafts(world, SHAPES["both"], without_replacement))[:4]]
    assert all(follows_the_rule(world, draft, walk_drawn) for world, draft in cases)
    assert not all(follows_the_rule(world, draft, scope["walk_drawn"]) for world, draft in cases)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=7).filter(any), st.integers(0, 10**6), st.data())
@examples(60)
def test_distinct_draws_record_what_they_were_drawn_from(weights, seed, data):
    count = data.draw(st.integers(1, len(weights)))
    probs = torch.tensor([weights]) / sum(weights)
    noise = torch.empty(1, len(weights)).exponential_(generator=torch.Generator().manual_seed(seed))
    (ids,), (q,) = draw_distinct(probs, noise, count)
    assert len(set(ids.tolist())) == count
    left: list[Any] = list(weights)
    for token, row in zip(ids.tolist(), q, strict=True):
        # Fractions of small whole numbers, normalised twice in fp32: a few roundings of 6e-8.
        torch.testing.assert_close(row, torch.tensor([float(c) for c in normed(left)]), rtol=1e-6, atol=0.0)
        assert bool(row.any()) == any(left) and (not any(left) or left[token])
        left[token] = 0


@pytest.mark.parametrize("noise", [0.0, 1e-45, 1.0, 104.0])
def test_distinct_draws_take_extreme_noise(noise):
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    ids, q = draw_distinct(probs, torch.full_like(probs, noise), 4)
    assert torch.isfinite(q).all() and not q[0, 2:].any()
    assert set(ids[0, :2].tolist()) == {1, 3}


def test_distinct_draws_have_the_distribution_of_draws_one_after_another():
    """20,000 seeded pairs against their exact chances: a chi-square of 11 degrees stays below 31.3 but for one seed in
    a thousand."""
    weights, total = [1, 2, 3, 6], 20_000
    probs = (torch.tensor(weights) / 12).expand(total, -1)
    noise = torch.empty(total, 4).exponential_(generator=torch.Generator().manual_seed(0))
    found = draw_distinct(probs, noise, 2)[0]
    statistic = 0.0
    for a, b in product(range(4), repeat=2):
        if a != b:
            want = total * weights[a] / 12 * weights[b] / (12 - weights[a])
            statistic += (int(((found[:, 0] == a) & (found[:, 1] == b)).sum()) - want) ** 2 / want
    assert statistic < 31.3
