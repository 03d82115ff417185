"""Comparison of a backend's kernels, and of a whole draft phase, with their references on small inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.reference import Parts, joined
from fastspec.kernels.quantised import reference as quantised_reference
from fastspec.patches.backends import TORCH
from fastspec.patches.checks.inputs import Draw, LayoutArguments
from fastspec.patches.checks.rows import CHECKS, Check

SHAPE = TreeShape(total_tokens=6, depth=2, top_k=2)
SEED, ROUNDING = 5, 0.12
"""Candidates of this seed's head are 0.188 apart and more, and in bfloat16 off by up to 0.04: another tree, or scores
that are off by more than this, are wrong."""


def small_head(draw: Draw) -> EagleHead:
    """A head whose candidates are far apart."""
    config = HeadConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        draft_vocab_size=24,
        target_hidden_size=32,
        taps=(0, 1, 2),
    )
    with draw.device:
        head, embedding = EagleHead(config).eval(), nn.Embedding(config.vocab_size, config.hidden_size)
    for module in (head, embedding):
        for name, parameter in list(module.named_parameters()):  # set, not moved: this runs on tensors without data too
            scale = 0.5 if name.startswith("lm_head") else parameter.shape[-1] ** -0.5 if module is head else 1.0
            ones = torch.ones(parameter.shape, dtype=draw.dtype, device=draw.device)
            value = draw.floats(*parameter.shape, scale=scale) if parameter.dim() > 1 else ones
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    assert head.inv_freq is not None
    head.set_rope(head.inv_freq, head.rope_scale)  # follows the weights, which were not moved
    head.bind(embedding, None)
    return head


def small_drafter(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter]) -> EagleDrafter:
    """A drafter with a small head, outside of graphs."""
    head = small_head(Draw(dtype, device, SEED))
    return drafts(BoundHead.of(head), SHAPE, rows=1, capacity=16, ops=replace(ops, captures=False))


@torch.no_grad()
def drafted(drafter: EagleDrafter) -> tuple[TokenTree, Tensor]:
    """The tree that the small head drafts after a prompt, and the scores of its candidates."""
    draw = Draw(drafter.last.dtype, drafter.last.device, SEED)
    ids, features = draw.whole(40, 1, 5), draw.floats(1, 5, 3 * 32)
    drafter.begin(ids, draw.fixed([5]), features, draw.fixed([7]))
    return drafter.propose(5), drafter.growth.scores


def phase_difference(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter]) -> str | None:
    """Difference of a small head's tree from that of plain torch; None where it does not."""
    got, scores = drafted(small_drafter(ops, dtype, device, drafts))
    wanted, expected = drafted(small_drafter(TORCH, dtype, device, EagleDrafter))
    for name in ("tokens", "parents", "depths", "ancestors"):
        if not torch.equal(getattr(got, name), getattr(wanted, name)):
            return f"the tree's {name} are {getattr(got, name).tolist()}, not {getattr(wanted, name).tolist()}"
    off = float((scores - expected).abs().max())
    return None if off <= ROUNDING else f"scores are off by up to {off:.3g}, where {ROUNDING} is rounding"


REFERENCE = replace(
    TORCH,
    linear_parts=linear_reference.linear,
    experts=linear_reference.experts,
    stack=layer_reference.stack,
    stored_parts=quantised_reference.linears,
)
ROUNDINGS = {torch.float32: 256, torch.float16: 16, torch.bfloat16: 16, torch.float8_e8m0fnu: 0}
"""Units in the last place of the largest value that a kernel may be off: it sums in fp32 in its own order, where 4,096
products are off by the square root of their number. Powers of 2 are inputs, which no kernel writes."""


class Problem(NamedTuple):
    """A check that a backend fails, and what differs; an error that was `raised` may be a fault that passes."""

    check: str
    what: str
    raised: bool = False


