"""Dialects of published heads, and the sizes and flags that a head's config.json and parameter names give.

Formats read: the original EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE), vLLM's wrapper of EAGLE-1, SpecForge, speculators,
AngelSlim, ModelOpt, NeMo Automodel, DeepSpec, and `fastspec train`'s. docs/train/formats.md says what decides each
flag.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.generation.heads.files import Fields, Flag, check_kinds, some
from fastspec.generation.heads.module import HeadConfig

PREFIXES = re.compile(r"^(?:language_model\.|model\.|eagle_module\.)+")
"""Names of the modules that a head was saved from inside of; `language_model` is that of models with images."""
WRAPPERS = re.compile(
    r"^(?:module\.|draft_model\.|base_model\.model\.)+|_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
)
"""Names that trainers' wrappers (DDP, DeepSpeed, PEFT, torch.compile, FSDP, checkpointing) leave in a head's keys."""
MODELOPT_FIELDS = {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"}
NEMO = "LlamaEagle3DraftModel"
"""The class of NeMo Automodel's heads."""
TAPS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = "target_layer_ids"
"""The field in which DeepSpec names the layers that its heads read, by their outputs."""
SKIPPED = {"layers.0.input_layernorm.weight": "skip_prenorm", "norm.weight": "skip_output_norm"}
"""Norms that an EAGLE-1/2 head in vLLM's wrapper may hold -> the field that is false where vLLM runs them."""
NORMS = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"}
"""Norms of EAGLE-3 heads, of which EAGLE-1/2 heads have none."""
TRAINED_THETA = 10000.0
OWN = "fastspec"
"""The value of `trained_by` in heads that `fastspec train` wrote, and their dialect's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Conventions of one program that writes heads, where config.json leaves them open or differs from others."""

    name: str
    norm_before_residual: bool = False
    """The switch where the field is absent."""
    taps_by_rule: bool = False
    """True where the format's own rule is that unnamed taps are 2, L / 2 and L - 3."""
    last_tap_normed: bool = False
    """True where a tap after the last layer is after the target's final norm, as in transformers' hidden_states."""
    trained_theta: tuple[str, ...] = ()
    """RoPE types that are trained with TRAINED_THETA whatever config.json says."""
    theta_note: str | None = None
    """Note for a field rope_theta other than TRAINED_THETA."""
    norm_output_note: str | None = None
    """Note for a field norm_output that is true."""


