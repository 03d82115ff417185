"""The processes that try a model's code: run as a script by `unit_tests`, with the standard library alone.

    python trial.py supervise    starts the other two, ends everything at the time limit, and tells the verdict by its exit status
        (a fork of it)           runs the unit tests; what they call of the answer is asked for over a pipe
    python trial.py answer       runs the answer, and answers calls; in a sandbox where there is one

The answer's process never sees a test, and only plain data comes back from it: numbers, texts, containers, and handles for everything else,
which equal nothing but themselves. So there is nothing in its reach that decides the verdict: it can say what its functions return, and no
more. The tests' process cannot be traced or read by others of the same user (`PR_SET_DUMPABLE`), and its parent reads its exit status.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import numbers
import os
import signal
import subprocess
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from typing import Any

PASSED, FAILED = 83, 1
LONGEST = 1 << 26
"""Bytes of one message."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16), "float": float.fromhex, "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
    "Decimal": Decimal, "Fraction": Fraction,
}  # fmt: skip
"""Kind of value -> what reads its text."""
CHANGED = (list, dict, set, bytearray, deque)
"""What a call can change in place, so that the caller sees it."""


def encode(value: Any, handle: Callable[[Any], list[Any]]) -> list[Any]:
    """A value as JSON: plain data by value, subclasses of it as such, everything else as `handle` says."""
    if value is None or isinstance(value, (bool, str)):
        return ["is", value if value is None or isinstance(value, bool) else str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytearray" if isinstance(value, bytearray) else "bytes", bytes(value).hex()]
    if isinstance(value, (Decimal, Fraction)):
        return [type(value).__name__, str(value)]
    if isinstance(value, numbers.Integral):
        return ["int", hex(int(value))]
    if isinstance(value, numbers.Real):
        return ["float", float(value).hex()]
    if isinstance(value, numbers.Complex):
        return ["complex", complex(value).real.hex(), complex(value).imag.hex()]
    if isinstance(value, range):
        return ["range", *map(hex, (value.start, value.stop, value.step))]
    if isinstance(value, dict):
        return ["dict", [[encode(key, handle), encode(each, handle)] for key, each in value.items()]]
    kind = next((name for name, made in CONTAINERS.items() if isinstance(value, made)), None)  # type: ignore[arg-type]
    return handle(value) if kind is None else [kind, [encode(each, handle) for each in value]]


def decode(told: list[Any], held: Callable[[str, Any], Any]) -> Any:
    """What `encode` made; `held` gives what a handle stands for. Nothing that is told is run."""
    kind, value = told[0], told[1]
    if kind in CONTAINERS:
        return CONTAINERS[kind]([decode(each, held) for each in value])
    if kind == "dict":
        return {decode(key, held): decode(each, held) for key, each in value}
    if kind in TEXTS:
        return TEXTS[kind](value)
    if kind == "complex":
        return complex(float.fromhex(value), float.fromhex(told[2]))
    if kind == "range":
        return range(*(int(each, 16) for each in told[1:]))
    if kind == "is" and (value is None or isinstance(value, (bool, str))):
        return value
    return held(kind, value)


class Line:
    """One end of a line to the other process: JSON messages. Raises EOFError where the other end is gone."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")

    def tell(self, message: Any) -> None:
        self.writes.write(json.dumps(message).encode() + b"\n")
        self.writes.flush()

    def hear(self) -> Any:
        line = self.reads.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError("the other process has ended, or its message is too long")
        return json.loads(line)


def answer() -> None:
    """Run an answer and do what the tests ask of it, until nobody asks any more."""
    control(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = Line(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nowhere, each)
    job = line.hear()
    limit(**job["limits"])
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    run(job["parts"], module.__dict__)
    Served(line).serve({name: module.__dict__[name] for name in job["names"] if name in module.__dict__})


class Served:
    """The values of an answer that the tests hold handles of."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.values: list[Any] = []

    def serve(self, names: dict[str, Any]) -> None:
        """Tell what the names are, then do what is asked."""
        self.line.tell({name: self.told(value) for name, value in names.items()})
        while True:
            self.line.tell(self.reply(self.line.hear()))

    def told(self, value: Any) -> list[Any]:
        return encode(value, self.handle)

    def handle(self, value: Any) -> list[Any]:
        place = next((at for at, each in enumerate(self.values) if each is value), len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return ["handle", place]

    def held(self, kind: str, value: Any) -> Any:
        return self.values[value] if kind == "handle" else lambda *given: self.call_back(value, given)

    def call_back(self, number: int, given: tuple[Any, ...]) -> Any:
        """Call a function of the tests."""
        self.line.tell(["call back", number, [self.told(each) for each in given]])
        while (heard := self.line.hear())[0] != "back":
            self.line.tell(self.reply(heard))
        return decode(heard[1], self.held)

    def reply(self, asked: list[Any]) -> list[Any]:
        try:
            what, place, *rest = asked
            return ["value", *getattr(self, f"do_{what}")(self.values[place], *rest)]
        except Exception as error:
            return ["raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:1000]]

    def do_call(self, value: Any, given: list[Any], named: dict[str, Any]) -> list[Any]:
        arguments = [decode(each, self.held) for each in given]
        found = self.told(value(*arguments, **{name: decode(each, self.held) for name, each in named.items()}))
        after = [(at, self.told(each)) for at, each in enumerate(arguments) if isinstance(each, CHANGED)]
        return [found, [[at, each] for at, each in after if each != given[at]]]

    def do_get(self, value: Any, name: str) -> list[Any]:
        return [self.told(getattr(value, name))]

    def do_set(self, value: Any, name: str, told: list[Any]) -> list[Any]:
        setattr(value, name, decode(told, self.held))
        return [self.told(None)]

    def do_of(self, value: Any, name: str, *given: list[Any]) -> list[Any]:
        """One of the operations that `Remote` hands over: a builtin or an index."""
        arguments: list[Any] = [decode(each, self.held) for each in given]
        return [self.told(value[arguments[0]] if name == "item" else getattr(builtins, name)(value))]


class Remote:
    """Something of the answer that is no plain data. It can be called, indexed and iterated, and equals nothing but itself: what an answer
    says of its own equality is no evidence."""

    def __init__(self, tests: Tests, place: int) -> None:
        self.__dict__.update(_tests=tests, _place=place)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._tests.call(self._place, given, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask(["get", self._place, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._tests.ask(["set", self._place, name, self._tests.told(value)])

    def __getitem__(self, key: Any) -> Any:
        return self._of("item", self._tests.told(key))

    def __iter__(self) -> Iterator[Any]:
        found = self._of("iter")
        while True:
            try:
                yield next(found)
            except StopIteration:
                return

    def _of(self, name: str, *told: Any) -> Any:
        return self._tests.ask(["of", self._place, name, *told])

    __next__, __len__, __bool__ = partialmethod(_of, "next"), partialmethod(_of, "len"), partialmethod(_of, "bool")
    __str__, __repr__ = partialmethod(_of, "str"), partialmethod(_of, "repr")


class Tests:
    """The unit tests' side of the line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.functions: list[Any] = []
        self.remotes: dict[int, Remote] = {}

    def run(self, job: dict[str, Any]) -> None:
        """Run an item's context, setup and tests; raises whatever a test raises."""
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        space = module.__dict__
        run([job["context"]], space)
        names = sorted(wanted(job["tests"]) - ({*space, *dir(builtins)} - {job["entry_point"]}))
        self.line.tell({"parts": job["parts"], "limits": job["limits"], "names": names})
        space.update({name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names})
        told = self.line.hear()
        space.update({name: decode(told[name], self.held) for name in names if name in told and name not in sys.stdlib_module_names})
        limit(**job["limits"])
        run([[each] for each in job["tests"]], space)

    def told(self, value: Any) -> list[Any]:
        return encode(value, self.handle)

    def handle(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["handle", value._place]
        if not callable(value):
            raise TypeError(f"{type(value).__name__} cannot be handed to the answer: it is neither plain data nor a function")
        self.functions.append(value)
        return ["function", len(self.functions) - 1]

    def held(self, kind: str, value: Any) -> Any:
        if kind != "handle" or not isinstance(value, int):
            raise EOFError("the answer's process told no value")
        return self.remotes.setdefault(value, Remote(self, value))

    def call(self, place: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        told = [self.told(each) for each in given]
        found, after = self.exchange(["call", place, told, {name: self.told(each) for name, each in named.items()}])
        for at, each in after:
            changed = decode(each, self.held)
            if type(changed) is not type(given[at]) or not isinstance(changed, CHANGED):
                raise EOFError("the answer's process told no change of an argument")
            given[at].clear()
            (given[at].update if isinstance(changed, (dict, set)) else given[at].extend)(changed)
        return decode(found, self.held)

    def ask(self, message: list[Any]) -> Any:
        return decode(self.exchange(message)[0], self.held)

    def exchange(self, message: list[Any]) -> list[Any]:
        """Ask for something -> what the other process found. Raises the builtin exception that was raised there, or one like it."""
        self.line.tell(message)
        while (heard := self.line.hear())[0] == "call back":
            found = self.functions[heard[1]](*(decode(each, self.held) for each in heard[2]))
            self.line.tell(["back", self.told(found)])
        if heard[0] == "value":
            return list(heard[1:])
        known = (getattr(builtins, name, None) for name in heard[1])
        kind = next((each for each in known if isinstance(each, type) and issubclass(each, Exception)), Exception)
        try:
            error = kind(heard[2])
        except TypeError:  # one that takes other arguments, such as UnicodeDecodeError
            error = Exception(heard[2])
        raise error


def wanted(sources: list[str]) -> set[str]:
    """The names that some Python reads."""
    trees = (ast.walk(ast.parse(source)) for source in sources)
    return {node.id for tree in trees for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def run(parts: list[list[str]], space: dict[str, Any]) -> None:
    """Run sources one after another, of each the first form that compiles."""
    for ways in parts:
        for place, source in enumerate(ways):
            try:
                code = compile(source, "answer", "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                if place + 1 == len(ways):
                    raise
            else:
                break
        exec(code, space)


def limit(seconds: float, memory: int, processes: int) -> None:
    """Bound this process: processor time, address space, files, and the user's processes."""
    import resource

    wanted_ = {"CPU": int(seconds) + 1, "FSIZE": 1 << 20, "CORE": 0, "NOFILE": 64, "NPROC": processes}
    wanted_ |= {} if sys.platform == "darwin" else {"AS": memory}
    for name, most in wanted_.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def control(option: int, value: int) -> None:
    """Linux's prctl; elsewhere there is none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def supervise() -> None:
    """Read a job, try it, end everything that was started, and exit with the verdict."""
    job = json.loads(sys.stdin.buffer.read())
    control(PR_SET_DUMPABLE, 0)
    control(PR_SET_CHILD_SUBREAPER, 1)  # what the answer leaves behind becomes a child of this process
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if not job["privileges"]:
        control(PR_SET_NO_NEW_PRIVS, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    verdict = FAILED
    try:
        verdict = attempt(job)
    finally:
        end_all()
        os._exit(verdict)


def attempt(job: dict[str, Any]) -> int:
    """The exit status of the tests, FAILED where they did not end in time."""
    deadline = time.monotonic() + job["limits"]["seconds"]
    process = subprocess.Popen(
        job["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    tests = os.fork()
    if tests == 0:
        status = FAILED
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            control(PR_SET_PDEATHSIG, signal.SIGKILL)
            Tests(Line(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))).run(job)
            status = PASSED
        finally:
            os._exit(status)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(tests, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return FAILED


def descendants() -> list[int]:
    """The processes below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
    found, edge = list[int](), {os.getpid()}
    while edge:
        edge = {process for process, parent in parents.items() if parent in edge}
        found += edge
    return found


def end_all() -> None:
    """Kill what was started, and what that started, until nothing is left; five seconds at most."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for process in descendants():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


if __name__ == "__main__":
    {"supervise": supervise, "answer": answer}[sys.argv[1]]()
