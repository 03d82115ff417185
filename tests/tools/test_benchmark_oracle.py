"""benchmarks/oracle.py: drafts of the given survival that change no token, in calls, batches and open batches."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.models import tiny_head, tiny_model

import fastspec

SURVIVAL = (0.9, 0.7, 0.4, 0.2)
NEVER = {"do_sample": False, "eos_token_id": 1000, "pad_token_id": 0}


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark as a module, whose folder is on the path only while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("oracle")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch) -> None:
    """Runs on the CPU, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def known(script: Any, rows: int, tokens: int) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A patched model, an oracle that knows its answers to some prompts, these, and the answers."""
    model = tiny_model(max_position_embeddings=4096)
    fastspec.patch(model, eagle3=tiny_head(model))
    ids = torch.randint(6, 97, (rows, 9), generator=torch.Generator().manual_seed(3))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, **NEVER}
    plain = model.generate(ids, assistant="autoregressive", **options)
    oracle = script.Oracle(SURVIVAL)
    oracle.learn(ids, plain)
    return model, oracle, ids, plain


@pytest.mark.some("False")
@pytest.mark.parametrize(("captured", "nodes", "depth"), [(True, 12, 3), (False, 3, 4)])
def test_an_oracle_accepts_as_often_as_its_survival_and_changes_no_token(
    script, monkeypatch, captured, nodes, depth
) -> None:
    if captured:
        stand_in(monkeypatch)
    model, oracle, ids, plain = known(script, 6, 150)
    tree = fastspec.Eagle3(total_tokens=nodes, depth=depth, top_k=2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 150, **NEVER}
    assert torch.equal(model.generate(ids, assistant=oracle.decoding(tree, model), **options), plain)
    last, deepest = fastspec.report(model).last, min(nodes, depth + 2) - 1
    expected = [*SURVIVAL, 0.0][:deepest]
    found = last.acceptance_by_position
    assert len(found) <= deepest  # nothing is right by accident
    for share, chance in zip(found, expected, strict=False):  # 4.5 standard deviations, of a binomial
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / last.row_rounds) ** 0.5 + 6 / last.row_rounds
    shape = tree.shape("cpu")
    expected = 1 + sum(SURVIVAL[: min(shape.max_path, shape.total_tokens) - 1])  # the bonus token, and drafts
    assert last.acceptance_length == pytest.approx(expected, rel=0.1)


def test_rows_of_an_open_batch_draft_their_own_continuations(script) -> None:
    model, oracle, ids, plain = known(script, 5, 60)
    decoding = oracle.decoding(fastspec.Eagle3(total_tokens=12, depth=3, top_k=2), model)
    with fastspec.continuous(model, decoding, 2, prefix_caching=False) as batch:
        futures = [batch.submit(row, max_new_tokens=60, **NEVER) for row in ids]
        assert torch.equal(torch.cat([future.result(300) for future in futures]), plain)
    assert fastspec.report(model).last.acceptance_length > 2.4


def test_rows_say_how_much_faster_an_acceptance_is(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script, "WARM", 1)
    out = tmp_path / "rows.jsonl"
    sizes = "--shapes tiny --rows 2 --prefix 9 --tokens 12 --calls 1 --draft-vocab 64 --dtype float32 --open"
    script.main([*sizes.split(), "--trees", "8,3,2", "--survival", ".9,.8", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["rows"], row["way"], row["method"]) for row in rows] == [
        (2, way, method) for way in ("generate", "open") for method in ("autoregressive", "eagle3")
    ]
    assert all("warmup_seconds" in row for row in rows if row["way"] == "open")
    drafted = [row for row in rows if row["method"] == "eagle3"]
    assert all(row["equal"] == 1.0 for row in drafted if row["way"] == "generate")
    assert len(drafted) == 2 and all(1.5 < row["acceptance_length"] <= 3 for row in drafted)
    assert all(row["tokens_per_second"] > 0 and row["survival"] == [0.9, 0.8] for row in rows)


def test_the_likeliest_token_is_the_next_one_by_a_wide_margin(script) -> None:
    """Wider than what bf16 rounds away, for tokens of all kinds."""
    torch.manual_seed(0)
    model = script.steady(script.make_model("tiny", "cpu", torch.float32))
    ids = torch.arange(20, 220).view(10, 20)
    logits = model(ids).logits
    best = logits.topk(2).values
    assert torch.equal(logits.argmax(-1), ids + 1)
    assert float(((best[..., 0] - best[..., 1]) / logits.abs().amax(-1)).min()) > 0.05
