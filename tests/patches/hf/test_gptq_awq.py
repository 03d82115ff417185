"""GPTQ and AWQ checkpoints that `fastspec.models.load_model` reads itself: packed code by code here, loaded, decoded
with and written again. tests/clients has files of auto-round."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.gptq import Recipe, changed, projections, tensors_of, word, words, written
from helpers.models import tiny_head, tiny_model
from helpers.mtp import draft_by_token, oracle, published, target
from helpers.pages import snippets
from helpers.patch import assert_same, snapshot
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

import fastspec
from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import dequantised
from fastspec.models import load_model
from fastspec.patches.hf.changes import weights_digest
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.gptq_awq import AWQ, GPTQ, GPTQ_V2, TENSORS, PackedLinear, for_file, from_file
from fastspec.patches.hf.packed_loading import has_zero_points
from fastspec.patches.hf.quantised import read

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}
SMALL = fastspec.Eagle3(depth=2, top_k=2, total_tokens=6)
NAME = "GPTQ, AWQ"
V1, V2, GEMM = Recipe(), Recipe(format="gptq_v2"), Recipe("awq", "gemm")
RECIPES = {
    "GPTQ": V1,
    "GPTQ, symmetric": changed(V1, sym=True, group=64),
    "GPTQ v2": V2,
    "GPTQ, 8 bits": changed(V1, bits=8),
    "GPTQ v2, 8 bits, symmetric, a line": changed(V2, bits=8, sym=True, group=-1),
    "GPTQ, act-order": changed(V1, ordered=True),
    "GPTQ v2, act-order, symmetric": changed(V2, ordered=True, sym=True),
    "GPTQ without g_idx": changed(V1, g_idx=False, group=128),
    "AWQ": GEMM,
    "AWQ, symmetric, a line": changed(GEMM, sym=True, group=-1),
    "auto-round": Recipe("auto-round", "auto_round:auto_gptq"),
    "auto-round without the offset": Recipe("auto-round", "auto_round"),
    "auto-round as AWQ": Recipe("auto-round", "auto_round:auto_awq"),
}
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def plain(model_type: str = "llama", **over: Any) -> Any:
    return tiny_model(model_type, **SIZES | over)


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), tokenizer="none", **options)[0]


def slots(model: Any) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def trace(model: Any) -> dict[str, Any]:
    """What `unpatch` leaves as it was; a `state_dict` is made of the packed tensors anew."""
    places = {name: (each.data_ptr(), each.dtype, each.shape) for name, each in model.named_parameters()}
    return snapshot(model) | {"storage": places}


def test_words_are_those_of_the_formats():
    """Eight codes that count up, along the input channels of one output channel (GPTQ), and along output channels, in
    the order of AWQ; a zero point of 8 is 7 in v1."""
    codes = torch.arange(8)[None]
    assert word(range(8), 4) == 0x76543210 and word((1, 2, 3, 4), 8) == 0x04030201
    assert words(codes, 4, (0, 2, 4, 6, 1, 3, 5, 7)).item() == 0x75316420
    assert word([8] * 8, 4) == 0x88888888 - (1 << 32) and word([7] * 8, 4) == 0x77777777
    along = torch.tensor([[0x76543210] * 8], dtype=torch.int32)
    across = torch.tensor([[0x75316420]] * 8, dtype=torch.int32)
    assert from_file("qweight", along, GPTQ, 4).tolist() == [[0x76543210]] * 8
    assert from_file("qweight", across, AWQ, 4).tolist() == [[0x11111111 * i - (i > 7) * (1 << 32)] for i in range(8)]
    sevens = torch.tensor([[0x77777777]], dtype=torch.int32)
    assert from_file("qzeros", sevens, GPTQ, 4).item() == 0x88888888 - (1 << 32)
    assert from_file("qzeros", sevens, GPTQ_V2, 4).item() == 0x77777777
    assert from_file("qzeros", torch.tensor([[0x75316420]], dtype=torch.int32), AWQ, 4).item() == 0x76543210


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(GPTQ, 4), (GPTQ, 8), (GPTQ_V2, 4), (AWQ, 4)]),
    st.sampled_from(["qweight", "qzeros", "scales"]),
    st.randoms(use_true_random=False),
)
def test_tensors_come_back_as_the_file_had_them(rows, wide, kind, name, random):
    """Any words: those of v1 whose zero points went below 0 too."""
    rows = 8 * rows if kind[0] is AWQ and name == "qweight" else rows
    values = [[random.randrange(-(1 << 31), 1 << 31) for _ in range(wide)] for _ in range(rows)]
    tensor = torch.tensor(values, dtype=torch.int32)
    back = for_file(name, from_file(name, tensor, *kind), *kind)
    assert torch.equal(back, tensor) and back.shape == tensor.shape


@pytest.mark.some(
    "GPTQ",
    "GPTQ v2, 8 bits, symmetric, a line",
    "GPTQ, act-order",
    "GPTQ without g_idx",
    "AWQ",
    "AWQ, symmetric, a line",
    "auto-round without the offset",
    "auto-round as AWQ",
)
@pytest.mark.parametrize("kind", RECIPES)
def test_a_checkpoint_is_read_decoded_and_written_again(tmp_path, kind):
    """Weights bit for bit, tokens of the model's own forward and of assisted calls, and the files' tensors in what
    `save_pretrained` writes; attention has biases."""
    dense = written(plain("qwen2"), tmp_path / "given", RECIPES[kind])
    model = loaded(tmp_path / "given")
    layers = slots(model)
    assert len(layers) == 14 and dtype_of(model) == model.dtype == torch.float32
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            weight = read(module)
            assert not isinstance(weight, str), weight
            assert (weight.groups is None) != RECIPES[kind].ordered
            assert (weight.zeros is None) == RECIPES[kind].sym
            found = dequantised(weight, torch.float32)
            assert torch.equal(found, dense.get_submodule(name).weight), name
    inputs = prompts(3, 7)
    expected = dense.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    before = trace(model)
    fastspec.patch(model, eagle3=tiny_head(dense), stored=True)
    for assistant in ("autoregressive", SMALL):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    report = fastspec.report(model)
    assert report.stored == {NAME: 14} and not report.own_forward and report.kernels["stored_linears"]
    fastspec.unpatch(model)
    assert_same(before, trace(model))
    model.save_pretrained(tmp_path / "saved")
    first, second = tensors_of(tmp_path / "given"), tensors_of(tmp_path / "saved")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first)
    configs = [
        json.loads((tmp_path / each / "config.json").read_text())["quantization_config"] for each in ("given", "saved")
    ]
    assert configs[0] == configs[1]
    assert torch.equal(loaded(tmp_path / "saved").generate(**inputs, **OPTIONS), expected)


def test_the_pages_recipe_reads_a_checkpoint(tmp_path, monkeypatch):
    dense = written(plain(), tmp_path, changed(V1, ordered=True))
    monkeypatch.setattr("fastspec.models.load_model", lambda name, device: (loaded(tmp_path), name))
    (recipe,) = (each for each in snippets(Path("docs/guide/quantised.md")) if "load_model" in each.text)
    names: dict[str, Any] = {}
    exec(compile(recipe.text, recipe.name, "exec"), names)
    assert fastspec.report(names["model"]).stored == {NAME: 14}
    found = names["model"].generate(**prompts(4), **OPTIONS)
    assert torch.equal(found, dense.generate(**prompts(4), **OPTIONS))


def test_one_file_may_mix_layers(tmp_path):
    """Attention in 8 bits and other groups, one layer plain, the LM head packed: told by the tensors, whatever the
    configuration says of bits and groups."""

    def packs(name: str) -> bool:
        return (projections(name) and "layers.1.mlp" not in name) or name == "lm_head"

    eight = {"q_proj": changed(V1, bits=8, group=64), "down_proj": changed(V1, sym=True, group=-1)}
    dense = written(plain(), tmp_path, V1, packs, others=eight, shards="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, inputs = loaded(tmp_path), prompts(5)
    assert len(slots(model)) == 12 and isinstance(model.lm_head, PackedLinear)
    expected = dense.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    with fastspec.patched(model, eagle3=tiny_head(dense), stored=True):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=SMALL), expected)
        assert fastspec.report(model).stored == {NAME: 12}
    with fastspec.patched(model, eagle3=tiny_head(dense)):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=SMALL), expected)
        assert list(fastspec.report(model).own_forward) == [f"{NAME}: patch(model, stored=True) was not asked for"]


@pytest.mark.parametrize(("recipe", "name"), [(V1, "GPTQ"), (GEMM, "AWQ")])
def test_what_needs_a_dense_weight_is_refused_by_name(tmp_path, recipe, name):
    """PEFT places an adapter by a weight's device and dtype, and merges into its values."""
    written(plain(), tmp_path, recipe)
    model, inputs = loaded(tmp_path), prompts(5)
    before = model.generate(**inputs, **OPTIONS)
    layer = slots(model)[0]
    assert (layer.weight.device, layer.weight.dtype) == (layer.scales.device, layer.scales.dtype)
    assert not isinstance(layer.weight, torch.Tensor) and not hasattr(layer.weight, "data")
    with pytest.raises(Unsupported, match=rf"a layer of 4-bit {name} weights has no dense weight \(data\)"):
        layer.weight.data += 1
    model.post_init()
    assert torch.equal(copy.deepcopy(model).generate(**inputs, **OPTIONS), before)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_an_mtp_layer_stays_as_it_is_beside_packed_layers(tmp_path, prefix):
    """The family of Qwen3.5 and 3.6, Gated DeltaNet too, whose draft layer the publishers leave in 16 bits; the names
    of a text model, and of the one with vision around it, whose other tensors are left out."""
    model = target("qwen3_5_text")
    made = oracle(model)
    draft_by_token(made, model)

    def packs(name: str) -> bool:
        layer = model.get_submodule(name)
        return projections(name) and layer.in_features % 32 == layer.out_features % 8 == 0

    dense = written(model, tmp_path, V2, packs)
    count = sum(isinstance(each, torch.nn.Linear) and packs(name) for name, each in model.named_modules())
    (file,) = tmp_path.glob("*.safetensors")
    held = {re.sub(r"^model\.", prefix, key): each for key, each in load_file(file).items()}
    held |= {key: each.bfloat16() for key, each in published(made, "qwen", model.config.num_hidden_layers).items()}
    save_file(held | {"model.visual.merger.norm.weight": torch.ones(8)}, file, {"format": "pt"})
    found, inputs = loaded(tmp_path), prompts(5)
    expected = dense.generate(**inputs, **OPTIONS)
    fastspec.patch(found, mtp=True, stored=True)
    assert torch.equal(found.generate(**inputs, **OPTIONS, assistant="mtp"), expected)
    report = fastspec.report(found)
    assert report.stored == {NAME: count} and report.last.acceptance_length > 1


