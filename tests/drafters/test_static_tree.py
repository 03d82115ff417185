"""EAGLE-1's static trees (arXiv 2401.15077): which nodes, which tokens, what they were drawn from, computed without any
cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.head_variants import EXACT, drawn, forward, head_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastspec
from fastspec import Eagle1, Unsupported
from fastspec.config import part_of, shape_of
from fastspec.generation.drafters.head_drafter import StaticDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.attention import reference as attention_reference
from fastspec.patches.backends import TORCH

Paths = tuple[tuple[int, ...], ...]
PUBLISHED = Eagle1().tree()


@st.composite
def path_trees(draw: st.DrawFn) -> Paths:
    """Trees of up to ten nodes below the root, with gaps between the ranks."""
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 10))):
        child = (*draw(st.sampled_from(nodes)), draw(st.integers(0, 6)))
        nodes += [child] if child not in nodes else []
    return Eagle1(nodes[1:]).tree()


@torch.no_grad()
def states(
    head: Any, ids: list[int], features: Tensor, paths: Paths, tokens: list[int]
) -> dict[tuple[int, ...], Tensor]:
    """What the head says after ids [T + 1] with features [T, F] and the drafts of every inner node: logits [V_d], a run
    per node."""
    nodes, fused = [(), *paths], head.fuse(features[None])[0]
    out: dict[tuple[int, ...], Tensor] = {}
    for node in sorted({path[:-1] for path in paths}, key=len):
        text = ids[1:] + [tokens[nodes.index(node[:end])] for end in range(1, len(node) + 1)]
        hidden = torch.cat([fused, *(out[node[:end]][None] for end in range(len(node)))])
        out[node] = forward(head, text, hidden, list(range(len(text))), torch.ones(len(text), len(text)).tril().bool())[
            -1
        ]
    return {node: head.logits(state) for node, state in out.items()}


def check(head: Any, ids: list[int], features: Tensor, paths: Paths, tree: TokenTree, row: int) -> None:
    """A row's tree has the nodes of `paths`, each the likeliest token of its rank."""
    tokens, nodes = tree.tokens[row].tolist(), [(), *paths]
    logits = states(head, ids, features, paths, tokens)
    assert tokens[0] == ids[-1]
    assert tree.parents[row].tolist() == [0, *(nodes.index(path[:-1]) for path in paths)]
    assert tree.depths[row].tolist() == [len(path) for path in nodes]
    for node, path in enumerate(paths, 1):
        assert tokens[node] == int(head.to_target(logits[path[:-1]].topk(path[-1] + 1).indices)[-1])


def begun(
    head: Any, paths: Paths, ids: Tensor, features: Tensor, counts: list[int], process: Any = None
) -> StaticDrafter:
    drafter = StaticDrafter(BoundHead.of(head), paths, rows=len(counts), capacity=64, ops=TORCH, process=process)
    lengths = torch.tensor(counts)
    drafter.begin(ids[:, : max(counts)], lengths, features[:, : max(counts)], ids.gather(1, lengths[:, None])[:, 0])
    return drafter


