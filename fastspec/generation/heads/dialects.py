"""What a head's config.json and parameter names say, in each of the forms that heads are published in.

One `describe` for all of them: the dialect is a name and a handful of defaults, not a class. Formats read: the original EAGLE-1/2 and
EAGLE-3 (SafeAILab/EAGLE), vLLM's wrapper of EAGLE-1, SpecForge, speculators, AngelSlim, ModelOpt and NeMo Automodel, and what
`fastspec train` writes. What decides each flag, and which of these formats contradict each other, is in docs/checkpoints.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.generation.heads.module import HeadConfig

PREFIXES = ("model.", "eagle_module.")
MODELOPT_FIELDS = {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"}
TRAINED_THETA = 10000.0
BLOCK_FORMS = (
    ("DFlash 2", "selector_rank", "dflash2"),
    ("DSpark", "markov_rank", "dspark"),
    ("DFlash", "dflash_config", "dflash"),
)
"""Form of a head that drafts a block, a field of config.json that it alone has, and a word in the names of its classes."""
OWN = "fastspec"
"""What `trained_by` says in the config.json of heads that `fastspec train` wrote, and the name of their dialect."""
FIELD_KINDS = {
    "a list of names": ("architectures", "layer_types"),
    "a list of layer numbers": ("eagle_aux_hidden_state_layer_ids",),
    "an object of fields": ("eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling"),
    "true or false": ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "use_aux_hidden_state", "use_last_layernorm"),
    "a positive number": ("rope_theta", "rms_norm_eps", "partial_rotary_factor", "original_max_position_embeddings", "factor"),
    "a name": ("model_type", "hidden_act", "rope_type", "type"),
}
CHECKS: dict[str, Callable[[object], bool]] = {
    "a list of names": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "a list of layer numbers": lambda value: isinstance(value, list) and all(type(item) is int and item >= 0 for item in value),
    "an object of fields": lambda value: isinstance(value, Mapping),
    "true or false": lambda value: isinstance(value, bool),
    "a positive number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"),
    "a name": lambda value: isinstance(value, str),
}


class Flag(NamedTuple):
    """A switch of the head and what decided it."""

    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The reading of one head; `taps_known` is False where the default taps wait for the target's number of layers."""

    dialect: str
    config: HeadConfig
    taps_known: bool
    flags: dict[str, Flag]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """config.json by level: `top` is the file, `layer` describes the transformer layer, `nested` is `eagle_config`."""

    top: Mapping[str, Any]
    layer: Mapping[str, Any]
    nested: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str) -> Fields:
        check_kinds(raw, where)
        layer = raw
        for name in ("transformer_layer_config", "model"):
            inner = raw.get(name)
            if isinstance(inner, Mapping):
                layer = {**raw, **inner}
        check_kinds(layer, where)
        nested = layer.get("eagle_config") or {}
        check_kinds(nested, where)
        return cls(raw, layer, nested, where)

    def find(self, name: str) -> Flag | None:
        """The value of a field at the top, else in `eagle_config`, else in the layer's config; None where absent or null."""
        for level, source in ((self.top, "config"), (self.nested, "eagle_config"), (self.layer, "layer config")):
            if level.get(name) is not None:
                return Flag(level[name], source)
        return None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer from the layer's config, or `eagle_config`; CheckpointError for anything else."""
        value = self.layer.get(name)
        value = self.nested.get(name) if value is None else value
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.where}/config.json: {name} is {value!r}; expected a positive integer")
        return value


