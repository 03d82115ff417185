"""`fastspec bench` on tiny models: its rows, what it leaves out and refuses, differing answers, and peers that are
never patched."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import ROOT
from helpers.training import save_with_tokenizer, small_target
from rich.console import Console
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation.stats import Stats
from fastspec.patches.session import session_of
from fastspec.programs import compare as device
from fastspec.programs.bench import run, run_bench
from fastspec.programs.bench.methods import BenchPrompt, Method
from fastspec.programs.bench.report import print_differences, print_report, print_texts, quantiles, summarise
from fastspec.programs.cli.app import app
from fastspec.programs.compare import TimedStreamer
from fastspec.programs.texts import until_end

pytestmark = pytest.mark.usefixtures("quick")
torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores
VERSIONS = {"torch", "triton", "transformers", "fastspec", "commit"}
ENVIRONMENT = {"device", "dtype", "threads", "load", "date", "weight_bytes", "read_gb_per_s", *VERSIONS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and a prompt file of two categories, in a folder."""
    folder = tmp_path_factory.mktemp("bench")
    for name, seed in (
        ("model", 1),
        ("ends", 4),
    ):  # the first never says its end token here, the second after 18 tokens
        save_with_tokenizer(small_target(seed, peak=0.2), folder / name)
    texts = ["w9 w12 w40", "w5 w6 w7 w8 w9", "w100 w4 w4", "w77 w30 w31 w8"]
    rows = [{"id": f"p{i}", "category": "ab"[i // 2], "turns": [text, "never asked"]} for i, text in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def bench(saved: Path, *arguments: str):
    command = [
        "bench",
        "--model",
        str(saved / "model"),
        "--prompts",
        str(saved / "prompts.jsonl"),
        "--max-new-tokens",
        "12",
    ]
    return CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "160"})  # a tiny model is fast: wide numbers


@pytest.mark.filterwarnings("ignore:the draft model reads")  # it is the target itself
def test_json_is_one_object_and_rows_are_appended(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    methods = ["transformers", "assisted", "autoregressive", "prompt-lookup"]
    draft = ("--draft-model", str(saved / "model"))
    done = bench(
        saved, "--json", "--out", str(out), *draft, "--methods", ",".join(methods[1:]), "--max-new-tokens", "24"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"rows", "summary"}
    assert [json.loads(line) for line in out.read_text().splitlines()] == found["rows"]
    assert [(row["ids"], row["method"]) for row in found["rows"]] == [
        ([f"p{i}"], name) for i in range(4) for name in methods
    ]
    for row in found["rows"]:
        assert set(row) >= ENVIRONMENT and "texts" not in row
        assert row["identical"] and row["first_difference"] == [None] and row["tokens_per_second"] > 0
        assert row["new_tokens"] == found["rows"][0]["new_tokens"] or row["ids"] != ["p0"]
        assert row["ratio"] == 1.0 or row["method"] != "transformers"
        assert row["prefill_ms"] > 0 and row["peak_mib"] is None
        if not row["rounds"]:  # the whole answer came with the prefill
            assert (
                row["method"] in ("assisted", "prompt-lookup")
                and row["ms_per_round"] is row["acceptance_length"] is None
            )
            continue
        assert row["floor_share"] == pytest.approx(row["weight_bytes"] / 1e6 / row["ms_per_round"], rel=1e-2, abs=1e-3)
        assert sum(row["acceptance_by_position"]) == pytest.approx(row["acceptance_length"] - 1, abs=0.01)
    assert set(found["rows"][2]["phases_ms"]) >= {"draft", "score", "choose", "commit"}
    assert all(
        row["acceptance_length"] == 1.0 for row in found["rows"] if row["method"] in ("transformers", "autoregressive")
    )
    assert (
        max(row["acceptance_length"] or 0 for row in found["rows"] if row["method"] == "assisted") > 2
    )  # the target drafts for itself
    whole = [row for row in found["summary"] if row["category"] == "overall"]
    assert [(row["method"], row["count"], row["identical"]) for row in whole] == [(name, 4, 4) for name in methods]


def test_weights_count_an_untied_embedding_out(saved: Path) -> None:
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        methods=["transformers"],
        each=1,
        max_new_tokens=4,
    )
    model = small_target()
    skipped = model.model.embed_tokens.weight.numel()
    assert rows[0]["weight_bytes"] == 4 * (sum(p.numel() for p in model.parameters()) - skipped)
    assert [row["category"] for row in rows] == ["a", "b"]


def test_answers_are_counted_up_to_their_end_token(saved: Path) -> None:
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "ends"),
        methods=["autoregressive"],
        batch=2,
        each=2,
        max_new_tokens=30,
    )
    assert all(row["new_tokens"] == 2 * 18 and row["identical"] for row in rows)
    assert until_end([4, 1, 1], [1, None]) == [4, 1] and until_end([4, 3], [1]) == [4, 3]


