"""A program of kernels/quantised/row.py on the CPU: its statements on tensors of a program's threads, its PTX by numpy,
all threads one statement after the other. Gluon has no interpreter."""

from __future__ import annotations

import builtins
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastspec.kernels.quantised import row
from fastspec.kernels.quantised.conversions import pair_table
from fastspec.kernels.quantised.hopper import operands_of
from fastspec.kernels.quantised.reference import StoredWeight

Words = NDArray[Any]
Copy = tuple[Words, Words, Words]
"""Places in shared memory, the bytes that come there, and the warps that asked."""


class Memory:
    """Global memory, by bytes."""

    def __init__(self) -> None:
        self.octets = np.zeros(256, np.uint8)

    def pointer(self, tensor: Tensor | None) -> Pointer | None:
        """Where a tensor's copy begins."""
        if tensor is None:
            return None
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        at = len(self.octets)
        self.octets = np.concatenate([self.octets, raw, np.zeros(-len(raw) % 256, np.uint8)])
        return Pointer(self, torch.tensor(at), tensor.dtype)

    def read(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Values at addresses."""
        raw = np.stack([self.octets[at.numpy() + i] for i in range(dtype.itemsize)], -1)
        return torch.from_numpy(raw).view(dtype)[..., 0]


class Pointer:
    """Addresses of values of a dtype."""

    def __init__(self, memory: Memory | None, at: Tensor, dtype: torch.dtype) -> None:
        self.memory, self.at, self.dtype = memory, at, dtype

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.at + torch.as_tensor(places).long() * self.dtype.itemsize, self.dtype)

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.at.to(dtype)


class Whole(int):
    """A number of a kernel, whose comparisons have dtypes."""

    def to(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor(int(self), dtype=dtype)

    def __add__(self, other: int) -> Whole:
        return Whole(int(self) + other)

    def __lt__(self, other: int) -> Whole:  # type: ignore[override]
        return Whole(int(self) < int(other))

    def __gt__(self, other: int) -> Whole:  # type: ignore[override]
        return Whole(int(self) > int(other))


def _wide(words: Words) -> list[Words]:
    """Two numbers of bf16 of each word, float64."""
    return [((words >> np.uint32(at) & np.uint32(0xFFFF)) << np.uint32(16)).view(np.float32) for at in (0, 16)]


def _fma16(a: Words, b: Words, c: Words) -> Words:
    made = [
        torch.from_numpy(x.astype(np.float64) * y + z).bfloat16().view(torch.int16).numpy().astype(np.uint16)
        for x, y, z in zip(_wide(a), _wide(b), _wide(c), strict=True)
    ]
    return made[0].astype(np.uint32) | made[1].astype(np.uint32) << np.uint32(16)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    octets = np.stack([each >> np.uint32(8 * i) & np.uint32(255) for each in (a, b) for i in range(4)])
    out = np.zeros_like(a)
    for i in range(4):
        octet = octets[selector >> np.uint32(4 * i) & np.uint32(7), np.arange(len(a))]
        is_sign = (selector >> np.uint32(4 * i) & np.uint32(8)) > 0  # in every bit of the byte
        out |= np.where(is_sign, octet // 128 * 255, octet).astype(np.uint32) << np.uint32(8 * i)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out, said = np.zeros_like(a), int(table[0])
    for i in (i for i in range(8) if said >> i & 1):
        out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _floats(op: Callable[..., Words]) -> Callable[..., Words]:
    """An operation on the fp32 numbers of words, computed in float64 and rounded."""
    return lambda *words: (
        op(*(word.view(np.float32).astype(np.float64) for word in words)).astype(np.float32).view("u4")
    )


OPS: dict[str, Callable[..., Any]] = {
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "or.b32": np.bitwise_or,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mad.wide.u32": lambda a, b, c: a.astype(np.int64) * b + c,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma16,
    "fma.rn.f32": _floats(lambda a, b, c: a * b + c),
    "mul.rn.f32": _floats(np.multiply),
    "add.rn.f32": _floats(np.add),
    "setp.lt.u32": np.less,
    "setp.ge.u32": np.greater_equal,
    "setp.eq.u32": np.equal,
    "setp.ne.u32": np.not_equal,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view("u4"),
}


ALL, NONE = -1, -2
"""Warps that may read a byte of shared memory, where that is no single one."""


class Threads:
    """Threads of a program and their shared memory, which begins as bytes that nobody may read.

    What a warp stores the others may read after the next barrier of all. Where a copy comes nobody may read from when
    it is asked for until its group was waited for and a barrier followed; its warp may then, and all after a barrier of
    all.
    """

    def __init__(self, count: int, memory: Memory, shared: int) -> None:
        self.count, self.memory, self.shared = count, memory, np.full(shared, 0xEE, np.uint8)
        self.warp, self.reader = np.arange(count) // 32, np.full(shared, NONE)
        self.asked: list[Copy] = []
        """Copies of the group that is not committed yet."""
        self.groups: deque[list[Copy]] = deque()
        """Committed groups, the oldest first; as the threads' predicates are on copies alone, all have the same."""
        self.waited: list[Copy] = []

    def load(self, at: Words) -> Words:
        assert (at % 4 == 0).all() and (at >= 0).all() and (at + 4 <= len(self.shared)).all()
        reader, own = self.reader.reshape(-1, 4)[at // 4], self.warp.reshape(at.shape)[..., None]
        assert ((reader == ALL) | (reader == own)).all(), "a thread reads what it has not waited for"
        words: Words = self.shared.view(np.uint32)[at // 4]
        return words

    def ask(self, into: Words, of: Words, warp: Words) -> None:
        """Ask for copies of 16 bytes from global memory, by threads of these warps."""
        assert (into % 16 == 0).all() and (of % 16 == 0).all()
        for i in range(16):
            self.shared[into + i], self.reader[into + i] = 0xEE, NONE
            self.asked.append((into + i, self.memory.octets[of + i], warp))

    def wait(self, left: int) -> None:
        """Wait for all groups but so many."""
        assert left >= 0 and len(self.groups) <= left + 1, "more than the oldest stage is waited for"
        while len(self.groups) > left:
            self.waited += self.groups.popleft()

    def meet(self, of_all: bool) -> None:
        """A barrier of each warp, or of all."""
        for into, octets, warp in self.waited:
            self.shared[into], self.reader[into] = octets, warp
        self.waited = []
        if of_all:
            self.reader[self.reader != NONE] = ALL

    def store(self, at: Words, words: Words, warp: Words) -> None:
        assert (at % 4 == 0).all() and (at + 4 <= len(self.shared)).all()
        assert len(np.unique(at)) == len(np.unique(np.stack((at, words)), axis=1).T), (
            "threads store two words in a place"
        )
        self.shared.view(np.uint32)[at // 4] = words
        self.reader.reshape(-1, 4)[at // 4] = warp[:, None]

    def run(self, program: str, outs: int, given: Sequence[Words]) -> list[Words]:
        """What a program makes of its operands, which come behind its outputs."""
        held = {f"${outs + i}": words for i, words in enumerate(given)} | {
            "global_smem": np.zeros(self.count, np.uint32)
        }

        def value(name: str) -> Words:
            if name in held:
                return held[name]
            number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
            return np.full(self.count, number & 0xFFFFFFFF, np.uint32)

        def place(name: str) -> Words:
            of, _, more = name.strip("[]").partition("+")
            return value(of).astype(np.int64) + int(more or 0)

        left, is_left = dict[str, Words](), np.zeros(self.count, bool)
        program = re.sub(r"\.reg [^;]*;", "", program.strip())
        for line in re.sub(r"^\{|\}$", "", program).split(";"):
            if line.strip().startswith("DONE: "):  # where threads that were left behind go on
                held |= {name: np.where(is_left, words, held[name]) for name, words in left.items()}
            found = re.match(r"(?:@(\w+) )?(\S+) ?(.*)", line.strip().removeprefix("DONE: "))
            if found is None:
                continue
            _, op, rest = found.groups()
            is_on = held[found[1]] if found[1] else np.ones(self.count, bool)
            names = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            several = [re.findall(r"[^{},\s]+", name) for name in names]
            if op == "bra":
                left, is_left = dict(held), is_on
            elif op in OPS:
                held[names[0]] = OPS[op](*map(value, names[1:]))
            elif op.startswith("mov") and len(several[0]) == 2:
                held |= {name: value(names[1]) >> np.uint32(16 * i) for i, name in enumerate(several[0])}
            elif op.startswith("mov"):
                held[names[0]] = value(names[1]).copy()
            elif op.startswith("ld.shared"):
                held |= {name: self.load(place(names[1]) + 4 * i) for i, name in enumerate(several[0])}
            elif op.startswith("ld.global"):
                for i, name in enumerate(several[0]):
                    at = torch.from_numpy(np.where(is_on, place(names[1]) + 4 * i, 0))
                    words = self.memory.read(at, torch.int32).numpy().view("u4")
                    held[name] = np.where(is_on, words, held.get(name, words))
            elif op.startswith("st.shared"):
                for i, name in enumerate(several[1]):
                    self.store((place(names[0]) + 4 * i)[is_on], value(name)[is_on], self.warp[is_on])
            elif op.startswith("cp.async.cg"):
                self.ask(place(names[0])[is_on], place(names[1])[is_on], self.warp[is_on])
            elif op == "cp.async.commit_group":
                self.groups.append(self.asked)
                self.asked = []
            elif op == "cp.async.wait_group":
                self.wait(int(names[0]))
            elif op.startswith("ldmatrix"):
                rows, lane = place(names[1]).reshape(-1, 4, 8), np.arange(32)
                for i, name in enumerate(several[0]):
                    held[name] = self.load(rows[:, i][:, lane // 4] + lane % 4 * 4).reshape(-1)
            elif op.startswith("mma.sync"):
                self.multiply(held, several, value)
            else:
                assert op in ("bar.warp.sync", "bar.sync")
                self.meet(op == "bar.sync")
        return [held[f"${i}"] for i in range(outs)]

    def multiply(self, held: dict[str, Words], names: list[list[str]], value: Callable[[str], Words]) -> None:
        """mma.m16n8k16 of every warp, by PTX's places of its numbers."""
        lane, warps = np.arange(32), self.count // 32
        g, t = lane // 4, lane % 4
        a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for half in range(2):
            for i, name in enumerate(names[1]):
                a[:, g + 8 * (i & 1), 2 * t + half + 8 * (i >> 1)] = _wide(value(name))[half].reshape(warps, 32)
            for i, name in enumerate(names[2]):
                b[:, 2 * t + half + 8 * i, g] = _wide(value(name))[half].reshape(warps, 32)
        for i, name in enumerate(names[3]):
            c[:, g + 8 * (i >> 1), 2 * t + i % 2] = value(name).view(np.float32).reshape(warps, 32)
        made = (a @ b + c).astype(np.float32)
        for i, name in enumerate(names[0]):
            held[name] = made[:, g + 8 * (i >> 1), 2 * t + i % 2].reshape(-1).view("u4")


def stored_row(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None], form: row.RowForm
) -> Tensor:
    """`row.stored_row` by all its programs, of x [1, K]: [M]."""
    memory, kind = Memory(), weights[0].kind
    operands = []
    for weight, bias in zip(weights, biases, strict=True):
        whole = operands_of(weight, bias)
        fields = whole._replace(offset=None if whole.offset is None else whole.offset.reshape(1))._asdict()
        operands.append(
            SimpleNamespace(
                **{name: memory.pointer(each) if isinstance(each, Tensor) else each for name, each in fields.items()}
            )
        )
    channels = sum(weight.shape[0] for weight in weights)
    out = torch.full((channels // form.gates,), float("nan"), dtype=x.dtype)
    p_x, table = memory.pointer(x), memory.pointer(pair_table(kind, x.dtype, x.device)) if kind.table else None
    threads: Threads
    program = 0

    def assembly(text: str, how: str, given: Sequence[Any], dtype: Any, pure: bool, pack: int) -> Any:
        words = [torch.as_tensor(each).expand(threads.count).numpy() for each in given]
        words = [each.copy().view("u4") if each.itemsize == 4 else each for each in words]
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        made = threads.run(text, how.count("="), words)
        tensors = tuple(torch.from_numpy(each).view(kind) for each, kind in zip(made, kinds, strict=True))
        return tensors if isinstance(dtype, tuple) else tensors[0]

    def store(place: Pointer, values: Tensor, mask: Tensor) -> None:
        out[place.at[mask] // 2] = values[mask]

    def counted(*ends: int) -> Iterator[Whole]:
        return map(Whole, builtins.range(*ends))

    language = SimpleNamespace(
        arange=lambda first, last, layout: torch.arange(first, last, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        minimum=lambda a, most: a.clamp(max=most),
        where=torch.where,
        exp=torch.exp,
        load=lambda place: memory.read(place.at, place.dtype),
        store=store,
        program_id=lambda axis: program,
        static_range=counted,
        inline_asm_elementwise=assembly,
        allocate_shared_memory=lambda *given: SimpleNamespace(
            index=lambda at: SimpleNamespace(store=lambda values: None), _keep_alive=lambda: None
        ),
        **dict.fromkeys(("BlockedLayout", "SwizzledSharedLayout"), lambda *given: None),
        **{name: getattr(torch, name) for name in ("int16", "int32", "int64", "float32", "bfloat16")},
    )
    space = {"gl": language, "range": counted, "_fp32": lambda place: memory.read(place, torch.float32)}
    for name in ("_of", "_row_stored"):
        source = inspect.getsource(getattr(row, name).fn).partition("def ")[2]
        source = source.replace(".to(gl.int16, bitcast=True)", ".view(gl.int16)")
        exec("from __future__ import annotations\ndef " + source, space)
    steps = Whole(form.depth * form.bits // 8 // form.shares // form.size)
    for tile in range(channels // (16 * form.gates)):
        program = tile
        threads = Threads(32 * form.gates * form.shares, memory, form.shared)
        space["_row_stored"](p_x, operands, Pointer(None, torch.tensor(0), x.dtype), steps, table, form, False)
    return out
