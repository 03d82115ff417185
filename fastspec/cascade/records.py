"""What a cascade's stages answered, and how good it was: JSON lines, one per item and stage, and the tensors made of them.

The first line is a header: {"format": "fastspec.cascade.records", "version": 1, "features": [names]}. Every other line is a `Record`.
A line counts once its newline is written, so that a run cut short leaves a file that can be read and gone on with.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import CheckpointError, Unsupported
from fastspec.reading import parse_json

FORMAT, VERSION = "fastspec.cascade.records", 1
SPLITS = ("train", "held-out")


@dataclass(frozen=True, slots=True)
class Record:
    """One item answered by one stage.

    `item` is the item's id and `set` its data set; `split` "train" or "held-out"; `stage` the stage's name and `index` its place in the
    cascade, from 0. `prompt_tokens` as this stage's tokenizer counts them; the answer is `kept_tokens` taken over from the stage before and
    `new_tokens` that this stage generated, and `ended` says that it reached an end token. `start_ms` is the time of the prefill and of
    verifying what was handed over, `decode_ms` the rest. `label` in [0, 1] says how good the answer is, None where that was not judged
    yet, and `judged` by what (`fastspec.cascade.labels.judged_by`); `features` are the numbers that the header names. `versions` maps
    packages and devices to their versions.
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
        for name in ("item", "set", "split", "stage", "answer"):
            if not isinstance(getattr(self, name), str) or (name != "answer" and not getattr(self, name)):
                raise Unsupported(f"{where}: {name}={getattr(self, name)!r} must be a text")
        if self.split not in SPLITS:
            raise Unsupported(f"{where}: split={self.split!r}; accepted are {', '.join(map(repr, SPLITS))}")
        for name in ("index", "prompt_tokens", "new_tokens", "kept_tokens", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and name != "seed"):
                raise Unsupported(f"{where}: {name}={value!r} must be a whole number, and not negative")
        if self.index == 0 and self.kept_tokens:
            raise Unsupported(f"{where}: kept_tokens={self.kept_tokens}, and the first stage has nothing to take over")
        if not isinstance(self.ended, bool):
            raise Unsupported(f"{where}: ended={self.ended!r} must be True or False")
        for name in ("start_ms", "decode_ms"):
            if not _finite(getattr(self, name)) or getattr(self, name) < 0:
                raise Unsupported(f"{where}: {name}={getattr(self, name)!r} must be milliseconds, not negative")
        if self.label is not None and not (_finite(self.label) and 0 <= self.label <= 1):
            raise Unsupported(f"{where}: label={self.label!r} must lie in [0, 1], or be None where the answer was not judged")
        object.__setattr__(self, "features", tuple(self.features))
        if self.judged is not None and not isinstance(self.judged, str):
            raise Unsupported(f"{where}: judged={self.judged!r} must be a text, or None where that is not known")
        wrong = [value for value in self.features if not _finite(value)]
        if wrong:
            raise Unsupported(f"{where}: features must be finite numbers, not {wrong[0]!r}")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a file, in its order, and the names of their features."""

    features: tuple[str, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Aligned tensors of n items and L stages, F features: what a predictor is trained on and a cascade is judged by.

    `features` are L tensors [n, F] float32; `labels`, `start_ms` and `decode_ms` [n, L] float64; `tokens` (that the stage generated),
    `kept` and `prompt_tokens` [n, L] int64; `ended` [n, L] bool. `ids`, `sets` and `splits` are n texts, `stages` L and `names` F.
    """

    stages: tuple[str, ...]
    names: tuple[str, ...]
    ids: tuple[str, ...]
    sets: tuple[str, ...]
    splits: tuple[str, ...]
    features: tuple[Tensor, ...]
    labels: Tensor
    start_ms: Tensor
    decode_ms: Tensor
    tokens: Tensor
    kept: Tensor
    prompt_tokens: Tensor
    ended: Tensor

    def where(self, *, split: str | None = None, set: str | None = None) -> Table:
        """The items of one split, of one set, or of both. Raises `Unsupported` where there is none."""
        rows = zip(self.splits, self.sets, strict=True)
        chosen = [place for place, (in_split, in_set) in enumerate(rows) if split in (None, in_split) and set in (None, in_set)]
        if not chosen:
            there = f"splits {_named(self.splits)} and sets {_named(self.sets)}"
            raise Unsupported(f"no item of split={split!r}, set={set!r}; there are {there}")
        values: dict[str, Any] = {}
        for name in (each.name for each in fields(self) if each.name not in ("stages", "names")):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                values[name] = value[chosen]
            elif name == "features":
                values[name] = tuple(each[chosen] for each in value)
            else:
                values[name] = tuple(value[place] for place in chosen)
        return Table(self.stages, self.names, **values)


