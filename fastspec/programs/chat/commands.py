"""Commands of a chat, as one table: usage, purpose, present value, completions and function of each. The function takes
the chat and the arguments, and returns what is to be shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.control import Control, ControlType
from rich.table import Table
from rich.text import Text

import fastspec
from fastspec.config import STORAGES
from fastspec.default_trees import CPP_TREE
from fastspec.errors import FastSpecError, Unsupported, accepted, meant
from fastspec.files import parse_json
from fastspec.programs.chat import settings
from fastspec.programs.chat.session import Chat, read_saved
from fastspec.programs.chat.settings import COMMAND_FIELDS, FIELDS, KEPT_FOR, PROCESSORS, TREE, resource_names
from fastspec.programs.chat.view import COLUMN
from fastspec.programs.terminal import table

Run = Callable[..., Any]
Changes = Callable[..., dict[str, Any]]
Value = Callable[[Chat], str]
Choices = Callable[[Chat], Iterable[str]] | Iterable[str]


@dataclass(frozen=True)
class Command:
    """Row of the table. `usage` names the arguments, a word each, the optional ones in brackets; `choices` complete the
    first of them and the second."""

    usage: str
    what: str
    run: Run
    value: Value | None
    choices: tuple[Choices, ...]


COMMANDS: dict[str, Command] = {}
"""Name, without the slash -> its row."""


def command(usage: str, what: str, value: Value | None = None, *choices: Choices) -> Callable[[Run], Run]:

    def add(run: Run) -> Run:
        COMMANDS[usage.split()[0]] = Command(f"/{usage}", what, run, value, choices)
        return run

    return add


def setting(usage: str, what: str, value: Value, *choices: Choices) -> Callable[[Changes], Changes]:
    """Decorator that makes a command of a function from arguments to changes, of settings and, by names with a point,
    of fields of the assistants' configs. It shows the value that they come to."""

    def add(read: Changes) -> Changes:
        @command(usage, what, value, *choices)
        def run(chat: Chat, *texts: str) -> str:
            changes = read(chat, *texts)
            fields = {name: changes.pop(name) for name in list(changes) if "." in name}
            chat.change(fields, **changes)
            return f"{usage.split()[0]}: {value(chat)}"

        return read

    return add


def execute(chat: Chat, line: str) -> Any:
    """Run a line that starts with a slash, its words quoted as in a shell; returns what is to be shown, or None. Raises
    Unsupported for an unknown command, and what a command raises."""
    try:
        name, *arguments = shlex.split(line.removeprefix("/")) or [""]
    except ValueError as error:
        raise Unsupported(f"{line}: {error}") from error
    found = COMMANDS.get(name)
    if found is None:
        raise Unsupported(
            f"unknown command /{name}: {meant(f'/{name}', (f'/{each}' for each in COMMANDS))}/help lists them; a space "
            "before the slash makes the line a prompt"
        )
    _, *words = found.usage.split()
    least = sum(not word.startswith("[") for word in words)
    if not least <= len(arguments) <= len(words):
        count = str(least) if least == len(words) else f"{least} to {len(words)}"
        many = "" if count == "1" else "s"
        raise Unsupported(f"/{name} takes {count} argument{many}, not {len(arguments)}: {found.usage}")
    return found.run(chat, *arguments)


def _told(value: Any) -> str:
    if value is None:
        return "default"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _get(chat: Chat, name: str) -> Any:
    return chat.settings.field(name) if "." in name else getattr(chat.settings, name)


def _shown(name: str, absent: str = "default") -> Value:
    """The value of a setting, or of a field of an assistant's config."""
    return lambda chat: absent if _get(chat, name) is None else _told(_get(chat, name))


def _number(command: str, name: str, text: str, kind: type = int) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        expected = "whole number" if kind is int else "number"
        raise Unsupported(f"/{command}: {name} must be a {expected}, not {text!r}") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))