def test_a_bias_may_stand_in_the_file_alone(tmp_path):
    """AutoGPTQ wrote one for every layer, zeros where the model has none."""
    dense = written(plain(), tmp_path, V1)
    (file,) = tmp_path.glob("*.safetensors")
    save_file(load_file(file) | {"model.layers.0.mlp.up_proj.bias": torch.ones(256).half()}, file, {"format": "pt"})
    dense.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(256))
    model = loaded(tmp_path)
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))


@pytest.mark.parametrize(
    ("written_as", "named"),
    [
        ("auto_round:auto_gptq", {"backend": "auto_round:gptq:exllamav2"}),
        ("auto_round:auto_gptq", {"backend": "auto_round:auto_gptq:tritonv2"}),
        ("auto_round:auto_gptq", {"packing_format": "auto_round:gptq", "backend": "auto"}),
        ("auto_round:auto_gptq", {"backend": "auto"}),
        ("auto_round", {"backend": "auto_round:exllamav2"}),
        ("auto_round:auto_awq", {"backend": "auto_round:awq:gemm"}),
    ],
)
def test_older_files_of_auto_round_name_a_kernel_behind_their_format(tmp_path, written_as, named):
    config = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, **named}
    dense = written(plain(num_hidden_layers=1), tmp_path, Recipe("auto-round", written_as), config=config)
    model = loaded(tmp_path)
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))


