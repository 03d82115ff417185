"""What a cascade did with a request, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visit:
    """One stage's part in a request. `new_tokens` were generated, `kept_tokens` taken over from the stage before; `handed_tokens` is how
    long the answer was that it verified. `quality` is the probability that its answer is acceptable, then those of the later stages;
    `stop_value` and `go_on_value` the expected losses in milliseconds, or the probability that was reached and the one asked for."""

    stage: int
    name: str
    why: str
    new_tokens: int = 0
    kept_tokens: int = 0
    handed_tokens: int = 0
    milliseconds: float = 0.0
    quality: tuple[float, ...] = ()
    stop_value: float | None = None
    go_on_value: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stages that a request went through, in order; the last one answered."""

    visits: tuple[Visit, ...]

    @property
    def stage(self) -> int:
        """The stage whose answer was returned."""
        return self.visits[-1].stage

    @property
    def reused(self) -> int:
        """Tokens that stages took over from the ones before."""
        return sum(visit.kept_tokens for visit in self.visits)

    @property
    def milliseconds(self) -> float:
        """Time that the stages took."""
        return sum(visit.milliseconds for visit in self.visits)

    def __str__(self) -> str:
        lines = []
        for visit in self.visits:
            parts = [f"{visit.new_tokens} new tokens"] if visit.new_tokens or visit.kept_tokens else []
            parts += [f"{visit.kept_tokens} of {visit.handed_tokens} taken over"] if visit.handed_tokens else []
            parts += [f"{visit.milliseconds:.0f} ms"] if visit.milliseconds else []
            parts += [f"P(acceptable) {' '.join(f'{each:.2f}' for each in visit.quality)}"] if visit.quality else []
            lines.append(f"stage {visit.stage}, {visit.name}: {', '.join([*parts, visit.why])}")
        return "\n".join(lines)
