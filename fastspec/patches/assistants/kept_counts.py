"""Counts of tokens by which draft vocabularies follow texts, kept in the cache folder: the next process begins with the
tokens of the last texts. They are written by `unpatch`, before another vocabulary of the model reads them, and at exit;
never in a round, nor when a model is collected, which may be while a graph is captured."""

from __future__ import annotations

import atexit
import hashlib
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

from torch import nn

from fastspec import files
from fastspec.forks import at_fork
from fastspec.generation.heads.bound import DraftVocabulary

FOLDER, LARGEST = "drafted", 1 << 40
"""Folder of the cache, and a count that no texts make."""


def fingerprint(tokenizer: Any, size: int) -> str:
    """Name for the tokens of a tokenizer in the order of their ids, the same in every process; "" for one of less than
    half of a vocabulary of `size`, which is what transformers makes of a model without a tokenizer's files."""
    ids: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if 2 * len(ids) < size:
        return ""
    return hashlib.sha256("\n".join(sorted(ids, key=ids.__getitem__)).encode()).hexdigest()[:16]


def _path(tokens: str, size: int) -> Path:
    return files.cache_folder() / FOLDER / files.file_name(tokens, str(size))


def kept_counts(tokens: str, size: int) -> tuple[tuple[int, int], ...]:
    """Tokens with the counts that were kept of them, for a vocabulary of `size` by its fingerprint; a damaged file is
    ignored with a warning."""
    path = _path(tokens, size)
    found = files.read(path)
    if found is None:
        return ()
    try:
        counts = tuple((int(token), int(count)) for token, count in found["counts"].items())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files.ignore(path, f"no counts of tokens: {type(error).__name__}: {error}")
        return ()
    if not all(0 <= token < size and 0 < count < LARGEST for token, count in counts):
        files.ignore(path, f"counts of tokens that a vocabulary of {size} cannot have")
        return ()
    return counts


def keep_counts(vocabulary: DraftVocabulary) -> None:
    """Keep the counts of the tokens that have a vocabulary's free places; of two processes the last one's stay."""
    path = _path(vocabulary.kept_by, len(vocabulary.counts))
    files.write(path, {"counts": {str(token): count for token, count in vocabulary.most_counted().items()}})


class KeptVocabularies:
    """Draft vocabularies of this process whose counts are to be kept, with the models that they draft for."""

    def __init__(self) -> None:
        self.held: dict[DraftVocabulary, ref[nn.Module]] = {}
        at_fork(self)

    def forked(self) -> None:
        """Leave the counts to the process that forked."""
        self.held.clear()

    def hold(self, vocabulary: DraftVocabulary, model: nn.Module) -> None:
        """Keep the counts of a model's vocabulary later."""
        self.held.setdefault(vocabulary, ref(model))

    def let_go(self, model: nn.Module) -> None:
        """Keep the counts of a model's vocabularies, and of models that are gone, now and no more."""
        for vocabulary, owner in list(self.held.items()):
            if (owner() is model or owner() is None) and self.held.pop(vocabulary, None) is not None:
                keep_counts(vocabulary)

    def keep_all(self) -> None:
        """Keep the counts of all; those on a device that an error has broken are lost, with a warning."""
        for each in list(self.held):
            try:
                keep_counts(each)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                warnings.warn(f"fastspec could not keep counts of tokens: {why}", RuntimeWarning, stacklevel=2)


vocabularies = KeptVocabularies()
atexit.register(vocabularies.keep_all)
