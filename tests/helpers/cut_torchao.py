"""A model in torchao's weights that transformers has cut over two processes, by its own forward and as stored."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TorchAoConfig
from transformers.distributed import DistributedConfig

import fastspec
from helpers.generate import TREE, prompts
from helpers.models import tiny_head
from helpers.ranks import GREEDY, join


def compare(rank: int, folder: Path, plain: Path, kind: str) -> None:
    """Assert that assisted calls of the model in `plain` say what the layers' own forward says in this process, one of
    two that meet in a folder of their own."""
    from torchao import quantization

    join(rank, folder)
    config = TorchAoConfig(getattr(quantization, kind)())
    cut = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=config, distributed_config=cut
    ).eval()
    inputs, layers = prompts(4, 9), model.config.num_hidden_layers
    own = model.generate(**inputs, **GREEDY)
    head = tiny_head(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    with fastspec.patched(model, eagle3=head, stored=True):
        for assistant in ("autoregressive", TREE):
            assert torch.equal(model.generate(**inputs, **GREEDY, assistant=assistant), own), assistant
        report = fastspec.report(model)
    assert sum(report.stored.values()) == 7 * layers and not report.own_forward, report
    assert torch.equal(model.generate(**inputs, **GREEDY), own)
