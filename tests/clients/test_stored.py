"""Weights as the libraries store them, multiplied as they are: tiny models, loaded by transformers where it loads
them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, trained
from helpers.clients import MARKS, QUESTIONS, asked
from helpers.cut_torchao import compare
from helpers.generate import prompts
from helpers.gptq import Recipe, tensors_of, written
from helpers.models import tiny_head, tiny_model
from helpers.mtp import oracle, published, save_with, target
from helpers.pages import snippets
from helpers.patch import assert_same, snapshot
from helpers.processes import spawn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import fastspec
from fastspec.generation.drafters.head_program import HeadProgram
from fastspec.kernels.quantised.reference import StoredWeight, dequantised
from fastspec.models import load_model
from fastspec.patches.assistants.smaller_heads import with_vocabulary
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.quantised import format_of, read
from fastspec.patches.session import session_of

pytestmark = MARKS
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 1000}
TREE = fastspec.Eagle3(depth=3, top_k=3, total_tokens=8)
LAYERS = 3
Load = Callable[[Path], Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A model in fp32 as a directory, its sizes multiples of 128, with biases in attention."""
    path = tmp_path_factory.mktemp("stored") / "plain"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    tiny_model("qwen2", **sizes).save_pretrained(path)
    return path


def loaded(folder: Path, config: Any = None) -> Any:
    given = {} if config is None else {"quantization_config": config, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given).eval()


def torchao(kind: str, *args: Any, **options: Any) -> Load:
    def load(folder: Path) -> Any:
        ao = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig

        made = {name: value() if callable(value) else value for name, value in options.items()}
        return loaded(folder, TorchAoConfig(getattr(ao, kind)(*args, **made)))

    return load


def groups_of_32() -> Any:
    from torchao.quantization import granularity

    return granularity.PerGroup(32)


def bitsandbytes(**options: Any) -> Load:
    def load(folder: Path) -> Any:
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
        return loaded(folder, BitsAndBytesConfig(**(options if "load_in_8bit" in options else four | options)))

    return load


def compressed(
    activations: bool = False, only: dict[str, int] | None = None, *, lm_head: bool = False, **args: Any
) -> Load:
    """Written by compressed-tensors, rounded to the nearest, and loaded; `only` gives modules by name other bits."""

    def load(folder: Path) -> Any:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        model = loaded(folder)
        inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True) if activations else None

        def scheme(targets: list[str], **more: Any) -> Any:
            given = QuantizationArgs(**args | more)
            return QuantizationScheme(targets=targets, weights=given, input_activations=inputs)

        others = {name: scheme([f"re:.*{name}"], num_bits=bits) for name, bits in (only or {}).items()}
        rest = {"all": scheme(["Linear"])}
        apply_quantization_config(
            model, QuantizationConfig(config_groups=others | rest, ignore=[] if lm_head else ["lm_head"])
        )
        for layer in model.modules():
            if not hasattr(layer, "quantization_scheme"):
                continue
            given, weight = layer.quantization_scheme.weights, layer.weight.data
            size = given.group_size if given.strategy == "group" else weight.shape[1]
            parts = weight.unflatten(1, (-1, size))
            if given.strategy == "tensor":
                parts = weight.reshape(1, 1, -1)
            scale, zero = calculate_qparams(parts.amin(2), parts.amax(2), given)
            layer.weight_scale.data.copy_(scale.view_as(layer.weight_scale))
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero.view_as(layer.weight_zero_point))
        packer, path = ModelCompressor.from_pretrained_model(model), folder.parent / "compressed"
        packer.compress_model(model)
        model.save_pretrained(path)
        packer.update_config(path)
        return loaded(path) if args.get("symmetric", True) else load_model(str(path), tokenizer="none")[0]

    return load


