"""Another engine answers the bench's prompts in a process of its own; what stands in for vLLM here has its interface and a bigram's wit."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_head
from helpers_training import small_target, small_tokenizer
from typer.testing import CliRunner

import fastspec
from fastspec.bench import run_bench
from fastspec.bench.peers import Job, Peer, PeerFailed, Way, answers
from fastspec.bench.report import differing, summarise
from fastspec.cli import app
from fastspec.errors import Unsupported
from fastspec.training.save import save_head

torch.set_num_threads(1)
BENCHMARKS, PATCH = Path(__file__).parents[2] / "benchmarks", fastspec.patch
STAND_IN = '''
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

    def generate(self, prompts, settings, use_tqdm):
        assert settings.temperature == 0.0 and not settings.detokenize and not use_tqdm
        with open(SEEN, "a") as file:
            print(json.dumps({"prompts": [each["prompt_token_ids"] for each in prompts], **settings.__dict__}), file=file)
        self.calls += 1
        self.drafts += 2 * len(prompts)
        out = [[each["prompt_token_ids"][-1]] * settings.max_tokens for each in prompts]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)]) for ids in out]

    def get_metrics(self):
        name = "vllm:spec_decode_num_accepted_tokens"
        return [
            types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            types.SimpleNamespace(name=name, value=self.drafts // 2 * 3),
            types.SimpleNamespace(name=name + "_per_pos", values=[self.drafts, self.drafts // 2, 0]),
        ]
'''


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in where the engine's process finds it; the file in which it writes what it was given."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_SEEN", str(tmp_path / "seen.jsonl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fastspec.bench.device.read_bandwidth", lambda device: 1e9)
    return tmp_path / "seen.jsonl"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer, a head for it and two prompts, in a folder."""
    folder = tmp_path_factory.mktemp("bench")
    target = small_target(1, peak=0.2)
    target.save_pretrained(folder / "model")
    small_tokenizer().save_pretrained(folder / "model")
    save_head(tiny_head(target, taps=(1, 2, 3)), folder / "head", "a card")
    rows = [{"id": f"p{i}", "category": "a", "turns": [text]} for i, text in enumerate(("w9 w12 w40", "w5 w6 w7 w8 w9"))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read(seen: Path) -> list[dict]:
    return [json.loads(line) for line in seen.read_text().splitlines()]


def test_an_engine_answers_the_same_prompts_plainly_and_with_chains_of_the_head(saved: Path, engine: Path) -> None:
    written: list[dict] = []
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"], model=str(saved / "model"), heads=[str(saved / "head")], methods=["eagle3"], max_new_tokens=6,
        runs=2, peers=[Peer("vllm")], on_row=written.append,
    )  # fmt: skip
    assert rows == written
    ours, theirs = rows[:4], rows[4:]
    assert [(row["method"], row["ids"]) for row in theirs] == [
        (name, [f"p{i}"]) for name in ("vllm", "vllm-eagle3-3", "vllm-eagle3-5") for i in range(2)
    ]
    assert all(row["engine_version"] == "0.0.stand-in" and row["new_tokens"] == 6 and row["prefill_ms"] is None for row in theirs)
    assert [row["head"] for row in theirs] == [None] * 2 + [str(saved / "head")] * 4
    assert all(row["acceptance_length"] is None for row in theirs[:2])
    for row in theirs[2:]:  # two drafting steps a call: both keep a draft, one of them two
        assert row["acceptance_length"] == 2.5 and row["accepted_counts"] == [0, 1, 1, 0] and row["ms_per_round"] is None
    assert {row["prompt_tokens"] for row in ours} == {row["prompt_tokens"] for row in theirs}
    assert [row["method"] for row in differing(rows, peers=True)] == [row["method"] for row in theirs] and not differing(rows)
    settings, calls = ([each for each in read(engine) if ("model" in each) is wanted] for wanted in (True, False))
    assert [each.get("speculative_config", {}).get("num_speculative_tokens") for each in settings] == [None, 3, 5]
    for each in settings:
        assert (each["model"], each["dtype"], each["enable_prefix_caching"]) == (str(saved / "model"), "float32", False)
        assert each["disable_log_stats"] is ("speculative_config" not in each) and "enforce_eager" not in each
    assert settings[1]["speculative_config"]["model"] == str(saved / "head")
    assert len(calls) == 3 * 2 * (1 + 2)  # of every way, for every prompt, a warm-up and two runs
    assert all(len(each["prompts"]) == 1 and each["max_tokens"] == 6 for each in calls)
    assert not any(each["ignore_eos"] for each in calls)
    summary = {row["method"]: row for row in summarise(rows) if row["category"] == "overall"}
    assert summary["vllm-eagle3-3"]["acceptance_length"][1] == 2.5 and summary["vllm"]["prefill_ms"] is None


