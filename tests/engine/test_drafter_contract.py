"""What a drafter must have, what it may have, and how what it is decides who launches its rounds."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import MAKERS, prompts, stats
from helpers.models import tiny_model
from torch import Tensor

import fastspec
from fastspec import Unsupported
from fastspec.generation.drafters.base import OPTIONAL, Drafter, HostDrafter, Place, Traits, adopt, adopt_decoding
from fastspec.generation.engine.round_program import RoundProgram
from fastspec.generation.engine.schedule import (
    Eager,
    FedGraph,
    FedTreeGraph,
    GraphFromScore,
    GraphOfScore,
    SplitGraph,
    WholeGraph,
    schedule_of,
)
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}


class Least:
    """The least that a drafter and its decoding can be: they derive from nothing."""

    name, taps, nodes, max_path = "least", None, 3, 3

    def drafter(self, **_: Any) -> Any:
        return self

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        self.root = root.clone()

    def propose(self, extent: int) -> TokenTree:
        return TokenTree.chain(torch.stack((self.root, self.root + 1, self.root + 2), 1) % 97)

    def observe(
        self, tree: TokenTree, verdict: Any, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        self.root = torch.where(active, verdict.bonus, self.root)


@pytest.mark.parametrize("captured", [False, True])
def test_three_methods_and_two_numbers_make_a_drafter(monkeypatch, captured):
    if captured:
        stand_in(monkeypatch)
    target, _ = MAKERS["random"]
    plain, model = target(), fastspec.patch(target())
    for seed in range(3):
        inputs = prompts(5, 3, seed=seed)
        want = plain.generate(**inputs, **OPTIONS)
        assert model.generate(**inputs, **OPTIONS, assistant=Least()).tolist() == want.tolist()
        assert stats(model).assistant == "least" and stats(model).drafted > 0


@pytest.mark.parametrize("name", ["begin", "propose", "observe", "nodes", "max_path"])
def test_what_a_drafter_lacks_is_named_when_it_is_given(name):
    kind = type("Half", (Least,), {name: None})
    model = fastspec.patch(MAKERS["random"][0]())
    with pytest.raises(Unsupported, match=rf"Half is no drafter: it lacks {name}"):
        model.generate(**prompts(5), **OPTIONS, assistant=kind())


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_only_a_derived_class_may_have_is_named_too(name):
    kind = type("More", (Least,), {name: True})
    with pytest.raises(Unsupported, match=rf"three methods, {name}: derive it from fastspec.Drafter"):
        adopt(kind(), may_draw=False)


def test_helpers_of_its_own_are_a_drafters_own_affair():
    """By any name that no drafter here has, which nobody but the drafter itself calls."""
    kind = type("Helped", (Least,), dict.fromkeys(("learn", "take", "join", "rest", "static", "look_up"), print))
    assert isinstance(adopt(kind(), may_draw=False), Drafter)


@pytest.mark.parametrize("name", ["joins", "reading", "continuous"])
def test_a_decoding_that_says_more_derives_from_decoding(name):
    with pytest.raises(Unsupported, match=f"'least' has {name}: derive it from fastspec.Decoding"):
        adopt_decoding(type("More", (Least,), {name: True})())
    assert adopt_decoding(object()) is None


def test_what_derives_is_taken_as_it_is():
    class Own(Drafter):
        nodes = max_path = 1
        begin = propose = observe = Least.observe

    own = Own()
    assert adopt(own, may_draw=True) is own and adopt(None, may_draw=True) is None
    assert (own.pause(), own.fits(9), own.reserve(9), own.buffers, own.traits) == (0, True, 9, None, Traits())
    for refused in (lambda: own.open(3), lambda: own.copy_row(0, own, 3)):
        with pytest.raises(NotImplementedError, match="Own"):
            refused()


class Digesting(HostDrafter):
    """Learns from the number of accepted drafts."""

    nodes = max_path = 2
    begin = propose = Least.propose

    def digest(self, tree: Any, verdict: Any, logits: Any, active: Any, steps: int) -> Tensor:
        return torch.full((1, 1), steps)

    def update(self, digest: list[list[int]], steps: int) -> None:
        self.seen = digest, steps


def test_a_host_drafter_observes_by_its_digest_of_what_was_accepted():
    drafter, verdict = Digesting(), SimpleNamespace(accepted=torch.tensor([0]))
    tree: Any = SimpleNamespace(max_path=2)
    drafter.observe(tree, verdict, torch.zeros(1), torch.zeros(1), torch.ones(1), 0)  # type: ignore[arg-type]
    assert drafter.seen == ([[1]], 1)


@pytest.mark.parametrize(
    ("captures", "drafts", "decides", "kind"),
    [
        (False, Place.DEVICE, Place.DEVICE, Eager),
        (False, Place.HOST, Place.HOST, Eager),
        (True, Place.DEVICE, Place.DEVICE, WholeGraph),
        (True, Place.DEVICE, Place.HOST, SplitGraph),
        (True, Place.HOST, Place.DEVICE, GraphFromScore),
        (True, Place.HOST, Place.HOST, GraphOfScore),
        (True, None, Place.DEVICE, WholeGraph),
        (True, None, Place.HOST, SplitGraph),
        (False, Place.DEVICE, Place.FED, Eager),
        (True, Place.DEVICE, Place.FED, FedTreeGraph),
        (True, Place.HOST, Place.FED, GraphOfScore),
        (True, None, Place.FED, FedGraph),
    ],
)
@pytest.mark.parametrize("draws", [False, True])
def test_the_places_of_the_phases_choose_the_schedule(captures, drafts, decides, kind, draws):
    """Where the host drafts, drafts that bring their distributions are judged outside the graph."""
    target: Any = SimpleNamespace(captures=captures)
    drafter: Any = None if drafts is None else SimpleNamespace(traits=Traits(drafts, draws=draws), max_path=2)
    kind = GraphOfScore if kind is GraphFromScore and draws else kind
    program = RoundProgram(target, drafter, TORCH, SimpleNamespace())  # type: ignore[arg-type]
    for walks in (True, False):  # where it does not, the host chooses in trees of drafts
        found = type(schedule_of(program, SimpleNamespace(place=decides, walks=walks)))  # type: ignore[arg-type]
        assert found is (SplitGraph if kind is FedTreeGraph and not walks else kind)


class Letters:
    """In the place of the example's tokenizer: a prompt that repeats itself, and tokens as numbers."""

    def apply_chat_template(self, turns: Any, **options: Any) -> dict[str, Tensor]:
        ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids: Tensor, **options: Any) -> str:
        return " ".join(map(str, ids.tolist()))


def test_the_example_of_an_assistant_of_ones_own_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastspec.models.load_smollm2", lambda: (tiny_model(), Letters()))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_assistant.py"))
    printed = capsys.readouterr().out
    assert "repeat: 1 call, " in printed and "identical: True" in printed