KINDS: dict[str, Load] = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao int4 in int8": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=groups_of_32),
    "compressed-tensors w8a16": compressed(num_bits=8, strategy="channel"),
    "compressed-tensors w8a16, groups": compressed(num_bits=8, strategy="group", group_size=32),
    "compressed-tensors w4a16": compressed(num_bits=4, strategy="group", group_size=64),
    "compressed-tensors w4a16, zero points": compressed(num_bits=4, strategy="group", group_size=128, symmetric=False),
    "compressed-tensors w4a16, act-order": compressed(num_bits=4, strategy="group", group_size=32, actorder="weight"),
    "compressed-tensors, mixed": compressed(only={"down_proj": 8}, num_bits=4, strategy="group", group_size=32),
    "bitsandbytes nf4": bitsandbytes(bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4, nested": bitsandbytes(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bitsandbytes nf4, in words of bf16": bitsandbytes(
        bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "bitsandbytes fp4": bitsandbytes(bnb_4bit_quant_type="fp4"),
}
ROUNDED: dict[str, Load] = {
    "torchao int8": torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "compressed-tensors fp8": compressed(activations=True, num_bits=8, type="float", strategy="channel"),
    "compressed-tensors fp8, one scale": compressed(activations=True, num_bits=8, type="float", strategy="tensor"),
}


def slots(model: Any) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in model.named_modules() if format_of(each) is not None]


def densified(model: Any, folder: Path) -> Any:
    """The model in fp32 with the weights that are stored, dequantised."""
    dense = loaded(folder)
    for name, module in slots(model):
        weight = read(module)
        assert not isinstance(weight, str), f"{name}: {weight}"
        dense.get_submodule(name).weight.data = dequantised(weight, torch.float32)
    return dense


def bits(model: Any) -> dict[str, list[bytes]]:
    """The bytes of a model's state, of all tensors that a wrapper of several holds."""
    found = {}
    for name, value in model.state_dict().items():
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        tensors = [getattr(value, part) for part in parts] or [value]
        found[name] = [each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
    return found


def trace(model: Any) -> dict[str, Any]:
    """What `unpatch` leaves as it was, without the addresses of what bitsandbytes makes for each state_dict."""
    found, own = snapshot(model, values=False), dict(model.named_parameters())
    found["storage"] = {name: value for name, value in found["storage"].items() if name in own}
    return found


def laid_anew(model: Any) -> bool:
    """True where bitsandbytes' own first pass has laid weights anew for this CPU (AVX512-BF16), and rounds what it
    multiplies."""
    states = (getattr(getattr(module, "weight", None), "quant_state", None) for module in model.modules())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)


class Plain(TorchDispatchMode):  # type: ignore[misc]
    """Mode that takes no operation on another library's class of tensors, as torch 2.11's FakeTensorMode, under which a
    program is looked at before its first run."""

    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and not is_traceable_wrapper_subclass(each):
                assert type(each) in (torch.Tensor, nn.Parameter), type(each)
        return run(*args, **(kwargs or {}))


def check(model: Any, dense: Any, layers: int = 7) -> None:
    """Assisted calls say what the dequantised model says, all weights as stored, and `unpatch` leaves no trace."""
    before, values, count = trace(model), bits(model), len(slots(model))
    with Plain():
        assert all(isinstance(read(module), StoredWeight) for _, module in slots(model))
    inputs = prompts(4, 9)
    expected = dense.generate(**inputs, **OPTIONS)
    fastspec.patch(model, eagle3=tiny_head(dense), stored=True)
    for assistant in ("autoregressive", TREE):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    report = fastspec.report(model)
    assert sum(report.stored.values()) == count >= layers * LAYERS and not report.own_forward
    fastspec.unpatch(model)
    assert_same(before, trace(model))
    assert bits(model) == values


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_multiplied_as_stored(plain, kind):
    """The library's own answers, too: in fp32 it multiplies the same numbers, but for bitsandbytes on a CPU with
    AVX512-BF16, which rounds them."""
    model = KINDS[kind](plain)
    check(model, densified(model, plain))
    own, inputs = KINDS[kind](plain), prompts(4, 9)
    dense = densified(own, plain)
    said = own.generate(**inputs, **OPTIONS)
    if not laid_anew(own):
        assert torch.equal(said, dense.generate(**inputs, **OPTIONS))


