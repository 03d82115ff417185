"""Requests on their way through an open batch: prompts are made, tokens measured and read into events."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from fastspec.cascade.decisions import Visit
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.verify import TokenLogprob
from fastspec.patches.call.processors import StreamedRound
from fastspec.patches.hf.ends import end_tokens, stop_criterion
from fastspec.programs.serving import answers as reading
from fastspec.programs.serving import requests
from fastspec.programs.serving.answers import AnswerReader, End, Event, RoundNames, TokenNames, ToolCall, merged
from fastspec.programs.serving.batch import BatchPrompt, Sent, Served
from fastspec.programs.serving.metrics import Metrics, told_of
from fastspec.programs.serving.middleware import LET_GO
from fastspec.programs.serving.requests import NO_DRAFTS, AnswerRequest, Limits, Refused, Route, read
from fastspec.programs.serving.structured import call_form, chat_template, check, folded, response_template, takes_notes
from fastspec.programs.serving.tokenized import TokenizedTexts
from fastspec.programs.serving.wire import Mail, all_of

LONG = 16
"""Characters for each token of a row's room, above which a prompt's first ones are counted alone."""
STALLED = 30.0
"""Seconds without the end of a turn of the rounds, while requests are there, from which on a server is unhealthy."""
Posted = list[Event] | Callable[[], list[Event]] | BaseException | None
"""Events of an answer, or what reads them, or its error; None is a beat."""
log = logging.getLogger("fastspec.serve")


def finish_reason(
    config: Any, ends: frozenset[int], tokenizer: Any, stop: tuple[str, ...], tokens: list[int], cut: bool | None = None
) -> Literal["stop", "length"]:
    """Reason for the end of an answer: "length" where there is room for no more, and it ended neither itself nor by a
    stop string; `cut` says the first of an answer whose tokens another model counted."""
    if cut is None:
        cut = len(tokens) >= config.max_new_tokens and not (tokens and tokens[-1] in ends)
    if not cut:
        return "stop"
    text = tokenizer.decode(tokens) if stop else ""
    return "stop" if any(string in text for string in stop) else "length"


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's text and its tokens."""

    text: str
    ids: array[int]


