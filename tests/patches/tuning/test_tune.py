"""`fastspec.tune`: which launches are tried, which is chosen by a clock, what is kept and who uses it. In Triton's
interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.models import tiny_head, tiny_model
from typer.testing import CliRunner

import fastspec
from fastspec import files
from fastspec.errors import FastSpecError, Unsupported
from fastspec.kernels import tuned_launches
from fastspec.kernels.attention import few_queries, tree
from fastspec.kernels.attention.launches import TreeLaunch
from fastspec.kernels.launch import padded
from fastspec.kernels.linear import linear
from fastspec.kernels.linear.launches import HopperLaunch, RowLaunch
from fastspec.kernels.linear.linear import Launch
from fastspec.kernels.quantised import launches as stored
from fastspec.kernels.quantised.launches import StoredKind, StoredLaunch, StoredRowLaunch, place_of
from fastspec.kernels.quantised.reference import E4M3, INT8, NF4, PACKED4
from fastspec.kernels.tuned_launches import MISSING
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.patches.hf.layer_weights import pack_model
from fastspec.patches.session import session_of
from fastspec.patches.tuning import candidates, store, tune
from fastspec.programs.cli.app import app

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the interpreter is off: see test_tune_gpu.py"
)
CPU, HALF = torch.device("cpu"), torch.float16
ROW = ("linear", (1, 48, 64, HALF), (1, 48, 64, HALF))
SMALL = fastspec.Eagle3(depth=1, top_k=2, total_tokens=4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and nothing tuned."""
    monkeypatch.setenv(files.SETTING, str(tmp_path))
    for module, name in ((store, "_loaded"), (tuned_launches, "_launches")):
        monkeypatch.setattr(module, name, {})
    return tmp_path


@pytest.fixture
def clock(monkeypatch):
    """Seconds by launch, 1 for those that are not named; MISSING is the table's own."""
    seconds: dict[Any, float] = {}
    monkeypatch.setattr(tune, "seconds_of", lambda run, copies, device: seconds.get(run.args[0], 1.0))
    monkeypatch.setattr(candidates, "COPIES_OF", 0)
    monkeypatch.setattr(tune, "call_times", lambda *given: [1.0])
    return seconds


def one(op: str, place: Any, about: Any, launches: Any = None) -> Any:
    made = candidates.trial(op, place, about, CPU)
    return made if launches is None else replace(made, launches=tuple(launches))


PLACES = {
    "a row": (*ROW, RowLaunch),
    "rows": ("linear", (16, 48, 128, HALF), (5, 48, 128, HALF), Launch),
    "a gated row": ("gate_up", (1, 32, 64, HALF), (1, 32, 64, HALF), RowLaunch),
    "gated rows": ("gate_up", (16, 32, 64, HALF), (5, 32, 64, HALF), Launch),
    "parts": ("linear_parts", (16, 48, 512, HALF), (5, 48, 512, HALF), Launch),
    "few queries": ("few_attention", (HALF, 16, 2, 1, 64), (1, 1, 4, 2, 16, 40, True, HALF), TreeLaunch),
    **{
        f"stored, {name}": (op, place_of(*about), about, StoredLaunch)
        for name, (op, about) in {
            "a row of bytes": (
                "stored",
                (1, (48, 16), 160, HALF, StoredKind(INT8, (1, 0), torch.float32, None, 0, True)),
            ),
            "rows of fp8": (
                "stored",
                (5, (48,), 256, HALF, StoredKind(E4M3, (16, 128), torch.float32, None, 0, False)),
            ),
            "gates of 4 bits": (
                "stored_gate_up",
                (5, (32, 32), 128, HALF, StoredKind(PACKED4, (1, 32), HALF, torch.int32, 0, False)),
            ),
            "nested scales": ("stored", (20, (48,), 128, HALF, StoredKind(NF4, (1, 64), torch.uint8, None, 16, False))),
        }.items()
    },
    "a tree": ("tree_attention", (HALF, 16, 2, 64, 128), (1, 20, 4, 2, 16, 90, False, HALF), TreeLaunch),
}


