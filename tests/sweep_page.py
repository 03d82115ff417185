"""Generated parts of the user's guide: the tables of docs/guide/models.md and the counts of docs/guide/output.md, from
the rows that `sweep.py` writes and the adapters of fastspec.

A page holds a part between `<!-- made: NAME -->` and `<!-- end: NAME -->`; `filled` writes it anew.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastspec.patches.hf.families import ADAPTERS, Adapter

Row = dict[str, Any]
CAUSAL, VISION, SOURCE = "causal-lm", "image-text", "encoder-decoder"
WRONG = "differs", "raises", "stuck"
KINDS = "wrong", "refused", "generic", "adapter", "untried"
"""Kinds of rows, the worst first."""
FAMILIES = {
    "Apertus": ("apertus",),
    "Arcee": ("arcee",),
    "Aria": ("aria_text",),
    "Command R, R7B and A, Aya": ("cohere", "cohere2"),
    "CWM": ("cwm",),
    "dots.llm1": ("dots1",),
    "Emu3": ("emu3_text_model",),
    "ERNIE 4.5": ("ernie4_5", "ernie4_5_moe"),
    "EXAONE 4": ("exaone4",),
    "Gemma 1 to 4, VaultGemma": (
        *("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "vaultgemma"),
    ),
    "GLM-4, GLM-4.5 to 4.7": ("glm", "glm4", "glm4_moe"),
    "gpt-oss": ("gpt_oss",),
    "Granite": ("granite", "granitemoe"),
    "Helium": ("helium",),
    "HyperCLOVA X": ("hyperclovax",),
    "InternLM3": ("internlm3",),
    "IQuest-Coder": ("iquestcoder",),
    "Jais 2": ("jais2",),
    "Llama 2 to 4": ("llama", "llama4_text"),
    "MiniMax-M2": ("minimax_m2",),
    "Mistral, Ministral, Mixtral": ("mistral", "ministral", "ministral3", "mixtral"),
    "Nemotron": ("nemotron",),
    "OLMo, OLMoE, FlexOlmo": ("olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "flex_olmo"),
    "Phi-1 to Phi-4": ("phi", "phi3"),
    "Qwen2, Qwen2.5": ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"),
    "Qwen3": ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"),
    "Qwen3.5, Qwen3.6, Qwen3-Next": ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    "Seed-OSS": ("seed_oss",),
    "SmolLM3": ("smollm3",),
    "Solar Open": ("solar_open",),
    "StableLM": ("stablelm",),
    "Starcoder2": ("starcoder2",),
}
"""A family's published name -> the adapters of its decoders, all of fastspec's together."""
REASONS = {
    "keeps a recurrent state": "a recurrent state other than Gated DeltaNet's, which no draft may change",
    "has layers of type": "layers without a full KV cache (convolutions, sparse indices, linear attention)",
    "forward takes no": "no positions or no cache can be given to a pass",
    "scores the nodes of a draft tree otherwise": "positions or masks are read in a way of its own, seen by trial",
    "does not run as fastspec has to run it": "no 4-D mask can be given to a pass",
    "is an encoder-decoder model of type": "an encoder-decoder whose decoder is not known",
    "is more than one stack of layers": "more than one stack of layers",
    "generates by a loop of its own": "a generation loop of its own",
    "has no generate method": "no `generate`",
}
"""Words of a refusal -> why, in the page's words."""


def read(path: Path) -> tuple[dict[str, str], list[Row]]:
    """The versions and the rows of a file."""
    first, *rest = map(json.loads, path.read_text().splitlines())
    return first, rest


def filled(text: str, versions: dict[str, str], rows: Sequence[Row]) -> str:
    """A page with its generated parts made anew."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{PARTS[found[2]](versions, rows)}\n\n{found[3]}"

    return re.sub(r"(<!-- made: (\w+) -->)\n.*?\n(<!-- end: \2 -->)", made, text, flags=re.DOTALL)


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many classes there are of each of KINDS, each counted by its worst row; by model type where no model could be
    made."""
    kinds = defaultdict(set)
    for each in rows:
        kinds[each["model_type"] if each["class"] == "-" else each["class"]].add(_kind(each))
    worst = [min(found, key=KINDS.index) for found in kinds.values()]
    return {kind: worst.count(kind) for kind in KINDS}


