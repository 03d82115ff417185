"""A model that two processes hold together by tensor parallelism says what it says in one, in both."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.generate import bigram
from helpers.models import FAMILIES as ADAPTED
from helpers.models import tiny_head, tiny_model
from helpers.mtp import loaded
from helpers.processes import spawn
from helpers.ranks import (
    OWN_LAYER,
    SEEING,
    SIZE,
    SMALL,
    calls,
    captured,
    cut_heads,
    drafted,
    family,
    hooked,
    mixed,
    narrow,
    own_layer,
    packed,
    seen,
    sized,
    staged,
    whole,
    work,
)
from helpers.ranks_told import by_first, refusals, tuned
from helpers.vision import seeing
from torch._subclasses.fake_tensor import FakeTensor
from transformers import CONFIG_MAPPING

import fastspec
from fastspec.generation.drafters import head_program as head_cut
from fastspec.kernels import ahead
from fastspec.kernels.parallel import symmetric, words
from fastspec.kernels.parallel.symmetric import way_of
from fastspec.patches.backends import TORCH
from fastspec.patches.hf import parallel

GENERIC = "hunyuan_v1_dense"
FAMILIES = "llama", "gemma4_text", "qwen3_5_text", "gpt_oss", GENERIC
"""Those that stand for the others here; the others take minutes."""
OTHERS = [
    kind for kind in ADAPTED if kind not in FAMILIES and getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
]
KINDS = [
    (run.__name__, run, "")
    for run in (
        calls,
        cut_heads,
        drafted,
        own_layer,
        sized,
        staged,
        narrow,
        packed,
        captured,
        seen,
        hooked,
        refusals,
        tuned,
        by_first,
    )
]
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "layer_types": ["full_attention"] * 3,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}
MIXTURES = ("qwen2_moe", "glm4_moe", "gemma4_experts")
"""A shared expert that all have whole, one that is cut, and experts beside a dense feed-forward."""
JOBS = [*KINDS, *((kind, family, kind) for kind in FAMILIES), *((f"{kind}, mixed", mixed, kind) for kind in MIXTURES)]
Made = tuple[Path, list[dict[str, Any]]]


def run_both(folder: Path, kinds: list[str], jobs: list[Any]) -> Made:
    """The folder of the models, and what each of the two processes made of all jobs."""
    for kind in kinds:
        model = (
            tiny_model("gemma4_text", **SMALL, **GEMMA4_EXPERTS)
            if kind == "gemma4_experts"
            else tiny_model(kind, **SMALL)
        )
        model.save_pretrained(folder / kind)
    bigram(**SMALL).save_pretrained(folder / "bigram")
    loaded("glm4_moe", folder / OWN_LAYER)
    seeing(SEEING).save_pretrained(folder / SEEING)
    spawn(work, (folder, jobs), SIZE)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of every kind of call and of family."""
    return run_both(tmp_path_factory.mktemp("ranks"), [*FAMILIES, *MIXTURES], JOBS)


def compare(both: Made, name: str, run: Any, kind: str = "") -> list[Any]:
    """Every process's results of a job, of which all must be those of one process that holds the model alone; returns
    these."""
    folder, found = both
    torch.manual_seed(0)
    expected = run(whole(folder), kind)
    for rank in range(SIZE):
        made = found[rank][name]
        assert isinstance(made, list), made
        for index, (mine, alone) in enumerate(zip(made, expected, strict=True)):
            assert torch.equal(mine, alone) if isinstance(alone, torch.Tensor) else mine == alone, (rank, index)
    return expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_gives_the_same_tokens(both: Made, kind: str) -> None:
    *_, mode = compare(both, kind, family, kind)
    assert mode.startswith("generic" if kind == GENERIC else "adapter")


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_cut_within_captured_rounds(both: Made, kind: str) -> None:
    compare(both, f"{kind}, mixed", mixed, kind)


@pytest.mark.slow
def test_the_other_families_give_the_same_tokens(tmp_path: Path) -> None:
    made = run_both(tmp_path, OTHERS, [(kind, family, kind) for kind in OTHERS])
    for kind in OTHERS:
        compare(made, kind, family, kind)


def test_prompts_with_images_give_the_same_tokens(both: Made) -> None:
    compare(both, "seen", seen)


def test_drafts_are_accepted(both: Made) -> None:
    compare(both, "drafted", drafted)


def test_the_layer_of_a_models_own_files_drafts_in_all(both: Made) -> None:
    compare(both, "own_layer", own_layer)


def test_heads_are_cut_too(both: Made) -> None:
    """Their tokens, and as many accepted drafts a round, are those of whole heads."""
    compare(both, "cut_heads", cut_heads)


def test_calls_of_every_kind_give_the_same_tokens(both: Made) -> None:
    compare(both, "calls", calls)


