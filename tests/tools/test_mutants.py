"""`make mutants`: what is drawn, by which tests it is tried, and how a run that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.mutant_tests import Ran, chosen
from helpers.mutants import Mutant, drawn, mutants_of
from mutants import LIST, Listed, Result, digest, faults, listing, page, run_all, source_of, sources_of, verdict

SOURCE = '''"""A module."""
LEAST = 2


def grown(x: int | None, more: list[int], *, by: int = 1) -> int:
    """What x grows to."""
    if x is None or not more:
        raise ValueError(f"{x} or {more}: at least {1 + 1}")
    total = sum(each for each in more if each >= LEAST)
    more.append(total)
    return other(x + by, last=True)


class Kept:
    def take(self, x: int) -> None:
        self.x = -x
'''
CHANGED = [
    ("module", "LEAST = 2", "LEAST = 3"),
    ("grown", "by: int = 1", "by: int = 2"),
    ("grown", "if x is None or not more:", "if (not (x is None or not more)):"),
    ("grown", "if x is None or not more:", "if (x is None and (not more)):"),
    ("grown", "if x is None or not more:", "if (x is not None) or not more:"),
    ("grown", "if x is None or not more:", "if x is None or (more):"),
    ("grown", "if each >= LEAST", "if (not (each >= LEAST))"),
    ("grown", "if each >= LEAST", "if (each > LEAST)"),
    ("grown", "more.append(total)", "pass"),
    ("grown", "return other(x + by, last=True)", "return None"),
    ("grown", "return other(x + by, last=True)", "return (other(x + by))"),
    ("grown", "return other(x + by, last=True)", "return other((x - by), last=True)"),
    ("grown", "return other(x + by, last=True)", "return other(x + by, last=False)"),
    ("Kept.take", "self.x = -x", "pass"),
    ("Kept.take", "self.x = -x", "self.x = (x)"),
]


def test_every_place_is_changed_but_errors_annotations_and_texts() -> None:
    found = mutants_of("a.py", SOURCE)
    assert len({mutant.key for mutant in found}) == len(found)
    said = [
        (mutant.function or "module", *(each.strip() for each in mutant.key.split(": ", 2)[2].split(" => ")))
        for mutant in found
    ]
    missing = [
        row for row in CHANGED if not any(row[0] == name and row[1] in old and row[2] in new for name, old, new in said)
    ]
    assert not missing and len(found) == len(CHANGED)
    for mutant in found:
        compile(mutant.applied(SOURCE), "a.py", "exec")
        assert mutant.applied(SOURCE).count("\n") == SOURCE.count("\n")


def parted(name: str) -> tuple[str, str]:
    """The file and the function of a test."""
    file, _, test = name.partition("::")
    return file, test


def test_every_mutant_of_the_listed_modules_is_python() -> None:
    pytest.importorskip("tomllib", reason="Python 3.10 has none")
    listed = listing()
    sources = sources_of(listed.modules, LIST.parents[1])
    mutants = drawn(sources, listed.count, listed.seed)
    assert len(mutants) == listed.count
    assert all(f"def {test}(" in (LIST.parents[1] / file).read_text() for file, test in map(parted, listed.always))
    for mutant in mutants:
        compile(mutant.applied(sources[mutant.module]), mutant.module, "exec")
    with pytest.raises(ValueError, match="no file under fastspec/"):
        sources_of(["nothing/*.py"], LIST.parents[1])


def test_a_change_elsewhere_draws_no_others() -> None:
    sources = {"a.py": SOURCE, "b.py": SOURCE * 3}
    before = drawn(sources, 8, 0)
    assert [sum(mutant.module == name for mutant in before) for name in sources] == [2, 6]
    moved = drawn({**sources, "a.py": "# A line more.\n" + SOURCE}, 8, 0)
    assert [mutant.key for mutant in moved] == [mutant.key for mutant in before]
    assert {mutant.key for mutant in drawn(sources, 8, 1)} != {mutant.key for mutant in before}


def ran(seconds: float, *lines: int) -> Ran:
    return Ran(seconds, {"a.py": sum(1 << line for line in lines)})


def asked(key: str, tests: dict[str, Ran], texts: dict[str, str] | None = None, **more: str) -> list[str]:
    mutant = next(each for each in mutants_of("a.py", SOURCE) if key in each.key)
    return chosen(mutant, tests, {"a.py": SOURCE, **more}, texts or {})


def test_tests_are_those_that_run_the_line_one_case_of_each_first() -> None:
    tests = {
        "t.py::slow": ran(9, 5, 7, 10),
        "t.py::many[a]": ran(1, 10),
        "t.py::many[b]": ran(2, 10),
        "t.py::quick": ran(3, 10),
        "t.py::function": ran(0.1, 7),
        "t.py::module": ran(0.1, 2),
        "t.py::other": ran(0, 40),
        "u.py::nothing": Ran(0, {}),
    }
    ranked = ["t.py::many[a]", "t.py::quick", "t.py::slow", "t.py::many[b]", "t.py::function"]
    assert asked("more.append", tests) == ranked
    # No further than the seconds that are spent.
    assert asked("more.append", {**tests, "t.py::slow": ran(88, 10)}) == ranked[:2]
    assert asked("more.append", {"t.py::slow": ran(100, 10)}) == ["t.py::slow"]
    assert asked("more.append", {}) == []


def test_every_file_gives_a_test_in_turn_and_those_that_name_what_is_changed_come_first() -> None:
    tests = {f"t.py::{index}": ran(index, 10) for index in range(1, 4)}
    tests |= {"u.py::slow": ran(9, 10), "v.py::slow": ran(8, 10)}
    spread = ["t.py::1", "v.py::slow", "u.py::slow", "t.py::2", "t.py::3"]
    assert asked("more.append", tests) == spread
    assert asked("more.append", tests, {"t.py": "outgrown(1)", "u.py": "assert grown(1)"}) == [
        "u.py::slow",
        *(name for name in spread if name != "u.py::slow"),
    ]


def test_a_special_method_goes_by_the_name_of_its_class() -> None:
    source = "class Grown:\n    def __init__(self) -> None:\n        self.size = 2\n"
    mutant = next(mutant for mutant in mutants_of("a.py", source) if "2 => self.size = 3" in mutant.key)
    tests = {f"{file}.py::test": Ran(seconds, {"a.py": 1 << 3}) for seconds, file in enumerate("tuv")}
    texts = {"t.py": "class Other: def __init__", "u.py": "", "v.py": "Grown()"}
    assert chosen(mutant, tests, {"a.py": source}, texts)[0] == "v.py::test"


def test_what_stands_outside_of_functions_is_tried_by_tests_that_run_its_readers() -> None:
    tests = {f"t{line}.py::a": ran(1, line) for line in (2, 5, 7, 9, 10)}
    assert asked("LEAST = 2", tests)[0] == "t9.py::a"  # line 9 compares with it, line 2 is run by an import
    tests["b.py::a"] = Ran(0.5, {"b.py": 1 << 1})
    assert asked("LEAST = 2", tests, **{"b.py": "print(LEAST)"})[:2] == ["b.py::a", "t9.py::a"]
    assert asked("by: int = 2", tests)[:3] == ["t10.py::a", "t7.py::a", "t9.py::a"]  # a default: those of its body


def test_a_row_of_a_table_is_tried_by_the_cases_that_name_it_first() -> None:
    source = """FIRST = 1
