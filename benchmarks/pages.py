"""The tables of the pages: figures of committed rows, the trees of config.py, and the options of training.

    python benchmarks/pages.py             # writes them into the pages of docs/, and names those that changed

A page says where a table stands: between `<!-- table: NAME -->` and `<!-- end -->`, by a name of `TABLES`. A figure is
one of `benchmarks/results/`, each table a function of its rows, which a row of the table links.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from decimal import ROUND_HALF_UP, Decimal
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import typer
from common import Row, read

from fastspec.default_trees import BATCH_TREES, CPP_TREE, DEFAULT_TREES, SAMPLED_DEPTHS, TreeShape
from fastspec.programs.cli.app import app
from fastspec.programs.cli.heads import FIELD_OF
from fastspec.programs.training import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STORED = {"dense": "bf16", "int8": "int8", "fp8": "FP8 in blocks", "gptq": "4 bits, groups of 128 (GPTQ)", "nf4": "nf4"}
SETS = {"mt_bench": "MT-bench", "humaneval": "HumanEval", "mbpp": "MBPP", "gsm8k": "GSM8K"}
SETS |= {"qa": "questions", "sum": "summaries"}
"""Set of prompts -> its name on a page."""
SMOLLM2_SETS = ("mt_bench", "humaneval", "gsm8k", "qa", "sum")
NAMES = {
    "smollm2-135m-instruct": "SmolLM2-135M",
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B",
    "qwen2-1.5b": "Qwen2-1.5B shape",
    "llama-8b": "Llama-3.1-8B shape",
    "llama-8b-fp8": "Llama-3.1-8B shape, FP8",
    "llama-70b": "Llama-3.1-70B shape",
    "qwen3-8b": "Qwen3-8B shape",
    "mixtral-8x7b": "Mixtral-8x7B shape",
    "gemma3-12b": "Gemma-3-12B shape",
    "qwen3.5-9b": "Qwen3.5-9B shape",
    "qwen3.6-27b": "Qwen3.6-27B shape",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B shape",
    "gpt-oss-20b": "gpt-oss-20b shape",
    "qwen3-30b-a3b": "Qwen3-30B-A3B shape",
    "smollm2-135m": "SmolLM2-135M shape",
}
"""Model of a row -> its name on a page; a shape has random weights."""
LABELS = {"speculative": "`speculative` by SmolLM2", "static-compile": "static cache, compiled forward"}
LABELS |= {"transformers": "`generate`", "assisted": "assisted generation"}
"""Method -> its name on a page, where that is not its own."""


@cache
def of(file: str) -> tuple[Row, ...]:
    """The rows of a file."""
    return tuple(read(RESULTS / f"{file}.jsonl"))


def rows(file: str, **wanted: Any) -> list[Row]:
    """The rows of a file that have these values."""
    return [row for row in of(file) if all(row.get(name) == value for name, value in wanted.items())]


def one(file: str, **wanted: Any) -> Row:
    """The row of a file that has these values; KeyError where there is none, or another."""
    found = rows(file, **wanted)
    if len(found) != 1:
        raise KeyError(f"{file}: {len(found)} rows have {wanted}")
    return found[0]


def number(value: float) -> str:
    """A figure as it stands on a page: three digits at least, thousands apart."""
    return shown(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def shown(value: float, digits: int = 0) -> str:
    """A figure with so many digits after the point, halves rounded up."""
    return f"{Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def length_and_speed(row: Row) -> str:
    return f"{shown(row['acceptance_length'], 2)}, {shown(row['tokens_per_second'])}"


def link(file: str) -> str:
    return f"[rows](../../benchmarks/results/{file}.jsonl)"


def markdown(heads: Sequence[str], cells: Iterable[Sequence[Any]]) -> str:
    """A table, its first column on the left and the others as they come."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def expect() -> str:
    """What to expect: real models by medians over prompts, shapes by the time of a round."""
    cells: list[list[str]] = []
    smol, qwen = "SmolLM2-135M", "Qwen2.5-Coder-1.5B"
    usual = "transformers", "autoregressive", "nasd", "eagle3"

    def tell(model: str, place: str, method: str, figures: Sequence[str], file: str) -> None:
        cells.append([model, place, name_of(method), *figures, link(file)])

    for model, place, file, methods in (
        (f"{smol}, fp32", "two CPU cores", "bench_cpu", usual),
        (f"{qwen}, fp32", "two CPU cores", "bench_pair_cpu", ("transformers", "autoregressive", "speculative")),
        (f"{smol}, bf16", "H200", "bench_h200", ("transformers", "static-compile", *usual[1:])),
        (f"{qwen}, bf16", "H100", "bench_qwen_all_h100", usual),
    ):
        for method in methods:
            length, ms, speed, ratio = (
                sorted(row[name] for row in rows(file, batch=1, method=method))
                for name in ("acceptance_length", "ms_per_round", "tokens_per_second", "ratio")
            )
            spread = f"{shown(median(ratio), 1)} ({shown(ratio[0], 1)} to {shown(ratio[-1], 1)})"
            times = "1" if method == "transformers" else spread
            accepted = "1" if length[-1] == 1 else shown(median(length), 2)
            tell(model, place, method, [accepted, number(median(ms)), number(median(speed)), times], file)
    for shape in ("llama-8b", "gemma3-12b", "qwen3.5-9b", "gpt-oss-20b", "qwen3-30b-a3b"):
        first = shape == "llama-8b"
        file, wanted = f"full_size{'' if first else '_models'}_h200", {"shape": shape, "batch": 1, "prefix": 2048}
        plain = one(file, method="transformers", **wanted)["round_ms"]
        for method in (*(("transformers", "static-compile") if first else ()), "autoregressive", "eagle3"):
            ms = one(file, method=method, **wanted)["round_ms"]
            tell(f"{NAMES[shape]}, bf16", "H200", method, timed(method, ms, plain), file)
    for weights in ("int8", "fp8", "gptq"):
        figures = timed("autoregressive", stored_row(weights, "autoregressive")["round_ms"], None)
        tell(f"{NAMES['llama-8b']}, {STORED[weights]}", "H200", "autoregressive", figures, "stored_h200")
    for file, count, shape, launches, drafting in (
        ("parallel_h200", "two", "llama-8b", "shipped", {}),
        ("parallel_h200", "two", "llama-70b", "tuned", {}),
        ("parallel_four_h200", "four", "llama-8b", "shipped", {"norms": "owners"}),
        ("parallel_four_h200", "four", "llama-70b", "shipped", {}),
        ("parallel_four_h200", "four", "qwen3-30b-a3b", "shipped", {}),
    ):
        wanted = {"shape": shape} if count == "two" else {"shape": shape, "processes": 4, "batch": 1, "prefix": 2048}
        plain = one(file, method="transformers", **wanted)["round_ms"]
        for method, more in (("autoregressive", {}), ("eagle3", drafting)):
            ms = one(file, method=method, launches=launches, **wanted, **more)["round_ms"]
            tell(f"{NAMES[shape]}, bf16", f"{count} H200", method, timed(method, ms, plain), file)
    told = [cells[0], *(new if new[:2] != old[:2] else ["", "", *new[2:]] for old, new in pairwise(cells))]
    heads = ["model", "device", "with", "tokens a round", "ms a round", "tokens/s", "times `generate`", "rows"]
    return markdown(heads, told)