def test_sizes_of_trees_are_chosen_alike(both: Made) -> None:
    compare(both, "sized", sized)


def test_a_cascade_s_stages_are_held_by_one_process_or_by_all(both: Made) -> None:
    expected = compare(both, "staged", staged)
    outcomes = {outcome for row in (each for each in expected if isinstance(each, list)) for _, outcome, _ in row}
    assert outcomes == {"answered", "sent_on"}


def test_of_logits_the_likeliest_are_joined(both: Made) -> None:
    compare(both, "narrow", narrow)


def test_captured_rounds_give_the_same_tokens(both: Made) -> None:
    compare(both, "captured", captured)


def test_a_hook_on_a_cut_embedding_runs(both: Made) -> None:
    compare(both, "hooked", hooked)


def test_what_the_first_process_does_for_all_ends_in_all(both: Made) -> None:
    _, found = both
    mine, other = (found[rank]["by_first"] for rank in range(SIZE))
    assert mine[:4] == ["ValueError: plain", "Local: of this place", "Wordy: two words", "KeyboardInterrupt: "]
    told = [
        "ValueError: plain",
        "FastSpecError: Local: of this place",
        "FastSpecError: Wordy: two words",
        "KeyboardInterrupt: ",
    ]
    assert other[:4] == told and mine[4] == other[4] == 5
    assert all("fastspec.tune found" in each[5] for each in (mine, other))


def test_launches_are_tuned_by_one_and_used_by_all(both: Made) -> None:
    """Heads that are whole in all processes draft the same tokens only by the same launches."""
    _, (mine, other) = both
    assert mine["tuned"] == other["tuned"], (mine["tuned"], other["tuned"])
    kept, before, after, tables, failed = mine["tuned"]
    assert before == after and {op for op, *_ in kept} >= {"linear"}, kept
    assert tables == "tuned" and failed == "division by zero"


def test_what_each_has_of_weights_can_lie_together(both: Made) -> None:
    first, _, *told = compare(both, "packed", packed)
    assert first is True and all(each is True or isinstance(each, torch.Tensor) for each in told)


def test_whole_models_need_nothing_of_transformers_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which older versions do not have."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    read_again = runpy.run_module("fastspec.patches.hf.parallel")
    assert read_again["local_heads"](tiny_model("llama", **SMALL), 2) == 2


def test_a_model_over_processes_needs_a_version_that_fastspec_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", **SMALL)
    model._tp_size = 2
    monkeypatch.delattr("transformers.distributed.tensor_parallel.get_kv_heads_per_rank")
    with pytest.raises(fastspec.Unsupported, match=r"5\.21 and later make of tp_plan"):
        parallel.local_heads(model, 2)


@pytest.mark.parametrize(
    "nbytes, dtype, way",
    [
        (8192, torch.bfloat16, "one-shot"),
        (512 * 1024, torch.float32, "one-shot"),
        (512 * 1024 + 16, torch.bfloat16, "two-shot"),
        (8 * 2**20, torch.bfloat16, "two-shot"),
        (8 * 2**20 + 16, torch.bfloat16, "library"),
        (8200, torch.float32, "library"),
        (8192, torch.float16, "library"),
    ],
)
def test_the_way_of_a_sum(nbytes: int, dtype: torch.dtype, way: str) -> None:
    assert way_of(nbytes, dtype, True) == way
    assert way_of(nbytes, dtype, False) == "library"


