"""One step of transformers' own `generate` at a time, for the rounds that decode in lockstep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.errors import NoDistribution


class PlainSteps:
    """What plain `generate` does with a step's logits, in its order: processors, choice, padding, criteria, streamer.

    ids [B, T] are the prompts as `generate` has them. A sampled token is drawn as `generate` draws it, so that a seed gives its tokens.
    `scores` and `logits` hold a tensor [B, V] per step, where the call asks for them.
    """

    def __init__(self, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.ids, self.processors, self.criteria, self.streamer = ids, processors, criteria, streamer
        self.sample = bool(config.do_sample)
        wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        """Whether rows that have ended are padded; else they go on until all have ended, as in transformers."""
        pad = config._pad_token_tensor
        self.pad_token = 0 if pad is None else int(pad)
        self.unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        self.width = ids.shape[1]
        self.lengths: list[int | None] = [None] * ids.shape[0]
        self.over = False

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        """The next token of every row; see `fastspec.generation.lockstep.Steps`."""
        # Processors write into these scores, some past torch and its strides: a copy, laid out as plain decoding's.
        raw = logits.to(dtype=torch.float32, device=self.ids.device).clone(memory_format=torch.contiguous_format)
        processed = self.processors(self.ids, raw) if scores is None else scores.to(dtype=torch.float32, device=self.ids.device)
        if self.scores is not None:
            self.scores += (processed,)
        if self.logits is not None:
            self.logits += (raw,)
        tokens = self._drawn(torch.softmax(processed, -1)) if self.sample else processed.argmax(-1)
        if self.pads:
            tokens = tokens * self.unfinished + self.pad_token * (1 - self.unfinished)
        self.ids = torch.cat((self.ids, tokens[:, None]), -1)
        self.unfinished = self.unfinished & ~self.criteria(self.ids, self.scores)
        going = self.unfinished.tolist()
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        chosen = self.ids[:, -1].tolist()  # a criterion may have written there: the model reads it so
        self.over = not any(going)
        if self.pads:
            here = self.ids.shape[1] - self.width
            self.lengths = [here if length is None and not on else length for length, on in zip(self.lengths, going, strict=True)]
        return chosen

    def _drawn(self, probs: Tensor) -> Tensor:
        """Tokens [B] of probabilities [B, V]. Raises NoDistribution where plain decoding's own draw would raise or, on CUDA, end the
        process."""
        for row, fails in enumerate(probs[:, 0].isnan().tolist()):  # then all of the row are
            if fails:
                raise NoDistribution.after(self.ids.shape[1] - self.width, row)
        return torch.multinomial(probs, num_samples=1)[:, 0]
