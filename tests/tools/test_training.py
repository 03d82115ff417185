"""Training on the CPU: a head that learns a small target, calls that go on where the last one stopped, and two
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.training import (
    save_with_tokenizer,
    settings,
    small_target,
    small_texts,
    small_tokenizer,
    whole_run,
    write_prompts,
)
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from fastspec.errors import Unsupported
from fastspec.programs.cli.app import app
from fastspec.programs.training import TrainConfig, entry, train
from fastspec.programs.training.data import OutOfTime, Texts, TimeLimit
from fastspec.programs.training.trainer import Trainer

Material = tuple[LlamaForCausalLM, Texts, Texts]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    model = small_target()
    config = settings(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 160, config), small_texts(model, 24, config)


def same_state(one: Path, two: Path) -> None:
    """The heads and optimisers of two runs are equal to the bit, and so are the steps."""
    a, b = (torch.load(folder / "state.pt", weights_only=True) for folder in (one, two))
    assert a["progress"]["step"] == b["progress"]["step"] > 0
    torch.testing.assert_close(a["head"], b["head"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)


def test_acceptance_rises(material: Material, tmp_path: Path) -> None:
    trainer = Trainer(settings(tmp_path, epochs=2.0, learning_rate=1e-2), *material, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    assert trainer.validate()["top1"] > before + 0.5
    assert {p.name for p in tmp_path.iterdir()} == {
        "model.safetensors",
        "config.json",
        "README.md",
        "state.pt",
        "log.jsonl",
    }


def test_resumed_run_equals_one_run(material: Material, tmp_path: Path) -> None:
    one = Trainer(settings(tmp_path / "one", epochs=1.5), *material, Accelerator(cpu=True))
    one.run()
    steps = [0]
    while True:
        part = Trainer(settings(tmp_path / "two", epochs=1.5), *material, Accelerator(cpu=True))
        assert part.progress.step == steps[-1], "a stopped run is taken up at its last step"
        if part.run(limit=0.2).done(part.config) >= 1:
            break
        steps.append(part.progress.step)
    assert len(steps) > 2
    same_state(tmp_path / "one", tmp_path / "two")


def test_a_head_learns_by_overlap(material: Material, tmp_path: Path) -> None:
    trainer = Trainer(
        settings(tmp_path, epochs=1.7, loss="hybrid", learning_rate=1e-2), *material, Accelerator(cpu=True)
    )
    before = trainer.validate()["top1"]
    trainer.run()
    assert trainer.validate()["top1"] > before + 0.5
    assert "loss hybrid" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_killed_run_goes_on_from_its_last_checkpoint(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(settings(tmp_path / "one", epochs=1.2), *material, Accelerator(cpu=True)).run()
    config = settings(tmp_path / "two", epochs=1.2, checkpoint_minutes=1e-9)
    killed = Trainer(config, *material, Accelerator(cpu=True))
    step = killed.step

    def die(batch: Any) -> dict[str, Any]:
        if killed.progress.step == 7:
            raise KeyboardInterrupt
        return step(batch)

    monkeypatch.setattr(killed, "step", die)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    second = Trainer(config, *material, Accelerator(cpu=True))
    assert second.progress.step == 7
    second.run()
    same_state(tmp_path / "one", tmp_path / "two")
    rows = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}), "no row is logged twice"


def test_minutes_count_over_calls(material: Material, tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=0.0, minutes=0.02)
    first = Trainer(config, *material, Accelerator(cpu=True))
    assert first.run(limit=0.5).done(config) < 1
    second = Trainer(config, *material, Accelerator(cpu=True))
    assert second.progress.seconds == first.progress.seconds >= 0.5
    assert second.run().seconds < 30  # it ends: a step of a loaded machine may be long


def test_other_texts_or_sizes_are_refused_on_resuming(material: Material, tmp_path: Path) -> None:
    model, texts, heldout = material
    Trainer(settings(tmp_path, epochs=0.2), *material, Accelerator(cpu=True)).run()
    with pytest.raises(Unsupported, match="batch_tokens 512"):
        Trainer(settings(tmp_path, batch_tokens=256), *material, Accelerator(cpu=True))
    with pytest.raises(Unsupported, match="texts"):
        Trainer(settings(tmp_path), model, heldout, texts, Accelerator(cpu=True))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["identity"] |= {
        "loss": "",
        "decay": 0.0,
        "layers": 0,
        "anchors": 64,
    }  # as a run that was begun with block heads there
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match=r"loss 'kl' \(now 'tv'\): go on"):
        Trainer(settings(tmp_path, loss="tv"), *material, Accelerator(cpu=True))
    assert Trainer(settings(tmp_path), *material, Accelerator(cpu=True)).progress.step > 0
    assert (
        Trainer(settings(tmp_path, batch_tokens=256, resume=False), *material, Accelerator(cpu=True)).progress.step == 0
    )


@pytest.mark.slow
def test_one_command_called_until_it_is_done_equals_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = small_target(1, peak=0.08), small_tokenizer()
    assert train(whole_run(tmp_path, "one"), target=model, tokenizer=tokenizer) == tmp_path / "one"

    class Stub(TimeLimit):
        """Ends a call after so many shards, or so many seconds of training."""

        def __init__(self, shards: int, seconds: float) -> None:
            super().__init__()
            self.shards, self.seconds = shards, seconds

        def left(self) -> float:
            return self.seconds

        def need(self, seconds: float) -> None:
            self.shards -= 1
            if self.shards < 0:
                raise OutOfTime

    config, rows = whole_run(tmp_path, "two"), []
    clocks = [Stub(2, 1e9), Stub(5, 1e9), Stub(99, 0.1), Stub(0, 1e9)]
    for clock in clocks:
        monkeypatch.setattr(entry, "TimeLimit", lambda minutes, clock=clock: clock)
        done = train(config, target=model, tokenizer=tokenizer, report=rows.append)
        assert (done is None) == (clock is not clocks[-1])
    same_state(tmp_path / "one", tmp_path / "two")
    for name in ("continue_cut", "second_answers", "follow_ups"):
        assert any(row.get("added") == name and row["new_tokens"] > 0 for row in rows)
    log = (tmp_path / "two" / "log.jsonl").read_text()
    assert train(config, target=model, tokenizer=tokenizer) == tmp_path / "two", "a run that is done stays done"
    assert (tmp_path / "two" / "log.jsonl").read_text() == log and "validation" in log
    with pytest.raises(Unsupported, match=r"new_tokens 32 \(now 16\)"):
        train(whole_run(tmp_path, "two", new_tokens=16), target=model, tokenizer=tokenizer)


def test_the_command_trains_a_saved_model(tmp_path: Path) -> None:
    save_with_tokenizer(small_target(), tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    options = {
        "target": tmp_path / "model",
        "prompts": prompts,
        "output": tmp_path / "head",
        "epochs": 1,
        "new-tokens": 16,
        "max-length": 128,
        "batch-tokens": 512,
        "draft-vocab-size": 96,
        "mixed-precision": "no",
        "enlarge-minutes": 1,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    arguments += ["--continue-cut", "--second-answers", "--follow-ups", "--device", "cpu"]
    stopped = CliRunner().invoke(app, ["train", *arguments, "--stop-after", "0.00001"])
    assert stopped.exit_code == 0 and "run the same command again" in stopped.output, stopped.output
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0 and "head written to" in done.output, done.output
    assert (
        CliRunner().invoke(app, ["inspect", str(tmp_path / "head"), "--target", str(tmp_path / "model")]).exit_code == 0
    )
    missing = CliRunner().invoke(app, ["train", *arguments, "--heldout", "no-such.jsonl"])
    assert missing.exit_code == 1 and "no-such.jsonl: no such file" in missing.output


def test_a_named_gpu_is_the_current_one_unless_processes_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [entry._use(name) for name in (None, "cpu", "cuda", "cuda:1")] == [
        None,
        "cpu",
        "cuda",
        "cuda:1",
    ] and chosen == ["cuda:1"]
    with pytest.raises(Unsupported, match=r"'cuda:2' is not there.*docs/install\.md"):
        entry._use("cuda:2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert entry._use("cuda") == "cuda"
    with pytest.raises(Unsupported, match="'cuda:0' is one GPU, and 2 processes train"):
        entry._use("cuda:0")


TWO = """
import sys, torch
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
torch.set_num_threads(1)
from helpers.training import small_target, small_tokenizer, whole_run
from fastspec.programs.training import train
from fastspec.programs.training.target import TargetReader
from fastspec.programs.training.trainer import Trainer
seen, losses, step = [], [], Trainer.step
def noted(self, batch):
    self.rank, self.last = self.accelerator.process_index, step(self, batch)
    seen.append(batch.ids.tolist()), losses.append(float(self.last["loss"]))
    noted.trainer = self
    return self.last
