"""The texts that a head is trained on: answers of the target, what is added to them, and their shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training import END, VOCAB, settings, small_target, small_texts, small_tokenizer
from transformers import GenerationConfig

import fastspec
from fastspec.errors import Unsupported
from fastspec.patches.session import session_of
from fastspec.programs.training import regenerate
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import (
    OutOfTime,
    Shards,
    Texts,
    TimeLimit,
    batches,
    draft_vocabulary,
    join_answers,
    plan_batches,
)
from fastspec.programs.training.regenerate import Enlarger, answer, answer_prompts, candidates, end_tokens, follow_up

ROWS = [{"prompt": "w40 w41"}, {"turns": ["w50", "w60"]}]


def enlarged(folder: Path, texts: Texts, **changes: object) -> Texts:
    config = settings(folder, prompts="none", shard_texts=16, **changes)
    return Enlarger(
        target=small_target(),
        tokenizer=small_tokenizer(),
        ends=(END,),
        rows=ROWS,
        config=config,
        clock=TimeLimit(),
        report=[].append,
    ).run(texts)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return small_texts(small_target(), 40, settings(Path("unused")), ends=(END,))


def rows_of(texts: Texts) -> list[tuple[list[int], list[bool]]]:
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in map(texts.text, range(len(texts)))]


def test_answers_equal_generate_without_a_warning_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", pytest.fail)
    model = small_target(3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=n).tolist() for n in (1, 7, 12, 5)]
    texts = answer(model, prompts, np.zeros(4, bool), settings(Path("unused"), new_tokens=40), (7, END))
    assert texts.greedy.all()
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=[7, END], pad_token_id=0)[
            0
        ].tolist()
        assert texts.text(index)[0].tolist() == expected


@pytest.mark.gpu
def test_answers_on_a_gpu_equal_generate_and_leave_the_model_unpatched() -> None:
    model, rng = small_target(3).cuda(), np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=int(rng.integers(1, 30))).tolist() for _ in range(150)]
    texts = answer(model, prompts, np.zeros(150, bool), settings(Path("unused"), new_tokens=40), (7, END))
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=[7, END], pad_token_id=0)[
            0
        ].tolist()
        assert texts.text(index)[0].tolist() == expected
    assert session_of(model) is None


@pytest.mark.parametrize("is_patched", [False, True])
def test_answers_heed_no_settings_of_the_targets_own(is_patched: bool) -> None:
    model, prompts = small_target(3), [[5, 9, 77], [40]]
    asked = np.zeros(2, bool), settings(Path("unused"), new_tokens=40), (END,)
    plain = rows_of(answer(model, prompts, *asked))
    own = model.generation_config = GenerationConfig(
        repetition_penalty=1.5, max_new_tokens=3, do_sample=True, eos_token_id=9
    )
    if is_patched:
        fastspec.patch(model)
    assert rows_of(answer(model, prompts, *asked)) == plain
    assert model.generation_config is own and (session_of(model) is not None) == is_patched


def test_a_target_is_patched_once_for_all_shards_and_unpatched_behind_them(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches: list[object] = []
    former, rows_of_call, chosen = regenerate.patched, regenerate._call, iter(range(3, 99))
    calls: list[int] = []
    monkeypatch.setattr(regenerate, "patched", lambda model: patches.append(model) or former(model))
    monkeypatch.setattr(
        regenerate, "_rows", lambda target, length: next(chosen)
    )  # as the rounds of the former shards hold memory
    monkeypatch.setattr(regenerate, "_call", lambda *given: calls.append(given[-1]) or rows_of_call(*given))
    model = small_target(3)
    model.generation_config.temperature = own = 0.75
    rows = [{"prompt": f"w{n} w{n + 1}"} for n in range(10, 16)]
    config = settings(tmp_path, prompts="none", shard_texts=2, second_answers=True, sampled_share=1.0)
    for made in (1, 0):  # what is there asks nobody
        patches.clear()
        found = answer_prompts(model, small_tokenizer(), rows, (END,), config, tmp_path / "answers", TimeLimit())
        assert len(patches) == made and len(found) == 6 and len(list((tmp_path / "answers").iterdir())) == 3
        assert session_of(model) is None and model.generation_config.temperature == own
    assert len(calls) == 3 and len(set(calls)) == 1
    patches.clear()
    more = Enlarger(
        target=model,
        tokenizer=small_tokenizer(),
        ends=(END,),
        rows=rows,
        config=config,
        clock=TimeLimit(),
        report=[].append,
    ).run(found)
    assert len(calls) == 6 and len(set(calls[3:])) == 1
    assert (
        len(patches) == 1
        and len(more) == 12
        and session_of(model) is None
        and model.generation_config.temperature == own
    )


def test_sampled_answers_are_drawn_from_what_the_settings_leave() -> None:
    model, prompts = small_target(3, peak=0.05), [[5, 9, 77]] * 60
    some = answer(
        model, prompts, np.ones(60, bool), settings(Path("unused"), new_tokens=2, temperature=0.8, top_p=0.6), ()
    )
    drawn = {tuple(tokens[3:]) for tokens, _ in rows_of(some)}
    logits = model(torch.tensor([[5, 9, 77]])).logits[0, -1] / 0.8
    kept = logits.topk(64)
    shares = kept.values.softmax(-1)
    nucleus = set(kept.indices[shares.cumsum(-1) - shares < 0.6].tolist())
    assert len(drawn) > 10 and {first for first, _ in drawn} <= nucleus and len(nucleus) < 64


def test_cut_answers_are_continued(texts: Texts, tmp_path: Path) -> None:
    cut = candidates("continue_cut", texts, (END,))
    assert 0 < len(cut) < len(texts)
    found = rows_of(enlarged(tmp_path, texts, continue_cut=True))
    given = rows_of(texts)
    assert len(found) == len(given)
    assert found[: len(given) - len(cut)] == [row for i, row in enumerate(given) if i not in cut], (
        "the others stay as they were"
    )
    for tokens, mask in found[len(given) - len(cut) :]:
        before = next(
            row
            for i, row in enumerate(given)
            if i in cut and tokens[: len(row[0])] == row[0] and len(tokens) > len(row[0])
        )
        size = len(before[0])
        assert mask == before[1] + [True] * (len(tokens) - size)
        assert tokens[-1] == END or len(tokens) == size + 32
        assert END not in tokens[size:-1]


def test_greedy_answers_stay_greedy_when_continued(texts: Texts, tmp_path: Path) -> None:
    config = settings(tmp_path, new_tokens=64)
    cut = candidates("continue_cut", texts, (END,))
    chosen = [i for i in cut if texts.greedy[i]]
    prompts = [[t for t, a in zip(*texts.text(i), strict=True) if not a] for i in chosen]
    whole = answer(small_target(), prompts, np.zeros(len(chosen), bool), config, (END,))
    found = [tokens for tokens, _ in rows_of(enlarged(tmp_path, texts, continue_cut=True))]
    assert chosen and all(tokens in found for tokens, _ in rows_of(whole))


def test_second_answers_are_greedy_and_stand_beside_the_first(texts: Texts, tmp_path: Path) -> None:
    sampled = candidates("second_answers", texts, (END,))
    assert sorted(sampled) == np.flatnonzero(~texts.greedy).tolist()
    result = enlarged(tmp_path, texts, second_answers=True)
    found = rows_of(result)
    assert found[: len(texts)] == rows_of(texts)
    prompts = [texts.text(i)[0][~texts.text(i)[1]].tolist() for i in sampled]
    best = rows_of(answer(small_target(), prompts, np.zeros(len(prompts), bool), settings(tmp_path), (END,)))
    assert sorted(found[len(texts) :]) == sorted(best)
    assert result.greedy[len(texts) :].all()


def test_follow_ups_ask_a_second_question(texts: Texts, tmp_path: Path) -> None:
    ended = candidates("follow_ups", texts, (END,))
    assert len(ended)
    found, given = rows_of(enlarged(tmp_path, texts, follow_ups=True)), rows_of(texts)
    turns = [[2, first, *rest, END, 3] for first, *rest in ([40, 41], [50])]
    assert len(found) == len(given)
    for tokens, mask in found[len(given) - len(ended) :]:
        first, answered = next(row for i, row in enumerate(given) if i in ended and tokens[: len(row[0])] == row[0])
        turn = next(turn for turn in turns if tokens[len(first) :][: len(turn)] == turn)
        asked = len(first) + len(turn)
        assert len(tokens) > asked
        assert mask == answered + [False] * len(turn) + [True] * (len(tokens) - asked)


def test_follow_up_refuses_what_it_cannot_write() -> None:
    tokenizer = small_tokenizer()
    assert follow_up(tokenizer, "w9", (END,)) == [2, 9, END, 3]
    with pytest.raises(Unsupported, match="none of the target's end tokens"):
        follow_up(tokenizer, "w9", (77,))
    tokenizer.chat_template = None
    with pytest.raises(Unsupported, match="chat template"):
        follow_up(tokenizer, "w9", (END,))


def test_made_texts_are_kept_and_the_time_counts_over_calls(texts: Texts, tmp_path: Path) -> None:
    def files() -> dict[str, int]:
        return {str(path.relative_to(tmp_path)): path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")}

    kinds = {"continue_cut": True, "second_answers": True}
    short = enlarged(tmp_path, texts, enlarge_minutes=1e-9, **kinds)
    made = files()
    assert list(made) == ["enlarge/continue_cut/shard_00000.npz"], "a kind's first shard is made where any time is left"
    again = enlarged(tmp_path, texts, enlarge_minutes=1e-9, **kinds)
    assert files() == made and rows_of(again) == rows_of(short)
    everything = enlarged(tmp_path, texts, **kinds)
    assert len(files()) > 2 and made.items() <= files().items()
    assert rows_of(everything) == rows_of(enlarged(tmp_path / "one", texts, **kinds)), "the same as made in one call"


def test_no_shard_is_started_that_would_end_too_late(tmp_path: Path) -> None:
    clock = TimeLimit(minutes=1.0)
    shards = Shards(tmp_path, clock, seconds=[25.0])
    clock.began -= 40
    with pytest.raises(OutOfTime):
        shards.get(0, (0,), lambda: (Texts.of([]), {}))
    clock.began += 20
    shards.get(0, (0,), lambda: (Texts.of([]), {}))


def test_end_tokens_come_from_the_model_and_the_tokenizer() -> None:
    model = small_target()
    model.generation_config.eos_token_id = [9, 7]
    assert end_tokens(model, small_tokenizer()) == (END, 7, 9)
    model.generation_config.eos_token_id = None
    assert end_tokens(model, None) == ()


def test_answers_without_greedy_count_as_sampled(tmp_path: Path) -> None:
    arrays = {"ids": np.array(["1", "0"]), "lengths": np.array([2, 3]), "tokens": np.array([5, END, 6, 7, 8])}
    rows = [{"id": "0", "prompt": "w40"}, {"id": "1", "prompt": "w50 w51"}]
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez(tmp_path / "known.npz", **arrays, greedy=np.array([True, False]))
    plain, known = (join_answers(small_tokenizer(), rows, tmp_path / name) for name in ("plain.npz", "known.npz"))
    assert rows_of(plain) == rows_of(known)
    assert rows_of(plain)[0] == ([2, 50, 51, END, 3, 5, END], [False] * 5 + [True] * 2)
    assert plain.greedy.tolist() == [False, False] and known.greedy.tolist() == [True, False]
    with pytest.raises(Unsupported, match="not among the prompts"):
        join_answers(small_tokenizer(), rows[:1], tmp_path / "plain.npz")


def test_texts_survive_saving(tmp_path: Path) -> None:
    texts = Texts.of(
        [([1, 2, 3], [False, True, True]), ([4], [False]), ([5, 60000], [False, True])], np.array([True, False, True])
    )
    texts.save(tmp_path / "x.npz")
    again = Texts.load(tmp_path / "x.npz")
    for name in Texts.__slots__:
        np.testing.assert_array_equal(getattr(texts, name), getattr(again, name))
    vocabulary, share = draft_vocabulary(again, 2, 60001)
    assert vocabulary.tolist() == [2, 3] and share == pytest.approx(2 / 3)


def test_plan_covers_every_text_once() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, size=257)
    groups = plan_batches(lengths, 1024, 64, np.random.default_rng(0))
    assert sorted(np.concatenate(groups).tolist()) == list(range(257))
    for group in groups:
        width = -(-lengths[group].max() // 64) * 64
        assert len(group) == 1 or width * len(group) <= 1024


def test_texts_of_one_length_whose_answers_start_alike_go_together() -> None:
    rng = np.random.default_rng(3)
    pairs = [
        ([5] * n, [False] * a + [True] * (n - a))
        for n, a in zip(rng.integers(65, 129, 90), rng.integers(0, 60, 90), strict=True)
    ]
    texts = Texts.of([*pairs, ([5] * 70, [False] * 70), ([], [])])
    starts = texts.answer_starts
    assert starts.tolist() == [
        mask.index(True) if any(mask) else len(mask) for _, mask in [*pairs, ([], [False] * 70), ([], [])]
    ]
    texts, starts = texts.select(texts.lengths > 70), starts[texts.lengths > 70]
    groups = plan_batches(texts.lengths, 1024, 64, np.random.default_rng(0), starts)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(texts)))
    apart = [starts[group].max() - starts[group].min() for group in groups]
    alike = [
        starts[group].max() - starts[group].min()
        for group in plan_batches(texts.lengths, 1024, 64, np.random.default_rng(0))
    ]
    assert sum(apart) < 0.7 * sum(alike)
    again = plan_batches(texts.lengths, 1024, 64, np.random.default_rng(1), starts)
    assert not {tuple(sorted(group)) for group in groups} & {tuple(sorted(group)) for group in again}
    for group, batch in zip(groups, batches(texts, groups, 64), strict=True):
        assert batch.first == max(1, starts[group].min() - 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": ()}, "prompts"),
        ({"follow_ups": True}, "follow_ups"),
        ({"new_tokens": 256}, "no room"),
        ({"enlarge_minutes": -1.0}, "enlarge_minutes"),
        ({"epochs": 0.0}, "minutes"),
        ({"sampled_share": 1.5}, "sampled_share"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        settings(tmp_path, **changes)
    assert TrainConfig(target="x", output="y", prompts="z").epochs == 10
