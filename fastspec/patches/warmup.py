"""Short calls of every kind that a patched model will be asked for, so that its kernels are compiled and its rounds captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastspec.errors import Unsupported
from fastspec.generation.capture import padded_width
from fastspec.generation.prompt_parts import widest_part
from fastspec.patches.hf.compat import device_of, unwrapped
from fastspec.patches.session import session_of

NEW = 4
"""Tokens of every call: its first round runs, the second is captured."""
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


def widths(length: int, rows: int, device: torch.device) -> list[int]:
    """Prompts that make every pass of `rows` texts of up to `length` tokens: the powers of two that parts of a prompt are padded to, and
    the whole length."""
    powers, widest = [padded_width(1)], widest_part(rows, captures=device.type == "cuda")
    while powers[-1] < widest:
        powers.append(2 * powers[-1])
    return [*(width for width in powers if width < length), length]


def warmup(
    model: Any, *, rows: Sequence[int] = (1,), length: int = 2048, assistants: Sequence[str] | None = None,
    told: Callable[[int, int], object] | None = None,
) -> float:  # fmt: skip
    """Make short calls on a patched model, so that a later call finds its kernels compiled and, in this process, its rounds captured ->
    the seconds that it took.

    The calls are of every number of `rows` (prompts at once), of prompts of up to `length` tokens, greedy and sampled, by every assistant
    that the model is patched with, or by the names in `assistants`. Kernels stay in Triton's cache on disk: a server's image is warmed up
    once, on a GPU of the kind that it runs on. `told` is called with (calls that are done, of how many). Random numbers that the caller
    draws later are those that it would have drawn. Encoder-decoder models, and cascades, are left to their first call. Raises Unsupported
    for an unpatched model and for numbers that are none.
    """
    model = unwrapped(model)
    session = session_of(model)
    if session is None:
        raise Unsupported(f"this {type(model).__name__} is not patched: fastspec.patch(model) comes before fastspec.warmup(model)")
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder model: its first call warms it up")
    if not rows or any(count < 1 for count in rows) or length < 1:
        raise Unsupported(f"rows={list(rows)} and length={length}: numbers of prompts and tokens from 1 on are accepted")
    known = ("autoregressive", "nasd", *(name for name in session.resources if name != "cascade"))
    names = known if assistants is None else tuple(assistants)
    if unknown := set(names) - set(known):
        raise Unsupported(f"assistants {sorted(unknown)}: this model is patched with {', '.join(known)}")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length + NEW
    began, device = time.perf_counter(), device_of(model)
    calls = list(_calls(names, rows, max(1, min(length, most - NEW)), device))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for done, (name, count, width, options) in enumerate(calls):
            if told is not None:
                told(done, len(calls))
            ids = torch.randint(model.config.get_text_config().vocab_size, (count, width), device=device)
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), assistant=name, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
                **options,
            )  # fmt: skip
    if told is not None:
        told(len(calls), len(calls))
    return time.perf_counter() - began


def _calls(
    names: Sequence[str], rows: Sequence[int], length: int, device: torch.device
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:  # fmt: skip
    """(assistant, rows, tokens of the prompts, how tokens are chosen)."""
    for name in names:
        for count in rows:
            for width in widths(length, count, device):
                yield name, count, width, {"do_sample": False}
            yield name, count, min(32, length), SAMPLED
