"""MTP heads: read from a model's own files, drafting what transformers' own module drafts, changing no token."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import gguf
import pytest
import torch
from helpers.captured import Stand, stand_in
from helpers.devices import ON_CUDA
from helpers.generate import prompts
from helpers.heads import as_eagle3, make_head, write
from helpers.models import tiny_model
from helpers.mtp import FORMS, KINDS, draft_by_token, loaded, oracle, published, save_with, target
from helpers.pages import ROOT
from helpers.stored import halves
from helpers.tokenizers import worded
from helpers.vision import prompts_with_images, seeing
from huggingface_hub import constants, file_download
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

import fastspec
from fastspec import CheckpointError, Unsupported, files
from fastspec.default_trees import TreeShape
from fastspec.generation.drafters import head_drafter
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.heads.bound import Drafted, DraftVocabulary
from fastspec.generation.heads.rounded_linear import RoundedLinear, rounded_lines
from fastspec.patches.assistants import mtp, registry, smaller_heads
from fastspec.patches.assistants.kept_counts import vocabularies
from fastspec.patches.assistants.mtp import load_mtp
from fastspec.patches.assistants.mtp_report import inspect_mtp
from fastspec.patches.assistants.smaller_heads import read_list, with_vocabulary
from fastspec.patches.backends import TORCH, counted
from fastspec.patches.hf.cache import CACHE
from fastspec.patches.hf.checkpoint_files import dense_float8
from fastspec.patches.session import session_of
from fastspec.programs.cli.app import app

TREE = fastspec.Mtp(depth=3, top_k=3, total_tokens=12)
NEW = 24


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, MtpModel]:
    """A family's target from files with an MTP layer, and transformers' own layer of the same weights."""
    return loaded(kind, tmp_path_factory.mktemp("mtp"))


def theirs(made: MtpModel, model: Any, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Logits [T - 1, V] of transformers' layer after every pair of a text; and those after the pair's own likeliest
    token, and so on: every place is computed anew from the whole text before it."""
    found = [[] for _ in range(steps)]
    for end in range(1, ids.shape[1]):
        tokens, hidden = ids[:, 1 : end + 1], states[:, :end]
        for step in range(steps):
            places = torch.arange(tokens.shape[1])[None]
            cache = DynamicCache(config=made.config)
            out = made.forward_layer(0, hidden, places, cache, input_ids=tokens)
            logits = made._project_to_logits(out[:, -1])
            found[step].append(logits[0])
            tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
            hidden = torch.cat((hidden, out[:, -1:]), 1)
    return [torch.stack(each) for each in found]


@pytest.mark.parametrize("skimmed", [1, head_drafter.SKIMMED])
@torch.no_grad()
def test_drafts_are_those_of_transformers_own_layer(
    both: tuple[Any, MtpModel], skimmed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts read whole, or but for keys and values their last pairs alone."""
    monkeypatch.setattr(head_drafter, "SKIMMED", skimmed)
    model, made = both
    head = load_mtp(True, model)
    ids = torch.randint(6, 90, (1, 12), generator=torch.Generator().manual_seed(1))
    states = model(ids, output_hidden_states=True).hidden_states[-1]
    first, second, third = theirs(made, model, ids, states, 3)
    drafter = EagleDrafter(head, TreeShape(4, 2, 1), rows=1, capacity=40, ops=TORCH)
    readouts = drafter.readouts(ids[:, 1:], states[:, :-1])
    torch.testing.assert_close(drafter.program.logits(readouts)[0], first, rtol=1e-4, atol=1e-4)
    for end in range(2, ids.shape[1]):
        counts = Counter[str]()
        drafter = EagleDrafter(head, TreeShape(4, 2, 1), rows=1, capacity=40, ops=counted(TORCH, counts))
        drafter.begin(ids[:, :end], torch.tensor([end]), states[:, :end], ids[:, end])
        tree = drafter.propose(end)
        assert (counts["frontier_input"], counts["next_frontier"]) == (2, 0)
        assert counts["head_input"] == (2 if skimmed == 1 else 1)  # the last pair again, where others are skimmed
        chain = [int(each[end - 1].argmax()) for each in (first, second, third)]
        assert tree.tokens[0].tolist() == [int(ids[0, end]), *chain]


def draft_by_the_text(made: MtpModel, model: Any) -> None:
    """Let an MTP layer draft by the token before, the state and what it attends to."""
    draft_by_token(made, model)
    layer = made.layers[0]
    with torch.no_grad():
        for weight in layer.mtp_block.parameters():
            if weight.dim() > 1:
                weight.mul_(4.5)
        layer.eh_proj.weight[:, len(layer.eh_proj.weight) :] += 0.3 * torch.eye(len(layer.eh_proj.weight))
        layer.hnorm.weight.copy_(layer.enorm.weight)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rounds_accept_what_transformers_own_layer_drafts_from_the_whole_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls, and in an open batch whose second prompt goes on from the first's answer: the layer's keys and values
    are those of a text that is read anew."""
    monkeypatch.setattr("helpers.mtp.draft_by_token", draft_by_the_text)
    model, made = loaded(kind, tmp_path)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    chain = fastspec.Mtp(depth=3, top_k=1, total_tokens=4)

    def rounds(text: Tensor, begun: int) -> int:
        states = model(text, output_hidden_states=True).hidden_states[-1]
        drafts = [each.argmax(-1).tolist() for each in theirs(made, model, text, states, 3)]
        ids, end, count = text[0].tolist(), begun, 0
        while end < len(ids) - 1:
            chains = zip((each[end - 1] for each in drafts), ids[end + 1 :], strict=False)
            end, count = end + 1 + len(list(takewhile(lambda pair: pair[0] == pair[1], chains))), count + 1
        return count

    with fastspec.patched(model, mtp=True):
        ids = prompts(9)["input_ids"]
        text = model.generate(ids, **options, assistant=chain)
        first = rounds(text, 9)
        assert fastspec.report(model).last.rounds == first < 23
        more = torch.cat((text, ids[:, :4]), 1)
        mask = torch.ones_like(more)
        with fastspec.continuous(model, assistant=chain, rows=1) as batch:
            batch.submit(ids, **options).result()
            second = batch.submit(more, attention_mask=mask, **options).result()
        assert fastspec.report(model).last.rounds == first + rounds(second, more.shape[1])


@pytest.mark.each_value  # what chooses tokens reads the logits of every family alike
@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": False, "repetition_penalty": 1.3},
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_no_token_changes(both: tuple[Any, MtpModel], given: dict[str, Any]) -> None:
    model, _ = both
    inputs = prompts(5, 11, 3)
    with fastspec.patched(model):
        answers = []
        for assistant in ("autoregressive", TREE):
            torch.manual_seed(3)
            answers.append(model.generate(**inputs, max_new_tokens=NEW, assistant=assistant, **given))
        assert torch.equal(*answers)
        if not given["do_sample"]:
            plain = type(model).generate(model, **inputs, max_new_tokens=NEW, **given)
            assert torch.equal(answers[1], plain)
            assert fastspec.report(model).last.acceptance_length > 1.3


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=ON_CUDA,
        ),
    ],
)
def test_captured_rounds_change_no_token(both: tuple[Any, MtpModel], device: str, monkeypatch: Any) -> None:
    model = copy.deepcopy(both[0]).to(device)
    replayed: list[Stand] = []
    if device == "cpu":

        class Counted(Stand):
            def __call__(self, program: Any, key: Any) -> Any:
                replayed.append(self)
                return super().__call__(program, key)

        stand_in(monkeypatch, Counted)
    inputs = {name: each.to(device) for name, each in prompts(5, 11, 3).items()}
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = type(model).generate(model, **inputs, **options)
    with fastspec.patched(model, mtp=True):
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options, assistant=TREE), plain)
            assert fastspec.report(model).last.acceptance_length > 1.3
        assert any(each.graph is not None for each in replayed) or fastspec.report(model).graph_bytes > 0


