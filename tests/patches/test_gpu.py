"""On CUDA: in fp32 the tokens of the unpatched model, the ops as on the CPU, and a round that waits for nothing and can
be captured."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.devices import CUDA
from helpers.generate import MAKERS, TREE, bigram, prompts, seer, seer1
from helpers.kernels import ON_CUDA
from helpers.models import FAMILIES, tiny_head, tiny_model
from torch import Tensor

import fastspec
from fastspec.generation.drafters.head_drafter import EagleDrafter, StaticDrafter
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.schedule import Eager, WholeGraph
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import choose, walk, walk_drawn
from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.verification import reference as verification_reference
from fastspec.patches.assistants.fused import FusedDrafter
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for
from fastspec.patches.session import session_of

CPU = pytest.param("cpu")


def moved(inputs: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@ON_CUDA
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "gpt_neox"])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=["autoregressive", "eagle3"])
def test_every_family_gives_in_fp32_what_the_unpatched_model_gives(family, assistant, device):
    model = tiny_model(family).to(device)
    inputs = moved(prompts(3, 9, 17), device)
    options = {"do_sample": False, "max_new_tokens": 40}
    expected = model.generate(**inputs, **options)
    with fastspec.patched(model, eagle3=tiny_head(model).to(device)):
        assert model.generate(**inputs, **options, assistant=assistant).tolist() == expected.tolist()
    assert model.generate(**inputs, **options).tolist() == expected.tolist()


@ON_CUDA
def test_a_patched_model_may_move_to_the_device_and_samples_by_its_seed(device):
    target, head = MAKERS["bigram"]
    model = target()
    fastspec.patch(model, eagle3=head(model))
    model.to(device)
    inputs, emitted = moved(prompts(5, 8), device), []
    for _ in range(2):
        torch.manual_seed(3)
        emitted.append(
            model.generate(
                **inputs, do_sample=True, temperature=1.3, top_k=20, max_new_tokens=20, assistant=TREE
            ).tolist()
        )
    assert emitted[0] == emitted[1]
    assert fastspec.report(model).device.startswith("cuda") and fastspec.report(model).last.acceptance_length > 1.5


@ON_CUDA
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=["autoregressive", "eagle3"])
def test_asynchronous_rounds_give_the_same_tokens(assistant, device, monkeypatch):
    """Rows that end in the midst of it, growing buffers, calls one after another on the same graphs, and the same seed
    with and without."""
    from fastspec.generation.engine import batching

    target, head = MAKERS["bigram"]
    model = target().to(device)
    inputs, emitted = moved(prompts(9, 5, 7), device), []
    free = model.generate(**inputs, do_sample=False, max_new_tokens=300, eos_token_id=None)
    ends = [None, [int(free[0, 9 + 41]), int(free[1, 9 + 17])], None]
    wanted = [
        model.generate(**inputs, do_sample=False, max_new_tokens=1500, eos_token_id=each, pad_token_id=0).tolist()
        for each in ends
    ]
    fastspec.patch(model, eagle3=head(model).to(device))
    for after in (0, 10**9, 0):
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", after)
        for each, want in zip(ends, wanted, strict=True):
            options = {
                **inputs,
                "max_new_tokens": 1500,
                "eos_token_id": each,
                "pad_token_id": 0,
                "assistant": assistant,
            }
            assert model.generate(**options, do_sample=False).tolist() == want
        torch.manual_seed(3)
        emitted.append(model.generate(**options, do_sample=True, temperature=1.3, top_k=20).tolist())
    assert emitted[0] == emitted[1] == emitted[2]


@ON_CUDA
def test_smollm2_in_fp32_gives_what_transformers_gives(device):
    from fastspec.models import SMOLLM2, load_model
    from fastspec.programs.demo import PROMPTS
    from fastspec.programs.texts import encode

    model, tokenizer = load_model(SMOLLM2, device, torch.float32)
    batches = [encode(tokenizer, text, device) for _, text in PROMPTS]
    expected = [model.generate(**batch, do_sample=False, max_new_tokens=64).tolist() for batch in batches]
    with fastspec.patched(model, eagle3=SMOLLM2):
        assert [
            model.generate(**b, do_sample=False, max_new_tokens=64, assistant="eagle3").tolist() for b in batches
        ] == expected


def likeliest(scores: Tensor) -> Tensor:
    """Scores under which a draw can only give the greedy token."""
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True), -torch.inf)


WAYS = [
    *((drafts, backend) for backend in ("torch", "triton") for drafts in ("dynamic", "static", "drawn")),
    ("fused", "triton"),
]
"""What drafts, and the kernels; "fused" is the dynamic tree in one launch."""
BACKED = pytest.mark.parametrize(("drafts", "backend"), WAYS)


class Rounds:
    """A target and a drafter of one call, and the round as the loop runs it, on static buffers."""

    def __init__(self, device: str, drafts: str, backend: str = "torch") -> None:
        self.model = bigram().to(device)
        name, head = {"dynamic": ("eagle3", seer), "fused": ("eagle3", tiny_head)}.get(drafts, ("eagle", seer1))
        fastspec.patch(self.model, **{name: head(self.model).to(device)})
        head = session_of(self.model).resources[name]
        self.extent, self.count, self.rows = 128, 0, 3
        self.ops, rows = TORCH if backend == "torch" else triton_ops(), self.rows
        sizes = {"rows": rows, "capacity": self.extent, "ops": self.ops}
        if name == "eagle3":
            self.drafter = (FusedDrafter if drafts == "fused" else EagleDrafter)(head, TREE.shape(device), **sizes)
        else:
            self.drafter = StaticDrafter(
                head, fastspec.Eagle1().tree(), **sizes, process=likeliest if drafts == "drawn" else None
            )
        self.target = HFModel(
            self.model, adapter_for(self.model), tail=self.drafter.nodes, taps=head.config.taps, **sizes
        )
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(6, 97, (rows, 9), generator=generator).to(device)
        self.counts = torch.tensor([9, 4, 7], device=device)

    def begin(self) -> None:
        self.target.open(self.extent)
        self.drafter.open(self.extent)
        logits, features = self.target.prefill(self.ids, self.counts)
        self.drafter.begin(self.ids, self.counts, features, logits.argmax(-1))

    def round(self) -> tuple[Tensor, Tensor]:
        """One round -> the tokens that it emits [B, P], and how many of them are accepted drafts [B]."""
        tree = self.drafter.propose(self.extent)
        logits, features = self.target.score(tree, self.extent)
        if tree.q is None:
            verdict = walk(tree, choose(logits, None, self.ops), self.ops)
        else:
            verdict = walk_drawn(
                tree, likeliest(logits), tree.q, torch.rand(tree.tokens.shape, device=logits.device), self.ops
            )
        self.target.commit(verdict, self.active)
        self.drafter.observe(tree, verdict, logits, features, self.active, self.extent)
        return verdict.tokens(tree), verdict.accepted

    def texts(self, step, rounds: int) -> list[list[int]]:
        """What each row says in some rounds, its first token included."""
        emitted = [[token] for token in self.drafter.root.tolist()]
        for _ in range(rounds):
            tokens, accepted = step()
            for row, (line, count) in enumerate(zip(tokens.tolist(), accepted.tolist(), strict=True)):
                emitted[row] += line[: count + 1]
        return emitted

    def plain(self, count: int) -> list[list[int]]:
        """The same from the model's own forward, one token after another."""
        emitted = []
        for row, real in enumerate(self.counts.tolist()):
            ids = self.ids[row : row + 1, :real]
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=1000
            )
            emitted.append(out[0, real:].tolist())
        return emitted


