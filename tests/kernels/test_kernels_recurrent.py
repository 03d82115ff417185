"""Gated DeltaNet: the reference against the recurrence token by token, and the kernels against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fastspec.generation.tree import TokenTree
from fastspec.kernels.layer.reference import gate_heads as plain_gate_heads
from fastspec.kernels.linear.reference import Parts
from fastspec.kernels.recurrent import reference
from fastspec.kernels.recurrent.reference import DecayRates

pytest.importorskip("triton")

from helpers.devices import INTERPRETED
from helpers.kernels_attention import TYPED
from helpers.trees import random_parents

from fastspec.kernels.layer import norms
from fastspec.kernels.recurrent import conv, delta

TYPES = pytest.mark.parametrize(("device", "dtype"), TYPED)
SEEDS = st.integers(0, 2**31)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = st.sampled_from([(1, 1, 16, 16), (2, 4, 8, 12), (1, 2, 20, 40), (2, 2, 32, 16)])


@dataclass
class Case:
    """A tree of N nodes for two rows or a text, of (Hk, Hv, Dk, Dv), behind a state that is not empty; products as
    slices of wider rows."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    rates: DecayRates
    state: Tensor
    tree: TokenTree

    @classmethod
    def made(
        cls,
        sizes: tuple[int, int, int, int],
        nodes: int,
        seed: int,
        dtype: torch.dtype,
        device: str,
        chain: bool = False,
    ) -> Case:
        keys, values, key_size, value_size = sizes
        draw = torch.Generator().manual_seed(seed)
        channels = 2 * keys * key_size + values * value_size
        wide = torch.randn(2, nodes, channels + 2 * values + 3, generator=draw).to(dtype).to(device)
        mixed, a, b, _ = wide.split((channels, values, values, 3), -1)
        rates = DecayRates(
            *(torch.randn(values, generator=draw).to(dtype).to(device) for _ in "ab"), scale=1.0 + seed % 2
        )
        state = torch.randn(2, values, key_size, value_size, generator=draw).to(device)
        parents = random_parents(2, nodes, draw)
        tree = TokenTree.from_parents(
            parents * 0, (torch.arange(nodes) - 1).clamp(min=0).expand(2, -1) if chain else parents
        )
        return cls(
            mixed, a, b, rates, state, TokenTree(*(getattr(tree, each).to(device) for each in TREE), tree.max_path)
        )

    def space(self) -> tuple[Tensor, Tensor]:
        """Updates and gates, of a buffer with room for more nodes."""
        heads, size = self.state.shape[1], self.state.shape[3]
        nodes, like = self.mixed.shape[1], torch.empty(0, dtype=torch.float32, device=self.mixed.device)
        updates, gates = (like.new_full((2, nodes + 3, heads, *more), torch.nan) for more in ((size,), ()))
        return updates[:, :nodes], gates[:, :nodes]

    def path(self, row: int, node: int) -> list[int]:
        above = self.tree.parents[row].tolist()
        path = [node]
        while path[-1]:
            path.append(above[path[-1]])
        return path[::-1]


