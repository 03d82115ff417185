"""Block heads in training: what a block sees, what its slots are judged by, that they learn, and that runs are taken up to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers_training import VOCAB, settings, small_target, small_texts
from torch import Tensor
from transformers import LlamaForCausalLM

import fastspec
from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.drafters.block.checkpoint import from_json, load_block_head
from fastspec.generation.drafters.block.draft import BlockDrafter
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.training import TrainConfig, blocks
from fastspec.training.blocks import BlockTraining, draw_anchors, places_of
from fastspec.training.data import Texts, batches
from fastspec.training.features import DEVICE, KeptFeatures
from fastspec.training.learner_block import block_for, default_taps, start_block, unused_token
from fastspec.training.losses import LOSSES, row_losses
from fastspec.training.target import TargetReader
from fastspec.training.trainer import Trainer

Material = tuple[LlamaForCausalLM, Texts, Texts]
KINDS = {"dspark": {}, "dspark, cut": {"kind": "dspark", "draft_vocab_size": 96}, "dflash": {}, "dflash2": {}}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    model = small_target()
    config = settings(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 160, config), small_texts(model, 24, config)


def block(folder: Path, kind: str, **changes: object) -> TrainConfig:
    sizes = {"kind": kind, "draft_vocab_size": 0, "block_size": 5, "anchors": 9, "mask_token": 3}
    sizes |= {} if kind == "dflash" else {"rank": 12}
    return settings(folder, **sizes | KINDS.get(kind, {}) | changes)


def made_head(model: LlamaForCausalLM, kind: str, seed: int = 0) -> tuple[BlockHead, Tensor]:
    """A head whose corrections are not at zero, and its draft vocabulary."""
    torch.manual_seed(seed)
    config = block(Path("unused"), kind)
    vocabulary = torch.arange(0, VOCAB)[torch.randperm(VOCAB)[: config.draft_vocab_size or VOCAB]].sort().values
    head = BlockHead(block_for(config, model, len(vocabulary), Texts.of([])))
    start_block(head, model, vocabulary)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    head.bind(model.get_input_embeddings(), model.get_output_embeddings())
    return head, vocabulary


def batch_of(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids [3, 17], where [M] and anchors [3, 4] of texts of unequal length."""
    torch.manual_seed(seed)
    lengths, starts = (17, 11, 14), (4, 3, 9)
    ids = torch.zeros(3, 17, dtype=torch.int64)
    where = []
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        ids[row, :length] = torch.randint(4, VOCAB, (length,))
        where += [row * 17 + at for at in range(start, length - 1)]
    anchors = torch.from_numpy(draw_anchors(np.array(where), (3, 17), 4, np.random.default_rng(seed)))
    return ids, torch.tensor(where), anchors


def test_anchors_are_drawn_from_the_answers_without_repeats() -> None:
    where = np.array([2, 3, 5, 7, 12, 13, 14, 15, 16, 31])
    drawn, again = ([draw_anchors(where, (4, 10), 3, np.random.default_rng((1, step))) for step in range(50)] for _ in range(2))
    assert np.array_equal(drawn, again)
    for row, allowed in enumerate(({2, 3, 5, 7}, {2, 3, 4, 5, 6}, set(), {1})):
        seen = {int(x) for found in drawn for x in found[row] if x >= 0}
        assert seen == allowed
        for found in drawn:
            mine = [int(x) for x in found[row] if x >= 0]
            assert mine == sorted(set(mine)) and len(mine) == min(3, len(allowed))
    assert draw_anchors(where, (4, 10), 0, None).tolist() == [[2, 3, 5, 7, -1], [2, 3, 4, 5, 6], [-1] * 5, [1, -1, -1, -1, -1]]


@pytest.mark.parametrize("kind", KINDS)
def test_many_blocks_in_one_pass_are_what_the_drafter_drafts_one_by_one(material: Material, kind: str) -> None:
    """The training mask against a drafter that has no mask: a cache that holds the context before the anchor, and one block."""
    model = material[0]
    head, vocabulary = made_head(model, kind)
    ids, where, anchors = batch_of()
    reader = TargetReader(model, head.config.taps, vocabulary)
    features = reader.read(ids, where).features
    with torch.no_grad():
        many = BlockTraining(head, LOSSES["ce"], 0.8, reader.draft_id).states(ids, features, anchors)
    assert many.shape == (3, 4, head.config.drafts, 64) and head.config.drafts == (5 if head.config.sample_from_anchor else 4)
    for row in range(3):
        drafter = BlockDrafter(head)
        for column, anchor in enumerate(anchors[row].tolist()):
            drafter.append(features[row, drafter.length : anchor])  # only ever more of it: anchors ascend
            one = drafter.draft(int(ids[row, anchor]))
            torch.testing.assert_close(one.states, many[row, column], rtol=1e-4, atol=1e-5)


