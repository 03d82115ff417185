"""A call goes one way through the engine: no file of it is left and entered again more than once in a phase of the
call.

An entry is a call of a function in one file of the engine from another file. Entries of the same file with none of
another's between them count as one, and code that merely reads a value (properties) is none. Of the rounds the last one
is looked at: eager, and as graphs.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from helpers.captured import stand_in
from helpers.generate import prompts, shallow_model
from helpers.models import tiny_head

import fastspec
from fastspec.generation import engine
from fastspec.generation.engine import rounds

ENGINE = Path(engine.__file__).parent
ONCE_MORE = 2
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def room_of(code) -> str | None:
    """The engine's file that code is in; None outside, and for what only reads a value."""
    path = Path(code.co_filename)
    return path.name if path.parent == ENGINE and code not in reads() else None


def reads() -> set:
    """The code of properties: who reads a value from a room does not enter it."""
    modules = [module for name, module in sys.modules.items() if name.startswith(engine.__name__ + ".")]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {part.fget.__code__ for each in classes for part in vars(each).values() if isinstance(part, property)}


@contextmanager
def entries(monkeypatch) -> Iterator[dict[str, list[str]]]:
    """The rooms that are entered from others, in their order, by the phase of the call."""
    found: dict[str, list[str]] = {"making": [], "prefill": [], "round": [], "output": []}
    phase, known = ["making"], {}

    def watch(frame, event, _):
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        rooms = []
        for code in (frame.f_code, frame.f_back.f_code):
            if code not in known:
                known[code] = room_of(code)
            rooms.append(known[code])
        if rooms[0] is not None and rooms[0] != rooms[1]:
            found[phase[0]].append(rooms[0])

    decode, turn = rounds.decode, rounds.Rounds.turn

    def decoding(*args):
        phase[0] = "prefill"
        return decode(*args)

    def turning(self, *args):
        phase[0] = "round"
        found["round"].clear()  # the last round is what is looked at
        turn(self, *args)
        phase[0] = "output"

    monkeypatch.setattr(rounds.Rounds, "turn", turning)
    monkeypatch.setattr("fastspec.patches.call.generate.decode", decoding)
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def visits(monkeypatch, assistant: str, options: dict) -> dict[str, Counter]:
    """How often each file is entered in the phases of a call that does nothing for the first time."""
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model))
    options = {**prompts(9, 5), "max_new_tokens": 9, "do_sample": False, "eos_token_id": None, **options}
    for _ in range(3):
        model.generate(**options, assistant=assistant)
    with entries(monkeypatch) as found:
        model.generate(**options, assistant=assistant)
    assert {"engine.py", "round_program.py", "schedule.py", "verifier.py", "batching.py"} <= set(found["round"])
    return {phase: Counter(room for room, _ in groupby(rooms)) for phase, rooms in found.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 0.8}, {"repetition_penalty": 1.3}, SCORES], ids=str
)
@pytest.mark.parametrize("assistant", ["autoregressive", "nasd", "eagle3"])
def test_no_room_is_entered_again_more_than_once_in_a_phase(monkeypatch, assistant, options, captures):
    if captures:
        stand_in(monkeypatch)
    for phase, found in visits(monkeypatch, assistant, options).items():
        assert max(found.values()) <= ONCE_MORE, (phase, found)