def test_the_published_tree():
    assert len(PUBLISHED) == 25
    assert [sum(len(path) == depth for path in PUBLISHED) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    inner = {path[:-1] for path in PUBLISHED}
    assert len(inner) == 11 and sum(path not in inner for path in PUBLISHED) == 15
    ids, features = drawn(head_of("eagle"), 2, 40, 3)
    drafter = begun(head_of("eagle"), PUBLISHED, ids, features, [33, 7])
    assert (drafter.nodes, drafter.max_path, drafter.grown) == (26, 6, 10)
    passes = []
    step = drafter._step
    drafter._step = lambda tokens, *rest: passes.append(tokens.shape[1]) or step(tokens, *rest)  # type: ignore[method-assign]
    with torch.no_grad():
        tree = drafter.propose(33)
    assert passes == [4, 4, 1, 1]  # the root's children came from the pass over the prompt
    for row, count in enumerate((33, 7)):
        check(head_of("eagle"), ids[row, : count + 1].tolist(), features[row, :count], PUBLISHED, tree, row)


@pytest.mark.parametrize("variant", ["eagle", "eagle of two layers", "small vocabulary"])
@given(paths=path_trees(), counts=st.lists(st.integers(1, 13), min_size=1, max_size=3), seed=st.integers(0, 99))
@EXACT
@torch.no_grad()
def test_children_are_the_likeliest_tokens_of_their_rank(variant, paths, counts, seed):
    head = head_of(variant)
    ids, features = drawn(head, len(counts), 14, seed)
    tree = begun(head, paths, ids, features, counts).propose(max(counts))
    assert torch.equal(TokenTree.from_parents(tree.tokens, tree.parents).ancestors, tree.ancestors)
    for row, count in enumerate(counts):
        check(head, ids[row, : count + 1].tolist(), features[row, :count], paths, tree, row)


@given(paths=path_trees(), nodes=st.integers(2, 30), seed=st.integers(0, 99))
@EXACT
@torch.no_grad()
def test_a_part_of_a_tree_is_one_and_drafts_its_tokens_on_the_same_state(paths, nodes, seed):
    part = part_of(paths, nodes)
    assert len(part) == min(nodes - 1, len(paths)) and {path[:-1] for path in part} <= {(), *part}
    assert shape_of(part).total_tokens == 1 + len(part) and shape_of(part).max_path == 1 + max(map(len, part))
    ids, features = drawn(head_of("eagle"), 2, 14, seed)
    drafter = begun(head_of("eagle"), paths, ids, features, [5, 9])
    whole, other = drafter.propose(9), drafter.sized(shape_of(part))
    tree = other.propose(9)
    for row, count in enumerate((5, 9)):
        check(head_of("eagle"), ids[row, : count + 1].tolist(), features[row, :count], part, tree, row)
    assert other.root is drafter.root and other.state is drafter.state
    assert torch.equal(drafter.propose(9).tokens, whole.tokens)


def test_a_device_s_own_static_tree_has_parts_of_six_sizes_at_most_with_none():
    for kind in ("cpu", "cuda"):
        shapes, first = Eagle1().steps(kind)
        assert [shape.total_tokens for shape in shapes] == [2, 4, 8, 16, 26] and first == shapes[-1]
        assert [shape.max_path for shape in shapes] == [2, 4, 6, 6, 6]
    assert part_of(PUBLISHED, 4) == ((0,), (0, 0), (0, 0, 0))
    assert Eagle1().is_default and not any(
        each.is_default for each in (Eagle1(drafts="sampled"), Eagle1(paths=[[0], [0, 0]]))
    )


@given(
    paths=path_trees(),
    ends=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
@EXACT
@torch.no_grad()
def test_rounds_draft_from_the_true_text_so_far(paths, ends, seed):
    head, counts = head_of("eagle"), [3, 8]
    ids, features = drawn(head, 2, 60, seed)
    drafter = begun(head, paths, ids, features, counts)
    held = {name: getattr(drafter, name).data_ptr() for name in ("last", "root")} | {
        "lengths": drafter.state.lengths.data_ptr()
    }
    texts = [ids[row, : count + 1].tolist() for row, count in enumerate(counts)]
    truths = [features[row, :count] for row, count in enumerate(counts)]
    generator = torch.Generator().manual_seed(seed)
    nodes = [(), *paths]
    for turn in range(3):
        tree = drafter.propose(max(map(len, texts)))
        told = torch.randn(2, len(nodes), 64, generator=generator)
        bonus, chosen, active = torch.randint(0, 97, (2,), generator=generator), [], []
        for row in range(2):
            end, runs = ends[2 * turn + row]
            last = nodes[end % len(nodes)]
            path = [nodes.index(last[:step]) for step in range(len(last) + 1)]
            chosen.append(path)
            active.append(runs)
            if runs:
                texts[row] += [*tree.tokens[row, path[1:]].tolist(), int(bonus[row])]
                truths[row] = torch.cat((truths[row], told[row, path]))
        full = torch.tensor([path + path[-1:] * (tree.max_path - len(path)) for path in chosen])
        verdict = Verdict(full, torch.tensor([len(path) - 1 for path in chosen]), bonus)
        drafter.observe(tree, verdict, told, told, torch.tensor(active), 40)
        tree = drafter.propose(max(map(len, texts)))
        for row in range(2):
            check(head, texts[row], truths[row], paths, tree, row)
    assert held == {name: getattr(drafter, name).data_ptr() for name in ("last", "root")} | {
        "lengths": drafter.state.lengths.data_ptr()
    }


def narrow(scores: Tensor) -> Tensor:
    """Temperature 2, then the three likeliest tokens: fewer than some nodes have children."""
    scores = scores / 2.0
    return scores.masked_fill(scores < scores.topk(3).values[:, -1:], -torch.inf)


@given(paths=path_trees(), counts=st.lists(st.integers(1, 13), min_size=1, max_size=3), seed=st.integers(0, 99))
@EXACT
@torch.no_grad()
def test_drawn_children_record_their_distribution(paths, counts, seed):
    """Distinct siblings, and q the head's processed distribution without the earlier ones; zeros once nothing is
    left."""
    head = head_of("eagle")
    ids, features = drawn(head, len(counts), 14, seed)
    torch.manual_seed(seed)
    tree = begun(head, paths, ids, features, counts, narrow).propose(max(counts))
    assert tree.q is not None and tree.q.shape == (len(counts), len(paths) + 1, 97)
    for row, count in enumerate(counts):
        tokens = tree.tokens[row].tolist()
        logits = states(head, ids[row, : count + 1].tolist(), features[row, :count], paths, tokens)
        left = {node: narrow(each[None])[0].softmax(-1) for node, each in logits.items()}
        for node, path in enumerate(paths, 1):
            rest = left[path[:-1]]
            want = rest / rest.sum() if bool(rest.any()) else rest
            # The head's states are sums of 64 to 128 terms in another order: some 1e-5 of a logit of size 10, and so of
            # a chance.
            torch.testing.assert_close(tree.q[row, node], want, rtol=1e-3, atol=1e-5)
            assert not bool(rest.any()) or rest[tokens[node]] > 0
            left[path[:-1]] = rest.index_fill(0, torch.tensor(tokens[node]), 0.0)


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a tensor on the host, or makes a shape depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("process", [None, narrow])
@torch.no_grad()
def test_a_draft_never_waits_for_the_host(process, monkeypatch):
    monkeypatch.setattr(attention_reference, "_is_spoiled", lambda out: False)  # a look that it takes on the CPU alone
    ids, features = drawn(head_of("eagle"), 2, 14, 0)
    drafter = begun(head_of("eagle"), PUBLISHED, ids, features, [5, 9], process)
    with NoWaiting():
        tree = drafter.propose(9)
        path = torch.zeros(2, tree.max_path, dtype=torch.long)
        verdict = Verdict(path, torch.tensor([0, 0]), torch.tensor([3, 4]))
        drafter.observe(tree, verdict, features, torch.zeros(2, 26, 64), torch.tensor([True, True]), 20)
    with NoWaiting(), pytest.raises(AssertionError):
        bool(ids.any())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": [[0], [1, 0]]}, r"\[1, 0\] has no parent: add \[1\]"),
        ({"paths": [[0, 0]]}, r"\[0, 0\] has no parent"),
        ({"paths": [[0], [1], [0]]}, r"\[0\] is named twice"),
        ({"paths": [[0], [-1]]}, r"path \[-1\]: rank must be a whole number of at least 0, not -1"),
        ({"paths": [[True]]}, "not True"),
        ({"paths": [[0.0]]}, r"not 0\.0"),
        ({"paths": [[0], [[1]]]}, r"not \[1\]"),
        ({"paths": ["01"]}, "not '0'"),
        ({"paths": [0, 1]}, "one path of child ranks per node"),
        ({"paths": 3}, "one path of child ranks per node"),
        ({"paths": []}, "names 0 nodes"),
        ({"paths": [[]]}, "empty path"),
        ({"paths": [[rank] for rank in range(256)]}, "names 256 nodes; between 1 and 255"),
        ({"drafts": "random"}, "'random'; accepted are 'greedy', 'sampled'"),
    ],
)
def test_trees_that_are_none_are_refused(options, message):
    with pytest.raises(Unsupported, match=message):
        Eagle1(**options)


def test_configs_compare_and_hash_as_values():
    assert Eagle1([[1], [0, 0], [0]]) == Eagle1(((0,), (1,), (0, 0))) != Eagle1()
    assert len({Eagle1([[0]]), Eagle1(((0,),)), Eagle1()}) == 2
    assert Eagle1([[1], [0, 0], [0]]).tree() == ((0,), (1,), (0, 0))
    assert fastspec.Eagle2(3, 2, 9) != fastspec.Eagle3(3, 2, 9)
    assert fastspec.Eagle2(3, 2, 9).shape("cpu") == fastspec.Eagle3(3, 2, 9).shape("cpu")
    with pytest.raises(Unsupported, match="Eagle2: top_k"):
        fastspec.Eagle2(top_k=0)
