"""Processes that hold the model of an open batch together: the first takes prompts, and tells the others before every
turn what has happened, so that all run the same turns. Batches of a cascade's stages take turns.

They talk over gloo. A process that waits sleeps; the first speaks every BEAT seconds where nothing happens, and one
that hears nothing for LIMIT raises an error.
"""

from __future__ import annotations

import io
import pickle
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.engine.open_batch import OpenBatch
from fastspec.patches.call.grammar import Grammar
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.call.ranks import Ranks

LIMIT = timedelta(minutes=10)
"""Time after which a process that the others wait for counts as lost; a streamer may hold the batch as long."""
FAILED = timedelta(seconds=30)
"""The same where the last turn has failed here, and the others may be in the middle of it."""
BEAT = 10.0
"""Seconds between two words of the first process where nothing happens."""
KEPT = 64
"""Objects that prompts have in common, which are sent once."""
SHARED = (Grammar, StopStringCriteria, PreTrainedTokenizerBase)
"""Their kinds."""
RECENT = 16
"""Tokens of each answer that the processes compare after a turn."""


@dataclass(frozen=True, slots=True)
class News:
    """Events since the last turn.

    `came` are prompts as `PromptMail` writes them, `let_go` numbers of those that nobody waits for or whose streamer
    failed, `acts` the names and arguments of what is done between two turns. `stale`: the model has changed; `failed`:
    the last turn did; `closing`: no more prompts come; `fatal` is the error that ends the batch.
    """

    came: tuple[bytes, ...] = ()
    let_go: tuple[int, ...] = ()
    acts: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    stale: bool = False
    failed: bool = False
    closing: bool = False
    fatal: str | None = None


NOTHING = News()
"""News of most turns, which take no bytes."""


class TurnOrder:
    """Order of the turns of open batches in the same processes, one at a time: in the first the batch that has waited
    longest, in another the one that the first names. An error of one ends all. With `held` none begins before
    `begin`."""

    def __init__(self, *, held: bool = False) -> None:
        self.count = 0
        """Batches so far, which are numbered as they are opened."""
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._holder: object = self if held else None
        self._waiting: deque[object] = deque()
        self._heard: list[int] | None = None
        """Head of what the first process tells a batch that has not come for it yet."""

    def begin(self) -> None:
        """All batches are open."""
        self.release(self)

    def take(self, batch: object) -> None:
        """Wait until a batch may take a turn, in the first process; at once where it still has one."""
        with self._changed:
            if self._holder is not batch:
                self._waiting.append(batch)
                self._changed.wait_for(lambda: self.error or (self._holder is None and self._waiting[0] is batch))
                self._waiting.remove(batch)
            self._hold(batch)

    def hear(self, batch: object, number: int, receive: Callable[[], list[int]]) -> list[int]:
        """Wait, in another process, until the first names a batch that has no turn -> the head, its number last."""
        kept = self._holder is batch
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.error or self._holder is batch or self._is_free_for(number))
                self._hold(batch)
                head, self._heard = self._heard, None
            head = receive() if head is None else head
            if kept or head[-1] == number:
                return head
            with self._changed:
                self._heard = head
            self.release(batch)

    def release(self, batch: object) -> None:
        """End a batch's turn, if it has one."""
        with self._changed:
            if self._holder is batch:
                self._holder = None
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all batches with an error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _is_free_for(self, number: int) -> bool:
        return self._holder is None and (self._heard is None or self._heard[-1] == number)

    def _hold(self, batch: object) -> None:
        if self.error is not None:
            raise FastSpecError(f"another stage's batch has ended: {self.error}") from self.error
        self._holder = batch


