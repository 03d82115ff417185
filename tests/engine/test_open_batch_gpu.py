"""Open batches on CUDA: rounds are captured while other threads submit, and every answer is that of `generate`
alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.generate import MAKERS, NEVER, TREE
from helpers.open import GREEDY, texts, told
from helpers.threads import in_threads
from helpers.training import small_target, small_tokenizer

import fastspec
from fastspec.generation.engine.engine import Engine
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.programs.bulk import Done, answer_file, encode, settings_of

pytestmark = ON_CUDA
DEVICE = "cuda"
SECONDS = 120
COUNTS = (9, 3, 14, 5, 7, 40, 11, 6)


def made(kind: str) -> tuple[Any, Any]:
    """(the unpatched model, the same patched, with a head), on the device."""
    target, head = MAKERS[kind]
    plain, model = target().to(DEVICE), target().to(DEVICE)
    return plain, fastspec.patch(model, eagle3=head(model).to(DEVICE))


def settings(at: int) -> dict[str, Any]:
    """Of one prompt: some with processors, which make tensors on the device when it is submitted."""
    more: dict[str, Any] = [{}, {"repetition_penalty": 1.3}, {"suppress_tokens": [7, 8]}, {"eos_token_id": [5, NEVER]}][
        at % 4
    ]
    return {**GREEDY, "pad_token_id": 0, "max_new_tokens": 12 + 3 * at, **more}


@pytest.mark.parametrize("assistant", [TREE, "nasd"], ids=["eagle3", "nasd"])
def test_rounds_without_drafts_are_captured_too(assistant):
    """Alone, where the drafter hears of them, and beside rows that draft."""
    plain, model = made("bigram")
    ids = [each.to(DEVICE) for each in texts(*COUNTS)]
    want = [plain.generate(each[None], **settings(at))[0].tolist() for at, each in enumerate(ids)]
    with fastspec.continuous(model, assistant, rows=4, max_length=128) as batch:
        for share in (1, 2, 3):
            asked = [batch.submit(each, drafts=at % share > 0, **settings(at)) for at, each in enumerate(ids)]
            assert told(asked) == want


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=["autoregressive", "eagle3", "nasd"])
def test_threads_submit_while_rounds_are_captured(assistant, rows):
    """Each batch captures its own rounds and passes over prompts, of every width; ids come from the device and from the
    host."""
    plain, model = made("bigram")
    ids = [each.to(DEVICE) for each in texts(*COUNTS)]
    want = [plain.generate(each[None], **settings(at))[0].tolist() for at, each in enumerate(ids)]
    for _ in range(3):
        got: dict[tuple[int, int], list[int]] = {}
        with fastspec.continuous(model, assistant, rows=rows, max_length=128, prefill_chunk=16) as batch:

            def ask(which: int, batch: Any = batch, got: Any = got) -> None:
                for at in range(which, which + len(ids)):
                    at %= len(ids)
                    given = ids[at].cpu() if (which + at) % 3 == 0 else ids[at]
                    future = batch.submit(given, **settings(at))
                    got[which, at] = future.result(SECONDS)[0].tolist()

            in_threads(ask, 6)
            assert batch.stats.joined == 6 * len(ids)
            assert batch.stats.replays > 0 or assistant == "nasd"  # whose graphs are not whole rounds
        assert got == {(which, at): emitted for which in range(6) for at, emitted in enumerate(want)}


def test_two_models_are_captured_by_two_threads():
    """Neither disturbs the other's captures, which begin by waiting for the device."""
    pairs = [made(kind) for kind in ("bigram", "random")]
    ids = [each.to(DEVICE) for each in texts(*COUNTS)]
    options = {**GREEDY, "max_new_tokens": 24}
    want = [[plain.generate(each[None], **options).tolist() for each in ids] for plain, _ in pairs]
    got: dict[tuple[int, int], Any] = {}

    def ask(which: int) -> None:
        for at, each in enumerate(ids):
            got[which, at] = (
                pairs[which][1].generate(each[None], **options, assistant=TREE if at % 2 else "autoregressive").tolist()
            )

    in_threads(ask, 2)
    assert got == {(which, at): want[which][at] for which in range(2) for at in range(len(ids))}


@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=["autoregressive", "eagle3"])
def test_captured_rounds_narrow_and_widen(assistant, monkeypatch):
    """An answer that runs all the time goes through rounds of one, two and four rows, and drafts are as good in all of
    them."""
    plain, model = made("bigram")
    seen: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, *rest: seen.append(len(self.state.running)) or step(self, *rest))
    ids = [each.to(DEVICE) for each in texts(*COUNTS)]
    options = {**GREEDY, "max_new_tokens": 400}
    want = [
        plain.generate(ids[at][None], **{**options, "max_new_tokens": count})[0].tolist()
        for at, count in enumerate((400, 20, 20, 20))
    ]
    with fastspec.continuous(model, assistant, rows=4, max_length=512) as batch:
        for _ in range(2):
            first = batch.submit(ids[0], **options)
            others = [batch.submit(each, **{**options, "max_new_tokens": 20}) for each in ids[1:4]]
            assert told([first, *others]) == want
        stats = batch.stats
    assert {1, 4} <= set(seen) <= {1, 2, 4} and stats.replays > len(seen) / 2
    if assistant is TREE:
        with fastspec.continuous(model, assistant, rows=1, max_length=512) as batch:
            told([batch.submit(ids[0], **options)])
        assert stats.acceptance_length > 0.9 * batch.stats.acceptance_length


def test_a_file_of_prompts(tmp_path: Path):
    """Whose ids a tokenizer makes on the host."""
    model, tokenizer = fastspec.patch(small_target().to(DEVICE)), small_tokenizer()
    prompts = ["w5 w6", "w7", "w9 w10 w11", "w3 w4 w5 w6"]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    settings = settings_of("", 9)
    assert answer_file(model, tokenizer, file, out, settings, assistant="nasd", rows=2, max_length=60) == Done(0, 4, 0)
    rows = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda row: row["line"])
    for row, prompt in zip(rows, prompts, strict=True):
        ids = encode(tokenizer, prompt, DEVICE)["input_ids"]
        new = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert row["text"] == tokenizer.decode(new, skip_special_tokens=True)


def test_a_first_token_does_not_wait_for_its_row(monkeypatch):
    """It comes while the device still works on that."""
    _, model = made("bigram")
    admit, over, seen = Engine.admit, torch.cuda.Event(), list[bool]()

    class Seen(RoundStreamer):
        def put_round(self, round: StreamedRound) -> None:
            seen.append(over.query())

    def slowly(*given: Any) -> None:
        admit(*given)
        torch.cuda._sleep(10**9)
        over.record()

    with fastspec.continuous(model, TREE, rows=1, max_length=128) as batch:
        told([batch.submit(texts(9)[0], **GREEDY, max_new_tokens=12)])
        monkeypatch.setattr(Engine, "admit", slowly)
        told([batch.submit(texts(9)[0], streamer=Seen(), **GREEDY, max_new_tokens=12)])
    assert seen[0] is False and seen[-1] is True
