"""A model that changes while a batch is open: who is submitted behind the change is answered by the changed model, who runs is not lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers_captured import stand_in
from helpers_generate import TREE
from helpers_open import GREEDY, Gate, alone, made, texts, told
from torch import Tensor, nn

import fastspec


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


CHANGES = replaced, hooked, own_forward, new_parameter, new_storage


@pytest.mark.filterwarnings("ignore:.*generic")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_later_prompts_see_the_change(change: Any, assistant: Any, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert gate.seen.acquire(timeout=30)
        replaced(model)
        waiting = [batch.submit(each, max_new_tokens=6, **GREEDY) for each in ids[1:]]
        dropped = batch.submit(ids[2], max_new_tokens=6, **GREEDY)
        dropped.cancel()
        assert batch.waiting == 3
        for _ in range(6):
            gate.go.release()
        assert len(told([running])[0]) == 12  # its rounds were made of modules that the change may or may not have reached
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
