"""Patching as a state machine: any order of patch, unpatch, copies, foreign writes and calls keeps every promise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.models import tiny_head, tiny_model
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fastspec
from fastspec.patches.session import STATE, session_of

PROMPT = torch.tensor([[7, 8, 9], [10, 11, 12]])
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TREE = fastspec.Eagle3(depth=1, top_k=2, total_tokens=4)


class Subject:
    """A model and what must be true of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.bare = self.attributes()
        self.weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        self.patched = self.overwritten = False
        self.theirs: Any = None  # a generate that someone else put there before the patch
        self.calls = 0

    def attributes(self) -> dict[str, dict[str, int]]:
        return {
            name: {key: id(value) for key, value in vars(module).items()} for name, module in self.model.named_modules()
        }

    def expected(self) -> torch.Tensor:
        return type(self.model).generate(self.model, PROMPT, **OPTIONS)


class Patching(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["llama", "gpt2"]))
    def start(self, kind: str) -> None:
        self.subjects = [Subject(tiny_model(kind, **SMALL))]

    def pick(self, index: int) -> Subject:
        return self.subjects[index % len(self.subjects)]

    @rule(index=st.integers(0, 2), with_head=st.booleans())
    def patch(self, index: int, with_head: bool) -> None:
        subject = self.pick(index)
        options = {"eagle3": tiny_head(subject.model, head_dim=8)} if with_head else {}
        if subject.patched:
            with pytest.raises(fastspec.PatchConflict, match="patched already"):
                fastspec.patch(subject.model, **options)
        else:
            fastspec.patch(subject.model, **options)
            subject.patched, subject.calls = True, 0

    @rule(index=st.integers(0, 2), force=st.booleans())
    def unpatch(self, index: int, force: bool) -> None:
        subject = self.pick(index)
        if not subject.patched:
            with pytest.raises(fastspec.PatchConflict, match="not patched"):
                fastspec.unpatch(subject.model, force=force)
        elif subject.overwritten and not force:
            with pytest.raises(fastspec.PatchConflict, match="someone else"):
                fastspec.unpatch(subject.model)
        elif subject.overwritten:
            left = vars(subject.model)["generate"]
            with pytest.warns(UserWarning, match="generate"):
                fastspec.unpatch(subject.model, force=True)
            assert vars(subject.model).pop("generate") is left
            if subject.theirs is not None:
                subject.model.generate = subject.theirs
            subject.patched = subject.overwritten = False
        else:
            fastspec.unpatch(subject.model, force=force)
            subject.patched = False

    @rule(index=st.integers(0, 2))
    def foreign_write(self, index: int) -> None:
        subject = self.pick(index)
        if subject.patched:
            inner = subject.model.generate
            subject.model.generate = lambda *args, **kwargs: inner(*args, **kwargs)
            subject.overwritten = True
        elif subject.theirs is None:
            model = subject.model
            subject.theirs = model.generate = lambda *args, **kwargs: type(model).generate(model, *args, **kwargs)
            subject.bare = subject.attributes()

    @precondition(lambda self: len(self.subjects) < 3)
    @rule(index=st.integers(0, 2))
    def deepcopy(self, index: int) -> None:
        original = self.pick(index)
        if original.overwritten or original.theirs is not None:
            return  # a closure of someone else's keeps the original inside
        twin = Subject(copy.deepcopy(original.model))
        twin.patched, twin.calls = original.patched, original.calls
        ours = (STATE, "generate", "generate_batch") if twin.patched else ()
        twin.bare[""] = {key: value for key, value in twin.bare[""].items() if key not in ours}
        with torch.no_grad():
            for parameter in twin.model.parameters():
                parameter.neg_()
        self.subjects.append(twin)

    @rule(index=st.integers(0, 2))
    def generate_plain(self, index: int) -> None:
        subject = self.pick(index)
        assert torch.equal(subject.model.generate(PROMPT, **OPTIONS), subject.expected())

    @rule(index=st.integers(0, 2), name=st.sampled_from(["eagle3", "autoregressive", "nasd"]))
    def generate_assisted(self, index: int, name: str) -> None:
        subject = self.pick(index)
        session = session_of(subject.model)
        if session is None:
            with pytest.raises(ValueError, match="assistant"):
                subject.model.generate(PROMPT, **OPTIONS, assistant=name)
        elif name == "eagle3" and "eagle3" not in session.resources:
            with pytest.raises(fastspec.Unsupported, match="no head"):
                subject.model.generate(PROMPT, **OPTIONS, assistant=name)
        else:
            assistant = TREE if name == "eagle3" else name
            assert torch.equal(subject.model.generate(PROMPT, **OPTIONS, assistant=assistant), subject.expected())
            subject.calls += 1

    @rule(index=st.integers(0, 2))
    def fail_inside(self, index: int) -> None:
        subject = self.pick(index)
        if subject.patched:

            def stop(*_: Any, **__: Any) -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                subject.model.generate(PROMPT, **OPTIONS, assistant="autoregressive", stopping_criteria=[stop])

    @invariant()
    def promises_hold(self) -> None:
        for subject in getattr(self, "subjects", ()):
            assert (session_of(subject.model) is not None) == subject.patched
            assert {
                name: parameter.data_ptr() for name, parameter in subject.model.named_parameters()
            } == subject.weights
            if subject.patched:
                assert len(fastspec.report(subject.model).calls) == subject.calls
            else:
                assert subject.attributes() == subject.bare


TestPatching = Patching.TestCase
TestPatching.settings = examples(25, stateful_step_count=15, database=None)
