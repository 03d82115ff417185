"""The fused drafter against the head's own forward pass, node by node: every candidate, every score, every choice of a
frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.devices import CPU, CUDA
from helpers.examples import examples
from helpers.kernels import ON_CUDA, captured
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.tree import Verdict
from fastspec.kernels.drafting.fused.draft import draft, draft_space, draft_weights, supports
from fastspec.patches.backends import TORCH

ON_CPU = pytest.mark.parametrize("device", [CPU])

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "draft_vocab_size": 97,
    "target_hidden_size": 32,
    "taps": (1, 2, 3),
}
REAL = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 9001,
    "draft_vocab_size": 4099,
    "target_hidden_size": 1024,
}


def make_head(sizes: dict[str, Any], dtype: torch.dtype, device: str, seed: int = 0) -> EagleHead:
    """A head with random weights, bound to a random embedding; its logits spread over several units."""
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(HeadConfig(**sizes)).eval().requires_grad_(False)
    for name, parameter in head.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        scale = 2.0 if name.startswith("lm_head") else 1.0
        parameter.copy_(1 + 0.2 * drawn if parameter.ndim == 1 else drawn * scale * parameter.shape[1] ** -0.5)
    ids = torch.randperm(head.config.vocab_size, generator=generator)[: head.config.draft_vocab_size].sort().values
    head.d2t.copy_(ids - torch.arange(len(ids)))
    embedding = nn.Embedding(head.config.vocab_size, head.config.hidden_size).requires_grad_(False)
    embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))
    head.to(device, dtype).bind(embedding.to(device, dtype), None)
    return head


def wide_copy(head: EagleHead) -> EagleHead:
    """The same weights in float64; norms and rotations are still computed in fp32, as the head does in every dtype."""
    copy = EagleHead(head.config).eval().requires_grad_(False).double()
    copy.load_state_dict(
        {name: value.double() if value.is_floating_point() else value for name, value in head.state_dict().items()}
    )
    weight = head.bound.embedding.weight.detach().double()
    copy.to(weight.device).bind(nn.Embedding.from_pretrained(weight), None)
    return copy


@dataclass
class Rounds:
    """The state of some rows between rounds, and what the head has read so far: keys and values per row, without a
    cache."""

    head: EagleHead
    top_k: int
    depth: int
    rows: int
    pairs: int
    limit: int
    programs: int | None = None

    def __post_init__(self) -> None:
        c, layer = self.head.config, self.head.layers[0]
        weight = self.head.fc.weight
        attn, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([part.weight for part in (attn.q_proj, attn.k_proj, attn.v_proj)])
        weights = draft_weights(BoundHead.of(self.head), qkv, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self.weights = weights
        slots = self.limit + max(self.pairs, self.depth * self.top_k)
        shape = (self.rows, c.num_key_value_heads, slots, c.head_dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=weight.dtype, device=weight.device) for _ in range(2))
        state = torch.full((self.rows, c.hidden_size), torch.nan, dtype=weight.dtype, device=weight.device)
        self.last, self.readout = state, state.clone()
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=weight.device)
        angle = torch.arange(slots, device=weight.device)[:, None] * self.head.inv_freq.to(weight.device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.spaces = {}

    def space(self, pairs: int) -> Any:
        if pairs not in self.spaces:
            made = draft_space(
                self.weights, rows=self.rows, pairs=pairs, top_k=self.top_k, depth=self.depth, programs=self.programs
            )
            for buffer in made.buffers[:-2]:
                buffer.fill_(torch.nan if buffer.is_floating_point() else -(2**62))
            self.spaces[pairs] = made
        return self.spaces[pairs]

    def draft(
        self, tokens: Tensor | None, features: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        space = self.space(0 if tokens is None else tokens.shape[1])
        state = (self.last, self.readout, self.k, self.v, self.lengths, self.cos, self.sin, self.limit)
        return draft(self.weights, space, tokens, features, counts, *state)

    def begin(self, row: int, told: Replay) -> None:
        """Start a row from what was fed to a replay in the same dtype."""
        keys, values = told.past
        self.k[row, :, : len(keys)], self.v[row, :, : len(keys)] = keys.transpose(0, 1), values.transpose(0, 1)
        self.last[row], self.lengths[row] = told.last, len(keys)
        self.readout[row] = told.last if self.head.config.norm_output else self.head.norm(told.last)


class Replay:
    """One row as the head's own forward pass reads it: keys and values are kept in lists, and every node attends to
    what it is given."""

    def __init__(self, head: EagleHead) -> None:
        self.head, self.dtype, self.device = head, head.fc.weight.dtype, head.fc.weight.device
        self.last: Any = None
        self.past = self.empty()

    def step(
        self, tokens: Tensor, hidden: Tensor, position: Tensor, seen: Tensor, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N], hidden [N, H], seen [N, past + N] bool, kept keys and values [past, Hkv, D] -> states [N, H], all
        keys and values."""
        found = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = torch.cat((kept[0], k[0])), torch.cat((kept[1], v[0]))
            found[:] = [keys, values]
            group = q.shape[2] // k.shape[2]
            wide = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
            out = nn.functional.scaled_dot_product_attention(
                q[0].transpose(0, 1), *wide, attn_mask=mask, scale=q.shape[-1] ** -0.5
            )
            return out.transpose(0, 1)[None]

        states = self.head.step(tokens[None], hidden[None], position[None], attend)[0]
        return states, found[0], found[1]

    def empty(self) -> tuple[Tensor, Tensor]:
        c = self.head.config
        shape = (0, c.num_key_value_heads, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device), torch.zeros(
            shape, dtype=self.dtype, device=self.device
        )

    def observe(self, tokens: Tensor, features: Tensor) -> None:
        """Real pairs only."""
        if not len(tokens):
            return
        before = len(self.past[0])
        position = torch.arange(before, before + len(tokens), device=self.device)
        seen = torch.arange(before + len(tokens), device=self.device)[None] <= position[:, None]
        hidden = self.head.fuse(features[None].to(self.dtype))[0]
        states, keys, values = self.step(tokens, hidden, position, seen, self.past)
        self.past, self.last = (keys, values), states[-1]

    def levels(self, tokens: list[int], parents: list[int], top_k: int, depth: int) -> list[Tensor]:
        """Log-probabilities over the draft vocabulary of every expanded node, level by level, for candidates as the
        kernel chose them."""
        out = [self.head.logits(self.last).double().log_softmax(-1)[None]]
        kept, length = self.past, len(self.past[0])
        order: list[int] = []
        states: dict[int, Tensor] = {}
        for level in range(depth):
            base = top_k + level * top_k**2
            frontier = [parents[base + i * top_k] for i in range(top_k)]
            order += frontier
            seen = torch.ones(top_k, length + len(order), dtype=torch.bool, device=self.device)
            seen[:, length:] = False
            for i, node in enumerate(frontier):
                up = node
                while up >= 0:
                    seen[i, length + order.index(up)] = True
                    up = parents[up]
            hidden = torch.stack([self.last if parents[node] < 0 else states[parents[node]] for node in frontier])
            ids = torch.tensor([tokens[node] for node in frontier], device=self.device)
            position = torch.full((top_k,), length + level, device=self.device)
            found, *kept = self.step(ids, hidden, position, seen, kept)
            states |= dict(zip(frontier, found, strict=True))
            out.append(self.head.logits(found).double().log_softmax(-1))
        return out


