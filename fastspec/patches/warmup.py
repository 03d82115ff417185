"""Short calls of every kind that a patched model will be asked for, so that its kernels are compiled and its rounds
captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastspec.config import Nasd
from fastspec.errors import Unsupported, check_whole
from fastspec.generation.capture import padded_width, padded_widths
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine.round_program import EXTENT_BUCKET, rounded
from fastspec.generation.engine.rounds import groups
from fastspec.generation.target import widest_part
from fastspec.patches.hf.compat import device_of, unwrapped
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.session import PatchSession, patched_session

NEW = 4
"""Tokens of every call: its first round runs, the second is captured."""
WARM_NEW = 24
"""Tokens of a warm-up's answers: several rounds, whatever is accepted, of which the second is captured."""
WARM_SIZED = 40
"""Tokens of a call where the size of a round is chosen: enough rounds that their time is measured, too."""
MADE, TIMED, HOSTED = 3, 8, 3
"""Turns of an open batch that make the rounds of a size (one of them reads prompts, one captures), and that measure
them, and those whose tokens the host chooses."""
WARM_ENDLESS = 128
"""Tokens of answers that are cancelled after these turns."""
WARM_SLOTS = 2048
WARM_LENGTH = WARM_SLOTS - EXTENT_BUCKET
"""Tokens of texts that a warm-up is for: with what rounds write beyond their ends they have room in buffers of
WARM_SLOTS."""
MOST_WARM = 4 * WARM_SLOTS - EXTENT_BUCKET
"""The same where nobody says how many tokens, as far as memory allows: what a row has room for by default. From twice
WARM_SLOTS on attention over trees may run by another kernel on Hopper, which would compile while all rows wait."""
SHARE = 2
"""Part of the free memory, one in so many, that buffers for texts of any length may take."""
OVERSHOT = 4
"""Rounds whose tokens need room beyond a text's limit: the one that ends it, one that was launched before that was
read, the next one of the rows beside it, and the one that may be launched behind that."""
ENDLESS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


def widths(length: int, rows: int, *, captures: bool) -> list[int]:
    """Prompts that make every pass of `rows` texts of up to `length` tokens, where passes are captured or not: the
    whole length, and what parts of a prompt are padded to. The longest comes first: in the buffers that it needs all
    others are captured."""
    padded = [*padded_widths(widest_part(rows, captures=captures))]
    return [length, *(width for width in reversed(padded) if width < length)]


def warm_lengths(most: int) -> Iterator[int]:
    """Lengths that a warm-up may be for where texts have up to `most` tokens, the longest first: all of these where
    they are few enough, then as many as buffers of a power of two have room for, down to WARM_LENGTH."""
    most = min(most, MOST_WARM)
    yield most
    for power in reversed(range(WARM_SLOTS.bit_length() - 1, (most - 1).bit_length())):
        yield (1 << power) - EXTENT_BUCKET


def room_for(length: int, longest: int) -> int:
    """Committed tokens of a row that the rounds of an open batch make room for where texts have up to `length` tokens,
    and a round commits `longest` at most."""
    return rounded(length + OVERSHOT * longest)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Prompts that come to an open batch at once in a warm-up: their tokens, how theirs are chosen, whether behind a
    constraint, and the size of the rounds' trees, where it is chosen; then the answers are cancelled after so many
    `turns`, and have no rounds where these are 0."""

    lengths: Sequence[int]
    options: dict[str, Any]
    constrained: bool = False
    size: int | None = None
    turns: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of an answer."""
        if self.turns is None:
            return WARM_NEW
        return WARM_ENDLESS if self.turns else 1


def open_batch_calls(
    length: int,
    sizes: Mapping[int, Sequence[int | None]],
    together: int,
    *,
    captures: bool,
    held: Mapping[int, Sequence[int | None]],
) -> Iterator[OpenCall]:
    """Prompts that warm up an open batch, of `length` tokens at most.

    First come the passes that read prompts, alone and up to `together` of them at once; where passes are captured each
    comes twice: the first one compiles. Then come rounds of every number of rows, and of each of their `sizes`; `held`
    has those of rows behind constraints, and nothing where these are not warmed up.
    """
    several = [[min(width, length)] * count for count, width in groups(together) if width <= padded_width(length)]
    passes = [*([width] for width in widths(length, 1, captures=captures)), *sorted(several, key=max, reverse=True)]
    turns = 0 if captures and all(None not in choices for choices in sizes.values()) else None
    for lengths in passes:
        for _ in range(1 + captures):
            yield OpenCall(lengths, GREEDY, turns=turns)
    for count, choices in sizes.items():
        for options, constrained in ((GREEDY, False), (SAMPLED, False), (GREEDY, True)):
            hosted = constrained or options is not GREEDY
            for size in held.get(count, ()) if constrained else choices:
                turns = None if size is None else MADE + (HOSTED if hosted else TIMED)
                yield OpenCall([min(padded_width(1), length)] * count, options, constrained, size, turns)