def name_of(method: str) -> str:
    return LABELS.get(method, f"`{method}`")


def timed(method: str, ms: float, plain: float | None) -> list[str]:
    """The figures of a shape: of a head, whose tokens a round are its own, the time of a round alone."""
    if method == "eagle3":
        return ["A", shown(ms, 2), f"A · {number(1e3 / ms)}", f"A · {plain / ms:.1f}" if plain else ""]
    times = f"{plain / ms:.1f}" if plain and method != "transformers" else "1" if method == "transformers" else ""
    return ["1", shown(ms, 2), number(1e3 / ms), times]


def demo() -> str:
    """The demo on two cores, by processor, instructions and kernels: the range of runs."""
    cells = []
    zen3, zen4, zen5 = (f"AMD EPYC (Zen {number})" for number in (3, 4, 5))
    for said, device, kernels, more in (
        (f"{zen4}, AVX-512", zen4, "cpp", {"instructions": "AVX512", "commit": "d83bb80"}),
        (f"{zen4}, held to AVX2", zen4, "cpp", {"instructions": "AVX2", "commit": "d83bb80"}),
        (f"{zen3}, AVX2 alone", zen3, "cpp", {}),
        (f"{zen5}, AVX-512", zen5, "torch", {"instructions": "AVX512"}),
        (f"{zen3}, AVX2 alone", zen3, "torch", {}),
    ):
        wanted = {"device": device, "kernels": kernels, **more}
        found = [rows("demo_cpu", method=name, **wanted) for name in ("autoregressive", "eagle3")]
        ratios = [span(row["ratio"] for row in each) for each in found]
        cells.append([said, {"cpp": "C++", "torch": "plain torch"}[kernels], len(found[0]), *ratios])
    return markdown(["processor", "kernels", "runs", "`autoregressive`", "`eagle3`"], cells)


