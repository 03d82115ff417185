"""benchmarks/oracle.py: drafts of the given survival that change no token, in calls, batches and open batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.bench import benchmark
from helpers.captured import stand_in
from helpers.models import tiny_head, tiny_model

import fastspec

pytestmark = pytest.mark.usefixtures("on_cpu")
SURVIVAL = (0.9, 0.7, 0.4, 0.2)
RECURRENT_MIXTURE = (
    "qwen3_5_moe_text",
    {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
)
NEVER = {"do_sample": False, "eos_token_id": 1000, "pad_token_id": 0}


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark("oracle")


def known(script: Any, rows: int, tokens: int) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A patched model, an oracle that knows its answers to some prompts, these, and the answers."""
    model = tiny_model(max_position_embeddings=4096)
    fastspec.patch(model, eagle3=tiny_head(model))
    ids = torch.randint(6, 97, (rows, 9), generator=torch.Generator().manual_seed(3))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, **NEVER}
    plain = model.generate(ids, assistant="autoregressive", **options)
    answers = {tuple(row[:9]): row[9:] for row in plain.tolist()}
    return model, script.Oracle(SURVIVAL, answers), ids, plain


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


@pytest.mark.slow
def test_a_served_shape_answers_every_prompt_whole_and_the_same_with_and_without_drafts(script, monkeypatch) -> None:
    """Of any prompts, which the oracle was told nothing of; no token ends an answer, and all have a text."""
    full_size = benchmark("full_size")
    monkeypatch.setitem(full_size.SHAPES["tiny"][1], "vocab_size", 50_000)
    asked = SimpleNamespace(prefix=60, tokens=100, head="eagle3", draft_vocab=512, backend="auto", dtype="float32")
    asked.rows = [3]
    said: dict[str, list[list[int]]] = {}
    for tree in ("none", "8,5,2"):
        batch, tokenizer = script.opened("tiny", tree, script.QWEN_MTP, asked)
        chats = [[{"role": "user", "content": f"prompt {number}"}] for number in range(12)]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        with batch:
            futures = [batch.submit(torch.tensor([ids]), do_sample=False, max_new_tokens=100) for ids in prompts]
            answers = zip(futures, prompts, strict=True)
            said[tree] = [future.result(300)[0, len(ids) :].tolist() for future, ids in answers]
        expected = 1 if tree == "none" else 1 + sum(script.QWEN_MTP[:6])  # of nodes in a chain
        assert batch.stats.acceptance_length == pytest.approx(expected, rel=0.1)
    assert said["none"] == said["8,5,2"] and all(len(ids) == 100 for ids in said["none"])
    assert len(tokenizer) == 50_000 and tokenizer.decode([49_999]).strip() == "<49999>"
    assert all(tokenizer.decode([token]) and "\ufffd" not in tokenizer.decode([token]) for token in said["none"][0])


@pytest.mark.parametrize("collapsed", [False, True])
def test_an_mtp_layer_drafts_for_experts_that_are_independent_or_the_same(
    script, collapsed, tmp_path, monkeypatch
) -> None:
    full_size = benchmark("full_size")
    monkeypatch.setitem(full_size.SHAPES, "experts", RECURRENT_MIXTURE)
    monkeypatch.setattr(script, "WARM", 1)
    torch.manual_seed(0)
    model, found = script.steady(script.make_model("experts", "cpu", torch.float32), collapsed), []
    for router in full_size.routers_of(model):
        router.register_forward_hook(lambda _, __, out: found.append(len(out[-1].unique())))
    ids = torch.randint(10, 512, (1, 40))
    assert torch.equal(model(ids).logits.argmax(-1), (ids + script.STRIDE) % 512)
    assert found == [2] * 4 if collapsed else min(found) > 12
    out, flag = tmp_path / "rows.jsonl", ["--collapsed"] if collapsed else []
    sizes = "--shapes experts --rows 1 --prefix 9 --tokens 16 --calls 1 --head mtp --dtype float32 --trees 8,3,2"
    script.main([*sizes.split(), *flag, "--survival", ".9,.8", "--out", str(out)])
    plain, drafted = (json.loads(line) for line in out.read_text().splitlines())
    assert (plain["method"], drafted["method"], drafted["equal"]) == ("autoregressive", "mtp", 1.0)
    assert plain["collapsed"] == drafted["collapsed"] == collapsed and 1.5 < drafted["acceptance_length"] <= 3


@pytest.mark.slow
def test_a_shape_is_served(script, tmp_path) -> None:
    """By a command that serving.py starts, with an oracle that it says the acceptance of."""
    pytest.importorskip("openai")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(9)))
    start = "--serve {port} --shapes smollm2-135m --prefix 60 --tokens 8 --rows 2 --trees 8,5,2"
    start = f"--start=one={sys.executable} {script.__file__} {start}"
    given = f"--model smollm2-135m --prompts {prompts} --out {out} --ways whole --in-flight 2 --requests 1".split()
    command = [sys.executable, Path(script.__file__).with_name("serving.py"), start, *given, "--max-tokens", "8"]
    subprocess.run(command, check=True)
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert row["new_tokens"] == 8 * row["requests"] and row["acceptance_length"] > 2


def test_the_likeliest_token_is_the_next_one_by_a_wide_margin(script) -> None:
    """Wider than what bf16 rounds away, for tokens of all kinds."""
    torch.manual_seed(0)
    model = script.steady(script.make_model("tiny", "cpu", torch.float32))
    ids = torch.arange(20, 220).view(10, 20)
    logits = model(ids).logits
    best = logits.topk(2).values
    assert torch.equal(logits.argmax(-1), (ids + script.STRIDE) % model.config.vocab_size)
    assert float(((best[..., 0] - best[..., 1]) / logits.abs().amax(-1)).min()) > 0.05
