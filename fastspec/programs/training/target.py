"""Frozen target as a teacher: its features and distributions of a batch, read anew or kept from epoch to epoch."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]  # of accelerate
import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import is_plain
from fastspec.patches.hf.compat import stack_of
from fastspec.programs.training.data import TextBatch, Texts
from fastspec.programs.training.ttt import Teacher

GIB = 2**30
SEED = 0
"""Of the order in which texts are chosen to be kept."""
CGROUP = Path("/sys/fs/cgroup")
"""Where a container's limits are told."""
NOWHERE, DEVICE, HOST = 0, 1, 2
"""Where a text's features are kept; texts of one batch should share it, see `KeptFeatures.read`."""


def freeze(target: Any) -> Any:
    """The target in eval mode and without gradients. Raises `Unsupported` where its weights are packed integers."""
    packed = [name for name, parameter in target.named_parameters() if not parameter.is_floating_point()]
    if packed:
        raise Unsupported(f"the target has packed weights ({packed[0]}); training needs one in plain floating point")
    return target.eval().requires_grad_(False)


def decoder(target: Any) -> Any:
    if hasattr(target, "get_decoder"):
        return stack_of(target.get_decoder())
    return getattr(target, target.base_model_prefix)


class TeacherLogits(NamedTuple):
    """Logits of M states, reduced: `probs` [M, V_d] and `inside` [M] as in `Teacher`, `whole` [M] fp32 the log-sum-exp
    of all, and `best` [M] the most likely token's id."""

    probs: Tensor
    inside: Tensor
    whole: Tensor
    best: Tensor


class TargetReader:
    """Reads a `Teacher` from the target; full-vocabulary logits exist only `chunk` rows at a time."""

    def __init__(self, target: Any, taps: tuple[int, ...], vocabulary: Tensor, *, chunk: int = 4096) -> None:
        self.base = decoder(target)
        self.lm_head = target.get_output_embeddings()
        self.taps = taps
        self.chunk = chunk
        size = self.lm_head.weight.shape[0]
        device = self.lm_head.weight.device
        self.vocabulary = vocabulary.to(device)
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self.draft_id = torch.full((size,), -1, device=device).index_copy_(
            0, self.vocabulary, torch.arange(len(vocabulary), device=device)
        )

    @torch.no_grad()
    def read(self, ids: Tensor, where: Tensor) -> Teacher:
        """ids [B, T] right-padded, where [M] flat positions as in `TextBatch` -> the teacher there."""
        features, _, judged = self.said(ids, where)
        return self.teacher(features, where, judged)

    @torch.no_grad()
    def said(self, ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor, TeacherLogits]:
        """One pass of the target over ids [B, T]: features [B, T, F], and at `where` the states that the LM head reads
        [M, H] with their reduced logits."""
        out = self.base(input_ids=ids, output_hidden_states=bool(self.taps), use_cache=False)
        features = torch.cat([out.hidden_states[tap] for tap in self.taps], -1) if self.taps else out.last_hidden_state
        states = out.last_hidden_state.flatten(0, 1)[where]
        return features, states, self.judged(states)

    @torch.no_grad()
    def judged(self, states: Tensor, known: tuple[Tensor, Tensor] | None = None) -> TeacherLogits:
        """Reduced logits of states [M, H]; `known` `whole` and `best` spare those outside the draft vocabulary."""
        size = self.lm_head.weight.shape[0]
        parts = []
        for start in range(0, len(states), self.chunk):
            rows = states[start : start + self.chunk]
            if known is None or not self.drafted_bytes:
                logits = self.lm_head(rows)
                whole, best = logits.float().logsumexp(-1), logits.argmax(-1)
                kept = logits if len(self.vocabulary) == size else logits[:, self.vocabulary]
            else:
                whole, best = (each[start : start + self.chunk] for each in known)
                kept = self._drafted(rows)
            share = torch.zeros_like(whole) if len(self.vocabulary) == size else kept.float().logsumexp(-1) - whole
            parts.append(TeacherLogits(kept.float().softmax(-1).to(rows.dtype), share.clamp(max=0).exp(), whole, best))
        return TeacherLogits(*(torch.cat(each) for each in zip(*parts, strict=True)))

    @property
    def drafted_bytes(self) -> int:
        """Bytes of a copy of the LM head's rows for the draft vocabulary; 0 where none is made."""
        part = len(self.vocabulary) < self.lm_head.weight.shape[0] and is_plain(self.lm_head)
        return len(self.vocabulary) * self.lm_head.weight.shape[1] * self.lm_head.weight.itemsize if part else 0

    def _drafted(self, rows: Tensor) -> Tensor:
        """Logits [M, V_d] of the draft vocabulary alone, of a plain LM head."""
        if self._rows is None:
            bias = self.lm_head.bias
            self._rows = self.lm_head.weight[self.vocabulary], None if bias is None else bias[self.vocabulary]
        return F.linear(rows, *self._rows)

    def teacher(self, features: Tensor, where: Tensor, judged: TeacherLogits) -> Teacher:
        best = self.draft_id[judged.best]
        return Teacher(features=features, where=where, probs=judged.probs, inside=judged.inside, best=best)


