"""The norm of a product whose addends lie in several processes: here all of them in one, one launch after another."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.devices import CPU, CUDA
from helpers.examples import examples
from helpers.words import Group, near, write
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.layer.norms import rms_norm
from fastspec.kernels.linear import launches
from fastspec.kernels.linear.launches import RowLaunch
from fastspec.kernels.linear.linear import linear
from fastspec.kernels.linear.reference import DeferredProduct, DeferredSum, Parts, joined
from fastspec.kernels.parallel import joins, reduced_norm, reference, words
from fastspec.kernels.parallel.words import BLANK, NANS, ROWS, Space, fits, sum_words
from fastspec.kernels.tuned_launches import forced

ROOM = tl.constexpr(ROWS)


def norm(
    group: Group,
    rank: int,
    own: list[Any],
    weight: Tensor,
    residual: Tensor | None,
    offset: float | None,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """A process's norm and sum."""

    def run(space: Space) -> Any:
        return reduced_norm.reduced_norm(own[rank], weight, 1e-5, residual, None, None, offset, space, ordered)

    rows = [joined(each).flatten(0, -2) for each in own]
    if reduced_norm.has_owners(rows[0].nbytes, len(own)) and not isinstance(own[rank], DeferredProduct):
        total = torch.zeros_like(rows[0], dtype=torch.float32)
        for each in rows:
            total += each.float()
        return group.launch_with_owners(  # type: ignore[return-value]
            rank,
            rows,
            total.to(rows[0].dtype),
            run,
        )

    return group.launch(rank, rows, run)  # type: ignore[return-value]


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 5),
    size=st.sampled_from([2, 24, 64, 130]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    parts=st.integers(0, 3),
    with_residual=st.booleans(),
    offset=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 2**31),
    owned=st.sampled_from([1 << 40, 0, 600]),
    ordered=st.booleans(),
)
@examples(12)
def test_every_process_gets_the_norm_of_the_sum(
    device, processes, size, dtype, parts, with_residual, offset, seed, owned, ordered
):
    """Message after message, with other numbers of rows in turn, with owners of rows and without, all the same bits,
    and where that is asked for those of the norm of a tensor; nothing but its own words are written to the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced_norm, "OWNED_BYTES", owned)
        check_norms(device, processes, size, dtype, parts, with_residual, offset, seed, ordered)


def check_norms(device, processes, size, dtype, parts, with_residual, offset, seed, ordered):
    torch.manual_seed(seed)
    group = Group(processes, size, dtype, device)
    weight = torch.randn(size, device=device).to(dtype)
    for rows in ((1,), (2, 2), (1,), (1, 3), (2, 4), (2, 2)):
        shape = *rows, size
        if parts:
            own = [Parts(torch.randn(parts, *shape, device=device), dtype) for _ in range(processes)]
        else:
            own = [torch.randn(shape, device=device).to(dtype) for _ in range(processes)]
        residual = torch.randn(shape, device=device).to(dtype) if with_residual else None
        total = torch.zeros(shape, device=device)
        for each in own:
            total = total + joined(each).float()
        want = rms_norm(total.to(dtype), weight, 1e-5, residual, offset=offset)
        made = [norm(group, rank, own, weight, residual, offset, ordered) for rank in range(processes)]
        assert torch.equal(made[0][0], want[0]) if ordered else near(made[0], want)
        assert all(torch.equal(each[0], made[0][0]) and torch.equal(each[1], want[1]) for each in made)


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 3),
    size=st.sampled_from([2, 6, 24]),
    depth=st.sampled_from([8, 24, 65]),
    launch=st.sampled_from([RowLaunch(2, 16, 1), RowLaunch(4, 32, 2), RowLaunch(8, 16, 1)]),
    biased=st.booleans(),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(processes=3, size=130, depth=65, launch=RowLaunch(8, 16, 1), biased=True, with_residual=True, seed=0)
@examples(8)
def test_a_row_s_product_sends_itself(device, processes, size, depth, launch, biased, with_residual, seed):
    """The norm is that of the sum of the products, message after message, those of rows that norms send in between
    too."""
    torch.manual_seed(seed)
    group, dtype = Group(processes, size, torch.float16, device), torch.float16
    scale = torch.randn(size, device=device).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "ROWS", ((1, (launches.LaunchRule(launch),)), *launches.ROWS[1:]))
        for shape in ((1, 1), (1,), (2, 1), (1, 1), (1, 1)):
            own = []
            for _ in range(processes):
                x, weight = (
                    torch.randn(*shape, depth, device=device).to(dtype),
                    torch.randn(size, depth, device=device).to(dtype),
                )
                own.append(
                    DeferredProduct(x, weight, torch.randn(size, device=device).to(dtype) if biased else None, linear)
                )
            if shape == (2, 1):  # two rows: products that send nothing
                own = [each.made() for each in own]
            residual = torch.randn(*shape, size, device=device).to(dtype) if with_residual else None
            total = torch.zeros(*shape, size, device=device)
            for each in own:
                total = total + joined(each).float()
            want = rms_norm(total.to(dtype), scale, 1e-5, residual)
            made = [norm(group, rank, own, scale, residual, None) for rank in range(processes)]
            assert near(made[0], want) and all(
                torch.equal(each[0], made[0][0]) and torch.equal(each[1], want[1]) for each in made
            )


HALF = {"dtype": torch.float16}


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 8, **HALF), torch.zeros(6, 8, **HALF)),
        (torch.zeros(1, 8), torch.zeros(6, 8)),
        (torch.zeros(1, 8, **HALF), torch.zeros(7, 8, **HALF)),
        (torch.zeros(1, 8, **HALF).requires_grad_(), torch.zeros(6, 8, **HALF)),
        (torch.zeros(5, 0, **HALF), torch.zeros(6, 0, **HALF)),
        (torch.zeros(8, 1, **HALF).t(), torch.zeros(8, 6, **HALF).t()),
    ],
    ids=["two rows", "fp32", "an odd row", "gradients", "no inputs", "strides"],
)
def test_products_that_cannot_send_are_made_first(x, weight):
    assert reduced_norm.sending_launch(DeferredProduct(x, weight, None, linear)) is None
    one = DeferredProduct(torch.zeros(1, 8, **HALF), torch.zeros(6, 8, **HALF), None, linear)
    assert isinstance(reduced_norm.sending_launch(one), RowLaunch) and reduced_norm.sending_launch(one.made()) is None


def test_a_product_sends_itself_though_torch_was_tuned_to_be_faster():
    """By itself: a launch more, for the words, would cost more."""
    x, weight = torch.zeros(1, 8, **HALF), torch.zeros(6, 8, **HALF)
    with forced("linear", x.device, (1, 6, 8, torch.float16), None):
        assert isinstance(reduced_norm.sending_launch(DeferredProduct(x, weight, None, linear)), RowLaunch)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_was_sent_counts_though_its_norm_failed(device, monkeypatch):
    """Both have sent, and neither's words stand in the way of a later message."""
    group, draws = Group(2, 24, torch.float16, device), torch.Generator().manual_seed(0)
    weights = [torch.randn(24, 16, generator=draws).to(device, torch.float16) for _ in range(2)]
    scale = torch.ones(24, device=device, dtype=torch.float16)

    def rows() -> list[Any]:
        return [
            DeferredProduct(torch.randn(1, 16, generator=draws).to(device, torch.float16), weight, None, linear)
            for weight in weights
        ]

    with monkeypatch.context() as patch:
        patch.setattr(reduced_norm, "_reduced_norm", {(1,): lambda *given, **more: 1 / 0})
        own = rows()
        for rank in range(2):

            def failed(space: Space, rank: int = rank, own: list[Any] = own) -> Tensor:
                with pytest.raises(ZeroDivisionError):
                    reduced_norm.reduced_norm(own[rank], scale, 1e-5, None, None, None, None, space)
                return scale

            group.launch(rank, [joined(each) for each in own], failed)
    own = rows()
    want = rms_norm((joined(own[0]).float() + joined(own[1]).float()).half(), scale, 1e-5)
    for rank in range(2):
        assert near(norm(group, rank, own, scale, None, None), want)
    assert [counts[0].item() for counts in group.counts] == [2, 2]


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(("behind", "count"), [("nothing", 0), ("product", 1), ("norm", 1)])
def test_an_interrupt_leaves_no_words_and_waits_for_none(device, monkeypatch, behind, count):
    """Before the product, behind its launch, or behind the norm's, which has read what came."""
    group, dtype = Group(2, 24, torch.float16, device), torch.float16
    own = DeferredProduct(torch.randn(1, 16).to(device, dtype), torch.randn(24, 16).to(device, dtype), None, linear)
    scale = torch.ones(24, device=device, dtype=dtype)

    def interrupted(run: Any, *given: Any, **more: Any) -> None:
        if behind != "nothing":
            run(*given, **more)
        raise KeyboardInterrupt

    if behind == "norm":
        monkeypatch.setattr(
            reduced_norm, "_reduced_norm", {(1,): partial(interrupted, reduced_norm._reduced_norm[(1,)])}
        )
    else:
        monkeypatch.setattr(reduced_norm, "linear_row", partial(interrupted, reduced_norm.linear_row))
    monkeypatch.setattr(words, "MAX_LOOKS", 1000)
    sent = joined(own)
    if count:
        write(group.spaces[0], sent[0], 1, 0, 1)
    with pytest.raises(KeyboardInterrupt):
        reduced_norm.reduced_norm(own, scale, 1e-5, None, None, None, None, group.seen[0])
    wanted = group.blank()
    if count:
        write(wanted[1], sent[0], 0, 0, 1)
    group.compare(0, wanted)
    assert group.counts[0][0] == count


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*product(("norm", "owned", "table", "columns"), (torch.float32, torch.float16)), ("product", torch.float16)],
)
def test_a_row_may_have_the_bits_of_a_blank(device, kind, dtype, monkeypatch):
    """Other NaNs are sent for them: in every kind of message no word is left out."""
    monkeypatch.setattr(reduced_norm, "OWNED_BYTES", 0 if kind == "owned" else 1 << 40)
    monkeypatch.setattr(joins, "CHUNK", 16)
    group, scale = Group(3, 16, dtype, device), torch.ones(16, device=device, dtype=dtype)
    row, sent = scale[None].clone(), scale[None].clone()
    row.view(torch.int32)[0, 5], sent.view(torch.int32)[0, 5] = BLANK.value, NANS.value
    own: Tensor | DeferredProduct = row
    if kind == "product":
        own = DeferredProduct(torch.zeros(1, 8).to(row), torch.zeros(16, 8).to(row), row[0], linear)

    def normed(space: Space) -> Tensor:
        return reduced_norm.reduced_norm(own, scale, 1e-5, None, None, None, None, space)[1]

    def columns(space: Space) -> Tensor:
        return joins.gathered(row, 48, space).view(3, 16).sum(0, keepdim=True)

    look = partial(joins.summed_rows, torch.zeros(1, dtype=torch.long, device=device), row, 0)
    run = {"table": look, "columns": columns}.get(kind, normed)
    for rank in (1, 2):  # the owner is another
        rows = [sent] * 3
        found = group.launch_with_owners(rank, rows, sent, run) if kind == "owned" else group.launch(rank, rows, run)
        assert torch.equal(found.isnan(), row.isnan())


