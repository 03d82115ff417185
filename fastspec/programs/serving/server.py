"""Requests on their way through an open batch: prompts are made, tokens measured and read into events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.hf.ends import end_tokens, stop_criterion
from fastspec.programs.serving.answers import (
    AnswerReader,
    CallsParser,
    Content,
    End,
    Event,
    Reasoning,
    ResponseParser,
    merged,
)
from fastspec.programs.serving.batch import Sent, Served
from fastspec.programs.serving.mail import Mail, all_of
from fastspec.programs.serving.metrics import Metrics
from fastspec.programs.serving.middleware import LET_GO
from fastspec.programs.serving.requests import NEW_TOKENS, AnswerRequest, Limits, Refused, too_many
from fastspec.programs.serving.structured import check
from fastspec.programs.serving.templates import response_template

LONG = 16
"""Characters for each token that a row has room for, above which a prompt's first ones are counted alone: a megabyte
takes a tokenizer seconds."""
STALLED = 30.0
"""Seconds without the end of a turn of the rounds, while requests are there, from which on a server is unhealthy."""
log = logging.getLogger("fastspec.serve")


class FinishReason:
    """Why an answer ended, of the configuration that it was asked with."""

    def __init__(self, config: Any, models: Any, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.limit, self.tokenizer, self.stop = config.max_new_tokens, tokenizer, stop
        self.ends = end_tokens(config, models)

    def of(self, tokens: list[int]) -> Literal["stop", "length"]:
        """ "length" where there is room for no more, and it neither said its end nor a stop string at last."""
        if len(tokens) < self.limit or tokens[-1] in self.ends:
            return "stop"
        text = self.tokenizer.decode(tokens) if self.stop else ""
        return "stop" if any(string in text for string in self.stop) else "length"


class ServedAnswer:
    """Answer that a batch decodes: its tokens are measured, and its events posted to `queue`, an error as itself.

    It is the streamer's reader of a `Served`.
    """

    def __init__(
        self,
        asked: AnswerRequest,
        prompt_tokens: int,
        reason: FinishReason,
        reader: AnswerReader,
        metrics: Metrics,
        mail: Mail,
    ) -> None:
        self.asked, self.prompt_tokens, self.reason = asked, prompt_tokens, reason
        self.reader, self.metrics, self.mail = reader, metrics, mail
        self.queue: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue()
        self.tokens: list[int] = []
        self.called = False
        self.first: float | None = None

    def put_tokens(self, tokens: list[int]) -> None:
        """Take a round's tokens."""
        self.tokens += tokens
        self.metrics.tokens.inc(len(tokens))
        self.metrics.rate.add(len(tokens))
        first = self.first is None
        if self.first is None:
            self.first = time.perf_counter() - self.asked.arrived
            self.metrics.first_token.observe(self.first)
        if self.asked.stream:
            self._post(self.reader.add(tokens), urgent=first)

    def _post(self, events: list[Event], urgent: bool = False) -> None:
        self.called = self.called or any(not isinstance(event, (Content, Reasoning)) for event in events)
        if events:
            self.mail.post(self.queue, events, urgent)

    def over(self, future: Future[Any]) -> None:
        """The batch is done with it, however it ended."""
        error = None if future.cancelled() else future.exception()
        outcome = "cancelled" if future.cancelled() else "error" if error is not None else self.reason.of(self.tokens)
        try:
            if future.cancelled():
                error = Refused("the server stops", 503)
            elif error is None:
                self._post([*(() if self.asked.stream else self.reader.add(self.tokens)), *self.reader.finish()])
                reason = "tool_calls" if self.called else self.reason.of(self.tokens)
                self._post([End(reason, self.prompt_tokens, len(self.tokens))])
        except Exception as raised:
            error, outcome = raised, "error"
        if error is not None:
            self.mail.post(self.queue, error)
        seconds = time.perf_counter() - self.asked.arrived
        self.metrics.requests.labels(outcome).inc()
        self.metrics.seconds.observe(seconds)
        first = "none" if self.first is None else f"{self.first:.3f} s"
        said = f"{self.prompt_tokens} prompt tokens, {len(self.tokens)} new, first after {first}, {seconds:.3f} s"
        log.info("%s: %s, %s", self.asked.request_id, outcome, said)
        if outcome == "error":
            log.error("%s failed", self.asked.request_id, exc_info=error)

    async def events(self) -> AsyncIterator[list[Event]]:
        """The events as they come, up to the end. Raises what ended the answer."""
        while True:
            events: list[Event] = []
            for item in await all_of(self.queue):
                if isinstance(item, BaseException):
                    if events:
                        yield list(merged(events))
                    raise item
                events += item
            yield list(merged(events))
            if isinstance(events[-1], End):
                return


