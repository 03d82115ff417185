"""Run of a bench: a prompt is answered by all methods before the next one, so that a slow spell hits all of them."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.config import BackendName
from fastspec.devices import use_device
from fastspec.errors import Unsupported
from fastspec.generation.heads.module import EagleHead
from fastspec.generation.stats import Profile
from fastspec.models import SMOLLM2, load_model, source_of
from fastspec.patches.assistants.heads import find_head, load_head
from fastspec.patches.hf.ends import end_tokens
from fastspec.programs.bench.methods import (
    BUNDLED,
    BenchPrompt,
    Drafters,
    Method,
    Row,
    Say,
    choose,
    encode_rows,
    make_batches,
    read_drafters,
    read_rows,
    rows_of,
    twin,
)
from fastspec.programs.bench.peers import CHAINS, Peer, PeerFailed, PeerJob, answers
from fastspec.programs.compare import MeasuredAnswer, beside, environment, floor, measured_answer, median_answer
from fastspec.programs.texts import padded_inputs


def on_part(
    part: list[BenchPrompt],
    methods: list[Method],
    max_new_tokens: int,
    *,
    untimed: int = 0,
    warmup: int | None = None,
    runs: int = 1,
) -> Iterator[tuple[Method, MeasuredAnswer, MeasuredAnswer]]:
    """(method, its answer, the baseline's answer) to one batch of prompts; the first method is the baseline. Every one
    answers `warmup` times before it is measured (None: `untimed` times where it compiles or captures), then `runs`
    times. Its answer is that of median time, or one that differs from the baseline's."""
    base: MeasuredAnswer | None = None
    for method in methods:
        for _ in range(warmup if warmup is not None else untimed if method.compiles else 0):
            ask(method, part, max_new_tokens)
        answers = [ask(method, part, max_new_tokens) for _ in range(runs)]
        base = base or median_answer(answers)
        other = [answer for answer in answers if answer.tokens != base.tokens]
        yield method, other[0] if other else median_answer(answers), base


def row_of(
    part: list[BenchPrompt], answer: MeasuredAnswer, base: MeasuredAnswer, tokenizer: Any, floor_ms: float = 0.0
) -> Row:
    """Figures of an answer to a batch of prompts, beside the baseline's."""
    stats, found = answer.stats, beside(answer, base)
    phases = {name: seconds for name, seconds in stats.phases.items() if name != "prefill"}
    prefill = stats.phases.get("prefill", 0.0)
    per_round = 1e3 * (stats.seconds - prefill) / stats.rounds if stats.rounds else None
    return {
        "category": part[0].category,
        "ids": [prompt.id for prompt in part],
        "batch": len(part),
        "prompt_tokens": sum(len(prompt.ids) for prompt in part),
        "new_tokens": sum(map(len, answer.tokens)),
        "seconds": round(answer.seconds, 4),
        "tokens_per_second": round(found["tokens_per_second"], 2),
        "ratio": round(found["ratio"], 3),
        "identical": found["identical"],
        "first_difference": found["first_difference"],
        "acceptance_length": round(stats.acceptance_length, 3) if stats.row_rounds else None,
        "acceptance_rate": round(stats.acceptance_rate, 3) if stats.drafted else None,
        "accepted_counts": stats.lengths,
        "acceptance_by_position": [round(share, 3) for share in stats.acceptance_by_position],
        "rounds": stats.rounds,
        "prefill_ms": round(1e3 * prefill, 2),
        "ms_per_round": round(per_round, 3) if per_round else None,
        "phases_ms": {name: round(1e3 * seconds / stats.rounds, 3) for name, seconds in phases.items() if stats.rounds},
        "beside_ms": round(1e3 * (answer.seconds - stats.seconds), 2) if stats.seconds else None,
        "floor_share": round(floor_ms / per_round, 3) if per_round else None,
        "peak_mib": answer.peak_mib,
        "texts": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answer.tokens],
    }


def ask(method: Method, part: list[BenchPrompt], max_new_tokens: int) -> MeasuredAnswer:
    """One timed call on a left-padded batch."""
    model = method.model
    inputs = padded_inputs([prompt.ids for prompt in part], model.generation_config, model.device)
    return measured_answer(model, inputs, max_new_tokens, count=method.peer, **method.options)