@pytest.mark.parametrize(
    ("name", "recipe", "told"),
    [
        ("quantize_config.json", changed(V1, ordered=True), {"bits": 4, "group_size": 32, "desc_act": True}),
        ("quant_config.json", GEMM, {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_older_folders_describe_their_weights_in_a_file_of_its_own(tmp_path, name, recipe, told):
    dense = written(plain(), tmp_path, recipe, config={})
    path = tmp_path / "config.json"
    held = json.loads(path.read_text())
    del held["quantization_config"]
    path.write_text(json.dumps(held))
    (tmp_path / name).write_text(json.dumps(told))
    model = loaded(tmp_path.parent, subfolder=tmp_path.name)
    assert len(slots(model)) == 14
    model = loaded(tmp_path)
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))


@pytest.mark.parametrize("kind", ["GPTQ, act-order", pytest.param("AWQ", marks=pytest.mark.slow)])
def test_the_triton_kernel_reads_them(tmp_path, kind):
    """In the interpreter: zero points, act-order, and AWQ's, which are stored alike."""
    inputs, options = prompts(4), OPTIONS | {"max_new_tokens": 2}
    dense = written(plain(num_hidden_layers=1), tmp_path / kind, RECIPES[kind])
    with fastspec.patched(loaded(tmp_path / kind), backend="triton", stored=True) as model:
        found = model.generate(**inputs, **options, assistant="autoregressive")
        assert fastspec.report(model).kernels["stored_linears"]
    assert torch.equal(found, dense.generate(**inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_stay_as_the_file_has_them(tmp_path, dtype):
    """In any dtype of the model, which is the embedding's."""
    written(plain(), tmp_path, V1)
    model, first = loaded(tmp_path, dtype=dtype), tensors_of(tmp_path)
    assert dtype_of(model) == model.dtype == dtype
    state = model.state_dict()
    assert all(torch.equal(state[key], first[key]) for key in first if ".layers." in key and "norm" not in key)
    assert model(**prompts(4)).logits.dtype == dtype


def test_a_cast_leaves_scales_as_the_file_has_them(tmp_path):
    """bf16 holds fewer digits than their fp16: the weights would be others."""
    written(plain("qwen2"), tmp_path, V1)
    model = loaded(tmp_path)
    first = {name: each.clone() for name, each in model.state_dict().items() if name.endswith(TENSORS)}
    for cast in (model.to(torch.bfloat16), model.bfloat16()):
        assert dtype_of(cast) == slots(cast)[0].bias.dtype == torch.bfloat16
        state = cast.state_dict()
        assert all(torch.equal(state[name], each) and state[name].dtype == each.dtype for name, each in first.items())
    assert slots(model.to("meta"))[0].scales.is_meta


def test_a_state_is_loaded_as_a_file_is(tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        written(tiny_model("llama", seed, **SIZES), tmp_path / name, changed(GEMM, sym=name == "one"))
    one, two = loaded(tmp_path / "one"), loaded(tmp_path / "two")
    one.load_state_dict(two.state_dict())
    assert torch.equal(one.generate(**prompts(4), **OPTIONS), two.generate(**prompts(4), **OPTIONS))
    one.load_state_dict(tensors_of(tmp_path / "one"))
    again = loaded(tmp_path / "one")
    assert torch.equal(one.generate(**prompts(4), **OPTIONS), again.generate(**prompts(4), **OPTIONS))


def without(key: str) -> Any:
    return lambda held: {name: each for name, each in held.items() if name != key}


UP = "model.layers.0.mlp.up_proj"
REFUSED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "a format": ("format 'marlin'", V1.config | {"checkpoint_format": "marlin"}, None),
    "marlin": ("format 'marlin'", V1.config | {"is_marlin_format": True}, None),
    "an order of AWQ": ("format 'gemv_fast'", GEMM.config | {"version": "gemv_fast"}, None),
    "an order of auto-round": (
        "'auto_round:x'",
        {"quant_method": "auto-round", "packing_format": "auto_round:x"},
        None,
    ),
    "activations": ("act_bits=8", V1.config | {"act_bits": 8}, None),
    "no packed tensors": ("no file has a qweight", V1.config, lambda held: {}),
    "no zero points": ("has no qzeros", V1.config, without(f"{UP}.qzeros")),
    "2 bits": ("2 bits a weight", V1.config, lambda held: held | {f"{UP}.qweight": torch.zeros(8, 256).int()}),
    "words of 16 bits": (
        r"qweight is I16 \[16, 256\], not I32",
        V1.config,
        lambda held: held | {f"{UP}.qweight": torch.zeros(16, 256).short()},
    ),
    "other scales": ("scales is F16", V1.config, lambda held: held | {f"{UP}.scales": torch.zeros(4, 255).half()}),
    "groups": (
        "3 groups do not fit",
        V1.config,
        lambda held: (
            without(f"{UP}.g_idx")(held)
            | {f"{UP}.scales": torch.zeros(3, 256).half(), f"{UP}.qzeros": torch.zeros(3, 32).int()}
        ),
    ),
    "no matrix": (
        "are not all matrices",
        V1.config,
        lambda held: held | {f"{UP}.scales": torch.zeros(256).half()},
    ),
    "groups that are none": (
        f"{UP}: its g_idx names groups up to 4",
        V1.config,
        lambda held: held | {f"{UP}.g_idx": torch.full((128,), 4).int()},
    ),
    "scales of activations": (
        "model.layers.0.mlp.act.scales",
        GEMM.config,
        lambda held: held | {"model.layers.0.mlp.act.scales": torch.ones(8)},
    ),
    "another tensor": (f"{UP}.signs", V1.config, lambda held: held | {f"{UP}.signs": torch.ones(8)}),
    "no such layer": (
        "no layer of its own",
        V1.config,
        lambda held: {key.replace("mlp.up_proj", "mlp.experts.0.up_proj"): each for key, each in held.items()},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path, case):
    told, config, change = REFUSED[case]
    written(plain(num_hidden_layers=1), tmp_path, V1, config=config)
    if change is not None:
        (file,) = tmp_path.glob("*.safetensors")
        held = load_file(file)
        packed = {key: each for key, each in held.items() if ".layers." in key and "norm" not in key}
        rest = {key: each for key, each in held.items() if key not in packed}
        save_file(rest | change(packed), file, {"format": "pt"})
    with pytest.raises(Unsupported, match=told):
        loaded(tmp_path)


def test_layers_that_transformers_leaves_out_may_be_packed(tmp_path, monkeypatch):
    """Draft layers of a checkpoint's own, by the patterns of the model's class; packed experts are refused."""
    dense = written(plain(num_hidden_layers=1), tmp_path / "mtp", V1)
    (file,) = (tmp_path / "mtp").glob("*.safetensors")
    held = load_file(file)
    extra = {key.replace("model.", "mtp."): each.clone() for key, each in held.items() if "mlp" in key}
    save_file(held | extra, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"mtp\.layers\.0\.mlp\.down_proj, which is no layer of its own"):
        loaded(tmp_path / "mtp")
    monkeypatch.setattr(type(dense), "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    model = loaded(tmp_path / "mtp")
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))


def test_packed_experts_are_refused(tmp_path):
    """transformers holds them in one tensor."""
    written(tiny_model("mixtral", num_hidden_layers=1, vocab_size=128), tmp_path, V1)
    (file,) = tmp_path.glob("*.safetensors")
    held = load_file(file)
    (key,) = (key for key in held if key.endswith("experts.0.w1.weight"))
    del held[key]
    save_file(held | {key.replace(".weight", ".qweight"): torch.zeros(8, 8).int()}, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"experts\.0\.w1, which is no layer of its own in MixtralForCausalLM"):
        loaded(tmp_path)


def test_an_lm_head_that_the_configuration_ties_is_refused(tmp_path):
    model = plain()
    written(model, tmp_path, V1, lambda name: name == "lm_head")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(Unsupported, match="set tie_word_embeddings to false"):
        loaded(tmp_path)


def test_layers_of_another_class_and_pickled_files_are_refused(tmp_path):
    model = tiny_model("gpt2", n_embd=64, n_layer=1, n_head=4)
    model.save_pretrained(tmp_path / "gpt2")
    (file,) = (tmp_path / "gpt2").glob("*.safetensors")
    held = load_file(file)
    del held["transformer.h.0.attn.c_attn.weight"]
    held["transformer.h.0.attn.c_attn.qweight"] = torch.zeros(8, 192).int()
    save_file(held, file, {"format": "pt"})
    written(plain(num_hidden_layers=1), tmp_path / "bin", V1)
    (file,) = (tmp_path / "bin").glob("*.safetensors")
    torch.save(load_file(file), tmp_path / "bin" / "pytorch_model.bin")
    file.unlink()
    for name, told in (("gpt2", "is a Conv1D in GPT2LMHeadModel"), ("bin", "pytorch_model.bin: packed weights")):
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": V1.config}))
        with pytest.raises(Unsupported, match=told):
            loaded(tmp_path / name)


def test_options_reach_the_configuration_as_in_from_pretrained(tmp_path):
    """A configuration of the caller's, which stays as it is, and single fields of one; files in a folder inside."""
    from transformers import AutoConfig

    dense = written(plain(), tmp_path / "files", V1)
    config = AutoConfig.from_pretrained(tmp_path / "files")
    config.rms_norm_eps = dense.config.rms_norm_eps = 0.5
    told = config.to_dict()
    for module in dense.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    want = dense.generate(**prompts(4), **OPTIONS)
    for options in ({"config": config}, {"rms_norm_eps": 0.5, "attn_implementation": "eager"}):
        model = loaded(tmp_path / "files", **options)
        assert len(slots(model)) == 14 and torch.equal(model.generate(**prompts(4), **OPTIONS), want)
    assert model.config._attn_implementation == "eager" and config.to_dict() == told
    assert len(slots(loaded(tmp_path, subfolder="files", num_hidden_layers=2))) == 14


def test_a_device_map_places_them_but_offloads_none(tmp_path):
    dense = written(plain(num_hidden_layers=1), tmp_path / "files", V1)
    model = loaded(tmp_path / "files", device_map="cpu")
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), dense.generate(**prompts(4), **OPTIONS))
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.\S+ is offloaded"):
        loaded(tmp_path / "files", device_map=places | {"lm_head": "cpu"}, offload_folder=str(tmp_path / "disk"))


def test_processes_do_not_cut_them(tmp_path):
    written(plain(num_hidden_layers=1), tmp_path, V1)
    for asked in ({"tp_plan": "auto"}, {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto")}):
        with pytest.raises(Unsupported, match=rf"packed weights, which are loaded whole: leave out {min(asked)}"):
            loaded(tmp_path, **asked)


def test_a_digest_is_that_of_the_weights(tmp_path):
    """Answers of one model are told from another's by what they hold packed."""
    for name, seed in (("one", 0), ("two", 1)):
        written(tiny_model("llama", seed, **SIZES), tmp_path / name, GEMM)
    one, again, two = (loaded(tmp_path / name) for name in ("one", "one", "two"))
    two.load_state_dict(one.state_dict() | {key: each for key, each in two.state_dict().items() if "qzeros" in key})
    assert weights_digest(one) == weights_digest(again) != weights_digest(two)


def test_other_quantisers_are_transformers_own(tmp_path):
    """Their packages are asked for as before; with a `quantization_config` of the caller's GPTQ's too."""
    from transformers import GPTQConfig

    written(plain(num_hidden_layers=1), tmp_path, V1)
    with (
        pytest.warns(UserWarning, match="You passed"),
        pytest.raises((ImportError, RuntimeError), match=r"optimum|GPU"),
    ):
        loaded(tmp_path, quantization_config=GPTQConfig(bits=4))


@pytest.mark.parametrize("given", [{"dequantize": True}, {"quant_method": "awq"}, {"config_groups": None}, None])
def test_zero_points_of_compressed_tensors_alone_are_taken_over(given):
    """Not where transformers unpacks them itself, nor another method's; tests/clients loads files of the library."""
    groups: dict[str, Any] = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False}},
        "none": {"weights": None},
        "W4A16": ["Linear"],
    }
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert has_zero_points(whole | (given or {})) == (given is None)
    groups["all"]["weights"]["symmetric"] = True
    assert not has_zero_points(whole)