@triton.jit
def _guessing(p_mine, p_out, guess, count):
    o_w = tl.arange(0, 16)
    b_none, p_mine = tl.zeros((16,), tl.float32), p_mine.to(tl.pointer_type(tl.int32))
    b_sum = sum_words(b_none, p_mine, 0, guess, count, o_w, o_w < 16, tl.float32, 16, True, 0, 2, ROOM, 16, 1000)
    tl.store(p_out + o_w, b_sum)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_wrong_guess_is_not_read(device):
    """Of a count that is one behind: where it looks, the message after this one's may have come already."""
    (space, _), out = Group(2, 16, torch.float32, device).spaces, torch.zeros(16, device=device)
    for sender in range(2):
        for count in (4, 5):
            write(space, torch.full((16,), 10.0 * count + sender, device=device), sender, 0, count)
    for guess in (3, 4):
        _guessing[(1,)](space.data_ptr(), out, guess, 4)
        assert torch.equal(out, torch.full_like(out, 81.0))


@CPU.marks[0]
def test_words_are_waited_for():
    """Those of a row that come one after another, in any order."""
    group = Group(2, 16, torch.float32, "cpu")
    rows, scale = [torch.randn(1, 16) for _ in range(2)], torch.ones(16)
    words = rows[1].view(torch.int32)[0]

    def come() -> None:
        for at in torch.randperm(16).tolist():
            time.sleep(0.005)
            group.spaces[0][1, 1, 0, at] = words[at]

    sender = threading.Thread(target=come)
    sender.start()
    _, total = reduced_norm.reduced_norm(rows[0], scale, 1e-5, None, None, None, None, group.seen[0])
    sender.join()
    assert torch.equal(total, rows[0] + rows[1]) and bool((group.spaces[0] == BLANK.value).all())


