"""What an open batch's rounds are made of, and whether the model is that still."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from fastspec.patches.hf.changes import Settings
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.hf.walk import every_module
from fastspec.patches.hf.watch import Watch
from fastspec.patches.pool import weights_of


class MadeOf:
    """What of a model has a say in the tokens of rounds that are made now: the way that it runs, and where its weights lie."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._watch, self._parts = Watch(model), self._parts_now()
        self._training = self._training_now()

    def differs(self) -> bool:
        """Whether rounds that were made now would be made of something else."""
        return self._parts_now() != self._parts

    def has_changed(self) -> bool:
        """The same in a fraction of the time where nothing is another; so is a model that cannot be looked at, which the next rounds will
        tell."""
        try:
            if self._watch.holds() and self._training_now() == self._training:
                return False
            watch = Watch(self.model)
            changed = self.differs()
        except Exception:
            return True
        if not changed:
            self._watch, self._training = watch, self._training_now()
        return changed

    def _training_now(self) -> list[bool]:
        """Which modules are in train mode, where a pass may add noise."""
        return [module.training for module in self.model.modules()]

    def _parts_now(self) -> Hashable:
        """Equal to nothing else where another thread adds modules to the model just now."""
        with torch.autocast(device_of(self.model).type, enabled=False):  # of the thread that asks; the batch's own has none
            try:
                return mode_for(self.model), weights_of(self.model), Settings(self.model, every_module(self.model)).values
            except RuntimeError as error:
                if "during iteration" not in str(error):  # of a dictionary of modules or hooks
                    raise
                return object()
