"""Records of answers of a cascade's stages, with features and labels, as JSON lines and as tensors.

The first line is a header: {"format": "fastspec.cascade.records", "version": 1, "features": NAMES}. Every other line is
a `Record`, and counts once its newline is written: a run cut short leaves a file that can be gone on with.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import CheckpointError, Unsupported
from fastspec.files import parse_json

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
LAST = 32
"""Tokens at the answer's end over which the entropy is averaged a second time."""
NAMES: tuple[str, ...] = (
    *(f"log_probability_q{int(100 * q)}" for q in QUANTILES),
    *(f"gap_q{int(100 * q)}" for q in QUANTILES),
    "log_probability_mean",
    "entropy_mean",
    "entropy_last",
    "log_probability_first",
    "gap_first",
    "entropy_first",
    "log_prompt_tokens",
    "log_answer_tokens",
    "share_of_limit",
    "ended",
    "repetition",
    "stage",
)
"""The features in their order; a predictor holds for these names alone."""


def features(
    measures: Tensor,
    tokens: Sequence[int] | Tensor,
    *,
    prompt_tokens: int,
    limit: int,
    ended: bool,
    stage: int,
    stages: int,
) -> Tensor:
    """The features `NAMES` of one answer -> [F] fp32 on the CPU.

    measures [T, 3] fp32 on the CPU: for each answer token its log-probability (untempered, nats), the gap between the
    two largest log-probabilities there, and the entropy (nats). `limit` is the number of tokens that the answer might
    have had, `ended` whether an end token closed it, `stage` of `stages` the model that gave it. Quantiles, linearly
    interpolated, follow Gupta et al., arXiv 2404.10136. Raises `Unsupported` for numbers that are not finite.
    """
    ids: Sequence[int] = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    count = len(ids)
    chances, gaps, entropies = measures.t().tolist()  # a hundred numbers do not pay for torch's operations
    sums = sum(chances), sum(gaps), sum(entropies)
    if not math.isfinite(sum(sums)):
        row, column = next(iter((~torch.isfinite(measures)).nonzero().tolist()), (0, 0))
        raise Unsupported(
            f"features: the {('log-probability', 'gap', 'entropy')[column]} of answer token {row} is "
            f"{float(measures[row, column])}, not a finite number; measure on the model's own logits, before "
            "processors that forbid tokens"
        )
    grams = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    last = entropies[-LAST:]
    return torch.tensor(
        [
            *_quantiles(sorted(chances)),
            *_quantiles(sorted(gaps)),
            sums[0] / count,
            sums[2] / count,
            sum(last) / len(last),
            chances[0],
            gaps[0],
            entropies[0],
            math.log1p(prompt_tokens),
            math.log(count),
            min(1.0, count / limit),
            float(ended),
            1 - len(set(grams)) / len(grams) if grams else 0.0,
            stage / max(1, stages - 1),
        ],
        dtype=torch.float32,
        device="cpu",
    )


def _quantiles(ordered: list[float]) -> list[float]:
    """Numbers in ascending order -> their `QUANTILES`, linear between neighbours, as torch.quantile has them."""
    last, found = len(ordered) - 1, []
    for q in QUANTILES:
        place = q * last
        low = int(place)
        value = ordered[low]
        found.append(value if low == last else value + (place - low) * (ordered[low + 1] - value))
    return found


FORMAT, VERSION = "fastspec.cascade.records", 1
HEADER = json.dumps({"format": FORMAT, "version": VERSION, "features": list(NAMES)})
SPLITS = ("train", "held-out")


