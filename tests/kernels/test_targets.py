"""Every kernel compiles for the GPUs that people have, and fits what they have of shared memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastspec.kernels import launch

SCRIPT = Path(__file__).parents[1] / "compile_targets.py"
TARGETS = [80, 86, 89, 90, 100, 120]
TRITON = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")


FITS = 86, "8B", "linear, 8 rows"
ORDERED = 90, "mixers", "route, one of 64"
BEHIND = 90, "135M", "ordered product, 61 rows"
NORM, NORM_OF_SUM = (90, "8B", "rms_norm, 61 rows"), (90, "8B", "reduced_norm in order, 61 rows")
PARTS = [(capability, "135M,mixers", f"{part}/48") for part, capability in enumerate((80, 90, 120))]
LACKING = (
    ("135M", "linear_parts, 61 rows"),
    ("135M", "topk_expand of logits"),
    ("8B", "tree_attention, 61 rows, 16384"),
    ("8B", "ordered product, 480 rows"),
    ("8B", "ordered attention, chain, 61 rows"),
    ("8B", "ordered attention, long chain, 61 rows"),
    ("8B", "ordered attention, long text, 61 rows"),
    ("8B", "ordered attention, long text in one share, 61 rows"),
    ("mixers", "delta_tree, 61 rows"),
    ("135M", "stored product of 4 bits by order, 61 rows"),
    ("135M", "stored product of int8 on sums, 1 rows"),
    ("mixers", "experts in MXFP4, 16 rows"),
)
"""Launches of kernels that no part has."""
Job = tuple[int | str, str, str]


def rows_of(*jobs: Job) -> list[list[dict]]:
    """What the script prints of each job; in a process of its own, since Triton's interpreter is on in this one."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "FASTSPEC_PORTABLE")
    }
    environment["PYTHONPATH"] = str(SCRIPT.parents[1])
    given = "\n".join(
        json.dumps([str(capability), shape, *([only] if only else [])]) for capability, shape, only in jobs
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-"], env=environment, input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[dict]] = [[]]
    for line in done.stdout.splitlines():
        if line:
            found[-1].append(json.loads(line))
        else:
            found.append([])
    assert found.pop() == [] and len(found) == len(jobs)
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[Job, list[dict]]:
    """The rows of all that the fast suite compiles, by one process: torch and Triton are imported once."""
    jobs = [FITS, ORDERED, BEHIND, NORM, NORM_OF_SUM, *PARTS]
    return dict(zip(jobs, rows_of(*jobs), strict=True))


def check(rows: list[dict]) -> None:
    """All launches compile, within the shared memory that is there, and keep at most 288 bytes of a thread's registers
    in memory; those of a tree of more than 4,096 candidates, which few ask for, up to 1,536, and those of runs of long
    texts, which add up all of them, up to 352 on 12.0."""
    most = dict.fromkeys((f"tree_build, {count} candidates" for count in (5000, 16384)), 1536)
    folded = "ordered attention, long text in one share"
    most |= {row["op"]: 352 for row in rows if row["op"].startswith(folded) and row["capability"] == 120}
    assert rows and not [row for row in rows if "error" in row]
    assert not [row for row in rows if row["shared"] > row["limit"]]
    assert not [row for row in rows if row["stack"] > most.get(row["op"], 288)]


@TRITON
def test_a_product_fits_the_smallest_device(compiled):
    """One launch of the fast suite: its table's six stages would take 120 KiB."""
    rows = compiled[FITS]
    check(rows)
    assert [row["kernel"] for row in rows] == ["_linear_kernel"] and rows[0]["shared"] <= launch.LEAST_SHARED


@TRITON
def test_the_choice_of_one_expert_keeps_the_order_of_groups(compiled):
    """Where nothing but reductions read a tensor that was reshaped Triton lays it out as it likes, places of a maximum
    or not."""
    (row,) = compiled[ORDERED]
    assert row["kernel"] == "_route" and "error" not in row


@TRITON
def test_the_norm_of_a_sum_in_order_adds_up_squares_as_a_norm_does(compiled):
    """By threads that have the same of a row's values: else processes would give rows other bits by their number."""
    (norm,), (of_sum,) = compiled[NORM], compiled[NORM_OF_SUM]
    assert len(norm["squares"]) == 1 and norm["squares"] == of_sum["squares"]


@TRITON
def test_a_product_is_written_where_no_warp_still_reads(compiled):
    """Tensor cores read shared memory until they are waited for, by each warp for itself."""
    (row,) = compiled[BEHIND]
    assert row["kernel"] == "_hopper_linear" and "error" not in row


@TRITON
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_some_kernels_compile_for_a_device_of_each_kind(compiled, part):
    """Some of every fifth launch of an op, for one device or another: neighbours are one kernel with more rows and the
    like. `make test-targets` compiles every kernel for each device, the slow suite every launch."""
    check(compiled[part])


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
def test_every_kernel_compiles_for_each_device(capability):
    """Every fifth launch, and the kernels that these lack: CI runs this by `make test-targets`."""
    made = rows_of((capability, "135M,mixers", "0/1"), *((capability, shape, only) for shape, only in LACKING))
    for rows in made:
        check(rows)
    assert len({row["kernel"] for rows in made for row in rows}) == (
        64 if capability == 90 else 59
    )  # as the whole of the launches has


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["8B", "135M", "mixers"])
@pytest.mark.parametrize("capability", TARGETS)
def test_every_kernel_compiles_for_every_device(capability, shape):
    (rows,) = rows_of((capability, shape, ""))
    check(rows)
    assert len({row["kernel"] for row in rows}) >= (8 if shape == "mixers" else 20)


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("only", ["8 rows", "topk_expand", "tree_build", "frontier", "pairs"])
def test_kernels_compile_for_amd(only):
    """Those of a round of SmolLM2's shape; nothing is known of their speed there, nor whether they are right. The sum
    over NVLink and the norm behind it are written in NVIDIA's instructions."""
    (rows,) = rows_of(("gfx942", "135M", only))
    rows = [row for row in rows if not row["op"].startswith(("reduced_norm", "look_up", "all_gather", "likeliest"))]
    assert rows and not [row for row in rows if "error" in row or row["shared"] > row["limit"]]


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
def test_a_pipeline_has_the_stages_that_fit(monkeypatch, limit):
    """Never fewer than two, never more than the table's, and each of those that fit."""
    monkeypatch.setattr(launch, "shared_memory", lambda device: limit)
    for stages in (2, 3, 6):
        for stage in (1 << 10, 20480, 40 << 10, 120 << 10):
            got = launch.stages_within(stages, stage, None)
            assert got == stages or (got == 2 < stages) or (got * stage <= limit - 2048 < (got + 1) * stage)
