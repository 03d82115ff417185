"""Forwards that trainers put on a model: those that call the original in generation keep the adapter, others are warned
of."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.generate import prompts, shallow_model, stats
from helpers.models import tiny_head
from transformers import LlamaForCausalLM

import fastspec

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
FUSED = """
def add_fused_lm_head(model):
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def _fused_forward(self, *args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return original_forward(*args, **kwargs)
        raise RuntimeError("training")

    model.forward = types.MethodType(_fused_forward, model)
"""
"""The shape of TRL's function; the suite of clients runs the real one."""


def as_trl(model: Any, module: str = "trl.trainer.utils") -> Any:
    """The model with such a forward, from a module of this name."""
    import types

    home: dict[str, Any] = {"__name__": module, "functools": functools, "types": types}
    exec(FUSED, home)
    home["add_fused_lm_head"](model)
    return model


def test_a_forward_that_calls_the_original_keeps_the_adapter():
    plain = shallow_model().generate(**prompts(6, 3), **OPTIONS).tolist()
    for model in (as_trl(shallow_model()), as_trl(as_trl(shallow_model()))):
        fastspec.patch(model)
        assert fastspec.report(model).mode == "adapter llama"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="assisted calls run in generic mode")
            assert model.generate(**prompts(6, 3), **OPTIONS, assistant="nasd").tolist() == plain


def test_accelerates_conversion_keeps_the_adapter_and_its_autocast_does_not():
    from accelerate.utils import convert_outputs_to_fp32

    model = shallow_model()
    model.forward = convert_outputs_to_fp32(model.forward)
    assert fastspec.report(fastspec.patch(model)).mode == "adapter llama"
    model = shallow_model()
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    assert fastspec.report(fastspec.patch(model)).mode.startswith(
        "generic (LlamaForCausalLM has a forward of someone else's ("
    )


def test_a_model_that_accelerate_runs_in_bf16_is_drafted_for():
    """Its weights are fp32 and its passes are not: what they are trusted by is what bf16 resolves."""
    import torch
    from accelerate.utils import convert_outputs_to_fp32

    model = shallow_model(num_hidden_layers=2)
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    with fastspec.patched(model, assistant="nasd"):
        model.generate(**prompts(6), **OPTIONS)
        assert stats(model).emitted == OPTIONS["max_new_tokens"] and not fastspec.report(model).unassisted


def test_a_model_that_accelerate_unwrapped_keeps_the_adapter():
    """It leaves the function inside the class's own decorators on the instance."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (
        AcceleratorState,
        GradientState,
        PartialState,
    ):  # of the training tests, where one process runs them before
        state._reset_state()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.unwrap_model(accelerator.prepare(as_trl(shallow_model())), keep_fp32_wrapper=False)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    assert model.forward.__func__ is not type(model).forward
    assert fastspec.report(fastspec.patch(model)).mode == "adapter llama"
    plain = shallow_model().generate(**prompts(6), **OPTIONS)
    assert torch.equal(model.generate(**prompts(6), **OPTIONS, assistant="nasd"), plain)


@pytest.mark.parametrize("level", ["of the same shape", "on an instance", "on a layer"])
def test_a_forward_of_someone_elses_is_named_once(level):
    """Also one that looks like the original from outside: `functools.wraps` copies names."""
    model, want = shallow_model(), shallow_model().generate(**prompts(6), **OPTIONS).tolist()
    if level == "of the same shape":
        as_trl(model, "mine")
    else:
        changed = model if level == "on an instance" else model.model.layers[2]
        own = type(changed).forward
        changed.forward = functools.wraps(own)(lambda *args, **kwargs: own(changed, *args, **kwargs))
    fastspec.patch(model)
    name = "LlamaDecoderLayer" if level == "on a layer" else "LlamaForCausalLM"
    with pytest.warns(
        UserWarning, match=f"generic mode, which is slower: {name} has a forward of someone else's"
    ) as told:
        for _ in range(2):
            assert model.generate(**prompts(6), **OPTIONS, assistant="nasd").tolist() == want
    assert sum("generic mode" in str(warning.message) for warning in told) == 1 and stats(model).assistant == "nasd"


class Tuner(torch.nn.Module):
    """What PEFT's models of adapters hold, and what may be handed around by itself."""

    __module__ = "peft.tuners.lora.model"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class Peft(torch.nn.Module):
    """PEFT's model around a tuner, or around the model itself for prompt learning. One of several kinds of adapters
    has no method that gives what is inside."""

    __module__ = "peft.peft_model"

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_model = base


