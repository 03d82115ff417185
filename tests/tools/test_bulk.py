"""A file of prompts answered into another: each as by `generate` alone, runs taken up again, several processes side by
side."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_head
from helpers.training import small_target, small_tokenizer, write_prompts
from typer.testing import CliRunner

import fastspec
from fastspec import Unsupported
from fastspec.models import SMOLLM2
from fastspec.programs import bulk
from fastspec.programs.bulk import Done, read_answered, read_left, read_tasks, settings_of, share_of_process
from fastspec.programs.cli.app import app
from fastspec.programs.cli.serving import Chosen, chosen_of, opened
from fastspec.programs.texts import encode
from fastspec.programs.training.heads import save_head

TREE = fastspec.Eagle3(depth=3, top_k=2, total_tokens=6)
GREEDY = {"do_sample": False, "top_k": 50, "temperature": 1.0}


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    model = small_target()
    return fastspec.patch(model, eagle3=tiny_head(model)), small_tokenizer()


def answer_file(model: Any, tokenizer: Any, prompts: Path, out: Path, name: str = "", **options: Any) -> Done:
    """Answer a file with settings and other options together."""
    others = {
        each: options.pop(each) for each in ("assistant", "rows", "max_length", "share", "tell") if each in options
    }
    return bulk.answer_file(model, tokenizer, prompts, out, settings_of(name, **options), **others)


def answers(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["line"])


def emitted(small: tuple[Any, Any], prompt: Any, count: int = 9, chat: bool = True) -> tuple[str, int]:
    model, tokenizer = small
    ids = encode(tokenizer, prompt, chat=chat)["input_ids"]
    new = model.generate(ids, max_new_tokens=count, **GREEDY)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new)


def test_lines_are_answered_as_alone_and_in_any_form(small, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    talk = [
        {"role": "user", "content": "w7 w8"},
        {"role": "assistant", "content": "w9"},
        {"role": "user", "content": "w5"},
    ]
    rows = [
        {"prompt": "w5 w6"},
        {"messages": talk, "id": "second"},
        {"turns": ["w9 w10 w11", "w12"], "id": 3},
        {"prompt": "w4 " * 70},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    told: list[tuple[int, int]] = []
    done = answer_file(
        *small,
        file,
        out,
        assistant=TREE,
        rows=2,
        max_new_tokens=9,
        max_length=60,
        tell=lambda *call: told.append(call),
    )
    assert done == Done(0, 3, 1) and sorted(told) == [(1, 4), (2, 4), (3, 4), (4, 4)]
    found = answers(out)
    assert [row["line"] for row in found] == [1, 3, 5, 7] and [row.get("id") for row in found] == [
        None,
        "second",
        3,
        None,
    ]
    for row, prompt in zip(found, ("w5 w6", talk, "w9 w10 w11"), strict=False):
        text, count = emitted(small, prompt)
        assert (row["prompt"], row["text"], row["tokens"]) == (prompt, text, count)
        assert row["finish"] == ("length" if count == 9 else "stop")
    assert "max_length" in found[3]["error"]
    assert answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=9) == Done(3, 1, 0)  # with more room
    raw = tmp_path / "raw.jsonl"
    file.write_text(json.dumps(rows[0]))
    answer_file(*small, file, raw, assistant=TREE, rows=2, max_new_tokens=9, chat=False)
    assert answers(raw)[0]["text"] == emitted(small, "w5 w6", chat=False)[0]


def test_conversations_that_the_server_takes_are_answered(small, tmp_path):
    """Contents as parts, or null, as it is beside a call, and a byte order mark before the first line."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    call = {"type": "function", "function": {"name": "f", "arguments": ""}}
    parts = [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]
    given = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    plain = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": ""}]
    more = {"role": "tool", "content": "w9"}
    file.write_text(json.dumps({"messages": [*given, more]}), encoding="utf-8-sig")
    assert answer_file(*small, file, out, assistant=TREE, rows=1, max_new_tokens=5) == Done(0, 1, 0)
    assert answers(out)[0]["text"] == emitted(small, [*plain, more], 5)[0]