def span(values: Iterable[float]) -> str:
    """The least and the most of some figures."""
    found = sorted(values)
    return f"{shown(found[0], 2)} to {shown(found[-1], 2)}" if len(found) > 1 else shown(found[0], 2)


def trees() -> str:
    """The trees that calls take by default."""

    def cells(where: str, tree: TreeShape) -> list[Any]:
        return [where, tree.total_tokens, tree.depth, tree.top_k]

    found = [cells("CPU", DEFAULT_TREES["cpu"]), cells("CPU, C++ kernels, `eagle3`", CPP_TREE)]
    found += [cells("GPU", DEFAULT_TREES["cuda"])]
    found += [cells(f"GPU, {least} rows and more", tree) for least, tree in BATCH_TREES["cuda"]]
    for least, depth in SAMPLED_DEPTHS:
        said = f"sampling at a temperature of {least:g} and more" if least else "sampling below that"
        found.append([said, "as above", f"{depth} at the most", "as above"])
    return markdown(["where", "nodes", "depth", "top-k"], found)


def batches() -> str:
    """MT-bench's 80 prompts by the rows that are decoded at a time."""
    cells = []
    for said, batch, at_a_time, tree in (
        ("1", 1, 1, [60, 7, 10]),
        ("8, in ten batches", 8, 8, [32, 6, 8]),
        ("8, `ContinuousBatch`", 80, 8, [32, 6, 8]),
        ("16, `ContinuousBatch`", 80, 16, [32, 6, 8]),
        ("80, one batch", 80, 80, [32, 6, 8]),
    ):
        wanted = {"count": 80, "batch": batch, "rows": at_a_time, "commit": "38783ba"}
        plain = one("speed_h200", assistant="autoregressive", **wanted)
        head = rows("speed_h200", assistant="eagle3", tree=tree, **wanted)[0]
        both = (f"{shown(row['tokens_per_second'])} ({row['rows_running']:.0%})" for row in (plain, head))
        cells.append([said, *both])
    return markdown(["rows at a time", "`autoregressive`", "`eagle3`"], cells)


def batch_trees() -> str:
    """Trees of batches of many rows: SmolLM2 as it is, and rounds of the 1.5B shape with the same trees."""
    cells = []
    for row in rows("batch_trees_h100", model="smollm2-135m-instruct"):
        other = rows("batch_trees_h100", model="qwen2-1.5b", rows=row["rows"], tree=row["tree"])
        ms = shown(other[0]["round_ms"], 2) if other else ""
        per_ms = shown(row["acceptance_length"] / other[0]["round_ms"], 2) if other else ""
        default = next(tree for least, tree in reversed(BATCH_TREES["cuda"]) if row["rows"] >= least)
        tree = row["tree"].replace(",", ", ")
        if row["tree"] == f"{default.total_tokens},{default.depth},{default.top_k}":
            tree = f"**{tree}**"
        speed = [shown(row["tokens_per_second"]), shown(row["acceptance_length"], 2), shown(row["round_ms"], 2)]
        cells.append([row["rows"], tree, *speed, ms, per_ms])
    heads = ["rows", "nodes, depth, top-k", "SmolLM2, tokens/s", "tokens a round", "ms a round"]
    return markdown([*heads, "1.5B shape, ms a round", "tokens a ms"], cells)


