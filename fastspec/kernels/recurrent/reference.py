"""Gated DeltaNet over trees in plain torch: what the kernels beside it compute, and their specification.

The recurrence of a value head along a text, from a state S [Dk, Dv], with a key k and a query q of norm 1, a value v, a
decay e^g and a rate beta (Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464):

    S = e^g S;  S = S + k (beta (v - k S))^T;  o = q S / sqrt(Dk)

No node of a tree has a state of its own. With G_i the sum of the g from the root to node i, and S what the committed
text left, each node's update u_i solves a triangular system over its ancestors j, and outputs and states follow from
the updates of a path (the WY form of the recurrence with the ancestors of a tree in place of all earlier tokens;
TreeWY, arXiv 2608.20961):

    u_i = beta_i (v_i - e^G_i k_i S - sum_j e^(G_i - G_j) (k_i k_j) u_j)
    o_i = (e^G_i q_i S + sum_j e^(G_i - G_j) (q_i k_j) u_j + (q_i k_i) u_i) / sqrt(Dk)
    S_i = e^G_i S + sum_j e^(G_i - G_j) k_j u_j^T + k_i u_i^T

Letters: L layers, B rows (sequences), N nodes of a row's tree, P of its longest path, Hk key heads, Hv value heads, Dk
and Dv their sizes, C channels 2 * Hk * Dk + Hv * Dv of queries, keys and values, K width of the convolution, W 64-bit
words. States are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-6
"""Addend of the square of a query's or key's length."""
CHUNK = 64
"""Tokens of a text that are one triangular system."""


@dataclass(frozen=True, slots=True)
class DecayRates:
    """Sources of the nodes' decay and rate: a node's g is -e^log_decay softplus(a + bias), its beta `scale` times
    sigmoid(b).

    `log_decay` and `bias` are [Hv].
    """

    log_decay: Tensor
    bias: Tensor
    scale: float = 1.0

    def of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a, b [B, N, Hv] -> g and beta, fp32; beta is rounded to b's dtype on its way."""
        return -self.log_decay.float().exp() * F.softplus(a.float() + self.bias.float()), (
            b.sigmoid() * self.scale
        ).float()


