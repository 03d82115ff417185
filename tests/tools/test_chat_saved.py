"""A chat that was saved goes on: by /load, by --load, and in another model's chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.chat import make_chat, screen
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.programs.chat.loop import converse
from fastspec.programs.chat.session import read_saved
from fastspec.programs.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny model with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("saved")
    save_with_tokenizer(small_target(), folder)
    return str(folder)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["chat", "--device", "cpu", *arguments], env={"COLUMNS": "160"})
    return done.exit_code, done.output


def test_what_was_saved_is_read_as_it_was(tmp_path: Path) -> None:
    chat, path = make_chat(), tmp_path / "chat.json"
    settings = ["/assistant autoregressive,nasd", "/processor topk 0.8 40", "/gamma 4", "/set eagle.paths [[0],[0,0]]"]
    converse(chat, [*settings, "w10", "w11 w12", f"/save {path}"], screen(), strict=True)
    saved = read_saved(path)
    assert (saved.settings, saved.conversation, saved.turns) == (chat.settings, chat.conversation, chat.turns)


def test_settings_of_older_files_are_read(tmp_path: Path) -> None:
    """Files that name each field of an assistant's config by its command."""
    older = {
        "gamma": 3,
        "ngram": None,
        "top_k_filler": 2,
        "stop_if_unknown": False,
        "storage": "onelevel",
        "early_exit": 4,
        "branches": None,
        "drafts": "sampled",
        "tree_total_tokens": "auto",
        "tree_depth": 2,
        "tree_top_k": None,
    }
    own = {"model": "m", "resources": [["eagle3", "h"]], "assistants": ["nasd"], "storage_per": "chat", "seed": 7}
    path = tmp_path / "older.json"
    path.write_text(json.dumps({"settings": own | older, "conversation": [], "turns": []}))
    found = read_saved(path).settings
    assert (found.resources, found.storage_per, found.seed) == ((("eagle3", "h"),), "chat", 7)
    assert found.assistant("nasd") == fastspec.Nasd(gamma=3, top_k_filler=2, stop_if_unknown=False, storage="one_level")
    assert found.assistant("speculative") == fastspec.Speculative(gamma=3, early_exit=4)
    assert found.assistant("eagle") == fastspec.Eagle1(drafts="sampled")
    assert found.assistant("eagle2") == fastspec.Eagle2(total_tokens="auto", depth=2)
    assert found.assistant("eagle3") == fastspec.Eagle3(total_tokens="auto", depth=2)


def test_load_goes_on_where_save_was(tmp_path: Path, model: str) -> None:
    path, again = tmp_path / "chat.json", tmp_path / "again.json"
    options = ["--model", model, "--assistant", "nasd,transformers", "--max-new-tokens", "7"]
    lines = ["w10", f"/save {path}", "w20 w21", f"/save {tmp_path / 'all.json'}"]
    status, emitted = run(*options, *(word for line in lines for word in ("--prompt", line)))
    assert status == 0, emitted
    straight = json.loads((tmp_path / "all.json").read_text())
    for way in (["--load", str(path)], ["--model", model, "--prompt", f"/load {path}"]):
        status, emitted = run(*way, "--prompt", "w20 w21", "--prompt", f"/save {again}")
        assert status == 0, emitted
        found = json.loads(again.read_text())
        assert found["conversation"] == straight["conversation"] and len(found["turns"]) == 2
        assert [each["tokens"] for each in found["turns"][1]["answers"]] == [
            each["tokens"] for each in straight["turns"][1]["answers"]
        ]
        assert found["settings"]["assistants"] == ["nasd", "transformers"] and found["settings"]["max_new_tokens"] == 7


def test_load_refuses_options_that_the_file_has(tmp_path: Path, model: str) -> None:
    status, emitted = run("--load", str(tmp_path / "chat.json"), "--model", model, "--seed", "3", "--prompt", "w9")
    assert status == 2 and "--model, --seed" in emitted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no chat that /save wrote"),
        ("[]", "no chat"),
        ('{"settings": {}}', "no conversation and no turns"),
        ('{"settings": {"model": 5}, "conversation": [], "turns": []}', "model is 5"),
        (
            '{"settings": {"model": "a", "assistants": [], "resources": [], "colour": 1}, "conversation": [], '
            '"turns": []}',
            "colour",
        ),
        (
            '{"settings": {"model": "a", "assistants": [], "resources": []}, "conversation": [{"role": "user"}], '
            '"turns": []}',
            "content",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(Unsupported, match=words):
        read_saved(tmp_path / "other.json")
    with pytest.raises(Unsupported, match="No such file"):
        read_saved(tmp_path / "none.json")
