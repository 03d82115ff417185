"""The chat's answers beside each other."""

from __future__ import annotations

import io

import pytest
from helpers.chat import make_chat, screen
from rich.console import Console

from fastspec.patches.call import refusals
from fastspec.programs.chat.loop import converse, respond
from fastspec.programs.chat.session import BEAMS, Chat
from fastspec.programs.chat.view import COLUMN
from fastspec.programs.compare import BASELINE as PLAIN


@pytest.fixture
def chat() -> Chat:
    return make_chat()


@pytest.mark.parametrize(("width", "beside"), [(2 * COLUMN - 1, False), (2 * COLUMN, True), (200, True)])
def test_answers_stand_beside_each_other_where_there_is_room(chat: Chat, width: int, beside: bool) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    converse(chat, ["/columns on", "/beams 2", "/length 4", "w10 w11"], console)
    text = console.export_text()
    assert any("autoregressive" in line and BEAMS in line for line in text.splitlines()) == beside
    for answer in chat.turns[0].answers:
        assert answer.text in text
    one = Console(record=True, width=width, file=io.StringIO())
    converse(chat, ["/beams 1", "w10"], one)
    assert "\nautoregressive\n" in one.export_text()  # a single answer has the whole width


def test_columns_show_every_answer_and_its_trees_below(chat: Chat) -> None:
    chat.settings = chat.settings.replace(
        assistants=("nasd", "autoregressive", PLAIN), debug=True, columns=True, max_new_tokens=20
    )
    console = Console(record=True, width=120, file=io.StringIO())
    turn = respond(chat, "w10 w11 w10 w11", console)
    text = console.export_text()
    top, below = text.split("round 1:", 1)
    columns = [" ".join(line[at * 40 : at * 40 + 40].strip() for line in top.splitlines()[1:]) for at in range(3)]
    for answer, shown in zip(turn.answers, columns, strict=True):
        assert " ".join(answer.text.split()) in " ".join(shown.split())
    assert top.rstrip().endswith("nasd") and "round 2:" in below and "\nautoregressive\nround 1:" in below


def test_an_error_in_columns_leaves_the_terminal_usable(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "position_rows", lambda model: 512)  # as where positions lie in a table
    chat.settings = chat.settings.replace(assistants=("autoregressive", PLAIN), columns=True)
    console = screen()
    converse(chat, ["w9 " * 600, "w10"], console)
    assert "max_position_embeddings" in console.export_text()
    assert [turn.prompt for turn in chat.turns] == ["w10"]