@dataclass(frozen=True, slots=True)
class Record:
    """One item answered by one stage.

    `item` is the item's id and `set` its data set; `split` "train" or "held-out"; `stage` the stage's name and `index`
    its place, from 0. `prompt_tokens` as this stage's tokenizer counts them; the answer is `kept_tokens` taken over
    from the stage before and `new_tokens` of its own, and `ended` where it reached an end token. `start_ms` is the time
    of the prefill and of verifying a handed answer, `decode_ms` the rest. `label` in [0, 1] is the answer's quality,
    None before it is `judged` by a judge of this name. `versions` are those of packages and devices.
    """

    item: str
    set: str
    split: str
    stage: str
    index: int
    prompt_tokens: int
    answer: str
    new_tokens: int
    kept_tokens: int
    ended: bool
    start_ms: float
    decode_ms: float
    label: float | None
    features: tuple[float, ...]
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict)
    judged: str | None = None

    def __post_init__(self) -> None:
        where = f"record of item {self.item!r} by stage {self.stage!r}"
        for words, names, fits in CHECKS:
            for name in names:
                if not fits(getattr(self, name)):
                    raise Unsupported(f"{where}: {name}={getattr(self, name)!r} must be {words}")
        if self.index == 0 and self.kept_tokens:
            raise Unsupported(f"{where}: kept_tokens={self.kept_tokens}, and the first stage has nothing to take over")
        object.__setattr__(self, "features", tuple(self.features))


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[Any], bool]], ...] = (
    ("a text", ("item", "set", "stage"), lambda value: isinstance(value, str) and value != ""),
    ("a text", ("answer",), lambda value: isinstance(value, str)),
    ("a text or None", ("judged",), lambda value: value is None or isinstance(value, str)),
    (" or ".join(map(repr, SPLITS)), ("split",), lambda value: value in SPLITS),
    ("a whole number", ("seed",), _whole),
    (
        "a whole number of at least 0",
        ("index", "prompt_tokens", "new_tokens", "kept_tokens"),
        lambda value: _whole(value) and value >= 0,
    ),
    ("True or False", ("ended",), lambda value: isinstance(value, bool)),
    ("milliseconds, not negative", ("start_ms", "decode_ms"), lambda value: _finite(value) and value >= 0),
    (
        "in [0, 1], or None before it is judged",
        ("label",),
        lambda value: value is None or (_finite(value) and 0 <= value <= 1),
    ),
    (
        "finite numbers, as the header names them",
        ("features",),
        lambda value: isinstance(value, (list, tuple)) and len(value) == len(NAMES) and all(map(_finite, value)),
    ),
)
"""Conditions of the fields, in words and as a test."""


@dataclass(frozen=True, slots=True)
class Table:
    """Aligned tensors of n items and L stages: `features` L tensors [n, F] float32; `labels` [n, L] float64; `tokens`
    (that the stage generated) and `kept` [n, L] int64. `ids` and `sets` are n texts, `stages` L."""

    stages: tuple[str, ...]
    ids: tuple[str, ...]
    sets: tuple[str, ...]
    features: tuple[Tensor, ...]
    labels: Tensor
    tokens: Tensor
    kept: Tensor


def split(item: str, seed: int, share: float) -> str:
    """Split of an item: "train" for a `share` of the items, else "held-out", by a hash of its id and `seed`."""
    if not 0 <= share <= 1:
        raise Unsupported(f"share={share} must lie in [0, 1]: the part of the items that belongs to the training")
    drawn = int.from_bytes(sha256(f"{seed}:{item}".encode()).digest()[:8], "big") / 2**64
    return SPLITS[0] if drawn < share else SPLITS[1]


