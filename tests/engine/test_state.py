"""The KV cache by itself: its buffers as they grow, the rows as they commit, join and leave, and the bridge to
transformers' caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.state import AttentionState
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec import Unsupported, devices
from fastspec.devices import memory_of
from fastspec.errors import FastSpecError
from fastspec.generation import sequence_state as module
from fastspec.generation.layer_state import FirstLayers, FullAttentionState, Moves
from fastspec.generation.sequence_state import SequenceState, SharedState
from fastspec.generation.tree import Verdict
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import SlotCache, export_span, import_past

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**31)
DRAWN = examples(30)
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others


def made(
    capacity: int, tail: int = 3, *, rows: int = 2, layers: int = 2, dtype: torch.dtype = torch.float32
) -> AttentionState:
    """Three key heads of size 5, so that no two dimensions are alike."""
    return AttentionState(layers, rows, 3, capacity, tail, 5, dtype)


def filled(cache: AttentionState, seed: int = 0) -> AttentionState:
    generator = torch.Generator().manual_seed(seed)
    for buffer in (cache.k, cache.v):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return cache


@pytest.mark.parametrize("first", [1, 4, 1024])
@given(capacity=st.integers(1, 40), tail=st.integers(1, 9), asked=st.lists(st.integers(1, 60), max_size=6))
@DRAWN
def test_buffers_double_up_to_the_calls_capacity(first, capacity, tail, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_SLOTS", first)
        cache = made(capacity, tail)
    bound = min(capacity, first)
    assert (cache.bound, cache.slots, cache.limit, cache.tail) == (bound, bound + tail, capacity, tail)
    for committed in asked:
        held = filled(cache).k.clone(), cache.v.clone()
        fits = min(committed, capacity) <= bound
        assert cache.fits(committed) == fits
        assert cache.reserve(committed) == min(committed, capacity)
        if not fits:
            bound = min(max(committed, 2 * bound), capacity)
        assert cache.bound == bound and cache.k.shape == cache.v.shape == (2, 2, 3, bound + tail, 5)
        for now, before in zip((cache.k, cache.v), held, strict=True):
            assert torch.equal(now[:, :, :, : before.shape[3]], before) and not now[:, :, :, before.shape[3] :].any()


def test_layers_hold_no_memory_until_a_call_reserves_some():
    layers = FullAttentionState(2, 4, 3, 5, dtype=torch.float16, device=CPU)
    assert layers.k.shape == layers.v.shape == (2, 4, 3, 0, 5) and layers.bytes(7) == 2 * 2 * 2 * 4 * 3 * 7 * 5
    layers.resize(7)
    assert layers.k.shape == layers.v.shape == (2, 4, 3, 7, 5) and layers.k.data_ptr() != layers.v.data_ptr()


def test_a_cache_keeps_its_dtype_as_it_grows_and_begins_again_with_empty_rows(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SLOTS", 2)
    cache = made(9, 1, dtype=torch.float16)
    assert cache.k.dtype == cache.v.dtype == torch.float16 and cache.lengths.dtype == torch.int64
    cache.reserve(5)
    assert cache.k.dtype == cache.v.dtype == torch.float16
    cache.lengths.fill_(4)
    cache.open(3)
    assert cache.lengths.tolist() == [0, 0] and cache.limit == 3 and cache.bound == 5
    assert cache.fits(99) and cache.reserve(99) == 5


@pytest.mark.parametrize(
    "committed, slots", [(1, 1024), (1024, 1024), (1025, 2048), (5000, 8192), (16385, 32768), (40000, 49152)]
)
def test_buffers_on_cuda_have_round_sizes(committed, slots):
    """Powers of two, then steps of 16,384, whatever the call's capacity is, and no fewer than the first."""
    for first, least in (
        (1024, slots),
        (128, min(slots, max(128, 1 << (committed - 1).bit_length()))),
        (4096, max(slots, 4096)),
    ):
        cache: Any = SimpleNamespace(lengths=SimpleNamespace(is_cuda=True), first=first)
        assert SequenceState._wanted(cache, committed) == least


