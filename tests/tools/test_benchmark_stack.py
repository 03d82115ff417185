"""benchmarks/stack.py: the stack beside plain torch, what each way leaves out, and the rows."""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.patches.backends import TORCH, counted, triton_ops
from fastspec.programs.bench.device import versions

pytestmark = pytest.mark.slow  # of a script that is run by hand

ROOT = Path(__file__).parents[2]
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
LAYERS = 2
TINY = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 31, "bias": True}  # fmt: skip
OPS = {  # what is left out -> calls of a whole stack that are missing
    "attention": {"tree_attention": LAYERS}, "norms": {"rms_norm": 2 * LAYERS + 1}, "rope": {"rope_cache": LAYERS},
    "qkv": {"linear": LAYERS}, "out": {"linear": LAYERS}, "down": {"linear": LAYERS}, "head": {"linear": 1},
    "gate_up": {"gate_up": LAYERS},
}  # fmt: skip


@pytest.fixture(scope="module")
def stack():
    """The benchmark as a module, whose folder is on the path only while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("stack")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, int], int, int, int, int]:
    """A shape, batch, nodes, prefix and slots, of odd sizes."""
    kv_heads, size = draw(st.integers(1, 2)), draw(st.sampled_from([8, 16]))
    heads = kv_heads * draw(st.integers(1, 3))
    shape = {"hidden_size": heads * size, "intermediate_size": draw(st.integers(1, 65)), "num_hidden_layers": draw(st.integers(1, 2)),
             "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": draw(st.integers(2, 65)),
             "bias": draw(st.booleans())}  # fmt: skip
    prefix, nodes = draw(st.integers(0, 40)), draw(st.integers(1, 9))
    return shape, draw(st.integers(1, 2)), nodes, prefix, prefix + nodes + draw(st.integers(0, 9))


@examples(12)
@given(shapes(), st.integers(0, 2**31))
@torch.no_grad()
def test_the_stack_is_that_of_plain_torch(stack, drawn, seed: int) -> None:
    torch.manual_seed(seed)
    made = stack.make_stack(*drawn, DEVICE, DTYPE)
    got, want = (stack.step(ops, made).float() for ops in (triton_ops(), TORCH))
    assert got.shape == (drawn[1], drawn[2], drawn[0]["vocab_size"])
    stack.compare("the stack", got, want, stack.tolerance(made))


@pytest.mark.parametrize("name", OPS)
@torch.no_grad()
def test_what_is_left_out_is_not_called_and_all_else_is(stack, name: str) -> None:
    assert set(OPS) == set(stack.KERNELS)
    made = stack.make_stack(TINY, 1, 2, 7, 9, DEVICE, DTYPE)
    counts: dict[str | None, Counter[str]] = {None: Counter(), name: Counter()}
    outs = {left_out: stack.step(counted(TORCH, calls), made, left_out) for left_out, calls in counts.items()}
    assert counts[None] - counts[name] == Counter(OPS[name]) and not counts[name] - counts[None]
    assert name == "head" or (outs[name].shape == outs[None].shape and not torch.equal(outs[name], outs[None]))


def test_every_kernel_moves_the_output_beyond_the_tolerance(stack) -> None:
    """A stack in which some op had no say would pass with that op wrong."""
    torch.manual_seed(0)
    made = stack.make_stack(TINY, 1, 2, 7, 9, "cpu", torch.float32)
    want = stack.step(TORCH, made)
    for name in set(OPS) - {"head"}:
        with pytest.raises(ArithmeticError, match="allowed"):
            stack.compare(name, stack.step(TORCH, made, name), want, 100 * stack.tolerance(made))


def test_the_rows(stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stack.SHAPES, "tiny", TINY)
    switches = []
    measure = stack.measure

    def watched(run, times):
        switches.append((stack.launch.PDL, stack.launches.PDL))
        return measure(run, times)

    monkeypatch.setattr(stack, "measure", watched)
    path = tmp_path / "rows.jsonl"
    stack.main(["--shapes", "tiny", "--prefix", "7", "--nodes", "2", "--slots", "9", "--times", "1", "--out", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ways = [row["way"] for row in rows]
    committed = [json.loads(line) for line in (ROOT / "benchmarks/results/stack_h200.jsonl").read_text().splitlines()]
    assert len(ways) == len(set(ways)) == 3 + len(OPS) and set(ways) <= {row["way"] for row in committed}
    assert ways[:2] == ["base", "base no pdl"] and ways[-1] == "base again"
    assert switches == [((way != "base no pdl"),) * 2 for way in ways] and stack.launch.PDL and stack.launches.PDL
    for row in rows:
        assert set(row) == set(committed[0]) - {"code"} | {"nodes", *versions()}
        assert row["difference"] == (None if row["way"].startswith("without") else 0.0)
        assert math.isfinite(row["replay_ms"]) and row["replay_ms"] > 0
        assert (row["shape"], row["batch"], row["nodes"], row["prefix"], row["dtype"]) == ("tiny", 1, 2, 7, str(DTYPE)[6:])


def test_a_wrong_output_stops_it(stack) -> None:
    """Attention that is off by a thousandth is found beside plain torch, a product that is off from the second way on beside "base"."""
    torch.manual_seed(0)
    made = stack.make_stack(TINY, 1, 1, 7, 8, "cpu", torch.float32)
    wrong = replace(TORCH, tree_attention=lambda *operands: 1.001 * TORCH.tree_attention(*operands))
    with pytest.raises(ArithmeticError, match="plain torch"):
        next(stack.rows_of(wrong, made, [], 1))
    calls = []

    def drifting(x, weight, bias):
        calls.append(x)
        return TORCH.linear(x, weight, bias) * (1 + (len(calls) > 3 * (3 * LAYERS + 1)) * 1e-3)  # a pass to compare, two of "base"

    with pytest.raises(ArithmeticError, match='"base no pdl" beside "base"'):
        list(stack.rows_of(replace(TORCH, linear=drifting), made, [], 1))
    assert stack.launch.PDL and stack.launches.PDL


@pytest.mark.parametrize(
    "words",
    [
        "--prefix 9 --slots 9", "--prefix 9 --nodes 3 --slots 11", "--nodes 0", "--prefix=-1", "--times 0", "--batch 0", "--without rms",
        "--shapes mixtral-8x7b",
    ],
)
def test_what_does_not_fit_is_refused(stack, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stack.main(words.split())
    assert "error" in capsys.readouterr().err
