"""Trees of the device's own sizes, and of those that rounds choose (`total_tokens="auto"`): whatever is chosen, in
every round another size, tokens are plain decoding's, and the head reads what was emitted without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import Looked, stand_in
from helpers.gemma4 import bigram_gemma4, knowing
from helpers.generate import MAKERS, NEVER, SHALLOW, bigram, prompts, same, seer, seer1, stats, unpatched
from helpers.models import tiny_head, tiny_model
from helpers.mtp import loaded
from helpers.sizes import AUTO, ORDER, force_sizes

import fastspec
from fastspec import Eagle1, Eagle2, Eagle3, Mtp
from fastspec.default_trees import BATCH_TREES, CPP_TREE, DEFAULT_TREES, MOST_NODES, MOST_STEPS, TREE_STEPS, sampled
from fastspec.errors import Unsupported
from fastspec.generation import sequence_state
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.base import Drafter, RootsOnly
from fastspec.generation.drafters.dynamic_tree import trees_of
from fastspec.generation.drafters.head_drafter import RestingDrafter
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine.batching import ASYNCHRONOUS_AFTER
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.schedule import WholeGraph
from fastspec.patches.assistants import registry as assistants
from fastspec.patches.backends import TORCH
from fastspec.patches.call import assembly
from fastspec.patches.call.assembly import new_engine
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.session import session_of

torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores


@pytest.fixture
def forced(monkeypatch) -> Callable[..., list[tuple[int, list[int]]]]:
    """`force_sizes`, until the test is over."""
    return partial(force_sizes, monkeypatch)


@pytest.fixture(params=list(MAKERS))
def fresh(request):
    """(the unpatched model, the same model patched by a session of its own)."""
    target, head = MAKERS[request.param]
    model = target()
    return unpatched(request.param), fastspec.patch(model, eagle3=head(model))


@pytest.fixture
def knows():
    """As `fresh`, with a head that knows its target."""
    model = bigram()
    return unpatched("bigram"), fastspec.patch(model, eagle3=seer(model))


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
    assert named.shape("cpu", 8) == named.shape("cpu")
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
    monkeypatch.setattr(assembly, "_chooses_sizes", lambda plan: False)
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


def test_the_sizes_of_a_device_hold_its_own_tree_and_are_six_at_most_with_none():
    for kind, made in ((kind, made) for kind in TREE_STEPS for made in (Eagle3, Eagle2, Mtp)):
        for rows in (1, 2, 4, 7, 8, 9, 16, 31, 32, 64, 127, 128, 1000):
            steps, first = made(total_tokens="auto").steps(kind, rows)
            assert first == Eagle3().shape(kind, rows) and first in steps and 1 <= len(steps) <= MOST_STEPS
            nodes = [shape.total_tokens for shape in steps]
            assert nodes == sorted(set(nodes)) and max(nodes) * rows <= max(MOST_NODES[kind], rows * first.total_tokens)
            assert all(
                one.max_path <= other.max_path and one.depth * one.top_k <= other.depth * other.top_k
                for one, other in pairwise(steps)
            )
            assert made(total_tokens="auto").shape(kind, rows) == steps[-1]
    assert [shape.total_tokens for shape in Eagle3(total_tokens="auto").steps("cuda")[0]] == [2, 4, 8, 16, 60]
    assert [shape.total_tokens for shape in AUTO.steps("cpu")[0]] == [2, 4, 8, 16]
    assert AUTO.steps("cuda")[0][-1] == fastspec.TreeShape(22, 2, 3)  # all that it grows
    assert Eagle3(depth=0, top_k=1, total_tokens="auto").steps("cuda") == ((fastspec.TreeShape(2, 0, 1),),) * 1 + (
        fastspec.TreeShape(2, 0, 1),
    )


@dataclass(frozen=True)
class Asked:
    """What `sized` reads of a plan."""

    decoding: Any
    model: Any
    ops: Any
    processing: Any
    device: torch.device
    request: Request
    follows_load: bool


@pytest.mark.parametrize("config", [Eagle3(), Eagle2(), Mtp(draft_vocab="full"), Eagle3(fused=False)], ids=repr)
def test_a_devices_own_trees_have_sizes_that_pay_where_these_change_no_token_or_no_setting_holds_bits(config):
    def steps(
        config: Any,
        model: Any,
        exact: bool,
        kind: str = "cuda",
        temperature: float | None = None,
        rows: int = 1,
        follows_load: bool = False,
        **keeps: bool,
    ) -> Any:
        decoding: Any = assistants.EagleDecoding(**trees_of(config, kind)[0], head=None)
        how = SimpleNamespace(sample=temperature is not None, temperature=temperature)
        ids = torch.ones(rows, 3, dtype=torch.long)
        request = Request(ids, ids.sum(1), [], 8, frozenset(), None, **keeps)
        decided = assembly.sized(
            Asked(decoding, model, replace(TORCH, exact=exact), how, torch.device(kind), request, follows_load)
        ).decoding
        assert decided.chooses_fed == (follows_load and not exact and decided.steps is not None)
        return decided.steps

    dense, mixture, recurrent = map(tiny_model, ("llama", "qwen3_moe", "qwen3_5_text"))
    assert steps(config, dense, True) == steps(config, mixture, False, temperature=1.0) == (config, "cuda")
    assert steps(config, recurrent, False) == (config, "cuda")
    assert steps(config, dense, False, rows=8) is None and steps(config, mixture, False, "cpu") is None
    assert steps(config, dense, False, follows_load=True) == (config, "cuda")
    assert steps(config, dense, False, "cpu", follows_load=True) is None
    assert steps(config, dense, False, "cpu", rows=2) == (config, "cpu")
    assert steps(config, dense, False, "cpu", rows=2, keep_scores=True) is None
    assert steps(config, copy.deepcopy(dense).half(), False, "cpu", rows=2) is None
    for given in ({"total_tokens": 60}, {"depth": 3}, {"top_k": 4}):
        assert steps(replace(config, **given), dense, True) is None
    assert steps(Eagle3(fused=True), mixture, True) is None


def test_one_launch_drafts_one_size():
    with pytest.raises(Unsupported, match="fused=True drafts trees of one size"):
        Eagle3(total_tokens="auto", fused=True)


@pytest.mark.some("random-lengths0-False-1", "bigram")
@pytest.mark.each_value  # each of these has a say in another part of a round
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("lengths", [(7,), (9, 3, 1)])
def test_another_size_in_every_round_changes_no_token(fresh_maker, forced, monkeypatch, rounds, captured, lengths):
    if captured:
        stand_in(monkeypatch)
    pair = fresh_maker()
    taken = forced(rounds=rounds)
    for _ in range(3):  # in the third all is captured
        same(pair, AUTO, prompts(*lengths), max_new_tokens=60, eos_token_id=NEVER)
    assert {size for size, _ in taken} >= ({0, 1, 2, 3, 4} if rounds < 5 else {0, 1, 4})
    assert all(not any(accepted) for size, accepted in taken if not size)


@pytest.fixture(params=list(MAKERS))
def fresh_maker(request):
    """Makes what `fresh` is, after a backend was exchanged."""
    target, head = MAKERS[request.param]

    def make() -> tuple[Any, Any]:
        model = target()
        return unpatched(request.param), fastspec.patch(model, eagle3=head(model))

    return make


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("rounds", [1, 3, 12])
def test_another_size_in_every_round_on_a_gpu(forced, monkeypatch, kind, rounds):
    """Captured, and with a round in flight: in calls, batches and an open batch, whose drafts a good head has right."""
    target, head = MAKERS[kind]
    plain, model = target().cuda(), target().cuda()
    fastspec.patch(model, eagle3=head(model).cuda())
    monkeypatch.setattr(RootsOnly, "backlog", 20)  # which a head reads while a round is in flight
    taken = forced(rounds=rounds)
    for lengths in ((7,), (9, 3, 1)):
        inputs = {name: ids.cuda() for name, ids in prompts(*lengths).items()}
        for _ in range(3):
            same((plain, model), AUTO, inputs, max_new_tokens=300, eos_token_id=NEVER)
    with fastspec.continuous(model, AUTO, rows=3) as batch:
        ids = [torch.arange(6, 46 + length, device="cuda")[None] for length in range(3, 10)]
        futures = [batch.submit(row, max_new_tokens=80, do_sample=False, eos_token_id=NEVER) for row in ids]
        for row, future in zip(ids, futures, strict=True):
            wanted = plain.generate(row, max_new_tokens=80, do_sample=False, eos_token_id=NEVER)
            assert future.result(300).tolist() == wanted.tolist()
    assert {size for size, _ in taken} >= {0, 1, 2, 3, 4}
    drafted = [drafts for size, accepted in taken for drafts in accepted if size >= 4]
    assert kind == "random" or sum(drafted) > 2 * len(drafted)


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_a_head_reads_what_was_emitted_without_it(forced, monkeypatch, captured):
    """All drafts of a head that knows its target are accepted, however many rounds went without them: also where more
    did than it keeps features of, and in rows that end."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 7)
    model = bigram()
    pair = unpatched("bigram"), fastspec.patch(model, eagle3=seer(model))
    for order in ((4, *(0,) * 20), (0, 1), (0, 0, 0, 0, 0, 0, 0, 4, 4)):
        with pytest.MonkeyPatch.context():
            taken = forced(order)
            for _ in range(2):
                same(pair, Eagle3(total_tokens="auto"), prompts(9, 3, 1), max_new_tokens=90)
            drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
            assert not drafted or sum(drafted) > 3.2 * len(drafted)


