"""benchmarks/acceptance.py on tiny models: its rows, answers without an end, and what it says of answers that
differ."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bench import benchmark
from helpers.heads import save_eagle3
from helpers.models import tiny_head, tiny_model
from helpers.training import small_target, small_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fastspec.generation.stats import Stats
from fastspec.patches.assistants.mtp import new_mtp, saved_mtp
from fastspec.patches.hf.cache import CACHE, kept_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_cpu")]  # of a script that is run by hand

TOKENS = 20
TEXTS = ["w9 w12 w40", "w5 w6 w7 w8 w9", "w100 w4 w4", "w77 w30 w31 w8", "w64"]
VERSIONS = {"torch", "triton", "transformers", "fastspec", "commit"}


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark("acceptance")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model that ends its answers after 9, 10, 19 and more tokens, its tokenizer, a head and a prompt file, in a
    folder."""
    folder = tmp_path_factory.mktemp("acceptance")
    target = small_target(10, peak=0.2)
    target.save_pretrained(folder / "model")
    tokenizer = small_tokenizer()
    tokenizer.chat_template = None  # answers follow a prompt's last word
    tokenizer.save_pretrained(folder / "model")
    save_eagle3(tiny_head(target), folder / "head")
    (folder / "words.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return folder


def rows_of(script: Any, saved: Path, *arguments: str) -> list[dict[str, Any]]:
    out = saved / "rows.jsonl"
    out.unlink(missing_ok=True)
    files = ["--model", str(saved / "model"), "--prompts", str(saved / "words.jsonl"), "--out", str(out)]
    script.main([*files, "--tokens", str(TOKENS), *arguments])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@cache
def lengths() -> list[int]:
    """New tokens of every answer."""
    model = small_target(10, peak=0.2)
    tokenizer = small_tokenizer()
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    return [model.generate(ids, max_new_tokens=TOKENS, do_sample=False).shape[1] - ids.shape[1] for ids in prompts]


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_say_what_ran_and_how_long_rows_were_running(script, saved: Path, batch: int) -> None:
    head = str(saved / "head")
    drafted = {"autoregressive": None, "eagle3": head} | (
        {"nasd": None, "eagle": "random weights"} if batch > 1 else {}
    )
    rows = rows_of(script, saved, "--batch", str(batch), "--assistants", *drafted, "--head", head)
    assert {row["assistant"]: row["head"] for row in rows} == drafted
    for row in rows:
        assert set(row) >= VERSIONS | {"device", "dtype"} and row["backend"].startswith("torch") and not row["no_end"]
        assert row["identical"] == 5 and row["differences"] == [] and row["near_ties"] == row["other"] == 0
        for name in ("tokens_per_second", "transformers_tokens_per_second"):
            low, middle, high = row[f"{name}_quantiles"]
            assert 0 < low <= middle <= high and row[name] > 0
    emitted = lengths()
    assert len(set(emitted)) > 2  # else nothing ends early in a batch
    parts = [emitted[start : start + batch] for start in range(0, 5, batch)]
    rounds = [max(part) - 1 for part in parts]  # the first token comes from the prefill
    assert rows[0]["rounds"] == sum(rounds) >= rows[1]["rounds"]
    room = sum(len(part) * spent for part, spent in zip(parts, rounds, strict=True))
    assert rows[0]["rows_running"] == round((sum(emitted) - 5) / room, 3)
    assert batch > 1 or all(row["rows_running"] == 1.0 for row in rows)


def test_prompts_take_turns_in_fewer_rows(script, saved: Path) -> None:
    head = ["--head", str(saved / "head"), "--assistants", "autoregressive", "eagle3", "--batch", "5"]
    whole, turns = rows_of(script, saved, *head), rows_of(script, saved, *head, "--rows", "2")
    for at_once, in_turns in zip(whole, turns, strict=True):
        assert (at_once["rows"], in_turns["rows"]) == (5, 2) and at_once["identical"] == in_turns["identical"] == 5
        assert in_turns["rows_running"] > at_once["rows_running"] and in_turns["rounds"] > at_once["rounds"]
    emitted = sum(lengths())
    assert turns[0]["rows_running"] == round((emitted - 5) / (2 * turns[0]["rounds"]), 3)


def test_without_an_end_all_answers_are_equally_long(script, saved: Path) -> None:
    (row,) = rows_of(script, saved, "--batch", "3", "--assistants", "autoregressive", "--no-end")
    assert row["no_end"] and row["identical"] == 5
    assert row["rounds"] == 2 * (TOKENS - 1) and row["rows_running"] == 1.0


def test_a_row_says_which_tree_was_measured_and_chosen(script, saved: Path) -> None:
    (row,) = rows_of(
        script, saved, "--assistants", "eagle3", "--head", str(saved / "head"), "--tree", "auto", "--no-plain"
    )
    (choice,) = row["choices"]
    assert (
        row["tree"] == "auto"
        and choice["chosen"] in choice["sizes"]
        and len(choice["expected"]) == len(choice["sizes"]) > 1
    )
    (row,) = rows_of(
        script, saved, "--assistants", "eagle3", "--head", str(saved / "head"), "--tree", "6,2,3", "--no-plain"
    )
    assert row["tree"] == [6, 2, 3] and "choices" not in row
    rows = rows_of(
        script,
        saved,
        "--assistants",
        "autoregressive",
        "eagle3",
        "--head",
        str(saved / "head"),
        "--tree",
        "6,2,3",
        "9,4,3",
    )
    ways = [(each["assistant"], each.get("tree")) for each in rows]
    assert ways == [("autoregressive", None), ("eagle3", [6, 2, 3]), ("eagle3", [9, 4, 3])]
    assert all(each["identical"] == each["count"] for each in rows) and {each.get("head") for each in rows[1:]} == {
        str(saved / "head")
    }


def test_several_heads_are_measured_in_one_run_as_by_themselves(script, saved: Path) -> None:
    other = saved / "other"
    save_eagle3(tiny_head(small_target(10, peak=0.2), seed=5), other)
    heads, shared = [str(saved / "head"), str(other)], ["--assistants", "autoregressive", "eagle3", "--tree", "20,3,6"]
    plain, *both = rows_of(script, saved, *shared, "--head", *heads)
    assert plain["assistant"] == "autoregressive" and [row["head"] for row in both] == heads
    assert all(row["identical"] == row["count"] for row in both)
    alone = [rows_of(script, saved, *shared, "--head", head)[1] for head in heads]
    assert [row["rounds"] for row in both] == [row["rounds"] for row in alone]
    assert both[0]["rounds"] != both[1]["rounds"]  # so that one could not stand for the other


def test_an_mtp_layer_has_rows_by_trees_and_by_drafted_tokens(script, saved: Path) -> None:
    layer = saved / "layer"
    layer.mkdir(exist_ok=True)
    save_file(saved_mtp(new_mtp(small_target(10, peak=0.2))), layer / "model.safetensors")
    shared = ["--assistants", "mtp", "--head", str(layer), "--tree", "2,0,1", "8,2,3"]
    rows = rows_of(script, saved, *shared, "--draft-vocab", "256", "300")
    assert [(row["tree"], row["draft_vocab"]) for row in rows] == [
        (tree, count) for tree in ([2, 0, 1], [8, 2, 3]) for count in (256, 300)
    ]
    assert all(row["identical"] == row["count"] for row in rows)
    whole = rows_of(script, saved, *shared, "--no-plain")
    assert all("draft_vocab" not in row and row["acceptance_length"] >= 1 for row in whole)


def test_drawn_answers_have_rows_of_their_own_and_are_compared_with_nothing(script, saved: Path) -> None:
    shared = ("--head", str(saved / "head"), "--tree", "6,2,2", "8,3,2", "--no-plain")
    rows = rows_of(script, saved, *shared, "--temperature", "0", "1", "2", "--top-p", "0.9")
    assert [(row.get("temperature"), row.get("top_p"), row["tree"]) for row in rows] == [
        (heat, None if heat is None else 0.9, tree) for heat in (None, 1.0, 2.0) for tree in ([6, 2, 2], [8, 3, 2])
    ]
    greedy, drawn = {row["answers_sha256"] for row in rows[:2]}, {row["answers_sha256"] for row in rows[4:]}
    assert len(greedy) == 1 and not greedy & drawn and all("identical" not in row for row in rows)
    with pytest.raises(SystemExit):
        rows_of(script, saved, *shared[:-1], "--temperature", "1")


@pytest.mark.parametrize("end", ["cut", "changed"])
def test_an_answer_that_differs_is_listed_and_no_near_tie(script, saved: Path, monkeypatch, end: str) -> None:
    """A planted wrong token, and an answer that stops early, of the fourth prompt."""
    real, emitted = script.generate, lengths()[3]

    def generate(model: Any, prompts: Any, assistant: Any, *rest: Any) -> Any:
        answers = real(model, prompts, assistant, *rest)
        if assistant is not None and len(prompts) == 2:  # the second batch begins with it
            answers[0] = answers[0][:-1] if end == "cut" else [*answers[0][:2], 127 - answers[0][2], *answers[0][3:]]
        return answers

    monkeypatch.setattr(script, "generate", generate)
    (row,) = rows_of(script, saved, "--batch", "3", "--assistants", "autoregressive")
    (found,) = row["differences"]
    assert (row["identical"], row["near_ties"], row["other"]) == (4, 0, 1)
    assert found["prompt"] == 3 and found["position"] == (emitted - 1 if end == "cut" else 2)
    if end == "cut":
        assert found["tokens"][1] is None and found["tokens"][0] is not None
        assert found["gap"] is found["bound"] is row["logit_gap_where_different"] is None
    else:
        assert sum(found["tokens"]) == 127 and found["gap"] > found["bound"] > 0


def test_counts_of_gaps_at_both_sides_of_the_bound(script) -> None:
    gaps = [(0.0, 0.1), (0.1, 0.1), (0.1001, 0.1), (None, None), (float("nan"), 0.1)]
    mine = script.Tally([1.0], [7], [Stats(rows=1)], differences=[{"gap": gap, "bound": bound} for gap, bound in gaps])
    row = script.row_of(mine, script.Tally([2.0], [7]), 9)
    assert (row["near_ties"], row["other"], row["identical"]) == (2, 3, 4)
    assert row["acceptance_length"] is row["rows_running"] is None  # every answer came with the prefill


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9))
def test_a_difference_is_where_the_answers_part(script, plain: list[int], ours: list[int], first: int) -> None:
    model, prompt = MODEL, [first, 11]
    if plain == ours:
        with pytest.raises(ValueError, match="equal"):
            script.difference(model, prompt, plain, ours)
        return
    found = script.difference(model, prompt, plain, ours)
    at = found["position"]
    assert plain[:at] == ours[:at] and found["tokens"] == [
        plain[at] if at < len(plain) else None,
        ours[at] if at < len(ours) else None,
    ]
    assert found["tokens"][0] != found["tokens"][1]
    if None in found["tokens"]:
        assert found["gap"] is found["bound"] is None
        return
    with torch.no_grad():
        logits = model(torch.tensor([prompt + plain[:at]])).logits[0, -1]
    assert found["gap"] == pytest.approx(abs(float(logits[plain[at]] - logits[ours[at]])), abs=1e-6)


MODEL = tiny_model()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_the_bound_is_that_of_two_passes(script, dtype: torch.dtype) -> None:
    """Passes over a whole text and token by token: the gap of the two best changes by less than the bound, and by a
    tenth of it."""
    model = tiny_model(initializer_range=0.1).to(dtype)
    torch.manual_seed(0)
    text = torch.randint(6, 97, (1, 150))
    whole, cache, steps = model(text).logits[0].float(), None, []
    for token in text.split(1, 1):
        out = model(token, **{CACHE: cache}, use_cache=True)
        cache = kept_cache(out)
        steps.append(out.logits[0, -1].float())
    changes = []
    for place, (one, other) in enumerate(zip(whole, steps, strict=True)):
        pair = one.topk(2).indices.tolist()
        moved = abs(float((one[pair[0]] - one[pair[1]]) - (other[pair[0]] - other[pair[1]])))
        changes.append(moved / script.rounding_bound(model, one, pair, place + 1))
    assert sum(change > 1 for change in changes) <= 2  # one in 370 of 150, and a margin of one
    assert max(changes) > 0.1
