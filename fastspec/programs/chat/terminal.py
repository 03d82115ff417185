"""Lines from a terminal, with editing, history and completion. The only module that knows prompt_toolkit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings

from fastspec.programs.chat.commands import COMMANDS
from fastspec.programs.chat.session import Chat


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