def read(path: str | Path) -> tuple[Record, ...]:
    """The records of a file, in its order, without a last line that was cut short. Raises `CheckpointError` for other
    files and features, for a line that cannot be read and for an item and stage that occur twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as records of a cascade: {error}") from error
    lines = text.split("\n")[:-1]
    if not lines:
        raise CheckpointError(f"{path} is empty: records of a cascade begin with a header")
    header = _object(lines[0], f"{path}, line 1")
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{path}: line 1 must be the header of records, {HEADER}")
    if header.get("features") != list(NAMES):
        raise CheckpointError(f"{path} holds other features than {', '.join(NAMES)}: write the answers to another file")
    found: dict[tuple[str, str], Record] = {}
    for place, line in enumerate(lines[1:], 2):
        record = _record(line, f"{path}, line {place}")
        if (record.item, record.stage) in found:
            answer = f"item {record.item!r} by stage {record.stage!r}"
            raise CheckpointError(f"{path}, line {place}: {answer} occurs twice; remove one line")
        found[record.item, record.stage] = record
    return tuple(found.values())


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise CheckpointError(f"{where}: no JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: no JSON object")
    return values


def _record(line: str, where: str) -> Record:
    values = _object(line, where)
    # old files do not say how they were judged
    unlike = sorted((set(values) | {"judged"}) ^ {each.name for each in fields(Record)})
    if unlike:
        raise CheckpointError(f"{where}: missing or unknown: {', '.join(unlike)}")
    try:
        return Record(**values)
    except Unsupported as error:
        raise CheckpointError(f"{where}: {error}") from error


class Writer:
    """Appends records to a new or an old file, each flushed, as a context manager: `done` holds the (item, stage) that
    it has. Raises `CheckpointError` for a file of other records, `Unsupported` for a record that is there already."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = self.path.read_bytes().rfind(b"\n") + 1 if self.path.exists() else 0  # up to the last newline
        self.done: set[tuple[str, str]] = set()
        if size:
            self.done = {(record.item, record.stage) for record in read(self.path)}
            os.truncate(self.path, size)
        try:
            self._file = self.path.open("a" if size else "w", encoding="utf-8")
        except OSError as error:
            raise Unsupported(f"could not write the records: {error}") from error
        if not size:
            self._write(HEADER)

    def add(self, record: Record) -> None:
        if (record.item, record.stage) in self.done:
            answer = f"item {record.item!r} by stage {record.stage!r}"
            raise Unsupported(f"{self.path} has {answer} already; `done` says what it has")
        self._write(json.dumps(asdict(record)))
        self.done.add((record.item, record.stage))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def rewrite(path: str | Path, records: Sequence[Record]) -> None:
    """Replace a file by these records in one step: another reader sees the old file or the new one."""
    beside = Path(f"{path}.part")
    beside.unlink(missing_ok=True)
    with Writer(beside) as writer:
        for record in records:
            writer.add(record)
    os.replace(beside, path)


def table(records: Sequence[Record], stages: Sequence[str], split: str) -> Table:
    """Aligned tensors of the items of a split that every stage of `stages` answered, in their order. Raises
    `Unsupported` without such an item, for one that is not judged, in several sets or splits, or of stages in another
    order."""
    items: dict[str, dict[str, Record]] = {}
    for record in records:
        items.setdefault(record.item, {})[record.stage] = record
    rows = [[found[stage] for stage in stages] for found in items.values() if all(stage in found for stage in stages)]
    for row in rows:
        _check(row)
    rows = [row for row in rows if row[0].split == split]
    if not rows:
        known = ", ".join(sorted({repr(record.stage) for record in records})) or "none"
        raise Unsupported(
            f"no {split} item was answered by every stage of {', '.join(stages)}; the records have the stages {known}"
        )

    def column(name: str, kind: torch.dtype) -> Tensor:
        return torch.tensor([[getattr(record, name) for record in row] for row in rows], dtype=kind, device="cpu")

    return Table(
        stages=tuple(stages),
        ids=tuple(row[0].item for row in rows),
        sets=tuple(row[0].set for row in rows),
        features=tuple(
            torch.tensor([row[place].features for row in rows], dtype=torch.float32, device="cpu")
            for place in range(len(stages))
        ),
        labels=column("label", torch.float64),
        tokens=column("new_tokens", torch.int64),
        kept=column("kept_tokens", torch.int64),
    )


def _check(row: Sequence[Record]) -> None:
    first = row[0]
    for place, record in enumerate(row):
        where = f"item {record.item!r} by stage {record.stage!r}"
        if (record.set, record.split) != (first.set, first.split):
            differ = f"{record.set!r}, {record.split!r} are not {first.set!r}, {first.split!r} of stage {first.stage!r}"
            raise Unsupported(f"{where}: its set and split {differ}; record an item once, in one set")
        if record.index != place:
            raise Unsupported(f"{where}: its place was {record.index}, and here it is {place}: name stages in order")
        if record.label is None:
            raise Unsupported(f"{where} is not judged: `fastspec cascade train` judges what it has answered")
