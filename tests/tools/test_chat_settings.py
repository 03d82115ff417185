"""What the chat's commands for trees, early exits and storages make the assistants do, and when a kept storage goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat import make_chat, screen, target, tokenizer
from helpers.examples import examples
from helpers.generate import bigram, seer, seer1
from helpers.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation.drafters.nasd import NasdDecoding
from fastspec.programs.chat.commands import execute
from fastspec.programs.chat.loop import converse, respond
from fastspec.programs.chat.session import Chat, read_saved
from fastspec.programs.chat.settings import Settings, read_own
from fastspec.programs.chat.view import AnswerStreamer
from fastspec.programs.compare import BASELINE as PLAIN


@pytest.fixture
def chat() -> Chat:
    return make_chat()


@pytest.fixture(scope="module")
def eagles() -> Chat:
    model = target(bigram())
    fastspec.patch(model, eagle2=seer1(model), eagle3=seer(model))
    return Chat(
        model, tokenizer(), Settings(model="tiny", resources=(), assistants=("eagle2", "eagle3"), max_new_tokens=12)
    )


def answered(chat: Chat, strategy: str, prompt: str = "w10 w11") -> tuple[list[int], list[int]]:
    """The tokens of a strategy's answer, and the nodes of each round's tree."""
    streamer = AnswerStreamer(chat.tokenizer, screen(), trees=True)
    answer = chat.answer(prompt, strategy, streamer)
    return answer.tokens, [len(found.tokens) for found in streamer.trees or ()]


@examples(8)
@given(
    nodes=st.integers(1, 40), more=st.lists(st.integers(0, 5), max_size=2), name=st.sampled_from(["eagle2", "eagle3"])
)
def test_trees_have_the_size_asked_for_or_are_refused(eagles: Chat, nodes: int, more: list[int], name: str) -> None:
    plain, _ = answered(eagles, PLAIN)
    try:
        wanted = fastspec.Eagle3(total_tokens=nodes, **dict(zip(("depth", "top_k"), more, strict=False)))
    except Unsupported:
        before = eagles.settings
        with pytest.raises(Unsupported):
            execute(eagles, f"/tree {nodes} {' '.join(map(str, more))}")
        assert eagles.settings == before
        return
    told = execute(eagles, f"/tree {nodes} {' '.join(map(str, more))}")
    tokens, trees = answered(eagles, name)
    shape = wanted.shape("cpu")
    assert tokens == plain and set(trees) == {shape.total_tokens}
    assert told == f"tree: {nodes} nodes, depth {shape.depth}, top_k {shape.top_k}"
    assert "default: 16 nodes, depth 3, top_k 4" in execute(eagles, "/tree default")
    assert set(answered(eagles, name)[1]) == {16}


def test_an_automatic_tree_is_measured_before_the_answer_is_timed(eagles: Chat) -> None:
    assert execute(eagles, "/tree auto 2 3") == "tree: auto, at most 16 nodes, depth 2, top_k 3"
    config = fastspec.Eagle3(total_tokens="auto", depth=2, top_k=3)
    assert eagles.settings.assistant("eagle3") == config
    asked: list[dict[str, Any]] = []
    real = eagles.model.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(eagles.model.__dict__, "generate", lambda **given: asked.append(given) or real(**given))
        _, trees = answered(eagles, "eagle3")
        answered(eagles, "eagle3")
    assert [given["max_new_tokens"] for given in asked] == [4, 12, 12] and {given["assistant"] for given in asked} == {
        config
    }
    assert set(trees) <= set(fastspec.report(eagles.model).trees[config, 1].sizes)
    execute(eagles, "/tree default")


def test_a_tree_that_the_head_cannot_draft_is_refused_where_it_answers(eagles: Chat) -> None:
    before = eagles.settings
    with pytest.raises(Unsupported, match="draft vocabulary of 97"):
        execute(eagles, "/tree 60 1 98")
    assert eagles.settings == before


def test_early_exit_drafts_with_the_targets_own_layers(chat: Chat) -> None:
    plain, _ = answered(chat, PLAIN)
    converse(chat, ["/early_exit 4", "/gamma 3", "/assistant speculative"], screen(), strict=True)
    tokens, trees = answered(chat, "speculative")
    assert tokens == plain and set(trees) == {4}
    before = chat.settings
    with pytest.raises(Unsupported, match="/resource speculative SOURCE or /early_exit K"):
        execute(chat, "/early_exit off")
    assert chat.settings == before
    execute(chat, "/assistant autoregressive")
    assert (
        execute(chat, "/early_exit off") == "early_exit: off" and chat.settings.field("speculative.early_exit") is None
    )


def test_an_early_exit_that_another_model_has_not_leaves_speculative_out(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(chat, ["/early_exit 4", "/assistant speculative,transformers"], screen(), strict=True)
    monkeypatch.setattr(
        "fastspec.programs.chat.settings.load_model",
        lambda name, *rest: (target(tiny_model(num_hidden_layers=3)), tokenizer()),
    )
    assert "speculative is left out: early_exit=4: the target has 3 layers, so at most 2" in execute(
        chat, "/model other"
    )
    assert chat.settings.assistants == (PLAIN,)


def test_without_stop_if_unknown_nasd_always_drafts(chat: Chat) -> None:
    execute(chat, "/stop_if_unknown off")
    assert chat.settings.assistant("nasd").stop_if_unknown is False
    assert min(answered(chat, "nasd")[1]) >= 9  # a chain of eight, or more
    execute(chat, "/stop_if_unknown on")
    assert 1 in answered(chat, "nasd")[1]


COMMANDS_OF_STORAGES = (
    "/reset",
    "/gamma 4",
    "/ngram 3",
    "/ngram default",
    "/storage basic chat",
    "/storage suffix chat",
    "/storage one_level",
    "/storage suffix",
    "/storage ngram answer",
)


@examples(8)
@given(
    lines=st.lists(
        st.one_of(st.sampled_from(COMMANDS_OF_STORAGES), st.sampled_from(["w10", "w11 w12"])), min_size=4, max_size=9
    )
)
def test_a_storage_is_kept_until_it_is_reset_or_changed(lines: list[str]) -> None:
    """Drafted and accepted tokens are those of plain calls with a storage that is made anew exactly then; the warm-up
    leaves no trace."""
    chat, twin = make_chat(), fastspec.patch(target())
    execute(chat, "/storage basic chat")
    kept: Any = None
    for line in lines:
        if line.startswith("/"):
            before = chat.settings
            execute(chat, line)
            changed = any(before.field(name) != chat.settings.field(name) for name in ("nasd.storage", "nasd.n"))
            changed = changed or before.storage_per != chat.settings.storage_per
            kept = None if changed or line == "/reset" else kept
            continue
        config = chat.settings.assistant("nasd")
        if chat.settings.storage_per == "chat":
            kept = (
                kept
                or NasdDecoding(config).drafter(rows=1, capacity=0, device="cpu", ops=None, process=None).storages[0]
            )
            config = fastspec.Nasd(gamma=config.gamma, storage=kept)
        ids = chat._encode([{"role": "user", "content": line}])
        out = twin.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            assistant=config,
            return_dict_in_generate=True,
        )
        answer = chat.answer(line, "nasd", AnswerStreamer(chat.tokenizer, screen()))
        assert answer.tokens == out.sequences[0, ids.shape[1] :].tolist()
        assert (answer.drafted, answer.accepted) == (out.fastspec.drafted, out.fastspec.accepted)


def test_what_was_generated_once_is_drafted_in_the_next_turn_of_the_chat(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(chat, ["/storage suffix chat", "/assistant nasd", "/cache off"], screen(), strict=True)
    first = chat.answer("w10", "nasd", AnswerStreamer(chat.tokenizer, screen()))
    again = chat.answer("w10", "nasd", AnswerStreamer(chat.tokenizer, screen()))
    assert again.accepted > first.accepted and again.tokens == first.tokens
    monkeypatch.setattr("fastspec.programs.chat.settings.load_model", lambda name, *rest: (target(), tokenizer()))
    execute(chat, "/model other")  # its tokens may be others
    assert chat.answer("w10", "nasd", AnswerStreamer(chat.tokenizer, screen())).accepted == first.accepted


def test_help_shows_the_values(chat: Chat) -> None:
    lines = ["/storage suffix chat", "/early_exit 2", "/tree 12 3 4", "/stop_if_unknown off"]
    converse(chat, lines, screen(), strict=True)
    shown = {}
    for name in ("storage", "early_exit", "tree", "stop_if_unknown"):
        console = screen()
        console.print(execute(chat, f"/help {name}"))
        shown[name] = console.export_text().splitlines()[1]
    ends = {
        "storage": "suffix, one per chat",
        "early_exit": "2",
        "tree": "12 nodes, depth 3, top_k 4",
        "stop_if_unknown": "off",
    }
    assert all(shown[name].rstrip().endswith(f"  {end}") for name, end in ends.items())


def test_settings_are_saved_as_data(chat: Chat) -> None:
    converse(chat, ["/storage suffix chat", "/tree auto", "/assistant nasd"], screen(), strict=True)
    respond(chat, "w10", screen())
    saved = chat.as_json()["settings"]
    given = {"nasd.storage": "suffix", "eagle2.total_tokens": "auto", "eagle3.total_tokens": "auto"}
    assert saved["storage_per"] == "chat" and dict(saved["given"]) == given


OWN = """
import torch
from transformers import LogitsProcessor
import fastspec