def test_a_cache_that_memory_cannot_hold_is_refused_before_it_is_made(monkeypatch):
    need = 2 * 4 * 2 * 2 * 3 * (100 + 3) * 5  # keys and values, bytes, layers, rows, heads, slots, size
    monkeypatch.setattr(module, "memory_of", lambda device: need)
    cache = made(100)
    monkeypatch.setattr(module, "memory_of", lambda device: need - 1)
    with pytest.raises(Unsupported, match="a KV cache of 100 tokens for 2 rows"):
        cache.open(100)
    cache.open(99)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_buffers_that_cannot_grow_are_refused_with_their_size(monkeypatch, error):
    monkeypatch.setattr(module, "FIRST_SLOTS", 1)
    cache = made(2**20)

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise error("no memory")

    monkeypatch.setattr(torch, "zeros", fail)
    need = 2 * 4 * 2 * 2 * 3 * (2**20 + 3) * 5
    with pytest.raises(FastSpecError, match=rf"{2**20 + 3} tokens for 2 rows needs {need / 2**30:.2f} GiB"):
        cache.reserve(2**20)


def test_memory_is_the_systems_or_unknown(monkeypatch):
    pages = {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 7}
    monkeypatch.setattr(devices.os, "sysconf", pages.__getitem__)
    assert memory_of("cpu") == 21
    monkeypatch.delattr(devices.os, "sysconf")
    assert memory_of("cpu") is None
    made(100)  # of any size, where nobody tells
    second = {"cuda:1": SimpleNamespace(total_memory=5)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", second.__getitem__)
    assert memory_of(str(torch.device("cuda", 1))) == 5


@given(SEEDS, st.integers(1, 6), st.integers(0, 3))
@DRAWN
def test_commit_moves_the_accepted_path_and_counts_it(seed, steps, more):
    generator, nodes = torch.Generator().manual_seed(seed), steps + more
    cache = filled(made(12, nodes, rows=3), seed)
    cache.lengths.copy_(torch.randint(0, 12, (3,), generator=generator))
    before, keys, values = cache.lengths.tolist(), cache.k.clone(), cache.v.clone()
    path = torch.stack([torch.randperm(nodes, generator=generator)[:steps].sort().values for _ in before])
    path[:, 0] = 0
    verdict = Verdict(path, torch.randint(0, steps, (3,), generator=generator), torch.zeros(3, dtype=torch.long))
    active = torch.rand(3, generator=generator) < 0.6
    cache.commit(TORCH, verdict, active)
    for row, length in enumerate(before):
        grown = int(verdict.accepted[row]) + 1 if active[row] else 0
        assert int(cache.lengths[row]) == min(12, length + grown)
        for now, old in ((cache.k, keys), (cache.v, values)):
            assert torch.equal(
                now[:, row, :, length : length + steps], old[:, row, :, [length + node for node in path[row].tolist()]]
            )
            assert torch.equal(now[:, row, :, :length], old[:, row, :, :length])


def test_a_path_of_the_root_alone_moves_nothing():
    cache = made(4, 1)
    ops: Any = SimpleNamespace(commit_slots=TORCH.commit_slots)  # without kv_block_copy
    zero = torch.zeros(2, dtype=torch.long)
    cache.commit(ops, Verdict(zero[:, None], zero, zero), torch.tensor([True, False]))
    assert cache.lengths.tolist() == [1, 0]


def test_a_row_joins_with_what_was_committed_and_its_neighbours_stay():
    cache, other = filled(made(9, rows=3)), filled(made(9, rows=1), 1)
    keys, values = cache.k.clone(), cache.v.clone()
    cache.lengths.fill_(2)
    cache.copy_row(1, other, 4)
    assert cache.lengths.tolist() == [2, 4, 2]
    for now, old, new in ((cache.k, keys, other.k), (cache.v, values, other.v)):
        assert torch.equal(now[:, 1, :, :4], new[:, 0, :, :4])
        old[:, 1, :, :4] = now[:, 1, :, :4]
        assert torch.equal(now, old)


def test_what_a_former_text_wrote_is_zeroed():
    """Where a row or a call begins anew, and in a cache that is handed out; what no text has reached is not touched."""
    cache, other = made(9, rows=3), filled(made(9, rows=1), 1)
    assert cache.reserve(5) == 5 and cache.reached == 5 + cache.tail < cache.slots
    for buffer in (cache.k, cache.v):
        buffer.fill_(torch.nan)
    cache.lengths.fill_(5)
    cache.copy_row(1, other, 4)
    for now, new in ((cache.k, other.k), (cache.v, other.v)):
        assert torch.equal(now[:, 1, :, :4], new[:, 0, :, :4])
        assert not now[:, 1, :, 4 : cache.reached].any() and now[:, 1, :, cache.reached :].isnan().all()
        assert now[:, [0, 2]].isnan().all()
    shown = torch.ones(3, 6, dtype=torch.bool)
    for keys, values in export_span(cache, torch.zeros(3, dtype=torch.long), shown):
        assert not keys[1, :, 4:].any() and not values[1, :, 4:].any()
    reached = cache.reached
    cache.open(9)
    assert cache.reached == 0
    for now in (cache.k, cache.v):
        assert not now[:, :, :, :reached].any() and now[:, :, :, reached:].isnan().all()


def test_lengths_stay_at_the_bound():
    cache = made(9)
    cache.lengths.copy_(torch.tensor([3, 8]))
    cache.grow(torch.tensor([2, 2]))
    assert cache.lengths.tolist() == [5, 9]


def test_a_view_of_the_first_layers_is_the_whole_caches_memory(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SLOTS", 4)
    whole = filled(made(9, layers=3))
    whole.lengths.fill_(2)
    view = SharedState(whole, 2)
    (layers,) = view.kinds
    assert (
        torch.equal(layers.k, whole.k[:2]) and torch.equal(layers.v, whole.v[:2]) and (view.limit, view.tail) == (9, 3)
    )
    view.grow(torch.tensor([1, 2]))
    assert (view.lengths.tolist(), whole.lengths.tolist()) == ([3, 4], [2, 2])
    assert view.reserve(7) == 7 and whole.bound == view.bound == 8 and layers.k.data_ptr() == whole.k.data_ptr()


def test_layers_are_written_one_by_one():
    cache = filled(made(6, layers=3))
    k, v, slots = torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 5), torch.tensor([[0, 3], [7, 1]])
    wanted = cache.k.clone(), cache.v.clone()
    for row in range(2):
        for node in range(2):
            wanted[0][1, row, :, slots[row, node]], wanted[1][1, row, :, slots[row, node]] = k[row, node], v[row, node]
    cache.write(TORCH, 1, k, v, slots)
    assert torch.equal(cache.k, wanted[0]) and torch.equal(cache.v, wanted[1])


def test_transformers_view_writes_at_the_slots_and_shows_the_extent():
    cache, slots = filled(made(9)), torch.tensor([[2, 3], [5, 6]])
    cache.lengths.copy_(torch.tensor([2, 5]))
    view = SlotCache(cache, TORCH, {None: slots}, 7)
    keys, values = torch.randn(2, 3, 2, 5), torch.randn(2, 3, 2, 5)
    shown = view.update(keys, values, 1)
    assert [x.shape for x in shown] == [(2, 3, 7, 5)] * 2
    for row in range(2):
        for node in range(2):
            assert torch.equal(shown[0][row, :, slots[row, node]], keys[row, :, node])
            assert torch.equal(shown[1][row, :, slots[row, node]], values[row, :, node])
    assert shown[0].data_ptr() == cache.k[1].data_ptr() and shown[1].data_ptr() == cache.v[1].data_ptr()
    view.update(2 * keys.double(), values.half(), 0)  # autocast computes in another dtype than the cache's
    assert torch.equal(cache.k[0, 0, :, slots[0, 0]], 2 * keys[0, :, 0]) and cache.v.dtype == torch.float32
    assert view.get_seq_length() == 5 and view.get_mask_sizes(2) == (7, 0) and not view.is_compileable
    for wrong in (torch.randn(2, 2, 2, 5), torch.randn(2, 3, 2, 4)):
        for pair in ((wrong, values), (keys, wrong)):
            heads, size = wrong.shape[1], wrong.shape[3]
            with pytest.raises(
                Unsupported, match=rf"layer 1 has {heads} (key|value) heads of size {size}, its config says 3 of 5"
            ):
                view.update(*pair, 1)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6).filter(any), min_size=1, max_size=3), SEEDS)
