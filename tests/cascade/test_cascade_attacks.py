"""Code that means harm: it cannot say that it passed, and what it starts, writes and reaches is bounded.

The attacks on the verdict know how `fastspec.cascade.trial` works. Those that a sandbox is needed against run where one works.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from fastspec.cascade.sandbox import PROTECTION, command, sandbox, trouble
from fastspec.cascade.unit_tests import Limits, UnitTests, passes, passes_all
from fastspec.errors import Unsupported

QUICK = Limits(seconds=8)
WORKING = [kind for kind in PROTECTION if not trouble(kind)]
HALF = UnitTests("def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(8) == 4\ncheck(half)\n", "half")
WRONG = "def half(x):\n    return None\n"
SERVED = "import sys\nsys.modules['__main__'].Served.reply = "
REPLY = '["value", ["int", "0x2"], []]'
FORGED = {
    "status": "import os\nos._exit(83)",
    "status in a call": "def half(x):\n    import os\n    os._exit(83)",
    "exit": "import sys\nsys.exit(0)",
    "equal to all": "class All:\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 0\nhalf = lambda x: All()",
    "a number equal to all": "class All(int):\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 0\nhalf = lambda x: All(7)",
    "a list of them": "class All(list):\n    __eq__ = lambda *_: True\n    __hash__ = None\nhalf = lambda x: All([1])",
    "builtins": WRONG + "import builtins\nbuiltins.exec = builtins.compile = builtins.AssertionError = lambda *_, **__: None",
    "trace": WRONG + "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)",
    "frames": WRONG + (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for name in list(frame.f_globals):\n"
        "        if name in ('run', 'limit'): frame.f_globals[name] = lambda *_, **__: None\n    frame = frame.f_back"
    ),
    "own test": WRONG + "def check(candidate): pass\nassert_ = True",
    "every descriptor": WRONG + (
        f"import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{{}}\\n' + b'{REPLY}\\n' * 9)\n    except OSError: pass"
    ),
    "no protocol": WRONG + SERVED + "lambda *_: ['call back', 99, []]",
    "no value": WRONG + SERVED + "lambda *_: ['value', ['eval', '2'], []]",
    "a handle of nothing": WRONG + SERVED + "lambda *_: ['value', ['handle', []], []]",
    "deep": WRONG + SERVED + "lambda s, _: s.line.writes.write(b'[' * 10**6 + b'\\n')",
    "an argument of the tests": WRONG + SERVED + "lambda *_: ['value', ['int', '2'], [[0, ['list', []]]]]",
    "its parent": WRONG + "import os, signal\nif os.getppid() > 1: os.kill(os.getppid(), signal.SIGKILL)",
}  # fmt: skip


@pytest.mark.parametrize("kind", WORKING)
def test_an_answer_cannot_say_that_it_passed(kind: str) -> None:
    answers = {"right": "def half(x):\n    return x // 2", **FORGED}
    start = time.monotonic()
    found = passes_all([(HALF, answer) for answer in answers.values()], allow_code_execution=True, limits=QUICK, sandbox=kind)
    assert [name for name, fine in zip(answers, found, strict=True) if fine] == ["right"]
    assert time.monotonic() - start < 60


MARK = "mark_4711"
LOOK = """
import gc, glob, os, sys
def half(x):
    wanted = "_".join(("mark", "4711")).encode()
    found = [type(each).__name__ for each in gc.get_objects() if each is not globals() and isinstance(each, (dict, list, tuple))
             and any(isinstance(one, str) and wanted.decode() in one for one in (each.values() if isinstance(each, dict) else each))]
    for path in [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/fd/*")]:
        try:
            if os.path.isfile(path) and wanted in open(path, "rb").read(1 << 20): found.append(path)
        except OSError: pass
    for maps in glob.glob("/proc/[0-9]*/maps"):
        if MEMORY and maps.split("/")[2] != str(os.getpid()):
            try:
                with open(maps) as lines, open(maps[:-4] + "mem", "rb") as memory:
                    for line in lines:
                        low, high = (int(each, 16) for each in line.split()[0].split("-"))
                        memory.seek(low)
                        if wanted in memory.read(min(high - low, 1 << 24)): found.append(maps)
            except (OSError, ValueError, OverflowError): pass
    open(PATH, "a").write(repr(found) + "\\n")
    return x // 2
"""


@pytest.mark.parametrize("kind", [kind for kind in WORKING if kind in ("none", "unshare")])
def test_the_tests_are_out_of_an_answers_reach(tmp_path: Path, kind: str) -> None:
    """Objects, frames, command lines, environments and descriptors; the memory of other processes where its user may not be root."""
    seen = tmp_path / "seen"
    memory = kind != "none" or os.getuid() != 0
    tests = UnitTests(f"'{MARK}'\n{HALF.tests}", "half")
    assert passes(
        tests, f"PATH, MEMORY = {str(seen)!r}, {memory}\n{LOOK}", allow_code_execution=True, limits=Limits(60), sandbox=kind
    )  # fmt: skip
    assert seen.read_text().split("\n") == ["[]", "[]", ""]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


DAEMONS = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(PATH, "a").write(f"{os.getpid()} {MARKED}\\n")
            time.sleep(60)
        os._exit(0)
while open(PATH, "a").tell() < 5 * 8: time.sleep(0.01)
def half(x): return x // 2
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_daemons_end_with_their_answer(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    answer = f"PATH, MARKED = {str(pids)!r}, 'daemon'\n{DAEMONS}"
    assert passes(HALF, answer, allow_code_execution=True, limits=QUICK, sandbox="none")
    started = [int(line.split()[0]) for line in pids.read_text().splitlines()]
    assert len(started) == 5 and not any(alive(pid) for pid in started)


@pytest.mark.skipif(sandbox() == "none", reason="no sandbox works here")
@pytest.mark.parametrize("kind", [kind for kind in WORKING if kind != "none"])
def test_a_sandbox_has_no_network(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        heard: list[object] = []
        thread = threading.Thread(target=lambda: heard.append(server.accept()))
        thread.start()
        dial = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)\n"
        assert not passes(UnitTests(""), dial, allow_code_execution=True, limits=QUICK, sandbox=kind)
        assert not heard
        assert passes(UnitTests(""), dial, allow_code_execution=True, limits=QUICK, sandbox="none")
        thread.join()


@pytest.mark.skipif("bubblewrap" not in WORKING, reason="needs bubblewrap")
def test_bubblewrap_keeps_the_files_as_they_are(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("as it was")
    home = os.path.expanduser("~")
    for act in (f"open({str(mark)!r}, 'w')", f"open({home + '/mark_4711'!r}, 'x') and 1 / 0", "open('/usr/mark_4711', 'w')"):
        assert not passes(UnitTests(""), act, allow_code_execution=True, limits=QUICK, sandbox="bubblewrap")
    assert mark.read_text() == "as it was" and not os.path.exists(home + "/mark_4711")
    assert passes(UnitTests(""), "open('own', 'w').write('x')", allow_code_execution=True, limits=QUICK, sandbox="bubblewrap")


def test_a_sandbox_that_is_asked_for_and_does_not_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="accepted are 'auto', 'bubblewrap'"):
        sandbox("chroot")
    trouble.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"'bubblewrap' does not work.*no bwrap in PATH"):
        passes(HALF, WRONG, allow_code_execution=True, sandbox="bubblewrap")
    broken = tmp_path / "nsjail"
    broken.write_text("#!/bin/sh\necho no namespaces >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(Unsupported, match=r"'nsjail'.*status 3: no namespaces"):
        sandbox("nsjail")
    assert sandbox() == "none" and command("none") == []
    trouble.cache_clear()


FAIR = {
    "a class of the answer": UnitTests(
        "assert total(root) == 3\nassert root.left.value == 2\nroot.left.value = 5\nassert total(root) == 6", "total",
        setup="root = Node(1)\nroot.left = Node(2)",
    ),
    "a function of the tests": UnitTests("assert apply(lambda x: [x, x], 3) == [3, 3]\nassert apply(len, 'ab') == 2", "apply"),
    "changed in place": UnitTests(
        "x = [3, 1, 2]\nassert order(x) is None and x == [1, 2, 3]\nd = {}\nfill(d)\nassert d == {1: (2.5, None)}", "order"
    ),
    "generators": UnitTests("assert list(steps(3)) == [0, 1, 2]\nassert next(steps(1)) == 0 and sum(steps(4)) == 6", "steps"),
    "errors": UnitTests("try:\n    fails(1)\nexcept KeyError:\n    pass\nelse:\n    assert False", "fails"),
    "modules and numbers": UnitTests(
        "assert math.isclose(tenth(), 0.1)\nassert exact() == Fraction(1, 3)", "tenth", setup="from fractions import Fraction"
    ),
    "a builtin's name": UnitTests("assert sum(2, 3) == 6 and max([1, 2]) == 2", "sum"),
    "a helper of the context": UnitTests(
        "def check(f):\n    assert twice(f(2)) == 8\ncheck(square)", "square",
        context="def twice(x):\n    return 2 * x\n\ndef square(x):\n    '''x * x'''\n",
    ),
}  # fmt: skip
FAIR_ANSWER = """
import math
from fractions import Fraction
class Node:
    def __init__(self, value): self.value, self.left = value, None
def total(node): return 0 if node is None else node.value + total(node.left)
def apply(f, x): return f(x)
def order(x): x.sort()
def fill(d): d[1] = (2.5, None)
def steps(n): yield from range(n)
def fails(x): return {}[x]
def tenth(): return 0.3 - 0.2
def exact(): return Fraction(1, 3)
def square(x): return x * x
def sum(a, b): return a * b
def max(x): return 0
"""


@pytest.mark.parametrize("name", FAIR)
def test_what_fair_answers_and_tests_exchange(name: str) -> None:
    assert passes(FAIR[name], FAIR_ANSWER, allow_code_execution=True, limits=QUICK)
