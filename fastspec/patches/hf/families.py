"""Families: what fastspec knows of each model family, and of the families' mixtures of experts, as rows of data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names of the parts of a mixture of experts, as attributes of the feed-forward, its router or `experts`."""

    router: str = "gate"
    sigmoid: bool = False
    normalised_if: str = ""
    """The router's attribute that says whether the shares of the chosen add up to one; "": what `normalised` says."""
    normalised: bool = True
    correction: str = ""
    """The router's, which scores are added to where experts are chosen."""
    groups: str = ""
    kept: str = ""
    scale: str = ""
    """The router's numbers of groups and of those to choose from, and the factor of its shares."""
    rounded: bool = True
    """True where shares are rounded to the dtype of the logits, else fp32."""
    wide: bool = False
    """True where logits are computed in fp32 whatever the weights' dtype."""
    shared: str = ""
    shared_gate: str = ""
    shared_act: str = "act_fn"
    """An expert that every token goes to, what it is gated by, and its activation."""
    transposed: bool = False
    """True where the experts' weights are [E, in, out], else [E, out, in]."""
    interleaved: bool = False
    offset: float = 0.0
    scales_input: bool = False
    """As in `kernels.linear.reference.Expert`."""
    alpha: str = ""
    limit: str = ""
    """The attributes of `experts` with these of the `Expert`; without, its `act_fn` says them."""


QWEN_EXPERTS = Mixture(normalised_if="norm_topk_prob")
SHARED_EXPERT = replace(QWEN_EXPERTS, shared="shared_expert", shared_gate="shared_expert_gate")
GLM4_EXPERTS = Mixture(
    normalised_if="norm_topk_prob",
    sigmoid=True,
    correction="e_score_correction_bias",
    groups="num_group",
    kept="topk_group",
    scale="routed_scaling_factor",
    wide=True,
    shared="shared_experts",
)
GPT_OSS_EXPERTS = Mixture(router="router", transposed=True, interleaved=True, offset=1.0, alpha="alpha", limit="limit")
LLAMA4_EXPERTS = Mixture(
    router="router",
    sigmoid=True,
    normalised=False,
    shared="shared_expert",
    shared_act="activation_fn",
    transposed=True,
    scales_input=True,
)


