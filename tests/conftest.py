"""What the tests share: the offline setting, threads, the models that the tests of `generate` compare, SmolLM2 once per
worker."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
CACHE = os.environ["FASTSPEC_CACHE"] = tempfile.mkdtemp(
    prefix="fastspec-tests-"
)  # what was tuned on this machine is none of the tests'
os.environ.setdefault("FASTSPEC_TESTS_LIBRARIES", CACHE)  # where one worker has compiled for all; it goes last
os.environ.setdefault(
    "FASTSPEC_CPU", "torch"
)  # one choice on every machine, and none waits for a compiler; its own tests unset it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores, and so do the processes that tests start

import numpy as np
import pytest
import torch
from helpers.examples import register
from helpers.libraries import share_libraries
from helpers.pairwise import left_out

gc.disable()  # until all is collected: what modules make stays
register()
share_libraries(CACHE)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined: the kernels' tests run on the CPU
    from helpers.interpreter import remember_builtins

    remember_builtins()
    for device in (torch.cuda, torch.xpu, torch.mtia):  # each seed would be kept for one, with the stack it came by
        device.manual_seed_all = lambda seed: None

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # whatever the environment says


def pytest_unconfigure():
    """Leave no folder behind."""
    shutil.rmtree(CACHE, ignore_errors=True)  # a process that a test has started may still write there


def pytest_collection_finish():
    """What is imported by now stays: garbage collections need not look at it, and of what tests leave there is little
    to find."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Left to `make test-slow`: where nothing is drafted, the pair whose drafts are right, which repeats the one whose
    drafts are wrong; of tests with three and more axes of parameters what holds no pair of values, or marked
    `each_value` no value, that the others have not; and of tests marked `some` the cases that they do not name."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "bigram" in (params.get("pair"), params.get("kind")) and params.get("assistant") == "autoregressive":
            item.add_marker(pytest.mark.slow)
    for item in left_out(items):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers for a test in any order: a sample that happens to end early is no reason to fail."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_mixed_precision():
    """Accelerate keeps a process's mixed precision: a module whose tests train leaves none behind."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()


@pytest.fixture(autouse=True)
def shared_device():
    """What torch keeps of a device's memory goes back when it is much: several workers share the device."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def pairs():
    """kind -> (the unpatched model, only read, the same patched); drafts are mostly wrong for "random" and all right
    for "bigram"."""
    from helpers.generate import MAKERS, unpatched

    import fastspec

    made = {}
    for kind, (target, head) in MAKERS.items():
        model = target()
        made[kind] = (unpatched(kind), fastspec.patch(model, eagle3=head(model)))
    return made


@pytest.fixture(params=["random", "bigram"])
def pair(request, pairs):
    """(unpatched, patched), of both kinds in turn."""
    return pairs[request.param]


@pytest.fixture(params=["autoregressive", "eagle3", "nasd"])
def assistant(request):
    """An assistant by name, and one by a config of a small tree."""
    from helpers.generate import TREE

    return TREE if request.param == "eagle3" else request.param


@pytest.fixture
def captures(monkeypatch):
    """A backend of plain torch that captures."""
    from helpers.captured import stand_in

    stand_in(monkeypatch)


@pytest.fixture(scope="session")
def rank_pools():
    """Processes that hold models together, kept for all tests that want as many."""
    from helpers.rank_pool import RankPools

    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of SmolLM2-135M-Instruct in fp32 on the CPU. Shared: a test that patches it must unpatch
    it."""
    from fastspec.models import load_smollm2

    return load_smollm2("cpu", torch.float32)