def test_tables_and_texts_are_printed(saved: Path) -> None:
    done = bench(saved, "--methods", "autoregressive", "--each", "1", "--print-output", "--compare")
    assert done.exit_code == 0, done.output
    for words in ("identical to transformers", "autoregressive", "2/2", "ratio", "acceptance", "score", "floor"):
        assert words in done.output


@pytest.mark.parametrize("named", [False, True])
def test_an_assistant_without_its_resource_is_left_out_or_refused_where_named(saved: Path, named: bool) -> None:
    done = bench(saved, "--each", "1", *(("--methods", "autoregressive,eagle3") if named else ()))
    assert done.exit_code == int(named), done.output
    emitted = " ".join(done.output.split())
    assert ("method 'eagle3' cannot be measured" if named else "left out: eagle3") in emitted
    assert "--head" in emitted and "Traceback" not in emitted


def test_a_static_cache_is_compiled_on_the_cpu_only_where_it_is_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiled.append(options) or forward)
    done = bench(saved, "--each", "1", "--methods", "static-compile")
    assert done.exit_code == 0 and "2/2" in done.output and compiled
    done = bench(saved, "--each", "1", "--max-new-tokens", "2")
    assert done.exit_code == 0 and "left out: static-compile" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nonsense"], "nonsense"),
        (["--prompts", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--methods", "assisted"], "--draft-model"),
        (["--methods", "prompt-lookup", "--batch", "2"], "one prompt at a time"),
        (["--max-new-tokens", "1000"], "no room for 1000 new tokens"),
        (["--out", "no/such/folder/rows.jsonl"], "no/such/folder"),
        (["--model", "no/such-model-anywhere"], "no/such-model-anywhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(saved: Path, arguments: list[str], words: str) -> None:
    done = bench(saved, *arguments)
    assert done.exit_code == 1 and words in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize("text", ["not json", "[1]", '{"category": "a"}', '{"turns": []}'])
def test_a_damaged_prompt_file_names_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w4"}\n' + text + "\n")
    with pytest.raises(Unsupported, match="line 2"):
        run_bench(prompts=[path], model="none")


def plant(monkeypatch, victim: str) -> None:
    """Make a method answer with another first token."""
    real = run.ask

    def ask(method: Any, part: Any, max_new_tokens: int) -> Any:
        answer = real(method, part, max_new_tokens)
        if method.name == victim:
            answer.tokens[0][0] += 1
        return answer

    monkeypatch.setattr(run, "ask", ask)


@pytest.mark.some("arguments0", "arguments3", "prompt-lookup")
@pytest.mark.parametrize(
    ("victim", "arguments", "status"),
    [
        ("autoregressive", [], 1),
        ("autoregressive", ["--json"], 1),
        ("autoregressive", ["--allow-different"], 0),
        ("autoregressive", ["--dtype", "bfloat16"], 0),
        ("prompt-lookup", [], 0),
    ],
)
def test_a_difference_is_an_error_in_fp32_and_a_note_elsewhere(
    saved: Path, monkeypatch, victim, arguments, status
) -> None:
    plant(monkeypatch, victim)
    done = bench(saved, "--each", "1", "--methods", "autoregressive,prompt-lookup", *arguments)
    assert done.exit_code == status, done.output
    assert f"{victim} differs from transformers on a p0 from new token 1 on" in " ".join(done.output.split())
    assert ("ERROR" in done.output) == (victim == "autoregressive" and "bfloat16" not in arguments)


def test_titles_and_numbers_are_whole_in_eighty_columns() -> None:
    kept = (ROOT / "benchmarks" / "results" / "bench_cpu.jsonl").read_text(encoding="utf-8")
    console = Console(record=True, width=80, file=io.StringIO())
    print_report([json.loads(line) for line in kept.splitlines()], console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["all", "prompts", "tokens/s", "20", "50", "80", "ratio", "acceptance", "rate", "identical"] in lines
    assert ["ms", "a", "round", "all", "draft", "score", "choose", "commit", "floor", "by", "position"] in lines


def test_differing_texts_are_shown_beside_each_other() -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    plain = {
        "method": "transformers",
        "category": "a",
        "ids": ["x"],
        "texts": ["one two"],
        "identical": True,
        "dtype": "float32",
    }
    ours = plain | {"method": "nasd", "texts": ["one four"], "identical": False, "first_difference": [1]}
    print_texts([plain, ours], console, compare=True)
    print_differences([plain, ours], console)
    text = console.export_text()
    assert "one two" in text and "one four" in text and "ERROR: nasd" in text


@pytest.mark.filterwarnings("ignore:the draft model reads")  # it is the target itself
def test_peers_run_on_an_instance_that_is_not_patched_and_shares_the_weights(saved: Path, monkeypatch) -> None:
    seen: dict[str, Any] = {}
    real = run.ask

    def ask(method: Any, part: Any, max_new_tokens: int) -> Any:
        assert (session_of(method.model) is None) == method.peer
        assert ("generate" in vars(method.model)) != method.peer
        seen[method.name] = method.model
        return real(method, part, max_new_tokens)

    monkeypatch.setattr(run, "ask", ask)
    monkeypatch.setattr(run, "ask", ask)
    run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        draft_model=str(saved / "model"),
        each=1,
        max_new_tokens=4,
        methods=["assisted", "prompt-lookup", "autoregressive"],
    )
    plain, patched = seen["transformers"], seen["autoregressive"]
    assert seen["assisted"] is seen["prompt-lookup"] is plain and plain is not patched
    assert all(a is b for a, b in zip(plain.parameters(), patched.parameters(), strict=True))
    assert session_of(patched) is None  # unpatched when the run was over


def test_batches_hold_one_category_and_are_compared_row_by_row(saved: Path) -> None:
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        batch=3,
        max_new_tokens=9,
        methods=["autoregressive"],
    )
    assert [row["ids"] for row in rows] == [["p0", "p1"]] * 2 + [["p2", "p3"]] * 2
    assert all(row["identical"] and row["batch"] == 2 and row["acceptance_length"] == 1.0 for row in rows)


def test_several_batch_sizes_are_measured_and_summarised_apart(saved: Path) -> None:
    done = bench(saved, "--batch", "1", "--batch", "2", "--methods", "autoregressive", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(row["batch_size"], row["ids"]) for row in found["rows"] if row["method"] == "autoregressive"] == [
        (1, ["p0"]),
        (1, ["p1"]),
        (1, ["p2"]),
        (1, ["p3"]),
        (2, ["p0", "p1"]),
        (2, ["p2", "p3"]),
    ]
    whole = [row for row in found["summary"] if row["category"] == "overall"]
    assert [(row["batch_size"], row["method"], row["count"], row["identical"]) for row in whole] == [
        (size, method, count, count)
        for size, count in ((1, 4), (2, 2))
        for method in ("transformers", "autoregressive")
    ]
    printed = bench(saved, "--batch", "1", "--batch", "2", "--methods", "transformers").output
    assert printed.count("all prompts") == 2 and "batch: 1" in printed and "batch: 2" in printed
    for none in (0, []):
        with pytest.raises(Unsupported, match="batch must be at least 1"):
            run_bench(model="none", batch=none)


def test_methods_that_compile_answer_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are of the last call; transformers' own methods, of which all but one compile nothing, are asked
    once."""
    asked: list[str] = []
    made = [
        Method(name, None, {}, {})
        for name in ("transformers", "prompt-lookup", "assisted", "static-compile", "eagle3", "nasd")
    ]

    def ask(method: Method, part: list[BenchPrompt], tokens: int) -> run.MeasuredAnswer:
        asked.append(method.name)
        return run.MeasuredAnswer([[1]], float(len(asked)), Stats(), None)

    monkeypatch.setattr(run, "ask", ask)
    found = list(run.on_part([BenchPrompt("a", "b", [1])], made, 4, untimed=2))
    assert asked == ["transformers", "prompt-lookup", "assisted"] + 3 * ["static-compile"] + 3 * ["eagle3"] + 3 * [
        "nasd"
    ]
    assert [answer.seconds for _, answer, _ in found] == [1, 2, 3, 6, 9, 12]


def test_versions_are_those_that_are_installed_and_a_missing_one_is_none(monkeypatch) -> None:
    found = device.versions()
    assert set(found) == VERSIONS and found["torch"] == torch.__version__ and found["fastspec"] == fastspec.__version__
    monkeypatch.setitem(sys.modules, "triton", None)  # what Python takes for a module that is not there
    assert device.versions() == found | {"triton": None}


def test_quantiles() -> None:
    assert quantiles([5.0]) == [5.0, 5.0, 5.0]
    assert quantiles([float(i) for i in range(11)]) == [2.0, 5.0, 8.0]
    assert quantiles([3.0, 1.0]) == pytest.approx([1.4, 2.0, 2.6])


def test_acceptance_by_position_of_a_hand_counted_run() -> None:
    stats = Stats()
    for accepted in (0, 2, 0, 3, 1):  # five rounds: three accept draft 1, two of them draft 2, one of them draft 3
        stats.count_accepted(accepted)
    assert stats.lengths == [2, 1, 1, 1]
    assert stats.acceptance_by_position == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert Stats().acceptance_by_position == []


def test_the_loop_counts_accepted_lengths(pairs) -> None:
    for _, model in pairs.values():
        ids = torch.arange(6, 14)[None]
        stats = model.generate(
            ids, assistant="eagle3", max_new_tokens=20, do_sample=False, return_dict_in_generate=True
        ).fastspec
        assert sum(stats.lengths) == stats.row_rounds
        assert sum(i * count for i, count in enumerate(stats.lengths)) == stats.accepted
        assert stats.round_tokens == stats.emitted - 1
        without_bonus = (
            stats.row_rounds + stats.accepted - stats.round_tokens
        )  # of rounds that the limit ended within their drafts
        share = 1 - without_bonus / stats.row_rounds
        assert without_bonus in (0, 1) and share + sum(stats.acceptance_by_position) == pytest.approx(
            stats.acceptance_length
        )


def test_a_clock_counts_what_a_peer_hands_over() -> None:
    clock = TimedStreamer(rows=1)
    for width in (7, 1, 3, 1, 2):  # the prompt, the first token, three rounds
        clock.put(torch.zeros(1, width))
    clock.end()
    assert (clock.stats.rounds, clock.stats.round_tokens, clock.stats.lengths) == (3, 6, [1, 1, 1])
    assert set(clock.stats.phases) == {"prefill", "pass"} and clock.stats.acceptance_length == 2.0


def test_a_summary_pools_positions_and_takes_medians() -> None:
    shared = {
        "method": "m",
        "category": "a",
        "identical": True,
        "prefill_ms": 1.0,
        "floor_share": None,
        "peak_mib": None,
        "ratio": 1.0,
    }
    shared |= {"acceptance_length": 1.5, "ms_per_round": 10.0}
    rows = [
        shared | {"tokens_per_second": speed, "phases_ms": phases, "accepted_counts": counts}
        for speed, phases, counts in (
            (1.0, {"score": 1.0}, [1]),
            (2.0, {"score": 2.0, "round": 3.0}, [1, 2]),
            (6.0, {}, [0, 0, 1]),
        )
    ]
    overall, category = summarise(rows)
    assert overall | {"category": "a"} == category
    assert (
        overall["tokens_per_second"][1] == 2.0
        and overall["phases_ms"] == {"score": 1.5, "round": 1.5}
        and overall["peak_mib"] is None
    )
    assert overall["acceptance_by_position"] == [0.6, 0.2]