ROWS = {
    "first": FIRST,
    "second": row(
        kind="this",
        by=2,
    ),
}


def row(name: str) -> int:
    return ROWS[name]
"""
    mutant = next(each for each in mutants_of("rows.py", source) if "by=3" in each.key)
    read = Ran(1.0, {"rows.py": 1 << 12})
    tests = {"t.py::a[first]": read, "t.py::b": read, "u.py::a[second]": read, "v.py::c": read, "w.py::d[this]": read}
    missed = {f"t.py::{index}": Ran(0.1, {"rows.py": 1 << 1}) for index in range(9)}
    assert chosen(mutant, tests, {"rows.py": source}, {"v.py": 'row("second")'}) == [
        "u.py::a[second]",
        "w.py::d[this]",
        "v.py::c",
        "t.py::a[first]",
        "t.py::b",
    ]
    reading = {"v.py": 'row("second")', "x.py": 'def test_a():\n    ROWS["second"]\ndef test_b():\n    ROWS["first"]'}
    tests |= {f"x.py::test_{each}": Ran(0.1, {}) for each in "ab"}  # of the table itself, which runs no line
    assert chosen(mutant, tests, {"rows.py": source}, reading)[:2] == ["x.py::test_a", "u.py::a[second]"]
    naming = {"w.py": "from fastspec.rows import row"}  # the case of a file that names the module
    assert chosen(mutant, tests, {"rows.py": source}, naming)[:2] == ["w.py::d[this]", "u.py::a[second]"]
    first = next(each for each in mutants_of("rows.py", source) if "FIRST = 2" in each.key)
    assert chosen(first, {"t.py::b": read, **missed}, {"rows.py": source}, {})[0] == "t.py::b"  # the table's reader


def jobs(source: str = SOURCE) -> list[tuple[Mutant, list[str], str]]:
    return [(mutant, ["t.py::a"], digest(source)) for mutant in mutants_of("a.py", source)[:6]]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    path, tried = tmp_path / "held" / "results.jsonl", []
    texts = {"t.py": "def a(): ...", "u.py": ""}

    def attempt(mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        tried.append(mutant.key)
        return ("lived", "") if "LEAST" in mutant.key else ("failed", "t.py")

    def again(tests: list[str], source: str | None = None, **changed: str) -> list[str]:
        tried.clear()
        run_all([(mutant, tests, source or own) for mutant, _, own in jobs()], path, attempt, texts | changed)
        return sorted(tried)

    keys = [mutant.key for mutant, *_ in jobs()]
    lived = [key for key in keys if "LEAST" in key]
    run_all(jobs()[:2], path, attempt, texts)
    path.write_text(path.read_text() + '{"key": "half a li')
    with path.open("a") as out:
        out.write("\n")
    results = run_all(jobs(), path, attempt, texts)
    assert sorted(tried) == sorted(keys) and list(results) == keys
    assert {results[key].outcome for key in lived} == {"lived"}
    assert again(["t.py::a"]) == [] == again(["t.py::a"], **{"u.py": "another"})
    assert again(["t.py::a", "t.py::b"]) == lived  # another test may kill what lived
    assert again(["t.py::a", "t.py::b"], **{"t.py": "another"}) == sorted(keys)  # and one that killed may not
    assert again(["t.py::a"], "another") == sorted(keys)
    run_all([(mutant, [], "another") for mutant, _, _ in jobs()[:1]], path, attempt, {"t.py": "another"})
    assert json.loads(path.read_text().splitlines()[-1])["outcome"] == "untested"


@pytest.mark.parametrize(
    ("code", "said", "wanted"),
    [
        (0, "1 passed", ("lived", "")),
        (1, "FAILED tests/t.py::test_a - assert 0", ("failed", "tests/t.py")),
        (2, "ERROR tests/t.py", ("failed", "tests/t.py")),
        (4, "ERROR: not found: tests/t.py::test_a", ("error 4", "")),
        (4, "ImportError while loading conftest 'tests/conftest.py'.", ("failed", "")),
        (-11, "", ("failed", "")),
        (None, "", ("timeout", "")),
    ],
)
def test_what_pytest_ends_with_is_a_verdict(code: int | None, said: str, wanted: tuple[str, str]) -> None:
    assert verdict(code, said) == wanted


def test_a_verdict_stands_while_the_function_is_the_same() -> None:
    inside, outside = (
        next(each for each in mutants_of("a.py", SOURCE) if key in each.key) for key in ("-x", "LEAST =")
    )
    assert source_of(inside, {"a.py": SOURCE}) == "    def take(self, x: int) -> None:\n        self.x = -x"
    assert source_of(outside, {"a.py": SOURCE}) == SOURCE.rstrip("\n")


def test_survivors_need_a_reason_and_nine_in_ten_are_killed() -> None:
    mutants = mutants_of("a.py", SOURCE)[:10]
    results = {mutant.key: Result(mutant.key, "failed", 1.0, "", "", 3) for mutant in mutants}
    lived = mutants[4].key
    assert not faults(Listed(0, 10, []), mutants, results)
    results[lived].outcome = "lived"
    assert faults(Listed(0, 10, []), mutants, results) == [f"lived without a reason: {lived}"]
    listed = Listed(0, 10, [], [], {lived: "both are the same number"})
    assert not faults(listed, mutants, results)
    text = "\n".join(page(listed, mutants, results))
    assert (
        "10 of them were tried so far, 9 of these killed: 90.0%" in text
        and f"the same number (lived, 3 tests)\n  `{lived}`" in text
    )
    results[mutants[0].key].outcome = "untested"
    assert len(faults(listed, mutants, results)) == 2  # one without a reason, and too few
    results[mutants[0].key].outcome = results[lived].outcome = "timeout"
    assert faults(listed, mutants, results) == [f"has a reason, and is killed: {lived}"]