@pytest.mark.parametrize(
    "kind", ["torchao int8", "compressed-tensors w4a16, zero points", "bitsandbytes nf4, nested"], ids=str
)
def test_a_gate_and_what_it_opens_may_be_one_weight(kind, tmp_path):
    """Phi-3's, and its projections."""
    path = tmp_path / "plain"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    tiny_model("phi3", **sizes).save_pretrained(path)
    model = KINDS[kind](path)
    check(model, densified(model, path), 4)


def test_a_stage_of_a_cascade_is_multiplied_as_stored(plain):
    pytest.importorskip("bitsandbytes")
    small, ids = KINDS["bitsandbytes nf4, nested"](plain), torch.tensor([[5, 6, 7, 8]])
    expected, large = densified(small, plain).generate(ids, **OPTIONS), loaded(plain)
    stage = fastspec.Stage(small, name="medium", resources={"stored": True})
    settings = {"label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0], "price": 0.0}
    with fastspec.patched(large, cascade=fastspec.Cascade(stages=[stage], **settings)):
        found = large.generate(ids, **OPTIONS, assistant="cascade")
        assert fastspec.report(small).stored == {"bitsandbytes 4 bits": 7 * LAYERS}
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ROUNDED)
def test_activations_are_not_rounded(plain, kind):
    model = ROUNDED[kind](plain)
    check(model, densified(model, plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_dequantises_as_its_library_does(plain, kind):
    """Bit for bit, by the product of ones: the library's own forward, or what it unpacks."""
    model = KINDS[kind](plain)
    found = {name: dequantised(read(module), torch.float32) for name, module in slots(model)}
    model(torch.tensor([[1]]))  # compressed-tensors unpacks
    for name, weight in found.items():
        module = model.get_submodule(name)
        held = module.weight
        if kind.startswith("bitsandbytes"):
            import bitsandbytes

            wanted = bitsandbytes.functional.dequantize_4bit(held.data, held.quant_state)
        else:
            wanted = held.dequantize() if hasattr(held, "qdata") else held.data
        assert torch.equal(weight, wanted), name


@pytest.mark.parametrize(
    "args", [{"num_bits": 8, "strategy": "channel"}, {"num_bits": 4, "strategy": "group", "group_size": 32}], ids=str
)
def test_zero_points_are_read_where_transformers_refuses_them(plain, args, tmp_path):
    """Those of compressed-tensors, as its file has them, beside layers of another format; saved and read again."""
    model = compressed(symmetric=False, only={"down_proj": 8}, **args)(plain)
    path = plain.parent / "compressed"
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        loaded(path)
    state, files = model.state_dict(), tensors_of(path)
    assert sum(key.endswith("weight_zero_point") for key in files) == 7 * LAYERS
    assert all(torch.equal(state[key], each) and state[key].dtype == each.dtype for key, each in files.items())
    fastspec.patch(model, stored=True).save_pretrained(tmp_path)
    assert model.config.quantization_config.quant_method == "compressed-tensors"
    assert bits(load_model(str(tmp_path), tokenizer="none")[0]) == bits(model)


def test_int8_of_bitsandbytes_dequantises_as_its_library_does(plain):
    """To the order of two products in fp32, each rounded to half an ulp; before and after its own first pass, which
    moves its tensors, and with a line's scale changed."""
    model = ROUNDED["bitsandbytes int8"](plain)
    import bitsandbytes

    module, first = model.model.layers[0].mlp.up_proj, []
    for change in range(3):
        if change == 1:
            model(torch.tensor([[1]]))
        if change == 2:
            module.state.SCB[3] *= 2
        found = dequantised(read(module), torch.float32)
        held = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        wanted = bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, held)
        torch.testing.assert_close(found, wanted, rtol=2**-22, atol=0)
        first.append(found)
    assert torch.equal(first[0], first[1]) and torch.equal(first[2][3], 2 * first[0][3])


def test_a_plain_call_unpacks_and_assisted_calls_go_on(plain):
    """compressed-tensors' weights are unpacked by the first call without an assistant, as before `patch`."""
    model = KINDS["compressed-tensors w4a16"](plain)
    inputs, expected = prompts(5), densified(model, plain).generate(**prompts(5), **OPTIONS)
    fastspec.patch(model, stored=True)
    for assistant in ("nasd", None, "nasd"):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
        assert bool(fastspec.report(model).stored) == (model._forward_pre_hooks != {})


@pytest.mark.parametrize("why", ["3 bits", "a hook"])
def test_what_is_not_read_is_unpacked(plain, why):
    """3 bits beside 4, or generic mode: all of it, by its library, and `report` says so."""
    other = {"down_proj": 3} if why == "3 bits" else {}
    model = compressed(only=other, num_bits=4, strategy="group", group_size=32)(plain)
    dense = copy.deepcopy(model)
    if why == "a hook":
        model.model.layers[0].register_forward_hook(lambda *args: None)
    fastspec.patch(model, stored=True)
    told = fastspec.report(model)
    assert not told.stored and {why.partition(":")[0] for why in told.own_forward} == {"compressed-tensors"}
    found = model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    assert torch.equal(found, dense.generate(**prompts(5), **OPTIONS))


def test_the_pages_snippet_drafts_and_says_what_the_model_says(smollm2, tokenizer):
    """SmolLM2 in int8, 24 tokens: the answer of its own forward."""
    pytest.importorskip("torchao")
    names = {"model": copy.deepcopy(smollm2[0]), "inputs": asked(tokenizer, QUESTIONS[0])}
    (snippet,) = (each for each in snippets(Path("docs/guide/quantised.md")) if "torchao" in each.text)
    exec(compile(snippet.text, snippet.name, "exec"), names)
    model, report = names["model"], fastspec.report(names["model"])
    assert (
        report.stored == {"torchao int8": 7 * model.config.num_hidden_layers + 1} and report.last.acceptance_length > 2
    )
    fastspec.unpatch(model)
    plain = model.generate(**names["inputs"], max_new_tokens=24, do_sample=False)
    assert torch.equal(names["answer"], plain)


def test_the_layers_of_the_pages_recipe_for_bitsandbytes_can_be_read_as_stored(plain, monkeypatch):
    pytest.importorskip("bitsandbytes")
    load = AutoModelForCausalLM.from_pretrained
    places = {"org/model": plain}
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda name, **options: load(places[name], device_map="cpu", **options)
    )
    (recipe,) = (each for each in snippets(Path("docs/guide/quantised.md")) if "BitsAndBytesConfig" in each.text)
    names: dict[str, Any] = {}
    exec(compile(recipe.text, recipe.name, "exec"), names)
    assert not fastspec.report(names["model"]).stored
    with fastspec.patched(fastspec.unpatch(names["model"]), stored=True):
        assert fastspec.report(names["model"]).stored == {"bitsandbytes 4 bits": 7 * LAYERS}


