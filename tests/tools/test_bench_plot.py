"""The pictures of rows: every method and category of a bench, and the rows of other scripts, are drawn, whatever their
number."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.bench import BENCHMARKS, benchmark
from helpers.examples import examples
from hypothesis import Phase, given
from hypothesis import strategies as st

from fastspec.programs.bench.methods import PEERS

pytest.importorskip("matplotlib")
METHODS = (*PEERS, "autoregressive", "speculative", "nasd", "eagle", "eagle2", "eagle3", "someones-own")
WHERE = {"model": "m", "device": "cpu", "dtype": "float32", "threads": 2, "batch": 1, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def plot() -> Any:
    return benchmark("plot")


def row(method: str, category: str, speed: float) -> dict[str, Any]:
    counted = {
        "accepted_counts": [4, 1],
        "floor_share": 0.5,
        "peak_mib": None,
        "prefill_ms": 1.0,
        "phases_ms": {"score": 2.0},
    }
    figures = {
        "tokens_per_second": speed,
        "ratio": 1.0,
        "acceptance_length": 1.2,
        "ms_per_round": 3.5,
        "identical": True,
    }
    return WHERE | counted | figures | {"method": method, "category": category}


@examples(5, phases=[Phase.generate])  # a picture takes half a second: a failure is not shrunk
@given(
    methods=st.lists(st.sampled_from(METHODS), min_size=1, unique=True), categories=st.integers(1, 20), data=st.data()
)
def test_every_method_has_a_bar_in_every_category(plot, tmp_path_factory, methods, categories, data) -> None:
    names = [f"c{number}" for number in range(categories)]
    speeds = {(m, c): data.draw(st.integers(1, 99)) for m in methods for c in names}
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plot.plt, "close", seen.append)
        plot.draw([row(m, c, speed) for (m, c), speed in speeds.items()], tmp_path_factory.mktemp("plot") / "rows.png")
    *lines, rounds = seen[0].axes
    labels = [label.get_text() for line in lines for label in line.get_xticklabels()]
    assert labels == ["overall", *names] and max(len(line.get_xticks()) for line in lines) <= plot.LINE
    drawn = {
        (bars.get_label(), category.get_text()): bar.get_height()
        for line in lines
        for bars in line.containers
        if hasattr(bars, "patches")
        for category, bar in zip(line.get_xticklabels(), bars, strict=True)
    }
    assert {pair: height for pair, height in drawn.items() if pair[1] != "overall"} == speeds
    assert sorted(label.get_text() for label in rounds.get_yticklabels()) == sorted(methods)
    colours = {
        bars.get_label(): bars.patches[0].get_facecolor() for bars in lines[0].containers if hasattr(bars, "patches")
    }
    assert len(set(colours.values())) == len(methods)
    plot.plt.close(seen[0])


@pytest.mark.parametrize(("longest", "scale"), [(70.0, "linear"), (71.0, "log")])
def test_rounds_of_very_different_times_are_drawn_on_a_logarithmic_axis(
    plot, tmp_path, monkeypatch, longest, scale
) -> None:
    """So that the short ones can be read; every bar's end lies inside."""
    seen: list[Any] = []
    monkeypatch.setattr(plot.plt, "close", seen.append)
    rows = [
        row("eagle3", "a", 9.0),
        row("assisted", "a", 1.0) | {"ms_per_round": longest, "phases_ms": {"pass": longest}},
    ]
    plot.draw(rows, tmp_path / "rows.png")
    rounds = seen[0].axes[-1]
    assert rounds.get_xscale() == scale
    low, high = rounds.get_xlim()
    assert low < 3.5 / 5 and high >= longest
    plot.plt.close(seen[0])


def test_committed_rows_of_full_size_models_are_told_apart(plot, tmp_path, monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plot.plt, "close", seen.append)
    path = BENCHMARKS / "results" / "full_size_h200.jsonl"
    plot.main([str(path), "--out", str(tmp_path / "rows.png")])
    (axes,) = seen[0].axes
    drawn = [row for row in plot.read(path) if row.get("parts_ms")]
    assert len(axes.get_yticklabels()) == len(drawn) and axes.patches
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    plot.plt.close(seen[0])


def test_a_picture_beside_a_peer_has_every_case_and_its_ratio(plot, tmp_path, monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plot.plt, "close", seen.append)
    files = [BENCHMARKS / "results" / f"peers_{device}.jsonl" for device in ("h200", "h100")]
    plot.main([*map(str, files), "--out", str(tmp_path / "rows.png")])
    *devices, firsts = seen[0].axes
    for axes, file in zip(devices, files, strict=True):
        cases = plot.peer_cases(plot.read(file)).values()
        ratios = [min(plot.peer_figure(ours, row)[2] for row in theirs) for ours, theirs in cases]
        assert [bar.get_width() + 1 for bar in axes.patches] == pytest.approx(ratios)
    assert firsts.patches and all(bar.get_width() + 1 < 1 for bar in firsts.patches)  # where fastspec is slower
    plot.plt.close(seen[0])
