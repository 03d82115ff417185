"""What surrounds a captured graph, on the CPU: the pool, the keys, the halves of a round and the buffers that a graph
reads."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import ExitStack
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch
from helpers.captured import Stand
from helpers.generate import EAGLE1, MAKERS, TREE, answer, prompts, shallow_model, unpatched
from helpers.models import tiny_head, tiny_model
from helpers.tokenizers import DRAFT, TARGET

import fastspec
from fastspec.generation import sequence_state
from fastspec.generation.drafters import head_drafter as drafter
from fastspec.generation.drafters.base import Place
from fastspec.generation.drafters.nasd import NasdDrafter
from fastspec.generation.drafters.retokenized import SharedDrafter, TextDrafter
from fastspec.generation.engine import batching
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.schedule import GraphFromScore, GraphOfScore, WholeGraph
from fastspec.generation.verify import measure
from fastspec.patches.assistants.registry import Continued
from fastspec.patches.backends import TORCH
from fastspec.patches.call import processors as selection
from fastspec.patches.hf import model as hf_model
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.session import KEPT, session_of

OPTIONS = {
    "greedy": {},
    "history": {"repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 1},
    "waiting": {"do_sample": True, "top_k": 1, "eta_cutoff": 0.01},
}


SEPARATE = [fastspec.Speculative(), fastspec.Speculative(gamma=2), fastspec.Speculative(gamma=2, branches=2)]
"""With a draft model of its own; the first goes without drafts for some rounds where they are mostly wrong."""


def drafting(model: Any, kind: str) -> Any:
    """Patch a model with the head of its kind and a draft model that is right as often: seldom, or always."""
    draft = tiny_model(seed=3, num_hidden_layers=2) if kind == "random" else MAKERS[kind][0]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        return fastspec.patch(model, eagle3=MAKERS[kind][1](model), speculative=draft)


GREEDY = {"do_sample": False}
SHORT = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}


@cache
def told_plainly(kind: str, name: str) -> Any:
    """What the unpatched model says to a call of OPTIONS, and its scores; only read."""
    torch.manual_seed(0)
    return MAKERS[kind][0]().generate(**prompts(4, 9), **SHORT, **(GREEDY | OPTIONS[name]))


@pytest.mark.some("Eagle3", "autoregressive", "nasd", "Speculative(gamma=2, most=8, branches=2, early_exit=None)")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["random", "bigram"])
@pytest.mark.parametrize(
    "assistant", [TREE, "autoregressive", "nasd", fastspec.Speculative(early_exit=1), *SEPARATE], ids=str
)
def test_calls_of_every_kind_in_turn_give_what_they_give_alone(captures, kind, assistant):
    """Calls share what was captured; scores and tokens are those of the unpatched model, whatever call came before."""
    model, inputs = drafting(MAKERS[kind][0](), kind), prompts(4, 9)
    for name in ("greedy", "history", "greedy", "sampled", "waiting", "history", "sampled", "greedy", "waiting"):
        expected = told_plainly(kind, name)
        torch.manual_seed(0)
        got = model.generate(**inputs, **SHORT, **(GREEDY | OPTIONS[name]), assistant=assistant)
        assert got.sequences.tolist() == expected.sequences.tolist(), name
        for step, (a, b) in enumerate(zip(got.scores, expected.scores, strict=True)):
            live = (expected.sequences[:, inputs["input_ids"].shape[1] :][:, :step] != 5).all(1)
            torch.testing.assert_close(a[live], b[live], rtol=1e-3, atol=1e-3, msg=f"{name}, step {step}")
    assert fastspec.report(model).backend == "stand-in"
    session = session_of(model)
    assert 1 <= len(session.engines.held) <= 4
    fastspec.unpatch(model)
    assert not session.engines.held


@pytest.mark.some("bigram")
@pytest.mark.parametrize("kind", ["random", "bigram"])
def test_drafts_of_any_number_and_none_are_replayed(captures, kind):
    """Rounds of several lengths, without drafts, and those that try them again, whose draft model has a pause to read:
    few shapes in all, and the target's own text."""
    plain, model = unpatched(kind), drafting(MAKERS[kind][0](), kind)
    session = session_of(model)
    for seed in range(2):
        for extra in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 1}):
            options = {**prompts(9, 5, seed=seed), "max_new_tokens": 60, "eos_token_id": None}
            want = answer(plain, prompts(9, 5, seed=seed), max_new_tokens=60, eos_token_id=None, do_sample=False)
            assert model.generate(**options, **extra, assistant=fastspec.Speculative(most=3)).tolist() == want.tolist()
    held = list(session.engines.held.values())
    wide, fed = held[0].drafter.length.unread, {shapes[0][1] for shapes in held[0].drafter.passes.held.held}
    assert len(held) == 2 and wide > 8
    own = [each.schedules[each.main, Place.DEVICE] for each in held]
    assert [type(each) for each in own] == [
        GraphFromScore,
        GraphOfScore,
    ]  # drafts that were drawn are judged outside a graph
    assert set(own[0].graphs) == set(own[1].graphs) == {4}  # the longest path
    plain = [each.schedules.get((each.plain, Place.DEVICE)) for each in held]
    assert all((each is not None) == (kind == "random") for each in plain)
    assert kind != "random" or all(each.graph.graph for each in plain)  # rounds without drafts are replayed whole
    assert {2, wide} <= fed <= {1, 2, wide} if kind == "random" else {2} <= fed <= {1, 2}


