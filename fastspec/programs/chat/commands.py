"""The commands of a chat, as one table: name, arguments, what it does, its present value, and the function that does
it.

A command is a function of the chat and its arguments. It returns what is to be shown and raises `Unsupported` for what
it refuses.
"""

from __future__ import annotations

import difflib
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
from fastspec.config import CPP_TREE
from fastspec.errors import FastSpecError, Unsupported
from fastspec.files import parse_json
from fastspec.models import SMOLLM2, SMOLLM2_HEADS
from fastspec.programs.chat.resources import resource_names
from fastspec.programs.chat.saved import read_saved
from fastspec.programs.chat.session import Chat
from fastspec.programs.chat.settings import COMMAND_FIELDS, FIELDS, KEPT_FOR, PROCESSORS, STORAGES, TREE
from fastspec.programs.chat.view import COLUMN

Run = Callable[[Chat, list[str]], Any]


@dataclass(frozen=True)
class Command:
    """One row of the table. `arguments` is their grammar, a word each, the optional ones in brackets; `value` gives the
    setting's present value, `choices` what completes the first argument, and `second` what completes the second."""

    name: str
    arguments: str
    what: str
    run: Run
    value: Callable[[Chat], str] | None = None
    choices: Callable[[Chat], Iterable[str]] | None = None
    second: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()

    def check(self, arguments: list[str]) -> None:
        """Refuse a wrong number of arguments."""
        words = self.arguments.split()
        least = sum(not word.startswith("[") for word in words)
        if not least <= len(arguments) <= len(words):
            count = str(least) if least == len(words) else f"{least} to {len(words)}"
            raise Unsupported(
                f"/{self.name} takes {count} argument{'' if count == '1' else 's'}, not {len(arguments)}: {self.usage}"
            )


def execute(chat: Chat, line: str) -> Any:
    """Run a line that starts with a slash, its words quoted as in a shell; returns what is to be shown, or None.

    Raises Unsupported for what it cannot do, and what the command raises.
    """
    try:
        name, *arguments = shlex.split(line.removeprefix("/")) or [""]
    except ValueError as error:
        raise Unsupported(f"{line}: {error}") from error
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise Unsupported(
            f"unknown command /{name}: {hint}/help lists them; a space before the slash makes the line a prompt"
        )
    command.check(arguments)
    return command.run(chat, arguments)


