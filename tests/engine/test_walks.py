"""Trees, walks in step and the verification of a given text by themselves, with no model behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.trees import VOCAB, drawn_tree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.generation.drafters.given_text import CHUNKS, GivenText, Transcript
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import (
    choose,
    fill_ended,
    measure,
    until_end,
    walk,
    walk_drawn,
    walk_in_step,
    walk_with_history,
)
from fastspec.kernels.cache.reference import cache_write, kv_block_copy
from fastspec.kernels.drafting.reference import ancestor_words
from fastspec.kernels.verification.reference import SamplingSettings, categorical, pick, posterior_walk, under_settings
from fastspec.patches.backends import TORCH

SEEDS = st.integers(0, 2**31)
DRAWN = examples(40)
CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others


class Table:
    """Steps whose tokens are the argmax of what they are given; the call is over after `count` of them."""

    lengths: tuple[()] = ()
    pad_token = 0

    def __init__(self, count: int) -> None:
        self.left, self.over = count, False
        self.seen: list[list[int]] = []
        self.scores: list[Tensor | None] = []

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        self.scores.append(scores)
        self.seen.append(logits.argmax(-1).tolist())
        self.left -= 1
        self.over = self.left == 0
        return self.seen[-1]


def follow(tree: TokenTree, row: int, node: int, token: int) -> int | None:
    """The child of a token; of several the first of those with the longest path below."""
    parents = tree.parents[row].tolist()

    def height(node: int) -> int:
        return max((1 + height(below) for below in range(node + 1, len(parents)) if parents[below] == node), default=0)

    found = [
        below for below in range(1, len(parents)) if parents[below] == node and int(tree.tokens[row, below]) == token
    ]
    return max(found, key=height, default=None)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6), st.booleans(), SEEDS)
@DRAWN
def test_rows_walk_in_step_until_one_leaves_its_tree(rows, nodes, count, mixed, seed):
    """The path is as long as the shortest of the rows' own, and no longer than the call or `max_path`."""
    generator = torch.Generator().manual_seed(seed)
    tree = drawn_tree(rows, nodes, generator)
    says = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=generator)  # what a token is followed by
    logits = torch.nn.functional.one_hot(says[torch.arange(rows)[:, None] % VOCAB, tree.tokens], VOCAB).float()
    scores = logits * 2 if mixed else None
    steps = Table(count)
    with ELSEWHERE:
        verdict = walk_in_step(tree, logits, steps, scores)
    alone = []
    for row in range(rows):
        node, length = 0, 0
        while (child := follow(tree, row, node, int(says[row % VOCAB, tree.tokens[row, node]]))) is not None:
            node, length = child, length + 1
        alone.append(length)
    accepted = min(*alone, count - 1, count - 1)
    assert verdict.accepted.tolist() == [accepted] * rows and len(steps.seen) == accepted + 1
    assert verdict.bonus.tolist() == steps.seen[-1]
    assert verdict.path.shape == (rows, tree.max_path)
    assert verdict.path.dtype == verdict.accepted.dtype == verdict.bonus.dtype == torch.int64
    for row, path in enumerate(verdict.path.tolist()):
        assert path[0] == 0 and path[accepted:] == [path[accepted]] * (tree.max_path - accepted)
        for step, (above, node) in enumerate(pairwise(path[: accepted + 1])):
            assert int(tree.parents[row, node]) == above and int(tree.tokens[row, node]) == steps.seen[step][row]
        for node, shown in zip(path, steps.scores, strict=False):
            assert torch.equal(shown[row], logits[row, node] * 2) if mixed else shown is None


def test_of_equal_children_the_one_with_the_longest_path_below_is_taken():
    parents = torch.tensor([[0, 0, 0, 0, 2, 4, 3]])
    tree = TokenTree.from_parents(torch.tensor([[0, 1, 1, 1, 1, 1, 1]]), parents)
    logits = torch.nn.functional.one_hot(torch.ones(1, 7, dtype=torch.long), VOCAB)
    assert walk_in_step(tree, logits, Table(9)).path.tolist() == [[0, 2, 4, 5]]
    flat = TokenTree.from_parents(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 0]]))
    assert walk_in_step(flat, logits[:, :3], Table(9)).path.tolist() == [[0, 1]]


def test_a_path_is_no_longer_than_the_trees_bound():
    tree = TokenTree.from_parents(torch.tensor([[1, 1, 1, 1]]), torch.tensor([[0, 0, 1, 2]]), max_path=3)
    verdict = walk_in_step(tree, torch.tensor([0.0, 1.0, 0.0]).expand(1, 4, -1), Table(9))
    assert (verdict.path.tolist(), verdict.accepted.tolist()) == ([[0, 1, 2]], [2])


