"""Turns of an open batch: a thread hears what has happened since the last one, and runs rounds of the model as it is by
then."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.devices import made_current
from fastspec.errors import FastSpecError
from fastspec.forks import at_fork
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.base import Decoding, HostDrafter, check_rows
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.gathering import Gathering
from fastspec.generation.engine.handed import VerifyingRounds
from fastspec.generation.engine.open_batch import OpenBatch, RowCounts
from fastspec.generation.engine.own_rules import rules_of
from fastspec.generation.engine.prefix_cache import LEAST, LEAST_CAPTURED, PrefixCache
from fastspec.generation.engine.rounds import TOGETHER, Rounds
from fastspec.generation.stats import Stats
from fastspec.patches.call.assembly import entry, new_engine, sized
from fastspec.patches.call.one_prompt import PreparedPrompt, SettingsCache
from fastspec.patches.call.plan import Plan, Text
from fastspec.patches.call.processors import Processing
from fastspec.patches.hf.changes import Snapshot, WeightSample
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.ends import end_tokens
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.open_ranks import BEAT, News, OpenRanks
from fastspec.patches.session import PatchSession

AGREED_EVERY = 64
"""Turns after which processes choose the sizes of trees by newer times."""


LONGEST = 8192
"""Tokens of a row, prompt and answer, where nothing says how many."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of an open batch, as `continuous` takes them."""

    rows: int
    max_length: int | None
    prefill_chunk: int | Literal["auto"] | None
    narrows: bool
    prefix_caching: bool | None


@dataclass(frozen=True, slots=True)
class Act:
    """Work between two turns, by its name and arguments, and who waits for it."""

    name: str
    given: tuple[Any, ...]
    done: Future[None] = field(default_factory=Future)


