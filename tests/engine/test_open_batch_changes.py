"""A model that changes while a batch is open: who is submitted behind the change is answered by the changed model, who
runs is not lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.captured import Recorded, stand_in
from helpers.generate import TREE, shallow_model
from helpers.open import GREEDY, Gate, alone, made, texts, told
from torch import Tensor, nn

import fastspec
from fastspec.generation import sequence_state
from fastspec.generation.engine.open_batch import RowCounts
from fastspec.patches.hf.changes import weight_places
from fastspec.patches.session import session_of


class Doubled(nn.Module):
    """A feed-forward that somebody put in the place of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def replaced(model: Any) -> None:
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: -out)


def own_forward(model: Any) -> None:
    inner = model.model.layers[1].self_attn.o_proj.forward
    model.model.layers[1].self_attn.o_proj.forward = lambda x: -inner(x)


def new_parameter(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach() * -1)


def new_storage(model: Any) -> None:
    projection = model.model.layers[0].mlp.down_proj
    projection.weight.data = projection.weight.data.clone() * -1


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3.0)


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3.0


def other_rotation(model: Any) -> None:
    """Without a parameter, and of the same class."""
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq.mul_(3.0)


def factor(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.7


def epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1000.0


def scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 8


ATTRIBUTES = frequencies, other_frequencies, other_rotation, factor, epsilon, scale
CHANGES = replaced, hooked, own_forward, new_parameter, new_storage, other_rotation, epsilon


@pytest.mark.some("replaced", "hooked", "own_forward", "new_parameter", "new_storage", "epsilon")
@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:.*generic")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_later_prompts_see_the_change(
    change: Any, assistant: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        stand_in(monkeypatch)
    plain, model = made()
    changed, ids = copy.deepcopy(plain), texts(6, 9, 4)
    change(changed)
    before, after = ([alone(each, text, 10) for text in ids] for each in (plain, changed))
    assert before != after
    with fastspec.continuous(model, assistant, rows=2, max_length=40) as batch:
        assert told([batch.submit(each, max_new_tokens=10, **GREEDY) for each in ids]) == before
        change(model)
        assert told([batch.submit(each, max_new_tokens=10, **GREEDY) for each in ids]) == after
        assert told([batch.submit(ids[0], max_new_tokens=10, **GREEDY)]) == after[:1]
    assert model.generate(ids[1][None], max_new_tokens=10, assistant=assistant, **GREEDY)[0].tolist() == after[1]


@pytest.mark.filterwarnings("ignore:.*generic")
def test_rows_that_run_end_before_the_change_takes_effect() -> None:
    plain, model = made()
    changed, ids = copy.deepcopy(plain), texts(6, 9, 4)
    replaced(changed)
    gate = Gate()
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch:
        running = batch.submit(ids[0], streamer=gate, max_new_tokens=6, **GREEDY)
        assert gate.seen.acquire(timeout=300)
        replaced(model)
        waiting = [batch.submit(each, max_new_tokens=6, **GREEDY) for each in ids[1:]]
        dropped = batch.submit(ids[2], max_new_tokens=6, **GREEDY)
        dropped.cancel()
        assert batch.waiting == 3
        for _ in range(6):
            gate.go.release()
        assert (
            len(told([running])[0]) == 12
        )  # its rounds were made of modules that the change may or may not have reached
        assert told(waiting) == [alone(changed, each, 6) for each in ids[1:]]
        assert dropped.cancelled()


def test_a_method_that_rounds_pass_by_is_refused_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = made()
    (ids,) = texts(5)
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch:
        with monkeypatch.context() as patched:
            kept = model.prepare_inputs_for_generation
            patched.setattr(model, "prepare_inputs_for_generation", lambda *given, **options: kept(*given, **options))
            with pytest.raises(fastspec.Unsupported, match="prepare_inputs_for_generation"):
                batch.submit(ids, max_new_tokens=4, **GREEDY)
        assert told([batch.submit(ids, max_new_tokens=4, **GREEDY)]) == [alone(plain, ids, 4)]


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of all rounds that were made anew, those of the opening first."""
    begun: list[int] = []
    begin = RowCounts.begin

    def noted(self: Any) -> None:
        begun.append(self.rows)
        begin(self)

    monkeypatch.setattr(RowCounts, "begin", noted)
    return begun


@pytest.mark.parametrize("captured", [False, True])
def test_nothing_is_made_anew_without_a_change(
    captured: bool, rebuilt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by weights that are packed, nor by hooks that transformers leaves on the model and fastspec takes off
    again."""
    if captured:
        stand_in(monkeypatch)
    plain, model = made()
    ids = texts(6, 9)
    with fastspec.continuous(model, TREE, rows=2, max_length=40) as batch:
        for each in ids:
            assert told([batch.submit(each, max_new_tokens=6, **GREEDY)]) == [alone(plain, each, 6)]
            model(each[None], output_hidden_states=True)
            assert told([batch.submit(each, max_new_tokens=6, **GREEDY)]) == [alone(plain, each, 6)]
            model.generate(each[None], max_new_tokens=6, assistant=TREE, **GREEDY)
    assert rebuilt == [2]


def test_a_change_while_rounds_are_made_is_seen_by_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = made()
    changed, (ids,) = copy.deepcopy(plain), texts(6)
    replaced(changed)
    begin, whole = RowCounts.begin, model.model.layers[1].mlp

    def changing(self: Any) -> None:
        begin(self)
        model.model.layers[1].mlp = whole  # the rounds were made of the other

    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40, narrows=False) as batch:
        with monkeypatch.context() as patched:
            patched.setattr(RowCounts, "begin", changing)
            replaced(model)
            batch.submit(ids, max_new_tokens=6, **GREEDY).result(300)
        assert told([batch.submit(ids, max_new_tokens=6, **GREEDY)]) == [alone(plain, ids, 6)]
        replaced(model)
        assert told([batch.submit(ids, max_new_tokens=6, **GREEDY)]) == [alone(changed, ids, 6)]


