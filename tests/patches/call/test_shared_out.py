"""A model whose weights two processes share out by FSDP2: each decodes prompts of its own, in as many rounds as they need."""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cascade import trained
from helpers_generate import bigram, prompts, seer
from helpers_models import tiny_model
from helpers_processes import spawn
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastspec
from fastspec import Unsupported

NEW = (24, 9)
"""New tokens by process: one has done long before the other."""
ASSISTANTS = ("autoregressive", "nasd", "speculative", "eagle3")


def shared(reshards: bool | None = None) -> Any:
    """A patched model, cut layer by layer; its root is cut again behind a pass where it `reshards`."""
    model = bigram()
    draft = tiny_model("llama", seed=3, num_hidden_layers=1)
    cascade = fastspec.Cascade(
        stages=[fastspec.Stage(bigram(), name="small")], predictor=trained(("small", "large")), costs=[1.0, 2.0], label="large",
        thresholds=(1.0,),
    )  # fmt: skip
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
        made["broken"] = model.generate(**options, assistant="nasd", **({"streamer": Breaks()} if rank else {"num_return_sequences": 1}))
    except (OSError, ValueError) as error:
        made["broken"] = str(error)
    beams = {"num_beams": 2} if rank else {}
    made["beams"] = bigram().generate(**options, **beams)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made["left"] = model.generate(**options, **beams), [str(each.message) for each in told], dict(fastspec.report(model).unassisted)
    for name, refused in (("named", beams), ("cascade", {})):
        with pytest.raises(Unsupported) as why:
            model.generate(**options, **refused, assistant="nasd" if name == "named" else "cascade")
        made[name] = str(why.value)
    with pytest.raises(Unsupported) as why:
        fastspec.continuous(model, "nasd")
    made["open"] = str(why.value)
    alone = {**inputs, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "synced_gpus": False}  # as many passes in each
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
    """What a model in fp32 whose layers compute in bf16, and which is cut again behind each pass, makes without and with assistants."""
    model = fastspec.patch(bigram(), speculative=tiny_model("llama", seed=3, num_hidden_layers=1))
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
    return [model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant=name) for name in ("none", *ASSISTANTS[:3])]


def work(rank: int, port: int, folder: Path) -> None:
    """One of the two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    torch.save(every_call(rank), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process made of its calls. A process that waits for the other in vain ends with an error after a minute."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("shared")
    spawn(work, (port, folder), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ASSISTANTS)
def test_each_process_gives_the_tokens_of_the_whole_model(both, name):
    """For its own prompts, in rounds of its own number: the drafts are accepted, where they are good."""
    for made in both:
        assert torch.equal(made[name][0], made["plain"])
    accepted = [made[name][1] for made in both]
    assert min(accepted) > 3 if name == "eagle3" else max(accepted) > 1.2 if name == "nasd" else min(accepted) == 1


def test_one_layer_that_is_cut_keeps_processes_in_step_too(both):
    assert all(torch.equal(made["part"], made["plain"]) for made in both)


def test_one_layer_that_is_cut_keeps_processes_together_in_plain_decoding_too(both):
    """Each finds out at another place that the default cannot serve its call; transformers itself would look at the whole model alone."""
    for made in both:
        want, got = made["part left"]
        assert torch.equal(got, want)


def test_layers_that_compute_in_another_dtype_keep_keys_in_it(both):
    for made in both:
        want, *found = made["mixed"]
        assert [torch.equal(got, want) for got in found] == [True] * 3


def test_a_call_that_asks_for_processes_in_step_has_what_it_asks_for(both):
    assert all(torch.equal(made["synced"], made["plain"]) for made in both)


def test_drawn_answers_need_no_step_of_their_own(both):
    assert all(torch.equal(made["drawn"], made["plain"]) for made in both)


def test_a_process_that_fails_lets_the_other_finish(both):
    assert torch.equal(both[0]["broken"], both[0]["plain"])
    assert both[1]["broken"] == "the client went away"


def test_a_default_that_one_process_cannot_serve_is_left_out_by_both(both):
    """One of them asks for beams: neither drafts, and each says why."""
    for made, why in zip(both, ("another process, which holds a part of the model", "num_beams=2 cannot be combined"), strict=True):
        tokens, told, counted = made["left"]
        assert torch.equal(tokens, made["beams"])
        assert [text for text in told if "the default assistant cannot serve this call" in text and why in text]
        assert [why in text for text in counted] == [True] and list(counted.values()) == [1]


def test_a_named_assistant_that_one_process_cannot_serve_is_refused_in_both(both):
    assert "another process, which holds a part of the model, cannot serve its part of the call" in both[0]["named"]
    assert "num_beams=2 cannot be combined" in both[1]["named"]


def test_what_needs_more_than_passes_of_the_whole_model_is_refused_by_name(both):
    for made in both:
        assert "by FSDP, and a cascade's stages are not run over several processes" in made["cascade"]
        assert "continuous: several processes share out the weights of this FSDPLlamaForCausalLM by FSDP" in made["open"]
        assert "call fully_shard(model, reshard_after_forward=False)" in made["head"]
        assert torch.equal(made["cut"], made["plain"])
        assert torch.equal(*made["alone"]) and "synced_gpus=False cannot be combined" in made["apart"]