def _kind(row: Row) -> str:
    if row["outcome"] == "equal":
        return "generic" if row["mode"].startswith("generic") else "adapter"
    if row["outcome"] in WRONG:
        return "wrong"
    return "refused" if row["outcome"] == "refused" else "untried"


def _counted(versions: dict[str, str], rows: Sequence[Row]) -> str:
    found = counts(rows)
    equal = found["adapter"] + found["generic"]
    return (
        f"**Of the classes that transformers {versions['transformers']} lists for text generation {equal} give the "
        f"tokens of plain `generate`, {found['refused']} are refused by name, and {found['wrong'] or 'none'} give "
        "anything else.**"
    )


def _families(versions: dict[str, str], rows: Sequence[Row]) -> str:
    own = defaultdict(list)
    for each in rows:
        if _kind(each) == "adapter" and each["mapping"] != SOURCE:
            own[each["mode"].partition(" (")[0].rpartition(" ")[2]].append(each)
    lines = ["| family | text, `model_type` | with a vision encoder |", "|---|---|---|"]
    for name, adapters in FAMILIES.items():
        mine = [each for adapter in adapters for each in own[adapter]]
        vision = {each["model_type"] for each in mine if each["mapping"] == VISION}
        text = [each for each in mine if each["model_type"] not in vision]
        seen = [each for each in mine if each["mapping"] == VISION]
        lines.append(f"| {name} | {_types(text, _layers)} | {_types(seen, _images)} |")
    return "\n".join(lines)


def _types(rows: Iterable[Row], mark: Callable[[Row], str]) -> str:
    """Model types in alphabetical order, each with its marks."""
    return ", ".join(sorted({f"`{each['model_type']}`{mark(each)}" for each in rows}))


def _layers(row: Row) -> str:
    adapter: Adapter = ADAPTERS[row["mode"].partition(" (")[0].rpartition(" ")[2]]
    marks = {
        "E": adapter.mixture is not None or bool(adapter.experts),
        "W": bool(row.get("outgrown")),
        "R": bool(adapter.recurrent),
    }
    found = "".join(letter for letter, holds in marks.items() if holds)
    return f" {found}" if found else ""


def _images(row: Row) -> str:
    return " I" if row.get("images") == "equal" else ""


def _generic(versions: dict[str, str], rows: Sequence[Row]) -> str:
    own = [each for each in rows if _kind(each) == "generic"]
    seen = {each["model_type"] for each in own if each.get("images") == "equal"}
    parts = [[each for each in own if (each["model_type"] in seen) is wanted] for wanted in (True, False)]
    cells = [_types(part, lambda row: "") for part in parts]
    return "\n".join(["| prompts with images were compared | others |", "|---|---|", f"| {' | '.join(cells)} |"])


def _sources(versions: dict[str, str], rows: Sequence[Row]) -> str:
    return _types((each for each in rows if each["mapping"] == SOURCE and each["outcome"] == "equal"), lambda row: "")


def _refused(versions: dict[str, str], rows: Sequence[Row]) -> str:
    groups = defaultdict(list)
    for each in rows:
        if each["outcome"] == "refused":
            groups[next(why for words, why in REASONS.items() if words in each["reason"])].append(each)
    lines = ["| refused for | `model_type` |", "|---|---|"]
    lines += [f"| {why} | {_types(groups[why], lambda row: '')} |" for why in REASONS.values()]
    return "\n".join(lines)


def _untried(versions: dict[str, str], rows: Sequence[Row]) -> str:
    return _types((each for each in rows if _kind(each) == "untried"), lambda row: "")


PARTS: dict[str, Callable[[dict[str, str], Sequence[Row]], str]] = {
    "counts": _counted,
    "families": _families,
    "generic": _generic,
    "sources": _sources,
    "refused": _refused,
    "untried": _untried,
}
