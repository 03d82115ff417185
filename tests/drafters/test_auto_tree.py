"""`total_tokens="auto"`: the choice by a table of costs, and what measuring leaves of a call: its tokens, its seed, one
size for all."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers.generate import MAKERS, SHALLOW, prompts, same, seer1, stats
from helpers.models import tiny_head, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec import Eagle2, Eagle3
from fastspec.config import AUTO_SIZES, BATCH_TREES, CPP_TREE, DEFAULT_TREES, sampled
from fastspec.errors import Unsupported
from fastspec.generation import layer_state
from fastspec.patches.assistants import registry as assistants
from fastspec.patches.assistants import tree_size
from fastspec.patches.assistants.tree_size import (
    MOST_POWER,
    PRIOR,
    TreeChoice,
    choose_size,
    expected_tokens,
    monotone,
    power_of,
)
from fastspec.patches.backends import TORCH
from fastspec.patches.call import assembly
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.session import session_of

torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
AUTO = Eagle3(depth=2, top_k=3, total_tokens="auto")  # 21 candidates: sizes 2, 4, 6, 8, 12, 16, 22 on the CPU


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    """How many rounds are measured proves nothing here: fewer than of a user's call."""
    monkeypatch.setattr(tree_size, "TIMED", 2)
    monkeypatch.setattr(tree_size, "COUNTED", 10)


@pytest.fixture(params=list(MAKERS))
def fresh(request):
    """(the unpatched model, the same model patched by a session of its own)."""
    target, head = MAKERS[request.param]
    model = target()
    return target(), fastspec.patch(model, eagle3=head(model))


@pytest.fixture
def random():
    """As `fresh`, of one kind, where it does not matter how good the drafts are."""
    model = MAKERS["random"][0]()
    return MAKERS["random"][0](), fastspec.patch(model, eagle3=MAKERS["random"][1](model))


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """The batch size of everything that was measured."""
    rows: list[int] = []

    def spy(fresh, ops, request, sizes):
        rows.append(request.prompts.shape[0])
        return tree_size.choose_tree(fresh, ops, request, sizes)

    monkeypatch.setattr(assembly, "choose_tree", spy)
    return rows


def test_the_choice_weighs_tokens_against_time():
    expected, verify = [1.5, 2.0, 2.5, 2.6], [5.0, 5.0, 7.0, 20.0]
    assert choose_size(expected, 1.0, verify) == 1  # 0.25, 0.333, 0.3125, 0.124
    assert choose_size(expected, 10.0, verify) == 2  # dear drafts pay for more nodes: 0.1, 0.133, 0.147, 0.087
    assert choose_size([1.0, 2.0, 4.0], 1.0, [1.0, 3.0, 7.0]) == 0  # equal rates: the smallest
    assert choose_size([3.0], 1.0, [2.0]) == 0


@given(st.lists(st.tuples(st.floats(1, 20), st.floats(0.01, 100)), min_size=1, max_size=9), st.floats(0.01, 100))
def test_no_size_promises_more_than_the_chosen_one(table, draft_ms):
    expected, verify = zip(*table, strict=True)
    rates = [tokens / (draft_ms + ms) for tokens, ms in table]
    best = choose_size(expected, draft_ms, verify)
    assert all(rate < rates[best] for rate in rates[:best]) and all(rate <= rates[best] for rate in rates)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_times_never_fall_with_size(times):
    forced = monotone(times)
    assert list(forced) == sorted(forced) and all(after <= before for before, after in zip(times, forced, strict=True))
    assert forced[-1] == times[-1] and set(forced) <= set(times) and monotone(sorted(times)) == tuple(sorted(times))
    assert monotone([31, 130, 40, 36, 37, 50, 48]) == (
        31,
        36,
        36,
        36,
        37,
        48,
        48,
    )  # a slow spell is cut off by what came after it


def test_expected_tokens_sum_the_probabilities_of_the_best_paths():
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.4], [1.0, 0.0, 0.0, 0.5]]).log()
    found = expected_tokens(scores, (2, 3, 5))
    assert torch.allclose(found, torch.tensor([[1.5, 1.9, 2.275], [2.0, 2.5, 2.5]]))


CHANCES = torch.tensor(
    [[0.5, 0.3, 0.1, 0.05, 0.04, 0.0], [0.9, 0.6, 0.2, 0.2, 0.1, 0.01], [0.02, 0.4, 0.2, 0.1, 0.05, 0.3]]
)