@pytest.mark.parametrize(
    "told, reachable",
    [
        ([("a", 0, [0, 1]), ("a", 1, [0, 1])], True),
        ([("a", 1, [0, 1]), ("a", 0, [0, 1])], True),
        ([("a", 0, [0, 1]), ("b", 1, [0, 1])], False),
        ([("a", 0, [0]), ("a", 0, [0])], False),
        ([("a", 0, [0, 1]), ("a", 1, [1])], False),
    ],
    ids=["one host", "another order", "two hosts", "each sees one device", "one does not reach the other"],
)
def test_all_processes_find_the_same_way(told: list[Any], reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of CUDA is made up; what every process hears is the same, and so is what it makes of it."""
    for rank, (_, device, peers) in enumerate(told):
        monkeypatch.setattr(torch.cuda, "current_device", lambda mine=device: mine)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other, peers=peers: other in peers)
        monkeypatch.setattr(
            symmetric.dist, "all_gather_object", lambda heard, mine, group: heard.__setitem__(slice(None), told)
        )
        assert (
            symmetric.reachable.__wrapped__(SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)) is reachable
        )


def test_a_look_at_a_program_makes_no_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever is held when it is looked at, data or not: a space that was made meanwhile would be one of no
    addresses."""

    def asked(*_: Any) -> None:
        raise AssertionError("a look asked the other processes")

    monkeypatch.setattr(words, "_space", asked)
    monkeypatch.setattr(words.symmetric, "reachable", asked)
    made, group = SimpleNamespace(), SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    weight = torch.ones(4, 64)
    real = SimpleNamespace(is_cuda=True, new_empty=weight.new_empty)  # a tensor of the model's

    def program() -> None:
        made.spaces = [
            words.space_for(each, 64, torch.float32, group) for each in (torch.ones(4, 64, device="cuda"), real)
        ]

    monkeypatch.setattr(ahead, "_warned", False)
    ahead._look(program, ahead.Collector())
    assert not ahead._warned and made.spaces[0].addresses.is_cuda
    assert all(space.rank == 1 and space.words == 64 and isinstance(space.counts, FakeTensor) for space in made.spaces)
    with pytest.raises(AssertionError, match="asked"):
        words.space_for(real, 64, torch.float32, group)


@pytest.mark.parametrize("rows", [1, 61, 512, 4096])
def test_a_look_at_a_program_sums_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the message's way is: a look has no data, so that no process can be asked, and two-shot sums do not run
    without it."""

    def asked(*_: Any) -> None:
        raise AssertionError("a look asked the other processes")

    for name in ("reachable", "_space"):
        monkeypatch.setattr(symmetric, name, asked)
    made = SimpleNamespace()

    def program() -> None:
        made.total = symmetric.all_reduce(
            torch.ones(rows, 4096, device="cuda", dtype=torch.bfloat16), SimpleNamespace(group_name="0")
        )

    monkeypatch.setattr(ahead, "_warned", False)
    ahead._look(program, ahead.Collector())
    assert (
        not ahead._warned
        and made.total.is_cuda
        and (made.total.shape, made.total.dtype) == ((rows, 4096), torch.bfloat16)
    )


@pytest.mark.parametrize("wide", [6, 7], ids=["outputs divide", "outputs do not divide"])
def test_layers_of_several_cuts_are_multiplied_side_by_side(wide: int) -> None:
    """One whose outputs stay apart beside one whose outputs are joined, and two that are joined."""
    generator, sent = torch.Generator().manual_seed(0), []
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    x, whole = torch.randn(3, 8, generator=generator), torch.randn(wide, 8, generator=generator)
    first, rest = whole[: (wide + 1) // 2], whole[(wide + 1) // 2 :]

    def joined(part: torch.Tensor, width: int, _: Any) -> torch.Tensor:
        sent.append(width)
        several = part.shape[-1] // len(first)
        return torch.cat((part, *[x @ rest.T] * several), -1)

    ops = replace(TORCH, all_gather=joined)
    styles = parallel.ParallelStyle
    apart, cut = (parallel.Share(first, None, style, group, wide) for style in (styles.COLUMN, styles.COLUMN_JOINED))
    run = partial(parallel.product_of_shares, ops=ops, parts=False)
    torch.testing.assert_close(run((apart, cut))(x), torch.cat((x @ first.T, x @ whole.T), -1))
    torch.testing.assert_close(run((cut, cut))(x), torch.cat((x @ whole.T, x @ whole.T), -1))
    assert sent == [wide, 2 * wide] if wide == 6 else [wide] * 3  # at once, where each has as many outputs


def test_what_is_refused_by_name(both: Made) -> None:
    _, found = both
    for rank in range(SIZE):
        cascade, seeds, settings, profiles, ended, older, many, more = found[rank]["refusals"]
        differently = seeds, settings, profiles
        assert all("different arguments" in each for each in differently)
        assert "Cascade(memory=...)" in cascade and "2 hold this LlamaForCausalLM" in cascade
        assert "ended with different tokens (row 0, new token 0: 10, 11)" in ended
        assert "none of its parameters is a DTensor" in older
        assert "2 key heads, which 4 processes cannot divide" in many and "fsdp_size above 1" in more


def test_a_head_is_cut_as_far_as_its_layers_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LM head with a hook or of another class runs whole, by its own forward; tensors of inference mode have no
    versions."""
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    head = tiny_head(tiny_model("llama", **SMALL), draft_vocab_size=64)
    assert head_cut.cut_over(head, group) is None
    monkeypatch.setattr(head_cut, "LEAST_BYTES", 0)
    made = head_cut.cut_over(head, group)
    assert torch.equal(made.lm_head, head.lm_head.weight[32:]) and head_cut.cut_over(head, group) is made
    head.layers[0].self_attn.o_proj.weight.mul_(2.0)
    again = head_cut.cut_over(head, group)
    assert again is not made and torch.equal(again.layers[0].out[0], 2.0 * made.layers[0].out[0])
    handle = head.lm_head.register_forward_hook(lambda *_: None)
    assert head_cut.cut_over(head, group).lm_head is None
    handle.remove()
    with torch.inference_mode():
        copied = tiny_head(tiny_model("llama", **SMALL))
        assert head_cut.cut_over(copied, group).lm_head is None  # 97 tokens do not divide
