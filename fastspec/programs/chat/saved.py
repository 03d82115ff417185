"""A chat as a file: what `/save` wrote, read again."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from fastspec.cascade.decisions import Explanation, Visit
from fastspec.errors import Unsupported
from fastspec.files import parse_json
from fastspec.programs.chat.session import Answer, ChatTurn, SavedChat
from fastspec.programs.chat.settings import COMMAND_FIELDS, STORAGES, Settings

PARTS = {"settings": dict, "conversation": list, "turns": list}
TUPLES = ("assistants", "resources")


def read_saved(path: str | Path) -> SavedChat:
    """The chat in a file that `/save` wrote. Raises Unsupported for a file that cannot be read, or is none of these."""
    place = Path(path).expanduser()
    try:
        read = parse_json(place.read_text(encoding="utf-8"))
        missing = [name for name, kind in PARTS.items() if not isinstance(read.get(name), kind)]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        conversation = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in read["conversation"]]
        return SavedChat(_settings(read["settings"]), conversation, [_turn(turn) for turn in read["turns"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise Unsupported(f"{place} is no chat that /save wrote: {told}") from error


def _settings(read: dict[str, Any]) -> Settings:
    for name, kind in (("model", str), *((name, list) for name in TUPLES)):
        if not isinstance(read[name], kind):
            raise TypeError(f"{name} is {read[name]!r}")
    given = {name: value for name, value in read.items() if name not in COMMAND_FIELDS}
    given["assistants"] = tuple(read["assistants"])
    given["resources"] = tuple((str(name), str(at)) for name, at in read["resources"])
    changes = {str(name): value for name, value in given.pop("given", ())}
    for name, keys in COMMAND_FIELDS.items():  # names of older files, None for a default
        if read.get(name) is not None:
            changes |= dict.fromkeys(keys, STORAGES.get(read[name], read[name]) if name == "storage" else read[name])
    return Settings(**given).with_fields(changes)


def _turn(read: dict[str, Any]) -> ChatTurn:
    return ChatTurn(str(read["prompt"]), _settings(read["settings"]), [_answer(answer) for answer in read["answers"]])


def _answer(read: dict[str, Any]) -> Answer:
    """What `Answer.as_json` was made of; its other figures follow from these."""
    told = read["explanation"]
    visits = [Visit(**{**visit, "quality": tuple(visit["quality"])}) for visit in told["visits"]] if told else []
    given = {field.name: read[field.name] for field in fields(Answer)}
    return Answer(**{**given, "explanation": Explanation(tuple(visits)) if told else None})
