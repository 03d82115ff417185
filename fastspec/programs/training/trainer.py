"""Training run: schedule, steps, checkpoints, validation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather

from fastspec.errors import Unsupported
from fastspec.programs.training import data
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import TextBatch, Texts, batches, plan_batches
from fastspec.programs.training.heads import draft_vocabulary_of, model_card, opened, save_head, started, with_sizes_of
from fastspec.programs.training.target import DEVICE, HOST, NOWHERE, KeptFeatures, TargetReader
from fastspec.programs.training.ttt import TrainingTimeTest, chain_lengths

STATE = "state.pt"
LOG = "log.jsonl"
DRAFT_VOCABULARY = 10240  # of an EAGLE-3 head, unless said otherwise
START_BATCHES = 4  # that an EAGLE-1/2 head's start is solved from
PLAN = 2  # version of how texts become batches; a run of another version is not taken up
AGREE_EVERY = 10  # steps; several processes wait for each other and for the device to agree on the time
IDENTITY = (
    *("batch_tokens", "length_multiple", "max_length", "seed", "kind", "draft_vocab_size"),
    *("hidden_size", "intermediate_size", "taps", "loss", "start_from", "share_lm_head", "norms"),
    *("keep_features", "keep_features_host", "ttt_steps", "decay", "learning_rate", "final_learning_rate"),
    *("warmup_steps", "clip", "mixed_precision"),
)
"""Settings that a resumed run must share with the one it takes up."""


@dataclass(slots=True)
class Progress:
    """Place where a run stands; kept in its checkpoints."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    batches_per_epoch: int = 1
    history: list[dict[str, Any]] = field(default_factory=list)

    def done(self, config: TrainConfig) -> float:
        """The share of the run that is done, 0 to 1: by time or by epochs, whichever is further."""
        by_time = self.seconds / (60 * config.minutes) if config.minutes > 0 else 0.0
        by_epoch = (self.epoch + self.batch / self.batches_per_epoch) / config.epochs if config.epochs > 0 else 0.0
        return min(1.0, max(by_time, by_epoch))


