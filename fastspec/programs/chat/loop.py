"""Loop of a chat: lines from a terminal or elsewhere in, answers and tables out."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from fastspec.errors import FastSpecError
from fastspec.programs.chat import view
from fastspec.programs.chat.commands import COMMANDS, execute
from fastspec.programs.chat.session import BEAMS, Chat, ChatTurn, SavedChat
from fastspec.programs.chat.settings import Settings, read_own


class CommandCompleter(Completer):
    """Completes a command's name and its first two arguments, name by name where one is a list."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        if not space:
            for each, row in COMMANDS.items():
                if each.startswith(name[1:]):
                    yield Completion(f"/{each}", -len(name), display=row.usage, display_meta=row.what)
            return
        *before, word = rest.split(" ")
        if name[1:] not in COMMANDS or len(before) >= len(choices := COMMANDS[name[1:]].choices):
            return
        word = word if before else word.rpartition(",")[2]
        found = choices[len(before)]
        for choice in found(self.chat) if callable(found) else found:
            if choice.startswith(word):
                yield Completion(choice, -len(word))


def terminal_lines(chat: Chat, **options: Any) -> Iterator[str]:
    """Lines that the user types, until Ctrl-D. Ctrl-C drops a line, Alt-Enter (Esc, Enter) starts another one."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        "> ",
        completer=CommandCompleter(chat),
        history=InMemoryHistory(),
        key_bindings=bindings,
        complete_while_typing=True,
        bottom_toolbar=lambda: _state(chat),
        **options,
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _state(chat: Chat) -> str:
    settings = chat.settings
    told = f" {settings.model} | {','.join(settings.assistants)} | {settings.processor_text()}"
    return f"{told} | {settings.max_new_tokens} tokens | /help, Ctrl-C stops an answer, Ctrl-D quits"


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
        lines = terminal_lines(chat)
    elif not prompts and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no UTF-8 is refused, and the next one read
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