def test_rounds_of_other_rows_are_not_made_of_a_model_that_differs_for_a_moment() -> None:
    plain, model = made()
    ids, gate = texts(6, 5), Gate()
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=60) as batch:
        short = batch.submit(ids[1], max_new_tokens=1, **GREEDY)
        running = batch.submit(ids[0], streamer=gate, max_new_tokens=40, **GREEDY)
        assert gate.seen.acquire(timeout=300) and len(told([short])[0]) == 6
        whole = model.model.layers[1].mlp
        replaced(model)
        for _ in range(30):
            gate.go.release()
            assert gate.seen.acquire(timeout=300)
        model.model.layers[1].mlp = whole
        for _ in range(10):
            gate.go.release()
        running.result(300)
        for _ in range(2):
            assert told([batch.submit(each, max_new_tokens=8, **GREEDY) for each in ids]) == [
                alone(plain, each, 8) for each in ids
            ]
            assert told([batch.submit(ids[0], max_new_tokens=8, **GREEDY)]) == [alone(plain, ids[0], 8)]


def test_a_model_that_is_broken_for_a_moment_costs_the_prompts_of_that_moment_alone() -> None:
    plain, model = made()
    (ids,) = texts(6)
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch:
        assert told([batch.submit(ids, max_new_tokens=6, **GREEDY)]) == [alone(plain, ids, 6)]
        whole, model.model.layers[1].mlp = model.model.layers[1].mlp, nn.Linear(64, 7)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"size|shape"):
                batch.submit(ids, max_new_tokens=6, **GREEDY).result(300)
        assert batch.alive
        model.model.layers[1].mlp = whole
        assert told([batch.submit(ids, max_new_tokens=6, **GREEDY)]) == [alone(plain, ids, 6)]