class NoTwelve(LogitsProcessor):
    def __call__(self, ids, scores):
        return scores.index_fill(1, torch.arange(12, 30), -torch.inf)

made = []

def storage():
    made.append(fastspec.NgramStorage(n=3))
    return made[-1]

PROCESSORS = {"low": NoTwelve, "low too": NoTwelve()}
STORAGES = {"short": storage}
"""


@pytest.fixture
def own(tmp_path: Path) -> Chat:
    (tmp_path / "own.py").write_text(OWN)
    chat = make_chat()
    return Chat(chat.model, chat.tokenizer, chat.settings, **read_own(tmp_path / "own.py"))


@pytest.mark.some("low")
@pytest.mark.parametrize("name", ["low", "low too"])
def test_a_processor_of_ones_own_changes_every_strategys_answer(own: Chat, name: str) -> None:
    execute(own, "/assistant transformers,autoregressive,nasd")
    free = respond(own, "w10", screen()).answers[0].tokens
    assert set(free) & set(range(12, 30))
    execute(own, "/reset")
    assert execute(own, f"/logits_processor '{name}'")
    turn = respond(own, "w10", screen())
    assert not set(turn.answers[0].tokens) & set(range(12, 30))
    assert [turn.identical(answer) for answer in turn.answers] == [None, True, True]
    execute(own, "/reset")
    execute(own, "/logits_processor none")
    assert respond(own, "w10", screen()).answers[0].tokens == free


def test_a_storage_of_ones_own_is_made_for_each_answer_or_once(own: Chat) -> None:
    made = own.storages["short"].__globals__["made"]
    asked: list[Any] = []
    real = own.model.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(own.model.__dict__, "generate", lambda **given: asked.append(given) or real(**given))
        execute(own, "/storage short")
        for _ in range(2):
            answered(own, "nasd")
        execute(own, "/storage short chat")
        for _ in range(2):
            answered(own, "nasd")
    given = [each["assistant"].storage for each in asked if "streamer" in each]
    assert given == [made[0], made[1], made[2], made[2]] and len(made) == 3
    with pytest.raises(Unsupported, match="'short' is yours: /ngram default"):
        execute(own, "/ngram 3")
    assert execute(own, "/storage suffix answer") == "storage: suffix, one per answer"
    assert own.settings.own_storage is None


def test_a_saved_chat_asks_for_what_it_was_given(own: Chat, tmp_path: Path) -> None:
    lines = ["/logits_processor low", "/storage short chat", f"/save {tmp_path / 'chat.json'}"]
    converse(own, lines, screen(), strict=True)
    saved = read_saved(tmp_path / "chat.json").settings
    assert saved == own.settings
    with pytest.raises(Unsupported, match="logits processor 'low' of your own is unknown: there are none: --own FILE"):
        make_chat().reopen(saved)


def test_a_file_of_ones_own_is_checked(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no such file"):
        read_own(tmp_path / "none.py")
    for text in ("x = 1", "STORAGES = 3"):
        (tmp_path / "own.py").write_text(text)
        with pytest.raises(Unsupported, match="must assign dictionaries to ASSISTANTS, PROCESSORS, STORAGES"):
            read_own(tmp_path / "own.py")
    with pytest.raises(Unsupported, match="give yours another name"):
        Chat(None, None, Settings(), storages={"suffix": fastspec.SuffixStorage})


def test_the_example_of_ones_own_drafts_and_changes_scores() -> None:
    example = Path(__file__).parents[2] / "examples" / "own_in_chat.py"
    made = make_chat()
    chat = Chat(made.model, made.tokenizer, made.settings, **read_own(example))
    lines = [
        "/cache off",
        "/length 40",
        "/assistant transformers,nasd",
        "/storage last chat",
        "w10",
        "/reset",
        "/logits_processor fresh",
        "w10",
    ]
    converse(chat, lines[:5], screen(), strict=True)
    plain, drafted = chat.turns[0].answers
    assert plain.tokens == drafted.tokens
    again = chat.answer("w10", "nasd", AnswerStreamer(chat.tokenizer, screen()))
    assert again.drafted > 0
    converse(chat, lines[5:], screen(), strict=True)
    fresh, drafted = chat.turns[0].answers
    assert fresh.tokens == drafted.tokens != plain.tokens