def check_kinds(level: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a known field of another kind than its own; null stands for absent."""
    for kind, names in FIELD_KINDS.items():
        for name in names:
            if level.get(name) is not None and not CHECKS[kind](level[name]):
                raise CheckpointError(f"{where}/config.json: {name} is {level[name]!r}; expected {kind}")


def normalise_key(key: str) -> str | None:
    """The name that `EagleHead` uses for a published key, or None for what is recomputed or belongs to the target."""
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    if key.startswith("verifier_") or key.endswith("rotary_emb.inv_freq"):
        return None
    key = re.sub(r"^midlayer\.", "layers.0.", key)
    return "d2t" if key == "draft_id_to_target_id" else key


def dialect_of(fields: Fields, published: Iterable[str], state: Mapping[str, Tensor]) -> str:
    """Which program wrote the head. Raises CheckpointError, by name, for architectures that `EagleHead` does not cover."""
    top, where = fields.top, fields.where
    architectures = top.get("architectures") or []
    kind = top.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise CheckpointError(f"{where}: speculators_model_type is {kind!r}; accepted is 'eagle3'")
    if "Eagle3DeepseekV2ForCausalLM" in architectures or any("kv_a_proj" in key or "kv_b_proj" in key for key in state):
        raise CheckpointError(
            f"{where}: this head uses multi-head latent attention (Eagle3DeepseekV2ForCausalLM), which fastspec does not run; "
            "use a head with Llama-style attention for this target"
        )
    if kind == "eagle3":
        return "speculators"
    if top.get("model_type") == "eagle" and isinstance(top.get("model"), Mapping):
        return "vllm"
    if top.get("trained_by") == OWN:
        return OWN
    if not is_eagle3(state):
        return "eagle"
    if "Eagle3LlamaForCausalLM" in architectures:
        return "angelslim"
    if MODELOPT_FIELDS & set(fields.nested):
        return "modelopt"
    if "LlamaForCausalLMEagle3" in architectures:
        return "specforge"
    return "nemo" if any(key.startswith("model.") for key in published) else "eagle3"


def is_eagle3(state: Mapping[str, Tensor]) -> bool:
    """EAGLE-1/2 heads have none of these: a norm of the hidden state, a final norm, a map of the draft vocabulary."""
    return any(key in state for key in ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "d2t"))


def block_form(raw: Mapping[str, Any]) -> str | None:
    """The form of a head that drafts a block of tokens in one pass, by its config.json; None for any other head."""
    nested = raw.get("dflash_config")
    both = {**raw, **(nested if isinstance(nested, Mapping) else {})}
    names = str([both.get(name) for name in ("architectures", "model_type", "speculators_model_type", "projector_type")]).lower()
    return next((form for form, field, word in BLOCK_FORMS if both.get(field) is not None or word in names), None)


def describe(raw: Mapping[str, Any], published: Iterable[str], state: Mapping[str, Tensor], where: str) -> Description:
    """Read a head's sizes and flags.

    `raw` is config.json, `published` the keys as stored, `state` the tensors under normalised keys, with embed_tokens and t2d.
    Raises CheckpointError for fields that are missing, out of range or mean something that `EagleHead` cannot do.
    """
    if form := block_form(raw):
        raise CheckpointError(
            f"{where}: a {form} head, which drafts a block of tokens in one pass; fastspec decodes with EAGLE heads (docs/drafters.md says "
            "why): train one with `fastspec train --kind eagle3`"
        )
    fields = Fields.of(raw, where)
    dialect = dialect_of(fields, published, state)
    notes: list[str] = []
    flags: dict[str, Flag] = {}
    eagle3 = is_eagle3(state)
    sizes = _sizes(fields, state, eagle3)
    _refuse_other_layers(fields, sizes["num_hidden_layers"])
    rope = _rope(fields, dialect, flags, notes)
    switches: dict[str, Any] = _switches_from_keys(state, sizes, fields, flags)
    taps: tuple[int, ...] | None = ()
    count = 0
    if eagle3:
        switches |= _switches_from_config(fields, dialect, flags, notes)
        count = _tap_count(fields, state, sizes["target_hidden_size"])
        taps = _taps(fields, count, flags)
    if "auto_map" in raw:
        notes.append("config.json names code (auto_map); code that comes with a head is never executed")
    try:
        config = HeadConfig(
            kind="eagle3" if eagle3 else "eagle",
            **sizes,
            taps=tuple(range(count)) if taps is None else taps,
            rms_norm_eps=float(fields.layer.get("rms_norm_eps") or 1e-6),
            rope_parameters=rope,
            max_position_embeddings=fields.size("max_position_embeddings", 2048),
            **switches,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: config.json and weights do not make a head: {error}") from error
    return Description(dialect=dialect, config=config, taps_known=taps is not None, flags=flags, notes=tuple(notes))


def _sizes(fields: Fields, state: Mapping[str, Tensor], eagle3: bool) -> dict[str, Any]:
    hidden, heads, vocab = fields.size("hidden_size"), fields.size("num_attention_heads"), fields.size("vocab_size")
    query = state.get("layers.0.self_attn.q_proj.weight")
    rows = hidden if query is None else query.shape[0]
    head_dim = fields.size("head_dim", rows // heads)
    layers = fields.size("num_hidden_layers", 1)
    if layers > len(state):
        raise CheckpointError(f"{fields.where}: config.json says {layers} layers, the weights hold {len(state)} tensors; they do not match")
    lm_head = state.get("lm_head.weight")
    draft = fields.size("draft_vocab_size", vocab if lm_head is None else lm_head.shape[0]) if eagle3 else vocab
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.size("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
        "target_hidden_size": fields.size("target_hidden_size", hidden) if eagle3 else hidden,
        "num_hidden_layers": layers,
    }


def _refuse_other_layers(fields: Fields, layers: int) -> None:
    """Layers that draft differently from full attention and SwiGLU are refused by name."""
    cfg, where = fields.layer, fields.where
    activation = cfg.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where}/config.json: hidden_act is {activation!r}; accepted is 'silu'")
    types = (cfg.get("layer_types") or [])[:layers]
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other:
        raise CheckpointError(f"{where}/config.json: layer_types names {other}; accepted are 'full_attention' layers")
    window = fields.size("sliding_window", sys.maxsize)
    untyped = not types and (cfg.get("model_type") == "mistral" or cfg.get("use_sliding_window") is True)
    if ("sliding_attention" in types or untyped) and window < fields.size("max_position_embeddings", 2048):
        raise CheckpointError(
            f"{where}/config.json: the head was trained with a sliding window (sliding_attention, {window} tokens), which fastspec "
            "does not run; use a head whose layers are 'full_attention'"
        )


def _rope(fields: Fields, dialect: str, flags: dict[str, Flag], notes: list[str]) -> dict[str, Any]:
    cfg = fields.layer
    given = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
    if isinstance(given.get("full_attention"), Mapping):
        given = given["full_attention"]
    check_kinds(given, fields.where)
    kind = given.get("rope_type") or given.get("type") or "default"
    theta, source = given.get("rope_theta") or cfg.get("rope_theta"), "config"
    if dialect == "angelslim" and kind in ("default", "linear", "dynamic"):
        if theta not in (None, TRAINED_THETA):
            notes.append(f"config.json says rope_theta {theta}, but AngelSlim trains this RoPE type with {TRAINED_THETA:g}; that is used")
        theta, source = TRAINED_THETA, "AngelSlim's trainer"
    elif theta is None:
        theta, source = TRAINED_THETA, "absent, EAGLE's default"
    elif dialect == "specforge" and theta != TRAINED_THETA:
        notes.append(f"SpecForge before November 2025 trained with rope_theta {TRAINED_THETA:g} whatever the config says; probe it")
    if kind == "mrope":
        notes.append("rope_type 'mrope' is read as 'default': the two agree on text")
        kind = "default"
    if kind in ("dynamic", "longrope"):
        notes.append(f"rope_type {kind!r} is used with the frequencies of contexts up to max_position_embeddings, at any length")
    rope: dict[str, Any] = {k: v for k, v in given.items() if v is not None and k not in ("type", "mrope_section", "mrope_interleaved")}
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if rope.get(name) is None and cfg.get(name) is not None:
            rope[name] = cfg[name]
    if rope.get("partial_rotary_factor", 1.0) > 1:
        raise CheckpointError(
            f"{fields.where}/config.json: partial_rotary_factor is {rope['partial_rotary_factor']}; it is a share, at most 1"
        )
    if kind == "linear" and rope.get("factor") is None:
        raise CheckpointError(f"{fields.where}/config.json: rope_type 'linear' needs a factor")
    flags["rope_theta"] = Flag(float(theta), source)
    return rope | {"rope_type": kind, "rope_theta": float(theta)}


def _switches_from_keys(state: Mapping[str, Tensor], sizes: Mapping[str, Any], fields: Fields, flags: dict[str, Flag]) -> dict[str, bool]:
    def present(pattern: str) -> bool:
        return any(re.search(pattern, key) for key in state)

    switches = {
        "attention_bias": present(r"self_attn\..*\.bias$"),
        "mlp_bias": present(r"mlp\..*\.bias$"),
        "fc_bias": present(r"^fc\.bias$"),
        "qk_norm": present(r"self_attn\.[qk]_norm\."),
        "fc_norm": present(r"^fc_norm\."),
        "input_norm": present(r"^input_norm\."),
    }
    flags |= {name: Flag(value, "weights") for name, value in switches.items()}
    # A flag that the config raises and the weights lack stays raised, so that the missing weight is reported by name.
    eagle3 = is_eagle3(state)
    for name, field in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")) if eagle3 else (("fc_bias", "bias"),):
        declared = fields.find(field)
        if declared is not None and declared.value is True and not switches[name]:
            switches[name], flags[name] = True, Flag(True, declared.source)
    like_target = sizes["draft_vocab_size"] == sizes["vocab_size"] and sizes["hidden_size"] == sizes["target_hidden_size"]
    switches["target_rows"] = eagle3 and "lm_head_map.weight" in state
    switches["own_lm_head"] = eagle3 and ("lm_head.weight" in state or not like_target) and not switches["target_rows"]
    flags |= {name: Flag(switches[name], "weights") for name in ("own_lm_head", "target_rows")}
    return switches


def _switches_from_config(fields: Fields, dialect: str, flags: dict[str, Flag], notes: list[str]) -> dict[str, bool]:
    before = fields.find("norm_before_residual") or Flag(dialect == "speculators", f"absent, default of {dialect}")
    output = fields.find("norm_output")
    last = fields.find("use_last_layernorm")
    if (last is not None and last.value is False) or (dialect == "specforge" and output is not None and output.value is False):
        raise CheckpointError(
            f"{fields.where}: the head has no norm before its LM head (norm_output / use_last_layernorm false); not supported"
        )
    if output is None:
        output = Flag(False, "absent")
    elif dialect == "specforge" and output.value:
        # SpecForge's field says that the norm is applied before the LM head at all; what it feeds back stays un-normed.
        output = Flag(False, "SpecForge feeds back the hidden state before the norm")
    elif output.value and dialect not in ("speculators", OWN):
        notes.append("norm_output is read as speculators and vLLM do (the normed hidden state is fed back); SpecForge means otherwise")
    flags["norm_before_residual"], flags["norm_output"] = before, output
    return {"norm_before_residual": bool(before.value), "norm_output": bool(output.value)}


def _tap_count(fields: Fields, state: Mapping[str, Tensor], target_hidden: int) -> int:
    fc = state.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise CheckpointError(f"{fields.where}: fc.weight is missing or not a matrix; every EAGLE head has it: download the head again")
    if fc.shape[1] % target_hidden:
        raise CheckpointError(
            f"{fields.where}: fc.weight takes {fc.shape[1]} inputs, which is no multiple of the target's hidden size {target_hidden}; "
            "check target_hidden_size in config.json"
        )
    return fc.shape[1] // target_hidden


def _taps(fields: Fields, count: int, flags: dict[str, Flag]) -> tuple[int, ...] | None:
    """Indices into hidden_states, or None where the target's depth decides."""
    uses = fields.find("use_aux_hidden_state")
    if uses is not None and uses.value is False:
        raise CheckpointError(f"{fields.where}: use_aux_hidden_state is false: a head that reads no intermediate layers is not supported")
    name = "eagle_aux_hidden_state_layer_ids"
    # The top-level list counts as hidden_states does; the nested one names layer outputs, unless it starts with 2, as in heads
    # whose authors copied the other convention.
    top, nested = fields.layer.get(name), fields.nested.get(name)
    ids, source = (top, "config") if top else (nested, "eagle_config, counted from layer outputs")
    if not ids:
        flags["taps"] = Flag("2, L/2, L-3", "absent, EAGLE-3's default")
        if count != 3:
            raise CheckpointError(f"{fields.where}: fc.weight reads {count} layers but config.json does not name them ({name})")
        return None
    if len(ids) != count:
        raise CheckpointError(f"{fields.where}: {name} is {ids}; fc.weight reads {count} layers, so {count} layer numbers are expected")
    if not top and ids[0] == 2:
        source = "eagle_config, counted as hidden_states"
    taps = tuple(ids) if top or ids[0] == 2 else tuple(i + 1 for i in ids)
    flags["taps"] = Flag(taps, source)
    return taps
