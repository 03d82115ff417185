"""The verify rule, enumerated exactly: what a round emits has the target's own distribution, for drawn trees and
distributions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import choose, walk, walk_with_history
from fastspec.kernels.verification.reference import categorical
from fastspec.patches.backends import TORCH

VOCAB = 3
Prefix = tuple[int, ...]
Distribution = dict[Prefix, Fraction]
Rule = Callable[[TokenTree, list[int]], list[tuple[Prefix, Fraction]]]


class Case:
    """A tree and a table model: a rational distribution for every node's prefix, which equal siblings share."""

    def __init__(self, parents: list[int], tokens: list[int], weights: list[list[int]]) -> None:
        self.tree = TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]), max_path=len(parents))
        self.parents, self.tokens = parents, tokens
        self.prefixes: list[Prefix] = [()]
        for node in range(1, len(parents)):
            self.prefixes.append((*self.prefixes[parents[node]], tokens[node]))
        self.table: dict[Prefix, list[Fraction]] = {}
        for prefix, row in zip(self.prefixes, weights, strict=True):
            self.table.setdefault(prefix, [Fraction(w, sum(row)) for w in row])
        walked = [True]
        for node in range(1, len(parents)):
            twins = [n for n in range(1, node) if (parents[n], tokens[n]) == (parents[node], tokens[node])]
            walked.append(walked[parents[node]] and not twins)
        self.walked = {prefix for prefix, on in zip(self.prefixes, walked, strict=True) if on}
        """What a walk can reach: of equal siblings, the first."""

    def target_distribution(self, emitted: Prefix) -> Fraction:
        """The probability that the target says these tokens one after another."""
        distribution = Fraction(1)
        for place, token in enumerate(emitted):
            distribution *= self.table[emitted[:place]][token]
        return distribution


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees of any shape; equal siblings are among them, as where `nasd` fills rows up."""
    parents, tokens = [0], [0]
    for node in range(1, draw(st.integers(1, 5)) + 1):
        parents.append(draw(st.integers(0, node - 1)))
        tokens.append(draw(st.integers(0, VOCAB - 1)))
    weights = [draw(st.lists(st.integers(0, 4), min_size=VOCAB, max_size=VOCAB).filter(any)) for _ in parents]
    return Case(parents, tokens, weights)


def right_rule(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    verdict = walk(tree, torch.tensor([picks]), TORCH)
    return [(tuple(verdict.tokens(tree)[0, : int(verdict.accepted) + 1].tolist()), Fraction(1))]


def emitted_distribution(case: Case, rule: Rule) -> Distribution:
    """The distribution of the emitted tokens over every assignment of picks to nodes."""
    distribution: Distribution = {}
    for picks in product(range(VOCAB), repeat=len(case.parents)):
        chance = Fraction(1)
        for prefix, pick in zip(case.prefixes, picks, strict=True):
            chance *= case.table[prefix][pick]
        if chance:
            for emitted, share in rule(case.tree, list(picks)):
                distribution[emitted] = distribution.get(emitted, Fraction(0)) + chance * share
    return distribution


def lossless(case: Case, rule: Rule) -> bool:
    """Every emission ends where the walked tree ends, so its probability must be the target's own, and all must add up
    to one."""
    distribution = emitted_distribution(case, rule)
    return sum(distribution.values()) == 1 and all(
        emitted[:-1] in case.walked and emitted not in case.walked and chance == case.target_distribution(emitted)
        for emitted, chance in distribution.items()
    )


@given(cases())
@examples(40)
def test_one_draw_per_node_has_the_targets_distribution(case):
    assert lossless(case, right_rule)


@given(cases())
@examples(60)
def test_greedy_is_the_argmax_walk(case):
    scores = torch.tensor([[[float(p) for p in case.table[prefix]] for prefix in case.prefixes]])
    picks = choose(scores, None, TORCH)
    emitted, prefix = [], ()
    while True:
        emitted.append(max(range(VOCAB), key=lambda token: (case.table[prefix][token], -token)))
        prefix = (*prefix, emitted[-1])
        if prefix not in case.walked:
            break
    assert right_rule(case.tree, picks[0].tolist()) == [(tuple(emitted), Fraction(1))]


@given(cases(), st.integers(0, 2**31))
@examples(60)
def test_walking_with_history_is_the_same_walk(case, seed):
    """Equal to choosing at all nodes at once, with every visited node's own prefix handed to the processor."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.tensor([[[float(p) for p in case.table[prefix]] for prefix in case.prefixes]]).log()
    uniform = torch.rand(1, len(case.parents), generator=generator)
    seen: list[list[int]] = []

    def process(rows: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.extend(ids.tolist())
        return scores

    for draws in (uniform, None):
        seen.clear()
        plain = walk(case.tree, choose(logits, draws, TORCH), TORCH)
        history = [torch.tensor([9, case.tokens[0]])]
        slow, scores = walk_with_history(
            case.tree, logits, draws, history, process, [99], lambda row, picks: False, TORCH
        )
        assert (slow.path.tolist(), slow.accepted.tolist(), slow.bonus.tolist()) == (
            plain.path.tolist(),
            plain.accepted.tolist(),
            plain.bonus.tolist(),
        )
        path = plain.path[0, : int(plain.accepted) + 1]
        assert seen == [[9, case.tokens[0], *case.prefixes[node]] for node in path.tolist()]
        assert torch.equal(scores[0, : len(path)], logits[0, path])


@given(cases(), st.integers(1, 5), st.frozensets(st.integers(0, VOCAB - 1), max_size=2))
@examples(60)
def test_walking_with_history_stops_where_the_text_ends(case, left, ends):
    logits = torch.tensor([[[float(p) for p in case.table[prefix]] for prefix in case.prefixes]]).log()
    ((emitted, _),) = right_rule(case.tree, choose(logits, None, TORCH)[0].tolist())
    end = next((place for place, token in enumerate(emitted) if token in ends), len(emitted))
    emitted = emitted[: min(end + 1, left)]
    seen: list[int] = []

    def process(rows: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return scores

    text = [torch.tensor([case.tokens[0]])]
    verdict, _ = walk_with_history(
        case.tree, logits, None, text, process, [left], lambda row, picks: picks[-1] in ends, TORCH
    )
    assert tuple(verdict.tokens(case.tree)[0, : int(verdict.accepted) + 1].tolist()) == emitted
    assert seen == list(range(1, len(emitted) + 1))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4), st.integers(0, 2**31))
