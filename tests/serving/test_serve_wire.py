"""The two ends of a connection between processes."""

from __future__ import annotations

import pickle
import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest

pytest.importorskip("starlette")

from fastspec.programs.serving.wire import LOOK, Wire, sendable


def arrived(error: BaseException) -> BaseException:
    """An error as the other process reads it."""
    found: BaseException = pickle.loads(pickle.dumps(sendable(error)))
    return found


class Odd(Exception):
    """One that cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_messages_keep_their_order_and_news_go_alone() -> None:
    one, two = Pipe()
    news = [0]
    here, there = Wire(one, lambda: news[0]), Wire(two)
    parcels = there.parcels()
    for number in range(1_000):
        here.post(number)
    got: list[Any] = []
    while len(got) < 1_000:
        messages, beside = next(parcels)
        assert beside == 0
        got += messages
    assert got == list(range(1_000))
    for number, waits in enumerate((0.0, 3 * LOOK), 7):
        time.sleep(waits)
        news[0] = number
        assert next(parcels) == ([], number)
    here.post("last")
    here.end()
    here.flush()
    assert next(parcels) == (["last"], 8)
    one.close()
    assert next(parcels, None) is None
    there.post("nobody is there")
    there.post("and nothing happens")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_cannot_be_pickled_ends_the_connection_for_both() -> None:
    one, two = Pipe()
    here, there = Wire(one), Wire(two)
    over: list[str] = []

    def read(wire: Wire, name: str) -> None:
        assert not list(wire.parcels())
        over.append(name)

    threads = [threading.Thread(target=read, args=given) for given in ((here, "here"), (there, "there"))]
    for thread in threads:
        thread.start()
    here.post(lambda: None)
    for thread in threads:
        thread.join(60)
    assert sorted(over) == ["here", "there"]


def test_an_error_arrives_with_its_trace() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as raised:
        error = arrived(raised)
    assert type(error) is ValueError and str(error) == "wrong"
    assert "test_an_error_arrives" in str(error.__cause__)
    try:
        raise Odd(1, 2) from error
    except Odd as raised:
        odd = arrived(raised)
    assert type(odd) is RuntimeError and str(odd) == "Odd: 1 and 2"
    assert "ValueError: wrong" in str(odd.__cause__)  # what the error came of
