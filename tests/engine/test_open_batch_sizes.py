"""Open batches whose rounds choose how many nodes their trees have: every size is captured by a warm-up, which measures
its times, and answers are those of fixed trees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in, what_no_graph_served
from helpers.devices import ON_CUDA
from helpers.generate import MAKERS, bigram, seer
from helpers.grammars import SCHEMA, TOKENIZER, terse
from helpers.models import tiny_head, tiny_model
from helpers.open import GREEDY, alone, made, texts, told
from helpers.sizes import AUTO, ORDER, force_sizes

import fastspec
from fastspec.generation.drafters.base import Place, RootsOnly
from fastspec.generation.drafters.head_drafter import HeadDrafter
from fastspec.generation.drafters.tree_sizes import FED_KINDS, TreeSizes
from fastspec.generation.engine.engine import Engine
from fastspec.patches.call import assembly

PLACES = ["captured", pytest.param("cuda", marks=ON_CUDA)]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the CPU with stand-ins for graphs."""
    if request.param == "captured":
        stand_in(monkeypatch)
    return "cpu" if request.param == "captured" else "cuda"


def chosen(batch: Any) -> dict[int, TreeSizes | None]:
    """The choosers of an open batch, by rows."""
    return {rows: rounds.engine.sizes for rows, rounds in batch._widths.made.items()}


