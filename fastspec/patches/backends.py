"""Backends, the kernels that a model gets, named once, at `patch` time; and lines about what a call waits for."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from fastspec.config import BACKENDS
from fastspec.errors import Unsupported, accepted
from fastspec.files import cache_folder
from fastspec.generation.capture import FORESIGHT
from fastspec.generation.ops import Ops
from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import cpu
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import Native
from fastspec.kernels.parallel import reference as parallel_reference
from fastspec.kernels.parallel import symmetric
from fastspec.kernels.quantised import reference as quantised_reference
from fastspec.kernels.recurrent import reference as recurrent_reference
from fastspec.kernels.verification import reference as verification_reference

Library = TypeVar("Library")
SETTING = "FASTSPEC_QUIET"


def notice(line: str) -> None:
    """Print a line, unless the environment's FASTSPEC_QUIET is set, or transformers' verbosity is "error" or less."""
    if os.environ.get(SETTING, "") in ("", "0") and logging.get_verbosity() <= logging.WARNING:
        print(f"fastspec: {line}", file=sys.stderr, flush=True)


TORCH = Ops(
    name="torch",
    attention_layout=attention_reference.attention_layout,
    tree_attention=attention_reference.tree_attention,
    cache_write=cache_reference.cache_write,
    kv_block_copy=cache_reference.kv_block_copy,
    tree_input=drafting_reference.tree_input,
    commit_slots=cache_reference.commit_slots,
    emit=cache_reference.emit,
    path_pairs=drafting_reference.path_pairs,
    keep_last=drafting_reference.keep_last,
    keep_pair=drafting_reference.keep_pair,
    linear=linear_reference.linear,
    linears=linear_reference.linears,
    rms_norm=layer_reference.rms_norm,
    rope_cache=layer_reference.rope_cache,
    gate_up=linear_reference.gate_up,
    gate_heads=layer_reference.gate_heads,
    route=linear_reference.route,
    tree_conv=recurrent_reference.tree_conv,
    hold=recurrent_reference.hold,
    delta_tree=recurrent_reference.delta_tree,
    delta_chain=recurrent_reference.delta_chain,
    delta_commit=recurrent_reference.delta_commit,
    gated_norm=recurrent_reference.gated_norm,
    topk_logprobs=drafting_reference.topk_logprobs,
    topk_expand=drafting_reference.topk_expand,
    next_frontier=drafting_reference.next_frontier,
    head_input=drafting_reference.head_input,
    frontier_input=drafting_reference.frontier_input,
    tree_build=drafting_reference.tree_build,
    draws=verification_reference.draws,
    pick=verification_reference.pick,
    posterior_walk=verification_reference.posterior_walk,
    all_reduce=parallel_reference.all_reduce,
    look_up=parallel_reference.look_up,
    likeliest=parallel_reference.likeliest,
    all_gather=parallel_reference.all_gather,
    stored_linears=quantised_reference.linears,
    stored_experts=quantised_reference.experts,
)

TORCH_ONEDNN = replace(
    TORCH,
    name="torch+onednn",
    linear=cpu.linear,
    linears=partial(linear_reference.linears, product=cpu.linear),
    gate_up=partial(linear_reference.gate_up, product=cpu.linear),
    topk_expand=partial(drafting_reference.topk_expand, product=cpu.linear),
)
"""Plain torch, with the linear layers of the CPU through oneDNN."""


def loaded(sources: build.Sources, what: str, load: Callable[[Path], Library]) -> Library | str:
    """A library in C++ as `load` gives it, compiled first where that was not done on this machine; as a text why it
    cannot be had."""
    why = build.missing()
    if why is not None:
        return why
    path = cache_folder() / "kernels" / build.library_name(sources)
    if not build.whole(path):
        notice(f"compiling {what}, once for this machine")
    try:
        return build.build(path.parent, sources) or load(path)
    except OSError as error:
        return f"the compiled library cannot be loaded: {error}"


def cpp_native() -> Native | str:
    """The C++ kernels of the CPU, compiled first where that was not done on this machine; as a text why they cannot be
    had."""
    return loaded(build.KERNELS, "the kernels of the CPU", lambda path: Native(build.library(path)))


@cache
def ngram_counter() -> Callable[..., None] | None:
    """The function that counts texts in the arrays of an n-gram storage (`ngrams.cpp`), compiled first where that was
    not done on this machine; None, with a notice, where it cannot be had: Python counts then, some thirty times as
    slowly."""
    found = loaded(build.NGRAMS, "what counts n-grams", build.counter)
    if isinstance(found, str):
        notice(f"n-grams are counted in Python: {found}")
        return None
    return found


@cache
def ngram_grower() -> Callable[..., int] | None:
    """The compiled function that grows trees from these arrays; None where none counts in them."""
    found = None if ngram_counter() is None else loaded(build.NGRAMS, "what counts n-grams", build.grower)
    return None if isinstance(found, str) else found


@cache
def cpp_ops() -> Ops:
    """The C++ kernels of the CPU, compiled if need be. Raises Unsupported, and says why, where they cannot be."""
    native = cpp_native()
    if isinstance(native, str):
        raise Unsupported(
            f'backend="cpp" cannot be built here: {native}. Patch with backend="auto", which runs without it'
        )
    return replace(
        TORCH,
        name="cpp",
        linear=native.linear,
        linears=native.linears,
        gate_up=native.gate_up,
        rms_norm=native.rms_norm,
        rope_cache=native.rope_cache,
        tree_attention=native.tree_attention,
        pick=native.pick,
        topk_logprobs=native.topk_logprobs,
        topk_expand=native.topk_expand,
        stack=native.stack,
        packs=True,
        drafts_in=torch.bfloat16,
    )


@cache
def triton_ops() -> Ops:
    """The Triton kernels. Imports triton, and raises Unsupported where it is missing."""
    try:
        from fastspec.kernels.ahead import compile_ahead
        from fastspec.kernels.attention import layout, tree
        from fastspec.kernels.cache import commit
        from fastspec.kernels.drafting import inputs, pairs, topk_expand, tree_build
        from fastspec.kernels.layer import norms, rope_cache
        from fastspec.kernels.linear import experts, linear
        from fastspec.kernels.parallel import joins, reduced_norm
        from fastspec.kernels.quantised import linear as quantised
        from fastspec.kernels.recurrent import conv, delta
        from fastspec.kernels.verification import posterior_eval
    except ImportError as error:
        raise Unsupported(
            f'backend="triton" needs the package triton ({error}): install it, or patch with backend="torch"'
        ) from error
    if torch.cuda.is_available():
        FORESIGHT.prepare = partial(compile_ahead, say=notice)
    return replace(
        TORCH,
        name="triton",
        attention_layout=layout.attention_layout,
        tree_attention=tree.tree_attention,
        kv_block_copy=commit.kv_block_copy,
        tree_input=inputs.tree_input,
        commit_slots=commit.commit_slots,
        emit=commit.emit,
        path_pairs=pairs.path_pairs,
        keep_last=pairs.keep_last,
        keep_pair=pairs.keep_pair,
        linear=linear.linear,
        linears=partial(linear_reference.linears, product=linear.linear),
        linear_parts=linear.linear_parts,
        rms_norm=reduced_norm.rms_norm,
        rope_cache=rope_cache.rope_cache,
        gate_up=linear.gate_up,
        gate_heads=norms.gate_heads,
        route=experts.route,
        tree_conv=conv.tree_conv,
        hold=conv.hold,
        delta_tree=delta.delta_tree,
        delta_chain=delta.delta_chain,
        delta_commit=conv.delta_commit,
        gated_norm=norms.gated_norm,
        topk_expand=topk_expand.topk_expand,
        most_children=topk_expand.MAX_COUNT,
        next_frontier=inputs.next_frontier,
        head_input=inputs.head_input,
        frontier_input=inputs.frontier_input,
        tree_build=tree_build.tree_build,
        most_candidates=tree_build.MAX_CANDIDATES,
        draws=posterior_eval.draws,
        pick=posterior_eval.pick,
        posterior_walk=posterior_eval.posterior_walk,
        all_reduce=symmetric.all_reduce,
        all_gather=joins.all_gather,
        look_up=joins.look_up,
        likeliest=joins.likeliest,
        experts=experts.experts,
        stored_linears=quantised.linears,
        stored_parts=quantised.linear_parts,
        stored_experts=experts.experts,
        captures=torch.cuda.is_available(),
        packs=torch.cuda.is_available(),
    )


@cache
def exact_ops() -> Ops:
    """The Triton kernels that sum in a fixed order: nodes of a tree get the bits that plain decoding gives them."""
    ops = triton_ops()
    from fastspec.kernels.attention import ordered as attention
    from fastspec.kernels.linear import experts
    from fastspec.kernels.linear import ordered as products
    from fastspec.kernels.parallel import joins, reduced_norm
    from fastspec.kernels.quantised import linear as quantised

    return replace(
        ops,
        attention_layout=attention.attention_layout,
        tree_attention=attention.tree_attention,
        linear=products.linear,
        linears=partial(linear_reference.linears, product=products.linear),
        linear_parts=products.linear_parts,
        gate_up=products.gate_up,
        stored_linears=quantised.in_turns(quantised.linears),
        stored_parts=quantised.in_turns(quantised.linear_parts),
        experts=partial(experts.experts, ordered=True),
        stored_experts=partial(experts.experts, ordered=True),
        all_reduce=joins.ordered_sum,
        rms_norm=partial(reduced_norm.rms_norm, ordered=True),
        exact=True,
    )


def choose_backend(name: str, device: torch.device, adapted: bool = True) -> Ops:
    """The kernels of a backend name on a device; `adapted` says whether the model has an adapter.

    "auto" is Triton on CUDA from compute capability 8.0 on for a model with an adapter, else plain torch, on the CPU
    with oneDNN where torch has it (`on_cpu.named` makes it "cpp" before, where that runs). Raises Unsupported for an
    unknown name, and for "triton" where its kernels cannot run.
    """
    device_type = device.type
    if name not in BACKENDS:
        raise Unsupported(f"backend={name!r} on {device_type}: {accepted(repr(name), map(repr, BACKENDS))}")
    if name == "auto" and device_type == "cuda":
        able = torch.cuda.get_device_capability(device) >= (8, 0) and find_spec("triton") is not None
        return triton_ops() if adapted and able else TORCH
    if name == "cpp":
        if device_type != "cpu":
            raise Unsupported(f'backend="cpp" is for the CPU, and the model is on {device_type}: use backend="auto"')
        return cpp_ops()
    if name == "triton":
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported(
                f'backend="triton" needs a CUDA device, and the model is on {device_type}: use backend="auto"'
            )
        if not adapted:
            raise Unsupported(
                'backend="triton" needs a model with an adapter, and this one runs in generic mode: use backend="auto"'
            )
        return triton_ops()
    return TORCH_ONEDNN if name == "auto" and device_type == "cpu" and cpu.available() else TORCH


def counted(ops: Ops, counts: Counter[str]) -> Ops:
    """The same ops, each counting its calls under its name, or "<name> (torch)" where it is the reference."""

    def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = run(*args, **options)
            counts[name] += name != "stack" or result is not None  # which may leave it to the others
            return result

        return call

    held: dict[str, Any] = {field.name: getattr(ops, field.name) for field in fields(ops)}
    plain = {
        name
        for name, run in held.items()
        if ops.name not in (TORCH.name, TORCH_ONEDNN.name) and run is getattr(TORCH, name)
    }
    changed: dict[str, Any] = {
        name: counting(f"{name} (torch)" if name in plain else name, run) for name, run in held.items() if callable(run)
    }
    for name in ("drafts", "heads"):
        if held[name] is not None:
            changed[name] = counted(held[name], counts)
    return replace(ops, **changed)
