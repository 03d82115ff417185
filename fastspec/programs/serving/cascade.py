"""A cascade that is served: fields that its requests cannot have, and what is logged by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastspec.cascade.decisions import Visit
from fastspec.programs.serving.answers import NamedStage
from fastspec.programs.serving.batch import StageLoads
from fastspec.programs.serving.requests import AnswerRequest, Refused


def refuse_fields(asked: AnswerRequest, info: Mapping[str, str]) -> None:
    """Raise Refused for fields that what a server decodes with, by its settings, cannot honour, by their names."""
    name, why, own = "", "", info["assistant"]
    if "stages" not in info:
        if asked.price is not None:
            name, why = "price", "it is a cascade's, and this server has no cascade that decides by it"
    elif asked.assistant not in (None, own):
        name = f"assistant={asked.assistant!r}"
        why = f"all requests here are answered with {own!r}, whose stages have their own"
    elif asked.logprobs is not None:
        name, why = "logprobs", "the answer of a cascade may be any stage's, of other tokens"
    elif asked.structure is not None:
        name = "tool_choice" if asked.structure.calls else "response_format (text.format, structured_outputs)"
        why = "one model holds an answer to a structure, and the stages of a cascade answer one after another"
    if name:
        raise Refused(f"{name} is not accepted: {why}")


def stage_of(visit: Visit) -> NamedStage:
    """A stage's part in an answer, as a request that asks for the rounds is told it."""
    acceptable = visit.quality[0] if visit.quality else None
    return NamedStage({"name": visit.name, "outcome": visit.outcome, "acceptable": acceptable, "cost": visit.cost})


def told_of(visits: Sequence[Visit], loads: StageLoads) -> str:
    """The stages of an answer, and their loads now, for a line of the log; empty without a cascade."""
    parts = []
    for visit in visits:
        quality = f", P(acceptable) {visit.quality[0]:.2f}" if visit.quality else ""
        cost = "" if visit.cost is None else f", cost {visit.cost:.1f} ms"
        running, waiting = loads[visit.name]
        load = f" (now {running} in its rows, {waiting} waiting)"
        parts.append(f"; {visit.name}: {visit.outcome.replace('_', ' ')}{quality}{cost}{load}")
    return "".join(parts)
