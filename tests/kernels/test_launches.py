"""What is launched in half precision, kernel by kernel, and what the model says with it.

A front-door op may hand its work to torch, by size and dtype, so that calls of ops do not show what ran. Here every
launch of a Triton kernel is written down. On CUDA the first two runs of a round, the second while it is captured,
launch from Python; replays do not.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.devices import CPU, CUDA
from helpers.generate import EAGLE1, prompts
from helpers.models import tiny_head, tiny_model
from torch import Tensor

import fastspec
from fastspec.kernels.linear import linear
from fastspec.patches.hf.layer_weights import pack_model

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}
MIXED = {**WIDE, "moe_intermediate_size": 768, "num_experts_per_tok": 4}
"""Every token goes to all four experts, with weights of its own: a choice between them would turn with the last bit of
a router's logit."""
TREE = fastspec.Eagle3(depth=3, top_k=4, total_tokens=24)
TREE2 = fastspec.Eagle2(depth=3, top_k=4, total_tokens=24)


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched, by "module.kernel", with ":swiglu" behind a product that gates."""
    counted: Counter[str] = Counter()
    kind = type(linear._linear_kernel)
    run = kind.run

    def counting(self, *args, **options):
        module = self.fn.__module__.rpartition(".")[2]
        counted[f"{module}.{self.fn.__name__}{':swiglu' if options.get('SWIGLU') else ''}"] += 1
        return run(self, *args, **options)

    monkeypatch.setattr(kind, "run", counting)
    return counted


CHOICE = "posterior_eval._chunk_best_kernel posterior_eval._best_kernel posterior_eval._walk_kernel"
LAYER = f"{CHOICE} norms._rms_norm rope_cache._rope_cache"
PREFILL = "tree._attention_kernel swiglu._swiglu"
"""Of 70 tokens: more than the products' launches take, so that cuBLAS multiplies and a kernel gates."""
ROW = "row._row_kernel row._row_kernel:swiglu few_queries._few_kernel"
NODES = "linear._linear_kernel:swiglu linear._parts_kernel tree._attention_kernel commit._kv_block_copy"
"""Of 48 nodes, two rows' trees."""
GROWN = "topk_expand._product_kernel topk_expand._merge_kernel tree_build._tree_build_kernel"
DRAFT = f"{GROWN} linear._linear_kernel few_queries._few_kernel"
EXPERTS = "experts._route experts._group experts._gate_up experts._down experts._weighted_sum"
ONE = "experts_row._inner_row experts_row._down_row"
FUSED = "draft.draft_kernel tree_build._tree_build_kernel commit._kv_block_copy"
CASES: dict[str, tuple[str, dict[str, Any], Any, tuple[int, ...], str]] = {
    "one row": ("llama", WIDE, "autoregressive", (70,), f"{LAYER} {PREFILL} {ROW}"),
    "one row, biases": ("qwen2", WIDE, "autoregressive", (9,), f"{LAYER} {ROW}"),
    "one row, norms of queries and keys": ("qwen3", WIDE, "autoregressive", (9,), f"{LAYER} {ROW}"),
    "two trees": ("llama", WIDE, TREE, (70, 41), f"{LAYER} {PREFILL} {NODES} {DRAFT} inputs._head_input_kernel"),
    "two trees, EAGLE-2": ("llama", WIDE, TREE2, (9, 5), f"{LAYER} {NODES} {DRAFT} inputs._next_frontier_kernel"),
    "Gemma 3": (
        "gemma3_text",
        {**WIDE, "sliding_window": 16},
        "autoregressive",
        (70,),
        f"{LAYER} row._row_kernel few_queries._few_kernel",
    ),
    "Mixtral": ("mixtral", MIXED, "autoregressive", (9,), f"{LAYER} {EXPERTS} {ONE}"),
    "Qwen3-MoE": ("qwen3_moe", MIXED, "autoregressive", (9,), f"{LAYER} {EXPERTS} {ONE}"),
    "gpt-oss": ("gpt_oss", {**MIXED, "sliding_window": 16}, "autoregressive", (9,), f"{LAYER} {EXPERTS} {ONE}"),
    "GLM-4-MoE": ("glm4_moe", {**MIXED, "n_group": 1}, "autoregressive", (9,), f"{LAYER} {EXPERTS} {ONE}"),
    "two trees, Mixtral": ("mixtral", MIXED, TREE, (9, 5), f"{LAYER} {EXPERTS} {DRAFT}"),
    "one tree, in one launch": ("llama", WIDE, replace(TREE, fused=True), (9,), f"{LAYER} {FUSED}"),
}
"""(family, its sizes, assistant, lengths of the prompts, what must have been launched)"""
ON_CPU = {"one row, biases": (), "two trees, EAGLE-2": (pytest.mark.slow,)}
"""The interpreter takes ten seconds for each, and its bf16 is wrong."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RUNS = [
    pytest.param(name, dtype, *CUDA.values, marks=CUDA.marks, id=f"{name}-{dtype}-cuda")
    for name in CASES
    for dtype in HALVES
]
RUNS += [
    pytest.param(name, "fp16", *CPU.values, marks=(*CPU.marks, *marks), id=f"{name}-fp16-cpu")
    for name, marks in ON_CPU.items()
]


@pytest.mark.parametrize(("case", "half", "device"), RUNS)
def test_the_kernels_are_launched_and_give_what_the_unpatched_model_gives(case, half, device, launches):
    family, sizes, assistant, lengths, wanted = CASES[case]
    model = tiny_model(family, **sizes).to(device, HALVES[half])
    exact = copy.deepcopy(model).float()
    inputs = {name: ids.to(device) for name, ids in prompts(*lengths).items()}
    options = {**inputs, "do_sample": False, "max_new_tokens": 40 if device == "cuda" else 2, "eos_token_id": None}
    emitted = model.generate(**options)
    if device == "cpu":
        pack_model(model)  # as patch does on CUDA
    kind = EAGLE1 if assistant is TREE2 else {}
    small = {"intermediate_size": 768, "head_dim": 64, **kind}
    head = tiny_head(model, **small).to(device, HALVES[half])
    with fastspec.patched(model, **{"eagle2" if kind else "eagle3": head}, backend="triton"):
        assert not launches
        got = model.generate(**options, assistant=assistant)
        assert fastspec.report(model).last.replays > 0 or device == "cpu"
    assert {name for name in wanted.split() if not launches[name]} == set()
    with torch.no_grad():
        agree_but_for_rounding(model, exact, inputs, emitted, got)


def agree_but_for_rounding(model: Any, exact: Any, inputs: dict[str, Tensor], emitted: Tensor, got: Tensor) -> None:
    """Where an answer `got` leaves the one that the unpatched model said, the exact logits must not tell the two tokens
    apart.

    `exact` has the same weights in fp32; beside half precision its rounding is nothing. Let r be the most that any
    logit of the unpatched model is off along its answer, of 97 a token. The kernels sum in fp32 and round where the
    model rounds, or less often, so their logits are off by no more. A run that says b where c has the highest exact
    logit has l'(b) >= l'(c), so that l(c) - l(b) <= 2 r, and the two tokens were as good as equal; this holds for
    either run.
    """
    width = inputs["input_ids"].shape[1]
    for row, real in enumerate(inputs["attention_mask"].sum(1).tolist()):
        text = emitted[row, width - real :][None]
        logits = exact(text).logits[0, real - 1 : -1]
        rounding = float((model(text).logits[0, real - 1 : -1].float() - logits).abs().max())
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).median()) > 2 * rounding  # else nothing would be compared
        differ = (emitted[row, width:] != got[row, width:]).nonzero()
        if len(differ):
            first = int(differ[0])
            for token in (int(emitted[row, width + first]), int(got[row, width + first])):
                assert float(best[first, 0] - logits[first, token]) <= 2 * rounding, (row, first)


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_a_distribution_is_cut_and_drawn_from_by_kernels(device, launches):
    model = tiny_model(num_hidden_layers=1).to(device, torch.float16)
    inputs = {name: ids.to(device) for name, ids in prompts(5).items()}
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 2}
    with fastspec.patched(model, backend="triton"):
        model.generate(**inputs, **options, assistant="autoregressive")
    wanted = {"posterior_eval._chunk_mass_kernel", "posterior_eval._draw_kernel"}
    wanted |= {f"sampling.{name}" for name in ("_peaks_kernel", "_digit_kernel", "_close_kernel")}
    assert {name for name in wanted if not launches[name]} == set()
