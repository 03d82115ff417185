"""The errors that fastspec raises on purpose: each says what was wrong, where, and what to do."""


class FastSpecError(RuntimeError):
    """Base of all errors that fastspec raises on purpose."""


class PatchConflict(FastSpecError):
    """Someone else changed an attribute between `patch` and `unpatch`, or the model is patched already."""


class Unsupported(FastSpecError, ValueError):
    """A model, an assistant or a combination of `generate` arguments that cannot work together."""


class CheckpointError(FastSpecError):
    """A head that cannot be read, is damaged, or does not fit its target."""