def test_a_configuration_that_transformers_unsets_in_part(small, tmp_path, monkeypatch):
    """Gemma 2 and 3 are published with it."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"prompt": "w5 w6"}))
    monkeypatch.setattr(small[0].generation_config, "cache_implementation", "hybrid")
    assert answer_file(*small, file, out, assistant=TREE, rows=1, max_new_tokens=4) == Done(0, 1, 0)
    assert answers(out)[0]["text"] == emitted(small, "w5 w6", 4)[0]


def test_an_end_token_in_the_last_place_is_an_end(small, tmp_path, monkeypatch):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"prompt": "w5 w6"}))
    model, tokenizer = small
    ids = encode(tokenizer, "w5 w6")["input_ids"]
    *others, last = model.generate(ids, max_new_tokens=4, **GREEDY)[0, ids.shape[1] :].tolist()
    assert last not in others
    monkeypatch.setattr(model.generation_config, "eos_token_id", [last, 0])
    answer_file(*small, file, out, assistant=TREE, rows=1, max_new_tokens=4)
    (row,) = answers(out)
    assert row["finish"] == "stop" and row["tokens"] == 4


def test_a_run_goes_on_behind_a_line_that_was_not_finished(small, tmp_path):
    file, out = write_prompts(tmp_path / "prompts.jsonl", 12), tmp_path / "out.jsonl"
    options: dict[str, Any] = {
        "assistant": "autoregressive",
        "rows": 3,
        "max_new_tokens": 6,
        "temperature": 0.9,
        "seed": 5,
    }
    answer_file(*small, file, out, **options)
    whole = answers(out)
    lines = out.read_bytes().split(b"\n")
    out.write_bytes(b"\n".join([*lines[:4], lines[4][:20]]))
    assert answer_file(*small, file, out, **options) == Done(4, 8, 0)
    assert answers(out) == whole  # sampled by line, not by who comes first
    assert answer_file(*small, file, out, **options) == Done(12, 0, 0)
    other = write_prompts(tmp_path / "other.jsonl", 3)
    with pytest.raises(Unsupported, match="answers another prompt in line 1"):
        answer_file(*small, other, out, **options)
    out.write_text("hello\n")
    with pytest.raises(Unsupported, match="no answer of fastspec generate"):
        answer_file(*small, other, out, **options)


@pytest.mark.parametrize(
    "other",
    [{"max_new_tokens": 7}, {"temperature": 0.5}, {"top_p": 0.9}, {"seed": 6}, {"chat": False}, {"name": "another"}],
    ids=str,
)
def test_answers_by_other_settings_are_not_gone_on_from(small, tmp_path, other):
    file, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out.jsonl"
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "temperature": 0.9,
        "top_p": 0.8,
        "seed": 5,
        "name": "small",
        "rows": 2,
    }
    answer_file(*small, file, out, assistant="nasd", **options)
    held = out.read_bytes()
    with pytest.raises(
        Unsupported, match=r"answers line \d by other settings, .*, and now they are .*: name another --out"
    ):
        answer_file(*small, file, out, assistant="nasd", **options | other)
    assert answer_file(*small, file, out, assistant="autoregressive", **options | {"rows": 1}) == Done(
        2, 0, 0
    )  # which say the same
    assert out.read_bytes() == held


def test_greedy_answers_do_not_hang_on_what_only_sampling_reads():
    assert settings_of("m", 4, top_p=0.5, seed=3) == settings_of("m", 4) != settings_of("m", 4, 0.1)


def test_processes_share_the_lines_and_the_file(small, tmp_path, monkeypatch):
    file, out = write_prompts(tmp_path / "prompts.jsonl", 7), tmp_path / "out.jsonl"
    for rank, count in ((0, 3), (1, 2), (2, 2)):
        done = answer_file(*small, file, out, assistant="nasd", rows=2, max_new_tokens=4, share=(rank, 3))
        assert done == Done(0, count, 0)
    assert [row["line"] for row in answers(out)] == list(range(1, 8))
    assert share_of_process() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert share_of_process() == (2, 4)


def test_a_second_run_into_the_same_file_is_refused(small, tmp_path):
    """Whichever process it is of; once the first has ended, it goes on. What the first is about to finish is not cut
    off."""
    file, out = write_prompts(tmp_path / "prompts.jsonl", 3), tmp_path / "out.jsonl"
    seen: list[int] = []

    def again(done: int, of: int) -> None:
        """With the first answer, in the thread that writes: the next is half written for as long as the second run
        looks."""
        if seen:
            return
        with out.open("ab") as unfinished:
            unfinished.write(b'{"line": 9')
        seen.append(out.stat().st_size)
        with pytest.raises(
            Unsupported, match=r"another run answers into .*out\.jsonl: wait for it, stop it, or name another --out"
        ):
            answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=4)
        assert out.stat().st_size == seen[0]
        os.truncate(out, seen[0] - 10)

    assert answer_file(*small, file, out, assistant=TREE, rows=1, max_new_tokens=4, tell=again) == Done(0, 3, 0)
    assert len(seen) == 1 and [row["line"] for row in answers(out)] == [1, 2, 3]
    assert answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=4) == Done(3, 0, 0)


def test_a_file_system_without_locks_is_told(small, tmp_path, monkeypatch):
    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    file, out = write_prompts(tmp_path / "prompts.jsonl", 1), tmp_path / "out.jsonl"
    with pytest.warns(
        UserWarning, match=r"cannot be locked .*No locks available.*: two runs at once would answer every line twice"
    ):
        assert answer_file(*small, file, out, assistant=TREE, rows=1, max_new_tokens=4) == Done(0, 1, 0)


def test_the_command_loads_answers_and_counts(small, tmp_path, monkeypatch):
    file, out = write_prompts(tmp_path / "prompts.jsonl", 4), tmp_path / "out.jsonl"
    model = small_target()
    monkeypatch.setattr("fastspec.programs.cli.options.load_model", lambda name, *_, **__: (model, small_tokenizer()))
    monkeypatch.setattr("fastspec.programs.heads.load_config", lambda name: model.config)
    monkeypatch.setattr("fastspec.programs.cli.options.check_model", lambda name: None)
    command = [
        "generate",
        "--prompts",
        file,
        "--out",
        str(out),
        "--model",
        "small",
        "--max-new-tokens",
        "5",
        "--rows",
        "2",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "4 answers written" in done.output.replace("\n", " ")
    assert [row["text"] for row in answers(out)] == [emitted(small, task.prompt, 5)[0] for task in read_tasks(file)]
    assert fastspec.report(model).last.assistant == "nasd"
    refused = CliRunner().invoke(app, [*command, "--assistant", "eagle3"])
    assert refused.exit_code == 1 and "name one with --head" in refused.output
    fastspec.unpatch(model)
    save_head(tiny_head(model, kind="eagle", taps=(), own_lm_head=False), tmp_path / "head", "a card")
    before = [row["text"] for row in answers(out)]
    for assistant in ("eagle", "eagle2", None):
        out.unlink()
        more = ["--eagle", str(tmp_path / "head"), *(() if assistant is None else ("--assistant", assistant))]
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == 0, done.output
        assert [row["text"] for row in answers(out)] == before
        assert fastspec.report(model).last.assistant == (assistant or "eagle2")
        fastspec.unpatch(model)
    fastspec.patch(model)
    Path(file).write_text("{}\n")
    fastspec.unpatch(model)
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1 and 'not a row with "prompt"' in refused.output.replace("\n", " ")
    assert torch.is_grad_enabled()


def test_a_prompt_that_no_tokenizer_or_template_takes_ends_no_other(small, tmp_path):
    """Half of a character, which JSON may name, and a message whose content is no text."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    call = {"type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud83c"}'}}
    torn = (
        [{"role": "assistant", "tool_calls": [call]}],
        [{"role": "user", "content": "w5", "reasoning_content": "\ud83c"}],
    )
    rows = [{"prompt": "\ud83c w5"}, {"messages": [{"role": "user", "content": 5}]}, {"prompt": "w5 w6"}]
    rows += [{"messages": each} for each in torn]
    file.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):  # and again, when the file has a line of each
        assert answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=3).failed == 4
    found = answers(out)
    assert [row["line"] for row in found] == [1, 1, 2, 2, 3, 4, 4, 5, 5] and found[0]["prompt"] == rows[0]["prompt"]
    assert (
        r"has '\ud83c' at position 0" in found[0]["error"]
        and "messages[0].content must be a text" in found[2]["error"]
        and found[4]["text"] == emitted(small, "w5 w6", 3)[0]
        and r"tool_calls[0].function.arguments has '\ud83c'" in found[5]["error"]
        and r"the prompt has '\ud83c'" in found[7]["error"]
    )