class Shelf(NamedTuple):
    """Contents of one memory, of texts with J loss positions (as in `TextBatch`): the features that the head reads
    [tokens, F], the states that the LM head reads [J, H], and of its logits the log-sum-exp [J] and the most likely
    token [J]. Distributions over the draft vocabulary are computed from the states anew."""

    features: Tensor
    states: Tensor
    whole: Tensor
    best: Tensor


class KeptFeatures:
    """Reader of teachers that keeps the features of `mine` (places in `texts`): as many as fit `gib` GiB of the
    target's device, and of the rest as many as fit `host_gib` GiB of the host, page-locked on CUDA; `place` [N] int8
    says where. A batch of one memory whose texts were read before comes from there, any other from the target. Raises
    `Unsupported` where no text fits, and where there is less memory."""

    def __init__(self, reader: TargetReader, texts: Texts, gib: float, mine: np.ndarray, host_gib: float = 0.0) -> None:
        self.reader = reader
        self.device = device = reader.lm_head.weight.device
        few = torch.from_numpy(texts.tokens[:3].astype(np.int64))[None].to(device)  # for sizes and dtypes
        features, states, judged = reader.said(few, torch.ones(1, dtype=torch.int64, device=device))
        of_token, of_state = features.shape[-1] * features.itemsize, states.shape[-1] * states.itemsize
        of_state += judged.whole.itemsize + judged.best.itemsize
        self.lengths, self.judged = texts.lengths.astype(np.int64), _judged(texts)
        size = self.lengths * of_token + self.judged * of_state
        self.place = np.zeros(len(texts), dtype=np.int8)
        left = {DEVICE: gib * GIB - reader.drafted_bytes, HOST: host_gib * GIB}
        for text in np.random.default_rng(SEED).permutation(mine):
            place = next((place for place, room in left.items() if size[text] <= room), NOWHERE)
            if place:
                self.place[text], left[place] = place, left[place] - size[text]
        if not self.place.any():
            least = (size[mine].min() + (reader.drafted_bytes if gib else 0)) / GIB
            given = {"keep_features": gib, "keep_features_host": host_gib}
            told = " and ".join(f"{name} is {value:g} GiB" for name, value in given.items() if value)
            raise Unsupported(f"{told}, and the shortest text takes {least:.3g}: allow more, or 0 for none")
        self.first, self.first_judged = self._begins(self.lengths), self._begins(self.judged)
        self.read_before = np.zeros(len(texts), dtype=bool)
        like = Shelf(features[0], states, judged.whole, judged.best)
        memories = {DEVICE: ("keep_features", gib), HOST: ("keep_features_host", host_gib)}
        self.shelves = {
            place: self._shelf(place, *memories[place], like) for place in memories if (self.place == place).any()
        }

    def _begins(self, counts: np.ndarray) -> np.ndarray:
        """[N] int64: where each text begins on its shelf, if it takes so many rows there."""
        found = np.zeros(len(counts), dtype=np.int64)
        for place in (DEVICE, HOST):
            here = self.place == place
            found[here] = _bounds(counts[here])[:, 0]
        return found

    def _shelf(self, place: int, name: str, gib: float, like: Shelf) -> Shelf:
        here = self.place == place
        tokens, count = int(self.lengths[here].sum()), int(self.judged[here].sum())
        where = self.device if place == DEVICE else torch.device("cpu")
        sizes = [(n, *part.shape[1:]) for part, n in zip(like, (tokens, count, count, count), strict=True)]
        needed = sum(part.itemsize * math.prod(size) for part, size in zip(like, sizes, strict=True))
        if place == HOST and needed > (room := _host_room()):  # else the process would end once it writes there
            raise Unsupported(f"{name} is {gib:g} GiB, and the host has {room / GIB:.3g} GiB left for each process")
        try:
            kinds = zip(like, sizes, strict=True)
            parts = [torch.empty(size, dtype=part.dtype, device=where) for part, size in kinds]
            if place == HOST and self.device.type == "cuda":
                for part in parts:
                    _lock(part)
        except RuntimeError as error:  # torch's OutOfMemoryError is one, and what its allocator on the CPU raises
            raise Unsupported(f"{name} is {gib:g} GiB, more than {where} has free: {error}") from error
        return Shelf(*parts)

    def read(self, batch: TextBatch) -> Teacher:
        """The teacher of a batch on the target's device, as `TargetReader.read` gives it."""
        places = self.place[batch.texts]
        if self.read_before[batch.texts].all() and (places == places[0]).all():
            features, states, whole, best = self._recalled(batch.texts, batch.ids.shape[1])
            return self.reader.teacher(features, batch.where, self.reader.judged(states, (whole, best)))
        features, states, judged = self.reader.said(batch.ids, batch.where)
        self._keep(batch.texts, Shelf(features, states, judged.whole, judged.best))
        return self.reader.teacher(features, batch.where, judged)

    def _recalled(self, texts: np.ndarray, width: int) -> list[Tensor]:
        """Features of texts, and the rest of their shelf, on the target's device; padding is zeros."""
        shelf, count = self.shelves[self.place[texts[0]]], int(self.judged[texts].sum())
        found = [shelf.features.new_zeros((len(texts), width, shelf.features.shape[-1]), device=self.device)]
        found += [part.new_empty((count, *part.shape[1:]), device=self.device) for part in shelf[1:]]
        parts = self._parts(texts, range(len(texts)), found)
        torch._foreach_copy_(parts, [part for text in texts for part in self._kept(text)], non_blocking=True)
        return found

    def _keep(self, texts: np.ndarray, said: Shelf) -> None:
        new = (self.place[texts] != NOWHERE) & ~self.read_before[texts]
        parts = self._parts(texts, np.flatnonzero(new).tolist(), said)
        kept = [part for text in texts[new] for part in self._kept(text)]
        if kept:
            torch._foreach_copy_(kept, parts, non_blocking=True)
        self.read_before[texts[new]] = True

    def _parts(self, texts: np.ndarray, rows: Sequence[int], batch: Sequence[Tensor]) -> list[Tensor]:
        """The parts of some rows of a batch, as a shelf has them."""
        bounds, (features, *others) = _bounds(self.judged[texts]), batch
        found = []
        for row in rows:
            start, end = bounds[row]
            found += [features[row, : self.lengths[texts[row]]], *(part[start:end] for part in others)]
        return found

    def _kept(self, text: int) -> list[Tensor]:
        features, *others = self.shelves[self.place[text]]
        first, begins = self.first[text], self.first_judged[text]
        kept = [part[begins : begins + self.judged[text]] for part in others]
        return [features[first : first + self.lengths[text]], *kept]


