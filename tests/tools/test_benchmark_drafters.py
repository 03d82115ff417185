"""benchmarks/drafters.py on tiny models: simulated rounds against real ones and the engine's, trees against all paths, and T = 1 by
enumeration."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers_models import tiny_head
from helpers_training import VOCAB, settings, small_target, small_texts, small_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

import fastspec
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.training.blocks import BlockTraining
from fastspec.training.data import Texts
from fastspec.training.learner_block import block_for, start_block
from fastspec.training.losses import LOSSES
from fastspec.training.save import save_head
from fastspec.training.target import TargetReader
from fastspec.training.trainer import Trainer

TEXTS = ["w9 w12 w40", "w5 w6 w7 w8 w9", "w100 w4 w4"]
TOKENS = 14


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The benchmark's four modules, whose folder is on the path only while they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        parts = ("trees", "rounds", "time")
        return SimpleNamespace(main=importlib.import_module("drafters"), **{n: importlib.import_module(f"drafters_{n}") for n in parts})


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def block_head(model: Any, kind: str, cut: int = 0) -> BlockHead:
    """A head that drafts something right: its start reads the target's LM head, where the next token follows from the last."""
    torch.manual_seed(3)
    rank = {} if kind == "dflash" else {"rank": 8}
    config = settings(Path("unused"), kind=kind, draft_vocab_size=cut, block_size=6, mask_token=3, **rank)
    vocabulary = torch.arange(VOCAB - cut, VOCAB) if cut else torch.arange(VOCAB)
    head = BlockHead(block_for(config, model, len(vocabulary), Texts.of([])))
    start_block(head, model, vocabulary)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.add_((1.0 if "markov" in name or "codebook" in name else 0.02) * torch.randn_like(parameter))
    return head


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer, block heads, of which two were trained a little, an EAGLE-3 head and a prompt file, in a folder."""
    folder = tmp_path_factory.mktemp("drafters")
    target = small_target(10, peak=0.3)
    target.save_pretrained(folder / "model")
    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    save_head(block_head(target, "dflash"), folder / "dflash", "card")
    texts = small_texts(target, 160, settings(folder))
    for kind, cut in (("dspark", 110), ("dflash2", 0)):
        config = settings(
            folder / kind, kind=kind, draft_vocab_size=cut, block_size=6, mask_token=3, rank=12, anchors=12, epochs=2.0, learning_rate=1e-2,
        )  # fmt: skip
        Trainer(config, target, texts, texts.select(np.arange(160) < 4), Accelerator(cpu=True)).run()
    save_head(tiny_head(target, taps=(1, 2, 4)), folder / "eagle3", "card")
    (folder / "words.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return folder


def test_rows_hold_every_way_and_real_rounds_agree(scripts: Any, saved: Path) -> None:
    """--check itself ends with an error where a decoded answer or a number of rounds differs."""
    heads = [str(saved / name) for name in ("dspark", "dflash", "dflash2", "eagle3")]
    out = saved / "rows.jsonl"
    scripts.main.main(
        ["--model", str(saved / "model"), "--heads", *heads, "--prompts", str(saved / "words.jsonl"), "--answers", str(saved / "answers"),
         "--tokens", str(TOKENS), "--check", "2", "--width", "4", "--out", str(out)]
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    checks = [row for row in rows if row["way"] == "check"]
    assert [row["head"] for row in checks] == ["dspark", "dflash", "dflash2", "eagle3"] and all(row["checked"] == 2 for row in checks)
    found = {(row["head"], row["temperature"], row["way"]): row for row in rows if row["way"] != "check"}
    assert len(found) == len(rows) - 4 == 3 * (5 + 6) + 4 + 5
    for row in found.values():
        assert row["rounds"] <= row["tokens"] and row["acceptance_length"] == pytest.approx(row["tokens"] / row["rounds"], abs=1e-3)
        assert {"smollm2-135m", "llama-8b"} == set(row["predicted"])
    for head in ("dspark", "dflash2"):
        chain, tree = (found[head, 0.0, way]["acceptance_length"] for way in ("chain 8", "tree 60"))
        assert tree > chain > 1.3, "drafts are accepted, so that the check says something"
    kept = sorted((saved / "answers").iterdir())
    before = [path.read_bytes() for path in kept]
    scripts.main.main(
        ["--model", str(saved / "model"), "--heads", heads[1], "--prompts", str(saved / "words.jsonl"), "--answers", str(saved / "answers"),
         "--tokens", str(TOKENS), "--width", "4", "--out", str(out)]
    )  # fmt: skip
    again = [json.loads(line) for line in out.read_text().splitlines()][len(rows) :]
    assert [path.read_bytes() for path in kept] == before and len(kept) == 2, "answers are made once"
    assert all(row["rounds"] == found["dflash", row["temperature"], row["way"]]["rounds"] for row in again)


def test_a_round_that_differs_from_the_simulation_ends_the_run(scripts: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = scripts.main.decode
    monkeypatch.setattr(scripts.main, "decode", lambda *given: (lambda answer, rounds: (answer, rounds + 1))(*real(*given)))
    with pytest.raises(RuntimeError, match="rounds, and"):
        scripts.main.main(
            ["--model", str(saved / "model"), "--heads", str(saved / "dspark"), "--prompts", str(saved / "words.jsonl"), "--answers",
             str(saved / "answers"), "--tokens", str(TOKENS), "--check", "1", "--width", "4", "--temperatures", "0"]
        )  # fmt: skip


def test_simulated_rounds_of_eagle3_are_the_engines(scripts: Any, tmp_path: Path) -> None:
    """With a head that was trained a little, so that drafts are accepted, and whose attention then has a say in what it drafts."""
    model = small_target()
    config = settings(tmp_path, epochs=2.5, loss="hybrid", learning_rate=1e-2)
    trainer = Trainer(config, model, small_texts(model, 120, config), small_texts(model, 4, config), Accelerator(cpu=True))
    trainer.run()
    head = trainer.head.requires_grad_(False)
    torch.manual_seed(0)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.layers[0].self_attn, name).weight
        weight.add_(0.3 * torch.randn_like(weight))
    prompts = [[5, 9, 33, 7], [80, 12, 6, 7, 8, 9, 10], [7, 70, 77], [33, 34]]
    model.generation_config.eos_token_id = None
    seen = []
    for nodes, depth, width in ((8, 4, 3), (60, 4, 8)):
        with fastspec.patched(model, eagle3=head):
            loaded = fastspec.patches.assistants.heads.load_head(head, model)
            way = scripts.rounds.Way(name="tree", depth=depth + 1, width=width, nodes=nodes)
            for prompt in prompts:
                ids = torch.tensor([prompt])
                tree = fastspec.Eagle3(total_tokens=nodes, depth=depth, top_k=width)
                out = model.generate(ids, max_new_tokens=21, do_sample=False, pad_token_id=0, assistant=tree)
                text = scripts.rounds.Text.read(model, out[0].tolist(), len(prompt), head.config.taps)
                rounds = fastspec.report(model).last.row_rounds
                assert scripts.rounds.rounds_of(loaded, text, [way])["tree"] == (rounds, 20)
                seen.append(rounds)
    assert sum(seen) < 20 * len(seen) * 0.8, "drafts are accepted, so that the rounds say something"


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_simulated_chains_are_those_that_training_counts(scripts: Any, saved: Path, name: str) -> None:
    """Behind every position of a greedy answer, where the text's tokens are the target's first choices."""
    model = AutoModelForCausalLM.from_pretrained(saved / "model").eval()
    head = scripts.main.opened(str(saved / name), model)
    vocabulary = head.to_target(torch.arange(head.config.draft_vocab_size))
    reader = TargetReader(model, head.config.taps, vocabulary)
    accepted = []
    for prompt in ([5, 9, 33, 7], [80, 12, 6]):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        anchors = torch.arange(len(prompt), ids.shape[1] - 1)
        teacher = reader.read(ids, torch.arange(len(prompt) - 1, ids.shape[1] - 1))
        with torch.no_grad():
            hits = BlockTraining(head, LOSSES["ce"], 0.8, reader.draft_id)(ids, teacher, anchors[None])[2]
        text = scripts.rounds.Text.read(model, ids[0].tolist(), len(prompt), head.config.taps)
        way = scripts.rounds.Way(name="chain", depth=head.config.drafts)
        tree = way.tree(scripts.rounds.Source(head, text).behind(anchors)(way), ids[0, anchors])
        padded = torch.cat((ids[0], torch.full((way.depth,), -1)))
        lengths = scripts.trees.accepted(tree, padded[anchors[:, None] + 1 + torch.arange(way.depth)])
        assert lengths.tolist() == hits.nan_to_num(0.0).cumprod(0).sum(0).int().tolist()
        accepted += lengths.tolist()
    assert max(accepted) > 1 and sum(accepted) > len(accepted) * 0.3


class Tables:
    """Drafts of a toy: log-probabilities over `vocabulary` behind each last token, [V, C]."""

    depth = 3

    def __init__(self, logprobs: Tensor, vocabulary: Tensor) -> None:
        self.logprobs, self.vocabulary = logprobs, vocabulary

    def expand(self, level: int, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.logprobs[tokens]
        return wide, self.vocabulary.expand_as(wide)


def test_a_tree_holds_the_best_of_all_paths(scripts: Any) -> None:
    torch.manual_seed(0)
    size, depth = 4, 3
    table = torch.randn(size, size).log_softmax(-1)
    anchors = torch.tensor([0, 3])
    whole = scripts.trees.grow(Tables(table, torch.arange(size)), anchors, depth, size**depth)
    for row, anchor in enumerate(anchors.tolist()):
        scores = {}
        for length in range(1, depth + 1):
            for path in itertools.product(range(size), repeat=length):
                scores[path] = sum(float(table[a, b]) for a, b in itertools.pairwise((anchor, *path)))
        for nodes in (2, 9, 40):
            best = set(sorted(scores, key=lambda path: -scores[path])[: nodes - 1])
            tree = whole.cut(nodes)
            for path in itertools.product(range(size), repeat=depth):
                follows = next((n for n in range(depth) if path[: n + 1] not in best), depth)
                assert int(scripts.trees.accepted(tree, torch.tensor([path, path]))[row]) == follows


def toy() -> tuple[Tensor, Tensor]:
    """The target's distribution behind (last but one, last) [3, 3, 3] and the draft's behind the last [3, 2], over tokens 0 and 2."""
    torch.manual_seed(1)
    return torch.randn(3, 3, 3).double().softmax(-1), torch.randn(3, 2).double().softmax(-1)


def test_drawn_drafts_take_as_many_rounds_as_the_rule_itself(scripts: Any) -> None:
    """All texts of four tokens, weighed by the target, against all draws, acceptances and corrections of the rule, enumerated."""
    p, q = toy()
    vocabulary, size, drafts = torch.tensor([0, 2]), 4, 2
    table = Tables(q.log().float(), vocabulary)
    wide = torch.zeros(3, 3, dtype=torch.float64)
    wide[:, vocabulary] = q

    def rounds(before: tuple[int, int], left: int) -> float:
        """Expected rounds that emit so many tokens."""
        return 1 + drafted(before, left, 0) if left else 0.0

    def drafted(before: tuple[int, int], left: int, count: int) -> float:
        """Of a round that has emitted `count` accepted drafts and has `left` tokens to go: the rounds still to come after it."""
        if not left:
            return 0.0
        target = p[before]
        if count == drafts:
            return sum(float(target[x]) * rounds((before[1], x), left - 1) for x in range(3))
        draft = wide[before[1]]
        total = 0.0
        rest = (target - draft).clamp(min=0)
        for x in range(3):
            take = min(1.0, float(target[x] / draft[x])) if draft[x] else 0.0
            total += float(draft[x]) * take * drafted((before[1], x), left - 1, count + 1)
            refused = float(draft[x]) * (1 - take)
            total += refused * sum(float(rest[y] / rest.sum()) * rounds((before[1], y), left - 1) for y in range(3))
        return total

    expected = 0.0
    for path in itertools.product(range(3), repeat=size):
        text = torch.tensor([1, 2, *path])
        chance = 1.0
        told = []
        for at in range(2, len(text)):
            told.append(float(p[text[at - 2], text[at - 1], text[at]]))
            chance *= told[-1]
        anchors = text[1:-1]
        ahead = torch.arange(1, len(anchors) + 1)[:, None] + 1 + torch.arange(drafts)
        padded = torch.cat((text, torch.full((drafts,), -1)))
        logs = torch.cat((torch.tensor([0.0, 0.0, *told]).log().clamp(min=-50).float(), torch.zeros(drafts)))
        found = scripts.trees.chances(table, anchors, padded[ahead], logs[ahead])
        expected += chance * scripts.rounds.counted(found.double().numpy(), drawn=True)
    assert expected == pytest.approx(rounds((1, 2), size), rel=1e-5)  # chances are fp32


def test_picked_drafts_take_as_many_rounds_as_the_rule_itself(scripts: Any) -> None:
    """A tree's children are tried in order, each accepted with its share of what is left of the target's distribution."""
    p, q = toy()
    size = 4
    table = Tables(q.log().float(), torch.tensor([0, 2]))

    def tree_of(anchor: int) -> set[tuple[int, ...]]:
        tree = scripts.trees.grow(table, torch.tensor([anchor]), 2, 2).cut(5)
        paths = [path for n in (1, 2) for path in itertools.product((0, 2), repeat=n)]
        return {path for path in paths if int(scripts.trees.accepted(tree, torch.tensor([[*path, -1][:2]]))[0]) == len(path)}

    def rounds(before: tuple[int, int], left: int) -> float:
        return 1 + walked(before, left, tree_of(before[1]), ()) if left else 0.0

    def walked(before: tuple[int, int], left: int, tree: set[tuple[int, ...]], path: tuple[int, ...]) -> float:
        if not left:
            return 0.0
        rest, chance, total = p[before].clone(), 1.0, 0.0
        for child in sorted(node[-1] for node in tree if node[:-1] == path):
            take = float(rest[child] / rest.sum())
            total += chance * take * walked((before[1], child), left - 1, tree, (*path, child))
            chance *= 1 - take
            rest[child] = 0
        return total + chance * sum(float(rest[y] / rest.sum()) * rounds((before[1], y), left - 1) for y in range(3))

    expected = 0.0
    for path in itertools.product(range(3), repeat=size):
        text = [1, 2, *path]
        chance = 1.0
        for at in range(2, len(text)):
            chance *= float(p[text[at - 2], text[at - 1], text[at]])
        anchors = torch.tensor(text[1:-1])
        following = torch.tensor([[*text, -1, -1][at + 1 : at + 3] for at in range(1, len(text) - 1)])
        found = scripts.trees.accepted(scripts.trees.grow(table, anchors, 2, 2).cut(5), following)
        expected += chance * scripts.rounds.counted(found.double().numpy(), drawn=False)
    assert expected == pytest.approx(rounds((1, 2), size), rel=1e-9)


def test_predicted_times_are_read_from_the_rows(scripts: Any) -> None:
    model = small_target()
    eagle, block = tiny_head(model, taps=(1, 2, 4)).config, block_head(model, "dspark", 100).config
    found = scripts.time.predicted(eagle, 4.0, 8, 60)["llama-8b"]
    # The parts of the measured round, which is 6.548 ms and overlaps with the host: within 3 %.
    assert found["round_ms_measured"] == pytest.approx(6.548, rel=0.03)
    assert found["tokens_per_second_measured"] == pytest.approx(4000 / found["round_ms_measured"], rel=1e-3)
    small, shape = scripts.time.SHAPES
    wide = replace(eagle, hidden_size=576, intermediate_size=1536 + 100, vocab_size=49_152, draft_vocab_size=32_000 - 60)
    assert scripts.time.more_bytes(wide, small) == 2 * 576 * (300 - 60) and scripts.time.more_bytes(wide, shape) == 0
    spent = [scripts.time.predicted(each, 4.0, 8, 60)["smollm2-135m"]["draft_ms_measured"] for each in (eagle, wide)]
    assert spent[1] - spent[0] == pytest.approx(8 * 2 * 576 * 240 / scripts.time.Measured.of("smollm2-135m").gb_per_s / 1e6, abs=2e-4)
    # Two layers of 218.1 M parameters, fc over two taps, 32,000 rows of the LM head and of a Markov matrix of rank 8.
    layer = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 14336
    assert scripts.time.block_bytes(block, shape) == 2 * (2 * layer + len(block.taps) * 4096**2 + 32000 * (4096 + 8))
    both = scripts.time.predicted(block, 4.0, 6, 60)["llama-8b"]
    assert both["draft_ms_floor"] < both["draft_ms_estimate"] < found["draft_ms_measured"]
    assert scripts.time.predicted(block, 4.0, 6, 1)["llama-8b"]["score_ms"] < both["score_ms"] == found["score_ms"]

    measured = scripts.time.Measured.of("smollm2-135m")
    stack = dict(measured.stack)
    share = (stack[32] - stack[1]) / (stack[60] - stack[1])
    assert measured.scoring(32) == pytest.approx(measured.score[0] + share * (measured.score[1] - measured.score[0]))
    assert measured.scoring(1) == measured.score[0] and measured.scoring(60) == pytest.approx(measured.score[1])