def test_files_that_cannot_be_read_or_written_are_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("fastspec.programs.cli.serving.model_of", lambda *_, **__: pytest.fail("a model was loaded"))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w5"}')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "w5"')
    (tmp_path / "blank.jsonl").write_text("\n\n")
    for prompts, out, words in (
        (file, tmp_path, "cannot be written"),
        (file, tmp_path / "none" / "out.jsonl", "cannot be written"),
        (file, file / "out.jsonl", "cannot be written"),
        (tmp_path / "broken.jsonl", tmp_path / "out.jsonl", "no JSON object"),
        (tmp_path / "none.jsonl", tmp_path / "out.jsonl", "no such file"),
        (tmp_path / "blank.jsonl", tmp_path / "out.jsonl", "there are no prompts in"),
    ):
        done = CliRunner().invoke(app, ["generate", "--prompts", str(prompts), "--out", str(out)])
        assert done.exit_code == 1 and isinstance(done.exception, (Unsupported, SystemExit)), done.exception
        assert words in str(done.exception) + done.output
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("held", [b"my notes", b'{"prompt": "w5"}\n{"prompt": "w6"}', b'{"prompt": "w5"}'])
def test_a_file_of_something_else_is_not_touched(tmp_path, held):
    out, file = tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w5"}')
    out.write_bytes(held)
    with pytest.raises(Unsupported, match="no answer of fastspec generate"):
        read_left(file, out, settings_of("", 9))
    assert out.read_bytes() == held
    out.write_bytes(b'{"li')  # as far as it goes an answer's
    for mend, kept in ((False, b'{"li'), (True, b"")):
        assert (
            read_left(file, out, settings_of("", 9), mend=mend) == (1, list(read_tasks(file)))
            and out.read_bytes() == kept
        )


