"""One generate call: prefill, then rounds until every answer has ended."""

from __future__ import annotations

import time

from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.given_text import Read
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Outcome, Request
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.rounds import Rounds, take
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
        begun = root.clamp(min=0)  # of a row without a token the call hears below
        if drafter is not None and request.answers is None:
            drafter.begin(*text, features, begun)
        engine.begin(begun)
        firsts = root.tolist()  # waits for the device: what comes after is the rounds' time
    for row, token in enumerate(firsts):
        one = slice(row, row + 1)
        batch.read(row, [token], scores[one], logits[one])
    batch.lengths = target.lengths.tolist()
    if request.answers is not None:
        with timed(stats, "verify"):
            _verify_answers(engine, verifier, batch, Read(*text, features))
    del features
    rounds = Rounds(engine, batch, verifier, request.entry)
    while any(batch.active):
        rounds.turn()
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
            take(engine.step(max(batch.lengths), batch.stats, verifier), engine, batch)
            read.add(engine.last.tree, engine.last.verdict, engine.last.features, running)
        batch.stats = stats
    # a row's last round may go on in its text behind the end
    batch.out.kept = [min(kept, len(answer)) for kept, answer in zip(given.kept, batch.out.tokens, strict=True)]
    if drafter is not None:
        drafter.hint(request.answers)
        drafter.begin(*read.whole(), root.clone())
