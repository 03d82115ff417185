"""`examples/ray_serve.py` with two replicas on the CPU: requests go to both, and each answer is that of `generate`
alone."""

from __future__ import annotations

import importlib.util
import re
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.clients import MARKS
from helpers.serve import NAME, openai
from helpers.training import save_with_tokenizer, small_target, small_tokenizer

pytestmark = MARKS
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> Any:
    """The address of two replicas."""
    folder = tmp_path_factory.mktemp("small")
    save_with_tokenizer(small_target(peak=0.15), folder)
    spec = importlib.util.spec_from_file_location("ray_serve_example", ROOT / "examples" / "ray_serve.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(example.application(str(folder), name=NAME, rows=2, least=2, replicas=2))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_two_replicas_answer_as_generate_does(replicas):
    plain, tokenizer = small_target(peak=0.15), small_tokenizer()
    client = openai.OpenAI(base_url=f"{replicas}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(index: int) -> str:
        given = {"model": NAME, "prompt": f"w{5 + index} w7", "max_tokens": 6 + index, "temperature": 0}
        if index % 2:
            return "".join(chunk.choices[0].text for chunk in client.completions.create(**given, stream=True))
        return client.completions.create(**given).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(40)))
    for index, emitted in enumerate(got):
        ids = tokenizer(f"w{5 + index} w7", return_tensors="pt").input_ids
        new = plain.generate(ids, max_new_tokens=6 + index, do_sample=False)[0, ids.shape[1] :]
        assert emitted == tokenizer.decode(new, skip_special_tokens=True)
    counted: dict[str, float] = {}  # by when the replica's counter was made
    end = time.monotonic() + 60
    while len(counted) < 2 and time.monotonic() < end:
        with urllib.request.urlopen(f"{replicas}/metrics", timeout=60) as page:
            text = page.read().decode()
        born, rounds = (
            re.search(rf"^fastspec_{name} (\S+)$", text, re.M) for name in ("generated_tokens_created", "rounds_total")
        )
        counted[born.group(1)] = float(rounds.group(1))
    assert len(counted) == 2 and all(rounds > 0 for rounds in counted.values())