@pytest.mark.some("lengths1")
@pytest.mark.parametrize("lengths", [(9,), (9, 3, 1)])
def test_a_head_reads_it_while_rounds_go_on(forced, monkeypatch, lengths):
    """No round waits for it: the next one is in flight. What a call ends with nobody reads."""
    stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 7)
    read: list[tuple[int, bool]] = []
    hand_over, engines = RestingDrafter.hand_over, []
    monkeypatch.setattr(assembly, "new_engine", lambda plan: engines.append(new_engine(plan)) or engines[-1])

    def watched(self: RestingDrafter, rounds: int) -> None:
        read.append((rounds, engines[-1].in_flight))
        assert self.counts.max() == rounds
        hand_over(self, rounds)

    monkeypatch.setattr(RestingDrafter, "hand_over", watched)
    model = bigram()
    pair = unpatched("bigram"), fastspec.patch(model, eagle3=seer(model))
    for order in ((0, 0, 0, 4), (0,)):
        taken = forced(order, 13)
        for _ in range(3):
            read.clear()
            same(pair, Eagle3(total_tokens="auto"), prompts(*lengths), max_new_tokens=150, eos_token_id=NEVER)
        drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
        assert not drafted or sum(drafted) > 3.2 * len(drafted)
        flying = [rounds for rounds, in_flight in read if in_flight]
        assert len(flying) > 3 and len(read) - len(flying) < 2 and max(rounds for rounds, _ in read) in (6, 7)
        assert sum(rounds for rounds, _ in read) < 150 - (order == (0,))