@pytest.mark.some("qwen3_5_moe_text", "ernie4_5_moe")
def test_a_layer_in_8_bits_changes_no_token(both: tuple[Any, MtpModel]) -> None:
    """Projections and dense feed-forwards are rounded; experts, their routers and what the target lends are not."""
    model, _ = both
    inputs = prompts(5, 11, 3)
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = type(model).generate(model, **inputs, **options)
    with fastspec.patched(model, mtp=True, backend="torch", head_bits=8):
        assert torch.equal(model.generate(**inputs, **options, assistant=TREE), plain)
        report, head = fastspec.report(model), session_of(model).resources["mtp"].module
        assert report.head_bits == {"mtp": 8} and report.last.acceptance_length > 1.3
        made = {name for name, each in head.named_modules() if isinstance(each, RoundedLinear)}
        runs = {name for name, each in head.named_modules() if isinstance(each, torch.nn.Linear)}
        assert {"fc", "layer.self_attn.q_proj", "layer.self_attn.o_proj"} <= made
        assert all("shared_expert" in name or "gate" in name.rpartition(".")[2] for name in runs)
        passes = report.kernels["stored_linears"]
    with fastspec.patched(model, backend="torch", head_bits=8):  # which finds its layer at its first call
        assert torch.equal(model.generate(**inputs, **options, assistant=TREE), plain)
        assert fastspec.report(model).head_bits == {"mtp": 8}
        assert fastspec.report(model).kernels["stored_linears"] == passes


@pytest.mark.some("qwen3_5_text", "glm4_moe", "ernie4_5_moe")
def test_turns_and_open_batches(both: tuple[Any, MtpModel]) -> None:
    """A second turn on the returned cache, and prompts that join a running batch."""
    model, _ = both
    lines = [torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(length)) for length in (7, 4, 9)]
    with fastspec.patched(model, mtp=True):
        first = model.generate(
            lines[0], max_new_tokens=8, do_sample=False, assistant=TREE, return_dict_in_generate=True
        )
        more = torch.cat((first.sequences, lines[1]), 1)
        given = {"attention_mask": torch.ones_like(more), "max_new_tokens": 8, "do_sample": False}
        second = model.generate(more, **{CACHE: first[CACHE]}, assistant=TREE, **given)
        assert torch.equal(second, type(model).generate(model, more, **given))
        many = prompts(5, 11, 3, 8, 2)
        plain = type(model).generate(model, **many, max_new_tokens=10, do_sample=False)
        batch = fastspec.ContinuousBatch(TREE, rows=2)
        assert torch.equal(model.generate(**many, max_new_tokens=10, do_sample=False, assistant=batch), plain)
        with fastspec.continuous(model, assistant=TREE, rows=2) as batch:
            texts = []
            for drafts in ([True] * 3, [False] * 3, [False, True, False]):
                pairs = zip(lines, drafts, strict=True)
                answers = [batch.submit(line, max_new_tokens=10, do_sample=False, drafts=on) for line, on in pairs]
                texts += [answer.result() for answer in answers]
        for line, text in zip(lines * 3, texts, strict=True):
            plain = type(model).generate(model, line, max_new_tokens=10, do_sample=False)
            assert torch.equal(plain, text)


@pytest.mark.some("qwen3_5")
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_images(kind: str, tmp_path: Path) -> None:
    """The text decoder of a vision-language model drafts behind images too."""
    model = seeing(kind)
    save_with(model, published(oracle(model), "qwen", 0), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = prompts_with_images(model, ((3, 4), (6, 9)))
    plain = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    with fastspec.patched(model):
        assert torch.equal(plain, model.generate(**inputs, max_new_tokens=10, do_sample=False, assistant=TREE))
        assert fastspec.report(model).last.rounds > 0


def in_float8(tensors: dict[str, Tensor], scaled: str) -> dict[str, Tensor]:
    """Tensors of an MTP layer with its matrices in FP8, a scale for each block of 128 x 128, for each line or for
    all."""
    found = dict(tensors)
    for key, weight in tensors.items():
        if weight.dim() == 2 and not key.endswith(("gate.weight", "embed_tokens.weight")):
            largest = weight.abs().amax(1, keepdim=True) if scaled == "lines" else weight.abs().max().view(1, 1)
            found[key] = (weight * 448 / largest).to(torch.float8_e4m3fn)
            name, scale = ("weight_scale_inv", largest) if scaled == "blocks" else ("weight_scale", largest.bfloat16())
            found[key.replace("weight", name)] = (scale.view(()) if scaled == "all" else scale) / 448
            if scaled == "all":
                found[key.replace("weight", "input_scale")] = torch.ones(())
    return found


@pytest.mark.parametrize(("kind", "scaled"), [("qwen3_5_text", "blocks"), ("glm4_moe", "lines"), ("qwen3_next", "all")])
def test_a_layer_of_fp8_is_read(kind: str, scaled: str, tmp_path: Path) -> None:
    """As Qwen, DeepSeek and GLM ship it, experts one by one: it drafts as before it was rounded, and is saved dense."""
    model, _ = loaded(kind, tmp_path)
    layers = model.config.num_hidden_layers
    dense = load_mtp(True, model).module.state_dict()
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    mine = {key: each for key, each in held.items() if key.startswith(("mtp.", f"model.layers.{layers}."))}
    save_file(held | in_float8(mine, scaled), path, metadata={"format": "pt"})
    shown = inspect_mtp(tmp_path)
    assert shown is not None and shown.refused is None
    read = load_mtp(True, model).module.state_dict()
    for name, each in dense.items():
        torch.testing.assert_close(read[name], each, rtol=2**-4 + 2**-7, atol=float(each.abs().max()) / 2**8)
    inputs, options = prompts(5), {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**inputs, **options)
    fastspec.patch(model, mtp=True)
    assert torch.equal(model.generate(**inputs, **options, assistant=TREE), expected)
    assert fastspec.report(model).last.acceptance_length > 2
    model.save_pretrained(tmp_path / "saved")
    assert {key for key in load_file(tmp_path / "saved" / "model.safetensors") if key in mine} == mine.keys()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    again = load_mtp(True, saved).module.state_dict()
    assert all(torch.equal(again[name], each) for name, each in read.items())


def test_scales_of_fp8_stand_for_blocks_lines_and_all() -> None:
    codes = torch.randn(300, 200).to(torch.float8_e4m3fn)
    for name, scale in (
        ("weight_scale_inv", torch.rand(3, 2).to(torch.float8_e8m0fnu)),
        ("weight_scale_inv", torch.rand(3, 2)),
        ("weight_scale", torch.rand(300, 1).bfloat16()),
        ("weight_scale", torch.rand(300)),
        ("weight_scale", torch.rand(1)),
    ):
        wide = (
            scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200] if len(scale) == 3 else None
        )
        wide = scale.float().view(-1, 1) if wide is None else wide
        found = dense_float8({"a.weight": codes, f"a.{name}": scale, "a.input_scale": scale, "b.weight_scale": scale})
        assert found.keys() == {"a.weight", "b.weight_scale"}
        assert torch.equal(found["a.weight"], (codes.float() * wide).bfloat16())
    other = {"a.weight": codes, "a.weight_scale_inv": torch.rand(5, 4)}
    assert dense_float8(other) == other


@pytest.mark.parametrize("made", ["FP8Linear", "Params4bit"])
def test_a_layer_beside_quantised_ones_keeps_its_weights(made: str, tmp_path: Path) -> None:
    """In the target's dtype, whatever its own weights and LM head are stored in."""
    model, _ = loaded("qwen3_5_text", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key: each.bfloat16() if "mtp." in key else each for key, each in load_file(path).items()}, path)
    dense = load_mtp(True, model)
    layers = [(parent, *each) for parent in model.modules() for each in parent.named_children()]
    for parent, name, each in layers:
        if type(each) is torch.nn.Linear and made == "FP8Linear":
            stored = FP8Linear(each.in_features, each.out_features, block_size=(16, 16))
            stored.weight.data = each.weight.to(torch.float8_e4m3fn)
            stored.weight_scale_inv.data = torch.ones(stored.weight_scale_inv.shape)
            setattr(parent, name, stored)
        elif type(each) is torch.nn.Linear and made == "Params4bit":
            words = torch.zeros(each.weight.numel() // 4, 1, dtype=torch.bfloat16)
            each.weight = torch.nn.Parameter(words, requires_grad=False)
    read = load_mtp(True, model)
    first, second = dense.module.state_dict(), read.module.state_dict()
    assert all(torch.equal(second[name], each) and second[name].dtype == each.dtype for name, each in first.items())
    assert read.rows == dense.rows and read.config.vocab_size == dense.config.vocab_size
    if made == "FP8Linear":
        fastspec.patch(model, mtp=True, stored=True)
        one, drafted = (
            model.generate(**prompts(5), max_new_tokens=10, do_sample=False, assistant=each)
            for each in ("autoregressive", TREE)
        )
        assert torch.equal(one, drafted)


class Packed(torch.nn.Linear):
    """A quantised layer, as far as its tensors' names go."""

    names: tuple[str, ...] = ()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: torch.zeros(1) for name in self.names})


