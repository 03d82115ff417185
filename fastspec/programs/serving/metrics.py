"""Metrics of a server, in Prometheus' form, and what is logged of a cascade's stages."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastspec.cascade.decisions import Visit
from fastspec.programs.serving.batch import Served, StageLoads

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
CHANCES = tuple(step / 10 for step in range(1, 11))
STAGE_GAUGES = {
    "fastspec_stage_rows_running": "Rows of a stage that hold a request.",
    "fastspec_stage_queue": "Requests that wait for a row of a stage.",
}
"""Gauges of what `Served.loads` tells of a stage, in its order."""
COUNTED = {
    "rounds": ("rounds", "Rounds."),
    "row_rounds": ("row_rounds", "Rounds summed over running rows."),
    "drafted_tokens": ("drafted", "Draft tokens scored."),
    "accepted_tokens": ("accepted", "Draft tokens accepted."),
    "cached_prompt_tokens": ("reused", "Prompt tokens that a row had read for another request."),
}
"""Counters of the batch -> their fields of its statistics, and what they say."""
WINDOW = 10.0
"""Seconds that tokens per second are counted over."""


class Rate:
    """Tokens per second over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque()
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        now = time.monotonic()
        with self.lock:
            self.seen.append((now, count))
            self._forget(now)

    def value(self) -> float:
        with self.lock:
            self._forget(time.monotonic())
            return sum(count for _, count in self.seen) / WINDOW

    def _forget(self, now: float) -> None:
        while self.seen and self.seen[0][0] < now - WINDOW:
            self.seen.popleft()


class Metrics:
    """The metrics of one server; `registry` is what `/metrics` shows, `info` what is served."""

    def __init__(self, batch: Served, info: dict[str, str]) -> None:
        self.batch, self.info, self.rate, self.registry = batch, info, Rate(), CollectorRegistry()
        self.registry.register(self)
        counter = partial(Counter, namespace="fastspec", registry=self.registry)
        histogram = partial(Histogram, namespace="fastspec", registry=self.registry)
        self.requests = counter("requests", "Requests by how they ended.", ["outcome"])
        self.tokens = counter("generated_tokens", "New tokens of all answers.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of all prompts that were taken.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS
        )
        self.seconds = histogram("request_seconds", "From a request's arrival to its answer's end.", buckets=SECONDS)
        self.stage_requests = counter(
            "stage_requests",
            "Requests by stage: answered, sent on to the next, or left out for want of room.",
            ["stage", "outcome"],
        )
        self.stage_quality = histogram(
            "stage_expected_quality",
            "Probability that a stage's answer is acceptable, when it was decided on.",
            ["stage"],
            buckets=CHANCES,
        )
        self.stage_seconds = histogram(
            "stage_seconds",
            "From when a stage was asked to its answer, the wait for a row included.",
            ["stage"],
            buckets=SECONDS,
        )
        self.stage_cost = counter(
            "stage_cost_milliseconds", "Milliseconds that a stage's tokens cost by the cascade's rates.", ["stage"]
        )
        self.stage_tokens = counter(
            "stage_tokens",
            "Tokens of a stage's answers: new ones, and those kept of what it was handed.",
            ["stage", "kind"],
        )

    def add_visit(self, visit: Visit) -> None:
        name = visit.name
        self.stage_requests.labels(name, visit.outcome).inc()
        if visit.outcome == "left_out":
            return
        if visit.quality:
            self.stage_quality.labels(name).observe(visit.quality[0])
        self.stage_seconds.labels(name).observe(visit.milliseconds / 1000)
        if visit.cost is not None:
            self.stage_cost.labels(name).inc(visit.cost)
        self.stage_tokens.labels(name, "new").inc(visit.new_tokens)
        self.stage_tokens.labels(name, "kept").inc(visit.kept_tokens)

    def collect(self) -> Iterator[Metric]:
        """Gauges, and counts of the batch itself."""
        batch, stats = self.batch, self.batch.stats
        served = GaugeMetricFamily("fastspec_info", "What is served.", labels=list(self.info))
        served.add_metric(list(self.info.values()), 1)
        yield served
        rate = f"New tokens a second over the last {WINDOW:g} seconds."
        length = "Mean tokens that a round emits for a row, the bonus token counted."
        for name, said, value in (
            ("rows", "Rows of a round.", stats.rows),
            ("rows_running", "Rows that hold a request.", batch.running),
            ("queue", "Requests that wait for a row.", batch.waiting),
            ("acceptance_length", length, stats.acceptance_length),
            ("tokens_per_second", rate, self.rate.value()),
        ):
            yield GaugeMetricFamily(f"fastspec_{name}", said, value)
        for place, (name, said) in enumerate(STAGE_GAUGES.items()):
            loads = GaugeMetricFamily(name, said, labels=["stage"])
            for stage, load in batch.loads.items():
                loads.add_metric([stage], load[place])
            yield loads
        for name, (field, said) in COUNTED.items():
            yield CounterMetricFamily(f"fastspec_{name}", said, getattr(stats, field))


def told_of(visits: Sequence[Visit], loads: StageLoads) -> str:
    """The stages of an answer, and their loads now, for a line of the log; empty without a cascade."""
    parts = []
    for visit in visits:
        quality = f", P(acceptable) {visit.quality[0]:.2f}" if visit.quality else ""
        cost = "" if visit.cost is None else f", cost {visit.cost:.1f} ms"
        running, waiting = loads[visit.name]
        parts.append(
            f"; {visit.name}: {visit.outcome.replace('_', ' ')}{quality}{cost} (now {running} in its rows, {waiting} "
            "waiting)"
        )
    return "".join(parts)