def test_a_round_in_which_a_reading_is_captured_says_nothing_of_times(forced, monkeypatch):
    stand_in(monkeypatch)
    counted: list[float | None] = []
    reading: list[int] = []
    hand_over = RestingDrafter.hand_over

    def captures(self: RestingDrafter, rounds: int) -> None:
        reading.append(rounds)
        SPENT.captures += 1.0
        hand_over(self, rounds)

    monkeypatch.setattr(RestingDrafter, "hand_over", captures)
    model = bigram()
    patched = fastspec.patch(model, eagle3=seer(model))
    forced((0, 0, 0, 4))
    count = TreeSizes.count

    def watched(self: TreeSizes, size: int, accepted: list[int], ms: float | None, *more: Any, **others: Any) -> None:
        (counted if reading else []).append(ms)
        reading.clear()
        count(self, size, accepted, ms, *more, **others)

    monkeypatch.setattr(TreeSizes, "count", watched)
    patched.generate(**prompts(9), assistant=Eagle3(total_tokens="auto"), max_new_tokens=60, eos_token_id=NEVER)
    assert counted and not any(counted)


@pytest.mark.parametrize("captured", [False, True])
def test_captured_rounds_are_led_by_launches_after_other_work(forced, monkeypatch, captured):
    """Once where a call begins and after each reading, before the next round."""
    events: list[str] = []

    def tree_input(tokens: torch.Tensor, depths: torch.Tensor, lengths: torch.Tensor, last: int, table: Any) -> Any:
        if last == 0:
            assert tokens.shape == (2, 1) and table is None
            events.append("lead")
        return TORCH.tree_input(tokens, depths, lengths, last, table)

    stand_in(monkeypatch, captures=captured, tree_input=tree_input)
    hand_over, step = RestingDrafter.hand_over, Engine.step
    monkeypatch.setattr(RestingDrafter, "hand_over", lambda self, n: events.append("read") or hand_over(self, n))
    monkeypatch.setattr(Engine, "step", lambda self, *given: events.append("round") or step(self, *given))
    model = bigram()
    fastspec.patch(model, eagle3=seer(model))
    for assistant in ("autoregressive", Eagle3(total_tokens="auto")):
        forced((0, 0, 4), 5)
        for _ in range(3):
            events.clear()
            model.generate(**prompts(9, 3), assistant=assistant, do_sample=False, max_new_tokens=60, eos_token_id=NEVER)
        led = [first for first, second in pairwise(events) if second == "lead" != first]
        assert events.count("lead") == 2 * len(led)
        assert set(led) <= {"round", "read"} and led.count("read") == captured * events.count("read")
        assert len(led) - led.count("read") == captured == (events[:2] == ["round", "lead"])
        assert ("read" in events) == (assistant != "autoregressive")


