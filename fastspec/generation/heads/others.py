"""Drafting modules that fastspec does not run, told by their config.json and tensor names and refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastspec.errors import CheckpointError

TRAIN = "train one with `fastspec train --kind eagle3`"
HEADS = r"^(model\.|eagle_module\.)*(fc\.weight|d2t|.*\.hidden_norm\.weight)$"
"""Tensors of which EAGLE heads have one and language models none."""
MODELS = r"^(model\.)?(language_model\.)?(model\.)?layers\.0\.input_layernorm\."
"""A tensor of language models, and of EAGLE-3 heads."""
INSTEAD = f"use an EAGLE-3 head for this target, or {TRAIN}"


class Other(NamedTuple):
    """A kind of drafting module, told by `fields` of config.json, by a `word` in the names of its classes, or by a
    pattern of its `keys`. `why` completes "NAME, which ..."."""

    name: str
    why: str
    fields: tuple[str, ...] = ()
    word: str | None = None
    keys: str | None = None


BLOCK = "drafts a block of tokens in one pass; fastspec decodes with EAGLE heads (docs/drafters.md says why): " + TRAIN
OTHERS = (
    Other("a DFlash 2 head", BLOCK, fields=("selector_rank",), word="dflash2"),
    Other("a DSpark head", BLOCK, fields=("markov_rank",), word="dspark"),
    Other("a DFlash head", BLOCK, fields=("dflash_config",), word="dflash"),
    Other(
        "a P-EAGLE head",
        "drafts all tokens in one pass, from learned placeholders in place of hidden states, which fastspec does not "
        "run: " + INSTEAD,
        fields=("parallel_drafting", "ptd_token_id", "parallel_draft_step"),
        word="peagle",
        keys=r"(^|\.)(mask_hidden$|parallel_draft_heads\.)",
    ),
    Other(
        "Medusa heads",
        "draft every position from one hidden state, which fastspec does not run: " + INSTEAD,
        fields=("medusa_num_heads",),
        word="medusa",
        keys=r"^(medusa_heads?\.)?\d+\.\d+\.(linear\.)?weight$",
    ),
    Other(
        "an EAGLE-4 head",
        "has a sliding-window layer and a candidate head, which fastspec does not run: " + INSTEAD,
        word="eagle4",
    ),
    Other(
        "a head with multi-head latent attention (as Eagle3DeepseekV2ForCausalLM)",
        "fastspec does not run; use a head with Llama-style attention for this target",
        word="eagle3deepseek",
        keys=r"\.(kv_a_proj|kv_b_proj)",
    ),
    Other(
        "Gemma 4's assistant",
        "reads the keys and values of its target, which fastspec does not run: without assistant=, "
        "model.generate(..., assistant_model=draft) runs it as transformers does; or " + INSTEAD,
        word="gemma4.*assistant",
        keys=r"^(pre_projection|post_projection|masked_embedding)\.",
    ),
    Other(
        "vLLM's EAGLE-1 head for Llama 4",
        "is a whole Llama 4 layer that fastspec does not run: " + INSTEAD,
        word="eaglellama4",
    ),
    Other(
        "an MTP module",
        "comes with its own model and is no head for another; fastspec does not run it: " + INSTEAD,
        word="mtp|nextn",
        keys=r"(^mtp|\.mtp)\.|(^|\.)(enorm|hnorm|eh_proj|pre_fc_norm_hidden|pre_fc_norm_embedding)\.",
    ),
    Other(
        "a head with a mixture of experts",
        "fastspec runs in targets and not in heads: use one with a plain feed-forward",
        keys=r"\.experts\.",
    ),
)
"""Kinds of drafting modules, the narrower before the wider."""


def refuse_others(raw: Mapping[str, Any], published: Iterable[str], where: str) -> None:
    """Raise CheckpointError, by name, for a drafting module other than `EagleHead`."""
    keys = list(published)
    both = {**raw}
    for name in ("dflash_config", "eagle_config"):
        nested = raw.get(name)
        both |= nested if isinstance(nested, Mapping) else {}
    named = [both.get(name) for name in ("architectures", "model_type", "speculators_model_type", "projector_type")]
    names = str(named).lower()
    if any(re.search(MODELS, key) for key in keys) and not any(re.search(HEADS, key) for key in keys):
        raise CheckpointError(
            f"{where}: a language model of its own and no head: load it with AutoModelForCausalLM.from_pretrained(...) "
            "and give it as fastspec.patch(model, speculative=draft_model)"
        )
    for other in OTHERS:
        # a count of one step or head says nothing
        told = any(both.get(field) not in (None, False, 0, 1) or both.get(field) is True for field in other.fields)
        told = told or (other.word is not None and re.search(other.word, names) is not None)
        if told or (other.keys is not None and any(re.search(other.keys, key) for key in keys)):
            raise CheckpointError(f"{where}: {other.name}, which {other.why}")
