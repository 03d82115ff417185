"""The self-check: kernels, and a whole draft phase, are compared with their references on small inputs before the first
use on a device that they were never tested on; those in C++, which the machine's own compiler made, on every machine.

Once for a device, a dtype, the versions of torch, triton and fastspec, and a compiled library: the verdict is kept in
the cache folder, but for one that an error has ended. The environment's FASTSPEC_SELF_CHECK says "auto" (that),
"always" (on every device, in every process) or "never".
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastspec import files
from fastspec.default_trees import TreeShape
from fastspec.devices import MEASURED, device_name
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.reference import Parts, joined
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import ENDINGS
from fastspec.kernels.quantised import reference as quantised_reference
from fastspec.patches.backends import TORCH, notice
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
    """Difference of a tensor from what it should be, beyond rounding; None where there is none."""
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


SETTING = "FASTSPEC_SELF_CHECK"
MODES = ("auto", "always", "never")
FOLDER = "self_check"
_known: dict[tuple[str, ...], list[list[str]]] = {}
"""What this process has found or read: the key of a check -> the failures."""
_turn = threading.Lock()


def chosen(setting: str, choices: tuple[str, ...]) -> str:
    """Value of a setting in the environment, "auto" without one. Raises Unsupported for one that is unknown."""
    found = os.environ.get(setting) or "auto"
    if found not in choices:
        raise Unsupported(f"{setting}={found!r} in the environment: accepted are {', '.join(choices)}")
    return found


def self_check(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter] | None = None) -> None:
    """Check a backend's kernels in a dtype on a device, where that was not done; with `drafts` that drafter's phase
    alone. Raises FastSpecError with the names of kernels that differ; nothing else runs in their place."""
    wanted = chosen(SETTING, MODES)
    if wanted == "never" or ops.name not in ("triton", "cpp") or (ops.name == "cpp" and dtype not in ENDINGS):
        return
    name = device_name(device)
    if ops.name == "cpp":
        made = {"library": build.library_name()}
    else:
        from fastspec.kernels.launch import PORTABLE

        if wanted == "auto" and (device.type != "cuda" or name in MEASURED):
            return
        made = {"portable": str(PORTABLE)} | ({"exact": "True"} if ops.exact else {})
        made |= {} if ops.stored_linears is None else {"stored": "True"}
    dtype = dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
    about = {"device": name, "dtype": str(dtype).removeprefix("torch."), **made, **files.versions()}
    about |= {} if drafts is None else {"drafter": drafts.__name__}
    key, path = tuple(about.values()), files.cache_folder() / FOLDER / files.file_name(*about.values())
    with _turn:
        failures = _known.get(key)
        if failures is None:
            failures = None if wanted == "always" else _read(path, about)
            lasting = True
            if failures is None:
                failures, lasting = _run(ops, dtype, device, about, path, drafts)
            if lasting:
                _known[key] = failures
    if failures:
        told = "; ".join(f"{check}: {what}" for check, what in failures)
        kept = f"The verdict is kept in {path}; {SETTING}=always in the environment checks again"
        versions = ", ".join(f"{name} {value}" for name, value in files.versions().items())
        others = (
            'fastspec.patch(model, backend="torch")' if drafts is None else f"An assistant without {drafts.__name__}"
        )
        raise FastSpecError(
            f"kernels of backend {ops.name!r} do not compute on {name} in {about['dtype']} what their references do: "
            f"{told}. {others} runs without them. Please report this with the versions {versions}. "
            f"{kept if key in _known else 'An error may pass: nothing of it is kept, and the next patch checks again'}"
        )


def _read(path: Path, about: dict[str, str]) -> list[list[str]] | None:
    found = files.read(path)
    if found is None:
        return None
    failures = found.get("failures")
    well = isinstance(failures, list) and all(
        isinstance(each, list) and [type(x) for x in each] == [str, str] for each in failures
    )
    if not well or found.get("about") != about:
        files.ignore(path, "it holds no verdict on this device")
        return None
    return failures


def _run(
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    about: dict[str, str],
    path: Path,
    drafts: type[EagleDrafter] | None,
) -> tuple[list[list[str]], bool]:
    """Check -> the failures, and whether they are to be kept."""
    new = "" if device.type == "cpu" else ", which they were not tested on"
    notice(f"checking the kernels on {about['device']} in {about['dtype']}{new}, once for this machine")
    began, part = time.perf_counter(), () if drafts is None else ((), drafts)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # what a user's seed draws must not change
        if ops.name == "triton":
            from fastspec.kernels.ahead import compile_ahead

            with suppress(Exception):  # a kernel that does not compile is met, and named, by its own check
                compile_ahead(launcher(ops, dtype, device, *part), notice)
        found = list(problems(ops, dtype, device, *part))
    failures = [[problem.check, problem.what] for problem in found]
    if any(problem.raised for problem in found):
        return failures, False
    row: dict[str, Any] = {"about": about, "failures": failures, "seconds": round(time.perf_counter() - began, 2)}
    files.write(path, row | {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")})
    return failures, True