class Counted(list[int]):
    """Rounds that the device had counted after each round, in how many of which one was in flight."""

    flying = 0


@pytest.fixture
def counted(monkeypatch) -> Counted:
    """Let every round with chosen sizes check that the device counts as many rounds without drafts as the host, with
    the one in flight: in every row that goes on, those since its prompt joined."""
    found = Counted()
    step, admit, hand_over = Engine._sized_step, Engine.admit, RestingDrafter.hand_over

    def stepped(self: Engine[Any], *given: Any) -> Any:
        emitted = step(self, *given)
        assert isinstance(self.resting, RestingDrafter)
        flying = self.in_flight and not self.size
        found.flying += flying
        for row, (count, goes_on) in enumerate(zip(self.resting.counts.tolist(), self.state.running, strict=True)):
            wanted = self.kept[row] + flying
            assert count == wanted if goes_on else count <= wanted + 1, "one may have been in flight when it ended"
        found.append(max(self.kept) + flying)
        return emitted

    def admitted(self: Engine[Any], row: int, *given: Any) -> None:
        assert not self.in_flight and isinstance(self.resting, RestingDrafter)
        admit(self, row, *given)
        assert self.kept[row] == self.resting.counts[row] == 0

    def handed(self: RestingDrafter, rounds: int) -> None:
        assert self.counts.max() <= rounds + 1 <= self.backlog + 1
        hand_over(self, rounds)

    monkeypatch.setattr(Engine, "_sized_step", stepped)
    monkeypatch.setattr(Engine, "admit", admitted)
    monkeypatch.setattr(RestingDrafter, "hand_over", handed)
    return found


@pytest.mark.some("(9, 3, 1)")
@pytest.mark.parametrize("lengths", [(9,), (9, 3, 1)], ids=str)
def test_the_device_counts_the_rounds_that_the_host_counts(forced, counted, monkeypatch, lengths):
    """In calls of all lengths on engines that are kept, which end by length or by an end token with a round in flight,
    and in the middle of which graphs are captured, and captured anew in larger buffers."""
    stand_in(monkeypatch, Looked)
    monkeypatch.setattr(RootsOnly, "backlog", 21)
    monkeypatch.setattr(sequence_state, "FIRST_SLOTS", 64)
    model = bigram()
    pair = unpatched("bigram"), fastspec.patch(model, eagle3=seer(model))
    for order, rounds in (((0, 0, 0, 0, 4), 7), ((0, 1, 0, 2), 3)):
        forced(order, rounds)
        for count, end in ((100, NEVER), (1, NEVER), (2, NEVER), (60, 9), (100, NEVER)):
            same(pair, Eagle3(total_tokens="auto"), prompts(*lengths), max_new_tokens=count, eos_token_id=end)
    assert max(counted) in (20, 21) and counted.flying > 20


