"""Records of answers: written, read, cut short, gone on with, and made into tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.cascade.records import NAMES, SPLITS, Record, Writer, read, rewrite, table
from fastspec.errors import CheckpointError, Unsupported

STAGES = ("small", "large")
REST = (0.0,) * (len(NAMES) - 2)
WHOLE = Record(
    "i", "set", "train", "small", 0, 5, "text", 3, 0, True, 1.0, 2.0, 1.0, (0.5, 1.0, *REST), 7, {"torch": "2"}
)
FLOATS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def recordings(draw: st.DrawFn) -> list[Record]:
    """Records of several items and stages, in any order, some missing."""
    found = []
    for item in draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=5, unique=True)):
        part, where = draw(st.sampled_from(["train", "held-out"])), draw(st.sampled_from("xy"))
        for index, stage in enumerate(STAGES):
            if draw(st.integers(0, 3)):
                features = (draw(st.floats(-9, 9, width=32)), draw(st.floats(-9, 9, width=32)), *REST)
                counts, label = [draw(st.integers(0, 99)) for _ in range(3)], draw(st.floats(0, 1))
                emitted = [counts[0], draw(st.text(max_size=9)), counts[1], index * counts[2], draw(st.booleans())]
                found.append(
                    Record(item, where, part, stage, index, *emitted, draw(FLOATS), draw(FLOATS), label, features, 3)
                )
    return draw(st.permutations(found))


@given(recordings(), st.data())
@examples(40)
def test_records_survive_the_file_and_a_cut(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    with Writer(path) as writer:
        for record in records:
            writer.add(record)
    assert read(path) == tuple(records)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with Writer(path) as writer:
        assert len(writer.done) <= len(records)
        for record in records:
            if (record.item, record.stage) not in writer.done:
                writer.add(record)
    assert path.read_bytes() == whole
    changed = tuple(replace(record, label=0.25) for record in records)
    rewrite(path, changed)
    assert read(path) == changed and [each.name for each in path.parent.iterdir()] == ["r.jsonl"]


@given(recordings())
@settings(deadline=None)
def test_a_table_is_aligned(records: list[Record]) -> None:
    found = {(record.item, record.stage): record for record in records}
    whole = [
        item
        for item in dict.fromkeys(record.item for record in records)
        if all((item, stage) in found for stage in STAGES)
    ]
    for part in SPLITS:
        ids = [item for item in whole if found[item, "small"].split == part]
        if not ids:
            with pytest.raises(Unsupported, match=f"no {part} item"):
                table(records, STAGES, part)
            continue
        made = table(records, STAGES, part)
        assert list(made.ids) == ids and made.labels.dtype == torch.float64 and made.tokens.dtype == torch.int64
        for i, item in enumerate(made.ids):
            for k, stage in enumerate(made.stages):
                record = found[item, stage]
                assert made.sets[i] == record.set and made.features[k][i].tolist() == list(record.features)
                assert (made.labels[i, k], made.tokens[i, k], made.kept[i, k]) == (
                    record.label,
                    record.new_tokens,
                    record.kept_tokens,
                )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"split": "test"}, "split='test'"),
        ({"index": -1}, "index"),
        ({"kept_tokens": 1}, "take over"),
        ({"label": 1.5}, "label"),
        ({"label": math.nan}, "label"),
        ({"features": (1.0, math.inf, *REST)}, "inf"),
        ({"features": (1.0,)}, "features"),
        ({"start_ms": -1.0}, "start_ms"),
        ({"item": ""}, "item"),
        ({"ended": 1}, "True or False"),
        ({"judged": 3}, "judged"),
        ({"seed": 0.5}, "seed"),
        ({"answer": None}, "answer"),
        ({"new_tokens": True}, "new_tokens"),
    ],
)
def test_records_that_cannot_be_are_refused(change: dict, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        replace(WHOLE, **change)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(path)
    with Writer(path) as writer:
        writer.add(WHOLE)
        with pytest.raises(Unsupported, match="already"):
            writer.add(WHOLE)
    head, line_ = path.read_text().splitlines()
    for text, match in (
        ("", "empty"),
        ("{}\n", "header"),
        ("x\n", "line 1: no JSON"),
        (f"{head}\n{line_}\n{line_}\n", "line 3.*twice"),
        (f"{head}\n{{\n", "line 2: no JSON"),
        (f"{head}\n{{}}\n", "missing or unknown: answer"),
        (f"{head}\n[1]\n", "no JSON object"),
        (f"{head}\n{line_.replace('[0.5, 1.0', '[0.5')}\n", "as the header names them"),
        (f"{head}\n{line_.replace('train', 'no')}\n", "line 2.*split"),
        (head.replace("entropy_mean", "another") + "\n", "other features"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=match):
            read(path)


def test_tables_that_do_not_fit_are_refused() -> None:
    large = replace(WHOLE, stage="large", index=1)
    for records, match in (
        ([WHOLE, replace(large, label=None)], "is not judged"),
        ([WHOLE, replace(large, set="other")], "'other'"),
        ([WHOLE], "no train item"),
        ([WHOLE, replace(large, index=2)], "was 2, and here it is 1"),
        ([WHOLE, replace(large, split="held-out")], "held-out"),
    ):
        with pytest.raises(Unsupported, match=match):
            table(records, STAGES, "train")
    with pytest.raises(Unsupported, match="no held-out item"):
        table([WHOLE, large], STAGES, "held-out")