def test_the_pages_recipe_for_compressed_tensors_keeps_them_packed(plain, monkeypatch):
    written, load = KINDS["compressed-tensors w4a16"](plain), AutoModelForCausalLM.from_pretrained
    dense, inputs = densified(written, plain), prompts(4, 9)
    places = {"org/model-w4a16": plain.parent / "compressed"}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: load(places[name], dtype=torch.float32))
    (recipe,) = (each for each in snippets(Path("docs/guide/quantised.md")) if "org/model-w4a16" in each.text)
    names: dict[str, Any] = {}
    exec(compile(recipe.text, recipe.name, "exec"), names)
    found = names["model"].generate(**inputs, **OPTIONS)
    assert torch.equal(found, dense.generate(**inputs, **OPTIONS))
    assert fastspec.report(names["model"]).stored == {"compressed-tensors": 7 * LAYERS}


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_shares_of_two_processes_are_multiplied_as_stored(plain, kind, tmp_path):
    """As transformers loads and cuts them; each process has rounded its own share."""
    pytest.importorskip("torchao")
    spawn(compare, (tmp_path, plain, kind), 2)


def gptq(folder: Path) -> Any:
    written(loaded(folder), folder.parent / "gptq", Recipe(ordered=True))
    return load_model(str(folder.parent / "gptq"), tokenizer="none")[0]


