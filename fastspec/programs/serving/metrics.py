"""Metrics of a server, in Prometheus' form."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastspec.cascade.decisions import Visit
from fastspec.programs.serving.batch import Served

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
CHANCES = tuple(step / 10 for step in range(1, 11))
STAGE_GAUGES = {
    "fastspec_stage_rows_running": "Rows of a stage that hold a request.",
    "fastspec_stage_queue": "Requests that wait for a row of a stage.",
}
"""Gauges of what `Served.loads` tells of a stage, in its order."""
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
    """The metrics of one server; `registry` is what `/metrics` shows, `info` what is served. Those of stages have no
    values without a cascade."""

    def __init__(self, batch: Served, info: dict[str, str]) -> None:
        self.batch, self.info, self.rate, self.registry = batch, info, Rate(), CollectorRegistry()
        self.registry.register(self)
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.tokens = self._counter("generated_tokens", "New tokens of all answers.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of all prompts that were taken.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self.seconds = self._histogram("request_seconds", "From a request's arrival to its answer's end.", SECONDS)
        self.stage_requests = self._counter(
            "stage_requests",
            "Requests by stage: answered, sent on to the next, or left out for want of room.",
            "stage",
            "outcome",
        )
        self.stage_quality = self._histogram(
            "stage_expected_quality",
            "Probability that a stage's answer is acceptable, when it was decided on.",
            CHANCES,
            "stage",
        )
        self.stage_seconds = self._histogram(
            "stage_seconds", "From when a stage was asked to its answer, the wait for a row included.", SECONDS, "stage"
        )
        self.stage_cost = self._counter(
            "stage_cost_milliseconds", "Milliseconds that a stage's tokens cost by the cascade's rates.", "stage"
        )
        self.stage_tokens = self._counter(
            "stage_tokens",
            "Tokens of a stage's answers: new ones, and those kept of what it was handed.",
            "stage",
            "kind",
        )

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        return Counter(f"fastspec_{name}", said, labels, registry=self.registry)

    def _histogram(self, name: str, said: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"fastspec_{name}", said, labels, buckets=buckets, registry=self.registry)

    def add_visit(self, visit: Visit) -> None:
        """Count a stage's part in an answer."""
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
        """Counts of the batch itself."""
        batch, stats = self.batch, self.batch.stats
        served = GaugeMetricFamily("fastspec_info", "What is served.", labels=list(self.info))
        served.add_metric(list(self.info.values()), 1)
        yield served
        emitted = "Mean tokens that a round emits for a row, the bonus token counted."
        yield GaugeMetricFamily("fastspec_rows", "Rows of a round.", stats.rows)
        yield GaugeMetricFamily("fastspec_rows_running", "Rows that hold a request.", batch.running)
        yield GaugeMetricFamily("fastspec_queue", "Requests that wait for a row.", batch.waiting)
        yield GaugeMetricFamily("fastspec_acceptance_length", emitted, stats.acceptance_length)
        rate = f"New tokens a second over the last {WINDOW:g} seconds."
        yield GaugeMetricFamily("fastspec_tokens_per_second", rate, self.rate.value())
        for place, (name, said) in enumerate(STAGE_GAUGES.items()):
            loads = GaugeMetricFamily(name, said, labels=["stage"])
            for stage, load in batch.loads.items():
                loads.add_metric([stage], load[place])
            yield loads
        cached = "Prompt tokens that a row had read for another request."
        yield CounterMetricFamily("fastspec_rounds", "Rounds.", stats.rounds)
        yield CounterMetricFamily("fastspec_row_rounds", "Rounds summed over running rows.", stats.row_rounds)
        yield CounterMetricFamily("fastspec_drafted_tokens", "Draft tokens scored.", stats.drafted)
        yield CounterMetricFamily("fastspec_accepted_tokens", "Draft tokens accepted.", stats.accepted)
        yield CounterMetricFamily("fastspec_cached_prompt_tokens", cached, stats.reused)
