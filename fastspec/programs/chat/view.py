"""Views of a chat: answers with marked tokens, columns, the table of a turn, draft trees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fastspec.cascade.decisions import Explanation
from fastspec.generation.stats import Stats
from fastspec.programs.chat.session import Answer, ChatTurn
from fastspec.programs.compare import ROUNDING, first_difference
from fastspec.programs.demo import MarkedStreamer
from fastspec.programs.terminal import table
from fastspec.programs.texts import ACCEPTED, BONUS, OWN, RECOVERED, own_mark

STYLES: dict[str, str | None] = {ACCEPTED: "bold green", RECOVERED: "bold yellow", BONUS: "bold cyan", OWN: None}
"""Mark -> style."""
COLUMN = 36
"""Characters of the screen's width that a column needs."""
PAUSE = 0.1
"""Seconds between two pictures; a terminal takes its time for each."""


@dataclass(frozen=True)
class RoundTree:
    """Draft tree of one round on the host: tokens and parents of the nodes, the accepted path as node ids, the token
    that the target added. `notes[i]` has the probabilities of node i's token, p by the target and q by the drafter
    where drafts were drawn; `notes[-1]` those of `last`."""

    tokens: list[int]
    parents: list[int]
    path: list[int]
    last: int
    notes: list[str] | None = None

    @property
    def mark(self) -> str:
        return own_mark(self.tokens, self.parents, self.path, self.last)


class AnswerStreamer(MarkedStreamer):
    """Streamer that prints tokens in the style of their marks, counts rounds (`stats`), and keeps their trees where
    asked to. `ids` and `marks` are what was printed, in `spent` seconds."""

    def __init__(self, tokenizer: Any, console: Console, *, trees: bool = False) -> None:
        super().__init__(tokenizer, console)
        self.trees: list[RoundTree] | None = [] if trees else None
        self.marks: list[str] = []
        self.spent = 0.0
        self.stats = Stats(rows=1)
        self._mark = OWN
        self._drafted: int | None = None

    def on_tree(self, tree: Any, verdict: Any, logits: Any) -> None:
        """One round's tree, verdict and target logits [1, N, V], before its tokens come."""
        start = time.perf_counter()
        found = read_round(tree, verdict, None if self.trees is None else logits)
        self._mark, self._drafted = found.mark, len(found.tokens) - 1
        if self.trees is not None:
            self.trees.append(found)
        self.spent += time.perf_counter() - start

    def on_round(self, tokens: list[int], accepted: int) -> None:
        """`tokens` of one round, the first `accepted` of them drafted, or the first token, before any round."""
        if self._drafted is not None:
            self.stats.count_rows([(len(tokens), accepted, self._drafted)], self._drafted > 0)
            self._drafted = None
        marks = [ACCEPTED if index < accepted else self._mark for index in range(len(tokens))]
        self.marks += marks
        self.styles.extend(STYLES[mark] for mark in marks)

    def put(self, value: Any) -> None:
        start = time.perf_counter()
        super().put(value)
        self.spent += time.perf_counter() - start


def read_round(tree: Any, verdict: Any, logits: Any = None) -> RoundTree:
    """The round of row 0 on the host, with probabilities where the target's raw logits [B, N, V] are given, and without
    the copies of siblings that fill a tree up."""
    tokens, parents = tree.tokens[0], tree.parents[0]
    path = verdict.path[0, : int(verdict.accepted[0]) + 1].tolist()
    last = int(verdict.bonus[0])
    notes = None
    if logits is not None:
        scores = logits[0].float().log_softmax(-1)
        p = [*scores[parents, tokens].exp().tolist(), float(scores[path[-1], last].exp())]
        q = [] if tree.q is None else tree.q[0].gather(1, tokens[:, None])[:, 0].tolist()
        notes = [f"p={x:.2f}" + (f" q={q[i]:.2f}" if i < len(q) else "") for i, x in enumerate(p)]
    return _without_copies(RoundTree(tokens.tolist(), parents.tolist(), path, last, notes))


def _without_copies(found: RoundTree) -> RoundTree:
    """The round without nodes that are equal to an earlier sibling, or below one; a node on the path stays."""
    number, seen = {0: 0}, set()  # node -> its number without copies
    for node in range(1, len(found.tokens)):
        parent, token = found.parents[node], found.tokens[node]
        if parent in number and ((parent, token) not in seen or node in found.path):
            seen.add((parent, token))
            number[node] = len(number)
    kept, notes = list(number), found.notes
    return RoundTree(
        [found.tokens[node] for node in kept],
        [number[found.parents[node]] for node in kept],
        [number[node] for node in found.path],
        found.last,
        None if notes is None else [notes[node] for node in (*kept, -1)],
    )


def legend() -> Text:
    said = {
        ACCEPTED: " drafts",
        RECOVERED: ": the target's own token in a rejected draft's place",
        BONUS: ": its own after a path that was accepted to the end",
    }
    coloured = [Text.assemble((mark, STYLES[mark] or ""), what) for mark, what in said.items()]
    return Text("; ").join([*coloured, Text("plain: no draft")])