@pytest.mark.some("True")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_model_of_another_tokenizer_is_kept(captures, sampled, monkeypatch):
    """From call to call, of any length, as long as its weights are where they were; it proposes what a new one
    would."""
    plain, model, draft = shallow_model(), shallow_model(), tiny_model(seed=3, vocab_size=93, num_hidden_layers=1)
    fastspec.patch(model, speculative=(draft, DRAFT, TARGET))
    distribution, emitted = {"do_sample": True, "temperature": 0.7, "top_k": 1} if sampled else {"do_sample": False}, {}
    kind, trees = SharedDrafter if sampled else TextDrafter, []
    propose = kind.propose
    monkeypatch.setattr(kind, "propose", lambda *given: trees.append(propose(*given)) or trees[-1])
    held = session_of(model).engines.held

    def call(length: int, new: int) -> list[Any]:
        options = {**prompts(length), "max_new_tokens": new, "eos_token_id": None}
        trees.clear()
        torch.manual_seed(length)
        got = model.generate(**options, **distribution, assistant=fastspec.Speculative(gamma=3))
        if (length, new) not in emitted:
            emitted[length, new] = plain.generate(**options, do_sample=False).tolist()
        assert got.tolist() == emitted[length, new]
        drafter = next(reversed(held.values())).drafter
        assert drafter.room == drafter.draft.state.limit == 2 * (length + new) + 5
        return [id(drafter), drafter, [tree.tokens.tolist() for tree in trees]]

    calls = ((9, 18), (5, 18), (40, 30), (9, 18))
    for moved in range(2):
        kept = [call(*lengths) for lengths in calls]
        assert len({each[0] for each in kept}) == 1 and len(held) == 1 + moved
        passes, chunks = kept[0][1].passes.held.held, kept[0][1].draft.chunks.held
        assert len(passes) == 1 and all(captured.replays > 10 for _, captured in passes.values()) and len(chunks) < 4
        for parameter in draft.parameters():
            parameter.data = parameter.data.clone()
    for lengths, (_, _, proposed) in zip(calls, kept, strict=True):
        session_of(model).engines.clear()
        assert call(*lengths)[2] == proposed and len(proposed) > 10


@pytest.mark.some("{}")
@pytest.mark.parametrize("options", [{}, {"top_k_filler": 1}], ids=str)
def test_a_captured_round_teaches_nasd_what_any_round_does(captures, monkeypatch, options):
    """What it counts comes with the round's own result, and `observe` is never asked."""
    told, observed = {}, []
    observe = NasdDrafter.observe
    monkeypatch.setattr(NasdDrafter, "observe", lambda *given: (observed.append(True), observe(*given)))
    for backend in ("stand-in", "torch"):
        model = MAKERS["bigram"][0]()
        if backend == "torch":
            monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: TORCH)
        fastspec.patch(model)
        assert fastspec.report(model).backend == backend
        storages = [fastspec.NgramStorage(3), fastspec.NgramStorage(3)]
        for inputs, storage in zip((prompts(9), prompts(5, 8)), storages, strict=True):
            for _ in range(2):
                model.generate(
                    **inputs, do_sample=False, max_new_tokens=30, assistant=fastspec.Nasd(storage=storage, **options)
                )
        assert bool(observed) == (backend == "torch")
        told[backend] = [
            (storage.edges.keys, [storage.tallies.entries(i) for i in range(len(storage.tallies))])
            for storage in storages
        ]
    assert told["stand-in"] == told["torch"]


