"""Compile every Triton kernel for a GPU that need not be there, and print a row for each launch: its name, shared
memory and registers.

    python tests/compile_targets.py 86
    python tests/compile_targets.py gfx942 135M "8 rows"     # an AMD target: no registers are read
    python tests/compile_targets.py 86 135M,mixers 0/12      # a twelfth of every fifth launch
    python tests/compile_targets.py - < jobs                 # a line of such arguments each, as JSON lists; an empty line ends its rows

The host functions run as they do on such a device, with tensors on the CPU, and each launch is compiled in place of
being run.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

AMD = {"gfx942": 64 << 10}
"""AMD's targets -> bytes of local data share (CDNA 3 ISA, MI300)."""
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability -> bytes of shared memory that one program may use (CUDA C++ Programming Guide, technical
specifications)."""
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHAPES = {"8B": (4096, 14336, 32, 8, 128, 128256), "135M": (576, 1536, 9, 3, 64, 49152)}
"""name -> hidden size, inner size, query heads, key heads, head size, vocabulary."""
MIXERS = "mixers"
"""In place of a shape: recurrent layers and mixtures of experts."""


class Absent:
    """Triton's driver for a device that is not there."""

    def __init__(self, target: int | str) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.target, 64) if isinstance(self.target, str) else GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        """Notes beside the cache that a kernel's launcher was made, and where."""
        with Path(f"{os.environ['TRITON_CACHE_DIR']}.launchers").open("a") as file:
            file.write(f"{os.getpid()} {metadata.name}\n")


def pretend(target: int | str) -> None:
    """Let kernels and their host functions take tensors on the CPU for those of a device of this compute capability, or
    of AMD's."""
    from fastspec.kernels import launch
    from fastspec.kernels.attention import hopper as hopper_attention
    from fastspec.kernels.attention import ordered as ordered_attention
    from fastspec.kernels.attention import tree as tree_attention
    from fastspec.kernels.drafting import topk_expand
    from fastspec.kernels.linear import experts, experts_row, linear
    from fastspec.kernels.linear import hopper as hopper_linear
    from fastspec.kernels.quantised import hopper as hopper_stored
    from fastspec.kernels.quantised import linear as stored

    triton.runtime.driver.set_active(Absent(target))
    capability = 0 if isinstance(target, str) else target
    launch._capable = lambda device: capability >= 90
    for module in (stored, experts, experts_row):
        module.runs_ptx = lambda device: capability > 0
    for module in (linear, topk_expand):
        module.has_descriptors = launch._capable
    launch.shared_memory = lambda device: limit_of(target)
    for module in (hopper_attention, hopper_linear, hopper_stored, ordered_attention, experts):
        module.is_hopper = lambda device: capability == 90
    tree_attention.processors = lambda device: 108


def limit_of(target: int | str) -> int:
    """Bytes of shared memory that one program may use."""
    return AMD[target] if isinstance(target, str) else SHARED[target]


