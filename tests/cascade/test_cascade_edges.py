"""The cascade's edges: values of the wrong kind, a call's settings in every form that transformers takes, and what a
patch leaves."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, cascaded, stages, trained
from helpers.examples import examples
from helpers.generate import prompts, shallow_model
from helpers.tokenizers import DRAFT, LETTERS, TARGET, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

import fastspec
from fastspec.cascade.config import DTYPES, MODES, QUANTIZATIONS, RULES
from fastspec.cascade.decisions import Rates
from fastspec.errors import CheckpointError, Unsupported
from fastspec.patches.cascade.stages import Patching, StageModel
from fastspec.patches.session import session_of
from fastspec.programs.cli import cascade as cli_cascade
from fastspec.programs.training.cascade_answers import check_items, read_items

HIGH = 1e9
GREEDY = {"do_sample": False, "max_new_tokens": 12}
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.sampled_from(["", "a", "1e3", *MODES, *RULES, *DTYPES]),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(["model", "eagle3", "a"]), scalars, max_size=2),
)


def emitted(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(**options).tolist()


@examples(300)
@given(name=st.sampled_from(list(fastspec.Cascade.__dataclass_fields__)[1:]), value=values)
def test_every_value_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str, value: Any) -> None:
    """Whatever a key is given, from YAML or not: a cascade that can be hashed, or Unsupported."""
    fields = {"stages": ["a"], "predictor": "p", name: value}
    path = tmp_path_factory.getbasetemp() / "drawn.yaml"
    path.write_text(json.dumps(fields).replace("Infinity", ".inf").replace("NaN", ".nan"))
    for make in (lambda: fastspec.Cascade(**fields), lambda: fastspec.Cascade.from_yaml(path)):
        try:
            made = make()
        except Unsupported:
            continue
        assert isinstance(hash(made), int) and 0 <= made.price < float("inf") and made.gamma >= 1


@examples(200)
@given(name=st.sampled_from(list(fastspec.Stage.__dataclass_fields__)), value=values)
def test_every_value_of_a_stage_is_taken_or_refused(name: str, value: Any) -> None:
    try:
        made = fastspec.Stage(**{"model": "a", name: value})
    except Unsupported:
        return
    assert made.dtype in DTYPES and made.quantization in QUANTIZATIONS and isinstance(made.label, str)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("costs: 3", "list of numbers"),
        ("thresholds: abc", "list of numbers"),
        ("price: 1e3", r"1\.0e\+3"),
        ("price: .inf", "finite"),
        ("costs: [1, .inf]", "2 positive"),
        ("gamma: null", "gamma"),
        ("label: 3", "text"),
        ("explain: often", "true or false"),
        ("assistant: cascade", "another"),
        ("tokenizer: 3", "path or hub id"),
        ("stages: [{name: a}]", "model=None must be a transformers model"),
        ("stages: [{model: a, dtype: float99}]", "float99"),
        ("stages: [{model: a, resources: {eagle9: x}}]", "eagle9"),
        ("predictor: [a]", "must be a path"),
    ],
)
def test_values_of_the_wrong_kind_in_yaml_are_refused_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    base = {"stages": "stages: [a]", "predictor": "predictor: p"}
    base[text.split(":")[0]] = text
    (tmp_path / "c.yaml").write_text("\n".join(base.values()))
    with pytest.raises(Unsupported, match=f"c.yaml: .*{message}"):
        fastspec.Cascade.from_yaml(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unsupported, match="cannot be read"):
        fastspec.Cascade.from_yaml(tmp_path / "c.yaml")


def test_tokenizers_by_name_are_loaded_when_first_needed(tmp_path: Path) -> None:
    DRAFT.save_pretrained(tmp_path / "draft")
    TARGET.save_pretrained(tmp_path / "target")
    out = []
    for given_ in ((DRAFT, TARGET), (str(tmp_path / "draft"), tmp_path / "target")):
        small, large = (
            shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(DRAFT)),
            shallow_model(vocab_size=len(TARGET)),
        )
        stage = fastspec.Stage(small, tokenizer=given_[0], name="medium")
        more = {"predictor": trained(NAMED[1:]), "costs": [1.0, 2.0], "price": 0.0}
        fastspec.patch(large, cascade=fastspec.Cascade(stages=[stage], tokenizer=given_[1], label="large", **more))
        ids = torch.tensor([TARGET("abcdxyz", add_special_tokens=False)["input_ids"]])
        out.append(emitted(large, inputs=ids, **GREEDY, assistant="cascade"))
    assert out[0] == out[1]
    large, gone = shallow_model(vocab_size=len(TARGET)), str(tmp_path / "gone")
    fastspec.patch(
        large,
        cascade=fastspec.Cascade(
            stages=[fastspec.Stage(small, tokenizer=gone, name="medium")], tokenizer=gone, label="large", **more
        ),
    )
    with pytest.raises(Unsupported, match="could not load the tokenizer"):
        large.generate(ids, assistant="cascade")


FORMS = [
    {"max_new_tokens": 6},
    {"max_length": 14},
    {"max_new_tokens": 5.5},
    {"max_length": 13.5},
    {},
    {"max_new_tokens": 14, "eos_token_id": [40, 77, 11, 9, 5]},
    {"max_new_tokens": 9, "eos_token_id": [96, 21, 83], "pad_token_id": 3},
    {"max_new_tokens": 8, "suppress_tokens": [5, 36, 21]},
    {"max_length": 14, "max_new_tokens": 3},
]


@pytest.fixture(scope="module")
def climbing() -> Any:
    return cascaded(stages(), price=HIGH)


@pytest.mark.parametrize(
    ("default", "form"),
    [
        pytest.param(
            default,
            form,
            marks=pytest.mark.slow  # a default is read behind a limit of the call, which any limit shows
            if default and ({*form} - {"max_length", "max_new_tokens"} or 0.5 in [n % 1 for n in form.values()])
            else (),
        )
        for default in ({}, {"max_new_tokens": 4}, {"max_length": 15})
        for form in FORMS
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_to_transformers(
    climbing: Any, form: dict[str, Any], default: dict[str, Any]
) -> None:
    """As arguments, in a generation_config, and from the model's own; with a mask and without one."""
    batch = prompts(8, 5, 3)
    held = climbing.generation_config
    climbing.generation_config = GenerationConfig(**{**held.to_diff_dict(), **default})
    try:
        bare = {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, held.pad_token_id)}
        for call in ({**batch, **form}, {**bare, **form}, {**batch, "generation_config": GenerationConfig(**form)}):
            assert emitted(climbing, **call, assistant="cascade") == emitted(climbing, **call)
    finally:
        climbing.generation_config = held


