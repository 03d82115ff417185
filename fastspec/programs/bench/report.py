"""Report of a bench's rows: quantiles by method and category, differing answers, tables, texts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastspec.errors import Unsupported
from fastspec.generation.stats import Profile, Stats
from fastspec.programs.bench.methods import Row, is_peer
from fastspec.programs.compare import BASELINE, ROUNDING, first_difference
from fastspec.programs.terminal import table

OVERALL = "overall"
SIDE_BY_SIDE = 3
"""Methods beside transformers in a table of categories."""
FIGURES = (
    *("tokens_per_second", "ratio", "acceptance_length", "acceptance_rate", "prefill_ms", "ms_per_round"),
    *("floor_share", "peak_mib"),
)


def quantiles(values: Sequence[float]) -> list[float]:
    """The 20, 50 and 80 % quantiles, interpolated between the values."""
    if len(values) == 1:
        return [values[0]] * 3
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return [round(cuts[at], 4) for at in (1, 4, 7)]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row per batch size, method and category, and one per size and method over all (`OVERALL`, first): quantiles
    of each figure over the prompts, None where no row has it; medians of the phases; acceptance by position over all
    rounds; how many were identical."""
    groups: dict[tuple[int | None, str, str], list[Row]] = {}
    for category in (OVERALL, *dict.fromkeys(row["category"] for row in rows)):
        for row in rows:
            if category in (OVERALL, row["category"]):
                groups.setdefault((row.get("batch_size"), row["method"], category), []).append(row)
    summary = []
    for (size, method, category), group in groups.items():
        found: Row = {"batch_size": size, "method": method, "category": category, "count": len(group)}
        found["identical"] = sum(row["identical"] for row in group)
        for name in FIGURES:
            values = [row[name] for row in group if row.get(name) is not None]  # older rows have no acceptance_rate
            found[name] = quantiles(values) if values else None
        timed = [row["phases_ms"] for row in group if row["phases_ms"]]
        phases = dict.fromkeys(name for spent in timed for name in spent)  # a call without such rounds has 0 of a phase
        medians = {name: statistics.median(spent.get(name, 0.0) for spent in timed) for name in phases}
        found["phases_ms"] = {name: round(value, 3) for name, value in medians.items()}
        counts = [sum(column) for column in zip_longest(*(row["accepted_counts"] for row in group), fillvalue=0)]
        found["acceptance_by_position"] = [round(share, 3) for share in Stats(lengths=counts).acceptance_by_position]
        summary.append(found)
    return summary