def test_rows_that_have_ended_draft_the_filler():
    tree = TokenTree.chain(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    filled = fill_ended(tree, torch.tensor([8, 9]), torch.tensor([False, True]), 7)
    assert filled.tokens.tolist() == [[1, 2, 3], [9, 7, 7]]
    assert filled.parents is tree.parents and filled.max_path == 3


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 4), st.none() | st.integers(0, 12))
@DRAWN
def test_a_rows_tokens_are_those_up_to_its_end(tokens, before, length):
    assert until_end(tuple(tokens), length, before) == [
        t for place, t in enumerate(tokens, before) if length is None or place < length
    ]


@given(st.lists(st.lists(st.integers(1, 2), max_size=40), min_size=1, max_size=3), SEEDS)
@DRAWN
def test_a_text_is_kept_as_far_as_the_target_agrees(texts, seed):
    """Each row's target says its text up to a place of its own, then 3; chunks grow, and rows that left their text are
    filled up."""
    generator = torch.Generator().manual_seed(seed)
    place = [int(torch.randint(0, len(text) + 1, (), generator=generator)) for text in texts]
    truth = [text[:keep] + [3] * 300 for text, keep in zip(texts, place, strict=True)]
    verifier, empty, everyone = GivenText(texts, CPU), torch.empty(0), torch.ones(len(texts), dtype=torch.bool)
    assert (verifier.nodes, verifier.max_path, verifier.kept) == (64, 64, [0] * len(texts))
    verifier.begin(empty, empty, empty, torch.tensor([row[0] for row in truth]))
    emitted, rounds = [1] * len(texts), 0
    while verifier.goes_on:
        tree, nodes = verifier.propose(0), CHUNKS["cpu"][min(rounds, 3)]
        for row, text in enumerate(texts):
            more = text[emitted[row] :][: nodes - 1] if emitted[row] <= place[row] else []
            assert tree.tokens[row].tolist() == [truth[row][emitted[row] - 1], *more, *[0] * (nodes - 1 - len(more))]
        picks = torch.tensor([row[count : count + nodes] for row, count in zip(truth, emitted, strict=True)])
        verdict = walk(tree, picks, TORCH)
        verifier.observe(tree, verdict, empty, empty, everyone, 0)
        emitted = [count + accepted + 1 for count, accepted in zip(emitted, verdict.accepted.tolist(), strict=True)]
        rounds += 1
        assert verifier.goes_on == any(
            count <= keep and count < len(text) for count, keep, text in zip(emitted, place, texts, strict=True)
        )
    assert verifier.kept == place


def test_chunks_grow_to_the_last_size():
    text = [1, 2] * 120
    verifier, empty = GivenText([text], CPU), torch.empty(0)
    verifier.begin(empty, empty, empty, torch.tensor([1]))
    sizes, emitted = [], 1
    while verifier.goes_on:
        with ELSEWHERE:
            tree = verifier.propose(0)
        sizes.append(tree.tokens.shape[1])
        verdict = walk(tree, torch.tensor([(text[emitted:] + [0] * 64)[: sizes[-1]]]), TORCH)
        verifier.observe(tree, verdict, empty, empty, torch.tensor([True]), 0)
        emitted += int(verdict.accepted) + 1
    assert sizes == [8, 16, 32, 64, 64, 64] and verifier.kept == [240]


def test_a_row_that_has_ended_is_not_followed():
    verifier, empty = GivenText([[1, 2, 3, 4], [1, 2, 3, 4]], CPU), torch.empty(0)
    verifier.begin(empty, empty, empty, torch.tensor([1, 1]))
    tree = verifier.propose(0)
    verdict = Verdict(torch.tensor([[0, 1], [0, 1]]), torch.tensor([1, 1]), torch.tensor([3, 3]))
    verifier.observe(tree, verdict, empty, empty, torch.tensor([True, False]), 0)
    assert (verifier.kept, verifier.roots, verifier.following, verifier.goes_on) == (
        [3, 1],
        [3, 1],
        [True, False],
        True,
    )
    verifier.observe(tree, verdict, empty, empty, torch.tensor([False, False]), 0)
    assert not verifier.goes_on