def _read(name: str, text: str) -> Any:
    """The value that a text gives a field: "default", on or off, JSON, or else the text itself."""
    if text == "default":
        return FIELDS.get(name)
    if text in ("on", "off"):
        return text == "on"
    try:
        return parse_json(text)
    except ValueError:
        return text


def _fields(name: str, argument: str, what: str, choices: Choices = ("default",)) -> None:
    """A command that sets the fields of `COMMAND_FIELDS`; "default" takes them back."""

    def given(chat: Chat) -> str:
        given = dict(chat.settings.given)
        return " ".join(dict.fromkeys(_told(given.get(field)) for field in COMMAND_FIELDS[name]))

    @setting(f"{name} {argument}", what, given, choices)
    def read(chat: Chat, text: str) -> dict[str, Any]:
        return {field: _read(field, text) for field in COMMAND_FIELDS[name]}


def _switch(name: str, what: str, value: Value | None = None) -> None:
    """A command that switches a setting, or the field that `COMMAND_FIELDS` has for it."""
    (switched,) = COMMAND_FIELDS.get(name, (name,))

    @setting(f"{name} [on|off]", what, value or _shown(switched), ("on", "off"))
    def read(chat: Chat, text: str | None = None) -> dict[str, Any]:
        if text not in (None, "on", "off"):
            raise Unsupported(f"/{name} takes on or off, or nothing to switch, not {text!r}")
        if name == "cache":
            chat.drop_caches()
        return {switched: not _get(chat, switched) if text is None else text == "on"}


@command("help [COMMAND]", "this table", None, COMMANDS)
def _help(chat: Chat, name: str = "") -> Table:
    wanted = [row for each, row in COMMANDS.items() if name.removeprefix("/") in ("", each)]
    if not wanted:
        raise Unsupported(f"unknown command {name}: {meant(name.removeprefix('/'), COMMANDS)}/help lists them")
    rows = [tuple(map(Text, (row.usage, row.what, row.value(chat) if row.value else ""))) for row in wanted]
    return table(("command", "what it does", "now"), rows, numbers=False)


@command("model NAME [HEAD]", "load another model and patch it, with an EAGLE-3 head", _shown("model"))
def _model(chat: Chat, name: str, head: str | None = None) -> str:
    heads = settings.heads_of(name, [head] if head else None)
    return _opened(chat, chat.reopen(chat.settings.replace(model=name, resources=tuple(heads.items()))))


def _opened(chat: Chat, lost: dict[str, str]) -> str:
    note = "".join(f"\n{name} is left out: {why}" for name, why in lost.items())
    assistants = ", ".join(chat.settings.assistants)
    return f"{chat.settings.model} on {chat.model.device}, assistants: {assistants}{note}"


@command(
    "resource ASSISTANT SOURCE",
    "patch anew, with a head, a draft model or a cascade's YAML file for an assistant",
    lambda chat: ", ".join(f"{name}={source}" for name, source in chat.settings.resources) or "none",
    lambda chat: resource_names(),
)
def _resource(chat: Chat, name: str, source: str) -> str:
    resources = dict(chat.settings.resources) | {name: source}
    return _opened(chat, chat.reopen(chat.settings.replace(resources=tuple(resources.items()))))


@setting(
    "assistant NAME[,NAME...]",
    "who answers; several answer in turn and are compared; transformers is none",
    lambda chat: ",".join(chat.settings.assistants),
    Chat.known,
)
def _assistant(chat: Chat, text: str) -> dict[str, Any]:
    names = _names(text)
    if not names:
        raise Unsupported(f"/assistant takes one name or several with commas: {', '.join(chat.known())}")
    return {"assistants": names}


@setting("length N", "new tokens per answer, at most", _shown("max_new_tokens"))
def _length(chat: Chat, text: str) -> dict[str, Any]:
    return {"max_new_tokens": _number("length", "max_new_tokens", text)}


