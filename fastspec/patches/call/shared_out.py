"""A call of a model whose weights several processes share out (FSDP), or one process holds.

Passes of a call depend on its drafts. So every process says before each pass that it works, and an idle one (`agree`)
answers each with a pass over a single token, until none works.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastspec.errors import Unsupported
from fastspec.patches.assistants.registry import Continued, HeadDecoding
from fastspec.patches.hf.compat import device_of, is_shared_out


class LocalCall:
    """Call of a model whose weights one process holds: it waits for nobody."""

    def __enter__(self) -> LocalCall:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def check(self, decoding: Any) -> None:
        """Raise Unsupported for a decoding that cannot run here."""

    def agree(self, able: bool) -> bool:
        """True where all processes are able to go on with an assistant."""
        return able


class SynchronizedCall(LocalCall):
    """Call that all processes of FSDP make, each on prompts of its own; one that fails still answers the others'
    passes.

    A process waits when it knows whether it can serve the call, and in the end. Where one cannot, none does, and plain
    decoding keeps processes together in its own way.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.answering, self.agreed = model, False, False

    def __enter__(self) -> SynchronizedCall:
        self.hook: Any = self.model.register_forward_pre_hook(self._before_pass, prepend=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.hook is not None:
            self._wait(self.agreed)
            self._leave()

    def check(self, decoding: Any) -> None:
        """Raise Unsupported for what runs the model other than in whole passes, or needs weights between them."""
        inner, why = decoding.decoding if isinstance(decoding, Continued) else decoding, None
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()):
            why = (
                "it is the first version of it, whose inner model does not gather its weights by itself: use "
                "fully_shard"
            )
        elif self.model.config.is_encoder_decoder:
            why = "an encoder-decoder model takes no assistant there"
        elif getattr(inner, "modules", None) is None:  # stages, each of which generates by itself
            why = "a cascade's stages are not run over several processes"
        elif any(is_shared_out(module) for module in inner.modules):
            why = "its draft model is shared out too, and its passes are not kept in step"
        elif isinstance(inner, HeadDecoding) and self._is_cut():
            why = (
                "a head reads its embeddings between two passes, where they are cut: call fully_shard(model, "
                "reshard_after_forward=False)"
            )
        if why is not None:
            raise Unsupported(
                f"several processes share out the weights of this {type(self.model).__name__} by FSDP, and {why}"
            )

    def _is_cut(self) -> bool:
        """True where embeddings or LM head are cut behind a pass."""
        self._pass()
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return any(isinstance(getattr(end, "weight", None), DTensor) for end in ends)

    def agree(self, able: bool) -> bool:
        """Wait until no process works -> whether all are able to go on. Where they are not, this is over."""
        self.agreed = self._wait(able)
        if not self.agreed:
            self._leave()
        return self.agreed

    def _leave(self) -> None:
        self.hook.remove()
        self.hook = None

    def _before_pass(self, module: Any, args: Any) -> None:
        if not self.answering:
            self._say(works=True, able=True)

    def _wait(self, able: bool) -> bool:
        while True:
            works, all_able = self._say(works=False, able=able)
            if not works:
                return all_able
            self.answering = True
            try:
                self._pass()
            finally:
                self.answering = False

    @torch.no_grad()
    def _pass(self) -> None:
        self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(self.model)), use_cache=False)

    def _say(self, *, works: bool, able: bool) -> tuple[bool, bool]:
        """Tell all processes -> whether any works, and whether all are able."""
        told = torch.tensor([works, not able], dtype=torch.int32, device=device_of(self.model))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        any_works, any_unable = told.tolist()
        return bool(any_works), not any_unable