ADAPTED = {name: KINDS[name] for name in ("torchao int8", "bitsandbytes nf4, nested")} | {"GPTQ": gptq}


def whole_torchao(folder: Path) -> Any:
    ao = pytest.importorskip("torchao.quantization")
    model = loaded(folder)
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    return model


WITH_LM_HEAD: dict[str, Load] = {
    "torchao int8": whole_torchao,
    "compressed-tensors w4a16": compressed(lm_head=True, num_bits=4, strategy="group", group_size=64),
    "bitsandbytes nf4": bitsandbytes(bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["none"]),
    "bitsandbytes nf4, nested": bitsandbytes(
        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["none"]
    ),
}


@pytest.mark.parametrize("kind", WITH_LM_HEAD)
def test_a_borrowed_lm_head_is_read_as_stored(kind, tmp_path, monkeypatch):
    """By EAGLE heads and an MTP layer at every level, and where a text is scored. bitsandbytes' own forward would lay
    it anew for a CPU with AVX512-BF16."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "linear_value_head_dim": 16}
    plain = target("qwen3_5_text", **sizes, tie_word_embeddings=False)
    folder = save_with(plain, published(oracle(plain), "qwen", plain.config.num_hidden_layers), tmp_path / "plain")
    model = WITH_LM_HEAD[kind](folder)
    dense = densified(model, folder)
    assert "lm_head" in dict(slots(model))
    before, values, inputs = trace(model), bits(model), prompts(4, 9)
    expected = dense.generate(**inputs, **OPTIONS)
    head = tiny_head(dense, kind="eagle", taps=(), own_lm_head=False)
    fastspec.patch(model, eagle=head, eagle2=head, mtp=str(folder), stored=True)
    tree, passes = {"depth": 3, "top_k": 3, "total_tokens": 8}, Counter[str]()

    def counted(name: str, run: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            before = passes["products"]
            found = run(*args, **options)
            passes[name] += 1
            assert name == "products" or passes["products"] == before + 1
            return found

        return call

    kernels = replace(TORCH, stored_linears=counted("products", TORCH.stored_linears))
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *given, **options: kernels)
    monkeypatch.setattr(HeadProgram, "logits", counted("levels", HeadProgram.logits))
    for assistant in ("eagle", fastspec.Eagle2(**tree), fastspec.Mtp(**tree)):
        passes["levels"] = 0
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
        assert passes["levels"]
    narrow = fastspec.Mtp(**tree, draft_vocab=256)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=narrow), expected)
    session = session_of(model)
    assert session is not None
    drafted = with_vocabulary(session.resources["mtp"], narrow, model)
    assert torch.equal(drafted.readout().weight, dense.lm_head.weight[drafted.drafted()])
    with fastspec.patched(dense):
        torch.testing.assert_close(fastspec.log_probs(model, **inputs), fastspec.log_probs(dense, **inputs))
    assert not fastspec.report(model).own_forward and not laid_anew(model)
    fastspec.unpatch(model)
    assert_same(before, trace(model))
    assert bits(model) == values


def adapted(model: Any, name: str = "default", **options: Any) -> Any:
    """A model with a LoRA adapter of drawn weights on some projections, or PEFT's model with another."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", **options)
    if name == "default":
        model = get_peft_model(model, config)
    else:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(len(name))
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("kind", ADAPTED)
def test_lora_adds_to_stored_products(plain, kind):
    """One adapter, another, and none: the tokens of the dequantised model with the same."""
    pytest.importorskip("peft")
    model = ADAPTED[kind](plain)
    dense, inputs, found = densified(model, plain), prompts(4, 9), []
    head = tiny_head(dense)
    model, dense = adapted(model), adapted(dense)
    fastspec.patch(model, eagle3=head, stored=True)
    own = model.generate(**inputs, **OPTIONS)
    if laid_anew(model):
        pytest.skip("on this CPU bitsandbytes multiplies by its own forward from its first pass on")

    def check_now() -> None:
        expected = dense.generate(**inputs, **OPTIONS)
        for assistant in ("autoregressive", TREE):
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
        found.append(expected)

    check_now()
    assert torch.equal(own, found[0])
    report = fastspec.report(model)
    assert sum(report.stored.values()) == 7 * LAYERS and not report.own_forward
    assert report.kernels["stored_linears"]
    for each in (model, dense):
        adapted(each, "second").set_adapter("second")
    check_now()
    with model.disable_adapter(), dense.disable_adapter():
        check_now()
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    fastspec.unpatch(model)
    model.set_adapter("default")
    assert torch.equal(model.generate(**inputs, **OPTIONS), own)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_packed_layers_refuse_by_name_what_is_merged_into_them_or_made_of_them(plain, init):
    pytest.importorskip("peft")
    model = gptq(plain)
    with pytest.raises(fastspec.Unsupported, match="layer of 4-bit GPTQ weights has no dense weight"):
        adapted(model, init_lora_weights=init)
    model = adapted(gptq(plain))
    before = model.generate(**prompts(4), **OPTIONS)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(fastspec.Unsupported, match="layer of 4-bit GPTQ weights has no dense weight"):
            merge()
    assert torch.equal(model.generate(**prompts(4), **OPTIONS), before)


