"""The tables of the pages are those of committed rows, and every table is on a page."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.pages import PAGES, ROOT

FILES = ("bench_cpu", "bench_qwen_all_h100", "full_size_h200", "head_smollm2_h100", "peers_h100", "peers_h200")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("pages")


def test_every_table_stands_on_one_page_with_the_figures_of_its_rows(script: Any) -> None:
    found: Counter[str] = Counter()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found.update(name for _, name, _ in script.PLACE.findall(text))
        assert script.filled(text) == text, f"{page}: run python benchmarks/pages.py"
    assert dict(found) == dict.fromkeys(script.TABLES, 1)


@pytest.mark.parametrize("file", FILES)
def test_a_table_follows_its_rows(script: Any, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    kept = script.of
    figures = ("round_ms", "tokens_per_second", "acceptance_length", "first_token_s")

    def changed(name: str) -> tuple[Any, ...]:
        return tuple(
            row | {figure: 1.7 * row[figure] for figure in figures if name == file and row.get(figure)}
            for row in kept(name)
        )

    before = {name: table() for name, table in script.TABLES.items()}
    monkeypatch.setattr(script, "of", changed)
    assert {name for name, table in script.TABLES.items() if table() != before[name]}


def test_aims_of_stored_products_stand_beside_their_rows(script: Any) -> None:
    """Of which one is reached in some rows."""

    def ms(weights: str, rows: int = 1, nodes: int = 1, shape: str = "llama-8b") -> float:
        wanted = {"shape": shape, "weights": weights, "batch": rows, "nodes": nodes}
        bits = 8 if nodes > 1 else None
        found = [each for each in script.of("stored_h200") if wanted.items() <= each.items()]
        return float(min(each["round_ms"] for each in found if each["head_bits"] == bits))

    def many(rows: int) -> float:
        return ms("dense", rows) / ms("fp8", rows)

    text = (ROOT / "docs" / "maintainers" / "kernels.md").read_text(encoding="utf-8")
    told = [
        (f"{ms('dense', nodes=60):.2f}", "5.4"),
        (f"{1000 / ms('int8'):.0f} / {1000 / ms('fp8'):.0f}", "390"),
        (f"{ms('int8', nodes=60):.2f} / {ms('fp8', nodes=60):.2f}", "4.1"),
        (f"{1000 / ms('gptq'):.0f}", "530"),
        (f"{ms('gptq', nodes=16):.2f} / {ms('gptq', nodes=24):.2f}", "3.1"),
        (f"{1000 / ms('nf4'):.0f}", "470"),
        (f"{1000 / ms('mxfp4', shape='gpt-oss-20b'):.0f}", "520"),
        (" / ".join(f"{many(rows):.2f}" for rows in (8, 32, 128)), "1.3 / 1.15 / 1"),
    ]
    for found, aim in told:
        assert f"| {found} | {aim} |" in text, found
    assert [many(rows) >= aim for rows, aim in ((8, 1.3), (32, 1.15), (128, 1.0))] == [True, True, False]
    assert (
        "of which those of int8 without drafts and of FP8 in 8 and 32 rows are reached" in text
        and 1000 / ms("int8") > 390
    )
    token, round, wide = (
        next(each for each in script.of("mtp_h200") if wanted.items() <= each.items())
        for wanted in (
            {"shape": "qwen3.5-9b", "method": "autoregressive"},
            {"shape": "qwen3.5-9b", "method": "mtp", "head_bits": 8},
            {"shape": "qwen3.5-9b", "method": "mtp", "head_bits": 16},
        )
    )
    assert f"| 1.65 | {round['round_ms'] / token['round_ms']:.2f} |" in text
    assert f"| 1.22 | {round['score_ms'] / token['round_ms']:.2f} |" in text
    assert f"| 1.9, 1.1 | {wide['draft_ms']:.2f}, {round['draft_ms']:.2f} |" in text
    read = [1e-6 * each["drafter_read_bytes"] / each["read_gb_per_s"] for each in (wide, round)]
    assert "which alone takes {:.2f} and {:.2f} ms".format(*read) in text
    assert f"takes {round['score_ms'] - token['round_ms']:.2f} ms more than a token" in text
    assert ms("nf4", 128) > ms("dense", 128) < ms("fp8", 128)
    kept = {
        bits: {
            each["prompts"]: each["acceptance_length"]
            for each in script.of("head_bits_cpu")
            if each["head_bits"] == bits
        }
        for bits in (8, 16)
    }
    lost = [1 - kept[8][name] / kept[16][name] for name in kept[16]]
    assert f"loses {100 * max(lost):.1f} %" in text and sum(each > 0 for each in lost) == 1 and len(lost) == 5


def test_the_page_of_peers_begins_with_what_its_tables_show(script: Any) -> None:
    cases = [case for file in script.PEERS for case in script.peer_cases(script.of(file)).items()]
    slower = [case for case, (ours, theirs) in cases for each in theirs if script.peer_figure(ours, each)[2] < 1]
    later: dict[tuple[str, bool], list[int]] = {}
    for (shape, *_, method), (ours, (theirs, *_)) in cases:
        if "first_token_s" in ours and "first_token_s" in theirs:
            more = round(100 * ours["first_token_s"] / theirs["first_token_s"]) - 100
            later.setdefault((shape, method != "plain"), []).append(more)
    text = " ".join((ROOT / "docs" / "performance" / "peers.md").read_text(encoding="utf-8").split())
    assert len(slower) == 3 and "decodes faster in all of these cases but three" in text
    plain, headed = ([min(each), max(each)] for each in (later.pop(("llama-8b", head)) for head in (False, True)))
    ((small,),) = later.values()
    told = "by {} to {} % for the 8B shape, by {} to {} % with a head, and by {} %".format(*plain, *headed, small)
    assert told in text


def test_a_case_with_a_peer_is_of_one_commit_and_the_last_that_has_both(script: Any) -> None:
    def row(engine: str, commit: str, speed: float) -> dict[str, Any]:
        case = {"model": "llama-8b", "rows": 8, "before": 512, "method": "plain"}
        return case | {"engine": engine, "commit": commit, "tokens_per_second": speed}

    rows = [row("vllm", "a", 1.0), row("fastspec", "a", 2.0), row("vllm", "b", 3.0), row("fastspec", "b", 6.0)]
    ((ours, (theirs,)),) = script.peer_cases([*rows, row("fastspec", "c", 99.0)]).values()
    assert (ours["commit"], theirs["commit"]) == ("b", "b")
    assert script.peer_figure(ours, theirs) == ("6.00", "3.00", 2.0)
