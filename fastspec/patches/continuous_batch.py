"""Open batch of one patched model: callers submit prompts, and a thread runs the turns that decode them
(`open_turns.py`)."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastspec.config import ContinuousBatch
from fastspec.devices import free_memory
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.constraint import AnyToken
from fastspec.generation.drafters.base import Decoding, Place
from fastspec.generation.engine.own_rules import OwnRules
from fastspec.kernels.tuned_launches import installed, name_of
from fastspec.patches.assistants.registry import resolve
from fastspec.patches.backends import notice
from fastspec.patches.call.one_prompt import AnswerFuture, PreparedPrompt, prepare
from fastspec.patches.call.processors import RoundStreamer
from fastspec.patches.call.prompts import sees_ahead
from fastspec.patches.call.ranks import closes, opens, refuse_beside
from fastspec.patches.call.refusals import refuse_overrides
from fastspec.patches.hf.compat import (
    device_of,
    drop_capturing_hooks,
    dtype_of,
    is_shared_out,
    own_stop_strings,
    unwrapped,
)
from fastspec.patches.hf.modes import adapter_for, mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.open_ranks import OpenRanks, PromptMail, SilentRounds, TurnOrder
from fastspec.patches.open_turns import Act, BatchSettings, OpenTurns
from fastspec.patches.session import PatchSession, patched_session
from fastspec.patches.warmup import MOST_WARM, SHARE, WARM_LENGTH, WARM_NEW, open_batch_calls, room_for, warm_lengths

FIRST = "fastspec.patch(model) comes before fastspec.continuous"
CHUNKS = {"cuda": 1024, "cpu": 256}
"""Tokens of prompts that are read between two rounds, by the kind of device: on a GPU several short prompts, in one
pass."""
POLL = 0.002
"""Seconds after which a warm-up looks again how many turns there were."""


class Continuous(OpenTurns):
    """Open batch of a patched model, as `continuous` makes it. `submit` may be called from any thread; one thread of
    its own decodes.

    An answer is that of `generate` alone: greedy ones token by token (in fp32), and sampled ones follow the same
    distribution. A sampled answer is a function of the prompt, its settings and its seed, whatever else is decoded. A
    prompt that fails ends with its error in its future, and no other does.
    """

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
        self._original = session.original(model, "generate")
        self._mail, self._numbers = PromptMail(), itertools.count()
        self._left = False
        super().__init__(model, session, decoding, resolved, settings, chunk, ranks)
        session.batches += 1
        if ranks is not None:
            opens(ranks.whole)
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
        began, numbers = time.perf_counter(), torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        whole: dict[str, Any] = {
            "eos_token_id": vocabulary,  # which no token is
            "pad_token_id": 0,
        }
        tell = told or (lambda done, of: None)
        self._between_turns("reserve", room_for(length, rounds.engine.main.longest) if captures else 0)
        self._between_turns("try", captures)
        sizes = self._widths.sizes(Place.DEVICE)
        # other processes than the first hear of options alone
        held = self._widths.sizes(Place.FED) if captures and self.ranks is None else {}
        calls = list(open_batch_calls(longest, sizes, together, captures=captures, held=held))
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