@pytest.mark.parametrize("nodes", [2, 4, 7])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 6, 9])
def test_confidences_are_raised_to_the_power_that_promises_what_came(nodes, accepted):
    power = power_of(CHANCES.log(), nodes, accepted)
    best = CHANCES.sort(1, descending=True).values[:, : nodes - 1].double()
    rounds, promised = len(best), float(best.sum())
    counted = float((best**power).sum()) * (1 + PRIOR / rounds)  # the prior's rounds promise what these do on average
    goal = accepted + PRIOR * promised / rounds
    if 1.001 / MOST_POWER < power < MOST_POWER / 1.001:
        assert counted == pytest.approx(goal, rel=1e-6)
    else:
        assert (counted > goal) == (power > 1)
    assert (power > 1) == (accepted < promised)


def test_a_power_of_a_head_that_is_right_is_one():
    chances = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.25, 0.25]])
    assert power_of(chances.log(), 4, 2) == pytest.approx(1.0)
    assert power_of(chances.log(), 4, 5) < 1 < power_of(chances.log(), 4, 1)


def test_sizes_stay_within_what_a_tree_can_hold():
    assert AUTO.sizes("cpu") == (2, 4, 6, 8, 12, 16, 22) and AUTO.sizes("cuda") == (8, 16, 22)
    assert AUTO.shape("cpu") == fastspec.TreeShape(total_tokens=22, depth=2, top_k=3)
    for device, default in DEFAULT_TREES.items():
        config = Eagle2(total_tokens="auto")
        assert (
            config.sizes(device) == AUTO_SIZES[device] and config.shape(device).total_tokens == AUTO_SIZES[device][-1]
        )
        assert (config.shape(device).depth, config.shape(device).top_k) == (default.depth, default.top_k)
        assert Eagle3().sizes(device) == (default.total_tokens,) and Eagle3().shape(device) == default
    assert Eagle3(depth=0, top_k=1, total_tokens="auto").sizes("cuda") == (2,)
    assert len({AUTO, Eagle3(depth=2, top_k=3, total_tokens="auto"), Eagle3(depth=2, top_k=3, total_tokens=22)}) == 2


def test_the_trees_of_the_cpp_kernels_are_those_of_an_eagle3_without_sizes():
    target, head = MAKERS["bigram"]
    model = target()
    patched, cpp = fastspec.patch(model, eagle3=head(model), eagle2=None), replace(TORCH, name="cpp")
    found = []
    for config in ("eagle3", Eagle3(total_tokens=6, depth=2, top_k=2), Eagle3(top_k=2)):
        decoding = assistants.resolve(config, session_of(patched).resources, patched)
        drafters = [
            decoding.drafter(rows=1, capacity=16, device=model.device, ops=ops, process=None) for ops in (TORCH, cpp)
        ]
        found.append([drafter.nodes for drafter in drafters])
    given = Eagle3(top_k=2).shape("cpu").total_tokens
    assert found == [[16, 8], [6, 6], [given, given]]


def test_a_large_batch_grows_smaller_trees_where_none_was_named(monkeypatch):
    small, less, large = fastspec.TreeShape(3, 1, 2), fastspec.TreeShape(4, 1, 2), fastspec.TreeShape(6, 2, 2)
    monkeypatch.setitem(DEFAULT_TREES, "cpu", large)
    monkeypatch.setitem(BATCH_TREES, "cpu", ((3, less), (8, small)))
    assert [Eagle3().shape("cpu", rows) for rows in (1, 2, 3, 7, 8, 100)] == [large, large, less, less, small, small]
    assert Eagle3().shape("cuda") == Eagle3().shape("cuda", BATCH_TREES["cuda"][0][0] - 1) == DEFAULT_TREES["cuda"]
    assert all(Eagle3().shape("cuda", rows) == shape for rows, shape in BATCH_TREES["cuda"])
    named = Eagle3(total_tokens=5, depth=2, top_k=2)
    assert named.shape("cpu", 8) == named.shape("cpu") and AUTO.shape("cpu", 8) == AUTO.shape("cpu")
    target, head = MAKERS["bigram"]
    model = target()
    plain, patched = target(), fastspec.patch(model, eagle3=head(model))
    for config, rows, nodes in ((Eagle3(), 2, 6), (Eagle3(), 3, 4), (Eagle3(), 8, 3), (named, 8, 5)):
        decoding = assistants.resolve(config, session_of(patched).resources, patched)
        drafter = decoding.drafter(rows=rows, capacity=16, device=model.device, ops=TORCH, process=None)
        assert drafter.nodes == nodes
    same((plain, patched), Eagle3(), prompts(*range(3, 11)))


