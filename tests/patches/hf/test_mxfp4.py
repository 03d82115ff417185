"""Checkpoints of gpt-oss whose experts stay in MXFP4: packed code by code here, loaded, decoded with and written again,
beside transformers' own dequantised model of the same files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.gptq import tensors_of
from helpers.models import tiny_head, tiny_model
from helpers.mxfp4 import CONFIG, SIZES, packed, written
from helpers.patch import assert_same, snapshot
from safetensors.torch import load_file, save_file
from transformers import Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fastspec
from fastspec.devices import MEASURED
from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import StoredExperts
from fastspec.models import load_model
from fastspec.patches.hf.changes import weights_digest
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.packed_loading import PRODUCTS, PackedExperts

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}
SMALL = fastspec.Eagle3(depth=2, top_k=2, total_tokens=6)


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), tokenizer="none", **{"packed": True} | options)[0]


def experts(model: Any) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_those_that_transformers_dequantises(dtype):
    """Of every code and every power of 2 that fp32 holds as a normal number; bit for bit."""
    for power in (1, 100, 127, 140, 250):
        blocks = torch.arange(256).to(torch.uint8).view(2, 4, 2, 16)
        scales = torch.tensor([power, power + 1]).to(torch.uint8).expand(2, 4, 2).contiguous()
        made = PackedExperts(tiny_model("gpt_oss", **SIZES).model.layers[0].mlp.experts)
        made.gate_up_proj_blocks, made.gate_up_proj_scales = (
            torch.nn.Parameter(each, requires_grad=False) for each in (blocks, scales)
        )
        found, wanted = made.stored("gate_up_proj"), convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert found.shape == (2, 4, 64)
        for expert in (0, 1):
            assert torch.equal(found.dense(expert, dtype).t(), wanted[expert])


def test_layout_is_the_format_s():
    blocks, scales, dense = packed(torch.Generator().manual_seed(3), 3, 8, 64)
    assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2), dense)


def test_a_checkpoint_is_read_decoded_and_written_again(tmp_path):
    """Logits and tokens of the dequantised model, of transformers' own loading too; assistants; `unpatch` bit for bit;
    and the files' tensors in what `save_pretrained` writes."""
    dense = written(tmp_path / "given", shards="100KB")
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 1
    model, inputs = loaded(tmp_path / "given"), prompts(3, 7)
    assert len(experts(model)) == 2 and dtype_of(model) == model.dtype == torch.float32
    theirs = loaded(tmp_path / "given", packed=False)
    assert not experts(theirs)
    logits = dense(**inputs).logits.detach()
    assert torch.equal(theirs(**inputs).logits, logits)
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=0.0, atol=2e-6 * float(logits.abs().max()))
    expected = dense.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    before = snapshot(model)
    fastspec.patch(model, eagle3=tiny_head(dense))
    for assistant in ("autoregressive", "nasd", SMALL):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))
    model.save_pretrained(tmp_path / "saved")
    first, second = tensors_of(tmp_path / "given"), tensors_of(tmp_path / "saved")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first)
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert told == CONFIG
    assert torch.equal(loaded(tmp_path / "saved").generate(**inputs, **OPTIONS), expected)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_they_are_multiplied_as_stored(tmp_path, backend):
    """Where that is asked for: tokens of assistants, the report, and `unpatch` bit for bit; the kernels in Triton's
    interpreter."""
    dense = written(tmp_path, num_hidden_layers=1, swiglu_limit=0.5)
    new, assistants = (3, (SMALL,)) if backend == "triton" else (5, ("autoregressive", SMALL))
    model, inputs, options = loaded(tmp_path), prompts(3, 5), OPTIONS | {"max_new_tokens": new}
    expected, before = dense.generate(**inputs, **options), snapshot(model)
    fastspec.patch(model, backend=backend, eagle3=tiny_head(dense), stored=True)
    for assistant in assistants:
        assert torch.equal(model.generate(**inputs, **options, assistant=assistant), expected)
    report = fastspec.report(model)
    assert report.stored == {"MXFP4": 1} and not report.own_forward and report.dequantised is None
    assert report.kernels["stored_experts"] and "experts" not in report.kernels
    experts(model)[0].register_forward_hook(lambda *_: None)
    assert fastspec.report(model).own_forward == {"MXFP4: a hook is on it": 1}
    experts(model)[0]._forward_hooks.clear()
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))