@setting(
    f"processor {'|'.join(PROCESSORS)} [T] [k] [p]",
    "how tokens are chosen; of T, k, p those that it reads",
    lambda chat: chat.settings.processor_text(),
    PROCESSORS,
)
def _processor(chat: Chat, name: str, *values: str) -> dict[str, Any]:
    if name not in PROCESSORS:
        raise Unsupported(f"/processor: {name!r} is unknown: {accepted(name, PROCESSORS)}")
    fields = PROCESSORS[name]
    if len(values) > len(fields):
        raise Unsupported(f"/processor {name} takes {', '.join(fields) or 'nothing more'}, not {' '.join(values)!r}")
    read = {f: _number("processor", f, v, int if f == "top_k" else float) for f, v in zip(fields, values, strict=False)}
    return {"processor": name, **read}


@setting(
    "temperature T",
    "temperature of sampling; 0 is greedy",
    lambda chat: "0" if chat.settings.greedy else f"{chat.settings.temperature:g}",
)
def _temperature(chat: Chat, text: str) -> dict[str, Any]:
    return chat.settings.at_temperature(_number("temperature", "temperature", text, float))


@setting("seed N|off", "seed set before every answer", _shown("seed", "off"), ("off",))
def _seed(chat: Chat, text: str) -> dict[str, Any]:
    return {"seed": None if text == "off" else _number("seed", "seed", text)}


@setting(
    "beams N [LENGTH_PENALTY]",
    "a further answer by transformers' beam search, without an assistant; 1: none",
    lambda chat: f"{chat.settings.beams}, length penalty {chat.settings.length_penalty:g}",
)
def _beams(chat: Chat, text: str, penalty: str | None = None) -> dict[str, Any]:
    changes = {"beams": _number("beams", "beams", text)}
    if penalty is not None:
        changes["length_penalty"] = _number("beams", "length_penalty", penalty, float)
    return changes


@setting(
    "logits_processor NAME[,NAME...]|none",
    "processors of your own (--own FILE), which change scores before the choice",
    lambda chat: ",".join(chat.settings.logits_processors) or "none",
    lambda chat: ("none", *chat.processors),
)
def _logits_processor(chat: Chat, text: str) -> dict[str, Any]:
    return {"logits_processors": () if text == "none" else _names(text)}


_fields("gamma", "N|default", "tokens drafted a round by nasd and speculative")
_fields("ngram", "N|default", "longest n-gram of nasd")
_fields("top_k_filler", "N|default", "the target's best tokens of each position that nasd counts")
_switch("stop_if_unknown", "where nasd knows nothing, draft nothing; off: the last token again")


@setting(
    f"storage {'|'.join(STORAGES)}|NAME [{'|'.join(KEPT_FOR)}]",
    "where nasd keeps its n-grams (NAME: yours, --own FILE), and how long: one storage for each answer, or one for the "
    "chat until /reset",
    lambda chat: f"{chat.settings.own_storage or _get(chat, 'nasd.storage')}, one per {chat.settings.storage_per}",
    lambda chat: (*STORAGES, *chat.storages),
    KEPT_FOR,
)
def _storage(chat: Chat, name: str, kept: str | None = None) -> dict[str, Any]:
    name = settings.OLDER_STORAGES.get(name, name)
    if name not in (*STORAGES, *chat.storages):
        raise Unsupported(f"storage {name!r} is unknown: {accepted(name, (*STORAGES, *chat.storages))}")
    own, kind = (name, FIELDS["nasd.storage"]) if name in chat.storages else (None, name)
    return {"nasd.storage": kind, "own_storage": own, "storage_per": kept or chat.settings.storage_per}


@setting(
    "early_exit K|off",
    "speculative drafts with the target's own first K layers, without a draft model",
    _shown("speculative.early_exit", "off"),
    ("off",),
)
def _early_exit(chat: Chat, text: str) -> dict[str, Any]:
    changes = {"speculative.early_exit": None if text == "off" else _number("early_exit", "the number of layers", text)}
    if text != "off":  # the target may have fewer layers
        chat.check("speculative", chat.settings.with_fields(changes))
    return changes


