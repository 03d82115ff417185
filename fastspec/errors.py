"""The errors that fastspec raises on purpose: each says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def accepted(given: str, names: Iterable[str], rest: str = "") -> str:
    """End of an error about an unknown name: the one that was probably meant, and all that are accepted, as the caller
    writes them; `rest` names what else is."""
    known = list(names)
    return f"{meant(given, known)}accepted are {', '.join(known)}{rest}"


def meant(given: str, names: Iterable[str]) -> str:
    """The question "did you mean ...? " with the name that an unknown one is most like; empty where none is."""
    known = list(names)
    near = get_close_matches(given, known, 1) or get_close_matches(given.lower(), known, 1)
    return f"did you mean {near[0]}? " if near else ""


class FastSpecError(RuntimeError):
    """Base of all errors that fastspec raises on purpose."""


class PatchConflict(FastSpecError):
    """Someone else changed an attribute between `patch` and `unpatch`, or the model is patched already."""


class Unsupported(FastSpecError, ValueError):
    """A model, an assistant or a combination of `generate` arguments that cannot work together."""


class NoDistribution(FastSpecError):
    """A row that cannot be sampled further: one of its scores is NaN or +inf, or all are -inf. `row` is its number in
    the batch of the call, None where the prompt was submitted by itself."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row

    @classmethod
    def after(cls, tokens: int, row: int | None) -> NoDistribution:
        """The error of a row with so many new tokens."""
        return cls(
            f"{'this prompt' if row is None else f'row {row} of the batch'} cannot be sampled after {tokens} new "
            "tokens: its scores hold NaN or +inf, or the processors have left no token. Plain generate raises here, "
            'too ("probability tensor contains either `inf`, `nan` or element < 0"). Look for NaN in the weights, such '
            "as those of a training run that diverged, for a dtype that overflows, and at the logits processors",
            row,
        )


def check_whole(where: str, least: int, /, **values: object) -> None:
    """Raise Unsupported for values, by name, that are no whole numbers of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Unsupported(f"{where}: {name} must be a whole number of at least {least}, not {value!r}")


class CheckpointError(FastSpecError):
    """A head that cannot be read, is damaged, or does not fit its target."""