def test_a_process_without_rows_of_a_table_adds_nothing():
    group, table = Group(2, 8, torch.float32, "cpu"), torch.randn(3, 8)
    tokens = torch.tensor([2, 0, 1])
    empty = partial(joins.summed_rows, tokens, table[3:], 3)
    assert torch.equal(group.launch(1, [table[tokens], torch.zeros(3, 8)], empty), table[tokens])
    assert torch.equal(reference.look_up(tokens, table[3:], 3, None, lambda own: own), torch.zeros(3, 8))


def test_what_one_launch_takes():
    shapes = {
        (1, 1, 4096): True,
        (1, 128, 4096): True,
        (1, 129, 64): False,
        (1, 128, 8192): True,
        (1, 65, 16386): False,
        (0, 3, 64): False,
    }
    for shape, fit in shapes.items():
        assert fits(torch.Size(shape), torch.bfloat16) is fit, shape
    assert fits(torch.Size((1, 1, 7)), torch.float32) and not fits(torch.Size((1, 1, 7)), torch.float16)
    assert not fits(torch.Size((1, 1, 8)), torch.float64) and not fits(torch.Size((1, 1, 32770)), torch.bfloat16)


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 3),
    size=st.sampled_from([2, 24, 64, 130]),
    rows=st.integers(1, 5),
    half=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(25)
