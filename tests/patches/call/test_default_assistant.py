"""A default assistant serves calls that name none, and leaves to transformers what it cannot serve, with one warning
per reason."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.cascade import trained
from helpers.generate import TREE, prompts, shallow_model, stats
from helpers.models import tiny_head
from transformers import GenerationConfig

import fastspec
from fastspec import Unsupported
from fastspec.patches.session import session_of

DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "max_position_embeddings": 16,
}
"""A rotary embedding that reads the length of the text, past 16 tokens: a call that goes further is refused late."""

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def plain():
    return shallow_model()


@pytest.fixture
def model():
    made = shallow_model()
    return fastspec.patch(made, eagle3=tiny_head(made), assistant=TREE)


def assisted(model: Any) -> int:
    return len(fastspec.report(model).calls)


def test_a_call_that_names_none_is_served(plain, model):
    want = plain.generate(**prompts(6, 3), **OPTIONS)
    assert model.generate(**prompts(6, 3), **OPTIONS).tolist() == want.tolist()
    assert stats(model).assistant == "eagle3" and stats(model).drafted > 0
    assert "default: eagle3" in str(fastspec.report(model)) and fastspec.report(model).default is TREE


@pytest.mark.parametrize("off", [None, "none"])
def test_none_turns_it_off(plain, model, off):
    assert (
        model.generate(**prompts(6), **OPTIONS, assistant=off).tolist()
        == plain.generate(**prompts(6), **OPTIONS).tolist()
    )
    assert not assisted(model) and not fastspec.report(model).unassisted


def test_a_call_may_name_another(model):
    model.generate(**prompts(6), **OPTIONS, assistant="nasd")
    assert stats(model).assistant == "nasd"


def test_generation_configs_name_one(model, tmp_path):
    """The call's own before the model's, and the model's before the patch's; a saved one names it still."""
    model.generation_config.assistant = "nasd"
    model.generate(**prompts(6), **OPTIONS)
    assert stats(model).assistant == "nasd"
    GenerationConfig(
        assistant={"name": "eagle3", "depth": 3, "top_k": 2, "total_tokens": 6}, **OPTIONS
    ).save_pretrained(tmp_path)
    held = GenerationConfig.from_pretrained(tmp_path)
    model.generate(**prompts(6), generation_config=held)
    assert stats(model).assistant == "eagle3" and stats(model).drafted % 5 == 0
    model.generate(**prompts(6), generation_config=GenerationConfig(**OPTIONS))
    assert stats(model).assistant == "nasd"
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["assistant"] == "nasd"
    before = assisted(model)
    model.generate(**prompts(6), generation_config=GenerationConfig(assistant="none", **OPTIONS))
    assert assisted(model) == before


def test_an_object_in_a_generation_config_is_refused(model):
    """Saving would lose it without a word."""
    with pytest.raises(Unsupported, match="would be lost when the generation_config is saved"):
        model.generate(**prompts(6), generation_config=GenerationConfig(assistant=fastspec.Nasd(), **OPTIONS))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"name": "eagle4"}, "has the name 'eagle4'"),
        ({"name": "nasd", "gama": 3}, "does not fit fastspec.Nasd"),
        ({}, "has the name None"),
        ({"name": ["nasd"]}, r"has the name \['nasd'\]"),
    ],
)
def test_a_dictionary_that_fits_nothing_is_refused(model, given, match):
    with pytest.raises(Unsupported, match=match):
        model.generate(**prompts(6), **OPTIONS, assistant=given)


def test_a_default_that_no_call_could_have_is_refused_at_patch():
    model = shallow_model()
    with pytest.raises(Unsupported, match="assistant 'eagle3' has no head"):
        fastspec.patch(model, assistant="eagle3")
    with pytest.raises(Unsupported, match="is unknown"):
        fastspec.patch(model, assistant="eagle9")
    assert "generate" not in model.__dict__


def test_a_loop_of_ones_own_is_no_cause_for_a_warning(model, recwarn):
    ran = []

    def loop(model, input_ids, **given):
        ran.append(input_ids)
        return input_ids

    model.generate(**prompts(6), custom_generate=loop)
    assert len(ran) == 1 and not fastspec.report(model).unassisted
    assert not [each for each in recwarn if "assist" in str(each.message)]


UNSERVED: dict[str, Any] = {
    "num_beams": {"num_beams": 2},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "static"},
    "inputs_embeds": None,
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_it_cannot_serve_runs_plain(plain, model, name):
    """The same output, one warning however often, and a count; a call that names the assistant is refused."""

    def call(each: Any, **more: Any) -> Any:
        inputs, options = prompts(6), UNSERVED[name] or {}
        if name == "inputs_embeds":
            inputs = {
                "inputs_embeds": each.get_input_embeddings()(inputs["input_ids"]),
                "attention_mask": inputs["attention_mask"],
            }
        out = each.generate(**inputs, **OPTIONS, **options, **more)
        return (out if isinstance(out, torch.Tensor) else out.sequences).tolist()

    with pytest.warns(UserWarning, match="the default assistant cannot serve this call") as told:
        assert call(model) == call(plain)
    assert sum("default assistant" in str(warning.message) for warning in told) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the default assistant")
        call(model)
    assert list(fastspec.report(model).unassisted.values()) == [2] and not assisted(model)
    assert "left to transformers' own generate: 2 calls" in str(fastspec.report(model))
    with pytest.raises(Unsupported):
        call(model, assistant="nasd")


def test_a_reason_that_differs_in_numbers_alone_is_told_once():
    model, plain = (shallow_model(**DYNAMIC) for _ in range(2))
    fastspec.patch(model, assistant="nasd")
    with pytest.warns(UserWarning, match="default assistant") as told:
        for length in (9, 10):
            assert (
                model.generate(**prompts(length), **OPTIONS).tolist()
                == plain.generate(**prompts(length), **OPTIONS).tolist()
            )
    assert len([warning for warning in told if "default assistant" in str(warning.message)]) == 1
    assert list(fastspec.report(model).unassisted.values()) == [1, 1]


def test_a_streamer_hears_a_call_once_that_is_left_to_transformers_late():
    """What is refused behind transformers' preparation goes on there: the streamer has the prompt already."""
    model, plain = fastspec.patch(shallow_model(), assistant="nasd"), shallow_model()
    inputs, heard = prompts(6), []  # type: dict[str, torch.Tensor], list[Any]
    inputs["attention_mask"][0, -1] = 0  # padding on the right: seen when the call is made

    class Told:
        def put(self, value: Any) -> None:
            heard.append(value.tolist())

        def end(self) -> None:
            heard.append("end")

    with pytest.warns(UserWarning, match="default assistant"):
        model.generate(**inputs, **OPTIONS, streamer=Told())
    ours, heard = heard, []
    plain.generate(**inputs, **OPTIONS, streamer=Told())
    assert ours == heard


