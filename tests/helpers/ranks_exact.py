"""Processes that hold a model together with `patch(exact=True)`: their sums, and what they say beside other drafts and
other rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastspec
from fastspec.kernels.linear.reference import experts
from fastspec.kernels.parallel import reference
from fastspec.patches import session
from fastspec.patches.backends import TORCH
from helpers.generate import TREE, bigram, seer
from helpers.models import tiny_head
from helpers.parallel_gpu import added
from helpers.ranks import GREEDY, Loader, given, here, sizes

LONG = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
SCORED = {"return_dict_in_generate": True, "output_logits": True}


def sums(load: Loader, kind: str) -> list[Any]:
    """Sums of a few rows and of each by itself, which are those of all, in fp32 in the order of the ranks."""
    del load, kind
    group, made = dist.group.WORLD, []
    assert group is not None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        draw = torch.Generator().manual_seed(7)
        each = [torch.randn(9, 24, generator=draw).to(dtype) for _ in range(group.size())]
        mine = each[group.rank()]
        whole = reference.ordered_sum(mine.clone(), group)
        assert torch.equal(whole, added(each))
        for first, last in ((0, 1), (3, 4), (2, 9)):
            assert torch.equal(reference.ordered_sum(mine[first:last].clone(), group), whole[first:last])
        made.append(whole)
    return made


def taken(load: Loader, kind: str) -> list[Any]:
    """What a report says, the sums and products of a call by their names, and its answers, on kernels of plain torch
    in their place."""
    model = load(kind).to(torch.bfloat16)
    kernels = replace(TORCH, name="triton", linear_parts=TORCH.linear, experts=experts)
    ordered = replace(kernels, exact=True, all_reduce=reference.ordered_sum, name="ordered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "choose_backend", lambda *_, **__: kernels)
        patch.setattr(session, "exact_ops", lambda: ordered)
        for name in ("self_check", "use_tuned"):
            patch.setattr(session, name, lambda *_: None)
        with fastspec.patched(model, exact=True):
            made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in ("autoregressive", "nasd")]
            report = fastspec.report(model)
            told = [report.exact, report.why_inexact, report.kernels["all_reduce"] > 0]
        with fastspec.patched(model):
            return [*made, *told, fastspec.report(model).why_inexact]


def bits(load: Loader, kind: str) -> list[Any]:
    """Drafts, batches and open batches change no token and no logit, on GPUs: of prompts with which a pass has more
    rows than one message takes, and of each by itself. Every process compares its own."""
    model = load(kind)
    model = model.to(torch.float16 if kind == "qwen2" else torch.bfloat16)
    head = seer(bigram(**sizes())) if kind == "bigram" else tiny_head(model, copy_lm_head=False)
    inputs = given(60, 60, 60)
    with fastspec.patched(model, exact=True, eagle3=here(head).to(model.dtype)):
        run = partial(model.generate, **LONG)
        assert fastspec.report(model).exact, fastspec.report(model).why_inexact
        alone = [run(row[None], assistant="autoregressive", **SCORED) for row in inputs["input_ids"]]
        said = torch.cat([each.sequences for each in alone])
        for assistant in (TREE, "nasd"):
            for row, plain in zip(inputs["input_ids"], alone, strict=True):
                same(run(row[None], assistant=assistant, **SCORED), [plain])
                if kind == "bigram" and assistant is TREE:
                    assert fastspec.report(model).last.acceptance_length > 1.5
        for assistant in ("autoregressive", TREE, "nasd"):
            same(run(**inputs, assistant=assistant, **SCORED), alone)
        open_batch = run(**inputs, assistant=fastspec.ContinuousBatch("nasd", rows=2))
        assert torch.equal(open_batch, said)
    return [list(said.shape)]


def same(made: Any, alone: list[Any]) -> None:
    """Fail where tokens or logits of rows are not those of each by itself."""
    for at, plain in enumerate(alone):
        assert torch.equal(made.sequences[at], plain.sequences[0]), at
        for step, (one, other) in enumerate(zip(made.logits, plain.logits, strict=True)):
            assert torch.equal(one[at], other[0]), (at, step)
