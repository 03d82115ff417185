"""Draft models made of the target itself, for scripts that need a separate one: its first layers, with its tokenizer or
with another."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from fastspec.config import Speculative
from fastspec.patches.assistants.speculative import check_draft, resolve_speculative

KEPT = 0.6
"""Share of the target's vocabulary that the other tokenizer keeps: its earliest merges, so that it cuts rarer words
into more tokens."""


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """`speculative` with a draft model of the target's first `layers`, under another tokenizer where `renamed`."""

    config: Speculative
    layers: int
    renamed: bool = False

    def on(self, model: Any, tokenizer: Any) -> Any:
        """The decoding for a patched model, in place of the draft model that it was patched with."""
        draft: Any = first_layers(model, self.layers)
        if self.renamed:
            draft = (*renamed(draft, tokenizer), tokenizer)
        return resolve_speculative(self.config, {"speculative": check_draft(draft, model)}, model)


def on(assistant: Any, model: Any, tokenizer: Any) -> Any:
    """What `assistant=` takes: the assistant itself, but for one whose draft model has to be made first."""
    return assistant.on(model, tokenizer) if isinstance(assistant, OwnLayers) else assistant


def first_layers(model: Any, count: int) -> Any:
    """A model of the same class of another's first `count` layers, its embedding, final norm and LM head: the same
    modules, none copied.

    `model` is built as transformers' Llama: `model.embed_tokens`, `layers`, `norm`, `rotary_emb` and an `lm_head`.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    with torch.device("meta"):
        draft = type(model)(config)
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(draft.model, name, getattr(model.model, name))
    draft.model.layers = nn.ModuleList(model.model.layers[:count])
    draft.lm_head = model.lm_head
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def renamed(model: Any, tokenizer: Any, seed: int = 0) -> tuple[Any, Any]:
    """(a model with other token ids, its tokenizer): the KEPT first tokens of a byte-level BPE tokenizer, their ids
    permuted.

    Tokens that are kept mean what they meant; texts are cut into others where a merge is missing. The embedding and the
    LM head are copies with permuted rows, all else is shared.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    kept = int(KEPT * len(vocab))
    order = torch.randperm(kept, generator=torch.Generator().manual_seed(seed)).tolist()  # old id -> new id
    state["model"]["vocab"] = {form: order[index] for form, index in vocab.items() if index < kept}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in state["model"]["vocab"]]
    for token in state["added_tokens"]:
        token["id"] = order[token["id"]]
    roles = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    draft = first_layers(model, model.config.num_hidden_layers)
    draft.config.vocab_size = kept
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (draft.config, draft.generation_config):
            index = getattr(config, name)
            setattr(config, name, None if index is None else order[index])
    rows = torch.empty(kept, dtype=torch.long)
    rows[torch.tensor(order)] = torch.arange(kept)
    rows = rows.to(model.device)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft.lm_head = nn.Linear(head.shape[1], kept, bias=False, device="meta")
    draft.lm_head.weight = nn.Parameter(head.detach()[rows], requires_grad=False)
    draft.model.embed_tokens = nn.Embedding(kept, embedding.shape[1], device="meta")
    own = draft.lm_head.weight if embedding is head else nn.Parameter(embedding.detach()[rows], requires_grad=False)
    draft.model.embed_tokens.weight = own
    return draft, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **roles)
