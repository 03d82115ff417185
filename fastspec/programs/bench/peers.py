"""Engines beside fastspec: the same prompts, as token ids, to another library in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.stats import Stats
from fastspec.programs.bench.methods import ENGINES, Row
from fastspec.programs.compare import MeasuredAnswer

WORKERS = {engine: Path(__file__).with_name(f"in_{engine}.py") for engine in ENGINES}
"""Engine -> the script that answers for it."""
CHAINS = (3, 5)
"""Drafts of a chain; vLLM has no trees."""
MEMORY = 0.8
"""Of the device, for weights, keys and values, where a job says nothing else."""
SEQUENCES = 256
"""That it decodes together at the most; further prompts wait."""
SPARE = 16
"""Positions behind prompt and answer."""
TOLD = 12
"""Lines of an engine that failed that are told."""


class PeerFailed(FastSpecError):
    """Another engine did not answer; the error says what it wrote last."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine, and the Python that has it; by default the one that runs here."""

    engine: str
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.engine not in WORKERS:
            known = ", ".join(WORKERS)
            raise Unsupported(f"peer {self.engine!r} is unknown: accepted are {known}; no other engine was tried")

    def is_installed(self) -> bool:
        """True where that Python finds the engine, which is not imported."""
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.engine!r}) is None)"
        try:
            return subprocess.run([self.python, "-c", look], capture_output=True).returncode == 0
        except OSError as error:
            raise Unsupported(f"could not start {self.python}: {error}") from error

    def method(self, chain: int | None) -> str:
        """Name in rows: of plain decoding, or of chains of so many drafts of a head."""
        return self.engine if chain is None else f"{self.engine}-eagle3-{chain}"


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Job of an engine. `batches` are prompts as token ids, `max_new_tokens` one number for all batches or one for
    each; with `dummy` weights the model is a configuration alone."""

    model: str
    dtype: str
    batches: Sequence[Sequence[Sequence[int]]]
    max_new_tokens: int | Sequence[int]
    ends: Sequence[int] = ()
    exact_length: bool = False
    head: str | None = None
    dummy: bool = False
    warmup: int = 1
    runs: int = 1
    memory: float = MEMORY
    cache_bytes: int | None = None
    """Of its keys and values, where it shall not measure for itself how much of `memory` is left for them."""
    processes: int = 1
    """GPUs of this host that hold the model together."""
    quantization: str | None = None
    """Form that the engine makes of 16-bit weights, by its own name for it."""

    @property
    def new(self) -> list[int]:
        each = self.max_new_tokens
        return [each] * len(self.batches) if isinstance(each, int) else list(each)

    def options(self, chain: int | None) -> dict[str, Any]:
        """Arguments of `vllm.LLM`; no prefixes are kept from call to call, which repeats would find."""
        longest = max(len(ids) for batch in self.batches for ids in batch)
        options: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": longest + max(self.new) + SPARE,
            "seed": 0,
            "max_num_seqs": min(SEQUENCES, max(map(len, self.batches))),
            "enable_prefix_caching": False,
            "gpu_memory_utilization": self.memory,
            "skip_tokenizer_init": True,
        }
        drafts = {"method": "eagle3", "model": self.head, "num_speculative_tokens": chain}
        may = {
            "kv_cache_memory_bytes": self.cache_bytes,
            "quantization": self.quantization,
            "tensor_parallel_size": self.processes if self.processes > 1 else None,
            "load_format": "dummy" if self.dummy else None,
            "speculative_config": None if chain is None else drafts,
        }
        return options | {name: value for name, value in may.items() if value is not None}


def answers(peer: Peer, job: PeerJob, chain: int | None = None) -> tuple[Row, list[list[MeasuredAnswer]]]:
    """(version and settings of an engine, its timed answers to every batch). Raises PeerFailed."""
    name = peer.method(chain)
    asked: dict[str, Any] = {
        "options": job.options(chain),
        "batches": [[list(ids) for ids in batch] for batch in job.batches],
        "ends": list(job.ends),
        "max_new_tokens": job.new,
        "exact_length": job.exact_length,
        "warmup": job.warmup,
        "runs": job.runs,
        "unbiased": job.dummy and job.processes == 1,  # several processes take no function; what runs there is dense
    }
    with tempfile.TemporaryDirectory() as folder:
        path, out, log = (Path(folder) / name for name in ("job.json", "out.jsonl", "log.txt"))
        path.write_text(json.dumps(asked), encoding="utf-8")
        with log.open("wb") as file:
            command = [peer.python, str(WORKERS[peer.engine]), str(path), str(out)]
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=folder
            ).returncode
        said = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
        if status or len(said) != 1 + len(job.batches) * job.runs:
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TOLD:])
            raise PeerFailed(f"{name} ended with status {status} after {max(0, len(said) - 1)} answers:\n{last}")
    found: list[list[MeasuredAnswer]] = [[] for _ in job.batches]
    for answer in said[1:]:
        found[answer["batch"]].append(MeasuredAnswer(answer["tokens"], answer["seconds"], _stats(answer)))
    settings = {name: value for name, value in asked["options"].items() if name != "model"}
    if chain is not None:  # where the head lay is nobody's concern
        settings["speculative_config"] = settings["speculative_config"] | {"model": Path(str(job.head)).name}
    return {"engine_version": said[0]["version"], "engine_settings": settings}, found


def _stats(answer: Row) -> Stats:
    """Counts of an engine as an assistant's statistics. It counts drafts accepted after an answer's end too, which are
    left out of the tokens of rounds; rounds that rows shared and the time of a prompt it does not tell."""
    drafts, accepted, at = answer["drafts"], answer["accepted"], answer["accepted_at"]
    lengths = [more - less for more, less in zip([drafts, *at], [*at, 0], strict=True)] if drafts else []
    rows = len(answer["tokens"])
    after_first = max(0, sum(map(len, answer["tokens"])) - rows)  # the first token of each comes from its prompt
    found = Stats(rows=rows, row_rounds=drafts, draft_rounds=drafts, accepted=accepted, lengths=lengths)
    found.round_tokens, found.seconds = min(drafts + accepted, after_first), answer["seconds"]
    return found
