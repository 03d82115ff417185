"""One name for one thing on the command line, what is said of mistyped ones, and what is refused before weights are
loaded."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.heads import EAGLE1, as_eagle, save_eagle3, write
from helpers.models import tiny_head
from helpers.training import save_with_tokenizer, small_target

import fastspec
from fastspec.config import STORAGES
from fastspec.devices import memory_of
from fastspec.errors import CheckpointError, Unsupported, accepted
from fastspec.models import SMOLLM2, load_config, load_model
from fastspec.patches.api import ASSISTANTS
from fastspec.patches.assistants import heads as heads_of
from fastspec.programs import heads
from fastspec.programs.cli import device as cli_device
from fastspec.programs.training import TrainConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, two EAGLE-3 heads and an EAGLE-1/2 head for it, and a head for another."""
    folder, target = tmp_path_factory.mktemp("names"), small_target()
    save_with_tokenizer(target, folder / "model")
    (folder / "items.jsonl").write_text('{"prompt": "w5"}\n')
    (folder / "empty.jsonl").write_text("")
    save_eagle3(tiny_head(target), folder / "head")
    save_eagle3(tiny_head(target), folder / "other", taps=(0, 2, 40))
    (folder / "older").mkdir()
    embedding = target.get_input_embeddings().weight.detach().clone()
    write(folder / "older", *as_eagle(tiny_head(target, **{**EAGLE1, "draft_vocab_size": 128}), embedding))
    return folder


@pytest.fixture
def reached(monkeypatch) -> list[Any]:
    """Arguments of the model that a command would load next."""
    found: list[Any] = []

    def patched_model(name: str, *rest: Any, **options: Any) -> None:
        found.append((name, options["heads"]))
        raise Unsupported("far enough")

    monkeypatch.setattr(cli_device.options, "patched_model", patched_model)
    return found