class OpenTurns(ABC):
    """The thread of an open batch, and what it shares with those who ask: prompts that have arrived, work that waits
    for a turn to end, and the error that ended it."""

    verifies: ClassVar[bool] = False
    """True where prompts may bring an answer of another model (`VerifyingRounds`)."""

    @torch.inference_mode(False)  # the thread of the turns writes to what is made here
    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        session: PatchSession,
        decoding: Decoding,
        resolved: Callable[[], Decoding],
        settings: BatchSettings,
        chunk: int | None,
        ranks: OpenRanks | None,
    ) -> None:
        rows, narrows = settings.rows, settings.narrows
        self.model, self.session, self.decoding, self.chunk = model, session, decoding, chunk
        self._resolved, self._narrows = resolved, narrows
        self.max_length = settings.max_length or min(LONGEST, position_limit(model.config) or LONGEST)
        self._together = TOGETHER if narrows else 1  # which would make roundings depend on the load
        self._gathering = None if self.verifies or ranks is not None else Gathering(self._together)
        """Waits of prompts for others, by clocks, which processes do not share."""
        self.stats = Stats(assistant=decoding.name, rows=rows)
        """Counts since the batch was opened."""
        self.turns = 0
        """Turns of the rounds that have ended, which read prompts, decode rows, or do both."""
        self._tries = False
        """True in a warm-up, where drafts of the host have every size in turn."""
        self.ranks = ranks
        """The processes that hold the model together; the first takes prompts."""
        self._unsent: list[bytes] = []
        """Prompts that the other processes have not heard of."""
        self._acts: deque[Act] = deque()
        """Work that is to be done between two turns."""
        self._arrived: deque[PreparedPrompt] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._dead: BaseException | None = None
        self._failed: Exception | None = None
        """Error of the last turn, where other processes run the same one."""
        self._stale = self._suspect = False
        """True where the model is not what the rounds were made of, for all processes and for this one."""
        self._settled = SettingsCache()
        device = device_of(model)
        self._prefixes: PrefixCache[HFModel] = PrefixCache(unchanged=self._weights_hold, anywhere=self._anywhere)
        self._batch = OpenBatch(rows, self.stats, device, self._prefixes)
        self._batch.shared = ranks is not None
        with torch.autocast(device.type, enabled=False), session.turn.taken(device):  # the batch's own thread has none
            self._settle()
            self._widths = RowCounts(
                lambda count, other: self._unless_changed(count, other), self._batch, rows, narrows=narrows
            )
        drafter, target = self._widths.current.engine.drafter, self._widths.current.engine.target
        caches = narrows if settings.prefix_caching is None else settings.prefix_caching
        if caches and (drafter is None or drafter.resumes or decoding.taps is None):
            self._prefixes.least = LEAST_CAPTURED if target.captures else LEAST
        self._thread = threading.Thread(target=self._run, name="fastspec-continuous", daemon=True)
        at_fork(self)

    def forked(self) -> None:
        """Be over in a forked process, to which the thread of the turns does not come."""
        self._changed = threading.Condition()
        self._dead = self._dead or FastSpecError(
            "this process was forked after fastspec.continuous: open the batch in the process that asks it"
        )

    @abstractmethod
    def _read_prompt(self, sent: bytes) -> PreparedPrompt:
        """A prompt that the first process has taken."""

    def _prompts(self) -> list[PreparedPrompt]:
        """The prompts that wait and that hold rows."""
        held = [each for each in (*self._batch.queue, *self._batch.prompts) if isinstance(each, PreparedPrompt)]
        return [*self._arrived, *held]

    def _do(self, name: str, *given: Any) -> None:
        """Do the work that an `Act` names."""
        with self.session.turn.taken(device_of(self.model)):
            if name == "reserve":
                self._widths.reserve(*given)
                if self._widths.current.engine.sizes is not None:
                    self._widths.make_all()
            elif name == "narrow":
                self._widths.needed.clear()
                self._widths.pin(*given)
            elif name == "try":
                (self._tries,) = given
                self._let_try()
            else:
                self.stats.begin()
                self._prefixes.forget()
                for each in self._widths.pin(None):
                    self._begin_sizes(each)

    def _let_try(self) -> None:
        """Let drafters of the host have every size in turn, or not."""
        for rounds in self._widths.made.values():
            if isinstance(rounds.engine.drafter, HostDrafter):
                rounds.engine.drafter.tries = self._tries

    @torch.no_grad()
    def _rounds(self, rows: int, other: Rounds[HFModel] | None) -> Rounds[HFModel]:
        """Rounds of so many rows, which hold a text of one token each that nobody reads; prompts are read where those
        of `other` are."""
        batch, device = self._batch, device_of(self.model)
        ops = self.session.ops(self.model, mode_for(self.model))
        root = torch.zeros(rows, dtype=torch.long, device=device)
        text = Text(root[:, None], torch.ones_like(root[:, None], dtype=torch.bool))
        ends, answers = end_tokens(self.model.generation_config), () if self.verifies else None
        request = Request(text.ids, torch.ones_like(root), [], 0, ends, None, answers=answers)
        processing = Processing(LogitsProcessorList())
        plan = Plan(self.model, self.session, self.decoding, ops, text, request, self.max_length, processing)
        plan = replace(sized(replace(plan, follows_load=self._narrows)), ranks=self.ranks)
        engine = new_engine(plan)
        self._agree_on_sizes(engine)
        if isinstance(engine.drafter, HostDrafter):  # processes choose alike
            engine.drafter.timed, engine.drafter.ends_at_once = self._narrows and self.ranks is None, False
        check_rows(engine.drafter, self.decoding.name)
        _, features = request.read(engine.target)
        if engine.drafter is not None:
            engine.drafter.begin(request.prompts, request.counts, features, root)
        engine.begin(root)
        first = partial(entry, plan, engine) if other is None else other.entry
        kind = VerifyingRounds if self.verifies else Rounds
        return kind(engine, batch, rules_of(batch, engine), first, self.chunk, self._together, self._gathering)

    def _run(self) -> None:
        """The thread's work. What nothing else takes care of ends all prompts: none may wait for a thread that has
        gone."""
        SPENT.watched = self._look
        try:
            self._turns()
        except BaseException as fatal:
            others_listen = self._dead is None
            self._die(fatal)
            if self.ranks is not None:
                if others_listen and self.ranks.leads and self.ranks.order.error is None:
                    with suppress(FastSpecError):  # one of them may be what has failed
                        self.ranks.order.take(self.ranks)
                        self.ranks.tell(News(fatal=f"{type(fatal).__name__}: {fatal}"))
                self.ranks.order.fail(fatal)
        finally:
            if self.ranks is not None:
                self.ranks.order.release(self.ranks)

    def _die(self, fatal: BaseException) -> None:
        """End all prompts, and what waits between turns: none comes any more."""
        with self._changed:
            self._dead = fatal
            self._batch.fail(fatal)
            for single in (*self._batch.queue, *self._arrived):
                single.finish([], fatal)
            self._batch.queue.clear()
            self._arrived.clear()
            while self._acts:
                self._acts.popleft().done.set_exception(fatal)

    def _turns(self) -> None:
        """A turn of the rounds after another, while there is a prompt. All that is decided here follows from what the
        first process has heard."""
        batch = self._batch
        with torch.no_grad():
            while self._dead is None:
                news, ready = self._hear()
                if news.failed:
                    self._recover_together()
                    continue
                with self._changed:
                    while self._stale and batch.queue:  # who waits is decoded by rounds of the model as it is by then
                        self._arrived.appendleft(cast(PreparedPrompt, batch.queue.pop()))
                        ready += 1
                if self._stale and not batch.held and ready:
                    self._renew(ready)
                elif ready and not self._stale:
                    self._stale = self._anywhere(self._suspect or any(map(Snapshot.changed, self._snapshots)))
                with self._changed:
                    for _ in range(0 if self._stale else min(ready, len(self._arrived))):
                        self._take(self._arrived.popleft())
                    batch.cancel()
                    if not batch.queue and not batch.held:
                        if news.closing and not self._arrived:
                            break
                        continue
                self._turn()
        self._end_rounds()
        if self._dead is None:
            self._anywhere(False)  # all have come here

    def _turn(self) -> None:
        try:
            with self.session.turn.taken(device_of(self.model)):
                if self._tries:  # there may be rounds of another number of rows by now
                    self._let_try()
                self._widths.turn()
                self.turns += 1
        except Exception as error:
            if self.ranks is None:
                self._recover(error)
                return
            self._failed = FastSpecError(
                f"a round failed in {self.ranks.name}, as it does where another of them has ended: "
                f"{type(error).__name__}: {error}"
            )
            self._failed.__cause__ = error
            with self._changed:
                self._batch.fail(self._failed)
        else:
            if self.ranks is not None:
                self.ranks.count(self._batch)
                if self.turns % AGREED_EVERY == 0:
                    self._agree_on_sizes(self._widths.current.engine)

    def _hear(self) -> tuple[News, int]:
        """Wait for something to do -> what has happened, and how many prompts had arrived by then: who comes later may
        come behind a change that these do not see."""
        ranks = self.ranks
        if ranks is not None and self._failed is None:  # else the others may be in the middle of the turn
            ranks.order.release(ranks)
        if ranks is None or ranks.leads:
            with self._changed:
                self._changed.wait_for(self._has_work, None if ranks is None else BEAT)
            if ranks is not None:
                ranks.order.take(ranks)
            with self._changed:
                gone = tuple([single.number for single in self._prompts() if single.let_go()])
                came, self._unsent = tuple(self._unsent), []
                told = tuple((act.name, act.given) for act in self._acts)
                news = News(came, gone, told, self._suspect, self._failed is not None, self._closing)
                ready = len(self._arrived)
            if ranks is not None:
                ranks.tell(news)
        else:
            try:
                news = ranks.hear(self._failed is not None)
            except FastSpecError:
                if self._failed is None:
                    raise
                raise self._failed from self._failed.__cause__
            if self._failed is not None and not news.failed:
                raise self._failed
            with made_current(device_of(self.model)):
                self._arrived += [self._read_prompt(sent) for sent in news.came]
            for single in self._prompts():
                single.is_cancelled = single.is_cancelled or single.number in news.let_go
            ready = len(self._arrived)
        self._stale = self._stale or news.stale
        for name, given in news.acts:
            self._act(partial(self._do, name, *given))
        return news, ready

    def _act(self, do: Callable[[], object]) -> None:
        """Do something between two turns, and tell who waits for it."""
        error = self._raised_by(do)
        with self._changed:
            act = self._acts.popleft() if self._acts else None
        if act is not None and error is None:
            act.done.set_result(None)
        elif act is not None:
            act.done.set_exception(error)
        if self.ranks is not None and error is not None:  # buffers differ by now
            raise error

    def _has_work(self) -> bool:
        batch = self._batch
        return bool(
            self._arrived or batch.queue or batch.held or self._acts or self._closing or self._failed is not None
        )

    def _anywhere(self, mine: bool) -> bool:
        """True where it is so in this process, or in another that holds a part of the model; all of them ask."""
        return mine if self.ranks is None else self.ranks.any(mine)

    def _agree_on_sizes(self, engine: Engine[HFModel]) -> None:
        """Choose the sizes of trees by the first process's times."""
        if self.ranks is not None and engine.sizes is not None:
            engine.sizes.agree(self.ranks.first_value)

    def _begin_sizes(self, engine: Engine[HFModel]) -> None:
        """Choose the sizes of trees by what a warm-up has measured."""
        if engine.sizes is None:
            return
        if not any(self._batch.running):  # else one of their rounds may be in flight
            engine.warm_reading()
        engine.sizes.tried()
        self._agree_on_sizes(engine)
        engine.sizes.begin()
        engine.sizes.end()

    def _look(self) -> None:
        """See whether the model is another, in the middle of a turn that makes something of it."""
        self._suspect = self._suspect or self._stale or any(map(Snapshot.changed, self._snapshots))

    def _take(self, single: PreparedPrompt) -> None:
        """Let a prompt that has arrived wait for a row; one that cannot be brought to the model's device ends."""
        try:
            single.move(device_of(self.model))
        except Exception as error:
            self._batch.escalate(error)
            single.finish([], error)
        else:
            self._batch.queue.append(single)

    def _recover(self, error: Exception) -> None:
        """A round has failed, and with it the prompts in its rows: those that wait are decoded by new rounds."""
        with self._changed:
            self._batch.fail(error)
        fatal = self._raised_by(self._begin_anew)
        if fatal is not None:
            self._die(fatal)

    def _recover_together(self) -> None:
        """The first process's last turn has failed: go on where that of all others has, too. One that is at another
        place of the turn cannot be brought back."""
        assert self.ranks is not None
        error, self._failed = self._failed, None
        if self.ranks.any(error is None) or error is None:
            raise FastSpecError(
                "a round failed in some of the processes that hold the model, and not in all"
            ) from error
        self.ranks.digest = 0
        self._recover(error)

    def _raised_by(self, make: Callable[[], object]) -> Exception | None:
        """The error of a function here, or that of another process."""
        error: Exception | None = None
        try:
            make()
        except Exception as raised:
            error = raised
        elsewhere = self._anywhere(error is not None) and error is None
        return (
            FastSpecError(f"another process than {self.ranks.name} has failed") if elsewhere and self.ranks else error
        )

    def _renew(self, ready: int) -> None:
        """Make the rounds of a model that has changed, while no row holds a prompt. Where that fails the `ready`
        prompts that were there before end; those that came meanwhile may have come behind what makes it whole, and try
        it again."""

        def make() -> None:
            self._end_rounds()
            self._begin_anew()

        error = self._raised_by(make)
        if error is not None:
            with self._changed:
                self._stale = True
                for _ in range(min(ready, len(self._arrived))):
                    self._arrived.popleft().finish([], error)

    def _end_rounds(self) -> None:
        """End the rounds that no others follow: nothing is read for drafts that none will have."""
        engine = self._widths.current.engine
        engine.forget()
        engine.end()

    def _begin_anew(self) -> None:
        """Make all rounds anew, of the model as it is."""
        with self.session.turn.taken(device_of(self.model)):
            self._stale = self._suspect = False
            self._settled.known.clear()
            self.decoding = self._resolved()  # its head may have to follow the model
            self._settle()
            self._widths.begin()

    def _settle(self) -> None:
        """Bring weights to where the rounds read them, and say how the model runs. What the rounds are made of is noted
        before they are: a change meanwhile is seen by the next prompt."""
        self.session.unpack(self.model)
        mode = mode_for(self.model)
        self.session.pack(self.model, mode)
        self.session.tell_mode(mode)
        drafts = (each for each in self.decoding.modules if isinstance(each, PreTrainedModel))
        self._snapshots = [Snapshot(each) for each in dict.fromkeys((self.model, *drafts))]
        """Of the model and of draft models."""
        self._weights = self._sampled()

    def _sampled(self) -> WeightSample:
        return WeightSample((self.model, *self.decoding.modules))

    def _weights_hold(self) -> bool:
        """True where weights are seen to be what they were when this was asked last."""
        changed = self._anywhere(not self._weights.holds())
        if changed:
            self._weights = self._sampled()
        return not changed

    def _unless_changed(self, rows: int, other: Rounds[HFModel] | None) -> Rounds[HFModel] | None:
        """Rounds of so many rows beside those of `other`; None where the model is not, or not any more, what these were
        made of."""
        if other is None:
            return self._rounds(rows, None)
        differs = self._anywhere(self._stale or self._suspect or any(map(Snapshot.differs, self._snapshots)))
        made = None if differs else self._rounds(rows, other)
        if made is None or self._anywhere(any(map(Snapshot.differs, self._snapshots))):
            self._stale = True
            return None
        return made
