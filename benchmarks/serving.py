"""What servers of OpenAI's routes do under load: tokens per second, time to first token, and how long a running stream
stands still.

    python benchmarks/serving.py --model smollm2-135m-instruct --prompts mt_bench.jsonl --ways whole streamed long --in-flight 1 8 32 \\
        --start "fastspec=fastspec serve smollm2-135m-instruct --rows 32 --warmup --port {port}" \\
        --start "vllm=vllm serve {model} --served-model-name smollm2-135m-instruct --no-enable-prefix-caching --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 6000000000 --port {port}"

Servers run already (`--server`), or are started here, all at once, and ended (`--start`): a free port takes the place
of `{port}` in a command, a folder with the model, which another library reads (`saved_shape` of a shape in
full_size.py), that of `{model}`, and its shipped head that of `{head}`. `ready_s` is the time until such a server is
ready, the others starting beside it.

Every server gets the same greedy chats, so many of them in flight at a time and six times as many in all, or
`--requests` where those are more; the servers take turns at each load, and with `--parts` within one, so that what
disturbs the machine for a while disturbs all alike. Texts begin with a number and the load's name: none comes twice, so
that prefix caches find the turns of a chat alone. Ways to ask: answers `streamed`; or `whole`; or `long`, streamed,
where every tenth request begins with `--long` words; or `turns`, streamed chats of ten turns, which are ten requests
and `--long` words together, with first tokens by turn too; or `schema`, whole answers by a JSON schema: `valid` is the
share that hold to it. Before anything is timed each server answers ten prompts, or a chat; `equal` is the share of
answers that are the first server's, 1 in fp32. `pause_ms` are the times between a stream's chunks, those within 2 ms
taken for one. `acceptance_length` and `stages`, the share of answers by each stage of a cascade, are those of the
server's `/metrics`. One client reads all streams: whole answers tell the speed of a small model's server.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from common import Row, device_here, parser_of, place, write
from full_size import SHAPES, saved_shape
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from fastspec.devices import cpu_name
from fastspec.models import load_model
from fastspec.patches.assistants.heads import find_head
from fastspec.programs.bench.methods import read_rows
from fastspec.programs.bench.report import quantiles
from fastspec.programs.bench.run import saved

TOGETHER = 0.002
"""Seconds within which chunks count as one."""
REQUESTS, TURNS = 6, 10
"""Times those in flight: so many requests at the least; requests of a chat, and up to one that is long."""
WAYS = "streamed", "whole", "long", "turns", "schema"
WHOLE = "whole", "schema"
"""Ways whose answers are no streams."""
FIELDS = {"title": {"type": "string", "maxLength": 60}, "mood": {"enum": ["good", "bad"]}}
VALID = re.compile(r'\s*\{\s*"title"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"mood"\s*:\s*"(?:good|bad)"\s*\}\s*')
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "review", "strict": True, "schema": SCHEMA}}
COUNTS = {
    "fastspec_stage_requests_total": "answered by {stage}",
    "fastspec_row_rounds_total": "rounds",
    "fastspec_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
"""What servers count of drafts and of stages, by the name of a sample."""
LOOK, GRACE = 0.25, 20.0
"""Seconds between looks at a server that is not ready, and that one has to end."""


@dataclass(frozen=True, slots=True)
class Started:
    """Server that answers: its address, and the seconds from its start until it did; None where it ran before."""

    url: str
    ready_s: float | None = None


@contextlib.contextmanager
def started(commands: Sequence[str], model: str, patience: float) -> Iterator[dict[str, Started]]:
    """name -> server, of commands "NAME=COMMAND"; the model is written out in bf16 where there is CUDA. Raises
    `SystemExit` with what a server wrote last where it ends, or is not ready in time."""
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        filled = {}
        if any("{model}" in command for command in commands):
            of = saved_shape(model) if model in SHAPES else saved(model, *load_model(model, dtype=device_here()[1]))
            filled["{model}"] = stack.enter_context(of)
        if any("{head}" in command for command in commands):
            filled["{head}"] = str(find_head(model))
        begun, running = time.monotonic(), {}
        for port, text in zip(free_ports(len(commands)), commands, strict=True):
            name, command = text.split("=", 1)
            filled["{port}"] = str(port)
            words = shlex.split(command)
            for mark, value in filled.items():
                words = [word.replace(mark, value) for word in words]
            log = stack.enter_context((logs / f"{len(running)}.log").open("wb"))
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(end, process)
            running[name] = process, f"http://127.0.0.1:{port}", Path(log.name)
        found: dict[str, Started] = {}
        while len(found) < len(running):
            for name, (process, address, log_path) in running.items():
                if name not in found and is_ready(address):
                    found[name] = Started(f"{address}/v1", round(time.monotonic() - begun, 1))
                elif name not in found and (process.poll() is not None or time.monotonic() - begun > patience):
                    ended = f"ended with status {process.returncode}"
                    why = f"was not ready within {patience:g} s" if process.poll() is None else ended
                    raise SystemExit(f"{name} {why}:\n{log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(LOOK)
        yield {name: found[name] for name in running}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def is_ready(address: str) -> bool:
    """Whether `/health` says so."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, and all that it started; and end what does not."""
    for sign, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


