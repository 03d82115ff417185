"""Another engine answers the bench's prompts in a process of its own; what stands in for vLLM here has its interface
and a bigram's wit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bench import benchmark
from helpers.models import tiny_head
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

from fastspec.errors import Unsupported
from fastspec.programs.bench import run_bench
from fastspec.programs.bench.peers import Peer, PeerFailed, PeerJob, answers
from fastspec.programs.bench.report import differing, summarise
from fastspec.programs.cli.app import app
from fastspec.programs.training.heads import save_head

pytestmark = pytest.mark.usefixtures("quick")
torch.set_num_threads(1)
STAND_IN = """
import json, os, types
__version__ = "0.0.stand-in"
SEEN = os.environ["STAND_IN_SEEN"]

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class LLM:
    def __init__(self, **options):
        with open(SEEN, "a") as file:
            print(json.dumps(options), file=file)
        self.chain = (options.get("speculative_config") or {}).get("num_speculative_tokens")
        if self.chain == int(os.environ.get("STAND_IN_BREAKS_AT", 0)) != 0:
            raise RuntimeError("no kernel for a chain of this length")
        self.calls, self.drafts = 0, 0
        if os.path.isdir(options["model"]):
            with open(os.path.join(options["model"], "config.json")) as file:
                assert json.load(file)["architectures"] == ["LlamaForCausalLM"]

    def generate(self, prompts, settings, use_tqdm):
        assert settings.temperature == 0.0 and not settings.detokenize and not use_tqdm
        with open(SEEN, "a") as file:
            print(json.dumps({"prompts": [each["prompt_token_ids"] for each in prompts], **settings.__dict__}), file=file)
        self.calls += 1
        self.drafts += 2 * len(prompts)
        out = [[each["prompt_token_ids"][-1]] * settings.max_tokens for each in prompts]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)]) for ids in out]

    def apply_model(self, change):
        class Parameter:
            def __init__(self):
                self.data, self.zeroed = self, False

            def zero_(self):
                self.zeroed = True

        found = {name: Parameter() for name in ("router.bias", "router.weight", "experts.w2_bias")}
        change(types.SimpleNamespace(named_parameters=lambda: found.items()))
        with open(SEEN + ".zeroed", "a") as file:
            print(json.dumps([name for name, parameter in found.items() if parameter.zeroed]), file=file)

    def get_metrics(self):
        name = "vllm:spec_decode_num_accepted_tokens"
        return [
            types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            types.SimpleNamespace(name=name, value=self.drafts // 2 * 3),
            types.SimpleNamespace(name=name + "_per_pos", values=[self.drafts, self.drafts // 2, 0]),
        ]
"""  # noqa: E501


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in where the engine's process finds it; the file in which it writes what it was given."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_SEEN", str(tmp_path / "seen.jsonl"))
    return tmp_path / "seen.jsonl"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer, a head for it and two prompts, in a folder."""
    folder = tmp_path_factory.mktemp("bench")
    target = small_target(1, peak=0.2)
    save_with_tokenizer(target, folder / "model")
    save_head(tiny_head(target, taps=(1, 2, 3)), folder / "head", "a card")
    rows = [
        {"id": f"p{i}", "category": "a", "turns": [text]} for i, text in enumerate(("w9 w12 w40", "w5 w6 w7 w8 w9"))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read(seen: Path) -> list[dict]:
    return [json.loads(line) for line in seen.read_text().splitlines()]


def test_an_engine_answers_the_same_prompts_plainly_and_with_chains_of_the_head(saved: Path, engine: Path) -> None:
    written: list[dict] = []
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        heads=[str(saved / "head")],
        methods=["eagle3"],
        max_new_tokens=6,
        runs=2,
        peers=[Peer("vllm")],
        on_row=written.append,
    )
    assert rows == written
    ours, theirs = rows[:4], rows[4:]
    assert [(row["method"], row["ids"]) for row in theirs] == [
        (name, [f"p{i}"]) for name in ("vllm", "vllm-eagle3-3", "vllm-eagle3-5") for i in range(2)
    ]
    assert all(
        row["engine_version"] == "0.0.stand-in" and row["new_tokens"] == 6 and row["prefill_ms"] is None
        for row in theirs
    )
    assert [row["head"] for row in theirs] == [None] * 2 + [str(saved / "head")] * 4
    assert all(row["acceptance_length"] is None for row in theirs[:2])
    for row in theirs[2:]:  # two drafting steps a call: both keep a draft, one of them two
        assert (
            row["acceptance_length"] == 2.5 and row["accepted_counts"] == [0, 1, 1, 0] and row["ms_per_round"] is None
        )
    assert {row["prompt_tokens"] for row in ours} == {row["prompt_tokens"] for row in theirs}
    assert [row["method"] for row in differing(rows, peers=True)] == [
        row["method"] for row in theirs
    ] and not differing(rows)
    settings, calls = ([each for each in read(engine) if ("model" in each) is wanted] for wanted in (True, False))
    assert [each.get("speculative_config", {}).get("num_speculative_tokens") for each in settings] == [None, 3, 5]
    for each in settings:
        assert (each["model"], each["dtype"], each["enable_prefix_caching"]) == (str(saved / "model"), "float32", False)
        assert each["disable_log_stats"] is ("speculative_config" not in each) and "enforce_eager" not in each
    assert settings[1]["speculative_config"]["model"] == str(saved / "head")
    assert not Path(f"{engine}.zeroed").exists()  # trained weights stay what they are
    assert len(calls) == 3 * 2 * (1 + 2)  # of every way, for every prompt, a warm-up and two runs
    assert all(len(each["prompts"]) == 1 and each["max_tokens"] == 6 for each in calls)
    assert not any(each["ignore_eos"] for each in calls)
    summary = {row["method"]: row for row in summarise(rows) if row["category"] == "overall"}
    assert summary["vllm-eagle3-3"]["acceptance_length"][1] == 2.5 and summary["vllm"]["prefill_ms"] is None


def test_an_engine_starts_once_for_several_batch_sizes(saved: Path, engine: Path) -> None:
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        heads=[str(saved / "head")],
        methods=["transformers"],
        max_new_tokens=6,
        batch=(2, 1),
        peers=[Peer("vllm")],
    )
    theirs = [(row["method"], row["batch_size"], row["ids"]) for row in rows if row["method"].startswith("vllm")]
    ways = ("vllm", "vllm-eagle3-3", "vllm-eagle3-5")
    assert theirs == [(name, size, ids) for name in ways for size, ids in ((2, ["p0", "p1"]), (1, ["p0"]), (1, ["p1"]))]
    assert sum("model" in each for each in read(engine)) == len(ways)


def test_the_table_names_the_engine_and_what_is_missing_is_told(saved: Path, tmp_path: Path) -> None:
    arguments = [
        "bench",
        "--model",
        str(saved / "model"),
        "--prompts",
        str(saved / "prompts.jsonl"),
        "--max-new-tokens",
        "4",
    ]
    arguments += ["--methods", "autoregressive", "--peer", "vllm"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "vllm: 2 x 1 prompts" in done.output and "vllm differs from transformers on a p0" in done.output
    (tmp_path / "vllm.py").unlink()
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0 and f"left out: vllm: it is not installed for {sys.executable}" in " ".join(
        done.output.split()
    )
    done = CliRunner().invoke(app, [*arguments, "--peer-python", "no/such/python"], env={"COLUMNS": "160"})
    assert done.exit_code == 1 and "could not start no/such/python" in done.output


def test_an_engine_that_fails_costs_no_row_and_is_told(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_BREAKS_AT", "3")
    out = tmp_path / "rows.jsonl"
    arguments = [
        "bench",
        "--model",
        str(saved / "model"),
        "--prompts",
        str(saved / "prompts.jsonl"),
        "--max-new-tokens",
        "4",
    ]
    arguments += [
        "--each",
        "1",
        "--methods",
        "eagle3",
        "--head",
        str(saved / "head"),
        "--peer",
        "vllm",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 1
    assert (
        "vllm-eagle3-3 ended with status 1 after 0 answers" in done.output
        and "no kernel for a chain of this length" in done.output
    )
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["transformers", "eagle3", "vllm"]
    with pytest.raises(PeerFailed, match="no kernel for a chain of this length"):
        answers(
            Peer("vllm"),
            PeerJob(str(saved / "model"), "float32", [[[1, 2]]], 3, head="somewhere"),
            3,
        )


def test_shapes_with_random_weights_answer_at_their_length(engine: Path) -> None:
    job = PeerJob("shape", "bfloat16", [[[1, 2], [3]], [[4]]], 5, exact_length=True, dummy=True, warmup=0, runs=2)
    told, found = answers(Peer("vllm"), job)
    assert [[answer.tokens for answer in batch] for batch in found] == [[[[2] * 5, [3] * 5]] * 2, [[[4] * 5]] * 2]
    assert told["engine_settings"]["load_format"] == "dummy" and told["engine_settings"]["max_num_seqs"] == 2
    assert all(each["ignore_eos"] and each["min_tokens"] == 5 for each in read(engine)[1:])
    assert read(Path(f"{engine}.zeroed")) == [
        ["router.bias", "experts.w2_bias"]
    ]  # a router's would send every token to the same experts


def test_an_unknown_engine_is_refused(saved: Path) -> None:
    with pytest.raises(Unsupported, match="peer 'sglang' is unknown: accepted are vllm; no other engine was tried"):
        Peer("sglang")
    done = CliRunner().invoke(app, ["bench", "--peer", "sglang"], env={"COLUMNS": "160"})
    assert done.exit_code == 1 and "error: peer 'sglang' is unknown: accepted are vllm" in done.output


@pytest.fixture
def peers() -> Any:
    """benchmarks/peers.py."""
    return benchmark("peers")


def sides(rows: list[dict]) -> list[tuple]:
    return [(row["engine"], row["method"], row["rows"], row["before"]) for row in rows]


def test_both_sides_of_a_shape_have_rows_of_the_same_cases(
    engine: Path, peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LONG", 20)
    monkeypatch.setattr(
        peers, "timed", lambda call: float(call().numel())
    )  # seconds are tokens: what else runs here changes none
    out = tmp_path / "rows.jsonl"
    given = ["--cases", "2x8", "1x8", "1x33", "--round", "1x8", "--new", "5", "--memory", "0.7", "--cache-gib", "0.5"]
    peers.main(["--shapes", "tiny", *given, "--draft-vocab", "64", "--out", str(out)])
    rows = read(out)
    plain = [("plain", 2, 8), ("plain", 1, 8), ("plain", 1, 33)]
    assert sides(rows) == [
        *[("fastspec", *each) for each in (plain[0], ("eagle3", 1, 8), *plain[1:])],
        *[("vllm", *each) for each in (*plain, ("eagle3", 1, 8))],
    ]
    assert ["first_token_s" in row for row in rows] == [
        row["method"] == "eagle3" or row["before"] == 33 for row in rows
    ]
    assert [(rows[at].get("first_token_s"), rows[at].get("seconds")) for at in range(4)] == [
        (None, 26.0),
        (9.0, None),
        (None, 13.0),
        (34.0, 38.0),
    ]
    assert (rows[1]["drafts"], rows[1]["engine_settings"]["assistant"], rows[-1]["drafts"]) == (60, "eagle3", 5)
    assert all(row["engine_settings"]["gpu_memory_utilization"] == 0.7 for row in rows[4:])


@pytest.mark.slow
def test_a_case_that_fails_costs_no_other(
    engine: Path, peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("STAND_IN_BREAKS_AT", "5")
    seconds_of = peers.seconds_of

    def short(model: Any, ids: torch.Tensor, *rest: Any) -> Any:
        if ids.shape[0] == 2:
            raise torch.cuda.OutOfMemoryError("no room for two")
        return seconds_of(model, ids, *rest)

    monkeypatch.setattr(peers, "seconds_of", short)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit, match="failed: tiny, plain, 2 x 8; tiny, vllm eagle3"):
        peers.main(
            ["--shapes", "tiny", "--cases", "1x8", "2x8", "--new", "3", "--draft-vocab", "64", "--out", str(out)]
        )
    assert sides(read(out)) == [("fastspec", "plain", 1, 8), ("fastspec", "eagle3", 1, 8), ("vllm", "plain", 1, 8)]
    assert "no room for two" in capsys.readouterr().out


def test_without_the_engine_nothing_is_measured_in_vain(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").unlink()
    with pytest.raises(SystemExit, match=r"vllm is not installed for .*--peer-python, or --no-peer"):
        peers.main(["--shapes", "tiny"])


def test_an_engine_over_several_gpus_is_told_of_them_and_timed_without_its_prompt(
    engine: Path, peers: Any, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = [
        "--shapes",
        "tiny",
        "--processes",
        "2",
        "--cases",
        "1x7",
        "--new",
        "5",
        "--draft-vocab",
        "64",
        "--chains",
        "3",
        "--fp8",
    ]
    peers.main([*arguments, "--out", str(out)])
    rows, seen = read(out), read(engine)
    assert [(row["engine"], row["processes"], row["method"], row["drafts"]) for row in rows] == [
        ("vllm", 2, "plain", None),
        ("vllm", 2, "eagle3", 3),
    ]
    assert all(row["model"] == "tiny-fp8" for row in rows)
    assert all(row["round_ms"] < 1e3 and row["first_token_s"] >= 0 for row in rows)
    settings, calls = ([each for each in seen if ("model" in each) is wanted] for wanted in (True, False))
    assert all(each["tensor_parallel_size"] == 2 and each["load_format"] == "dummy" for each in settings)
    assert all(each["quantization"] == "fp8" for each in settings)
    assert [each["max_tokens"] for each in calls] == ([5] * 5 + [1] * 5) * 2
