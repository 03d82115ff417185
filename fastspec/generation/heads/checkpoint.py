"""Checkpoint of a drafting head: files of every published form translated into one, and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.generation.heads.dialects import (
    SKIPPED,
    Description,
    describe,
    normalise_key,
    skipped_by_vllm,
    unwrapped_key,
)
from fastspec.generation.heads.files import HeadFiles, check_finite, some
from fastspec.generation.heads.module import FLOATS, EagleHead, HeadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint(Description):
    """A head before it is built, whatever it was read from.

    `state` holds exactly the entries of `EagleHead(config).state_dict()`, with `d2t` as offsets; `embedding` [V, H] is
    the head's own, if it brought one. `assumed` is what was read into a file that leaves it open, `adapter` what is
    said of an adapter for the target that lies beside the head. `module` is the head itself where it was given as one.
    """

    where: str
    state: dict[str, Tensor]
    embedding: Tensor | None
    assumed: str | None = None
    adapter: str | None = None
    module: EagleHead | None = None

    @classmethod
    def of(cls, module: EagleHead) -> HeadCheckpoint:
        """A module, checked like a file. Raises CheckpointError for values not finite or missing, and bad draft ids."""
        where, config = "this EagleHead", module.config
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            raise CheckpointError(f"{where} is on the device meta, without values: fastspec.load_head loads one")
        _check_values(dict(module.named_parameters()), where)
        tokens = module.drafted()
        if bool((tokens < 0).any()) or bool((tokens >= config.vocab_size).any()):
            raise CheckpointError(f"{where}'s d2t leads outside the target's vocabulary of {config.vocab_size} tokens")
        weight = None if module.binding is None else getattr(module.binding.embedding, "weight", None)
        state = module.state_dict()
        return cls(where=where, dialect="module", config=config, state=state, embedding=weight, module=module)

    @property
    def own_embedding(self) -> Tensor | None:
        """The embedding that is the head's own: a module may hold its target's."""
        binding = None if self.module is None else self.module.binding
        return None if binding is not None and not binding.own_embedding else self.embedding

    @property
    def num_parameters(self) -> int:
        """Parameters of the head, its own embedding not counted."""
        return sum(tensor.numel() for name, tensor in self.state.items() if name != "d2t")


def translate(files: HeadFiles) -> HeadCheckpoint:
    """A head's files in the one form that fastspec runs. Raises CheckpointError for keys that are missing or unknown,
    shapes that contradict config.json, weights that are not finite, a `d2t` that is no map into the target's
    vocabulary, and architectures that `EagleHead` does not cover."""
    where, notes = files.where, list[str]()
    published = _renamed(files.tensors, unwrapped_key, where)
    adapted = {unwrapped_key(name).partition(".lora_")[0].removesuffix(".weight") for name in files.adapter}
    for_target = not adapted <= {name.rpartition(".")[0] for name in published}  # modules that a head does not have
    refuse_others(files.config, published if for_target else (*published, *files.adapter), where)
    state = _renamed(published, normalise_key, where)
    for name in sorted(skipped_by_vllm(files.config) & set(state)):
        del state[name]
        notes.append(f"{name} is left out, as vLLM leaves it out of EAGLE-1/2 heads without {SKIPPED[name]}: false")
    if scales := [name for name in state if re.search(CACHE_SCALE, name)]:
        notes.append(f"{some(scales)} is left out: the head's keys and values are kept in its own dtype")
        for name in scales:
            del state[name]
    _check_values(state, where)
    found = describe(files.config, published, state, where)
    _trim_spec_exit(found, state, notes)
    embedding = _take_embedding(found, state, notes, where)
    _take_vocabulary_map(found.config, state, notes, where)
    _fill_output_bias(found.config, state, notes)
    _check_keys(found.config, state, where)
    described = {each.name: getattr(found, each.name) for each in fields(found)} | {"notes": (*found.notes, *notes)}
    adapter = (
        f"{where} holds an adapter for the target beside the head, which was trained on the states of the target with "
        f"it: before patch, load it by peft.PeftModel.from_pretrained(model, {where!r})"
        if for_target
        else None
    )
    return HeadCheckpoint(where=where, state=state, embedding=embedding, adapter=adapter, **described)


def _renamed(published: dict[str, Tensor], rule: Callable[[str], str | None], where: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for key, tensor in published.items():
        name = rule(key)
        if name is None:
            continue
        if name in state:
            raise CheckpointError(f"{where}: two keys mean {name!r}, one of them {key!r}; keep one")
        state[name] = tensor
    return state


def _check_values(state: dict[str, Tensor], where: str) -> None:
    weights = {name: tensor for name, tensor in state.items() if name not in ("d2t", "t2d")}
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{where}: {name} is {tensor.dtype}; quantised heads are not supported, use the 16- or 32-bit one"
                if tensor.dtype not in (torch.int64, torch.bool)
                else f"{where}: {name} is {tensor.dtype}, and of those a head has d2t and t2d alone"
            )
    for name, tensor in weights.items():
        if tensor.ndim not in (1, 2):
            raise CheckpointError(f"{where}: {name} has shape {list(tensor.shape)}; weights are vectors and matrices")
        check_finite(name, tensor, where)


def _trim_spec_exit(found: Description, state: dict[str, Tensor], notes: list[str]) -> None:
    """Drop the one to three rows that AngelSlim's SpecExit adds to fc, for signals that drafting does not use."""
    hidden = found.config.hidden_size
    extra = state["fc.weight"].shape[0] - hidden if found.dialect == "angelslim" else 0
    if extra not in (1, 2, 3):
        return
    notes.append(f"fc.weight has {extra} extra output row(s), SpecExit's signals; the first {hidden} rows are used")
    for name in ("fc.weight", "fc.bias"):
        if name in state:
            state[name] = state[name][:hidden].clone()


