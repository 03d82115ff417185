"""Rows of a server: rounds that wait until a stream's reader fetches them, and the events that they are read into."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("starlette")

from fastspec.cascade.decisions import Visit
from fastspec.patches.call.processors import StreamedRound
from fastspec.programs.serving import wire
from fastspec.programs.serving.answers import Content, End, NamedRound, NamedStage
from fastspec.programs.serving.batch import Sent
from fastspec.programs.serving.server import Row, ServedAnswers
from fastspec.programs.serving.wire import Mail


class Letters:
    """A reader whose tokens are letters; token 0 raises."""

    def __init__(self) -> None:
        self.added: list[list[int]] = []
        self.cut = SimpleNamespace(found=None)

    def add(self, tokens: list[int], scored: Any = None) -> list[Any]:
        self.added.append(tokens)
        if 0 in tokens:
            raise ValueError("no such letter")
        return [Content("".join(map(chr, tokens)))]

    def finish(self) -> list[Any]:
        return []


def row_of(rounds: bool = False) -> tuple[Row, Letters, Future[Any]]:
    """The row of a stream that a batch decodes, its reader, and the answer's future; a loop runs."""
    asked: Any = SimpleNamespace(stream=True, logprobs=None, count=1, arrived=0.0, request_id="r", rounds=rounds)
    metrics, sent, reader = MagicMock(), Sent(), Letters()
    answers = ServedAnswers(asked, 3, metrics, Mail(asyncio.get_running_loop()), sent=[sent])
    names: Any = SimpleNamespace(named=lambda round: NamedRound({"tokens": round.tokens})) if rounds else None
    row = Row(answers, 0, 3, lambda tokens, cut: "length", reader, [], names)  # type: ignore[arg-type]
    sent.answer.add_done_callback(row.over)
    return row, reader, sent.answer


@pytest.fixture
def slow_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pace that is not over within a test, however busy the machine is."""
    monkeypatch.setattr(wire, "LONGEST_PACE", 600.0)
    monkeypatch.setattr(wire, "PACE", 600.0)


async def told(row: Row) -> list[Any]:
    return [event async for part in row.answers.events() for _, event in part]


def test_rounds_that_wait_are_read_in_one_go_and_say_the_same() -> None:
    async def run() -> None:
        row, reader, answer = row_of()
        events = asyncio.ensure_future(told(row))
        for part in ([97, 98, 99], [100], [101, 102]):
            for token in part:
                row.put_round(StreamedRound([token], drafted=2))
            await asyncio.sleep(0.05)
        row.put_round(StreamedRound([103, 104]))
        answer.set_result(None)
        *texts, end = await asyncio.wait_for(events, 30)
        assert reader.added == [[97, 98, 99], [100], [101, 102], [103, 104]]
        assert "".join(text.text for text in texts) == "abcdefgh" and texts[0] == Content("abc")
        assert isinstance(end, End) and (end.tokens, end.drafted, end.reason) == (8, 12, "length")

    asyncio.run(run())


@pytest.mark.usefixtures("slow_mail")
def test_the_end_of_an_answer_waits_for_no_pace() -> None:
    """Its client may ask again, in a row that stands idle until then."""

    async def run() -> None:
        row, _, answer = row_of()
        others = [asyncio.Queue[Any]() for _ in range(20)]
        for other in others:
            row.answers.mail.post(other, "begun")
        events = asyncio.ensure_future(told(row))
        row.put_round(StreamedRound([97]))
        await asyncio.sleep(0)  # from now on the next wake-up is some readers' pace away
        for other in others:
            row.answers.mail.post(other, "on")
        row.put_round(StreamedRound([98]))
        answer.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert events.done() and [type(event) for event in events.result()] == [Content, Content, End]
        assert [other.qsize() for other in others] == [1] * len(others)

    asyncio.run(run())


@pytest.mark.usefixtures("slow_mail")
@pytest.mark.parametrize("rounds", [False, True])
def test_the_first_token_waits_for_no_pace_behind_a_stage(rounds: bool) -> None:
    async def run() -> None:
        row, _, _ = row_of(rounds)
        others = [asyncio.Queue[Any]() for _ in range(20)]
        for other in others:
            row.answers.mail.post(other, "begun")
        await asyncio.sleep(0)  # from now on the next wake-up is some readers' pace away
        row.put_round(Visit(0, "small", "answered", 1))
        row.put_round(StreamedRound([97]))
        found = row.answers.events()
        first = asyncio.ensure_future(anext(found))
        for _ in range(5):
            await asyncio.sleep(0)
        assert first.done() and first.result()[-1] == (0, Content("a"))
        await found.aclose()

    asyncio.run(run())


def test_rounds_and_stages_that_are_told_of_keep_their_order() -> None:
    """Also where what waits is read later than the next of them comes."""

    async def run() -> None:
        row, _, answer = row_of(rounds=True)
        row.metrics.batch.loads = {"small": (1, 0)}
        expected: list[Any] = []
        for token in range(97, 107):
            visit = Visit(0, "small", "sent on", token)
            row.put_round(StreamedRound([token]))
            row.put_round(visit)
            expected += [NamedRound({"tokens": [token]}), Content(chr(token)), NamedStage.of(visit)]
        answer.set_result(None)
        found = await asyncio.wait_for(told(row), 30)
        assert found[:-1] == expected and isinstance(found[-1], End)
        row.metrics.requests.labels.assert_called_once_with("length")

    asyncio.run(run())


def test_what_reading_raises_ends_the_answer_and_counts_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        row, _, answer = row_of()
        row.put_round(StreamedRound([97]))
        row.put_round(StreamedRound([0]))
        with pytest.raises(ValueError, match="no such letter"):
            await asyncio.wait_for(told(row), 30)
        assert answer.cancelled()  # the batch decodes it no further
        row.metrics.requests.labels.assert_called_once_with("error")

    asyncio.run(run())
