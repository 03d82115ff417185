"""Which tokens end an answer, by generation configurations."""

from __future__ import annotations

from typing import Any

import torch


def end_tokens(*configs: Any) -> frozenset[int]:
    """Those of the first configuration that names any, as a number, a list or a tensor."""
    found: Any = next((config.eos_token_id for config in configs if config.eos_token_id is not None), [])
    return frozenset(torch.as_tensor(found, device="cpu").flatten().tolist())
