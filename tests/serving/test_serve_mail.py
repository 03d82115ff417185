"""What the batch's thread says, on its way to the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("starlette")

from fastspec.generation.verify import TokenLogprob
from fastspec.patches.call.processors import StreamedRound
from fastspec.programs.serving.batch import GATHERED, TokenStreamer
from fastspec.programs.serving.wire import LONGEST_PACE, Mail
from fastspec.programs.serving.wire import all_of as mail_of


def all_of(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_what_waits_comes_at_once_and_keeps_its_order() -> None:
    async def run() -> tuple[list[Any], list[Any], int]:
        loop, one, two = asyncio.get_running_loop(), asyncio.Queue[Any](), asyncio.Queue[Any]()
        mail, calls = Mail(loop), 0
        call = loop.call_soon_threadsafe

        def counted(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(*given)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

        def said() -> None:
            for queue, item in [
                (one, "a"),
                (two, "x"),
                (one, "b"),
                (one, "r"),
                (two, "y"),
                (one, "c"),
                (one, "d"),
                (one, None),
                (two, "z"),
            ]:
                mail.post(queue, item)

        thread = threading.Thread(target=said)
        thread.start()
        thread.join()  # the loop is busy meanwhile
        await asyncio.sleep(0)
        first = all_of(one), all_of(two), calls
        mail.post(two, "later")
        mail.post(two, None)
        await asyncio.sleep(0)
        assert not all_of(two) and calls == 1  # two readers were served: the next wake-up is a while off
        await asyncio.sleep(5 * LONGEST_PACE)
        assert all_of(two) == ["later", None] and calls == 1
        mail.post(one, "alone")
        await asyncio.sleep(0)
        assert all_of(one) == ["alone"] and calls == 2
        return first

    one, two, calls = asyncio.run(run())
    assert one == [*"abrcd", None] and two == [*"xyz"] and calls == 1


def test_what_is_urgent_waits_for_no_pace() -> None:
    async def run() -> None:
        loop, queues = asyncio.get_running_loop(), [asyncio.Queue[Any]() for _ in range(3)]
        mail = Mail(loop)
        for queue in queues[:2]:
            mail.post(queue, "begun")
        await asyncio.sleep(0)
        for item in ("on", "and on"):
            mail.post(queues[0], item)
            mail.post(queues[1], item)
        mail.post(queues[2], "first", urgent=True)
        mail.post(queues[1], "end", urgent=True)
        await asyncio.sleep(0)
        assert [all_of(queue) for queue in queues] == [["begun"], ["begun", "on", "and on", "end"], ["first"]]
        mail.post(queues[0], "later")
        await asyncio.sleep(3 * LONGEST_PACE)
        assert [all_of(queue) for queue in queues] == [["on", "and on", "later"], [], []]

    asyncio.run(run())


def test_many_threads_keep_the_order_of_every_queue() -> None:
    count, readers = 4_000, 5

    async def run() -> list[str]:
        queues, mail = [asyncio.Queue[Any]() for _ in range(readers)], Mail(asyncio.get_running_loop())

        def said(queue: asyncio.Queue[Any]) -> None:
            for number in range(count):
                mail.post(queue, chr(65 + number % 26), urgent=number % 7 == 0)
            mail.post(queue, None)

        async def read(queue: asyncio.Queue[Any]) -> str:
            parts = []
            while (item := await asyncio.wait_for(queue.get(), 30)) is not None:
                parts.append(item)
            return "".join(parts)

        threads = [threading.Thread(target=said, args=(queue,)) for queue in queues]
        for thread in threads:
            thread.start()
        return await asyncio.gather(*map(read, queues))

    assert asyncio.run(run()) == ["".join(chr(65 + number % 26) for number in range(count))] * readers


def test_nothing_is_lost_while_a_thread_posts() -> None:
    count = 20_000

    async def run() -> tuple[str, int]:
        queue, mail, parts, wakes = asyncio.Queue[Any](), Mail(asyncio.get_running_loop()), [], 0

        def said() -> None:
            for number in range(count):
                mail.post(queue, chr(65 + number % 26))
            mail.post(queue, None)

        thread = threading.Thread(target=said)
        thread.start()
        while parts[-1:] != [None]:
            parts += await asyncio.wait_for(mail_of(queue), 30)
            wakes += 1
        thread.join()
        return "".join(parts[:-1]), wakes

    text, wakes = asyncio.run(run())
    assert text == "".join(chr(65 + number % 26) for number in range(count))
    assert wakes < count


@pytest.mark.parametrize("whole", [False, True])
def test_rounds_of_a_whole_answer_come_gathered_after_the_first(whole: bool) -> None:
    """And say the same together."""
    rounds = [
        StreamedRound([n, n + 1], accepted=1, drafted=4, logprobs=[TokenLogprob(n, -1.0, ())], cached=5)
        for n in range(50)
    ]
    told: list[StreamedRound] = []
    streamer = TokenStreamer(told.append, 0, False, whole)
    for each in rounds:
        streamer.put_round(each)
    streamer.flush()
    streamer.flush()
    assert len(told) == (1 + -(-49 * 2 // GATHERED) if whole else 50) and told[0] == rounds[0]
    assert [token for each in told for token in each.tokens] == [token for each in rounds for token in each.tokens]
    for name in ("accepted", "drafted"):
        assert sum(getattr(each, name) for each in told) == sum(getattr(each, name) for each in rounds)
    assert [one for each in told for one in each.logprobs or ()] == [
        one for each in rounds for one in each.logprobs or ()
    ]
    assert {each.cached for each in told} == {5}