@pytest.mark.parametrize(
    "names",
    [("qweight", "scales"), ("weight_packed", "weight_scale"), ("weight", "weight.absmax", "weight.quant_map")],
    ids=["GPTQ", "compressed-tensors", "bitsandbytes"],
)
def test_a_layer_is_like_the_quantised_one_of_its_parts(names: tuple[str, ...], tmp_path: Path) -> None:
    """ERNIE's is dense, as its first layer is, and not as its last ones."""
    model, _ = loaded("ernie4_5_moe", tmp_path)
    dense = load_mtp(True, model).module.state_dict()
    for layer in model.model.layers.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__, layer.names = Packed, names
    read = load_mtp(True, model).module.state_dict()
    assert read.keys() == dense.keys() and all(torch.equal(read[name], each) for name, each in dense.items())


class Int8Tensor(torch.Tensor):
    """torchao's weight, which is compared with none."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_lm_head_that_a_layer_brings_beside_one_of_codes_is_its_own(tmp_path: Path) -> None:
    """GLM's files have copies of the embedding and of the LM head."""
    model, _ = loaded("glm4_moe", tmp_path, tie_word_embeddings=False)
    held, prefix = model.lm_head.weight, f"model.layers.{model.config.num_hidden_layers}"
    embedding = model.get_input_embeddings().weight
    broken(
        tmp_path, **{f"{prefix}.shared_head.head.weight": held.data, f"{prefix}.embed_tokens.weight": embedding.data}
    )
    assert load_mtp(True, model).module.lm_head is None
    model.lm_head.weight = torch.nn.Parameter(held.data.as_subclass(Int8Tensor), requires_grad=False)
    head = load_mtp(True, model)
    assert torch.equal(head.module.lm_head.weight, held) and not head.binding.own_embedding