@dataclass(slots=True)
class Answer:
    """One request: its text, and when it was sent, its chunks came and it was over, in seconds."""

    sent: float
    text: str = ""
    tokens: int = 0
    at: list[float] = field(default_factory=list)
    over: float = 0.0

    @property
    def first_ms(self) -> float:
        """Milliseconds to the first chunk; 0 of an answer that has none."""
        return 1e3 * (self.at[0] - self.sent) if self.at else 0.0

    @property
    def pauses(self) -> list[float]:
        """Times between chunks that are no single one."""
        return [later - sooner for sooner, later in pairwise(self.at) if later - sooner > TOGETHER]


async def ask(client: AsyncOpenAI, model: str, messages: list[Row], count: int, way: str) -> Answer:
    """The next answer of a chat, as its way has it. The package would look through `messages`: 19 take it 4 ms."""
    answer, body = Answer(time.perf_counter()), {"messages": messages}
    asked: dict[str, Any] = {"model": model, "max_tokens": count, "temperature": 0, "messages": [], "extra_body": body}
    if way == "schema":
        asked["response_format"] = FORMAT
    if way in WHOLE:
        found = await client.chat.completions.create(**asked)
        answer.text, answer.tokens = found.choices[0].message.content or "", found.usage.completion_tokens
    else:
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**asked, **more):
            if chunk.usage is not None:
                answer.tokens = chunk.usage.completion_tokens
            if chunk.choices and chunk.choices[0].delta.content:
                answer.text += chunk.choices[0].delta.content
                answer.at.append(time.perf_counter())
    answer.over = time.perf_counter()
    return answer


async def load(
    url: str, model: str, prompts: Sequence[str], in_flight: int, count: int, way: str = "streamed"
) -> tuple[list[Answer], float]:
    """All prompts, or all chats of ten of them, so many at a time -> the answers in the prompts' order, and the seconds
    that all took."""
    room = asyncio.Semaphore(in_flight)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600) as client:

        async def chat(turns: Sequence[str]) -> list[Answer]:
            messages, answers = list[Row](), list[Answer]()
            async with room:
                for prompt in turns:
                    messages.append({"role": "user", "content": prompt})
                    answers.append(await ask(client, model, messages, count, way))
                    messages.append({"role": "assistant", "content": answers[-1].text})
            return answers

        turns, begun = TURNS if way == "turns" else 1, time.perf_counter()
        chats = await asyncio.gather(*(chat(prompts[at : at + turns]) for at in range(0, len(prompts), turns)))
        return [answer for answers in chats for answer in answers], time.perf_counter() - begun