def has_kernel(ops: Ops, op: str) -> bool:
    """True where a backend has something of its own for an op."""
    return getattr(ops, op) is not None and getattr(ops, op) is not getattr(TORCH, op)


def problems(
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    checks: Sequence[Check] = CHECKS,
    drafts: type[EagleDrafter] = EagleDrafter,
) -> Iterator[Problem]:
    """Every check that a backend fails, the draft phase of `drafts` last. An error on the device ends the checks."""
    runs = [(check.name, partial(difference, check)) for check in checks if has_kernel(ops, check.op)]
    for name, run in (*runs, (f"{drafts.__name__} (a small head)", partial(phase_difference, drafts=drafts))):
        try:
            with exact_products():
                found = run(ops, dtype, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            yield Problem(name, f"{type(error).__name__}: {error}", raised=True)
            return
        if found is not None:
            yield Problem(name, found)


@contextmanager
def exact_products() -> Iterator[None]:
    """The references' products in fp32 are computed in fp32, whatever the user has set for cuBLAS."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def launcher(
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    checks: Sequence[Check] = CHECKS,
    drafts: type[EagleDrafter] = EagleDrafter,
) -> Callable[[], None]:
    """A program that runs what `problems` compares of a backend, without comparing, and on tensors without data too."""
    drafter = small_drafter(ops, dtype, device, drafts)

    def launch() -> None:
        for check in checks:
            if has_kernel(ops, check.op):
                run(check, ops, dtype, device)
        drafted(drafter)

    return launch


def difference(check: Check, ops: Ops, dtype: torch.dtype, device: torch.device) -> str | None:
    """Difference of a backend's op from its reference on a row's inputs; None where it does not."""
    (got, changed), (wanted, expected) = (run(check, each, dtype, device) for each in (ops, REFERENCE))
    results = tensors(check.view(got)), tensors(check.view(wanted))
    if len(results[0]) != len(results[1]):
        return f"it gives {len(results[0])} tensors, not {len(results[1])}"
    pairs = [*zip(*results, strict=True), *zip(changed, expected, strict=True)]
    return next((found for pair in pairs if (found := unlike(*pair)) is not None), None)


def run(check: Check, ops: Ops, dtype: torch.dtype, device: torch.device) -> tuple[Any, list[Tensor]]:
    """The result of a row's op, and its inputs, some of which it may write to."""
    args, options = check.inputs(Draw(dtype, device))
    given = [
        ops.attention_layout(*each.args, **each.options) if isinstance(each, LayoutArguments) else each for each in args
    ]
    with torch.no_grad():
        result = getattr(ops, check.calls or check.op)(*given, **options)
    return copy.copy(result), tensors([each for each in args if not isinstance(each, LayoutArguments)])


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a value, in order; parts of a product as their sum."""
    if isinstance(value, (Tensor, Parts)):
        return [joined(value)]
    if isinstance(value, (tuple, list)):
        return [found for each in value for found in tensors(each)]
    if is_dataclass(value) and not isinstance(value, type):
        return [found for each in fields(value) for found in tensors(getattr(value, each.name))]
    return []


def unlike(got: Tensor, wanted: Tensor) -> str | None:
    """How a tensor differs from what it should be by more than rounding; None where it does not."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"it gives {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    if not wanted.numel():
        return None
    if not wanted.is_floating_point():
        wrong = int((got != wanted).sum())
        return f"{wrong} of {wanted.numel()} whole numbers are others" if wrong else None
    wide, right = got.float(), wanted.float()
    room = ROUNDINGS[wanted.dtype] * torch.finfo(wanted.dtype).eps * max(1.0, float(right.abs().max()))
    off = (wide - right).abs()
    bad = ~(off <= room)  # what is not a number is wrong too
    if not bool(bad.any()):
        return None
    most = float(off.nan_to_num(torch.inf).max())
    return f"{int(bad.sum())} of {bad.numel()} values are off, by up to {most:.3g} where {room:.3g} is rounding"