@dataclass(frozen=True, slots=True)
class PositionFactor:
    """Factor of queries by position, 1 + b * log(1 + floor((p + first) / period)), with the names of these settings of
    the configuration, or of its `rope_parameters`."""

    b: str
    period: str
    first: int = 0
    """The number of a text's first position."""
    used_if: str = ""
    """The setting that says whether there is such a factor at all."""
    unrotated: bool = False
    """True where only layers have it that rotate nothing, and padding counts among the positions."""
    rounded: bool = False
    """True where the factor is rounded to the model's dtype, else fp32."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names of the parts of one decoder's `model_type`, as attributes of the model, of its decoder or of a layer."""

    model_type: str
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    rotary: str = "rotary_emb"
    lm_head: str = "lm_head"
    inside: str = ""
    """The attribute of a vision-language model that is a whole language model, its LM head included."""
    attention: str = "self_attn"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mixer_out_norm: str = ""
    mlp_out_norm: str = ""
    """Norms of what attention and feed-forward add; without norms of what they read those are ""."""
    qk_norm: bool = False
    """True where each head's queries and keys are normed."""
    heads_norm: str = ""
    """The norm without a weight of every head's rotated queries and keys, whose mean square is as before."""
    normed_if: str = ""
    """The attribute of an attention that says whether they are, where not all models do so."""
    wide_qk_norm: bool = False
    """True where all heads' queries are normed together, and so all keys."""
    eps: str = "variance_epsilon"
    """The attribute of a norm that is added to the mean square; "" for norms of another kind, which run as they are."""
    offset: float | None = None
    """What a norm adds to its weight, which it applies in fp32; None: it applies the weight to the rounded norm."""
    rotary_by_kind: bool = False
    """True where the kinds of layers (`layer_types`) have rotary tables of their own."""
    angles_once: bool = False
    """True where the rotary module gives each angle once; others repeat them for both halves of a head."""
    angles_twice: bool = False
    """True where it gives each angle twice in a row."""
    interleaved: bool = False
    """True where neighbouring channels are rotated with each other; in the others those of the two halves of a head."""
    position_factor: PositionFactor | None = None
    rotates: str = ""
    """The attribute of an attention that says whether it rotates at all, where some do not."""
    rotates_all: str = ""
    """The attribute of an attention that is None where all rotate after all."""
    qkv: str = ""
    """The attribute of an attention that is the product of queries, keys and values, where it is one."""
    out: str = "o_proj"
    parallel: bool = False
    """True where the feed-forward reads what the attention reads."""
    residual_scale: str = ""
    """The attribute of a layer that what its parts add is multiplied by."""
    embed_scale: str = ""
    """The attribute of the decoder that embeddings are multiplied by, where `embed` does not do it."""
    logit_scale: str = ""
    logit_divisor: str = ""
    """The settings that logits are multiplied and divided by."""
    scaled_around: tuple[str, ...] = ()
    """The types of models around the decoder that do so as well; others leave logits as they are."""
    sinks: str = ""
    """The attribute of an attention with a logit per head that joins the softmax."""
    cap: str = ""
    """The attribute of an attention that its scores are soft-capped with, None for no cap."""
    final_cap: str = ""
    """The setting that logits are soft-capped with, None for no cap."""
    norms_values: bool = False
    """True where values are normed, without a weight."""
    layer_input: str = ""
    """The gate for a layer's own input of every token, which `layer_input_out` and `layer_input_norm` follow."""
    layer_input_out: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm"
    layer_scale: str = ""
    """The attribute of a layer that its output is multiplied by."""
    experts: str = ""
    """Experts beside a dense feed-forward, their `router`, and norms of the dense result, their input and result."""
    router: str = "router"
    dense_out_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    hides: tuple[str, ...] = ()
    """Settings of the model around a decoder that name tokens which it shows the decoder as padding."""
    gated_attention: bool = False
    """True where q_proj gives every head's queries and as many gates, which what the head reads is multiplied by."""
    recurrent: str = ""
    """The Gated DeltaNet of a layer that has one in place of attention, and its parts."""
    recurrent_inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """Products of queries, keys and values, of the norm's gates, and of b and a, which make rates and decays."""
    grouped_inputs: bool = False
    """True where these hold everything of one key head side by side."""
    recurrent_norm: str = "norm"
    recurrent_out: str = "out_proj"
    doubles: str = ""
    """The attribute of a Gated DeltaNet that says whether its rates go up to 2."""
    recurrent_row: Adapter | None = None
    """The row of the layers that have one, where their norms stand elsewhere than in the others."""
    gated_mlp: bool = True
    """True where a dense `mlp` is down_proj(act(gate_proj(x)) * up_proj(x))."""
    gate_up: str = ""
    """The attribute of such an `mlp` that is the product of both, where it is one."""
    act: str = "act_fn"
    """The activation of such an `mlp`."""
    mixture: Mixture | None = None
    """That of the layers that have one."""
    unless: tuple[str, ...] = ()
    """Settings under which a model has no adapter, if they are neither None nor False."""