def sampling() -> str:
    """Acceptance length and tokens per second by temperature and depth, trees of 60 nodes."""
    cells = []
    for temperature, depth in product((1.0, 0.6, None), (7, 5, 4, 3)):
        wanted = {"tree": [60, depth, 10], "temperature": temperature}
        sets = ("mt_bench", "humaneval", "gsm8k")
        found = [rows("sampled_trees_h100", prompts=name, **wanted)[0] for name in sets]
        said = "greedy" if temperature is None else f"{temperature:g}"
        cells.append([said, depth, *map(length_and_speed, found)])
    return markdown(["temperature", "depth", "MT-bench", "HumanEval", "GSM8K"], cells)


SERVED = {"vllm": "vLLM", "fastspec-autoregressive": "fastspec, no drafts", "fastspec": "fastspec"}
SERVED |= {"vllm-eagle3-3": "vLLM, EAGLE-3", "fastspec-eagle3": "fastspec, EAGLE-3", "fastspec-oracle": "an oracle"}
"""A server's name in the rows -> what runs there."""


def servers(files: Sequence[str] = ("serving_h100", "serving_qwen_h100")) -> str:
    """Tokens per second of servers by requests in flight; of streams and chats the times to first tokens too."""
    cells, cases = [], dict[tuple[Any, ...], dict[str, Row]]()
    for row in (row for file in files for row in rows(file) if row["way"] != "long"):
        cases.setdefault((row["model"], row["way"], row["in_flight"]), {})[row["server"]] = row
    names = [name for name in SERVED if any(name in found for found in cases.values())]
    for (model, way, in_flight), found in cases.items():
        line = [NAMES.get(model, model), way, str(in_flight)]
        cells.append([*line, *(served(found[name]) if name in found else "" for name in names)])
    return markdown(["", "answers", "in flight", *(SERVED[name] for name in names)], cells)


def served(row: Row) -> str:
    turns = row.get("first_token_by_turn_ms")
    first = [turns[0], turns[-1]] if turns else row["first_token_ms"][1:2] if row["streamed"] else []
    return ", ".join([shown(row["tokens_per_second"]), *(f"{shown(ms)} ms" for ms in first)])


def peers_served() -> str:
    """The same of servers on a CPU, by what was asked; of chats the first tokens of the first and the last turn."""
    cells, servers = [], ("transformers", "fastspec", "fastspec-eagle3")
    for row in rows("serving_peers_cpu", server=servers[0]):
        case = {"way": row["way"], "in_flight": row["in_flight"]}
        cells.append([*case.values(), *(served(rows("serving_peers_cpu", server=each, **case)[0]) for each in servers)])
    return markdown(["asked", "in flight", "`transformers serve`", "`autoregressive`", "`eagle3`"], cells)


def served_cascade() -> str:
    """Requests a second and times of a served cascade and of its large stage alone, by requests in flight."""
    cells = []
    for row in of("serving_cascade_cpu"):
        told = [row["in_flight"], row["server"], shown(row["requests"] / row["seconds"], 2)]
        told += [f"{shown(row[f'{name}_ms'][1])}, {shown(row[f'{name}_95_ms'])}" for name in ("first_token", "answer")]
        stages = row["stages"] or {"large": 1.0}
        cells.append([*told, f"{shown(100 * stages.get('small', 0.0))} %", f"{shown(100 * row['equal'])} %"])
    return markdown(["in flight", "", "requests/s", "first token, ms", "answer, ms", "small answers", "equal"], cells)


