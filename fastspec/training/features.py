"""What the target says of texts, kept in its device's memory: a text that comes again is not read again. Of several processes each keeps
what it needs.

Of a text of L tokens, J of them judged (see `Batch`), are kept: the features that the head reads [L, F], the states that the LM head reads
[J, H], and of the LM head's logits the logarithm of their sum of exponentials and the most likely token. Distributions over the draft
vocabulary are computed from the states anew; where the loss asks for none, no states are kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.training.data import Batch, Texts
from fastspec.training.target import TargetReader
from fastspec.training.ttt import Teacher

GIB = 2**30
SEED = 0
"""Of the order in which texts are chosen to be kept."""


class KeptFeatures:
    """Reads teachers of batches for a `TargetReader`: of `mine` (places in `texts`) as many as fit `gib` GiB come from memory from the
    second time on.

    `kept` [N] bool says which these are; a batch of others, or of kept ones that were not read yet, is read from the target. Raises
    `Unsupported` where no text fits, and where the device has less memory.
    """

    def __init__(self, reader: TargetReader, texts: Texts, gib: float, mine: np.ndarray) -> None:
        self.reader = reader
        device = reader.lm_head.weight.device
        few = torch.from_numpy(texts.tokens[:3].astype(np.int64))[None].to(device)
        features, states, judged = reader.said(few, torch.ones(1, dtype=torch.int64, device=device))  # what sizes and dtypes there are
        of_token, of_state = features.shape[-1] * features.itemsize, states.shape[-1] * states.itemsize
        of_state += judged.whole.itemsize + judged.best.itemsize
        self.lengths, self.judged = texts.lengths.astype(np.int64), _judged(texts)
        size = self.lengths * of_token + self.judged * of_state
        self.kept = np.zeros(len(texts), dtype=bool)
        left = gib * GIB - reader.drafted_bytes
        for text in np.random.default_rng(SEED).permutation(mine):
            if size[text] <= left:
                self.kept[text], left = True, left - size[text]
        if not self.kept.any():
            least = (size[mine].min() + reader.drafted_bytes) / GIB
            raise Unsupported(f"keep_features is {gib:g} GiB, and the shortest text takes {least:.3g}: allow more, or 0 for none")
        self.first, self.first_judged = (np.cumsum(np.where(self.kept, n, 0)) - n for n in (self.lengths, self.judged))
        self.read_before = np.zeros(len(texts), dtype=bool)
        tokens, count = int(self.lengths[self.kept].sum()), int(self.judged[self.kept].sum())
        try:
            self.features = features.new_empty(tokens, features.shape[-1])
            self.states = states.new_empty(count, states.shape[-1])
            self.whole, self.best = judged.whole.new_empty(count), judged.best.new_empty(count)
        except RuntimeError as error:  # torch's OutOfMemoryError is one, and what its allocator on the CPU raises
            raise Unsupported(f"keep_features is {gib:g} GiB, more than {device} has free: {error}") from error

    def read(self, batch: Batch) -> Teacher:
        """What the target says of a batch on its device, as `TargetReader.read` of its ids and its positions."""
        if batch.texts is None:
            raise ValueError("the batch does not say which texts it holds")
        if self.read_before[batch.texts].all():
            return self._recalled(batch.texts, batch)
        features, states, judged = self.reader.said(batch.ids, batch.where)
        self._keep(batch.texts, features, states, judged.whole, judged.best)
        return self.reader.teacher(features, batch.where, judged)

    def _recalled(self, texts: np.ndarray, batch: Batch) -> Teacher:
        positions = np.minimum(np.arange(batch.ids.shape[1]), self.lengths[texts, None] - 1)  # padding repeats a text's last token
        features = self.features[self._moved(self.first[texts, None] + positions)]
        rows = self._moved(_runs(self.first_judged[texts], self.judged[texts]))
        judged = self.reader.judged(self.states[rows], (self.whole[rows], self.best[rows]))
        return self.reader.teacher(features, batch.where, judged)

    def _keep(self, texts: np.ndarray, features: Tensor, states: Tensor, whole: Tensor, best: Tensor) -> None:
        new = self.kept[texts] & ~self.read_before[texts]
        if not new.any():
            return
        count, judged = self.lengths[texts[new]], self.judged[texts[new]]
        tokens = self._moved(_runs(np.flatnonzero(new) * features.shape[1], count))
        self.features[self._moved(_runs(self.first[texts[new]], count))] = features.flatten(0, 1)[tokens]
        before = np.cumsum(self.judged[texts]) - self.judged[texts]
        source, rows = self._moved(_runs(before[new], judged)), self._moved(_runs(self.first_judged[texts[new]], judged))
        self.states[rows], self.whole[rows], self.best[rows] = states[source], whole[source], best[source]
        self.read_before[texts[new]] = True

    def _moved(self, index: np.ndarray) -> Tensor:
        found, device = torch.from_numpy(index), self.features.device
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _judged(texts: Texts) -> np.ndarray:
    """[N] int64: how many positions of each text carry a loss: those whose token two further on is the target's, see `Batch`."""
    before = np.concatenate(([0], np.cumsum(texts.answer, dtype=np.int64)))
    start, end = texts.offsets[:-1], texts.offsets[1:]
    found: np.ndarray = before[end] - before[np.minimum(start + 2, end)]
    return found


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0] to starts[0] + counts[0] - 1, then as many from starts[1], and so on: [sum of counts] int64."""
    ends = np.cumsum(counts)
    found: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return found