def tree_conv(
    x: Tensor,
    weight: Tensor,
    held: Tensor,
    parents: Tensor | None,
    kept: Tensor | None = None,
    out: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """A causal convolution along every node's ancestors, and SiLU if asked for -> [B, N, C]. Sums are fp32, rounded
    before and after SiLU.

    x [B, N, C] are the nodes' inputs, weight [C, K] the channels' own, the last column for the node itself; held [B, K,
    C] the last K inputs of the committed text, zeros where there are fewer. parents [B, N] int64 as in `TokenTree`;
    None: a chain. `kept` and `out` [B, N, C] receive the inputs and the result where given.
    """
    width = weight.shape[1]
    index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    above = (index - 1 if parents is None else torch.where(index == 0, -1, parents)) + width
    before = (torch.arange(width, device=x.device) - 1).clamp(min=0).expand(len(x), -1)
    step, texts = torch.cat((before, above), 1), torch.cat((held, x), 1)
    place, total = index + width, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in reversed(range(width)):
        total = total + texts.gather(1, place[..., None].expand_as(x)).float() * weight[:, column].float()
        place = step.gather(1, place)
    if kept is not None:
        kept.copy_(x)
    mixed = F.silu(total.to(x.dtype)) if silu else total.to(x.dtype)
    return mixed if out is None else out.copy_(mixed)


def hold(x: Tensor, held: Tensor, counts: Tensor) -> None:
    """Take the inputs of the first counts [B] of x [B, T, C] into held [B, K, C], in place: the last K."""
    width = held.shape[1]
    place = counts[:, None] + torch.arange(width, device=x.device)
    held.copy_(torch.cat((held, x), 1).gather(1, place[..., None].expand_as(held)))


def heads_of(mixed: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [..., C] of (Hk, Hv, Dk, Dv) -> queries and keys [..., Hv, Dk], of length 1 and divided by sqrt(Dk) for
    queries, and values [..., Hv, Dv]; fp32. A key head serves Hv / Hk value heads that follow each other."""
    key_heads, value_heads, key_size, value_size = sizes
    q, k, v = mixed.float().split((key_heads * key_size, key_heads * key_size, value_heads * value_size), -1)
    q, k = (x.unflatten(-1, (key_heads, key_size)).repeat_interleave(value_heads // key_heads, -2) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + TINY) for x in (q, k))
    return q / key_size**0.5, k, v.unflatten(-1, (value_heads, value_size))


def sizes_of(mixed: Tensor, state: Tensor) -> tuple[int, int, int, int]:
    """(Hk, Hv, Dk, Dv) of mixed [..., C] and a state [..., Hv, Dk, Dv]."""
    value_heads, key_size, value_size = state.shape[-3:]
    return (mixed.shape[-1] - value_heads * value_size) // (2 * key_size), value_heads, key_size, value_size


def delta_tree(
    mixed: Tensor, a: Tensor, b: Tensor, rates: DecayRates, state: Tensor, words: Tensor, updates: Tensor, gates: Tensor
) -> Tensor:
    """Outputs of a tree's nodes [B, N, Hv, Dv] in mixed's dtype; the state stays as it is.

    mixed [B, N, C] is what `tree_conv` gives, a and b [B, N, Hv] go to `rates`, state [B, Hv, Dk, Dv]; words [B, N, W]
    int64 are the ancestors, as in `TokenTree`. updates [B, N, Hv, Dv] and gates [B, N, Hv], fp32, receive u and G.
    """
    nodes = mixed.shape[1]
    place = torch.arange(nodes, device=mixed.device)
    sees = (words[:, :, place >> 6] >> (place & 63) & 1).bool()
    g, beta = rates.of(a, b)
    q, k, v = heads_of(mixed, sizes_of(mixed, state))
    total = (sees.float() @ g).transpose(1, 2)
    out, solved = _solve(q, k, v, beta, total, sees[:, None], state)
    updates.copy_(solved.transpose(1, 2))
    gates.copy_(total.transpose(1, 2))
    return out.to(mixed.dtype)


def delta_chain(mixed: Tensor, a: Tensor, b: Tensor, rates: DecayRates, state: Tensor, counts: Tensor) -> Tensor:
    """The same for a text that stands: outputs [B, T, Hv, Dv], and state [B, Hv, Dk, Dv] is moved behind its first
    counts [B] tokens."""
    g, beta = rates.of(a, b)
    real = torch.arange(mixed.shape[1], device=mixed.device) < counts[:, None]
    g, beta = g * real[..., None], beta * real[..., None]
    q, k, v = heads_of(mixed, sizes_of(mixed, state))
    outs = []
    for part in range(0, mixed.shape[1], CHUNK):
        keys, gate = k[:, part : part + CHUNK], g[:, part : part + CHUNK].cumsum(1).transpose(1, 2)
        sees = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool, device=mixed.device).tril()
        out, solved = _solve(
            q[:, part : part + CHUNK], keys, v[:, part : part + CHUNK], beta[:, part : part + CHUNK], gate, sees, state
        )
        outs.append(out)
        last = gate[..., -1:]
        weighted = keys.transpose(1, 2) * (last - gate).exp()[..., None]
        state.copy_(state * last.exp()[..., None] + weighted.transpose(-1, -2) @ solved)
    return torch.cat(outs, 1).to(mixed.dtype)


def _solve(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor, sees: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k, v [B, N, Hv, D], beta [B, N, Hv], gate [B, Hv, N], sees [..., N, N] bool with a node itself -> outputs [B,
    N, Hv, Dv] and updates [B, Hv, N, Dv]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rate = beta.transpose(1, 2)[..., None]
    decay = (gate[..., :, None] - gate[..., None, :]).masked_fill(~sees, -torch.inf).exp()
    grown = gate.exp()[..., None]
    system = (k @ k.transpose(-1, -2)) * decay * rate
    wanted = rate * (v - grown * (k @ state))
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = grown * (q @ state) + ((q @ k.transpose(-1, -2)) * decay) @ solved
    return out.transpose(1, 2), solved


def delta_commit(
    states: Tensor,
    held: Tensor,
    inputs: Tensor,
    mixed: Tensor,
    updates: Tensor,
    gates: Tensor,
    path: Tensor,
    accepted: Tensor,
    active: Tensor,
) -> None:
    """Move the states of L layers behind the accepted paths, in place.

    states [L, B, Hv, Dk, Dv], held [L, B, K, C]; of the tree's nodes inputs and mixed [L, B, N, C], updates [L, B, N,
    Hv, Dv] and gates [L, B, N, Hv]. path [B, P] int64 from the root on, of which accepted [B] + 1 nodes are kept in the
    rows that are active [B] bool.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    kept = (steps <= accepted[:, None]) & active[:, None]
    row = torch.arange(len(path), device=path.device)[:, None]
    _, k, _ = heads_of(mixed[:, row, path], sizes_of(mixed, states))
    gate = gates[:, row, path]
    last = gate.gather(2, accepted[None, :, None, None].expand(len(gate), -1, 1, gate.shape[3]))
    weight = (last - gate).masked_fill(~kept[..., None], -torch.inf).exp()
    added = torch.einsum("lbphk,lbphv->lbhkv", k * weight[..., None], updates[:, row, path])
    decayed = states * last[:, :, 0, :, None, None].exp() + added
    states.copy_(torch.where(active[:, None, None, None], decayed, states))
    counts = (accepted + 1) * active
    for layer, each in enumerate(inputs):
        hold(each[row, path], held[layer], counts)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., D] by weight [D] as `rms_norm`, times SiLU of gate [..., D], in gate's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((weight * wide.to(x.dtype)) * F.silu(gate.float())).to(x.dtype)
