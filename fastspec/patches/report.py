"""report: what a patch did to a model, and what its assisted calls have done since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastspec.cascade.memory import MemoryStats
from fastspec.generation.capture import graph_bytes
from fastspec.generation.drafters.tree_sizes import TreeChoice
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.stats import Stats
from fastspec.patches.hf.compat import device_of, dtype_of, unwrapped
from fastspec.patches.hf.layer_weights import told_formats
from fastspec.patches.hf.modes import mode_for, mode_of
from fastspec.patches.hf.quantised import told_dequantised
from fastspec.patches.session import patched_session
from fastspec.patches.tuning.store import tables_of


@dataclass(frozen=True, slots=True)
class Report:
    """Report of what is patched and what it did; `print` shows a table. `calls` holds the statistics of the last 1000
    assisted calls."""

    model: str
    mode: str
    backend: str
    device: str
    dtype: str
    assistants: tuple[str, ...]
    calls: tuple[Stats, ...] = field(default=())
    kernels: dict[str, int] = field(default_factory=dict)
    """Calls of each op from Python since the patch; what a captured round repeats is counted by `Stats.replays` of its
    call."""
    trees: dict[tuple[Any, int], TreeChoice] = field(default_factory=dict)
    """(config, rows) -> what total_tokens="auto" has measured and chooses for the model as it is now, in the last kind
    of call."""
    default: Any = None
    """The assistant of calls that name none."""
    unassisted: dict[str, int] = field(default_factory=dict)
    """Why calls that the default assistant could not serve ran transformers' own decoding -> how many did."""
    tables: str = "none"
    """Where the kernels' launches come from: "shipped" for this device, "tuned" on this machine, "portable", or "none"
    without kernels."""
    why_torch: str | None = None
    """Why `backend="auto"` runs on the CPU without the C++ kernels; None where it has them, and for other backends and
    devices."""
    why_inexact: str | None = None
    """Why drafts may change a near-tie in bfloat16 and float16; None where they do not (`patch(exact=...)`)."""
    stored: dict[str, int] = field(default_factory=dict)
    """Formats of quantised layers whose weights assisted calls multiply as stored -> how many layers do."""
    own_forward: dict[str, int] = field(default_factory=dict)
    """Format, and why its layers run by their own forward -> how many do."""
    head_bits: dict[str, int] = field(default_factory=dict)
    """Assistants whose heads multiply weights of fewer bits than their dtype's -> how many bits."""
    dequantised: str | None = None
    """Method of a checkpoint whose weights transformers dequantised when it loaded them, and what prevents it; None of
    others."""
    graph_bytes: int = 0
    """Memory of the graphs that this process has captured on the model's device, of other models too."""
    memory: MemoryStats | None = None
    """What the cascade keeps of keys and values between calls, and how that went; None where it keeps nothing."""

    @property
    def exact(self) -> bool:
        """True where every assistant gives the bits of `autoregressive`."""
        return self.why_inexact is None

    @property
    def last(self) -> Stats | None:
        """Statistics of the last assisted call."""
        return self.calls[-1] if self.calls else None

    def __str__(self) -> str:
        default = "" if self.default is None else f"; default: {getattr(self.default, 'name', self.default)}"
        lines = [
            f"{self.model} on {self.device}, {self.dtype}: {self.mode}, kernels: {self.backend}, assistants: "
            f"{', '.join(self.assistants)}{default}"
        ]
        lines += [] if self.tables == "none" else [f"  launch tables: {self.tables}"]
        lines += [] if self.why_torch is None else [f"  plain torch on the CPU: {self.why_torch}"]
        lines += [] if not self.exact else ["  exact: every assistant gives the bits of autoregressive"]
        lines += [
            f"  weights multiplied as stored: {name}, {_counted(count, 'layer')}" for name, count in self.stored.items()
        ]
        lines += [
            f"  run by their own forward: {_counted(count, 'layer')}, {why}" for why, count in self.own_forward.items()
        ]
        lines += [f"  the head of {name} in {bits} bits" for name, bits in self.head_bits.items()]
        lines += [] if self.dequantised is None else [f"  weights were dequantised: {self.dequantised}"]
        lines += [
            f"  left to transformers' own generate: {_counted(count)}, {why}" for why, count in self.unassisted.items()
        ]
        for name in dict.fromkeys(call.assistant for call in self.calls):
            lines.append(f"  {name}: {_speed([call for call in self.calls if call.assistant == name])}")
        lines += _stages_reached([call.explanations for call in self.calls if call.explanations])
        lines += [f"  graphs on {self.device}: {self.graph_bytes / 2**20:.0f} MiB"] if self.graph_bytes else []
        if self.memory is not None:
            lines.append(f"  kept between the cascade's calls: {self.memory}")
        for (config, rows), choice in self.trees.items():
            lines += [f"  {config}, rows: {rows}", *(f"    {line}" for line in str(choice).split("\n"))]
        return "\n".join(lines)