Trainer.step = noted
folder = Path(sys.argv[2])
rows, said = [0], TargetReader.said
def counted(self, ids, where):
    rows[0] += len(ids)
    return said(self, ids, where)
TargetReader.said = counted
config = whole_run(folder, "head", epochs=4.0, keep_features=float(sys.argv[3]))
found = train(config, target=small_target(1, peak=0.08), tokenizer=small_tokenizer())
trainer = noted.trainer
mine = len(range(trainer.accelerator.process_index, len(trainer.texts), 2))
torch.save([seen, losses, trainer.head.state_dict(), str(found), rows[0], mine], folder / f"rank{trainer.rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("gib", [0.0, 0.5])
def test_two_processes_share_the_batches_and_the_weights(tmp_path: Path, gib: float) -> None:
    (tmp_path / "two.py").write_text(TWO)
    whole_run(tmp_path, "head")  # writes the prompts before two processes do
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(tmp_path / "two.py"), str(Path(__file__).parents[1]), str(tmp_path), str(gib)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "ACCELERATE_USE_CPU": "true"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (seen0, losses0, head0, _, *read0), (seen1, _, head1, where, *read1) = (
        torch.load(tmp_path / f"rank{i}.pt") for i in (0, 1)
    )
    assert where == str(tmp_path / "head")
    assert len(seen0) == len(seen1) > 4
    one = len(seen0) // 4  # of four passes
    assert one > 0 and not [batch for batch in seen0[:one] if batch in seen1[:one]], (
        "within one pass the processes see different batches"
    )
    torch.testing.assert_close(head0, head1, rtol=0, atol=0)
    for rows, mine in (read0, read1):  # validation and a look at the sizes come on top
        assert rows < 2 * mine if gib else rows > 2.5 * mine, (rows, mine)
    assert sum(losses0[-3:]) < sum(losses0[:3])


def test_a_folder_is_not_gone_on_with_by_other_prompts_of_the_same_size_or_another_learning_rate(tmp_path):
    model, tokenizer = small_target(), small_tokenizer()
    prompts = Path(write_prompts(tmp_path / "prompts.jsonl", 12))
    given = {
        "target": "given",
        "output": str(tmp_path / "head"),
        "prompts": str(prompts),
        "epochs": 0.2,
        "batch_tokens": 256,
        "max_length": 64,
        "length_multiple": 16,
        "new_tokens": 8,
        "intermediate_size": 64,
        "progress": False,
        "mixed_precision": "no",
    }
    assert train(TrainConfig(**given), target=model, tokenizer=tokenizer, device="cpu")
    for other in ({"learning_rate": 0.5}, {"ttt_steps": 3}):
        with pytest.raises(Unsupported, match=next(iter(other))):
            train(TrainConfig(**given | other), target=model, tokenizer=tokenizer, device="cpu")
    held = prompts.read_bytes()
    prompts.write_bytes(held.replace(b"w1", b"w2"))
    assert prompts.read_bytes() != held and len(prompts.read_bytes()) == len(held)
    with pytest.raises(Unsupported, match="were made with prompts"):
        train(TrainConfig(**given), target=model, tokenizer=tokenizer, device="cpu")


def test_no_prompts_and_an_output_that_is_a_file_are_told(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    given = {"target": "given", "prompts": str(empty), "epochs": 1.0, "progress": False, "mixed_precision": "no"}
    resources = {"target": small_target(), "tokenizer": small_tokenizer(), "device": "cpu"}
    with pytest.raises(Unsupported, match="there are no prompts in"):
        train(TrainConfig(output=str(tmp_path / "head"), **given), **resources)
    assert not (tmp_path / "head").exists()
    with pytest.raises(Unsupported, match="is no folder"):
        train(TrainConfig(output=str(empty), **given), **resources)


def test_texts_of_which_none_can_be_trained_on_are_told(material: Material, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no text to train on: of 160 none"):
        Trainer(settings(tmp_path, max_length=2, new_tokens=1), *material, Accelerator(cpu=True))