DIALECTS = {
    row.name: row
    for row in (
        Dialect(name="eagle"),
        Dialect(name="vllm"),
        Dialect(name="eagle3", taps_by_rule=True),
        Dialect(name=OWN, taps_by_rule=True, last_tap_normed=True),
        Dialect(
            name="specforge",
            theta_note=f"SpecForge before November 2025 trained with rope_theta {TRAINED_THETA:g} whatever the "
            "config says; probe it",
            norm_output_note="SpecForge from May to September 2026 wrote norm_output true, its default, for heads "
            "that feed back the state before the norm; such a head drafts better with norm_output=False: probe it",
        ),
        Dialect(name="speculators", norm_before_residual=True),
        Dialect(name="angelslim", trained_theta=("default", "linear", "dynamic")),
        Dialect(name="modelopt"),
        Dialect(name="nemo"),
        Dialect(name="deepspec"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Reading of a head's config.json.

    Where `taps_known` is False the taps wait for the target's depth, and `config.taps` only counts them; `nested_taps`
    are the numbers that `eagle_config` gives them, until that depth is known. With `rope_interleaved` rotation turns
    neighbouring channels, not halves. `flags` maps a switch to its value and what decided it; `notes` are for a person.
    """

    dialect: str
    config: HeadConfig
    taps_known: bool = True
    nested_taps: tuple[int, ...] | None = None
    rope_interleaved: bool = False
    flags: dict[str, Flag] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def unwrapped_key(key: str) -> str:
    """A published key without the names of trainers' wrappers, which may stand within each other in any order."""
    while (bare := WRAPPERS.sub("", key)) != key:
        key = bare
    return key


def normalise_key(key: str) -> str | None:
    """The name that `EagleHead` uses for a published key, or None for what is recomputed or belongs to the target."""
    key = PREFIXES.sub("", key)
    if key.startswith("verifier_") or key.endswith("rotary_emb.inv_freq"):
        return None
    key = re.sub(r"^midlayer\.", "layers.0.", key).replace(".feed_forward.", ".mlp.")
    return "d2t" if key == "draft_id_to_target_id" else key


def dialect_of(fields: Fields, published: Iterable[str], state: Mapping[str, Tensor]) -> str:
    """Name of the program that wrote the head. Raises CheckpointError for speculators of other kinds."""
    top, where = fields.top, fields.where
    architectures = top.get("architectures") or []
    kind = top.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise CheckpointError(
            f"{where}: speculators_model_type is {kind!r}; accepted is 'eagle3', and the head of another format that "
            "this one was converted from, where that is EAGLE-1 or EAGLE-2"
        )
    signs = (
        ("speculators", kind == "eagle3"),
        ("vllm", _in_wrapper(top)),
        (OWN, top.get("trained_by") == OWN),
        ("eagle", not is_eagle3(state)),
        ("angelslim", "Eagle3LlamaForCausalLM" in architectures),
        ("modelopt", not MODELOPT_FIELDS.isdisjoint(fields.nested)),
        ("specforge", "LlamaForCausalLMEagle3" in architectures),
        ("deepspec", "Qwen3Eagle3Model" in architectures),
        ("nemo", any(key.startswith("model.") for key in published)),
    )
    return next((name for name, found in signs if found), "eagle3")


def _in_wrapper(raw: Mapping[str, Any]) -> bool:
    """True of a config.json of vLLM's wrapper."""
    return raw.get("model_type") == "eagle" and isinstance(raw.get("model"), Mapping)


def is_eagle3(state: Mapping[str, Tensor]) -> bool:
    """EAGLE-1/2 heads have none of these: a norm of the hidden state, a final norm, a map of the draft vocabulary."""
    return any(key in state for key in (*NORMS, "d2t"))


def skipped_by_vllm(raw: Mapping[str, Any]) -> set[str]:
    """Weights that vLLM loads and does not run, by the config.json of a head in its wrapper."""
    skipped = SKIPPED if _in_wrapper(raw) else {}
    return {name for name, field in skipped.items() if raw["model"].get(field) is not False}


def describe(raw: Mapping[str, Any], published: Iterable[str], state: Mapping[str, Tensor], where: str) -> Description:
    """Read the sizes and flags of a head with config.json `raw`, keys as stored `published`, and tensors under
    normalised keys `state`. Raises CheckpointError for fields that are missing, out of range or beyond `EagleHead`."""
    fields = Fields.of(raw, where)
    dialect = DIALECTS[dialect_of(fields, published, state)]
    eagle3 = is_eagle3(state)
    sizes = _sizes(fields, state, eagle3)
    _refuse_other_layers(fields, sizes["num_hidden_layers"])
    rope = _rope(fields, dialect, sizes["num_hidden_layers"])
    interleaved = _interleaved(fields, state)
    switches: dict[str, Any] = _switches_from_keys(fields, state, sizes)
    taps: tuple[int, ...] | None = ()
    nested: tuple[int, ...] | None = None
    count = 0
    if eagle3:
        switches |= _switches_from_config(fields, dialect)
        count = _tap_count(fields, state, sizes["target_hidden_size"])
        taps, nested = _taps(fields, count)
    if "auto_map" in raw:
        fields.notes.append("config.json names code (auto_map); code that comes with a head is never executed")
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
    return Description(
        dialect=dialect.name,
        config=config,
        taps_known=taps is not None,
        nested_taps=nested,
        rope_interleaved=interleaved,
        flags=fields.flags,
        notes=tuple(fields.notes),
    )


def _sizes(fields: Fields, state: Mapping[str, Tensor], eagle3: bool) -> dict[str, Any]:
    """Sizes of the head, from the weights where config.json leaves them out or gives the target's."""
    hidden, heads, vocab = fields.size("hidden_size"), fields.size("num_attention_heads"), fields.size("vocab_size")
    head_dim = fields.size("head_dim", _rows(state, "layers.0.self_attn.q_proj.weight", hidden) // heads)
    key_rows = _rows(state, "layers.0.self_attn.k_proj.weight", heads * head_dim)
    layers = len({found[1] for key in state if (found := re.match(r"layers\.(\d+)\.", key))}) or 1
    declared = fields.layer.get("num_hidden_layers")
    if declared not in (None, layers):
        fields.notes.append(f"config.json says num_hidden_layers {declared}, the weights hold {layers}, which are read")
    lm_head = state.get("lm_head.weight")
    draft = fields.size("draft_vocab_size", vocab if lm_head is None else lm_head.shape[0]) if eagle3 else vocab
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.size("intermediate_size_mlp" if _of_llama4(fields) else "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("num_key_value_heads", max(1, key_rows // head_dim)),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
        "target_hidden_size": _target_hidden(fields, state, hidden) if eagle3 else hidden,
        "num_hidden_layers": layers,
    }


def _rows(state: Mapping[str, Tensor], name: str, default: int) -> int:
    tensor = state.get(name)
    return default if tensor is None else tensor.shape[0]


def _target_hidden(fields: Fields, state: Mapping[str, Tensor], hidden: int) -> int:
    """The width of the states that a head reads; left out, the head's own, or for a narrow one a share of fc."""
    fc = state.get("fc.weight")
    named = fields.layer.get(TAPS) or fields.nested.get(TAPS) or fields.layer.get(OUTPUTS)
    count = len(named) if named else 3
    declared = fields.size("target_hidden_size", hidden)
    if fields.layer.get("target_hidden_size") is not None or fc is None or fc.ndim != 2 or fc.shape[1] % count:
        return declared
    size = fc.shape[1] // count
    if size <= declared or (fc.shape[1] % declared == 0 and size % declared):
        return declared
    fields.notes.append(f"config.json has no target_hidden_size; fc.weight reads {count} states of size {size}")
    return size


def _of_llama4(fields: Fields) -> bool:
    """True where the layer is described in Llama 4's terms."""
    return fields.layer.get("intermediate_size_mlp") is not None


def _interleaved(fields: Fields, state: Mapping[str, Tensor]) -> bool:
    """True where rotation turns neighbouring channels, as Llama 4's does."""
    if not _of_llama4(fields):
        return False
    no_rope = fields.layer.get("no_rope_layers")
    if isinstance(no_rope, list) and no_rope and not no_rope[0]:
        raise fields.error("no_rope_layers names a layer without rotation, which heads do not have")
    if fields.layer.get("use_qk_norm") is True and not any("q_norm" in key for key in state):
        raise fields.error(
            "use_qk_norm norms queries and keys without weights (Llama 4), which fastspec "
            "does not run in heads: use one without it"
        )
    fields.flags["rope_interleaved"] = Flag(True, "Llama 4's rotation")
    fields.notes.append(
        "programs differ in how a Llama 4 head rotates: neighbouring channels, which is used, or halves "
        "(rope_interleaved=False)"
    )
    return True


def _refuse_other_layers(fields: Fields, layers: int) -> None:
    """Layers that draft differently from full attention and SwiGLU are refused by name."""
    cfg = fields.layer
    activation = cfg.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act is {activation!r}; accepted is 'silu'")
    if NEMO in (fields.top.get("architectures") or []):
        if cfg.get("layer_types") or cfg.get("sliding_window"):
            fields.notes.append(
                "config.json is a copy of the target's; NeMo's heads attend to the whole text, whatever it says"
            )
        return
    types = (cfg.get("layer_types") or [])[:layers]
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other:
        raise fields.error(f"layer_types names {other}; accepted are 'full_attention' layers")
    window = fields.size("sliding_window", sys.maxsize)
    untyped = not types and (cfg.get("model_type") == "mistral" or cfg.get("use_sliding_window") is True)
    if ("sliding_attention" in types or untyped) and window < fields.size("max_position_embeddings", 2048):
        raise fields.error(
            f"the head was trained with a sliding window (sliding_attention, {window} tokens), "
            "which fastspec does not run; use a head whose layers are 'full_attention'"
        )


def _rope(fields: Fields, dialect: Dialect, layers: int) -> dict[str, Any]:
    cfg = fields.layer
    given = _rope_of_layer(fields, cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}, layers)
    check_kinds(given, fields.where)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default" and given.get("mrope_interleaved") is True:  # as Qwen3-VL's configurations say it
        kind = "mrope"
    theta, source = given.get("rope_theta") or cfg.get("rope_theta"), "config"
    if kind in dialect.trained_theta:
        if theta not in (None, TRAINED_THETA):
            fields.notes.append(
                f"config.json says rope_theta {theta}, but {dialect.name} trains this RoPE type with "
                f"{TRAINED_THETA:g}; that is used"
            )
        theta, source = TRAINED_THETA, f"{dialect.name}'s trainer"
    elif theta is None:
        theta, source = TRAINED_THETA, "absent, EAGLE's default"
    elif dialect.theta_note is not None and theta != TRAINED_THETA:
        fields.notes.append(dialect.theta_note)
    if kind == "mrope":
        fields.notes.append("rope_type 'mrope' is read as 'default': the two agree on text")
        kind = "default"
    if kind in ("dynamic", "longrope"):
        fields.notes.append(
            f"rope_type {kind!r} is used with the frequencies of contexts up to max_position_embeddings, at any length"
        )
    rope: dict[str, Any] = {
        k: v for k, v in given.items() if v is not None and k not in ("type", "mrope_section", "mrope_interleaved")
    }
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if rope.get(name) is None and cfg.get(name) is not None:
            rope[name] = cfg[name]
    if rope.get("partial_rotary_factor", 1.0) > 1:
        raise fields.error(f"partial_rotary_factor is {rope['partial_rotary_factor']}; it is a share, at most 1")
    if kind == "linear" and rope.get("factor") is None:
        raise fields.error("rope_type 'linear' needs a factor")
    fields.flags["rope_theta"] = Flag(float(theta), source)
    return rope | {"rope_type": kind, "rope_theta": float(theta)}


def _rope_of_layer(fields: Fields, given: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """The RoPE of the head's layers, where a type of layer has one each. Raises CheckpointError where these differ."""
    by_type = {name: rope for name, rope in given.items() if isinstance(rope, Mapping)}
    if not by_type:
        return given
    types = (fields.layer.get("layer_types") or [])[:layers] or (
        ["full_attention"] if "full_attention" in by_type else list(by_type)
    )
    named = [by_type[name] for name in types if name in by_type]
    if len(named) != len(types) or any(rope != named[0] for rope in named):
        raise fields.error(
            f"rope_parameters are of {sorted(by_type)}, the head's layers "
            f"{sorted(set(types))}; accepted is one RoPE for all its layers"
        )
    return named[0]


def _switches_from_keys(fields: Fields, state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, bool]:
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
    fields.flags.update({name: Flag(value, "weights") for name, value in switches.items()})
    eagle3 = is_eagle3(state)
    if not eagle3 and fields.layer.get("bias") is True and not switches["fc_bias"]:
        fields.notes.append("config.json says bias, the weights hold no fc.bias; read without one")
    # A norm that the config has and the weights lack stays, so that the missing weight is reported by name.
    for name, given in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc")) if eagle3 else ():
        declared = fields.find(given)
        if declared is not None and declared.value is True and not switches[name]:
            switches[name], fields.flags[name] = True, Flag(True, declared.source)
    like_target = (
        sizes["draft_vocab_size"] == sizes["vocab_size"] and sizes["hidden_size"] == sizes["target_hidden_size"]
    )
    switches["target_rows"] = eagle3 and "lm_head_map.weight" in state
    switches["own_lm_head"] = eagle3 and ("lm_head.weight" in state or not like_target) and not switches["target_rows"]
    fields.flags.update({name: Flag(switches[name], "weights") for name in ("own_lm_head", "target_rows")})
    return switches


def _switches_from_config(fields: Fields, dialect: Dialect) -> dict[str, bool]:
    before = fields.find("norm_before_residual") or Flag(
        dialect.norm_before_residual, f"absent, default of {dialect.name}"
    )
    output = fields.find("norm_output") or fields.find("return_hidden_post_norm") or Flag(False, "absent")
    last = fields.find("use_last_layernorm")
    if last is not None and last.value is False:
        raise CheckpointError(
            f"{fields.where}: the head has no norm before its LM head (use_last_layernorm is false); not supported"
        )
    if output.value and dialect.norm_output_note is not None:
        fields.notes.append(dialect.norm_output_note)
    fields.flags["norm_before_residual"], fields.flags["norm_output"] = before, output
    return {"norm_before_residual": bool(before.value), "norm_output": bool(output.value)}


def _tap_count(fields: Fields, state: Mapping[str, Tensor], target_hidden: int) -> int:
    uses, fc = fields.find("use_aux_hidden_state"), state.get("fc.weight")
    if uses is not None and uses.value is False:
        raise CheckpointError(
            f"{fields.where}: a head without auxiliary hidden states (use_aux_hidden_state is false) reads the "
            "target's last state alone, which fastspec does not run in EAGLE-3 heads: use one that reads intermediate "
            "layers, or train one with `fastspec train`"
        )
    if fc is None or fc.ndim != 2:
        raise CheckpointError(
            f"{fields.where}: fc.weight is missing or not a matrix; EAGLE-3 heads that read intermediate layers have "
            "it, and heads without auxiliary hidden states, which fastspec does not run, have none"
        )
    query, hidden = state.get("layers.0.self_attn.q_proj.weight"), fields.size("hidden_size")
    if query is not None and query.ndim == 2 and query.shape[1] == hidden and fc.shape[1] == 2 * hidden:
        raise CheckpointError(
            f"{fields.where}: an EAGLE-1/2 head with norms of its own ({some(sorted(NORMS & set(state)))}), which "
            "fastspec does not run: use an EAGLE-3 head for this target, or train one with `fastspec train`"
        )
    if fc.shape[1] % target_hidden:
        raise CheckpointError(
            f"{fields.where}: fc.weight takes {fc.shape[1]} inputs, which is no multiple of the target's hidden size "
            f"{target_hidden}; check target_hidden_size in config.json"
        )
    return fc.shape[1] // target_hidden


def _taps(fields: Fields, count: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Indices into hidden_states, None where the target's depth decides, and the numbers that `eagle_config` gives."""
    top, nested, outputs = fields.layer.get(TAPS), fields.nested.get(TAPS), fields.layer.get(OUTPUTS)
    ids, name = top or nested or outputs, TAPS if top or nested else OUTPUTS
    if not ids:
        fields.flags["taps"] = Flag("2, L/2, L-3", "absent, EAGLE-3's default")
        if count != 3:
            raise CheckpointError(
                f"{fields.where}: fc.weight reads {count} layers but config.json does not name them ({TAPS})"
            )
        return None, None
    if len(ids) != count:
        raise CheckpointError(
            f"{fields.where}: {name} is {ids}; fc.weight reads {count} layers, so {count} layer numbers are expected"
        )
    if top:
        fields.flags["taps"] = Flag(tuple(top), "config")
        return tuple(top), None
    if not nested:
        taps = tuple(i + 1 for i in ids)
        fields.flags["taps"] = Flag(taps, f"{OUTPUTS}, counted from layer outputs")
        return taps, None
    taps, fields.flags["taps"] = counted(tuple(ids), None)
    return taps, tuple(ids)


def counted(ids: tuple[int, ...], num_layers: int | None) -> tuple[tuple[int, ...], Flag]:
    """Indices into hidden_states of the numbers in `eagle_config`, for a target of `num_layers` (None: unknown).

    They count layer outputs, one less, unless they begin with 2 or would lead past the target's last layer.
    """
    if ids[0] == 2 or (num_layers is not None and max(ids) == num_layers):
        return ids, Flag(ids, "eagle_config, counted as hidden_states")
    taps = tuple(i + 1 for i in ids)
    return taps, Flag(taps, "eagle_config, counted from layer outputs")
