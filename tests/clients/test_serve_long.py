"""`fastspec serve` over hundreds of requests and through the death of its process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.clients import MARKS
from helpers.models import tiny_head
from helpers.serve import NAME, SECONDS, Asked, alone, ask_all, hold_as_alone, openai, requests, served, talk
from helpers.training import save_with_tokenizer, small_target

import fastspec

pytestmark = MARKS


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = small_target(peak=0.15)
    return small_target(peak=0.15), fastspec.patch(model, eagle3=tiny_head(model))


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kept() -> tuple[int, int]:
    """Objects that the garbage collector sees, and bytes of tensors among them."""
    gc.collect()
    found = gc.get_objects()
    return len(found), sum(
        each.nbytes for each in found if type(each) in (torch.Tensor, torch.nn.Parameter)
    )  # none without data


def test_two_hundred_requests_sixteen_in_flight_and_memory_stays(pair):
    """None is lost, none has another's answer, and what two hundred more leave behind is nothing that grows with
    them."""
    plain, model = pair
    asked = requests(200, 1)
    with served(model) as server:
        for few in (1, 2):  # rounds of one row and of two are made
            ask_all(server, [Asked("w5 w6", 60)] * 4, few)
        got = ask_all(server, asked)
        hold_as_alone(plain, asked, got)
        assert (
            server.metric("fastspec_time_to_first_token_seconds_count") == 208
            and server.batch.running == server.batch.waiting == 0
        )
        objects, tensors = kept()
        before = resident()
        assert ask_all(server, asked) == got
        more, same = kept()
        # a request that was kept would have a hundred objects, and its ids; allocators and their threads move by some
        # megabytes
        assert same - tensors < 2**12 and more - objects < 10 * len(asked) and resident() - before < 16 * 2**20


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save_with_tokenizer(small_target(peak=0.15), path)
    return path


def test_a_server_that_is_killed_comes_back_and_ends_when_told(pair, small_folder):
    """In a process of its own, from the command line."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "fastspec",
        "serve",
        str(small_folder),
        "--name",
        NAME,
        "--rows",
        "2",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FASTSPEC_API_KEY": "secret"}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=SECONDS)
    emitted, _, new = alone(pair[0], talk("w5 w6"), 8)
    for last in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen([*command], env=environment, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    answer = client.chat.completions.create(
                        model=NAME, messages=talk("w5 w6"), max_tokens=8, temperature=0
                    )
                    break
                except openai.APIConnectionError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.2)
            assert answer.choices[0].message.content == emitted and answer.model == NAME
            process.send_signal(last)
            _, log = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
    assert process.returncode in (0, -signal.SIGTERM) and f"{new} new" in log and "Traceback" not in log
    assert torch.is_grad_enabled()