def test_prompts_move_between_rows_that_grow_other_trees(monkeypatch):
    """An open batch widens and narrows through trees of three sizes, and a text goes on in each."""
    monkeypatch.setitem(DEFAULT_TREES, "cpu", fastspec.TreeShape(8, 3, 2))
    monkeypatch.setitem(BATCH_TREES, "cpu", ((2, fastspec.TreeShape(6, 2, 2)), (4, fastspec.TreeShape(3, 1, 1))))
    target, head = MAKERS["bigram"]
    model = target()
    plain, patched = target(), fastspec.patch(model, eagle3=head(model))
    ids = [torch.arange(6 + length, 6 + 2 * length)[None] for length in range(3, 10)]
    counts = [4 + 9 * (index % 3) for index in range(6)] + [90]
    with fastspec.continuous(patched, Eagle3(), rows=4) as batch:
        futures = [
            batch.submit(row, max_new_tokens=count, do_sample=False) for row, count in zip(ids, counts, strict=True)
        ]
        for row, count, future in zip(ids, counts, futures, strict=True):
            assert future.result(300).tolist() == plain.generate(row, max_new_tokens=count, do_sample=False).tolist()
        assert {width: rounds.engine.drafter.nodes for width, rounds in batch._widths.made.items() if width != 2} == {
            1: 8,
            4: 3,
        }


def test_a_call_that_samples_grows_shallower_trees_where_none_was_named(monkeypatch):
    """By its temperature, whatever processors stand beside; a greedy call and a tree with a size of the caller's are as
    they are."""
    monkeypatch.setitem(DEFAULT_TREES, "cpu", fastspec.TreeShape(12, 7, 2))
    target, head = MAKERS["bigram"]
    model = fastspec.patch(target(), eagle3=head(target()))
    depths, real = [], assistants.EagleDrafter
    monkeypatch.setattr(
        assistants,
        "EagleDrafter",
        lambda head, shape, **given: depths.append(shape.depth) or real(head, shape, **given),
    )
    ids, named = torch.arange(5, 12)[None], Eagle3(depth=6)
    for options in (
        {"do_sample": False},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "temperature": 0.9},
        {"do_sample": True, "temperature": 0.6},
        {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.2},
        {"do_sample": True, "repetition_penalty": 1.2},
        {"do_sample": True, "temperature": 0.8, "output_scores": True, "return_dict_in_generate": True},
        {"do_sample": True, "assistant": named},
    ):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **{"assistant": "eagle3", **options})
    assert depths == [7, 3, 3, 5, 5, 3, 3, 6]
    assert sampled(fastspec.TreeShape(12, 2, 3), 1.0) == fastspec.TreeShape(12, 2, 3)
    for shape in (*DEFAULT_TREES.values(), *(shape for _, shape in BATCH_TREES["cuda"]), CPP_TREE):
        assert all(sampled(shape, heat).total_tokens == shape.total_tokens for heat in (0.01, 0.79, 0.8, 1.0, 3.0))


@pytest.mark.parametrize("kind", [Eagle2, Eagle3])
@pytest.mark.parametrize("value", ["Auto", "", "60", "auto "])
def test_other_strings_are_refused(kind, value):
    with pytest.raises(Unsupported, match=f'{kind.__name__}: total_tokens={value!r}.*"auto"'):
        kind(total_tokens=value)


