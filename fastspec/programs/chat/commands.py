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
from fastspec import Eagle3
from fastspec.config import CPP_TREE, STORAGES
from fastspec.errors import FastSpecError, Unsupported, accepted, meant
from fastspec.files import parse_json
from fastspec.programs.chat.session import Chat, read_saved
from fastspec.programs.chat.settings import (
    COMMAND_FIELDS,
    FIELDS,
    KEPT_FOR,
    OLDER_STORAGES,
    PROCESSORS,
    TREE,
    heads_of,
    resource_names,
)
from fastspec.programs.chat.view import COLUMN
from fastspec.programs.terminal import table

Run = Callable[..., Any]
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
    """Decorator that puts a function into the table."""

    def add(run: Run) -> Run:
        COMMANDS[usage.split()[0]] = Command(f"/{usage}", what, run, value, choices)
        return run

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
        hint = meant(f"/{name}", (f"/{each}" for each in COMMANDS))
        raise Unsupported(
            f"unknown command /{name}: {hint}/help lists them; a space before the slash makes the line a prompt"
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


def _shown(name: str) -> Value:
    """The value of a setting, or of a field of an assistant's config."""
    return lambda chat: _told(_get(chat, name))


def _given(name: str) -> Value:
    """The values that the fields of a command were given."""

    def value(chat: Chat) -> str:
        given = dict(chat.settings.given)
        return " ".join(dict.fromkeys(_told(given.get(field)) for field in COMMAND_FIELDS[name]))

    return value


def _number(command: str, name: str, text: str, kind: type = int) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        expected = "whole number" if kind is int else "number"
        raise Unsupported(f"/{command}: {name} must be a {expected}, not {text!r}") from error


def _read(name: str, text: str) -> Any:
    """The value that a text gives a field: a number, on or off, JSON, or else the text itself. "default" is the class's
    default."""
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

    @command(f"{name} {argument}", what, _given(name), choices)
    def run(chat: Chat, text: str) -> str:
        chat.change({field: _read(field, text) for field in COMMAND_FIELDS[name]})
        return f"{name} = {text}"


def _switch(name: str, what: str, value: Value | None = None, after: Callable[[Chat], None] | None = None) -> None:
    """A command that switches a setting, or the field that `COMMAND_FIELDS` has for it."""
    (setting,) = COMMAND_FIELDS.get(name, (name,))

    @command(f"{name} [on|off]", what, value or _shown(setting), ("on", "off"))
    def run(chat: Chat, text: str | None = None) -> str:
        if text not in (None, "on", "off"):
            raise Unsupported(f"/{name} takes on or off, or nothing to switch, not {text!r}")
        chosen = not _get(chat, setting) if text is None else text == "on"
        if "." in setting:
            chat.change({setting: chosen})
        else:
            chat.settings = chat.settings.replace(**{setting: chosen})
        if after is not None:
            after(chat)
        return f"{name} {_told(chosen)}"


@command("help [COMMAND]", "this table", None, COMMANDS)
def _help(chat: Chat, name: str = "") -> Table:
    wanted = [row for each, row in COMMANDS.items() if name.removeprefix("/") in ("", each)]
    if not wanted:
        raise Unsupported(f"unknown command {name}: {meant(name.removeprefix('/'), COMMANDS)}/help lists them")
    rows = [tuple(map(Text, (row.usage, row.what, row.value(chat) if row.value else ""))) for row in wanted]
    return table(("command", "what it does", "now"), rows, numbers=False)


@command("model NAME [HEAD]", "load another model and patch it, with an EAGLE-3 head", _shown("model"))
def _model(chat: Chat, name: str, head: str | None = None) -> str:
    heads = heads_of(name, [head] if head else None)
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


@command(
    "assistant NAME[,NAME...]",
    "who answers; several answer in turn and are compared; transformers is none",
    lambda chat: ",".join(chat.settings.assistants),
    Chat.known,
)
def _assistant(chat: Chat, text: str) -> str:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not names:
        raise Unsupported(f"/assistant takes one name or several with commas: {', '.join(chat.known())}")
    for name in names:
        chat.check(name)
    chat.settings = chat.settings.replace(assistants=names)
    return f"assistants: {', '.join(names)}"


@command("length N", "new tokens per answer, at most", _shown("max_new_tokens"))
def _length(chat: Chat, text: str) -> str:
    chat.settings = chat.settings.replace(max_new_tokens=_number("length", "max_new_tokens", text))
    return f"max_new_tokens = {chat.settings.max_new_tokens}"


def _processor_text(chat: Chat) -> str:
    return chat.settings.processor_text()


@command(
    f"processor {'|'.join(PROCESSORS)} [T] [k] [p]",
    "how tokens are chosen; of T, k, p those that it reads",
    _processor_text,
    PROCESSORS,
)
def _processor(chat: Chat, name: str, *values: str) -> str:
    if name not in PROCESSORS:
        raise Unsupported(f"/processor: {name!r} is unknown: {accepted(name, PROCESSORS)}")
    fields = PROCESSORS[name]
    if len(values) > len(fields):
        raise Unsupported(f"/processor {name} takes {', '.join(fields) or 'nothing more'}, not {' '.join(values)!r}")
    read = {f: _number("processor", f, v, int if f == "top_k" else float) for f, v in zip(fields, values, strict=False)}
    chat.settings = chat.settings.replace(processor=name, **read)
    return f"processor: {_processor_text(chat)}"


@command(
    "temperature T",
    "temperature of sampling; 0 is greedy",
    lambda chat: "0" if chat.settings.greedy else f"{chat.settings.temperature:g}",
)
def _temperature(chat: Chat, text: str) -> str:
    chat.settings = chat.settings.at_temperature(_number("temperature", "temperature", text, float))
    return f"processor: {_processor_text(chat)}"


@command(
    "seed N|off",
    "seed set before every answer",
    lambda chat: "off" if chat.settings.seed is None else str(chat.settings.seed),
    ("off",),
)
def _seed(chat: Chat, text: str) -> str:
    value = None if text == "off" else _number("seed", "seed", text)
    if value is not None and not 0 <= value < 2**63:
        raise Unsupported(f"/seed: the seed must lie between 0 and 2**63 - 1, not {value}")
    chat.settings = chat.settings.replace(seed=value)
    return f"seed {text}" + ("" if value is None else ": set before every answer")


def _beams_value(chat: Chat) -> str:
    return f"{chat.settings.beams}, length penalty {chat.settings.length_penalty:g}"


@command(
    "beams N [LENGTH_PENALTY]",
    "a further answer by transformers' beam search, without an assistant; 1: none",
    _beams_value,
)
def _beams(chat: Chat, text: str, penalty: str | None = None) -> str:
    changes: dict[str, Any] = {"beams": _number("beams", "beams", text)}
    if penalty is not None:
        changes["length_penalty"] = _number("beams", "length_penalty", penalty, float)
    chat.settings = chat.settings.replace(**changes)
    return f"beams = {_beams_value(chat)}"


@command(
    "logits_processor NAME[,NAME...]|none",
    "processors of your own (--own FILE), which change scores before the choice",
    lambda chat: ",".join(chat.settings.logits_processors) or "none",
    lambda chat: ("none", *chat.processors),
)
def _logits_processor(chat: Chat, text: str) -> str:
    names = () if text == "none" else tuple(dict.fromkeys(filter(None, text.split(","))))
    settings = chat.settings.replace(logits_processors=names)
    chat.check_own(settings)
    chat.settings = settings
    return f"logits_processor = {text}"


_fields("gamma", "N|default", "tokens drafted a round by nasd and speculative")
_fields("ngram", "N|default", "longest n-gram of nasd")
_fields("top_k_filler", "N|default", "the target's best tokens of each position that nasd counts")
_switch("stop_if_unknown", "where nasd knows nothing, draft nothing; off: the last token again")


def _storage_value(chat: Chat) -> str:
    settings = chat.settings
    return f"{settings.own_storage or settings.field('nasd.storage')}, one per {settings.storage_per}"


@command(
    f"storage {'|'.join(STORAGES)}|NAME [{'|'.join(KEPT_FOR)}]",
    "where nasd keeps its n-grams (NAME: yours, --own FILE), and how long: one storage for each answer, or one for the "
    "chat until /reset",
    _storage_value,
    lambda chat: (*STORAGES, *chat.storages),
    KEPT_FOR,
)
def _storage(chat: Chat, name: str, kept: str | None = None) -> str:
    name = OLDER_STORAGES.get(name, name)
    if name not in (*STORAGES, *chat.storages):
        raise Unsupported(f"storage {name!r} is unknown: {accepted(name, (*STORAGES, *chat.storages))}")
    own, kind = (name, FIELDS["nasd.storage"]) if name in chat.storages else (None, name)
    chat.change({"nasd.storage": kind}, own_storage=own, storage_per=kept or chat.settings.storage_per)
    return f"storage = {_storage_value(chat)}"


@command(
    "early_exit K|off",
    "speculative drafts with the target's own first K layers, without a draft model",
    lambda chat: str(chat.settings.field("speculative.early_exit") or "off"),
    ("off",),
)
def _early_exit(chat: Chat, text: str) -> str:
    value = None if text == "off" else _number("early_exit", "the number of layers", text)
    changes = {"speculative.early_exit": value}
    if value is not None:  # the target may have fewer layers
        chat.check("speculative", chat.settings.with_fields(changes))
    chat.change(changes)
    told = "" if value is None else f": speculative drafts with the target's first {value} layers"
    return f"early_exit {text}{told}"


def _tree_value(chat: Chat) -> str:
    config = chat.settings.assistant("eagle3")
    cpp = config == Eagle3() and fastspec.report(chat.model).backend == "cpp"
    shape = CPP_TREE if cpp else config.shape(chat.model.device.type)
    grown = f"depth {shape.depth}, top_k {shape.top_k}"
    if config.total_tokens == "auto":
        return f"auto, at most {shape.total_tokens} nodes, {grown}"
    return f"{'default: ' if config.total_tokens is None else ''}{shape.total_tokens} nodes, {grown}"


@command(
    "tree N|auto|default [DEPTH] [TOP_K]",
    "nodes of the trees of eagle2 and eagle3, root counted; auto: as many as pay",
    _tree_value,
    ("auto", "default"),
)
def _tree(chat: Chat, size: str, *more: str) -> str:
    if size == "default" and more:
        raise Unsupported("/tree default is the device's tree as a whole: leave depth and top_k out")
    named = {"default": None, "auto": "auto"}
    sizes = {"total_tokens": named[size] if size in named else _number("tree", "total_tokens", size)}
    sizes |= {name: _number("tree", name, text) for name, text in zip(TREE[1:], more, strict=False)}
    chat.change({field: sizes.get(part) for part in TREE for field in COMMAND_FIELDS[f"tree_{part}"]})
    return f"tree: {_tree_value(chat)}"


_fields("branches", "N|default", "children that speculative drafts at every position")
_fields("drafts", "greedy|sampled", "how eagle drafts in sampled answers", ("greedy", "sampled"))


@command(
    "set ASSISTANT.FIELD VALUE",
    "any field of an assistant's config, such as nasd.total_tokens 24; default takes it back",
    lambda chat: ", ".join(f"{name}={_told(value)}" for name, value in chat.settings.given) or "default",
    FIELDS,
    ("default",),
)
def _set(chat: Chat, name: str, text: str) -> str:
    chat.change({name: _read(name, text)})
    return f"{name} = {_told(chat.settings.field(name))}"


def _template_value(chat: Chat) -> str:
    missing = chat.settings.chat and chat.tokenizer.chat_template is None
    return "on, but this model has no template" if missing else _told(chat.settings.chat)


_switch(
    "cache",
    "keep keys and values from turn to turn; EAGLE heads then see the new turn alone. A cascade keeps its own, by its "
    "`memory`",
    after=Chat.drop_caches,
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