@DRAWN
def test_a_users_cache_comes_in_without_its_padding_and_goes_out_in_columns(keep, seed):
    generator, rows = torch.Generator().manual_seed(seed), len(keep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_SLOTS", 1)
        cache = made(8, rows=rows)
    past = [tuple(torch.randn(rows, 3, 6, 5, generator=generator) for _ in "kv") for _ in range(2)]
    real = torch.tensor(keep)
    with ELSEWHERE:
        import_past(cache, past, real)
    kept = [[slot for slot, real in enumerate(row) if real] for row in keep]
    assert cache.lengths.tolist() == [len(row) for row in kept] and cache.bound >= max(map(len, kept))
    first = torch.tensor([int(torch.randint(0, len(row) + 1, (), generator=generator)) for row in kept])
    columns = torch.rand(rows, 9, generator=generator) < 0.7
    with ELSEWHERE:
        keys, values = zip(*export_span(cache, first, columns), strict=True)
    for layer, pair in enumerate(past):
        for out, source in zip((keys[layer], values[layer]), pair, strict=True):
            assert out.shape == (rows, 3, 9, 5) and out.is_contiguous()
            for row, slots in enumerate(kept):
                shown = list(zip(columns[row].nonzero()[:, 0].tolist(), slots[int(first[row]) :], strict=False))
                wanted = torch.zeros(3, 9, 5)
                for column, slot in shown:
                    wanted[:, column] = source[row][:, slot]
                assert torch.equal(out[row], wanted)


class Elsewhere(FullAttentionState):
    """Layers that keep what they keep on another device, and take down where what they are given lies."""

    device = ELSEWHERE
    given: list[Any]

    def commit(self, ops: Any, moves: Any) -> None:
        self.given += [moves.sources.device, moves.active.device, moves.verdict.path.device]

    def export(self, layer: int, *parts: Tensor) -> Any:
        self.given += [each.device for each in parts]


def test_layers_on_another_device_are_given_what_they_need_there():
    cache = made(9)
    cache.attention.__class__, cache.attention.given = Elsewhere, []  # type: ignore[attr-defined]
    path = torch.tensor([[0, 1], [0, 0]])
    cache.commit(TORCH, Verdict(path, torch.tensor([1, 0]), torch.tensor([4, 4])), torch.tensor([True, True]))
    export_span(cache, torch.zeros(2, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool))
    assert cache.attention.given == [ELSEWHERE] * (3 + 2 * 3)  # type: ignore[attr-defined]


def test_columns_far_before_a_row_are_zeros():
    """Further than the buffers have slots."""
    cache = filled(made(4, 1, rows=1, layers=1))
    cache.lengths.fill_(2)
    [(keys, values)] = export_span(cache, torch.tensor([0]), torch.arange(22)[None] >= 20)
    for found, buffer in ((keys, cache.k), (values, cache.v)):
        assert torch.equal(found[:, :, 20:], buffer[0, :, :, :2]) and not found[:, :, :20].any()


@pytest.mark.parametrize("ring", [None, 8])
def test_the_first_layers_of_another_state_move_paths_in_these_alone(ring):
    """Round its ring, where it has one."""
    whole = FullAttentionState(3, 1, 2, 4, dtype=torch.float32, device=CPU)
    whole.resize(8 if ring else 24)
    whole.ring = ring  # type: ignore[assignment]
    for buffer in (whole.k, whole.v):
        buffer.normal_()
    keys, values = whole.k.clone(), whole.v.clone()
    path, zero = torch.tensor([[0, 2]]), torch.zeros(1, dtype=torch.long)
    FirstLayers(whole, 2).commit(
        TORCH, Moves(Verdict(path, zero, zero), zero == 0, torch.tensor([[15, 18]]), torch.tensor([[15, 16]]))
    )
    sources, targets = ([7, 2], [7, 0]) if ring else ([15, 18], [15, 16])
    for now, old in ((whole.k, keys), (whole.v, values)):
        old[:2, :, :, targets] = old[:2, :, :, sources]
        assert torch.equal(now, old)


def test_a_row_begins_with_the_first_row_of_another_state():
    mine, other = made(6).attention, filled(made(6), 1).attention
    mine.copy_row(1, other, 4, 0, 0)
    assert (
        torch.equal(mine.k[:, 1, :, :4], other.k[:, 0, :, :4])
        and not mine.k[:, 1, :, 4:].any()
        and not mine.k[:, 0].any()
    )
    assert torch.equal(mine.v[:, 1, :, :4], other.v[:, 0, :, :4])