@pytest.mark.parametrize("given", [["{}/model"], ["--model", "{}/model"], ["--model={}/model"]], ids=str)
@pytest.mark.parametrize("option", ["--head", "--eagle3"])
@pytest.mark.parametrize("command", [["warmup"], ["tune", "--backend", "triton"], ["generate"]], ids=str)
def test_a_model_is_an_argument_or_an_option_and_a_head_has_its_older_spelling(
    saved: Path, tmp_path: Path, reached: list[Any], command: list[str], given: list[str], option: str, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5"}\n')
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    more = files if command == ["generate"] else []
    done = run(*command, *(word.format(saved) for word in given), *more, option, str(saved / "head"))
    assert done.exit_code == 1 and "far enough" in done.output, done.output
    assert reached == [(str(saved / "model"), {"eagle3": str(saved / "head")})]


def test_heads_of_each_kind_are_told_by_their_files(saved: Path, reached: list[Any]) -> None:
    run("warmup", str(saved / "model"), "--head", str(saved / "head"), "--eagle", str(saved / "older"))
    older = str(saved / "older")
    assert reached == [(str(saved / "model"), {"eagle3": str(saved / "head"), "eagle": older, "eagle2": older})]


@pytest.mark.parametrize("command", ["warmup", "demo", "chat"])
def test_a_name_before_a_head_is_refused_where_nothing_is_compared(
    saved: Path, reached: list[Any], command: str, monkeypatch
) -> None:
    monkeypatch.setattr("fastspec.programs.chat.settings.load_model", None)
    done = run(
        command, str(saved / "model"), "--prompt" if command != "warmup" else "--rows", "1", "--head", f"x={saved}/head"
    )
    told = " ".join(done.output.split())
    assert done.exit_code == 1 and not reached
    assert "names x" in told and "fastspec bench" in told and "generate" in told, done.output


def test_a_chat_refuses_what_takes_no_resource_before_it_loads(saved: Path, monkeypatch) -> None:
    monkeypatch.setattr("fastspec.programs.chat.settings.load_model", None)
    done = run("chat", str(saved / "model"), "--prompt", "w1", "--resource", "eagl3=x")
    assert done.exit_code == 1 and "'eagl3' takes no resource: did you mean eagle3" in done.output, done.output


@pytest.mark.parametrize("old", [False, True])
def test_training_has_the_names_of_the_other_commands(saved: Path, tmp_path: Path, old: bool, monkeypatch) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr("fastspec.programs.training.train", lambda config, **_: seen.append(config))
    names = ["--target", "--output", "--new-tokens"] if old else ["--model", "--out", "--max-new-tokens"]
    values = [str(saved / "model"), str(tmp_path / "head"), "77"]
    given = [word for pair in zip(names, values, strict=True) for word in pair]
    done = run("train", *given, "--prompts", "p.jsonl")
    assert done.exit_code == 0, done.output
    assert (seen[0].target, seen[0].output, seen[0].new_tokens) == (*values[:2], 77)


def test_the_server_takes_the_length_of_answers_by_both_names(monkeypatch) -> None:
    pytest.importorskip("starlette")
    from fastspec.programs.serving import app, requests

    def stop(*limits: int) -> None:
        raise Unsupported(f"limits {limits}")

    monkeypatch.setattr(requests, "Limits", stop)
    monkeypatch.setattr("fastspec.programs.serving.remote.Remote", lambda build: nullcontext())
    monkeypatch.setattr(app, "bound", lambda host, port: nullcontext())
    for option in ("--max-new-tokens", "--max-tokens"):
        assert "limits (55, 64, 1048576)" in run("serve", option, "55").output


TRAIN = "train", "{}/model", "--out", "{}/new", "--device", "cpu"
CASCADE = (
    *("cascade", "train", "--model", "b={}/model", "--prompts", "{}/items.jsonl"),
    *("--out", "{}/p.safetensors", "--answers", "{}/a.jsonl"),
)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["bench", "{}/model", "--model", "{}/model"], 2, "names the model already"),
        (["warmup"], 2, "name the model, as an argument or by --model"),
        (["train", "--out", "x"], 2, "name the model"),
        (["serve", "--heaad", "x"], 2, "no such option: --heaad: did you mean --head?"),
        (["bench", "--eagel3", "x"], 2, "did you mean --eagle3?"),
        (["bench", "--qqqq", "x"], 2, "no such option: --qqqq ╰"),
        (["bench", "{}/model", "--assistant", "eagel3"], 1, "did you mean eagle3?"),
        (["inspect", "--head", "x"], 2, "no such option: --head: HEAD is an argument, without a name"),
        (["tuen"], 2, "Did you mean 'tune'?"),
        (["chat", "{}/model", "--assistant", "eagel3", "--prompt", "w5"], 1, "did you mean eagle3?"),
        (["serve", "{}/model", "--assistant", "nsad"], 1, "did you mean nasd?"),
        (["bench", "{}/model", "--methods", "eagel3"], 1, "did you mean eagle3?"),
        (["bench", "{}/model", "--methods", "eagle3"], 1, "method 'eagle3' cannot be measured: it needs --head"),
        (["bench", "{}/model", "--head", "a={}/head", "--methods", "eagle3:b"], 1, "did you mean eagle3:a?"),
        (["bench", "{}/model", "--head", "{}/other"], 1, "/other does not fit the model: the head taps"),
        (["bench", "{}/model", "--draft-model", "smollm2-135-instruct"], 1, "did you mean smollm2-135m-instruct?"),
        (["bench", "{}/model", "--early-exit", "4"], 1, "the target has 4 layers, so at most 3 draft"),
        (["demo", "{}/model", "--head", "{}/other"], 1, "does not fit the model"),
        (["demo", "{}/model", "--head", "{}/older"], 1, "older is an EAGLE-1/2 head: fastspec bench takes it"),
        (["chat", "{}/model", "--head", "{}/other", "--prompt", "w5"], 1, "does not fit the model"),
        (["serve", "{}/model", "--head", "{}/other"], 1, "does not fit the model"),
        (["serve", "{}/model", "--head", "{}/older", "--assistant", "eagle3"], 1, "older is for eagle and eagle2"),
        (["serve", "{}/model", "--head", "b={}/head"], 1, "--head names b, which is no --stage"),
        (["serve", "{}/model", "--stage", "a=x", "--head", "b={}/head"], 1, "no --stage: accepted are a"),
        (["warmup", "{}/model", "--head", "{}/other"], 1, "does not fit the model"),
        (["chat", "{}/model", "--draft-model", "no/such-model", "--prompt", "w5"], 1, "load the model 'no/such-model'"),
        (["warmup", "{}/model", "--draft-model", "no/such-model"], 1, "could not load the model 'no/such-model'"),
        (["inspect", "{}/other", "{}/model", "--probe"], 1, "does not fit"),
        (["inspect", "smollm2-135m-instuct"], 1, "did you mean smollm2-135m-instruct?"),
        ([*TRAIN, "--prompts", "{}/none.jsonl"], 1, "none.jsonl: no such file"),
        ([*TRAIN, "--prompts", "{}/empty.jsonl"], 1, "there are no prompts in"),
        ([*TRAIN, "--prompts", "{}/items.jsonl", "--heldout", "{}/empty.jsonl"], 1, "there are no prompts in"),
        ([*TRAIN, "--prompts", "{}/items.jsonl", "--start-from", "{}/other"], 1, "does not fit the model"),
        ([*TRAIN, "--prompts", "{}/items.jsonl", "--loss", "hybird"], 2, "did you mean hybrid?"),
        ([*CASCADE, "--stage", "a={}/model", "--head", "a={}/other"], 1, "does not fit the model"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_before_weights_are_loaded(
    saved: Path, arguments: list[str], status: int, words: str, monkeypatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are loaded"))
    done = run(*(word.format(saved) for word in arguments))
    assert done.exit_code == status and words in " ".join(re.findall(r"[^\s│]+", done.output)), done.output


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("gguf", "is read by the package gguf, which is not installed: pip install"),
        (heads_of.PACKAGE, heads_of.INSTALL),
    ],
)
@pytest.mark.parametrize("command", ["demo", "generate", "warmup"])
def test_a_package_that_is_missing_is_told_before_weights_are_loaded(
    saved: Path, tmp_path: Path, command: str, package: str, words: str, monkeypatch
) -> None:
    from transformers import AutoModelForCausalLM

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are loaded"))
    files = ["--prompts", str(saved / "items.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    more = {"demo": [], "generate": files, "warmup": ["--head", SMOLLM2]}[command]
    done = run(command, "--model", SMOLLM2, *more)
    assert done.exit_code == 1 and words in done.output, done.output


def test_older_spellings_are_not_in_the_help() -> None:
    for command in ("generate", "serve", "warmup", "tune", "bench", "demo", "chat", "train", "inspect"):
        told = run(command, "--help").output
        assert "--model" in told and "MODEL" in told, command
        assert not any(old in told for old in ("--eagle", "--target", "--max-tokens ", "--new-tokens ", "--output"))


@pytest.mark.parametrize("names", [ASSISTANTS, STORAGES, ("--head", "--max-new-tokens")], ids=str)
def test_the_name_that_was_probably_meant_is_told(names: tuple[str, ...]) -> None:
    for name in names:
        for given in (name.upper(), name[:-3] + name[-2] + name[-3] + name[-1]):
            assert accepted(given, names).startswith(f"did you mean {name}? accepted are {names[0]}, "), given
    assert accepted("zzz", names) == f"accepted are {', '.join(names)}"


def test_the_library_tells_it_too() -> None:
    model = small_target()
    for refused, words in (
        (lambda: fastspec.patch(model, assistant="eagel3"), "did you mean 'eagle3'"),
        (lambda: fastspec.patch(model, assistant={"name": "nsad"}), "did you mean 'nasd'"),
        (lambda: fastspec.patch(model, backend="tritn"), "did you mean 'triton'"),
        (lambda: fastspec.Nasd(storage="one-level"), "did you mean 'one_level'"),
    ):
        with pytest.raises(Unsupported, match=words):
            refused()


@pytest.mark.parametrize(("room", "fits"), [(None, True), (1 << 16, False), (1 << 30, True)])
def test_a_model_that_memory_cannot_hold_is_refused_before_its_weights_are_read(
    saved: Path, room: int | None, fits: bool, monkeypatch
) -> None:
    from transformers import AutoModelForCausalLM

    read, name = [], str(saved / "model")
    count = sum(parameter.numel() for parameter in load_model(name)[0].parameters())
    real = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr("fastspec.models.memory_of", lambda device: room)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *given, **options: read.append(1) or real(*given, **options)
    )
    if fits:
        load_model(name)
    else:
        with pytest.raises(Unsupported, match=f"has {count:,} parameters, .* in float32, and cpu has"):
            load_model(name)
    assert len(read) == fits
    assert (memory_of("cpu") or 1 << 40) > 1 << 26


def test_a_model_and_its_tokenizer_are_all_that_is_returned() -> None:
    with pytest.raises(Unsupported, match="output_loading_info=True cannot be given here"):
        load_model("org/name", output_loading_info=True)


def test_a_mistyped_model_is_asked_for_once(monkeypatch) -> None:
    from transformers import AutoConfig, AutoTokenizer

    asked = []

    def unreachable(url: str, **_: Any) -> None:
        asked.append(url)
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    for kind in (AutoConfig, AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: pytest.fail("it is tried again"))
    for load in (load_model, load_config):
        with pytest.raises(Unsupported) as error:
            load("smolm2-135m-instruct")
        assert f"(no route to the hub): did you mean {SMOLLM2}? models that have a name: {SMOLLM2}" in str(error.value)
    assert len(asked) == 2
    for name in ("no such model", "./no/such/folder"):
        with pytest.raises(Unsupported, match="it is no hub id"):
            load_model(name)
    assert len(asked) == 2


def test_a_mistyped_model_is_told_before_torch_is_loaded() -> None:
    more = {
        "generate": ["--prompts", "p.jsonl", "--out", "a.jsonl"],
        "inspect": ["some/head"],
        "train": ["--out", "some/head"],
    }
    program = """
import json, sys
from fastspec.programs.cli.app import app
for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except SystemExit as end:
        print(words[0], end.code, "torch" in sys.modules, "transformers" in sys.modules)
"""
    commands = "generate", "serve", "warmup", "demo", "chat", "bench", "inspect", "train"
    words = [[command, *more.get(command, []), "--model", "smolm2-135m-instruct"] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(words)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr.count("did you mean smollm2-135m-instruct?") == len(commands), done.stderr
    assert done.stdout.splitlines() == [f"{command} 1 False False" for command in commands]


def test_a_busy_hub_and_a_model_of_the_cache_are_left_to_transformers(tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub.errors import EntryNotFoundError
    from transformers import AutoTokenizer

    class Tried(Exception):
        pass

    def tried(*_: Any, **__: Any) -> None:
        raise Tried

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tried)
    with pytest.raises(Unsupported, match="does not give it"):
        load_model("org/name")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    with pytest.raises(Tried):
        load_model("org/name")
    monkeypatch.undo()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tried)

    def without_config(url: str, **_: Any) -> None:
        raise EntryNotFoundError("no config.json")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", without_config)
    with pytest.raises(Tried):
        load_model("org/name")


def test_a_name_before_a_head_is_no_part_of_a_path(saved: Path, tmp_path: Path, monkeypatch) -> None:
    assert heads.named("a=some/head") == ("a", "some/head")
    assert heads.named("/some=where/head") == ("", "/some=where/head")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert heads.named("a=b") == ("", "a=b")
    both = [f"a={saved / 'head'}", f"b={saved / 'head'}"]
    assert set(heads.read_heads(both)) == {"eagle3:a", "eagle3:b"}
    with pytest.raises(Unsupported, match="are both heads of eagle3:a"):
        heads.read_heads([both[0], both[0]])
    with pytest.raises(CheckpointError, match="does not fit the model"):
        heads.read_heads([str(saved / "other")], small_target().config)