def test_they_keep_their_own_forward_where_nobody_asks(tmp_path, monkeypatch):
    """On GPUs too that read other formats as stored by themselves: the kernel was not timed there."""
    written(tmp_path, num_hidden_layers=1)
    model = loaded(tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr("fastspec.patches.hf.exact.device_name", lambda _: MEASURED[0])
    with fastspec.patched(model, backend="triton"):
        report = fastspec.report(model)
    assert report.own_forward == {"MXFP4: patch(model, stored=True) was not asked for": 1} and not report.stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_experts_are_transformers_own(tmp_path, dtype):
    """Of the dequantised weights, in their own loop over experts: rounded where it rounds. Limits are within what the
    drawn numbers reach."""
    written(tmp_path, swiglu_limit=0.5, num_hidden_layers=1)
    (ours,), dense = experts(loaded(tmp_path, dtype=dtype)), loaded(tmp_path, packed=False, dtype=dtype)
    theirs = dense.model.layers[0].mlp.experts
    theirs.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    x, shares = torch.randn(9, 64, generator=generator).to(dtype), torch.rand(9, 2, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    assert ours.gate_up_proj_bias.dtype == ours(x, chosen, shares).dtype == dtype
    wanted = theirs(x, chosen, shares)
    ulp = float(wanted.abs().max()) * torch.finfo(dtype).eps
    torch.testing.assert_close(ours(x, chosen, shares), wanted, rtol=0.0, atol=2 * ulp)


def test_what_needs_a_dense_weight_is_refused_by_name(tmp_path):
    written(tmp_path)
    model, inputs = loaded(tmp_path), prompts(5)
    before = model.generate(**inputs, **OPTIONS)
    for name in PRODUCTS:
        with pytest.raises(Unsupported, match=rf"MXFP4 have no dense weight \({name}\).*packed=False"):
            getattr(experts(model)[0], name)
        assert not hasattr(experts(model)[0], name)
    with pytest.raises(Unsupported, match=r"GptOssForCausalLM has packed weights.*packed=False"):
        model.dequantize()
    model.post_init()
    assert torch.equal(copy.deepcopy(model).generate(**inputs, **OPTIONS), before)


def test_experts_are_packed_where_asked_or_faster_or_where_the_dense_ones_do_not_fit(tmp_path, monkeypatch):
    """By default transformers dequantises what the memory has room for, and no device reads the faster packed."""
    written(tmp_path)
    assert not experts(loaded(tmp_path, packed=None))
    with monkeypatch.context() as patch:
        patch.setattr("fastspec.models.is_timed", lambda _: True)
        assert len(experts(loaded(tmp_path, packed=None, dtype=torch.bfloat16))) == 2
        assert not experts(loaded(tmp_path, packed=None))  # fp32
        assert not experts(loaded(tmp_path, packed=None, dtype=torch.bfloat16, device_map="cpu"))
    monkeypatch.setattr("fastspec.models.memory_of", lambda _: 100_000)
    assert len(experts(loaded(tmp_path, packed=None))) == 2
    with pytest.raises(Unsupported, match=r"it has [\d,]+ parameters"):
        loaded(tmp_path, packed=False)
    monkeypatch.setattr("fastspec.patches.hf.packed_loading.is_kernels_available", lambda: True)
    assert len(experts(loaded(tmp_path, packed=None))) == 2  # transformers dequantises for a CPU all the same
    with pytest.raises(Unsupported, match="packed=True cannot be given with quantization_config"):
        loaded(tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    assert not experts(loaded(tmp_path, packed=None, quantization_config=Mxfp4Config(dequantize=True)))


def test_files_of_another_layout_are_refused(tmp_path):
    written(tmp_path, num_hidden_layers=1)
    (file,), name = tmp_path.glob("*.safetensors"), "model.layers.0.mlp.experts"
    whole = load_file(file)
    lost = {key: each for key, each in whole.items() if key != f"{name}.down_proj_scales"}
    cut = whole | {f"{name}.gate_up_proj_blocks": whole[f"{name}.gate_up_proj_blocks"][..., :8].contiguous()}
    other = {key.replace("mlp.experts", "mlp.router"): each for key, each in whole.items()}
    plain = {key: each for key, each in whole.items() if not key.endswith("_blocks")}
    for held, told in (
        (lost, "down_proj_scales is missing"),
        (cut, r"gate_up_proj_blocks is U8 \[4, 192, 2, 8\], not U8 \[4, 192, 2, 16\]"),
        (other, "mlp.router, which is no GptOssExperts"),
        (plain, "no file has blocks"),
    ):
        save_file(held, file, {"format": "pt"})
        with pytest.raises(Unsupported, match=told):
            loaded(tmp_path)


def test_a_device_map_places_them_but_offloads_none(tmp_path):
    dense = written(tmp_path / "files", num_hidden_layers=1)
    model = loaded(tmp_path / "files", device_map="cpu")
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.\S+ is offloaded"):
        loaded(tmp_path / "files", device_map=places | {"lm_head": "cpu"}, offload_folder=str(tmp_path / "disk"))


def test_a_state_is_loaded_and_told_from_another(tmp_path):
    for seed in (0, 1):
        written(tmp_path / str(seed), seed=seed)
    one, two = (loaded(tmp_path / each) for each in "01")
    digests = weights_digest(one), weights_digest(two)
    two.load_state_dict(one.state_dict())
    assert digests[0] != digests[1] and weights_digest(two) == digests[0]
    assert isinstance(experts(two)[0].stored("down_proj"), StoredExperts)