def test_the_table_names_the_engine_and_what_is_missing_is_told(saved: Path, tmp_path: Path) -> None:
    arguments = ["bench", "--model", str(saved / "model"), "--prompts", str(saved / "prompts.jsonl"), "--max-new-tokens", "4"]
    arguments += ["--methods", "autoregressive", "--peer", "vllm"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "vllm: 2 x 1 prompts" in done.output and "vllm differs from transformers on a p0" in done.output
    (tmp_path / "vllm.py").unlink()
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0 and f"left out: vllm: it is not installed for {sys.executable}" in " ".join(done.output.split())
    done = CliRunner().invoke(app, [*arguments, "--peer-python", "no/such/python"], env={"COLUMNS": "160"})
    assert done.exit_code == 1 and "could not start no/such/python" in done.output


def test_an_engine_that_fails_costs_no_row_and_is_told(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_BREAKS_AT", "3")
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "--model", str(saved / "model"), "--prompts", str(saved / "prompts.jsonl"), "--max-new-tokens", "4"]
    arguments += ["--each", "1", "--methods", "eagle3", "--head", str(saved / "head"), "--peer", "vllm", "--out", str(out)]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 1
    assert "vllm-eagle3-3 ended with status 1 after 0 answers" in done.output and "no kernel for a chain of this length" in done.output
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["transformers", "eagle3", "vllm"]
    with pytest.raises(PeerFailed, match="no kernel for a chain of this length"):
        answers(Peer("vllm"), Job(str(saved / "model"), "float32", [[[1, 2]]], 3, head="somewhere"), Way("vllm-eagle3-3", 3))


def test_shapes_with_random_weights_answer_at_their_length(engine: Path) -> None:
    job = Job("shape", "bfloat16", [[[1, 2], [3]], [[4]]], 5, exact_length=True, dummy=True, warmup=0, runs=2)
    told, found = answers(Peer("vllm"), job, Way("vllm"))
    assert [[answer.tokens for answer in batch] for batch in found] == [[[[2] * 5, [3] * 5]] * 2, [[[4] * 5]] * 2]
    assert told["engine_settings"]["load_format"] == "dummy" and told["engine_settings"]["max_num_seqs"] == 2
    assert all(each["ignore_eos"] and each["min_tokens"] == 5 for each in read(engine)[1:])


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(Unsupported, match="peer 'sglang' is unknown: accepted are vllm"):
        Peer("sglang")


def test_the_two_sides_of_a_shape_and_of_a_file_make_one_table(
    saved: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers, "find_head", lambda name: str(saved / "head"))
    monkeypatch.setattr(fastspec, "patch", lambda model, eagle3: PATCH(model, eagle3=str(saved / "head")))
    out = tmp_path / "rows.jsonl"
    peers.main(["--shapes", "tiny", "--cases", "1x8", "2x8", "--new", "5", "--out", str(out)])
    shapes = read(out)
    assert [(row["engine"], row["method"], row["rows"]) for row in shapes] == [
        (name, method, rows) for name in ("fastspec", "vllm") for method, rows in (("plain", 1), ("plain", 2), ("eagle3", 1))
    ]
    calls = [each for each in read(engine) if "prompts" in each]
    assert [each["max_tokens"] for each in calls] == [5] * 10 + [5] * 5 + [1] * 5 and all(each["ignore_eos"] for each in calls)
    out.unlink()
    peers.main(["--prompts", str(saved / "prompts.jsonl"), "--model", str(saved / "model"), "--new", "4", "--out", str(out)])
    rows = read(out)
    assert [(row["engine"], row["method"], row["rows"], row.get("drafts")) for row in rows] == [
        *[("fastspec", method, rows, None) for rows in (1, 2) for method in ("plain", "eagle3")],
        *[("vllm", "eagle3" if drafts else "plain", rows, drafts) for drafts in (None, 3, 5) for rows in (1, 2)],
    ]
    assert all(row["new_tokens"] == 8 for row in rows) and all(row["same"] == 1 for row in rows[:4])
    capsys.readouterr()
    peers.main(["--table", str(out)])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 6  # of every one of vLLM's, ours beside it