def test_a_generation_config_is_handed_on_in_one(climbing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings beside one are deprecated."""
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", pytest.fail)
    monkeypatch.setattr("transformers.generation.utils.logger.warning", pytest.fail)
    config = GenerationConfig(max_new_tokens=3, eos_token_id=9)
    climbing.generate(**prompts(8, 5, 3), generation_config=config, assistant="cascade")


def test_a_length_that_the_prompts_have_is_refused(climbing: Any) -> None:
    with pytest.raises(Unsupported, match="max_length=5"):
        climbing.generate(**prompts(8, 5, 3), max_length=5, assistant="cascade")


def test_end_tokens_of_a_generation_config_are_end_tokens(climbing: Any) -> None:
    """What was an end token of the call becomes one of the taker's, the first that it names."""
    stage = StageModel(fastspec.Stage(shallow_model()), None, "cpu", Patching(fastspec.patch, fastspec.unpatch))
    stage.held.generation_config.eos_token_id = [9, 4]
    assert (
        stage.ends() == (9, 4)
        and stage.ends(None) == ()
        and stage.ends(7) == (7,)
        and stage.ends(torch.tensor([8, 2])) == (8, 2)
    )
    heard: list[bool] = []
    from fastspec.patches.cascade import loop as cascade

    def told(*args: Any, ended: bool, **more: Any) -> Any:
        heard.append(ended)
        return features(*args, ended=ended, **more)

    features, batch = cascade.features, prompts(6)
    first = emitted(session_of(climbing).resources["cascade"].stages[0].model, **batch, **GREEDY)[0][6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cascade, "features", told)
        climbing.generate(
            **batch, generation_config=GenerationConfig(max_new_tokens=5, eos_token_id=first), assistant="cascade"
        )
    assert heard[0]


def test_a_call_may_not_change_what_the_patch_fixed(climbing: Any) -> None:
    held = session_of(climbing).resources["cascade"].config
    other = fastspec.Stage(held.stages[0].model, name="small", assistant="autoregressive")
    for over in (
        {"memory": 5000},
        {"label": "x"},
        {"assistant": "autoregressive"},
        {"stages": [other, *held.stages[1:]]},
    ):
        with pytest.raises(Unsupported, match=f"differs in {next(iter(over))}"):
            climbing.generate(**prompts(5), assistant=replace(held, **over))
    for over in ({"price": 0}, {"price": 1e308}, {"risk": 0.1}, {"mode": "lossless"}):
        assert climbing.generate(**prompts(5), **GREEDY, assistant=replace(held, **over)).shape[1] <= 17


def test_a_patch_that_fails_leaves_the_stages_alone_and_one_that_ends_ends_whole() -> None:
    small, large = stages(2)
    with pytest.raises(CheckpointError):
        cascaded([small, large], predictor=trained(NAMED))
    assert session_of(small) is None and session_of(large) is None
    model = cascaded([small, large], price=HIGH)
    model.generate(**prompts(5), **GREEDY, assistant="cascade")
    small.generate = "someone else's"
    with pytest.warns(UserWarning, match="someone else"):
        fastspec.unpatch(model)
    assert session_of(small) is None and session_of(large) is None and small.generate == "someone else's"


@pytest.mark.parametrize(
    "asked", [{"stored": True}, {"exact": False}, {"head_bits": 16}, {"backend": "torch"}], ids=str
)
def test_a_patched_stage_has_the_settings_that_are_asked_for(asked: Any) -> None:
    for held in ({}, asked):
        small, large = stages(2)
        fastspec.patch(small, **held)
        model = cascaded([small, large], stages=[fastspec.Stage(small, name="medium", resources=asked)])
        if held:
            model.generate(**prompts(5), **GREEDY, assistant="cascade")
        else:
            with pytest.raises(Unsupported, match=f"patched already, without the {min(asked)} of its resources"):
                model.generate(**prompts(5), **GREEDY, assistant="cascade")


def test_assistants_and_resources_are_checked_before_a_request_needs_them() -> None:
    small, large = stages(2)
    with pytest.raises(Unsupported, match="unknown assistant 'nsad'"):
        cascaded([small, large], stages=[fastspec.Stage(small, name="medium", assistant="nsad")])
    fastspec.patch(small)
    stage = fastspec.Stage(
        small, name="medium", assistant="speculative", resources={"speculative": shallow_model(num_hidden_layers=1)}
    )
    model = cascaded([small, large], stages=[stage])
    with pytest.raises(Unsupported, match="patched already, without the speculative"):
        model.generate(**prompts(5), assistant="cascade")
    fastspec.unpatch(small)
    assert model.generate(**prompts(5), **GREEDY, assistant="cascade").shape[1] <= 17
    assert session_of(small).calls[-1].assistant == "speculative"


def test_rates_are_measured_where_a_stage_cannot_read_the_prompt() -> None:
    found = stages(3)
    found[1] = shallow_model(seed=1, num_hidden_layers=3, max_position_embeddings=16)
    model = cascaded(found, price=HIGH, costs=None)
    assert emitted(model, **prompts(40), **GREEDY, assistant="cascade") == emitted(model, **prompts(40), **GREEDY)


def test_prompts_of_a_stage_with_other_tokens() -> None:
    """One BOS where its tokenizer adds one; left out where the text has none of its tokens; a prompt function that
    gives no text."""
    begins = tokenizer(LETTERS[::-1], [("b", "c")])
    begins.add_special_tokens({"bos_token": "<s>"})
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begins.bos_token_id)]
    )
    small, large = (
        shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(begins)),
        shallow_model(vocab_size=len(TARGET)),
    )
    stage = fastspec.Stage(small, tokenizer=begins, name="medium")
    ids = TARGET("abc", add_special_tokens=False)["input_ids"]
    assert (
        StageModel(stage, TARGET, "cpu", Patching(fastspec.patch, fastspec.unpatch)).read_prompt(ids)
        == begins("abc")["input_ids"]
    )
    assert begins("abc")["input_ids"].count(begins.bos_token_id) == 1
    more = {"tokenizer": TARGET, "label": "large", "predictor": trained(NAMED[1:]), "costs": [1.0, 2.0], "price": 0.0}
    blind = fastspec.Stage(
        shallow_model(seed=1, vocab_size=len(DRAFT)), tokenizer=DRAFT, name="medium", prompt=lambda text: ""
    )
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[blind], **more))
    assert emitted(large, inputs=torch.tensor([ids]), **GREEDY, assistant="cascade") == emitted(
        large, inputs=torch.tensor([ids]), **GREEDY
    )
    assert "left out: the prompt has no tokens" in str(fastspec.report(large).last.explanations[0])
    fastspec.unpatch(large)
    fastspec.patch(large, cascade=fastspec.Cascade(stages=[replace(blind, prompt=lambda text: 3)], **more))
    with pytest.raises(Unsupported, match="must give text"):
        large.generate(torch.tensor([ids]), assistant="cascade")


