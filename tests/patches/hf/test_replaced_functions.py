"""Functions of someone else's in the place of transformers' or torch's: calls run them as plain generate does, or are
left to it."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import prompts, shallow_model
from helpers.models import FAMILIES, tiny_head, tiny_model
from helpers.seq2seq import tiny_seq2seq
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import fastspec
from fastspec.patches.hf.config_fields import recurrent_layers
from fastspec.patches.hf.modes import adapter_for

OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
CALLED: Counter[str] = Counter()


def louder(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
    """Attention of a user's own."""
    CALLED["louder"] += 1
    return sdpa_attention_forward(module, query, key, value * 1.5, mask, **more)


class Louder:
    """The same as an object."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        return louder(*args, **more)


def own_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **kwargs)


def replaced(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`owner.name` by a function that looks like it, and calls it."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def own(*args: Any, **kwargs: Any) -> Any:
        CALLED[name] += 1
        return change(before(*args, **kwargs))

    monkeypatch.setattr(owner, name, own)


def in_registry(table: Any, name: str, function: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setitem(table._global_mapping, name, function)


CASES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sdpa": in_registry(AttentionInterface, "sdpa", louder),
    "an object": in_registry(AttentionInterface, "sdpa", Louder()),
    "a partial": in_registry(AttentionInterface, "sdpa", functools.partial(louder)),
    "decorated": in_registry(AttentionInterface, "sdpa", torch.no_grad()(louder)),
    "rotary": lambda monkeypatch: replaced(
        monkeypatch, modeling_llama, "apply_rotary_pos_emb", lambda both: (both[0], both[1] * 1.3)
    ),
    "Linear.forward": lambda monkeypatch: replaced(monkeypatch, nn.Linear, "forward", lambda out: out * 1.02),
    "Linear.__call__": lambda monkeypatch: replaced(monkeypatch, nn.Linear, "__call__", lambda out: out * 1.02),
    "Module.__call__": lambda monkeypatch: replaced(monkeypatch, nn.Module, "__call__", lambda out: out),
    "F.silu": lambda monkeypatch: replaced(monkeypatch, nn.functional, "silu", lambda out: out * 1.1),
    "Embedding.forward": lambda monkeypatch: replaced(monkeypatch, nn.Embedding, "forward", lambda out: out * 1.5),
}


@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ["nasd", "eagle3"])
@pytest.mark.parametrize("case", list(CASES))
def test_what_someone_else_has_put_there_is_run(monkeypatch, case, assistant):
    """After the patch: a call sees what is there when it runs."""
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model))
    assert adapter_for(model) is not None
    CASES[case](monkeypatch)
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    CALLED.clear()
    with pytest.warns(UserWarning, match="generic mode, which is slower: .* is someone else's"):
        assert model.generate(**prompts(9, 6), **OPTIONS, assistant=assistant).tolist() == want
    assert CALLED or case in ("F.silu",)
    assert "is someone else's" in fastspec.report(model).mode and fastspec.report(model).last.rounds
    monkeypatch.undo()
    assert adapter_for(model) is not None


@pytest.mark.parametrize("where", ["the modelling file", "the registry"])
def test_masks_of_someone_elses_are_refused_by_name(monkeypatch, where):
    """A tree has a mask of its own: a user's, which may see less of a long text than of a short one, would be passed
    by."""
    model = shallow_model()
    fastspec.patch(model, assistant="nasd")
    if where == "the registry":
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", own_mask)
    else:
        replaced(monkeypatch, modeling_llama, "create_causal_mask", lambda mask: mask)
    want = model.generate(**prompts(9, 6), **OPTIONS, assistant=None).tolist()
    with pytest.warns(UserWarning, match="cannot serve this call"):
        assert model.generate(**prompts(9, 6), **OPTIONS).tolist() == want
    with pytest.raises(fastspec.Unsupported, match=r"mask.* is someone else's .*put transformers' own back"):
        model.generate(**prompts(9, 6), **OPTIONS, assistant="nasd")


def test_a_feed_forward_of_someone_elses_runs_within_the_adapter(monkeypatch):
    """Under the name of the one that it replaces: its own forward is called, as that of a quantised module is."""
    model = shallow_model()
    fastspec.patch(model)
    replaced(monkeypatch, modeling_llama.LlamaMLP, "forward", lambda out: out * 1.3)
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    CALLED.clear()
    assert model.generate(**prompts(9, 6), **OPTIONS, assistant="nasd").tolist() == want and CALLED["forward"]
    assert adapter_for(model) is not None


def test_an_attention_by_a_name_of_its_own_is_never_passed_by(monkeypatch):
    """Transformers makes no mask for a name that it does not know, so that trees cannot be scored: the call is left to
    plain decoding."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "louder", louder)
    model = shallow_model()
    fastspec.patch(model, assistant="nasd")
    model.set_attn_implementation("louder")
    ids = prompts(9)["input_ids"]
    want = model.generate(ids, **OPTIONS, assistant=None).tolist()
    with pytest.warns(UserWarning, match="cannot serve this call"):
        assert model.generate(ids, **OPTIONS).tolist() == want
    with pytest.raises(fastspec.Unsupported, match="scores the nodes of a draft tree otherwise"):
        model.generate(ids, **OPTIONS, assistant="nasd")
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "louder", sdpa_mask)  # with a mask they can
    model, CALLED["louder"] = shallow_model(), 0
    model.set_attn_implementation("louder")
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    fastspec.patch(model, assistant="nasd")
    assert (
        model.generate(**prompts(9, 6), **OPTIONS).tolist() == want
        and fastspec.report(model).last.rounds
        and CALLED["louder"]
    )