@pytest.mark.parametrize("name", PLACES)
def test_every_launch_that_is_tried_computes_what_it_should(name):
    op, place, about, kind = PLACES[name]
    made = one(op, place, about)
    assert any(isinstance(launch, kind) for launch in made.launches) and len(set(made.launches)) == len(made.launches)
    wanted = made.reference()
    some = [each for each in made.launches if isinstance(each, kind)][:: max(1, len(made.launches) // 3)]
    assert tune.wrong(made, MISSING, wanted) is None
    wanted = made.run(MISSING, 0) if made.same_bits else wanted
    for launch in (made.launches[0], *some):
        assert tune.wrong(made, launch, wanted) is None


@pytest.mark.parametrize("name", PLACES)
def test_a_launch_is_used_where_it_was_tuned(name, monkeypatch):
    """What the place asks for is what a call asks for, and the launch that is there runs."""
    op, place, about, kind = PLACES[name]
    made = one(op, place, about)
    with tuned_launches.recorded() as asked:
        made.run(MISSING, 0)
    assert asked[op, place] == about
    odd = next(launch for launch in made.launches if isinstance(launch, kind))
    seen: list[Any] = []
    find = tuned_launches.find
    for module in (linear, stored, few_queries, tree):
        monkeypatch.setattr(module, "find", lambda *given: seen.append(find(*given)) or seen[-1])
    made.run(odd, 0)
    assert odd in seen and tuned_launches.installed("cpu") == {}


def test_the_fastest_that_is_right_is_chosen(clock):
    good, better, spoiled = RowLaunch(2, 16, 1), RowLaunch(4, 16, 1), RowLaunch(8, 16, 1)
    made = one(*ROW, launches=[good, better, spoiled, "no launch"])
    clock.update({good: 0.7, better: 0.5, spoiled: 0.1})
    run = made.run
    made = replace(made, run=lambda launch, copy: run(launch, copy) + (launch is spoiled))
    found = tune.tune_place(made, CPU)
    assert (found.launch, found.kept, found.best_us, found.before_us) == (better, True, 5e5, 1e6)
    assert found.tried == 4 and len(found.refused) == 2
    assert "off, by up to 1" in found.refused[0] and "no launch" in found.refused[1]


def test_a_launch_of_stored_weights_keeps_every_bit(clock):
    """A result that rounding would allow is refused."""
    op, place, about, _ = PLACES["stored, rows of fp8"]
    made, near = one(op, place, about), StoredLaunch(2, 2)
    run = made.run
    made = replace(made, run=lambda launch, copy: run(launch, copy) * (1 + 2.0**-10 * (launch == near)))
    clock.update({near: 0.1, StoredLaunch(3, 8): 0.5})
    found = tune.tune_place(made, CPU)
    assert found.launch == StoredLaunch(3, 8) and found.tried == 15
    assert found.refused == (f"{near}: its bits are others than those of the launch that is used now",)


def test_heads_in_8_bits_ask_for_launches():
    model = tiny_model(num_hidden_layers=1).half()
    fastspec.patch(model, backend="triton", eagle3=tiny_head(model).half(), head_bits=8)
    with tuned_launches.recorded() as asked:
        model.generate(**prompts(3), max_new_tokens=3, do_sample=False, assistant=SMALL, eos_token_id=None)
    of_head = [(op, place, about) for (op, place), about in asked.items() if op.startswith("stored")]
    assert {op for op, *_ in of_head} == {"stored", "stored_gate_up"}
    for op, place, about in of_head:
        assert HALF in place and candidates.bytes_of(op, about) > 0
        made = one(op, place, about)
        assert tune.wrong(made, MISSING, made.reference()) is None


@pytest.mark.parametrize(("seconds", "kept"), [(0.97, True), (0.99, False), (1.2, False)])
def test_a_gain_within_noise_changes_nothing(seconds, kept, clock):
    launch = RowLaunch(2, 16, 1)
    clock[launch] = seconds
    found = tune.tune_place(one(*ROW, launches=[launch]), CPU)
    assert (
        found.kept == kept
        and found.launch == (launch if kept else None)
        and found.best_us == 1e6 * (seconds if kept else 1)
    )


def test_a_launch_in_use_that_is_wrong_is_an_error(clock):
    made = one(*ROW, launches=[])
    with pytest.raises(FastSpecError, match=r"linear .* is wrong with the launch that is used now: .* off"):
        tune.tune_place(replace(made, run=lambda launch, copy: made.run(launch, copy) + 1), CPU)


def patched() -> Any:
    model = tiny_model(num_hidden_layers=1).half()
    return fastspec.patch(model, backend="triton")


@pytest.fixture
def few_launches(monkeypatch):
    """One launch to try at a place."""
    monkeypatch.setattr(candidates, "_of_rows", lambda op, rows, *rest: [RowLaunch(2, 16, 1)] if rows == 1 else [])
    monkeypatch.setattr(candidates, "_of_parts", lambda *given: [])
    trial = candidates.trial

    def fewer(*given: Any) -> Any:
        made = trial(*given)
        return replace(made, launches=made.launches[:2])

    monkeypatch.setattr(candidates, "trial", fewer)
    monkeypatch.setattr(tune, "warmup", lambda model, rows, length: short(model))


def short(model: Any) -> Any:
    return model.generate(
        **prompts(3), max_new_tokens=2, do_sample=False, assistant="autoregressive", eos_token_id=None
    )


def test_a_model_is_tuned_and_later_processes_use_it(clock, few_launches, folder, monkeypatch):
    model, told = patched(), []
    assert fastspec.report(model).tables == "portable"
    expected = short(model).tolist()
    clock[RowLaunch(2, 16, 1)] = 0.5
    found = fastspec.tune(model, told=lambda *counts: told.append(counts))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] == len(found.places) > 4 and found.left == 0
    kept = [each for each in found.places if each.kept]
    assert kept and all(each.op in ("linear", "gate_up", "linear_parts") and each.shape[0] == 1 for each in kept)
    assert f"{len(kept)} of {len(found.places)} launches replaced" in str(found) and "RowLaunch(channels=2" in str(
        found
    )
    assert fastspec.report(model).tables == "tuned" and "launch tables: tuned" in str(fastspec.report(model))
    assert short(model).tolist() == expected
    [path] = folder.rglob("*.json")
    assert (
        path == found.path
        and str(torch.__version__) in path.name
        and len(json.loads(path.read_text())["launches"]) == len(kept)
    )
    for module, name in ((store, "_loaded"), (tuned_launches, "_launches")):  # another process
        monkeypatch.setattr(module, name, {})
    assert fastspec.report(patched()).tables == "tuned" and set(tuned_launches.installed("cpu").values()) == {
        RowLaunch(2, 16, 1)
    }
    done = CliRunner().invoke(app, ["tune", "--forget"])
    assert done.exit_code == 0 and f"removed {path}" in done.output and not path.exists()
    assert fastspec.report(model).tables == "portable" and not tuned_launches.installed("cpu")
    assert "nothing was tuned" in CliRunner().invoke(app, ["tune", "--forget"]).output


def test_launches_that_slow_calls_are_told_of_and_not_used(clock, few_launches, folder, monkeypatch):
    model = patched()
    clock[RowLaunch(2, 16, 1)] = 0.5
    monkeypatch.setattr(tune, "call_times", lambda *given: [1.0 + len(tuned_launches.installed("cpu"))])
    found = fastspec.tune(model)
    harmful = [each for each in found.places if each.harms]
    assert (
        harmful
        and not any(each.kept for each in found.places)
        and found.path is None
        and not list(folder.rglob("*.json"))
    )
    assert (
        "0 of" in str(found)
        and "500000.0 us are slower in calls" in str(found)
        and tuned_launches.installed("cpu") == {}
    )
    assert session_of(model).engines.held == {} and fastspec.report(model).tables == "portable"  # type: ignore[union-attr]


def test_other_places_stay_when_a_second_model_is_tuned(folder):
    first, second = ("linear", (1, 8, 8, HALF)), ("gate_up", (16, 8, 8, HALF))
    notes = {first: {"us": 1.0}, second: {"us": 2.0}}
    store.keep(CPU, {first: RowLaunch(2, 16, 1)}, notes)
    path = store.keep(CPU, {second: None}, notes)
    assert store.read_launches(path) == tuned_launches.installed("cpu") == {first: RowLaunch(2, 16, 1), second: None}
    kinds: dict[Any, Any] = {
        ("linear", (index,)): launch
        for index, launch in enumerate(
            [
                Launch(16, 128, 4, 4, tma=True),
                HopperLaunch(64, 128, 4, 2),
                Launch(64, 128, 4, 4, parts=2),
                StoredLaunch(3, 4),
                StoredRowLaunch(4, 128, 2),
                TreeLaunch(16, 32, 4, 2, 1),
                TreeLaunch(16, 32, 4, 2, 1, least=2),
            ]
        )
    }
    store.keep(CPU, kinds, {key: {} for key in kinds})
    assert store.read_launches(path).items() >= kinds.items()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"launches": [{"op": "linear"}]}',
        '{"launches": [{"op": "a", "place": 1, "launch": null}]}',
        '{"launches": 3}',
        '{"launches": [{"op": "a", "place": [], "launch": {"kind": "row", "size": 1}}]}',
    ],
)
def test_a_damaged_file_is_ignored_and_named(content, folder):
    path = store.path_of(CPU)
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match=rf"tuned/.*{path.suffix} cannot be read and is ignored"):
        assert store.use_tuned(CPU) == {}
    store.use_tuned(CPU)  # read once


