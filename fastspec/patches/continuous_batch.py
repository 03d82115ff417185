"""Open batch of one patched model: callers submit prompts, and a thread runs turns of the rounds that decode them."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.config import ContinuousBatch
from fastspec.devices import free_memory, made_current
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.capture import SPENT
from fastspec.generation.constraint import AnyToken
from fastspec.generation.drafters.base import Decoding, HostDrafter, check_rows
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.handed import VerifyingRounds
from fastspec.generation.engine.open_batch import OpenBatch, RowCounts
from fastspec.generation.engine.own_rules import OwnRules, rules_of
from fastspec.generation.engine.prefix_cache import LEAST, LEAST_CAPTURED, PrefixCache
from fastspec.generation.engine.rounds import TOGETHER, Rounds
from fastspec.generation.stats import Stats
from fastspec.kernels.tuned_launches import installed, name_of
from fastspec.patches.assistants.registry import resolve
from fastspec.patches.backends import notice
from fastspec.patches.call.assembly import entry, new_engine, sized
from fastspec.patches.call.one_prompt import AnswerFuture, PreparedPrompt, SettingsCache, prepare
from fastspec.patches.call.plan import Plan, Text
from fastspec.patches.call.processors import Processing, RoundStreamer
from fastspec.patches.call.prompts import sees_ahead
from fastspec.patches.call.ranks import closes, opens, refuse_beside
from fastspec.patches.call.refusals import refuse_overrides
from fastspec.patches.hf.changes import Snapshot, WeightSample
from fastspec.patches.hf.compat import (
    device_of,
    drop_capturing_hooks,
    dtype_of,
    is_shared_out,
    own_stop_strings,
    unwrapped,
)
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.ends import end_tokens
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for, mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.open_ranks import BEAT, News, OpenRanks, PromptMail, SilentRounds, TurnOrder
from fastspec.patches.session import PatchSession, patched_session
from fastspec.patches.warmup import (
    MOST_WARM,
    SHARE,
    WARM_LENGTH,
    WARM_NEW,
    open_batch_calls,
    room_for,
    warm_lengths,
)

LONGEST = 8192
"""Tokens of a row, prompt and answer, where nothing says how many."""
FIRST = "fastspec.patch(model) comes before fastspec.continuous"
CHUNKS = {"cuda": 1024, "cpu": 256}
"""Tokens of prompts that are read between two rounds, by the kind of device: on a GPU several short prompts, in one
pass."""
AGREED_EVERY = 64
"""Turns after which processes choose the sizes of trees by newer times."""
POLL = 0.002
"""Seconds after which a warm-up looks again how many turns there were."""


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


class Continuous:
    """Open batch of a patched model, as `continuous` makes it. `submit` may be called from any thread; one thread of
    its own decodes.

    An answer is that of `generate` alone: greedy ones token by token (in fp32), and sampled ones follow the same
    distribution. A sampled answer is a function of the prompt, its settings and its seed, whatever else is decoded. A
    prompt that fails ends with its error in its future, and no other does.
    """

    verifies: ClassVar[bool] = False
    """True where prompts may bring an answer of another model (`VerifyingRounds`)."""

    def __init__(
        self,
        model: Any,
        session: PatchSession,
        decoding: Decoding,
        resolved: Callable[[], Decoding],
        settings: BatchSettings,
        chunk: int | None,
        ranks: OpenRanks | None = None,
    ) -> None:
        self.model, self.session, self.decoding, self.chunk = model, session, decoding, chunk
        self._resolved, rows, narrows = resolved, settings.rows, settings.narrows
        self._narrows = narrows
        self._together = TOGETHER if narrows else 1  # which would make roundings depend on the load
        self.max_length = settings.max_length or min(LONGEST, position_limit(model.config) or LONGEST)
        self.stats = Stats(assistant=decoding.name, rows=rows)
        """Counts since the batch was opened."""
        self._original = session.original(model, "generate")
        self.turns = 0
        """Turns of the rounds that have ended, which read prompts, decode rows, or do both."""
        self._tries = False
        """True in a warm-up, where drafts of the host have every size in turn."""
        self.ranks = ranks
        """The processes that hold the model together; the first takes prompts."""
        self._mail, self._numbers = PromptMail(), itertools.count()
        self._unsent: list[bytes] = []
        """Prompts that the other processes have not heard of."""
        self._acts: deque[Act] = deque()
        """Work that is to be done between two turns."""
        self._arrived: deque[PreparedPrompt] = deque()
        self._changed = threading.Condition()
        self._closing = self._left = False
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
        session.batches += 1
        if ranks is not None:
            opens(ranks.whole)
        self._thread = threading.Thread(target=self._run, name="fastspec-continuous", daemon=True)
        self._thread.start()

    def submit(
        self,
        ids: Tensor,
        generation_config: Any = None,
        streamer: Any = None,
        *,
        seed: int | None = None,
        drafts: bool = True,
        **options: Any,
    ) -> AnswerFuture:
        """Ask for the answer to one prompt, ids [T] or [1, T] int64 on any device -> the future of what `generate`
        returns, [1, T + new tokens] on the model's.

        `generation_config`, `streamer` and further options are those of `generate`, one by one for each prompt; `seed`
        is that of its draws (None: one from torch's own generator). `future.cancel()` lets go of it, whether it waits
        or runs. The streamer is called from the batch's thread; what it raises ends this prompt alone.

        Without `drafts` the answer is the same, a token a round. While no row takes drafts a round costs what it does
        in plain decoding, and what the assistant reads of it; beside rows that do it costs what theirs do.

        Raises Unsupported for what an open batch does not decode, a prompt that with its answer is longer than
        `max_length` included, and for `drafts=False` with an assistant that always drafts; ValueError for settings that
        transformers refuses, and tokens that the model has not; FastSpecError where the batch is closed. Of processes
        that hold the model together the first takes prompts, whose further options pickle can send: Unsupported else.
        """
        if self.ranks is not None:
            self.ranks.refuse_prompts()
        single = self.prepared(ids, generation_config, streamer, seed, options, drafts)
        return self.send(single, ids, streamer, drafts, {"generation_config": generation_config, **options})

    def send(
        self, single: PreparedPrompt, ids: Tensor, streamer: Any, drafts: bool, given: dict[str, Any]
    ) -> AnswerFuture:
        """Let a prompt of these arguments wait for a row, in all processes that hold the model together."""
        if self.ranks is None:
            return self.arrive(single)
        single.number = next(self._numbers)
        asked = (streamer.logprobs, streamer.trees) if isinstance(streamer, RoundStreamer) else None
        given = own_stop_strings(self.model, given)
        given.pop("tokenizer", None)
        stage = single.handed, single.measured is not None
        with self._changed:  # who writes first is read first
            self._refuse_closed()
            self._unsent.append(self._mail.write((single.number, ids, single.rule.seed, asked, drafts, given, stage)))
            return self.arrive(single)

    def _read_prompt(self, sent: bytes) -> PreparedPrompt:
        """A prompt that the first process has taken."""
        number, ids, seed, asked, drafts, given, (handed, measured) = self._mail.read(sent)
        config, streamer = given.pop("generation_config"), None if asked is None else SilentRounds(*asked)
        single = self.prepared(ids, config, streamer, seed, given, drafts)
        single.number, single.handed = number, handed
        single.measure([] if measured else None)
        return single

    def prepared(
        self,
        ids: Tensor,
        generation_config: Any,
        streamer: Any,
        seed: int | None,
        options: dict[str, Any],
        drafts: bool = True,
    ) -> PreparedPrompt:
        """The prompt of these arguments of `submit`, which raises what this raises."""
        refuse_overrides(self.model)
        if isinstance(ids, Tensor) and ids.dim() == 1:
            ids = ids[None]
        given = {"generation_config": generation_config, "streamer": streamer}
        given = {"input_ids": ids, **{name: value for name, value in given.items() if value is not None}, **options}
        agreed = None if self.ranks is None else self.ranks.agreed
        single = prepare(self.model, self._original, given, seed, self._settled, agreed)
        verifier, engine = self._widths.current.verifier, self._widths.current.engine
        assert isinstance(verifier, OwnRules)
        verifier.check(single.rule)
        if not drafts:
            if engine.drafter is not None and engine.undrafted is None:
                raise Unsupported(
                    f"drafts=False: {type(engine.drafter).__name__} of assistant {self.decoding.name!r} does not say "
                    "observes_roots, so that it would not hear of rounds without drafts: open a batch of "
                    "'autoregressive' for these prompts"
                )
            single.rule = replace(single.rule, drafts=False)
        length = single.ids.shape[1] + single.limit
        if length > self.max_length:
            raise Unsupported(
                f"the prompt has {single.ids.shape[1]} tokens and may be answered with {single.limit}, {length} "
                f"together, and a row of this batch has room for {self.max_length} (max_length): ask for fewer "
                "(max_new_tokens), or shorten the prompt"
            )
        return single

    def arrive(self, single: PreparedPrompt) -> AnswerFuture:
        """Let a prompt wait for a row."""
        with self._changed:
            self._refuse_closed()
            self._arrived.append(single)
            self._changed.notify_all()
        return single.future

    def warmup(self, length: int | None = WARM_LENGTH, told: Callable[[int, int], object] | None = None) -> float:
        """Answer prompts of random tokens, so that later ones find their kernels compiled and their rounds captured ->
        the seconds that it took.

        There are prompts of up to `length` tokens, as far as a row has room for them, and rounds of every number of
        rows, greedy and sampled; where these are captured there are also rounds held to grammars, unless several
        processes hold the model, rounds of every size that trees may take, whose times are measured, and buffers have
        room for texts of `length` tokens from then on. A longer text makes them larger, and what was captured is
        captured anew, while all rows wait. None: as many tokens as a row has room for, 8,064 at most, or as fit half of
        the free memory. N-gram drafts have rounds of every size of their trees. To be called before prompts come:
        `stats` begin anew behind it. Of processes that hold the model together the first one's call is that of all; in
        the others it does nothing. `told` is called with (calls that are done, of how many). Raises Unsupported for a
        `length` below 1, and for rows without room for an answer.
        """
        length = self._warm_length() if length is None else length
        longest = min(length, self.max_length - WARM_NEW)
        if longest < 1:
            raise Unsupported(
                f"warmup: length={length} and max_length={self.max_length}: at least 1 and {WARM_NEW + 1} are accepted"
            )
        if self.ranks is not None and not self.ranks.leads:
            return 0.0
        rounds, captures = self._widths.current, self._widths.current.engine.target.captures
        together = min(rounds.together, self._widths.rows)
        constrains = captures and self.ranks is None  # others than the first process hear of options alone
        began, numbers = time.perf_counter(), torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        whole: dict[str, Any] = {
            "eos_token_id": vocabulary,  # which no token is
            "pad_token_id": 0,
        }
        tell = told or (lambda done, of: None)
        self._between_turns("reserve", room_for(length, rounds.engine.main.longest) if captures else 0)
        self._between_turns("try", captures)
        calls = list(
            open_batch_calls(longest, self._widths.sizes(), together, captures=captures, constrains=constrains)
        )
        try:
            for done, call in enumerate(calls):
                tell(done, len(calls))
                self._between_turns("narrow", call.size)  # each in rounds of its own number of rows, and of its size
                texts = [
                    torch.randint(vocabulary, (1, count), generator=numbers, device="cpu") for count in call.lengths
                ]
                ask = self._submit_constrained if call.constrained else self.submit
                with self._changed:  # so that they come at once
                    new = min(call.tokens, self.max_length - max(call.lengths))
                    options = {"max_new_tokens": new, **whole, **call.options}
                    futures = [ask(row, attention_mask=torch.ones_like(row), seed=0, **options) for row in texts]
                self._wait_for(futures, call.turns)
        finally:
            if self.alive:
                self._between_turns("try", False)
                self._between_turns("begin")  # the last turn counts on behind its answers
        tell(len(calls), len(calls))
        return time.perf_counter() - began

    def _wait_for(self, futures: Sequence[AnswerFuture], turns: int | None) -> None:
        """Wait for answers, of which those that have not ended after so many turns are cancelled."""
        most = self.turns + turns if turns else None
        while most is not None and self.turns < most and not all(future.done() for future in futures):
            wait(futures, POLL)
        for future in futures:
            if most is None or not future.cancel():
                future.result()

    def _submit_constrained(self, ids: Tensor, seed: int, **options: Any) -> AnswerFuture:
        """`submit`, behind a constraint that allows every token."""
        single = self.prepared(ids, None, None, seed, options)
        words = -(-self.model.config.get_text_config().vocab_size // 32)
        single.rule = replace(single.rule, constraint=AnyToken(words))
        return self.arrive(single)

    def _warm_length(self) -> int:
        """Length of the texts that a warm-up is for where nobody says it."""
        widths, most = self._widths, min(self.max_length, MOST_WARM)
        target, path = widths.current.engine.target, widths.current.engine.main.longest
        if not target.captures:
            return WARM_LENGTH
        share = free_memory(device_of(self.model)) // SHARE
        found = next((each for each in warm_lengths(most) if widths.bytes(room_for(each, path)) <= share), WARM_LENGTH)
        if found < most:
            notice(
                f"warming up for texts of {found:,} tokens, whose buffers take "
                f"{widths.bytes(room_for(found, path)) / 2**30:.1f} GiB of the memory; longer ones, of up to "
                f"{self.max_length:,} (max_length), make all rows wait once: fewer rows, or a length for the warm-up, "
                "avoid that"
            )
        return found

    def _between_turns(self, name: str, *given: Any) -> None:
        """Let the batch's thread do something between two turns, in all processes, and wait for it."""
        act = Act(name, given)
        with self._changed:
            self._refuse_closed()
            self._acts.append(act)
            self._changed.notify_all()
        act.done.result()

    def _do(self, name: str, *given: Any) -> None:
        """What `_between_turns` names."""
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

    @property
    def info(self) -> dict[str, str]:
        """Settings that it decodes with: assistant, kernels, device, dtype, rows and the tokens of one, and behind a
        warm-up the memory of buffers that is held for rows."""
        model = self.model
        return {
            "assistant": self.decoding.name,
            "kernels": self.session.ops(model, mode_for(model)).name,
            "device": str(device_of(model)),
            "dtype": str(dtype_of(model)).removeprefix("torch."),
            "rows": str(self.stats.rows),
            "max_length": str(self.max_length),
            **({"buffers": f"{self._widths.bytes(room) / 2**30:.1f} GiB"} if (room := self._widths.room) else {}),
        }

    @property
    def running(self) -> int:
        """Rows that hold a prompt."""
        return self._batch.held

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row."""
        return len(self._arrived) + len(self._batch.queue)

    @property
    def alive(self) -> bool:
        """True where it takes prompts."""
        takes = self.ranks is None or self.ranks.leads
        return takes and self._dead is None and not self._closing and self._thread.is_alive()

    def close(self, *, cancel: bool = False) -> None:
        """Take no more prompts, and return when all answers are there; with `cancel` those that are not are cancelled.
        May be called again where it was interrupted. Raises FastSpecError in the batch's own thread, which calls
        callbacks and streamers.

        Of processes that hold the model together the first one closes the batch. In another this returns when it has,
        and raises FastSpecError where that has failed; with `cancel` it returns at once, and the batch goes on.
        """
        if threading.current_thread() is self._thread:
            raise FastSpecError(
                "a callback or a streamer cannot close its batch: its answers are not there before it returns"
            )
        if self.ranks is None or self.ranks.leads:
            with self._changed:
                self._closing = True
                for single in self._prompts() if cancel else ():
                    single.future.cancel()
                self._changed.notify_all()
        elif cancel:
            return
        self._thread.join()
        with self._changed:
            first, self._left = not self._left, True
        if first:
            self.session.batches -= 1
            if self.ranks is not None:
                closes(self.ranks.whole)
            self.session.calls.append(self.stats)
            if not self.session.captured:
                drop_capturing_hooks(self.model)
        if self.ranks is not None and not self.ranks.leads and self._dead is not None:
            self._refuse_closed()

    def _prompts(self) -> list[PreparedPrompt]:
        """The prompts that wait and that hold rows."""
        held = [each for each in (*self._batch.queue, *self._batch.prompts) if isinstance(each, PreparedPrompt)]
        return [*self._arrived, *held]

    def __enter__(self) -> Continuous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(cancel=kind is not None)

    def _refuse_closed(self) -> None:
        if self._dead is not None:
            raise FastSpecError(
                f"this batch has stopped, its rounds cannot be made any more: {self._dead}"
            ) from self._dead
        if self._closing:
            raise FastSpecError("this batch is closed: fastspec.continuous(model, ...) opens another")

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
        plan = replace(sized(plan), ranks=self.ranks)
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
        return kind(engine, batch, rules_of(batch, engine), first, self.chunk, self._together)

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
        self._widths.current.engine.end()
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
            self._widths.current.engine.end()
            self._begin_anew()

        error = self._raised_by(make)
        if error is not None:
            with self._changed:
                self._stale = True
                for _ in range(min(ready, len(self._arrived))):
                    self._arrived.popleft().finish([], error)

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


BatchT = TypeVar("BatchT", bound=Continuous)


def open_batch(
    kind: type[BatchT], model: Any, assistant: Any, settings: BatchSettings, order: TurnOrder | None = None
) -> BatchT:
    """An open batch of this class, as `continuous` makes it; `order` is that of its turns and others', where the model
    is cut over processes."""
    model = unwrapped(model)
    session = patched_session(model, FIRST)
    group = group_of(model)
    ranks = None if group is None else OpenRanks(group, order)
    if ranks is not None:
        if order is None:
            refuse_beside(group, "continuous")
        named = re.sub("0x[0-9a-f]+", "", repr(assistant))
        tuned = sorted(map(repr, installed(name_of(device_of(model))).items()))
        ranks.check_opened(named, settings, tuned)
    if is_shared_out(model):
        raise Unsupported(
            f"continuous: several processes share out the weights of this {type(model).__name__} by FSDP, and prompts "
            "come to each at a time of its own; generate takes an assistant there, in all processes at once"
        )
    chunk = settings.prefill_chunk
    chunk = CHUNKS.get(device_of(model).type, CHUNKS["cpu"]) if chunk == "auto" else chunk
    whole = isinstance(chunk, Integral) and not isinstance(chunk, bool) and chunk >= 1
    if chunk is not None and not whole:
        raise Unsupported(f'continuous: prefill_chunk={chunk!r} must be at least 1, None or "auto"')

    def resolved() -> Decoding:
        return resolve(ContinuousBatch(assistant, settings.rows), session.resources, model).decoding

    decoding = resolved()
    refuse_overrides(model)
    if sees_ahead(model, adapter_for(model)):
        raise Unsupported(
            f"continuous takes no {type(model).__name__}, whose tokens see more of a prompt than what is before them"
        )
    return kind(model, session, decoding, resolved, settings, chunk, ranks)