PEERS = ("peers_h200", "peers_h100")
Case = tuple[str, int, int | None, str]


def peer_cases(measured: Iterable[Row]) -> dict[Case, tuple[Row, list[Row]]]:
    """(model, rows, tokens before, method) -> fastspec's row and vLLM's, of the last commit that measured both."""
    found: dict[Case, dict[str, list[Row]]] = {}
    for row in measured:
        case = row["model"], row["rows"], row.get("before"), row["method"]
        found.setdefault(case, {}).setdefault(row["commit"], []).append(row)
    cases = {}
    for case, commits in found.items():
        for both in reversed(commits.values()):
            ours = [row for row in both if row["engine"] == "fastspec"]
            theirs = [row for row in both if row["engine"] == "vllm"]
            if ours and theirs:
                cases[case] = ours[-1], theirs
                break
    order = list(NAMES)
    return {case: cases[case] for case in sorted(cases, key=lambda it: (order.index(it[0]), it[3], it[2] or 0, it[1]))}


def peer_figure(ours: Row, theirs: Row) -> tuple[str, str, float]:
    """(fastspec's figure, vLLM's, the ratio that is above 1 where fastspec is faster)."""
    name, unit = ("tokens_per_second", "") if "tokens_per_second" in ours else ("round_ms", " ms")
    here, there = ours[name], theirs[name]
    return f"{number(here)}{unit}", f"{number(there)}{unit}", there / here if unit else here / there


def case_name(case: Case, theirs: Row) -> tuple[str, str, str]:
    """(model and method, rows, tokens before) of a case, as a page and the picture name it."""
    model, count, before, method = case
    said = NAMES[model]
    if method == "eagle3" and before is None:
        said += f", EAGLE-3 (vLLM: chains of {theirs['drafts']})"
    elif method == "eagle3":
        said += f", a round (vLLM: a chain of {theirs['drafts']})"
    return said, f"{count:,}", "prompts" if before is None else f"{before:,}"


def peers(file: str) -> str:
    cells = []
    for case, (ours, theirs) in peer_cases(of(file)).items():
        for row in theirs:
            here, there, ratio = peer_figure(ours, row)
            cells.append([*case_name(case, row), there, here, shown(ratio, 2)])
    return markdown(["", "rows", "tokens before", "vLLM", "fastspec", "ratio"], cells)


def first_token(case: Case, ours: Row, theirs: Row) -> tuple[str, str, str, float]:
    """(model, vLLM's milliseconds to the first token, fastspec's, their ratio)."""
    here, there = 1e3 * ours["first_token_s"], 1e3 * theirs["first_token_s"]
    said = NAMES[case[0]] + (", with a head" if case[3] == "eagle3" else "")
    return said, number(there), number(here), there / here


def first_tokens() -> str:
    """Seconds to the first token."""
    cells = []
    for file in PEERS:
        for case, (ours, theirs) in peer_cases(of(file)).items():
            if "first_token_s" in ours and "first_token_s" in theirs[0]:
                said, *ms, ratio = first_token(case, ours, theirs[0])
                where = ["H200" if "200" in ours["device"] else "H100", said, f"{case[2]:,}"]
                cells.append([*where, *ms, shown(ratio, 2)])
    return markdown(["", "", "tokens before", "vLLM, ms", "fastspec, ms", "ratio"], cells)


def head_sets(file: str, stem: str = "", digits: int = 2, **wanted: Any) -> list[str]:
    """Acceptance length of a head of SmolLM2 on its sets of prompts."""
    return [shown(one(file, prompts=f"{stem}{name}", **wanted)["acceptance_length"], digits) for name in SMOLLM2_SETS]


def on_sets(cells: Iterable[Sequence[Any]], sets: Sequence[str] = SMOLLM2_SETS) -> str:
    """A table of figures on sets of prompts."""
    return markdown(["", *(SETS[name] for name in sets)], cells)