def test_lora_that_reads_the_weight_runs_by_its_own_forward(plain):
    """DoRA: it divides by the norms of what both add up to."""
    pytest.importorskip("peft")
    model = KINDS["bitsandbytes nf4"](plain)
    model = fastspec.patch(adapted(model, use_dora=True), stored=True)
    told = fastspec.report(model)
    apart = 3 * LAYERS  # those with an adapter, and in the feed-forward what stands beside them
    assert told.own_forward == {
        "bitsandbytes 4 bits: it is a part of a module that runs by its own forward": apart + 2 * LAYERS
    }
    found = model.generate(**prompts(4), **OPTIONS, assistant="autoregressive")
    assert torch.equal(found, model.generate(**prompts(4), **OPTIONS))


def test_dora_takes_the_norms_of_packed_weights(plain):
    pytest.importorskip("peft")
    model = gptq(plain)
    dense = adapted(densified(model, plain), use_dora=True)
    model, inputs = adapted(model, use_dora=True), prompts(4, 9)
    expected = dense.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    fastspec.patch(model, stored=True)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant="nasd"), expected)
    with pytest.raises(fastspec.Unsupported, match="layer of 4-bit GPTQ weights has no dense weight"):
        model.merge_adapter()


def test_the_triton_kernel_reads_them_too(plain):
    """In the interpreter, one format of each library."""
    for kind in ("torchao int8", "compressed-tensors w4a16, zero points", "bitsandbytes nf4, nested"):
        model = KINDS[kind](plain)
        expected = densified(model, plain).generate(**prompts(4), **OPTIONS | {"max_new_tokens": 2})
        with fastspec.patched(model, backend="triton", stored=True):
            found = model.generate(**prompts(4), **OPTIONS | {"max_new_tokens": 2}, assistant="autoregressive")
        assert torch.equal(found, expected), kind