def test_a_nested_call_runs_plain(plain, model):
    """From a criterion: the model decodes one call at a time with an assistant."""
    inner: list[Any] = []

    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not inner:
            inner.append(model.generate(**prompts(5), **OPTIONS).tolist())
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.warns(UserWarning, match="inside another such call"):
        out = model.generate(**prompts(6), **OPTIONS, stopping_criteria=[criterion])
    assert out.tolist() == plain.generate(**prompts(6), **OPTIONS).tolist()
    assert inner == [plain.generate(**prompts(5), **OPTIONS).tolist()]


def test_unpatch_removes_it_and_copies_keep_it(plain, model):
    twin = copy.deepcopy(model)
    fastspec.unpatch(model)
    want = plain.generate(**prompts(6), **OPTIONS).tolist()
    assert model.generate(**prompts(6), **OPTIONS).tolist() == want
    assert twin.generate(**prompts(6), **OPTIONS).tolist() == want and stats(twin).assistant == "eagle3"
    loaded = pickle.loads(pickle.dumps(twin))
    assert loaded.generate(**prompts(6), **OPTIONS).tolist() == want


def test_generate_batch_does_not_swallow_an_assistant(model):
    """transformers' continuous batching has its own loop; what it would take as a keyword and ignore is refused."""
    with pytest.raises(Unsupported, match="generate_batch takes no assistant="):
        model.generate_batch([[7, 8, 9]], assistant="nasd")
    with pytest.raises(Unsupported, match="generation_config names 'nasd'"):
        model.generate_batch([[7, 8, 9]], generation_config=GenerationConfig(assistant="nasd"))
    with pytest.raises(Unsupported, match="generation_config names 'nasd'"):
        model.init_continuous_batching(generation_config=GenerationConfig(assistant="nasd"))
    assert fastspec.unpatch(model).generate_batch.__func__ is type(model).generate_batch
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching


@pytest.mark.parametrize("where", ["patch", "model"])
def test_a_default_is_left_out_of_continuous_batching_with_a_warning(where, monkeypatch):
    model, begun = shallow_model(), []
    fastspec.patch(model, assistant="nasd" if where == "patch" else None)
    if where == "model":
        model.generation_config.assistant = "nasd"
    monkeypatch.setattr(type(model), "init_continuous_batching", lambda self, *given, **named: begun.append(given))
    for config in (None, GenerationConfig(max_new_tokens=3), model.generation_config):
        with pytest.warns(UserWarning, match="continuous batching takes no assistant") if not begun else nullcontext():
            model.init_continuous_batching(config)
    model.init_continuous_batching(GenerationConfig(assistant="none"))
    [(reason, count)] = session_of(model).unassisted.items()
    assert "continuous batching" in reason and count == 3 and len(begun) == 4


@pytest.mark.parametrize("off", [None, "none"])
def test_a_default_that_the_call_turns_off_is_no_cause_for_a_warning_in_a_batch(off, monkeypatch, recwarn):
    """`generate_batch` begins as `init_continuous_batching` does, in the same call."""
    model, begun = fastspec.patch(shallow_model(), assistant="nasd"), []
    monkeypatch.setattr(type(model), "init_continuous_batching", lambda self, *given, **named: begun.append(named))
    monkeypatch.setattr(
        type(model), "generate_batch", lambda self, inputs, **named: self.init_continuous_batching(**named)
    )
    model.generate_batch([[7, 8, 9]], assistant=off)
    assert begun == [{}] and not session_of(model).unassisted
    assert not [each for each in recwarn if "continuous batching" in str(each.message)]
    with pytest.warns(UserWarning, match="continuous batching takes no assistant"):
        model.generate_batch([[7, 8, 9]])
    assert len(begun) == 2 and sum(session_of(model).unassisted.values()) == 1


def test_no_name_stands_for_the_default(model):
    with pytest.raises(Unsupported, match="assistant='default' is unknown"):
        model.generate(**prompts(5), **OPTIONS, assistant="default")


def test_a_cascade_that_a_stage_refuses_runs_plain():
    """Late: the first stage has answered. The streamer hears the call once."""
    large = shallow_model(**DYNAMIC)
    small = shallow_model(num_hidden_layers=2)
    cascade = fastspec.Cascade(
        stages=[fastspec.Stage(small, name="small")],
        predictor=trained(("small", "large")),
        costs=[1.0, 2.0],
        label="large",
        thresholds=(1.0,),
    )
    fastspec.patch(large, cascade=cascade, assistant="cascade")
    heard: list[Any] = []

    class Told:
        def put(self, value: Any) -> None:
            heard.append(value.tolist())

        def end(self) -> None:
            heard.append("end")

    options = {**prompts(6), "max_new_tokens": 20, "do_sample": False}
    want = shallow_model(**DYNAMIC).generate(**options, streamer=Told())
    expected, heard = heard, []
    with pytest.warns(UserWarning, match="default assistant cannot serve this call.*past 16 this model"):
        assert large.generate(**options, streamer=Told()).tolist() == want.tolist()
    assert heard == expected
    with pytest.raises(Unsupported, match="past 16 this model"):
        large.generate(**options, assistant="cascade")