def compiled(target: int | str, rows: list[dict[str, Any]]) -> None:
    """Let every launch from here on be compiled for a device of this compute capability, and described in `rows`."""
    pretend(target)

    def bound(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            for name in re.findall(r"(%\S+) = tt.reshape %\S+ allow_reorder", made.asm["ttgir"]):
                if re.search(rf'"tt.reduce"\({name}, ', made.asm["ttgir"]):
                    raise ValueError(f"{kernel.__name__}: the places of a maximum are those of another order")
            if isinstance(kernel, GluonJITFunction) and writes_early(made.asm["ptx"]):
                raise ValueError(
                    f"{kernel.__name__}: shared memory is written that other warps' products may still read"
                )
            used = {} if isinstance(target, str) else usage(made.asm["cubin"])
            shared = made.metadata.shared + used.pop("static", 0)
            row = {"kernel": kernel.__name__, "shared": shared, **used}
            rows.append(row | ({"squares": places(made.asm["ttgir"])} if kernel.__name__.endswith("_norm") else {}))

        return run

    JITFunction.__getitem__ = bound


def places(ttgir: str) -> list[str]:
    """The layouts of fp32 rows that a kernel adds up: which of a row's values a thread has."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", ttgir)]


def writes_early(ptx: str) -> bool:
    """True where shared memory is written behind a wait for a warp's own products on Hopper, before all warps have met:
    Triton gives a change of layout the places of operands that it takes for read. (What it keeps there for specialised
    warps has a name.)"""
    waited = False
    for line in ptx.splitlines():
        if "bar.sync" in line or "barrier.sync" in line:
            waited = False
        elif "wgmma.wait_group" in line:
            waited = True
        elif waited and re.search(r"stmatrix|st\.shared", line) and "global_smem" not in line:
            return True
    return False


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, bytes of them that went to memory (the stack), and shared memory that the program itself
    declares beside Triton's, as cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", told)}
    own = max(0, found["SHARED"] - (1 << 10))  # the system has 1 KiB
    return {"registers": found["REG"], "stack": found["STACK"], "static": own}


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def stored_weights(channels: int, depth: int, dtype: torch.dtype) -> dict[str, Any]:
    """Weights [channels, depth] as quantisers store them."""
    from fastspec.kernels.quantised.reference import E4M3, INT8, NF4, PACKED4, Nested, StoredWeight

    def octets(width: int) -> Tensor:
        return torch.zeros(channels, width, dtype=torch.uint8)

    def single(*shape: int) -> Tensor:
        return floats(*shape, dtype=torch.float32)

    blocks = -(-channels // 128), -(-depth // 128)
    zeros, groups = torch.zeros(channels // 8, depth // 32, dtype=torch.int32), torch.zeros(depth, dtype=torch.int32)
    four = octets(depth // 2), PACKED4, floats(channels, depth // 32, dtype=dtype), (1, 32), depth, dtype
    nested = Nested(single(256), single(channels * depth // 2**14), single(1)[0], 256)
    places = torch.zeros(channels, depth // 64, dtype=torch.uint8)
    return {
        "nested nf4": StoredWeight(octets(depth // 2), NF4, places, (1, 64), depth, dtype, nested=nested),
        "int8 on sums": StoredWeight(octets(depth), INT8, single(channels, 1), (1, depth), depth, dtype, on_sums=True),
        "e4m3 in blocks": StoredWeight(octets(depth), E4M3, single(*blocks), (128, 128), depth, dtype),
        "4 bits by groups": StoredWeight(*four, zeros=zeros),
        "4 bits by order": StoredWeight(*four, zeros=zeros, groups=groups),
    }


def launches(shape: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each op of a round on a model of this shape: its name, and a call."""
    from fastspec.kernels.attention import layout as tree_layout
    from fastspec.kernels.attention import ordered as ordered_attention
    from fastspec.kernels.attention import tree as tree_attention
    from fastspec.kernels.attention.reference import Span
    from fastspec.kernels.cache import commit
    from fastspec.kernels.cache import commit as settle
    from fastspec.kernels.drafting import inputs, pairs, topk_expand, tree_build
    from fastspec.kernels.drafting.reference import InputWeights
    from fastspec.kernels.layer import norms as rms_norm
    from fastspec.kernels.layer import rope_cache
    from fastspec.kernels.linear import linear, ordered, swiglu
    from fastspec.kernels.linear import linear as linear_parts
    from fastspec.kernels.linear.reference import SILU, DeferredProduct, Parts
    from fastspec.kernels.parallel import joins, reduced_norm
    from fastspec.kernels.parallel.words import ROWS, Space, words_of
    from fastspec.kernels.quantised import linear as quantised
    from fastspec.kernels.verification import posterior_eval
    from fastspec.kernels.verification.reference import SamplingSettings

    hidden, inner, heads, kv_heads, size, vocab = SHAPES[shape]
    group, draft_vocab, nodes = heads // kv_heads, min(vocab, 32000), 61

    def few(*sizes: int) -> Tensor:
        return floats(*sizes, dtype=dtype)

    for rows in (1, 8, 61):
        x, active = few(1, rows, hidden), torch.ones(1, dtype=torch.bool)
        yield f"linear, {rows} rows", lambda x=x: linear.linear(x, few(hidden + 2 * kv_heads * size, hidden), None)
        yield f"linear to the vocabulary, {rows} rows", lambda x=x: linear.linear(x, few(vocab, hidden), None)
        yield f"linear with a bias, {rows} rows", lambda x=x: linear.linear(x, few(hidden, hidden), few(hidden))
        yield f"gate_up, {rows} rows", lambda x=x: linear.gate_up(x, few(2 * inner, hidden), None)
        yield (
            f"linear_parts, {rows} rows",
            lambda rows=rows: linear_parts.linear_parts(few(1, rows, inner), few(hidden, inner), None),
        )
        yield f"rms_norm, {rows} rows", lambda x=x: rms_norm.rms_norm(x, few(hidden), 1e-5, x)
        space = Space(whole(2), torch.zeros(ROWS, dtype=torch.int32), 0, 2, words_of(hidden, dtype))
        many = Space(whole(4), torch.zeros(ROWS, dtype=torch.int32), 0, 4, words_of(hidden, dtype))
        for name, own, spread in (
            ("", x, space),
            (" after its product", DeferredProduct(x, few(hidden, hidden), None, linear_parts.linear_parts), space),
            (" of four processes", x, many),
            (" in order", x, many),
        ):
            yield (
                f"reduced_norm{name}, {rows} rows",
                lambda x=x, own=own, spread=spread, ordered=name == " in order": reduced_norm.reduced_norm(
                    own, few(hidden), 1e-5, x, None, None, None, spread, ordered
                ),
            )
        yield (
            f"look_up, {rows} rows",
            lambda rows=rows, space=space: joins.summed_rows(whole(1, rows), few(64, hidden), 0, space),
        )
        here = few(rows, draft_vocab // 2)
        joined = Space(*space[:4], words_of(joins.CHUNK, dtype))
        yield f"all_gather, {rows} rows", lambda x=here, space=joined: joins.gathered(x, draft_vocab, space)
        yield f"likeliest, {rows} rows", lambda x=here, space=joined: joins.chosen(x, 0, Space(*space[:4], 16))
        yield f"swiglu, {rows} rows", lambda rows=rows: swiglu.swiglu(few(1, rows, 2 * inner))
        cache, table = few(1, kv_heads, 4096, size), floats(4096, size // 2, dtype=torch.float32)
        qkv = few(1, rows, (heads + 2 * kv_heads) * size)
        at = whole(1, rows)
        yield (
            f"rope_cache, {rows} rows",
            lambda q=qkv, n=at, k=cache, t=table: rope_cache.rope_cache(q, t, t, n, k, k, n),
        )
        yield (
            f"rope_cache in pairs, {rows} rows",
            lambda q=qkv, n=at, k=cache, t=table: rope_cache.rope_cache(q, t, t, n, k, k, n, interleaved=True),
        )
        yield (
            f"rope_cache with a factor, {rows} rows",
            lambda q=qkv, n=at, k=cache, t=table: rope_cache.rope_cache(
                q, t, t, n, k, k, n, factor=floats(4096, dtype=torch.float32)
            ),
        )
        if rows == 8:
            parts = Parts(floats(4, *qkv.shape, dtype=torch.float32), dtype)
            yield (
                f"rope_cache of parts, {rows} rows",
                lambda q=parts, n=at, k=cache, t=table: rope_cache.rope_cache(q, t, t, n, k, k, n),
            )
            yield f"gate_heads of parts, {rows} rows", lambda q=parts: rms_norm.gate_heads(few(1, 8, 1, size), q)
        for extent in (1024, 16384):
            words = None if rows == 1 else whole(1, rows, 1)
            layout = tree_layout.attention_layout(whole(1), words, rows, rows, extent, group)
            keys = few(1, kv_heads, extent + 64, size)
            yield (
                f"tree_attention, {rows} rows, {extent}",
                lambda n=rows, k=keys, to=layout: tree_attention.tree_attention(
                    few(1, n, heads, size), k, k, to, size**-0.5
                ),
            )
            part = 32 * rows
            chain = tree_layout.attention_layout(whole(1), None, part, part, extent, group)
            yield (
                f"tree_attention, a part of {part} tokens, {extent}",
                lambda n=part, k=keys, to=chain: tree_attention.tree_attention(
                    few(1, n, heads, size), k, k, to, size**-0.5
                ),
            )
        keys, sinks = few(1, kv_heads, 16384, size), few(heads)
        for span, extras in (
            (Span(4096), {}),
            (Span(128), {"sinks": sinks}),
            (Span(4096), {"cap": 50.0}),
            (Span(8192, chunk=True), {}),
        ):
            depths = None if rows == 1 else whole(1, rows)
            cut = {"span": span, "depths": depths, "ring": None if span.chunk else span.size + 1024}
            layout = tree_layout.attention_layout(whole(1), words, rows, rows, 16000, group, **cut)
            yield (
                f"tree_attention, {rows} rows, {span} {' '.join(extras)}",
                lambda n=rows, k=keys, to=layout, more=extras: tree_attention.tree_attention(
                    few(1, n, heads, size), k, k, to, size**-0.5, **more
                ),
            )
        wide = few(1, kv_heads, 16384, 512)
        layout = tree_layout.attention_layout(whole(1), words, rows, rows, 16000, group)
        yield (
            f"tree_attention, {rows} rows, wide heads",
            lambda n=rows, k=wide, to=layout: tree_attention.tree_attention(few(1, n, heads, 512), k, k, to, 1.0),
        )
        tree = None if rows == 1 else whole(1, rows, 1)
        for case, bits, slots, shares in (
            ("chain", None, 4000, None),
            ("tree", tree, 4000, None),
            ("long chain", None, 16000, None),
            ("long text", tree, 16000, None),
            ("long text in one share", tree, 16000, 1),
        ):

            def in_order(
                n: int = rows,
                k: Tensor = keys,
                bits: Tensor | None = bits,
                slots: int = slots,
                shares: int | None = shares,
            ) -> Tensor:
                layout = ordered_attention.attention_layout(whole(1), bits, n, n, slots, group)
                q = few(1, n, heads, size)
                return ordered_attention.tree_attention(q, k, k, layout, size**-0.5, shares=shares)

            yield f"ordered attention, {case}, {rows} rows", in_order
        yield f"ordered product, {rows} rows", lambda n=rows: ordered.linear(few(1, n, inner), few(hidden, inner), None)
        yield f"ordered gate_up, {rows} rows", lambda x=x: ordered.gate_up(x, few(2 * inner, hidden), None)
        if rows == 61:
            yield (
                "ordered product, 480 rows",
                lambda: ordered.linear(few(1, 480, hidden), few(3 * hidden // 2, hidden), None),
            )
            yield (
                "ordered gate_up, 480 rows",
                lambda: ordered.gate_up(few(1, 480, hidden), few(2 * inner, hidden), None),
            )
        for kind, weight in stored_weights(hidden, inner, dtype).items():
            yield (
                f"stored product of {kind}, {rows} rows",
                lambda n=rows, w=weight: quantised.linear(few(1, n, inner), w, None),
            )
            yield (
                f"stored parts of {kind}, {rows} rows",
                lambda n=rows, w=weight: quantised.linear_parts(few(1, n, inner), [w], [None]),
            )
            if rows == 1:
                yield f"dequantised {kind}", lambda w=weight: quantised.dequantised(w, dtype)
            if rows == 61:
                yield (
                    f"stored product of {kind}, 128 rows",
                    lambda w=weight: quantised.linear(few(1, 128, inner), w, None),
                )
                yield (
                    f"stored parts of {kind}, 128 rows",
                    lambda w=weight: quantised.linear_parts(few(1, 128, inner), [w], [None]),
                )
                yield (
                    f"stored gate and up of {kind}, 128 rows",
                    lambda w=weight: quantised.linears(few(1, 128, inner), [w] * 2, [None] * 2, SILU),
                )
        eight = stored_weights(hidden, inner, dtype)["e4m3 in blocks"]
        yield (
            f"3 stored parts, {rows} rows",
            lambda n=rows, w=eight: quantised.linear_parts(few(1, n, inner), [w] * 3, [None] * 3),
        )
        for count, kind in ((3, None), (2, SILU)):
            yield (
                f"{count} stored products, {rows} rows",
                lambda n=rows, w=eight, c=count, k=kind: quantised.linears(few(1, n, inner), [w] * c, [None] * c, k),
            )
        logits = few(1, rows, vocab)
        depths = whole(1, rows)
        yield f"draws, {rows} rows", lambda d=depths: posterior_eval.draws(whole(1), whole(1), d)
        yield f"pick, {rows} rows", lambda x=logits: posterior_eval.pick(x, None)
        drawn = floats(1, rows, dtype=torch.float32)
        yield f"pick, drawn, {rows} rows", lambda x=logits, u=drawn: posterior_eval.pick(x, u)
        yield (
            f"pick under settings, {rows} rows",
            lambda x=logits, u=drawn: posterior_eval.pick(x, u, SamplingSettings(0.8, 50, 0.9, 0.1)),
        )
        tree, table = whole(1, rows), few(vocab, hidden)
        yield f"tree_input, {rows} rows", lambda t=tree, e=table: inputs.tree_input(t, t, whole(1), 4000, e)
        path = whole(1, min(rows, 8))
        yield f"posterior_walk, {rows} rows", lambda t=tree, n=path.shape[1]: posterior_eval.posterior_walk(t, t, t, n)
        yield f"commit_slots, {rows} rows", lambda p=path, a=active: settle.commit_slots(whole(1), p, whole(1), a, 4000)
        yield f"emit, {rows} rows", lambda t=tree, p=path, a=active: settle.emit(t, p, whole(1), whole(1), a, whole(1))
    yield (
        "kv_block_copy",
        lambda: commit.kv_block_copy(*(few(4, 1, kv_heads, 1024, size),) * 2, whole(1, 8), whole(1, 8)),
    )
    yield (
        "path_pairs",
        lambda: pairs.path_pairs(
            few(1, nodes, 3 * hidden),
            whole(1, 8),
            whole(1),
            whole(1),
            torch.ones(1, dtype=torch.bool),
            whole(1),
            whole(1),
        ),
    )
    yield (
        "path_pairs of heard tokens",
        lambda: pairs.path_pairs(
            few(1, nodes, hidden),
            whole(1, 8),
            whole(1),
            whole(1),
            torch.ones(1, dtype=torch.bool),
            whole(1),
            whole(1),
            heard=(whole(1, 8), whole(vocab), 1024),
        ),
    )
    last = few(1, hidden)
    yield (
        "keep_last",
        lambda: pairs.keep_last(few(1, 8, hidden), few(1, 8, hidden), whole(1), last, last.clone(), whole(1), 4000),
    )
    yield (
        "keep_pair",
        lambda: pairs.keep_pair(
            few(1, 1, 3 * hidden),
            whole(1),
            torch.ones(1, dtype=torch.bool),
            whole(1),
            few(1, 128, 3 * hidden),
            whole(1, 128),
        ),
    )
    scores, ids = floats(1, 10, dtype=torch.float32), whole(draft_vocab)
    yield "topk_expand", lambda: topk_expand.topk_expand(few(1, 10, hidden), few(draft_vocab, hidden), scores, 10, ids)
    yield (
        "topk_expand of one node",
        lambda: topk_expand.topk_expand(few(1, 1, hidden), few(draft_vocab, hidden), scores[:, :1], 10, ids),
    )
    yield "topk_expand of logits", lambda: topk_expand.topk_expand(few(1, 10, draft_vocab), None, scores, 10, ids)
    for wide in (20, topk_expand.MAX_COUNT):
        scores = floats(1, wide, dtype=torch.float32)
        yield (
            f"topk_expand, {wide} children",
            lambda k=wide, s=scores: topk_expand.topk_expand(few(1, k, hidden), few(draft_vocab, hidden), s, k, ids),
        )
    norms, table = few(hidden), few(vocab, hidden)
    yield (
        "next_frontier",
        lambda: inputs.next_frontier(whole(1, 100), whole(1, 10), few(1, 10, hidden), whole(1, 10, 2), 10),
    )
    yield (
        "head_input",
        lambda: inputs.head_input(whole(1, 10), few(1, 10, hidden), InputWeights(table, norms, norms, 1e-5)),
    )
    yield (
        "frontier_input",
        lambda: inputs.frontier_input(
            whole(1, 100),
            whole(1, 10),
            few(1, 10, hidden),
            whole(1, 10, 2),
            10,
            InputWeights(table, norms, norms, 1e-5, 1.0),
        ),
    )
    for many in (710, 5000, tree_build.MAX_CANDIDATES):
        grown = floats(1, many, dtype=torch.float32)
        yield (
            f"tree_build, {many} candidates",
            lambda n=many, s=grown: tree_build.tree_build(
                s, whole(1, n), whole(1, n), whole(n), whole(1), 256 if n > 710 else 60
            ),
        )


def recurrent_launches(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Those of a Gated DeltaNet layer of Qwen3.5-9B, and of its gated attention."""
    from fastspec.kernels.layer import norms as gated
    from fastspec.kernels.layer import rope_cache
    from fastspec.kernels.recurrent import conv, delta
    from fastspec.kernels.recurrent.reference import DecayRates

    def few(*sizes: int) -> Tensor:
        return floats(*sizes, dtype=dtype)

    channels, heads, size = 8192, 32, 128
    rates, state = DecayRates(few(heads), few(heads)), floats(1, heads, size, size, dtype=torch.float32)
    weight, held, cache = few(channels, 4), few(1, 4, channels), few(1, 4, 4096, 256)
    for rows in (1, 8, 61, 512):
        wide, at, words = few(1, rows, 12352), whole(1, rows), whole(1, rows, (rows + 63) // 64)
        mixed, gate, b, a = wide.split((channels, 4096, heads, heads), -1)
        parts = gate.unflatten(-1, (heads, size))
        updates, gates = floats(1, rows, heads, size, dtype=torch.float32), floats(1, rows, heads, dtype=torch.float32)
        qkv, table = few(1, rows, (2 * 16 + 8) * 256), floats(4096, 32, dtype=torch.float32)
        yield f"tree_conv, {rows} rows", lambda x=mixed, p=at: conv.tree_conv(x, weight, held, p, x, x)
        yield f"tree_conv of a text, {rows} rows", lambda x=mixed: conv.tree_conv(x, weight, held, None)
        yield f"hold, {rows} rows", lambda x=mixed: conv.hold(x, held, whole(1))
        yield f"delta_chain, {rows} rows", lambda x=mixed, a=a, b=b: delta.delta_chain(x, a, b, rates, state, whole(1))
        yield (
            f"delta_tree, {rows} rows",
            lambda x=mixed, a=a, b=b, w=words, u=updates, g=gates: delta.delta_tree(x, a, b, rates, state, w, u, g),
        )
        yield f"gated_norm, {rows} rows", lambda x=parts: gated.gated_norm(few(*x.shape), x, few(size), 1e-6)
        yield f"gate_heads, {rows} rows", lambda x=qkv, n=rows: gated.gate_heads(few(1, n, 16, 256), x)
        yield (
            f"rope_cache with gates, {rows} rows",
            lambda q=qkv, n=at, t=table: rope_cache.rope_cache(
                q, t, t, n, cache, cache, n, few(256), few(256), 1e-6, True, True
            ),
        )
    states, kept = state[None], few(1, 1, 61, channels)
    updates, gates = floats(1, 1, 61, heads, size, dtype=torch.float32), floats(1, 1, 61, heads, dtype=torch.float32)
    on = torch.ones(1, dtype=torch.bool)
    yield (
        "delta_commit",
        lambda: conv.delta_commit(states, held[None], kept, kept, updates, gates, whole(1, 8), whole(1), on),
    )


def mixture_launches(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """A layer's router and experts, of fewer experts than the families have: their number is none of the products'."""
    from fastspec.kernels.linear import experts
    from fastspec.kernels.linear.reference import GELU_TANH, SWIGLU, Activation, Expert, Routing
    from fastspec.kernels.quantised.reference import MXFP4, StoredExperts, StoredWeight

    def few(*sizes: int) -> Tensor:
        return floats(*sizes, dtype=dtype)

    def codes(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=torch.uint8)

    def powers(*sizes: int) -> Tensor:
        return codes(*sizes).view(torch.float8_e8m0fnu)

    clamped = Expert(interleaved=True, gate=Activation(1.702), offset=1.0, limit=7.0)
    families = (
        ("Mixtral", 4096, 2048, 2, SWIGLU, False, False),
        ("gpt-oss", 2880, 2880, 4, clamped, True, False),
        ("GLM-4.5", 4096, 1408, 8, SWIGLU, False, True),
        ("Gemma 4", 2816, 704, 8, Expert(gate=GELU_TANH), False, False),
        ("Llama 4", 5120, 8192, 1, Expert(scales_input=True), True, True),
    )
    for rows in (1, 16, 32, 60, 128):
        for name, hidden, inner, choices, kind, transposed, shared in families:
            sizes = (
                ((8, hidden, 2 * inner), (8, inner, hidden))
                if transposed
                else ((8, 2 * inner, hidden), (8, hidden, inner))
            )
            gate_up, down = (few(*each).transpose(1, 2) if transposed else few(*each) for each in sizes)
            biases = {"gate_up_bias": few(8, 2 * inner), "down_bias": few(8, hidden)} if kind is clamped else {}
            beside = {"shared": few(rows, hidden), "shared_gate": few(rows, 1)} if shared else {}
            given = few(rows, hidden), gate_up, down, whole(rows, choices), few(rows, choices), kind
            yield f"experts of {name}, {rows} rows", lambda a=given, more=biases | beside: experts.experts(*a, **more)
        weights = [
            StoredExperts(StoredWeight(codes(8 * lines, 1440), MXFP4, powers(8 * lines, 90), (1, 32), 2880, None), 8)
            for lines in (5760, 2880)
        ]
        given = few(rows, 2880), *weights, whole(rows, 4), few(rows, 4), clamped
        more = {"gate_up_bias": few(8, 5760), "down_bias": few(8, 2880)}
        yield f"experts in MXFP4, {rows} rows", lambda a=given, more=more: experts.experts(*a, **more)
    chosen = Routing(8, normalised=True), Routing(10), Routing(8, sigmoid=True, normalised=True, groups=8, kept=4)
    for choice, count in zip(chosen, (128, 512, 256), strict=True):
        correction = floats(count, dtype=torch.float32) if choice.sigmoid else None
        yield f"route, {count} experts", lambda r=choice, c=correction, n=count: experts.route(few(60, n), r, c)
    alone = Routing(1, normalised=True, groups=8, kept=2)
    yield "route, one of 64 experts in groups", lambda: experts.route(few(60, 64), alone)


def main(target: int | str, shapes: list[str], only: str = "") -> None:
    """Print a row of JSON per launch; one that cannot be compiled says why. `only` is part of the name of those that
    are wanted, or says which of so many parts: of each op, whatever it is given beside, every fifth launch is in one of
    them, the first among these."""
    rows: list[dict[str, Any]] = []
    compiled(target, rows)
    part = re.fullmatch(r"(\d+)/(\d+)", only)
    counts: dict[str, int] = {}
    for shape in shapes:
        half = torch.bfloat16
        found = chain(recurrent_launches(half), mixture_launches(half)) if shape == MIXERS else launches(shape, half)
        for name, call in found:
            op = f"{shape}, {re.split(', | of | in | with | to ', name)[0]}"
            count = counts[op] = counts.get(op, -1) + 1
            offset = list(counts).index(op) + count // 5  # so that ops of few launches do not all go to the first part
            if (count % 5 or offset % int(part[2]) != int(part[1])) if part else only not in name:
                continue
            before = len(rows)
            try:
                call()
            except Exception as error:
                rows.append({"kernel": "?", "error": f"{type(error).__name__}: {error}"[:400]})
            for row in rows[before:]:
                print(
                    json.dumps({"capability": target, "shape": shape, "op": name, "limit": limit_of(target), **row}),
                    flush=True,
                )


def read(arguments: list[str]) -> None:
    """`main` of arguments of the command line."""
    chosen = arguments[0] if arguments[0] in AMD else int(arguments[0])
    main(chosen, arguments[1].split(",") if len(arguments) > 1 else [*SHAPES, MIXERS], *arguments[2:])


def each(jobs: list[list[str]]) -> None:
    """`read` of each in a fork of its own, for a process compiles for one target; the imports are shared. One that
    fails ends all."""
    for job in jobs:
        sys.stdout.flush()
        if not (child := os.fork()):
            read(job)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{job} failed")
        print()


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        each([json.loads(line) for line in sys.stdin])
    else:
        read(sys.argv[1:])
