"""Loop of a chat: lines in, answers and tables out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.tree import Tree

from fastspec.errors import FastSpecError
from fastspec.programs.chat import view
from fastspec.programs.chat.commands import execute
from fastspec.programs.chat.session import BEAMS, Chat, ChatTurn, SavedChat
from fastspec.programs.chat.settings import Settings, read_own

if TYPE_CHECKING:
    from rich.console import Console


def run_chat(
    settings: Settings,
    console: Console,
    prompts: list[str] | None = None,
    saved: SavedChat | None = None,
    own: str | None = None,
) -> Chat:
    """Load what the settings name and converse over `prompts`, where errors are raised; without any over what is typed,
    or standard input. Goes on from a `saved` chat, with what the Python file `own` adds; returns the chat."""
    chat = Chat.open(settings, **({} if own is None else read_own(own)))
    if saved is not None:
        chat.turns, chat.conversation = list(saved.turns), list(saved.conversation)
    console.print(f"{settings.model} on {chat.model.device}, {chat.dtype}; /help lists the commands", highlight=False)
    lines: Iterable[str] = prompts or sys.stdin
    if not prompts and sys.stdin.isatty():
        from fastspec.programs.chat.terminal import terminal_lines

        lines = terminal_lines(chat)
    converse(chat, lines, console, strict=bool(prompts))
    return chat


def converse(chat: Chat, lines: Iterable[str], console: Console, *, strict: bool = False) -> None:
    """Take lines until they end or /quit: commands start with a slash, everything else is a prompt. An error is one
    line, and the chat goes on; with `strict` it is raised."""
    console.print(view.legend())
    for line in lines:
        if not line.strip():
            continue
        try:
            take(chat, line.rstrip("\n"), console)
        except KeyboardInterrupt:
            console.print("\nstopped", style="yellow")
        except (FastSpecError, RuntimeError, ValueError) as error:  # the last two are torch's and transformers'
            if strict:
                raise
            console.print(f"error: {error}", style="red", markup=False, highlight=False)
        if chat.over:
            break


def take(chat: Chat, line: str, console: Console) -> None:
    if not line.startswith("/"):
        respond(chat, line.strip(), console)
        return
    shown = execute(chat, line)
    if isinstance(shown, str):
        console.print(shown, style="dim", markup=False, highlight=False)
    elif shown is not None:
        console.print(shown)


def respond(chat: Chat, prompt: str, console: Console) -> ChatTurn:
    """Answer a prompt with every strategy in turn, and compare them. An interrupt ends the turn."""
    turn, names = ChatTurn(prompt, chat.settings), chat.strategies()
    below: list[str | Tree] = []
    beside = chat.settings.columns and 1 < len(names) <= console.width // view.COLUMN
    with view.Columns(console, names) if beside else nullcontext() as columns:
        for name in names:
            if columns is None:
                console.print(f"\n[bold]{escape(name)}[/]")
            shown: Any = console if columns is None else view.Column(columns, name)
            streamer = view.AnswerStreamer(chat.tokenizer, shown, trees=chat.settings.debug)
            answer = chat.answer(prompt, name, streamer)
            turn.answers.append(answer)
            if name == BEAMS:
                shown.print(answer.text, markup=False, highlight=False)
            rounds = enumerate(streamer.trees or (), 1)
            trees = [view.round_tree(chat.tokenizer, number, found) for number, found in rounds]
            trees += [view.stage_tree(answer.explanation)] if answer.explanation is not None else []
            if columns is None:
                _print_all(console, trees)
            elif trees:
                below += [f"\n[bold]{escape(name)}[/]", *trees]
            if answer.stopped:
                shown.print("\nstopped", style="yellow")
                break
    _print_all(console, below)
    chat.keep(turn)
    console.print()
    console.print(view.turn_table(turn))
    told = view.verdict_line(turn, chat.dtype)
    if told is not None:
        console.print(told, highlight=False)
    return turn


def _print_all(console: Console, shown: Sequence[str | Tree]) -> None:
    for each in shown:
        console.print(each, highlight=False)