def _take_embedding(found: Description, state: dict[str, Tensor], notes: list[str], where: str) -> Tensor | None:
    """Remove embed_tokens from `state`, and the frozen copy of the target's LM head that some EAGLE-1/2 files carry."""
    config, embedding = found.config, state.pop("embed_tokens.weight", None)
    size = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding.shape != size:
        raise CheckpointError(
            f"{where}: embed_tokens.weight has shape {list(embedding.shape)}; config.json wants {list(size)}"
        )
    if config.kind == "eagle3":
        return embedding
    lm_head = state.get("lm_head.weight")
    if lm_head is not None and lm_head.shape == size:
        del state["lm_head.weight"]
        notes.append("lm_head.weight is a copy of the target's in EAGLE-1/2 heads: the target's is used")
    if embedding is not None:
        notes.append("embed_tokens.weight is a copy of the target's in EAGLE-1/2 heads: the target's is used")
    return None


def _take_vocabulary_map(config: HeadConfig, state: dict[str, Tensor], notes: list[str], where: str) -> None:
    """Check d2t against the sizes and t2d, make it offsets, drop t2d, and supply the identity where it is implied."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    draft, vocab = config.draft_vocab_size, config.vocab_size
    if d2t is None and draft < vocab and t2d is not None and t2d.shape == (vocab,) and int(t2d.bool().sum()) == draft:
        d2t = t2d.nonzero().flatten() - torch.arange(draft, device="cpu")
        notes.append("d2t is missing; the draft vocabulary is the tokens that t2d marks, in their order")
    if d2t is None:
        if draft != vocab:
            raise CheckpointError(
                f"{where}: missing d2t, which says which {draft} of the target's {vocab} tokens the head drafts: take "
                "it from the publisher's file, or from what the draft vocabulary was chosen with, and store it with "
                f"the weights as integers [{draft}], target id - draft id of each draft id"
            )
        state["d2t"] = torch.zeros(draft, dtype=torch.int64, device="cpu")
        return
    if d2t.shape != (draft,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(
            f"{where}: d2t is {d2t.dtype} of shape {list(d2t.shape)}; expected integers of shape [{draft}]"
        )
    if t2d is not None and t2d.shape != (vocab,):
        raise CheckpointError(f"{where}: t2d has shape {list(t2d.shape)}; expected [{vocab}], the target's vocabulary")
    rank, offsets = torch.arange(draft, device="cpu"), d2t.to(torch.int64)
    mask = None if t2d is None or draft == vocab else t2d.bool()
    wrong = _not_a_map(rank + offsets, mask, vocab)
    if wrong is None:
        state["d2t"] = offsets
    elif _not_a_map(offsets, mask, vocab) is None:
        state["d2t"] = offsets - rank
        notes.append("d2t holds token ids where offsets are usual; converted")
    else:
        raise CheckpointError(
            f"{where}: d2t (target id = draft id + d2t[draft id]) is not a map into the target's vocabulary: {wrong}"
        )


def _not_a_map(ids: Tensor, mask: Tensor | None, vocab: int) -> str | None:
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if len(falls):
        return f"target ids do not increase at draft id {int(falls[0]) + 1}"
    if ids[0] < 0 or ids[-1] >= vocab:
        return f"target ids reach from {int(ids[0])} to {int(ids[-1])}, the vocabulary has {vocab}"
    if mask is not None and not (bool(mask[ids].all()) and int(mask.sum()) == len(ids)):
        return "it disagrees with t2d"
    return None


def _fill_output_bias(config: HeadConfig, state: dict[str, Tensor], notes: list[str]) -> None:
    """Give o a zero bias in Qwen2-style layers, which have biases on q, k and v only."""
    if config.kind != "eagle3" or not config.attention_bias or any(re.search(r"o_proj\.bias$", key) for key in state):
        return
    notes.append("o_proj has no bias while q, k and v do; read as zero")
    for i in range(config.num_hidden_layers):
        state[f"layers.{i}.self_attn.o_proj.bias"] = state["fc.weight"].new_zeros(config.hidden_size)


def _check_keys(config: HeadConfig, state: dict[str, Tensor], where: str) -> None:
    with torch.device("meta"):
        expected = EagleHead(config).state_dict()
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unknown:
        parts = [f"missing {some(missing)}"] * bool(missing) + [f"unknown {some(unknown)}"] * bool(unknown)
        raise CheckpointError(
            f"{where}: the weights are not those of the head that config.json describes: {'; '.join(parts)}"
        )
    wrong = [
        f"{name} has shape {list(state[name].shape)} where config.json wants {list(tensor.shape)}"
        for name, tensor in expected.items()
        if state[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{where}: {'; '.join(wrong[:4])}; weights and config.json do not belong together")


CACHE_SCALE = r"\.[kv]_scale$"
"""Scales of an FP8 KV cache, of which a layer may hold some beside plain weights."""
TRAIN = "train one with `fastspec train --kind eagle3`"
HEADS = r"^(language_model\.|model\.|eagle_module\.)*(fc\.weight|d2t|pre_projection\.weight|.*\.hidden_norm\.weight)$"
"""Tensors of which drafting modules have one and language models none."""
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


BLOCK = (
    "drafts a block of tokens in one pass; fastspec decodes with EAGLE heads (docs/maintainers/drafters.md says why): "
    + TRAIN
)
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
        "a head with Gemma 4's layer (as DeepSpec's Gemma4Eagle3Model)",
        "has norms, scales and an activation that fastspec does not run in heads: " + INSTEAD,
        word="gemma4eagle3",
    ),
    Other(
        "Gemma 4's assistant",
        "reads the keys and values of its target: fastspec.patch(model, mtp=...) takes it",
        word="gemma4.*assistant",
        keys=r"^(pre_projection|post_projection|masked_embedding)\.",
    ),
    Other(
        "vLLM's EAGLE-1 head for Llama 4",
        "is a whole Llama 4 layer that fastspec does not run: " + INSTEAD,
        word="eaglellama4",
    ),
    Other(
        "an EAGLE-1/2 head with norms of its own (as HASS's, and vLLM's add_para_norm)",
        "fastspec does not run: " + INSTEAD,
        fields=("add_para_norm",),
        keys=r"^(?!mtp)(.*\.)?(embed|hidden|lm_head|post_embedding|pre_lm_head)_layernorm\.",  # MTP layers have some
    ),
    Other(
        "a ViSpec head",
        "reads features of images, and fastspec gives heads none: " + INSTEAD,
        keys=r"(^|\.)img_(adaptor|fc)\.",
    ),
    Other(
        "an MTP module",
        "drafts for the model that it comes with: fastspec.patch(model, mtp=PATH) reads it; or " + INSTEAD,
        word="mtp|nextn",
        keys=r"(^mtp|\.mtp)\.|(^|\.)(enorm|hnorm|eh_proj|pre_fc_norm_hidden|pre_fc_norm_embedding)\.",
    ),
    Other(
        "a head with PEFT's adapters beside its weights",
        "fastspec does not add to them: save what merge_and_unload() returns",
        keys=r"\.(base_layer|lora_\w+|modules_to_save)\.",
    ),
    Other(
        "a head with a mixture of experts",
        "fastspec runs in targets and not in heads: use one with a plain feed-forward",
        keys=r"\.experts\.",
    ),
)
"""Kinds of drafting modules, the narrower before the wider."""


def is_model(published: Iterable[str]) -> bool:
    """True for the names of a language model's tensors."""
    keys = list(published)
    return any(re.search(MODELS, key) for key in keys) and not any(re.search(HEADS, key) for key in keys)


def refuse_others(raw: Mapping[str, Any], published: Iterable[str], where: str) -> None:
    """Raise CheckpointError, by name, for a drafting module other than `EagleHead`."""
    keys = list(published)
    inner = raw.get("model")  # vLLM's wrapper
    both = {**(inner if isinstance(inner, Mapping) else {}), **raw}
    for name in ("dflash_config", "eagle_config"):
        nested = raw.get(name)
        both |= nested if isinstance(nested, Mapping) else {}
    named = [both.get(name) for name in ("architectures", "model_type", "speculators_model_type", "projector_type")]
    names = str(named).lower()
    if is_model(keys):
        raise CheckpointError(
            f"{where}: a language model of its own and no head: load it with AutoModelForCausalLM.from_pretrained(...) "
            "and give it as fastspec.patch(model, speculative=draft_model); on the command line it is a --draft-model"
        )
    for other in OTHERS:
        # a count of one step or head says nothing
        told = any(both.get(field) not in (None, False, 0, 1) or both.get(field) is True for field in other.fields)
        told = told or (other.word is not None and re.search(other.word, names) is not None)
        if told or (other.keys is not None and any(re.search(other.keys, key) for key in keys)):
            raise CheckpointError(f"{where}: {other.name}, which {other.why}")
