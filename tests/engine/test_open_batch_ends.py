"""However a batch is left, nobody waits for it and the model is free again."""

from __future__ import annotations

import pickle
from concurrent.futures import CancelledError

import pytest
from helpers.generate import NEVER, TREE, prompts, shallow_model
from helpers.models import tiny_head

import fastspec
from fastspec import FastSpecError
from fastspec.patches.hf.compat import has_capturing_hooks


@pytest.fixture(scope="module")
def model():
    return fastspec.patch(shallow_model())


class Leaving:
    """A streamer that ends its thread when the first tokens, or the end, come."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def put(self, value):
        self.seen += 1
        if self.at == "put" and self.seen > 1:
            raise SystemExit(3)

    def end(self):
        if self.at == "end":
            raise SystemExit(3)


@pytest.mark.parametrize("at", ["put", "end"])
def test_a_streamer_that_wants_to_leave_takes_nobody_with_it(model, at):
    ids = prompts(5)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": NEVER}
    expected = model.generate(ids, **options).tolist()
    with fastspec.continuous(model, "autoregressive", rows=2) as batch:
        leaving, other = batch.submit(ids, streamer=Leaving(at), **options), batch.submit(ids, **options)
        assert isinstance(leaving.exception(300), SystemExit)
        assert other.result(300).tolist() == expected
        assert batch.alive and batch.submit(ids, **options).result(300).tolist() == expected
    fastspec.unpatch(model)
    fastspec.patch(model)


def test_a_callback_cannot_close_its_batch_and_another_thread_can(model):
    """A streamer is called by the batch's own thread, as callbacks of answers are."""
    batch = fastspec.continuous(model, "autoregressive", rows=1)

    class Closing:
        def put(self, value): ...

        def end(self):
            batch.close()

    ids, options = prompts(5)["input_ids"], {"max_new_tokens": 4, "do_sample": False, "eos_token_id": NEVER}
    with pytest.raises(FastSpecError, match="cannot close its batch"):
        batch.submit(ids, streamer=Closing(), **options).result(300)
    assert batch.alive and batch.submit(ids, **options).result(300).shape == (1, 9)
    batch.close()
    batch.close()
    fastspec.unpatch(model)
    fastspec.patch(model)


def test_a_close_that_was_interrupted_may_be_called_again(model, monkeypatch):
    batch = fastspec.continuous(model, "autoregressive", rows=1)
    future = batch.submit(prompts(5)["input_ids"], max_new_tokens=400, do_sample=False, eos_token_id=NEVER)
    with monkeypatch.context() as patch:
        patch.setattr(batch._thread, "join", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.close()
    batch.close(cancel=True)
    with pytest.raises(CancelledError):
        future.result(300)
    fastspec.unpatch(model)
    fastspec.patch(model)


def test_a_closed_batch_counts_as_a_call_and_leaves_no_hooks_behind():
    """A model that has transformers' own hooks cannot be pickled."""
    model = shallow_model("gpt2")
    fastspec.patch(model, eagle3=tiny_head(model))
    ids, options = prompts(5)["input_ids"], {"max_new_tokens": 6, "do_sample": False, "eos_token_id": NEVER}
    with fastspec.continuous(model, TREE, rows=1) as batch:
        answer = batch.submit(ids, **options).result(300)
        assert has_capturing_hooks(model) and not fastspec.report(model).calls
    assert fastspec.report(model).calls == (batch.stats,) and batch.stats.emitted == 6
    assert pickle.loads(pickle.dumps(model)).generate(ids, **options).tolist() == answer.tolist()


@pytest.mark.parametrize("had", [False, True])
def test_hooks_that_the_models_own_passes_leave_go_with_the_batch(had):
    """Rounds of a model without an adapter ask it for its hidden states. Hooks that it had before stay."""
    model, ids = shallow_model("gpt2"), prompts(5)["input_ids"]
    if had:
        model(ids, output_hidden_states=True)

    def hooks():
        return [hook for module in model.modules() for hook in module._forward_hooks.values()]

    before = hooks()
    assert bool(before) == had
    fastspec.patch(model, eagle3=tiny_head(model))
    with fastspec.continuous(model, "eagle3", rows=1) as batch:
        batch.submit(ids, max_new_tokens=4, do_sample=False).result(300)
        assert hooks()
    assert hooks() == before
    model(ids, output_hidden_states=True)
    assert hooks()