def test_the_size_is_chosen_once_for_each_batch_size(fresh, measured):
    model = fresh[1]
    for _ in range(2):
        same(fresh, AUTO, prompts(7))
    assert measured == [1]
    chosen = fastspec.report(model).trees[AUTO, 1]
    assert stats(model).drafted == stats(model).row_rounds * (chosen.chosen - 1)
    same(fresh, AUTO, prompts(9, 3, 1))
    same(fresh, AUTO, prompts(30, 2, 8), repetition_penalty=1.2)
    assert measured == [1, 3] and fastspec.report(model).trees[AUTO, 1] is chosen
    same(
        fresh, Eagle3(depth=1, top_k=3, total_tokens="auto"), prompts(7), max_new_tokens=1
    )  # a call that no round is left in
    assert measured == [1, 3, 1] and len(fastspec.report(model).trees) == 3
    assert len(fastspec.report(model).calls) == 5  # what is measured is no call


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("table", list(AUTO_SIZES))
def test_the_choice_is_that_of_its_table(device, table, monkeypatch):
    monkeypatch.setitem(AUTO_SIZES, device, AUTO_SIZES[table])
    target, head = MAKERS["bigram"]
    plain, model = target().to(device), target().to(device)
    fastspec.patch(model, eagle3=head(model).to(device))
    inputs = {name: tensor.to(device) for name, tensor in prompts(7, 4).items()}
    for _ in range(2):
        same((plain, model), AUTO, inputs)
    (choice,) = fastspec.report(model).trees.values()
    assert choice.sizes == AUTO.sizes(device) and choice.draft_ms > 0
    assert list(choice.verify_ms) == sorted(choice.verify_ms) and list(choice.expected) == sorted(choice.expected)
    most = [
        min(size, AUTO.depth + 2) + 1e-4 for size in choice.sizes
    ]  # a path and the bonus token; fp32 sums of probabilities
    assert choice.expected[0] > 1 and all(found <= bound for found, bound in zip(choice.expected, most, strict=True))
    assert choice.chosen == choice.sizes[choose_size(choice.expected, choice.draft_ms, choice.verify_ms)]


def test_confidences_are_those_of_the_drafts(monkeypatch):
    """A head that knows its target expects what it is given: with all verify times equal the largest tree wins."""
    target, head = MAKERS["bigram"]
    model = target()
    fastspec.patch(model, eagle3=head(model))
    monkeypatch.setattr(tree_size, "monotone", lambda times: (1.0,) * len(times))
    model.generate(**prompts(6), do_sample=False, max_new_tokens=12, assistant=AUTO)
    (choice,) = fastspec.report(model).trees.values()
    assert choice.chosen == choice.sizes[-1] and choice.expected[-1] > choice.expected[0] > 1


def test_a_draw_is_that_of_the_same_size_by_number(fresh):
    model, options = fresh[1], {"do_sample": True, "temperature": 1.2, "max_new_tokens": 20}
    emitted = []
    for assistant in (AUTO, AUTO, None):
        assistant = assistant or Eagle3(depth=2, top_k=3, total_tokens=fastspec.report(model).trees[AUTO, 2].chosen)
        torch.manual_seed(5)
        emitted.append(model.generate(**prompts(5, 8), **options, assistant=assistant).tolist())
    assert emitted[0] == emitted[1] == emitted[2]  # the call that measures draws no number more


def test_a_past_is_read_and_left_alone(fresh):
    plain, model = fresh
    inputs, options = (
        prompts(9),
        {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True, "eos_token_id": 1000},
    )
    first = [
        m.generate(**inputs, **options, **extra) for m, extra in ((plain, {}), (model, {"assistant": "autoregressive"}))
    ]
    ids = torch.cat((first[0].sequences, torch.tensor([[5, 40, 11]])), 1)
    turns = zip((plain, model), first, ({}, {"assistant": AUTO}), strict=True)
    emitted = [m.generate(ids, **{CACHE: kept_cache(out)}, **options, **extra).sequences for m, out, extra in turns]
    assert emitted[0].tolist() == emitted[1].tolist() and (AUTO, 1) in fastspec.report(model).trees


def test_rows_that_have_ended_do_not_count(monkeypatch):
    target, head = MAKERS["random"]
    model = target()
    fastspec.patch(model, eagle3=head(model))
    counted, taken = [], []
    monkeypatch.setattr(
        tree_size,
        "expected_tokens",
        lambda scores, sizes: counted.append(len(scores)) or expected_tokens(scores, sizes),
    )
    monkeypatch.setattr(
        tree_size,
        "power_of",
        lambda scores, nodes, accepted: taken.append(accepted) or power_of(scores, nodes, accepted),
    )
    options = {"do_sample": False, "assistant": AUTO}
    model.generate(**prompts(5, 8), **options, max_new_tokens=70, eos_token_id=1000)
    model.generate(**prompts(5, 8, 3), **options, max_new_tokens=2)
    model.generate(**prompts(5), **options, max_new_tokens=70, eos_token_id=list(range(97)))
    assert counted == [2 * tree_size.COUNTED, 3, 1]
    assert all(0 <= accepted <= 3 * rounds for accepted, rounds in zip(taken, counted, strict=True))


