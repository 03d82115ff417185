"""What plain `generate` calls of a model and an assisted call does not: each such method is listed, and an override of
it is refused."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import pytest
from helpers.generate import prompts, stats
from helpers.models import tiny_model

import fastspec
from fastspec import Unsupported
from fastspec.patches.call.refusals import _PASSED_BY

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
REASONED = {
    "forward": "an adapter runs the decoder's parts; an override puts the model into generic mode, where it is called",
    "__call__": "as forward: hooks on the model put it into generic mode",
    "_wrapped_call_impl": "as forward",
    "_call_impl": "as forward",
    "wrapper": "decorators of forward",
    "get_experts_implementation": "looked up by _optimize_model_for_decode",
    "_optimize_model_for_decode": "kernels of transformers for the length of its own loop: the backend has its own",
    "_valid_auto_compile_criteria": "whether transformers compiles its own loop's passes",
    "_get_deprecated_gen_repo": "looked up before a custom loop too, where it gives None at once",
    "_extract_generation_mode_kwargs": "called with a custom loop too",
    "_supports_default_dynamic_cache": "a question about the class",
}
"""Methods that plain decoding alone calls and whose override an assisted call honours otherwise, or which an override
cannot change."""


def called(model: Any, **options: Any) -> set[str]:
    """The names of the model's own methods that a call of `generate` enters."""
    seen: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_locals.get("self") is model:
            seen.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        model.generate(**prompts(5, 3), **OPTIONS, **options)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_fires_in_plain_calls_alone_is_listed(family):
    """With an adapter and in generic mode: whatever plain decoding calls and an assisted call does not is refused when
    overridden, or has its reason here."""
    model = fastspec.patch(tiny_model(family))
    model.generate(**prompts(5), **OPTIONS, assistant="nasd")  # the first one tries a model without an adapter
    missing = called(model) - called(model, assistant="nasd")
    assert missing <= {*_PASSED_BY, *REASONED}
    assert {"prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "_prefill"} <= missing
    assert ("forward" in missing) == (family == "llama")


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in _PASSED_BY
        for level in ("instance", "class")
        if (name, level) != ("_sample", "instance")
    ],
)  # plain decoding calls `_sample` of the class
def test_an_override_is_refused_or_left_to_plain_decoding(name, level):
    """On the instance, as PEFT's prompt tuning does, and in a class of the user's own."""
    model, fired = tiny_model(), []
    own = getattr(type(model), name)

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        fired.append(name)
        return own(self, *args, **kwargs)

    if level == "class":
        model.__class__ = type("Mine", (type(model),), {name: override})
    else:
        model.__dict__[name] = override.__get__(model)
    fastspec.patch(model, assistant="nasd")
    with pytest.raises(
        Unsupported, match=rf"{name} is [\w.]*test_model_hooks's .*: plain decoding goes by it at every step"
    ):
        model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    assert not fired
    with pytest.warns(UserWarning, match="the default assistant cannot serve"):
        out = model.generate(**prompts(5), **OPTIONS)
    assert fired and out.tolist() == tiny_model().generate(**prompts(5), **OPTIONS).tolist()


@pytest.mark.parametrize("home", [__name__, None], ids=str)  # that which exec makes has none
def test_a_forward_of_ones_own_is_called(home):
    """An override of forward, on the instance or in a class, has its say in every pass."""
    plain = tiny_model().generate(**prompts(5), **OPTIONS).tolist()
    for level in ("instance", "class"):
        model = tiny_model()
        own, passes = type(model).forward, []

        @wraps(own)  # patch reads its signature
        def forward(self: Any, *args: Any, own: Any = own, passes: list[int] = passes, **kwargs: Any) -> Any:
            passes.append(1)
            out = own(self, *args, **kwargs)
            out.logits = out.logits.roll(1, -1)
            return out

        forward.__module__ = home
        if level == "class":
            model.__class__ = type("Mine", (type(model),), {"forward": forward})
        else:
            model.__dict__["forward"] = forward.__get__(model)
        want = model.generate(**prompts(5), **OPTIONS).tolist()
        before = len(passes)
        got = fastspec.patch(model).generate(**prompts(5), **OPTIONS, assistant="nasd").tolist()
        assert got == want != plain and len(passes) > before and stats(model).assistant == "nasd"