def test_what_another_process_has_written_meanwhile_is_not_cut_off(tmp_path, monkeypatch):
    """It had begun its line when the file was read, or had cut off itself what a stopped run left."""
    out = tmp_path / "out.jsonl"
    first, next_ = (json.dumps({"line": line, "prompt": "w5", "settings": {}}).encode() + b"\n" for line in (1, 2))

    def meanwhile(text: str) -> Any:
        out.write_bytes(first + next_)
        return json.loads(text)

    monkeypatch.setattr("fastspec.programs.bulk.parse_json", meanwhile)
    out.write_bytes(first + next_[:-5])
    assert [*read_answered(out, mend=True)] == [1] and out.read_bytes() == first + next_


def test_a_line_that_cannot_be_written_ends_the_run_and_the_next_one_goes_on(small, tmp_path, monkeypatch):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w5 w{number}"}) for number in range(4, 16)))
    write, room = os.write, [200]

    def full(handle: int, data: bytes) -> int:
        taken = min(len(data), room[0])
        if not taken:
            raise OSError(28, "No space left on device")
        room[0] -= taken
        return write(handle, data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr("fastspec.programs.bulk.os.write", full)
        with pytest.raises(Unsupported, match="No space left"):
            answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=3)
    assert out.stat().st_size == 200
    done = answer_file(*small, file, out, assistant=TREE, rows=2, max_new_tokens=3)
    assert (
        done.before and done.before + done.written == 12 and [row["line"] for row in answers(out)] == list(range(1, 13))
    )