UNTIMED = 2
"""Untimed calls on every prompt, on CUDA, of methods that compile in the first and capture in the second."""
WARM_UP_TOKENS = 8


def run_bench(
    *,
    prompts: Sequence[str | Path] = (),
    texts: Sequence[str] = (),
    model: str = SMOLLM2,
    heads: Sequence[str] | None = None,
    draft_model: str | None = None,
    early_exit: int | None = None,
    methods: Sequence[str] | None = None,
    each: int | None = None,
    max_new_tokens: int = 128,
    dtype: str | None = None,
    device: str | None = None,
    backend: BackendName = "auto",
    batch: int | Sequence[int] = 1,
    runs: int = 1,
    warmup: int | None = None,
    peers: Sequence[Peer] = (),
    on_failure: Callable[[str], object] | None = None,
    say: Say | None = None,
    on_row: Callable[[Row], object] | None = None,
    on_profile: Callable[[str, Profile], object] | None = None,
) -> list[Row]:
    """Answer the prompts greedily by every method, and return one row per method and batch of prompts; see
    docs/performance/measure.md.

    `prompts` are jsonl files in Spec-Bench's form, `texts` prompts of the category "prompt"; without both `BUNDLED` is
    asked. The first `each` prompts of every category are taken, and `batch` of one category answered together, of
    several such numbers one after another (`batch_size` of a row). `model`, `heads` and `draft_model` are names as in
    `load_model` and `fastspec.patch`; "NAME=HEAD" is measured as "eagle3:NAME"; without `heads` those that ship for the
    model are taken. `speculative` and transformers' `assisted` draft with `draft_model`, or the target's first
    `early_exit` layers. `methods` are assistants and `PEERS`, by default all that have what they need; "transformers"
    is always measured. `dtype` defaults to fp32 on the CPU and bf16 on CUDA, `device` to CUDA where there is one. `say`
    is told of what is left out, `on_row` is given every row, `on_profile` the times of every assistant's rounds, from
    one more call on the first batch.

    Every method answers a batch `runs` times, after `warmup` times (None: on CUDA twice, methods that compile or
    capture); the call of median time makes its row, or one whose answer differs from `transformers`.

    `peers` are other engines, which answer after all methods, when the model has left the device. What one that fails
    wrote last is given to `on_failure`, or raised as PeerFailed once all have answered. A row's `floor_share` is the
    time of reading the weights once, at the bandwidth measured here, over that of a round. Raises Unsupported for bad
    arguments and methods that lack something, before weights are loaded where the configurations tell.
    """
    sizes = [batch] if isinstance(batch, int) else list(dict.fromkeys(batch))
    counts = [("max_new_tokens", max_new_tokens), ("each", 1 if each is None else each), ("runs", runs)]
    for name, value in (*counts, *(("batch", size) for size in sizes or [0])):
        if value < 1:
            raise Unsupported(f"{name} must be at least 1, not {value}")
    say = say or (lambda line: None)
    files = prompts if prompts or texts else (BUNDLED,)
    asked = [row for path in files for row in read_rows(path)] + rows_of(texts)
    if not asked:
        raise Unsupported("there are no prompts in " + ", ".join(map(str, files)))
    absent = [peer for peer in peers if not peer.is_installed()]
    for peer in absent:
        say(f"left out: {peer.engine}: it is not installed for {peer.python}: name another Python with --peer-python")
    device = use_device(device)
    named = read_drafters(heads, draft_model, early_exit, model, methods)
    target, tokenizer = load_model(model, device, getattr(torch, dtype) if dtype else None)
    plain = twin(target)  # before the patch
    drafters = named.loaded(target, tokenizer)
    encoded = encode_rows(asked, tokenizer, target, each, max_new_tokens, say)
    parts = {size: make_batches(encoded, size) for size in sizes}
    patching = drafters.patching()
    patched = {name: twin(target) if name else target for name in patching}  # of the same weights
    answered: list[tuple[int, list[BenchPrompt], MeasuredAnswer]] = []
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row | where)
        if on_row is not None:
            on_row(rows[-1])

    with contextlib.ExitStack() as stack:
        for name, instance in patched.items():
            resources: dict[str, Any] = patching[name] | ({} if name else drafters.resources)
            fastspec.patch(instance, **resources, backend=backend)
            stack.callback(fastspec.unpatch, instance)
        chosen = {size: choose(methods, plain, patched, drafters, size, say) for size in sizes}
        floor_ms, columns = floor(target)
        where = {"model": model, "max_new_tokens": max_new_tokens} | environment(target) | columns
        untimed = UNTIMED if target.device.type == "cuda" else 0
        for size in sizes:
            say(
                f"{model} on {where['device']}, {where['dtype']}, threads: {where['threads']}: {len(parts[size])} x "
                f"{size} prompts, greedy"
            )
            longest = max(parts[size], key=lambda part: max(len(prompt.ids) for prompt in part))
            for method in chosen[size]:
                say(f"warm-up: {method.name}")
                ask(method, longest, min(max_new_tokens, WARM_UP_TOKENS))
            for number, part in enumerate(parts[size], 1):
                say(f"{number}/{len(parts[size])}: {part[0].category}")
                for method, answer, base in on_part(
                    part, chosen[size], max_new_tokens, untimed=untimed, warmup=warmup, runs=runs
                ):
                    if method is chosen[size][0]:
                        answered.append((size, part, base))
                    row = row_of(part, answer, base, tokenizer, floor_ms)
                    say(f"{method.name}: {row['tokens_per_second']:.1f} tokens/s")
                    add({"method": method.name, **method.drafted_by, **row, "runs": runs, "batch_size": size})
        if on_profile is not None:
            for method in chosen[sizes[0]]:
                if not method.peer:
                    say(f"profile: {method.name}")
                    with fastspec.profile(method.model) as profile:
                        ask(method, parts[sizes[0]][0], max_new_tokens)
                    on_profile(method.name, profile)
    failures = []
    for peer in (each for each in peers if each not in absent):
        try:
            for row in by_peer(peer, model, target, tokenizer, drafters, answered, max_new_tokens, runs, say):
                add(row)
        except PeerFailed as error:
            failures.append(str(error))
    for failure in failures:
        if on_failure is None:
            raise PeerFailed(failure)
        on_failure(failure)
    return rows


