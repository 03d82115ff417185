"""Log-probabilities of a given text, by the passes that rounds verify drafts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastspec.devices import made_current
from fastspec.errors import Unsupported
from fastspec.generation.target import compact
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import TokenLogprob, top_logprobs
from fastspec.patches.call.refusals import refuse_ids
from fastspec.patches.hf.compat import device_of, unwrapped
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.modes import is_wrapped, mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.session import PatchSession, patched_session

Value = TypeVar("Value")
NODES = 64
"""Tokens of each row that a pass scores."""
SCORES = 1 << 26
"""Scores of a pass at most, in all rows together."""


@torch.no_grad()
def log_probs(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Log-probability of every token of a text after those before it, as generation has it.

    input_ids and attention_mask [B, T] are texts with padding on either side, or none without a mask. Returns [B, T -
    1] fp32: at t the log-probability of token t + 1 under the softmax of the logits over `temperature`, and 0 where
    either of the two is padding. Nothing is drawn or kept, and there are no gradients.

    The text is read in chains of nodes by the kernels of rounds. Of a model patched with `exact=True` these are the
    bits of what `generate(..., output_logits=True)` returns; else, and in fp32, they are equal but for rounding.

    Raises Unsupported for an unpatched model, an encoder-decoder, a model that reads more than tokens or that several
    processes hold, texts and masks that are no such tensors, a mask with a hole, and a temperature that is not above 0.
    """
    model, session = _session(model)
    if not temperature > 0:
        raise Unsupported(f"log_probs: temperature={temperature} must be above 0")
    refuse_ids(model, {"input_ids": input_ids, "attention_mask": attention_mask})
    device = device_of(model)
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ids, keep = input_ids.to(device), keep.to(device).bool()
    if keep.shape != ids.shape or bool((keep[:, 1:] > keep[:, :-1]).sum(1).add(keep[:, 0]).gt(1).any()):
        raise Unsupported("log_probs takes a mask as wide as the texts, with the tokens of each side by side")
    texts, counts = compact(ids, keep)
    found = ids.new_zeros((len(ids), ids.shape[1] - 1), dtype=torch.float32)
    if texts.shape[1] < 2:
        return found

    def taken(logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, N] of tokens [B, N] under logits [B, N, V]."""
        return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    with made_current(device):
        scored = torch.cat(list(_passes(model, session, texts, counts, taken, nullcontext)), 1)
    real = keep[:, 1:] & keep[:, :-1]
    found[real] = scored[torch.arange(scored.shape[1], device=device) < counts[:, None] - 1]
    return found


@torch.no_grad()
def text_logprobs(model: Any, ids: Sequence[int], count: int) -> Iterator[list[TokenLogprob]]:
    """Log-probabilities of one text's tokens from the second on, with the `count` likeliest each, pass by pass; a pass
    takes its turn between those of an open batch. Raises Unsupported as `log_probs`."""
    model, session = _session(model)
    device = device_of(model)
    text = torch.tensor([list(ids)], device=device)
    if text.shape[1] < 2:
        return

    def read(logits: Tensor, tokens: Tensor) -> list[TokenLogprob]:
        return top_logprobs(logits[0], tokens[0].tolist(), count)

    counts = text.new_tensor([text.shape[1]])
    yield from _passes(model, session, text, counts, read, lambda: session.turn.taken(device))


def _session(model: Any) -> tuple[Any, PatchSession]:
    """The model without wrappers, and its session. Raises Unsupported for one whose texts are not scored."""
    model = unwrapped(model)
    session = patched_session(model, "its texts are scored after fastspec.patch(model)")
    if model.config.is_encoder_decoder or is_wrapped(model):
        raise Unsupported(f"log_probs reads texts of tokens alone, and {type(model).__name__} reads more than these")
    if group_of(model) is not None:
        raise Unsupported(f"log_probs is for one process, and several hold this {type(model).__name__}")
    session.unpack(model)
    return model, session


def _passes(
    model: Any,
    session: PatchSession,
    texts: Tensor,
    counts: Tensor,
    read: Callable[[Tensor, Tensor], Value],
    turn: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Value]:
    """Values of `read` for logits [B, N, V] and tokens [B, N], pass by pass, of texts [B, T] padded on the right."""
    rows, longest = texts.shape
    nodes = max(1, min(NODES, longest - 1, SCORES // (rows * model.config.get_text_config().vocab_size)))
    with turn():
        ops = session.ops(model, mode_for(model))
        target = language_model(model, None, rows=rows, capacity=longest, tail=nodes, ops=ops, first=longest)
        logits, _ = target.prefill(texts[:, :1], torch.ones_like(counts))
        found = read(logits[:, None], texts[:, 1:2])
    yield found
    active = torch.ones_like(counts, dtype=torch.bool)
    for at in range(1, longest - 1, nodes):
        tree = TokenTree.chain(texts[:, at : min(at + nodes, longest - 1)])
        count = tree.tokens.shape[1]
        with turn():
            target.reserve(at + count)
            logits, _ = target.score(tree, at)
            found = read(logits, texts[:, at + 1 : at + 1 + count])
            path = torch.arange(count, device=texts.device).expand(rows, -1)
            target.commit(Verdict(path, torch.full_like(counts, count - 1), texts[:, at + count]), active)
        yield found