class Server:
    """What answers the requests of one model: an open batch, its tokenizer, and the model's name."""

    def __init__(self, batch: Served, tokenizer: Any, name: str, limits: Limits) -> None:
        self.batch, self.tokenizer, self.name, self.limits = batch, tokenizer, name, limits
        self.metrics = Metrics(batch)
        self.template = response_template(tokenizer, batch.model.config)
        self.special = frozenset(tokenizer.all_special_ids)
        self.since = int(time.time())
        self.reading = ThreadPoolExecutor(16, "fastspec-prompts")
        self.making = ThreadPoolExecutor(1, "fastspec-stop-strings")
        """Of stop strings: one request's at a time, for that takes Python's time from all others."""
        self.compiling = ThreadPoolExecutor(2, "fastspec-grammars")
        """Of grammars, each in a process of its own."""
        self.mail: Mail | None = None
        self._turns, self._moved = -1, 0.0
        tokenizer("", add_special_tokens=False)  # sets padding and truncation, which threads could not beside others

    async def ask(self, read: Callable[[], AnswerRequest]) -> ServedAnswer:
        """Hand a request to the batch, which has taken it when this returns; `read` reads it, in a thread. Raises
        Refused: 400 for what cannot be answered, 429 where too many wait, 503 where the batch takes nothing any
        more."""
        loop = asyncio.get_running_loop()
        asked, ids, reader = await loop.run_in_executor(self.reading, lambda: self._read(read()))
        if asked.stop:  # which may take seconds: other requests go on meanwhile
            try:
                criterion = await loop.run_in_executor(self.making, stop_criterion, self.tokenizer, asked.stop)
            except ValueError as error:
                raise Refused(f"stop: {error}") from error
            self.batch.know(asked.stop, criterion)
        if asked.structure is not None:
            try:
                await loop.run_in_executor(self.compiling, check, asked.structure)
            except Unsupported as error:
                raise Refused(str(error)) from error
        self._fit(asked, len(ids))
        if self.mail is None or self.mail.loop is not loop:
            self.mail = Mail(loop)
        reason = FinishReason(asked.config, self.batch.model.generation_config, self.tokenizer, asked.stop)
        answer = ServedAnswer(asked, len(ids), reason, reader, self.metrics, self.mail)
        if not self._open:
            self._moved = time.monotonic()
        sent = self.batch.send(ids, asked.config, answer.put_tokens, asked.seed)
        LET_GO.get([]).append(sent.answer.cancel)
        sent.answer.add_done_callback(answer.over)
        await self._is_taken(sent)
        self.metrics.prompt_tokens.inc(len(ids))
        return answer

    def _read(self, asked: AnswerRequest) -> tuple[AnswerRequest, list[int], AnswerReader]:
        """(a request, the tokens of its prompt, the reader of its answer). Texts are tokenized by a call that lets go
        of the interpreter."""
        if asked.prompt is not None:
            return asked, self._ids(asked.prompt, special=True), AnswerReader(self.tokenizer, None)
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": asked.tools}
        try:
            text = self.tokenizer.apply_chat_template(asked.messages, **options, **asked.variables)
        except Exception as error:  # of any kind: a template raises what it likes
            raise Refused(f"the model's chat template: {type(error).__name__}: {error}") from error
        ids = self._ids(text, special=False)
        structure = asked.structure
        if structure is not None and structure.calls:
            return asked, ids, AnswerReader(self.tokenizer, CallsParser(structure.tool), self.special)
        if structure is not None or self.template is None:
            return asked, ids, AnswerReader(self.tokenizer, None)
        ends = end_tokens(asked.config, self.batch.model.generation_config) & self.special
        parser = ResponseParser(self.template, self.tokenizer, asked.tools, text)
        return asked, ids, AnswerReader(self.tokenizer, parser, ends)

    def _ids(self, text: str, special: bool) -> list[int]:
        most = self.batch.max_length

        def ids(text: str) -> list[int]:
            try:
                found: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
            except (TypeError, ValueError) as error:  # half of a character, say, that a template has made
                raise Refused(f"the prompt cannot be tokenized: {error}") from error
            return found

        if len(text) > LONG * most:
            count = len(ids(text[: LONG * most]))
            if count > 2 * most:  # the rest may join with a few of them
                raise Refused(f"the prompt has {count} tokens or more, and this server takes {most - 1} at most")
        return ids(text)

    def _fit(self, asked: AnswerRequest, length: int) -> None:
        """Say how long the answer may get. Raises Refused for a prompt that has no room, and where too many wait."""
        batch, config = self.batch, asked.config
        room = min(batch.max_length - length, self.limits.tokens)
        if room < 1:
            raise Refused(f"the prompt has {length} tokens, and this server takes {batch.max_length - 1} at most")
        if config.max_new_tokens is None and config.max_length is not None:
            config.max_new_tokens, config.max_length = config.max_length - length, None
        if not asked.limited:
            config.max_new_tokens = min(config.max_new_tokens or NEW_TOKENS, room)
        elif config.max_new_tokens > self.limits.tokens:
            raise too_many(config.max_new_tokens, self.limits)
        if batch.waiting >= self.limits.queue:
            self.metrics.requests.labels("refused").inc()
            message = f"{batch.waiting} requests are waiting already: try again later"
            raise Refused(message, 429, headers={"Retry-After": "1"})

    async def _is_taken(self, sent: Sent) -> None:
        """Return when the batch has taken a prompt. Raises Refused; where nobody waits for that any more the prompt is
        let go of."""
        try:
            await asyncio.shield(asyncio.wrap_future(sent.taken))
        except asyncio.CancelledError:
            sent.answer.cancel()
            raise
        except (Unsupported, ValueError) as error:
            self.metrics.requests.labels("refused").inc()
            raise Refused(str(error)) from error
        except FastSpecError as error:
            self.metrics.requests.labels("refused").inc()
            raise Refused(str(error), 503) from error

    @property
    def _open(self) -> int:
        return self.batch.running + self.batch.waiting

    def ill(self) -> str | None:
        """Why the server is not healthy; None where it is."""
        if not self.batch.alive:
            return "the rounds have failed for good"
        if self.batch.turns != self._turns or not self._open:
            self._turns, self._moved = self.batch.turns, time.monotonic()
        seconds = time.monotonic() - self._moved
        return f"no round has ended for {seconds:.0f} seconds, and requests wait" if seconds > STALLED else None

    def close(self) -> None:
        """Let go of all requests."""
        for threads in (self.reading, self.making, self.compiling):
            threads.shutdown(wait=False, cancel_futures=True)
        self.batch.close()