def smollm2_heads() -> str:
    """Acceptance length of the head that ships, and of the one before it."""
    cells = []
    ships = "smollm2-135m-instruct"
    for said, head in (("the head", ships), ("without norms", f"{ships}, as it was before, without norms")):
        for depth in (7, 9):
            figures = head_sets("head_smollm2_h100", head=head, tree=[60, depth, 10], batch=40, dtype="bfloat16")
            cells.append([f"{said}, depth {depth}", *figures])
    return on_sets(cells)


def head_bits() -> str:
    """Acceptance length of the head that ships, in its own dtype and in 8 bits."""
    return on_sets(
        [f"`head_bits={bits}`", *head_sets("head_bits_cpu", "eval_eagle_", 3, head_bits=bits)] for bits in (16, 8)
    )


def stored_row(weights: str, method: str, bits: int | None = None) -> Row:
    """The row of an 8B shape with weights stored so, one row."""
    wanted = {"shape": "llama-8b", "weights": weights, "batch": 1, "nodes": 60 if method == "eagle3" else 1}
    return one("stored_h200", method=method, head_bits=bits, **wanted)


def stored() -> str:
    """Milliseconds of an 8B shape by how its weights are stored."""
    cells = []
    for weights, said in STORED.items():
        ways = (("autoregressive", None), ("eagle3", 16), ("eagle3", 8))
        first = shown(stored_row(weights, "autoregressive")["prefill_ms"], 0)
        cells.append([said, first, *(shown(stored_row(weights, *way)["round_ms"], 2) for way in ways)])
    return markdown(["", "the prompt", "a token", "a round of `eagle3`", "with `head_bits=8`"], cells)


def eagle_head() -> str:
    """Acceptance length of the head of EAGLE-1's and EAGLE-2's format that ships."""
    wanted = {"count": 40, "max_new_tokens": 128, "commit": "a4b6162", "batch": 40}
    both = ("eagle2", "eagle")
    return on_sets([f"`{each}`", *head_sets("lossless_h200", "eval_eagle_", assistant=each, **wanted)] for each in both)


def qwen_head() -> str:
    """Acceptance length and tokens per second of the head for a real 1.5B model."""
    cells, sets = [], ("humaneval", "mbpp", "gsm8k", "mt_bench")
    for tree in ([60, 7, 10], [60, 9, 10], [40, 7, 10]):
        found = [one("head_qwen_all_h100", prompts=name, tree=tree) for name in sets]
        cells.append([f"{tree[0]} nodes, depth {tree[1]}", *map(length_and_speed, found)])
    return on_sets(cells, sets)


def floors() -> str:
    """Rounds of shapes beside the time of reading once what they need."""
    cells = []
    for file in ("full_size_h200", "full_size_models_h200"):
        for row in of(file):
            if row["method"] in ("autoregressive", "eagle3") and row.get("nodes") is not None:
                found, head = [row["floor_ms"]], row.get("drafter_read_bytes")
                found += [row["floor_ms"] + head / row["read_gb_per_s"] / 1e6] if head else []
                floors = [f"{shown(each, 2)} ({shown(row['round_ms'] / each, 2)})" for each in found]
                where = [NAMES[row["shape"]], f"{row['prefix']:,}", row["batch"], name_of(row["method"])]
                cells.append([*where, shown(row["round_ms"], 2), *floors, *[""] * (2 - len(floors))])
    return markdown(["", "tokens before", "rows", "", "ms a round", "floor (floors a round)", "with the head's"], cells)


def portable() -> str:
    """Hopper's kernels beside those of other GPUs, on one GPU."""
    cells = []
    for method in ("autoregressive", "eagle3"):
        here, there = (one("full_size_portable_h100", method=method, portable=way)["round_ms"] for way in (False, True))
        cells.append([name_of(method), shown(here, 2), shown(there, 2), shown(there / here, 2)])
    return markdown(["ms a round", "Hopper's", "portable", "ratio"], cells)


