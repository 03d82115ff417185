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
from helpers.mtp import KINDS, loaded
from helpers.rank_pool import RankPools
from helpers.ranks import (
    OWN_LAYER,
    SEEING,
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
    sizes,
    staged,
    stored,
)
from helpers.ranks_told import by_first, refusals, tuned, verdicts, vocabularies
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models."""
    made = tmp_path_factory.mktemp("ranks")
    for kind in {*FAMILIES, "qwen2_moe", "glm4_moe", "phi3"}:
        tiny_model(kind, **SMALL).save_pretrained(made / kind)
    tiny_model("gemma4_text", **SMALL, **GEMMA4_EXPERTS).save_pretrained(made / "gemma4_experts")
    tiny_model("llama", **SMALL | {"num_hidden_layers": 1}).save_pretrained(made / "one layer")
    bigram(**sizes()).save_pretrained(made / "bigram")
    for kind in KINDS:
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if kind.startswith("qwen") else {}
        loaded(kind, made / f"{kind}{OWN_LAYER}", **heads)
    seeing(SEEING).save_pretrained(made / SEEING)
    return made


@pytest.mark.some("gemma4_text", "qwen3_5_text", "gpt_oss", "hunyuan_v1_dense")
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_gives_the_same_tokens(rank_pools: RankPools, folder: Path, kind: str) -> None:
    *_, mode = rank_pools.compare(family, folder, kind)
    assert mode.startswith("generic" if kind == GENERIC else "adapter")


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_cut_within_captured_rounds(rank_pools: RankPools, folder: Path, kind: str) -> None:
    rank_pools.compare(mixed, folder, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_another_family_gives_the_same_tokens(rank_pools: RankPools, tmp_path: Path, kind: str) -> None:
    tiny_model(kind, **SMALL).save_pretrained(tmp_path / kind)
    rank_pools.compare(family, tmp_path, kind)


def test_prompts_with_images_give_the_same_tokens(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(seen, folder)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma4_text", "phi3"])
def test_shares_of_quantised_weights_are_multiplied_as_stored(rank_pools: RankPools, folder: Path, kind: str) -> None:
    """Attention of gpt-oss has biases, also where it is cut by inputs."""
    *_, held = rank_pools.compare(stored, folder, kind)
    assert held["fine-grained FP8"] >= 8


def test_drafts_are_accepted(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(drafted, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_of_a_models_own_files_drafts_in_all(rank_pools: RankPools, folder: Path, kind: str) -> None:
    rank_pools.compare(own_layer, folder, kind)


def test_heads_are_cut_too(rank_pools: RankPools, folder: Path) -> None:
    """Their tokens, and as many accepted drafts a round, are those of whole heads."""
    rank_pools.compare(cut_heads, folder)


def test_calls_of_every_kind_give_the_same_tokens(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(calls, folder)


def test_sizes_of_trees_are_chosen_alike(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(sized, folder)


def test_a_cascade_s_stages_are_held_by_one_process_or_by_all(rank_pools: RankPools, folder: Path) -> None:
    expected = rank_pools.compare(staged, folder)
    outcomes = {outcome for row in (each for each in expected if isinstance(each, list)) for _, outcome, _ in row}
    assert outcomes == {"answered", "sent_on"}


def test_of_logits_the_likeliest_are_joined(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(narrow, folder)


def test_captured_rounds_give_the_same_tokens(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(captured, folder)


def test_a_hook_on_a_cut_embedding_runs(rank_pools: RankPools, folder: Path) -> None:
    rank_pools.compare(hooked, folder)


def test_what_the_first_process_does_for_all_ends_in_all(rank_pools: RankPools, folder: Path) -> None:
    (mine, other), _ = rank_pools.run(by_first, folder, alone=False)
    assert mine[:4] == ["ValueError: plain", "Local: of this place", "Wordy: two words", "KeyboardInterrupt: "]
    told = [
        "ValueError: plain",
        "FastSpecError: Local: of this place",
        "FastSpecError: Wordy: two words",
        "KeyboardInterrupt: ",
    ]
    assert other[:4] == told and mine[4] == other[4] == 5
    assert all("fastspec.tune found" in why for each in (mine, other) for why in each[5:])


def test_the_first_process_s_verdict_on_an_mtp_layer_is_that_of_all(rank_pools: RankPools, folder: Path) -> None:
    """One that finds a kept verdict does not leave others alone with the probe's sums."""
    (mine, other), _ = rank_pools.run(verdicts, folder, alone=False)
    (_, before), *_ = mine
    assert mine == [(1, before), 1, (1, before), 1, (2, before), 1]
    assert other == [(1, before), 0, (1, before), 0, (2, before), 1]


def test_the_first_process_s_draft_vocabulary_is_that_of_all(rank_pools: RankPools, folder: Path) -> None:
    drafted, *_ = rank_pools.compare(vocabularies, folder)
    assert drafted == [*range(40)]


def test_launches_are_tuned_by_one_and_used_by_all(rank_pools: RankPools, folder: Path) -> None:
    """Heads that are whole in all processes draft the same tokens only by the same launches."""
    (mine, other), _ = rank_pools.run(tuned, folder, "one layer", alone=False)
    assert mine == other
    kept, before, after, tables, failed = mine
    assert before == after and {op for op, *_ in kept} >= {"linear"}, kept
    assert tables == "tuned" and failed == "division by zero"


def test_what_each_has_of_weights_can_lie_together(rank_pools: RankPools, folder: Path) -> None:
    first, _, *told = rank_pools.compare(packed, folder)
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


def test_what_is_refused_by_name(rank_pools: RankPools, folder: Path) -> None:
    found, _ = rank_pools.run(refusals, folder, alone=False)
    for told in found:
        cascade, seeds, settings, profiles, ended, older, many, more = told
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