def check_choices(scores: Tensor, parents: Tensor, top_k: int, depth: int) -> None:
    """The kernel's frontiers are exactly the best of its own scores, the lower index first among equals."""
    assert parents[:top_k].tolist() == [-1] * top_k
    for level in range(depth):
        base = top_k + level * top_k**2
        first = 0 if level == 0 else base - top_k**2
        best = torch.sort(scores[first:base], descending=True, stable=True).indices[:top_k] + first
        assert parents[base : base + top_k**2].tolist() == best.repeat_interleave(top_k).tolist()


def errors(replay: Replay, scores: Tensor, tokens: Tensor, parents: Tensor, top_k: int, depth: int) -> float:
    """How far the kernel's log-probabilities are from the replay's, and how much better a token that it left out is:
    the largest."""
    head, worst = replay.head, 0.0
    ids = {
        int(token): i
        for i, token in enumerate(head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device)))
    }
    for level, table in enumerate(replay.levels(tokens.tolist(), parents.tolist(), top_k, depth)):
        base = 0 if level == 0 else top_k + (level - 1) * top_k**2
        for i, logp in enumerate(table):
            part = slice(base + i * top_k, base + (i + 1) * top_k)
            chosen = torch.tensor([ids[token] for token in tokens[part].tolist()], device=logp.device)
            assert len(set(chosen.tolist())) == top_k
            above = scores[parents[base + i * top_k]] if level else 0.0
            emitted = scores[part] - above
            assert bool((emitted[1:] <= emitted[:-1]).all())
            left = logp.index_fill(0, chosen, -torch.inf).max() - emitted[-1]
            worst = max(worst, float((emitted - logp[chosen]).abs().max()), float(left))
    return worst


