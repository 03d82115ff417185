"""What a server of OpenAI's routes does under load: tokens per second, time to first token, and how long a running stream stands still.

    fastspec serve smollm2-135m-instruct --rows 8 --port 8000 &
    python benchmarks/serving.py --server fastspec=http://127.0.0.1:8000/v1 --server other=http://127.0.0.1:8001/v1 \\
        --model smollm2-135m-instruct --prompts benchmarks/prompts.jsonl --in-flight 1 8 32 --out rows.jsonl

Every server gets the same greedy streamed chats, so many of them in flight at a time, the servers in turns at each load. With `--long N`
every tenth request begins with a text of N words. Before anything is timed each server answers four prompts; `equal` is the share of
answers that are those of the first server at its first load, which in fp32 must be 1. `pause_ms` are the times between the moments at which
text of a stream arrives, chunks within 2 ms of each other taken for one, since a round brings several tokens. One client reads all streams,
and a small model on a GPU makes tokens faster than it reads chunks: with `--whole` answers come in one piece, which leaves the server's own
speed, and no time to a first token.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from fastspec.bench.prompts import read_rows
from fastspec.bench.report import quantiles
from fastspec.devices import cpu_name

TOGETHER = 0.002
"""Seconds within which chunks count as one."""
LONG_EVERY = 10


@dataclass(slots=True)
class Answer:
    """One request: its text, and when it was sent and its chunks came, in seconds."""

    sent: float
    text: str = ""
    tokens: int = 0
    at: list[float] = field(default_factory=list)

    @property
    def pauses(self) -> list[float]:
        """Times between chunks that are no single one."""
        return [later - sooner for sooner, later in zip(self.at, self.at[1:], strict=False) if later - sooner > TOGETHER]


async def ask(client: AsyncOpenAI, model: str, prompt: str, count: int, whole: bool) -> Answer:
    """One chat, streamed unless its answer is to come as a `whole`."""
    answer = Answer(time.perf_counter())
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": count, "temperature": 0,
    }  # fmt: skip
    if whole:
        found = await client.chat.completions.create(**asked)
        answer.text, answer.tokens = found.choices[0].message.content or "", found.usage.completion_tokens
        return answer
    async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            answer.text += chunk.choices[0].delta.content
            answer.at.append(time.perf_counter())
    return answer


async def load(
    url: str, model: str, prompts: Sequence[str], in_flight: int, count: int, whole: bool = False
) -> tuple[list[Answer], float]:  # fmt: skip
    """All prompts, so many at a time -> the answers in their order, and the seconds that all took."""
    room = asyncio.Semaphore(in_flight)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600) as client:

        async def one(prompt: str) -> Answer:
            async with room:
                return await ask(client, model, prompt, count, whole)

        begun = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        return answers, time.perf_counter() - begun


def texts(path: str, requests: int, long: int) -> list[str]:
    """So many prompts of a file, again from its start where it has fewer; with `long` every tenth behind a text of so many words."""
    found = [row["text"] for row in read_rows(path)]
    filler = " ".join(f"item {number}" for number in range(long // 2))
    chosen = [found[index % len(found)] for index in range(requests)]
    return [f"{filler}\n{text}" if long and index % LONG_EVERY == LONG_EVERY - 1 else text for index, text in enumerate(chosen)]


def row_of(server: str, in_flight: int, answers: Sequence[Answer], seconds: float, wanted: Sequence[str]) -> dict[str, Any]:
    """What a load came to."""
    first = [1e3 * (answer.at[0] - answer.sent) for answer in answers if answer.at] or [0.0]
    pauses = sorted(1e3 * pause for answer in answers for pause in answer.pauses) or [0.0]
    return {
        "server": server, "in_flight": in_flight, "requests": len(answers), "new_tokens": sum(answer.tokens for answer in answers),
        "seconds": round(seconds, 3), "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 2),
        "first_token_ms": [round(value, 2) for value in quantiles(first)], "pause_ms": [round(value, 2) for value in quantiles(pauses)],
        "pause_99_ms": round(pauses[int(0.99 * (len(pauses) - 1))], 2), "pause_longest_ms": round(pauses[-1], 2),
        "equal": sum(answer.text == text for answer, text in zip(answers, wanted, strict=True)) / len(answers),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write a row for every server and load."""
    parser = argparse.ArgumentParser(description="Load servers of OpenAI's routes, and compare them.")
    parser.add_argument("--server", action="append", required=True, help="NAME=URL; may be given several times")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="jsonl file in Spec-Bench's form")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--whole", action="store_true", help="answers are not streamed")
    parser.add_argument("--long", type=int, default=0, help="words of a text that every tenth prompt begins with")
    parser.add_argument("--note", default="", help="what the rows say of the machine and the servers")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    prompts = texts(given.prompts, given.requests, given.long)
    servers = dict(server.split("=", 1) for server in given.server)
    for url in servers.values():
        asyncio.run(load(url, given.model, prompts[:4], 4, given.max_tokens, given.whole))
    wanted: list[str] | None = None
    for in_flight in given.in_flight:
        for name, url in servers.items():
            answers, seconds = asyncio.run(load(url, given.model, prompts, in_flight, given.max_tokens, given.whole))
            wanted = wanted or [answer.text for answer in answers]
            row = row_of(name, in_flight, answers, seconds, wanted)
            row |= {"streamed": not given.whole, "max_tokens": given.max_tokens, "long": given.long, "note": given.note}
            row |= {"client_cpu": cpu_name(), "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
            row |= {package: importlib.metadata.version(package) for package in ("torch", "transformers", "openai")}
            print(json.dumps(row))
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
