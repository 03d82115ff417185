"""A pytest plugin that runs transformers' own generation tests on models patched with a default assistant; `run.py`
starts it.

Every model is patched at its first `generate` call, whoever makes it. A call that the assistant serves is made a second
time by plain decoding, with the same random numbers; where it is greedy and in fp32, all that the two return must
agree. One that is left to transformers because it asks for attentions, hidden states or no cache is made without these
too, and compared.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_head
from transformers import GenerationMixin, set_seed

import fastspec
from fastspec.patches.call.generate import generate as served
from fastspec.patches.hf.cache import CACHE, GIVEN, given_cache, kept_cache
from fastspec.patches.session import session_of

PLAIN = GenerationMixin.generate
SETTINGS: dict[str, Any] = {
    "unpatched": None,
    "autoregressive": "autoregressive",
    "nasd": "nasd",
    "eagle3": fastspec.Eagle3(depth=2, top_k=2, total_tokens=6),
    "early_exit": fastspec.Speculative(early_exit=1, gamma=2),
}
"""Name -> the default assistant of every model; eagle3 has a head of random weights."""
NOT_SERVED = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}
"""Arguments that an assistant cannot have, and the values that it can."""
TOLERANCE = 2e-5
"""Share of a tensor's largest value: sums of 32 to 97 products in fp32, taken in another order, in each of up to 40
products and norms on the way to a logit, of which each may move the last bits (6e-8) by a few."""
COUNTED = ("rounds", "emitted", "drafted", "accepted")
MARKERS = (
    "slow",
    "generate",
    "torch_compile_test",
    "torch_export_test",
    "accelerate_tests",
    "is_training_test",
    "is_tensor_parallel_test",
)


class Suite:
    """One run over one family: patches models, compares calls, counts, and writes what came of it."""

    def __init__(self, setting: str, out: Path, left_padding: bool) -> None:
        self.setting, self.out, self.left_padding = setting, out, left_padding
        self.models: list[Any] = []
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.unpatched: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def patch(self, model: Any) -> bool:
        """Patch a model, whose calls then go through `call`; False, counted, where fastspec refuses it."""
        head = tiny_head(model).to(model.device, model.dtype) if self.setting == "eagle3" else None
        try:
            fastspec.patch(model, eagle3=head, assistant=SETTINGS[self.setting])
        except fastspec.Unsupported as reason:
            self.unpatched[f"{type(model).__name__}: {reason}"] += 1
            return False
        model.__dict__["generate"] = types.MethodType(functools.partial(_call, self), model)
        self.models.append(model)
        return True

    def make(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> tuple[Any, bool]:
        """A call of a patched model, made twice where the assistant serves it -> its output, and whether it was
        served."""
        session, before, past = session_of(model), torch.get_rng_state(), copy.deepcopy(given_cache(kwargs))
        assert session is not None
        made = len(session.calls)
        output = served(model, *args, **kwargs)
        if len(session.calls) == made:
            return output, False
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        kwargs = (
            kwargs
            if past is None
            else {name: value for name, value in kwargs.items() if name not in GIVEN} | {CACHE: past}
        )
        plain = PLAIN(model, *args, **kwargs)
        torch.set_rng_state(after)
        settings = kwargs.get("generation_config") or model.generation_config
        sampled = kwargs.get("do_sample", getattr(settings, "do_sample", None))
        exact = not sampled and model.dtype == torch.float32
        _compare(output, plain, exact, kwargs.get("attention_mask"))
        self.counts[f"{kind}, {'equal' if exact else 'of equal shapes'}"] += 1
        return output, True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that come from GenerationTesterMixin."""
        mixin = importlib.import_module("tests.generation.test_utils").GenerationTesterMixin
        kept = [
            item
            for item in items
            if issubclass(getattr(item, "cls", None) or object, mixin) and hasattr(mixin, item.name)
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        if self.left_padding:
            _pad_on_the_left(importlib.import_module("tests.causal_lm_tester").CausalLMModelTester)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The same inputs, weights and random numbers in every run."""
        importlib.import_module("tests.test_modeling_common").global_rng.seed(item.name)
        set_seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.split("::", 1)[1]] = (
                report.outcome
            )  # a file may have several classes of the same tests
        if report.failed:
            self.errors[report.nodeid.split("::", 1)[1]] = str(getattr(report.longrepr, "reprcrash", report.longrepr))[
                :500
            ]

    def pytest_runtest_teardown(self) -> None:
        """Count what the test's models did, and let go of them."""
        for model in self.models:
            report = fastspec.report(model)
            self.counts["models"] += 1
            self.counts["assisted calls"] += len(report.calls)
            for name in COUNTED:
                self.counts[name] += sum(getattr(call, name) for call in report.calls)
            for reason, count in report.unassisted.items():
                self.left[re.sub(r"\d+", "N", reason)] += count
        self.models.clear()

    def pytest_sessionfinish(self) -> None:
        told = {"tests": self.outcomes, "errors": self.errors}
        counted = {
            "counts": dict(self.counts),
            "left to transformers": dict(self.left),
            "refused at patch": dict(self.unpatched),
        }
        self.out.write_text(json.dumps({**told, **({} if SETTINGS[self.setting] is None else counted)}, indent=1))


def _call(suite: Suite, model: Any, *args: Any, **kwargs: Any) -> Any:
    output, assisted = suite.make(model, args, kwargs, "as asked")
    asked = [name for name, accepted in NOT_SERVED.items() if kwargs.get(name, accepted) != accepted]
    if asked and not assisted and given_cache(kwargs) is None:
        session, state = session_of(model), torch.get_rng_state()
        assert session is not None
        left = session.unassisted.copy()
        suite.make(
            model,
            args,
            {name: value for name, value in kwargs.items() if name not in asked},
            "without what is not served",
        )
        session.unassisted = left
        torch.set_rng_state(state)
    return output


def _compare(ours: Any, plain: Any, exact: bool, mask: torch.Tensor | None) -> None:
    """Raise AssertionError where two outputs of `generate` differ: in tokens, scores, logits, or keys and values of
    what is no padding."""
    assert type(ours) is type(plain), f"fastspec returned {type(ours).__name__}, plain decoding {type(plain).__name__}"
    if isinstance(ours, torch.Tensor):
        return _same("sequences", [ours], [plain], exact)
    returned = [
        {part.name for part in dataclasses.fields(each) if getattr(each, part.name) is not None}
        for each in (ours, plain)
    ]
    assert returned[0] == returned[1], f"fastspec returned {sorted(returned[0])}, plain decoding {sorted(returned[1])}"
    for name in ("sequences", "scores", "logits"):
        held = [getattr(each, name) for each in (ours, plain)]
        _same(name, *([each] if isinstance(each, torch.Tensor) else each or [] for each in held), exact)
    past = [kept_cache(each) for each in (ours, plain)]
    if past[0] is not None:
        for part in ("keys", "values", "conv_states", "recurrent_states"):
            _same(f"{CACHE}.{part}", *([*_held(cache, part, mask)] for cache in past), exact)


def _held(cache: Any, part: str, mask: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """A part of every layer that has it: keys and values without padding, or the states of recurrent layers, several to
    a layer."""
    for layer in cache.layers:
        held = getattr(layer, part, None)
        if part in ("keys", "values"):
            yield from () if held is None else (held * _kept(mask, held),)
        elif held is not None:
            yield from held.values()


def _kept(mask: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Which slots of a cache [B, H, T, D] are no padding, [B, 1, T, 1]; the mask [b, t] is the prompt's."""
    kept = keys.new_ones(keys.shape[0], keys.shape[2])
    if mask is not None and mask.dim() == 2:
        kept[:, : mask.shape[1]] = mask.repeat_interleave(keys.shape[0] // mask.shape[0], 0)[:, : kept.shape[1]]
    return kept[:, None, :, None]


def _same(name: str, ours: Any, plain: Any, exact: bool) -> None:
    shapes = [[tuple(each.shape) for each in part] for part in (ours, plain)]
    assert shapes[0] == shapes[1], f"{name}: fastspec's have the shapes {shapes[0]}, plain decoding's {shapes[1]}"
    for step, (mine, its) in enumerate(zip(ours, plain, strict=True)) if exact else ():
        assert mine.dtype == its.dtype, f"{name}[{step}] is {mine.dtype}, plain decoding's {its.dtype}"
        size = its[its.isfinite()].abs().max().item()
        told = functools.partial("fastspec's {}[{}]: {}".format, name, step)
        torch.testing.assert_close(mine, its, rtol=0, atol=TOLERANCE * size if its.is_floating_point() else 0, msg=told)


def _pad_on_the_left(tester: Any) -> None:
    """Turn the masks of the tests' inputs round: padding on the right is nothing that `generate` takes from a user."""
    original = tester.prepare_config_and_inputs_for_common

    def prepare(self: Any) -> Any:
        config, inputs = original(self)
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
        return config, inputs

    tester.prepare_config_and_inputs_for_common = prepare


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--setting", choices=list(SETTINGS), default="unpatched")
    parser.addoption("--outcome", type=Path, required=True)
    parser.addoption("--left-padding", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of transformers")
    setting = config.getoption("--setting")
    suite = Suite(setting, config.getoption("--outcome").absolute(), config.getoption("--left-padding"))
    config.pluginmanager.register(suite)
    if SETTINGS[setting] is None:
        return

    @functools.wraps(PLAIN)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session_of(self) is None and suite.patch(self):
            return self.generate(*args, **kwargs)
        return PLAIN(self, *args, **kwargs)

    GenerationMixin.generate = generate