def learning_rate(config: TrainConfig, progress: Progress) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` times the peak."""
    floor = config.final_learning_rate
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress.done(config)))
    return config.learning_rate * cosine * min(1.0, (progress.step + 1) / max(1, config.warmup_steps))


class Trainer:
    """Trainer of a head; `run` trains until the end, or for `limit` seconds, and can be called again."""

    def __init__(
        self, config: TrainConfig, target: Any, texts: Texts, heldout: Texts, accelerator: Accelerator
    ) -> None:
        began = opened(config, target)
        config = with_sizes_of(config, began) if began is not None else config
        self.config, self.accelerator = config, accelerator
        self.texts = _usable(texts, config.max_length)
        self.heldout = _usable(heldout, config.max_length)
        if not len(self.texts):
            raise Unsupported(
                f"there is no text to train on: of {len(texts)} none has an answer of three tokens and at most "
                f"{config.max_length} in all"
            )
        self.starts = self.texts.answer_starts
        self.folder = Path(config.output)
        self.progress = Progress()
        vocab = target.get_input_embeddings().weight.shape[0]
        self.identity: dict[str, Any] = {
            **{name: getattr(config, name) for name in IDENTITY},
            **{"texts": len(self.texts), "tokens": int(self.texts.lengths.sum()), "plan": PLAN},
            "processes": accelerator.num_processes,
        }
        if config.keeps_features:  # kept features depend on it
            self.identity["target_dtype"] = str(target.dtype)
        state = self._stored()
        if state is None and began is not None:
            vocabulary = draft_vocabulary_of(began)
            self.coverage = data.coverage_of(self.texts, vocabulary)
        elif state is None:
            size = config.draft_vocab_size or (DRAFT_VOCABULARY if config.kind == "eagle3" else vocab)
            vocabulary, self.coverage = data.draft_vocabulary(self.texts, min(size, vocab), vocab)
        else:
            vocabulary, self.coverage = state["vocabulary"].cpu(), state["coverage"]
        torch.manual_seed(config.seed)
        self.features: KeptFeatures | None = None
        fresh = state is None and began is None
        first = batches(self.texts, self._plan(0)[:START_BATCHES], config.length_multiple) if fresh else None
        self.head = began or started(config, target, vocabulary, first)
        self.reader = TargetReader(target, self.head.config.taps, vocabulary)
        self.module = TrainingTimeTest(
            self.head, config.ttt_steps, config.decay, loss=config.loss, compile=config.compile
        )
        if config.keeps_features:
            self.features = self._kept()
        self.vocabulary = vocabulary
        self.head.to(accelerator.device)
        optimizer = torch.optim.AdamW(
            self.head.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if state is not None:
            self.head.load_state_dict(state["head"])
            optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(state["scaler"])
        self.unrolled, self.optimizer = accelerator.prepare(self.module, optimizer)
        if accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in self.progress.history)
            (self.folder / LOG).write_text(lines, encoding="utf-8")

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / STATE
        if not (self.config.resume and path.exists()):
            return None
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        default = {each.name: each.default for each in fields(TrainConfig)}
        begun = default | state["identity"]  # an older run lacks newer settings, and may hold "" or 0 for these two
        begun |= {name: default[name] for name in ("loss", "decay") if not begun[name]}
        if was := data.differing(begun, self.identity):
            raise Unsupported(
                f"the run in {self.folder} has {was}: go on with the same, choose another output folder, or set "
                "resume=False"
            )
        return state

    def _plan(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self.config.seed, epoch))
        if self.features is not None:
            return self._own_groups(self.features.place, rng)
        config = self.config
        groups = plan_batches(self.texts.lengths, config.batch_tokens, config.length_multiple, rng, self.starts)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return groups[: max(1, len(groups) // world) * world][rank::world] or groups

    def _kept(self) -> KeptFeatures:
        """This process's features. Raises `Unsupported` in all processes where one of them can keep none."""
        config, world, error = self.config, self.accelerator.num_processes, None
        mine, count = np.arange(self.accelerator.process_index, len(self.texts), world), len(self.texts)
        if count < world:
            raise Unsupported(f"keep_features gives each of {world} processes its own texts, and there are {count}")
        try:
            kept = KeptFeatures(self.reader, self.texts, config.keep_features, mine, config.keep_features_host)
        except Unsupported as raised:
            error = raised
        failed = torch.tensor([int(error is not None)], device=self.accelerator.device)
        if bool(gather(failed).any()):
            raise error or Unsupported("keep_features: another process can keep no text; its error says why")
        return kept

    def _own_groups(self, place: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Batches of this process's texts, each of one memory or none; as many in every process."""
        tokens, multiple, lengths = self.config.batch_tokens, self.config.length_multiple, self.texts.lengths
        mine = np.arange(len(lengths)) % self.accelerator.num_processes == self.accelerator.process_index
        groups: list[np.ndarray] = []
        for part in filter(len, (np.flatnonzero(mine & (place == each)) for each in (DEVICE, HOST, NOWHERE))):
            first = not groups
            groups += [part[group] for group in plan_batches(lengths[part], tokens, multiple, rng, self.starts[part])]
            if not first:
                rng.shuffle(groups)  # type: ignore[arg-type]  # a list of arrays is shuffled in place
        counts = gather(torch.tensor([len(groups)], device=self.accelerator.device))
        return groups[: int(counts.min())]

    def step(self, batch: TextBatch) -> dict[str, Any]:
        """One optimiser step; returns tensors, so that nothing waits for the device."""
        teacher = self.reader.read(batch.ids, batch.where) if self.features is None else self.features.read(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.progress)
        with self.accelerator.autocast():
            loss, losses, hits = self.unrolled(batch.ids, teacher, batch.first)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "losses": losses, "accuracy": hits.float().nanmean(1), "norm": norm}

    def run(
        self,
        limit: float = math.inf,
        report: Callable[[dict[str, Any]], None] | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> Progress:
        """Train until the run's end or for `limit` seconds, with checkpoints; `report` is given a row at the first step
        and every 50, `tick` the share that is done after each."""
        p, config = self.progress, self.config
        first, limit, seen = p.step, self._agreed(limit), 0
        last = time.perf_counter()
        began = saved = self._agreed(last)
        plan = self._plan(p.epoch)
        p.batches_per_epoch = len(plan)
        stream = batches(self.texts, plan[p.batch :], config.length_multiple)
        while p.done(config) < 1 and limit > 0:
            batch = next(stream, None)
            if batch is None:
                p.epoch, p.batch = p.epoch + 1, 0
                stream = batches(self.texts, self._plan(p.epoch), config.length_multiple)
                continue
            result = self.step(batch.to(self.accelerator.device))
            tokens = int(batch.ids.numel()) * self.accelerator.num_processes
            seen, p.tokens = seen + tokens, p.tokens + tokens
            p.step, p.batch = p.step + 1, p.batch + 1
            if tick is not None:
                tick(p.done(config))
            if p.step % 50 == 0 or p.step == 1:
                row = self._row(result, seen, time.perf_counter() - last)
                seen, last = 0, time.perf_counter()
                if report is not None and self.accelerator.is_main_process:
                    report(row)
            if config.validate_every and p.step % config.validate_every == 0 and len(self.heldout):
                self._log({"step": p.step, "validation": self.validate()})
            if self.accelerator.num_processes > 1 and p.step % AGREE_EVERY:
                continue
            now = self._agreed(time.perf_counter())
            p.seconds, began, limit = p.seconds + now - began, now, limit - (now - began)
            if 0 < 60 * config.checkpoint_minutes < now - saved:
                self.checkpoint()
                saved = now
        if p.step > first:
            self.checkpoint()
        return p

    def finish(self) -> None:
        """Validate the trained head once, and write the result into its log and card."""
        last = self.progress.history[-1] if self.progress.history else {}
        if len(self.heldout) and (last.get("step") != self.progress.step or "validation" not in last):
            self._log({"step": self.progress.step, "validation": self.validate()})
            self.checkpoint()

    def _agreed(self, now: float) -> float:
        """The main process's clock, so that all processes stop at the same step."""
        if self.accelerator.num_processes == 1:
            return now
        return float(broadcast(torch.tensor([now], dtype=torch.float64, device=self.accelerator.device))[0])

    def _row(self, result: dict[str, Any], tokens: int, seconds: float) -> dict[str, Any]:
        p = self.progress
        row = {
            "step": p.step,
            "done": round(p.done(self.config), 4),
            "loss": round(float(result["loss"]), 4),
            "losses": [round(x, 3) for x in result["losses"].tolist()],
            "accuracy": [round(x, 3) for x in result["accuracy"].tolist()],
            "norm": round(float(result["norm"]), 3),
            "tokens_per_second": round(tokens / max(seconds, 1e-9)),
        }
        self._log(row)
        return row

    def _log(self, row: dict[str, Any]) -> None:
        self.progress.history.append(row)
        if self.accelerator.is_main_process:
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """`top1`: mean tokens of a round of a chain (bonus counted), teacher-forced; and the `accuracy` by depth."""
        steps, device, total = self.config.ttt_steps, self.head.fc.weight.device, 0
        texts = self.heldout.select(np.arange(len(self.heldout)) < self.config.heldout_texts)
        unrolled = TrainingTimeTest(self.head, steps, 1.0)
        counts, right = torch.zeros(2, steps, device=device, dtype=torch.float64)
        for batch in batches(texts, plan_batches(texts.lengths, 16384, 64, None), 64):
            batch = batch.to(device)
            with self.accelerator.autocast():
                teacher = self.reader.read(batch.ids, batch.where)
                _, _, hits = unrolled(batch.ids, teacher, batch.first)
            alive, rows = chain_lengths(hits, teacher.where, batch.ids.shape)
            counts, right, total = counts + alive, right + hits.sum(1), total + int(rows)
        accuracy = [round(x, 4) for x in (right / max(1, total)).tolist()]
        return {"top1": round(1 + float(counts.sum()) / max(1, total), 3), "accuracy": accuracy}

    def checkpoint(self) -> None:
        """Write the head (bf16, with its card) and, beside it, what `resume` needs."""
        if not self.accelerator.is_main_process:
            return
        p, scaler, part = self.progress, self.accelerator.scaler, self.folder / (STATE + ".part")
        row = next((r["validation"] for r in reversed(p.history) if "validation" in r), None)
        card = model_card(
            self.config,
            self.head.config,
            coverage=self.coverage,
            validation=row,
            steps=p.step,
            processes=self.accelerator.num_processes,
            texts=len(self.texts),
        )
        save_head(self.head, self.folder, card)
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict(),
            "vocabulary": self.vocabulary,
            "coverage": self.coverage,
            "scaler": None if scaler is None else scaler.state_dict(),
            "identity": self.identity,
            "progress": {name: getattr(p, name) for name in Progress.__slots__},
        }
        torch.save(state, part)
        part.replace(self.folder / STATE)


def _usable(texts: Texts, longest: int) -> Texts:
    """The conversations that fit and hold an answer of at least three tokens."""
    if not len(texts):
        return texts
    answers = np.add.reduceat(texts.answer.astype(np.int64), texts.offsets[:-1])
    return texts.select((texts.lengths <= longest) & (answers >= 3))
