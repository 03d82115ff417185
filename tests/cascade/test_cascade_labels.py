"""Is an answer acceptable: keys and prompts from rows, extraction, agreement, unit tests that run a model's code; and which
items are held out."""

from __future__ import annotations

import math
import os
import re
import time
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

import pytest
from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.cascade.labels import (
    LETTERS,
    METRICS,
    Key,
    accepts,
    agreement,
    chosen,
    key_of,
    label,
    label_all,
    normalise,
    number,
    prompt_of,
)
from fastspec.cascade.records import split
from fastspec.cascade.unit_tests import Limits, UnitTests, called, codes_of, passes, passes_all
from fastspec.errors import Unsupported

CHOICE = {
    "id": "c/0", "category": "x", "question": "Question: Which body is a star?", "choices": ["A comet.", "The Sun", "The Moon", "Mars"],
    "answer": 1, "answer_letter": "B", "prompt": "Question: Which ...\nA. A comet.\nAnswer:",
}  # fmt: skip
SUM = {"id": "n/0", "category": "math", "prompt": "What is 40 + 2?", "reference": "40 + 2 = <<40+2=42>>42\n#### 42"}
HUMAN = {
    "id": "h/0", "prompt": 'import math\n\ndef half(x: int) -> int:\n    """Half of x, rounded down."""\n', "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(8) == 4\n", "reference": "    return x // 2\n",
}  # fmt: skip
MBPP = {
    "id": "m/0", "text": "Write a function to add two numbers.", "prompt": "Write ...", "test_setup_code": "two = 2",
    "test_list": ["assert set([add(1, two)]) == {3}", "assert add(2, two) == 4"],
}  # fmt: skip
FREE = {"id": "f/0", "turns": ["Write a poem.", "Shorten it."], "reference": ["Roses ...", "..."]}
QUICK = Limits(seconds=5)


def in_code(text: str) -> str:
    return f"Here it is:\n\n```python\n{text}\n```\nIt works."


@given(
    value=st.decimals(min_value=-(10**9), max_value=10**9, allow_nan=False, places=2),
    commas=st.booleans(), sign=st.sampled_from(["", "$", "\\$", "€"]),
    form=st.sampled_from([
        "The answer is {}.", "{}", "We get 3 apples and 4,5 pears, so **{}**", "7 - 4 = 3\n#### {}", "x = $\\boxed{{{}}}$ of 12 cases",
        "#### {}\n\nSo there are 7 in 1 box.", "It costs {} dollars.", "{}%", "(12:30) -> {}!", "10.5 and then {}\n", "so...{}",
    ]),
)  # fmt: skip
@settings(deadline=None)
def test_number_is_found_in_every_form(value: Decimal, commas: bool, sign: str, form: str) -> None:
    digits = f"{abs(value):,}" if commas else f"{abs(value)}"
    written = ("-" if value.is_signed() else "") + sign + digits
    assert number(form.format(written)) == value


@given(st.text(alphabet="0123456789.,-+eE$%# \n\\boxed{}ab", max_size=30))
@settings(deadline=None)
def test_number_takes_any_text(text: str) -> None:
    found = number(text)
    assert found is None or found.is_finite()
    # A digit that is no part of a word makes a number.
    assert found is not None or not re.search(r"(?<![A-Za-z0-9_])[0-9]", text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10-5", 5), ("- 5", 5), ("-5", -5), ("5.", 5), ("0.50", Decimal("0.5")), (".5", Decimal("0.5")), ("12kg", 12), ("about x2", None),
     ("1, 2,3", 3), ("1{,}000", 1000), ("#### Step 1\nSo 42", 42), ("\\boxed{\\text{no}} 7", 7), ("", None), ("so...42", 42),
     ("\u22123", -3), ("2e3", 2000), ("\\boxed{1} or \\boxed{2} of 3", 2)],
)  # fmt: skip
def test_number_by_hand(text: str, value: object) -> None:
    assert number(text) == value


def test_numbers_are_compared_exactly() -> None:
    key = key_of(SUM)
    assert key == Key("number", ("42",))
    assert accepts(key, "42.00") and not accepts(key, "42.000000000000000000001") and not accepts(key, "none")


def plain_choices() -> st.SearchStrategy[list[str]]:
    """Choices whose texts are words of their own: none contains another, a letter, or a negation."""
    words = ["comet", "the moon", "planet x7", "12", "3.5", "12.5", "red giant", "dwarf star", "a black hole"]
    return st.lists(st.sampled_from(words), min_size=2, max_size=6, unique=True)


FORMS = ["{l}", "({l})", "{l}.", " {l})", "**{l}**", "{l}. {t}", "{l}: {t}", "{l}) {t}", "({l}) {t}", "**{l}. {t}**", "The answer is {l}.",
         "The answer is {l}. {t}", "the correct answer is: ({l})", "Answer: {l}", "The correct option is {l}", "$\\boxed{{{l}}}$",
         "{l}\n\nExplanation: it is so.", "Let us think. It shines.\n\n{l}", "I would choose option {l} here", "{l} because it shines",
         "{l} - {t}", "Because it shines, the answer is {l}, which is right.", "My choice: {l}", "`{l}`", "\"{l}\"",
         "{t}", "{t}.", "The answer is {t}.", "The answer is: {t}", "It must be {t}, I think."]  # fmt: skip


@given(choices=plain_choices(), form=st.sampled_from(FORMS), data=st.data())
@settings(deadline=None)
def test_choice_is_found_in_every_form(choices: list[str], form: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(choices) - 1))
    assert chosen(form.format(l=LETTERS[place], t=choices[place]), choices) == LETTERS[place]


@given(choices=plain_choices(), data=st.data())
@settings(deadline=None)
def test_two_choices_are_none(choices: list[str], data: st.DataObject) -> None:
    one, two = data.draw(st.permutations(range(len(choices))))[:2]
    a, b, form = LETTERS[one], LETTERS[two], data.draw(st.integers(0, 8))
    text = [
        f"{a} or {b}", f"The answer is {a}. No, the answer is {b}.", f"The answer is {a} and {b}", f"{a}. {choices[two]}",
        f"({a}) or ({b})",
        f"{a}. {choices[one]}\n{b}. {choices[two]}", f"either {choices[one]} or {choices[two]}", f"The answer is {a}, {b}.",
        f"Option {a} is like option {b}",
    ][form]  # fmt: skip
    assert chosen(text, choices) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [("A planet, I think", None), ("a", "A"), ("b)", "B"), ("The answer is a planet", None), ("E", None), ("The answer is E.", None),
     ("", None), ("The answer is not B.", None), ("It is not the sun", None), ("the sun", "B"), ("I don't know", None), ("A comet.", "A"),
     ("The answer is A comet", "A"), ("Mars or rather the moon", None), ("C-level", None), ("A's", None)],
)  # fmt: skip
def test_choice_by_hand(text: str, letter: str | None) -> None:
    assert chosen(text, CHOICE["choices"]) == letter


@given(st.text(alphabet="ABCDabcd. ()*:\nors\\{}$'", max_size=24), plain_choices())
@settings(deadline=None)
def test_choice_takes_any_text(text: str, choices: list[str]) -> None:
    assert chosen(text, choices) in (None, *LETTERS[: len(choices)])


def test_equal_choices_are_ambiguous_by_text_alone_and_longer_ones_come_first() -> None:
    assert chosen("It must be the red giant star.", ["red", "red giant star", "red giant"]) == "B"
    assert chosen("same", ["same", "same", "other"]) is None
    assert chosen("B. same", ["same", "same", "other"]) == "B"


