"""One generate call: prefill, then rounds until every answer has ended."""

from __future__ import annotations

import time

from torch import Tensor

from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.given_text import Read
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Outcome, Request
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.verifier import Verifier, verifier_of
from fastspec.generation.stats import Stats, timed


def decode(engine: Engine[TargetT], request: Request, name: str) -> Outcome:
    """Run a call to its end; without a drafter every round is one token."""
    target, drafter = engine.target, engine.drafter
    stats = Stats(assistant=name, rows=len(engine.state.root))
    began, first_runs, captures = time.perf_counter(), SPENT.first_runs, SPENT.captures
    batch = Batch(request, stats)
    verifier = verifier_of(engine.choice, request, batch)
    with timed(stats, "prefill"):
        first = request.begins()
        logits, features = first.read(target)
        text = request.context if request.context is not None and not features.shape[-1] else (first.prompts, first.counts)
        root, scores = verifier.first(logits, text, batch.places)
        if drafter is not None and request.answers is None:
            drafter.begin(*text, features, root)
        engine.begin(root)
        firsts = root.tolist()  # waits for the device: what comes after is the rounds' time
    for row, token in enumerate(firsts):
        one = slice(row, row + 1)
        batch.read(row, [token], scores[one], logits[one])
    batch.lengths = target.lengths.tolist()
    if request.answers is not None:
        with timed(stats, "verify"):
            _verify_answers(engine, verifier, batch, Read(*text, features))
    del features
    while any(batch.active):
        free = batch.free()
        if free and not engine.in_flight:
            _admit(engine, verifier, batch, free[0])
            continue
        engine.state.activate(batch.running, batch.padded)
        _take(engine.step(max(batch.lengths), stats, verifier, not free and batch.goes_on(engine.main.longest)), engine, batch)
    engine.end()
    batch.finish()
    stats.seconds = time.perf_counter() - began
    stats.first_run_seconds, stats.capture_seconds = SPENT.first_runs - first_runs, SPENT.captures - captures
    return batch.out


def _verify_answers(engine: Engine[TargetT], verifier: Verifier, batch: Batch, read: Read) -> None:
    """Rounds over the given answers, then the start of the call's own drafter."""
    request, drafter, root = batch.request, engine.drafter, engine.state.root
    assert request.answers is not None
    with engine.verifying(request.answers) as given:
        given.begin(request.prompts, request.counts, read.blank, root)
        stats, batch.stats = batch.stats, Stats()  # of these rounds, which say nothing of the drafter's
        while given.goes_on and any(batch.active):
            engine.state.activate(batch.active, batch.padded)
            running = [on and not padded for on, padded in zip(batch.active, batch.padded, strict=True)]
            _take(engine.step(max(batch.lengths), batch.stats, verifier), engine, batch)
            read.add(engine.last.tree, engine.last.verdict, engine.last.features, running)
        batch.stats = stats
    # a row's last round may go on in its text behind the end
    batch.out.kept = [min(kept, len(answer)) for kept, answer in zip(given.kept, batch.out.tokens, strict=True)]
    if drafter is not None:
        drafter.hint(request.answers)
        drafter.begin(*read.whole(), root.clone())


def _admit(engine: Engine[TargetT], verifier: Verifier, batch: Batch, row: int) -> None:
    """Let the next prompt that waits begin in buffers of one row, and give it a row whose own prompt has ended."""
    request = batch.request
    assert request.entry is not None
    prompt = batch.places[row] = batch.waiting.pop(0)
    one, count = slice(prompt, prompt + 1), batch.counts[prompt]
    with timed(batch.stats, "prefill"):
        target, drafter = request.entry()
        text = request.prompts[one, :count], request.counts[one]
        logits, features = target.prefill(*text)
        root, scores = verifier.first(logits, text, [prompt])
        if drafter is not None:
            drafter.begin(*text, features, root)
        engine.admit(row, target, drafter, root, count)
        tokens = root.tolist()
    batch.lengths[row] = count
    batch.read(prompt, tokens, scores, logits)
    batch.stats.joined += 1


def _take(emitted: list[list[int]], engine: Engine[TargetT], batch: Batch) -> None:
    """Hand a round's tokens to the prompts that its rows hold."""
    request, stats, last = batch.request, batch.stats, engine.last
    if request.watch is not None:
        request.watch(last.tree, last.verdict, last.logits)
    measures = None if last.committed.measures is None else last.committed.measures.clone()  # the next replay writes over them
    nodes, drafted = last.tree.tokens.shape[1] - 1, last.tree.drafted
    for row, (prompt, (accepted, *tokens)) in enumerate(zip(batch.places, emitted, strict=True)):
        if not batch.active[prompt]:
            continue
        if engine.state.padded[row]:
            batch.take(prompt, tokens[: accepted + 1], accepted, None, None)
            continue
        stats.count_round(accepted, nodes if drafted is None else drafted[row], nodes > 0)
        scores: Tensor | None = None
        logits: Tensor | None = None
        if request.keep_scores or request.keep_logits:
            path = last.verdict.path[row, : accepted + 1]
            scores = last.scores_along(row, path) if request.keep_scores else None
            logits = last.logits[row, path].float() if request.keep_logits else None
        if measures is not None:
            batch.measures[prompt].append(measures[row, : accepted + 1])
        batch.take(prompt, tokens[: accepted + 1], accepted, scores, logits)
    batch.lengths = [length + accepted + 1 for length, (accepted, *_) in zip(batch.lengths, emitted, strict=True)]
    stats.rounds += 1
