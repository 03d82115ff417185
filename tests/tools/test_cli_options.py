"""What the commands share: versions, `python -m fastspec`, device and backend; and prompts, runs and warm-ups of the
bench."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers.heads import save_eagle3
from helpers.models import tiny_head
from helpers.seq2seq import tiny_seq2seq
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

import fastspec
from fastspec.devices import choose_device
from fastspec.errors import Unsupported
from fastspec.models import load_model
from fastspec.programs.bench import run_bench
from fastspec.programs.bench.methods import BUNDLED, read_rows
from fastspec.programs.cli import options
from fastspec.programs.cli.app import app

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny decoder-only model and a tiny T5, each with a tokenizer, and a head for the first."""
    folder = tmp_path_factory.mktemp("options")
    for name, model in (("model", small_target()), ("t5", tiny_seq2seq("t5", vocab_size=128))):
        save_with_tokenizer(model, folder / name)
    save_eagle3(tiny_head(small_target()), folder / "head")
    return folder


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_python_m_prints_the_version_of_our_distribution() -> None:
    done = subprocess.run([sys.executable, "-m", "fastspec", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"fastspec-transformers {fastspec.__version__} ({Path(fastspec.__file__).parent}), torch "
    )


ABSENT = ("cuda", 0, "no CUDA device"), ("cuda:2", 2, "cuda:0 to cuda:1"), ("gpu", 2, "accepted are")


@pytest.mark.parametrize(("name", "count", "words"), ABSENT)
def test_a_device_that_is_not_there_is_refused(name: str, count: int, words: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(Unsupported, match=words):
        choose_device(name)
    assert choose_device() == ("cuda" if count else "cpu") and choose_device("cpu") == "cpu"
    if count:
        assert choose_device("cuda:1") == "cuda:1"


@pytest.mark.parametrize(
    "command", [["demo"], ["chat", "--prompt", "w9"], ["bench"], ["cascade", "train"], ["generate"]]
)
def test_commands_that_load_a_model_take_a_device_and_a_backend(
    saved: Path, tmp_path: Path, command: list[str], monkeypatch
) -> None:
    model = str(saved / "model")
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"id": f"a{n}", "prompt": "w9", "answer": 1}) + "\n" for n in range(60)))
    files = ["--prompts", str(items), "--out", str(tmp_path / "p.safetensors"), "--answers", str(tmp_path / "a.jsonl")]
    named = [*files, "--stage", f"a={model}", "--model", f"b={model}"] if "cascade" in command else ["--model", model]
    named += ["--head", str(saved / "head")] if "demo" in command else files[:4] if "generate" in command else []
    refused = run(*command, *named, "--device", "cuda:7")
    assert refused.exit_code == 1 and "cuda:7" in refused.output, refused.output

    def patch(model: object, *, backend: str = "auto", **options: object) -> None:
        raise Unsupported(f"asked for {backend}")

    for name in ("patch", "patched"):
        monkeypatch.setattr(fastspec, name, patch)
    refused = run(
        *command,
        *named,
        "--backend",
        "torch",
        "--device",
        "cpu",
        *(["--max-new-tokens", "1"] if "demo" in command else []),
    )
    assert refused.exit_code == 1 and "asked for torch" in refused.output, refused.output


