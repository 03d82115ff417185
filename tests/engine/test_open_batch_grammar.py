"""Open batches whose rows are held to grammars of their own, or to none."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from helpers.captured import Fixed, Stand, stand_in, what_no_graph_served
from helpers.devices import ON_CUDA
from helpers.generate import TREE, seer
from helpers.grammars import END, SCHEMA, SIZE, TOKENIZER, terse
from helpers.open import alone, texts, told
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastspec
from fastspec.generation.constraint import Masks
from fastspec.generation.drafters import nasd
from fastspec.generation.drafters.ngram_rounds import TimedDrafts
from fastspec.generation.engine import engine
from fastspec.generation.engine.schedule import FedGraph, FedTreeGraph, Schedule, SplitGraph
from fastspec.patches.call.grammar import GrammarState

pytest.importorskip("llguidance")

FORMS: list[dict[str, Any]] = [{}, {"json_schema": SCHEMA}, {"regex": "[ab/]{9}c"}, {"choice": ["true", "12 a"]}]
HOW: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "typical_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.3},
]


def asked(number: int) -> dict[str, Any]:
    """Settings of one prompt: every form with every way to choose."""
    form, how = FORMS[number % 4], HOW[number // 4 % 4]
    held = {"logits_processor": [fastspec.Grammar(TOKENIZER, **form)]} if form else {}
    return {"max_new_tokens": 24, "eos_token_id": END, **held, **how}


def prompts_on(device: str) -> list[Tensor]:
    return [ids.to(device) for ids in texts(*range(3, 19))]


@cache
def one_by_one(device: str) -> list[list[int]]:
    """The answers to these prompts in a row of their own, without drafts."""
    with (
        fastspec.patched(terse().to(device)) as model,
        fastspec.continuous(model, "autoregressive", rows=1, max_length=64) as batch,
    ):
        return told([batch.submit(ids, seed=at, **asked(at)) for at, ids in enumerate(prompts_on(device))])


@pytest.mark.some("nasd", "cpu")  # captured rounds of the others in the next test
@pytest.mark.parametrize(
    ("assistant", "device"),
    [
        ("autoregressive", "captured"),
        ("nasd", "captured"),
        (TREE, "captured"),
        (TREE, "cpu"),
        *(pytest.param(each, "cpu", marks=pytest.mark.slow) for each in ("autoregressive", "nasd")),
        *(pytest.param(each, "cuda", marks=ON_CUDA) for each in ("autoregressive", "nasd", TREE)),
    ],
    ids=str,
)
def test_rows_with_and_without_grammars_answer_as_by_themselves(
    assistant: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ones as the unpatched model, sampled ones as their seed alone without drafts."""
    if device == "captured":
        stand_in(monkeypatch)
        device = "cpu"
    plain, model = terse().to(device), terse().to(device)
    prompts = prompts_on(device)
    with (
        fastspec.patched(model, eagle3=seer(model).to(device)),
        fastspec.continuous(model, assistant, rows=3, max_length=64) as batch,
    ):
        found = told([batch.submit(ids, seed=number, **asked(number)) for number, ids in enumerate(prompts)])
    assert found == one_by_one(device)
    for number, ids in enumerate(prompts):
        options = asked(number)
        if not options["do_sample"]:
            assert found[number] == alone(plain, ids, options.pop("max_new_tokens"), **options)


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_masks_of_greedy_rows_are_filled_together(assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a round without drafts, of which graphs hold all else; for each depth of a tree at the most, and never
    for all of its nodes."""
    stand_in(monkeypatch)
    plain, model, prompts = terse(), terse(), texts(5, 6, 7)
    fill, step, fills, rounds = Masks.fill, Schedule.step, list[int](), list[tuple[Schedule, int, int]]()

    def filled(masks: Masks, nodes: Any, size: int, held: Any, *more: Any) -> None:
        fills.append(len(held))
        assert {len(tokens) for tokens in nodes[0]} == {1}
        fill(masks, nodes, size, held, *more)

    def stepped(schedule: Schedule, *call: Any) -> Any:
        before = len(fills)
        done, emitted = step(schedule, *call)
        rounds.append((schedule, len(fills) - before, max(row[0] for row in emitted)))
        return done, emitted

    monkeypatch.setattr(Masks, "fill", filled)
    monkeypatch.setattr(Schedule, "step", stepped)
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {"eos_token_id": END, "do_sample": False, "logits_processor": [grammar]}
    with fastspec.patched(model, eagle3=seer(model)), fastspec.continuous(model, assistant, rows=3) as batch:
        found = told([batch.submit(ids, max_new_tokens=24, **options) for ids in prompts])
    assert found == [alone(plain, ids, 24, **options) for ids in prompts]
    assert len(rounds) > 8 and max(fills) > 1
    replays = list[int]()
    for schedule, count, accepted in rounds:
        assert count == 1 if assistant == "autoregressive" else count <= 1 + accepted
        assert type(schedule) is (FedGraph if assistant == "autoregressive" else FedTreeGraph)
        replays.append(schedule.back.replays)
    assert max(replays) > 3


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_constrained_rounds_behind_a_warm_up_find_everything_captured(
    assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    ran, model = what_no_graph_served(monkeypatch), terse()
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [grammar]}
    with fastspec.patched(model, eagle3=seer(model)), fastspec.continuous(model, assistant, rows=2) as batch:
        batch.warmup(length=60)
        ran.clear()
        for prompts in (texts(9, 3), texts(7), texts(4, 5, 6)):
            told([batch.submit(ids, **options) for ids in prompts])
    assert not ran


class Launches(TorchDispatchMode):
    """Counts what changes tensors and runs in no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.graphs = list[str](), 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.graphs or op.is_view or op.overloadpacket._qualified_op_name in UNLAUNCHED):
            self.found.append(op.overloadpacket._qualified_op_name)
        return op(*args, **(kwargs or {}))


