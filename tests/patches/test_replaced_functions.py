"""Functions of someone else's in the place of transformers' or torch's: calls run them as plain generate does, or are left to it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from helpers_generate import prompts, shallow_model
from helpers_models import tiny_head
from helpers_seq2seq import tiny_seq2seq
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import fastspec
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
    "rotary": lambda monkeypatch: replaced(monkeypatch, modeling_llama, "apply_rotary_pos_emb", lambda both: (both[0], both[1] * 1.3)),
    "Linear.forward": lambda monkeypatch: replaced(monkeypatch, nn.Linear, "forward", lambda out: out * 1.02),
    "Linear.__call__": lambda monkeypatch: replaced(monkeypatch, nn.Linear, "__call__", lambda out: out * 1.02),
    "Module.__call__": lambda monkeypatch: replaced(monkeypatch, nn.Module, "__call__", lambda out: out),
    "F.silu": lambda monkeypatch: replaced(monkeypatch, nn.functional, "silu", lambda out: out * 1.1),
    "Embedding.forward": lambda monkeypatch: replaced(monkeypatch, nn.Embedding, "forward", lambda out: out * 1.5),
}


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
    """A tree has a mask of its own: a user's, which may see less of a long text than of a short one, would be passed by."""
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
    """Transformers makes no mask for a name that it does not know, so that trees cannot be scored: the call is left to plain decoding."""
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
    assert model.generate(**prompts(9, 6), **OPTIONS).tolist() == want and fastspec.report(model).last.rounds and CALLED["louder"]


def test_every_function_of_a_modelling_file_that_plain_decoding_calls_is_called(monkeypatch):
    """One after another, each by a function that counts: what a plain call calls, an assisted call calls too."""
    functions = [name for name, value in vars(modeling_llama).items() if isinstance(value, FunctionType)]
    model = shallow_model()
    fastspec.patch(model)
    seen = []
    for name in functions:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replaced(patch, modeling_llama, name, lambda out: out)
            counts = []
            for assistant in (None, "nasd"):
                CALLED.clear()
                try:
                    model.generate(**prompts(9), max_new_tokens=3, do_sample=False, assistant=assistant)
                except fastspec.Unsupported as refused:
                    assert name in str(refused)
                counts.append(CALLED[name])
        assert bool(counts[0]) == bool(counts[1]) or "mask" in name, (name, counts)
        seen += [name] * bool(counts[0])
    assert {"apply_rotary_pos_emb", "create_causal_mask"} <= set(seen)


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