@pytest.mark.parametrize("given", [[], ["--stored", "--head-bits", "8"]], ids=str)
@pytest.mark.parametrize("command", ["generate", "warmup", "serve"])
def test_weights_are_read_as_a_command_says(
    saved: Path, tmp_path: Path, monkeypatch, command: str, given: list[str]
) -> None:
    """The server's process is this one."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5"}\n')
    more = {"generate": ["--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")], "serve": ["--port", "0"]}
    import_module("fastspec.programs.serving.app")  # whose own name for it stays
    monkeypatch.setattr("fastspec.programs.serving.remote.Remote", lambda build: build())

    def patch(model: object, *, stored: bool | None, head_bits: int | None, **options: object) -> None:
        raise Unsupported(f"asked for stored={stored}, head_bits={head_bits}")

    monkeypatch.setattr(fastspec, "patch", patch)
    done = run(command, str(saved / "model"), *more.get(command, ()), "--device", "cpu", *given)
    assert done.exit_code == 1 and f"stored={True if given else None}, head_bits={8 if given else None}" in done.output


def test_a_prompt_is_benched_with_runs_and_warm_ups(saved: Path, monkeypatch) -> None:
    from fastspec.programs.bench import run as bench

    asked, ask = [], bench.ask
    monkeypatch.setattr(bench, "ask", lambda method, *rest: (asked.append(method.name), ask(method, *rest))[1])
    options = ["--prompt", "w9 w12", "--prompt", "w5", "--runs", "3", "--warmup", "2", "--methods", "nasd", "--json"]
    done = run("bench", "--model", str(saved / "model"), *options, "--max-new-tokens", "6")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["category"], row["ids"], row["runs"]) for row in rows] == [("prompt", [i], 3) for i in "1122"]
    assert asked == ["transformers", "nasd"] + 2 * (["transformers"] * 5 + ["nasd"] * 5)  # a first call each


def test_a_run_that_differs_is_not_hidden_by_the_median(saved: Path, monkeypatch) -> None:
    from fastspec.generation.stats import Stats
    from fastspec.programs.bench import run as bench
    from fastspec.programs.bench.methods import BenchPrompt, Method

    answers = iter([([1], 1.0), ([1], 2.0), ([1], 3.0), ([1], 1.0), ([1], 2.0), ([2], 9.0)])

    def ask(*given: object) -> bench.MeasuredAnswer:
        tokens, seconds = next(answers)
        return bench.MeasuredAnswer([tokens], seconds, Stats(), None)

    monkeypatch.setattr(bench, "ask", ask)
    made = [Method(name, None, {}, {}) for name in ("transformers", "nasd")]
    found = [answer for _, answer, _ in bench.on_part([BenchPrompt("a", "b", [1])], made, 4, runs=3)]
    assert [(answer.seconds, answer.tokens) for answer in found] == [(2.0, [[1]]), (9.0, [[2]])]


def test_bench_alone_asks_the_bundled_prompts(saved: Path) -> None:
    rows = run_bench(model=str(saved / "model"), methods=["autoregressive"], max_new_tokens=2)
    asked = read_rows(BUNDLED)
    assert len(asked) == 8 and [row["ids"] for row in rows if row["method"] == "transformers"] == [
        [row["id"]] for row in asked
    ]
    assert len({row["category"] for row in asked}) == 6


def test_a_configuration_is_looked_for_where_the_model_is(saved: Path, monkeypatch) -> None:
    from transformers import AutoConfig

    seen, read = [], AutoConfig.from_pretrained
    monkeypatch.setattr(
        AutoConfig, "from_pretrained", lambda name, **options: (seen.append(options), read(name, **options))[1]
    )
    model, _ = load_model(str(saved / "t5"), revision="v1", attn_implementation="eager")
    assert model.config.is_encoder_decoder and {"revision": "v1"} in seen


@pytest.mark.filterwarnings("ignore:the draft model reads")  # it is the target's twin
def test_an_encoder_decoder_model_is_benched_and_chatted_with(saved: Path) -> None:
    methods, model = ["autoregressive", "nasd", "speculative"], str(saved / "t5")
    rows = run_bench(
        texts=["w9 w12 w40", "w5 w6"], model=model, draft_model=model, methods=methods, max_new_tokens=9, batch=2
    )
    assert [row["method"] for row in rows] == ["transformers", *methods] and rows[3]["acceptance_length"] > 1
    assert all(row["identical"] for row in rows) and rows[0]["new_tokens"] > 9
    options = ["--assistant", "transformers,nasd", "--max-new-tokens", "9", "--prompt", "w9 w12", "--json"]
    done = run("chat", "--model", str(saved / "t5"), *options)
    assert done.exit_code == 0, done.output
    answers = json.loads(done.stdout)["turns"][0]["answers"]
    assert answers[1]["identical"] is True and len(answers[1]["tokens"]) == len(answers[0]["tokens"]) > 1


@pytest.mark.parametrize(("asked", "processes", "packed"), [(True, 1, True), (None, 1, None), (True, 2, None)])
def test_stored_keeps_experts_packed(monkeypatch, asked: bool | None, processes: int, packed: bool | None) -> None:
    """But of a model that is cut over processes, whose experts transformers reads."""
    told: list[dict[str, object]] = []
    model = small_target()
    monkeypatch.setattr("fastspec.programs.cli.options.cut_over", lambda _: {})
    monkeypatch.setattr(
        "fastspec.programs.cli.options.load_model", lambda *_, **options: (told.append(options), (model, None))[1]
    )
    patched, _ = options.patched_model("org/gpt-oss", "cpu", "torch", stored=asked, processes=processes)
    fastspec.unpatch(patched)
    assert patched is model and told == [{"packed": packed}]