@pytest.mark.parametrize(
    "command", [["generate", "--prompts", "{file}", "--out", "{out}"], ["serve", "--port", "0"]], ids=str
)
def test_an_assistant_that_these_commands_do_not_have_is_told_before_a_model_is_loaded(tmp_path, monkeypatch, command):
    monkeypatch.setattr("fastspec.programs.cli.options.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5"}')
    given = [word.format(file=tmp_path / "prompts.jsonl", out=tmp_path / "out.jsonl") for word in command]
    done = CliRunner().invoke(app, [*given, "--assistant", "cascade"])
    assert done.exit_code == 1
    assert (
        "--assistant cascade: accepted are eagle3, eagle2, eagle, mtp, nasd, speculative, autoregressive"
        in f"{done.exception} {done.output}".replace("\n", " ")
    )


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"turns": []},
        {"prompt": [{"role": "user"}]},
        {"messages": []},
        {"messages": [{"text": "w5"}], "prompt": "w5"},
    ],
    ids=str,
)
def test_a_row_of_another_form_is_refused(tmp_path: Path, row: dict) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    with pytest.raises(Unsupported, match='line 1: not a row with "prompt", "messages" or "turns"'):
        list(read_tasks(tmp_path / "prompts.jsonl"))


OWN, OLDER = {"eagle3": "own"}, {"eagle": "older", "eagle2": "older"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((SMOLLM2, {}, None), Chosen("eagle3", SMOLLM2)),
        ((SMOLLM2, {}, "eagle"), Chosen("eagle", f"{SMOLLM2}-eagle")),
        ((SMOLLM2, OLDER, None), Chosen("eagle2", "older")),
        ((SMOLLM2, OWN, "eagle2"), Chosen("eagle2", f"{SMOLLM2}-eagle")),
        ((SMOLLM2, {}, "nasd"), Chosen("nasd", None)),
        (("other", {}, None), Chosen("nasd", None)),
        (("other", {**OLDER, **OWN}, None), Chosen("eagle3", "own")),
        (("other", {**OLDER, **OWN}, "eagle"), Chosen("eagle", "older")),
        (("other", {}, "autoregressive"), Chosen("autoregressive", None)),
        ((SMOLLM2, {}, None, "small"), Chosen("speculative", None, "small")),
        (("other", {}, "speculative", "small"), Chosen("speculative", None, "small")),
    ],
    ids=str,
)
def test_commands_choose_an_assistant_and_its_head(given: Any, wanted: Chosen) -> None:
    assert chosen_of(*given) == wanted
    for assistant in ("eagle3", "eagle2", "eagle"):
        with pytest.raises(Unsupported, match=f"name one with --head .* for {assistant}$"):
            chosen_of("other", {}, assistant)
    with pytest.raises(Unsupported, match=r"; --head older is for eagle and eagle2$"):
        chosen_of("other", OLDER, "eagle3")
    for more in (({}, "nasd", "small"), (OWN, None, "small"), ({}, "speculative")):
        with pytest.raises(Unsupported, match="--draft-model"):
            chosen_of("other", *more)


def test_a_draft_model_drafts_for_what_these_commands_open(tmp_path: Path) -> None:
    for name, layers in (("large", 2), ("little", 1)):
        small_target(layers=layers).save_pretrained(tmp_path / name)
        small_tokenizer().save_pretrained(tmp_path / name)
    large, little = str(tmp_path / "large"), str(tmp_path / "little")
    chosen = chosen_of(large, {}, None, little)
    batch, tokenizer = opened(large, chosen, rows=2, max_length=64, device="cpu", backend="torch")
    with batch:
        ids = tokenizer("w5 w6 w7", return_tensors="pt").input_ids
        answer = batch.submit(ids, max_new_tokens=12, do_sample=False).result(60)
        assert batch.stats.assistant == batch.info["assistant"] == "speculative" and batch.stats.drafted > 0
    assert torch.equal(answer, small_target(layers=2).generate(ids, max_new_tokens=12, do_sample=False))