TREE = "tokens", "parents", "depths", "ancestors"


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(wanted.float().abs().max()))
    assert found.isfinite().all() and (found.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * scale


def step_by_step(case: Case, row: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """The recurrence itself, in double precision -> the last token's output [Hv, Dv], and the state [Hv, Dk, Dv]."""
    q, k, v = (
        x.double() for x in reference.heads_of(case.mixed[row, path], reference.sizes_of(case.mixed, case.state))
    )
    g, beta = (x.double() for x in case.rates.of(case.a[row, path], case.b[row, path]))
    state, out = case.state[row].double(), torch.empty(0)
    for step in range(len(path)):
        state = state * g[step].exp()[:, None, None]
        change = beta[step][:, None] * (v[step] - torch.einsum("hk,hkv->hv", k[step], state))
        state = state + k[step][:, :, None] * change[:, None, :]
        out = torch.einsum("hk,hkv->hv", q[step], state)
    return out, state


@given(sizes=SIZES, nodes=st.integers(1, 12), seed=SEEDS)
@examples(8)
def test_a_tree_and_a_text_are_the_recurrence(sizes: tuple[int, int, int, int], nodes: int, seed: int) -> None:
    case = Case.made(sizes, nodes, seed, torch.float32, "cpu")
    updates, gates = case.space()
    out = reference.delta_tree(case.mixed, case.a, case.b, case.rates, case.state, case.tree.ancestors, updates, gates)
    held = torch.randn(1, 2, 4, case.mixed.shape[2])
    for row in range(2):
        for node in range(nodes):
            path = case.path(row, node)
            wanted, state = step_by_step(case, row, path)
            close(out[row, node], wanted, torch.float32)
            states, inputs = case.state[None].clone(), held.clone()
            given = torch.tensor([path + [node] * 2, path + [node] * 2])
            mine = torch.tensor([row == 0, row == 1])
            accepted, kept = (
                torch.tensor([len(path) - 1] * 2),
                (case.mixed[None], case.mixed[None], updates[None], gates[None]),
            )
            reference.delta_commit(states, inputs, *kept, given, accepted, mine)
            close(states[0, row], state, torch.float32)
            assert torch.equal(states[0, 1 - row], case.state[1 - row]) and torch.equal(
                inputs[0, 1 - row], held[0, 1 - row]
            )
            assert torch.equal(inputs[0, row], torch.cat((held[0, row], case.mixed[row, path]))[-4:])
    counts, state = torch.tensor([nodes, nodes // 2]), case.state.clone()
    reference.delta_chain(case.mixed, case.a, case.b, case.rates, state, counts)
    close(state[0], step_by_step(case, 0, list(range(nodes)))[1], torch.float32)
    close(state[1], step_by_step(case, 1, list(range(nodes // 2)))[1], torch.float32)


@given(nodes=st.integers(1, 9), width=st.integers(1, 4), seed=SEEDS)
@examples(8)
def test_the_convolution_goes_along_ancestors(nodes: int, width: int, seed: int) -> None:
    case = Case.made((1, 1, 4, 4), nodes, seed, torch.float32, "cpu")
    weight, held = torch.randn(12, width), torch.randn(2, width, 12)
    out = reference.tree_conv(case.mixed, weight, held, case.tree.parents)
    for row in range(2):
        for node in range(nodes):
            text = torch.cat((held[row], case.mixed[row, case.path(row, node)]))
            wanted = F.silu(F.conv1d(text.T[None], weight[:, None], groups=12)[0, :, -1])
            torch.testing.assert_close(out[row, node], wanted, rtol=1e-5, atol=1e-5)


@TYPES
@given(sizes=SIZES, nodes=st.sampled_from([1, 2, 7, 16, 33, 70, 130]), seed=SEEDS, chain=st.booleans())
@examples(6)
def test_a_tree(device: str, dtype: torch.dtype, sizes: Any, nodes: int, seed: int, chain: bool) -> None:
    case = Case.made(sizes, nodes, seed, dtype, device, chain)
    wanted = case.space()
    given = case.mixed, case.a, case.b, case.rates, case.state, case.tree.ancestors
    expected = reference.delta_tree(*given, *wanted)
    found, before = case.space(), case.state.clone()
    close(delta.delta_tree(*given, *found), expected, dtype)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs, torch.float32)
    assert torch.equal(case.state, before)


@TYPES
@given(sizes=SIZES, tokens=st.sampled_from([1, 5, 16, 17, 40, 70]), seed=SEEDS, data=st.data())
@examples(6)
def test_a_text(device: str, dtype: torch.dtype, sizes: Any, tokens: int, seed: int, data: st.DataObject) -> None:
    case = Case.made(sizes, tokens, seed, dtype, device, chain=True)
    counts = torch.tensor([data.draw(st.integers(0, tokens)), tokens], device=device)
    mine, theirs = case.state.clone(), case.state.clone()
    expected = reference.delta_chain(case.mixed, case.a, case.b, case.rates, theirs, counts)
    found = delta.delta_chain(case.mixed, case.a, case.b, case.rates, mine, counts)
    close(mine, theirs, torch.float32)
    for row, count in enumerate(counts.tolist()):
        assert found[row].isfinite().all()
        if count:
            close(found[row, :count], expected[row, :count], dtype)


@TYPES
@given(
    nodes=st.sampled_from([1, 6, 20]),
    width=st.integers(2, 4),
    channels=st.sampled_from([12, 530]),
    seed=SEEDS,
    chain=st.booleans(),
    silu=st.booleans(),
)
@examples(6)
def test_the_convolution(
    device: str, dtype: torch.dtype, nodes: int, width: int, channels: int, seed: int, chain: bool, silu: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, nodes, channels + 5, generator=draw).to(dtype).to(device)[..., :channels]
    weight, held = (
        torch.randn(channels, width, generator=draw).to(dtype).to(device),
        torch.randn(2, width, channels, generator=draw),
    )
    held = held.to(dtype).to(device)
    parents = None if chain else random_parents(2, nodes, draw).to(device)
    kept, out = (torch.zeros(2, nodes + 2, channels, dtype=dtype, device=device)[:, :nodes] for _ in "ab")
    found = conv.tree_conv(x, weight, held, parents, kept, out, silu=silu)
    assert found.data_ptr() == out.data_ptr() and torch.equal(kept, x)
    close(found, reference.tree_conv(x, weight, held, parents, silu=silu), dtype)
    counts = torch.tensor([nodes // 2, nodes], device=device)
    mine, theirs = held.clone(), held.clone()
    conv.hold(x, mine, counts)
    reference.hold(x, theirs, counts)
    assert torch.equal(mine, theirs)


@TYPES
@given(sizes=SIZES, nodes=st.sampled_from([1, 5, 40]), seed=SEEDS, data=st.data())
@examples(5)
def test_accepted_paths(
    device: str, dtype: torch.dtype, sizes: Any, nodes: int, seed: int, data: st.DataObject
) -> None:
    """Of three layers; rows that are not active keep what they have."""
    layers, chain = 3, data.draw(st.booleans())
    cases = [Case.made(sizes, nodes, seed + layer, dtype, device, chain) for layer in range(layers)]
    states = torch.stack([case.state for case in cases])
    mixed = torch.stack([case.mixed for case in cases])
    inputs, held = torch.randn_like(mixed), torch.randn(layers, 2, 4, mixed.shape[3]).to(mixed)
    updates = torch.randn(layers, 2, nodes, *states.shape[2::2], device=device)
    gates = -torch.rand(layers, 2, nodes, states.shape[2], device=device).cumsum(2)
    paths = [cases[0].path(row, data.draw(st.integers(0, nodes - 1))) for row in range(2)]
    width = max(map(len, paths)) + 1
    path = torch.tensor([each + [each[-1]] * (width - len(each)) for each in paths], device=device)
    accepted = torch.tensor([len(each) - 1 for each in paths], device=device)
    active = torch.tensor([True, data.draw(st.booleans())], device=device)
    theirs, mine = (states.clone(), held.clone()), (states.clone(), held.clone())
    reference.delta_commit(*theirs, inputs, mixed, updates, gates, path, accepted, active)
    conv.delta_commit(*mine, inputs, mixed, updates, gates, path, accepted, active)
    close(mine[0], theirs[0], torch.float32)
    assert torch.equal(mine[1], theirs[1])


@TYPES
@given(heads=st.sampled_from([1, 3, 9]), size=st.sampled_from([12, 64]), nodes=st.integers(1, 5), seed=SEEDS)
@examples(6)
def test_gates(device: str, dtype: torch.dtype, heads: int, size: int, nodes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, nodes, heads, size, generator=draw).to(dtype).to(device)
    wide = torch.randn(2, nodes, 2 * heads * size + 8, generator=draw).to(dtype).to(device)
    weight = torch.randn(size, generator=draw).to(dtype).to(device)
    gate = wide[..., : heads * size].unflatten(-1, (heads, size))
    close(norms.gated_norm(x, gate, weight, 1e-6), reference.gated_norm(x, gate, weight, 1e-6), dtype)
    for product in (wide, *(Parts(torch.randn(s, *wide.shape, generator=draw).to(device), dtype) for s in (2, 4))):
        close(norms.gate_heads(x, product), plain_gate_heads(x, product), dtype)


@INTERPRETED
def test_what_the_kernels_do_not_accept() -> None:
    case = Case.made((2, 4, 8, 12), 5, 0, torch.float32, "cpu")
    given = [case.mixed, case.a, case.b, case.rates, case.state, case.tree.ancestors, *case.space()]
    for at, wrong, words in (
        (0, case.mixed[..., 1:], "mixed is"),
        (1, case.a[:, :2], "a is"),
        (4, case.state.double(), "state is"),
        (5, case.tree.ancestors.int(), "words is"),
        (6, case.space()[0].half(), "updates is"),
    ):
        with pytest.raises(ValueError, match=words):
            delta.delta_tree(*given[:at], wrong, *given[at + 1 :])
    with pytest.raises(ValueError, match="counts is"):
        delta.delta_chain(*given[:5], torch.tensor([1]))
    with pytest.raises(ValueError, match="weight is"):
        conv.tree_conv(case.mixed, torch.randn(3, 4), torch.randn(2, 4, 80), None)
    with pytest.raises(ValueError, match="qkv is"):
        norms.gate_heads(torch.randn(2, 5, 2, 4), torch.randn(2, 5, 15))
    with pytest.raises(ValueError, match="qkv's parts is"):
        norms.gate_heads(torch.randn(2, 5, 2, 4), Parts(torch.randn(2, 2, 5, 15).half(), torch.float32))
    with pytest.raises(ValueError, match=r"rounded to torch\.float16; accepted is torch\.float32"):
        norms.gate_heads(torch.randn(2, 5, 2, 4), Parts(torch.randn(2, 2, 5, 16), torch.float16))
