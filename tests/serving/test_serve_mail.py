"""What the batch's thread says, on its way to the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastspec.serving.manager import Mail


class Marked(str):
    """Text of another kind, as transformers' reasoning is."""


def all_of(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_texts_that_wait_are_one_and_everything_keeps_its_order() -> None:
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
                (one, "a"), (two, "x"), (one, "b"), (one, Marked("r")), (two, "y"), (one, "c"), (one, "d"), (one, None), (two, "z"),
            ]:  # fmt: skip
                mail.post(queue, item)

        thread = threading.Thread(target=said)
        thread.start()
        thread.join()  # the loop is busy meanwhile
        await asyncio.sleep(0)
        first = all_of(one), all_of(two), calls
        mail.post(two, "later")
        mail.post(two, None)
        await asyncio.sleep(0)
        assert all_of(two) == ["later", None]
        return first

    one, two, calls = asyncio.run(run())
    assert one == ["ab", "r", "cd", None] and type(one[1]) is Marked
    assert two == ["xyz"] and calls == 1


def test_nothing_is_lost_while_a_thread_posts() -> None:
    count = 20_000

    async def run() -> tuple[str, int]:
        queue, mail, parts = asyncio.Queue[Any](), Mail(asyncio.get_running_loop()), []

        def said() -> None:
            for number in range(count):
                mail.post(queue, chr(65 + number % 26))
            mail.post(queue, None)

        thread = threading.Thread(target=said)
        thread.start()
        while (item := await asyncio.wait_for(queue.get(), 30)) is not None:
            parts.append(item)
        thread.join()
        return "".join(parts), len(parts)

    text, parts = asyncio.run(run())
    assert text == "".join(chr(65 + number % 26) for number in range(count))
    assert parts < count