def _tree_value(chat: Chat) -> str:
    config = chat.settings.assistant("eagle3")
    cpp = config == fastspec.Eagle3() and fastspec.report(chat.model).backend == "cpp"
    shape = CPP_TREE if cpp else config.shape(chat.model.device.type)
    grown = f"depth {shape.depth}, top_k {shape.top_k}"
    if config.total_tokens == "auto":
        return f"auto, at most {shape.total_tokens} nodes, {grown}"
    return f"{'default: ' if config.total_tokens is None else ''}{shape.total_tokens} nodes, {grown}"


@setting(
    "tree N|auto|default [DEPTH] [TOP_K]",
    "nodes of the trees of eagle2 and eagle3, root counted; auto: as many as pay",
    _tree_value,
    ("auto", "default"),
)
def _tree(chat: Chat, size: str, *more: str) -> dict[str, Any]:
    if size == "default" and more:
        raise Unsupported("/tree default is the device's tree as a whole: leave depth and top_k out")
    named = {"default": None, "auto": "auto"}
    sizes = {"total_tokens": named[size] if size in named else _number("tree", "total_tokens", size)}
    sizes |= {name: _number("tree", name, text) for name, text in zip(TREE[1:], more, strict=False)}
    return {field: sizes.get(part) for part in TREE for field in COMMAND_FIELDS[f"tree_{part}"]}


_fields("branches", "N|default", "children that speculative drafts at every position")
_fields("drafts", "greedy|sampled", "how eagle drafts in sampled answers", ("greedy", "sampled"))


@setting(
    "set ASSISTANT.FIELD VALUE",
    "any field of an assistant's config, such as nasd.total_tokens 24; default takes it back",
    lambda chat: ", ".join(f"{name}={_told(value)}" for name, value in chat.settings.given) or "default",
    FIELDS,
    ("default",),
)
def _set(chat: Chat, name: str, text: str) -> dict[str, Any]:
    if name not in FIELDS:
        raise Unsupported(f"{name!r} is unknown: {accepted(name, FIELDS)}")
    return {name: _read(name, text)}


def _template_value(chat: Chat) -> str:
    missing = chat.settings.chat and chat.tokenizer.chat_template is None
    return "on, but this model has no template" if missing else _told(chat.settings.chat)


_switch(
    "cache",
    "keep keys and values from turn to turn; EAGLE heads then see the new turn alone. A cascade keeps its own, by its "
    "`memory`",
)
_switch("chat", "the model's chat template; off: the texts as they stand", _template_value)
_switch("debug", "draw the draft tree of every round after the answer; the stages of a cascade show none")
_switch("columns", f"several answers beside each other, where the terminal has {COLUMN} characters for each")


@command("reset", "forget the conversation", lambda chat: f"{len(chat.turns)} turns")
def _reset(chat: Chat) -> str:
    chat.reset()
    return "the conversation is forgotten"


@command("save FILE", "write conversation and statistics as JSON")
def _save(chat: Chat, name: str) -> str:
    path = Path(name).expanduser()
    try:
        path.write_text(json.dumps(chat.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FastSpecError(f"/save: could not write {path}: {error.strerror or error}") from error
    return f"{len(chat.turns)} turns written to {path}"


@command("load FILE", "go on with a conversation that /save wrote, with its model and settings")
def _load(chat: Chat, name: str) -> str:
    lost = chat.restore(read_saved(name))
    return f"{len(chat.turns)} turns read from {name}; {_opened(chat, lost)}"


@command("clear", "clear the screen")
def _clear(chat: Chat) -> Control:
    return Control(ControlType.CLEAR, ControlType.HOME)


@command("quit", "leave; so does Ctrl-D")
def _quit(chat: Chat) -> None:
    chat.over = True
