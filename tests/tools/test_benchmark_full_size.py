"""benchmarks/full_size.py: its rows on tiny shapes, and the bytes that a round must read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.bench import benchmark
from helpers.models import tiny_model

from fastspec.patches.assistants import smaller_heads
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.cache import kept_cache

pytestmark = pytest.mark.usefixtures("on_cpu")
MIXTURE = (
    "mixtral",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
)
EXPERTS = 6 * 8 * 3 * 64 * 96 * 4  # layers, experts, gate, up and down, fp32


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark("full_size")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt_oss", {"num_local_experts": 8, "intermediate_size": 96, "head_dim": 16}),
        ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 96, "norm_topk_prob": True}),
    ],
)
def test_random_weights_spread_tokens_over_the_experts(script, monkeypatch, kind, sizes) -> None:
    """In every layer, as trained routers do: one that sends all to the same few is another kernel's work."""
    sizes = MIXTURE[1] | {"num_hidden_layers": 12, "hidden_size": 256} | sizes
    monkeypatch.setitem(
        script.SHAPES, "mixture", (kind, {name: size for name, size in sizes.items() if name != "sliding_window"})
    )
    torch.manual_seed(0)
    model, found = script.make_model("mixture", "cpu", torch.float32), []
    for router in script.routers_of(model):
        router.register_forward_hook(lambda _, __, out: found.append(torch.bincount(out[-1].flatten(), minlength=8)))
    model(torch.randperm(256)[None])
    assert len(found) == 12 and all(counts.sum() == 512 and counts.max() <= 2.5 * 64 for counts in found)


