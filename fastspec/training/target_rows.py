"""An LM head in training that is the target's rows behind one learned matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.generation.drafters.eagle.head import EagleHead


class TargetRows(nn.Module):
    """Logits of hidden states [..., H] -> rows @ (map @ state): `rows` [V_d, H] are the target's and stay as they are, `map` [H, H] is
    learned and starts as the identity.

    What a head feeds back to itself need not be what the target's LM head reads, and the map stands between the two.
    """

    rows: Tensor

    def __init__(self, rows: Tensor, map: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("rows", rows.detach().float(), persistent=False)
        start = torch.eye(rows.shape[1]) if map is None else map.detach()
        self.map = nn.Parameter(start.to(rows.device, torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(F.linear(hidden, self.map), self.rows)


def share_lm_head(head: EagleHead, target: Any, map: Tensor | None = None) -> None:
    """Give a head with `config.target_rows` the LM head that it is trained with."""
    weight = target.get_output_embeddings().weight
    ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
    head.add_module("lm_head", TargetRows(weight[ids.to(weight.device)].to(head.fc.weight.device), map))