def seen_by(run: Callable[[], Any]) -> set[CodeType]:
    """The code of every function that a call runs."""
    found: set[CodeType] = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def modelling_code(model: Any, run: Callable[[], Any]) -> list[tuple[Any, str]]:
    """Each function of a model's modelling file, and each method of its modules' classes, that a call runs: (module or
    class, name)."""
    codes, classes = seen_by(run), {base for module in model.modules() for base in type(module).__mro__}
    places = [each for each in classes if each.__module__.startswith("transformers.models.")]
    places = [*sorted(places, key=lambda each: each.__qualname__), sys.modules[type(model).__module__]]
    held = ((place, name, value) for place in places for name, value in vars(place).items())
    return [(place, name) for place, name, value in held if isinstance(value, FunctionType) and value.__code__ in codes]


QUICK = "llama", "gemma2", "phi3", "qwen3_moe"


@pytest.mark.some("qwen3_moe", "gemma2")
@pytest.mark.parametrize(
    "family", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_whatever_of_the_modelling_code_plain_decoding_calls_is_called(monkeypatch, family):
    """One function or method after another is replaced by one that counts: what a plain call calls, an assisted call
    calls too, unless it is refused by the name of what was replaced. Nothing is passed by."""
    model = tiny_model(family, num_hidden_layers=4)
    fastspec.patch(model)
    run = functools.partial(model.generate, **prompts(9), max_new_tokens=3, do_sample=False, eos_token_id=None)
    places, refused = modelling_code(model, run), []
    for place, name in places:
        counts = []
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replaced(patch, place, name, lambda out: out)
            for assistant in (None, "nasd"):
                CALLED.clear()
                try:
                    run(assistant=assistant)
                except fastspec.Unsupported as error:
                    assert name in str(error) or place.__name__.rpartition(".")[2] in str(error), (name, str(error))
                    refused.append(name)
                    CALLED[name] += 1
                counts.append(CALLED[name])
        assert bool(counts[0]) <= bool(counts[1]), (place.__name__, name, counts)
    assert len(places) >= 10
    assert set(refused) < {name for _, name in places} or any(recurrent_layers(model.config))


rotated = modeling_llama.apply_rotary_pos_emb


def other_way(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """A rotation of a user's own."""
    q, k = rotated(q, k, cos, -sin, unsqueeze_dim)
    return q * 1.3, k


class OtherWay(nn.Module):
    """The same as a module."""

    def forward(self, *args: Any) -> Any:
        return other_way(*args)


class OtherWayBackward(torch.autograd.Function):
    """The same as what has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return other_way(*args)


OBJECTS: dict[str, Callable[[], Any]] = {
    "a module": OtherWay,
    "the apply of an autograd function": lambda: OtherWayBackward.apply,
    "a partial of a module": lambda: functools.partial(OtherWay()),
    "a mock": lambda: mock.Mock(side_effect=other_way),
    "a custom op": lambda: torch.library.custom_op(f"fastspec_tests::rotate{next(NUMBER)}", mutates_args=())(rotation),
}
NUMBER = itertools.count()


def rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    turned, left = other_way(q, k, cos, sin)
    return turned.clone(), left.clone()


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_place_of_a_function_is_called(monkeypatch, kind):
    model = fastspec.patch(shallow_model())
    plain = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", OBJECTS[kind]())
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    assert want != plain
    with pytest.warns(UserWarning, match="apply_rotary_pos_emb is someone else's"):
        assert model.generate(**prompts(9, 6), **OPTIONS, assistant="nasd").tolist() == want


def test_what_transformers_own_attention_calls_is_called(monkeypatch):
    model = fastspec.patch(shallow_model())
    replaced(monkeypatch, sys.modules[sdpa_attention_forward.__module__], "use_gqa_in_sdpa", lambda _: False)
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    CALLED.clear()
    with pytest.warns(UserWarning, match="sdpa_attention.use_gqa_in_sdpa is someone else's"):
        assert model.generate(**prompts(9, 6), **OPTIONS, assistant="nasd").tolist() == want
    assert CALLED["use_gqa_in_sdpa"]


def test_a_kept_engine_is_not_used_where_a_class_has_changed(monkeypatch):
    """What was captured has the class's forward of then in it."""
    stand_in(monkeypatch)
    model = shallow_model()
    fastspec.patch(model)
    model.generate(**prompts(9, 6), **OPTIONS, assistant="autoregressive")
    for change in (1.3, 1.1):
        with monkeypatch.context() as patch:
            replaced(patch, modeling_llama.LlamaMLP, "forward", lambda out, change=change: out * change)
            want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
            for _ in range(2):
                assert model.generate(**prompts(9, 6), **OPTIONS, assistant="autoregressive").tolist() == want
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    assert model.generate(**prompts(9, 6), **OPTIONS, assistant="autoregressive").tolist() == want


@pytest.mark.parametrize("kind", ["gemma2", "llama4_text"])
def test_a_norm_s_own_helper_of_someone_else_s_is_called(monkeypatch, kind):
    model = fastspec.patch(tiny_model(kind, num_hidden_layers=4))
    [norm] = {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    replaced(monkeypatch, norm, "_norm", lambda out: out * 1.2)
    want = model.generate(**prompts(9, 6), **OPTIONS).tolist()
    CALLED.clear()
    assert model.generate(**prompts(9, 6), **OPTIONS, assistant="nasd").tolist() == want and CALLED["_norm"]


def test_an_override_that_hides_behind_the_name_of_what_it_wraps_is_refused(monkeypatch):
    """`functools.wraps` copies the module's name, too."""
    model = fastspec.patch(shallow_model())
    replaced(monkeypatch, type(model), "prepare_inputs_for_generation", lambda inputs: inputs)
    with pytest.raises(
        fastspec.Unsupported, match=r"prepare_inputs_for_generation is .* \(own, .*test_replaced_functions.py"
    ):
        model.generate(**prompts(9), **OPTIONS, assistant="nasd")


def test_a_mask_that_an_encoder_decoder_s_loop_would_pass_by_is_refused(monkeypatch):
    model = tiny_seq2seq("t5")
    options = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 4, "do_sample": False}
    fastspec.patch(model, assistant="nasd")
    replaced(monkeypatch, sys.modules[type(model).__module__], "create_causal_mask", lambda mask: mask)
    want = model.generate(**options, assistant=None).tolist()
    with pytest.warns(UserWarning, match="create_causal_mask is someone else's"):
        assert model.generate(**options).tolist() == want
    with pytest.raises(fastspec.Unsupported, match="put it back"):
        model.generate(**options, assistant="nasd")


def test_decorated_functions_of_transformers_own_are_not_taken_for_others():
    for model in (shallow_model(), shallow_model(attn_implementation="eager")):
        assert adapter_for(model) is not None
    assert torch.is_grad_enabled()