def test_a_table_that_is_cut_is_looked_up_in(device, processes, size, rows, half, whole, seed):
    """By every process, message after message; the last process may have fewer rows of the table than the others."""
    torch.manual_seed(seed)
    dtype = torch.float16 if half else torch.float32
    group, vocabulary = Group(processes, size, dtype, device), 5 * processes - 1
    table = torch.randn(vocabulary, size, device=device).to(dtype)
    shares = table.split(5)
    for turn in range(3):
        tokens = torch.randint(vocabulary, (rows,) if turn == 1 else (rows, 2), device=device).to(
            torch.int64 if whole else torch.int32
        )
        want, flat = torch.nn.functional.embedding(tokens, table), tokens.flatten()
        mine = [
            torch.where(((flat >= 5 * rank) & (flat < 5 * rank + 5))[:, None], want.reshape(-1, size), 0)
            for rank in range(processes)
        ]
        for rank in range(processes):
            run = partial(joins.summed_rows, tokens, shares[rank], 5 * rank)
            assert torch.equal(group.launch(rank, mine, run), want)


def test_a_table_whose_holders_do_not_reach_each_other_is_summed_by_the_op(monkeypatch):
    table, tokens = torch.randn(4, 6), torch.tensor([[4, 7, 3, 8, 5]])
    monkeypatch.setattr(joins.symmetric, "all_reduce", lambda own, group: own + 1)
    found = joins.look_up(tokens, table, 4, SimpleNamespace(size=lambda: 2))
    want = torch.stack([table[0], table[3], torch.zeros(6), torch.zeros(6), table[1]])[None] + 1
    assert torch.equal(found, want)


def test_addends_that_do_not_reach_each_other_are_added_by_the_op():
    x, weight, asked = torch.randn(2, 3, 8), torch.randn(8), []

    def all_reduce(own: Tensor, group: object) -> Tensor:
        asked.append(group)
        return 3 * own

    found = reduced_norm.rms_norm(DeferredSum(x, "group", all_reduce), weight, 1e-5, x)
    want = rms_norm(3 * x, weight, 1e-5, x)
    assert asked == ["group"] and all(map(torch.equal, found, want))