@given(st.lists(st.sampled_from(["sun", "moon", "u.s.", "dark-red"]), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_text_is_compared_normalised(words: list[str], data: st.DataObject) -> None:
    articles, forms = st.sampled_from(["", "the ", "A ", "an  "]), [str, str.upper, "{}!".format]
    dressed = " ".join(data.draw(articles) + data.draw(st.sampled_from(forms))(word) for word in words)
    key = Key("text", ("nothing of it", " ".join(words)))
    assert accepts(key, dressed) and not accepts(key, dressed + " more")
    assert normalise(normalise(dressed)) == normalise(dressed)


WORDS = st.lists(st.sampled_from("vwxyz"), max_size=7)


@given(WORDS, WORDS)
@settings(deadline=None)
def test_agreement_is_by_definition(one: list[str], two: list[str]) -> None:
    @lru_cache(None)
    def longest(i: int, j: int) -> int:
        if not i or not j:
            return 0
        if one[i - 1] == two[j - 1]:
            return 1 + longest(i - 1, j - 1)
        return max(longest(i - 1, j), longest(i, j - 1))

    rest, same = list(two), 0
    for word in one:
        if word in rest:
            rest.remove(word)
            same += 1
    total = len(one) + len(two)
    expected = {"f1": 2 * same / total if total else 1.0, "rouge_l": 2 * longest(len(one), len(two)) / total if total else 1.0}
    for metric in METRICS:
        assert agreement(" ".join(one), " ".join(two), metric) == expected[metric] == agreement(" ".join(two), " ".join(one), metric)


def test_label_without_a_key() -> None:
    # Three of four words agree on both sides: F1 = 2 * 3 / 8.
    assert [label(None, "w x y z", last="w x y v", threshold=at) for at in (0.75, 0.76)] == [1.0, 0.0]
    with pytest.raises(Unsupported, match="threshold"):
        label(None, "w", last="w")
    with pytest.raises(Unsupported, match="last"):
        label(None, "w", threshold=0.5)
    with pytest.raises(Unsupported, match="rouge_l"):
        agreement("w", "w", "bleu")


def test_keys_of_rows() -> None:
    assert key_of(CHOICE) == Key("choice", ("B",), tuple(CHOICE["choices"]))
    assert key_of({**CHOICE, "answer_letter": None}) == key_of(CHOICE)
    assert key_of({"id": "n", "prompt": "?", "answer": "1,800"}) == Key("number", ("1800",))
    assert key_of({"id": "s", "turns": ["?", "??"], "reference": ["so\n#### 7", "no"]}) == Key("number", ("7",))
    assert key_of({"id": "t", "prompt": "Who?", "answer": ["Bob", "Robert"]}) == Key("text", ("Bob", "Robert"))
    assert key_of(FREE) is None and key_of({"id": "r", "prompt": "Who?", "reference": "Bob"}) is None
    assert key_of({"id": "r", "prompt": "Who?", "reference": "Bob"}, kind="text") == Key("text", ("Bob",))
    tests = key_of(HUMAN).tests
    assert tests.entry_point == "half" and tests.context == HUMAN["prompt"] and tests.tests.endswith("check(half)\n")
    assert key_of(MBPP).tests.entry_point == "add" and key_of(MBPP).tests.setup == "two = 2"


@pytest.mark.parametrize(
    ("row", "kind", "match"),
    [({**CHOICE, "answer_letter": "E"}, None, "answer_letter"), ({"id": 1, "prompt": "?", "choices": ["x"]}, None, "choices"),
     ({"id": 1, "prompt": "?", "test": "x"}, None, "entry_point"), (FREE, "number", "no key"), (SUM, "numbers", "accepted"),
     ({**MBPP, "test_list": ["assert ("]}, None, "no Python"), ({"id": 1, "test": "x", "entry_point": "f"}, None, "nothing to ask")],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(row: dict, kind: str | None, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        key_of(row, kind)


def test_prompts() -> None:
    assert prompt_of(SUM) == 'What is 40 + 2?\n\nThink step by step and end with "The answer is N." where N is a number.'
    lettered = "A. A comet.\nB. The Sun\nC. The Moon\nD. Mars"
    assert prompt_of(CHOICE) == f"Which body is a star?\n{lettered}\n\nAnswer with the letter of the correct choice."
    whole = {**CHOICE, "question": f"Which body is a star?\n{lettered}\nAnswer:"}
    assert prompt_of(whole) == prompt_of(CHOICE)
    assert HUMAN["prompt"].strip() in prompt_of(HUMAN) and "one Python code block" in prompt_of(HUMAN)
    assert prompt_of(MBPP) == (
        "Write a function to add two numbers.\nYour code should pass these tests:\n\n"
        "assert set([add(1, two)]) == {3}\nassert add(2, two) == 4\n\nAnswer with the function in one Python code block."
    )
    assert prompt_of(FREE) == "Write a poem."
    assert prompt_of({"id": "t", "prompt": "Who?", "answer": "Bob"}).startswith("Who?\n\nAnswer in as few words")


def test_code_is_not_run_without_consent(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    answer = in_code(f"open({str(mark)!r}, 'w')\ndef half(x): return x // 2")
    tests = key_of(HUMAN).tests
    for call in (
        lambda: label(key_of(HUMAN), answer), lambda: passes(tests, answer), lambda: passes_all([(tests, answer)]),
        lambda: label_all([key_of(HUMAN)], [answer]), lambda: passes(tests, answer, allow_code_execution=1),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(Unsupported, match="allow_code_execution=True"):
            call()
    with pytest.raises(Unsupported, match="consent"):
        accepts(key_of(HUMAN), answer)
    assert not mark.exists()
    assert passes(tests, answer, allow_code_execution=True, sandbox="none") and mark.exists()


HALF = "def half(x):\n    return x // 2"
ANSWERS = {
    in_code(HALF): True,
    in_code("def half(x):\n    return math.floor(x / 2)"): True,  # the prompt's import
    HALF: True,
    f"Sure! Here it is:\n{HALF}\n": True,
    f"```python\n{HALF}": True,  # cut short
    f"```\nhalf(5)\n```\nor\n```py\n{HALF}\n```": True,
    "    return x // 2": True,
    "y = x // 2\n    return y": True,  # its first line's indentation is lost
    "y = x // 2\nreturn y": True,
    "TWO = 2\ndef half(x):\n    return x // TWO": True,
    "from __future__ import annotations\n" + HALF: True,
    "from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int\ndef half(x):\n    return D(x).x // 2": True,
    HALF + "\nif __name__ == '__main__':\n    print(input())": True,
    in_code("def half(x):\n    return x / 2"): False,
    in_code("def other(x):\n    return x // 2"): False,
    "I cannot do that.": False,
    "": False,
    HALF + "\nimport sys\nsys.exit(0)": False,
    HALF + "\nraise SystemExit": False,
    HALF + "\nimport os\nos._exit(0)": False,
    HALF + "\ninput()": False,  # no input
    "def half(x):\n    return half(x)": False,
    "x = '\ud800\x00": False,
}


def test_answers_are_judged_by_their_tests() -> None:
    tests = key_of(HUMAN).tests
    found = passes_all([(tests, answer) for answer in ANSWERS], allow_code_execution=True, limits=QUICK, workers=3)
    assert {answer for answer, fine in zip(ANSWERS, found, strict=True) if fine} == {answer for answer, fine in ANSWERS.items() if fine}


def test_tests_after_the_setup_and_mixed_keys() -> None:
    keys = [key_of(MBPP), key_of(SUM), None, key_of(MBPP)]
    answers = [in_code("def add(a, b):\n    return a + b"), "42", "x y", in_code("def add(a, b):\n    return a - b")]
    found = label_all(keys, answers, last=["", "", "x y", ""], threshold=1.0, allow_code_execution=True, limits=QUICK)
    assert found == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(Unsupported, match="do not match"):
        label_all(keys, answers[:3])
    with pytest.raises(Unsupported, match="workers"):
        passes_all([], allow_code_execution=True, workers=0)
    with pytest.raises(Unsupported, match="seconds"):
        Limits(seconds=0)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["while True: pass", "import os; os._exit(0)"])
def test_everything_that_was_started_is_killed(tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"
    child = (
        "import subprocess, sys, os\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}')\n"
    )
    start = time.monotonic()
    assert not passes(UnitTests("", "f"), child + end, allow_code_execution=True, limits=Limits(seconds=2), sandbox="none")
    assert time.monotonic() - start < 20
    pause = time.monotonic() + 10  # the signal is sent; the kernel may take a moment
    while any(alive(int(pid)) for pid in pids.read_text().split()) and time.monotonic() < pause:
        time.sleep(0.01)
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_the_process_gets_nothing_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSPEC_SECRET", "1")
    seen = tmp_path / "seen"
    look = f"import os, sys\nopen({str(seen)!r}, 'w').write(repr((sorted(os.environ), os.listdir('.'), os.getcwd(), sys.flags.isolated)))"
    assert passes(UnitTests(""), look, allow_code_execution=True, limits=QUICK, sandbox="none")
    names, entries, folder, isolated = eval(seen.read_text())
    assert set(names) <= {"PATH", "LC_CTYPE"} and entries == [] and isolated == 1  # Python sets LC_CTYPE itself in the C locale
    assert not os.path.exists(folder)
    big = "x = bytearray(1 << 29)"
    assert not passes(UnitTests(""), big, allow_code_execution=True, limits=Limits(20, 1 << 28))
    assert passes(UnitTests(""), big, allow_code_execution=True, limits=Limits(20, 1 << 31))
    assert not passes(UnitTests(""), "open('f', 'wb').write(bytes(1 << 22))", allow_code_execution=True, limits=QUICK)
    assert passes(UnitTests(""), "print('x' * (1 << 24))", allow_code_execution=True, limits=QUICK)


def test_there_is_no_input() -> None:
    """Even where the process that judges has some."""
    kept, (read, write) = os.dup(0), os.pipe()
    try:
        os.write(write, b"5\n")
        os.dup2(read, 0)
        assert not passes(UnitTests(""), "input()", allow_code_execution=True, limits=QUICK)
    finally:
        os.dup2(kept, 0)
        for each in (kept, read, write):
            os.close(each)


def test_several_run_at_a_time(tmp_path: Path) -> None:
    meet = "import os, time\nopen({0!r}, 'w').close()\nwhile not os.path.exists({1!r}): time.sleep(0.01)"
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    items = [(UnitTests(""), meet.format(one, two)), (UnitTests(""), meet.format(two, one))]
    assert passes_all(items, allow_code_execution=True, limits=Limits(30), workers=2, sandbox="none") == [True, True]


@given(st.text(max_size=40), st.sampled_from(["", "python", "py", "text"]))
@examples(50)
def test_a_block_is_taken_whole(text: str, tag: str) -> None:
    code = text.replace("`", "").replace("~", "")
    assert codes_of(f"Look:\n```{tag}\n{code}\n```\nDone.") == (code + "\n",)


def test_called() -> None:
    assert called("assert set(f(1)) == {g(2)}") == "f" and called("assert True") is None
    assert called("assert sum(1, 2) == 3") == "sum"
    assert called("import math\nassert math.isclose(f(1), 2)") == "f"


@given(st.text(max_size=12), st.integers(0, 9), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_split_is_fixed_and_grows_with_the_share(item: str, seed: int, one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert split(item, seed, 0.0) == "held-out" and split(item, seed, 1.0) == "train"
    assert (split(item, seed, low), split(item, seed, high)) != ("train", "held-out")
    with pytest.raises(Unsupported, match="share"):
        split(item, seed, 1 + one + 0.1)


def test_split_gives_about_the_share() -> None:
    # Recorded: a change of the hash would move items between the parts of data that exist.
    assert [split(f"gsm8k_test/{i}", 0, 0.5) for i in range(4)] == ["held-out", "held-out", "train", "held-out"]
    for seed in (0, 1):
        count = sum(split(f"item/{i}", seed, 0.3) == "train" for i in range(4000))
        assert abs(count - 1200) < 5 * math.sqrt(4000 * 0.3 * 0.7)  # five standard deviations of a binomial count
    assert any(split(f"item/{i}", 0, 0.5) != split(f"item/{i}", 1, 0.5) for i in range(20))