def by_size(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every batch size, in their order; older runs, which do not say it, as one."""
    sizes = dict.fromkeys(row.get("batch_size") for row in rows)
    return [[row for row in rows if row.get("batch_size") == size] for size in sizes]


def without_texts(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "texts"}


@contextmanager
def writer(path: Path | None) -> Iterator[Callable[[Row], None] | None]:
    """Function that appends a row to a jsonl file at once; None without a file."""
    if path is None:
        yield None
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise Unsupported(f"could not write the rows: {error}") from error
    with file:
        yield lambda row: print(json.dumps(without_texts(row)), file=file, flush=True)


def print_profiles(profiles: Mapping[str, Profile], folder: Path, console: Console) -> None:
    """Times of the parts of each method's rounds, and the file of their trace for Perfetto."""
    for name, profile in profiles.items():
        path = folder / f"TRACE-{name.replace(':', '-')}.json"
        console.print(f"\n{name}", style="bold", markup=False)
        console.print(str(profile), markup=False)
        try:
            profile.write_trace(path)
        except OSError as error:
            raise Unsupported(f"could not write the trace: {error}") from error
        console.print(f"trace: {path}", style="dim", markup=False, soft_wrap=True)


def differing(rows: Iterable[Row], peers: bool = False) -> list[Row]:
    """Rows of assistants (or of peers) whose answer is not that of transformers' plain generate."""
    return [row for row in rows if not row["identical"] and is_peer(row["method"]) == peers]


def print_report(rows: Sequence[Row], console: Console) -> None:
    """Differing answers, then the tables of every batch size."""
    print_differences(rows, console)
    for group in by_size(rows):
        summary, where = summarise(group), group[0]
        batch = where.get("batch_size", where["batch"])
        console.print(
            f"\n{where['model']}, {where['device']}, {where['dtype']}, threads: {where['threads']}, batch: {batch}",
            style="bold",
            markup=False,
        )
        whole = [row for row in summary if row["category"] == OVERALL]
        for each in (speed_table(whole), round_table(whole), *category_tables(summary)):
            console.print(each, "")
    drafters: dict[str, str | None] = {}
    for row in rows:
        named = f"head {row['head']}" if row["head"] else row["draft_model"]
        drafters[row["method"]] = named if row["early_exit"] is None else f"early exit after layer {row['early_exit']}"
    told = "; ".join(f"{method}: {drafter}" for method, drafter in drafters.items() if drafter)
    if told:
        console.print(f"drafted by: {told}", style="dim", markup=False, highlight=False)
    console.print(
        "20, 50, 80: quantiles over the prompts; every other figure is a median. acceptance: tokens a round; rate: "
        "share of the drafts that were accepted, of a tree's too. by position: share of rounds that "
        f"accepted draft 1, 2, 3. floor: reading {rows[0]['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{rows[0]['read_gb_per_s']} GB/s over the time of a round.",
        style="dim",
    )


def print_differences(rows: Sequence[Row], console: Console) -> None:
    """Answers that are not transformers' own: errors in fp32, notes in lower precision, where rounding differs."""
    exact = rows[0]["dtype"] == "float32"
    for row in (*differing(rows), *differing(rows, peers=True)):
        loud = exact and not is_peer(row["method"])
        at = next(index for index in row["first_difference"] if index is not None)
        line = f"{row['method']} differs from transformers on {row['category']} {', '.join(row['ids'])}"
        kind, style = ("ERROR", "bold red") if loud else ("note", "yellow")
        console.print(f"{kind}: {line} from new token {at + 1} on", style=style, markup=False)
    if not exact and differing(rows):
        console.print(f"In {rows[0]['dtype']} {ROUNDING}.")


def speed_table(whole: list[Row]) -> Table:
    """One line per method: speed, ratio, acceptance, identical answers."""
    rows = []
    for row in whole:
        same = f"[{'green' if row['identical'] == row['count'] else 'bold red'}]{row['identical']}/{row['count']}[/]"
        speeds = [f"{value:.1f}" for value in row["tokens_per_second"]]
        shares = [_median(row, name, ".2f") for name in ("acceptance_length", "acceptance_rate")]
        rows.append((row["method"], *speeds, _median(row, "ratio", ".2f") + "x", *shares, same))
    return _table(("all prompts", "tokens/s 20", "50", "80", "ratio", "acceptance", "rate", "identical"), rows)


def round_table(whole: list[Row]) -> Table:
    """One line per method: milliseconds of a round by phase, and acceptance by position."""
    phases = [name for name in dict.fromkeys(name for row in whole for name in row["phases_ms"]) if name != "pass"]
    memory = [("peak_mib", "peak MiB", ".0f")] if any(row["peak_mib"] for row in whole) else []
    last, rows = [("floor_share", "floor", ".0%"), *memory], []
    for row in whole:
        spent = [f"{row['phases_ms'][name]:.1f}" if name in row["phases_ms"] else "" for name in phases]
        positions = " ".join(f"{share:.2f}".removeprefix("0") for share in row["acceptance_by_position"][:3])
        shares = [_median(row, name, form) for name, _, form in last]
        rows.append((row["method"], _median(row, "ms_per_round", ".1f"), *spent, *shares, positions))
    return _table(("ms a round", "all", *phases, *(title for _, title, _ in last), "by position"), rows)


def category_tables(summary: list[Row]) -> Iterator[Table]:
    """One line per category: median tokens/s and ratio of a few methods in each table, for 80 columns."""
    found = {(row["category"], row["method"]): row for row in summary}
    names = list(dict.fromkeys(row["method"] for row in summary if row["method"] != BASELINE))
    for start in range(0, max(1, len(names)), SIDE_BY_SIDE):
        methods = [BASELINE, *names[start : start + SIDE_BY_SIDE]]
        kinds = [kind for kind in dict.fromkeys(row["category"] for row in summary) if kind != OVERALL]
        rows = [(kind, *(_cell(found.get((kind, method))) for method in methods)) for kind in kinds]
        yield _table(("tokens/s", *methods), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # 80 columns hold a round's phases
    return table(titles, rows, whole="by position", box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))


def _cell(row: Row | None) -> str:
    if row is None:  # the run was cut short here
        return ""
    speed = f"{row['tokens_per_second'][1]:.1f}"
    return speed if row["method"] == BASELINE else f"{speed} {row['ratio'][1]:.2f}x"


def _median(row: Row, name: str, form: str) -> str:
    return "" if row[name] is None else format(row[name][1], form)


def print_texts(rows: Sequence[Row], console: Console, compare: bool) -> None:
    """Every answer, prompt by prompt; with `compare` beside transformers' own."""
    base: Row = {}
    for row in rows:
        if row["method"] == BASELINE:
            base = row
            console.rule(f"{row['category']} {', '.join(row['ids'])}", characters="-")
        if compare and row is base:
            continue
        for number, text in enumerate(row["texts"]):
            console.print(f"{row['method']}:", style="bold", markup=False)
            console.print(side_by_side(base["texts"][number], text) if compare else text, markup=False, highlight=False)


def side_by_side(plain: str, ours: str) -> Any:
    """transformers' text and another as two columns; what follows the common start is coloured."""
    same = first_difference(ours, plain)
    if same is None:
        return Text("identical to transformers:\n", style="green").append(ours, style="dim")
    table = Table.grid(expand=True, padding=(0, 2))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(Text(BASELINE, style="bold"), Text("this method", style="bold"))
    texts = ((plain, "green"), (ours, "bold red"))
    table.add_row(*(Text(text[:same], style="dim").append(text[same:], style=style) for text, style in texts))
    return table