def _named(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(map(repr, values)))) or "none"


def split(item: str, seed: int, share: float) -> str:
    """Where an item belongs: "train" for a `share` of the items, else "held-out"; by a hash of its id and `seed`, whatever the others."""
    if not 0 <= share <= 1:
        raise Unsupported(f"share={share} must lie in [0, 1]: the part of the items that belongs to the training")
    drawn = int.from_bytes(sha256(f"{seed}:{item}".encode()).digest()[:8], "big") / 2**64
    return SPLITS[0] if drawn < share else SPLITS[1]


def read(path: str | Path) -> Records:
    """Read a file of records. A last line without its newline was cut short and is left out.

    Raises `CheckpointError` for a file that is none, for a line that cannot be read and for an item and stage that occur twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as records of a cascade: {error}") from error
    lines = text.split("\n")[:-1]
    if not lines:
        raise CheckpointError(f"{path} is empty: records of a cascade begin with a header")
    names = _header(lines[0], path)
    found: dict[tuple[str, str], Record] = {}
    for place, line in enumerate(lines[1:], 2):
        record = _record(line, names, f"{path}, line {place}")
        if (record.item, record.stage) in found:
            raise CheckpointError(f"{path}, line {place}: item {record.item!r} by stage {record.stage!r} occurs twice; remove one line")
        found[record.item, record.stage] = record
    return Records(names, tuple(found.values()))


def _header(line: str, path: str | Path) -> tuple[str, ...]:
    try:
        header = parse_json(line)
    except ValueError as error:
        raise CheckpointError(f"{path}, line 1: no JSON ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        expected = f'{{"format": "{FORMAT}", "version": {VERSION}, "features": [names]}}'
        raise CheckpointError(f"{path}: line 1 must be the header of records, {expected}")
    names = header.get("features")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: the header's features={names!r} must be a list of names")
    return tuple(names)


def _record(line: str, names: Sequence[str], where: str) -> Record:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise CheckpointError(f"{where}: no JSON ({error})") from error
    expected = {each.name for each in fields(Record)}
    if not isinstance(values, dict) or set(values) | {"judged"} != expected:  # files of before do not say how they were judged
        unlike = sorted((set(values) | {"judged"}) ^ expected) if isinstance(values, dict) else sorted(expected)
        raise CheckpointError(f"{where}: missing or unknown: {', '.join(unlike)}")
    if not isinstance(values["features"], list) or len(values["features"]) != len(names):
        raise CheckpointError(f"{where}: features must be {len(names)} numbers, as the header names them: {', '.join(names)}")
    try:
        return Record(**values)
    except Unsupported as error:
        raise CheckpointError(f"{where}: {error}") from error


class Writer:
    """Appends records to a file, or goes on with one that is there: `done` holds the (item, stage) that it has.

    `names` are the features' names, which an existing file must have too. A context manager; each record is flushed. Raises
    `CheckpointError` for a file of other records, `Unsupported` for a record that is there already or has another number of features.
    """

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        self.path, self.names = Path(path), tuple(names)
        size = _whole(self.path)
        self.done: set[tuple[str, str]] = set()
        if size:
            there = read(self.path)
            if there.features != self.names:
                raise CheckpointError(
                    f"{path} holds other features ({', '.join(there.features)}) than {', '.join(self.names)}; write to another file"
                )
            self.done = {(record.item, record.stage) for record in there.records}
            os.truncate(self.path, size)
        try:
            self._file = self.path.open("a" if size else "w", encoding="utf-8")
        except OSError as error:
            raise Unsupported(f"could not write the records: {error}") from error
        if not size:
            self._write(_head(self.names))

    def add(self, record: Record) -> None:
        """Write one record."""
        if (record.item, record.stage) in self.done:
            raise Unsupported(f"{self.path} has item {record.item!r} by stage {record.stage!r} already; `done` says what it has")
        if len(record.features) != len(self.names):
            raise Unsupported(f"the record of item {record.item!r} has {len(record.features)} features, not {len(self.names)}")
        self._write(json.dumps(asdict(record)))
        self.done.add((record.item, record.stage))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _head(names: Sequence[str]) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, "features": list(names)})


def _whole(path: Path) -> int:
    """The bytes of a file up to its last newline; 0 where there is no file."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def rewrite(path: str | Path, records: Records) -> None:
    """Replace a file by these records (with labels, say) in one step: another reader sees the old file or the new one."""
    beside = Path(f"{path}.part")
    beside.unlink(missing_ok=True)
    with Writer(beside, records.features) as writer:
        for record in records.records:
            writer.add(record)
    os.replace(beside, path)