@examples(60)
def test_rows_are_walked_together_as_they_are_alone(rows, seed):
    """Rows with texts of different lengths and different room, in one call and one by one; each is asked about its own
    prefixes."""
    generator = torch.Generator().manual_seed(seed)
    count, nodes = len(rows), 7
    parents = torch.tensor([[0, 0, 0, 1, 1, 3, 4]] * count)
    tree = TokenTree.from_parents(torch.randint(0, VOCAB, (count, nodes), generator=generator), parents)
    logits, uniform = (
        torch.randn(count, nodes, VOCAB, generator=generator),
        torch.rand(count, nodes, generator=generator),
    )
    history = [torch.arange(length) for length, _ in rows]

    def shift(rows: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len({len(history[row]) for row in rows}) <= len(rows) == len(ids)
        return torch.stack([line.roll(int(text.sum()) % VOCAB) for text, line in zip(ids, scores, strict=True)])

    def go(chosen: list[int]) -> list[tuple[list[int], int, int]]:
        part = TokenTree(*(x[chosen] for x in (tree.tokens, tree.parents, tree.depths, tree.ancestors)), tree.max_path)
        left = [rows[b][1] for b in chosen]
        texts = [history[b] for b in chosen]
        verdict, _ = walk_with_history(
            part, logits[chosen], uniform[chosen], texts, shift, left, lambda row, picks: False, TORCH
        )
        return list(zip(verdict.path.tolist(), verdict.accepted.tolist(), verdict.bonus.tolist(), strict=True))

    assert go(list(range(count))) == [go([b])[0] for b in range(count)]


def test_rows_that_have_ended_are_not_walked():
    tree = TokenTree.from_parents(torch.tensor([[4, 1], [5, 1]]), torch.tensor([[0, 0], [0, 0]]))
    logits = torch.zeros(2, 2, 8)
    logits[..., 1] = 1.0
    history = [torch.tensor([4]), torch.tensor([5])]
    verdict, _ = walk_with_history(
        tree, logits, None, history, lambda rows, ids, scores: scores, [99, 0], lambda row, picks: False, TORCH
    )
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.bonus.tolist() == [1, 5]


FULL = Case([0, 0, 0, 1], [0, 0, 1, 2], [[1, 2, 3], [2, 1, 1], [1, 1, 2], [3, 1, 1]])


def redrawn_bonus(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """A known wrong rule: on a mismatch the bonus token is drawn anew, so a drafted token may come back as the
    bonus."""
    ((emitted, _),) = right_rule(tree, picks)
    table = FULL.table[emitted[:-1]]
    return [((*emitted[:-1], token), table[token]) for token in range(VOCAB) if table[token]]


def wrong_child(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """Walks to the first child, whatever its token."""
    moved = [next((c for c in range(1, 4) if FULL.parents[c] == node), None) for node in range(4)]
    return right_rule(tree, [picks[n] if child is None else FULL.tokens[child] for n, child in enumerate(moved)])


def bonus_of_the_root(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """Takes the bonus token from the root's draw."""
    ((emitted, _),) = right_rule(tree, picks)
    return [((*emitted[:-1], picks[0]), Fraction(1))]


def stops_early(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """Emits the accepted path without a bonus token."""
    ((emitted, _),) = right_rule(tree, picks)
    return [(emitted[:-1], Fraction(1))]


@pytest.mark.parametrize("rule", [redrawn_bonus, wrong_child, bonus_of_the_root, stops_early])
def test_planted_bugs_are_found(rule):
    assert lossless(FULL, right_rule)
    assert not lossless(FULL, rule)


TWICE = Case([0, 0, 0, 2], [0, 1, 1, 2], [[1, 2, 3], [2, 1, 1], [2, 1, 1], [3, 1, 1]])


def a_chance_for_each_copy(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """Where the first of two equal children is refused, the second is tried by a draw of its own."""
    ((emitted, _),) = right_rule(tree, picks)
    again = TWICE.table[()][1]
    return [(emitted, Fraction(1))] if picks[0] == 1 else [((1, picks[1]), again), (emitted, 1 - again)]


def rest_of_another_copy(tree: TokenTree, picks: list[int]) -> list[tuple[Prefix, Fraction]]:
    """Steps to the first of two equal children and goes on below the second whatever the first drew."""
    ((emitted, _),) = right_rule(tree, picks)
    return [((1, 2, picks[3]) if picks[0] == 1 else emitted, Fraction(1))]


@pytest.mark.parametrize("rule", [a_chance_for_each_copy, rest_of_another_copy])
def test_planted_bugs_with_equal_siblings_are_found(rule):
    assert lossless(TWICE, right_rule)
    assert not lossless(TWICE, rule)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=9).filter(any))
@examples(60)
def test_the_uniforms_of_a_token_have_its_probability(weights):
    """On a grid of cell midpoints every token gets p of the cells, one cell more or less at each of its two ends."""
    cells = 1 << 10
    uniform = (torch.arange(cells) + 0.5) / cells
    logits = torch.tensor(weights, dtype=torch.float64).log().float()
    found = categorical(logits.expand(cells, -1), uniform).bincount(minlength=len(weights))
    for weight, count in zip(weights, found.tolist(), strict=True):
        assert abs(count - cells * weight / sum(weights)) <= 2
        assert weight or not count


@pytest.mark.parametrize("uniform", [0.0, 2.0**-149, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("size", [1, 7, 63, 65, 4099])
def test_tokens_of_probability_zero_are_never_drawn(uniform, size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(32, size, generator=generator) * 4
    dead = torch.rand(32, size, generator=generator) < 0.7
    dead[:, size // 2] = False
    dead[::2, : size // 2] = True
    dead[1::2, size // 2 + 1 :] = True
    logits[dead] = -torch.inf
    picks = categorical(logits, torch.full((32,), uniform, dtype=torch.float32))
    assert not dead[torch.arange(32), picks].any()
    far = torch.zeros(1, size)
    far[:, : size - 1] = 200.0  # the last token is finite and its probability underflows to 0
    assert size == 1 or int(categorical(far, torch.tensor([uniform]))) < size - 1


@given(st.integers(1, 70), st.integers(1, 3))
@examples(20)
def test_a_chain_is_the_tree_of_its_parents(nodes, rows):
    tokens = torch.arange(rows * nodes).view(rows, nodes)
    chain, tree = (
        TokenTree.chain(tokens),
        TokenTree.from_parents(tokens, (torch.arange(nodes) - 1).clamp(min=0).expand(rows, -1)),
    )
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(chain, name), getattr(tree, name))
    assert chain.max_path == tree.max_path == nodes
