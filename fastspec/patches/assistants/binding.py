"""A head's binding to its target, kept right where the target was moved, cast, or given another embedding or LM head since."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from fastspec.errors import Unsupported
from fastspec.generation.drafters.eagle.head import EagleHead
from fastspec.patches.hf.compat import device_of

OWN_EMBEDDING = "_brought_embedding"  # set on a head: whether its embedding is its own rather than the target's
BOUND_ROWS = "_bound_rows"  # set on a head: the rows of the target's embedding and LM head when it was bound


def rows_of(target: PreTrainedModel) -> tuple[int, int]:
    """Rows of a target's embedding and of its LM head. Raises Unsupported for a module in place of either that has no weight of its own."""
    for name, module in (("embedding", target.get_input_embeddings()), ("LM head", target.get_output_embeddings())):
        if not isinstance(getattr(module, "weight", None), torch.Tensor):
            raise Unsupported(
                f"a drafting head needs the size of its target's {name}, and that of this {type(target).__name__} is a "
                f"{type(module).__name__} without a weight: use autoregressive, nasd or speculative"
            )
    return target.get_input_embeddings().weight.shape[0], target.get_output_embeddings().weight.shape[0]


def refreshed(head: EagleHead, target: PreTrainedModel) -> EagleHead:
    """The head as it is to be used now: itself, or a copy that shares its weights where the target has got another embedding or LM head
    since it was bound (`set_output_embeddings`, `resize_token_embeddings`).

    Raises Unsupported where the target's vocabulary has changed and the head cannot serve it.
    """
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    held, borrowed = head.__dict__["_embed_tokens"], head.__dict__["_target_lm_head"]
    own = head.__dict__[OWN_EMBEDDING]
    rows = rows_of(target)
    if rows == head.__dict__[BOUND_ROWS] and (own or held is embedding) and borrowed in (None, lm_head):
        head.renew()
        return head
    reasons = []
    last = int(head.to_target(torch.arange(len(head.d2t), device=head.d2t.device)).max())
    if last >= min(rows):
        reasons.append(f"the head drafts tokens up to {last}")
    if own and held.weight.shape[0] < rows[1]:
        reasons.append(f"the head's own embedding has {held.weight.shape[0]} rows")
    if borrowed is not None and not head.config.target_rows and rows[1] != head.config.draft_vocab_size:
        reasons.append(f"the head drafts with the model's LM head, of {head.config.draft_vocab_size} tokens")
    wide = [each.weight.shape[1] for each in ((None if own else embedding), (None if borrowed is None else lm_head)) if each is not None]
    if any(each != head.config.hidden_size for each in wide):
        reasons.append(f"the head is {head.config.hidden_size} wide")
    if reasons:
        was = head.__dict__[BOUND_ROWS]
        raise Unsupported(
            f"the model's embedding and LM head have changed since fastspec.patch ({was[0]} and {was[1]} tokens then, {rows[0]} and "
            f"{rows[1]} now), and its head does not fit them: {'; '.join(reasons)}. Change them back, such as by "
            f"model.resize_token_embeddings({head.config.vocab_size}), or fastspec.unpatch(model) and patch it with a head made for it"
        )
    twin = copy.copy(head)
    twin.bind(held if own else embedding, lm_head)
    twin.__dict__[BOUND_ROWS] = rows
    return twin


def moved(head: EagleHead, target: PreTrainedModel) -> EagleHead:
    """A copy of a head on the target's device and in its dtype; what it borrows of the target stays shared."""
    own = head.__dict__[OWN_EMBEDDING]
    borrowed = [part for part in (None if own else head.__dict__["_embed_tokens"], head.__dict__["_target_lm_head"]) if part is not None]
    twin = copy.deepcopy(head, {id(part): part for part in borrowed}).to(device_of(target), target.dtype)
    if own:
        twin.__dict__["_embed_tokens"].to(device_of(target), target.dtype)
    return twin
