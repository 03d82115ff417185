"""The cascade through the front door: each stage says what it alone would have said, and no more stages are asked than
decided."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, Told, cascaded, stages, trained, with_saved_stage
from helpers.examples import examples
from helpers.generate import prompts, shallow_model
from helpers.gptq import packed_layers
from helpers.tokenizers import DRAFT, TARGET
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import fastspec
from fastspec.cascade.predictor import Predictor
from fastspec.distribution import install_command
from fastspec.errors import CheckpointError, FastSpecError, Unsupported
from fastspec.patches.session import session_of

HIGH = 1e9
GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def models() -> list[Any]:
    found = stages()
    cascaded(found)
    return found


def config(model: Any, **over: Any) -> fastspec.Cascade:
    return replace(session_of(model).resources["cascade"].config, **over)


def explained(model: Any) -> tuple[Any, ...]:
    return fastspec.report(model).last.explanations


@examples(6)
@given(
    seed=st.integers(0, 5),
    reached=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    penalty=st.sampled_from([1.0, 1.2]),
)
def test_every_row_is_answered_as_by_its_stage_alone(
    models: list[Any], seed: int, reached: list[int], penalty: float
) -> None:
    batch = prompts(*range(9, 9 - len(reached), -1), seed=seed)
    options = {**GREEDY, "repetition_penalty": penalty, "eos_token_id": 5}
    told = Told([(1.0 if stop == 0 else 0.0, 0.5, 0.5) for stop in reached])
    told.script += [(1.0 if stop == 1 else 0.0, 0.5) for stop in reached if stop > 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "score", lambda *args: told(*args))
        out = models[-1].generate(**batch, **options, assistant=config(models[-1], thresholds=[0.5, 0.5]))
    for row, stop in enumerate(reached):
        alone = models[stop].generate(**batch, **options)[row, batch["input_ids"].shape[1] :].tolist()
        alone = alone[: alone.index(5) + 1] if 5 in alone else alone
        emitted = out[row, batch["input_ids"].shape[1] :].tolist()
        assert emitted[: len(alone)] == alone and set(emitted[len(alone) :]) <= {0}
        visits = explained(models[-1])[row].visits
        assert [visit.stage for visit in visits] == list(range(stop + 1))
        assert visits[-1].new_tokens + visits[-1].kept_tokens == len(alone)


def test_a_stage_takes_over_what_it_would_have_written_too() -> None:
    """Two stages with one set of weights: the second keeps the whole answer, and generates nothing."""
    twins = [shallow_model(), shallow_model()]
    model = cascaded(twins, price=HIGH)
    batch = prompts(7)
    out = model.generate(**batch, **GREEDY, assistant="cascade")
    first, second = explained(model)[0].visits
    assert out.tolist() == twins[0].generate(**batch, **GREEDY).tolist()
    assert (first.new_tokens, second.new_tokens, second.kept_tokens, second.handed_tokens) == (24, 0, 24, 24)
    assert explained(model)[0].reused == 24
    assert "24 of 24 taken over" in str(fastspec.report(model)) and "24 of 24 taken over" in str(explained(model)[0])


def test_a_higher_price_never_stops_earlier(models: list[Any]) -> None:
    batch, before = prompts(8, 7, 6, 5, seed=3), [0] * 4
    for price in (0.0, 1e-6, *(9.0**step for step in range(-1, 5)), HIGH):
        models[-1].generate(**batch, **GREEDY, assistant=config(models[-1], price=price))
        reached = [each.stage for each in explained(models[-1])]
        assert all(now >= then for now, then in zip(reached, before, strict=True))
        assert price > 0 or reached == [0] * 4
        before = reached
    assert max(before) > 0


def test_sampled_stages_follow_their_own_distribution() -> None:
    """4,000 tokens of a second stage that verified a first one's: chi-square at a significance of 1e-4, 6 degrees of
    freedom."""
    small, large = (
        shallow_model(seed=seed, vocab_size=7, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        for seed in (1, 2)
    )
    model = cascaded([small, large], thresholds=[1.0])
    ids, rows = torch.tensor([[1, 3, 2]]), 4000
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "score", lambda *args: Told([(0.0, 0.5)])(*args))
        out = model.generate(ids.expand(rows, -1), do_sample=True, top_k=0, max_new_tokens=1, assistant="cascade")
    distribution = torch.softmax(large.requires_grad_(False)(ids).logits[0, -1], -1) * rows
    counts = torch.bincount(out[:, 3], minlength=7)
    assert float(((counts - distribution) ** 2 / distribution).sum()) < 27.9


def test_features_are_of_the_answer(models: list[Any]) -> None:
    told = Told([(1.0, 0.5, 0.5)])
    batch = prompts(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "score", lambda *args: told(*args))
        out = models[-1].generate(**batch, **GREEDY, assistant=config(models[-1], thresholds=[0.5, 0.5]))
    with torch.no_grad():
        distributions = torch.log_softmax(models[0](out).logits[0, 5:-1], -1)
    chances = distributions.gather(1, out[0, 6:, None])
    stage, features = told.asked[0]
    names = dict(zip(fastspec.cascade.records.NAMES, features.tolist(), strict=True))
    assert stage == 0 and names["log_probability_mean"] == pytest.approx(float(chances.mean()), abs=1e-4)


def test_stages_with_other_tokens_are_handed_texts() -> None:
    small, large = (
        shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(DRAFT)),
        shallow_model(vocab_size=len(TARGET)),
    )
    stage = fastspec.Stage(small, tokenizer=DRAFT, name="medium")
    cascade = fastspec.Cascade(
        stages=[stage], tokenizer=TARGET, label="large", predictor=trained(NAMED[1:]), costs=[1.0, 2.0]
    )
    fastspec.patch(large, cascade=cascade)
    ids = torch.tensor([TARGET("abcdxyz12bc", add_special_tokens=False)["input_ids"]])
    for price, alone in ((0.0, small), (HIGH, large)):
        out = large.generate(ids, **GREEDY, assistant=replace(cascade, price=price), eos_token_id=None)
        if price:
            assert out.tolist() == large.generate(ids, **GREEDY, eos_token_id=None).tolist()
            continue
        text = TARGET.decode(ids[0])
        read = torch.tensor([DRAFT(text, add_special_tokens=False)["input_ids"]])
        emitted = alone.generate(read, attention_mask=torch.ones_like(read), **GREEDY)
        answer = DRAFT.decode(emitted[0])[len(text) :]
        assert TARGET.decode(out[0]) == text + answer
    with pytest.raises(Unsupported, match="bad_words_ids speaks of the large model's tokens"):
        large.generate(ids, **GREEDY, assistant="cascade", bad_words_ids=[[3]])


def test_a_stage_that_is_named_is_loaded_when_a_request_first_reaches_it(tmp_path: Any) -> None:
    small, large = (
        shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(TARGET)),
        shallow_model(vocab_size=len(TARGET)),
    )
    small.save_pretrained(tmp_path)
    TARGET.save_pretrained(tmp_path)
    text = (
        f"stages:\n- model: {tmp_path}\n  name: medium\n  assistant: autoregressive\nlabel: large\nprice: "
        "0\ncosts: [1, 2]\npredictor: "
    )
    trained(NAMED[1:]).save(tmp_path / "p.safetensors")
    (tmp_path / "cascade.yaml").write_text(text + str(tmp_path / "p.safetensors"))
    fastspec.patch(large, cascade=replace(fastspec.Cascade.from_yaml(tmp_path / "cascade.yaml"), tokenizer=TARGET))
    held = session_of(large).resources["cascade"].stages[0]
    assert not held.loaded
    ids = torch.tensor([[3, 4, 5, 6]])
    out = large.generate(ids, **GREEDY, assistant="cascade", eos_token_id=None)
    assert held.loaded and out.tolist() == small.generate(ids, **GREEDY, eos_token_id=None).tolist()


def test_a_stage_whose_positions_end_is_left_out() -> None:
    found = [shallow_model(seed=1, max_position_embeddings=16), shallow_model()]
    model = cascaded(found, price=0.0)
    batch = prompts(20)
    assert model.generate(**batch, **GREEDY, assistant="cascade").tolist() == model.generate(**batch, **GREEDY).tolist()
    assert "left out: the prompt has 20 tokens" in str(explained(model)[0])


def test_costs_are_measured_where_none_are_given() -> None:
    model = cascaded(stages(2), costs=None)
    model.generate(**prompts(6), **GREEDY, assistant="cascade")
    rates = session_of(model).resources["cascade"].rates[None]
    assert len(rates.token_ms) == 2 and min(rates.token_ms) > 0 and rates.verify_ms[0] == 0 and min(rates.start_ms) > 0


def test_streamers_dictionaries_and_copies_of_rows(models: list[Any], capsys: Any) -> None:
    batch, seen = prompts(6), []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append("end")

    last = config(models[-1], price=HIGH, explain=True)
    out = models[-1].generate(**batch, **GREEDY, assistant=last, streamer=Streamer(), return_dict_in_generate=True)
    assert seen == [*out.sequences[0].tolist(), "end"] and out.fastspec.explanations
    assert "answered: it is the last" in capsys.readouterr().out
    thrice = GenerationConfig(num_return_sequences=3, do_sample=True, max_new_tokens=24)
    out = models[-1].generate(**batch, generation_config=thrice, assistant=config(models[-1]))
    assert out.shape == (3, 30) and len(explained(models[-1])) == 3


def test_kept_keys_and_values_serve_the_next_turn() -> None:
    found = stages(2)
    model = cascaded(found, price=HIGH, memory=10_000_000)
    batch = prompts(30)
    first = model.generate(**batch, **GREEDY, assistant="cascade")
    longer = torch.cat((first, torch.tensor([[9, 8, 7]])), 1)
    out = model.generate(longer, **GREEDY, assistant="cascade")
    assert out.tolist() == model.generate(longer, **GREEDY).tolist()
    assert fastspec.report(model).memory.hits == 2 and "hits=2" in str(fastspec.report(model))
    fastspec.unpatch(model)
    small = cascaded(stages(2), price=HIGH, memory=1000)
    with pytest.raises(Unsupported, match=r"1,?000"):
        small.generate(**batch, **GREEDY, assistant="cascade")


def test_unpatching_restores_the_stages_and_leaves_those_of_the_user() -> None:
    small, medium, large = stages()
    fastspec.patch(medium)
    model = cascaded([small, medium, large], price=HIGH)
    model.generate(**prompts(5), **GREEDY, assistant="cascade")
    assert session_of(small) is not None
    twin = copy.deepcopy(model)
    assert (
        twin.generate(**prompts(5), **GREEDY, assistant="cascade").tolist()
        == large.generate(**prompts(5), **GREEDY).tolist()
    )
    fastspec.unpatch(model)
    assert session_of(small) is None and session_of(medium) is not None and "generate" not in small.__dict__


@pytest.mark.parametrize("mode", ["lossless", "token"])
def test_the_other_modes_give_what_the_large_model_gives(models: list[Any], mode: str) -> None:
    batch = prompts(8, 5, 3)
    below = config(models[-1]).stages[: 2 if mode == "lossless" else 1]
    large = shallow_model(seed=9)
    cascade = fastspec.Cascade(stages=below, mode=mode, alpha="lossless", gamma=4)
    fastspec.patch(large, cascade=cascade)
    more = {"repetition_penalty": 1.2} if mode == "lossless" else {}
    for options in ({**GREEDY, **more}, {**GREEDY, "suppress_tokens": [7, 8, 9, 10, 11]}):
        assert (
            large.generate(**batch, **options, assistant="cascade").tolist()
            == large.generate(**batch, **options).tolist()
        )
    torch.manual_seed(0)
    out = large.generate(**batch, do_sample=True, temperature=0.7, top_k=9, max_new_tokens=12, assistant="cascade")
    assert out.shape == (3, 20)


def test_token_mode_at_the_small_end_gives_what_the_small_model_gives(models: list[Any]) -> None:
    large = shallow_model(seed=9)
    fastspec.patch(
        large, cascade=fastspec.Cascade(stages=models[:1], mode="token", rule="token_v2", alpha=1.0, gamma=3)
    )
    batch = prompts(8, 5)
    for options in (GREEDY, {**GREEDY, "suppress_tokens": [7, 8, 9, 10, 11]}):
        assert (
            large.generate(**batch, **options, assistant="cascade").tolist()
            == models[0].generate(**batch, **options).tolist()
        )
    for sample in (False, True):
        with pytest.raises(Unsupported, match="repetition_penalty"):
            large.generate(**batch, do_sample=sample, repetition_penalty=1.5, max_new_tokens=4, assistant="cascade")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values"),
        ({"num_beams": 2}, "num_beams"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding on the left"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
    ],
)
def test_what_cannot_be_combined_is_refused(models: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        models[-1].generate(torch.tensor([[5, 6, 7]]), **GREEDY, assistant="cascade", **options)


def test_bad_configurations_are_refused_and_change_nothing(tmp_path: Any) -> None:
    small, large = stages(2)
    good = {"stages": [fastspec.Stage(small, name="medium")], "predictor": trained(NAMED[1:]), "label": "large"}
    for over, message in (
        ({"stages": []}, "stages="),
        ({"costs": [1.0, 0.0]}, "positive"),
        ({"costs": [1.0]}, "2 positive"),
        ({"price": -1}, "negative"),
        ({"mode": "both"}, "mode"),
        ({"thresholds": [2.0]}, "probabilities"),
        ({"predictor": None}, "predictor"),
        ({"risk": 1.0}, "risk"),
        ({"alpha": 3.0}, "alpha"),
        ({"alpha": "none"}, "alpha"),
        ({"rule": "v9"}, "rule"),
        ({"gamma": 0}, "gamma"),
        ({"memory": 0}, "memory"),
        ({"memory": 1.5}, "memory"),
        ({"host_memory": -1}, "host_memory"),
        ({"price": float("nan")}, "price"),
        ({"stages": [small, small], "mode": "token"}, "two models"),
    ):
        with pytest.raises(Unsupported, match=message):
            fastspec.Cascade(**{**good, **over})
    bits = {"model": "a", "quantization": "2bit"}
    for stage in ({"model": None}, {"model": small, "quantization": "4bit"}, bits, {"model": "a", "prompt": 1}):
        with pytest.raises(Unsupported):
            fastspec.Stage(**stage)
    wrong = {
        "stages: [a]\nlambda: 3": "unknown key lambda; .*; a cascade's `price`, what a bad answer costs",
        "stages: [{model: a, head: b}]": "stage 0: unknown key head; .*; a stage's head is named by `resources",
        "stages: [{model: a, lambda: 3}]": "stage 0: unknown key lambda; .*; a cascade's `price`",
        "stages: [{model: a, size: 3}]": "unknown key size",
        "- a": "keys",
        "stages: [a]\nprice: 3\nprice: 4": "line 3 has the key 'price' a second time",
        "stages:\n- model: a\n  name: x\n  model: b": "line 4 has the key 'model' a second time",
    }
    for text, message in wrong.items():
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(Unsupported, match=message):
            fastspec.Cascade.from_yaml(tmp_path / "c.yaml")
    for over, error, message in (
        ({"predictor": trained(NAMED)}, CheckpointError, "3 stages"),
        ({"predictor": tmp_path / "none"}, FastSpecError, "none"),
        ({"stages": [large]}, Unsupported, "itself"),
        ({"stages": [shallow_model(vocab_size=3000)]}, Unsupported, "both tokenizers"),
    ):
        with pytest.raises(error, match=message):
            fastspec.patch(large, cascade=fastspec.Cascade(**{**good, **over}))
        assert session_of(large) is None
    with pytest.raises(Unsupported, match="supplies them"):
        fastspec.patch(large).generate(torch.tensor([[5, 6]]), assistant="cascade")
    fastspec.unpatch(large)
    fastspec.patch(large, cascade=fastspec.Cascade(**good))
    with pytest.raises(Unsupported, match="patched with"):
        large.generate(torch.tensor([[5, 6]]), assistant=fastspec.Cascade(**{**good, "stages": [shallow_model()]}))


@pytest.mark.parametrize(
    "options", [{"device_map": {"": "cpu"}}, {"quantization": "4bit"}, {"quantization": "8bit"}], ids=str
)
def test_stages_are_loaded_as_asked(tmp_path: Any, options: dict[str, Any]) -> None:
    if "quantization" in options:
        pytest.importorskip("bitsandbytes")
    large = with_saved_stage(shallow_model(vocab_size=len(TARGET)), tmp_path, TARGET, **options)
    ids = torch.tensor([[5, 6, 7, 8]])
    out = large.generate(ids, **GREEDY, assistant="cascade", eos_token_id=None)
    held = session_of(large).resources["cascade"].stages[0].model
    product = held.model.layers[0].mlp.up_proj
    assert type(product).__module__.startswith("bitsandbytes" if "quantization" in options else "torch")
    assert out.tolist() == held.generate(ids, **GREEDY, eos_token_id=None).tolist()


def test_a_stage_multiplies_weights_as_stored_where_that_is_asked() -> None:
    small, large = packed_layers(shallow_model(seed=1)), shallow_model()
    stage = fastspec.Stage(small, name="medium", resources={"stored": True})
    settings = {"label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0], "price": 0.0}
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[stage], **settings))
    ids = torch.tensor([[5, 6, 7, 8]])
    out = large.generate(ids, **GREEDY, assistant="cascade", eos_token_id=None)
    assert fastspec.report(small).stored and fastspec.report(small).kernels["stored_linears"]
    fastspec.unpatch(large)
    assert out.tolist() == small.generate(ids, **GREEDY, eos_token_id=None).tolist()


def test_quantised_stages_need_bitsandbytes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    large = shallow_model(vocab_size=len(TARGET))
    stage = fastspec.Stage(str(tmp_path), name="medium", quantization="4bit")
    settings = {"tokenizer": TARGET, "label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0]}
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[stage], **settings))
    with pytest.raises(Unsupported, match=re.escape(install_command("quantised"))):
        large.generate(torch.tensor([[5, 6]]), **GREEDY, assistant="cascade")
