"""One generate call: prefill, then rounds until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.capture import SPENT
from fastspec.generation.handover import Read
from fastspec.generation.lockstep import Steps, until_end, walk_in_step
from fastspec.generation.protocols import Drafter, LanguageModel
from fastspec.generation.rounds import Rounds
from fastspec.generation.stats import Stats, timed
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import RowProcessor, choose, measure, walk_with_history

AHEAD_AFTER = 8
"""Rounds of a call before its rounds are launched ahead of the host."""


@dataclass(slots=True)
class Request:
    """What to generate: prompts [B, T] (left padding removed, rows filled up on the right) with counts [B] real tokens.

    `context` is the whole text in the same form, where the target's cache holds a part of it already: drafters that read no features
    get it; with an encoder-decoder model they get the source and then the decoder's tokens. `history[b]` [T_b] is what a
    history-dependent processor sees of row b before its first new token, `limit` the number of new tokens, `ends` the end
    tokens. Rows that `stop` ends before the others go on, as in transformers, where there are no end tokens and no prompts that wait; else
    they are over. `process_at` is called level by level of the walk where processors look at the history; all others
    belong to the rounds. With `steps` the rows decode in lockstep, and these choose every token and say when a row has ended: `ends`,
    `stop`, `process_at` and `keep_scores` are not used. `stop(row, new_tokens)` is asked after every token, and
    `emit(row, tokens, accepted, done)` is told of every round; before that `watch(tree, verdict, logits)` sees the round's tree and
    the target's raw logits [B, N, V] of its nodes, on the device. `answers`, a text per row that another model wrote, are verified as
    drafts first. `measure` asks for `fastspec.generation.verify.measure` of every new token.

    `rows` prompts are decoded at a time, None: all of them. The others wait, and take the place of those that have ended: `entry()` then
    gives a target and a drafter of one row for a prompt to begin in. Such calls have no context and no answers.
    """

    prompts: Tensor
    counts: Tensor
    history: list[Tensor]
    limit: int
    ends: frozenset[int]
    process_at: RowProcessor | None
    stop: Callable[[int, list[int]], bool] | None = None
    emit: Callable[[int, list[int], int, bool], None] | None = None
    watch: Callable[[TokenTree, Verdict, Tensor], None] | None = None
    context: tuple[Tensor, Tensor] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    answers: Sequence[Sequence[int]] | None = None
    measure: bool = False
    rows: int | None = None
    steps: Steps | None = None
    entry: Callable[[], tuple[LanguageModel, Drafter | None]] | None = None

    def begins(self) -> Request:
        """The same of the prompts that it begins with."""
        if self.rows is None:
            return self
        counts = self.counts[: self.rows]
        return replace(self, prompts=self.prompts[: self.rows, : int(counts.max())], counts=counts, rows=None)


@dataclass(slots=True)
class Outcome:
    """New tokens per row, trimmed; per row and new token its processed scores and raw logits [V] where asked for, and per row the
    measures [T, 3] of its new tokens. `kept` counts the tokens of each row's given answer that the target has said too."""

    tokens: list[list[int]]
    scores: list[list[Tensor]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    measures: list[Tensor] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


class _Run:
    """The host's side of a call: what each prompt's answer says and whether it goes on. Prompts are counted through the whole call, and
    rows of the rounds hold them in turns, where there are fewer."""

    def __init__(self, request: Request, stats: Stats) -> None:
        rows = request.prompts.shape[0]
        self.request, self.stats = request, stats
        self.places = list(range(rows if request.rows is None else request.rows))
        """The prompt that each row holds."""
        self.waiting = list(range(len(self.places), rows))
        self.counts: list[int] = request.counts.tolist()
        self.lengths: list[int] = []
        """No less than each row's committed tokens, from the prefill on."""
        self.out = Outcome([[] for _ in range(rows)], [[] for _ in range(rows)], [[] for _ in range(rows)], stats=stats)
        self.active = [True] * rows
        """Of each prompt, whether its answer goes on; also of those that wait."""
        self.limit = request.limit
        self.alone = bool(request.ends) or request.rows is not None
        """Whether an answer that `stop` stops is over, or goes on until all were stopped."""
        self.asked: dict[tuple[int, int], bool] = {}  # (prompt, tokens said) -> what `stop` said of it
        self.stops: dict[int, int] = {}  # prompt -> tokens it had said when it was stopped, where they go on
        self.measures: list[list[Tensor]] = [[] for _ in range(rows)]

    @property
    def running(self) -> list[bool]:
        """Which rows of the rounds go on."""
        return [self.active[prompt] for prompt in self.places]

    def free(self) -> list[int]:
        """Rows whose prompts have ended, as many as there are prompts that wait."""
        return [row for row, goes_on in enumerate(self.running) if not goes_on][: len(self.waiting)]

    def read(self, prompt: int, said: list[int], scores: Tensor, logits: Tensor) -> None:
        """Take a prompt's first token, of scores and logits [1, V]."""
        if self.request.measure:
            self.measures[prompt].append(measure(logits, torch.tensor(said, device=logits.device)))
        self.take(prompt, said, 0, scores if self.request.keep_scores else None, logits if self.request.keep_logits else None)

    def take(self, prompt: int, tokens: list[int], accepted: int, scores: Tensor | None, logits: Tensor | None) -> None:
        """Append tokens to a prompt's answer until it ends; scores and logits are [len(tokens), V]."""
        request, said = self.request, self.out.tokens[prompt]
        if request.steps is not None:
            self._take_steps(request.steps, prompt, tokens, accepted)
            return
        count = 0
        for token in tokens:
            said.append(token)
            count += 1
            stopped = self.stopped(prompt, said)
            if stopped and not self.alone:
                self._wait(prompt)
                stopped = False
            if token in request.ends or len(said) >= self.limit or stopped:
                self.active[prompt] = False
                break
        if scores is not None:
            self.out.scores[prompt] += list(scores[:count])
        if logits is not None:
            self.out.logits[prompt] += list(logits[:count])
        if request.emit is not None:
            request.emit(prompt, tokens[:count], min(accepted, count), not self.active[prompt])

    def _take_steps(self, steps: Steps, prompt: int, tokens: list[int], accepted: int) -> None:
        """`take` in lockstep: `steps` has ended rows and call already, and rows that have ended stay in the batch."""
        said = self.out.tokens[prompt]
        more = until_end(tokens, steps.lengths[prompt], len(said))
        said += more
        self.active[prompt] = not steps.over
        if self.request.emit is not None and more:
            self.request.emit(prompt, more, min(accepted, len(more)), steps.over or steps.lengths[prompt] == len(said))

    @property
    def filled(self) -> list[bool]:
        """Which rows have ended and are filled up, in lockstep."""
        steps = self.request.steps
        return [False] * len(self.places) if steps is None else [length is not None for length in steps.lengths]

    def stopped(self, prompt: int, said: list[int]) -> bool:
        """What `stop` says of a prompt whose answer says this; it is asked once, by the walk or after it."""
        key = prompt, len(said)
        if self.request.stop is not None and key not in self.asked:
            self.asked[key] = self.request.stop(prompt, list(said))
        return self.asked.get(key, False)

    def over(self, prompt: int, more: list[int]) -> bool:
        """Whether an answer ends after `more` tokens of this round, the last of which is new."""
        return more[-1] in self.request.ends or (self.alone and self.stopped(prompt, self.out.tokens[prompt] + more))

    def goes_on(self, drafter: Drafter | None) -> bool:
        """Whether the round after the next one may be launched before the next one is read: only its tokens are asked for, and as far as
        lengths tell, not all rows end before it. A round launched in vain takes its time, so calls of a few rounds never do it."""
        request = self.request
        told = request.watch is None and not (request.keep_scores or request.keep_logits or request.measure)
        if not told or self.stats.rounds < AHEAD_AFTER:
            return False
        most = 1 if drafter is None else drafter.max_path
        return any(self.active[prompt] and len(self.out.tokens[prompt]) + most < self.limit for prompt in self.places)

    def _wait(self, prompt: int) -> None:
        """An answer was stopped without an end token: it goes on until every one was stopped once."""
        self.stops.setdefault(prompt, len(self.out.tokens[prompt]))
        if len(self.stops) == len(self.active):
            self.limit = min(self.limit, max(self.stops.values()))
            self.active = [len(said) < self.limit for said in self.out.tokens]

    def finish(self) -> None:
        """Cut what a row said beyond the common end, and count."""
        for kept in (self.out.tokens, self.out.scores, self.out.logits):
            for row in kept:
                del row[self.limit :]
        self.stats.emitted = sum(map(len, self.out.tokens))
        if self.request.measure:
            parts = [torch.cat(row)[: len(said)] for row, said in zip(self.measures, self.out.tokens, strict=True)]
            self.out.measures = [part.cpu() for part in parts]


def decode(rounds: Rounds, request: Request, name: str) -> Outcome:
    """Run a call to its end; without a drafter every round is one token."""
    target, drafter = rounds.target, rounds.drafter
    stats = Stats(assistant=name, rows=len(rounds.root))
    began, first_runs, captures = time.perf_counter(), SPENT.first_runs, SPENT.captures
    run = _Run(request, stats)
    with timed(stats, "prefill"):
        first = request.begins()
        logits, features = target.prefill(first.prompts, first.counts)
        shown = request.context if request.context is not None and not features.shape[-1] else (first.prompts, first.counts)
        root, scores = _first(rounds, request, logits, shown, run.places)
        if drafter is not None and request.answers is None:
            drafter.begin(*shown, features, root)
        rounds.begin(root)
        firsts = root.tolist()  # waits for the device: what comes after is the rounds' time
    for row, token in enumerate(firsts):
        one = slice(row, row + 1)
        run.read(row, [token], scores[one], logits[one])
    run.lengths = target.lengths.tolist()
    if request.answers is not None:
        with timed(stats, "verify"):
            _verify_answers(rounds, run, Read(*shown, features))
    del features
    while any(run.active):
        free = run.free()
        if free and not rounds.ahead:
            _join(rounds, run, free[0])
            continue
        rounds.activate(run.running, run.filled)
        _take(rounds.step(max(run.lengths), stats, _decider(rounds, request, run), not free and run.goes_on(drafter)), rounds, run)
    rounds.end()
    run.finish()
    stats.seconds = time.perf_counter() - began
    stats.first_run_seconds, stats.capture_seconds = SPENT.first_runs - first_runs, SPENT.captures - captures
    return run.out


def _verify_answers(rounds: Rounds, run: _Run, read: Read) -> None:
    """Rounds over the given answers, then the start of the call's own drafter."""
    request, drafter = run.request, rounds.drafter
    assert request.answers is not None
    with rounds.verifying(request.answers) as chain:
        chain.drafter.begin(request.prompts, request.counts, read.blank, chain.root)
        stats, run.stats = run.stats, Stats()  # of these rounds, which say nothing of the drafter's
        while chain.drafter.goes_on and any(run.active):
            chain.activate(run.active, run.filled)
            running = [on and not filled for on, filled in zip(run.active, run.filled, strict=True)]
            _take(chain.step(max(run.lengths), run.stats, _decider(chain, request, run)), chain, run)
            read.add(chain.tree, chain.verdict, chain.features, running)
        run.stats = stats
    # a row's last round may go on in its text behind the end
    run.out.kept = [min(kept, len(said)) for kept, said in zip(chain.drafter.kept, run.out.tokens, strict=True)]
    rounds.begin(chain.root)
    if drafter is not None:
        if hasattr(drafter, "learn"):
            drafter.learn(request.answers)
        drafter.begin(*read.whole(), rounds.root.clone())


def _join(rounds: Rounds, run: _Run, row: int) -> None:
    """Let the next prompt that waits begin in buffers of one row, and give it a row whose own prompt has ended."""
    request = run.request
    assert request.entry is not None
    prompt = run.places[row] = run.waiting.pop(0)
    one, count = slice(prompt, prompt + 1), run.counts[prompt]
    with timed(run.stats, "prefill"):
        target, drafter = request.entry()
        shown = request.prompts[one, :count], request.counts[one]
        logits, features = target.prefill(*shown)
        root, scores = _first(rounds, request, logits, shown, [prompt])
        if drafter is not None:
            drafter.begin(*shown, features, root)
        rounds.join(row, target, drafter, root, count)
        said = root.tolist()
    run.lengths[row] = count
    run.read(prompt, said, scores, logits)
    run.stats.joined += 1


def _first(
    rounds: Rounds, request: Request, logits: Tensor, shown: tuple[Tensor, Tensor], prompts: list[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The first tokens of these prompts from the prefill's logits [B, V] -> tokens [B], processed scores [B, V]; a drafter that mixes its
    own law in reads the text `shown` for it."""
    mixes = hasattr(rounds.drafter, "mix")
    if mixes and (request.process_at is not None or request.answers is not None):
        raise Unsupported(
            "a mixture of two models' laws takes no processors that look at the tokens so far (repetition_penalty, no_repeat_ngram_size, "
            "...) and no answers to verify: leave them out, or decode the large model's own law"
        )
    if request.process_at is None:
        scores = rounds.processed(logits)
        if mixes:
            scores = rounds.drafter.first(*shown, logits, scores, process=rounds.process, sample=rounds.sample)
        if request.steps is not None:
            return torch.tensor(request.steps(logits, scores if mixes else None), device=logits.device), scores
    else:
        scores = request.process_at(prompts, torch.stack([request.history[prompt] for prompt in prompts]), logits.float())
    uniform = rounds.uniform((scores.shape[0], 1))
    return choose(scores[:, None], uniform, rounds.ops)[:, 0], scores.float()


def _take(packed: list[list[int]], rounds: Rounds, run: _Run) -> None:
    """Hand a round's tokens to the prompts that its rows hold."""
    request, stats, verdict = run.request, run.stats, rounds.verdict
    if request.watch is not None:
        request.watch(rounds.tree, verdict, rounds.logits)
    measures = rounds.measures.clone() if request.measure else None  # the next replay writes over them
    drafted = getattr(rounds.drafter, "drafted", None)
    for row, (prompt, (accepted, *said)) in enumerate(zip(run.places, packed, strict=True)):
        if not run.active[prompt]:
            continue
        if rounds.filled[row]:
            run.take(prompt, said[: accepted + 1], accepted, None, None)
            continue
        stats.row_rounds += 1
        nodes = rounds.tree.tokens.shape[1] - 1
        stats.drafted += nodes if drafted is None else drafted[row]
        stats.draft_rounds += nodes > 0
        stats.accepted += accepted
        stats.count_accepted(accepted)
        stats.round_tokens += accepted + 1
        scores: Tensor | None = None
        logits: Tensor | None = None
        if request.keep_scores or request.keep_logits:
            path = verdict.path[row, : accepted + 1]
            scores = rounds.along(row, path) if request.keep_scores else None
            logits = rounds.logits[row, path].float() if request.keep_logits else None
        if measures is not None:
            run.measures[prompt].append(measures[row, : accepted + 1])
        run.take(prompt, said[: accepted + 1], accepted, scores, logits)
    run.lengths = [length + accepted + 1 for length, (accepted, *_) in zip(run.lengths, packed, strict=True)]
    stats.rounds += 1


def _decider(rounds: Rounds, request: Request, run: _Run) -> Callable[[], tuple[Verdict, Tensor | None]] | None:
    """What makes the verdict in place of the round's own choice, where the host does."""
    if request.steps is not None:
        return partial(_decide_in_step, rounds, request.steps)
    return None if request.process_at is None else partial(_decide, rounds, request, run)


def _decide_in_step(rounds: Rounds, steps: Steps) -> tuple[Verdict, None]:
    """The verdict on a scored tree in lockstep; a drafter that mixes its own law in gives the scores."""
    tree, logits = rounds.tree, rounds.logits
    scores = rounds.drafter.mix(tree, logits, rounds.processed(logits)) if hasattr(rounds.drafter, "mix") else None
    return walk_in_step(tree, logits, steps, scores), None


def _decide(rounds: Rounds, request: Request, run: _Run) -> tuple[Verdict, Tensor]:
    """The verdict on a scored tree by processors that look at the history, and the processed scores along its path [B, P, V]."""
    assert request.process_at is not None
    tree, logits, places, said, process_at = rounds.tree, rounds.logits, run.places, run.out.tokens, request.process_at
    history = [torch.cat((h := request.history[prompt], h.new_tensor(said[prompt]))) for prompt in places]
    left = [run.limit - len(said[prompt]) if run.active[prompt] else 0 for prompt in places]
    uniform = rounds.uniform(tree.tokens.shape)

    def process(rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
        return process_at([places[row] for row in rows], texts, scores)

    def over(row: int, more: list[int]) -> bool:
        return run.over(places[row], more)

    return walk_with_history(tree, logits, uniform, history, process, left, over, rounds.ops)
