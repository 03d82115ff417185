"""docs/models.md, from the rows that `sweep.py` writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TITLES = {
    "causal-lm": "Causal language models",
    "image-text": "Vision-language models",
    "encoder-decoder": "Encoder-decoder models",
}
WRONG = "differs", "raises", "stuck"
COUNTED = {
    "adapter": "adapter",
    "generic": "generic mode",
    "refused": "refused by name",
    "wrong": "wrong",
    "untried": "not tried",
}
HEAD = """# Which models work

Every class that transformers {transformers} lists for text generation, tiny, with random weights in fp32, on the CPU (torch {torch}): what
`generate(assistant=...)` gives beside plain `generate`. `python tests/sweep.py` writes this page and
[its rows](../benchmarks/results/models.jsonl).

**{equal} classes give the same tokens, {refused} are refused by name, {wrong} give anything else.** A refusal is an `Unsupported` error of
`patch` or of the first call; the model itself goes on as before. [Patching](patching.md#which-models) says what the modes are.

"""  # noqa: E501
LEGEND = """The same tokens means: greedy, from every assistant that is named, for one text, for three texts in a batch with left padding,
and for a conversation of three turns of two texts, each on the cache that the last turn returned, the second turn by plain `generate`. Of
the assistants, the draft model of `speculative` nearly agrees with its target, so that drafts are accepted, and the head of `eagle3` is
random.

*Windows*: some layers see a window or chunk, which these texts outgrow. *Images*: prompts with random images give the same tokens too;
where there is nothing, images were not tried.
"""  # noqa: E501
ALL = ["autoregressive", "nasd", "speculative", "eagle3"]


def read(path: Path) -> tuple[dict[str, str], list[Row]]:
    """The versions and the rows of a file."""
    first, *rest = map(json.loads, path.read_text().splitlines())
    return first, rest


def page(versions: dict[str, str], rows: Sequence[Row]) -> str:
    """The whole page."""
    found = counts(rows)
    equal = found["adapter"] + found["generic"]
    out = [
        HEAD.format(**versions, equal=equal, refused=found["refused"], wrong=found["wrong"] or "none"),
        _summary(rows),
        LEGEND,
    ]
    for mapping, title in TITLES.items():
        own = [each for each in rows if each["mapping"] == mapping]
        if own:
            out += [
                f"\n## {title}\n\n",
                _equal(own),
                _failed(own, WRONG, "Wrong"),
                _failed(own, ("refused",), "Refused"),
                _untried(own),
            ]
    return "".join(out)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many classes there are of each kind in COUNTED, each counted by its worst row; by model type where no model
    could be made."""
    kinds = defaultdict(set)
    for each in rows:
        kinds[_name(each)].add(_kind(each))
    order = ["wrong", "refused", "generic", "adapter", "untried"]
    worst = [min(found, key=order.index) for found in kinds.values()]
    return {kind: worst.count(kind) for kind in COUNTED}


def _kind(row: Row) -> str:
    if row["outcome"] == "equal":
        return "generic" if row["mode"].startswith("generic") else "adapter"
    if row["outcome"] in WRONG:
        return "wrong"
    return "refused" if row["outcome"] == "refused" else "untried"


def _name(row: Row) -> str:
    return row["model_type"] if row["class"] == "-" else row["class"]


def _summary(rows: Sequence[Row]) -> str:
    lines = [f"| classes | {' | '.join(COUNTED.values())} |", "|---|" + "---|" * len(COUNTED)]
    for mapping, title in TITLES.items():
        found = counts([each for each in rows if each["mapping"] == mapping])
        if any(found.values()):
            lines.append(f"| {title} | {' | '.join(str(found[kind]) for kind in COUNTED)} |")
    return "\n".join(lines) + "\n\n"


def _equal(rows: Sequence[Row]) -> str:
    groups, notes = defaultdict(list), list[str]()
    for each in rows:
        if each["outcome"] == "equal":
            mode = each["mode"].partition(" (")[0].rpartition(" ")[2]
            windows, images = ("yes" if each.get(name) in (True, "equal") else "" for name in ("outgrown", "images"))
            mode = "*generic*" if mode == "generic" else mode
            groups[each["class"], mode, _assistants(each, notes), _turns(each, notes), windows, images].append(
                each["model_type"]
            )
    if not groups:
        return ""
    more = {
        place: name
        for place, name in ((3, "turns"), (4, "windows"), (5, "images"))
        if any(cells[place] for cells in groups)
    }
    header = ["class", "model types", "adapter", "assistants", *more.values()]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for cells, kinds in sorted(groups.items(), key=lambda item: (item[0][0].lower(), item[0])):
        shown = cells[0], ", ".join(f"`{kind}`" for kind in kinds), *cells[1:3], *(cells[place] for place in more)
        lines.append(f"| {' | '.join(shown)} |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(["Equal:\n", *lines, "", *numbered, *([""] if numbered else [])]) + "\n"


def _assistants(row: Row, notes: list[str]) -> str:
    """Those that gave the same, and by number why others did not run."""
    ran = row["assistants"]
    if "eagle3" not in row:
        return ", ".join(ran)
    return "all four" if ran == ALL else f"all but `eagle3` [{_note(row['eagle3'], row, notes)}]"


def _turns(row: Row, notes: list[str]) -> str:
    told = row.get("turns", "")
    return told if told in ("", "equal") else f"[{_note(told, row, notes)}]"


def _note(told: str, row: Row, notes: list[str]) -> int:
    words = told.replace(row["class"], "the model")
    if words not in notes:
        notes.append(words)
    return notes.index(words) + 1


def _failed(rows: Sequence[Row], outcomes: tuple[str, ...], title: str) -> str:
    """A line a reason, in the words of the error, with the classes in place of their own names."""
    groups = defaultdict(list)
    for each in rows:
        if each["outcome"] in outcomes:
            groups[each["reason"].replace(each["class"], "…"), each["outcome"]].append(each)
    if not groups:
        return ""
    lines = ["| classes | reason |", "|---|---|"]
    for (reason, outcome), own in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        names = ", ".join(dict.fromkeys(map(_name, own)))
        lines.append(f"| {names} | {'' if outcome == 'refused' else outcome + ': '}{_cell(reason)} |")
    return "\n".join([f"{title}:\n", *lines, "", ""])


def _untried(rows: Sequence[Row]) -> str:
    own = [each for each in rows if _kind(each) == "untried"]
    if not own:
        return ""
    why = "Not tried, since no tiny model could be made here or plain `generate` itself fails on text:\n"
    lines = [f"| `{each['model_type']}` | {_cell(each['reason'])} |" for each in own]
    return "\n".join([why, "| model type | why |", "|---|---|", *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