@pytest.mark.slow
def test_rows_of_a_mixture_count_the_experts_that_rounds_touch(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(script.SHAPES, "mixture", MIXTURE)
    monkeypatch.setattr(script, "read_bandwidth", lambda device: 1e9)
    out = tmp_path / "rows.jsonl"
    script.main(
        [
            "--shapes",
            "mixture",
            "--prefix",
            "9",
            "--batch",
            "1,3",
            "--tokens",
            "30",
            "--dtype",
            "float32",
            "--out",
            str(out),
        ]
    )
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 3) for name in ("autoregressive", "eagle3", "transformers")
    ]
    for row in rows:
        tokens = row["batch"] * row["nodes"]
        assert row["experts_read"] == 2 if tokens == 1 else 2 < row["experts_read"] <= min(8, 2 * tokens)
        assert row["read_bytes"] == pytest.approx(row["weight_bytes"] - EXPERTS / 8 * (8 - row["experts_read"]), abs=12)
        assert row["kept_bytes"] == row["batch"] * 6 * 2 * 2 * 16 * 9 * 4
        assert row["floor_ms"] == round((row["read_bytes"] + row["kept_bytes"]) / 1e6, 4)
        assert row["floor_share"] == round(row["floor_ms"] / row["round_ms"], 3)
        low, middle, high = row["round_ms_quantiles"]
        assert 0 < low <= middle <= high and row["round_ms"] == middle
        assert set(row) >= {"torch", "triton", "transformers", "fastspec", "commit", "device", "dtype"}
    assert [row["nodes"] for row in rows[:3]] == [1, 16, 1]
    nothing = {"first_runs": 0.0, "captures": 0.0}  # the CPU captures nothing
    assert all(row["capture_s"] == row["first_call_s"] == nothing for row in rows if row["method"] != "transformers")
    assert [row["drafter_read_bytes"] // row["head_bytes"] for row in rows if row["method"] == "eagle3"] == [8, 8]


def test_stored_weights_are_read_as_stored(script, tmp_path, monkeypatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(script.SHAPES, "small", ("llama", sizes | heads))
    out = tmp_path / "rows.jsonl"
    options = "--shapes small --prefix 9 --tokens 8 --calls 1 --dtype float32 --peers none --weights dense,fp8"
    script.main([*options.split(), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["weights"], row["method"]) for row in rows] == [
        (weights, method) for weights in ("dense", "fp8") for method in ("autoregressive", "eagle3")
    ]
    layers = 3 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 384)
    scales = 4 * layers // 128**2
    assert rows[0]["read_bytes"] - rows[2]["read_bytes"] == 3 * layers - scales


def test_an_mtp_layer_is_a_method_with_bytes_of_its_own(script, tmp_path, monkeypatch) -> None:
    """A level reads the layer, in its bits, and the rows of the target's LM head that it drafts with."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
    sizes |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    monkeypatch.setitem(script.SHAPES, "recurrent", ("qwen3_5_text", sizes))
    monkeypatch.setattr(smaller_heads, "DEFAULT", 128)
    out = tmp_path / "rows.jsonl"
    options = "--shapes recurrent --prefix 9 --tokens 8 --calls 2 --dtype float32 --backend torch --peers none"
    script.main([*options.split(), "--methods", "autoregressive,mtp", "--head-bits", "16,8", "--out", str(out)])
    plain, *rows = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert plain["method"] == "autoregressive" and plain["head_bytes"] == 0
    assert [(row["method"], row["head_bits"]) for row in rows] == [("mtp", 16), ("mtp", 8)]
    products = {"fc": (64, 128), "q": (128, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    products |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    weights, lines = (
        sum(made(each) for each in products.values()) for made in (lambda at: at[0] * at[1], lambda at: at[0])
    )
    norms, weights, lines = 4 * (5 * 64 + 2 * 16), weights + 128 * 64, lines + 128  # and rows of the LM head
    assert rows[0]["head_bytes"] == 4 * weights + norms
    assert rows[1]["head_bytes"] == weights + 4 * lines + norms
    assert all(row["drafter_read_bytes"] == 8 * row["head_bytes"] and "draft 1" in row["parts_ms"] for row in rows)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_5_text"])
def test_a_filled_cache_is_what_a_text_leaves(script, family: str, monkeypatch) -> None:
    """As long as the text in every layer, or as its window leaves it; and plain decoding goes on from it."""
    over = {"sliding_window": 16} if family == "mistral" else {}
    model = tiny_model(family, **over)
    ids = torch.randint(10, model.config.vocab_size, (2, 41))
    with torch.no_grad():
        left = kept_cache(model(ids[:, :40], use_cache=True))
        found = script.filled_cache(model, 2, 40)
    assert found.get_seq_length() == left.get_seq_length() == 40
    for mine, theirs in zip(found.layers, left.layers, strict=True):
        assert type(mine) is type(theirs)
        for name in ("keys", "values", "cumulative_length"):
            a, b = getattr(mine, name, None), getattr(theirs, name, None)
            assert (a.shape == b.shape) if isinstance(b, torch.Tensor) else a == b
    filled, made = script.filled_cache, []  # type: ignore[var-annotated]
    monkeypatch.setattr(script, "FILLED", 40)
    monkeypatch.setattr(script, "filled_cache", lambda *given: made.append(given[1:]) or filled(*given))
    script.peer(model, ids, 4, 1)
    assert made == [(2, 40)] * 3


@pytest.mark.parametrize("experts", [1.0, 2.5, 4.0])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_bytes_of_experts_by_hand(script, family: str, experts: float) -> None:
    """So many experts of four; an embedding that is not the LM head is not read."""
    model = tiny_model(family)
    whole = sum(weight.nbytes for weight in read_parameters(model))
    all_experts = sum(weight.nbytes for name, weight in model.named_parameters() if "experts" in name)
    assert (all_experts > 0) == (family != "llama")
    assert script.read_bytes(model, experts) == pytest.approx(whole - all_experts * (1 - experts / 4), abs=8)
    assert script.read_bytes(model, None) == whole


@pytest.mark.parametrize("family, tokens", [("llama", 40), ("gemma3_text", 40), ("qwen3_5_text", 40)])
def test_bytes_of_what_is_kept_by_hand(script, family: str, tokens: int) -> None:
    model = tiny_model(family)
    config = model.config
    keys = 2 * config.num_key_value_heads * config.head_dim * 4
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    state = 0
    if "linear_attention" in kinds:
        inner = config.linear_num_value_heads * config.linear_value_head_dim
        state = 4 * inner * config.linear_key_head_dim
        state += (
            4 * config.linear_conv_kernel_dim * (2 * config.linear_num_key_heads * config.linear_key_head_dim + inner)
        )
    seen = {"full_attention": keys * tokens, "linear_attention": state}
    seen["sliding_attention"] = (
        keys * min(tokens, config.sliding_window or tokens) if hasattr(config, "sliding_window") else 0
    )
    assert script.kept_bytes(model, tokens, 3) == 3 * sum(seen[kind] for kind in kinds)