@pytest.mark.parametrize(
    ("device", "drafts", "backend"),
    [
        pytest.param(*where.values, *way, marks=where.marks)
        for where, ways in ((CPU, WAYS[:3]), (CUDA, WAYS))
        for way in ways
    ],
)
@torch.no_grad()
def test_rounds_on_static_buffers(device, drafts, backend):
    rounds = Rounds(device, drafts, backend)
    rounds.begin()
    emitted = rounds.texts(rounds.round, 12 if drafts == "fused" else 6)
    assert [row[:12] for row in emitted] == [row[:12] for row in rounds.plain(12)] and min(map(len, emitted)) >= 12


@ON_CUDA
@BACKED
@torch.no_grad()
def test_a_round_waits_for_nothing(device, drafts, backend):
    rounds = Rounds(device, drafts, backend)
    rounds.begin()
    rounds.round()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds.round()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@ON_CUDA
@BACKED
@torch.no_grad()
def test_the_host_reads_back_once_a_round(device, drafts, backend):
    """Of the rounds of a call: run as they are, captured, and replayed on the backend that captures."""
    made = Rounds(device, drafts, backend)
    made.begin()
    drawn = drafts == "drawn"
    engine = Engine(
        made.target,
        made.drafter,
        made.ops,
        ChoiceRule(sample=drawn, process=likeliest if drawn else None),
        rows=made.rows,
    )
    engine.begin(made.drafter.root)
    longest, stats = 9, Stats()
    for _ in range(4):
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                packed = engine.step(longest, stats, engine.choice)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        longest += max(accepted for accepted, *_ in packed) + 1
    assert sum("synchronizing CUDA operation" in str(each.message) for each in seen) == 1  # of the last round
    assert stats.replays == (3 if backend == "triton" else 0)
    assert {type(each) for each in engine.schedules.values()} == {WholeGraph if backend == "triton" else Eager}


@ON_CUDA
@BACKED
@torch.no_grad()
def test_a_captured_round_gives_the_same_tokens(device, drafts, backend):
    rounds = Rounds(device, drafts, backend)
    rounds.begin()
    expected = rounds.texts(rounds.round, 6)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rounds.round()  # warm-up: cuBLAS takes its workspace
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rounds.round()
    rounds.begin()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return out

    assert rounds.texts(replay, 6) == expected


@ON_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_ops_agree_with_the_cpu(dtype, device):
    generator = torch.Generator().manual_seed(1)
    nodes, prefix, size = 63, torch.tensor([5, 40]), 16
    parents = torch.stack(
        [torch.tensor([0, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))])] * 2
    )
    tree = TokenTree.from_parents(torch.randint(0, 9, (2, nodes), generator=generator), parents)
    q = torch.randn(2, nodes, 6, size, generator=generator).to(dtype)
    k, v = (torch.randn(2, 2, 110, size, generator=generator).to(dtype) for _ in range(2))
    picks = torch.randint(0, 9, (2, nodes), generator=generator)
    walked, attended = [], []
    for where in ("cpu", device):
        layout = attention_reference.attention_layout(prefix.to(where), tree.ancestors.to(where), nodes, nodes, 105, 3)
        wide = torch.float32 if where == "cpu" else dtype
        attended.append(
            attention_reference.tree_attention(*(x.to(where, wide) for x in (q, k, v)), layout, 0.25).cpu().float()
        )
        walked.append(
            [
                x.cpu()
                for x in verification_reference.posterior_walk(*(x.to(where) for x in (tree.tokens, parents, picks)), 9)
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*walked, strict=True))
    # Outputs are means of values of size 1; the weights and the result are rounded to dtype, and fp32 sums over 105
    # slots are off by less.
    bound = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert float((attended[0] - attended[1]).abs().max()) < bound
