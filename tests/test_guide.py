"""The user's guide says what the code and the rows have: fields of assistants, default trees, commands of the chat,
settings of the environment, errors, figures."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import fields
from typing import Any

from helpers.pages import FENCE, ROOT

import fastspec
from fastspec import errors
from fastspec.default_trees import BATCH_TREES, CPP_TREE, DEFAULT_TREES, SAMPLED_DEPTHS, TreeShape
from fastspec.programs.chat.commands import COMMANDS

CONFIGS = (
    fastspec.Eagle3,
    fastspec.Eagle1,
    fastspec.Mtp,
    fastspec.Speculative,
    fastspec.Nasd,
    fastspec.ContinuousBatch,
)

USERS = ("index.md", "install.md", "tutorial.md", "recipes.md", "guide/*.md")
WORDS = 12_500
"""Most words of these pages, without code, generated lists and the lines of tables."""


def page(name: str) -> str:
    return (ROOT / "docs" / "guide" / name).read_text(encoding="utf-8")


def rows(file: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a file in benchmarks/results that have these values."""
    found = map(json.loads, (ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8").splitlines())
    return [row for row in found if all(row.get(name) == value for name, value in wanted.items())]


def one(file: str, name: str, **wanted: Any) -> Any:
    """A value of the first row that has these."""
    return rows(file, **wanted)[0][name]


def held(name: str, *phrases: str) -> None:
    """Each phrase stands on a page, whose lines are one text."""
    text = " ".join(page(name).split())
    assert not [phrase for phrase in phrases if phrase not in text]


def test_the_users_part_stays_short() -> None:
    found = [path for pattern in USERS for path in (ROOT / "docs").glob(pattern)]
    texts = [FENCE.sub("", path.read_text(encoding="utf-8")) for path in found]
    texts = [re.sub(r"<!-- made.*?<!-- end", "", text, flags=re.DOTALL) for text in texts]
    assert len(found) > 15 and sum(len(re.sub(r"[|`]|---", " ", text).split()) for text in texts) < WORDS


def test_figures_of_the_output_are_those_of_their_rows() -> None:
    fp32 = [row for row in rows("lossless_h200.jsonl", dtype="float32", batch=40) if "assistant" in row]
    prompts = {row["prompts"]: row["count"] for row in fp32}
    told = {row["assistant"].partition(",")[0]: 0 for row in fp32}
    assert len(prompts) == 5 and all(row["identical"] == row["count"] for row in fp32)
    held("output.md", f"On an H200 {sum(prompts.values())} prompts of five sets gave identical answers in fp32")
    held("output.md", *(f"`{assistant}`" for assistant in told))
    bf16 = rows("lossless_h200.jsonl", dtype="bfloat16", batch=40, assistant="eagle3")
    same, of = (sum(row[name] for row in bf16) for name in ("identical", "count"))
    gap = max(row["logit_gap_where_different"]["max"] for row in bf16)
    held("output.md", f"{same} of {of} answers of `eagle3`", f"at most {gap} apart")
    asked = {"assistant": "eagle3", "prompts": "mt_bench", "batch": 1, "dtype": "bfloat16"}
    fast, exact = (one("exact_h100.jsonl", "equal", exact=kind, **asked) for kind in (False, True))
    held("output.md", f"{exact} of {exact} answers where the fast kernels gave {fast} (`eagle3`, one at a time, H100")
    drawn = rows("distribution_h200.jsonl")
    ((texts, significance),) = {(row["texts"], row["significance"]) for row in drawn}
    assert all(each["p"] > significance for row in drawn for each in row["positions"])
    held("output.md", f"{texts:,} texts for each assistant", f"significance {significance}")


def test_what_the_same_bits_take_is_that_of_their_rows() -> None:
    """Most that shapes of 1.5B to 8B take in one process: a row, a prompt and eight trees; of long texts the trees and
    the prompts."""
    shapes = ("qwen2-1.5b", "llama-3b", "qwen3-4b", "qwen2.5-7b", "llama-8b")

    def more(figure: str, prefix: int, **wanted: Any) -> list[int]:
        """Percents, ascending."""
        found = [row for row in rows("exact_rounds_h200.jsonl", prefix=prefix, **wanted) if row["shape"] in shapes]
        times = {(row["shape"], row["batch"], row["method"], row["sums"]): row[figure] for row in found}
        exact = [(case, time) for (*case, sums), time in times.items() if sums == "exact"]
        return sorted(round(100 * time / times[(*case, "fast")]) - 100 for case, time in exact)

    def most(figure: str, prefix: int, **wanted: Any) -> int:
        return more(figure, prefix, **wanted)[-1]

    row, prompt, trees = (
        most("round_ms", 2048, batch=1),
        most("prefill_ms", 2048),
        most("round_ms", 2048, batch=8, method="eagle3"),
    )
    held(
        "output.md",
        f"one row's token or round after 2,048 tokens takes up to {row} % longer, prompts {prompt} %",
        f"prompts {prompt} %, eight trees {trees} %",
        f"after 32,768 trees {most('round_ms', 32768, method='eagle3')} %, prompts {most('prefill_ms', 32768)} %",
    )
    held("../performance/expect.md", f"[the same bits](../guide/output.md#the-same-bits) take up to {row} % more")
    trees, prompts = more("round_ms", 32768, method="eagle3"), more("prefill_ms", 32768)
    held(
        "../maintainers/same_bits.md",
        f"After 32,768 tokens trees take {trees[0]} to {trees[-1]} % longer than",
        f"and prompts {prompts[0]} to {prompts[-1]} %:",
    )


def test_figures_of_times_are_those_of_their_rows() -> None:
    def of(what: str, **wanted: Any) -> float:
        return one("stored_h200.jsonl", what, **wanted)

    beside = {"shape": "llama-8b", "method": "autoregressive"}
    eight, many = (
        [of("round_ms", **beside, weights=weights, batch=batch) for weights in ("fp8", "dense")] for batch in (8, 32)
    )
    held("quantised.md", "in {:.2f} ms instead of {:.2f} in bf16".format(*eight))
    held("quantised.md", "32 rows in {:.2f} instead of {:.2f}".format(*many))
    formats = ("dense", "fp8", "gptq", "int8", "nf4")
    most = [of("round_ms", **beside, weights=weights, batch=128, prefix=512) for weights in formats]
    said = "take {:.2f} ms in bf16, {:.2f} of FP8, {:.2f} of GPTQ, {:.2f} of int8, {:.2f} of nf4"
    held("quantised.md", said.format(*most))
    plain, drafted = (
        [of("round_ms", shape="gpt-oss-20b", method=method, weights=weights) for weights in ("mxfp4", "dense")]
        for method in ("autoregressive", "eagle3")
    )
    held("quantised.md", "{:.2f} ms a token of the 20B shape on an H200, {:.2f} dense".format(*plain))
    held("quantised.md", "a round of `eagle3` {:.2f} and {:.2f}".format(*drafted))
    rounds = [
        of("round_ms", shape=shape, weights="dense", method="eagle3", head_bits=bits)
        for shape in ("llama-8b", "qwen3-4b", "qwen2-1.5b")
        for bits in (8, 16)
    ]
    held("assistants.md", "takes {:.2f} ms with it instead of {:.2f}, of a 4B shape {:.2f} instead of".format(*rounds))
    held("assistants.md", "{3:.2f}, and of a 1.5B shape {4:.2f} instead of {5:.2f}".format(*rounds))
    told = {"qwen3.5-9b": "takes {:.2f} ms a token and {:.2f} ms a round of 60", "qwen3.6-27b": "{:.2f} and {:.2f} ms"}
    for shape, said in told.items():
        pair = [one("mtp_h200.jsonl", "round_ms", shape=shape, method="autoregressive")]
        pair += [one("mtp_h200.jsonl", "round_ms", shape=shape, method="mtp", head_bits=8)]
        held("../performance/expect.md", said.format(*pair))
    ratio = one("oracle_h200.jsonl", "over_plain", shape="qwen3.6-35b-a3b", tree="auto")
    held("../performance/expect.md", f"made {ratio:.2f} times the tokens a second of")
    ratio = one("oracle_h200.jsonl", "over_plain", shape="qwen3.5-9b", tree="auto")
    held("../performance/expect.md", f"of Qwen3.5-9B's shape {ratio:.2f} times")
    cold, warm = (
        one("first_call_h100.jsonl", "first_token", shape="llama-8b", assistant="eagle3", caches=caches)
        for caches in ("cold", "warm")
    )
    held("devices.md", f"comes after {cold:.1f} s, and after {warm:.1f} with filled caches")
    plain = {"processes": 2, "method": "autoregressive"}
    small, large = (one("parallel_h200.jsonl", "round_ms", shape=f"llama-{size}", **plain) for size in ("8b", "70b"))
    memory = one("parallel_h200.jsonl", "peak_mib", shape="llama-70b", **plain) / 1024
    held("parallel.md", f"Two H200 make {1000 / small:.0f} tokens a second", f"and {1000 / large:.0f} of a 70B shape")
    held("parallel.md", f"{memory:.0f} GiB of each GPU")
    four = {**plain, "processes": 4, "batch": 1, "prefix": 2048}
    small, large = (
        one("parallel_four_h200.jsonl", "round_ms", shape=f"llama-{size}", **four) for size in ("8b", "70b")
    )
    held("parallel.md", f"four make {1000 / small:.0f} and {1000 / large:.0f}")

    def four_of(what: str, shape: str, method: str = "autoregressive", batch: int = 1, prefix: int = 2048) -> Any:
        wanted = {"shape": shape, "method": method, "batch": batch, "prefix": prefix, "processes": 4}
        return one("parallel_four_h200.jsonl", what, **wanted)

    ratio = four_of("parts_ms", "llama-70b", "eagle3")["score"][1] / four_of("round_ms", "llama-70b")
    held("../performance/expect.md", f"scores 60 nodes in {ratio:.2f} times the time of a token")
    eight = [four_of("round_ms", "llama-70b", method, 8) for method in ("autoregressive", "eagle3")]
    held(
        "../performance/expect.md",
        "Eight rows take {:.1f} ms a token, and {:.1f} ms a round of eight trees".format(*eight),
    )
    for shape, said in (
        ("llama-8b", "{:.2f} ms a token and {:.2f} ms a round, with eight rows {:.2f} and {:.2f} ms"),
        ("qwen3-30b-a3b", "{:.2f} and {:.2f} ms, with eight rows {:.2f} and {:.2f} ms"),
    ):
        long = [four_of("round_ms", shape, method, n, 32768) for n in (1, 8) for method in ("autoregressive", "eagle3")]
        held("../performance/expect.md", said.format(*long))
    answers = [one("parallel_four_h200.jsonl", "ms", what="cascade", answers=stage) for stage in ("small", "large")]
    held("../performance/expect.md", "in {:.0f} ms where the stage answers, and in {:,.0f} ms".format(*answers))
    of_auto = {"way": "generate", "method": "eagle3", "tree": "auto", "new_tokens": 128}
    slower = [
        100 - 100 * one("oracle_h200.jsonl", "over_plain", shape=shape, rows=count, survival=[0.0], **of_auto)
        for shape in ("llama-8b", "qwen2-1.5b")
        for count in (1, 8)
    ]
    held("assistants.md", "{:.0f} % slower than without drafts for an 8B shape and {:.0f} % for".format(*slower[::2]))
    held("assistants.md", "a 1.5B shape, with eight rows {:.0f} and {:.0f} %".format(*slower[1::2]))
    for shape, said in (
        ("llama-8b", "{:.2f} times as fast as without drafts, and {:.2f} times"),
        ("qwen2-1.5b", "{:.2f} and {:.2f} times"),
    ):
        kinds = {"shape": shape, "rows": 8, "way": "generate", "survival": [0.93, 0.8, 0.66, 0.58, 0.44, 0.39, 0.24]}
        pair = [one("oracle_h200.jsonl", "over_plain", tree=tree, **kinds) for tree in ("auto", "default")]
        held("../performance/batches.md", said.format(*pair))
    nothing = [
        100 - 100 * each["over_plain"]
        for each in rows("oracle_h200.jsonl", method="eagle3", survival=[0.0], new_tokens=128)
        if each["rows"] < 128
    ]
    held("../performance/batches.md", f"1, 8 and 32 rows take {min(nothing):.0f} to {max(nothing):.0f} % longer")
    longer = one("oracle_h200.jsonl", "over_plain", survival=[0.0], new_tokens=1024, method="eagle3")
    held("../performance/batches.md", f"answers of 1,024 tokens {100 - 100 * longer:.0f} %")
    open_rows = {"shape": "qwen2-1.5b", "rows": 32, "way": "open", "tree": "auto"}
    held(
        "../performance/batches.md", f"made {one('oracle_h200.jsonl', 'over_plain', **open_rows):.2f} times the tokens"
    )
    for shape, said, told in (
        ("qwen3-30b-a3b", "{:.2f} times as fast with eight rows and {:.2f} times with 128", "made {:.2f}"),
        ("qwen3.6-35b-a3b", "by its MTP layer {:.2f} and {:.2f} times", "and {:.2f} times the tokens"),
    ):
        many = {"shape": shape, "tree": "auto", "survival": kinds["survival"]}
        eight, most, opened = (
            one("oracle_h200.jsonl", "over_plain", rows=count, way=way, **many)
            for count, way in ((8, "generate"), (128, "generate"), (8, "open"))
        )
        held("../performance/batches.md", said.format(eight, most), told.format(opened))
    mixture = {"shape": "qwen3-30b-a3b", "method": "eagle3", "rows": 1, "survival": kinds["survival"]}
    fixed, chosen = (one("oracle_h200.jsonl", "over_plain", tree=tree, **mixture) for tree in ("default", "auto"))
    held("assistants.md", f"{chosen:.2f} times as fast as without drafts, where 60 nodes made it {fixed:.2f} times")


def test_what_servers_without_and_with_drafts_lose_is_that_of_their_rows() -> None:
    def lost(server: str, beside: str, name: str = "tokens_per_second", **wanted: Any) -> float:
        ours, theirs = (one("serving_h200.jsonl", name, server=each, **wanted) for each in (server, beside))
        return 100 - 100 * ours / theirs

    drafted = {"server": "fastspec", "beside": "fastspec-autoregressive", "model": "qwen2.5-coder-1.5b-instruct"}
    alone = min(lost(**drafted, way=way, in_flight=1) for way in ("whole", "streamed", "turns"))
    single = sorted(lost(**drafted, way=way, in_flight=32) for way in ("whole", "streamed"))
    schema = max(lost(**drafted, way="schema", in_flight=count) for count in (1, 8, 32))
    trees = {"server": "fastspec-eagle3", "beside": "fastspec-autoregressive", "model": "smollm2-135m-instruct"}
    held(
        "../performance/batches.md",
        f"make up to {1 - alone / 100:.1f} times the tokens with one in flight",
        f"make {-lost(**drafted, way='turns', in_flight=32):.0f} % more in chats of ten turns",
        f"lose {single[0]:.0f} to {single[1]:.0f} % in single answers, and up to {schema:.0f} % where a schema holds",
        f"lost {lost(**trees, way='schema', in_flight=1):.0f} % of SmolLM2's one stream",
    )

    def losses(model: str, way: str, in_flight: int) -> list[float]:
        wanted = {"model": model, "way": way, "in_flight": in_flight}
        told = [each["tokens_per_second"] for each in rows("serving_drafts_h200.jsonl", **wanted)]
        return [100 - 100 * drafts / none for none, drafts in zip(told[::2], told[1::2], strict=True)]

    def lost_in_turn(*cell: Any) -> float:
        return statistics.median(losses(*cell))

    ngrams = [lost_in_turn(drafted["model"], *cell) for cell in (("whole", 32), ("streamed", 32), ("schema", 8))]
    held_to = [lost_in_turn(trees["model"], "schema", count) for count in (1, 8)]
    held(
        "../performance/batches.md",
        "lost {:.0f} % in whole answers and {:.0f} % in streamed ones with 32 in flight, and {:.0f} % with".format(
            *ngrams
        ),
        "EAGLE-3 with a schema {:.0f} % of one stream and {:.0f} % of eight".format(*held_to),
        "of one stream {:.0f} to {:.0f} %".format(*sorted(losses(trees["model"], "schema", 1))[::2]),
        f"made {-lost_in_turn(drafted['model'], 'whole', 8):.0f} % more in whole answers with eight in flight",
    )

    def served(shape: str, method: str, count: int) -> float:
        found = (
            one("oracle_h200.jsonl", "tokens_per_second", way="serve", shape=shape, rows=count, method=each)
            for each in (method, "autoregressive")
        )
        return float(next(found) / next(found))

    held(
        "../performance/batches.md",
        "the first made {:.2f}, {:.2f} and {:.2f} times".format(
            *(served("qwen3-30b-a3b", "eagle3", count) for count in (1, 8, 32))
        ),
        "the second {:.2f} and {:.2f} with 8 and 32".format(
            *(served("qwen3.6-35b-a3b", "mtp", count) for count in (8, 32))
        ),
    )
    plain = {"server": "fastspec-autoregressive", "beside": "vllm", "model": "llama-8b"}
    whole, streamed = (
        [lost(**plain, way=way, in_flight=count) for count in (1, 8, 32, 64)] for way in ("whole", "streamed")
    )
    fewer = f"makes {whole[3]:.0f} % fewer tokens a second than vLLM in whole answers of 64"
    held("../performance/batches.md", fewer, f"in flight, {whole[2]:.0f} % fewer of 32")
    assert [loss > 0 for loss in (*whole, *streamed)] == [False, False, True, True, False, False, False, False]

    def first(server: str, **wanted: Any) -> float:
        name = "first_token_by_turn_ms" if wanted["way"] == "turns" else "first_token_ms"
        times: list[float] = one("serving_h200.jsonl", name, server=server, **wanted)
        return times[0] if wanted["way"] == "turns" else times[1]

    for count in (1, 8, 32, 64):
        ours, theirs = (
            first(server, model="llama-8b", way="streamed", in_flight=count)
            for server in ("fastspec-autoregressive", "vllm")
        )
        assert ours < theirs
    chats = {"smollm2-135m-instruct": "fastspec-eagle3", "qwen2.5-coder-1.5b-instruct": "fastspec"}
    later = []
    for model, drafted_by in chats.items():
        burst = {"model": model, "way": "turns", "in_flight": 32}
        later += [
            100 * first(each, **burst) / first("vllm", **burst) - 100
            for each in ("fastspec-autoregressive", drafted_by)
        ]
    held(
        "../performance/batches.md",
        "SmolLM2's come earlier by {:.0f} to {:.0f} %, Qwen's later by {:.0f} to {:.0f} %".format(
            -later[0], -later[1], *later[2:]
        ),
    )
    turns = [
        one("serving_long_chats_h200.jsonl", "first_token_by_turn_ms", server=f"fastspec-{assistant}")
        for assistant in ("autoregressive", "eagle3")
    ]
    held(
        "../performance/batches.md",
        "takes SmolLM2 {:.0f} ms to its first token without drafts, the first turn {:.0f}, and with EAGLE-3 {:.0f} and "
        "{:.0f}".format(*(each[turn] for each in turns for turn in (-1, 0))),
    )
    ours, theirs = (
        f"{one('serving_transformers_h200.jsonl', 'tokens_per_second', server=server):,.0f}"
        for server in ("fastspec-autoregressive", "transformers")
    )
    held(
        "../performance/batches.md", f"SmolLM2 makes {ours} tokens a second there and by `transformers serve` {theirs}"
    )


def test_figures_of_the_cascade_are_those_of_its_rows() -> None:
    def alone(stage: str) -> str:
        (row,) = rows("cascade_h200.jsonl", kind="stage", set="all", stage=stage)
        return f"{100 * row['quality']:.1f} % {'right ' if stage[0] == 's' else ''}at {row['cost']:.0f} ms"

    def gain(items: str) -> float:
        return 100 * one("cascade_h200.jsonl", "mean", kind="area", set=items)

    held("cascade.md", f"SmolLM2-135M ({alone('smollm2-135m')})", f"Qwen2.5-Coder-1.5B ({alone('qwen2.5-coder-1.5b')})")
    held("cascade.md", f"gains {gain('all'):.1f} points over mixing the two at random")
    held("cascade.md", f"{gain('eval_mmlu'):.1f} for MMLU and {gain('eval_arc_challenge'):.1f} for ARC")
    held("cascade.md", f"loses {-gain('eval_mbpp_test'):.1f} for MBPP")


def test_assistants_are_shown_with_all_their_fields() -> None:
    for config in CONFIGS:
        named = ", ".join(field.name for field in fields(config))
        assert f"`fastspec.{config.__name__}({named})`" in page("assistants.md")


def test_default_trees_are_those_of_the_code() -> None:
    text = page("assistants.md")

    def sizes(tree: TreeShape) -> str:
        return f"{tree.total_tokens}, {tree.depth}, {tree.top_k}"

    assert f"| CPU, C++ kernels, `eagle3` | {sizes(CPP_TREE)} |" in text
    assert f"| CPU, else | {sizes(DEFAULT_TREES['cpu'])} |" in text
    (first, _), *_ = BATCH_TREES["cuda"]
    assert f"| CUDA, below {first} rows | {sizes(DEFAULT_TREES['cuda'])} |" in text
    rows = ", ".join(str(rows) for rows, _ in BATCH_TREES["cuda"])
    trees = "; ".join(sizes(tree) for _, tree in BATCH_TREES["cuda"])
    assert f"| from {rows} rows on | {trees} |" in text
    ((hot, shallow), (_, depth)) = SAMPLED_DEPTHS
    assert f"at most {depth} deep, {shallow} from a temperature of {hot} on" in text


def test_every_command_of_the_chat_is_on_its_page() -> None:
    assert set(COMMANDS) <= set(re.findall(r"`/(\w+)", page("chat.md")))


def test_settings_of_the_environment_are_those_that_the_code_reads() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastspec").rglob("*.py"))
    read = set(re.findall(r'"(FASTSPEC_\w+)"', source))
    told = set(re.findall(r"`(FASTSPEC_\w+)", page("devices.md") + page("serving.md")))
    assert read == told


def test_errors_are_named() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert not [name for name in kinds if name not in page("troubleshooting.md")]