class OpenRanks(Ranks):
    """The processes of one open batch, whose turns are in an order with others'. `leads` is true in the first; `digest`
    stands for what all turns have made of the prompts."""

    def __init__(self, whole: dist.ProcessGroup, order: TurnOrder | None = None) -> None:
        super().__init__(_talking(dist.group.WORLD, tuple(dist.get_process_group_ranks(whole))), torch.device("cpu"))
        self.whole, self.rank, self.size = whole, whole.rank(), whole.size()
        self.leads, self.digest = self.rank == 0, 0
        self.order = TurnOrder() if order is None else order
        self.number, self.order.count = self.order.count, self.order.count + 1

    @property
    def name(self) -> str:
        """This process, for a message."""
        return f"process {self.rank} of the {self.size} that hold the model together"

    def check_opened(self, *parts: object) -> None:
        """Raise Unsupported, in every process, where they do not open the same batch."""
        with self._reached():
            differs = self.differ(*parts)
        if differs:
            raise Unsupported(
                f"the {self.size} processes that hold the model together opened batches with different arguments: each "
                "must pass the same assistant, rows, max_length, prefill_chunk, narrows and prefix_caching, and have "
                "the same launches that fastspec.tune found"
            )

    def any(self, mine: bool) -> bool:
        told = torch.tensor([mine], dtype=torch.int32, device="cpu")
        with self._reached():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return bool(told)

    def refuse_prompts(self) -> None:
        """Raise Unsupported in another process than the first."""
        if not self.leads:
            raise Unsupported(
                f"submit: this is {self.name}, and the first one takes the prompts: submit them there; here "
                "close(), or the end of the with block, waits until that closes its batch"
            )

    def tell(self, news: News) -> None:
        """Tell the others, from the first, in a turn of the batch."""
        told, limit = b"" if news == NOTHING else pickle.dumps(news), FAILED if news.failed else LIMIT
        with self._reached():
            self._send(torch.tensor([len(told), self.digest, self.number], device="cpu"), limit)
            if told:
                self._send(torch.frombuffer(bytearray(told), dtype=torch.uint8).cpu(), limit)

    def hear(self, failed: bool) -> News:
        """Wait for what the first process tells, and so for a turn; `failed` where the last one has here. Raises
        FastSpecError where that ends the batch, or turns have made something else of the prompts there."""

        def receive() -> list[int]:
            with self._reached():
                head = torch.zeros(3, dtype=torch.long, device="cpu")
                return [int(each) for each in self._send(head, FAILED if failed else LIMIT).tolist()]

        size, digest, number = self.order.hear(self, self.number, receive)
        if number != self.number:
            raise FastSpecError(f"a round failed in {self.name} alone")
        with self._reached():
            body = torch.empty(size, dtype=torch.uint8, device="cpu")
            news: News = pickle.loads(self._send(body, LIMIT).numpy().tobytes()) if size else NOTHING
        if news.fatal is not None:
            raise FastSpecError(f"the first of the {self.size} processes that hold the model together: {news.fatal}")
        if digest != self.digest and not news.failed:
            raise FastSpecError(
                f"{self.name} made other tokens of the prompts than the first: the model's generation_config, a hook, "
                "a processor or weights differ between them, or the sums between the devices are at fault"
            )
        return news

    def count(self, batch: OpenBatch) -> None:
        """A turn has ended."""
        answers = [(len(answer), answer[-RECENT:]) for answer in batch.out.tokens]
        self.digest = zlib.crc32(repr((batch.active, batch.lengths, answers)).encode(), self.digest)

    def _send(self, mine: Tensor, limit: timedelta) -> Tensor:
        """The first process's tensor, written over mine."""
        work = dist.broadcast(mine, group=self.group, group_src=0, async_op=True)
        assert work is not None
        work.wait(limit)
        return mine

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of a connection, or of time
            raise FastSpecError(
                f"{self.name} cannot reach the others any more, one of which has ended or stands still: {error}"
            ) from error


@cache
def _talking(world: object, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Processes of a world over gloo; made once, since torch would give the next the same name."""
    try:
        made = dist.new_group(list(ranks), timeout=LIMIT, backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:  # of the store, for which nobody else has come
        raise FastSpecError(
            f"fastspec.continuous: the {len(ranks)} processes that hold the model together did not all call it within "
            f"{LIMIT.total_seconds():.0f} seconds: {error}"
        ) from error
    assert made is not None
    return made


class SilentRounds(RoundStreamer):
    """Streamer of a prompt that another process streams: it asks for as much of each round, and tells nobody."""

    def __init__(self, logprobs: int | None, trees: bool) -> None:
        self.logprobs, self.trees = logprobs, trees

    def put_round(self, round: StreamedRound) -> None:
        """Nothing."""


class PromptMail:
    """Arguments of prompts as bytes, which other processes read in the order in which they were written. Grammars,
    tokenizers and stop strings are sent once, and then named, the last KEPT. Tensors on a GPU go to the reader's."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.count = 0

    def write(self, given: tuple[Any, ...]) -> bytes:
        """The arguments as bytes. Raises Unsupported for those that cannot be sent."""
        before = self.kept.copy(), self.count
        try:
            return self.packed(given, whole=None)
        except Exception as error:
            self.kept, self.count = before
            raise Unsupported(
                "the prompt's arguments cannot be sent to the other processes that hold the model together "
                f"({type(error).__name__}: {error}): pass values, and objects of classes that pickle finds by name"
            ) from error

    def read(self, sent: bytes) -> Any:
        """The arguments again."""
        return _Reader(io.BytesIO(sent), self).load()

    def packed(self, value: Any, whole: Any) -> bytes:
        """A value as bytes, with what it shares with others named; but for `whole`, which is written out."""
        file = io.BytesIO()
        _Writer(file, self, whole).dump(value)
        return file.getvalue()

    def number_of(self, held: Any) -> tuple[int, bytes | None]:
        """The number of an object, and the object as bytes where the readers have not got it."""
        known = next((number for number, each in self.kept.items() if each is held), None)
        if known is not None:
            self.kept.move_to_end(known)
            return known, None
        sent = self.packed(held, whole=held)
        number, self.count = self.count, self.count + 1
        self._keep(number, held)
        return number, sent

    def object_of(self, number: int, sent: bytes | None) -> Any:
        """The object of a number."""
        if sent is None:
            self.kept.move_to_end(number)
        else:
            self._keep(number, self.read(sent))
        return self.kept[number]

    def _keep(self, number: int, held: Any) -> None:
        self.kept[number] = held
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, mail: PromptMail, whole: Any) -> None:
        super().__init__(file)
        self.mail, self.whole = mail, whole

    def persistent_id(self, obj: Any) -> Any:
        return self.mail.number_of(obj) if isinstance(obj, SHARED) and obj is not self.whole else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return _here, (obj.cpu(), obj.device.type)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mail: PromptMail) -> None:
        super().__init__(file)
        self.mail = mail

    def persistent_load(self, pid: Any) -> Any:
        return self.mail.object_of(*pid)


def _here(tensor: Tensor, kind: str) -> Tensor:
    """A tensor on this process's device of a kind."""
    return tensor.to(kind)
