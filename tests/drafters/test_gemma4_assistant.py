"""Gemma 4's assistants: drafts of transformers' own module, and calls that say what the unpatched model says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.gemma4 import ORDERED, PAIR, StepByStep, assistant_for, bigram_gemma4, gemma4, knowing
from helpers.generate import NEVER, free, kept, prompts, same, stats
from helpers.models import tiny_model
from helpers.vision import prompts_with_images, seeing
from torch import Tensor

import fastspec
from fastspec import CheckpointError, Mtp, Unsupported
from fastspec.default_trees import TreeShape
from fastspec.patches.assistants.gemma4_assistant import SharedCacheDecoding
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import CACHE
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for

CLOSE = {"rtol": 0.0, "atol": 2e-4}
SHAPES = {
    "a chain": TreeShape(total_tokens=5, depth=3, top_k=1),
    "a tree": TreeShape(total_tokens=12, depth=3, top_k=3),
    "one level": TreeShape(total_tokens=4, depth=0, top_k=3),
    "wider than it holds": TreeShape(total_tokens=4, depth=2, top_k=8),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "last layers that read the keys of others": ({}, {}, (9, 4)),
    "every layer with keys of its own": ({"num_kv_shared_layers": 0}, {}, (9, 4)),
    "the likeliest centroids": ({}, ORDERED, (7, 12)),
    "a window shorter than the text": ({"sliding_window": 6}, {}, (23, 5, 6, 7, 8)),
    "keys that are values": ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, {}, (9, 4)),
    "a window whose ring has gone round": ({"sliding_window": 40}, {}, (1300, 1100)),
    "a unified model": ({"kind": "gemma4_unified_text"}, {}, (9, 4)),
}


def committed(model: Any, assistant: Any, shape: TreeShape, lengths: tuple[int, ...]) -> tuple[Any, Any, list[Tensor]]:
    """A target that has read prompts of these lengths, a drafter behind them, and the prompts."""
    inputs, counts = prompts(*lengths), torch.tensor(lengths)
    ids = torch.stack([row.roll(int(count) - len(row)) for row, count in zip(inputs["input_ids"], counts, strict=True)])
    decoding = SharedCacheDecoding(name="mtp", shape=shape, assistant=assistant)
    sizes = {"rows": len(lengths), "capacity": max(lengths) + 20}
    drafter = decoding.drafter(**sizes, device=ids.device, ops=TORCH, process=None)
    target = HFModel(model, adapter_for(model), **sizes, tail=drafter.nodes, taps=(), ops=TORCH)
    drafter.bind(target)
    logits, features = target.prefill(ids, counts)
    drafter.begin(ids, counts, features, logits.argmax(-1))
    return target, drafter, [row[:count] for row, count in zip(ids, lengths, strict=True)]


def paths(tree: Any, row: int) -> list[list[int]]:
    """The tokens of every node's path, the root first."""
    found: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True)):
        found.append([*(found[parent] if node else []), token])
    return found


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        pytest.param(case, shape, id=f"{name}, {tree}")
        for name, case in CASES.items()
        for tree, shape in SHAPES.items()
        if max(case[2]) < 1000 or tree == "a tree"
    ],
)
@torch.no_grad()
def test_a_tree_is_what_transformers_module_drafts(case: Any, shape: TreeShape) -> None:
    """Every path scores what the chain of its tokens does, and no better path is left out."""
    over, ordered, lengths = case
    model = gemma4(**over)
    assistant = assistant_for(model, **ordered)
    _, drafter, texts = committed(model, assistant, shape, lengths)
    tree = drafter.propose(max(lengths))
    best = drafter.growth.scores.topk(shape.total_tokens - 1, 1).indices.sort(1).values
    for row, text in enumerate(texts):
        oracle = StepByStep(model, assistant, text[None])
        chances = {}
        for path in paths(tree, row)[1:]:
            behind = tuple(path[:-1])
            if behind not in chances:
                logits = oracle(behind)[0]
                scored = logits > logits.min() + 0.5 if ordered else torch.ones_like(logits, dtype=torch.bool)
                chances[behind] = torch.log_softmax(logits.where(scored, -torch.inf), -1)
        wanted = torch.stack(
            [sum(chances[tuple(path[:end])][path[end]] for end in range(1, len(path))) for path in paths(tree, row)[1:]]
        )
        torch.testing.assert_close(drafter.growth.scores[row, best[row]], wanted, **CLOSE)
        firsts = chances[(int(tree.tokens[row, 0]),)].topk(min(shape.top_k, shape.total_tokens - 1)).indices.tolist()
        assert {path[1] for path in paths(tree, row)[1:]} <= set(firsts)
        if shape.top_k == 1:
            greedy = [int(tree.tokens[row, 0])]
            for _ in range(shape.total_tokens - 1):
                greedy.append(int(oracle(greedy)[0].argmax()))
            assert tree.tokens[row].tolist() == greedy


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.no_grad()
def test_a_chain_has_the_logits_and_states_of_transformers_module(case: Any) -> None:
    over, ordered, lengths = case
    model = gemma4(**over)
    assistant = assistant_for(model, **ordered)
    target, drafter, texts = committed(model, assistant, SHAPES["a chain"], lengths)
    extent, hidden = drafter.reserve(max(lengths)), drafter.last[:, None]
    tokens = torch.randint(3, 90, (len(lengths), 3), generator=torch.Generator().manual_seed(0))
    oracles = [StepByStep(model, assistant, text[None]) for text in texts]
    for step in range(3):
        hidden, readout = drafter.program.step(tokens[:, step, None], hidden, drafter._nodes(1, extent))
        for row, oracle in enumerate(oracles):
            logits, state = oracle(tokens[row, : step + 1].tolist())
            torch.testing.assert_close(hidden[row, 0], state, **CLOSE)
            mine = assistant.lm_head(readout[row, 0])
            known = logits > logits.min() + 0.5 if ordered else torch.ones_like(logits, dtype=torch.bool)
            assert int(known.sum()) == (21 if ordered else 98)
            torch.testing.assert_close(mine[known], logits[known], **CLOSE)
    assert target.lengths.tolist() == list(lengths)  # nothing was written


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, Any]]:
    """Quality of the assistant -> (unpatched, patched)."""
    pairs = {}
    for name, (target, drafts, over) in {
        "random": (gemma4, assistant_for, {}),
        "a short window": (gemma4, assistant_for, {"sliding_window": 6}),
        "the likeliest centroids": (gemma4, lambda model: assistant_for(model, **ORDERED), {}),
        "knowing": (bigram_gemma4, knowing, {}),
        "half knowing": (bigram_gemma4, lambda model: knowing(model, 0.6), {}),
    }.items():
        model = target(**over)
        pairs[name] = kept(target(**over)), fastspec.patch(model, mtp=drafts(model))
    return pairs