def test_a_stage_that_is_loaded_late_is_not_given_the_large_models_tokens(tmp_path: Path) -> None:
    shallow_model(seed=1, num_hidden_layers=2, vocab_size=len(DRAFT)).save_pretrained(tmp_path)
    DRAFT.save_pretrained(tmp_path)
    large = shallow_model(vocab_size=len(TARGET))
    cascade = fastspec.Cascade(
        stages=[fastspec.Stage(str(tmp_path), name="medium")],
        tokenizer=TARGET,
        label="large",
        predictor=trained(NAMED[1:]),
        costs=[1, 2],
    )
    fastspec.patch(large, cascade=cascade)
    with pytest.raises(Unsupported, match="suppress_tokens speaks of the large model's tokens"):
        large.generate(torch.tensor([[5, 6]]), suppress_tokens=[3], assistant="cascade")


def test_items_are_refused_by_line_and_ids_must_be_unique(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text('{"id": "a", "prompt": "one\u2028two"}\n\n{"prompt": "three"}\n', encoding="utf-8")
    assert [item.name for item in read_items(first)] == ["a", "first-3"] and len(read_items(first, 1)) == 1
    second.write_text('{"id": "a", "prompt": "four"}')
    with pytest.raises(Unsupported, match="'a' is there twice, in first and second"):
        check_items(read_items(first) + read_items(second), right=True)
    with pytest.raises(Unsupported, match="no items"):
        check_items([], right=True)
    none = "line 1 is no JSON object"
    for text, message in (("{}", 'line 1: not a row with "prompt" or "turns"'), ("[1]", none), ("{", none)):
        second.write_text(text)
        with pytest.raises(Unsupported, match=message):
            read_items(second)


@examples(40)
@given(
    names=st.lists(st.text("ab[/]-.", min_size=1, max_size=60), min_size=2, max_size=4),
    points=st.integers(0, 60),
    price=st.floats(1e-3, 1e9),
)
def test_tables_fit_80_columns(names: list[str], points: int, price: float) -> None:
    """A line for every row, no number cut off, names as they are where there is room; 15 prices at most, first and last
    among them."""
    file = io.StringIO()
    console = Console(highlight=False, markup=False, width=80, file=file)
    cli_cascade._print_rates(
        console, tuple(names), Rates((9999.99,) * len(names), (0.0,) * len(names), (8888.88,) * len(names))
    )
    said_ = {"items": 14042, "ece": 0.0125}
    cli_cascade._print_calibration(console, [{"set": each, "seen_at": each, "stage": each, **said_} for each in names])
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 * (len(names) + 1) and max(map(len, lines)) <= 80
    assert all(
        "9999.99" in line and "8888.88" in line and names[at][:18] in line
        for at, line in enumerate(lines[1 : len(names) + 1])
    )
    assert all("14042  0.01" in line for line in lines[-len(names) :])
    said_ = {
        "kind": "frontier",
        "set": "s",
        "inside": True,
        "cost": 98765.4,
        "quality": 0.5,
        "mixing": 0.4,
        "gain": -0.1,
        "stage": 0.25,
    }
    said_ |= {"stderr": 0.0125, "gain_stderr": 0.125}
    rows = [{**said_, "price": price + at} for at in range(points)]
    outside = {**said_, "inside": False, "price": 3.0}
    file.truncate(file.seek(0))
    cli_cascade._print_frontier(console, [outside, *rows])
    lines = file.getvalue().splitlines()[3:]
    assert len(lines) == min(points, 15) and all(
        "98765.4" in line and "-0.100  0.125  " in line and len(line) <= 80 for line in lines
    )
    shown = [f"{row['price']:{'.0f' if row['price'] >= 10 else '.3g'}}" for row in (*rows[:1], *rows[-1:])]
    assert [line.split()[0] for line in (*lines[:1], *lines[-1:])] == shown


@pytest.mark.parametrize("name", ["stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"])
def test_what_may_keep_a_state_over_the_batch_is_refused(name):
    """The stages answer some of the rows each: none of them makes plain decoding's calls."""

    def own(*args, **kwargs):
        raise AssertionError("never called")

    large = cascaded(stages(2))
    with pytest.raises(Unsupported, match="may keep a state over a whole batch"):
        large.generate(
            **prompts(6), max_new_tokens=4, assistant="cascade", **{name: own if name.startswith("prefix") else [own]}
        )