def table(records: Records, stages: Sequence[str]) -> Table:
    """Aligned tensors of those items that every stage of `stages` answered, in the order in which the items first occur.

    Raises `Unsupported` where no item has every stage, where a record is not labelled, and where records of one item differ in their set
    or split or a stage's place in the cascade is not that in `stages`.
    """
    if not stages or len(set(stages)) != len(stages):
        raise Unsupported(f"stages={list(stages)!r} must be names, each once, the cheapest first")
    items: dict[str, dict[str, Record]] = {}
    for record in records.records:
        items.setdefault(record.item, {})[record.stage] = record
    rows = [[found[stage] for stage in stages] for found in items.values() if all(stage in found for stage in stages)]
    if not rows:
        known = _named(record.stage for record in records.records)
        raise Unsupported(f"no item was answered by every stage of {', '.join(stages)}; the records have stages {known}")
    for row in rows:
        _check(row)

    def column(name: str, kind: torch.dtype) -> Tensor:
        return torch.tensor([[getattr(record, name) for record in row] for row in rows], dtype=kind, device="cpu")

    return Table(
        stages=tuple(stages),
        names=records.features,
        ids=tuple(row[0].item for row in rows),
        sets=tuple(row[0].set for row in rows),
        splits=tuple(row[0].split for row in rows),
        features=tuple(
            torch.tensor([row[place].features for row in rows], dtype=torch.float32, device="cpu") for place in range(len(stages))
        ),
        labels=column("label", torch.float64),
        start_ms=column("start_ms", torch.float64),
        decode_ms=column("decode_ms", torch.float64),
        tokens=column("new_tokens", torch.int64),
        kept=column("kept_tokens", torch.int64),
        prompt_tokens=column("prompt_tokens", torch.int64),
        ended=column("ended", torch.bool),
    )


def _check(row: Sequence[Record]) -> None:
    first = row[0]
    for place, record in enumerate(row):
        where = f"item {record.item!r} by stage {record.stage!r}"
        if (record.set, record.split) != (first.set, first.split):
            differ = f"{record.set!r}, {record.split!r} are not {first.set!r}, {first.split!r} of stage {first.stage!r}"
            raise Unsupported(f"{where}: its set and split {differ}; record an item once, in one set")
        if record.label is None:
            raise Unsupported(f"{where} has no label; judge its answer with `fastspec.cascade.labels` and `rewrite` the records")
        if record.index != place:
            raise Unsupported(f"{where} was recorded as stage {record.index} of its cascade, and is stage {place} here")
