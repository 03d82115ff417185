"""The EAGLE drafter against the published algorithm (EAGLE-2, arXiv 2406.16858, section 4), computed without any
cache."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.head_variants import EXACT, VARIANTS, drawn, forward, head_of
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation import target
from fastspec.generation.drafters import head_drafter
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH, counted


@torch.no_grad()
def published(
    head: Any, ids: list[int], features: Tensor, shape: fastspec.TreeShape
) -> tuple[list[int], list[int], list[int]]:
    """tokens, parents, depths of the tree after ids [T + 1] with features [T, F]; every level runs the whole text
    anew."""
    k, length = shape.top_k, len(ids) - 1
    fused = head.fuse(features[None])[0]
    prefix = torch.ones(length, length).tril().bool()
    last = forward(head, ids[1:], fused, list(range(length)), prefix)[-1]

    def expand(state: Tensor) -> list[tuple[float, int]]:
        logp, draft = head.logits(state).log_softmax(-1).topk(k)
        return list(zip(logp.tolist(), head.to_target(draft).tolist(), strict=True))

    # candidates in the order of growth: (score, token, parent's index or None, depth)
    grown: list[tuple[float, int, int | None, int]] = [(score, token, None, 1) for score, token in expand(last)]
    level, states = list(range(k)), dict.fromkeys(range(k), last)  # the state that a node is fed with
    fed: list[int] = []
    for depth in range(shape.depth):
        fed += level
        mask = torch.zeros(length + len(fed), length + len(fed), dtype=torch.bool)
        mask[:length, :length] = prefix
        for place, node in enumerate(fed):
            mask[length + place, :length] = True
            up: int | None = node
            while up is not None:
                mask[length + place, length + fed.index(up)] = True
                up = grown[up][2]
        tokens = ids[1:] + [grown[node][1] for node in fed]
        hidden = torch.cat((fused, torch.stack([states[node] for node in fed])))
        positions = list(range(length)) + [length + grown[node][3] - 1 for node in fed]
        out = dict(zip(fed, forward(head, tokens, hidden, positions, mask)[length:], strict=True))
        first = len(grown)
        for node in level:
            for score, token in expand(out[node]):
                states[len(grown)] = out[node]
                grown.append((grown[node][0] + score, token, node, depth + 2))
        level = sorted(range(first, len(grown)), key=lambda i: -grown[i][0])[:k]
    kept = sorted(sorted(range(len(grown)), key=lambda i: -grown[i][0])[: shape.total_tokens - 1])
    place = {None: 0} | {node: i + 1 for i, node in enumerate(kept)}
    parents = [place[grown[node][2]] for node in kept]
    return [ids[-1], *(grown[n][1] for n in kept)], [0, *parents], [0, *(grown[n][3] for n in kept)]


def shapes() -> st.SearchStrategy[fastspec.TreeShape]:
    def sized(top_k: int, depth: int) -> st.SearchStrategy[fastspec.TreeShape]:
        most = min(256, top_k + depth * top_k**2 + 1)
        return st.integers(2, most).map(lambda n: fastspec.TreeShape(total_tokens=n, depth=depth, top_k=top_k))

    return st.tuples(st.integers(1, 6), st.integers(0, 4)).flatmap(lambda pair: sized(*pair))


def row_of(tree: TokenTree, row: int) -> tuple[list[int], list[int], list[int]]:
    return tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depths[row].tolist()


IN_ONE_LAUNCH = "plain", "small vocabulary", "norm_output"
"""The variants that the Triton backend runs."""
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a CUDA device")
FRONTIERS = given(
    shape=shapes(),
    rows=st.integers(1, 3),
    length=st.sampled_from([1, 2, 7, 33]),
    apart=st.booleans(),
    seed=st.integers(0, 99),
)


def check_frontier(
    backend: str, variant: str, shape: fastspec.TreeShape, rows: int, length: int, apart: bool, seed: int
) -> None:
    """From features as one tensor, or `apart`, as one for each of the low, mid and high taps."""
    head = head_of(variant)
    ids, features = drawn(head, rows, length + 1, seed)
    given = features[:, :length]
    taps = given.chunk(max(1, len(head.config.taps)), -1) if apart else given
    tree = fastspec.frontier_generate(head, ids, taps, shape=shape, backend=backend)
    for row in range(rows):
        assert row_of(tree, row) == published(head, ids[row].tolist(), features[row, :length], shape)
    rebuilt = TokenTree.from_parents(tree.tokens, tree.parents)
    assert torch.equal(rebuilt.ancestors, tree.ancestors)
    assert rebuilt.max_path <= tree.max_path == shape.max_path


@pytest.mark.parametrize("variant", VARIANTS)
@FRONTIERS
@EXACT
def test_frontier_generate_is_the_published_algorithm(variant, shape, rows, length, apart, seed):
    check_frontier("torch", variant, shape, rows, length, apart, seed)


@INTERPRETED
@pytest.mark.parametrize("variant", IN_ONE_LAUNCH)
@FRONTIERS
@examples(
    2, derandomize=True, phases=[Phase.generate]
)  # the interpreter is slow, and slower where an example is shrunk
def test_frontier_generate_in_one_launch_is_too(variant, shape, rows, length, apart, seed):
    check_frontier("triton", variant, shape, rows, length, apart, seed)


def test_the_default_tree_has_the_published_size():
    head = head_of("plain")
    ids, features = drawn(head, 1, 65, 0)
    tree = fastspec.frontier_generate(head, ids, features[:, :64])
    assert tree.tokens.shape == (1, 60)
    assert row_of(tree, 0) == published(head, ids[0].tolist(), features[0, :64], fastspec.TreeShape(60, 7, 10))


def begun(
    head: Any, shape: fastspec.TreeShape, ids: Tensor, features: Tensor, counts: list[int], capacity: int = 64
) -> EagleDrafter:
    """A drafter over rows of `counts` prompt tokens, each followed by its root; what lies behind is noise."""
    drafter = EagleDrafter(BoundHead.of(head), shape, rows=len(counts), capacity=capacity, ops=TORCH)
    lengths = torch.tensor(counts)
    drafter.begin(ids[:, : max(counts)], lengths, features[:, : max(counts)], ids.gather(1, lengths[:, None])[:, 0])
    return drafter


@pytest.mark.parametrize("skimmed", [1, 15, head_drafter.SKIMMED])
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("variant", ["plain", "two layers", "eagle"])
@torch.no_grad()
def test_rows_of_different_lengths(variant, chunk, skimmed, monkeypatch):
    """Read whole, or but for keys and values their last pairs alone, where a part has `skimmed` tokens of all rows."""
    monkeypatch.setattr(target, "NARROW", chunk)
    monkeypatch.setattr(head_drafter, "SKIMMED", skimmed)
    head, shape, counts = head_of(variant), fastspec.TreeShape(total_tokens=12, depth=3, top_k=3), [1, 13, 6]
    ids, features = drawn(head, 3, 20, 4)
    tree = begun(head, shape, ids, features, counts).propose(13)
    for row, count in enumerate(counts):
        assert row_of(tree, row) == published(head, ids[row, : count + 1].tolist(), features[row, :count], shape)


@pytest.mark.parametrize(("variant", "fed"), [("plain", 1), ("eagle", 1), ("two layers", 20)])
@torch.no_grad()
def test_a_prompt_s_last_pair_alone_attends_where_the_head_has_one_layer(variant, fed, monkeypatch):
    monkeypatch.setattr(head_drafter, "SKIMMED", 40)
    seen = []

    def attention(q: Tensor, *more: Any, **named: Any) -> Tensor:
        seen.append(q.shape[1])
        return TORCH.tree_attention(q, *more, **named)

    ids, features = drawn(head_of(variant), 2, 20, 0)
    for rows, wanted in ((2, fed), (1, 20)):  # 40 tokens, and 20
        drafter = EagleDrafter(
            BoundHead.of(head_of(variant)),
            fastspec.TreeShape(4, 2, 1),
            rows=rows,
            capacity=64,
            ops=replace(TORCH, tree_attention=attention),
        )
        drafter.begin(ids[:rows, :20], torch.tensor([20, 3])[:rows], features[:rows, :20], ids[:rows, 0])
        assert set(seen) == {wanted}
        seen.clear()


@pytest.mark.parametrize("variant", ["plain", "two layers", "norm_output", "eagle"])
@given(
    shape=shapes(),
    accepted=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
@EXACT
def test_observing_is_like_beginning_with_the_longer_text(variant, shape, accepted, seed):
    """After rounds of drawn verdicts every row drafts from the true text so far; rows that were not active stay where
    they were."""
    head, counts = head_of(variant), [3, 8]
    ids, features = drawn(head, 2, 60, seed)
    with torch.no_grad():
        drafter = begun(head, shape, ids, features, counts)
        texts = [ids[row, : count + 1].tolist() for row, count in enumerate(counts)]
        truths = [features[row, :count] for row, count in enumerate(counts)]
        generator = torch.Generator().manual_seed(seed)
        for turn in range(3):
            tree = drafter.propose(max(map(len, texts)))
            told = torch.randn(2, shape.total_tokens, features.shape[2], generator=generator)
            paths, active = [], []
            for row in range(2):
                steps, runs = accepted[2 * turn + row]
                path = [0]
                while len(path) <= steps and (
                    below := [c for c in range(1, shape.total_tokens) if tree.parents[row, c] == path[-1]]
                ):
                    path.append(below[-1])
                paths.append(path)
                active.append(runs)
            bonus = torch.randint(0, 97, (2,), generator=generator)
            for row in (r for r in range(2) if active[r]):
                texts[row] += [*tree.tokens[row, paths[row][1:]].tolist(), int(bonus[row])]
                truths[row] = torch.cat((truths[row], told[row, paths[row]]))
            full = torch.tensor([p + [p[-1]] * (shape.max_path - len(p)) for p in paths])
            verdict = Verdict(full, torch.tensor([len(p) - 1 for p in paths]), bonus)
            drafter.observe(tree, verdict, told, told, torch.tensor(active), 40)
            tree = drafter.propose(max(map(len, texts)))
            for row in range(2):
                assert row_of(tree, row) == published(head, texts[row], truths[row], shape)


def test_every_level_that_a_tree_grows_is_marked():
    head, shape = head_of("plain"), fastspec.TreeShape(total_tokens=9, depth=2, top_k=3)
    ids, features = drawn(head, 1, 5, 0)
    drafter, marks = EagleDrafter(BoundHead.of(head), shape, rows=1, capacity=32, ops=TORCH), []
    drafter.begin(ids[:, :4], torch.tensor([4]), features[:, :4], ids[:, 4])
    drafter.mark = marks.append
    drafter.propose(4)
    assert marks == ["draft 0", "draft 1", "draft 2"]


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return 1.5 * super().forward(ids)


def hooked(rows: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(rows, width)
    embedding.register_forward_hook(lambda module, args, out: 1.5 * out)
    return embedding


EMBEDDINGS = {
    "plain": nn.Embedding,
    "scaled": Scaled,
    "hooked": hooked,
    "of another dtype": partial(nn.Embedding, dtype=torch.float64),
    "renormed": partial(nn.Embedding, max_norm=3.0),
}


@pytest.mark.parametrize("variant", ["plain", "norm_output", "eagle"])
@pytest.mark.parametrize("kind", EMBEDDINGS)
@torch.no_grad()
def test_an_embedding_that_is_more_than_a_table_keeps_its_forward(kind, variant):
    torch.manual_seed(3)
    head, counts, shape = (
        copy.deepcopy(head_of(variant)),
        Counter[str](),
        fastspec.TreeShape(total_tokens=12, depth=3, top_k=3),
    )
    head.bind(EMBEDDINGS[kind](97, 64), head.bound.lm_head)
    ids, features = drawn(head, 2, 9, 5)
    lengths = torch.tensor([8, 3])
    drafter = EagleDrafter(BoundHead.of(head), shape, rows=2, capacity=64, ops=counted(TORCH, counts))
    drafter.begin(ids[:, :8], lengths, features[:, :8], ids.gather(1, lengths[:, None])[:, 0])
    tree = drafter.propose(8)
    for row, count in enumerate(lengths.tolist()):
        assert row_of(tree, row) == published(head, ids[row, : count + 1].tolist(), features[row, :count], shape)
    looked_up = kind == "plain" and variant != "eagle"
    assert (counts["head_input"], counts["frontier_input"], counts["next_frontier"]) == (
        (1, 3, 0) if looked_up else (0, 0, 3)
    )


@pytest.mark.parametrize(
    ("rows", "length", "width", "options"),
    [
        (0, 5, 192, {}),
        (1, 1, 192, {}),
        (1, 5, 64, {}),
        (1, 5, 192, {"backend": "cuda"}),
        (1, 5, 192, {"shape": fastspec.TreeShape(9, 1, 98)}),
    ],
)
def test_bad_input_is_refused(rows, length, width, options):
    with pytest.raises(Unsupported, match="frontier_generate"):
        ids, features = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length - 1, width)
        fastspec.frontier_generate(head_of("plain"), ids, features, **options)


def test_taps_that_are_apart_must_be_all_there():
    head = head_of("plain")
    ids, features = drawn(head, 1, 6, 0)
    with pytest.raises(Unsupported, match=r"features \(1, 5, 128\) do not fit.*192"):
        fastspec.frontier_generate(head, ids, features[:, :5].chunk(3, -1)[:2])


@INTERPRETED
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in IN_ONE_LAUNCH])
def test_a_head_that_one_launch_cannot_run_is_named_as_the_cause(variant):
    head = head_of(variant)
    ids, features = drawn(head, 1, 6, 0)
    with pytest.raises(Unsupported, match=r"one-layer EAGLE-3 heads.*this head is"):
        fastspec.frontier_generate(head, ids, features[:, :5], backend="triton", shape=fastspec.TreeShape(5, 1, 2))


@INTERPRETED
@pytest.mark.parametrize("kind", ["scaled", "hooked", "renormed", "LM head"])
def test_a_module_that_is_more_than_its_weight_is_not_read_in_one_launch(kind):
    """It is named as the cause."""
    head, shape = copy.deepcopy(head_of("plain")), fastspec.TreeShape(5, 1, 2)
    head.bind(EMBEDDINGS.get(kind, nn.Embedding)(97, 64), head.bound.lm_head)
    if kind == "LM head":
        head.lm_head.register_forward_hook(lambda module, args, out: -out)
    ids, features = drawn(head, 1, 6, 0)
    cause = "LM head" if kind == "LM head" else r"torch\.nn\.Embedding"
    with pytest.raises(Unsupported, match=rf'reads the .* of a plain {cause}.*: use backend="torch"'):
        fastspec.frontier_generate(head, ids, features[:, :5], backend="triton", shape=shape)


@INTERPRETED
def test_top_k_is_named_as_the_cause_where_it_is():
    head = head_of("plain")
    ids, features = drawn(head, 1, 6, 0)
    shape = fastspec.TreeShape(total_tokens=18, depth=0, top_k=17)
    with pytest.raises(Unsupported, match=r"up to 16 children.*top_k=17"):
        fastspec.frontier_generate(head, ids, features[:, :5], backend="triton", shape=shape)
    tree = fastspec.frontier_generate(head, ids, features[:, :5], shape=shape)
    assert row_of(tree, 0) == published(head, ids[0].tolist(), features[0, :5], shape)
