"""Dependent launches: the rule that every kernel keeps, and graphs of many kernels against the same kernels one after
the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from helpers.devices import INTERPRETED
from helpers.kernels import ON_CUDA, captured
from torch import Tensor

from fastspec.generation import decoder_layer
from fastspec.kernels import launch
from fastspec.kernels.attention import layout as tree_layout
from fastspec.kernels.attention import tree as tree_attention
from fastspec.kernels.cache.commit import kv_block_copy
from fastspec.kernels.drafting import reference
from fastspec.kernels.drafting.topk_expand import topk_expand
from fastspec.kernels.drafting.tree_build import tree_build
from fastspec.kernels.layer.norms import rms_norm
from fastspec.kernels.layer.rope_cache import rope_cache
from fastspec.kernels.linear.experts import experts
from fastspec.kernels.linear.linear import Launch, linear
from fastspec.kernels.linear.swiglu import swiglu
from fastspec.kernels.verification.posterior_eval import pick, posterior_walk
from fastspec.patches.backends import triton_ops

# The products let dependents start before their own wait: see the last paragraph of launch.py, and their tests.
KERNELS = Path(launch.__file__).parent
PRODUCTS = {KERNELS / "linear" / f"{name}.py" for name in ("linear", "row", "hopper")}
PRODUCTS |= {KERNELS / "quantised" / f"{name}.py" for name in ("linear", "hopper")}
FILES = [
    path
    for path in sorted(KERNELS.rglob("*.py"))
    if re.search(r"import \(?\s*dependent\b|import .*\bOrderedPass\b", path.read_text()) and path not in PRODUCTS
    if path.stem not in ("ordered", "ordered_sums")  # which launch nothing themselves
]
BEFORE_THE_WAIT = {"tl.load(p_weight", "guess = tl.load(p_counts + row, volatile=True) + 1"}
"""The weights of a norm, and a guess that it checks behind the wait: the only memory that is read before, beside
addresses that stand."""
WAIT, RELEASE = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
BEGIN, WRITTEN_OUT = "wait_for_previous(PDL)", f"if PDL:\n    {WAIT}\n    {RELEASE}"
"""How a kernel begins, and the same where it is written out."""
BY_ROWS = [f"if EARLY:\n    {RELEASE}", WAIT, f"if not EARLY:\n    {RELEASE}"]
"""What norms do, which let the product behind a row alone start before they wait."""


@INTERPRETED
def test_the_interpreter_launches_one_after_the_other():
    for device in ("cpu", "cuda:0"):
        assert launch.dependent(torch.device(device)) == launch.spread(torch.device(device)) == {"PDL": False}


@ON_CUDA
def test_hopper_launches_dependents_while_the_switch_is_on(device, monkeypatch):
    able = torch.cuda.get_device_capability() >= (9, 0) and not launch.PORTABLE
    assert launch.dependent(torch.device(device)) == ({"PDL": True, "launch_pdl": True} if able else {"PDL": False})
    assert launch.spread(torch.device(device)) == ({"PDL": True, "launch_pdl": False} if able else {"PDL": False})
    monkeypatch.setattr(launch, "PDL", False)
    assert launch.dependent(torch.device(device)) == {"PDL": False}


BEHIND_ITS_OWN = ("ordered_tree", "_tail")
"""A kernel that only one of its own file, or of ordered_hopper.py, is launched before."""
AFTER_THE_ROTATION = ("ordered_chain", "_few")
"""A kernel that runs after the rotation of what it reads, or after one that is no dependent launch."""

GIVEN = {"p_decay", "p_bias", "p_words", "p_a", "p_b"}
AFTER_THE_CONVOLUTION = {
    ("tree", "_tree_inverse"): GIVEN,
    ("tree", "_tree_updates"): {*GIVEN, "p_mixed", "p_state"},
}
"""Kernels of Gated DeltaNet -> what they read before they wait, which the kernel in front of them does not write: the
first runs after the convolution of what the gates stand beside, the second after the first."""

ROW_OF_CODES = ("row", "_row_stored")
"""A kernel that lets those behind it start at once, and reads nothing but weights before it waits."""


def launched(tree: ast.Module) -> set[str]:
    """Names of the kernels in kernel[grid](...)."""
    calls = (n.func.value for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
    return {call.id for call in calls if isinstance(call, ast.Name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kernel_waits_before_it_touches_memory(path):
    """PDL is its last parameter; it waits, then lets dependents start, and nothing but weights is read before."""
    tree = ast.parse(path.read_text())
    kernels = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = launched(tree)
    assert names and names <= set(kernels)
    for name in names:
        kernel = kernels[name]
        assert kernel.args.args[-1].arg == "PDL", name
        if (path.stem, name) in (BEHIND_ITS_OWN, AFTER_THE_ROTATION, ROW_OF_CODES, *AFTER_THE_CONVOLUTION):
            continue
        lines = [ast.unparse(node) for node in kernel.body]
        place = next(i for i, line in enumerate(lines) if line == BEGIN or line.startswith("if PDL:"))
        if lines[place] not in (BEGIN, WRITTEN_OUT):
            done = [ast.unparse(node) for node in kernel.body[place].body]
            by_rows = done == BY_ROWS and path.stem in ("norms", "ordered_chain", "reduced_norm")
            assert by_rows or (len(done) == 3 and done[1:] == [WAIT, RELEASE]), name
            assert by_rows or "prefetch(p_ids, PREFETCH)" in done[0], name
        before = "\n".join(ast.unparse(node) for node in kernel.body[:place])
        for allowed in BEFORE_THE_WAIT:
            before = before.replace(allowed, "")
        assert not any(word in before for word in ("tl.load", "tl.store", "atomic", "return")), name


def test_a_row_of_codes_reads_weights_alone_before_it_waits():
    (path,) = (path for path in FILES if path.stem == ROW_OF_CODES[0] and path.parent.name == "quantised")
    (kernel,) = (n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) == ROW_OF_CODES[1])
    before, after = "\n".join(map(ast.unparse, kernel.body)).split(WAIT)
    assert RELEASE in before and not any(word in before for word in ("p_x", "p_out", "gl.store", "atomic", "return"))
    assert "p_x" in after and "gl.store(p_out" in after


def test_what_reads_before_it_waits_runs_behind_a_kernel_that_has_waited():
    """The tails of ordered attention read what was there before `_runs`, which lets nobody start before it has waited
    for that; what `_runs` leaves they read behind their own wait."""
    stem, name = BEHIND_ITS_OWN
    (path,) = (path for path in FILES if path.stem == stem)
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    kernel = ast.unparse(functions[name])
    alone, behind = (
        kernel.index(each) for each in ("if WHOLE:\n        wait_for_previous(PDL)", "else:\n        begin =")
    )
    wait = kernel.index("wait_for_previous(PDL)", behind)
    assert alone < kernel.index("tl.load") and wait < min(map(kernel.index, ("p_part +=", "p_state +=", "tl.store")))
    host = ast.unparse(functions["nodes_attention"])
    launches = [host.index(each) for each in ("ordered_hopper.launch(", "_runs[", "_tail[")]
    assert launches == sorted(launches)


def test_what_reads_the_text_before_it_waits_runs_after_the_rotation():
    """`_few` reads keys of the committed text before it waits, and all else after: the rotation in front lets nobody
    start before it has waited for what wrote that text and its length."""
    sources = {path.stem: {n.name: n for n in ast.parse(path.read_text()).body if hasattr(n, "name")} for path in FILES}
    stem, name = AFTER_THE_ROTATION
    before, *after = ast.unparse(sources[stem][name]).split("wait_for_previous(PDL)")
    assert len(after) == 2, "once for those that have nothing to do"
    assert "tl.minimum(stop, prefix)" in before + after[0] and "tl.store" not in before + after[0]
    assert "tl.load(p_q" in after[1] and "if stop > prefix:" in after[1]
    rotation = triton_ops().rope_cache.__module__.rpartition(".")[2]
    names = launched(ast.parse(next(path for path in FILES if path.stem == rotation).read_text()))
    assert names and {ast.unparse(sources[rotation][name].body[0]) for name in names} == {BEGIN}
    layer = ast.parse(Path(decoder_layer.__file__).read_text())
    (mixer,) = (n for n in layer.body if isinstance(n, ast.ClassDef) and n.name == "FullAttention")
    methods = {node.name: node for node in mixer.body if isinstance(node, ast.FunctionDef)}
    of_self = [n for n in ast.walk(methods["__call__"]) if isinstance(n, ast.Call) and "self." in ast.unparse(n.func)]
    calls = [ast.unparse(n.func) for n in sorted(of_self, key=lambda n: (n.lineno, n.col_offset))]
    assert calls.index("self.ops.tree_attention") == calls.index("self._rotated") + 1
    (last,) = (node for node in methods["_rotated"].body if isinstance(node, ast.Return))
    assert ast.unparse(last).startswith("return self.ops.rope_cache(")


def test_what_reads_gates_or_a_state_before_it_waits_runs_after_the_convolution():
    """`_tree_inverse` reads the gates' inputs and ancestors before it waits, `_tree_updates` keys and a state too: the
    convolution in front of the first has waited for the product and all states, and the first for the convolution."""
    functions = {
        (path.parent.name, node.name): node
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for (_, name), read in AFTER_THE_CONVOLUTION.items():
        nodes = list(ast.walk(functions["recurrent", name]))
        (wait,) = (n.lineno for n in nodes if isinstance(n, ast.Call) and ast.unparse(n) == BEGIN)
        calls = [n for n in nodes if isinstance(n, ast.Call) and n.lineno < wait]
        names = {n.id for call in calls for n in ast.walk(call) if isinstance(n, ast.Name)}
        assert {each for each in names if each.startswith("p_")} == read
        assert not any(ast.unparse(call.func) == "tl.store" for call in calls)
        assert not any(isinstance(n, ast.Return) and n.lineno < wait for n in nodes)
    host = ast.unparse(functions["recurrent", "wide_tree"])
    assert host.index("_tree_inverse[") < host.index("_tree_updates[")
    assert ast.unparse(functions["recurrent", "_tree_conv"].body[0]) == BEGIN
    layer = ast.parse(Path(decoder_layer.__file__).read_text())
    (mixer,) = (n for n in layer.body if isinstance(n, ast.ClassDef) and n.name == "GatedDelta")
    calls = [
        ast.unparse(n.func)
        for n in sorted(
            (n for n in ast.walk(mixer) if isinstance(n, ast.Call)), key=lambda n: (n.end_lineno, n.end_col_offset)
        )
    ]
    calls = [each for each in calls if each.startswith(("ops.", "self."))]
    assert calls.index("self.project") < calls.index("ops.tree_conv")
    assert calls[calls.index("ops.delta_tree") - 2 : calls.index("ops.delta_tree")] == [
        "ops.tree_conv",
        "self._activated",
    ]


def test_the_common_beginning_waits_and_then_lets_dependents_start():
    nodes = ast.parse(Path(launch.__file__).read_text()).body
    (begin,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "wait_for_previous")
    assert [ast.unparse(node) for node in begin.body[1:]] == [WRITTEN_OUT]


def test_the_rule_is_looked_for_in_all_files():
    found = {path.relative_to(KERNELS).as_posix().removesuffix(".py") for path in FILES}
    assert {
        "layer/norms",
        "linear/swiglu",
        "layer/rope_cache",
        "cache/commit",
        "linear/experts",
    } < found
    assert {"drafting/topk_expand", "parallel/reduced_norm", "parallel/joins"} < found
    assert {
        "attention/tree",
        "attention/few_queries",
        "attention/parts",
        "drafting/inputs",
        "drafting/pairs",
    } < found
    assert all(path.exists() for path in PRODUCTS)


@pytest.mark.parametrize(
    ("shape", "begin", "bytes_"), [((4, 64), 0, 128), ((4, 512), 0, 512), ((4, 60), 0, 0), ((4, 64), 1, 0)]
)
def test_only_aligned_lines_are_prefetched(shape, begin, bytes_):
    weight = torch.zeros(shape[0] * shape[1] + begin, dtype=torch.float16)[begin:].view(shape)
    assert launch.prefetched(weight, 512) == bytes_
    assert launch.prefetched(torch.zeros(9, 100, dtype=torch.float16)[:, :64], 512) == 0  # lines 200 bytes apart


@ON_CUDA
@pytest.mark.parametrize("rows", [1, 16, 61])
def test_a_chain_of_forty_kernels_gives_the_same_with_and_without(device, rows, monkeypatch):
    """Each kernel reads what the one before it wrote, in buffers that are used again and again; one that runs ahead
    shows in the end."""
    torch.manual_seed(rows)
    size, inner = 1024, 1408
    given = {"device": device, "dtype": torch.bfloat16}
    gates = [torch.randn(2 * inner, size, **given) / size**0.5 for _ in range(10)]
    downs = [torch.randn(size, inner, **given) / inner**0.5 for _ in range(10)]
    norms = [1 + 0.1 * torch.randn(size, **given) for _ in range(11)]
    x = torch.zeros(rows, size, **given)
    wide, narrow = Launch(64, 64, 4, 4), Launch(64, 128, 4, 3)

    def chain(pdl: bool) -> tuple[Tensor, ...]:
        monkeypatch.setattr(launch, "PDL", pdl)
        normed, total = rms_norm(x, norms[0], 1e-5)
        for gate, down, norm in zip(gates, downs, norms[1:], strict=True):
            inside = swiglu(linear(normed, gate, None, launch=wide))
            normed, total = rms_norm(linear(inside, down, None, launch=narrow), norm, 1e-5, total)
        return normed, total

    graph, outs = captured(lambda: chain(True))
    for _ in range(50):
        x.normal_()
        graph.replay()
        for got, wanted in zip(outs, chain(False), strict=True):
            assert bool(wanted.isfinite().all()) and torch.equal(got, wanted)


class Round:
    """The other kernels in a row, each on what the ones before it gave, with torch's own in between; the caches change
    with every run."""

    ROWS, NODES, HEADS, KV_HEADS, SIZE, VOCAB, COUNT, STEPS = 2, 16, 8, 2, 64, 5000, 8, 4

    def __init__(self, device: str, slots: int) -> None:
        rows, nodes, width = self.ROWS, self.NODES, self.HEADS * self.SIZE
        given = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
        self.slots = slots
        self.prefix = torch.tensor([slots - 900, slots // 2], device=device)
        self.qkv = torch.empty(rows, nodes, width + 2 * self.KV_HEADS * self.SIZE, **given)
        self.caches = [torch.randn(1, rows, self.KV_HEADS, slots, self.SIZE, **given) for _ in range(2)]
        self.logits = torch.empty(rows, 3 * self.STEPS, self.VOCAB, **given)
        angle = torch.rand(slots, self.SIZE // 2, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.words = reference.own_bits(nodes, torch.device(device)).expand(rows, -1, -1)
        self.place = torch.arange(nodes, device=device).expand(rows, -1)
        self.gate_up, self.down = torch.randn(8, 256, width, **given) / 20, torch.randn(8, width, 128, **given) / 10
        self.norm, self.head = torch.randn(width, **given), torch.randn(self.VOCAB, width, **given) / 20
        self.d2t = torch.zeros(self.VOCAB, dtype=torch.int64, device=device)
        self.children = nodes * self.COUNT
        self.parents = torch.full((rows, self.children), -1, device=device)
        self.root = torch.zeros(rows, dtype=torch.int64, device=device)
        self.shares = torch.full((rows * nodes, 2), 0.5, device=device)
        self.uniform = torch.empty(rows, 3 * self.STEPS, device=device)

    def draw(self) -> None:
        self.qkv.normal_()
        self.logits.normal_()
        self.uniform.uniform_()

    def run(self, caches: list[Tensor]) -> tuple[Tensor, ...]:
        nodes, steps = self.NODES, self.STEPS
        k, v = caches
        slots = self.prefix[:, None] + self.place
        q = rope_cache(self.qkv, self.cos, self.sin, slots, k[0], v[0], slots)
        layout = tree_layout.attention_layout(
            self.prefix, self.words, nodes, nodes, self.slots, self.HEADS // self.KV_HEADS
        )
        mixed = tree_attention.tree_attention(q, k[0], v[0], layout, self.SIZE**-0.5).flatten(2)
        chosen = mixed.flatten(0, 1)[:, :8].float().topk(2).indices
        inner = experts(mixed.flatten(0, 1), self.gate_up, self.down, chosen, self.shares).view_as(mixed)
        normed, total = rms_norm(inner, self.norm, 1e-5, mixed)
        scores = -total[..., 0].float().abs()
        copied = normed.clone()  # a copy is no kernel, and cannot let its dependents start early
        children, tokens, best, index = topk_expand(copied, self.head, scores, self.COUNT, self.d2t)
        tree = tree_build(children, tokens, self.parents, torch.ones_like(self.parents[0]), self.root, 3 * steps)
        greedy, drawn = pick(self.logits, None), pick(self.logits, self.uniform)
        parents = (self.place[:, : 3 * steps] - 1).clamp(min=0)
        path, accepted, bonus = posterior_walk(tree[0] % 2, parents, (greedy + drawn) % 2, steps)
        kv_block_copy(k, v, self.prefix[:, None] + path.flip(1), self.prefix[:, None] + self.place[:, :steps])
        return (*caches, q, total, normed, children, tokens, best, index, *tree, greedy, drawn, path, accepted, bonus)


@ON_CUDA
@pytest.mark.parametrize("slots", [1024, 8192])
def test_a_round_of_all_kernels_gives_the_same_with_and_without(device, slots, monkeypatch):
    torch.manual_seed(slots)
    case = Round(device, slots)
    case.draw()
    monkeypatch.setattr(launch, "PDL", True)
    graph, outs = captured(lambda: case.run(case.caches))
    monkeypatch.setattr(launch, "PDL", False)
    for _ in range(50):
        case.draw()
        before = [cache.clone() for cache in case.caches]
        graph.replay()
        for got, wanted in zip(outs, case.run(before), strict=True):
            assert torch.equal(got, wanted)