def test_devices_that_read_weights_once_verify_all_in_one_size():
    meta = GivenText([[1]], torch.device("meta"))
    assert meta.chunks == (64,) and meta.nodes == 64


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_a_drafter_is_shown_the_prompts_and_what_was_committed(wide):
    ids, counts = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2])
    features = torch.arange(2 * 3 * wide).view(2, 3, wide).float()
    read = Transcript(ids, counts, features)
    tree = TokenTree.from_parents(torch.tensor([[6, 7, 8], [9, 10, 11]]), torch.tensor([[0, 0, 0], [0, 0, 1]]))
    verdict = Verdict(torch.tensor([[0, 2, 2], [0, 1, 2]]), torch.tensor([1, 2]), torch.tensor([0, 0]))
    more = 100 + torch.arange(2 * 3 * wide).view(2, 3, wide).float()
    read.add(tree, verdict, more, [True, False])
    read.add(tree, verdict, more, [False, True])
    with ELSEWHERE:
        whole, lengths, shown = read.whole()
    assert whole.tolist() == [[1, 2, 3, 6, 8], [4, 5, 9, 10, 11]] and lengths.tolist() == [5, 5]
    assert shown.shape == (2, 5, wide)
    assert torch.equal(
        shown, torch.stack((torch.cat((features[0], more[0, [0, 2]])), torch.cat((features[1, :2], more[1]))))
    )


@pytest.mark.parametrize("narrow", [1, 2])
def test_features_of_a_part_of_the_prompts_are_not_shown(narrow):
    """Where the target read the prompts' last tokens alone, or its features have no width."""
    read = Transcript(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.ones(1, narrow, 4))
    assert read.features is None and read.whole()[2].shape == (1, 3, 0)


def test_trees_of_parents_are_checked_and_bounded():
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    tree = TokenTree.from_parents(
        tokens, torch.tensor([[3, 0, 1, 1], [0, 0, 0, 0]]).clamp(max=2)
    )  # a root's own parent is not read
    assert tree.parents.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]] and tree.max_path == 3
    assert tree.ancestors.tolist() == [[[1], [3], [7], [11]], [[1], [3], [5], [9]]]
    assert TokenTree.from_parents(tokens, torch.zeros(2, 4, dtype=torch.long), max_path=4).max_path == 4
    assert TokenTree.chain(tokens, max_path=2).max_path == 2 and TokenTree.chain(tokens).q is None
    q = torch.rand(2, 4, VOCAB)
    assert TokenTree.chain(tokens, q=q).q is q
    for wrong in ([0, 1, 0, 0], [0, 0, 2, 0], [0, -1, 0, 0], [0, 0, 0, 3]):
        with pytest.raises(ValueError, match="must name an earlier node"):
            TokenTree.from_parents(tokens[:1], torch.tensor([wrong]))
    with pytest.raises(ValueError, match="must name an earlier node"):
        TokenTree.from_parents(tokens, torch.zeros(2, 3, dtype=torch.long))


def test_the_tree_of_plain_decoding_is_a_chain_of_one():
    root = torch.tensor([4, 7])
    alone, chain = TokenTree.root_only(root), TokenTree.chain(root[:, None])
    for name in ("tokens", "parents", "depths", "ancestors"):
        mine, theirs = getattr(alone, name), getattr(chain, name)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
    assert alone.max_path == 1 and alone.q is None


@given(st.integers(1, 3), st.integers(2, 6), SEEDS)
@DRAWN
def test_measures_are_those_of_the_definitions(rows, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 2, vocab, generator=generator)
    logits[:, :, 0] = -torch.inf  # 0 * -inf is not 0
    tokens = torch.randint(1, vocab, (rows, 2), generator=generator)
    got = measure(logits.half(), tokens)
    assert got.shape == (rows, 2, 3) and got.dtype == torch.float32
    distribution = logits.half().double().softmax(-1)
    best = distribution.sort(-1, descending=True).values.log()
    entropy = torch.special.entr(distribution).sum(-1)
    wanted = torch.stack(
        (distribution.log().gather(-1, tokens[..., None])[..., 0], best[..., 0] - best[..., 1], entropy), -1
    )
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "distribution",
    [
        SamplingSettings(top_k=3),
        SamplingSettings(top_p=0.6),
        SamplingSettings(min_p=0.2),
        SamplingSettings(0.7, 4, 0.8, 0.1),
    ],
)
def test_a_distribution_is_of_each_node_by_itself(distribution):
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).half()
    alone = torch.stack([torch.stack([under_settings(node[None], distribution)[0] for node in row]) for row in scores])
    assert torch.equal(under_settings(scores, distribution), alone)


def test_a_distribution_without_settings_is_that_of_the_scores():
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(under_settings(scores, SamplingSettings()), scores) and not SamplingSettings().filters


@pytest.mark.parametrize(
    "scores, top_p, kept",
    [
        ([0.0, 0.0, 0.0, 0.0], 0.5, [2, 3]),
        ([0.0, 0.0, 0.0, 0.0], 0.51, [1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], 0.0, [3]),
        ([2.0, 0.0, 2.0, 0.0, 0.0], 0.85, [0, 2, 4]),
        ([2.0, 0.0, 2.0, 0.0, 0.0], 0.8, [0, 2]),
    ],
)
def test_top_p_takes_the_lowest_of_equal_tokens_away_while_their_mass_is_at_most_the_rest(scores, top_p, kept):
    """A mass of exactly 1 - top_p goes too. Of equal tokens the lowest ids go first, in nodes [B, N, V] as in a row."""
    row = torch.tensor(scores)
    for shape in ((), (1,), (2, 3)):
        got = under_settings(row.expand(*shape, -1), SamplingSettings(top_p=top_p)).view(-1, len(row))
        assert [node.isfinite().nonzero().flatten().tolist() for node in got] == [kept] * len(got)