def test_a_prompt_that_comes_behind_what_makes_the_model_whole_does_not_end_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though rounds of the broken model are still being made, and fail, when it comes."""
    plain, model = made()
    (ids,), later = texts(6), []
    whole, begin = model.model.layers[1].mlp, RowCounts.begin
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch:

        def failing(self: Any) -> None:
            try:
                begin(self)
            finally:
                if not later:
                    model.model.layers[1].mlp = whole
                    later.append(batch.submit(ids, max_new_tokens=6, **GREEDY))

        monkeypatch.setattr(RowCounts, "begin", failing)
        model.model.layers[1].mlp = nn.Linear(64, 7)
        with batch._changed:
            broken = [batch.submit(ids, max_new_tokens=6, **GREEDY) for _ in range(2)]
        for each in broken:
            with pytest.raises(RuntimeError, match=r"size|shape"):
                each.result(300)
        assert told(later) == [alone(plain, ids, 6)]


@pytest.mark.parametrize("narrows", [True, False])
def test_what_was_made_of_a_model_that_is_another_by_now_is_not_kept(narrows, monkeypatch):
    """Of twelve prompts four wait; a module is another while they are read, which needs what was not made before, and
    is then put back."""
    stand_in(monkeypatch)
    plain, model = made()
    ids, options = texts(*[5] * 8, *[40] * 4), {**GREEDY, "max_new_tokens": 6}
    want, layer = [alone(plain, each, 6) for each in ids], model.model.layers[1]
    whole = layer.mlp
    with fastspec.continuous(model, "autoregressive", rows=8, max_length=80, narrows=narrows) as batch:
        told([batch.submit(ids[0], **options)])
        before = batch._widths.made[8].engine
        gates = {0: Gate(), 8: Gate()}
        with batch._changed:
            futures = [batch.submit(each, streamer=gates.get(at), **options) for at, each in enumerate(ids)]
        for gate, mlp in zip(gates.values(), (Doubled(whole), whole), strict=True):
            assert gate.seen.acquire(timeout=300)
            layer.mlp = mlp
            gate.go.release(9)
        assert told(futures[:8]) == want[:8] and len(told(futures[8:])) == 4
        for _ in range(3):
            with batch._changed:
                futures = [batch.submit(each, **options) for each in ids[8:]]
            assert told(futures) == want[8:]
        assert batch._widths.made[8].engine is not before


def test_what_was_made_in_a_turn_at_whose_end_the_model_is_whole_is_not_kept(monkeypatch):
    """Eight prompts have one token to go when a module is another, which it is until the first of those that wait was
    read."""
    stand_in(monkeypatch)
    plain, model = made()
    ids, options = texts(*[5] * 8, *[40] * 4), {**GREEDY, "max_new_tokens": 6}
    want, layer = [alone(plain, each, 6) for each in ids], model.model.layers[1]
    whole, gates = layer.mlp, {0: Gate(), 8: Gate()}
    with fastspec.continuous(model, "autoregressive", rows=8, max_length=80) as batch:
        with batch._changed:
            futures = [batch.submit(each, **options) for each in ids[:8]]
        told(futures)
        with batch._changed:
            futures = [batch.submit(each, streamer=gates.get(at), **options) for at, each in enumerate(ids)]
        for count in range(6):
            assert gates[0].seen.acquire(timeout=300)
            layer.mlp = Doubled(whole) if count == 5 else whole
            gates[0].go.release()
        assert gates[8].seen.acquire(timeout=300)
        layer.mlp = whole
        gates[8].go.release(9)
        assert told(futures[:8]) == want[:8] and len(told(futures[8:])) == 4
        for _ in range(2):
            with batch._changed:
                futures = [batch.submit(each, **options) for each in ids[8:]]
            assert told(futures) == want[8:]


class Thrice(nn.Module):
    """Positions that are three times as far apart."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, x: Tensor, positions: Tensor, *given: Any) -> Any:
        return self.inner(x, 3 * positions, *given)


