"""Mistakes in a third party's drafter: each is named, and none becomes another text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import prompts, shallow_model
from torch import Tensor

import fastspec
from fastspec import Unsupported
from fastspec.generation.drafters.base import Traits
from fastspec.generation.tree import TokenTree

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    return fastspec.patch(shallow_model())


class Good:
    """A drafter of chains of three tokens, and its own decoding."""

    name, taps, nodes, max_path = "good", None, 3, 3

    def drafter(self, **_: Any) -> Any:
        return self

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        self.root = root

    def chain(self, *more: int) -> TokenTree:
        return TokenTree.chain(
            torch.cat((self.root[:, None], torch.tensor([more] * len(self.root), dtype=torch.long)), 1)
        )

    def propose(self, extent: int) -> Any:
        return self.chain(7, 8)

    def observe(self, tree: Any, verdict: Any, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        self.root = torch.where(active, verdict.bonus, self.root)


class Derived(fastspec.Drafter):
    """The same, derived."""

    nodes = max_path = 3
    begin, chain, propose, observe = Good.begin, Good.chain, Good.propose, Good.observe  # type: ignore[assignment]


class Decoding(fastspec.Decoding):
    """Makes what `made` says."""

    name, taps = "derived", None
    made: ClassVar[Any] = Derived

    def drafter(self, **_: Any) -> Any:
        return self.made()


def refused(model: Any, assistant: Any, why: str, *lengths: int) -> None:
    with pytest.raises(Unsupported, match=why):
        model.generate(**prompts(*lengths or (5,)), **OPTIONS, assistant=assistant)
    assert model.generate(**prompts(5), **OPTIONS, assistant="autoregressive").shape[1] == 17  # the next call is served


TREES: dict[str, tuple[Any, str]] = {
    "no tree": (lambda self, extent: None, r"Bad.propose gave a NoneType: fastspec.TokenTree.chain"),
    "tokens": (lambda self, extent: self.root[:, None], r"Bad.propose gave a Tensor"),
    "one row of two": (
        lambda self, extent: TokenTree.chain(self.root[:1, None]),
        r"tokens of shape \[1, 1\] for 2 rows: they are \[2, N\]",
    ),
    "another dtype": (
        lambda self, extent: TokenTree.chain(self.root[:, None].int()),
        "tokens in torch.int32 on cpu: they are torch.int64",
    ),
    "too many nodes": (
        lambda self, extent: self.chain(1, 2, 3),
        "of 4 nodes and up to 4 a path, and it says nodes=3 and max_path=3",
    ),
    "too long a path": (lambda self, extent: TokenTree.chain(self.root[:, None], 4), "1 nodes and up to 4 a path"),
    "another root": (
        lambda self, extent: TokenTree.chain(self.root[:, None] + 1),
        r"begins with token \d+ in row 0, where \d+ was emitted last",
    ),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("base", [Good, Derived])
@pytest.mark.parametrize(("propose", "why"), TREES.values(), ids=TREES)
def test_a_wrong_tree_is_named(monkeypatch, model, base, propose, why, captured):
    """The target would go on from another root, and score nodes that there is no room for."""
    if captured:
        stand_in(monkeypatch)
    bad = type("Bad", (base,), {"propose": propose})
    assistant = bad() if base is Good else type("Makes", (Decoding,), {"made": bad})()
    refused(model, assistant, why, 5, 3)


def test_rows_that_have_ended_may_begin_anywhere(model):
    """Nobody reads what they say."""

    class Forgetful(Good):
        def observe(
            self, tree: Any, verdict: Any, logits: Tensor, features: Tensor, active: Tensor, extent: int
        ) -> None:
            self.root = torch.where(active, verdict.bonus, 3)

    plain, inputs = shallow_model(), prompts(5, 3, 9)
    generated = plain.generate(**inputs, **OPTIONS)[:, 9:]
    options = {**OPTIONS, "eos_token_id": [int(generated[0, 1]), int(generated[1, 4])], "max_new_tokens": 20}
    assert (
        model.generate(**inputs, **options, assistant=Forgetful()).tolist()
        == plain.generate(**inputs, **options).tolist()
    )


NUMBERS = [("nodes", 0), ("nodes", True), ("nodes", "3"), ("max_path", 2.0), ("max_path", -1), ("max_path", None)]


@pytest.mark.parametrize("base", [Good, Derived])
@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_a_number_that_is_none_is_named(model, base, name, value):
    bad = type("Bad", (base,), {name: value})
    assistant = bad() if base is Good else type("Makes", (Decoding,), {"made": bad})()
    refused(model, assistant, rf"Bad is no drafter: it lacks {name} \(int, at least 1\)")


@pytest.mark.parametrize(("name", "args"), [("begin", "ids, counts"), ("propose", ""), ("observe", "tree, verdict")])
def test_a_method_of_other_arguments_is_named(model, name, args):
    space: dict[str, Any] = {}
    exec(f"def {name}(self{', ' if args else ''}{args}): ...", space)
    refused(
        model, type("Bad", (Good,), {name: space[name]})(), rf"Bad is no drafter: {name}\({args}\) is called with \("
    )


def test_a_decoding_of_other_arguments_is_named(model):
    class Bad(Good):
        def drafter(self, rows: int, capacity: int) -> Any:  # type: ignore[override]
            return self

    refused(model, Bad(), r"drafter\(rows, capacity\) is called with \(rows, capacity, device, ops, process\)")


def test_a_class_is_told_from_its_object(model):
    refused(model, Good, r"assistant=Good is a class: give an object of it, Good\(...\)")
    refused(model, fastspec.Eagle3, r"assistant=Eagle3 is a class: give an object of it, Eagle3\(...\)")


@pytest.mark.parametrize("base", [Good, Decoding])
@pytest.mark.parametrize("taps", ["all", (9,), (-1,), (1.5,), (True,), 2])
def test_taps_that_the_model_does_not_have_are_named(model, base, taps):
    refused(model, type("Bad", (base,), {"taps": taps})(), r"has taps=.*, from 0, the embeddings, to 3")


@pytest.mark.parametrize(("name", "why"), [("name", "Bad lacks `name`"), ("taps", "assistant 'bad' lacks `taps`")])
def test_what_a_derived_decoding_lacks_is_named(model, name, why):
    held = {"name": "bad", "taps": None, "drafter": Decoding.drafter, "made": Derived}
    del held[name]
    refused(model, type("Bad", (fastspec.Decoding,), held)(), why)


def test_a_derived_decoding_makes_drafters_of_three_methods(model):
    want = shallow_model().generate(**prompts(5, 3), **OPTIONS)
    assistant = type("Makes", (Decoding,), {"made": Good})()
    assert model.generate(**prompts(5, 3), **OPTIONS, assistant=assistant).tolist() == want.tolist()
    refused(model, type("Makes", (Decoding,), {"made": lambda self: 5})(), "int is no drafter: it lacks begin")


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"traits": None}, "Bad.traits=None must be"),
        ({"traits": Traits(reusable=True)}, r"Bad says .*, and lacks open\(capacity\)"),
    ],
)
def test_traits_that_are_none_or_lack_their_method_are_named(model, over, why):
    refused(model, type("Makes", (Decoding,), {"made": type("Bad", (Derived,), over)})(), why)


def with_q(drafter: Any) -> TokenTree:
    """Its chain of sevens and eights, which follow a distribution that has nothing else."""
    tree = drafter.chain(7, 8)
    return replace(tree, q=torch.nn.functional.one_hot(tree.tokens, shallow_model().config.vocab_size).float())


@pytest.mark.parametrize(
    ("base", "traits", "sampled", "refuses"),
    [
        (Good, None, False, True),
        (Good, None, True, False),
        (Derived, Traits(), True, True),
        (Derived, Traits(draws=True), True, False),
    ],
)
def test_distributions_that_no_trait_announces_are_named(model, base, traits, sampled, refuses):
    """Such drafts would be judged as if they were a function of the text: other tokens would be likely."""
    drafts = type(
        "Draws", (base,), {"propose": lambda self, extent: with_q(self), **({"traits": traits} if traits else {})}
    )
    assistant = type("Makes", (Decoding,), {"made": drafts})()
    options = OPTIONS | ({"do_sample": True, "top_k": 1} if sampled else {})
    if refuses:
        with pytest.raises(
            Unsupported, match=r"Draws.propose gave drafts with the distributions .* Traits\(draws=True\)"
        ):
            model.generate(**prompts(5, 3), **options, assistant=assistant)
        return
    want = shallow_model().generate(**prompts(5, 3), **OPTIONS)
    assert model.generate(**prompts(5, 3), **options, assistant=assistant).tolist() == want.tolist()


def test_a_continuous_decoding_whose_rows_cannot_begin_anew_is_named(model):
    assistant = type("Makes", (Decoding,), {"continuous": True})()
    refused(
        model,
        fastspec.ContinuousBatch(assistant, rows=1),
        r"'derived' says continuous = True, and its Derived lacks copy_row",
        5,
        3,
    )