GEMMA2 = Adapter(
    "gemma2",
    mlp_norm="pre_feedforward_layernorm",
    mixer_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    eps="eps",
    offset=1.0,
    cap="attn_logit_softcapping",
    final_cap="final_logit_softcapping",
)
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    cap="",
    qk_norm=True,
    rotary_by_kind=True,
    offset=0.0,
    norms_values=True,
    layer_input="per_layer_input_gate",
    layer_scale="layer_scalar",
    experts="experts",
    hides=("image_token_id", "video_token_id", "audio_token_id"),
)
OLMO2 = Adapter(
    "olmo2",
    input_norm="",
    mlp_norm="",
    mixer_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    wide_qk_norm=True,
)
QWEN3_5 = Adapter("qwen3_5_text", qk_norm=True, eps="eps", offset=1.0, gated_attention=True, recurrent="linear_attn")
PAIRS = Adapter("ernie4_5", interleaved=True)
GLM = replace(PAIRS, model_type="glm", gate_up="gate_up_proj", act="activation_fn")
COHERE = replace(
    PAIRS,
    model_type="cohere",
    angles_twice=True,
    parallel=True,
    mlp_norm="",
    eps="",
    logit_scale="logit_scale",
    unless=("use_qk_norm",),
)
GRANITE = Adapter(
    "granite", residual_scale="residual_multiplier", embed_scale="embedding_multiplier", logit_divisor="logits_scaling"
)
ADAPTERS = {
    row.model_type: row
    for row in (
        Adapter("llama"),
        Adapter("mistral"),
        Adapter("qwen2"),
        Adapter("qwen3", qk_norm=True),
        Adapter("qwen3_moe", qk_norm=True, mixture=QWEN_EXPERTS),
        Adapter("qwen2_vl_text"),
        Adapter("qwen2_5_vl_text"),
        Adapter("qwen3_vl_text", qk_norm=True),
        Adapter("qwen3_vl_moe_text", qk_norm=True, mixture=Mixture()),
        Adapter("mixtral", gated_mlp=False, mixture=Mixture(rounded=False)),
        Adapter("glm4_moe", qk_norm=True, normed_if="use_qk_norm", mixture=GLM4_EXPERTS),
        Adapter("ministral"),
        Adapter(
            "ministral3",
            position_factor=PositionFactor("llama_4_scaling_beta", "original_max_position_embeddings", rounded=True),
        ),
        Adapter("qwen2_moe", mixture=SHARED_EXPERT),
        Adapter("seed_oss"),
        Adapter("cwm"),
        Adapter("arcee"),
        Adapter("starcoder2"),
        Adapter("smollm3", rotates="use_rope"),
        Adapter("gemma", eps="eps", offset=1.0),
        GEMMA2,
        replace(GEMMA2, model_type="gemma3_text", cap="", qk_norm=True, rotary_by_kind=True),
        GEMMA4,
        replace(GEMMA4, model_type="gemma4_unified_text", layer_input="", experts=""),
        OLMO2,
        replace(OLMO2, model_type="olmo3", rotary_by_kind=True),
        QWEN3_5,
        replace(QWEN3_5, model_type="qwen3_5_moe_text", mixture=replace(SHARED_EXPERT, normalised_if="")),
        replace(
            QWEN3_5,
            model_type="qwen3_next",
            recurrent_inputs=("in_proj_qkvz", "in_proj_ba"),
            grouped_inputs=True,
            mixture=SHARED_EXPERT,
        ),
        replace(
            OLMO2,
            model_type="olmo_hybrid",
            recurrent="linear_attn",
            recurrent_row=Adapter(
                "olmo_hybrid",
                recurrent="linear_attn",
                recurrent_inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
                recurrent_norm="o_norm",
                recurrent_out="o_proj",
                doubles="allow_neg_eigval",
            ),
        ),
        Adapter("gpt_oss", gated_mlp=False, sinks="sinks", angles_once=True, mixture=GPT_OSS_EXPERTS),
        Adapter("dots1", qk_norm=True, mixture=GLM4_EXPERTS),
        Adapter("solar_open", mixture=GLM4_EXPERTS),
        Adapter("olmoe", wide_qk_norm=True, mixture=QWEN_EXPERTS, unless=("clip_qkv",)),
        Adapter("minimax_m2", wide_qk_norm=True),
        Adapter("aria_text"),
        Adapter("emu3_text_model"),
        Adapter("internlm3"),
        Adapter("iquestcoder"),
        Adapter("jais2"),
        Adapter("nemotron"),
        Adapter("olmo", unless=("clip_qkv",)),
        Adapter("stablelm", unless=("use_parallel_residual", "qk_layernorm")),
        Adapter("apertus", input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", qk_norm=True),
        Adapter("phi", out="dense", parallel=True, mlp_norm="", norm="final_layernorm", unless=("qk_layernorm",)),
        Adapter("phi3", qkv="qkv_proj", gate_up="gate_up_proj", act="activation_fn"),
        replace(GEMMA2, model_type="vaultgemma", mixer_out_norm="", mlp_out_norm=""),
        replace(
            OLMO2,
            model_type="exaone4",
            wide_qk_norm=False,
            qk_norm=True,
            rotates="is_sliding",
            rotates_all="sliding_window",
        ),
        replace(OLMO2, model_type="flex_olmo", mixture=QWEN_EXPERTS),
        PAIRS,
        replace(PAIRS, model_type="ernie4_5_moe"),
        replace(PAIRS, model_type="helium"),
        GLM,
        replace(GLM, model_type="glm4", mixer_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
        replace(
            PAIRS,
            model_type="llama4_text",
            inside="language_model",
            eps="eps",
            mlp="feed_forward",
            act="activation_fn",
            rotates="use_rope",
            heads_norm="qk_norm",
            position_factor=PositionFactor("attn_scale", "floor_scale", 1, "attn_temperature_tuning", unrotated=True),
            mixture=LLAMA4_EXPERTS,
        ),
        COHERE,
        replace(COHERE, model_type="cohere2", rotates="sliding_window", unless=()),
        GRANITE,
        replace(GRANITE, model_type="granitemoe", mlp="block_sparse_moe"),
        replace(
            GRANITE,
            model_type="hyperclovax",
            mixer_out_norm="post_norm1",
            mlp_out_norm="post_norm2",
            logit_scale="logits_scaling",
            logit_divisor="",
            scaled_around=("hyperclovax_vision_v2",),
        ),
    )
}


BY_SLOT = {"doge": "keep_window_size", "llama4_text": "floor_scale"}
"""Model type -> setting past which a layer's own forward counts slots, in which draft nodes lie out of order."""


@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """Names of the parts of one encoder-decoder `model_type`, in its decoder, and how positions come in."""

    model_type: str
    relative: bool = False
    """True where blocks take a bias by distance (T5) instead of embedded positions."""
    counted: bool = False
    """True where padding tokens have no position (fairseq's tables)."""
    scale: str = ""
    """What embeddings are multiplied by, where `embed_tokens` does not do it."""
    embed_norm: str = ""
    norm_first: bool = False
    """True where `embed_norm` comes before positions are added."""
    final: str = ""
    scaled_if: str = ""
    """The setting that says whether the last hidden state is multiplied by width**-0.5."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Attributes that the decoder must have."""
        loop = ("block",) if self.relative else ("layers", "embed_positions")
        return (*loop, *filter(None, (self.scale, self.embed_norm, self.final)))


SEQ2SEQ = {
    row.model_type: row
    for row in (
        Seq2Seq("t5", relative=True, final="final_layer_norm", scaled_if="scale_decoder_outputs"),
        Seq2Seq("mt5", relative=True, final="final_layer_norm"),
        Seq2Seq("bart", embed_norm="layernorm_embedding"),
        Seq2Seq("plbart", embed_norm="layernorm_embedding"),
        Seq2Seq("mbart", embed_norm="layernorm_embedding", final="layer_norm"),
        Seq2Seq("marian", scale="embed_scale"),
        Seq2Seq("pegasus", scale="embed_scale", final="layer_norm"),
        Seq2Seq("bigbird_pegasus", final="layernorm_embedding"),
        Seq2Seq("blenderbot", final="layer_norm"),
        Seq2Seq("blenderbot-small", scale="embed_scale", embed_norm="layernorm_embedding", norm_first=True),
        Seq2Seq("m2m_100", counted=True, final="layer_norm"),
    )
}