class Keywords(LlamaForCausalLM):
    def generate(self, inputs: Any = None, images: Any = None, **generate_kwargs: Any) -> Any:
        return super().generate(inputs, **generate_kwargs)[:, 2:]


class Anything(Keywords):
    def generate(self, *a: Any, **k: Any) -> Any:
        return super().generate(*a, **k)[:, 1:]


class Bare(LlamaForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


class Unnamed(LlamaForCausalLM):
    def forward(self, *a: Any, **k: Any) -> Any:
        return super().forward(*a, **k)


def of_class(kind: type) -> Any:
    model = shallow_model()
    model.__class__ = kind
    return model


@pytest.mark.parametrize("kind", [Keywords, Anything], ids=lambda kind: kind.__name__)
def test_a_generate_of_a_users_class_may_name_its_arguments_in_any_way(kind):
    ids = prompts(6)["input_ids"]
    want = of_class(kind).generate(ids, **OPTIONS).tolist()
    model = fastspec.patch(of_class(kind))
    assert model.generate(ids, assistant="nasd", **OPTIONS).tolist() == want
    assert stats(model).emitted == OPTIONS["max_new_tokens"]


def test_a_model_that_hides_its_lm_head_is_decoded_with_and_has_no_head():
    want = shallow_model().generate(**prompts(6, 3), **OPTIONS).tolist()
    model = fastspec.patch(of_class(Bare), speculative=of_class(Bare))
    for assistant in ("nasd", "speculative"):
        assert model.generate(**prompts(6, 3), assistant=assistant, **OPTIONS).tolist() == want
    with pytest.raises(fastspec.Unsupported, match="LM head, and that of this Bare is a NoneType without a weight"):
        fastspec.patch(of_class(Bare), eagle3=tiny_head(shallow_model()))


def test_a_forward_that_names_no_arguments_is_told_to():
    with pytest.raises(
        fastspec.Unsupported, match=r"Unnamed\.forward takes no position_ids.*Name them in its signature"
    ):
        fastspec.patch(of_class(Unnamed))


WRAPS: dict[str, Callable[[Any], Any]] = {
    "compile": torch.compile,
    "data parallel": torch.nn.DataParallel,
    "prompt learning": Peft,
    "tuner": Tuner,
    "peft": lambda model: Peft(Tuner(model)),
    "compiled peft": lambda model: torch.compile(Peft(Tuner(model))),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_is_patched_inside(wrap):
    """`patch` and `unpatch` return what they were given, and `report` and `profile` take it."""
    model = shallow_model()
    wrapped = WRAPS[wrap](model)
    assert fastspec.patch(wrapped, assistant="nasd") is wrapped and "generate" in model.__dict__
    with fastspec.profile(wrapped) as profile:
        model.generate(**prompts(6), **OPTIONS)
    assert profile.rounds and fastspec.report(wrapped).last.assistant == "nasd"
    with pytest.raises(fastspec.PatchConflict):
        fastspec.patch(model)
    assert fastspec.unpatch(wrapped) is wrapped and "generate" not in model.__dict__


def test_a_compiled_model_generates_through_its_wrapper():
    wrapped = fastspec.patch(torch.compile(shallow_model()), assistant="nasd")
    assert (
        wrapped.generate(**prompts(6, 3), **OPTIONS).tolist()
        == shallow_model().generate(**prompts(6, 3), **OPTIONS).tolist()
    )
    assert fastspec.report(wrapped).last.rounds


@pytest.mark.parametrize("name", ["model", "module"])
def test_an_object_that_holds_the_model_is_told_which_part_to_pass(name):
    class Pipeline:
        pass

    class Trainers(torch.nn.Module):
        pass

    for holder in (Pipeline(), Trainers()):
        setattr(holder, name, shallow_model())
        kind = type(holder).__name__
        with pytest.raises(fastspec.Unsupported, match=rf"not {kind}: pass its \.{name}"):
            fastspec.patch(holder)
        fastspec.patch(getattr(holder, name))
        for ask in (fastspec.report, fastspec.unpatch):
            with pytest.raises(fastspec.FastSpecError, match=rf"{kind}.*pass its \.{name}"):
                ask(holder)


@pytest.mark.parametrize("given", [None, "model", 3, dict])
def test_what_is_no_model_is_named(given):
    with pytest.raises(fastspec.Unsupported, match="patch takes a transformers model, not"):
        fastspec.patch(given)
