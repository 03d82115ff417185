"""Processes that hold a model together (tensor parallelism).

Every process runs the same rounds, on logits of which all have the same bits; what any of them sees alone must not
change how many rounds there are, or the sums between them would not meet.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.ends import StopStrings
from fastspec.patches.hf.parallel import group_of

Value = TypeVar("Value")
Made = TypeVar("Made")
BY_TEXT = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria, StopStrings)
"""Criteria that say the same of the same text in every process."""


class Ranks:
    """The processes of a call, whose messages lie on `device`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    def differ(self, *parts: object) -> bool:
        """True where the processes have not all called this with the same tensors and values; waits for the device."""
        told = hashlib.sha256()
        for part in parts:
            told.update(part.cpu().numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode())
        mine = torch.frombuffer(bytearray(told.digest()), dtype=torch.uint8).to(self.device)
        all_of_them = mine.new_empty(self.group.size(), len(mine))
        dist.all_gather_into_tensor(all_of_them.view(-1), mine, group=self.group)
        return not torch.equal(all_of_them, mine.expand_as(all_of_them))

    def check_arguments(self, ids: Tensor, *parts: object) -> None:
        """Raise Unsupported, in every process, where they were not called alike; ids [B, T]."""
        if self.differ(tuple(ids.shape), ids, *parts):
            raise Unsupported(
                f"the {self.group.size()} processes that hold the model together called generate with different "
                "arguments: each must pass the same input_ids, assistant, settings and kinds of streamer, profile and "
                "criteria, and run the same kernels by the same launches that fastspec.tune found, in a cache folder "
                "that all of them read"
            )

    def check_answers(self, answers: list[list[int]]) -> None:
        """Raise FastSpecError, in every process, where these differ."""
        if self.differ(answers):
            found: list[list[list[int]]] = [[] for _ in range(self.group.size())]
            dist.all_gather_object(found, answers, group=self.group)
            raise FastSpecError(
                f"the {self.group.size()} processes that hold the model together ended with different tokens "
                f"({_first_difference(found)}): a logits processor, a hook or weights differ between them, or the sums "
                "between the devices are at fault"
            )

    def any(self, mine: bool) -> bool:
        """True where any process says so."""
        told: list[bool] = [False] * self.group.size()
        dist.all_gather_object(told, mine, group=self.group)
        return any(told)

    def share_random_numbers(self) -> None:
        """Let all draw what the first process would: its generator's state, of the call's device and of the CPU."""
        torch.set_rng_state(self.first(torch.get_rng_state()))
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.first(torch.cuda.get_rng_state(self.device)), self.device)

    def first(self, mine: Tensor) -> Tensor:
        """The first process's tensor, of the same shape and dtype as mine, where mine lies."""
        sent = mine.to(self.device, copy=True)
        dist.broadcast(sent, group=self.group, group_src=0)
        return sent.to(mine.device)

    def first_value(self, mine: Value) -> Value:
        """The first process's value of any kind."""
        held = [mine]
        dist.broadcast_object_list(held, group=self.group, group_src=0, device=self.device)
        return held[0]

    def by_first(self, run: Callable[[], Value]) -> Value:
        """Result of `run` in the first process, which alone calls it; its error is raised in all."""
        return self.led(lambda joint: run(), lambda: None)

    def led(self, run: Callable[[Callable[..., Made]], Value], together: Callable[..., Made]) -> Value:
        """Result of `run(joint)` in the first process, as `by_first`; `joint(...)` there calls `together(...)` in all,
        and an error of that ends each."""
        if self.group.rank() > 0:
            nothing: tuple[tuple[Any, ...] | None, Any, BaseException | None] = None, None, None
            while (told := self.first_value(nothing))[0] is not None:
                together(*told[0])
            _, value, failed = told
            if failed is not None:
                raise failed
            return cast(Value, value)
        beside = False

        def joint(*given: Any) -> Made:
            nonlocal beside
            self.first_value((given, None, None))
            beside = True
            found = together(*given)
            beside = False
            return found

        try:
            value = run(joint)
        except BaseException as error:  # an interruption too: the others wait for this one
            if not beside:
                self.first_value((None, None, _sendable(error)))
            raise
        self.first_value((None, value, None))
        return value

    def agreed(self, criteria: Iterable[Any]) -> StoppingCriteriaList:
        """Criteria of which those that look at anything beside the text say what the first process's say."""
        return StoppingCriteriaList(each if type(each) in BY_TEXT else FirstSays(each, self) for each in criteria)


def ranks_of(model: Any) -> Ranks | None:
    """The processes that hold a model together, or None where one holds all of it."""
    group = group_of(model)
    return None if group is None else Ranks(group, device_of(model))


def by_first(model: Any, run: Callable[[], Value]) -> Value:
    """Result of `run` in the first of a model's processes, all of which call this, or here in the only one."""
    ranks = ranks_of(model)
    return run() if ranks is None else ranks.by_first(run)


_open: Counter[tuple[int, ...]] = Counter()
"""Open batches that decode in processes, by their ranks."""


def opens(whole: dist.ProcessGroup) -> None:
    """An open batch decodes in these processes from here on."""
    _open[_ranks(whole)] += 1


def closes(whole: dist.ProcessGroup) -> None:
    """It does not any more."""
    _open[_ranks(whole)] -= 1


def refuse_beside(whole: dist.ProcessGroup | None, what: str) -> None:
    """Raise Unsupported where an open batch decodes in these processes, whose rounds keep an order of their own."""
    if whole is not None and _open[_ranks(whole)]:
        raise Unsupported(
            f"{what}: an open batch decodes in the {whole.size()} processes that hold the model together, and its "
            "turns and another call would come in another order in each: submit prompts to that batch, or close it "
            "first"
        )


def _ranks(whole: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(whole))


class FirstSays(StoppingCriteria):
    """A criterion whose verdict is the first process's."""

    def __init__(self, criterion: Any, ranks: Ranks) -> None:
        self.criterion, self.ranks = criterion, ranks

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """[B] bool."""
        verdict = torch.as_tensor(self.criterion(input_ids, scores, **kwargs), device=input_ids.device)
        return self.ranks.first(verdict.expand(input_ids.shape[0]).to(torch.uint8)).bool()


def _sendable(error: BaseException) -> BaseException:
    """An error as another process can read it."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else FastSpecError(str(error))
    except Exception:  # of a local class, or one whose arguments are not its words
        return FastSpecError(f"{type(error).__name__}: {error}")


def _first_difference(answers: list[list[list[int]]]) -> str:
    """Place where the answers [process][row] of some processes part, in words; nothing where they are alike again."""
    for row, each in enumerate(zip_longest(*answers, fillvalue=[])):
        for index, tokens in enumerate(zip_longest(*each)):
            if len(set(tokens)) > 1:
                return f"row {row}, new token {index}: {', '.join(map(str, tokens))}"
    return "of no row"
