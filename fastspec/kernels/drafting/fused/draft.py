"""The draft phase of an EAGLE-3 head as one launch over the whole chip: the accepted pairs, then a dynamic tree of
candidates.

B batch rows, P accepted pairs per row, H hidden size, H_t target width, taps per feature, I feed-forward size, Hq / Hkv
query / key heads, D head size, E = (Hq + 2 * Hkv) * D, C cache slots, V draft vocabulary, TOP children per node, M =
TOP + depth * TOP ** 2 candidates. Every weight is read once per pass, in tiles dealt to all programs; grid barriers
part the phases (phases.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, expect
from fastspec.kernels.drafting.fused import attention as mixing
from fastspec.kernels.drafting.fused import phases
from fastspec.kernels.launch import stages_within
from fastspec.kernels.layer.norms import summed


@triton.jit(do_not_specialize=["limit"])
def draft_kernel(
    p_pair_tokens,
    p_features,
    p_counts,
    p_last,
    p_readout,
    p_k,
    p_v,
    p_lengths,
    p_cos,
    p_sin,
    p_embedding,
    p_fc,
    p_fc_norm,
    p_input_norm,
    p_hidden_norm,
    p_qkv,
    p_o,
    p_mlp_norm,
    p_gate_up,
    p_down,
    p_norm,
    p_lm_head,
    p_d2t,
    p_scores,
    p_tokens,
    p_parents,
    buffers,
    limit,
    stride_b,
    stride_h,
    B: tl.constexpr,
    PAIRS: tl.constexpr,
    TOP: tl.constexpr,
    DEPTH: tl.constexpr,
    TAPS: tl.constexpr,
    HT: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    FC_NORM: tl.constexpr,
    NORM_RESIDUAL: tl.constexpr,
    FED_NORM: tl.constexpr,
    S_FC: tl.constexpr,
    S_QKV: tl.constexpr,
    S_O: tl.constexpr,
    S_DOWN: tl.constexpr,
    SPLITS: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BKV: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BNODES: tl.constexpr,
    BH: tl.constexpr,
    BHT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BTOP: tl.constexpr,
    BCH: tl.constexpr,
    BW: tl.constexpr,
    STAGES: tl.constexpr,
    STAGES_KV: tl.constexpr,
    AHEAD: tl.constexpr,
    AHEAD_LONG: tl.constexpr,
):
    """One draft phase: feed the accepted pairs, then grow the tree level by level; all programs run every phase, a
    barrier after each."""
    p_wide, p_x, p_mixed, p_act, p_residual, p_after, p_hidden, p_parts = buffers[:8]
    p_mix, p_peak, p_mass, p_keys, p_high, p_total, p_score, p_front, p_words, p_count, p_left = buffers[8:]
    pid, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = p_x.dtype.element_ty
    E: tl.constexpr = (HQ + 2 * HKV) * D
    M: tl.constexpr = TOP + DEPTH * TOP * TOP
    T: tl.constexpr = (V + BV - 1) // BV
    W: tl.constexpr = (DEPTH * TOP + 63) // 64 if DEPTH > 0 else 1
    o_h = tl.arange(0, BH)
    m_h = o_h < H
    goal = programs

    if PAIRS > 0:
        if FC_NORM:
            phases.norm_features(p_features, p_fc_norm, p_wide, B * PAIRS, pid, programs, TAPS, HT, BHT, EPS)
            goal = phases.grid_barrier(p_count, goal)
            phases.product(p_wide, p_fc, p_parts, B * PAIRS, pid, programs, H, TAPS * HT, S_FC, BR, BN, BK, STAGES)
        else:
            phases.product(p_features, p_fc, p_parts, B * PAIRS, pid, programs, H, TAPS * HT, S_FC, BR, BN, BK, STAGES)
        phases.prefetch(p_qkv, B * PAIRS, pid, E, 2 * H, S_QKV, False, BR, BN, BK, AHEAD_LONG)
        goal = phases.grid_barrier(p_count, goal)

    for turn in range(0, DEPTH + 1):  # turn 0: the accepted pairs and the root; turn 1 + level: the nodes of a level
        level = tl.cast(turn - 1, tl.int32)
        nodes = tl.where(turn == 0, PAIRS, TOP)
        rows = B * nodes
        for row in range(pid, rows, programs):
            token, hidden = tl.cast(0, tl.int64), tl.zeros((BH,), dtype)
            if turn == 0:
                token = tl.load(p_pair_tokens + row)
                hidden = summed(p_parts, row, rows, o_h, m_h, H, S_FC).to(dtype)
            else:
                token, above = phases.choose_node(
                    p_scores, p_tokens, p_words, p_score, p_front, row, level, B, TOP, M, W, BCH, BW
                )
                o_above = tl.cast(above, tl.int64) * H + o_h
                if turn == 1:
                    hidden = tl.load(p_last + o_above, mask=m_h, other=0.0, cache_modifier=".cg")
                else:
                    hidden = tl.load(p_hidden + o_above, mask=m_h, other=0.0, cache_modifier=".cg")
            embedded = tl.load(p_embedding + token * H + o_h, mask=m_h, other=0.0).to(dtype)
            o_row = tl.cast(row, tl.int64) * H + o_h
            o_wide = o_row + tl.cast(row, tl.int64) * H
            tl.store(p_wide + o_wide, phases.normed(embedded, p_input_norm, o_h, m_h, H, EPS), mask=m_h)
            normed = phases.normed(hidden, p_hidden_norm, o_h, m_h, H, EPS)
            tl.store(p_wide + o_wide + H, normed, mask=m_h)
            tl.store(p_residual + o_row, normed if NORM_RESIDUAL else hidden, mask=m_h)
        if (turn > 0) | (PAIRS > 0):
            goal = phases.grid_barrier(p_count, goal)
            phases.product(p_wide, p_qkv, p_parts, rows, pid, programs, E, 2 * H, S_QKV, BR, BN, BK, STAGES)
            phases.prefetch(p_o, rows, pid, H, HQ * D, S_O, False, BR, BN, BK, AHEAD_LONG)
            goal = phases.grid_barrier(p_count, goal)
            read = p_parts, p_cos, p_sin, p_k, p_v, p_lengths, p_words, p_mix, p_peak, p_mass
            at = stride_b, stride_h, nodes, level
            mixing.attention(
                *read, *at, B, pid, programs, HQ, HKV, D, S_QKV, HALF, TOP, W, SPLITS, BM, BNODES, BJ, SCALE, STAGES_KV
            )
            goal = phases.grid_barrier(p_count, goal)
            mixing.join_splits(p_mix, p_peak, p_mass, p_mixed, rows * HQ, pid, programs, D, SPLITS)
            goal = phases.grid_barrier(p_count, goal)
            phases.product(p_mixed, p_o, p_parts, rows, pid, programs, H, HQ * D, S_O, BR, BN, BK, STAGES)
            phases.prefetch(p_gate_up, rows, pid, 2 * INNER, H, 1, True, BR, BN, BK, AHEAD)
            goal = phases.grid_barrier(p_count, goal)
            phases.add_and_norm(
                p_parts, p_residual, p_mlp_norm, p_after, p_x, rows, pid, programs, H, S_O, BH, EPS, False
            )
            goal = phases.grid_barrier(p_count, goal)
            phases.gated_product(p_x, p_gate_up, p_act, rows, pid, programs, INNER, H, BR, BN, BK, STAGES)
            phases.prefetch(p_down, rows, pid, H, INNER, S_DOWN, False, BR, BN, BK, AHEAD)
            goal = phases.grid_barrier(p_count, goal)
            phases.product(p_act, p_down, p_parts, rows, pid, programs, H, INNER, S_DOWN, BR, BN, BK, STAGES)
            phases.prefetch(p_lm_head, rows, pid, V, H, 1, False, BR, BV, BKV, AHEAD * BN // BV)
            goal = phases.grid_barrier(p_count, goal)
            phases.add_and_norm(
                p_parts, p_after, p_norm, p_hidden, p_x, rows, pid, programs, H, S_DOWN, BH, EPS, FED_NORM
            )
            goal = phases.grid_barrier(p_count, goal)
        if turn == 0:
            fed = p_hidden, p_counts, p_last, p_readout, p_lengths, p_norm, p_x, limit
            phases.keep_last(*fed, pid, programs, B, PAIRS, H, BH, EPS, FED_NORM)
            goal = phases.grid_barrier(p_count, goal)
        parents = tl.where(turn == 0, 1, TOP)
        base = tl.where(turn == 0, 0, TOP + level * TOP * TOP)
        phases.head_topk(
            p_x, p_lm_head, p_keys, p_high, p_total, B * parents, pid, programs, V, H, TOP, BR, BV, BKV, STAGES
        )
        if turn < DEPTH:
            phases.prefetch(p_qkv, B * TOP, pid, E, 2 * H, S_QKV, False, BR, BN, BK, AHEAD_LONG)
        goal = phases.grid_barrier(p_count, goal)
        found = p_keys, p_high, p_total, p_score, p_front, p_d2t, p_scores, p_tokens, p_parents
        phases.write_children(*found, B * parents, parents, base, pid, programs, V, T, TOP, M, BT, BC, BTOP)
        goal = phases.grid_barrier(p_count, goal)
    phases.leave(p_count, p_left)


class HeadTensors(NamedTuple):
    """The weights of one head in the kernel's order, all contiguous and of one dtype.

    embedding [vocabulary, H] (any float dtype), fc [H, taps * H_t], fc_norm [taps, H_t] (any where the head has none),
    qkv [E, 2 * H], o [H, Hq * D], gate_up [2 * I, H], down [H, I], lm_head [V, H], the norms [H], d2t [V] int64.
    """

    embedding: Tensor
    fc: Tensor
    fc_norm: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    lm_head: Tensor
    d2t: Tensor


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights of a head, and its HeadConfig."""

    tensors: HeadTensors
    config: Any


@dataclass(frozen=True, slots=True)
class DraftSpace:
    """Buffers between the phases of one kind of launch, and the counters of its barriers: zero before and after every
    launch.

    A launch that was aborted leaves them undefined. Two launches that may overlap need two spaces. `buffers` are in the
    kernel's order, from p_wide on; `meta` holds its sizes and switches.
    """

    rows: int
    pairs: int
    top_k: int
    depth: int
    buffers: tuple[Tensor, ...]
    meta: dict[str, Any]
    options: dict[str, Any]
    programs: int


def supports(config: Any) -> bool:
    """True where the kernel runs heads of this HeadConfig."""
    plain = not (config.attention_bias or config.mlp_bias or config.fc_bias or config.qk_norm or config.input_norm)
    size = config.head_dim
    widths = (config.hidden_size, config.target_hidden_size, config.intermediate_size)
    fits = size >= 16 and size & (size - 1) == 0 and all(width % 16 == 0 for width in widths)
    return (
        config.kind == "eagle3"
        and config.num_hidden_layers == 1
        and (config.own_lm_head or config.target_rows)
        and plain
        and fits
    )


def draft_weights(bound: Any, qkv: Tensor, gate_up: Tensor) -> DraftWeights:
    """The weights of a BoundHead; qkv [E, 2 * H] and gate_up [2 * I, H] are its projections, one after another."""
    head, embed = bound.module, bound.binding.embedding
    c, layer = head.config, head.layers[0]
    if not supports(c):
        raise ValueError(
            f"the fused drafter runs one-layer EAGLE-3 heads with an LM head of their own and without biases, not {c}"
        )
    if type(embed) is not torch.nn.Embedding:
        raise ValueError(
            f"the target's embedding is a {type(embed).__name__}; the fused drafter reads a plain torch.nn.Embedding"
        )
    fc_norms = head.fc_norm or [head.norm]
    weights = HeadTensors(
        embed.weight.detach(),
        head.fc.weight.detach(),
        torch.stack([norm.weight.detach() for norm in fc_norms]),
        layer.input_layernorm.weight.detach(),
        layer.hidden_norm.weight.detach(),
        qkv,
        layer.self_attn.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        gate_up,
        layer.mlp.down_proj.weight.detach(),
        head.norm.weight.detach(),
        bound.readout().weight.detach(),
        head.d2t,
    )
    channels, dtype = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, weights.fc.dtype
    expect("the fused drafter", (channels, 2 * c.hidden_size), dtype, CONTIGUOUS, qkv=qkv)
    expect("the fused drafter", (2 * c.intermediate_size, c.hidden_size), dtype, CONTIGUOUS, gate_up=gate_up)
    for name, tensor in weights._asdict().items():
        expect("the fused drafter", tensor.shape, None, CONTIGUOUS, **{name: tensor})
    return DraftWeights(weights, c)


@lru_cache
def _multiprocessors(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and the bytes of shared memory of one."""
    if device.type != "cuda":
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor


def _power(count: int, least: int = 1) -> int:
    return max(least, int(triton.next_power_of_2(count)))


def _parts(tiles: int, steps: int, programs: int) -> int:
    """Parts to split the inner size of a product in: few rounds of short items, and little to sum up."""
    return min(range(1, min(4, steps) + 1), key=lambda s: -(-tiles * s // programs) * -(-steps // s) + s)


def _tiles(dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Tiles of weights (BN x BK, BV x BKV for the LM head) and of `rows` activations BR, keys per step BJ, stages in
    flight, warps, and the bytes of each weight row (multiples of 16) that are asked for before one barrier (AHEAD) and
    before several (AHEAD_LONG)."""
    height, common = min(64, _power(rows, 16)), {"WARPS": 4, "AHEAD": 0, "AHEAD_LONG": 0, "STAGES_KV": 2}
    if dtype == torch.float32:
        return common | {"BR": min(32, height), "BN": 32, "BK": 32, "BV": 64, "BKV": 32, "BJ": 16, "STAGES": 3}
    halves = {"BR": height, "BN": 64, "BK": 128, "BV": 128, "BKV": 64, "BJ": 64}
    return common | halves | {"STAGES": 4 if height < 64 else 3}


def _programs(device: torch.device, dtype: torch.dtype, m: dict[str, Any]) -> int:
    """Programs on the device together: two per multiprocessor where shared memory and registers (255 a thread) fit."""
    count, memory = _multiprocessors(device)
    products = m["STAGES"] * max((m["BN"] + m["BR"]) * m["BK"], (m["BV"] + m["BR"]) * m["BKV"])
    attention = (m["BM"] + 2 * m["STAGES_KV"] * m["BJ"]) * m["D"]
    fits = m["WARPS"] <= 4 and 2 * (max(products, attention) * dtype.itemsize + 4096) <= memory
    return count * (2 if fits else 1)


def draft_space(
    weights: DraftWeights,
    *,
    rows: int,
    pairs: int,
    top_k: int,
    depth: int,
    programs: int | None = None,
) -> DraftSpace:
    """Buffers for launches of `rows` batch rows with `pairs` accepted pairs each (0: none is fed) and trees of top_k
    and depth.

    `programs` must fit on the device together; None takes two per multiprocessor where they do. Raises
    ValueError for sizes that make no tree.
    """
    w, c, device = weights.tensors, weights.config, weights.tensors.fc.device
    (vocabulary, width), inner, size = w.lm_head.shape, w.down.shape[1], c.head_dim
    heads, kv_heads, tap_width = c.num_attention_heads, c.num_key_value_heads, c.target_hidden_size
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k is {top_k}; accepted are 1 to the draft vocabulary's {vocabulary}")
    if rows < 1 or pairs < 0 or depth < 0:
        raise ValueError(f"rows={rows}, pairs={pairs}, depth={depth}; accepted are at least 1, 0 and 0")
    most, words = rows * max(pairs, top_k), -(-depth * top_k // 64) or 1
    sizes = {"D": size, "BM": _power(heads // kv_heads * max(pairs, top_k), 16)}
    meta: dict[str, Any] = _tiles(w.fc.dtype, most)
    stage = max((meta["BN"] + meta["BR"]) * meta["BK"], (meta["BV"] + meta["BR"]) * meta["BKV"]) * w.fc.element_size()
    meta["STAGES"] = stages_within(meta["STAGES"], stage, device)
    meta |= sizes | ({} if device.type == "cuda" else {"AHEAD": 0, "AHEAD_LONG": 0})
    grid = _programs(device, w.fc.dtype, meta) if programs is None else programs
    outputs = {"S_FC": (width, w.fc.shape[1]), "S_QKV": w.qkv.shape, "S_O": w.o.shape, "S_DOWN": w.down.shape}
    splits = {name: _parts(-(-n // meta["BN"]), -(-k // meta["BK"]), grid) for name, (n, k) in outputs.items()}
    tiles = -(-vocabulary // meta["BV"])
    per_key_head = max(2, min(16, grid // (rows * kv_heads)))
    meta |= splits | {
        "B": rows,
        "PAIRS": pairs,
        "TOP": top_k,
        "DEPTH": depth,
        "TAPS": len(c.taps),
        "HT": tap_width,
        "H": width,
        "INNER": inner,
        "HQ": heads,
        "HKV": kv_heads,
        "V": vocabulary,
        "EPS": c.rms_norm_eps,
        "SCALE": size**-0.5,
        "FC_NORM": c.fc_norm,
        "NORM_RESIDUAL": c.norm_before_residual,
        "FED_NORM": c.norm_output,
        "SPLITS": 1 << (per_key_head.bit_length() - 1),
        "BNODES": _power(max(pairs, top_k), 16),
        "BH": _power(width),
        "BHT": _power(tap_width),
        "BT": _power(tiles),
        "BC": min(4096, _power(tiles * top_k)),
        "BTOP": _power(top_k),
        "BCH": _power(top_k * top_k),
        "BW": _power(words),
    }
    parts = max(splits[name] * most * n for name, (n, _) in outputs.items())

    def made(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    nodes, frontier = most * heads, rows * top_k
    states = (most, width), (most, heads * size), (most, inner), (most, width), (most, width), (most, width)
    parted, tiled = (nodes, meta["SPLITS"]), (frontier, tiles)
    # wide, x, mixed, act, residual, after, hidden; parts, mix, peak, mass; keys; high, total, score; front; words;
    # count, left
    buffers = (
        *made(w.fc.dtype, (max(rows * pairs * w.fc.shape[1], most * 2 * width),), *states),
        *made(torch.float32, (parts,), (*parted, size), parted, parted),
        torch.zeros(*tiled, top_k, dtype=torch.int64, device=device),
        *made(torch.float32, tiled, tiled, (frontier,)),
        torch.zeros(frontier, dtype=torch.int64, device=device),
        torch.zeros(2, frontier, words, dtype=torch.int64, device=device),
        *(torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)),
    )
    warps = meta.pop("WARPS")
    options = {"num_warps": warps, "launch_cooperative_grid": True} if device.type == "cuda" else {}
    return DraftSpace(rows, pairs, top_k, depth, buffers, meta, options, grid)


def draft(
    weights: DraftWeights,
    space: DraftSpace,
    tokens: Tensor | None,
    features: Tensor | None,
    counts: Tensor | None,
    last: Tensor,
    readout: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    limit: int,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Feed the accepted pairs, then grow a tree from the last of them, as `EagleDrafter.observe` and `propose` do.

    tokens [B, P] int64, features [B, P, taps * H_t] and counts [B] int64, the real pairs, are None where the space has
    none. last, readout [B, H], the state fed back and its norm that the LM head reads, are replaced where counts > 0;
    lengths [B] int64 grow by counts up to `limit`. k_cache, v_cache [B, Hkv, C, D] (slots and channels contiguous) take
    the pairs at slots lengths + i and the nodes behind them: C must hold limit + max(P, depth * top_k). cos, sin [C, R
    / 2] fp32 are tables by position. Returns the candidates in order of growth: scores [B, M] fp32, tokens [B, M] int64
    and parents [B, M] int64, candidate indices or -1; `out` are tensors to write them to.
    """
    w, c, s = weights.tensors, weights.config, space
    rows, dtype, op = s.rows, w.fc.dtype, "draft"
    expect(op, (rows, w.lm_head.shape[1]), dtype, CONTIGUOUS, last=last, readout=readout)
    expect(op, (rows,), torch.int64, CONTIGUOUS, lengths=lengths)
    expect(op, cos.shape, torch.float32, CONTIGUOUS, cos=cos, sin=sin)
    if s.pairs:
        if tokens is None or features is None or counts is None:
            raise ValueError(
                f"this space feeds {s.pairs} pairs per row: give tokens, features and counts, or make a space with "
                "pairs=0"
            )
        expect(op, (rows, s.pairs), torch.int64, CONTIGUOUS, tokens=tokens)
        expect(op, (rows, s.pairs, w.fc.shape[1]), dtype, CONTIGUOUS, features=features)
        expect(op, (rows,), torch.int64, CONTIGUOUS, counts=counts)
    slots, need = k_cache.shape[2], limit + max(s.pairs, s.depth * s.top_k)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(op, (rows, c.num_key_value_heads, slots, c.head_dim), dtype, **{name: cache})
        laid = cache.stride() == k_cache.stride() and cache.stride()[2:] == (c.head_dim, 1)
        if not laid or min(slots, len(cos)) < need:
            raise ValueError(
                f"draft: {name} is {list(cache.shape)}, strides {cache.stride()}, with {len(cos)} positions in the "
                f"tables; accepted are slots and channels that are contiguous, and {need} slots and positions or more"
            )
    grown = rows, s.top_k + s.depth * s.top_k**2
    kinds = (torch.float32, torch.int64, torch.int64)
    scores, out_tokens, parents = out or (torch.empty(grown, dtype=kind, device=last.device) for kind in kinds)
    expect(op, grown, torch.float32, CONTIGUOUS, scores=scores)
    expect(op, grown, torch.int64, CONTIGUOUS, tokens=out_tokens, parents=parents)
    if tokens is None or features is None or counts is None:  # not read
        tokens, features, counts = lengths, last, lengths
    draft_kernel[(s.programs,)](
        *(tokens, features, counts, last, readout, k_cache, v_cache, lengths, cos, sin),
        *(*w, scores, out_tokens, parents, s.buffers, limit, *k_cache.stride()[:2]),
        HALF=cos.shape[1],
        **s.meta,
        **s.options,
    )
    return scores, out_tokens, parents