UNLAUNCHED = ("aten::lift_fresh", "aten::detach", "aten::empty_like")


def test_rounds_of_trees_launch_graphs_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's copy of what graphs chose, once more for every node that is asked about, then the device's of what was
    corrected, and the host's of the tokens, where the round is asynchronous. Masks lie where they are made, on the
    CPU."""
    stand_in(monkeypatch)
    launches, call, step, fill = Launches(), Stand.__call__, FedTreeGraph.step, Masks.fill
    rounds, fills = list[tuple[int, int, list[str]]](), list[int]()

    def replayed(self: Stand, *given: Any) -> Any:
        launches.graphs += 1
        try:
            return call(self, *given)
        finally:
            launches.graphs -= 1

    def stepped(self: FedTreeGraph, *given: Any) -> Any:
        launches.found, before = [], len(fills)
        with launches:
            done = step(self, *given)
        rounds.append((self.back.replays, given[-1] + len(fills) - before, launches.found))
        return done

    def filled(masks: Masks, *given: Any) -> None:
        fills.append(1)
        fill(masks, *given)

    monkeypatch.setattr(Stand, "__call__", replayed)
    monkeypatch.setattr(FedTreeGraph, "step", stepped)
    monkeypatch.setattr(Masks, "fill", filled)
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {"do_sample": False, "eos_token_id": END, "logits_processor": [grammar], "max_new_tokens": 40}
    with fastspec.patched(model := terse(), eagle3=seer(model)), fastspec.continuous(model, TREE, rows=3) as batch:
        told([batch.submit(ids, **options) for ids in texts(5, 6, 7, 8, 4, 3)])
    settled = [(copies, found) for replays, copies, found in rounds if replays > 3]
    assert len(settled) > 10 and all(found == ["aten::copy_"] * (1 + copies) for copies, found in settled)


def test_a_row_without_drafts_takes_none_beside_those_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """All behind grammars, in rounds of one kind."""
    stand_in(monkeypatch)
    plain, model, prompts = terse(), terse(), texts(4, 5, 6)
    accepted = list[list[int]]()
    step = FedTreeGraph.step

    def stepped(self: FedTreeGraph, *given: Any) -> Any:
        done = step(self, *given)
        accepted.append([row[0] for row in done[1]])
        return done

    monkeypatch.setattr(FedTreeGraph, "step", stepped)
    grammar = fastspec.Grammar(TOKENIZER, regex="[a-f0-9]{40}")
    options = {"do_sample": False, "eos_token_id": END, "logits_processor": [grammar]}
    with fastspec.patched(model, eagle3=seer(model)), fastspec.continuous(model, TREE, rows=3) as batch:
        found = told(
            [batch.submit(ids, max_new_tokens=30, **options, drafts=at != 1) for at, ids in enumerate(prompts)]
        )
    assert found == [alone(plain, ids, 30, **options) for ids in prompts]
    assert max(row[0] for row in accepted) > 0 and not any(row[1] for row in accepted if len(row) == 3)


def test_rounds_of_trees_that_the_host_corrects_or_judges_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of drafting and scoring, beside rows without a grammar; replays read what was captured. Every node is asked
    about."""
    stand_in(monkeypatch, Fixed)
    monkeypatch.setattr(GrammarState, "allows", lambda *_: False)
    made, make = list[Schedule](), engine.schedule_of
    monkeypatch.setattr(engine, "schedule_of", lambda *given: made.append(make(*given)) or made[-1])
    grammar = fastspec.Grammar(TOKENIZER, regex=r"(.|\n)*")
    forms: list[dict[str, Any]] = [{}, {"logits_processor": [grammar]}, {"repetition_penalty": 1.3}]
    plain, prompts = terse(), texts(*range(3, 12))
    asked = [{"do_sample": False, "eos_token_id": END, **forms[at]} for at in (1, 1, 1, 0, 1, 2, 1, 2, 0)]
    with fastspec.patched(model := terse(), eagle3=seer(model)), fastspec.continuous(model, TREE, rows=3) as batch:
        found = told([batch.submit(ids, max_new_tokens=40, **how) for ids, how in zip(prompts, asked, strict=True)])
    assert found == [alone(plain, ids, 40, **how) for ids, how in zip(prompts, asked, strict=True)]
    corrected = [each for each in made if isinstance(each, FedTreeGraph) and each.back.replays > 3]
    judged = [each for each in made if isinstance(each, SplitGraph) and each.back.replays > 3]
    assert corrected and judged
    assert all(mine.front is theirs.front for mine in corrected for theirs in judged if mine.program is theirs.program)


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_trees_are_scored_before_the_host_has_read_the_round_in_front_of_them(
    assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows without a grammar, while prompts join and rows end, after which other graphs take over."""
    stand_in(monkeypatch)
    plain, model, begun = terse(), terse(), list[bool]()
    launch = FedGraph._launch
    monkeypatch.setattr(
        FedGraph, "_launch", lambda self, *call: begun.append(self.begun is not None) or launch(self, *call)
    )
    grammar = fastspec.Grammar(TOKENIZER, regex="[a-f0-9]{40}")
    held = {"eos_token_id": END, "do_sample": False, "logits_processor": [grammar]}
    free = {"eos_token_id": SIZE + 1, "do_sample": False}
    asked = [(40 - 3 * place, held if place % 3 else free) for place in range(9)]
    prompts = texts(*range(4, 13))
    with (
        fastspec.patched(model, eagle3=seer(model)),
        fastspec.continuous(model, assistant, rows=2, max_length=64) as batch,
    ):
        futures = [
            batch.submit(ids, max_new_tokens=count, **options)
            for ids, (count, options) in zip(prompts, asked, strict=True)
        ]
        found = told(futures)
    wanted = [alone(plain, ids, count, **how) for ids, (count, how) in zip(prompts, asked, strict=True)]
    assert found == wanted
    assert sum(begun) > (30 if assistant == "autoregressive" else 15) and not all(begun)


def test_what_a_grammar_raises_ends_its_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, prompts = terse(), terse(), texts(4, 5)
    grammar = fastspec.Grammar(TOKENIZER, regex="[ab]{40}")
    with fastspec.patched(model), fastspec.continuous(model, "nasd", rows=2, max_length=64) as batch:
        make = grammar.matcher

        def broken() -> Any:
            matcher = make()
            matcher.try_consume_tokens([SIZE + 5])  # from then on it is in an error
            return matcher

        monkeypatch.setattr(grammar, "matcher", broken)
        bad = batch.submit(prompts[0], max_new_tokens=9, logits_processor=[grammar])
        good = batch.submit(prompts[1], max_new_tokens=9, do_sample=False)
        with pytest.raises(fastspec.Unsupported, match="cannot be followed any further"):
            bad.result(30)
        assert told([good]) == [alone(plain, prompts[1], 9, eos_token_id=END)]


def test_n_grams_hear_whether_the_host_has_a_part_in_choosing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds beside a grammar have times of their own."""
    stand_in(monkeypatch)
    monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])
    heard, ran = list[bool](), TimedDrafts.ran

    def told_of(drafts: TimedDrafts, kind: int, hosted: bool, *gains: Any, **more: Any) -> None:
        heard.append(hosted)
        ran(drafts, kind, hosted, *gains, **more)

    monkeypatch.setattr(TimedDrafts, "ran", told_of)
    with (
        fastspec.patched(model := terse()),
        fastspec.continuous(model, "nasd", rows=1, max_length=64) as batch,
    ):
        for number, hosted in ((0, False), (1, True), (0, False)):
            heard.clear()
            batch.submit(texts(5)[0], **asked(number)).result(60)
            assert len(heard) > 1 and set(heard[1:]) == {hosted}  # the first may be the last answer's last


