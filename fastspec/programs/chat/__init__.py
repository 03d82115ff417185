"""`fastspec chat`: a conversation in the terminal in which strategies answer, and are compared; docs/guide/chat.md
shows it.

`session.Chat` holds the model and the conversation, `settings` reads what the model is patched with, `commands` is the
table of commands, `view` what is shown, `loop` runs lines through them, and `terminal` reads the lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastspec.programs.chat.settings import Settings, read_own

if TYPE_CHECKING:
    from rich.console import Console

    from fastspec.programs.chat.session import Chat, SavedChat


def run_chat(
    settings: Settings,
    console: Console,
    prompts: list[str] | None = None,
    saved: SavedChat | None = None,
    own: str | None = None,
) -> Chat:
    """Load what the settings name and converse over `prompts`, where errors are raised; without any over what is typed,
    or standard input where that is no terminal. Goes on from a `saved` chat, with what the Python file `own` adds;
    returns the chat as it ended."""
    from fastspec.programs.chat.loop import converse
    from fastspec.programs.chat.session import Chat

    with console.status("Importing torch and transformers"):  # what comes after it shows its own progress
        import fastspec.patches.api  # noqa: F401
    chat = Chat.open(settings, **({} if own is None else read_own(own)))
    if saved is not None:
        chat.turns, chat.conversation = list(saved.turns), list(saved.conversation)
    console.print(f"{settings.model} on {chat.model.device}, {chat.dtype}; /help lists the commands", highlight=False)
    converse(chat, prompts or _typed(chat), console, strict=bool(prompts))
    return chat


def _typed(chat: Chat) -> Iterable[str]:
    if not sys.stdin.isatty():
        return sys.stdin
    from fastspec.programs.chat.terminal import terminal_lines

    return terminal_lines(chat)