def test_tables_that_grew_while_the_model_was_another_are_not_kept(monkeypatch):
    monkeypatch.setattr(sequence_state, "FIRST_SLOTS", 64)
    plain, model = made()
    ids = texts(115, 6)
    want, whole = [alone(plain, each, 12) for each in ids], model.model.rotary_emb
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=400) as batch:
        assert told([batch.submit(ids[1], max_new_tokens=12, **GREEDY)]) == want[1:]
        gate = Gate()
        future = batch.submit(ids[0], streamer=gate, max_new_tokens=40, **GREEDY)
        assert gate.seen.acquire(timeout=300)
        model.model.rotary_emb = Thrice(whole)
        gate.go.release(25)
        for _ in range(25):
            assert gate.seen.acquire(timeout=300)
        model.model.rotary_emb = whole
        gate.go.release(99)
        told([future])
        assert told([batch.submit(each, max_new_tokens=12, **GREEDY) for each in ids]) == want


class Tuned(nn.Linear):
    """A layer that holds PEFT's switches, as its tuners' layers do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._active_adapter, self._disable_adapters, self.merged_adapters, self.scaling = ["a"], False, [], {"a": 0.5}


def test_what_rounds_are_good_for_tells_adapters_forwards_and_places_apart() -> None:
    model = nn.Sequential(Tuned(), nn.SiLU(), nn.Identity())
    seen = [weight_places(model)]
    model[0]._active_adapter = ["b"]
    seen.append(weight_places(model))
    model[0]._disable_adapters = True
    seen.append(weight_places(model))
    model[0].scaling["a"] = 0.25
    seen.append(weight_places(model))
    model[1] = nn.Identity()
    seen.append(weight_places(model))
    for own in (lambda x: x, lambda x: -x):
        model[2].forward = own
        seen.append(weight_places(model))
    assert len(set(seen)) == len(seen) == 7 and weight_places(model) == seen[-1]


def test_a_batch_that_is_opened_under_autocast_runs_as_its_thread_does(rebuilt: list[int]) -> None:
    plain, model = made()
    (ids,) = texts(6)
    with (
        torch.autocast("cpu", torch.bfloat16),
        fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch,
    ):
        assert batch._widths.current.engine.target.adapter is not None
        future = batch.submit(ids, max_new_tokens=6, **GREEDY)
        future.result(300)
    assert told([future]) == [alone(plain, ids, 6)] and rebuilt == [2]


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_calls_whose_engines_are_kept_see_the_change(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same engine serves calls behind which nothing has changed."""
    stand_in(monkeypatch, Recorded)
    plain, model = made()
    changed, (ids,) = copy.deepcopy(plain), texts(9)
    change(changed)
    pool = session_of(model).engines
    for reference in (plain, changed):
        kept = set()
        for _ in range(2):
            found = model.generate(ids[None], max_new_tokens=10, assistant="autoregressive", **GREEDY)
            assert found[0].tolist() == alone(reference, ids, 10)
            kept.add(id(next(reversed(pool.held.values()))))
        assert len(kept) == 1
        if reference is plain:
            change(model)


@pytest.mark.filterwarnings("ignore:.*generic")
def test_frequencies_that_a_model_registers_anew_are_the_same(rebuilt: list[int]) -> None:
    """longrope does so at every forward pass of the model's own."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 2.0,
    }
    rope |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}
    plain, model = (shallow_model("phi3", rope_parameters=rope) for _ in range(2))
    fastspec.patch(model)
    model(texts(6)[0][None])  # the first time it adds attributes
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=40) as batch:
        for ids in texts(6, 9, 4):
            model(ids[None])
            assert told([batch.submit(ids, max_new_tokens=6, **GREEDY)]) == [alone(plain, ids, 6)]
    assert rebuilt == [1]
