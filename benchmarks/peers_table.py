"""The Markdown of `peers.py`: every case with vLLM's figure beside ours, then which versions and settings gave them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

OURS, THEIRS = "fastspec", "vllm"
NAMES = {OURS: "fastspec", THEIRS: "vLLM"}
COLUMNS = ("model", "tokens before", "rows", "new", "", "fastspec", "vLLM", "ratio", "first token, s: fastspec", "vLLM")
Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Markdown of the last rows of every case. A ratio above 1 is in our favour."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = row["model"], row.get("before"), row["rows"], row["new"], row["method"]
        cases.setdefault(key, {})[row["engine"] + (f" {row['drafts']}" if row["engine"] == THEIRS and row.get("drafts") else "")] = row
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for (model, before, count, new, method), found in cases.items():
        for name, theirs in found.items():
            mine = found.get(OURS)
            if name == OURS or mine is None:
                continue
            what = "ms a round" if "round_ms" in mine else "tokens/s"
            a, b = (row.get("round_ms", row.get("tokens_per_second")) for row in (mine, theirs))
            ratio = b / a if "round_ms" in mine else a / b
            firsts = [f"{row['first_token_s']:.3g}" if "first_token_s" in row else "" for row in (mine, theirs)]
            cells = [model, before or "prompts", count, new, f"{method}, {what}", _cell(a, mine), _cell(b, theirs), f"{ratio:.2f}", *firsts]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    last = {id(row) for found in cases.values() for row in found.values()}
    return "\n".join([*lines, "", *_told([row for row in rows if id(row) in last])])


def _cell(value: float, row: Row) -> str:
    """A figure, with the drafts of a round and the mean tokens that one gave where there are any."""
    if row["method"] == "plain":
        return f"{value:,.0f}"
    drafts = f"{row['drafts']} drafts, " if row.get("drafts") else ""
    return f"{value:,.{2 if 'round_ms' in row else 0}f} ({drafts}{row['acceptance_length']:.2f} tokens a round)"


def _told(rows: Sequence[Row]) -> list[str]:
    """A line for every device and version of ours, and one for every version and setting of an engine, with the cases that it gave."""
    made: dict[str, dict[str, None]] = {}
    for row in rows:
        where = f"On {row['device']}: torch {row['torch']}, triton {row['triton']}, transformers {row['transformers']}"
        of = f"{row['model']} {row['rows']}x{row.get('before') or 'prompts'}"
        made.setdefault(f"{where}, commit {row['commit']}", {})[of] = None
    lines = [f"{where}: {', '.join(of)}." for where, of in made.items()]
    cases: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        settings = json.dumps(row.get("engine_settings", {}), sort_keys=True)
        drafts = f" {row['drafts']}" if row["engine"] == THEIRS and row.get("drafts") else ""
        cases.setdefault((row["engine"], str(row.get("engine_version")), settings), {})[f"{row['model']} {row['method']}{drafts}"] = None
    told = [f"- {NAMES[engine]} {version}, {', '.join(of)}: `{settings}`" for (engine, version, settings), of in cases.items()]
    return [*lines, "", *told]