CHAIN = Mtp(depth=3, top_k=1, total_tokens=4)


@pytest.mark.some("half knowing", "a short window", "the likeliest centroids")
@pytest.mark.each_value  # the shape of a tree and the number of rows do not hang on the weights
@pytest.mark.parametrize("kind", ["random", "a short window", "the likeliest centroids", "half knowing"])
@pytest.mark.parametrize(("assistant", "lengths"), [("mtp", (7,)), ("mtp", (3, 12, 1, 17)), (CHAIN, (3, 12, 1, 17))])
def test_greedy(made: Any, kind: str, assistant: Any, lengths: tuple[int, ...]) -> None:
    same(made[kind], assistant, prompts(*lengths), max_new_tokens=20, eos_token_id=NEVER)
    assert stats(made[kind][1]).assistant == "mtp"


def test_what_an_assistant_knows_is_accepted(made: Any) -> None:
    chain = Mtp(depth=3, top_k=1, total_tokens=5)
    same(made["knowing"], chain, prompts(9, 4), max_new_tokens=51, eos_token_id=NEVER)
    assert stats(made["knowing"][1]).acceptance_length == 5.0
    same(made["half knowing"], "mtp", prompts(9), max_new_tokens=61, eos_token_id=NEVER)
    assert 1.3 < stats(made["half knowing"][1]).acceptance_length < 4.5


