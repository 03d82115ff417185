"""What the encoder of an encoder-decoder model has read for a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What an encoder made of a call's rows: `states` [B, S, D], `mask` [B, S], None where the call has none, and the tokens `ids`
    [B, S], None where the call brought none. `shared` says whether they are the decoder's tokens too."""

    states: Tensor
    mask: Tensor | None
    ids: Tensor | None
    shared: bool = True

    def text(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """The source's tokens and then the decoder's ids [B, T], without padding: tokens [B, S + T at most], counts [B]; None where there
        are none, or none that the decoder knows."""
        if self.ids is None or not self.shared:
            return None
        keep = torch.ones_like(self.ids) if self.mask is None else self.mask.to(self.ids.device)
        whole, real = torch.cat((self.ids, ids), 1), torch.cat((keep.bool(), torch.ones_like(ids, dtype=torch.bool)), 1)
        order = torch.argsort((~real).int(), dim=1, stable=True)[:, : int(real.sum(1).max())]
        return whole.gather(1, order), real.sum(1)