@pytest.mark.parametrize("kind", ["bigram", "random"])
def test_the_largest_tree_is_expected_to_give_what_it_gave(kind, monkeypatch):
    target, head = MAKERS[kind]
    model = target(num_hidden_layers=6)
    fastspec.patch(model, eagle3=head(model))
    taken = []
    monkeypatch.setattr(tree_size, "power_of", lambda *given: taken.append(given) or power_of(*given))
    model.generate(**prompts(6, 9, 4), do_sample=False, max_new_tokens=70, assistant=AUTO, eos_token_id=1000)
    ((scores, nodes, accepted),) = taken
    (choice,) = fastspec.report(model).trees.values()
    rounds, promised = len(scores), float(scores.exp().sum())  # the largest tree keeps every candidate
    assert (
        rounds == 3 * tree_size.COUNTED
        and nodes == choice.sizes[-1]
        and choice.power == power_of(scores, nodes, accepted) != 1.0
    )
    assert choice.expected[-1] - 1 == pytest.approx((accepted + PRIOR * promised / rounds) / (rounds + PRIOR), rel=1e-4)
    assert (accepted > rounds) == (kind == "bigram")  # one head knows its target, the other does not


def test_the_report_shows_the_table(random):
    same(random, AUTO, prompts(7))
    shown, choice = str(fastspec.report(random[1])), fastspec.report(random[1]).trees[AUTO, 1]
    assert f"{AUTO}, rows: 1" in shown and f"{choice.chosen} nodes chosen" in shown
    table = TreeChoice((2, 4), 1.0, (3.0, 3.5), (1.5, 2.25), 4)
    lines = str(table).split("\n")
    assert [line.split() for line in lines[2:]] == [
        ["2", "3.000", "1.500", "0.3750"],
        ["4", "3.500", "2.250", "0.5000", "<"],
    ]


def test_a_copy_measures_for_itself_and_unpatch_forgets(random, measured):
    model = random[1]
    same(random, AUTO, prompts(7))
    twin = copy.deepcopy(model)
    assert not fastspec.report(twin).trees and len(fastspec.report(model).trees) == 1
    same((random[0], twin), AUTO, prompts(7))
    assert measured == [1, 1]
    session = session_of(model)
    fastspec.unpatch(model)
    assert not session.trees


def test_another_dtype_is_another_machine(random, measured):
    model = random[1].double()
    call = {"do_sample": False, "max_new_tokens": 8, "assistant": AUTO}
    model.generate(**prompts(7), **call)
    model.float().generate(**prompts(7), **call)
    assert measured == [1, 1] and len(fastspec.report(model).trees) == 1 and len(session_of(model).trees) == 2


def test_an_eagle_2_head_has_its_own_choice(measured):
    target, _ = MAKERS["bigram"]
    model = target()
    fastspec.patch(model, eagle2=seer1(model))
    same((target(), model), Eagle2(depth=2, top_k=3, total_tokens="auto"), prompts(7, 3))
    assert measured == [2] and not math.isnan(sum(fastspec.report(model).trees[Eagle2(2, 3, "auto"), 2].expected))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text"])
def test_a_text_that_cannot_be_made_shorter_is_read_anew_for_every_size(kind, measured, monkeypatch):
    """Recurrent states, and windows whose rings go round: every size begins where the others began."""
    monkeypatch.setattr(layer_state, "STEP", 1)
    read: list[list[int]] = []
    original = tree_size._Trial.run

    def spy(trial, size, count):
        found = original(trial, size, count)
        again = tree_size._Trial(trial.fresh, trial.ops, trial.request)
        wanted = original(again, size, count)
        assert (
            torch.equal(found[1], wanted[1]) and found[2] == wanted[2]
        )  # the scores of all rounds, and what was accepted
        read.append(trial.lengths.tolist())
        return found

    monkeypatch.setattr(tree_size._Trial, "run", spy)
    target = tiny_model(kind, sliding_window=8, **SHALLOW) if kind == "gemma3_text" else tiny_model(kind, **SHALLOW)
    model = fastspec.patch(copy.deepcopy(target), eagle3=tiny_head(target))
    same((target, model), AUTO, prompts(7, 3), max_new_tokens=12)
    assert measured == [2] and read == [[7, 3]] * 7
