"""What the target said of texts, kept in memory, and heads that draft with rows of the target's LM head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, cpu_offload
from helpers.captured import stand_in
from helpers.examples import examples
from helpers.training import settings, small_target, small_texts
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import fastspec
from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants.heads import inspect_head, load_head
from fastspec.patches.session import session_of
from fastspec.programs.bench.run import readable
from fastspec.programs.training import target as features
from fastspec.programs.training import ttt
from fastspec.programs.training.data import TextBatch, Texts, batches, plan_batches
from fastspec.programs.training.target import DEVICE, GIB, HOST, NOWHERE, KeptFeatures, TargetReader
from fastspec.programs.training.trainer import Trainer
from fastspec.programs.training.ttt import Teacher, TrainingTimeTest, UnrolledAttention

Material = tuple[LlamaForCausalLM, Texts, Texts]
ALL = 1.0
"""GiB, more than the texts here take."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    model = small_target()
    config = settings(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 60, config), small_texts(model, 12, config)


def counted(reader: TargetReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each pass of the target from here on."""
    passes: list[int] = []
    said = reader.said

    def noted(ids: torch.Tensor, where: torch.Tensor) -> Any:
        passes.append(len(ids))
        return said(ids, where)

    monkeypatch.setattr(reader, "said", noted)
    return passes


def agree(one: Any, two: Any, batch: TextBatch, texts: Texts, **tolerance: float) -> None:
    """Two teachers of a batch say the same, of the padding too where a head could see it: nowhere."""
    assert batch.texts is not None
    for row, index in enumerate(batch.texts):
        n = texts.lengths[index]
        torch.testing.assert_close(one.features[row, :n], two.features[row, :n], **tolerance)
    for name in ("probs", "inside"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), **tolerance)
    assert torch.equal(one.where, two.where) and torch.equal(one.best, two.best)


@contextmanager
def unread(reader: TargetReader) -> Iterator[None]:
    """Meanwhile the target cannot be asked."""

    def refused(*args: Any) -> Any:
        raise AssertionError("the target was asked for what is kept")

    reader.said = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        del reader.said


@examples(20)
@given(
    taps=st.sampled_from([(), (1, 2, 4), (3,)]),
    vocabulary=st.integers(1, 128),
    gib=st.sampled_from([ALL, 3e-4, 1.2e-4, 0.0]),
    host=st.sampled_from([ALL, 1.2e-4]),
    seed=st.integers(0, 99),
    chunk=st.sampled_from([50, 300, 4096]),
)
def test_recalled_teachers_are_the_targets_own(
    material: Material, taps: tuple[int, ...], vocabulary: int, gib: float, host: float, seed: int, chunk: int
) -> None:
    model, texts, _ = material
    ids = torch.from_numpy(np.sort(np.random.default_rng(seed).choice(128, vocabulary, replace=False)))
    reader = TargetReader(model, taps, ids, chunk=chunk)
    host = 0.0 if gib == ALL else host
    kept = KeptFeatures(reader, texts, gib, np.arange(len(texts)), host)
    wide = max(1, len(taps)) * 64 * 4
    for place, room in ((DEVICE, gib), (HOST, host)):
        shelf, here = kept.shelves.get(place), (kept.place == place).sum()
        if shelf is None:
            assert here == 0
        else:
            assert sum(part.nbytes for part in shelf) <= room * GIB and shelf.features.shape[1] * 4 == wide
    assert kept.place.all() if ALL in (gib, host) else 0 < kept.place.astype(bool).sum() < len(texts)
    for epoch in range(2):
        for batch in batches(texts, plan_batches(texts.lengths, 700, 16, np.random.default_rng((seed, epoch))), 16):
            agree(kept.read(batch), reader.read(batch.ids, batch.where), batch, texts)
    assert (kept.read_before == kept.place.astype(bool)).all()
    for place in kept.shelves:  # batches of one place come from memory
        here = np.flatnonzero(kept.place == place)
        for batch in batches(texts, [here[group] for group in plan_batches(texts.lengths[here], 700, 16, None)], 16):
            expected = reader.read(batch.ids, batch.where)
            with unread(reader):
                agree(kept.read(batch), expected, batch, texts)


@pytest.mark.parametrize("change", ["hook", "class"])
def test_an_lm_head_that_is_more_than_its_weight_is_asked_itself(material: Material, change: str) -> None:
    class Halved(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    model, texts = small_target(), material[1]
    if change == "hook":
        model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)
    else:
        model.lm_head.__class__ = Halved
    reader = TargetReader(model, (1, 2, 4), torch.arange(90), chunk=300)
    kept = KeptFeatures(reader, texts, ALL, np.arange(len(texts)))
    for _ in range(2):
        for batch in batches(texts, plan_batches(texts.lengths, 700, 16, None), 16):
            agree(kept.read(batch), reader.read(batch.ids, batch.where), batch, texts)


def test_kept_texts_are_read_once(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(settings(tmp_path, epochs=3.0, keep_features=ALL), *material, Accelerator(cpu=True))
    passes = counted(trainer.reader, monkeypatch)
    trainer.run()
    assert trainer.progress.step == 21 and sum(passes) == len(trainer.texts)


def test_texts_that_do_not_fit_are_read_every_time(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(
        settings(tmp_path, epochs=3.0, keep_features=2e-4, keep_features_host=2e-4), *material, Accelerator(cpu=True)
    )
    assert trainer.features is not None and set(trainer.features.shelves) == {DEVICE, HOST}
    place = trainer.features.place
    kept = int((place != NOWHERE).sum())
    for epoch in range(3):
        groups = trainer._plan(epoch)
        assert sorted(np.concatenate(groups)) == list(range(len(trainer.texts)))
        assert all(len(set(place[group])) == 1 for group in groups)
    passes = counted(trainer.reader, monkeypatch)
    trainer.run()
    assert 0 < kept < len(trainer.texts)
    assert sum(passes) == kept + 3 * (len(trainer.texts) - kept)


@pytest.mark.some("eagle3")
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_run_learns_the_same_from_memory(material: Material, tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {"draft_vocab_size": 0} if kind == "eagle" else {}
    runs = []
    for name, memory in (("one", {}), ("two", {"keep_features": ALL}), ("three", {"keep_features_host": ALL})):
        runs.append(
            Trainer(
                settings(tmp_path / name, kind=kind, epochs=1.5, **memory, **sizes), *material, Accelerator(cpu=True)
            )
        )
        runs[-1].run()
    one, *others = (dict(run.head.named_parameters()) for run in runs)
    assert len({run.progress.step for run in runs}) == 1 and runs[0].progress.step > 4
    for name, value in one.items():
        for other in others:
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-3)
    assert all(run.validate()["top1"] == pytest.approx(runs[0].validate()["top1"], abs=0.02) for run in runs)


def test_the_target_reader_says_what_lies_outside_the_draft_vocabulary(material: Material) -> None:
    model, texts = material[:2]
    batch = next(batches(texts, [np.arange(3)], 16))
    vocabulary = torch.arange(0, 128, 3)
    teacher = TargetReader(model, (2,), vocabulary, chunk=5).read(batch.ids, batch.where)
    whole = model(batch.ids).logits.flatten(0, 1)[batch.where].softmax(-1)
    torch.testing.assert_close(teacher.inside, whole[:, vocabulary].sum(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(teacher.probs * teacher.inside[:, None], whole[:, vocabulary], rtol=1e-4, atol=1e-6)


def test_less_memory_than_a_text_takes_is_refused(material: Material) -> None:
    reader = TargetReader(material[0], (1, 2, 4), torch.arange(90))
    with pytest.raises(
        Unsupported, match=r"keep_features is 1e-09 GiB, and the shortest text takes .*: allow more, or 0 for none"
    ):
        KeptFeatures(reader, material[1], 1e-9, np.arange(60))
    with pytest.raises(
        Unsupported, match=r"keep_features_host is 1e-09 GiB, and the shortest text takes .*: allow more, or 0 for none"
    ):
        KeptFeatures(reader, material[1], 0.0, np.arange(60), 1e-9)
    with pytest.raises(
        Unsupported,
        match=r"keep_features is 1e-09 GiB and keep_features_host is 2e-09 GiB, and the shortest text takes",
    ):
        KeptFeatures(reader, material[1], 1e-9, np.arange(60), 2e-9)


def test_memory_that_the_host_has_not_is_refused_before_it_is_taken(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = TargetReader(material[0], (1, 2, 4), torch.arange(90))
    monkeypatch.setattr(features, "CGROUP", tmp_path)
    for name, text in (
        ("max", "9000\n"),
        ("current", "8000\n"),
        ("stat", "anon 5000\ninactive_file 2000\nactive_file 500\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert features._host_room() == 9000 - 8000 + 2500, "what a container read of files is not in the way"
    (tmp_path / "memory.max").write_text("max\n")
    room = features._host_room()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert GIB / 64 < features._host_room() < room / 2
    monkeypatch.setattr(features, "_host_room", lambda: 1000.0)
    with pytest.raises(
        Unsupported, match=r"keep_features_host is 1 GiB, and the host has .* GiB left for each process"
    ):
        KeptFeatures(reader, material[1], 0.0, np.arange(60), ALL)


@pytest.mark.gpu
def test_features_in_the_hosts_memory_are_those_of_the_device(material: Material) -> None:
    model, texts = small_target().to("cuda"), material[1]
    reader = TargetReader(model, (1, 2, 4), torch.arange(90, device="cuda"))
    kept = KeptFeatures(reader, texts, 0.0, np.arange(len(texts)), ALL)
    assert all(part.is_pinned() for part in kept.shelves[HOST])
    plan = plan_batches(texts.lengths, 700, 16, None)
    said = [kept.read(batch.to(torch.device("cuda"))) for batch in batches(texts, plan, 16)]
    with unread(reader):
        for before, batch in zip(said, batches(texts, plan, 16), strict=True):
            agree(kept.read(batch.to(torch.device("cuda"))), before, batch, texts)


def test_a_run_that_kept_nothing_does_not_begin_to(material: Material, tmp_path: Path) -> None:
    Trainer(settings(tmp_path), *material, Accelerator(cpu=True)).run(limit=1e-6)
    with pytest.raises(Unsupported, match=r"keep_features 0\.0 \(now 1\.0\)"):
        Trainer(settings(tmp_path, keep_features=ALL), *material, Accelerator(cpu=True))


def test_processes_without_a_text_are_refused(material: Material, tmp_path: Path) -> None:
    texts = material[1].select(np.arange(60) < 2)
    stand: Any = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=3, process_index=0), texts=texts, config=settings(tmp_path)
    )
    with pytest.raises(Unsupported, match="each of 3 processes its own texts, and there are 2"):
        Trainer._kept(stand)


@pytest.fixture(scope="module")
def shared(material: Material, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    folder = tmp_path_factory.mktemp("shared")
    trainer = Trainer(
        settings(folder, epochs=3.0, learning_rate=1e-2, share_lm_head=True, taps=(1, 2, 4)),
        *material,
        Accelerator(cpu=True),
    )
    trainer.run()
    return trainer, folder


def test_a_shared_lm_head_is_the_targets_rows(material: Material, shared: tuple[Trainer, Path]) -> None:
    (trainer, folder), model = shared, material[0]
    written, rows = load_file(folder / "model.safetensors"), model.lm_head.weight[trainer.vocabulary]
    assert "lm_head.weight" not in written and trainer.head.lm_head is None
    assert (written["lm_head_map.weight"].float() - torch.eye(64)).abs().max() > 0.01  # learned, from the identity
    head = load_head(folder, model)
    bound = BoundHead.of(head)
    read = bound.readout()
    assert head.config.target_rows and type(read) is torch.nn.Linear and bound.readout() is read
    torch.testing.assert_close(read.weight, rows @ written["lm_head_map.weight"].float())
    states = torch.randn(7, 64)
    torch.testing.assert_close(head.logits(states), read(head.norm(states)))
    assert ("target_rows", "True (weights)") in inspect_head(folder, model).rows()
    assert "`lm_head_map.weight`" in (folder / "README.md").read_text()

    ids = torch.arange(5, 15)[None]
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    with fastspec.patched(model, eagle3=folder):
        found = model.generate(ids, max_new_tokens=40, do_sample=False, assistant="eagle3")
        length = fastspec.report(model).last.acceptance_length
    assert torch.equal(found, plain) and length > 1.2


def test_a_run_goes_on_from_a_head_with_a_shared_lm_head(
    material: Material, shared: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trainer, folder = shared
    sizes = {"draft_vocab_size": 0, "intermediate_size": 0}
    second = Trainer(settings(tmp_path, start_from=str(folder), epochs=0.5, **sizes), *material, Accelerator(cpu=True))
    assert second.config.share_lm_head and second.head.config == trainer.head.config
    one, two = trainer.head.lm_head_map, second.head.lm_head_map
    assert one is not None and two is not None
    torch.testing.assert_close(two.weight, one.weight.bfloat16().float(), rtol=0, atol=0)
    assert second.validate()["accuracy"] == pytest.approx(trainer.validate()["accuracy"], abs=0.03)
    second.run()
    assert not torch.equal(two.weight, one.weight.bfloat16().float())
    with pytest.raises(Unsupported, match=r"other sizes than the run: share_lm_head True \(the head: False\)"):
        own = Trainer(settings(tmp_path / "own", epochs=0.1), *material, Accelerator(cpu=True))
        own.run()
        third = settings(tmp_path / "third", start_from=str(tmp_path / "own"), share_lm_head=True, **sizes)
        Trainer(third, *material, Accelerator(cpu=True))


@pytest.mark.some("own LM head")
@pytest.mark.parametrize("rows", [False, True], ids=["own LM head", "shared LM head"])
def test_a_head_with_the_norms_of_eagle_3_1(material: Material, tmp_path: Path, rows: bool) -> None:
    """It learns, is written and read as what it is, drafts, and is gone on from; heads without them, and other kinds,
    are told apart."""
    model = material[0]
    config = settings(
        tmp_path / "one",
        epochs=3.0,
        learning_rate=1e-2,
        norms=True,
        share_lm_head=rows,
        taps=(1, 2, 4),
        keep_features=ALL,
    )
    trainer = Trainer(config, *material, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    assert trainer.validate()["top1"] > before + 0.2
    written = load_file(tmp_path / "one" / "model.safetensors")
    assert all(
        (written[f"fc_norm.{tap}.weight"].float() - 1).abs().max() > 0.01 for tap in range(3)
    )  # learned, from one
    head = load_head(tmp_path / "one", model)
    assert head.config.fc_norm and head.config.norm_output and not head.config.norm_before_residual
    described = inspect_head(tmp_path / "one", model)
    assert ("norm_output", "True (config)") in described.rows() and not described.notes
    assert "`norm_output`" in (tmp_path / "one" / "README.md").read_text()
    ids, features, positions = torch.arange(3, 9)[None], torch.randn(1, 6, 192), torch.arange(6)[None]
    causal = UnrolledAttention()
    fused = head.fc(torch.cat([norm(part) for norm, part in zip(head.fc_norm, features.chunk(3, -1), strict=True)], -1))
    torch.testing.assert_close(head.fuse(features), fused)
    fed = head.step(ids, fused, positions, causal)
    assert fed.pow(2).mean(-1).sqrt().sub(head.norm.weight.pow(2).mean().sqrt()).abs().max() < 0.5  # normed
    torch.testing.assert_close(head.logits(fed), BoundHead.of(head).readout()(fed))

    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    with fastspec.patched(model, eagle3=tmp_path / "one"):
        assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False, assistant="eagle3"), plain)
        assert fastspec.report(model).last.acceptance_length > 1.2
    sizes = {"draft_vocab_size": 0, "intermediate_size": 0}
    second = settings(tmp_path / "two", start_from=str(tmp_path / "one"), epochs=0.1, **sizes)
    assert Trainer(second, *material, Accelerator(cpu=True)).config.norms
    own = Trainer(settings(tmp_path / "own", epochs=0.1), *material, Accelerator(cpu=True))
    own.run()
    with pytest.raises(Unsupported, match=r"other sizes than the run: norms True \(the head: False\)"):
        Trainer(
            settings(tmp_path / "three", start_from=str(tmp_path / "own"), norms=True, **sizes),
            *material,
            Accelerator(cpu=True),
        )
    with pytest.raises(Unsupported, match="has norms"):
        Trainer(replace(config, norms=False), *material, Accelerator(cpu=True))
    with pytest.raises(ValueError, match="norms belongs to kind"):
        settings(tmp_path, norms=True, kind="eagle", draft_vocab_size=0)


def test_a_shared_lm_head_that_cannot_be_had_is_refused(
    material: Material, shared: tuple[Trainer, Path], tmp_path: Path
) -> None:
    model, folder = material[0], shared[1]
    weight = model.lm_head.weight
    try:
        for wrong, told in (
            (torch.zeros(128, 32, dtype=torch.uint8), "torch.uint8"),  # packed, as bitsandbytes'
            (torch.zeros(128, 64).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
            (torch.zeros(128, 64, device="meta"), "on the device meta"),
            (torch.zeros(90, 64), r"of shape \[90, 64\]"),
            (torch.zeros(128, 32), r"of shape \[128, 32\]"),
        ):
            model.lm_head.weight = torch.nn.Parameter(wrong, requires_grad=False)
            with pytest.raises(
                CheckpointError, match=rf"drafts with rows \[64\] of the target's LM head.* that is {told}.*: load the"
            ):
                load_head(folder, model)
            (reason,) = inspect_head(folder, model).misfits or ()
            assert "rows [64]" in reason
    finally:
        model.lm_head.weight = weight
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for more, told in (
        ({"lm_head.weight": torch.zeros(96, 64)}, r"unknown lm_head\.weight"),
        (
            {"lm_head_map.weight": torch.zeros(64, 32)},
            r"lm_head_map\.weight has shape \[64, 32\] where config\.json wants \[64, 64\]",
        ),
    ):
        save_file(tensors | more, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=told):
            load_head(tmp_path, model)
    with pytest.raises(ValueError, match="share_lm_head belongs to kind"):
        settings(tmp_path, share_lm_head=True, kind="eagle", draft_vocab_size=0)
    with pytest.raises(Unsupported, match="states are 64 wide, its LM head reads 64, and the head is to be 32"):
        Trainer(settings(tmp_path / "narrow", share_lm_head=True, hidden_size=32), *material, Accelerator(cpu=True))


ROUNDINGS = 3
"""How many times as far from a step in fp32 one on a GPU may be as one on the CPU in bf16, products and attention both,
as there. Each rounds in its own order. How much of a gradient cancels, and so what a rounding is of what is left, is
the same for both."""


class RoundedAttention(UnrolledAttention):
    """Attention in bf16, as on a GPU."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().__call__(layer, q.bfloat16(), k.bfloat16(), v.bfloat16())


def step_of(module: TrainingTimeTest, batch: TextBatch, teacher: Teacher, first: int) -> tuple[torch.Tensor, ...]:
    """A batch's losses and two gradients, on the CPU."""
    module.zero_grad()
    loss, losses, _ = module(batch.ids, teacher, first)
    loss.backward()
    layer = module.head.layers[0]
    return losses.cpu(), module.head.fc.weight.grad.cpu(), layer.self_attn.k_proj.weight.grad.cpu()


def on_the_cpu(trainer: Trainer, batch: TextBatch, teacher: Teacher) -> tuple[TrainingTimeTest, TextBatch, Teacher]:
    """The same step on the CPU, where all of it is in fp32."""
    head, target = EagleHead(trainer.head.config), small_target()
    head.load_state_dict(trainer.head.state_dict())
    head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    teacher = Teacher(**{field.name: getattr(teacher, field.name).cpu() for field in fields(Teacher)})
    return (
        TrainingTimeTest(head.float(), trainer.config.ttt_steps, trainer.config.decay),
        batch.to(torch.device("cpu")),
        teacher,
    )


def rounded_step(
    trainer: Trainer, batch: TextBatch, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, ...]:
    """The same step on the CPU, in bf16."""
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(ttt, "UnrolledAttention", RoundedAttention)
        return step_of(*on_the_cpu(trainer, batch, teacher), 0)


def test_a_step_on_the_cpu_is_the_trainer_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path, epochs=1.0, share_lm_head=True, taps=(1, 2, 4))
    model = small_target()
    trainer = Trainer(
        config, model, small_texts(model, 16, config), small_texts(model, 4, config), Accelerator(cpu=True)
    )
    trainer.run()
    batch = next(batches(trainer.texts, plan_batches(trainer.texts.lengths, 900, 16, None), 16))
    teacher = trainer.reader.read(batch.ids, batch.where)
    steps = (step_of(*on_the_cpu(trainer, batch, teacher), 0), step_of(trainer.module, batch, teacher, 0))
    for mine, theirs in zip(*steps, strict=True):
        assert torch.equal(mine, theirs) and bool(mine.any())
    late = step_of(trainer.module, batch, teacher, batch.first + trainer.config.ttt_steps + 4)
    rounded = rounded_step(trainer, batch, teacher, monkeypatch)
    for wrong, near, right in zip(late[1:], rounded[1:], steps[1][1:], strict=True):
        assert (wrong - right).norm() > 2 * ROUNDINGS * (near - right).norm() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_a_run_from_memory_gives_a_head_that_drafts(
    tmp_path: Path, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: dict[str, Any] = {"share_lm_head": True, "taps": (1, 2, 4)}
    config = settings(tmp_path, epochs=8.0, keep_features=ALL, mixed_precision="bf16", compile=compile, **shape)
    model = small_target().cuda()
    texts, heldout = small_texts(model, 160, config), small_texts(model, 24, config)
    trainer = Trainer(config, model, texts, heldout, Accelerator(mixed_precision="bf16"))
    assert trainer.features is not None and trainer.features.shelves[DEVICE].features.is_cuda
    before = trainer.validate()["top1"]
    trainer.run()
    assert trainer.features.read_before.all() and trainer.validate()["top1"] > before + 0.5
    for batch in batches(trainer.texts, plan_batches(trainer.texts.lengths, 900, 16, None), 16):
        batch = batch.to(model.device)
        teacher = trainer.features.read(batch)
        agree(teacher, trainer.reader.read(batch.ids, batch.where), batch, trainer.texts, rtol=1e-4, atol=1e-5)
        found = [step_of(trainer.module, batch, teacher, first) for first in (0, batch.first)]
        assert batch.first > 4  # rows of prompts take part in the first step alone
        exact, rounded = (
            step_of(*on_the_cpu(trainer, batch, teacher), 0),
            rounded_step(trainer, batch, teacher, monkeypatch),
        )
        for right, near, *steps in zip(exact, rounded, *found, strict=True):
            assert (
                max((step - right).norm() for step in steps) < ROUNDINGS * (near - right).norm() + 1e-3 * right.norm()
            )
    ids = torch.arange(5, 15, device=model.device)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(ids, **options)
    with fastspec.patched(model, eagle3=tmp_path):
        for fused in (None, False):
            assert torch.equal(model.generate(ids, assistant=fastspec.Eagle3(fused=fused), **options), plain)
            assert fastspec.report(model).last.acceptance_length > 1.2


def test_a_shared_lm_head_drafts_on_where_the_target_s_is_offloaded_later(shared: tuple[Trainer, Path]) -> None:
    model, ids = small_target(), torch.arange(5, 15)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(ids, **options)
    with fastspec.patched(model, eagle3=shared[1]):
        for offload in (True, False):
            assert torch.equal(model.generate(ids, assistant="eagle3", **options), plain)
            assert fastspec.report(model).last.acceptance_length > 1.2
            if offload:
                cpu_offload(model.lm_head, torch.device("cpu"))


def test_other_programs_get_a_head_with_an_lm_head_of_its_own(
    material: Material, shared: tuple[Trainer, Path], tmp_path: Path
) -> None:
    model, folder = material[0], shared[1]
    head, states = load_head(folder, model), torch.randn(7, 64)
    assert readable(head, str(folder), str(tmp_path)) == str(tmp_path)
    written = load_head(tmp_path, model)
    assert written.config.own_lm_head and not written.config.target_rows and written.lm_head is not None
    torch.testing.assert_close(written.logits(states), head.logits(states), rtol=0.02, atol=0.02)  # bf16
    for name in ("fc.weight", "norm.weight", "d2t"):
        assert torch.equal(written.state_dict()[name], head.state_dict()[name])
    assert readable(written, str(tmp_path), "nowhere") == str(tmp_path)


def read_by(folder: Path, model: Any) -> Any:
    """The module that a head of a folder reads logits with."""
    return BoundHead.of(load_head(folder, model)).readout()


@pytest.mark.some("True")
@pytest.mark.parametrize("captured", [False, True])
def test_a_shared_lm_head_follows_the_target(
    material: Material, shared: tuple[Trainer, Path], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was loaded for one target and given to another, an LM head that is replaced, and one that is changed
    in place."""
    folder, other = shared[1], small_target()
    loaded = load_head(folder, material[0])
    head = BoundHead.of(loaded)
    other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
    given = BoundHead.of(load_head(loaded, other))
    fresh, former = read_by(folder, other), head.readout()
    moved = given.readout()
    assert torch.equal(moved.weight, fresh.weight) and not torch.equal(moved.weight, former.weight)
    other.lm_head.weight.data.copy_(
        other.lm_head.weight.data.roll(3, 0)
    )  # without a word to torch's counter of versions
    assert torch.equal(given.readout().weight, fresh.weight)
    given.renew()
    assert given.readout() is moved and torch.equal(moved.weight, read_by(folder, other).weight)
    assert torch.equal(former.weight, head.readout().weight) and not torch.equal(former.weight, moved.weight)

    ids = torch.arange(5, 15)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    model = small_target()
    if captured:
        stand_in(monkeypatch)
    with fastspec.patched(model, eagle3=folder):
        for _ in range(2):
            model.generate(ids, assistant="eagle3", **options)
        length = fastspec.report(model).last.acceptance_length
        session = session_of(model)
        assert session is not None
        kept = session.resources["eagle3"].readout()
        model.lm_head.weight.data.mul_(-1)  # as a fused optimiser or a copy of weights does it
        out = model.generate(ids, assistant="eagle3", **options)
        assert torch.equal(out, model.generate(ids, **options))
        assert torch.equal(kept.weight, read_by(folder, model).weight)  # in place: what is captured reads it
        model.lm_head.weight.data.mul_(-1)
        order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
        embedding, lm_head = torch.nn.Embedding(128, 64), torch.nn.Linear(64, 128, bias=False)
        embedding.weight.data, lm_head.weight.data = model.model.embed_tokens.weight[order], model.lm_head.weight[order]
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(lm_head.requires_grad_(False))
        prompt = torch.argsort(order)[ids]
        out = model.generate(prompt, assistant="eagle3", **options)
        again = fastspec.report(model).last.acceptance_length
    assert torch.equal(out, model.generate(prompt, **options))
    assert length > 1.2 and again > 1.0
