"""What processes have side by side, joined: here all of them in one, one launch after another."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.devices import CPU, CUDA
from helpers.examples import examples
from helpers.words import Group
from hypothesis import example, given
from hypothesis import strategies as st

from fastspec.kernels.parallel import joins, reference
from fastspec.kernels.verification.reference import best_key

DTYPES = st.sampled_from([torch.float32, torch.float16])


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 3),
    width=st.integers(3, 40),
    rows=st.integers(1, 4),
    dtype=DTYPES,
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(processes=3, width=4, rows=2, dtype=torch.float32, strided=False, seed=0)  # the last has none
@examples(25)
def test_columns_are_joined(device, processes, width, rows, dtype, strided, seed):
    """Bit for bit, in chunks of 16, message after message; the last process may have fewer columns, or none."""
    torch.manual_seed(seed)
    chunk, part = 16, reference.share(width, processes)
    group, chunks = Group(processes, chunk, dtype, device), -(-part // chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "CHUNK", chunk)
        for shape in ((rows,), (1, rows), (rows, 2)):
            whole = torch.randn(*shape, width, device=device).to(dtype)
            parts = [whole[..., part * rank : part * (rank + 1)] for rank in range(processes)]
            sent = []
            for each in parts:
                padded = torch.zeros(*shape, chunks * chunk, device=device, dtype=dtype)
                padded[..., : each.shape[-1]] = each
                sent.append(padded.reshape(-1, chunk))
            for rank, each in enumerate(parts):
                x = each if strided else each.contiguous()
                assert torch.equal(group.launch(rank, sent, partial(joins.gathered, x, width)), whole)


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    processes=st.integers(2, 3),
    vocabulary=st.integers(3, 40),
    rows=st.integers(1, 4),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
@example(processes=3, vocabulary=4, rows=2, dtype=torch.float32, seed=0)  # the last has none
@examples(25)
def test_the_likeliest_of_all_processes_is_chosen(device, processes, vocabulary, rows, dtype, seed):
    """Of equal scores the lowest token's, wherever they lie."""
    torch.manual_seed(seed)
    part = reference.share(vocabulary, processes)
    group = Group(processes, 1, torch.int32, device)
    for shape in ((rows,), (1, rows)):
        scores = torch.randint(-2, 3, (*shape, vocabulary), device=device).to(dtype)
        firsts = [part * rank for rank in range(processes)]
        parts = [scores[..., first : first + part].contiguous() for first in firsts]
        keys = []
        for each, first in zip(parts, firsts, strict=True):
            if not each.numel():
                keys.append(torch.full(shape, torch.iinfo(torch.int64).min, device=device))
                continue
            best = (each == each.amax(-1, keepdim=True)).int().argmax(-1)  # the first of them
            keys.append(best_key(each, best, first))
        parts_of = [torch.stack([key >> at & 0xFFFF for at in (0, 16, 32, 48)], -1).int().view(-1, 4) for key in keys]
        want = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
        for rank, first in enumerate(firsts):
            found = group.launch(rank, parts_of, partial(joins.chosen, parts[rank], first))
            assert torch.equal(found, want[..., None])


def test_what_does_not_fit_goes_the_reference_s_way(monkeypatch):
    asked = []
    monkeypatch.setattr(joins.reference, "all_gather", lambda x, width, group: asked.append((x.shape, width)))
    monkeypatch.setattr(joins, "space_for", lambda *given: pytest.fail("a space is asked for"))
    group = SimpleNamespace(size=lambda: 2)
    for x in (torch.zeros(129, 8), torch.zeros(2, 4, dtype=torch.long), torch.zeros(0, 4), torch.zeros(129, 4096)):
        joins.all_gather(x, 2 * x.shape[-1], group)
    assert len(asked) == 4
    monkeypatch.setattr(joins.reference, "likeliest", lambda scores, first, group: asked.append(first))
    joins.likeliest(torch.zeros(129, 8), 3, group)
    joins.likeliest(torch.zeros(2, 8, dtype=torch.float64), 4, group)
    assert asked[4:] == [3, 4]