def counted(url: str) -> dict[str, float]:
    """Rounds of a row, drafts accepted in them, and answers by stage since the server's start; nothing of a server that
    does not say."""
    families, found, address = [], dict[str, float](), url.rstrip("/").removesuffix("/v1") + "/metrics"
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(address, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    for sample in (sample for family in families for sample in family.samples if sample.name in COUNTS):
        if sample.labels.get("outcome", "answered") == "answered":
            name = COUNTS[sample.name].format(**sample.labels)
            found[name] = found.get(name, 0.0) + sample.value
    return found


def acceptance(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Mean tokens of a round, the bonus token counted, between two looks."""
    rounds, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in ("rounds", "accepted"))
    return round(1 + accepted / rounds, 3) if rounds else None


def shares(before: dict[str, float], after: dict[str, float]) -> dict[str, float] | None:
    """Share of the answers between two looks by stage; None without stages."""
    names = {name: name.removeprefix("answered by ") for name in after if name.startswith("answered by ")}
    new = {stage: after[name] - before.get(name, 0.0) for name, stage in names.items()}
    return {stage: round(count / sum(new.values()), 3) for stage, count in new.items()} if any(new.values()) else None


def texts(path: str, requests: int, way: str, long: int, name: str) -> list[str]:
    """So many prompts of a file, again from its start where it has fewer; for `long` every tenth behind a text of so
    many words, for `turns` each behind a tenth of them. No two texts begin alike, under other names of loads either."""
    found = [row["text"] for row in read_rows(path)]
    chosen = [found[index % len(found)] for index in range(requests)]
    every, words = {"long": (TURNS, long), "turns": (1, long // TURNS)}.get(way, (requests + 1, 0))
    for index in range(every - 1, requests, every):
        filler = " ".join(f"item {number}" for number in range(index, index + words // 2))
        chosen[index] = f"{filler}\n{chosen[index]}"
    return [f"{index} {way} {name}\n{text}" for index, text in enumerate(chosen)]


def requests_of(given: argparse.Namespace, way: str, in_flight: int) -> int:
    """Requests of a load; of `turns` whole chats, as many as are in flight at the least."""
    chats = TURNS * max(in_flight, -(-given.requests // TURNS))
    return chats if way == "turns" else max(given.requests, REQUESTS * in_flight)


def name_at(url: str) -> str:
    """The name that requests must have for a server's model: its own, or where it was loaded from."""
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        return json.load(answer)["data"][0]["id"]


def row_of(server: str, in_flight: int, answers: Sequence[Answer], seconds: float, wanted: Sequence[str]) -> Row:
    """The row of a load."""
    first = sorted(answer.first_ms for answer in answers if answer.at) or [0.0]
    whole = sorted(1e3 * (answer.over - answer.sent) for answer in answers)
    pauses = sorted(1e3 * pause for answer in answers for pause in answer.pauses) or [0.0]
    new, same = sum(answer.tokens for answer in answers), zip(answers, wanted, strict=True)
    row = {"server": server, "in_flight": in_flight, "requests": len(answers), "new_tokens": new}
    row |= {"seconds": round(seconds, 3), "tokens_per_second": round(new / seconds, 2)}
    for name, values, most in (("first_token", first, 95), ("answer", whole, 95), ("pause", pauses, 99)):
        row[f"{name}_ms"] = [round(value, 2) for value in quantiles(values)]
        row[f"{name}_{most}_ms"] = round(values[int(most / 100 * (len(values) - 1))], 2)
    equal = sum(answer.text == text for answer, text in same) / len(answers)
    return row | {"pause_longest_ms": round(pauses[-1], 2), "equal": equal}


def rows_of(given: argparse.Namespace, servers: dict[str, Started]) -> Iterator[dict[str, Any]]:
    """A row for every way, load and server."""
    where = place(*device_here()) | {"client_cpu": cpu_name(), "cores": os.cpu_count(), "note": given.note}
    names = {server.url: name_at(server.url) for server in servers.values()}
    for way in given.ways:
        long = given.long if way in ("long", "turns") else 0
        prompts = texts(given.prompts, TURNS, way, long, "warm")
        for server in servers.values():
            asyncio.run(load(server.url, names[server.url], prompts, 4, given.max_tokens, way))
        for number, in_flight in enumerate(given.in_flight):
            wanted: list[str] = []
            prompts = texts(given.prompts, requests_of(given, way, in_flight), way, long, f"{in_flight} {number}")
            size = TURNS * -(-len(prompts) // (TURNS * given.parts))  # of a part, whole chats
            before = {name: counted(server.url) for name, server in servers.items()}
            told = {name: list[tuple[list[Answer], float]]() for name in servers}
            for at, (name, server) in product(range(0, len(prompts), size), servers.items()):
                part = prompts[at : at + size]
                asked = load(server.url, names[server.url], part, in_flight, given.max_tokens, way)
                told[name].append(asyncio.run(asked))
            for name, server in servers.items():
                answers = [answer for part, _ in told[name] for answer in part]
                wanted = wanted or [answer.text for answer in answers]
                after, seconds = counted(server.url), sum(seconds for _, seconds in told[name])
                row = row_of(name, in_flight, answers, seconds, wanted)
                row |= {"acceptance_length": acceptance(before[name], after), "stages": shares(before[name], after)}
                if way == "turns":
                    by_turn = [[answer.first_ms for answer in answers[turn::TURNS]] for turn in range(TURNS)]
                    row["first_token_by_turn_ms"] = [round(quantiles(firsts)[1], 2) for firsts in by_turn]
                if way == "schema":
                    row["valid"] = sum(VALID.fullmatch(answer.text) is not None for answer in answers) / len(answers)
                row |= {"way": way, "streamed": way not in WHOLE, "max_tokens": given.max_tokens, "long": long}
                row |= {"ready_s": server.ready_s, "model": given.model, "prompts": Path(given.prompts).stem}
                yield row | where | {"load_average": round(os.getloadavg()[0], 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--server", action="append", default=[], help="NAME=URL of one that runs; repeatable")
    parser.add_argument("--start", action="append", default=[], help="NAME=COMMAND of one to start; repeatable")
    parser.add_argument("--patience", type=float, default=600, help="seconds until started servers must be ready")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="jsonl file in Spec-Bench's form")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64, help="of a load, or six times those in flight")
    parser.add_argument("--parts", type=int, default=1, help="of a load, which servers answer in turn")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="+", default=["streamed"], choices=WAYS)
    parser.add_argument("--long", type=int, default=1500, help="words of every tenth prompt (long), a chat (turns)")
    parser.add_argument("--note", default="", help="what the rows say of the machine and the servers")
    given = parser.parse_args(arguments)
    if not given.server + given.start:
        parser.error("name a --server, or one to --start")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends what was started, too
    with started(given.start, given.model, given.patience) as own:
        running = {name: Started(url) for name, url in (text.split("=", 1) for text in given.server)}
        for row in rows_of(given, running | own):
            write(given.out, row)


if __name__ == "__main__":
    main()