@dataclass
class Row:
    """Answer that a batch decodes: its tokens are measured, and its events posted to `queue` with its number."""

    answers: ServedAnswers
    index: int
    prompt_tokens: int
    reason: Callable[[list[int], bool | None], Literal["stop", "length"]]
    reader: AnswerReader
    echo: list[Event]
    rounds: RoundNames | None = None
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    cached: int = 0
    visits: list[Visit] = field(default_factory=list)
    called: bool = False
    first: float | None = None
    waiting: list[StreamedRound | Visit] = field(default_factory=list)
    """What is not read into events yet: of an answer that is not streamed all of it, until the end."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    failed: Exception | None = None
    """Error of reading it."""

    def __post_init__(self) -> None:
        self.asked, self.metrics = self.answers.asked, self.answers.metrics
        self._post(self.echo)

    def put_round(self, round: StreamedRound | Visit) -> None:
        first = False
        if isinstance(round, Visit):
            self.visits.append(round)
            self.metrics.add_visit(round)
        else:
            self.tokens += round.tokens
            self.accepted += round.accepted
            self.drafted += round.drafted
            self.cached = round.cached
            self.metrics.tokens.inc(len(round.tokens))
            self.metrics.rate.add(len(round.tokens))
            first = self.first is None
            if self.first is None:
                self.first = time.perf_counter() - self.asked.arrived
                self.metrics.first_token.observe(self.first)
        with self.reading:
            told = bool(self.waiting)
            self.waiting.append(round)
        if self.asked.stream and (first or not told):  # a stage that waits for its pace holds up no first token
            self.answers.post(self.index, self.read, first)

    def read(self) -> list[Event]:
        """The events of all rounds that wait: many tokens cost as much as one."""
        events: list[Event] = []
        with self.reading:
            waiting, self.waiting = self.waiting, []
            try:
                if self.rounds is None and self.asked.logprobs is None:
                    tokens = [token for each in waiting if isinstance(each, StreamedRound) for token in each.tokens]
                    events += self.reader.add(tokens) if tokens else ()
                else:
                    events += [event for each in waiting for event in self._read(each)]
            except Exception as error:
                self.failed = error
                raise
            self._note(events)
        return events

    def _read(self, round: StreamedRound | Visit) -> list[Event]:
        if isinstance(round, Visit):
            return [] if self.rounds is None else [reading.NamedStage.of(round)]
        named = [] if self.rounds is None else [self.rounds.named(round)]
        return [*named, *self.reader.add(round.tokens, round.logprobs)]

    def _note(self, events: list[Event]) -> None:
        self.called = self.called or any(isinstance(event, ToolCall) for event in events)

    def _post(self, events: list[Event], urgent: bool = False) -> None:
        self._note(events)
        if events:
            self.answers.post(self.index, events, urgent)

    def over(self, future: Future[Any]) -> None:
        if self.answers.refused:
            return
        cancelled = future.cancelled() and self.failed is None
        error = self.failed or (None if cancelled else future.exception())
        failure = "refused" if isinstance(error, Unsupported) else "error"
        outcome = "cancelled" if cancelled else failure if error is not None else self._reason()
        try:
            if cancelled:
                error = Refused("the server stops", 503)
            elif error is None:
                self.end()
        except Exception as raised:
            error, outcome = raised, "error"
        if error is not None:
            self.answers.post(self.index, error)
        seconds = time.perf_counter() - self.asked.arrived
        self.metrics.requests.labels(outcome).inc()
        self.metrics.seconds.observe(seconds)
        first = "none" if self.first is None else f"{self.first:.3f} s"
        said = f"{self.prompt_tokens} prompt tokens, {len(self.tokens)} new, first after {first}, {seconds:.3f} s"
        name = self.asked.request_id + (f"[{self.index}]" if self.asked.count > 1 else "")
        log.info("%s: %s, %s%s", name, outcome, said, told_of(self.visits, self.metrics.batch.loads))
        if outcome == "error":
            log.error("%s failed", name, exc_info=error)

    def _reason(self) -> Literal["stop", "length"]:
        return self.reason(self.tokens, self.visits[-1].cut if self.visits else None)

    def end(self) -> None:
        """Post what is left, and the end, which waits for no pace: the client may ask again, in a row that is idle."""
        self._post(self.read())
        self._post(self.reader.finish())
        reason = "tool_calls" if self.called else self._reason()
        seconds = time.perf_counter() - self.asked.arrived
        ended = End(
            reason,
            len(self.tokens),
            self.accepted,
            self.drafted,
            stop=self.reader.cut.found,
            cached=self.cached,
            first=seconds if self.first is None else self.first,
            seconds=seconds,
        )
        self._post([ended], urgent=True)


@dataclass
class ServedAnswers:
    """Answers to one request, whose prompts have so many tokens; their events come to one queue."""

    asked: AnswerRequest
    prompt_tokens: int
    metrics: Metrics
    mail: Mail
    queue: asyncio.Queue[tuple[int, Posted]] = field(default_factory=asyncio.Queue)
    sent: list[Sent] = field(default_factory=list)
    refused: bool = False
    """True where the batch does not take them: the request is answered with that, and is no answer that ended."""

    def post(self, index: int, item: Posted, urgent: bool = False) -> None:
        self.mail.post(self.queue, (index, item), urgent)

    def cancel(self) -> None:
        for sent in self.sent:
            sent.answer.cancel()

    async def beat(self, seconds: float) -> None:
        """Let `events` come without one every so many seconds, whatever else comes."""
        while True:
            await asyncio.sleep(seconds)
            self.queue.put_nowait((0, None))

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """The events of all answers, up to their ends; none at a beat. Raises what ended one of them, and cancels the
        others."""
        left = self.asked.count
        while left:
            parts: dict[int, list[Event]] = {}
            error: BaseException | None = None
            beat = False
            for index, posted in await all_of(self.queue):
                item = posted
                beat = beat or posted is None
                if callable(item) and error is None:
                    try:
                        item = item()
                    except Exception as raised:
                        item = raised
                if isinstance(item, BaseException):
                    error = error or item
                elif error is None and item and not callable(item):
                    parts.setdefault(index, []).extend(item)
            if parts or beat:
                yield [(index, event) for index, events in parts.items() for event in merged(events)]
            if error is not None:
                self.cancel()
                raise error
            left -= sum(isinstance(events[-1], End) for events in parts.values())


class Server:
    """Answers to the requests of one model, and what makes them: an open batch, its tokenizer, and the model's name."""

    def __init__(
        self, batch: Served, tokenizer: Any, name: str, limits: Limits, info: dict[str, str] | None = None
    ) -> None:
        self.batch, self.tokenizer, self.name, self.limits = batch, tokenizer, name, limits
        self.info = {"model": name, **batch.info, **(info or {})}
        self.metrics = Metrics(batch, self.info)
        self.template, self.takes_notes = response_template(tokenizer, batch.model.config), takes_notes(tokenizer)
        self.calls, self.chat_template = call_form(self.template, tokenizer), chat_template(tokenizer)
        self.special, self.names = frozenset(tokenizer.all_special_ids), TokenNames(tokenizer)
        self.texts = TokenizedTexts(tokenizer)
        self.since = int(time.time())
        self.reading = ThreadPoolExecutor(4, "fastspec-prompts")
        """Threads that read requests: more would read all of a burst together, and the rounds wait for the first."""
        self.making = ThreadPoolExecutor(1, "fastspec-stop-strings")
        """Of stop strings: one request's at a time, for that takes Python's time from all others."""
        self.compiling = ThreadPoolExecutor(2, "fastspec-grammars")
        """Of grammars, each in a process of its own."""
        self.mail: Mail | None = None
        self._turns, self._moved = -1, 0.0
        tokenizer("")  # sets padding and truncation, which threads could not beside others

    def read(self, body: Any, route: Route, request_id: str = "") -> AnswerRequest:
        return read(body, route, request_id, self.limits, self.name, self.batch.model, self.calls, self.chat_template)

    async def ask(self, read: Callable[[], AnswerRequest]) -> ServedAnswers:
        """Hand a request to the batch, which has taken it when this returns; `read` reads it, in a thread. Raises
        Unsupported or Refused: 429 where too many wait, 503 where the batch takes nothing any more."""
        loop = asyncio.get_running_loop()
        self._refuse_full(1)  # before a text is tokenized
        asked, prompts = await loop.run_in_executor(self.reading, lambda: self._read(read()))
        if asked.stop:  # which may take seconds: other requests go on meanwhile
            try:
                criterion = await loop.run_in_executor(self.making, stop_criterion, self.tokenizer, asked.stop)
            except ValueError as error:
                raise Refused(f"stop: {error}") from error
            self.batch.know(asked.stop, criterion)
        if asked.structure is not None:
            await loop.run_in_executor(self.compiling, check, asked.structure)
        configs = [self._fit(asked, len(prompt.ids)) for prompt in prompts]
        self._refuse_full(asked.count)
        if self.mail is None or self.mail.loop is not loop:
            self.mail = Mail(loop)
        prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        answers = ServedAnswers(asked, prompt_tokens, self.metrics, self.mail)
        LET_GO.get([]).append(answers.cancel)
        try:
            scored = await self._scored(answers, prompts)
            for place, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
                for number in range(asked.n):
                    self._send(answers, place * asked.n + number, prompt, config, scored[place])
            for sent in answers.sent:
                await self._is_taken(sent)
        except BaseException as error:
            answers.refused = isinstance(error, Refused)
            answers.cancel()
            raise
        self.metrics.prompt_tokens.inc(prompt_tokens)
        return answers

    async def _scored(self, answers: ServedAnswers, prompts: list[ReadPrompt]) -> list[list[TokenLogprob]]:
        """The log-probabilities of each prompt's tokens from the second on, where they are part of the answer."""
        asked = answers.asked
        found: list[list[TokenLogprob]] = [[] for _ in prompts]
        if not asked.echo or asked.logprobs is None:
            return found

        def put(found: list[TokenLogprob], round: StreamedRound | Visit) -> None:
            assert isinstance(round, StreamedRound)
            found.extend(round.logprobs or ())

        self._begin()
        for prompt, each in zip(prompts, found, strict=True):
            answers.sent.append(self.batch.score(prompt.ids, asked.logprobs, partial(put, each)))
        for sent in answers.sent:
            await self._is_taken(sent)
            try:
                await asyncio.wrap_future(sent.answer)
            except asyncio.CancelledError:
                if sent.answer.cancelled():
                    raise Refused("the server stops", 503) from None
                raise
            except Unsupported as error:
                raise Refused(f"echo with logprobs: {error}") from error
        answers.sent.clear()
        return found

    def _send(
        self, answers: ServedAnswers, index: int, prompt: ReadPrompt, config: Any, scored: list[TokenLogprob]
    ) -> None:
        """Ask the batch for one answer; where it has no token it is there at once."""
        asked, ends = answers.asked, end_tokens(config, self.batch.model.generation_config)
        reader = self._reader(asked, prompt, ends)
        reason = partial(finish_reason, config, ends, self.tokenizer, asked.stop)
        echo = reader.echo(prompt.text, prompt.ids, scored) if asked.echo else []
        rounds = RoundNames(self.tokenizer, self.names) if asked.rounds else None
        row = Row(answers, index, len(prompt.ids), reason, reader, echo, rounds)
        if asked.config.max_new_tokens == 0:
            done: Future[None] = Future()
            done.set_result(None)
            row.over(done)
            return
        self._begin()
        seed = None if asked.seed is None else (asked.seed + index % asked.n + 2**63) % 2**64 - 2**63  # of 64 bits
        drafts = not {asked.assistant, self.info["assistant"]} & {*NO_DRAFTS}
        given = BatchPrompt(
            prompt.ids,
            config,
            seed,
            asked.frequency,
            asked.presence,
            asked.logprobs,
            trees=asked.rounds and drafts,
            drafts=drafts,
            price=asked.price,
            whole=not (asked.stream or asked.rounds),
        )
        sent = self.batch.send(given, row.put_round)
        answers.sent.append(sent)
        sent.answer.add_done_callback(row.over)

    def _begin(self) -> None:
        if not self._open:
            self._moved = time.monotonic()

    def _read(self, asked: AnswerRequest) -> tuple[AnswerRequest, list[ReadPrompt]]:
        """A request and its prompts. Raises Refused, by name, for fields that what decodes cannot honour."""
        own, name, why = self.info["assistant"], "", ""
        other = asked.assistant not in (None, own)
        if "stages" not in self.batch.info:
            if other and asked.assistant not in NO_DRAFTS:
                name, why = f"assistant={asked.assistant!r}", f"all rows here have {own!r}, or 'none'"
            if asked.price is not None:
                name, why = "price", "it is a cascade's, and this server has no cascade that decides by it"
        elif other:
            name = f"assistant={asked.assistant!r}"
            why = f"all requests here are answered with {own!r}, whose stages have their own"
        elif asked.logprobs is not None:
            name, why = "logprobs", "the answer of a cascade may be any stage's, of other tokens"
        elif asked.structure is not None:
            name = "tool_choice" if asked.structure.calls else "response_format (text.format, structured_outputs)"
            why = "one model holds an answer to a structure, and the stages of a cascade answer one after another"
        if name:
            raise Refused(f"{name} is not accepted: {why}")
        return asked, [self._prompt(each) for each in asked.prompts] or [self.templated(asked)]

    def _prompt(self, given: str | list[int]) -> ReadPrompt:
        if isinstance(given, str):
            ids = self.ids(given, special=True)
            if not ids:
                raise Refused("prompt is empty: an answer needs one token or more to go on from")
            return ReadPrompt(given, ids)
        return ReadPrompt(self.tokenizer.decode(given, skip_special_tokens=True), array("i", given))

    def templated(self, asked: AnswerRequest, answers: bool = True) -> ReadPrompt:
        """The prompt that the model's template makes of a conversation, up to where an answer begins."""
        messages = asked.messages if self.takes_notes else folded(asked.messages)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answers, tools=asked.tools, **asked.variables
            )
        except Exception as error:  # of any kind: a template raises what it likes
            raise Refused(f"the model's chat template: {type(error).__name__}: {error}") from error
        return ReadPrompt(text, self.ids(text, special=False))

    def _reader(self, asked: AnswerRequest, prompt: ReadPrompt, ends: frozenset[int]) -> AnswerReader:
        names, structure = self.names if asked.logprobs is not None else None, asked.structure
        if structure is not None and structure.calls:
            calls = reading.CallsParser(structure.tool)
            return AnswerReader(self.tokenizer, calls, self.special, asked.stop, names)
        if asked.prompts or self.template is None or (structure is not None and not structure.opening):
            return AnswerReader(self.tokenizer, None, stop=asked.stop, names=names)
        begun = prompt.text if structure is None else ""  # a structure begins with the answer's first token
        most = None if asked.parallel else 1
        parser = reading.ResponseParser(self.template, self.tokenizer, asked.tools, begun, most, asked.allowed)
        either = parser if structure is None else reading.StructureParser(structure.opening, parser)
        return AnswerReader(self.tokenizer, either, ends & self.special, asked.stop, names)

    def ids(self, text: str, special: bool) -> array[int]:
        """The tokens of a text. Raises Refused for one that is far too long, by its first ones."""
        most = self.batch.max_length

        def ids(text: str) -> array[int]:
            try:
                if not special:
                    return self.texts.ids(text)
                found = array("i", self.tokenizer(text)["input_ids"])
            except (TypeError, ValueError) as error:  # half of a character, say, that a template has made
                raise Refused(f"the prompt cannot be tokenized: {error}") from error
            return found

        if len(text) > LONG * most:
            count = len(ids(text[: LONG * most]))
            if count > 2 * most:  # the rest may join with a few of them
                raise Refused(f"the prompt has {count} tokens or more, and this server takes {most - 1} at most")
        return ids(text)

    def _fit(self, asked: AnswerRequest, length: int) -> Any:
        """The settings of one prompt, with how long its answer may get. Raises Refused where it has no room."""
        batch, config = self.batch, copy.copy(asked.config)
        room = min(batch.max_length - length, self.limits.tokens)
        if room < (1 if config.max_new_tokens != 0 else 0):
            raise Refused(f"the prompt has {length} tokens, and this server takes {batch.max_length - 1} at most")
        if config.max_new_tokens is None and config.max_length is not None:
            config.max_new_tokens, config.max_length = config.max_length - length, None
        if not asked.limited:
            config.max_new_tokens = min(config.max_new_tokens or requests.NEW_TOKENS, room)
        elif config.max_new_tokens > self.limits.tokens:
            raise requests.too_many(config.max_new_tokens, self.limits)
        return config

    def _refuse_full(self, count: int) -> None:
        """Raise Refused where so many answers cannot wait: as many as rows and queue hold may come at once."""
        waiting, rows = self.batch.waiting, self.batch.stats.rows
        if count > self.limits.queue + rows:
            raise Refused(
                f"{count} answers are asked for at once, and this server has {rows} rows and lets {self.limits.queue} "
                "wait: send fewer prompts, or a smaller n"
            )
        if waiting >= self.limits.queue or (count > 1 and waiting + count > self.limits.queue + rows):
            self.metrics.requests.labels("refused").inc()
            raise Refused(f"{waiting} requests are waiting already: try again later", 429, headers={"Retry-After": "1"})

    async def _is_taken(self, sent: Sent) -> None:
        """Return when the batch has taken a prompt. Raises Refused; where nobody waits any more it is let go of."""
        try:
            await asyncio.shield(asyncio.wrap_future(sent.taken))
        except asyncio.CancelledError:
            sent.answer.cancel()
            raise
        except (FastSpecError, ValueError) as error:
            self.metrics.requests.labels("refused").inc()
            raise Refused(str(error), 400 if isinstance(error, (Unsupported, ValueError)) else 503) from error

    _open = property(lambda self: self.batch.running + self.batch.waiting)

    def ill(self) -> str | None:
        """Reason for which the server is not healthy; None where it is."""
        if not self.batch.alive:
            return "the rounds have failed for good"
        if self.batch.turns != self._turns or not self._open:
            self._turns, self._moved = self.batch.turns, time.monotonic()
        seconds = time.monotonic() - self._moved
        return f"no round has ended for {seconds:.0f} seconds, and requests wait" if seconds > STALLED else None

    def close(self) -> None:
        for threads in (self.reading, self.making, self.compiling):
            threads.shutdown(wait=False, cancel_futures=True)
        self.batch.close()
