"""`fastspec.warmup` makes calls of every kind, and leaves the model and the user's random numbers as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.captured import stand_in, what_no_graph_served
from helpers.generate import bigram, prompts
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import tiny_seq2seq
from helpers.sizes import force_sizes

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation import capture
from fastspec.generation.drafters import nasd, ngram_rounds
from fastspec.generation.engine.rounds import groups
from fastspec.generation.target import WIDE, prompt_parts
from fastspec.patches.call import assembly
from fastspec.patches.session import session_of
from fastspec.patches.warmup import open_batch_calls, widths


def patched():
    model = tiny_model(num_hidden_layers=3)
    return fastspec.patch(model, eagle3=tiny_head(model))


def test_every_kind_of_call_is_made(monkeypatch):
    model, told = patched(), []
    asked: Counter[tuple] = Counter()
    generate = model.generate

    def noted(**options):
        asked[(options["assistant"], *options["input_ids"].shape, options["do_sample"])] += 1
        return generate(**options)

    monkeypatch.setitem(vars(model), "generate", noted)
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    seconds = fastspec.warmup(model, rows=(1, 3), length=70, told=lambda *counts: told.append(counts))
    assert torch.equal(torch.rand(2), wanted) and seconds > 0
    kinds = {
        (name, rows, width, False)
        for name in ("autoregressive", "nasd", "eagle3")
        for rows in (1, 3)
        for width in (32, 64, 70)
    }
    kinds |= {(name, rows, 32, True) for name in ("autoregressive", "nasd", "eagle3") for rows in (1, 3)}
    assert set(asked) == kinds and set(asked.values()) == {1}  # each a second time where it would be captured
    assert told[0] == (0, len(kinds)) and told[-1] == (len(kinds), len(kinds))
    asked.clear()
    fastspec.warmup(model, length=4, assistants=["autoregressive"])
    assert set(asked) == {("autoregressive", 1, 4, False), ("autoregressive", 1, 4, True)}


def test_a_later_call_captures_nothing_anew(monkeypatch):
    """Where rounds are captured, those of a warmed-up kind are replays from the first on, and so are passes over
    prompts of any length."""
    stand_in(monkeypatch)
    made = what_no_graph_served(monkeypatch)
    model = patched()
    fastspec.warmup(model, length=80, assistants=["autoregressive", "eagle3"])
    assert made
    made.clear()
    for name in ("autoregressive", "eagle3"):
        for length in (70, 9, 40):
            model.generate(**prompts(length), do_sample=False, max_new_tokens=6, eos_token_id=None, assistant=name)
            report = fastspec.report(model).last
            assert report.replays == report.rounds and not made


def test_rounds_of_every_size_are_captured_and_timed(monkeypatch):
    """So that a later call chooses among them, whichever it takes."""
    stand_in(monkeypatch)
    made = what_no_graph_served(monkeypatch)
    monkeypatch.setattr(assembly, "read_times", lambda path: {})
    kept: list[Any] = []
    monkeypatch.setattr(assembly, "keep_times", lambda path, known: kept.append(known))
    model = patched()
    fastspec.warmup(model, rows=(2,), length=128, assistants=["eagle3"])
    (choice,) = [sizes.choice() for (*_, heat), sizes in session_of(model).trees.items() if heat is None]
    assert choice.sizes == (1, 2, 4, 8, 16) and all(choice.measured) and len(kept) > 0
    assert session_of(model).pinned is None
    made.clear()
    taken = force_sizes(monkeypatch)
    for length in (9, 40):
        ids = prompts(length, length - 3)
        model.generate(**ids, do_sample=False, max_new_tokens=60, eos_token_id=None, assistant="eagle3")
    assert not made and {size for size, _ in taken} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("rows", [1, 4])
def test_trees_of_n_grams_are_captured(monkeypatch, rows):
    """Those of rows that are copies draft all that there is."""
    stand_in(monkeypatch)
    monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])
    monkeypatch.setattr(ngram_rounds, "GRANTED", (ngram_rounds.SAVED,) * 2)  # the smallest models' drafts are dear
    made = what_no_graph_served(monkeypatch)
    model = fastspec.patch(bigram())
    fastspec.warmup(model, rows=(rows,), length=150, assistants=["nasd"])
    made.clear()
    ids = torch.tensor([[5, 6, 7, 8] * 10] * rows)
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant="nasd", **options)
    assert fastspec.report(model).last.acceptance_length > 1.3 and not made


@pytest.mark.parametrize(
    ("length", "wanted"),
    [
        (1, [1]),
        (32, [32]),
        (33, [32, 33]),
        (2000, [32, 64, 96, 128, 192, 256, 384, 512, 1024, 2000]),
        (5000, [32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 5000]),
    ],
)
def test_prompts_cover_what_parts_are_padded_to(length, wanted):
    assert widths(length, 1, captures=True) == wanted[::-1]
    narrow = [width for width in wanted[::-1] if width <= 512 or width == length]
    assert widths(length, 1, captures=False) == widths(length, 4, captures=True) == narrow

    def passes(prompts: Iterable[int]) -> set[int]:
        return {capture.padded_width(width) for each in prompts for _, width in prompt_parts(each, WIDE)}

    assert passes(range(1, length + 1)) <= passes(wanted)


@pytest.mark.parametrize("length", [1, 16, 17, 65, 96, 128, 129, 150, 200, 300, 2000])
def test_each_pass_of_prompts_together_is_warmed_up_once(length):
    """All that prompts of so many tokens make, where the first of each two compiles."""
    calls = [call.lengths for call in open_batch_calls(length, {1: [0]}, 8, captures=True, held={})]
    passes = [(len(lengths), capture.padded_width(max(lengths))) for lengths in calls if len(lengths) > 1]
    made = {(count, width) for count, width in groups(8) if width <= capture.padded_width(length)}
    assert len(passes) == 2 * len(made) and {*passes} == made


def test_texts_stay_within_the_model(monkeypatch):
    model = patched()
    most = model.config.max_position_embeddings
    fastspec.warmup(model, length=10 * most, assistants=["autoregressive"])
    assert len(fastspec.report(model).calls) == len(widths(most - 4, 1, captures=False)) + 1


def test_what_cannot_be_warmed_up_is_refused():
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(Unsupported, match="not patched"):
        fastspec.warmup(model)
    fastspec.patch(model)
    for wrong, message in (
        ({"rows": [0]}, "rows must be a whole number of at least 1, not 0"),
        ({"rows": ["2"]}, "not '2'"),
        ({"length": 2.5}, "length must be a whole number"),
        ({"rows": 3}, r"rows=3 must list .* \(1, 8\)"),
        ({"rows": ()}, "must list"),
    ):
        with pytest.raises(Unsupported, match=message):
            fastspec.warmup(model, **wrong)
    with pytest.raises(Unsupported, match=r"\['eagle3'\].*autoregressive, nasd"):
        fastspec.warmup(model, assistants=["eagle3"])
    with pytest.raises(Unsupported, match="encoder-decoder"):
        fastspec.warmup(fastspec.patch(tiny_seq2seq("t5")))
