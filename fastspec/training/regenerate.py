"""The target answers the training prompts itself: a head learns to guess its target, not the data set's authors.

Prompts are sorted by length and answered in large left-padded batches on one preallocated KV cache. On CUDA the decoding step is one
graph per (rows, cache size); as rows finish, the batch is halved onto the rows still going. Shards are written as they are done, so
that a stopped run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from fastspec.generation.capture import recorded
from fastspec.patches.hf.cache_names import cache_argument
from fastspec.training.config import TrainConfig
from fastspec.training.data import Row, Texts, encode_prompts
from fastspec.training.shards import Clock, Shards

ATTENTION = "fastspec_slots"


def end_tokens(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: those of the target's generation configuration, and the tokenizer's."""
    found = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    ends = {*(found if isinstance(found, list | tuple) else [found]), getattr(tokenizer, "eos_token_id", None)}
    return tuple(sorted(token for token in ends if token is not None))


def answer_prompts(
    target: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    ends: Sequence[int],
    config: TrainConfig,
    folder: Path,
    clock: Clock,
    *,
    greedy: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Texts:
    """The target's answers to `rows`, as texts; shards are kept in `folder` and not made twice.

    A share `config.sampled_share` is sampled (temperature, top-p), the rest greedy; with `greedy` all are. `tell` is given the rows that
    are answered, and how many they will be. Raises `OutOfTime` where `clock` ends.
    """
    shards = Shards(folder, clock)
    parts = []
    for number, start in enumerate(range(0, len(rows), config.shard_texts)):
        chosen, seed = rows[start : start + config.shard_texts], (config.seed, start)

        def make(
            chosen: Sequence[Row] = chosen, seed: tuple[int, int] = seed, start: int = start
        ) -> tuple[Texts, dict[str, Any]]:
            share = 0.0 if greedy else config.sampled_share
            sampled = np.random.default_rng(seed).random(len(chosen)) < share
            done = lambda count: tell(start + count, len(rows))  # noqa: E731
            return answer(target, encode_prompts(tokenizer, chosen), sampled, config, ends, tell=done), {}

        parts.append(shards.get(number, seed, make)[0])
        tell(start + len(chosen), len(rows))
    return Texts.join(parts)


def answer(
    target: Any, prompts: Sequence[Sequence[int]], sampled: np.ndarray, config: TrainConfig, ends: Sequence[int], *, rows: int = 1024,
    tell: Callable[[int], None] = lambda count: None,
) -> Texts:  # fmt: skip
    """Answer tokenised prompts, in their order; prompts longer than `config.max_length - new_tokens` get an empty answer.

    `sampled` [N] says which are sampled rather than greedy; an answer stops after one of `ends`, or at `config.new_tokens`. A
    batch is of at most `rows` on CUDA, and its cache takes a quarter of the free memory; on the CPU 16 rows are taken at a time. `tell`
    is given the number of prompts that are answered, after every batch.
    """
    room = config.max_length - config.new_tokens
    order = sorted((i for i in range(len(prompts)) if 0 < len(prompts[i]) <= room), key=lambda i: len(prompts[i]))
    rows, slots = (rows, _cache_slots(target)) if target.device.type == "cuda" else (16, 2**62)
    answers: list[list[int]] = [[] for _ in prompts]
    answered = len(prompts) - len(order)
    former = target.config._attn_implementation
    target.set_attn_implementation(ATTENTION)
    try:
        for group in split_rows(order, [len(prompts[i]) + config.new_tokens for i in order], rows, slots):
            found = _Decoder(target, config, ends).run([prompts[i] for i in group], torch.from_numpy(sampled[group]))
            for index, tokens in zip(group, found, strict=True):
                answers[index] = tokens
            answered += len(group)
            tell(answered)
    finally:
        target.set_attn_implementation(former)
    pairs = [([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    return Texts.of(pairs, ~sampled)


def split_rows(order: Sequence[int], sizes: Sequence[int], rows: int, slots: int) -> list[list[int]]:
    """`order` in groups of at most `rows`, each padded to its largest size holding at most `slots`; a group has at least one entry."""
    groups: list[list[int]] = []
    largest = 0
    for index, size in zip(order, sizes, strict=True):
        largest = max(largest, size) if groups else size
        if not groups or len(groups[-1]) == rows or (len(groups[-1]) + 1) * largest > slots:
            groups.append([])
            largest = size
        groups[-1].append(index)
    return groups


def _cache_slots(target: Any) -> int:
    """How many positions of the KV cache a quarter of the free device memory holds."""
    c, device = target.config.get_text_config(), target.device
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free // 4 // (2 * c.num_hidden_layers * heads * width * target.dtype.itemsize))


class _Slots(Cache):
    """Keys and values in fixed buffers [rows, heads, size, D]; the next token is written at `position`, a device tensor."""

    def __init__(self, size: int) -> None:
        super().__init__(layers=[])
        self.size = size
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.position: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.buffers):
            b, h, _, d = key_states.shape
            self.buffers.append((key_states.new_zeros(b, h, self.size, d), value_states.new_zeros(b, h, self.size, value_states.shape[-1])))
        keys, values = self.buffers[layer_idx]
        if self.position is None:
            keys[:, :, : key_states.shape[2]] = key_states
            values[:, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        keys.index_copy_(2, self.position, key_states)
        values.index_copy_(2, self.position, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def keep(self, chosen: Tensor) -> None:
        """Keep these rows only."""
        for index, (keys, values) in enumerate(self.buffers):
            self.buffers[index] = (keys[chosen], values[chosen])


def _slots_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention without repeating grouped keys: query [B, Hq, T, D], key and value [B, Hkv, L, D], bool mask [B, 1, T, L]."""
    b, hq, t, d = query.shape
    hkv = key.shape[1]
    if t > 1:
        groups = hq // hkv
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    grouped = query.reshape(b, hkv, hq // hkv, d)
    scores = (grouped @ key.transpose(2, 3)) * (d**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[:, :, 0, None], float("-inf")).view_as(scores)
    out = scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    return out.reshape(b, 1, hq, d), None


AttentionInterface.register(ATTENTION, _slots_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: kwargs.get("attention_mask"))


class _Decoder:
    """One batch from its prompts to its answers."""

    def __init__(self, target: Any, config: TrainConfig, ends: Sequence[int]) -> None:
        self.target, self.config, self.taking = target, config, cache_argument(type(target).forward)
        self.device = target.device
        self.ends = torch.tensor(list(ends), dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], sampled: Tensor) -> list[list[int]]:
        """Answers to one batch of prompts, the end token included where one was reached."""
        longest, count = max(map(len, prompts)), len(prompts)
        steps = self.config.new_tokens
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        pad = torch.tensor([longest - len(p) for p in prompts], device=self.device)
        self.slots = _Slots(longest + steps)
        self.pad, self.sampled = pad, sampled.to(self.device)
        self.greedy = not bool(sampled.any())
        self.out = torch.full((count, steps), -1, device=self.device)
        self.owner = torch.arange(count, device=self.device)
        self.done = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.position = torch.tensor([longest], device=self.device)
        self.columns = torch.arange(longest + steps, device=self.device)
        self.start = longest
        self.token = self._choose(self._prefill(ids, pad))
        self._note(self.token, 0)
        step: Callable[[], None] = self._step
        for i in range(1, steps):
            if i % 16 == 1:
                going = int((~self.done).sum())
                if not going:
                    break
                shrink = going <= len(self.done) // 2
                if shrink:
                    self._shrink()
                if self.device.type == "cuda" and (shrink or i == 1):
                    step = self._capture()
            step()
        found = []
        for row in self.out.tolist():
            tokens = row[: row.index(-1)] if -1 in row else row
            found.append(tokens)
        return found

    def _prefill(self, ids: Tensor, pad: Tensor) -> Tensor:
        size = ids.shape[1]
        at = torch.arange(size, device=self.device)
        last = []
        layers: list[list[tuple[Tensor, Tensor]]] = []
        for rows in torch.arange(len(ids), device=self.device).split(128):
            part = _Slots(self.slots.size)
            mask = (at[None, :] <= at[:, None]) & (at >= pad[rows, None])[:, None]
            mask = (mask | torch.eye(size, dtype=torch.bool, device=self.device))[:, None]
            where = (at - pad[rows, None]).clamp(min=0)
            out = self.target(
                input_ids=ids[rows], attention_mask=mask, position_ids=where, use_cache=True, logits_to_keep=1, **{self.taking: part}
            )
            last.append(out.logits[:, -1])
            layers.append(part.buffers)
        self.slots.buffers = [(torch.cat([p[i][0] for p in layers]), torch.cat([p[i][1] for p in layers])) for i in range(len(layers[0]))]
        return torch.cat(last)

    def _step(self) -> None:
        self.slots.position = self.position
        mask = ((self.columns >= self.pad[:, None]) & (self.columns <= self.position))[:, None, None]
        where = self.position - self.pad[:, None]
        out = self.target(
            input_ids=self.token[:, None], attention_mask=mask, position_ids=where, use_cache=True, **{self.taking: self.slots}
        )
        self.token.copy_(self._choose(out.logits[:, -1]))
        self.position += 1
        self._note(self.token, self.position - self.start)

    def _note(self, token: Tensor, column: Tensor | int) -> None:
        """Write the tokens of rows that are still going, and mark those that end here."""
        column = torch.as_tensor(column, device=self.device).expand(1)
        kept = torch.where(self.done, -1, token)
        self.out[self.owner, column] = kept
        self.done |= (token[:, None] == self.ends).any(-1)

    def _choose(self, logits: Tensor) -> Tensor:
        """Greedy, or for the sampled rows one draw after temperature and top-p (among the 64 most likely)."""
        best = logits.argmax(-1)
        if self.greedy:
            return best
        top = (logits.float() / self.config.temperature).topk(min(64, logits.shape[-1]), -1)
        probs = top.values.softmax(-1)
        probs = torch.where(probs.cumsum(-1) - probs < self.config.top_p, probs, 0.0)
        drawn = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return torch.where(self.sampled, top.indices.gather(-1, drawn)[:, 0], best)

    def _shrink(self) -> None:
        chosen = (~self.done).nonzero()[:, 0]
        self.slots.keep(chosen)
        for name in ("pad", "sampled", "owner", "done", "token"):
            setattr(self, name, getattr(self, name)[chosen])

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph. Warming up and capturing run it for real, so what it changes is put back first."""
        kept = [x.clone() for x in (self.token, self.position, self.done, self.out)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            self._step()
        for x, old in zip((self.token, self.position, self.done, self.out), kept, strict=True):
            x.copy_(old)
        return graph.replay
