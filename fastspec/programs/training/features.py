"""Features of texts, kept in the memory of the target's device and of the host from epoch to epoch.

Of a text of L tokens with J loss positions (as in `TextBatch`) are kept: the features that the head reads [L, F], the
states that the LM head reads [J, H], and the log-sum-exp and the most likely token of its logits. Distributions over
the draft vocabulary are computed from the states anew.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]  # of accelerate
import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.programs.training.data import TextBatch, Texts
from fastspec.programs.training.target import TargetReader
from fastspec.programs.training.ttt import Teacher

GIB = 2**30
SEED = 0
"""Of the order in which texts are chosen to be kept."""
CGROUP = Path("/sys/fs/cgroup")
"""Where a container's limits are told."""
NOWHERE, DEVICE, HOST = 0, 1, 2
"""Where a text's features are kept; texts of one batch should share it, see `KeptFeatures.read`."""


class Shelf(NamedTuple):
    """Contents of one memory: features [tokens, F]; states [J, H], whole [J] and best [J] of the loss positions."""

    features: Tensor
    states: Tensor
    whole: Tensor
    best: Tensor


class KeptFeatures:
    """Reader of teachers that keeps the features of `mine` (places in `texts`): as many as fit `gib` GiB of the
    target's device, and of the rest as many as fit `host_gib` GiB of the host, page-locked on CUDA.

    `place` [N] int8 says where each is kept (`NOWHERE`, `DEVICE`, `HOST`). A batch of one memory whose texts were read
    before comes from there, any other from the target. Raises `Unsupported` where no text fits, and where there is less
    memory.
    """

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
        if batch.texts is None:
            raise ValueError("the batch does not say which texts it holds")
        places = self.place[batch.texts]
        if self.read_before[batch.texts].all() and (places == places[0]).all():
            recalled = self._from_device if places[0] == DEVICE else self._from_host
            features, states, whole, best = recalled(batch.texts, batch.ids.shape[1])
            return self.reader.teacher(features, batch.where, self.reader.judged(states, (whole, best)))
        features, states, judged = self.reader.said(batch.ids, batch.where)
        self._keep(batch.texts, Shelf(features, states, judged.whole, judged.best))
        return self.reader.teacher(features, batch.where, judged)

    def _from_device(self, texts: np.ndarray, width: int) -> tuple[Tensor, ...]:
        shelf = self.shelves[DEVICE]
        positions = np.minimum(np.arange(width), self.lengths[texts, None] - 1)  # padding repeats a text's last token
        features = shelf.features[self._moved(self.first[texts, None] + positions)]
        rows = self._moved(_runs(self.first_judged[texts], self.judged[texts]))
        return features, shelf.states[rows], shelf.whole[rows], shelf.best[rows]

    def _from_host(self, texts: np.ndarray, width: int) -> tuple[Tensor, ...]:
        shelf = self.shelves[HOST]  # padding is zeros
        features = shelf.features.new_zeros((len(texts), width, shelf.features.shape[-1]), device=self.device)
        count = int(self.judged[texts].sum())
        found = [part.new_empty((count, *part.shape[1:]), device=self.device) for part in shelf[1:]]
        for row, (text, (to, end)) in enumerate(zip(texts, _bounds(self.judged[texts]), strict=True)):
            first, length = self.first[text], self.lengths[text]
            features[row, :length].copy_(shelf.features[first : first + length], non_blocking=True)
            first = self.first_judged[text]
            for there, part in zip(found, shelf[1:], strict=True):
                there[to:end].copy_(part[first : first + end - to], non_blocking=True)
        return features, *found

    def _keep(self, texts: np.ndarray, said: Shelf) -> None:
        new = (self.place[texts] != NOWHERE) & ~self.read_before[texts]
        width, bounds = said.features.shape[1], _bounds(self.judged[texts])
        for place, shelf in self.shelves.items():
            here = np.flatnonzero(new & (self.place[texts] == place))
            if place == DEVICE and here.size:
                count, judged = self.lengths[texts[here]], self.judged[texts[here]]
                tokens = self._moved(_runs(here * width, count))
                shelf.features[self._moved(_runs(self.first[texts[here]], count))] = said.features.flatten(0, 1)[tokens]
                source = self._moved(_runs(bounds[here, 0], judged))
                rows = self._moved(_runs(self.first_judged[texts[here]], judged))
                for there, part in zip(shelf[1:], said[1:], strict=True):
                    there[rows] = part[source]
            elif place == HOST:
                for row in here:
                    first, length = self.first[texts[row]], self.lengths[texts[row]]
                    shelf.features[first : first + length].copy_(said.features[row, :length], non_blocking=True)
                    (start, end), first = bounds[row], self.first_judged[texts[row]]
                    for there, part in zip(shelf[1:], said[1:], strict=True):
                        there[first : first + end - start].copy_(part[start:end], non_blocking=True)
        self.read_before[texts[new]] = True

    def _moved(self, index: np.ndarray) -> Tensor:
        found, pinned = torch.from_numpy(index), self.device.type == "cuda"
        return (found.pin_memory() if pinned else found).to(self.device, non_blocking=pinned)


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
    """Page-lock a tensor of the host, for as long as it lives. torch's own allocator would round it up to a power of
    two."""
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


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0] to starts[0] + counts[0] - 1, then as many from starts[1], and so on: [sum of counts] int64."""
    ends = np.cumsum(counts)
    found: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return found