def test_attention_in_pieces_is_attention_at_once(material: Material) -> None:
    head, vocabulary = made_head(material[0], "dspark")
    ids, where, anchors = batch_of(1)
    reader = TargetReader(material[0], head.config.taps, vocabulary)
    features = reader.read(ids, where).features
    training = BlockTraining(head, LOSSES["ce"], 0.8, reader.draft_id)
    with torch.no_grad():
        whole = training.states(ids, features, anchors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks.BlockAttention.__init__, "__defaults__", (10 * 10,))  # two blocks of five rows, one text
            torch.testing.assert_close(training.states(ids, features, anchors), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_a_block_sees_the_context_before_its_anchor_and_nothing_else(material: Material, kind: str) -> None:
    model = material[0]
    head, vocabulary = made_head(model, kind)
    ids, where, anchors = batch_of(2)
    reader = TargetReader(model, head.config.taps, vocabulary)
    features = reader.read(ids, where).features.requires_grad_()
    states = BlockTraining(head, LOSSES["ce"], 0.8, reader.draft_id).states(ids, features, anchors)
    for row in range(3):
        for column, anchor in enumerate(anchors[row].tolist()):
            for slot in (0, states.shape[2] - 1):
                seen = torch.autograd.grad(states[row, column, slot].square().sum(), features, retain_graph=True)[0].abs().sum(-1) > 0
                wanted = torch.zeros_like(seen)
                wanted[row, :anchor] = True
                assert torch.equal(seen, wanted), "every feature before the anchor has a say, its own and later ones have none"
    changed = ids.clone()
    changed[0, int(anchors[0, 1])] = (changed[0, int(anchors[0, 1])] + 1) % VOCAB
    with torch.no_grad():
        other = BlockTraining(head, LOSSES["ce"], 0.8, reader.draft_id).states(changed, features, anchors)
    differ = (other != states).any(-1).any(-1)
    assert differ.nonzero().tolist() == [[0, 1]], "another anchor's token changes its own block alone"


def test_slots_are_judged_by_the_tokens_that_follow_their_anchor(material: Material) -> None:
    model = material[0]
    head, vocabulary = made_head(model, "dspark, cut")
    ids, where, anchors = batch_of(3)
    anchors[1, 3] = -1
    gone = int(anchors[0, 0]) + 2  # another turn begins inside a block: what follows it is judged no more
    where = where[where != gone]
    reader = TargetReader(model, head.config.taps, vocabulary)
    places = places_of(ids, where, anchors, 5, reader.draft_id)
    draft_ids = {int(token): number for number, token in enumerate(vocabulary)}
    judged = where.tolist()
    for row in range(3):
        for column, anchor in enumerate(anchors[row].tolist()):
            alive = anchor >= 0
            for slot in range(5):
                at = anchor + slot
                alive = alive and row * 17 + at in judged
                assert bool(places.used[row, column, slot]) == alive
                if not alive:
                    assert not places.known[row, column, slot]
                    continue
                right = int(ids[row, at + 1])
                assert int(places.previous[row, column, slot]) == int(ids[row, at])
                assert judged[int(places.teacher[row, column, slot])] == row * 17 + at
                assert bool(places.known[row, column, slot]) == (right in draft_ids)
                if right in draft_ids:
                    assert int(places.truth[row, column, slot]) == draft_ids[right]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_weighted_mean_of_single_predictions(material: Material, kind: str) -> None:
    """Every slot by itself, through the module that drafts, in a loop; with pieces of three predictions."""
    model = material[0]
    head, vocabulary = made_head(model, kind)
    ids, where, anchors = batch_of(4)
    reader = TargetReader(model, head.config.taps, vocabulary)
    teacher = reader.read(ids, where)
    loss = LOSSES["ce+l1" if head.config.kind == "dspark" else "ce"]
    training = BlockTraining(head, loss, 0.7, reader.draft_id)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(blocks, "LOGITS", 3 * head.config.draft_vocab_size)
        total, losses, hits = training(ids, teacher, anchors)
        states = training.states(ids, teacher.features, anchors)
        places = places_of(ids, where, anchors, head.config.drafts, reader.draft_id)
        sums = {"main": [0.0, 0.0], "extra": [0.0, 0.0]}
        for row, column, slot in places.used.nonzero().tolist():
            at = int(places.teacher[row, column, slot])
            hidden, previous = states[row, column, slot], places.previous[row, column, slot]
            unary = head.unary(hidden)
            scores, ids_of = head.edges(unary, hidden, previous[None])
            choice = int(scores.argmax()) if ids_of is None else int(ids_of[int(scores.argmax())])
            assert float(hits[slot, 4 * row + column]) == float(choice == int(teacher.best[at]))
            if not places.known[row, column, slot]:
                continue
            weight, truth = 0.7**slot, places.truth[row, column, slot]
            logits = unary if head.config.kind == "dflash2" else scores[0]
            value, alpha = row_losses(loss, logits[None], teacher.probs[at][None], teacher.inside[at][None], truth[None], overlap=True)
            sums["main"][0] += weight * float(value)
            sums["main"][1] += weight
            if head.config.kind == "dspark":
                guess = float(head.confidence(hidden, previous).sigmoid())
                sums["extra"][0] -= weight * float(alpha * np.log(guess) + (1 - alpha) * np.log(1 - guess))
                sums["extra"][1] += weight
            if ids_of is not None and int(truth) in ids_of.tolist():
                sums["extra"][0] -= weight * float(scores[0].log_softmax(-1)[ids_of.tolist().index(int(truth))])
                sums["extra"][1] += weight
        assert torch.isnan(hits).T.reshape(3, 4, -1).equal(~places.used)
        wanted = sum(value / mass for value, mass in sums.values() if mass)
        assert float(total) == pytest.approx(wanted, rel=1e-4) and len(losses) == head.config.drafts


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize(("kind", "name"), [("dspark", "kl+l1"), ("dflash", "dpace"), ("dflash2", "ce")])
def test_pieces_and_compilation_change_no_gradient(material: Material, kind: str, name: str, compiled: bool) -> None:
    """A whole batch at once against pieces of three predictions, which are computed again in the backward pass."""
    model = material[0]
    ids, where, anchors = batch_of(5)
    found = []
    for logits, compile in ((1 << 20, compiled), (3, False)):
        head, vocabulary = made_head(model, kind)
        reader = TargetReader(model, head.config.taps, vocabulary)
        training = BlockTraining(head, LOSSES[name], 0.7, reader.draft_id, compile=compile)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "LOGITS", logits * head.config.draft_vocab_size)
            total, losses, hits = training(ids, reader.read(ids, where), anchors)
            total.backward()
        found.append([total.detach(), losses, hits, *(p.grad for p in head.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 20
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_losses_of_the_texts_tokens_need_no_distributions(material: Material, kind: str) -> None:
    """What the learner reads for `ce`, against a reader of distributions: the same losses, fresh and from what is kept."""
    model, texts, _ = material
    head, vocabulary = made_head(model, kind)
    bare = TargetReader(model, head.config.taps, vocabulary, distributions=False)
    whole = TargetReader(model, head.config.taps, vocabulary)
    training = BlockTraining(head, LOSSES["ce"], 0.7, bare.draft_id)
    kept = KeptFeatures(bare, texts, 1.0, np.arange(len(texts)))
    assert kept.shelves[DEVICE].states.shape == (int(kept.judged.sum()), 0)
    batch = next(batches(texts, [np.arange(5)], 16))
    anchors = torch.from_numpy(draw_anchors(batch.where.numpy(), tuple(batch.ids.shape), 4, np.random.default_rng(0)))
    wanted = training(batch.ids, whole.read(batch.ids, batch.where), anchors)
    for _ in range(2):
        teacher = kept.read(batch)
        assert teacher.probs.shape == (len(batch.where), 0) and not kept.read_before.all()
        for mine, theirs in zip(training(batch.ids, teacher, anchors), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_a_run_that_kept_more_of_each_text_is_not_taken_up(material: Material, tmp_path: Path) -> None:
    """Runs of older versions kept states for every loss: where the memory does not hold all texts, others would be kept now."""
    config = block(tmp_path, "dflash", keep_features=1.0, epochs=0.2)
    Trainer(config, *material, Accelerator(cpu=True)).run()
    Trainer(config, *material, Accelerator(cpu=True))  # its own
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["identity"].pop("distributions") is False
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match="kept more of a text than this version"):
        Trainer(config, *material, Accelerator(cpu=True))


@torch.no_grad()
def loss_of(trainer: Trainer) -> float:
    """Over the held-out texts, with anchors drawn by one key."""
    texts, learner = trainer.heldout, trainer.learner
    batch = learner.prepared(next(batches(texts, [np.arange(len(texts))], 16)), (1,))
    return float(learner.module(*learner.inputs(batch, learner.reader.read(batch.ids, batch.where)))[0])


@pytest.mark.parametrize("kind", ["dspark, cut", "dflash", "dflash2"])
def test_heads_learn_and_their_files_hold_them(material: Material, tmp_path: Path, kind: str) -> None:
    trainer = Trainer(block(tmp_path, kind, epochs=2.0, learning_rate=1e-2), *material, Accelerator(cpu=True))
    before, loss = trainer.validate(), loss_of(trainer)
    trainer.run()
    trainer.finish()
    after = trainer.validate()
    assert loss_of(trainer) < 0.8 * loss
    assert sum(after["accuracy"]) > sum(before["accuracy"]) + 0.3 and after["top1"] > before["top1"] + 0.05
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["validation"] == after
    loaded, head = load_block_head(tmp_path), trainer.head
    assert loaded.config == head.config
    for name, value in head.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value if name == "d2t" else value.bfloat16().float(), rtol=0, atol=0)
    raw, card = json.loads((tmp_path / "config.json").read_text()), (tmp_path / "README.md").read_text()
    assert raw["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in head.config.taps]
    assert str(after["top1"]) in card and "mask token | 3 " in card


def test_a_resumed_run_equals_one_run(material: Material, tmp_path: Path) -> None:
    """Anchors too are drawn as if nothing had happened."""
    Trainer(block(tmp_path / "one", "dspark", epochs=1.0), *material, Accelerator(cpu=True)).run()
    steps = [0]
    while True:
        part = Trainer(block(tmp_path / "two", "dspark", epochs=1.0), *material, Accelerator(cpu=True))
        assert part.progress.step == steps[-1]
        if part.run(limit=0.03).done(part.config) >= 1:
            break
        steps.append(part.progress.step)
    assert len(steps) > 2
    a, b = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two"))
    assert a["progress"]["step"] == b["progress"]["step"] > 0
    torch.testing.assert_close(a["head"], b["head"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    with pytest.raises(Unsupported, match="anchors 9"):
        Trainer(block(tmp_path / "two", "dspark", anchors=8), *material, Accelerator(cpu=True))


def test_an_eagle3_head_learns_by_overlap(material: Material, tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path, epochs=1.7, loss="hybrid", learning_rate=1e-2), *material, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    assert trainer.validate()["top1"] > before + 0.5
    assert "loss hybrid" in (tmp_path / "README.md").read_text()


def test_the_target_reader_says_what_lies_outside_the_draft_vocabulary(material: Material) -> None:
    model = material[0]
    ids, where, _ = batch_of()
    vocabulary = torch.arange(0, VOCAB, 3)
    teacher = TargetReader(model, (2,), vocabulary, chunk=5).read(ids, where)
    whole = model(ids).logits.flatten(0, 1)[where].softmax(-1)
    torch.testing.assert_close(teacher.inside, whole[:, vocabulary].sum(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(teacher.probs * teacher.inside[:, None], whole[:, vocabulary], rtol=1e-4, atol=1e-6)


def test_a_head_that_is_read_differently_is_refused(material: Material, tmp_path: Path) -> None:
    Trainer(block(tmp_path, "dspark", epochs=0.05), *material, Accelerator(cpu=True)).run()
    with pytest.raises(CheckpointError, match="drafts a block"):
        fastspec.patch(material[0], eagle3=tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert from_json(raw, "here").kind == "dspark" and from_json(raw, "here").sample_from_anchor
    nested = raw["dflash_config"]
    changes = [
        ({"layer_types": ["sliding_attention"]}, "sliding"), ({"is_causal": True}, "is_causal"), ({"num_attention_heads": 3}, "multiple"),
        ({"dflash_config": nested | {"markov_head_type": "rnn"}}, "head_type"),
        ({"dflash_config": nested | {"projector_type": "domino"}}, "domino"),
        ({"dflash_config": {}}, "mask_token_id"), ({"final_logit_softcapping": 30.0}, "softcapping"),
    ]  # fmt: skip
    for change, message in changes:
        with pytest.raises(CheckpointError, match=message):
            from_json(raw | change, "here")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": 7}))
    with pytest.raises(CheckpointError, match="and config"):
        load_block_head(tmp_path)


def test_a_head_reads_layers_from_the_second_to_the_third_last() -> None:
    assert default_taps(36) == (2, 10, 18, 26, 34) and default_taps(30)[0] == 2 and default_taps(30)[-1] == 28
    assert default_taps(1) == (1,) and max(default_taps(4)) == 2


def test_the_mask_token_is_one_that_no_text_holds() -> None:
    texts = Texts.of([([0, 1, 3, 5], [False, True, True, True])])
    assert unused_token(texts, 6) == 4
    with pytest.raises(Unsupported, match="mask_token"):
        unused_token(Texts.of([([0, 1], [False, True])]), 2)