def test_a_choice_under_a_distribution_is_the_distributions():
    scores, uniform, distribution = torch.randn(2, 5, 7), torch.rand(2, 5), SamplingSettings(top_k=2)
    assert torch.equal(
        choose(scores, uniform, TORCH, distribution), pick(under_settings(scores, distribution), uniform)
    )
    assert torch.equal(choose(scores, uniform, TORCH), pick(scores, uniform))
    assert torch.equal(choose(scores, None, TORCH, distribution), scores.argmax(-1))


def test_scores_along_a_path_are_written_where_its_nodes_stand():
    """Rows whose texts differ in length are processed apart, and their scores lie at the same step."""
    tree = TokenTree.chain(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    logits = torch.eye(VOCAB)[torch.tensor([1, 2, 0])].expand(2, -1, -1).half()
    seen: list[Any] = []

    def process(rows: list[int], ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        seen.append((rows, ids.tolist()))
        return scores * 2

    history = [torch.tensor([5, 0]), torch.tensor([0])]
    with ELSEWHERE:
        verdict, scores = walk_with_history(
            tree, logits, None, history, process, [9, 9], lambda row, picks: False, TORCH
        )
    assert torch.equal(scores, logits.float() * 2) and scores.dtype == torch.float32
    assert seen == [
        ([1], [[0]]),
        ([0], [[5, 0]]),
        ([1], [[0, 1]]),
        ([0], [[5, 0, 1]]),
        ([1], [[0, 1, 2]]),
        ([0], [[5, 0, 1, 2]]),
    ]
    assert (verdict.path.tolist(), verdict.accepted.tolist(), verdict.bonus.tolist()) == (
        [[0, 1, 2]] * 2,
        [2, 2],
        [0, 0],
    )


def test_ancestors_take_as_many_words_as_they_need():
    assert [ancestor_words(torch.zeros(1, nodes, dtype=torch.long), nodes).shape[2] for nodes in (1, 64, 65, 129)] == [
        1,
        1,
        2,
        3,
    ]


def test_ops_make_their_tensors_where_what_they_are_given_lies():
    """All that verifies and commits, once as it is and once with another default device."""
    generator, rows = torch.Generator().manual_seed(0), 2
    tree = drawn_tree(rows, 5, generator)
    scores, uniform = torch.randn(rows, 5, VOCAB, generator=generator), torch.rand(rows, 5, generator=generator)
    picks, states = (
        torch.randint(0, VOCAB, (rows, 5), generator=generator),
        torch.randn(rows, 5, 4, generator=generator),
    )
    path, accepted, active = torch.tensor([[0, 1, 3], [0, 2, 2]]), torch.tensor([2, 1]), torch.tensor([True, False])
    empty = torch.zeros(2, 2, rows, 4, 9, 4)

    def everything() -> list[Any]:
        lengths, root, caches = accepted.clone(), accepted.clone(), empty.clone()
        heads = states[:, :, None].expand(-1, -1, 4, -1)
        cache_write(caches[0, 0], caches[1, 0], heads, -heads, picks + 5)
        moves = TORCH.commit_slots(lengths, path, accepted, active, 8)
        kv_block_copy(*caches, *moves)
        drawn = walk_drawn(tree, scores, scores.softmax(-1), uniform, TORCH)
        last = states[:, 0].clone(), states[:, 1].clone()
        TORCH.keep_last(states, -states, accepted, *last, lengths, 9)
        pairs = TORCH.path_pairs(states, path, accepted, accepted, active, root, lengths)
        read = TORCH.tree_input(tree.tokens, tree.depths, lengths, 7, states[0])
        walked = (
            posterior_walk(tree.tokens, tree.parents, picks, 4),
            categorical(scores, uniform),
            ancestor_words(tree.parents, 5),
        )
        made = TokenTree.from_parents(tree.tokens, tree.parents), TokenTree.chain(picks), TokenTree.root_only(root)
        trees = [(t.tokens, t.parents, t.depths, t.ancestors) for t in made]
        return [
            caches,
            moves,
            lengths,
            drawn.path,
            drawn.accepted,
            drawn.bonus,
            last,
            pairs,
            root,
            read,
            *walked,
            *trees,
        ]

    want = everything()
    with ELSEWHERE:
        got = everything()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