def broken(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors in a checkpoint; None takes one out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mtp.fc.weight": None}, "fc.weight is missing"),
        ({"mtp.pre_fc_norm_embedding.weight": None}, "token_norm.weight is missing"),
        ({"mtp.layers.0.self_attn.q_norm.weight": None}, "layer.self_attn.q_norm.weight is missing"),
        ({"mtp.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, r"quantised \(layer.mlp.up_proj.weight_scale\)"),
        (
            {"mtp.layers.0.mlp.up_proj.weight_packed": torch.ones(1).int()},
            r"quantised \(layer.mlp.up_proj.weight_packed",
        ),
        ({"mtp.fc.weight": torch.ones(64, 128, dtype=torch.int8)}, r"its MTP weights quantised \(fc.weight\)"),
        ({"mtp.fc.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)}, r"its MTP weights quantised \(fc.weight\)"),
        ({"mtp.fc.weight": torch.ones(64, 64)}, r"fc.weight is \[64, 64\], not \[64, 128\]"),
        ({"mtp.layers.1.input_layernorm.weight": torch.ones(64)}, "an MTP layer for each draft"),
        ({"mtp.fc.weight": torch.full((64, 128), float("nan"))}, "fc.weight contains NaN or infinite values"),
        (
            {"mtp.embed_tokens.weight": torch.ones(97, 32)},
            r"an embedding of shape \[97, 32\], .* 97 tokens and is 64 wide",
        ),
        ({"mtp.embed_tokens.weight": torch.ones(90, 64)}, r"an embedding of shape \[90, 64\], .* has 97 tokens"),
        ({"mtp.embed_tokens.weight": torch.full((97, 64), torch.inf)}, "embed_tokens.weight contains NaN or inf"),
    ],
)
def test_a_head_that_is_not_whole_is_refused_by_name(
    changes: dict[str, Tensor | None], told: str, tmp_path: Path
) -> None:
    """`inspect` says so in the same words of what headers show."""
    model, _ = loaded("qwen3_5_text", tmp_path)
    broken(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=told) as refused:
        fastspec.patch(model, mtp=True)
    shown = inspect_mtp(tmp_path)
    assert shown is not None and shown.refused == (None if "contains NaN" in told else str(refused.value))
    with fastspec.patched(model), pytest.raises(Unsupported, match=told):
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant="mtp")


def test_models_without_such_a_head_are_refused_by_name(tmp_path: Path) -> None:
    model = target("qwen3_5_text")
    with pytest.raises(CheckpointError, match="not loaded from files"):
        fastspec.patch(model, mtp=True)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds no MTP weights"):
        fastspec.patch(model, mtp=True)
    with pytest.raises(CheckpointError, match="the hub does not give it"):
        fastspec.patch(model, mtp="nobody/nothing")
    model.config.name_or_path = str(tmp_path / "renamed")
    with pytest.raises(CheckpointError, match=r"renamed is no directory, and no hub id .*mtp=PATH"):
        fastspec.patch(model, mtp=True)
    ids = torch.tensor([[7, 8]])
    with fastspec.patched(model), pytest.raises(Unsupported, match="renamed is no directory"):
        model.generate(ids, max_new_tokens=3, assistant="mtp")
    model.config.name_or_path = str(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"\.bin files \(pytorch_model.bin\), and MTP weights are read from safet"
    ):
        fastspec.patch(model, mtp=True)
    with fastspec.patched(model, assistant=None), pytest.raises(Unsupported, match='assistant="mtp"'):
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, use_mtp=True, assistant="autoregressive")


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite", "hy_v3", "mimo_v2_flash"])
def test_families_without_an_adapter_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Before a file is read, and `inspect` says so."""
    tiny_model(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    width = model.config.hidden_size
    place = f"model.layers.{model.config.num_hidden_layers}"
    broken(tmp_path, **{f"{place}.enorm.weight": torch.ones(width), f"{place}.eh_proj.weight": torch.ones(width, 2)})
    told = f"through an adapter, and {type(model).__name__} runs in generic mode .*: use 'nasd' or 'speculative'"
    with pytest.raises(Unsupported, match=told):
        fastspec.patch(model, mtp=True)
    with fastspec.patched(model), pytest.raises(Unsupported, match=told):
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant="mtp")
    shown = inspect_mtp(tmp_path)
    assert shown is not None and re.search(told, shown.refused)


@pytest.mark.parametrize("kind", ["exaone4", "starcoder2", "olmo"])
def test_layers_that_begin_with_no_such_norm_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """EXAONE 4.5's checkpoints bring a layer in Qwen's form."""
    tiny_model(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    broken(tmp_path, **{"mtp.fc.weight": torch.ones(2, 2), "mtp.pre_fc_norm_hidden.weight": torch.ones(2)})
    told = f"'mtp' does not run layers like those of this {type(model).__name__}"
    with pytest.raises(Unsupported, match=told):
        fastspec.patch(model, mtp=True)
    with pytest.raises(Unsupported, match=told):
        mtp.new_mtp(model)
    shown = inspect_mtp(tmp_path)
    assert shown is not None and told in shown.refused


def test_what_holds_no_layer_is_refused_by_its_type(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    with pytest.raises(CheckpointError, match="mtp= is a Linear, which holds no draft layers: accepted are True, a d"):
        fastspec.patch(model, mtp=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="Gemma 4's draft layers are a checkpoint of their own"):
        fastspec.patch(tiny_model("gemma4_text"), mtp=True)


@pytest.mark.parametrize(
    ("kind", "over", "told"),
    [
        (
            "qwen3_5_text",
            {"hidden_size": 128},
            r"of this MtpHead do not fit this .*q_proj.weight is \[128, 128\], not \[128, 64\]",
        ),
        ("qwen3_5_text", {"vocab_size": 120}, "drafts 120 tokens, and Qwen3_5ForCausalLM has 97"),
        ("glm4_moe", {}, "has a Glm4MoeDecoderLayer, and Qwen3_5ForCausalLM has layers of Qwen3_5DecoderLayer"),
    ],
)
def test_a_module_of_another_model_is_refused_by_name(kind: str, over: Any, told: str, tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path / "first")
    other, _ = loaded(kind, tmp_path / "other", **over)
    with pytest.raises(CheckpointError, match=told):
        fastspec.patch(model, mtp=load_mtp(True, other).as_module())


def test_blocks_among_mtp_tensors_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    layer = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if "mtp." in name}
    blocks = {f"mtp.{n}.{name.rpartition('layers.0.')[2]}": x.clone() for n in (0, 1) for name, x in layer.items()}
    markov = {"mtp.1.markov_head.markov_w1.weight": torch.ones(8, 64)}
    broken(tmp_path, **dict.fromkeys(layer), **blocks, **markov)
    with pytest.raises(CheckpointError, match=r"DSpark blocks under mtp\. \(mtp\.1\.markov_head"):
        fastspec.patch(model, mtp=True)


def test_another_copy_has_what_a_conversion_lost(tmp_path: Path) -> None:
    """A directory of several files, read without those that hold nothing of the layer."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "lost")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lost")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "apart").mkdir()
    for number, kept in enumerate((False, True)):
        part = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.") == kept}
        save_file(part, tmp_path / "apart" / f"model-{number}.safetensors", metadata={"format": "pt"})
    ids = torch.tensor([[7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    with fastspec.patched(model, mtp=tmp_path / "apart", assistant="mtp"):
        assert torch.equal(plain, model.generate(ids, max_new_tokens=NEW, do_sample=False))
        assert fastspec.report(model).last.acceptance_length > 1.3


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_the_layer_is_that_of_the_files_that_the_model_is_loaded_from(size: str, tmp_path: Path) -> None:
    """Also where an older file lies beside them; of two that are not loaded neither is taken."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    own = load_mtp(True, model).module.state_dict()
    model.save_pretrained(tmp_path, state_dict=state, max_shard_size=size)
    old = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.startswith("mtp.")}
    for name in ("a", "old"):
        save_file(old, tmp_path / f"{name}.safetensors")
    found = load_mtp(tmp_path, model).module.state_dict()
    assert all(torch.equal(own[key], found[key]) for key in own)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight.* in two files.*leave one"):
        load_mtp(tmp_path, model)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts folders into a hub's cache, each as a commit, `main` or none -> the name of the repository."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--tiny"

    def put(folder: Path, commit: str, *names: str) -> str:
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        for name in names:
            (repository / "refs" / name).write_text(commit)
        return "org/tiny"

    return put


@pytest.mark.parametrize("revision", [None, "old", "b" * 40])
def test_a_model_of_the_hub_has_its_layer_from_the_revision_that_it_was_loaded_from(
    hub: Any, revision: str | None, tmp_path: Path
) -> None:
    """Which transformers' models do not keep; no network is asked."""
    made = {}
    for seed, (commit, name) in enumerate((("a" * 40, "main"), ("b" * 40, "old"))):
        made[name] = loaded("qwen3_5_text", tmp_path / name, seed=seed)[1]
        hub(tmp_path / name, commit, name)
    options = {} if revision is None else {"revision": revision}
    model = AutoModelForCausalLM.from_pretrained("org/tiny", dtype=torch.float32, **options)
    wanted = made["main" if revision is None else "old"].layers[0].mtp_block.self_attn.q_proj.weight
    assert torch.equal(load_mtp(True, model).module.layer.self_attn.q_proj.weight, wanted)


@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_files_that_are_there_are_read_without_a_network(
    hub: Any, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody has said that there is none."""
    for seed, (commit, name) in enumerate((("a" * 40, "main"), ("b" * 40, "old"))):
        model, _ = loaded("qwen3_5_text", tmp_path / name, seed=seed)
        with fastspec.patched(model, mtp=True):
            model.save_pretrained(tmp_path / f"{name} {shard}", max_shard_size=shard)
        hub(tmp_path / f"{name} {shard}", commit, name)
    model = AutoModelForCausalLM.from_pretrained("org/tiny", dtype=torch.float32)
    asked: list[Any] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", lambda *given, **_: asked.append(given))
    for source in (True, "org/tiny"):
        assert load_mtp(source, model).config.kind == "mtp"
    shown = inspect_mtp("org/tiny")
    assert shown is not None and shown.refused is None and not asked


def test_files_that_are_fetched_are_of_the_index_that_names_them(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the hub's main revision is by then."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    with fastspec.patched(model, mtp=True):
        model.save_pretrained(tmp_path / "cut", max_shard_size="50KB")
    for file in (tmp_path / "cut").glob("*.safetensors"):
        file.unlink()
    asked: list[str | None] = []
    monkeypatch.setattr(mtp, "cached_file", lambda *given, revision, **_: asked.append(revision))
    with pytest.raises(CheckpointError, match="which its index names"):
        load_mtp(hub(tmp_path / "cut", "a" * 40, "main"), model)
    assert asked == ["a" * 40]


@pytest.mark.parametrize("size", ["50KB", "1GB"])
def test_inspecting_files_that_are_not_there_fetches_their_headers_alone(
    size: str, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several that an index names, and of one."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    with fastspec.patched(model, mtp=True):
        model.save_pretrained(tmp_path / "cut", max_shard_size=size)
    held = {file.name: file.read_bytes() for file in (tmp_path / "cut").glob("*.safetensors")}
    for name in held:
        (tmp_path / "cut" / name).unlink()
    asked: dict[str, str | None] = {}

    def headers(repository: str, name: str, *, revision: str | None) -> Any:
        asked[name] = revision
        size = int.from_bytes(held[name][:8], "little")
        told = json.loads(held[name][8 : 8 + size])
        kinds = {key: SimpleNamespace(**each) for key, each in told.items() if key != "__metadata__"}
        return SimpleNamespace(tensors=kinds)

    monkeypatch.setattr(mtp, "parse_safetensors_file_metadata", headers)
    monkeypatch.setattr(mtp, "cached_file", lambda _, name, **__: None if name == mtp.INDEX else pytest.fail("fetched"))
    shown = inspect_mtp(hub(tmp_path / "cut", "a" * 40, "main"))
    assert shown is not None and shown.refused is None
    if len(held) == 1:
        monkeypatch.undo()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        with pytest.raises(CheckpointError, match=f"gives neither {mtp.INDEX} nor {mtp.WHOLE}: .*HF_HUB_OFFLINE"):
            load_mtp("org/tiny", model)
        return
    assert {*asked.values()} == {"a" * 40} and len(asked) < len(held)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(mtp, "parse_safetensors_file_metadata", refuse)
    shown = inspect_mtp("org/tiny")
    assert shown is not None and shown.refused == "org/tiny is no directory, and the hub does not give it (no network)"


def test_of_one_revision_alone_and_in_several_files(hub: Any, tmp_path: Path) -> None:
    """Also where what was fetched is no main revision."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    held = load_mtp(True, model).module.state_dict()
    with fastspec.patched(model, mtp=True):
        model.save_pretrained(tmp_path / "several", max_shard_size="50KB")
    assert (tmp_path / "several" / mtp.INDEX).exists()
    hub(tmp_path / "several", "c" * 40)
    model = AutoModelForCausalLM.from_pretrained("org/tiny", revision="c" * 40, dtype=torch.float32)
    mine = load_mtp(True, model).module.state_dict()
    assert mine.keys() == held.keys() and all(torch.equal(mine[key], held[key]) for key in held)
    shown = inspect_mtp(tmp_path / "several")
    assert shown is not None and ("tensors", "15") in shown.facts and shown.refused is None


def test_a_target_with_an_adapter_is_said_to_be_drafted_for_less_well(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    ids = torch.tensor([[7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    model.peft_config = {}
    model.peft_config["default"] = object()  # PEFT's field, which says that weights are not those of the files
    told = "an adapter changes what this Qwen3_5ForCausalLM says.*less often"
    with pytest.warns(UserWarning, match=told):
        fastspec.patch(model, mtp=True)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=TREE))
    fastspec.unpatch(model)
    held, model.peft_config = model.peft_config, {}
    with fastspec.patched(model, mtp=True):
        model.peft_config = held
        with pytest.warns(UserWarning, match=told):
            model.generate(ids, max_new_tokens=3, assistant=TREE)
        model.generate(ids, max_new_tokens=3, assistant=TREE)  # which tells nothing more: a warning is an error here


@pytest.mark.parametrize(("shares", "before"), [((0.5, 0.5), False), ((0.5, 0.529), False), ((0.5, 0.531), True)])
def test_the_default_reading_is_kept_unless_the_other_is_clearly_better(
    shares: tuple[float, float], before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = loaded("glm4_moe", tmp_path)
    monkeypatch.setattr(mtp, "_agreements", lambda *_: list(shares))
    assert load_mtp(True, model).config.last_tap_before_norm is before


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_layer_that_speculators_saved_alone(kind: str, tmp_path: Path) -> None:
    """It is the layer of the model's own files, under other names."""
    model, made = loaded(kind, tmp_path / "whole")
    alone = tmp_path / "alone"
    alone.mkdir()
    config = {"speculators_model_type": "mtp", "transformer_layer_config": model.config.to_diff_dict()}
    (alone / "config.json").write_text(json.dumps(config))
    tensors = published(made, "speculators", 3, split=kind == "qwen3_5_moe_text")
    save_file({name: each.contiguous() for name, each in tensors.items()}, alone / "model.safetensors")
    own, apart = load_mtp(True, model).module.state_dict(), load_mtp(alone, model).module.state_dict()
    assert own.keys() == apart.keys() and all(torch.equal(own[name], apart[name]) for name in own)
    with pytest.raises(CheckpointError, match=r"an MTP module.*mtp=PATH"):
        fastspec.load_head(alone, model)


def test_a_copy_of_the_targets_lm_head_is_not_held_twice(tmp_path: Path) -> None:
    model, _ = loaded("glm4_moe", tmp_path)
    copies = {
        "model.layers.3.shared_head.head.weight": model.lm_head.weight.detach().clone(),
        "model.layers.3.embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
    }
    broken(tmp_path, **copies)
    head = load_mtp(True, model)
    assert head.binding.lm_head is model.lm_head and head.binding.embedding is model.model.embed_tokens
    own = torch.randn(97, 64)
    broken(tmp_path, **copies | {"model.layers.3.shared_head.head.weight": own})
    assert torch.equal(load_mtp(True, model).module.lm_head.weight, own)
    broken(tmp_path, **copies | {"model.layers.3.embed_tokens.weight": own})
    given = load_mtp(load_mtp(True, model).as_module(), model).binding  # a head that was loaded before
    assert given.own_embedding and torch.equal(given.embedding.weight, own)


@torch.no_grad()
@pytest.mark.parametrize("side", ["after", "before"])
def test_the_side_of_the_final_norm_that_drafts_better_is_read(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that knows its bigram target by the hidden state alone, of one side of a norm that turns the other over:
    the layer passes it on, and it is the embedding of the token whose successor is drafted."""
    monkeypatch.setattr(mtp, "PROBE_TOKENS", 200)  # as many as outside of tests
    model = target("glm4_moe", tie_word_embeddings=False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        for name, weight in layer.mlp.named_parameters():
            if "down_proj" in name:
                weight.zero_()
    width = model.config.hidden_size
    sign = torch.where(torch.arange(width) % 3 == 0, -1.0, 1.0)
    model.model.norm.weight.copy_(sign)
    following = model.lm_head(model.model.norm(model.model.embed_tokens.weight)).argmax(-1)
    text = [model.config.bos_token_id]
    while int(following[text[-1]]) not in text:
        text.append(int(following[text[-1]]))
    made = oracle(model)
    layer = made.layers[0]
    for name, weight in layer.mtp_block.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    for norm in (layer.enorm, layer.hnorm):
        norm.weight.fill_(1.0)
    layer.post_norm.weight.copy_(sign)
    # states -> the embedding of the token that follows theirs, which the target would have read next
    normed = torch.nn.functional.rms_norm(model.model.embed_tokens.weight, (width,))
    states, wanted = normed[text] * (sign if side == "after" else 1), normed[following[text]]
    solved = torch.linalg.lstsq(states, wanted).solution.T
    layer.eh_proj.weight.copy_(torch.cat((torch.zeros(width, width), solved), 1))
    save_with(model, published(made, "deepseek", 3), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    config = load_mtp(True, model).config
    assert config.last_tap_before_norm is (side == "before") and config.norm_output is (side == "after")
    ids = torch.tensor([[7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    with fastspec.patched(model, assistant="mtp"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "_agreements", lambda *_: pytest.fail("measured once for a checkpoint"))
        assert torch.equal(plain, model.generate(ids, max_new_tokens=NEW, do_sample=False))


def test_unpatching_frees_the_layer(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    before = {name for name, _ in model.named_parameters()}
    fastspec.patch(model, mtp=True)
    session = session_of(model)
    assert session is not None and "mtp" in session.resources
    assert {name for name, _ in model.named_parameters()} == before
    fastspec.unpatch(model)
    assert not session.resources or session_of(model) is None


def test_a_draft_vocabulary_bounds_what_is_drafted_and_follows_the_texts(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    ids = torch.tensor([[590, 591, 592, 593, 590, 591]])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    narrow = fastspec.Mtp(depth=3, top_k=3, total_tokens=12, draft_vocab=256)
    with fastspec.patched(model):
        whole = load_mtp(True, model)
        head = with_vocabulary(whole, narrow, model)
        assert with_vocabulary(whole, narrow, model) is head and head.config.draft_vocab_size == 256
        assert head.drafted().unique().numel() == 256 and head.drafted()[:240].tolist() == [*range(240)]
        head.hear(ids, torch.tensor([6]))
        assert head.drafted()[240:244].tolist() == [590, 591, 592, 593]
        rows = model.lm_head.weight[head.drafted()]
        assert torch.equal(head.readout().weight, rows) and head.drafted().unique().numel() == 256
        head.hear(ids[:, 4:5], torch.tensor([0]))  # nothing of it is real
        assert head.drafted()[240:244].tolist() == [590, 591, 592, 593]
        assert torch.equal(plain, model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=narrow))
        assert with_vocabulary(whole, fastspec.Mtp(), model) is whole  # small enough
        assert with_vocabulary(whole, fastspec.Mtp(draft_vocab="full"), model) is whole
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
        assert torch.equal(with_vocabulary(whole, narrow, model).readout().weight, 2 * rows)
    with pytest.raises(Unsupported, match="draft_vocab"):
        fastspec.Mtp(draft_vocab=1.5)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_draft_vocabulary_has_rows_of_a_packed_lm_head(bits: Any, tmp_path: Path) -> None:
    """Dequantised, in the places of tokens that texts bring too, and as they are after they have changed."""
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    packed = FP8Linear(model.lm_head.in_features, 600, block_size=(32, 32))
    packed.weight.data = (model.lm_head.weight.data * 50).to(torch.float8_e4m3fn)
    packed.weight_scale_inv.data = torch.full_like(packed.weight_scale_inv, 1 / 50)
    model.lm_head = packed.eval()
    ids, narrow = torch.tensor([[590, 591, 592, 593, 590, 591]]), fastspec.Mtp(draft_vocab=256)
    options = {"max_new_tokens": NEW, "do_sample": False}
    with fastspec.patched(model, mtp=True, stored=True, head_bits=bits, backend="torch"):
        session = session_of(model)
        assert session is not None
        whole = session.resources["mtp"]
        assert with_vocabulary(whole, fastspec.Mtp(), model) is whole and whole.readout() is packed
        plain = model.generate(ids, **options, assistant="autoregressive")
        for change in (1.0, -2.0):
            packed.weight_scale_inv.data *= change
            head = with_vocabulary(whole, narrow, model)
            if change == 1.0:
                assert torch.equal(model.generate(ids, **options, assistant=narrow), plain)
                assert head.drafted()[240:244].tolist() == [590, 591, 592, 593]
            rows = packed.weight.data[head.drafted()].float() * packed.weight_scale_inv.data[0, 0]
            made = head.readout()
            if bits is None:
                assert torch.equal(made.weight, rows)
            else:
                codes, scales = rounded_lines(rows, made.kind)
                assert torch.equal(codes.view(torch.uint8), made.codes) and torch.equal(scales, made.scales)


def test_a_draft_vocabulary_of_a_head_in_8_bits_is_rounded_and_follows_the_texts(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    ids = torch.tensor([[590, 591, 592, 593, 590, 591]])
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    narrow = fastspec.Mtp(depth=3, top_k=3, total_tokens=12, draft_vocab=256)
    with fastspec.patched(model, mtp=True, head_bits=8, backend="torch"):
        session = session_of(model)
        assert session is not None
        whole = session.resources["mtp"]
        assert whole.readout() is model.lm_head
        head = with_vocabulary(whole, narrow, model)
        made = head.readout()

        def rounded() -> bool:
            """Codes and scales are those of the rows of the drafted tokens."""
            codes, scales = rounded_lines(model.lm_head.weight[head.drafted()], made.kind)
            return torch.equal(codes.view(torch.uint8), made.codes) and torch.equal(scales, made.scales)

        assert isinstance(made, RoundedLinear) and len(made.codes) == 256 and rounded()
        drafts = []
        for ops in (TORCH, replace(TORCH, stored_parts=halves)):
            drafter = EagleDrafter(head, TreeShape(12, 3, 3), rows=1, capacity=40, ops=ops)
            states = torch.randn(1, 5, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
            drafter.begin(ids[:, :5], torch.tensor([5]), states, ids[:, 5])
            drafts.append(drafter.propose(5).tokens)
        assert torch.equal(*drafts)  # of products whose parts others add up too
        held = made.codes.data_ptr(), made.scales.data_ptr()
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=narrow)
        assert torch.equal(plain, out) and fastspec.report(model).last.acceptance_length > 1.2
        assert head.drafted()[240:244].tolist() == [590, 591, 592, 593] and rounded()
        for change in (lambda weight: weight.mul_(2.0), lambda weight: weight.normal_(0.0, 0.3)):
            with torch.no_grad():
                change(model.lm_head.weight)
            assert with_vocabulary(whole, narrow, model) is head and head.readout() is made and rounded()
        assert held == (made.codes.data_ptr(), made.scales.data_ptr())  # which captured rounds read


@pytest.mark.parametrize("bits", [8, 16])
def test_a_draft_vocabulary_that_was_made_in_inference_mode_follows_later_texts(tmp_path: Path, bits: Any) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant": fastspec.Mtp(draft_vocab=256)}
    with fastspec.patched(model, mtp=True, head_bits=bits, backend="torch"):
        for inside, ids in ((True, [[590, 591, 592, 590]]), (False, [[580, 581, 582, 580]])):
            plain = model.generate(torch.tensor(ids), **options | {"assistant": None})
            with torch.inference_mode(inside):
                assert torch.equal(model.generate(torch.tensor(ids), **options), plain)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_draft_vocabulary_stays_while_its_lm_head_is_offloaded(tmp_path: Path, bits: Any) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    narrow = fastspec.Mtp(draft_vocab=256)
    with fastspec.patched(model, mtp=True, head_bits=bits, backend="torch"):
        for offloaded, ids in ((False, [[590, 591, 592, 590]]), (True, [[580, 581, 582, 580]])):
            if offloaded:
                accelerate.cpu_offload(model.lm_head, execution_device=torch.device("cpu"))
            plain = model.generate(torch.tensor(ids), max_new_tokens=NEW, do_sample=False)
            assert torch.equal(
                model.generate(torch.tensor(ids), max_new_tokens=NEW, do_sample=False, assistant=narrow), plain
            )
            head = with_vocabulary(session_of(model).resources["mtp"], narrow, model)
            assert head.drafted()[240:243].tolist() == [590, 591, 592]


def test_norms_of_unlike_epsilons_take_no_launch_together(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, drafts_well=False)
    head = load_mtp(True, model)
    program = EagleDrafter(head, TreeShape(4, 2, 1), rows=1, capacity=40, ops=TORCH).program
    tokens, states = torch.tensor([[7, 8]]), torch.randn(1, 2, model.config.hidden_size)
    alike, _ = program.feed(tokens, states)
    head.module.state_norm.eps = 100.0
    program = EagleDrafter(head, TreeShape(4, 2, 1), rows=1, capacity=40, ops=TORCH).program
    embedded = model.get_input_embeddings()(tokens)
    apart = torch.cat((program.token_norm(embedded)[0], program.state_norm(states)[0]), -1)
    found, _ = program.feed(tokens, states)
    assert torch.equal(found, program._first(apart, states)[0]) and not torch.allclose(found, alike)


def test_the_tokens_that_a_vocabulary_follows_are_no_change_of_weights(tmp_path: Path) -> None:
    """A prompt's next turn is read from where its text ended."""
    model, _ = loaded("glm4_moe", tmp_path, vocab_size=600)
    ids = torch.tensor([[590, 591, 592, 593, 590, 591] * 4])
    narrow = fastspec.Mtp(depth=3, top_k=3, total_tokens=12, draft_vocab=256)
    with fastspec.patched(model), fastspec.continuous(model, assistant=narrow, rows=2) as batch:
        first, second = (batch.submit(ids, max_new_tokens=4, do_sample=False).result() for _ in range(2))
        assert torch.equal(first, second) and batch.stats.reused > 16


def test_a_vocabulary_counts_what_a_call_without_drafts_ends_with(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TreeSizes, "_choose", lambda self, begins=False: self._use(0, 1000))
    monkeypatch.setattr(TreeSizes, "_affords", lambda self, size: False)
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    ids, found = torch.tensor([[590, 591, 592, 593, 590, 591]]), []
    count = DraftVocabulary.count
    monkeypatch.setattr(
        DraftVocabulary, "count", lambda self, *given: found.append([x.clone() for x in given]) or count(self, *given)
    )
    auto = fastspec.Mtp(depth=3, top_k=3, total_tokens="auto", draft_vocab=256)
    with fastspec.patched(model):
        emitted = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=1000, assistant=auto)[0, 6:]
    counted = [token for tokens, counts in found for token in tokens[0, : int(counts[0])].tolist()]
    assert counted == [*ids[0].tolist(), *emitted[1:].tolist()], "the prompt too, which the head never reads"


FEW = fastspec.Mtp(depth=3, top_k=3, total_tokens=12, draft_vocab=256)
"""240 tokens that the tokenizer names, and 16 places for those of texts."""


@pytest.fixture
def worldly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with a tokenizer beside its files, whose texts are of tokens beyond the first 240, and a cache."""
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path / "cache"))
    model, _ = loaded("qwen3_5_text", tmp_path / "model", vocab_size=600)
    worded(600).save_pretrained(tmp_path / "model")
    return model


def asked(model: Any, first: int = 590) -> tuple[Tensor, list[int]]:
    """What a model answers to a text, and the tokens in the free places then, the likeliest first."""
    ids = torch.tensor([[first, first + 1, first + 2, first]])
    with fastspec.patched(model):
        answer = model.generate(ids, max_new_tokens=4, do_sample=False, assistant=FEW)
        return answer, with_vocabulary(session_of(model).resources["mtp"], FEW, model).drafted()[240:].tolist()


@pytest.mark.filterwarnings("error")
def test_counts_of_tokens_are_kept_for_the_next_patch(worldly: Any) -> None:
    """By the tokens, whatever model has them; and no answer changes."""
    plain = worldly.generate(torch.tensor([[590, 591, 592, 590]]), max_new_tokens=4, do_sample=False)
    assert torch.equal(asked(worldly)[0], plain)
    (file,) = files.kept("drafted")
    counts = json.loads(file.read_text())["counts"]
    assert {"590", "591", "592"} <= counts.keys() and all(int(token) >= 240 for token in counts)
    assert os.name == "nt" or not file.stat().st_mode & 0o077, "texts are their user's alone"
    others, found = asked(worldly, 300)
    assert {300, 301, 302, 590, 591, 592} <= {*found}
    assert torch.equal(others[0, :4], torch.tensor([300, 301, 302, 300])) and [*files.kept("drafted")] == [file]
    file.unlink()
    assert not {590, 591, 592} & {*asked(worldly, 300)[1]}
    file.unlink()
    worded().save_pretrained(worldly.config.name_or_path)  # whose are the others?
    assert {590, 591, 592} <= {*asked(worldly)[1]} and not [*files.kept("drafted")]


def test_counts_of_a_vocabulary_that_is_gone_are_kept_for_the_next(worldly: Any) -> None:
    """Of a model that was cast, whose later ones stay, and of one that nothing refers to."""
    model = AutoModelForCausalLM.from_pretrained(worldly.config.name_or_path, dtype=torch.float32)
    fastspec.patch(model, backend="torch")
    for first in (590, 580):
        model.generate(torch.tensor([[first, first + 1]]), max_new_tokens=1, do_sample=False, assistant=FEW)
        gone = weakref.ref(model)
        held = [owner() for owner in vocabularies.held.values()]
        model.double()
    assert held.count(model) == 1
    del held
    head = with_vocabulary(registry._head("mtp", session_of(model).resources, model, 3), FEW, model)
    assert {580, 581, 590, 591} <= {*head.drafted()[240:].tolist()}
    del model, head
    gc.collect()
    assert gone() is None and {580, 581, 590, 591, 300} <= {*asked(worldly, 300)[1]}


def test_a_process_keeps_its_counts_when_it_ends(worldly: Any, tmp_path: Path) -> None:
    """Several at once keep those of one of them, whole."""
    program = (
        "import sys, torch, fastspec; from transformers import AutoModelForCausalLM as Auto\n"
        "model, first = fastspec.patch(Auto.from_pretrained(sys.argv[1], dtype=torch.float32)), int(sys.argv[2])\n"
        "few = fastspec.Mtp(depth=3, top_k=3, total_tokens=12, draft_vocab=256)\n"
        "ids = torch.tensor([[first, first + 1, first]])\n"
        "model.generate(ids, max_new_tokens=2, do_sample=False, assistant=few)\n"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program, worldly.config.name_or_path]
    begun = [subprocess.Popen([*command, str(first)], cwd=ROOT) for first in (400, 500)]
    assert [each.wait(timeout=240) for each in begun] == [0, 0]
    assert {400, 401} <= {*asked(worldly)[1]} or {500, 501} <= {*asked(worldly)[1]}


def test_a_process_ends_as_it_would_where_its_device_is_broken() -> None:
    """One line says that the counts are lost, of however many models, and no other word of an error is printed."""
    program = (
        "import sys, torch\n"
        "from fastspec.patches.assistants.kept_counts import vocabularies\n"
        "class Broken:\n"
        "    kept_by, counts = 'tokens', range(9)\n"
        "    def most_counted(self):\n"
        "        raise RuntimeError('CUDA error: an illegal memory access\\nIt may have been reported late')\n"
        "for _ in range(2):\n"
        "    vocabularies.hold(Broken(), torch.nn.Linear(1, 1))\n"
        "sys.exit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    said = [line for line in ended.stderr.splitlines() if "error" in line.lower() or "Warning" in line]
    assert ended.returncode == 3 and len(said) == 1 and "Traceback" not in ended.stderr
    assert said[0].endswith("could not keep counts of tokens: CUDA error: an illegal memory access")


def test_a_forked_process_leaves_the_counts_to_the_one_before(worldly: Any) -> None:
    with fastspec.patched(worldly):
        worldly.generate(torch.tensor([[590]]), max_new_tokens=2, assistant=FEW)
        child = os.fork()
        if child == 0:
            os._exit(len(vocabularies.held))
        assert os.waitpid(child, 0)[1] == 0 and len(vocabularies.held) > 0


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"counts": {"x": 1}}', '{"counts": {"600": 1}}', '{"counts": {"7": 0}}']
)
def test_damaged_counts_are_left_with_a_warning(text: str, worldly: Any) -> None:
    plain, _ = asked(worldly)
    (file,) = files.kept("drafted")
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match="cannot be read and is ignored") as told:
        assert torch.equal(asked(worldly)[0], plain)
    assert len([each for each in told if "damaged" in str(each.message)]) == 1
    assert "590" in json.loads(file.read_text())["counts"]  # made anew


def test_a_cache_that_cannot_be_written_to_is_said_once(worldly: Any, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="cannot keep what it measured") as told:
        assert torch.equal(asked(worldly)[0], asked(worldly)[0])
    assert len([each for each in told if "cannot keep" in str(each.message)]) == 1


def test_processes_that_hold_a_model_together_begin_with_the_first_ones_counts(worldly: Any, monkeypatch: Any) -> None:
    """Which alone keeps them."""
    given = Drafted(torch.arange(240), ((444, 5000), (445, 6000)), "tokens")
    monkeypatch.setattr(smaller_heads, "by_first", lambda model, made: pickle.loads(pickle.dumps(given)))
    monkeypatch.setattr(smaller_heads, "group_of", lambda model: SimpleNamespace(rank=lambda: 1))
    assert {444, 445, 590} <= {*asked(worldly)[1]} and not [*files.kept("drafted")]
    monkeypatch.setattr(smaller_heads, "group_of", lambda model: SimpleNamespace(rank=lambda: 0))
    assert {444, 445, 590} <= {*asked(worldly)[1]} and len([*files.kept("drafted")]) == 1


def test_a_list_is_read_at_the_next_patch(worldly: Any, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    few = fastspec.Mtp(draft_vocab=str(path))
    for ids in ([3, 4, 9, 20], [5, 6, 7, 21]):
        with fastspec.patched(worldly, mtp=True):
            path.write_text(json.dumps(ids))
            for _ in range(2):
                head = with_vocabulary(session_of(worldly).resources["mtp"], few, worldly)
                assert head.drafted().tolist() == ids
                path.write_text("[8]")
    assert not [*files.kept("drafted")]


def as_gguf(ids: Tensor, path: Path) -> None:
    """Drafted tokens as llama.cpp's conversion of an EAGLE-3 head writes them: `d2t`, the ids themselves."""
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_tensor("d2t", ids.numpy().astype("int64"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("part", [False, True])
def test_a_tokenizer_that_is_cached_in_part_is_said_to_be(
    hub: Any, part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers loads one of its vocabulary alone, without its added tokens."""
    folder, letters = tmp_path / "own", {chr(code): code - 97 for code in range(97, 120)}
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "vocab.json").write_text(json.dumps({**letters, "<|endoftext|>": 23}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    if not part:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<tool>"])
        tokenizer.save_pretrained(folder)
    asked, load = list[bool](), AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda where, local_files_only, **given: (
            asked.append(local_files_only) or load(where, local_files_only=True, **given)
        ),
    )
    model = SimpleNamespace(config=SimpleNamespace(name_or_path=hub(folder, "a" * 40, "main")))
    if part:
        with pytest.warns(UserWarning, match="org/tiny is there in part, without tokenizer.json, .* or added_tokens"):
            assert list(smaller_heads._special(smaller_heads._tokenizer(model))) == [23]
    else:
        assert list(smaller_heads._special(smaller_heads._tokenizer(model))) == [23, 24]
    assert asked == [not part]  # what is missing may be on the hub


@pytest.mark.parametrize("form", ["json", "ids.pt", "d2t.pt", "t2d.safetensors", "gguf"])
def test_lists_of_drafted_tokens_are_read_in_the_forms_of_others(form: str, tmp_path: Path) -> None:
    ids = torch.tensor([3, 4, 9, 20])
    mask = torch.zeros(30, dtype=torch.bool).index_fill_(0, ids, True)
    path = tmp_path / f"list.{form}"
    write = {
        "json": lambda: path.write_text(str(ids.tolist())),
        "ids.pt": lambda: torch.save(ids.tolist(), path),
        "d2t.pt": lambda: torch.save({"d2t": ids - torch.arange(4), "t2d": mask}, path),
        "t2d.safetensors": lambda: save_file({"t2d": mask}, path),
        "gguf": lambda: as_gguf(ids, path),
    }
    write[form]()
    assert torch.equal(read_list(path, 30), ids)
    with pytest.raises(CheckpointError, match="from 3 to 20, and the model has 20"):
        read_list(path, 20)
    path.write_bytes(b"no list")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_list(path, 30)


@pytest.mark.parametrize(
    ("name", "held", "told"),
    [
        ("list.json", "[1.5, 2]", "torch.float32, and token ids are whole"),
        ("list.json", "[true, false]", "torch.bool, and token ids are whole"),
        ("list.json", "[]", "lists tokens none"),
        ("list.pt", torch.tensor([False, True, True]), "torch.bool, and token ids are whole"),
        ("list.pt", torch.tensor([1.5]), "torch.float32, and token ids are whole"),
        ("list.pt", {"d2t": torch.tensor([1.5])}, "torch.float32, and token ids are whole"),
        ("list.pt", {7: 100}, "neither 'd2t' nor 't2d', but 7"),
    ],
)
def test_what_is_no_list_of_ids_is_not_made_one(name: str, held: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(held, str):
        path.write_text(held)
    else:
        torch.save(held, path)
    with pytest.raises(CheckpointError, match=told):
        read_list(path, 30)


def test_an_lm_head_of_the_layers_own_has_no_draft_vocabulary(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=600)
    broken(tmp_path, **{"mtp.lm_head.weight": torch.randn(600, 64)})
    with fastspec.patched(model, mtp=True):
        for asked in (None, "full", 600):
            whole = fastspec.Mtp(depth=2, top_k=2, total_tokens=5, draft_vocab=asked)
            model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant=whole)
        with pytest.raises(
            Unsupported, match="draft_vocab=300 takes rows of the target's LM head, and this layer brings"
        ):
            model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant=fastspec.Mtp(draft_vocab=300))


@pytest.mark.parametrize(("kind", "lazily"), [*((kind, False) for kind in KINDS), ("qwen3_5_text", True)])
def test_saving_the_model_keeps_its_layer(kind: str, lazily: bool, tmp_path: Path) -> None:
    """Into one file, and into several that an index names."""
    model, _ = loaded(kind, tmp_path / "first")
    held = load_mtp(True, model).module.state_dict()
    with fastspec.patched(model, mtp=None if lazily else True):
        if lazily:
            model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant="mtp")
        model.save_pretrained(tmp_path / "one")
        model.save_pretrained(tmp_path / "several", max_shard_size="50KB")
        model.save_pretrained(tmp_path / "first")  # over what it was read from
    assert "save_pretrained" not in vars(model)
    for name in ("one", "several", "first"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        mine = load_mtp(True, again).module.state_dict()
        assert mine.keys() == held.keys() and all(torch.equal(mine[key], held[key]) for key in held)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
@pytest.mark.parametrize("new", [False, True])
def test_saving_the_model_keeps_a_layer_that_was_trained(kind: str, new: bool, tmp_path: Path) -> None:
    model, _ = loaded(kind, tmp_path / "first")
    head = mtp.new_mtp(model) if new else load_mtp(True, model).as_module()
    with torch.no_grad():
        head.fc.weight.mul_(1.5)
    with fastspec.patched(model, mtp=head):
        model.save_pretrained(tmp_path / "other")
    held = load_mtp(True, AutoModelForCausalLM.from_pretrained(tmp_path / "other")).module.fc.weight
    assert torch.equal(held, head.fc.weight.bfloat16().float())


def test_a_layer_that_no_form_tells_is_said_to_be_left_out(tmp_path: Path) -> None:
    model, _ = loaded("ernie4_5_moe", tmp_path / "first")
    head = load_mtp(True, model).as_module()
    with torch.no_grad():
        head.fc.weight.mul_(1.5)
    told = "leaves the MTP layer out: this MTP layer has no norm before the LM head"
    with fastspec.patched(model, mtp=head), pytest.warns(UserWarning, match=told):
        model.save_pretrained(tmp_path / "other")
    assert not any("mtp" in name for name in load_file(tmp_path / "other" / "model.safetensors"))


def test_a_layer_that_was_cast_with_its_model_is_saved_as_its_files_have_it(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path / "first")
    held = load_mtp(True, model).module.fc.weight
    with fastspec.patched(model, mtp=True, backend="torch"):
        model.bfloat16()
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant=TREE)
        model.float()
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant=TREE)
        model.save_pretrained(tmp_path / "other")
    assert torch.equal(load_file(tmp_path / "other" / "model.safetensors")["mtp.fc.weight"], held)


def test_a_layer_that_is_gone_from_its_files_is_not_lost_in_silence(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path / "first")
    with fastspec.patched(model, mtp=True):
        broken(
            tmp_path / "first",
            **{name: None for name in load_file(tmp_path / "first" / "model.safetensors") if "mtp" in name},
        )
        with pytest.raises(CheckpointError, match="nothing was saved"):
            model.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_quantised_model_says_that_it_is_saved_without_its_layer(tmp_path: Path, monkeypatch: Any) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path / "first")
    saved: list[dict[str, Any]] = []
    monkeypatch.setattr(type(model), "save_pretrained", lambda self, folder, **more: saved.append(more))
    model.hf_quantizer = object()
    with (
        fastspec.patched(model, mtp=True),
        pytest.warns(UserWarning, match="leaves its MTP layer out, as transformers"),
    ):
        model.save_pretrained(tmp_path / "other")
    assert saved == [{}]


def test_fewer_drafted_tokens_than_children_are_refused(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    (tmp_path / "few.json").write_text("[7, 8, 9]")
    few = fastspec.Mtp(depth=2, top_k=4, total_tokens=8, draft_vocab=str(tmp_path / "few.json"))
    with fastspec.patched(model), pytest.raises(Unsupported, match="draft vocabulary of 3"):
        model.generate(torch.tensor([[7, 8]]), max_new_tokens=3, assistant=few)


def test_several_threads_may_be_the_first_to_ask(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    ids = torch.tensor([[7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    with fastspec.patched(model), ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(model.generate, ids, max_new_tokens=5, do_sample=False, assistant=TREE) for _ in range(4)
        ]
        assert all(torch.equal(answer.result(), plain) for answer in answers)
    assert "save_pretrained" not in vars(model)


def test_the_probe_is_not_a_call_of_the_users(tmp_path: Path) -> None:
    model, _ = loaded("glm4_moe", tmp_path)
    model.generation_config.return_dict_in_generate = True
    model.generation_config.num_beams = model.generation_config.num_return_sequences = 2
    assert load_mtp(True, model).config.norm_output


def test_an_open_batch_whose_model_is_cast_goes_on(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path)
    ids = torch.tensor([[7, 8, 9]])
    with fastspec.patched(model, mtp=True), fastspec.continuous(model, assistant=TREE, rows=2) as batch:
        batch.submit(ids, max_new_tokens=4, do_sample=False).result()
        model.double()
        answer = batch.submit(ids, max_new_tokens=6, do_sample=False).result()
        assert torch.equal(answer, type(model).generate(model, ids, max_new_tokens=6, do_sample=False))


def test_inspect_says_what_a_checkpoint_brings(tmp_path: Path) -> None:
    loaded("glm4_moe", tmp_path / "with")
    target("glm4_moe").save_pretrained(tmp_path / "without")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "with")])
    assert shown.exit_code == 0 and "MTP, in the checkpoint" in shown.output
    found = inspect_mtp(tmp_path / "with")
    assert found is not None and ("glm4_moe", 'assistant="mtp", by the adapter glm4_moe') in found.facts
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "without")])
    assert shown.exit_code == 1 and "a language model without MTP weights" in shown.output
    assert "holds no MTP weights" in " ".join(shown.output.split())
    tiny_model("gemma4_text").save_pretrained(tmp_path / "gemma")
    found = inspect_mtp(tmp_path / "gemma")
    assert found is not None and "a checkpoint of their own" in str(found.refused)


def test_inspect_reads_a_layer_by_the_model_that_is_named(tmp_path: Path) -> None:
    """A folder that holds the layer alone has no config.json to be read by, and another model's layer does not fit."""
    model, _ = loaded("qwen3_5_text", tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    layer = mtp.saved_mtp(load_mtp(True, model).as_module())
    save_file(layer, tmp_path / "alone" / "model.safetensors")
    target("qwen3_5_text", hidden_size=128).save_pretrained(tmp_path / "other")
    for name, told in (("whole", 'assistant="mtp"'), ("other", "fc.weight is [64, 128], not [128, 256]")):
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "alone"), str(tmp_path / name)])
        assert shown.exit_code == (name == "other") and told in " ".join(shown.output.split()), shown.output


@pytest.mark.parametrize(
    "more",
    [{}, {"layer_types": ["full_attention"] * 36}, {"rms_norm_eps": 1}, {"rope_scaling": {"rope_type": "mrope"}}],
    ids=str,
)
def test_inspect_reads_heads_whose_configuration_transformers_refuses(more: dict[str, Any], tmp_path: Path) -> None:
    config, state = as_eagle3(make_head(), None)
    write(tmp_path, config | more, state)
    assert inspect_mtp(tmp_path) is None
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0 and "eagle3" in shown.output
    for odd in ({"hidden_size": "64"}, {"num_attention_heads": 0}):
        write(tmp_path, config | odd, state)
        refused = CliRunner().invoke(app, ["inspect", str(tmp_path)])
        assert refused.exit_code == 1 and next(iter(odd)) in str(refused.exception) + refused.output


def test_the_pages_table_has_the_families_that_are_tried_and_their_tensors() -> None:
    page = (ROOT / "docs" / "guide" / "mtp.md").read_text(encoding="utf-8")
    told: dict[str, str] = {}
    for kinds, tensors in re.findall(r"^\|[^|]*\|([^|]*)\| `([^`]*)\*`[^|]*\| yes \|$", page, re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", kinds), tensors.replace("N", "{n}"))
    assert told.keys() == KINDS.keys()
    for kind, tensors in told.items():
        assert all(f"{name}.".startswith(tensors) for name in FORMS[KINDS[kind]].values()), kind