def bound_of(
    exact: Replay, same: Replay, scores: Tensor, tokens: Tensor, parents: Tensor, top_k: int, depth: int
) -> float:
    """A bound for the kernel's error: three times the largest of torch's own pass in the same dtype over the same
    nodes, which rounds in as many places but sums in another order, and the rounding of scores that are sums of up to
    depth + 1 terms of size 32."""
    args = (tokens.tolist(), parents.tolist(), top_k, depth)
    own = max(float((a - b).abs().max()) for a, b in zip(exact.levels(*args), same.levels(*args), strict=True))
    return 3 * own + 32 * (depth + 1) * torch.finfo(torch.float32).eps


@torch.no_grad()
def run_rounds(rounds: Rounds, prefix: list[int], counts: list[list[int]], seed: int) -> None:
    """Rows of `prefix` pairs, then rounds that feed counts of them; every tree is checked."""
    head, exact_head, pairs = rounds.head, wide_copy(rounds.head), rounds.pairs
    generator = torch.Generator().manual_seed(seed)
    device, dtype = head.fc.weight.device, head.fc.weight.dtype
    exact = [Replay(exact_head) for _ in range(rounds.rows)]
    same = [Replay(head) for _ in range(rounds.rows)]

    def drawn(width: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, head.config.vocab_size, (rounds.rows, width), generator=generator)
        features = torch.randn(rounds.rows, width, head.fc.weight.shape[1], generator=generator)
        return tokens.to(device), features.to(device, dtype)

    tokens, features = drawn(max(prefix))
    for row, count in enumerate(prefix):
        for replay in (exact[row], same[row]):
            replay.observe(tokens[row, :count], features[row, :count])
        if count:
            rounds.begin(row, same[row])
    for turn, real in enumerate(counts):
        tokens, features = drawn(pairs)
        before = rounds.last.clone(), rounds.readout.clone()
        found = rounds.draft(tokens, features, torch.tensor(real, device=device))
        unfed = draft_space(rounds.weights, rows=rounds.rows, pairs=0, top_k=rounds.top_k, depth=rounds.depth).meta
        fed = rounds.space(pairs).meta
        if (
            turn == 0
            and rounds.rows == 1
            and {name: fed[name] for name in fed if fed[name] != unfed[name]}.keys() <= {"PAIRS"}
        ):
            again = rounds.draft(None, None, None)  # nothing new to feed: the same tree
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        for row, count in enumerate(real):
            for replay in (exact[row], same[row]):
                replay.observe(tokens[row, :count], features[row, :count])
            if not count:
                assert torch.equal(rounds.last[row], before[0][row]) and torch.equal(
                    rounds.readout[row], before[1][row]
                )
            scores, drafts, parents = (x[row] for x in found)
            assert bool(scores.isfinite().all()) and int(rounds.lengths[row]) == len(exact[row].past[0])
            check_choices(scores, parents, rounds.top_k, rounds.depth)
            bound = bound_of(exact[row], same[row], scores, drafts, parents, rounds.top_k, rounds.depth)
            assert errors(exact[row], scores, drafts, parents, rounds.top_k, rounds.depth) <= bound
            own = float((same[row].last.double() - exact[row].last).abs().max())
            assert (
                float((rounds.last[row].double() - exact[row].last).abs().max()) <= 3 * own + 8 * torch.finfo(dtype).eps
            )
    for space in rounds.spaces.values():
        assert all(int(counter) == 0 for counter in space.buffers[-2:])


SWITCHES = {name: st.booleans() for name in ("norm_before_residual", "norm_output", "fc_norm")}
VARIANTS = st.fixed_dictionaries(SWITCHES | {"num_key_value_heads": st.sampled_from([1, 2, 4])})


@ON_CPU
@given(
    variant=VARIANTS,
    dtype=st.sampled_from([torch.float32, torch.float16]),
    rows=st.integers(1, 2),
    top_k=st.integers(1, 4),
    depth=st.integers(0, 3),
    pairs=st.sampled_from([1, 3, 5]),
    seed=st.integers(0, 99),
    data=st.data(),
)
@examples(4, derandomize=True)
def test_a_draft_is_what_the_head_drafts(device, variant, dtype, rows, top_k, depth, pairs, seed, data):
    head = make_head(TINY | variant, dtype, device, seed)
    prefix = [data.draw(st.sampled_from([0, 1, 7, 33, 65])) for _ in range(rows)]
    counts = [
        [data.draw(st.integers(1, pairs)) for _ in range(rows)],
        [data.draw(st.integers(0, pairs)) for _ in range(rows)],
    ]
    run_rounds(Rounds(head, top_k, depth, rows, pairs, 80), prefix, counts, seed)


@ON_CPU
@pytest.mark.slow
def test_ancestors_beyond_one_word(device):
    head = make_head(TINY, torch.float32, device, 3)
    run_rounds(Rounds(head, 13, 5, 1, 1, 8), [2], [[1]], 3)


@pytest.mark.parametrize("device", [CPU, CUDA])
@torch.no_grad()
def test_rounds_are_those_of_the_unfused_drafter(device):
    """In fp32, on heads whose scores lie apart: the candidates that `EagleDrafter` hands to its re-ranking, round after
    round."""
    head, shape, rows = make_head(TINY, torch.float32, device, 5), TreeShape(total_tokens=9, depth=3, top_k=3), 2
    handed: list[tuple[Tensor, ...]] = []

    def build(*args: Any) -> tuple[Tensor, ...]:
        handed.append(args[:3])
        return TORCH.tree_build(*args)

    drafter = EagleDrafter(BoundHead.of(head), shape, rows=rows, capacity=64, ops=replace(TORCH, tree_build=build))
    generator = torch.Generator().manual_seed(1)
    ids, counts = (
        torch.randint(0, 131, (rows, 12), generator=generator).to(device),
        torch.tensor([12, 7], device=device),
    )
    drafter.begin(ids, counts, torch.randn(rows, 12, 96, generator=generator).to(device), ids[:, 0])
    rounds = Rounds(head, shape.top_k, shape.depth, rows, shape.max_path, 64)
    slots = rounds.k.shape[2]
    rounds.k.copy_(drafter.attention.k[0, :, :, :slots])
    rounds.v.copy_(drafter.attention.v[0, :, :, :slots])
    for mine, theirs in (
        (rounds.last, drafter.last),
        (rounds.readout, drafter.readout),
        (rounds.lengths, drafter.state.lengths),
    ):
        mine.copy_(theirs)
    tree, found = drafter.propose(64), rounds.draft(None, None, None)
    for active in ([True, True], [True, False], [False, True]):
        scores, tokens, parents = handed[-1]
        assert torch.equal(found[1], tokens) and torch.equal(found[2], parents)
        # sums of five terms below 16 in size, each off by fp32 sums of some hundred products
        torch.testing.assert_close(found[0], scores, rtol=1e-5, atol=1e-5)
        features = torch.randn(rows, 9, 96, generator=generator).to(device)
        bonus = torch.randint(0, 131, (rows,), generator=generator).to(device)
        going = torch.tensor(active, device=device)
        path = torch.ones(
            rows, shape.max_path, dtype=torch.long, device=device
        )  # the root, and its first child again and again
        path[:, 0] = 0
        verdict = Verdict(path, torch.ones(rows, dtype=torch.long, device=device), bonus)
        row = torch.arange(rows, device=device)[:, None]
        fed = verdict.tokens(tree), features[row, path].contiguous(), (verdict.accepted + 1) * going
        drafter.observe(tree, verdict, features, features, going, 64)
        tree, found = drafter.propose(64), rounds.draft(*fed)
        assert torch.equal(rounds.lengths, drafter.state.lengths)
        torch.testing.assert_close(rounds.last, drafter.last, rtol=1e-5, atol=1e-5)


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
NORMED = {"norm_output": True, "num_key_value_heads": 2}
BEFORE = {"norm_before_residual": True, "fc_norm": True, "num_key_value_heads": 16}
LONG_HEADS = {"head_dim": 128, "num_attention_heads": 8, "draft_vocab_size": 9001}


@ON_CUDA
@pytest.mark.parametrize(
    ("dtype", "variant", "rows", "top_k", "depth", "pairs", "prefix"),
    [
        *((dtype, {}, 1, 10, 7, 9, [331]) for dtype in (FULL, HALF, BRAIN)),
        (FULL, NORMED, 3, 10, 5, 9, [0, 65, 700]),
        (BRAIN, NORMED, 3, 10, 5, 9, [0, 65, 700]),
        (BRAIN, BEFORE, 2, 4, 3, 5, [63, 1]),
        (BRAIN, LONG_HEADS, 8, 10, 2, 9, [129] * 8),
        (HALF, {}, 1, 1, 4, 2, [64]),
    ],
)
def test_a_draft_on_the_whole_grid_is_what_the_head_drafts(device, dtype, variant, rows, top_k, depth, pairs, prefix):
    head = make_head(REAL | variant, dtype, device)
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(1, pairs + 1, (rows,), generator=generator).tolist()
    counts = [first] + [torch.randint(0, pairs + 1, (rows,), generator=generator).tolist() for _ in range(3)]
    run_rounds(Rounds(head, top_k, depth, rows, pairs, 800), prefix, counts, 4)


@ON_CUDA
@torch.no_grad()
def test_every_launch_gives_the_same_and_can_be_captured(device):
    head = make_head(REAL, torch.bfloat16, device)
    rounds = Rounds(head, 10, 7, 1, 9, 400)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 9001, (1, 9), generator=generator).to(device)
    features, counts = (
        torch.randn(1, 9, 3072, generator=generator).to(device, torch.bfloat16),
        torch.tensor([5], device=device),
    )
    rounds.k.normal_()
    rounds.v.normal_()

    def round_from_300() -> list[Tensor]:
        rounds.lengths.fill_(300)
        return [x.clone() for x in (*rounds.draft(tokens, features, counts), rounds.last, rounds.lengths)]

    expected = round_from_300()
    for _ in range(50):  # a race between phases would show as another tree, sooner or later
        assert all(torch.equal(a, b) for a, b in zip(expected, round_from_300(), strict=True))
    graph, out = captured(round_from_300)
    for tensor in out:
        tensor.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, out, strict=True))


@pytest.mark.parametrize(
    "change",
    [{"attention_bias": True}, {"qk_norm": True}, {"num_hidden_layers": 2}, {"input_norm": True}, {"head_dim": 24}],
)
def test_heads_that_the_kernel_does_not_run_are_named(change):
    assert supports(HeadConfig(**TINY)) and not supports(HeadConfig(**TINY | change))
    with pytest.raises(ValueError, match="fused drafter"):
        draft_weights(BoundHead.of(make_head(TINY | change, torch.float32, "cpu")), torch.empty(0), torch.empty(0))


def test_bad_input_is_refused():
    rounds = Rounds(make_head(TINY, torch.float32, "cpu"), 2, 1, 1, 2, 8)
    tokens, features, counts = (
        torch.zeros(1, 2, dtype=torch.long),
        torch.zeros(1, 2, 96),
        torch.ones(1, dtype=torch.long),
    )
    with pytest.raises(ValueError, match="features is"):
        rounds.draft(tokens, features[..., :95], counts)
    with pytest.raises(ValueError, match="counts is"):
        rounds.draft(tokens, features, counts.int())
    with pytest.raises(ValueError, match="give tokens"):
        rounds.draft(tokens, None, counts)
    with pytest.raises(ValueError, match="top_k is 98"):
        draft_space(rounds.weights, rows=1, pairs=2, top_k=98, depth=1)
    rounds.limit = 9
    with pytest.raises(ValueError, match="k_cache is"):
        rounds.draft(tokens, features, counts)
    with pytest.raises(ValueError, match="qkv is"):
        draft_weights(BoundHead.of(rounds.head), rounds.weights.tensors.qkv[1:], rounds.weights.tensors.gate_up)
