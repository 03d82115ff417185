"""By what answers were judged: nothing is judged by agreement unasked, and what was written says how it was judged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_training import small_target, small_tokenizer
from typer.testing import CliRunner

from fastspec.cascade import records
from fastspec.cascade.labels import KEY_FIELDS
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.sandbox import PROTECTION
from fastspec.errors import Unsupported
from fastspec.programs.cli.app import app
from fastspec.programs.training.cascade_answers import check_execution, judge, read_items, read_sets


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(name: str, count: int, **key: Any) -> list[dict[str, Any]]:
    return [{"id": f"{name}-{at}", "turns": [f"w{5 + at % 90} w6"], **key} for at in range(count)]


def test_a_reference_in_words_is_no_key_and_agreement_must_be_asked_for(tmp_path: Path) -> None:
    rows = [*asked("n", 2, answer="7"), *asked("r", 3, reference=["A poem about the sea."])]
    path = write(tmp_path / "bench.jsonl", rows)
    with pytest.raises(Unsupported, match=rf"bench.jsonl: 3 of 5 items, such as 'r-0'.*{re.escape(KEY_FIELDS)}.*--agreement") as refused:
        read_sets([path])
    assert "`answer`" in str(refused.value) and "`choices`" in str(refused.value)
    assert [item.key is None for item in read_sets([path], agreement=True)] == [False] * 2 + [True] * 3
    assert len(read_sets([path], 2)) == 2


def record(item: str, index: int, answer: str, **more: Any) -> records.Record:
    stage = ("small", "large")[index]
    return records.Record(item, "bench", "train", stage, index, 3, answer, 4, 0, True, 1.0, 1.0, None, (0.5,), 0, **more)


def test_labels_that_were_made_in_another_way_are_made_anew(tmp_path: Path) -> None:
    """A file judged by agreement, judged again with keys: no label of before is left."""
    path = tmp_path / "answers.jsonl"
    held = [record(item, index, "7" if (item, index) == ("a", 0) else "8") for item in "ab" for index in range(2)]
    with records.Writer(path, ("one",)) as writer:
        for each in held:
            writer.add(each)
    bare = read_items(write(tmp_path / "bench.jsonl", [{"id": item, "prompt": "?"} for item in "ab"]))
    assert judge(path, bare, threshold=1.0, allow_code_execution=False) == {"bench": "agreement with large (F1 of at least 1)"}
    assert [each.label for each in records.read(path).records] == [0.0, 1.0, 1.0, 1.0]
    keyed = read_items(write(tmp_path / "bench.jsonl", [{"id": "a", "prompt": "?", "answer": "7"}, {"id": "b", "prompt": "?"}]))
    told = judge(path, keyed, threshold=1.0, allow_code_execution=False)
    assert told == {"bench": "a number: 1 items, agreement with large (F1 of at least 1): 1 items"}
    found = records.read(path).records
    assert [each.label for each in found] == [1.0, 0.0, 1.0, 1.0]
    assert {each.judged for each in found} == {"a number", "agreement with large (F1 of at least 1)"}


def test_files_of_before_are_read_and_judged_anew(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with records.Writer(path, ("one",)) as writer:
        writer.add(record("a", 1, "8"))
    head, line = path.read_text().splitlines()
    row = {**json.loads(line), "label": 1.0}
    del row["judged"]
    path.write_text(f"{head}\n{json.dumps(row)}\n")
    assert records.read(path).records[0].judged is None
    keyed = read_items(write(tmp_path / "bench.jsonl", [{"id": "a", "prompt": "?", "answer": "7"}]))
    judge(path, keyed, threshold=1.0, allow_code_execution=False)
    assert records.read(path).records[0].label == 0.0


def test_train_and_evaluate_say_by_set_how_answers_were_judged(tmp_path: Path) -> None:
    for name in ("small", "large"):
        small_target(peak=0.3).save_pretrained(tmp_path / name)
        small_tokenizer().save_pretrained(tmp_path / name)
    words = [f"w{at}" for at in range(4, 20)]
    first = write(tmp_path / "first.jsonl", asked("n", 36, answer=words))
    second = write(tmp_path / "second.jsonl", asked("r", 36, reference="some words"))
    arguments = [
        "cascade", "train", "--stage", f"small={tmp_path}/small", "--model", f"large={tmp_path}/large", "--prompts", str(first),
        "--prompts", str(second), "--out", f"{tmp_path}/p.safetensors", "--answers", f"{tmp_path}/answers.jsonl",
        "--max-new-tokens", "6", "--batch", "36", "--report", f"{tmp_path}/report.jsonl",
    ]  # fmt: skip
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1 and "36 of 36 items" in refused.output and not (tmp_path / "answers.jsonl").exists()
    emitted = CliRunner().invoke(app, [*arguments, "--agreement"])
    assert emitted.exit_code == 0, emitted.output
    lines = ["first: judged by a reference text", "second: judged by agreement with large (F1 of at least 0.5)"]
    assert all(line in emitted.output for line in lines)
    told = "first: a reference text; second: agreement with large (F1 of at least 0.5)"
    assert Predictor.load(tmp_path / "p.safetensors").place["judged"] == told
    found = CliRunner().invoke(
        app, ["cascade", "evaluate", "--predictor", f"{tmp_path}/p.safetensors", "--answers", f"{tmp_path}/answers.jsonl",
              "--out", f"{tmp_path}/rows.jsonl"],
    )  # fmt: skip
    assert found.exit_code == 0 and all(line in found.output for line in lines)
    for name in ("report", "rows"):
        assert {json.loads(line)["judged"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()} == {told}


def test_running_code_is_asked_for_before_anything_is_computed(tmp_path: Path) -> None:
    rows = [{"id": "m", "prompt": "Add.", "test_list": ["assert add(1, 2) == 3"]}]
    path = write(tmp_path / "mbpp.jsonl", rows)
    with pytest.raises(Unsupported, match=r"mbpp: items with unit tests.*--allow-code-execution"):
        check_execution(read_sets([path]), False)
    assert check_execution(read_sets([path]), True) in PROTECTION
    assert check_execution([], False) is None
    arguments = ["--stage", "small=/nowhere", "--model", "large=/nowhere", "--prompts", str(path), "--out", "p", "--answers", "a"]
    emitted = CliRunner().invoke(app, ["cascade", "train", *arguments])
    assert emitted.exit_code == 1 and "--allow-code-execution" in emitted.output and "/nowhere" not in emitted.output
