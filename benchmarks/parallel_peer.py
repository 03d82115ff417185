"""vLLM's times of a model that several GPUs hold together, with random weights, beside those of `parallel.py`, on the same machine.

    python benchmarks/parallel_peer.py --shapes llama-8b llama-70b --peer-python vllm/bin/python --out rows.jsonl

A row is of one shape and method: tokens one by one, or rounds with a chain of `drafts` of a head of the published shape, whose drafts are
mostly wrong. `round_ms` is the median call of `new` tokens less that of one token, over the rounds. The engine compiles and captures as it
does by default, in processes of its own. It must not set up NVLink multicast where the host's other users share the switch: start this
with `NCCL_NVLS_ENABLE=0` and `VLLM_ALLREDUCE_USE_SYMM_MEM=0` there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, make_head  # the scripts beside this one
from peers import COMPILES, RUNS, write_configs
from transformers import AutoConfig, AutoModelForCausalLM

from fastspec.programs.bench.device import device_name, versions
from fastspec.programs.bench.peers import Peer, PeerJob, Way, answers, medians


def written(name: str, folder: Path, draft_vocab: int) -> tuple[str, str]:
    """Folders with the configurations of a shape and of a head for it: (target, head)."""
    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=131072, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return write_configs(model, make_head(model, draft_vocab), folder)


def rows_of(peer: Peer, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of tokens one by one, and one of every length of chain."""
    ids = torch.randint(10, SHAPES[name][1]["vocab_size"], (args.prefix,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        target, head = written(name, Path(folder), args.draft_vocab)
        for chain in (None, *args.chains):
            job = PeerJob(
                target, "bfloat16", [[ids], [ids]], (args.tokens, 1), exact_length=True, head=head, dummy=True, warmup=COMPILES, runs=RUNS,
                memory=args.memory, processes=args.processes,
            )  # fmt: skip
            told, calls = answers(peer, job, Way(peer.engine if chain is None else f"{peer.engine}-eagle3-{chain}", chain))
            whole, first = medians(calls)
            rounds = args.tokens - 1 if chain is None else whole.stats.row_rounds
            row: dict[str, Any] = {"shape": name, "processes": args.processes, "prefix": args.prefix, "new": args.tokens, "what": "round"}
            row |= {"engine": peer.engine, "method": "plain" if chain is None else "eagle3", "drafts": chain}
            row |= {"round_ms": round(1e3 * (whole.seconds - first.seconds) / rounds, 4), "prefill_ms": round(1e3 * first.seconds, 2)}
            found.append(row | told)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b"], choices=list(SHAPES))
    parser.add_argument("--processes", type=int, default=2, help="GPUs that hold the model")
    parser.add_argument("--chains", nargs="*", type=int, default=[5], help="drafts of a chain")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--memory", type=float, default=0.9, help="share of every device that the engine takes")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    peer = Peer("vllm", args.peer_python)
    if not peer.is_installed():
        raise SystemExit(f"{peer.engine} is not installed for {peer.python}: name another with --peer-python")
    where = {"device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")), **versions()}
    for name in args.shapes:
        for row in rows_of(peer, name, args):
            print({key: row[key] for key in ("shape", "method", "drafts", "round_ms", "prefill_ms")}, flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | where) + "\n")


if __name__ == "__main__":
    main()
