"""What a call leaves: answers cut at their common end with all that belongs to their tokens, and the cache's slots as
columns."""

from __future__ import annotations

import torch
from helpers.examples import examples
from helpers.state import AttentionState
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.stats import Stats
from fastspec.patches.hf.cache import export_span


def test_what_belongs_to_tokens_beyond_the_common_end_is_cut_with_them() -> None:
    """Without end tokens a row that is stopped goes on until all were: it may then have said more than the last of
    them."""
    stops = (2, 4)
    request = Request(
        torch.zeros(2, 1, dtype=torch.long),
        torch.ones(2, dtype=torch.long),
        [torch.zeros(1)] * 2,
        20,
        frozenset(),
        None,
        stop=lambda row, generated: len(generated) == stops[row],
        keep_scores=True,
        keep_logits=True,
        measure=True,
    )
    run = Batch(request, Stats(assistant="autoregressive", rows=2))
    generated = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23]]
    for row, tokens in enumerate(generated):
        scores = torch.tensor(tokens)[:, None].float()
        run.measures[row].append(scores)
        run.take(row, tokens, 0, scores, -scores)
    assert run.active == [False, False]
    run.finish()
    assert run.out.tokens == [[10, 11, 12, 13], [20, 21, 22, 23]] and run.stats.emitted == 8
    for row, tokens in enumerate(run.out.tokens):
        assert [each.item() for each in run.out.scores[row]] == tokens
        assert [each.item() for each in run.out.logits[row]] == [-token for token in tokens]
        assert run.out.measures[row][:, 0].tolist() == tokens


@examples(40)
@given(st.data(), st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**16))
def test_a_span_of_a_cache_is_its_slots_column_by_column(data: st.DataObject, rows: int, width: int, seed: int) -> None:
    """Zeros where a row shows nothing and behind its length, whatever a later round has left in those slots."""
    store = AttentionState(2, rows, 2, 40, 4, 3)
    generator = torch.Generator().manual_seed(seed)
    store.reserve(40)
    for part in (store.k, store.v):
        part.normal_(generator=generator)
    lengths, first = (data.draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows)) for _ in range(2))
    shown = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    store.lengths.copy_(torch.tensor(lengths))
    held = export_span(store, torch.tensor(first), torch.tensor(shown))
    for cache, got in zip((store.k, store.v), zip(*held, strict=True), strict=True):
        assert len(got) == 2
        for layer, found in enumerate(got):
            assert found.shape == (rows, 2, width, 3) and found.is_contiguous()
            for row in range(rows):
                for column in range(width):
                    slot = first[row] + sum(shown[row][:column])
                    real = shown[row][column] and slot < lengths[row]
                    wanted = cache[layer, row, :, slot] if real else torch.zeros(2, 3)
                    assert torch.equal(found[row, :, column], wanted)