@pytest.mark.some("1")
@pytest.mark.parametrize("rounds", [1, 3])
def test_no_size_is_captured_after_a_warm_up(device: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that follow one another in every order, in rows that come and go, greedy and sampled, with drafts and
    without."""
    ran, taken = what_no_graph_served(monkeypatch), force_sizes(monkeypatch, rounds=rounds)
    plain, model = (each.to(device) for each in made("bigram"))
    with fastspec.continuous(model, AUTO, rows=2, max_length=200) as batch:
        batch.warmup(length=100)
        assert not taken and batch.stats.joined == 0, "what a warm-up accepts says nothing of a text"
        sizes = {rows: 0 if each is None else len(each.shapes) + 1 for rows, each in chosen(batch).items()}
        assert min(sizes.values()) > 3 and set(sizes) == {1, 2}
        for each in chosen(batch).values():
            assert each is not None and len(each.made) == len(each.shapes) + 1 and not each._is_cold()
        ran.clear()
        for count, options in ((3, {}), (2, {}), (1, {}), (3, {"do_sample": True, "top_k": 4}), (2, {"seed": 3})):
            ids = texts(*range(5, 5 + count))
            given: dict[str, Any] = {**GREEDY, **options}
            futures = [
                batch.submit(each, **given, max_new_tokens=30 + 20 * place, drafts=place != 1)
                for place, each in enumerate(ids)
            ]
            found = told(futures)
            if "do_sample" not in options:
                assert found == [alone(plain, each.to(device), 30 + 20 * at) for at, each in enumerate(ids)]
        assert not ran
    assert {size for size, _ in taken} >= {0, 1, 2, 3, 4}
    drafted = [drafts for size, accepted in taken for drafts in accepted if size >= 4]
    assert sum(drafted) > 1.5 * len(drafted)


def test_a_rest_of_any_length_is_read_by_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, model = what_no_graph_served(monkeypatch), made("random")[1].to(device)
    with fastspec.continuous(model, AUTO, rows=2, max_length=200) as batch:
        batch.warmup(length=100)
        engine = batch._widths.made[2].engine
        assert engine.resting is not None and engine.resting.backlog == 128
        ran.clear()
        for count in (1, 33, 65, 97, 128):
            engine.resting.hand_over(count)
        assert not ran


@pytest.mark.slow  # rows held to grammars, and sizes, find their graphs in tests of their own
def test_rows_held_to_grammars_find_every_size_captured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    ran, taken = what_no_graph_served(monkeypatch), force_sizes(monkeypatch)
    plain, model = terse().to(device), terse().to(device)
    options = {**GREEDY, "eos_token_id": 5, "logits_processor": [fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)]}
    with (
        fastspec.patched(model, eagle3=seer(model).to(device)),
        fastspec.continuous(model, AUTO, rows=2, max_length=90) as batch,
    ):
        batch.warmup(length=60)
        sizes = chosen(batch)[2]
        ran.clear()
        for ids in (texts(9, 3), texts(7), texts(4, 5, 6)):
            found = told([batch.submit(each, **options, max_new_tokens=24) for each in ids])
            assert found == [alone(plain, each.to(device), 24, **options) for each in ids]
        assert not ran
    assert sizes is not None and {size for size, _ in taken} == {*range(len(sizes.shapes) + 1)}


def test_a_warm_up_measures_every_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of every number of rows, those that the host decides or corrects apart; a text that comes behind it is
    not cold."""
    kept: list[Any] = []
    monkeypatch.setattr(assembly, "keep_times", lambda path, known: kept.append(known))
    monkeypatch.setattr(assembly, "read_times", lambda path: {})
    model = made("random")[1].to(device)
    with fastspec.continuous(model, AUTO, rows=2, max_length=100) as batch:
        batch.warmup(length=40)
        for sizes in chosen(batch).values():
            assert sizes is not None and set(sizes.known) == {0, -1, FED_KINDS} and sizes.acceptance.tried[-1][0] == 0
            for spent in sizes.known.values():
                assert set(spent) == {1, *(shape.total_tokens for shape in sizes.shapes)} and min(spent.values()) > 0
            assert any(each is sizes.known for each in kept) and all(sizes.choice().measured)
    batch = fastspec.continuous(model, AUTO, rows=1, max_length=100)
    batch.warmup(length=40)  # again, with what is known
    assert told([batch.submit(texts(5)[0], **GREEDY, max_new_tokens=9)])
    batch.close()


def test_a_warm_up_that_fails_leaves_sizes_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    model, failed = made("random")[1], Exception("no call")
    with fastspec.continuous(model, AUTO, rows=2, max_length=100) as batch:

        def tell(done: int, of: int) -> None:
            if done > 9:
                raise failed

        with pytest.raises(Exception, match="no call"):
            batch.warmup(40, tell)
        assert {rounds.engine.pinned for rounds in batch._widths.made.values()} == {None}


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_rows_that_take_no_drafts_rest_the_head(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone they run as rounds without drafts, which say nothing of drafts; beside others the head has read all."""
    if captured:
        stand_in(monkeypatch)
    taken = force_sizes(monkeypatch, order=(4,))
    plain, model = made("bigram")
    sizes: list[int] = []
    step = Engine._of_size
    monkeypatch.setattr(Engine, "_of_size", lambda self, given, size: sizes.append(size) or step(self, given, size))
    first, second = texts(9, 5)
    with fastspec.continuous(model, AUTO, rows=2, max_length=150, narrows=False) as batch:
        for _ in range(2):
            assert told([batch.submit(first, drafts=False, max_new_tokens=30, **GREEDY)]) == [alone(plain, first, 30)]
            assert set(sizes) == {0} and not taken
            both = [batch.submit(first, drafts=False, max_new_tokens=90, **GREEDY)]
            both += [batch.submit(second, max_new_tokens=90, **GREEDY)]
            assert told(both) == [alone(plain, each, 90) for each in (first, second)]
            drafted = [accepted for _, accepted in taken]
            assert all(len(each) == 1 for each in drafted), "a row that takes none is not asked"
            assert sum(map(sum, drafted)) > 2 * len(drafted)
            sizes.clear(), taken.clear()


def test_the_default_of_a_captured_batch_chooses_sizes_where_a_call_s_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the prompts that join renew the share of their rows in what drafts may lose."""
    stand_in(monkeypatch)
    joined: list[float] = []
    join = TreeSizes.join
    monkeypatch.setattr(TreeSizes, "join", lambda self, share: joined.append(share) or join(self, share))
    plain, model = made("bigram")
    with fastspec.continuous(model, "eagle3", rows=4, max_length=150, narrows=False) as batch:
        (sizes,) = chosen(batch).values()
        assert sizes is not None and sizes.captures
        ids = texts(5, 9, 7, 4, 6)
        found = told([batch.submit(each, **GREEDY, max_new_tokens=50) for each in ids])
        assert found == [alone(plain, each, 50) for each in ids] and joined == [0.25] * 5
    with fastspec.continuous(model, fastspec.Eagle3(total_tokens=8), rows=4, max_length=150) as batch:
        assert set(chosen(batch).values()) == {None}
    with fastspec.continuous(model.half(), "eagle3", rows=4, max_length=150) as batch:
        assert set(chosen(batch).values()) == {None}, "in half precision trees of another size may change a tie"


@pytest.mark.each_value  # what is drafted does not hang on whose weights they are
@pytest.mark.parametrize("assistant", [AUTO, "eagle"], ids=["eagle3", "eagle"])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_answers_go_on_through_sizes_that_are_captured_under_load(
    device: str, kind: str, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warm-up, and with prompts that begin like others."""
    taken = force_sizes(monkeypatch, order=ORDER[::-1], rounds=2)
    if assistant == "eagle":
        monkeypatch.setattr(assembly, "_chooses_sizes", lambda plan: True)
    plain, model = (each.to(device) for each in made(kind))
    ids = texts(40, 9, 45)
    ids += [torch.cat((each, more)) for each, more in zip(ids, texts(3, 2, 5, seed=4), strict=True)]
    with fastspec.continuous(model, assistant, rows=4, max_length=150) as batch:
        batch._prefixes.least = 8
        for _ in range(2):
            found = told([batch.submit(each, **GREEDY, max_new_tokens=70 - 9 * at) for at, each in enumerate(ids)])
            assert found == [alone(plain, each.to(device), 70 - 9 * at) for at, each in enumerate(ids)]
        assert batch.stats.reused > 0
    assert {size for size, _ in taken} >= {0, 1, 2, 3, 4}


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_prompts_join_rests_without_the_others_being_read(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's cache is that of rounds that all draft, of rows that others joined and of those that joined; it reads
    once in so many rounds as it keeps features of."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 25)
    reads: list[list[int]] = []
    take_pairs = HeadDrafter.take_pairs

    def taking(
        self: HeadDrafter, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, *more: Any
    ) -> None:
        reads.append(counts.tolist())
        take_pairs(self, tokens, features, counts, *more)

    monkeypatch.setattr(HeadDrafter, "take_pairs", taking)
    drafters = []
    for order in ((4,), (0,)):
        force_sizes(monkeypatch, order=order)
        monkeypatch.setattr(TreeSizes, "_affords", lambda self, size, rounds=1, order=order: order == (4,))
        reads.clear()
        plain, model = made("random")
        first, *others = texts(9, 5, 7, 6, 4)
        with fastspec.continuous(model, AUTO, rows=2, max_length=150, narrows=False, prefix_caching=False) as batch:
            with batch._changed:
                futures = [batch.submit(first, **GREEDY, max_new_tokens=70)]
                futures += [batch.submit(each, **GREEDY, max_new_tokens=11) for each in others]
            found = told(futures)
            assert found == [alone(plain, first, 70), *(alone(plain, each, 11) for each in others)]
        drafters.append(batch._widths.current.engine.drafter)
    assert len(reads) == 2 and sum(counts[0] for counts in reads) == 48 and reads[0][1] < 25, "the rest at no end"
    wanted, got = drafters
    for row, least in enumerate((9 + 48, 4 + 9)):
        count = min(int(each.state.lengths[row]) for each in drafters)
        assert count >= least
        for one, other in ((wanted.attention.k, got.attention.k), (wanted.attention.v, got.attention.v)):
            assert torch.allclose(one[0][row, :, :count], other[0][row, :, :count], atol=1e-4, rtol=1e-4)


@pytest.mark.some("False")
@pytest.mark.parametrize("captured", [False, True])
def test_a_row_that_takes_no_drafts_is_read_in_parts(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds without drafts, more of them than pairs are kept of: the head's cache is that of a row that drafts."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 25)
    force_sizes(monkeypatch, order=(4,))
    drafters, (text,) = [], texts(9)
    for drafts in (True, False):
        plain, model = made("random")
        with fastspec.continuous(model, AUTO, rows=1, max_length=150, prefix_caching=False) as batch:
            found = told([batch.submit(text, **GREEDY, max_new_tokens=70, drafts=drafts)])
            assert found == [alone(plain, text, 70)]
        drafters.append(batch._widths.current.engine.drafter)
    count = min(int(each.state.lengths[0]) for each in drafters)
    assert count >= 9 + 48
    wanted, got = drafters
    for one, other in ((wanted.attention.k, got.attention.k), (wanted.attention.v, got.attention.v)):
        assert torch.allclose(one[0][0, :, :count], other[0][0, :, :count], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("forced", [False, True])
def test_an_exact_model_s_default_chooses_sizes_and_keeps_the_bits(
    forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 any size has the answers of `autoregressive`; a model that is not exact keeps its fixed trees where it
    has all rows whatever the load."""
    pytest.importorskip("triton")
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    head, ids = tiny_head(model).to(model.device, model.dtype), texts(9, 3, 14, 5, 7, 40)
    asked: dict[str, Any] = {**GREEDY, "max_new_tokens": 60}
    with fastspec.patched(model, eagle3=head, exact=True):
        with fastspec.continuous(model, "autoregressive", rows=4, max_length=128) as batch:
            want = told([batch.submit(each, **asked) for each in ids])
        if forced:
            force_sizes(monkeypatch)
        ran = what_no_graph_served(monkeypatch)
        with fastspec.continuous(model, "eagle3", rows=4, max_length=128) as batch:
            batch.warmup(length=100)
            assert all(each is not None for each in chosen(batch).values())
            ran.clear()
            for _ in range(2):
                assert told([batch.submit(each, **asked) for each in ids]) == want
            assert not ran
            assert fastspec.report(model).graph_bytes > 0
    for narrows in (True, False):
        patched = fastspec.patched(model, eagle3=head, exact=False)
        with patched, fastspec.continuous(model, "eagle3", rows=4, max_length=128, narrows=narrows) as batch:
            assert all((each is not None) == narrows for each in chosen(batch).values())
            assert all(each is None or each.fed for each in chosen(batch).values())


def by_clock(monkeypatch: pytest.MonkeyPatch, ms: Callable[[Place, int], float]) -> list[tuple[Place, int]]:
    """Let a clock of the test's own say what a round takes, by the place of its verdict and its nodes -> both, of every
    round."""
    ran: list[tuple[Place, int]] = []
    step, clock = Engine._step, SimpleNamespace(seconds=0.0)
    clock.perf_counter = lambda: clock.seconds

    def stepped(self: Engine[Any], program: Any, *call: Any) -> Any:
        found = step(self, program, *call)
        ran.append((self.place, self.last.tree.tokens.shape[1]))
        clock.seconds += ms(*ran[-1]) / 1e3
        return found

    stand_in(monkeypatch)
    monkeypatch.setattr(assembly, "keep_times", lambda path, known: None)
    monkeypatch.setattr(assembly, "read_times", lambda path: {})
    monkeypatch.setattr(Engine, "_step", stepped)
    monkeypatch.setattr("fastspec.generation.engine.engine.time", clock)
    return ran


def test_texts_of_which_nothing_is_accepted_rest_after_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes a millisecond and half a millisecond more a node."""
    ran = by_clock(monkeypatch, lambda place, nodes: 0.5 + 0.5 * nodes)
    model = bigram()
    fastspec.patch(model, eagle3=tiny_head(model))
    with fastspec.continuous(model, AUTO, rows=2, max_length=300, narrows=False) as batch:
        batch.warmup(length=40)
        ran.clear()
        for _ in range(3):
            told([batch.submit(each, **GREEDY, max_new_tokens=200) for each in texts(5, 9)])
        nodes = [count for _, count in ran]
        spent = sum(1 + 0.5 * (count - 1) for count in nodes)
    assert spent < 1.03 * len(nodes) and nodes.count(1) > 0.9 * len(nodes)


@pytest.mark.parametrize("fed", [False, True])
def test_rows_held_to_a_grammar_have_the_nodes_that_pay_there(fed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that pay where the host has no part in a round, and where it chooses all tokens, which a warm-up has
    measured too, cost more than they bring where it corrects what was chosen. With `fed` no others choose."""
    pytest.importorskip("llguidance")
    trees = {Place.DEVICE: 1.5, Place.FED: 6.0, Place.HOST: 9.0}
    ran = by_clock(monkeypatch, lambda place, nodes: trees[place] if nodes > 1 else 8.0 if place is Place.HOST else 1.0)
    monkeypatch.setattr(assembly, "TreeSizes", lambda *given, **more: TreeSizes(*given, **{**more, "fed": fed}))
    plain, model = terse(), terse()
    held = {**GREEDY, "eos_token_id": 5, "logits_processor": [fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)]}
    fastspec.patch(model, eagle3=seer(model))
    ids = texts(9, 7, 4, 12, 5, 8)
    with fastspec.continuous(model, AUTO, rows=1, max_length=120) as batch:
        batch.warmup(length=60)
        for options, count in ((held, 24), ({**GREEDY, "eos_token_id": 5}, 60), (held, 24)):
            ran.clear()
            found = [told([batch.submit(each, **options, max_new_tokens=count)])[0] for each in ids]
            assert found == [alone(plain, each, count, **options) for each in ids]
            tokens = sum(map(len, found)) - len(found)
            spent = sum(trees[place] if nodes > 1 else 1.0 for place, nodes in ran)
            if options is held:
                assert {place for place, _ in ran} == {Place.FED} and spent < 1.06 * tokens, (spent, tokens)
            else:
                assert {place for place, _ in ran} == {Place.DEVICE} and spent < 0.8 * tokens, (spent, tokens)
                assert not fed or len({nodes for _, nodes in ran}) == 1


def test_where_rounds_held_to_grammars_alone_choose_no_other_sizes_are_warmed_up_or_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of either kind that follow one another find their graphs."""
    pytest.importorskip("llguidance")
    stand_in(monkeypatch)
    unserved, _ = what_no_graph_served(monkeypatch), force_sizes(monkeypatch)
    monkeypatch.setattr(assembly, "TreeSizes", lambda *given, **more: TreeSizes(*given, **{**more, "fed": True}))
    ran: list[tuple[Place, int]] = []
    step = Engine._step
    monkeypatch.setattr(
        Engine, "_step", lambda self, *call: (step(self, *call), ran.append((self.place, self.size)))[0]
    )
    plain, model = terse(), terse()
    free = {**GREEDY, "eos_token_id": 5}
    held = {**free, "logits_processor": [fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)]}
    with fastspec.patched(model, eagle3=seer(model)), fastspec.continuous(model, AUTO, rows=2, max_length=90) as batch:
        batch.warmup(length=60)
        assert {size for place, size in ran if place is not Place.FED} == {0, 4}, "0: rows that take no drafts"
        ran.clear(), unserved.clear()
        for turn in range(5):
            options, count = ((free, 40), (held, 24))[turn % 2]
            ids = texts(9, 3)
            found = told([batch.submit(each, **options, max_new_tokens=count) for each in ids])
            assert found == [alone(plain, each, count, **options) for each in ids]
            assert bool(fastspec.report(model).trees) == (turn > 0), "those of rounds that have chosen"
    assert not unserved and {size for place, size in ran if place is Place.DEVICE} == {4}
    assert {size for place, size in ran if place is Place.FED} == {0, 1, 2, 3, 4}


def test_rounds_of_sampled_rows_held_to_a_grammar_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host chooses on trees, and corrects roots alone: both are compared with each other."""
    pytest.importorskip("llguidance")
    stand_in(monkeypatch)
    force_sizes(monkeypatch)
    places = set[Place]()
    count = TreeSizes.count
    monkeypatch.setattr(TreeSizes, "count", lambda self, *told: places.add(told[-1]) or count(self, *told))
    model = terse()
    asked = {"do_sample": True, "eos_token_id": 5, "max_new_tokens": 24, "assistant": AUTO}
    with fastspec.patched(model, eagle3=seer(model)):
        for ids in texts(9, 7, 4):
            model.generate(ids[None], **asked, logits_processor=[fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)])
    assert places == {Place.HOST}