def _host_room() -> float:
    """Bytes of the host's memory left for each of its processes, by the system and a container's limit."""
    room = float(psutil.virtual_memory().available)
    paths = [CGROUP / f"memory.{name}" for name in ("max", "current", "stat")]
    if all(path.exists() for path in paths):
        limit, used, stat = (path.read_text(encoding="utf-8").strip() for path in paths)
        parts = dict(line.split() for line in stat.splitlines())
        if limit.isdigit():  # files that were read are given back when their memory is needed
            room = min(room, int(limit) - int(used) + int(parts["inactive_file"]) + int(parts["active_file"]))
    return room / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _lock(part: Tensor) -> None:
    """Page-lock a tensor of the host, for as long as it lives. torch would round its size up to a power of two."""
    if not part.numel():
        return
    part.zero_()  # pages come into being here, by all threads
    cuda, at = torch.cuda.cudart(), part.data_ptr()
    error = int(cuda.cudaHostRegister(at, part.numel() * part.itemsize, 0))
    if error:
        raise RuntimeError(f"cudaHostRegister of {part.numel() * part.itemsize / GIB:.3g} GiB gave error {error}")
    weakref.finalize(part, cuda.cudaHostUnregister, at).atexit = False


def _bounds(counts: np.ndarray) -> np.ndarray:
    """Bounds of runs of so many each, one behind another: [N, 2] int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.stack((ends - counts, ends), 1)


def _judged(texts: Texts) -> np.ndarray:
    """[N] int64: loss positions of each text, those whose token two further on is the target's."""
    before = np.concatenate(([0], np.cumsum(texts.answer, dtype=np.int64)))
    start, end = texts.offsets[:-1], texts.offsets[1:]
    found: np.ndarray = before[end] - before[np.minimum(start + 2, end)]
    return found
