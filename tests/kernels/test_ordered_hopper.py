"""Ordered attention's kernels for Hopper by an interpreter of their own, beside the reference: on a GPU test_ordered.py
compares their bits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.gluon import LANGUAGE, Number, Pointer, Program, plain
from helpers.trees import random_parents

pytest.importorskip("triton")

from fastspec.generation.tree import ancestor_words
from fastspec.kernels.attention import ordered, ordered_hopper, ordered_hopper_sums, parts, reference
from fastspec.kernels.attention.ordered_sums import OrderedPass

SIZES = 4, 128, 16, 2, 8
"""Rows of a half, keys of a block, channels, places, and columns of ones."""


def run(kernel: str, grid: tuple[int, ...], given: OrderedPass, outputs: tuple[torch.Tensor, ...], **options) -> None:
    """Every program of a kernel, which takes what the host functions of ordered_hopper.py give it."""
    k, v = (x.reshape(-1, x.shape[3]) for x in (given.k, given.v))
    program = Program(k, v)
    scope = plain(parts, ordered_hopper_sums, ordered_hopper, shared_memory=program.shared_memory, produce=None)
    operands, counts, compiled = ordered_hopper._operands(given)
    pointers = [Pointer(x.view(-1)) for x in operands[:3]]
    wanted = {"S_K", "S_V", "GROUP", "FINE"}
    compiled = {name: value for name, value in compiled.items() if name in wanted} | {"SIZES": SIZES, "PDL": False}
    for place in product(*map(range, grid)):
        LANGUAGE.program_id = lambda axis, place=place: Number(place[axis])
        LANGUAGE.num_programs = lambda axis: Number(grid[axis])
        LANGUAGE.warp_specialize = program.warp_specialize
        numbers = given.q.shape[1], given.extent, *options.get("shares", ()), *counts, *options.get("strides", ())
        scope[kernel](
            *pointers,
            *(None, None),
            *(Pointer(x.view(-1)) for x in (*outputs, given.tree.prefix)),
            given.scale2,
            *map(Number, (*numbers, given.tree.prefix.stride(0))),
            **compiled,
            **options.get("more", {}),
        )


def launch(given: OrderedPass, part: torch.Tensor, state: torch.Tensor, shares: int) -> None:
    part.fill_(torch.nan)
    state.fill_(torch.nan)
    more = {"GRAIN": given.grain, "SHARED": shares > 1}
    grid = -(-given.rows // (2 * SIZES[0])), given.pairs, shares
    run("_hopper_runs", grid, given, (part, state), shares=(part.shape[1], shares), more=more)


def chain(given: OrderedPass) -> None:
    grid = -(-given.rows // (2 * SIZES[0])), given.pairs
    run("_hopper_chain", grid, given, (given.out,), strides=given.out.stride()[:2])


@pytest.mark.parametrize(("shares", "fine"), [(1, True), (3, False), (8, True), (None, False), (None, True)])
def test_a_text_is_that_of_the_reference(shares, fine, monkeypatch):
    """Trees by shares of the text, and a chain (None), in rows of lengths around borders of blocks and runs; nobody
    reads what nobody has written."""
    monkeypatch.setattr(ordered, "FEW_HEADS", int(fine))
    monkeypatch.setattr(ordered_hopper, "fits", lambda *given: True)
    monkeypatch.setattr(ordered_hopper, "launch", launch)
    monkeypatch.setattr(ordered_hopper, "chain", chain)
    monkeypatch.setattr(ordered_hopper, "descriptor", lambda x: None)
    generator, nodes = torch.Generator().manual_seed(shares or 0), 5
    for prefixes in ([0, 15, 256, 700], [4613]):
        prefix, extent = torch.tensor(prefixes), max(prefixes) + nodes
        words = None
        if shares:
            words = ancestor_words(random_parents(1, nodes, generator).expand(len(prefixes), -1).contiguous(), nodes)
        q = torch.randn(len(prefixes), nodes, 2, SIZES[2], generator=generator)
        cache = torch.randn(2, len(prefixes), 1, extent + 128, SIZES[2], generator=generator)
        layout = reference.attention_layout(prefix, words, nodes, nodes, extent, 2)
        wanted = reference.tree_attention(q.double(), *cache.double(), layout, 0.25)
        for row, each in enumerate(prefixes):
            cache[:, row, :, each + nodes :] = torch.nan
        laid = ordered.attention_layout(prefix, words, nodes, nodes, extent, 2)
        got = ordered.tree_attention(q, *cache, laid, 0.25, short=0, shares=shares)
        assert (got.double() - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("fine", [False, True])
def test_shares_leave_no_more_sums_than_there_are_places(fine):
    """Of texts of any length up to an extent: the first share's, later runs', and an open run's."""
    of = plain(parts)
    for end in map(Number, range(16, 20_000, 208)):
        for shares in map(Number, (2, 3, 5, 8, 22, 33)):
            runs = [of["share_of"](end, Number(share), shares, fine) for share in range(shares + 1)]
            assert runs == sorted(runs) and runs[0] == 0 < runs[1] and runs[-1] == ordered.runs_of(end, fine)
            ended = runs[-1] - (end < of["run_start"](runs[-1], fine))
            most = 1 + max(0, ended - runs[1]) + 1
            assert most <= ordered_hopper.places_of(shares, end, fine)
            assert most <= ordered_hopper.places_of(shares, end + 3000, fine)
