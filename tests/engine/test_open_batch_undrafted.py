"""Prompts of an open batch that take no drafts: the same answers a token a round, alone and beside rows that draft."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.captured import stand_in
from helpers.generate import TREE
from helpers.open import GREEDY, SECONDS, alone, made, texts

import fastspec
from fastspec import Unsupported
from fastspec.generation.drafters.head_drafter import HeadDrafter
from fastspec.generation.engine import batching
from fastspec.patches.call.processors import RoundStreamer, StreamedRound


class Trees(RoundStreamer):
    """Keeps what it is told, trees too."""

    trees = True

    def __init__(self) -> None:
        self.told: list[StreamedRound] = []

    def put_round(self, round: StreamedRound) -> None:
        self.told.append(round)


@pytest.mark.some("Eagle3", "nasd", "autoregressive")
@pytest.mark.each_value  # a captured and a launched round call the same drafter
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", [TREE, "eagle", "nasd", "autoregressive"], ids=str)
def test_answers_without_drafts_are_the_same(monkeypatch: pytest.MonkeyPatch, assistant: Any, captured: bool) -> None:
    """Greedy, sampled, and where the processors look at the history; in turns with rows that draft, so that the
    drafter goes on from rounds that it drafted nothing for."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = made("bigram")
    prompts = texts(9, 5, 7)
    rules: list[dict[str, Any]] = [GREEDY, {**GREEDY, "repetition_penalty": 1.3}, {"do_sample": True, "top_k": 4}]
    with fastspec.continuous(model, assistant, rows=4, max_length=120) as batch:
        for number, (text, rule) in enumerate(zip(prompts, rules, strict=True)):
            given = {"eos_token_id": None, "pad_token_id": 0, "seed": number, **rule}
            kept = [Trees() for _ in range(3)]
            first = batch.submit(text, streamer=kept[0], drafts=False, max_new_tokens=40, **given).result(SECONDS)
            beside = [
                batch.submit(text, streamer=kept[1], max_new_tokens=60, **given),
                batch.submit(text, streamer=kept[2], drafts=False, max_new_tokens=40, **given),
            ]
            drafted, undrafted = (each.result(SECONDS)[0].tolist() for each in beside)
            assert drafted[: len(undrafted)] == undrafted == first[0].tolist()
            if not rule.get("do_sample"):
                assert drafted == alone(plain, text, 60, **rule)
            for streamer in (kept[0], kept[2]):
                assert [len(each.tokens) for each in streamer.told] == [1] * 40
                assert all(each.drafted == each.accepted == 0 and each.tree is None for each in streamer.told)
            if assistant == TREE:
                assert sum(each.accepted for each in kept[1].told) > 0


@pytest.mark.parametrize("assistant", [TREE, "eagle", "nasd"], ids=str)
def test_trees_hold_what_was_accepted(assistant: Any) -> None:
    _, model = made("bigram")
    streamer = Trees()
    with fastspec.continuous(model, assistant, rows=3, max_length=120) as batch:
        told, beside = texts(9, 5)
        asked = batch.submit(told, streamer=streamer, max_new_tokens=50, **GREEDY)
        batch.submit(beside, max_new_tokens=50, **GREEDY).result(SECONDS)
        answer = asked.result(SECONDS)[0].tolist()
    first, *rounds = streamer.told
    assert first.tree is None and (assistant == "eagle" or sum(each.accepted for each in rounds) > 0)
    last, said = first.tokens[-1], first.tokens
    for each in rounds:
        tree = each.tree
        if tree is None:
            assert each.drafted == 0 and len(each.tokens) == 1
            last, said = each.tokens[-1], said + each.tokens
            continue
        assert tree.path[0] == 0 and tree.tokens[0] == last
        assert len(tree.tokens) == len(tree.parents) >= 1 + each.drafted
        assert all(parent < node for node, parent in enumerate(tree.parents) if node)
        assert all(tree.parents[node] == above for above, node in zip(tree.path, tree.path[1:], strict=False))
        assert [tree.tokens[node] for node in tree.path[1:]][: each.accepted] == each.tokens[: each.accepted]
        last, said = each.tokens[-1], said + each.tokens
    assert answer[9:] == said


def test_an_assistant_that_would_not_hear_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadDrafter, "observes_roots", False)
    _, model = made()
    with fastspec.continuous(model, "eagle3", rows=1, max_length=64) as batch:
        with pytest.raises(Unsupported, match="EagleDrafter of assistant 'eagle3' does not say observes_roots"):
            batch.submit(texts(5)[0], drafts=False, max_new_tokens=4)
        batch.submit(texts(5)[0], max_new_tokens=4, **GREEDY).result(SECONDS)