@torch.no_grad()
def test_a_round_goes_on_from_what_was_accepted() -> None:
    """After rounds with accepted drafts a tree is what transformers' module drafts behind the text so far."""
    model = bigram_gemma4()
    seen, generator = knowing(model), torch.Generator().manual_seed(0)
    for layer in seen.model.layers:  # which read the text, and are right all the same
        weight = layer.self_attn.o_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=generator))
        layer.post_attention_layernorm.weight.mul_(0.15)
    fastspec.patch(model, mtp=seen)
    trees: list[Any] = []

    class Watch:
        def put(self, tokens: Tensor) -> None: ...

        def end(self) -> None: ...

        def on_tree(self, tree: Any, verdict: Any, logits: Tensor) -> None:
            trees.append((tree.tokens.clone(), tree.parents.clone()))

    ids = prompts(9)["input_ids"]
    chain = Mtp(depth=2, top_k=1, total_tokens=4)
    out = model.generate(ids, assistant=chain, max_new_tokens=30, do_sample=False, streamer=Watch(), eos_token_id=NEVER)
    assert stats(model).acceptance_length > 2
    text, at = out[0].tolist(), 9
    for tokens, _ in trees:
        drafted = tokens[0].tolist()
        assert text[at] == drafted[0]
        oracle, greedy = StepByStep(model, seen, out[:, :at]), drafted[:1]
        for _ in range(3):
            greedy.append(int(oracle(greedy)[0].argmax()))
        assert drafted == greedy
        more = next(
            (count for count in range(1, 4) if text[at + count : at + count + 1] != drafted[count : count + 1]), 4
        )
        at += more


@pytest.mark.some("options1", "options3")
@pytest.mark.each_value  # tokens are drawn from logits, whatever drafted
@pytest.mark.parametrize("kind", ["a short window", "half knowing"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
        {"repetition_penalty": 1.2, "top_k": 50},
        {"num_return_sequences": 3, "temperature": 1.3},
    ],
)
def test_drafts_do_not_change_what_is_drawn(made: Any, kind: str, options: dict[str, Any]) -> None:
    model, found = made[kind][1], []
    for assistant in ("autoregressive", "mtp", CHAIN):
        torch.manual_seed(3)
        given = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 0, **{"top_k": 0} | options}
        found.append(model.generate(**prompts(5, 9, 2), assistant=assistant, **given).tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.each_value  # a batch keeps its rows apart by whatever model
@pytest.mark.parametrize("kind", ["a short window", "half knowing"])
@pytest.mark.parametrize("lengths", [(7,), (7, 4)])
def test_turns_go_on_from_the_cache_of_the_last(made: Any, kind: str, lengths: tuple[int, ...]) -> None:
    turns = {}
    for which, model in enumerate(made[kind]):
        inputs, said = prompts(*lengths), []
        options = {} if which == 0 else {"assistant": "mtp"}
        cache = None
        for _ in range(3):
            given = inputs if cache is None else {**inputs, CACHE: cache}
            out = model.generate(
                **given, **options, max_new_tokens=9, do_sample=False, eos_token_id=NEVER, return_dict_in_generate=True
            )
            said.append(out.sequences.tolist())
            cache, more = out[CACHE], torch.full((len(lengths), 3), 9)
            ids = torch.cat((out.sequences, more), 1)
            mask = inputs["attention_mask"]
            inputs = {
                "input_ids": ids,
                "attention_mask": torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1),
            }
        turns[which] = said
    assert turns[0] == turns[1]