def _number(command: str, name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise Unsupported(
            f"/{command}: {name} must be a {'whole number' if kind is int else 'number'}, not {text!r}"
        ) from error


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


def _set(chat: Chat, arguments: list[str]) -> str:
    name, text = arguments
    chat.change({name: _read(name, text)})
    return f"{name} = {_told(chat.settings.field(name))}"


def _fields(command: str) -> Run:
    """A command that sets the fields of `COMMAND_FIELDS`; "default" takes them back."""

    def run(chat: Chat, arguments: list[str]) -> str:
        chat.change({name: _read(name, arguments[0]) for name in COMMAND_FIELDS[command]})
        return f"{command} = {arguments[0]}"

    return run


def _count(command: str, setting: str) -> Run:
    """A command that sets a whole number of the chat's own settings."""

    def run(chat: Chat, arguments: list[str]) -> str:
        value = _number(command, setting, arguments[0], int)
        chat.settings = chat.settings.replace(**{setting: value})
        return f"{setting} = {value}"

    return run


def _switched(setting: str, present: bool, arguments: list[str]) -> bool:
    word = arguments[0] if arguments else ("off" if present else "on")
    if word not in ("on", "off"):
        raise Unsupported(f"/{setting} takes on or off, or nothing to switch, not {word!r}")
    return word == "on"


def _toggle(setting: str, after: Callable[[Chat], None] | None = None) -> Run:
    def run(chat: Chat, arguments: list[str]) -> str:
        value = _switched(setting, getattr(chat.settings, setting), arguments)
        chat.settings = chat.settings.replace(**{setting: value})
        if after is not None:
            after(chat)
        return f"{setting} {_told(value)}"

    return run


def _stop_if_unknown(chat: Chat, arguments: list[str]) -> str:
    (name,) = COMMAND_FIELDS["stop_if_unknown"]
    value = _switched("stop_if_unknown", chat.settings.field(name), arguments)
    chat.change({name: value})
    return f"stop_if_unknown {_told(value)}"


def _model(chat: Chat, arguments: list[str]) -> str:
    name, *head = arguments
    heads = dict(SMOLLM2_HEADS if name == SMOLLM2 else ()) | ({"eagle3": head[0]} if head else {})
    lost = chat.reopen(chat.settings.replace(model=name, resources=tuple(heads.items())))
    return _opened(chat, lost)


def _resource(chat: Chat, arguments: list[str]) -> str:
    name, source = arguments
    if name not in resource_names():
        raise Unsupported(f"{name!r} takes no resource: accepted are {', '.join(resource_names())}")
    lost = chat.reopen(chat.settings.replace(resources=tuple({**dict(chat.settings.resources), name: source}.items())))
    return _opened(chat, lost)


def _opened(chat: Chat, lost: dict[str, str]) -> str:
    settings = chat.settings
    note = "".join(f"\n{name} is left out: {why}" for name, why in lost.items())
    return f"{settings.model} on {chat.model.device}, assistants: {', '.join(settings.assistants)}{note}"


def _assistant(chat: Chat, arguments: list[str]) -> str:
    names = tuple(dict.fromkeys(name for name in arguments[0].split(",") if name))
    if not names:
        raise Unsupported(f"/assistant takes one name or several with commas: {', '.join(chat.known())}")
    for name in names:
        chat.check(name)
    chat.settings = chat.settings.replace(assistants=names)
    return f"assistants: {', '.join(names)}"


def _processor(chat: Chat, arguments: list[str]) -> str:
    name, *values = arguments
    if name not in PROCESSORS:
        raise Unsupported(f"/processor: {name!r} is unknown: accepted are {', '.join(PROCESSORS)}")
    fields = PROCESSORS[name]
    if len(values) > len(fields):
        raise Unsupported(f"/processor {name} takes {', '.join(fields) or 'nothing more'}, not {' '.join(values)!r}")
    read = {f: _number("processor", f, v, int if f == "top_k" else float) for f, v in zip(fields, values, strict=False)}
    chat.settings = chat.settings.replace(processor=name, **read)
    return f"processor: {chat.settings.processor_text()}"


def _temperature(chat: Chat, arguments: list[str]) -> str:
    value = _number("temperature", "temperature", arguments[0], float)
    chat.settings = chat.settings.at_temperature(value)
    return f"processor: {chat.settings.processor_text()}"


def _storage(chat: Chat, arguments: list[str]) -> str:
    name, *kept = arguments
    if name not in STORAGES:
        raise Unsupported(f"storage {name!r} is unknown: accepted are {', '.join(STORAGES)}")
    chat.change({"nasd.storage": STORAGES[name]}, **dict(zip(("storage_per",), kept, strict=False)))
    return f"storage = {_storage_value(chat)}"


def _storage_value(chat: Chat) -> str:
    held = chat.settings.field("nasd.storage")
    return f"{next(name for name, kind in STORAGES.items() if kind == held)}, one per {chat.settings.storage_per}"


def _early_exit(chat: Chat, arguments: list[str]) -> str:
    (name,) = COMMAND_FIELDS["early_exit"]
    value = None if arguments[0] == "off" else _number("early_exit", "the number of layers", arguments[0], int)
    if value is not None:
        chat.check("speculative", chat.settings.with_fields({name: value}))  # the target may have fewer layers
    chat.change({name: value})
    return f"early_exit {arguments[0]}" + (
        "" if value is None else f": speculative drafts with the target's first {value} layers"
    )


def _tree(chat: Chat, arguments: list[str]) -> str:
    size, *more = arguments
    if size == "default" and more:
        raise Unsupported("/tree default is the device's tree as a whole: leave depth and top_k out")
    total = (
        {"default": None, "auto": "auto"}[size]
        if size in ("default", "auto")
        else _number("tree", "total_tokens", size, int)
    )
    grown = {name: _number("tree", name, text, int) for name, text in zip(TREE[1:], more, strict=False)}
    sizes = {"total_tokens": total, **grown}
    chat.change({name: sizes.get(part) for part in TREE for name in COMMAND_FIELDS[f"tree_{part}"]})
    return f"tree: {_tree_value(chat)}"


def _tree_value(chat: Chat) -> str:
    config = chat.settings.assistant("eagle3")
    cpp = config == Eagle3() and fastspec.report(chat.model).backend == "cpp"
    shape = CPP_TREE if cpp else config.shape(chat.model.device.type)
    grown = f"depth {shape.depth}, top_k {shape.top_k}"
    if config.total_tokens == "auto":
        return f"auto, at most {shape.total_tokens} nodes, {grown}"
    return f"{'default: ' if config.total_tokens is None else ''}{shape.total_tokens} nodes, {grown}"


def _seed(chat: Chat, arguments: list[str]) -> str:
    value = None if arguments[0] == "off" else _number("seed", "seed", arguments[0], int)
    if value is not None and not 0 <= value < 2**63:
        raise Unsupported(f"/seed: the seed must lie between 0 and 2**63 - 1, not {value}")
    chat.settings = chat.settings.replace(seed=value)
    return f"seed {arguments[0]}" + ("" if value is None else ": set before every answer")


def _reset(chat: Chat, arguments: list[str]) -> str:
    chat.reset()
    return "the conversation is forgotten"


def _save(chat: Chat, arguments: list[str]) -> str:
    path = Path(arguments[0]).expanduser()
    try:
        path.write_text(json.dumps(chat.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FastSpecError(f"/save: could not write {path}: {error.strerror or error}") from error
    return f"{len(chat.turns)} turns written to {path}"


def _load(chat: Chat, arguments: list[str]) -> str:
    saved = read_saved(arguments[0])
    lost = chat.restore(saved.settings, saved.conversation, saved.turns)
    return f"{len(chat.turns)} turns read from {arguments[0]}; {_opened(chat, lost)}"


def _clear(chat: Chat, arguments: list[str]) -> Control:
    return Control(ControlType.CLEAR, ControlType.HOME)


def _quit(chat: Chat, arguments: list[str]) -> None:
    chat.over = True


def _help(chat: Chat, arguments: list[str]) -> Table:
    wanted = [command for command in TABLE if not arguments or command.name == arguments[0].removeprefix("/")]
    if not wanted:
        raise Unsupported(f"unknown command {arguments[0]}: /help lists them")
    table = Table(box=None, pad_edge=False)
    for title in ("command", "what it does", "now"):
        table.add_column(title, overflow="fold")
    for command in wanted:
        table.add_row(*map(Text, (command.usage, command.what, command.value(chat) if command.value else "")))
    return table


def _told(value: Any) -> str:
    if value is None:
        return "default"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _shown(setting: str) -> Callable[[Chat], str]:
    return lambda chat: _told(getattr(chat.settings, setting))


def _shown_field(command: str) -> Callable[[Chat], str]:
    def value(chat: Chat) -> str:
        given = dict(chat.settings.given)
        return " ".join(dict.fromkeys(_told(given.get(name)) for name in COMMAND_FIELDS[command]))

    return value


def _given(chat: Chat) -> str:
    return ", ".join(f"{name}={_told(value)}" for name, value in chat.settings.given) or "default"


def _chat_value(chat: Chat) -> str:
    missing = chat.settings.chat and chat.tokenizer.chat_template is None
    return "on, but this model has no template" if missing else _shown("chat")(chat)


def _resources(chat: Chat) -> str:
    return ", ".join(f"{name}={source}" for name, source in chat.settings.resources) or "none"


def _switch(chat: Chat) -> Iterable[str]:
    return ("on", "off")


def _default(chat: Chat) -> Iterable[str]:
    return ("default",)


TABLE: tuple[Command, ...] = (
    Command("help", "[COMMAND]", "this table", _help, None, lambda chat: [command.name for command in TABLE]),
    Command("model", "NAME [HEAD]", "load another model and patch it, with an EAGLE-3 head", _model, _shown("model")),
    Command(
        "resource",
        "ASSISTANT SOURCE",
        "patch anew, with a head, a draft model or a cascade's YAML file for an assistant",
        _resource,
        _resources,
        lambda chat: resource_names(),
    ),
    Command(
        "assistant",
        "NAME[,NAME...]",
        "who answers; several answer in turn and are compared; transformers is none",
        _assistant,
        lambda chat: ",".join(chat.settings.assistants),
        Chat.known,
    ),
    Command(
        "length", "N", "new tokens per answer, at most", _count("length", "max_new_tokens"), _shown("max_new_tokens")
    ),
    Command(
        "processor",
        f"{'|'.join(PROCESSORS)} [T] [k] [p]",
        "how tokens are chosen; of T, k, p those that it reads",
        _processor,
        lambda chat: chat.settings.processor_text(),
        lambda chat: PROCESSORS,
    ),
    Command(
        "temperature",
        "T",
        "temperature of sampling; 0 is greedy",
        _temperature,
        lambda chat: "0" if chat.settings.greedy else f"{chat.settings.temperature:g}",
    ),
    Command(
        "seed",
        "N|off",
        "seed set before every answer",
        _seed,
        lambda chat: "off" if chat.settings.seed is None else str(chat.settings.seed),
        lambda chat: ["off"],
    ),
    Command(
        "beams",
        "N",
        "a further answer by transformers' beam search, without an assistant; 1: none",
        _count("beams", "beams"),
        _shown("beams"),
    ),
    Command(
        "gamma",
        "N|default",
        "tokens drafted a round by nasd and speculative",
        _fields("gamma"),
        _shown_field("gamma"),
        _default,
    ),
    Command("ngram", "N|default", "longest n-gram of nasd", _fields("ngram"), _shown_field("ngram"), _default),
    Command(
        "top_k_filler",
        "N|default",
        "the target's best tokens of each position that nasd counts",
        _fields("top_k_filler"),
        _shown_field("top_k_filler"),
        _default,
    ),
    Command(
        "stop_if_unknown",
        "[on|off]",
        "where nasd knows nothing, draft nothing; off: the last token again",
        _stop_if_unknown,
        lambda chat: _told(chat.settings.field("nasd.stop_if_unknown")),
        _switch,
    ),
    Command(
        "storage",
        f"{'|'.join(STORAGES)} [{'|'.join(KEPT_FOR)}]",
        "where nasd keeps its n-grams, and how long: one storage for each answer, or one for the chat until /reset",
        _storage,
        _storage_value,
        lambda chat: STORAGES,
        KEPT_FOR,
    ),
    Command(
        "early_exit",
        "K|off",
        "speculative drafts with the target's own first K layers, without a draft model",
        _early_exit,
        lambda chat: str(chat.settings.field("speculative.early_exit") or "off"),
        lambda chat: ["off"],
    ),
    Command(
        "tree",
        "N|auto|default [DEPTH] [TOP_K]",
        "nodes of the trees of eagle2 and eagle3, root counted; auto measures",
        _tree,
        _tree_value,
        lambda chat: ["auto", "default"],
    ),
    Command(
        "branches",
        "N|default",
        "children that speculative drafts at every position",
        _fields("branches"),
        _shown_field("branches"),
        _default,
    ),
    Command(
        "drafts",
        "greedy|sampled",
        "how eagle drafts in sampled answers",
        _fields("drafts"),
        _shown_field("drafts"),
        lambda chat: ("greedy", "sampled"),
    ),
    Command(
        "set",
        "ASSISTANT.FIELD VALUE",
        "any field of an assistant's config, such as nasd.total_tokens 24; default takes it back",
        _set,
        _given,
        lambda chat: FIELDS,
        ("default",),
    ),
    Command(
        "cache",
        "[on|off]",
        "keep keys and values from turn to turn; EAGLE heads then see the new turn alone. A cascade keeps its own, "
        "by its `memory`",
        _toggle("cache", Chat.drop_caches),
        _shown("cache"),
        _switch,
    ),
    Command(
        "chat",
        "[on|off]",
        "the model's chat template; off: the texts as they stand",
        _toggle("chat"),
        _chat_value,
        _switch,
    ),
    Command(
        "debug",
        "[on|off]",
        "draw the draft tree of every round after the answer; the stages of a cascade show none",
        _toggle("debug"),
        _shown("debug"),
        _switch,
    ),
    Command(
        "columns",
        "[on|off]",
        f"several answers beside each other, where the terminal has {COLUMN} characters for each",
        _toggle("columns"),
        _shown("columns"),
        _switch,
    ),
    Command("reset", "", "forget the conversation", _reset, lambda chat: f"{len(chat.turns)} turns"),
    Command("save", "FILE", "write conversation and statistics as JSON", _save),
    Command("load", "FILE", "go on with a conversation that /save wrote, with its model and settings", _load),
    Command("clear", "", "clear the screen", _clear),
    Command("quit", "", "leave; so does Ctrl-D", _quit),
)
COMMANDS = {command.name: command for command in TABLE}
"""Name, without the slash -> its row."""
