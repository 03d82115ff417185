"""The small launches of a round against their references: they move and count whole numbers and copy states, so all is
exact."""

from __future__ import annotations

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.cache.commit import commit_slots, emit
from fastspec.kernels.drafting import pairs as drafting_pairs
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.drafting.inputs import tree_input
from fastspec.kernels.drafting.pairs import keep_last, keep_pair, path_pairs

DRAWN = examples(30)
SEEDS = st.integers(0, 2**31)
ROWS, PATHS, NODES = st.integers(1, 4), st.sampled_from([1, 2, 7, 8, 9, 33]), st.sampled_from([1, 2, 60, 65])


class poisoned:
    """Fills what torch.empty gives with NaN, or with the largest integer."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


class Round:
    """A verdict on trees of random tokens, which no walk need have made, as slices of wider tensors where `apart`."""

    def __init__(self, device: str, rows: int, steps: int, nodes: int, apart: bool, seed: int) -> None:
        self.generator, self.apart, self.device = torch.Generator().manual_seed(seed), apart, device
        self.path = self.whole((rows, steps), nodes)
        self.accepted, self.bonus, self.root = (
            self.whole((rows,), steps),
            self.whole((rows,), 2**40),
            self.whole((rows,), 2**40),
        )
        self.tokens = self.whole((rows, nodes), 2**40)
        self.lengths, self.active = (
            self.whole((rows,), 300),
            self.laid(torch.rand(rows, generator=self.generator) < 0.7),
        )

    def whole(self, shape: tuple[int, ...], below: int) -> Tensor:
        return self.laid(torch.randint(0, below, shape, generator=self.generator))

    def laid(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        return torch.stack((x, x.flip(0)), -1)[..., 0] if self.apart else x


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@EVERYWHERE
@given(ROWS, PATHS, NODES, st.booleans(), st.integers(0, 400), SEEDS)
@DRAWN
def test_commit_slots(device, rows, steps, nodes, apart, bound, seed):
    drawn = Round(device, rows, steps, nodes, apart, seed)
    before = drawn.lengths.clone()
    wanted = cache_reference.commit_slots(before, drawn.path, drawn.accepted, drawn.active, bound)
    given_lengths = drawn.lengths.tolist()
    with poisoned():
        got = commit_slots(drawn.lengths, drawn.path, drawn.accepted, drawn.active, bound)
    for a, b in zip((*got, drawn.lengths), (*wanted, before), strict=True):
        same(a, b)
    for row, length in enumerate(given_lengths):  # the reference itself
        assert got[0][row].tolist() == [length + node for node in drawn.path[row].tolist()]
        assert got[1][row].tolist() == list(range(length, length + steps))
        emitted = int(drawn.accepted[row]) + 1 if drawn.active[row] else 0
        assert int(before[row]) == min(bound, length + emitted)


@EVERYWHERE
@given(ROWS, PATHS, NODES, st.booleans(), SEEDS)
@DRAWN
def test_emit(device, rows, steps, nodes, apart, seed):
    drawn = Round(device, rows, steps, nodes, apart, seed)
    given_root = drawn.root.tolist()
    verdict = drawn.tokens, drawn.path, drawn.accepted, drawn.bonus, drawn.active
    root = drawn.root.clone()
    wanted = cache_reference.emit(*verdict, root)
    with poisoned():
        got = emit(*verdict, drawn.root)
    same(got, wanted)
    same(drawn.root, root)
    for row, old in enumerate(given_root):  # the reference itself
        accepted, path = int(drawn.accepted[row]), drawn.path[row].tolist()
        emitted = [int(drawn.tokens[row, node]) for node in path[1 : accepted + 1]]
        assert got[row, : accepted + 2].tolist() == [accepted, *emitted, int(drawn.bonus[row])]
        assert int(root[row]) == (int(drawn.bonus[row]) if drawn.active[row] else old)


@EVERYWHERE
@given(ROWS, PATHS, NODES, st.booleans(), SEEDS)
@DRAWN
def test_emit_says_which_rows_have_no_token(device, rows, steps, nodes, apart, seed):
    """The host reads it; what goes on upon the device is token 0."""
    drawn = Round(device, rows, steps, nodes, apart, seed)
    missing = torch.arange(rows, device=device) % 2 == seed % 2
    drawn.bonus.masked_fill_(missing, -1)
    bonus, root = drawn.bonus.clone(), drawn.root.clone()
    wanted = cache_reference.emit(drawn.tokens, drawn.path, drawn.accepted, bonus, drawn.active, root)
    got = emit(drawn.tokens, drawn.path, drawn.accepted, drawn.bonus, drawn.active, drawn.root)
    for each in (got, wanted):
        assert torch.equal(each[:, 0], torch.where(missing, -1 - drawn.accepted, drawn.accepted))
        assert (each[:, 1:] >= 0).all()
    same(got, wanted)
    same(drawn.bonus, bonus)
    same(drawn.root, root)
    assert (drawn.bonus >= 0).all() and (drawn.root[missing & drawn.active] == 0).all()


@EVERYWHERE
def test_emit_of_trees_of_roots_alone(device):
    """Whose tokens are the memory that the next roots are written to."""
    drawn = Round(device, 3, 1, 1, False, 0)
    root, zero = drawn.root.clone(), torch.zeros_like(drawn.root)
    got = emit(drawn.root[:, None], zero[:, None], zero, drawn.bonus, drawn.active, drawn.root)
    assert torch.equal(got, torch.stack((zero, drawn.bonus), 1))
    assert torch.equal(drawn.root, torch.where(drawn.active, drawn.bonus, root))


DTYPES = st.sampled_from([torch.float32, torch.float16])
SIZES = st.sampled_from([1, 7, 64, 65, 130])


@EVERYWHERE
@given(
    *(ROWS, PATHS, NODES, SIZES, DTYPES, st.booleans(), st.sampled_from([None, torch.float32, torch.float16])),
    st.booleans(),
    SEEDS,
)
@DRAWN
def test_path_pairs(device, rows, steps, nodes, size, dtype, apart, kept, hears, seed):
    drawn = Round(device, rows, steps, nodes, apart, seed)
    features = torch.randn(rows, nodes, size + 3 * apart, generator=drawn.generator).to(device, dtype)[..., :size]
    verdict = drawn.path, drawn.accepted, drawn.bonus, drawn.active
    outs = (
        None
        if kept is None
        else (torch.full((rows, steps, size), torch.nan, dtype=kept, device=device), drawn.whole((rows,), 9))
    )
    root, given_root = drawn.root.clone(), drawn.root.tolist()
    copies = None if outs is None else tuple(x.clone() for x in outs)
    tokens, counted = drawn.whole((rows, steps), 5), torch.full((5,), 3, device=device)  # few, so that some are equal
    heard, known = ((tokens, each, 1024) if hears else None for each in (counted, counted.clone()))
    wanted = drafting_reference.path_pairs(features, *verdict, root, drawn.lengths, copies, known)
    with poisoned(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_pairs, "PAIR_BLOCK", 64)
        got = path_pairs(features, *verdict, drawn.root, drawn.lengths, outs, heard)
    for a, b in zip((*got, drawn.root), (*wanted, root), strict=True):
        same(a, b)
    if heard is not None and known is not None:
        same(heard[1], known[1])
    if outs is not None:
        assert got[0] is outs[0] and got[1] is outs[1]
    for row in range(rows):  # the reference itself
        active, path = bool(drawn.active[row]), drawn.path[row].tolist()
        assert all(torch.equal(wanted[0][row, i], features[row, node].to(kept or dtype)) for i, node in enumerate(path))
        assert int(wanted[1][row]) == (int(drawn.accepted[row]) + 1 if active else 0)
        assert wanted[2][row].tolist() == [int(drawn.lengths[row]) + i for i in range(steps)]
        assert int(root[row]) == (int(drawn.bonus[row]) if active else given_root[row])
    real = [token for row in range(rows) for token in tokens[row, : int(wanted[1][row])].tolist()]
    assert known is None or known[1].tolist() == [3 + 1024 * real.count(token) for token in range(5)]


@EVERYWHERE
@given(ROWS, st.integers(1, 9), SIZES, DTYPES, st.booleans(), st.integers(0, 400), SEEDS)
@DRAWN
def test_keep_last(device, rows, pairs, size, dtype, apart, bound, seed):
    drawn = Round(device, rows, 1, 1, apart, seed)
    hidden, readout = (
        torch.randn(rows, pairs, size + 5 * apart, generator=drawn.generator).to(device, dtype)[..., :size]
        for _ in "hr"
    )
    counts = drawn.whole((rows,), pairs + 1)
    last = [torch.randn(rows, size, generator=drawn.generator).to(device, dtype) for _ in range(2)]
    kept, lengths, given_lengths = [x.clone() for x in last], drawn.lengths.clone(), drawn.lengths.tolist()
    drafting_reference.keep_last(hidden, readout, counts, *kept, lengths, bound)
    for row, count in enumerate(counts.tolist()):  # the reference itself
        for after, before, states in zip(kept, last, (hidden, readout), strict=True):
            assert torch.equal(after[row], states[row, count - 1] if count else before[row])
        assert int(lengths[row]) == min(bound, given_lengths[row] + count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_pairs, "PAIR_BLOCK", 64)
        keep_last(hidden, readout, counts, *last, drawn.lengths, bound)
    for a, b in zip((*last, drawn.lengths), (*kept, lengths), strict=True):
        same(a, b)


@EVERYWHERE
@given(ROWS, NODES, SIZES, DTYPES, st.sampled_from([torch.float32, torch.float16]), st.booleans(), PATHS, SEEDS)
@DRAWN
def test_keep_pair(device, rows, nodes, size, dtype, kept, apart, capacity, seed):
    """Rows that are not active, or have no place left, keep what they have."""
    drawn = Round(device, rows, 1, nodes, apart, seed)
    features = torch.randn(rows, nodes, size + 3 * apart, generator=drawn.generator).to(device, dtype)[..., :size]
    counts = drawn.whole((rows,), capacity + 1)
    held = torch.randn(rows, capacity, size, generator=drawn.generator).to(device, kept)
    tokens = drawn.whole((rows, capacity), 9).contiguous()
    wanted = counts.clone(), held.clone(), tokens.clone()
    drafting_reference.keep_pair(features, drawn.bonus, drawn.active, *wanted)
    for row, count in enumerate(counts.tolist()):  # the reference itself
        takes, others = bool(drawn.active[row]) and count < capacity, torch.arange(capacity, device=device) != count
        assert int(wanted[0][row]) == count + takes
        assert torch.equal(wanted[1][row][others], held[row][others])
        assert torch.equal(wanted[2][row][others], tokens[row][others])
        if takes:
            assert torch.equal(wanted[1][row, count], features[row, 0].to(kept))
            assert int(wanted[2][row, count]) == int(drawn.bonus[row])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting_pairs, "ROOT_BLOCK", 64)
        keep_pair(features, drawn.bonus, drawn.active, counts, held, tokens)
    for a, b in zip((counts, held, tokens), wanted, strict=True):
        same(a, b)


@EVERYWHERE
@given(
    ROWS, NODES, st.sampled_from([None, *range(1, 4), 64, 130, 4097]), DTYPES, st.booleans(), st.integers(0, 400), SEEDS
)
@DRAWN
def test_tree_input(device, rows, nodes, size, dtype, apart, last, seed):
    drawn = Round(device, rows, 1, nodes, apart, seed)
    tokens, depths = drawn.whole((rows, nodes), 19), drawn.whole((rows, nodes), nodes)
    table = (
        None if size is None else torch.randn(19, size + apart, generator=drawn.generator).to(device, dtype)[:, :size]
    )
    with poisoned():
        got = tree_input(tokens, depths, drawn.lengths, last, table)
    wanted = drafting_reference.tree_input(tokens, depths, drawn.lengths, last, table)
    assert got[2] is wanted[2] is None if table is None else torch.equal(got[2], wanted[2])
    for a, b in zip(got[:2], wanted[:2], strict=True):
        same(a, b)
    for row, length in enumerate(drawn.lengths.tolist()):  # the reference itself
        assert wanted[0][row].tolist() == [min(last, length + depth) for depth in depths[row].tolist()]
        assert wanted[1][row].tolist() == list(range(length, length + nodes))
        assert table is None or all(
            torch.equal(wanted[2][row, i], table[token]) for i, token in enumerate(tokens[row].tolist())
        )


def test_what_does_not_fit_is_refused():
    drawn = Round("cpu", 3, 2, 4, False, 0)
    with pytest.raises(ValueError, match=r"commit_slots: lengths is \[3\] torch.int32.*accepted is \[3\] torch.int64"):
        commit_slots(drawn.lengths.int(), drawn.path, drawn.accepted, drawn.active, 9)
    with pytest.raises(ValueError, match=r"commit_slots: active is \[3\] torch.int64.*accepted is \[3\] torch.bool"):
        commit_slots(drawn.lengths, drawn.path, drawn.accepted, drawn.active.long(), 9)
    with pytest.raises(ValueError, match=r"emit: root is \[2\] torch.int64.*accepted is \[3\] torch.int64"):
        emit(drawn.tokens, drawn.path, drawn.accepted, drawn.bonus, drawn.active, drawn.root[:2])
    features, verdict = torch.zeros(3, 4, 8), (drawn.path, drawn.accepted, drawn.bonus, drawn.active)
    with pytest.raises(ValueError, match=r"path_pairs: features is \[3, 4, 8\] .* with a contiguous last dimension"):
        path_pairs(torch.zeros(3, 8, 4).transpose(1, 2), *verdict, drawn.root, drawn.lengths)
    with pytest.raises(ValueError, match=r"path_pairs: root is \[3\] torch.int32"):
        path_pairs(features, *verdict, drawn.root.int(), drawn.lengths)
    with pytest.raises(ValueError, match=r"path_pairs: out is \[3, 3, 8\].*accepted is \[3, 2, 8\], contiguous"):
        path_pairs(features, *verdict, drawn.root, drawn.lengths, (torch.zeros(3, 3, 8), drawn.accepted))
    with pytest.raises(ValueError, match=r"keep_last: counts is \[2\] torch.int64.*accepted is \[3\]"):
        keep_last(features, features, drawn.accepted[:2], features[:, 0], features[:, 0], drawn.lengths, 9)
    with pytest.raises(
        ValueError, match=r"keep_last: last_readout is \[3, 8\].*strides \(32, 1\); accepted is \[3, 8\], contiguous"
    ):
        keep_last(features, features, drawn.accepted, torch.zeros(3, 8), features[:, 0], drawn.lengths, 9)
    held, tokens = torch.zeros(3, 5, 8), torch.zeros(3, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"keep_pair: features is \[3, 4, 8\] .* with a contiguous last"):
        keep_pair(torch.zeros(3, 8, 4).transpose(1, 2), drawn.bonus, drawn.active, drawn.accepted, held, tokens)
    with pytest.raises(ValueError, match=r"keep_pair: counts is \[2\] torch.int64"):
        keep_pair(features, drawn.bonus, drawn.active, drawn.accepted[:2], held, tokens)
    with pytest.raises(ValueError, match=r"keep_pair: held is \[3, 5, 7\].*accepted is \[3, 5, 8\]"):
        keep_pair(features, drawn.bonus, drawn.active, drawn.accepted, held[..., :7], tokens)
    with pytest.raises(
        ValueError, match=r"tree_input: depths is \[3, 3\] torch.int64.*accepted is \[3, 4\] torch.int64"
    ):
        tree_input(drawn.tokens, drawn.tokens[:, :3], drawn.lengths, 9, None)
    with pytest.raises(
        ValueError, match=r"tree_input: table is \[8, 4\] .*\(1, 8\); accepted is \[V, H\], with a cont"
    ):
        tree_input(drawn.tokens, drawn.tokens, drawn.lengths, 9, torch.zeros(4, 8).t())