def warmup(
    model: Any,
    *,
    rows: Sequence[int] = (1,),
    length: int = 2048,
    assistants: Sequence[str] | None = None,
    told: Callable[[int, int], object] | None = None,
) -> float:
    """Make short calls on a patched model, so that a later call finds its kernels compiled and, in this process, its
    rounds captured -> the seconds that it took.

    The calls are of every number of `rows` (prompts at once), of prompts of up to `length` tokens, greedy and sampled,
    by every assistant that the model is patched with, or by the names in `assistants`. Kernels stay in Triton's cache
    on disk: a server's image is warmed up once, on a GPU of the kind that it runs on. `told` is called with (calls that
    are done, of how many). Where rounds choose how many nodes their trees have, greedy ones of every size are captured
    and timed. Random numbers that the caller draws later are those that it would have drawn. Encoder-decoder models,
    and cascades, are left to their first call. Raises Unsupported for an unpatched model and for numbers that are
    none.
    """
    model = unwrapped(model)
    session = patched_session(model, "fastspec.patch(model) comes before fastspec.warmup(model)")
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder model: its first call warms it up")
    if not isinstance(rows, Sequence) or not rows:
        raise Unsupported(f"warmup: rows={rows!r} must list the numbers of prompts at once, such as (1, 8)")
    for count in rows:
        check_whole("warmup", 1, rows=count, length=length)
    known = assistants_of(session)
    names = known if assistants is None else tuple(assistants)
    if unknown := set(names) - set(known):
        raise Unsupported(f"assistants {sorted(unknown)}: this model is patched with {', '.join(known)}")
    most = position_limit(model.config) or length + NEW
    began, device, tell = time.perf_counter(), device_of(model), told or (lambda done, of: None)
    captures = session.ops(model, mode_for(model)).captures
    calls = list(_calls(names, rows, max(1, min(length, most - NEW)), captures))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # processes that hold the model together are asked the same
        for done, (name, count, width, options) in enumerate(calls):
            tell(done, len(calls))
            ids = torch.randint(model.config.get_text_config().vocab_size, (count, width), device=device)
            call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant": name, **ENDLESS}
            model.generate(**call, **options, max_new_tokens=NEW)
            if captures and options is SAMPLED:  # the last of its kind
                for sizes in _choosers(session, name, count):
                    _try_sizes(session, sizes, partial(model.generate, **call, **GREEDY), most - width)
                if name == Nasd.name:  # whose drafter has trees of every size in turn
                    _call_at(session, 0, partial(model.generate, **call, **GREEDY), most - width)
    tell(len(calls), len(calls))
    return time.perf_counter() - began


def _choosers(session: PatchSession, name: str, rows: int) -> list[TreeSizes]:
    """The choosers of the sizes of trees in greedy calls of an assistant and so many rows."""
    return [
        sizes
        for ((config, _), count, *_, temperature), sizes in session.trees.items()
        if config.name == name and count == rows and temperature is None
    ]


def _try_sizes(session: PatchSession, sizes: TreeSizes, call: Callable[..., object], most: int) -> None:
    """Let a call have rounds of every size, which are captured and whose times are known then."""
    for size in range(len(sizes.shapes) + 1):
        _call_at(session, size, call, most)
        sizes.tried()
    sizes.end()


def _call_at(session: PatchSession, size: int, call: Callable[..., object], most: int) -> None:
    """Make a call whose rounds are asked for this size."""
    session.pinned = size
    try:
        call(max_new_tokens=min(WARM_SIZED, most))
    finally:
        session.pinned = None


def assistants_of(session: PatchSession) -> tuple[str, ...]:
    """The names of the assistants that a model is patched for, cascades apart."""
    return ("autoregressive", "nasd", *(name for name in session.resources if name != "cascade"))


def _calls(
    names: Sequence[str], rows: Sequence[int], length: int, captures: bool
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """(assistant, rows, tokens of the prompts, how tokens are chosen). Where passes are captured each comes twice: the
    first compiles."""
    for name in names:
        for count in rows:
            for width in widths(length, count, captures=captures):
                for _ in range(1 + captures):
                    yield name, count, width, GREEDY
            yield name, count, min(padded_width(1), length), SAMPLED
