"""The calls of one of two processes that share a model's weights out by FSDP2."""

from __future__ import annotations

import datetime
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastspec
from fastspec import Unsupported
from helpers import generate
from helpers.cascade import trained
from helpers.generate import prompts, seer
from helpers.models import tiny_model

bigram = partial(generate.bigram, num_hidden_layers=3)
"""Deep enough for a clock to find that trees pay, which the device's own are sized by."""
NEW = (24, 9)
"""New tokens by process: one has done long before the other."""
ASSISTANTS = ("autoregressive", "nasd", "speculative", "eagle3")


def shared(reshards: bool | None = None) -> Any:
    """A patched model, cut layer by layer; its root is cut again behind a pass where it `reshards`."""
    model = bigram()
    draft = tiny_model("llama", seed=3, num_hidden_layers=1)
    cascade = fastspec.Cascade(
        stages=[fastspec.Stage(bigram(), name="small")],
        predictor=trained(("small", "large")),
        costs=[1.0, 2.0],
        label="large",
        thresholds=(1.0,),
    )
    fastspec.patch(model, eagle3=seer(bigram()), speculative=draft, cascade=cascade, assistant="eagle3")
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=reshards)


class Breaks:
    """A streamer that fails at the third token."""

    def __init__(self) -> None:
        self.left = 3

    def put(self, value: Any) -> None:
        self.left -= 1
        if not self.left:
            raise OSError("the client went away")

    def end(self) -> None:
        """Nothing is kept."""


def every_call(rank: int) -> dict[str, Any]:
    """What one process makes of the calls that the tests look at."""
    inputs = prompts(5, 9, seed=rank)
    options = {**inputs, "max_new_tokens": NEW[rank], "do_sample": False}
    model, made = shared(), {"plain": bigram().generate(**options)}
    for name in ASSISTANTS:
        made[name] = model.generate(**options, assistant=name), fastspec.report(model).last.acceptance_length
    made["synced"] = model.generate(**options, assistant="nasd", synced_gpus=True)
    torch.manual_seed(rank)
    drawn = {**options, "do_sample": True, "top_k": 1}
    made["drawn"] = model.generate(**drawn, assistant="eagle3")
    try:
        made["broken"] = model.generate(
            **options, assistant="nasd", **({"streamer": Breaks()} if rank else {"num_return_sequences": 1})
        )
    except (OSError, ValueError) as error:
        made["broken"] = str(error)
    beams = {"num_beams": 2} if rank else {}
    made["beams"] = bigram().generate(**options, **beams)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made["left"] = (
            model.generate(**options, **beams),
            [str(each.message) for each in told],
            dict(fastspec.report(model).unassisted),
        )
    for name, refused in (("named", beams), ("cascade", {})):
        with pytest.raises(Unsupported) as why:
            model.generate(**options, **refused, assistant="nasd" if name == "named" else "cascade")
        made[name] = str(why.value)
    with pytest.raises(Unsupported) as why:
        fastspec.continuous(model, "nasd")
    made["open"] = str(why.value)
    alone = {
        **inputs,
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
        "synced_gpus": False,
    }  # as many passes in each
    made["alone"] = bigram().generate(**alone), model.generate(**alone)
    with pytest.raises(Unsupported) as why:
        model.generate(**alone, assistant="nasd")
    made["apart"] = str(why.value)
    part = bigram()
    fully_shard(fastspec.patch(part).model.layers[0])
    made["part"] = part.generate(**options, assistant="nasd")
    fastspec.unpatch(part)
    fastspec.patch(part, assistant="nasd")
    own = {"output_attentions": True} if rank else {}  # refused at once
    ends = {**options, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    if not rank:  # refused when the call has been prepared
        ends["attention_mask"][0, -1] = 0
    made["part left"] = bigram().generate(**ends), part.generate(**ends, **own)
    cut = shared(reshards=True)
    made["cut"] = cut.generate(**options, assistant="nasd")
    with pytest.raises(Unsupported) as why:
        cut.generate(**options, assistant="eagle3")
    made["head"] = str(why.value)
    made["mixed"] = alike(inputs)
    return made


def alike(inputs: dict[str, Any]) -> list[Any]:
    """What a model in fp32 whose layers compute in bf16, and which is cut again behind each pass, makes without and
    with assistants."""
    model = fastspec.patch(bigram(), speculative=tiny_model("llama", seed=3, num_hidden_layers=1))
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
    return [
        model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant=name)
        for name in ("none", *ASSISTANTS[:3])
    ]


def work(rank: int, port: int, folder: Path) -> None:
    """One of the two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
    torch.save(every_call(rank), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
