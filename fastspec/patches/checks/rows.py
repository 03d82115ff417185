"""Checks: a row for every kernel and form of it, with small inputs in which rounding decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.attention.reference import Span
from fastspec.kernels.drafting.reference import Candidates, InputWeights
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Activation, Expert, Routing
from fastspec.kernels.quantised.reference import (
    E4M3,
    INT8,
    MXFP4,
    NF4,
    PACKED4,
    Codes,
    Nested,
    StoredExperts,
    StoredWeight,
)
from fastspec.kernels.recurrent.reference import DecayRates
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.checks.inputs import Draw, LayoutArguments, layers, tree

GROUPED = Routing(4, sigmoid=True, normalised=True, groups=4, kept=2)
GPT_OSS = Expert(interleaved=True, gate=Activation(1.702), offset=1.0, limit=7.0)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """The op that a row is about, which form of it, its inputs, and what of its result has a meaning. `calls` names
    another op that is called, where the result of the row's own can only be read by that."""

    op: str
    form: str
    inputs: Callable[[Draw], Inputs]
    view: Callable[[Any], Any]
    calls: str | None

    @property
    def name(self) -> str:
        """As errors have it."""
        return f"{self.op} ({self.form})"


def check(
    op: str,
    form: str,
    inputs: Callable[..., Inputs],
    *given: Any,
    view: Callable[[Any], Any] = lambda result: result,
    calls: str | None = None,
    **options: Any,
) -> Check:
    """A check whose inputs take more than what draws them."""
    return Check(op, form, lambda draw: inputs(draw, *given, **options), view, calls)


def products(draw: Draw, rows: int, channels: int, depth: int, bias: bool = False, kind: Activation = SILU) -> Inputs:
    """x [rows, depth] times `channels` output channels; `kind` is for a gate."""
    weight = draw.floats(channels, depth, scale=depth**-0.5)
    more = {} if kind == SILU else {"kind": kind}
    return (draw.floats(1, rows, depth), weight, draw.floats(channels) if bias else None), more


def apart(draw: Draw, rows: int, channels: Sequence[int], depth: int, kind: Activation | None = None) -> Inputs:
    """x [rows, depth] times weights of so many output channels each, every other of which has a bias."""
    weights = [draw.floats(count, depth, scale=depth**-0.5) for count in channels]
    biases = [draw.floats(count) if at % 2 else None for at, count in enumerate(channels)]
    return (draw.floats(1, rows, depth), weights, biases, kind), {}


