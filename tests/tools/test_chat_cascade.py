"""The cascade in the chat: what is shown of its decisions, whose words are compared, and what it keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cascade import trained
from helpers.chat import cascade_file, interrupt_after, screen, target, tokenizer
from helpers.examples import examples
from helpers.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fastspec
from fastspec.cascade.predictor import Predictor
from fastspec.errors import CheckpointError, FastSpecError, Unsupported
from fastspec.patches.hf.cache import CACHE
from fastspec.programs.chat.commands import execute
from fastspec.programs.chat.loop import converse, respond
from fastspec.programs.chat.session import Chat
from fastspec.programs.chat.settings import Settings
from fastspec.programs.chat.view import ACCEPTED, STYLES, AnswerStreamer
from fastspec.programs.cli.app import app
from fastspec.programs.compare import BASELINE as PLAIN

HIGH = 1e9
LONG = " ".join(f"w{number}" for number in range(10, 50))
"""A prompt that is worth keeping."""


def small_model() -> Any:
    return target(tiny_model(seed=1, num_hidden_layers=2))


def cascade_chat(*assistants: str, own: dict[str, Any] | None = None, **over: Any) -> Chat:
    """A chat of two stages: at price 0 the small one answers, at a high price the large one."""
    stage, large = fastspec.Stage(small_model(), name="small"), target()
    given = {"predictor": trained(("small", "large")), "costs": [1.0, 2.0], "price": 0.0, **over}
    cascade = fastspec.Cascade(stages=[stage], label="large", tokenizer=tokenizer(), **given)
    names = assistants or ("cascade",)
    chosen = Settings(model="tiny", resources=(), assistants=names, max_new_tokens=12)
    return Chat(fastspec.patch(large, cascade=cascade), tokenizer(), chosen, own)


def alone(chat: Chat, model: Any, prompt: str) -> list[int]:
    """What a model says to the prompt by itself."""
    ids = chat._encode([*chat.conversation, {"role": "user", "content": prompt}])
    return model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


def shown(chat: Chat, *lines: str) -> str:
    console = screen()
    converse(chat, lines, console, strict=True)
    return console.export_text()


def test_a_smaller_stage_that_answers_is_named_and_not_compared() -> None:
    chat = cascade_chat(PLAIN, "cascade", "nasd")
    expected = alone(chat, small_model(), "w10 w11")
    text = shown(chat, "w10 w11")
    plain, cascade, nasd = chat.turns[0].answers
    assert cascade.tokens == expected != plain.tokens and nasd.tokens == plain.tokens
    assert [chat.turns[0].identical(answer) for answer in chat.turns[0].answers] == [None, None, True]
    assert "cascade: stage 0 answered, 0 tokens were taken over" in text
    assert str(cascade.explanation) in text and "P(acceptable)" in text and "going on" in text
    assert next(line for line in text.splitlines() if line.startswith("cascade  ")).split()[-4:] == [
        "-",
        "-",
        "stage",
        "0",
    ]
    assert f"The 2 greedy answers of {PLAIN}, nasd are identical, token for token." in text
    assert "cascade is not compared: its stage 0, small, answered, not the large model." in text
    assert "differs" not in text


def test_the_large_models_answer_is_compared_like_any_other() -> None:
    chat, console = cascade_chat("cascade", PLAIN, price=HIGH), screen()
    converse(chat, ["w10 w11"], console)
    styled = console.export_text(styles=True, clear=False).splitlines()
    text = console.export_text()
    cascade, plain = chat.turns[0].answers
    first, second = cascade.explanation.visits
    assert cascade.tokens == plain.tokens and chat.turns[0].identical(plain) is True
    assert f"cascade: stage 1 answered, {second.kept_tokens} tokens were taken over" in text
    assert all(line in text for line in str(cascade.explanation).splitlines())
    assert [STYLES[ACCEPTED] == "bold green" and "1;32m" in line for line in styled if "stage " in line][1:] == [
        False,
        True,
    ]
    assert first.why.startswith("went on") and "answered: it is the last" in text
    assert "The 2 greedy answers are identical" in text and "not compared" not in text


@examples(5)
@given(order=st.permutations(["cascade", "climbs", "autoregressive", PLAIN]), temperature=st.sampled_from([0, 0, 1]))
def test_in_any_order_only_what_must_agree_is_compared(order: list[str], temperature: float) -> None:
    chat = cascade_chat(*order)
    chat.own = {"climbs": replace(chat._cascade("cascade"), price=HIGH)}
    text = shown(chat, f"/temperature {temperature}", "w10 w11")
    turn = chat.turns[0]
    others = [answer for answer in turn.answers if answer.strategy != "cascade"]
    if temperature:
        assert turn.reference is None and "identical" not in text and "compared" not in text
        return
    assert turn.reference is others[0]
    assert [turn.identical(answer) for answer in others] == [None, True, True]
    assert turn.identical(next(answer for answer in turn.answers if answer.strategy == "cascade")) is None
    assert "differs" not in text and text.count("is not compared") == 1 and "The 3 greedy answers of" in text


def test_alone_a_cascade_is_compared_with_nothing() -> None:
    text = shown(cascade_chat(), "w10")
    assert "compared" not in text and "identical" not in text and "stage 0, small: 12 new tokens" in text


def test_json_carries_the_decisions_as_data(tmp_path: Path) -> None:
    chat = cascade_chat("cascade", PLAIN, price=HIGH)
    shown(chat, "w10 w11", f"/save {tmp_path / 'chat.json'}")
    saved, plain = json.loads((tmp_path / "chat.json").read_text())["turns"][0]["answers"]
    told = chat.turns[0].answers[0].explanation
    assert (saved["explanation"]["stage"], saved["explanation"]["reused"]) == (1, told.reused)
    assert [visit["why"] for visit in saved["explanation"]["visits"]] == [visit.why for visit in told.visits]
    first = saved["explanation"]["visits"][0]
    assert first["quality"] == list(told.visits[0].quality) and first["stop_value"] > first["go_on_value"] > 0
    assert (saved["acceptance_length"], saved["exact"], plain["explanation"], plain["exact"]) == (
        None,
        True,
        None,
        True,
    )


@pytest.mark.some("1000000000.0")
@pytest.mark.parametrize("price", [0.0, HIGH])
def test_a_cascade_keeps_caches_of_its_own(price: float) -> None:
    chat = cascade_chat("cascade", "autoregressive", price=price, memory=10_000_000)
    without = cascade_chat("cascade", price=price)
    asked: list[dict[str, Any]] = []
    real = chat.model.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            chat.model.__dict__, "generate", lambda *given, **named: asked.append(named) or real(*given, **named)
        )
        shown(chat, "/cache on", LONG)
        assert fastspec.report(chat.model).memory.hits == 0  # nothing of the warm-up is left
        shown(chat, "w12 w13", "w14")
    shown(without, LONG, "w12 w13", "w14")
    assert [turn.answers[0].tokens for turn in chat.turns] == [turn.answers[0].tokens for turn in without.turns]
    assert not any(CACHE in named for named in asked if named.get("assistant") == "cascade")
    assert any(CACHE in named for named in asked if named.get("assistant") == fastspec.Autoregressive.name)
    hits = fastspec.report(chat.model).memory.hits
    assert hits > 0 and chat.turns[1].answers[1].reused > 0
    shown(chat, "/cache", "w15")
    assert fastspec.report(chat.model).memory.hits == hits
    shown(chat, "/reset", LONG)
    assert fastspec.report(chat.model).memory.hits == hits


@pytest.mark.parametrize("order", [("cascade", PLAIN), (PLAIN, "cascade")])
def test_an_interrupt_between_stages_leaves_the_chat_usable(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    chat = cascade_chat(*order, price=HIGH, memory=10_000_000)
    shown(chat, "w9", "/reset")  # warm
    real = Predictor.score

    def score(*given: Any) -> Any:
        monkeypatch.setattr(Predictor, "score", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "score", score)
    text = shown(chat, "w10")
    assert "cascade (stopped)" in text and "compared" not in text and "mixture" not in text
    assert [turn.prompt for turn in chat.turns] == ([] if order[0] == "cascade" else ["w10"])  # it had said nothing yet
    shown(chat, "w11")
    first, second = chat.turns[-1].answers
    assert first.tokens == second.tokens and {first.explanation is None, second.explanation is None} == {True, False}


def test_an_interrupt_while_the_answer_is_printed_keeps_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = cascade_chat("cascade", PLAIN)
    expected = alone(chat, small_model(), "w10")
    interrupt_after(monkeypatch, 3)
    text = shown(chat, "w10", "w11")
    (stopped,) = chat.turns[0].answers
    assert stopped.tokens == expected[:3] and stopped.stopped and stopped.explanation is None
    assert chat.turns[0].identical(stopped) is None and "cascade (stopped)" in text
    assert len(chat.turns[1].answers) == 2


def test_the_stages_of_a_cascade_show_no_trees_and_its_other_modes_do() -> None:
    text = shown(cascade_chat(price=HIGH), "/debug on", "w10 w11")
    assert "round 1" not in text and "stage 1, large" in text
    for over in ({"mode": "lossless"}, {"mode": "token", "alpha": "lossless"}):
        chat = cascade_chat("cascade", PLAIN, **over)
        text = shown(chat, "/debug on", "/cache on", "w10 w11", "w12")
        assert "round 1: " in text and text.count("The 2 greedy answers are identical") == 2
        assert all(turn.answers[0].acceptance_length >= 1 for turn in chat.turns)


def test_a_mixture_of_two_models_is_not_compared() -> None:
    chat = cascade_chat(PLAIN, "cascade", mode="token", rule="token_v2", alpha=1.0)
    execute(chat, "/cache on")
    for prompt in ("w10 w11", "w12 w13"):
        expected = alone(chat, small_model(), prompt)
        text = shown(chat, prompt)
        plain, mixed = chat.turns[-1].answers
        assert mixed.tokens == expected and mixed.reused == 0 and (plain.reused > 0) == (prompt != "w10 w11")
    assert "mixture" in text and "cascade is not compared: its tokens follow a mixture of two models." in text


@pytest.fixture
def plain_chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat without a cascade; `load_model` makes tiny models."""
    made = {"small": small_model}
    for module in ("chat.settings", "cli.options"):
        monkeypatch.setattr(
            f"fastspec.programs.{module}.load_model",
            lambda name, *rest, **options: (made.get(Path(name).name, target)(), tokenizer()),
        )
    monkeypatch.setattr("fastspec.programs.cli.options.check_model", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    chosen = Settings(model="tiny", resources=(), assistants=(PLAIN,), max_new_tokens=12)
    return Chat.open(chosen)


@pytest.mark.parametrize("named", [False, True])
def test_a_resource_is_read_from_yaml_with_the_chats_tokenizer(
    plain_chat: Chat, tmp_path: Path, capsys: Any, named: bool
) -> None:
    more = f"\ntokenizer: {tmp_path / 'small'}" if named else ""
    chat, path = plain_chat, cascade_file(tmp_path, small_model(), f"price: 0.0\nexplain: true{more}")
    expected = alone(chat, small_model(), "w10 w11")
    execute(chat, f"/resource cascade {path}")
    assert chat._cascade("cascade").tokenizer is chat.tokenizer
    text = shown(chat, "/assistant cascade", "w10 w11")
    assert chat.turns[0].answers[0].tokens == expected and text.count("stage 0, small:") == 1
    assert "stage 0" not in capsys.readouterr().out  # what `explain` would print is on the screen already


def test_a_cascade_that_cannot_be_read_leaves_the_one_before(plain_chat: Chat, tmp_path: Path) -> None:
    chat, path = plain_chat, cascade_file(tmp_path, small_model())
    shown(chat, f"/resource cascade {path}", "/assistant cascade", "w10 w11")
    before = chat.settings
    text = Path(path).read_text()
    cases: list[tuple[str, type[FastSpecError], str]] = [
        ("size: 3", Unsupported, "unknown key size"),
        ("stages: [", Unsupported, "cannot be read"),
        ("", Unsupported, "keys and values"),
        (text + "tokenizer: small\n", Unsupported, "could not load the tokenizer 'small'"),
        (text + "thresholds: [2]\n", Unsupported, "probabilities"),
        (text.replace("name: small", "name: tiny"), CheckpointError, "tiny"),
    ]
    for wrong, error, words in cases:
        Path(path).write_text(wrong)
        with pytest.raises(error, match=words):
            execute(chat, f"/resource cascade {path}")
        assert chat.settings == before
        chat.reset()
        assert respond(chat, "w10 w11", screen()).answers[0].explanation is not None
    Path(path).unlink()
    with pytest.raises(Unsupported, match="cannot be read"):
        execute(chat, f"/resource cascade {path}")
    assert chat.answer("w10", "cascade", AnswerStreamer(chat.tokenizer, screen())).explanation is not None
    assert "cascade is left out" in execute(chat, "/model other")


def test_a_cascade_on_the_command_line(plain_chat: Chat, tmp_path: Path) -> None:
    path = cascade_file(tmp_path, small_model(), f"price: {HIGH}")
    fixed = [
        "chat",
        "--model",
        "tiny",
        "--max-new-tokens",
        "8",
        "--resource",
        f"cascade={path}",
        "--assistant",
        "cascade,transformers",
    ]
    done = CliRunner().invoke(app, [*fixed, "--prompt", "w10 w11", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["turns"][0]["answers"]
    assert found[0]["explanation"]["visits"][1]["name"] == "large" and found[1]["identical"] is True
    done = CliRunner().invoke(app, [*fixed, "--prompt", "w10 w11"])
    assert done.exit_code == 0 and "cascade: stage 1 answered" in done.output
    done = CliRunner().invoke(app, [*fixed, "--resource", "cascade=none.yaml", "--prompt", "w10"])
    assert done.exit_code == 1 and "none.yaml cannot be read" in done.output and "Traceback" not in done.output