def by_peer(
    peer: Peer,
    name: str,
    target: Any,
    tokenizer: Any,
    drafters: Drafters,
    answered: list[tuple[int, list[BenchPrompt], MeasuredAnswer]],
    max_new_tokens: int,
    runs: int,
    say: Say,
) -> Iterator[Row]:
    """Rows of an engine, for which the model goes to the CPU. `answered`: (size, batch, the baseline's answer)."""
    target.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    head = next((drafters.heads[name] for name in drafters.names("eagle3") if name in drafters.heads), None)
    with saved(name, target, tokenizer) as folder, tempfile.TemporaryDirectory() as place:
        job = PeerJob(
            folder,
            str(target.dtype).removeprefix("torch."),
            [[prompt.ids for prompt in part] for _, part, _ in answered],
            max_new_tokens,
            ends=sorted(end_tokens(target.generation_config)),
            runs=runs,
            head=None if head is None else readable(load_head(head, target), head, place),
        )
        sizes = Counter(size for size, _, _ in answered)
        for chain in (None, *(CHAINS if head is not None else ())):
            say(f"{peer.method(chain)}: {', '.join(f'{count} x {size}' for size, count in sizes.items())} prompts")
            told, found = answers(peer, job, chain)
            drafted_by = {"head": None if chain is None else head, "draft_model": None, "early_exit": None}
            for (size, part, base), calls in zip(answered, found, strict=True):
                row = row_of(part, median_answer(calls), base, tokenizer) | told
                row |= {"prefill_ms": None, "beside_ms": None}
                yield {"method": peer.method(chain), **drafted_by, **row, "runs": runs, "batch_size": size}


def readable(head: EagleHead, source: str, place: str) -> str:
    """Folder of a head for other programs: its own, or `place`, where one without an LM head is written out with it."""
    from fastspec.programs.training.heads import save_head, with_own_lm_head

    if not head.config.target_rows:
        return str(find_head(source))
    save_head(with_own_lm_head(head), place, f"# {source}, with its LM head\n")
    return place


@contextlib.contextmanager
def saved(name: str, target: Any, tokenizer: Any) -> Iterator[str]:
    """Folder or hub id from which another library loads a model; one from a GGUF is written out in its dtype."""
    source, packed = source_of(name)
    if not packed:
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder
