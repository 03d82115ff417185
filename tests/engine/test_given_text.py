"""Answers of another model that are verified as drafts: the target says what it would have said, and counts what it
kept."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import MAKERS, SHALLOW, TREE, answer, prompts, unpatched
from helpers.models import tiny_head, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.generation.drafters.given_text import GivenText
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.verify import measure
from fastspec.patches.assistants.registry import Continued

ASSISTANTS: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "nasd": "nasd",
    "eagle3": TREE,
    "speculative": fastspec.Speculative(gamma=3),
    "early exit": fastspec.Speculative(early_exit=1),
}
LENGTH = 90  # more than a pass verifies at once


@pytest.fixture(scope="module", params=sorted(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(kind: str) -> Any:
    return unpatched(kind)


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    make, head = MAKERS[kind]
    model = make()
    model.generation_config.eos_token_id = 5
    return fastspec.patch(model, eagle3=head(model), speculative=tiny_model(seed=3, num_hidden_layers=2))


def answered(model: Any, texts: list[list[int]], assistant: Any, **options: Any) -> tuple[Any, Any]:
    heard: list[Any] = []
    out = model.generate(**options, assistant=Continued(assistant, texts, heard.append, measure=True))
    return out, heard[0]


def common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.some("eagle3", "speculative", "random")
@pytest.mark.each_value
@pytest.mark.parametrize("name", ASSISTANTS)
@examples(2)
@given(seed=st.integers(0, 2**31))
def test_greedy_output_is_the_plain_one_and_the_common_part_was_kept(
    plain: Any, model: Any, name: str, seed: int
) -> None:
    drawn = Random(seed)
    batch = prompts(7, 3, 5, seed=drawn.randrange(4))
    options = {"do_sample": False, "max_new_tokens": LENGTH, "repetition_penalty": drawn.choice([1.0, 1.3])}
    wanted = answer(plain, batch, **options)
    width = batch["input_ids"].shape[1]
    emitted = [row[width:].tolist() for row in wanted]
    emitted = [row[: row.index(5) + 1] if 5 in row else row for row in emitted]
    texts = []
    for row in emitted:
        kept = drawn.choice([0, len(row), drawn.randint(0, len(row)), drawn.randint(0, len(row))])
        texts.append(row[:kept] + drawn.choices(range(97), k=drawn.randint(0, 20)))
    out, outcome = answered(model, texts, ASSISTANTS[name], **batch, **options)
    assert out.tolist() == wanted.tolist()
    assert outcome.kept == [common(text, row) for text, row in zip(texts, emitted, strict=True)]
    assert outcome.tokens == emitted


@pytest.mark.each_value
@pytest.mark.parametrize("name", ASSISTANTS)
def test_nothing_is_kept_behind_an_end(plain: Any, model: Any, name: str) -> None:
    """A given text that goes on behind the end token just as the target would."""
    batch = prompts(7, 3, 5, seed=3)
    width = batch["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    texts = answer(plain, batch, **options, eos_token_id=1000)[:, width:].tolist()
    end = texts[1][2]
    emitted = [row[: row.index(end) + 1] if end in row else row for row in texts]
    _, outcome = answered(model, texts, ASSISTANTS[name], **batch, **options, eos_token_id=end)
    assert outcome.tokens == emitted and outcome.kept == list(map(len, emitted)) and len(emitted[1]) <= 3


@pytest.mark.each_value
@pytest.mark.parametrize("name", ASSISTANTS)
def test_measures_are_those_of_the_raw_distribution(plain: Any, model: Any, name: str) -> None:
    batch = prompts(6, 4)
    options = {"do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.2}
    width = batch["input_ids"].shape[1]
    texts = [row[width : width + 9].tolist() for row in answer(plain, batch, **options)]
    _, outcome = answered(model, texts, ASSISTANTS[name], **batch, **options)
    for row, emitted in enumerate(outcome.tokens):
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + emitted])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(outcome.measures[row], measure(logits, torch.tensor(emitted)), atol=1e-4, rtol=1e-4)


def test_sampled_text_follows_the_plain_distribution_whatever_the_answer_is() -> None:
    """4,000 texts of two tokens over a vocabulary of 7: chi-square on the pairs at a significance of 1e-4."""
    model = tiny_model(
        **SHALLOW, vocab_size=7, pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.2
    )
    rows, ids = 4000, torch.tensor([[1, 3, 2]])
    model.requires_grad_(False)
    first = torch.softmax(model(ids).logits[0, -1], -1)
    distributions = [
        torch.softmax(model(torch.cat((ids, torch.tensor([[token]])), 1)).logits[0, -1], -1) for token in range(7)
    ]
    expected = torch.stack([first[token] * distributions[token] for token in range(7)]).flatten() * rows
    texts = [[int(first.argmax()), 4, 4]] * (rows // 2) + [[0, 0]] * (rows // 2)
    torch.manual_seed(5)
    with fastspec.patched(model):
        out, _ = answered(
            model, texts, "autoregressive", input_ids=ids.expand(rows, -1), do_sample=True, top_k=0, max_new_tokens=2
        )
    seen = Counter((out[:, 3] * 7 + out[:, 4]).tolist())
    counts = torch.tensor([seen[pair] for pair in range(49)])
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < 93.2  # the 1 - 1e-4 quantile with 48 degrees of freedom is 93.2


def test_streams_and_scores_are_those_of_the_plain_call(model: Any) -> None:
    batch = prompts(6)
    options = {
        **batch,
        "do_sample": False,
        "max_new_tokens": 20,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    plain = model.generate(**options)
    text = plain.sequences[0, 6:16].tolist()
    out, outcome = answered(model, [text], "nasd", **options)
    assert out.sequences.tolist() == plain.sequences.tolist() and outcome.kept == [len(text)]
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4)


def test_the_verifier_takes_few_passes(model: Any) -> None:
    batch = prompts(6)
    plain = model.generate(**batch, do_sample=False, max_new_tokens=LENGTH)
    text = plain[0, 6:].tolist()
    passes: list[int] = []

    class Counting(GivenText):
        def propose(self, extent: int) -> Any:
            tree = super().propose(extent)
            passes.append(tree.tokens.shape[1])
            return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastspec.generation.engine.engine.GivenText", Counting)
        answered(model, [text], "autoregressive", **batch, do_sample=False, max_new_tokens=LENGTH)
    assert passes == [8, 16, 32, 64][: len(passes)] and sum(passes) >= len(text) - 1


def test_head_is_shown_the_features_of_what_was_kept() -> None:
    """What a drafter begins with after a kept answer is what it begins with where the answer stands in the prompt."""
    model = MAKERS["bigram"][0]()
    fastspec.patch(model, eagle3=tiny_head(model))
    batch = prompts(6, 4, seed=2)
    options = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None}
    emitted = model.generate(**batch, **options)[:, 6:].tolist()
    shown: list[Any] = []
    begin = EagleDrafter.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EagleDrafter, "begin", lambda *args: (shown.append([x.clone() for x in args[1:]]), begin(*args))[1]
        )
        answered(model, [emitted[0][:40], [*emitted[1][:13], 96]], TREE, **batch, **options)
        ids, counts, features, root = shown.pop()
        for row, real in enumerate((6, 4)):
            whole = torch.tensor([batch["input_ids"][row, 6 - real :].tolist() + emitted[row]])[:, : int(counts[row])]
            assert (
                ids[row, : counts[row]].tolist() == whole[0].tolist()
                and int(root[row]) == emitted[row][int(counts[row]) - real]
            )
            model.generate(whole, do_sample=False, max_new_tokens=2, assistant=TREE)
            torch.testing.assert_close(features[row, : counts[row]], shown.pop()[2][0], atol=1e-4, rtol=1e-4)