def test_time_that_is_over_leaves_places(clock, few_launches):
    found = fastspec.tune(patched(), minutes=1e-9)
    assert len(found.places) == 1 and found.left > 3 and "places were left" in str(found)
    sizes = candidates.bytes_of(found.places[0].op, found.places[0].shape)
    assert sizes > 0 and found.path is None


def test_what_cannot_be_tuned_is_refused(clock):
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(Unsupported, match="not patched"):
        fastspec.tune(model)
    fastspec.patch(model, backend="torch")
    with pytest.raises(Unsupported, match="backend 'torch' has no launches to tune"):
        fastspec.tune(model)
    with pytest.raises(Unsupported, match="minutes=0"):
        fastspec.tune(patched(), minutes=0)
    assert fastspec.report(model).tables == "none" and "launch tables" not in str(fastspec.report(model))


@pytest.mark.parametrize(("name", "wanted"), [("NVIDIA H200", "shipped"), ("NVIDIA A100", "portable")])
def test_tables_are_shipped_where_they_were_measured(name, wanted, monkeypatch):
    monkeypatch.setattr(store, "name_of", lambda device: name)
    assert store.tables_of(triton_ops(), HALF, CPU) == wanted and store.tables_of(TORCH, HALF, CPU) == "none"


def test_a_head_s_shapes_are_asked_for_too():
    model = tiny_model(num_hidden_layers=3).half()
    pack_model(model)  # as patch does on CUDA
    fastspec.patch(model, eagle3=tiny_head(model).half(), backend="triton")
    with tuned_launches.recorded() as asked:
        model.generate(**prompts(3), max_new_tokens=2, do_sample=False, assistant=SMALL, eos_token_id=None)
    assert {op for op, _ in asked} == {"linear", "linear_parts", "gate_up", "few_attention"}
    assert all(
        place[0] in (1, *(padded(count) for count in range(2, 65))) for op, place in asked if op != "few_attention"
    )
    assert len({place[0] for op, place in asked if op == "linear"}) == 2