def _counted(count: int, what: str = "call") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _speed(calls: list[Stats]) -> str:
    """Tokens a second of an assistant's calls, and what they come of."""
    rounds, seconds = sum(call.row_rounds for call in calls), sum(call.seconds for call in calls)
    rate = sum(call.emitted for call in calls) / seconds if seconds else 0.0
    speed = f"{_counted(len(calls))}, {rate:.1f} tokens/s"
    if not rounds:  # a cascade's calls are those of its stages
        return speed
    length = sum(call.round_tokens for call in calls) / rounds
    drafted, accepted = sum(call.drafted for call in calls), sum(call.accepted for call in calls)
    kept = f", acceptance rate {accepted / drafted:.2f}" if drafted else ""
    prepared = sum(call.prepare_seconds for call in calls)
    phases = {"prepare": prepared} if prepared else {}
    for call in calls:
        for phase, spent in call.phases.items():
            phases[phase] = phases.get(phase, 0.0) + spent
    shares = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in phases.items())
    made = sum(call.first_run_seconds for call in calls), sum(call.capture_seconds for call in calls)
    way = f"; in it first runs {made[0]:.2f} s, captures {made[1]:.2f} s" if any(made) else ""
    return f"{speed}, acceptance length {length:.2f}{kept}; {shares}{way}"


def _stages_reached(calls: list[tuple[Any, ...]]) -> list[str]:
    """A line for every stage of the cascade: how many requests it answered, and what was taken over."""
    explanations = [explanation for call in calls for explanation in call]
    visits = [visit for explanation in explanations for visit in explanation.visits]
    lines = []
    for stage, name in sorted({(visit.stage, visit.name) for visit in visits}):
        mine = [visit for visit in visits if visit.stage == stage]
        answered = sum(explanation.stage == stage for explanation in explanations)
        tokens = sum(visit.new_tokens for visit in mine)
        line = f"    stage {stage}, {name}: answered {answered} of {len(explanations)} requests, {tokens} new tokens"
        handed = sum(visit.handed_tokens for visit in mine)
        lines.append(line + (f", {sum(v.kept_tokens for v in mine)} of {handed} taken over" if handed else ""))
    return lines


def report(model: Any) -> Report:
    """Report of what `patch` did to a model and what its assisted calls have done since. Raises Unsupported for an
    unpatched model."""
    model = unwrapped(model)
    session = patched_session(model, "nothing to report before fastspec.patch(model)")
    mode, device, dtype = mode_for(model), device_of(model), dtype_of(model)
    ops = session.ops(model, mode)
    why_inexact = None if ops.exact else session.why_inexact(model, mode, ops)
    stored, own_forward = told_formats(model, session.reads_stored(model, mode, ops))
    return Report(
        model=type(model).__name__,
        mode=mode_of(model),
        backend=ops.name,
        tables=tables_of(ops, dtype, device),
        why_torch=session.why_torch(model, mode),
        stored=stored,
        own_forward=own_forward,
        head_bits={
            name: 8
            for name, held in session.resources.items()
            if isinstance(held, BoundHead) and held.module.is_rounded
        },
        dequantised=told_dequantised(model),
        why_inexact=why_inexact,
        device=str(device),
        graph_bytes=graph_bytes(device),
        dtype=str(dtype).removeprefix("torch."),
        assistants=("autoregressive", "nasd", *session.resources),
        calls=tuple(session.calls),
        kernels=dict(session.kernels),
        default=session.default,
        unassisted=dict(session.unassisted),
        memory=None if "cascade" not in session.resources else session.resources["cascade"].memory_stats,
        trees={
            (config, rows): sizes.choice()
            for ((config, _), rows, *where, _, _), sizes in session.trees.items()
            if where == [device, dtype] and (sizes.rounds or not sizes.fed)
        },
    )