def test_it_does_where_prompts_come_and_go(forced, counted, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 21)
    forced((0, 0, 0, 0, 4), 7)
    model = bigram()
    plain, patched = bigram(), fastspec.patch(model, eagle3=seer(model))
    inputs, options = prompts(9, 3, 7, 5, 8, 4, 6), {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    expected = plain.generate(**inputs, **options, eos_token_id=9)
    joined = fastspec.ContinuousBatch(Eagle3(total_tokens="auto"), rows=2)
    for _ in range(2):
        assert patched.generate(**inputs, **options, eos_token_id=9, assistant=joined).tolist() == expected.tolist()
    ids = [torch.arange(6, 46 + length)[None] for length in range(3, 10)]
    options["eos_token_id"] = NEVER
    with fastspec.continuous(patched, Eagle3(total_tokens="auto"), rows=4) as batch:
        counts = [4 + 9 * (index % 3) for index in range(6)] + [100]
        futures = [
            batch.submit(row, **{**options, "max_new_tokens": count}) for row, count in zip(ids, counts, strict=True)
        ]
        for row, count, future in zip(ids, counts, futures, strict=True):
            wanted = plain.generate(row, **{**options, "max_new_tokens": count})
            assert future.result(300).tolist() == wanted.tolist()
    assert max(counted) in (20, 21) and counted.flying > 20


class Pausing(Drafter):
    """A decoding, and its drafter of chains of five, which never drafts."""

    name, taps, nodes, max_path = "pausing", None, 5, 5

    def drafter(self, **call: Any) -> Drafter:
        return self

    def pause(self) -> int:
        return 1000

    def begin(self, *given: Any) -> None:
        """Nothing."""

    def propose(self, extent: int) -> Any:
        raise AssertionError("it pauses")

    def observe(self, *given: Any) -> None:
        raise AssertionError("it pauses")


def test_a_call_without_drafts_waits_for_as_few_rounds_as_plain_decoding(forced, monkeypatch):
    """To the end of its answers: the next round emits one token, however large the largest tree is."""
    stand_in(monkeypatch)
    forced((0,), 1000)
    model, launched, found = bigram(), list[bool](), list[int]()
    fastspec.patch(model, eagle3=seer(model))
    launch = WholeGraph.launch
    monkeypatch.setattr(WholeGraph, "launch", lambda self, *given: launched.append(True) or launch(self, *given))
    for assistant in ("autoregressive", Eagle3(total_tokens="auto"), Pausing()):
        for _ in range(3):  # in the third all is captured
            launched.clear()
            same((unpatched("bigram"), model), assistant, prompts(7, 3), max_new_tokens=50, eos_token_id=NEVER)
        found.append(len(launched))
    assert found == [49 - ASYNCHRONOUS_AFTER] * 3


@pytest.mark.some("False")
@pytest.mark.parametrize("captured", [False, True])
def test_a_head_s_cache_is_that_of_rounds_that_all_draft(forced, monkeypatch, captured):
    """Keys and values of every pair, and the states that it drafts from, row by row."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 9)
    monkeypatch.setattr(Engine, "forget", Engine.settle)  # a call ends without what nobody drafts after
    made: list[Any] = []
    monkeypatch.setattr(assembly, "new_engine", lambda plan: made.append(new_engine(plan)) or made[-1])
    for order in ((4,), (4, *(0,) * 20), ORDER):
        forced(order)
        model = MAKERS["random"][0]()
        fastspec.patch(model, eagle3=tiny_head(model), backend="auto" if captured else "torch")
        options = {"do_sample": False, "max_new_tokens": 50, "eos_token_id": NEVER, "pad_token_id": 0}
        model.generate(**prompts(9, 3, 5), **options, assistant=Eagle3(total_tokens="auto"))
    expected = made[0].drafter
    for drafter in (engine.drafter for engine in made[1:]):
        for row, (mine, theirs) in enumerate(
            zip(drafter.state.lengths.tolist(), expected.state.lengths.tolist(), strict=True)
        ):
            assert min(mine, theirs) >= prompts(9, 3, 5)["attention_mask"][row].sum() + 45
            for one, other in (
                (drafter.attention.k, expected.attention.k),
                (drafter.attention.v, expected.attention.v),
            ):
                pairs = [each[0][row, :, : min(mine, theirs)] for each in (one, other)]
                assert torch.allclose(*pairs, atol=1e-4, rtol=1e-4)


@pytest.mark.some("bigram")
@pytest.mark.each_value  # how long a size stays does not hang on how good the head is
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_seed_draws_the_same_answer_with_trees_of_any_size(fresh, forced, rounds):
    model = fresh[1]
    for options in ({"temperature": 1.2}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.2}):
        call = {"do_sample": True, "max_new_tokens": 24, "eos_token_id": NEVER, "pad_token_id": 0, **options}
        emitted = []
        for assistant, order in ((Eagle3(), ORDER), (AUTO, ORDER), (AUTO, ORDER[::-1]), (AUTO, (0,))):
            forced(order, rounds)
            torch.manual_seed(5)
            emitted.append(model.generate(**prompts(5, 8), **call, assistant=assistant).tolist())
        assert emitted[0] == emitted[1] == emitted[2] == emitted[3]


def test_a_head_reads_what_rows_emitted_while_others_were_taken(knows, forced, monkeypatch):
    """A prompt that joins is read in its own entry; the other rows' pairs are read when drafts are tried."""
    taken, read = forced((0, 0, 0, 4), 9), list[int]()
    hand_over = RestingDrafter.hand_over
    monkeypatch.setattr(
        RestingDrafter, "hand_over", lambda self, rounds: read.append(rounds) or hand_over(self, rounds)
    )
    batch = fastspec.ContinuousBatch(Eagle3(total_tokens="auto"), rows=2)
    inputs = prompts(9, 3, 7, 5, 8, 4, 6)
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": 9, "pad_token_id": 0}
    expected = knows[0].generate(**inputs, **options)
    assert knows[1].generate(**inputs, **options, assistant=batch).tolist() == expected.tolist()
    drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
    assert len(drafted) > 4 and sum(drafted) > 3.2 * len(drafted)
    assert stats(knows[1]).joined == 5 and 0 < len(read) < 4 and max(read) > 9


def test_prompts_that_join_rows_in_the_middle_of_rounds_without_drafts(fresh, forced):
    forced()
    pair = fresh
    inputs, options = prompts(9, 3, 7, 5, 8), {"do_sample": False, "max_new_tokens": 24}
    expected = pair[0].generate(**inputs, **options)
    got = pair[1].generate(**inputs, **options, assistant=fastspec.ContinuousBatch(AUTO, rows=2))
    assert got.tolist() == expected.tolist()


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_an_open_batch_chooses_sizes(forced, monkeypatch, captured):
    """Prompts come and go while rounds of all sizes run, widen and narrow, and begin like others."""
    if captured:
        stand_in(monkeypatch)
    taken = forced()
    model = bigram()
    plain, patched = bigram(), fastspec.patch(model, eagle3=seer(model))
    ids = [torch.arange(6, 46 + length)[None] for length in range(3, 10)]
    with fastspec.continuous(patched, AUTO, rows=4) as batch:
        counts = [4 + 9 * (index % 3) for index in range(6)] + [60]
        futures = [
            batch.submit(row, max_new_tokens=count, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
            for row, count in zip(ids, counts, strict=True)
        ]
        sampled_once = [batch.submit(ids[0], max_new_tokens=20, do_sample=True, seed=3) for _ in range(2)]
        for row, count, future in zip(ids, counts, futures, strict=True):
            wanted = plain.generate(row, max_new_tokens=count, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
            assert future.result(300).tolist() == wanted.tolist()
        assert sampled_once[0].result(300).tolist() == sampled_once[1].result(300).tolist()
        found = batch.submit(ids[0], max_new_tokens=30, do_sample=False, eos_token_id=NEVER, pad_token_id=0).result(300)
        assert found.tolist() == plain.generate(ids[0], max_new_tokens=30, eos_token_id=NEVER).tolist()
    drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
    assert {size for size, _ in taken} == {0, 1, 2, 3, 4} and sum(drafted) > 2 * len(drafted)
    assert {rows for _, rows in fastspec.report(patched).trees} >= {4}


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_gemma_4_s_assistant_chooses_sizes(captured, forced, monkeypatch):
    if captured:
        stand_in(monkeypatch)
    taken, model = forced(), bigram_gemma4()
    fastspec.patch(model, mtp=knowing(model), backend="torch")
    for _ in range(2):
        same((bigram_gemma4(), model), Mtp(total_tokens="auto"), prompts(7, 3), max_new_tokens=60)
    drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
    assert {size for size, _ in taken} == {0, 1, 2, 3, 4} and sum(drafted) > 3 * len(drafted)


def test_the_layer_of_a_checkpoint_chooses_sizes(forced, tmp_path):
    """Over recurrent layers, whose rounds without drafts commit as all others do."""
    taken = forced()
    model, _ = loaded("qwen3_5_text", tmp_path)
    plain = copy.deepcopy(model)
    fastspec.patch(model, mtp=True)
    for _ in range(2):
        same((plain, model), Mtp(total_tokens="auto"), prompts(7, 3), max_new_tokens=40, eos_token_id=NEVER)
    assert {size for size, _ in taken} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text"])
def test_recurrent_layers_and_windows(forced, kind):
    forced()
    target = tiny_model(kind, sliding_window=8, **SHALLOW) if kind == "gemma3_text" else tiny_model(kind, **SHALLOW)
    model = fastspec.patch(copy.deepcopy(target), eagle3=tiny_head(target))
    same((target, model), AUTO, prompts(7, 3), max_new_tokens=30)


def test_an_eagle_2_head_chooses_sizes(forced):
    taken, model = forced(), bigram()
    fastspec.patch(model, eagle2=seer1(model))
    same((bigram(), model), Eagle2(depth=2, top_k=3, total_tokens="auto"), prompts(7, 3), max_new_tokens=40)
    drafted = [drafts for size, accepted in taken for drafts in accepted if size == 4]
    assert sum(drafted) > 2 * len(drafted)


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_an_eagle_1_head_drafts_the_part_of_its_tree_that_pays(forced, monkeypatch, captured):
    """Of the published tree, in calls whose answer hangs on no size; not of one that is named, nor of drawn drafts."""
    if captured:
        stand_in(monkeypatch)
    taken, model = forced(), bigram()
    fastspec.patch(model, eagle=seer1(model))
    for _ in range(2):
        same((bigram(), model), "eagle", prompts(7, 3), max_new_tokens=60, eos_token_id=NEVER)
    drafted = [drafts for size, accepted in taken for drafts in accepted if size == 5]
    assert {size for size, _ in taken} == {0, 1, 2, 3, 4, 5} and sum(drafted) > 3 * len(drafted)
    (choice,) = fastspec.report(model).trees.values()
    assert choice.sizes == (1, 2, 4, 8, 16, 26)
    taken.clear()
    for other in (Eagle1(paths=[[0], [0, 0]]), Eagle1(drafts="sampled")):
        same((bigram(), model), other, prompts(7, 3), max_new_tokens=20, eos_token_id=NEVER)
    same((bigram(), model), "eagle", prompts(7), max_new_tokens=20, eos_token_id=NEVER)  # alone on the CPU
    assert not taken


def test_processors_that_look_at_the_history_and_lockstep(fresh, forced):
    forced()
    for options in ({"repetition_penalty": 1.3}, {"max_time": 1000.0}):
        same(fresh, AUTO, prompts(9, 3), max_new_tokens=30, **options)


def test_a_row_that_has_ended_leaves_room_for_what_others_emit_without_drafts(fresh, monkeypatch):
    """The head reads it at the end, more pairs than the row that has ended has room for."""
    monkeypatch.setattr(TreeSizes, "_affords", lambda self, size: False)
    batch = fastspec.ContinuousBatch(Eagle3(total_tokens="auto"), rows=2)
    same(fresh, batch, prompts(4, 5, 4, 5, 4), max_new_tokens=16, eos_token_id=NEVER, pad_token_id=0)


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
    assert emitted[0].tolist() == emitted[1].tolist()


def test_calls_choose_by_what_rounds_took_and_accepted(knows, monkeypatch, tmp_path):
    """Without anything forced: a call begins with the device's own size, and later ones go on from what is known, in
    another session from the file."""
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path))
    plain, model = knows
    for _ in range(3):
        same((plain, model), AUTO, prompts(7), max_new_tokens=150, eos_token_id=NEVER)
    (choice,) = fastspec.report(model).trees.values()
    assert choice.sizes == (1, 2, 4, 8, 16) and any(choice.measured) and choice.chosen in choice.sizes
    assert min(choice.round_ms) > 0 and choice.expected[0] == 1.0 and choice.expected[4] > 2.5
    assert f"{AUTO}, rows: 1" in str(fastspec.report(model)) and f"{choice.chosen} nodes chosen" in str(
        fastspec.report(model)
    )
    same((plain, model), AUTO, prompts(9, 3), max_new_tokens=10)
    assert set(fastspec.report(model).trees) == {(AUTO, 1), (AUTO, 2)}
    session = session_of(model)
    fastspec.unpatch(model)
    assert not session.trees and list((tmp_path / "rounds").glob("*.json"))
    fastspec.patch(model, eagle3=seer(model))
    same((plain, model), AUTO, prompts(7), max_new_tokens=2)
    (again,) = fastspec.report(model).trees.values()
    assert [known for known, before in zip(again.measured, choice.measured, strict=True) if before] == [True] * sum(
        choice.measured
    )


def test_a_fixed_size_reads_no_clock(knows, monkeypatch):
    monkeypatch.setattr(TreeSizes, "__init__", None)
    same(knows, Eagle3(total_tokens=8), prompts(7), max_new_tokens=40, eos_token_id=NEVER)
    assert stats(knows[1]).drafted == 7 * stats(knows[1]).row_rounds and not fastspec.report(knows[1]).trees


def test_a_copy_chooses_for_itself_and_another_dtype_does(knows):
    model = knows[1]
    same(knows, AUTO, prompts(7))
    twin = copy.deepcopy(model)
    assert not fastspec.report(twin).trees and len(fastspec.report(model).trees) == 1
    model.double().generate(**prompts(7), do_sample=False, max_new_tokens=8, assistant=AUTO)
    assert len(fastspec.report(model).trees) == 1 and len(session_of(model).trees) == 2


def test_experts_that_tokens_choose_make_nodes_dear(monkeypatch):
    model = tiny_model("qwen3_moe")
    whole, experts, share = assembly.expert_bytes(model)
    assert experts == sum(w.nbytes for name, w in model.named_parameters() if ".experts." in name) > 0
    assert share == 0.5 and whole > 0 == assembly.expert_bytes(tiny_model())[1]
    steps, found = Eagle3(total_tokens="auto").steps("cuda")[0], []
    for read in ((6 * 10**9, 64 * 10**9, 8 / 256), (8 * 10**9, 0, 1.0)):
        monkeypatch.setattr(assembly, "expert_bytes", lambda _, read=read: read)
        times = assembly.prior_times(model, torch.device("cuda"), steps, 0, 1)
        assert times == sorted(times)
        found.append([ms / times[0] for ms in times])
    (_, _, four, _, sixteen, sixty), dense = found
    assert four > 1.5 and sixteen > 3 and sixty > 6 and max(dense) < 1.7


def test_nothing_is_measured_inside_a_profile(knows, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path))
    with fastspec.profile(knows[1]):
        same(knows, AUTO, prompts(7), max_new_tokens=60, eos_token_id=NEVER)
    (choice,) = fastspec.report(knows[1]).trees.values()
    assert not any(choice.measured)
    same(knows, AUTO, prompts(7), max_new_tokens=60, eos_token_id=NEVER)
    (choice,) = fastspec.report(knows[1]).trees.values()
    assert any(choice.measured)


def test_what_is_given_back_frees_its_sizes_of_rounds(knows, forced):
    forced()
    same(knows, AUTO, prompts(7), max_new_tokens=40)
    engine = session_of(knows[1])
    assert engine is not None
    fastspec.unpatch(knows[1])
    assert not engine.trees and not engine.engines.held