def test_a_second_call_captures_nothing(captures):
    target, head = MAKERS["random"]
    model = target()
    fastspec.patch(model, eagle3=head(model))
    for expected in (1, 1, 1):
        model.generate(**prompts(5, 8), do_sample=False, max_new_tokens=20, assistant=TREE)
        assert len(session_of(model).engines.held) == expected
    last = fastspec.report(model).last
    assert last.replays == last.rounds > 3
    (engine,) = session_of(model).engines.held.values()
    assert engine.graph is engine.schedules[engine.main, Place.DEVICE].graph.graph is True  # the stand-in's


def test_packed_weights_are_views_and_are_undone(captures):
    model = MAKERS["random"][0]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ExitStack() as stack:
        stack.enter_context(fastspec.patched(model))
        attn, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        for group in ((attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert len({layer.weight.untyped_storage().data_ptr() for layer in group}) == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_that_were_moved_are_packed_again(captures):
    model = MAKERS["random"][0]()
    fastspec.patch(model)
    attn = model.model.layers[1].self_attn
    for parameter in model.parameters():  # as .to() does
        parameter.data = parameter.detach().clone()
    model.generate(**prompts(5), do_sample=False, max_new_tokens=3, assistant="autoregressive")
    assert attn.k_proj.weight.untyped_storage().data_ptr() == attn.q_proj.weight.untyped_storage().data_ptr()
    fastspec.unpatch(model)
    assert attn.k_proj.weight.untyped_storage().data_ptr() != attn.q_proj.weight.untyped_storage().data_ptr()


@pytest.mark.some("autoregressive", "Eagle3", "Speculative(gamma=2, most=8, branches=1, early_exit=None)")
@pytest.mark.parametrize(
    ("assistant", "kind"),
    [
        ("autoregressive", "random"),
        ("nasd", "random"),
        (TREE, "bigram"),
        (fastspec.Speculative(early_exit=1), "bigram"),
        (SEPARATE[1], "bigram"),
        *(
            pytest.param(each, "random", marks=pytest.mark.slow)
            for each in (TREE, fastspec.Speculative(early_exit=1), *SEPARATE)
        ),
        *(pytest.param(each, "bigram", marks=pytest.mark.slow) for each in ("nasd", SEPARATE[0], SEPARATE[2])),
    ],
    ids=str,
)
def test_an_answer_is_verified_by_captured_rounds(captures, kind, assistant):
    """Calls with an answer to verify, of any length and in turn with calls without, and what is measured of their
    tokens."""
    make, _ = MAKERS[kind]
    plain, model = unpatched(kind), drafting(make(), kind)
    for turn, lengths in enumerate(
        ((0, 7, 40), (40,), (7, 40))
    ):  # passes of every width are run, captured and replayed
        inputs, options = prompts(9, 5, seed=turn % 2), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
        want = answer(plain, inputs, **options)
        for kept in lengths:
            heard = []
            texts = [row[9 : 9 + kept].tolist() + [3] * 5 for row in want]
            out = model.generate(**inputs, **options, assistant=Continued(assistant, texts, heard.append, measure=True))
            assert out.tolist() == want.tolist() and min(heard[0].kept) >= min(kept, 40)
            for row, emitted in enumerate(heard[0].tokens):
                text = inputs["input_ids"][row, 9 - (9, 5)[row] :].tolist() + emitted
                logits = plain(torch.tensor([text])).logits[0, -len(emitted) - 1 : -1].detach()
                torch.testing.assert_close(
                    heard[0].measures[row], measure(logits, torch.tensor(emitted)), atol=1e-4, rtol=1e-4
                )
        assert model.generate(**inputs, **options, assistant=assistant).tolist() == want.tolist()


@pytest.mark.parametrize(("mode", "alpha"), [("lossless", "lossless"), ("token", 1.0)])
def test_a_cascade_s_rounds_are_kept_and_begin_anew(captures, mode, alpha):
    below = [tiny_model(seed=3, num_hidden_layers=2), tiny_model(seed=4, num_hidden_layers=3)][
        : 2 if mode == "lossless" else 1
    ]
    plain, model = shallow_model(), shallow_model()
    cascade = fastspec.Cascade(stages=below, mode=mode, rule="token_v2", alpha=alpha, gamma=3)
    fastspec.patch(model, cascade=cascade)
    for seed in range(3):
        options = {**prompts(9, 5, seed=seed), "max_new_tokens": 12, "do_sample": False}
        want = (plain if mode == "lossless" else below[0]).generate(**options)
        assert model.generate(**options, assistant="cascade").tolist() == want.tolist()
    assert len(session_of(model).engines.held) == 1  # the second and the third call took the first one's


@pytest.fixture
def launched(captures, monkeypatch):
    """Calls are asynchronous from the first round on; the launches of each call."""
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    counted: list[int] = []
    begin, launch = Engine.begin, WholeGraph.launch

    def begun(self, root):
        counted.append(0)
        begin(self, root)

    def launching(self, verifier):
        counted[-1] += 1
        return launch(self, verifier)

    monkeypatch.setattr(Engine, "begin", begun)
    monkeypatch.setattr(WholeGraph, "launch", launching)
    return counted


@pytest.mark.some("Eagle3")
@pytest.mark.parametrize(
    ("assistant", "kind"),
    [
        (TREE, "bigram"),
        ("autoregressive", "random"),
        pytest.param(TREE, "random", marks=pytest.mark.slow),
        pytest.param("autoregressive", "bigram", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_asynchronous_rounds_give_the_same_tokens(launched, monkeypatch, kind, assistant):
    """Rows that end at different places, by an end token, by length and by a criterion, with growing buffers; then a
    second turn."""
    monkeypatch.setattr(selection, "CRITERIA", (*selection.CRITERIA, FunctionType))
    make, head = MAKERS[kind]
    plain, model = unpatched(kind), make()
    fastspec.patch(model, eagle3=head(model))
    session, seen = session_of(model), 0
    for seed in range(4):
        inputs = prompts(9, 5, 7, seed=seed)
        free = answer(plain, inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
        ends = (
            [int(free[0, 9 + 11]), int(free[1, 9 + 17])] if seed % 3 else None
        )  # of rows 0 and 1, and whichever says them before
        options = {
            **inputs,
            "do_sample": False,
            "max_new_tokens": 30 + 40 * seed,
            "eos_token_id": ends,
            "pad_token_id": 0,
        }
        if seed % 3 == 2:
            options["stopping_criteria"] = [
                lambda ids, scores, **_: torch.tensor([row[9:].tolist().count(0) > 2 for row in ids])
            ]
        kept = {"return_dict_in_generate": True}
        want, got = plain.generate(**options, **kept), model.generate(**options, **kept, assistant=assistant)
        assert got.sequences.tolist() == want.sequences.tolist()
        last = fastspec.report(model).last
        assert all(not held.in_flight for held in session.engines.held.values())
        # not asynchronous: the first two of each size of the buffers, and those that may be the last by length
        assert last.rounds <= launched[-1] + 2 * 3 + 6
        assert launched[-1] <= last.rounds + 1
        seen += launched[-1]
        one = {name: value[:1, -9:] for name, value in inputs.items()}
        first = [
            m.generate(**one, do_sample=False, max_new_tokens=12, eos_token_id=ends, **kept, **extra)
            for m, extra in ((plain, {}), (model, {"assistant": assistant}))
        ]
        again = [
            m.generate(
                torch.cat((out.sequences, torch.tensor([[7, 8]])), 1),
                **{CACHE: kept_cache(out)},
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=ends,
                **extra,
            )
            for m, out, extra in zip((plain, model), first, ({}, {"assistant": assistant}), strict=True)
        ]
        assert again[0].tolist() == again[1].tolist()
    assert seen > 30


@pytest.mark.parametrize(
    "options", [{"output_scores": True}, {"output_logits": True}, {"repetition_penalty": 1.2}], ids=str
)
def test_calls_that_read_more_than_tokens_are_not_asynchronous(launched, options):
    model = MAKERS["random"][0]()
    fastspec.patch(model)
    for _ in range(2):
        more = {"return_dict_in_generate": True, **options}
        model.generate(**prompts(5), do_sample=False, max_new_tokens=15, assistant="autoregressive", **more)
    assert sum(launched) == 0
    with fastspec.profile(model) as profile:
        model.generate(**prompts(5), do_sample=False, max_new_tokens=15, assistant="autoregressive")
    assert sum(launched) == 0 and len(profile.rounds) == 14


def test_a_call_that_was_broken_off_leaves_no_round_behind(launched):
    plain, model = MAKERS["bigram"][0](), MAKERS["bigram"][0]()
    fastspec.patch(model, eagle3=MAKERS["bigram"][1](model))

    class Breaks:
        """A streamer that fails at its sixth call."""

        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls == 6:
                raise OSError("the pipe is closed")

        def end(self):
            """Nothing to flush."""

    options = {**prompts(6), "do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    want = plain.generate(**options).tolist()
    for _ in range(3):
        assert model.generate(**options, assistant=TREE).tolist() == want
        with pytest.raises(OSError, match="the pipe"):
            model.generate(**options, assistant=TREE, streamer=Breaks())
    assert launched[-1] > 0
    assert model.generate(**options, assistant=TREE).tolist() == want


def test_the_same_seed_gives_the_same_tokens_whether_rounds_are_asynchronous_or_not(captures, monkeypatch):
    """Within a call: a round that is launched in vain draws after all that is used."""
    model = MAKERS["random"][0]()
    fastspec.patch(model)
    emitted = []
    for after in (0, 10**9, 0):
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", after)
        torch.manual_seed(3)
        out = model.generate(
            **prompts(6, 4), do_sample=True, temperature=1.5, max_new_tokens=40, assistant="autoregressive"
        )
        emitted.append(out.tolist())
    assert emitted[0] == emitted[1] == emitted[2]


@pytest.fixture
def existing(captures, monkeypatch):
    """What holds buffers and exists, by class, while no garbage is collected: rounds, targets and drafts, drafters,
    keys and values, graphs. No more targets of rounds than the bound may exist."""
    kinds = Engine, hf_model.HFModel, drafter.HeadDrafter, sequence_state.SequenceState, Stand
    held = {kind: weakref.WeakSet() for kind in kinds}

    def watch(kind: Any) -> None:
        begin = kind.__init__

        def made(self, *args, **options):
            held[kind].add(self)
            begin(self, *args, **options)
            targets = {id(each.target) for each in held[Engine]}
            assert len(targets) <= KEPT, "dropped rounds are still there"

        monkeypatch.setattr(kind, "__init__", made)

    for kind in kinds:
        watch(kind)
    gc.collect()
    gc.disable()
    yield lambda: {kind.__name__: len(found) for kind, found in held.items() if found}
    gc.enable()


HOLDERS = {
    "autoregressive": "autoregressive",
    "nasd": "nasd",
    "eagle": "eagle",
    "eagle3": TREE,
    "early exit": fastspec.Speculative(early_exit=2),
    "draft model": fastspec.Speculative(gamma=3),
    "auto": pytest.param(fastspec.Eagle3(depth=4, top_k=3, total_tokens="auto"), marks=pytest.mark.slow),
}


@pytest.mark.some("nasd", "eagle3", "early exit", "draft model")
@pytest.mark.parametrize("assistant", HOLDERS.values(), ids=HOLDERS)
def test_rounds_that_are_dropped_are_freed_without_a_garbage_collection(existing, assistant):
    model = shallow_model()
    small = tiny_model(seed=3, num_hidden_layers=2)
    fastspec.patch(model, eagle=tiny_head(model, **EAGLE1), eagle3=tiny_head(model), speculative=small)
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    for rows in range(1, KEPT + 3):
        model.generate(**prompts(*[5] * rows), **options, assistant=assistant)
    held = session_of(model).engines.held
    assert len(held) == KEPT == existing()["Engine"] and existing()["SequenceState"] >= KEPT
    with fastspec.profile(model):
        model.generate(**prompts(5), **options, assistant=assistant)
    model.generate(**prompts(5), **options, assistant=assistant, repetition_penalty=1.2)
    model.generate(**prompts(5), **{**options, "do_sample": True}, assistant=assistant, eta_cutoff=0.01)
    model.generate(**prompts(5), **options, assistant=Continued(assistant, [[7, 8, 9]]))
    assert len(held) == KEPT
    fastspec.unpatch(model)
    assert existing() == {}
    gone = weakref.ref(model)
    del model
    assert gone() is None


@pytest.mark.parametrize("mode", ["token", "lossless"])
def test_a_cascade_s_rounds_are_freed_too(existing, mode):
    small, model = tiny_model(seed=3, num_hidden_layers=2), shallow_model()
    rule = {"rule": "token_v2", "alpha": 1.0} if mode == "token" else {}
    with fastspec.patched(model, cascade=fastspec.Cascade(stages=[small], mode=mode, gamma=3, **rule)):
        for rows in range(1, KEPT + 3):
            model.generate(**prompts(*[5] * rows), do_sample=False, max_new_tokens=6, assistant="cascade")
        assert existing()["Engine"] == KEPT
    assert existing() == {}
