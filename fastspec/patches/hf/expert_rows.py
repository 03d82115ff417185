"""What fastspec knows of the families' mixtures of experts, as rows of data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names of the parts of a mixture of experts, as attributes of the feed-forward or of its router or `experts`, and how it computes."""

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
    """The router's numbers of groups of experts and of those to choose from, and the factor of its shares, where it has them."""
    rounded: bool = True
    """Whether shares are rounded to the dtype of the logits, else fp32."""
    wide: bool = False
    """Whether logits are computed in fp32 whatever the weights' dtype."""
    shared: str = ""
    shared_gate: str = ""
    shared_act: str = "act_fn"
    """An expert that every token goes to, what it is gated by, and its activation."""
    transposed: bool = False
    """Whether the experts' weights are [E, in, out], else [E, out, in]."""
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
    normalised_if="norm_topk_prob", sigmoid=True, correction="e_score_correction_bias", groups="num_group", kept="topk_group",
    scale="routed_scaling_factor", wide=True, shared="shared_experts",
)  # fmt: skip
GPT_OSS_EXPERTS = Mixture(router="router", transposed=True, interleaved=True, offset=1.0, alpha="alpha", limit="limit")
LLAMA4_EXPERTS = Mixture(
    router="router", sigmoid=True, normalised=False, shared="shared_expert", shared_act="activation_fn", transposed=True, scales_input=True
)