def test_n_grams_that_rest_beside_grammars_hear_of_many_rounds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until other prompts take rows; answers are those of plain decoding."""
    stand_in(monkeypatch)
    monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])
    monkeypatch.setattr(TimedDrafts, "pays", lambda self, going, following=False: 0.0)
    spans, catch_up = list[int](), nasd.NasdDrafter.catch_up

    def told_of(drafter: nasd.NasdDrafter, tokens: Any, counts: Any) -> None:
        spans.append(tokens.shape[1])
        catch_up(drafter, tokens, counts)

    monkeypatch.setattr(nasd.NasdDrafter, "catch_up", told_of)
    prompts, plain, held = texts(*range(3, 10)), terse(), {"regex": "[ab/]{30}"}

    def options() -> dict[str, Any]:
        grammar = fastspec.Grammar(TOKENIZER, **held)
        return {"do_sample": False, "eos_token_id": END, "logits_processor": [grammar]}

    with (
        fastspec.patched(model := terse()),
        fastspec.continuous(model, "nasd", rows=4, max_length=96) as batch,
    ):
        found = told([batch.submit(ids, max_new_tokens=40, **options()) for ids in prompts])
    assert found == [alone(plain, ids, 40, **options()) for ids in prompts]
    assert max(spans) > 4 and len(spans) < batch.stats.rounds / 2
