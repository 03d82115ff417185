"""A model whose weights two processes share out by FSDP2: each decodes prompts of its own, in as many rounds as they
need."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from helpers.processes import spawn
from helpers.shared_out import ASSISTANTS, work


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process made of its calls. A process that waits for the other in vain ends with an error after five
    minutes."""
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
    """Each finds out at another place that the default cannot serve its call; transformers itself would look at the
    whole model alone."""
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
    for made, why in zip(
        both, ("another process, which holds a part of the model", "num_beams=2 cannot be combined"), strict=True
    ):
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
        assert (
            "continuous: several processes share out the weights of this FSDPLlamaForCausalLM by FSDP" in made["open"]
        )
        assert "call fully_shard(model, reshard_after_forward=False)" in made["head"]
        assert torch.equal(made["cut"], made["plain"])
        assert torch.equal(*made["alone"]) and "synced_gpus=False cannot be combined" in made["apart"]