def prompt_parts() -> str:
    """Milliseconds of a prefill by the tokens that are read at once."""
    widths = sorted({row["part"] for row in of("long_prompt_parts_h200")})
    cells = []
    for shape, prompt in dict.fromkeys((row["shape"], row["prompt"]) for row in of("long_prompt_parts_h200")):
        line: list[str] = [f"{NAMES[shape]}, {prompt:,}"]
        for part in widths:
            wanted = {"shape": shape, "prompt": prompt, "part": part}
            found = [rows("long_prompt_parts_h200", method=name, **wanted) for name in ("autoregressive", "eagle3")]
            line.append(" / ".join(shown(1e3 * each[-1]["prefill_again_s"]) for each in found if each))
        cells.append(line)
    return markdown(["`autoregressive` / `eagle3`, ms", *(f"{width:,}" for width in widths)], cells)


def exact() -> str:
    """Answers equal to those of `autoregressive` one at a time by the same kernels, and new tokens a second."""
    cells = []
    both = ("autoregressive", "eagle3")
    for batch, assistant in [(1, name) for name in (*both, "nasd")] + list(product((8, 40), both)):
        wanted = {"prompts": "mt_bench", "dtype": "bfloat16", "assistant": assistant, "batch": batch}
        found = [one("exact_h100", exact=way, **wanted) for way in (False, True)]
        where = "one at a time" if batch == 1 else f"batches of {batch}"
        equal = [f"{row['equal']} of {row['answers']}" for row in found]
        cells.append([f"`{assistant}`, {where}", *equal, *(shown(row["tokens_per_second"]) for row in found)])
    return markdown(["", "fast: equal", "exact: equal", "fast: tokens/s", "exact: tokens/s"], cells)


def exact_rounds() -> str:
    """Milliseconds of a round and of its prompts by the fast kernels, and how many times as long the same bits take."""
    found, cells = rows("exact_rounds_h200"), []
    for fast, same in zip(found[::2], found[1::2], strict=True):
        of, other = ([row[name] for name in ("shape", "method", "batch", "prefix", "sums")] for row in (fast, same))
        assert of[-1] == "fast" and other == [*of[:-1], "exact"]
        times = [(shown(fast[name], 2), shown(same[name] / fast[name], 2)) for name in ("round_ms", "prefill_ms")]
        cells.append([f"{of[0]}, `{of[1]}`", str(of[2]), shown(of[3]), *times[0], *times[1]])
    return markdown(["", "rows", "tokens before", "fast: ms", "exact", "prompts, fast: ms", "exact"], cells)


NO_FIELDS = ("device", "help", "model_option")
"""Options of `fastspec train` that are no fields of `TrainConfig`."""


def default_of(value: Any) -> str:
    """What a page says of a setting's default."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "required" if value is MISSING else str(value or "") if isinstance(value, str | tuple) else f"{value:g}"


def train_options() -> str:
    """The settings of a training run: those with an option and its help, then the fields of Python alone."""
    command: Any = typer.main.get_command(app)
    held = {field.name: field.default for field in fields(TrainConfig)}
    cells = []
    for option in command.commands["train"].params:
        if not option.hidden and option.name not in NO_FIELDS:
            label = option.metavar if option.param_type_name == "argument" else option.opts[0]
            cells.append([f"`{label}`", default_of(held.pop(FIELD_OF.get(option.name, option.name))), option.help])
    alone = ", ".join(f"`{name}={default!r}`" for name, default in held.items())
    return markdown(["option", "default", ""], cells) + f"\nIn Python alone: {alone}.\n"


MADE = (expect, demo, trees, train_options, batches, batch_trees, sampling, servers, served_cascade)
MADE += (peers_served, first_tokens, smollm2_heads, head_bits, stored, eagle_head, qwen_head, floors, portable)
MADE += (prompt_parts, exact, exact_rounds)
TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in MADE}
TABLES |= {file: partial(peers, file) for file in PEERS}
TABLES["servers_h200"] = partial(servers, ["serving_h200"])


def filled(text: str) -> str:
    """A page with its tables as the rows have them."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pages that are written")
    for page in sorted(parser.parse_args(arguments).out.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