@pytest.mark.each_value  # prompts are seated above the drafter
@pytest.mark.parametrize("kind", ["a short window", "half knowing"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_new_prompt_takes_the_place_of_one_that_has_ended(made: Any, kind: str, rows: int) -> None:
    inputs = prompts(5, 12, 3, 9, 20)
    same(made[kind], fastspec.ContinuousBatch(Mtp(depth=2, top_k=2), rows=rows), inputs, eos_token_id=NEVER)


def test_an_open_batch(made: Any) -> None:
    plain, model = made["half knowing"]
    texts = [prompts(length, seed=length)["input_ids"] for length in (5, 12, 3, 9, 20)]
    expected = [free(plain, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 20)[0] for ids in texts]
    with fastspec.continuous(model, "mtp", rows=4) as batch:
        found = [batch.submit(ids[0], max_new_tokens=20, eos_token_id=NEVER) for ids in texts]
        assert [each.result(60)[0, -20:].tolist() for each in found] == expected
        for share in (1, 2):  # without drafts, alone and beside others
            found = [
                batch.submit(ids[0], max_new_tokens=20, eos_token_id=NEVER, drafts=at % share > 0)
                for at, ids in enumerate(texts)
            ]
            assert [each.result(60)[0, -20:].tolist() for each in found] == expected


@pytest.mark.some("gemma4")
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_images(kind: str) -> None:
    model = seeing(kind, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=PAIR * 2)
    inputs = prompts_with_images(model, ((3, 4), (6, 2)))
    text = {"input_ids": inputs["input_ids"] % 89, "attention_mask": inputs["attention_mask"]}
    expected, of_text = free(model, inputs), free(model, text)
    assistant = assistant_for(model)
    with fastspec.patched(model, mtp=assistant):
        for way in ("mtp", Mtp(depth=2, top_k=1)):
            assert free(model, inputs, assistant=way) == expected
            assert free(model, text, assistant=way) == of_text


@pytest.mark.parametrize("backend", ["auto", "torch", "cpp"])
def test_backends(backend: str, made: Any) -> None:
    for kind, drafts in {"random": assistant_for, "half knowing": lambda model: knowing(model, 0.6)}.items():
        model = bigram_gemma4() if kind == "half knowing" else gemma4()
        try:
            fastspec.patch(model, mtp=drafts(model), backend=backend)
        except Unsupported as error:
            pytest.skip(str(error))
        same((made[kind][0], model), "mtp", prompts(7, 3), eos_token_id=NEVER)


def test_generic_mode(made: Any) -> None:
    """A forward that someone else has changed runs as it is, and its keys are read all the same."""
    model = bigram_gemma4()
    fastspec.patch(model, mtp=knowing(model), backend="torch")
    handle = model.model.register_forward_hook(lambda module, given, out: None)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, out: None)
    same((made["knowing"][0], model), "mtp", prompts(7, 3), max_new_tokens=21, eos_token_id=NEVER)
    assert fastspec.report(model).mode.startswith("generic")
    assert stats(model).acceptance_length > 3
    handle.remove()


def test_a_measured_size(made: Any) -> None:
    same(made["half knowing"], Mtp(total_tokens="auto"), prompts(7), max_new_tokens=20, eos_token_id=NEVER)
    assert any(config == Mtp(total_tokens="auto") for config, _ in fastspec.report(made["half knowing"][1]).trees)


def test_by_a_dictionary_and_as_the_default(tmp_path: Any) -> None:
    model = gemma4()
    expected = free(model, prompts(7))
    with fastspec.patched(model, mtp=assistant_for(model), assistant="mtp"):
        assert free(model, prompts(7)) == expected and stats(model).assistant == "mtp"
        assert free(model, prompts(7), assistant={"name": "mtp", "depth": 2, "top_k": 2}) == expected
        assert "mtp" in fastspec.report(model).assistants
    assert free(model, prompts(7)) == expected


def test_from_a_folder(tmp_path: Any) -> None:
    model = bigram_gemma4().to(torch.bfloat16)
    knowing(bigram_gemma4()).save_pretrained(tmp_path)
    with fastspec.patched(model, mtp=str(tmp_path)):
        model.generate(**prompts(7), assistant=Mtp(depth=3, top_k=1), max_new_tokens=30, do_sample=False)
        assert stats(model).acceptance_length > 3


def test_an_assistant_follows_its_target_and_stays_as_it_is() -> None:
    model = bigram_gemma4()
    own = knowing(model)
    fastspec.patch(model, mtp=own)
    model.to(torch.bfloat16)
    model.generate(**prompts(7), assistant="mtp", max_new_tokens=30, do_sample=False, eos_token_id=NEVER)
    assert stats(model).acceptance_length > 3
    assert own.dtype == torch.float32


def test_what_does_not_fit_is_refused_by_name(tmp_path: Any) -> None:
    model = gemma4()
    assistant = assistant_for(model)

    def refused(error: type[Exception], words: str, target: Any = model, **options: Any) -> None:
        with pytest.raises(error, match=words):
            fastspec.patch(target, **options)
        assert not hasattr(target, "_fastspec")

    refused(Unsupported, r"reads the keys and values of a Gemma 4 model.*LlamaForCausalLM", tiny_model(), mtp=assistant)
    refused(Unsupported, r"fastspec.patch\(model, mtp=assistant\)", speculative=assistant)
    refused(CheckpointError, "hidden states of 48", mtp=assistant_for(gemma4(hidden_size=48)))
    refused(CheckpointError, "drafts 120 tokens, and the target has 98", mtp=assistant_for(gemma4(vocab_size=120)))
    refused(
        CheckpointError, "4 heads of 8 read layers of type sliding_attention", mtp=assistant_for(gemma4(head_dim=8))
    )
    longer = assistant_for(gemma4(sliding_window=65))
    refused(CheckpointError, "window of 65 tokens is longer than the target's, of 64", mtp=longer)
    refused(CheckpointError, "holds no draft layers", mtp=tiny_model())
    tiny_model().save_pretrained(tmp_path / "llama")
    refused(CheckpointError, "llama", mtp=tmp_path / "llama")
    refused(CheckpointError, "is no directory, and no hub id of the form owner/name", mtp=tmp_path / "nowhere")
    refused(CheckpointError, "nowhere is no directory, and no hub id", mtp="nowhere")
    refused(CheckpointError, "is no directory, and the hub does not give it", mtp="nobody/nothing")
    assistant.save_pretrained(tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    state = assistant.state_dict()
    del state["post_projection.weight"], state["lm_head.weight"]
    assistant.save_pretrained(tmp_path / "broken", state_dict=state)
    refused(CheckpointError, "lacks post_projection.weight", mtp=tmp_path / "broken")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 48}))
    refused(CheckpointError, r"brings .*pre_projection.weight of \[24, 128\], not \[24, 96\]", mtp=tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"none")
    refused(CheckpointError, "cannot be loaded", mtp=tmp_path / "whole")
    huge = assistant_for(model)
    huge.pre_projection.weight.data[0, 0] = 1e30
    refused(CheckpointError, r"pre_projection.weight has values up to 1e\+30", gemma4().half(), mtp=huge)
    huge.pre_projection.weight.data[0, 0] = torch.nan
    huge.save_pretrained(tmp_path / "nan")
    refused(CheckpointError, "pre_projection.weight contains NaN", mtp=tmp_path / "nan")
    refused(CheckpointError, r"fastspec.patch\(model, mtp=...\) takes it", eagle3=tmp_path / "broken")
    refused(Unsupported, "a checkpoint of their own", assistant="mtp")
    refused(Unsupported, "no such kernel", mtp=assistant, assistant=Mtp(fused=True))
    refused(Unsupported, "draft_vocab=256 bounds what", mtp=assistant, assistant=Mtp(draft_vocab=256))
    wide = Mtp(depth=1, top_k=30)
    refused(Unsupported, "exceed the 21 tokens", mtp=assistant_for(model, **ORDERED), assistant=wide)
    fastspec.patch(model, mtp=assistant)
    with pytest.raises(Unsupported, match="exceed the 98 tokens"):
        model.generate(**prompts(3), assistant=Mtp(depth=1, top_k=99))


def test_layers_of_one_kind_alone() -> None:
    """An assistant whose layers all see the whole text."""
    model = gemma4()
    expected = free(model, prompts(9, 4))
    kinds = ["full_attention"] * 4
    assistant = assistant_for(
        model, text={"layer_types": kinds, "per_layer_config": {i: {"head_dim": 24} for i in range(4)}}
    )
    with fastspec.patched(model, mtp=assistant):
        assert free(model, prompts(9, 4), assistant="mtp") == expected