def stored(
    draw: Draw, rows: int, kind: Codes, block: tuple[int, int], gate: Activation | None = None, **more: bool
) -> Inputs:
    """x [rows, 256] times two weights of 48 channels with scales of blocks; `more` says which of `zeros`, `nested` and
    `on_sums` they have. With a `gate` both have a bias, else one."""

    def weight(draw: Draw) -> StoredWeight:
        groups, zeros, nested = 256 // block[1], None, None
        codes = draw.whole(256 if kind != E4M3 else 112, 48, 256 * kind.bits // 8).to(torch.uint8)
        scales = (draw.uniform(-(-48 // block[0]), groups) + 0.5) / 256
        if more.get("nested"):
            nested = Nested(draw.uniform(256), draw.uniform(1) / 16, draw.uniform(1)[0] / 16, 256)
            scales = draw.whole(256, 48, groups).to(torch.uint8)
        if more.get("zeros"):
            zeros = draw.whole(2**31, 48 * kind.bits // 32, groups).to(torch.int32)
        on_sums = more.get("on_sums", False)
        return StoredWeight(codes, kind, scales, block, 256, None, zeros=zeros, nested=nested, on_sums=on_sums)

    x, weights, bias = draw.floats(1, rows, 256), [weight(draw), weight(draw)], draw.floats(48)
    return (x, weights, [bias if gate else None, bias], gate), {}


def stored_part(draw: Draw, rows: int, kind: Codes, block: tuple[int, int], lines: Sequence[int] = (96,)) -> Inputs:
    """x [rows, 512] times weights of some lines each as a quantiser stores them, with scales of blocks."""
    weights = []
    for count in lines:
        codes = draw.whole(256, count, 512 * kind.bits // 8).to(torch.uint8)
        scales = (draw.uniform(count, 512 // block[1]) + 0.5) / 256
        weights.append(StoredWeight(codes, kind, scales, block, 512, None))
    return (draw.floats(1, rows, 512), weights, [None] * len(weights)), {}


def attention(
    draw: Draw,
    nodes: int,
    extent: int,
    chain: bool = False,
    span: Span | None = None,
    extras: bool = False,
    size: int = 32,
) -> Inputs:
    """Two rows of `nodes` queries behind prefixes of different length, four query heads to two key heads."""
    _, depths, words = tree(draw, 2, nodes)
    q = draw.floats(2, nodes, 4, size)
    k, v = (draw.floats(2, 2, extent, size) for _ in "kv")
    seen = {"span": span, "depths": None if chain else depths} if span else {}
    prefix = draw.fixed([extent - nodes - 3, (extent - nodes) // 2])
    layout = LayoutArguments((prefix, None if chain else words, nodes, nodes, extent, 2), seen)
    more = {"sinks": draw.floats(4), "cap": 20.0} if extras else {}
    return (q, k, v, layout, size**-0.5), more


def norm(draw: Draw, residual: bool = False, offset: float | None = None) -> Inputs:
    """Rows of a width that is no power of 2, with a residual or without."""
    x, weight = draw.floats(2, 3, 80), draw.floats(80)
    return (x, weight, 1e-5, draw.floats(2, 3, 80) if residual else None), {"offset": offset}


def rope(draw: Draw, norms: bool, scaled: bool = False) -> Inputs:
    """Two rows of three nodes, four query heads to two key heads; with norms of heads, and a factor by position."""
    size, rows, nodes = 16, 2, 3
    angles = draw.uniform(32, size // 2) * 6
    positions = draw.fixed([[4, 5, 6], [9, 10, 10]])
    slots = draw.fixed([[4, 5, 6], [9, 10, 11]])
    k, v = (draw.floats(rows, 2, 32, size) for _ in "kv")
    weights = (draw.floats(size), draw.floats(size), 1e-6) if norms else ()
    more = {"factor": draw.uniform(32) + 0.5} if scaled else {}
    mixed = draw.floats(rows, nodes, (4 + 2 * 2) * size)
    return (mixed, angles.cos(), angles.sin(), positions, k, v, slots, *weights), more


def walk(draw: Draw) -> Inputs:
    """Two trees of five nodes, in which four and two nodes, the root counted, were picked."""
    parents = draw.fixed([[0, 0, 0, 1, 3], [0, 0, 1, 2, 3]])
    tokens = draw.fixed([[9, 4, 5, 6, 7], [8, 3, 3, 5, 1]])
    picks = draw.fixed([[4, 6, 0, 7, 2], [3, 9, 4, 4, 4]])
    return (tokens, parents, picks, 4), {}


def numbers(draw: Draw) -> Inputs:
    """Streams of which a step leaves 64 bits, and nodes at equal depths."""
    streams, depths = draw.fixed([2**62 + 5, -(2**61) - 7]), draw.fixed([[0, 1, 1, 2, 5], [0, 1, 2, 2, 3]])
    return (streams, draw.fixed([0, 4096]), depths), {}


def scores(draw: Draw, rows: int, drawn: bool, settings: SamplingSettings | None = None) -> Inputs:
    """Logits of which a few tokens hold the mass, and numbers that fall into the middle of their shares."""
    logits = draw.order(300, 1, rows).to(draw.dtype) / 64 - 8
    best = draw.order(300, 1, rows)[..., :2]
    logits = logits.scatter(-1, best, draw.fixed([9.0, 9.5], torch.float32).to(draw.dtype).expand(1, rows, 2))
    number = torch.where(draw.uniform(1, rows) < 0.5, 0.15, 0.8)  # the two best have shares of about .38 and .62
    return (logits, number if drawn else None, settings), {}


def expansion(draw: Draw, nodes: int, count: int, below: bool = False) -> Inputs:
    """Logits are whole numbers, all different at a node: p(v) / 16, and its negative at every other node."""
    vocab, hidden = 200, 64
    order = draw.order(vocab)
    weight = torch.zeros(vocab, hidden, device=draw.device, dtype=torch.float32)
    weight[:, 0], weight[:, hidden - 1] = order % 16, order // 16
    x = draw.floats(1, nodes, hidden).float()
    sign = 1 - 2 * (torch.arange(nodes, device=draw.device) % 2)
    x[..., 0], x[..., hidden - 1] = sign / 16, sign
    start = -0.37 * torch.arange(nodes, device=draw.device, dtype=torch.float32)[None]
    out = None
    if below:
        whole = [draw.whole(9, 1, size) for size in (nodes * count, count * count)]
        out = Candidates(draw.single(1, nodes * count), whole[0], whole[1], 7)
    return (x.to(draw.dtype), weight.to(draw.dtype), start, count, draw.whole(50, vocab), out), {}


def candidates(draw: Draw) -> Inputs:
    """Two levels of 4 and 16 candidates, of which 9 are kept."""
    first = -draw.order(4, 2).float() - 1
    second = first.repeat_interleave(4, 1) - 0.13 * (1 + draw.order(16, 2).float())
    above = torch.arange(4, device=draw.device).repeat_interleave(4).expand(2, -1)
    parents = torch.cat((torch.full_like(above[:, :4], -1), above), 1)
    depths = draw.fixed([1] * 4 + [2] * 16)
    return (torch.cat((first, second), 1), draw.whole(999, 2, 20), parents, depths, draw.whole(999, 2), 10), {}


def frontier(draw: Draw) -> Inputs:
    """Three of twelve candidates go on."""
    words = draw.whole(2**20, 2, 3, 1)
    return (draw.whole(40, 2, 12), draw.order(12, 2)[:, :3].contiguous(), draw.floats(2, 3, 48), words, 24), {}


def fed(draw: Draw, offset: float | None = None) -> InputWeights:
    """An embedding's table and the two norms of a head."""
    return InputWeights(draw.floats(40, 48), draw.floats(48), draw.floats(48), 1e-5, offset)


def head(draw: Draw) -> Inputs:
    """Three tokens of two rows, with hidden states."""
    return (draw.whole(40, 2, 3), draw.floats(2, 3, 48), fed(draw)), {}


def verdict(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """path [2, 3], accepted, bonus and active of two rows with trees of five nodes."""
    path, accepted, bonus = (draw.fixed(each) for each in ([[0, 2, 4], [0, 1, 1]], [2, 1], [77, 78]))
    return path, accepted, bonus, draw.fixed([True, False], torch.bool)


def commitment(draw: Draw) -> Inputs:
    """A row that runs, and one that has ended, at the end of its room."""
    path, accepted, _, active = verdict(draw)
    return (draw.fixed([7, 30]), path, accepted, active, 31), {}


def emission(draw: Draw) -> Inputs:
    """The tokens of an accepted path, of a row that runs and of one that does not."""
    path, *others = verdict(draw)
    return (draw.whole(999, 2, 5), path, *others, draw.fixed([5, 6])), {}


def pairs(draw: Draw) -> Inputs:
    """Features of five nodes, of which those on the path are kept."""
    return (draw.floats(2, 5, 96), *verdict(draw), draw.fixed([5, 6]), draw.fixed([7, 30])), {}


def last_pairs(draw: Draw) -> Inputs:
    """Two states of three nodes, of which the last accepted one is kept."""
    states = [draw.floats(2, 3, 48) for _ in range(2)]
    return (*states, draw.fixed([2, 0]), draw.floats(2, 48), draw.floats(2, 48), draw.fixed([7, 30]), 31), {}


def kept_pair(draw: Draw) -> Inputs:
    """Features of two nodes a row, of which one row is not active and one has kept all that it can."""
    active = torch.tensor([True, True, False], device=draw.device)
    held = draw.floats(3, 4, 96), draw.whole(40, 3, 4)
    return (draw.floats(3, 2, 96), draw.fixed([5, 6, 7]), active, draw.fixed([2, 4, 1]), *held), {}


def moves(draw: Draw) -> Inputs:
    """Slots that overlap: what is moved lies where something is moved to."""
    caches = [draw.floats(2, 2, 2, 16, 24) for _ in "kv"]
    return (*caches, draw.fixed([[4, 6, 7], [8, 9, 11]]), draw.fixed([[4, 5, 6], [8, 9, 10]])), {}


def places(draw: Draw) -> Inputs:
    """Tokens and depths of two trees, one of which ends where positions do."""
    return (draw.whole(40, 2, 5), draw.whole(4, 2, 5), draw.fixed([7, 30]), 32, draw.floats(40, 48)), {}


def gates(draw: Draw) -> Inputs:
    """Heads beside a product that holds their gates."""
    return (draw.floats(2, 3, 4, 16), draw.floats(2, 3, (2 * 4 + 2 * 2) * 16)), {}


def gated(draw: Draw) -> Inputs:
    """Heads, their gates and a norm."""
    return (draw.floats(2, 3, 4, 16), draw.floats(2, 3, 4, 16), draw.floats(16), 1e-6), {}


def routing(draw: Draw, chosen: Routing, corrected: bool = False) -> Inputs:
    """Logits of 32 experts that are all different, for five tokens."""
    logits = (draw.order(32, 5).to(draw.dtype) - 16) / 8
    correction = draw.order(32).float() * 1e-3 if corrected else None
    return (logits, chosen, correction), {}


def by_expert(result: Any) -> Any:
    """Experts and their shares in the order of the experts, since theirs has no meaning."""
    chosen, shares = result
    order = chosen.argsort(-1)
    return chosen.gather(-1, order), shares.gather(-1, order)


def mixture(draw: Draw, tokens: int, kind: Expert) -> Inputs:
    """Four experts with a shared one."""
    size, inner = 64, 48
    chosen = draw.order(4, tokens)[:, :2].contiguous()
    weights = draw.floats(4, 2 * inner, size, scale=size**-0.5), draw.floats(4, size, inner, scale=inner**-0.5)
    shares = draw.uniform(tokens, 2).to(draw.dtype)
    return (draw.floats(tokens, size), *weights, chosen, shares, kind), {"shared": draw.floats(tokens, size)}


def stored_mixture(draw: Draw, tokens: int, kind: Expert) -> Inputs:
    """Four experts in MXFP4 with biases."""

    def weights(draw: Draw, channels: int, depth: int) -> StoredExperts:
        codes = draw.whole(256, 4 * channels, depth // 2).to(torch.uint8)
        scales = (draw.whole(3, 4 * channels, depth // 32) + 121).to(torch.uint8).view(torch.float8_e8m0fnu)
        return StoredExperts(StoredWeight(codes, MXFP4, scales, (1, 32), depth, None), 4)

    size, inner = 96, 64
    chosen = draw.order(4, tokens)[:, :2].contiguous()
    shares = draw.uniform(tokens, 2).to(draw.dtype)
    experts = weights(draw, 2 * inner, size), weights(draw, size, inner)
    biases = {"gate_up_bias": draw.floats(4, 2 * inner), "down_bias": draw.floats(4, size)}
    return (draw.floats(tokens, size), *experts, chosen, shares, kind), biases


SIZES = {"keys": 2, "values": 4, "key": 16, "value": 16}
CHANNELS = 2 * SIZES["keys"] * SIZES["key"] + SIZES["values"] * SIZES["value"]


def recurrent(draw: Draw, nodes: int) -> tuple[Any, ...]:
    """mixed, a, b, rates, state."""
    values = SIZES["values"]
    rates = DecayRates(draw.floats(values), draw.floats(values))
    state = draw.single(2, values, SIZES["key"], SIZES["value"])
    return draw.floats(2, nodes, CHANNELS), draw.floats(2, nodes, values), draw.floats(2, nodes, values), rates, state


def delta_tree(draw: Draw) -> Inputs:
    """Trees of six nodes, with space for their updates."""
    nodes, (_, _, words) = 6, tree(draw, 2, 6)
    spaces = draw.single(2, nodes, SIZES["values"], SIZES["value"]), draw.single(2, nodes, SIZES["values"])
    return (*recurrent(draw, nodes), words, *spaces), {}


def delta_chain(draw: Draw) -> Inputs:
    """Texts of 13 and 20 tokens."""
    return (*recurrent(draw, 20), draw.fixed([13, 20])), {}


def delta_commit(draw: Draw) -> Inputs:
    """The updates of an accepted path, of a row that runs and of one that does not."""
    nodes, values = 5, SIZES["values"]
    path, accepted, _, active = verdict(draw)
    states, held = draw.single(1, 2, values, SIZES["key"], SIZES["value"]), draw.floats(1, 2, 4, CHANNELS)
    inputs, mixed = (draw.floats(1, 2, nodes, CHANNELS) for _ in range(2))
    updates, grown = draw.single(1, 2, nodes, values, SIZES["value"]), -draw.uniform(1, 2, nodes, values)
    return (states, held, inputs, mixed, updates, grown, path, accepted, active), {}


def convolution(draw: Draw, chain: bool) -> Inputs:
    """Six nodes of a text or of trees, behind four inputs that are held."""
    parents = None if chain else tree(draw, 2, 6)[0]
    return (draw.floats(2, 6, CHANNELS), draw.floats(CHANNELS, 4), draw.floats(2, 4, CHANNELS), parents), {}


def held(draw: Draw) -> Inputs:
    """Inputs of which six and two are real, where four are held."""
    return (draw.floats(2, 6, CHANNELS), draw.floats(2, 4, CHANNELS), draw.fixed([6, 2])), {}


def likeliest(draw: Draw) -> Inputs:
    """Logits that are all different, in bfloat16 too."""
    return ((draw.order(300, 3) - 150).to(draw.dtype) / 16, 4), {}


LONG = 1100
"""Cache slots that several programs share."""
CHECKS: tuple[Check, ...] = (
    check("linear", "one row", products, 1, 96, 256),
    check("linear", "one row, a bias and an odd depth", products, 1, 40, 200, bias=True),
    check("linear", "5 rows", products, 5, 96, 256),
    check("linear", "5 rows, deep", products, 5, 64, 4096, bias=True),
    check("linears", "one row", apart, 1, (96, 32, 32), 256),
    check("linears", "5 rows", apart, 5, (96, 32, 32), 256),
    check("linears", "20 rows, a gate", apart, 20, (64, 64), 256, SILU),
    check("linears", "5 rows, a gate of GELU", apart, 5, (48, 48), 256, GELU_TANH),
    check("stored_linears", "int8 by lines, one row", stored, 1, INT8, (1, 256), on_sums=True),
    check("stored_linears", "e4m3 in blocks, 5 rows", stored, 5, E4M3, (16, 128)),
    check("stored_linears", "e4m3 in blocks, a gate, 20 rows", stored, 20, E4M3, (16, 128), SILU),
    check("stored_linears", "4 bits, zero points, 20 rows", stored, 20, PACKED4, (1, 32), zeros=True),
    check("stored_linears", "a table, nested scales, 80 rows", stored, 80, NF4, (1, 64), nested=True),
    check("stored_linears", "4 bits, zero points, many rows", stored, 520, PACKED4, (1, 32), zeros=True),
    check("stored_parts", "int8 by lines, 20 rows", stored_part, 20, INT8, (1, 512)),
    check("stored_parts", "4 bits, groups, 5 rows", stored_part, 5, PACKED4, (1, 128)),
    check("stored_parts", "three in int8, 10 rows", stored_part, 10, INT8, (1, 512), (96, 32, 32)),
    check("gate_up", "one row", products, 1, 2 * 48, 256),
    check("gate_up", "5 rows", products, 5, 2 * 48, 256),
    check("gate_up", "5 rows, GELU", products, 5, 2 * 48, 256, kind=GELU_TANH),
    check("gate_up", "20 rows", products, 20, 2 * 64, 256, bias=True),
    check("gate_up", "80 rows", products, 80, 2 * 48, 64),
    check("linear_parts", "5 rows, deep", products, 5, 64, 4096, bias=True),
    check("attention_layout", "trees", attention, 6, 60, calls="tree_attention"),
    check("tree_attention", "few queries", attention, 1, 60, chain=True),
    check("tree_attention", "few queries, a long text", attention, 2, LONG),
    check("tree_attention", "trees", attention, 20, 90),
    check("tree_attention", "trees, a long text", attention, 20, LONG),
    check("tree_attention", "a chain, windows", attention, 20, 90, chain=True, span=Span(16)),
    check("tree_attention", "trees, chunks", attention, 12, 90, span=Span(16, chunk=True)),
    check("tree_attention", "sinks and a cap", attention, 20, 90, extras=True),
    check("tree_attention", "few queries, sinks and a cap", attention, 1, 90, extras=True),
    check("rms_norm", "alone", norm),
    check("rms_norm", "of a sum, with an offset", norm, residual=True, offset=1.0),
    check("stack", "trees", layers, 5, biased=True),
    check("stack", "one token, norms of heads, weights side by side", layers, 1, apart=False, norms=True, offset=1.0),
    check("stack", "a head's input", layers, 3, given=True, single=True),
    check("rope_cache", "plain", rope, norms=False),
    check("rope_cache", "norms", rope, norms=True),
    check("rope_cache", "a factor by position", rope, norms=False, scaled=True),
    check("gate_heads", "plain", gates),
    check("gated_norm", "plain", gated),
    check("route", "softmax", routing, Routing(4, normalised=True), view=by_expert),
    check("route", "groups", routing, GROUPED, corrected=True, view=by_expert),
    check("experts", "few tokens", mixture, 3, Expert()),
    check("experts", "40 tokens, interleaved", mixture, 40, GPT_OSS),
    check("stored_experts", "one token", stored_mixture, 1, GPT_OSS),
    check("stored_experts", "20 tokens", stored_mixture, 20, GPT_OSS),
    check("kv_block_copy", "overlap", moves),
    check("tree_input", "trees", places),
    check("commit_slots", "two rows", commitment),
    check("emit", "two rows", emission),
    check("path_pairs", "two rows", pairs),
    check("keep_last", "two rows", last_pairs),
    check("keep_pair", "three rows", kept_pair),
    check("topk_logprobs", "three rows", likeliest),
    check("topk_expand", "one node", expansion, 1, 4),
    check("topk_expand", "6 nodes", expansion, 6, 4, below=True),
    check("topk_expand", "20 children", expansion, 2, 20),
    check("next_frontier", "two rows", frontier),
    check("head_input", "two rows", head),
    check("frontier_input", "two rows, an offset", lambda draw: ((*frontier(draw)[0], fed(draw, 1.0)), {})),
    check("tree_build", "two levels", candidates),
    check("draws", "two rows", numbers),
    check("pick", "the likeliest", scores, 3, drawn=False),
    check("pick", "a draw", scores, 3, drawn=True),
    check("pick", "a draw under settings", scores, 3, True, SamplingSettings(0.9, 20, 0.99, 0.01)),
    check("posterior_walk", "two rows", walk),
    check("tree_conv", "trees", convolution, chain=False),
    check("tree_conv", "a text", convolution, chain=True),
    check("hold", "two rows", held),
    check("delta_tree", "trees", delta_tree),
    check("delta_chain", "a text", delta_chain, view=lambda out: (out[0, :13], out[1])),
    check("delta_commit", "two rows", delta_commit),
)