def turn_table(turn: ChatTurn) -> Table:
    """One row per strategy, without the columns that are empty."""
    answers = turn.answers
    columns = {
        "strategy": [each.strategy + " (stopped)" * each.stopped for each in answers],
        "tokens": [str(len(each.tokens)) for each in answers],
        "seconds": [f"{each.seconds:.2f}" for each in answers],
        "tokens/s": [f"{each.tokens_per_second:.1f}" for each in answers],
        "acceptance\nlength": [
            "-" if each.acceptance_length is None else f"{each.acceptance_length:.2f}" for each in answers
        ],
        "accepted/\ndrafted": [f"{each.accepted}/{each.drafted}" if each.drafted else "-" for each in answers],
        "reused": [str(each.reused) for each in answers] if any(each.reused for each in answers) else [],
        "identical": [_agreement(turn, each) for each in answers],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return table(shown, zip(*shown.values(), strict=True))  # eight columns in a terminal of eighty


def _agreement(turn: ChatTurn, answer: Answer) -> str:
    same = turn.identical(answer)
    if same is not None:
        return "yes" if same else "no"
    if answer.exact or answer.stopped or not turn.settings.greedy or len(turn.answers) == 1:
        return ""
    return "mixture" if answer.explanation is None else f"stage {answer.explanation.stage}"


def verdict_line(turn: ChatTurn, dtype: str) -> str | None:
    """Agreement of the greedy answers, and those that are not compared; None where there is nothing to compare."""
    first, others = turn.reference, [answer for answer in turn.answers if turn.identical(answer) is not None]
    told = [_why_not_compared(answer) for answer in turn.answers if not answer.exact and _agreement(turn, answer)]
    if first is None or not others:
        return " ".join(told) or None
    parted = [answer for answer in others if not turn.identical(answer)]
    if parted:
        places = [(answer.strategy, (first_difference(answer.tokens, first.tokens) or 0) + 1) for answer in parted]
        why = "" if dtype == "float32" else f" (in {dtype} {ROUNDING})"
        verdict = "; ".join(f"{name} differs from {first.strategy} from token {at} on" for name, at in places) + why
    else:
        names = f" of {', '.join(answer.strategy for answer in (first, *others))}" if told else ""
        verdict = f"The {len(others) + 1} greedy answers{names} are identical, token for token"
    return " ".join([f"{verdict}.", *told])


def _why_not_compared(answer: Answer) -> str:
    if answer.explanation is None:
        return f"{answer.strategy} is not compared: its tokens follow a mixture of two models."
    who = answer.explanation.visits[-1]
    return f"{answer.strategy} is not compared: its stage {who.stage}, {who.name}, answered, not the large model."


def stage_tree(explanation: Explanation) -> Tree:
    """Decisions of a cascade, a line for each stage that it came to, the one that answered marked."""
    *_, last = lines = str(explanation).splitlines()
    tree = Tree(f"cascade: stage {explanation.stage} answered, {explanation.reused} tokens were taken over")
    for line in lines:
        tree.add(Text(line, STYLES[ACCEPTED] or "" if line is last else "dim"))
    return tree


def round_tree(tokenizer: Any, number: int, found: RoundTree) -> Tree:
    """Draft tree of a round with the notes of its nodes, the accepted path marked, and the target's own token."""

    def label(token: int, index: int, style: str, mark: str = "") -> Text:
        note = found.notes[index] if found.notes else ""
        return Text.assemble((repr(tokenizer.decode([token])), style), f" {note}", f" <- {mark}" if mark else "")

    def close(node: int) -> None:
        if node == found.path[-1]:
            at[node].add(label(found.last, -1, STYLES[found.mark] or "bold", found.mark))

    drafted, accepted = len(found.tokens) - 1, len(found.path) - 1
    root = repr(tokenizer.decode(found.tokens[:1]))
    at = {0: Tree(f"round {number}: {accepted} of {drafted} drafted tokens accepted, after {root}")}
    close(0)
    for node in range(1, len(found.tokens)):
        style, mark = (STYLES[ACCEPTED] or "", ACCEPTED) if node in found.path else ("dim", "")
        at[node] = at[found.parents[node]].add(label(found.tokens[node], node, style, mark))
        close(node)
    return at[0]


class Columns:
    """Context manager that draws texts beside each other; they stay as they are at its end."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self.texts = {name: Text() for name in names}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
        for name in names:
            table.add_column(escape(name), ratio=1, overflow="fold")
        table.add_row(*self.texts.values())
        self.live = Live(table, console=console, auto_refresh=False)
        self._drawn = 0.0

    def __enter__(self) -> Columns:
        self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.live.stop()  # draws what was added since the last picture

    def add(self, name: str, text: Text) -> None:
        self.texts[name].append_text(text)
        now = time.perf_counter()
        if now - self._drawn > PAUSE:
            self.live.refresh()
            self._drawn = now


class Column:
    """A column as a streamer's console: `print` as far as streamers use it."""

    def __init__(self, columns: Columns, name: str) -> None:
        self.columns, self.name = columns, name

    def print(self, text: str = "", *, style: str | None = None, end: str = "\n", **_: Any) -> None:
        self.columns.add(self.name, Text(text + end, style or ""))
