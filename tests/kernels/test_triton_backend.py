"""The Triton backend from the front door: what a patched model says with it, what it ran, and what it leaves behind.

On the CPU the kernels run in Triton's interpreter, uncaptured; on CUDA rounds are captured.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.devices import CPU, CUDA
from helpers.generate import MAKERS, TREE, prompts, seer1
from helpers.kernels import EVERYWHERE, ON_CUDA
from helpers.models import FAMILIES, tiny_head, tiny_model
from torch import Tensor

import fastspec
from fastspec.errors import Unsupported
from fastspec.patches.assistants.fused import FusedDrafter
from fastspec.patches.assistants.registry import EagleDecoding
from fastspec.patches.backends import triton_ops
from fastspec.patches.hf.layer_weights import pack_model
from fastspec.patches.session import session_of

HERE = ((CPU, ("qwen2", "qwen3", "gpt_oss")), (CUDA, FAMILIES))  # a bias, q/k norms, experts: the interpreter is slow
SMALL = fastspec.Eagle3(depth=2, top_k=2, total_tokens=6)


@pytest.fixture
def drafters(monkeypatch):
    """The drafters that calls are given, the last one last."""
    made = []
    drafter = EagleDecoding.drafter
    monkeypatch.setattr(EagleDecoding, "drafter", lambda self, **call: made.append(drafter(self, **call)) or made[-1])
    return made


def moved(inputs: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@pytest.mark.some("qwen3", "gpt_oss")
@pytest.mark.parametrize(
    ("family", "device"),
    [pytest.param(f, *d.values, marks=d.marks, id=f"{f}-{d.values[0]}") for d, families in HERE for f in families],
)
def test_every_family_gives_in_fp32_what_the_unpatched_model_gives(family, device):
    model = tiny_model(family, num_hidden_layers=2, num_attention_heads=4).to(device)
    inputs = moved(prompts(2, 4), device)
    options = {
        "do_sample": False,
        "max_new_tokens": 4 if device == "cuda" else 3,
    }  # the second round reads what the first one kept
    expected = model.generate(**inputs, **options)
    with fastspec.patched(model, eagle3=tiny_head(model).to(device), backend="triton"):
        for assistant in ("autoregressive", SMALL) if device == "cuda" or family == "qwen2" else (SMALL,):
            assert model.generate(**inputs, **options, assistant=assistant).tolist() == expected.tolist()
    assert model.generate(**inputs, **options).tolist() == expected.tolist()


@EVERYWHERE
def test_texts_outgrow_windows(device):
    """A window of six positions in one layer of two; a prompt, the texts and the trees behind them pass it."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model("qwen2", sliding_window=6, use_sliding_window=True, num_attention_heads=4, **layers).to(device)
    inputs = moved(prompts(2, 7), device)
    options = {"do_sample": False, "max_new_tokens": 4}
    expected = model.generate(**inputs, **options)
    with fastspec.patched(model, eagle3=tiny_head(model).to(device), backend="triton"):
        for assistant in ("autoregressive", SMALL) if device == "cuda" else (SMALL,):
            assert model.generate(**inputs, **options, assistant=assistant).tolist() == expected.tolist()
    model.config.sliding_window = 400
    assert model.generate(**inputs, **options).tolist() != expected.tolist()  # the window matters


@EVERYWHERE
def test_the_backend_s_ops_are_called(device):
    target, head = MAKERS["bigram"]
    model = target(num_hidden_layers=2).to(device)
    inputs = moved(prompts(2, 4), device)
    options = {"do_sample": False, "max_new_tokens": 6 if device == "cpu" else 20}
    expected = model.generate(**inputs, **options)
    if device == "cpu":
        pack_model(model)  # as patch does on CUDA
    fastspec.patch(model, eagle3=head(model).to(device), backend="triton")
    assert model.generate(**inputs, **options, assistant=SMALL).tolist() == expected.tolist()
    report = fastspec.report(model)
    assert report.backend == "triton" and report.last.acceptance_length > 1.5
    wanted = (
        "attention_layout",
        "tree_attention",
        "kv_block_copy",
        "linear",
        "linear_parts",
        "rms_norm",
        "rope_cache",
        "gate_up",
    )
    wanted += (
        "topk_expand",
        "head_input",
        "frontier_input",
        "tree_build",
        "pick",
        "posterior_walk",
        "commit_slots",
        "emit",
    )
    wanted += ("path_pairs", "keep_last", "tree_input")
    assert all(report.kernels[name] > 0 for name in wanted)
    assert report.last.replays == (report.last.rounds - 1 if device == "cuda" else 0)


@pytest.mark.parametrize(
    ("rows", "choices"), [(1, (True, False, None)), pytest.param(3, (True,), marks=pytest.mark.slow)]
)
def test_a_user_chooses_how_a_draft_phase_is_launched(rows, choices, drafters):
    """In one launch, also in batches, in separate kernels, or as fastspec would; the tokens are the same."""
    plain, model = tiny_model(num_hidden_layers=2), tiny_model(num_hidden_layers=2)
    inputs, options = prompts(*[3, 4, 2][:rows]), {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None}
    want = plain.generate(**inputs, **options).tolist()
    fastspec.patch(model, eagle3=tiny_head(model), backend="triton")
    for fused in choices:
        assistant = fastspec.Eagle3(total_tokens=4, depth=1, top_k=2, fused=fused)
        assert model.generate(**inputs, **options, assistant=assistant).tolist() == want
        assert fastspec.report(model).last.drafted > 0
        assert isinstance(drafters[-1], FusedDrafter) == bool(fused)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_k": 17}, "up to 16 children of a node, not top_k=17"),
        ({"backend": "torch"}, "'torch' has no kernel for it"),
        ({"qk_norm": True}, "this head is HeadConfig"),
    ],
    ids=["top_k", "backend", "head"],
)
def test_one_launch_that_cannot_be_is_refused_with_the_reason(change, reason):
    model = tiny_model()
    sizes = {name: value for name, value in change.items() if name == "qk_norm"}
    fastspec.patch(model, eagle3=tiny_head(model, **sizes), backend=change.get("backend", "triton"))
    with pytest.raises(fastspec.Unsupported, match=rf"one launch \(fused=True\): .*{reason}"):
        model.generate(
            **prompts(4), max_new_tokens=3, assistant=fastspec.Eagle3(depth=1, top_k=change.get("top_k", 2), fused=True)
        )
    for wrong in (1, "yes"):
        with pytest.raises(fastspec.Unsupported, match=r"fused=.*; accepted are True, False and None"):
            fastspec.Eagle2(fused=wrong)


@ON_CUDA
def test_one_row_is_drafted_for_in_one_launch(device, drafters):
    target, head = MAKERS["random"]
    model = target().to(device)
    inputs, options = moved(prompts(9), device), {"do_sample": False, "max_new_tokens": 30}
    expected = model.generate(**inputs, **options).tolist()
    fastspec.patch(model, eagle3=head(model).to(device))
    for fused in (False, True, True):
        assert model.generate(**inputs, **options, assistant=replace(TREE, fused=fused)).tolist() == expected
        assert isinstance(drafters[-1], FusedDrafter) is fused


@ON_CUDA
@pytest.mark.parametrize(
    "options", [{"temperature": 1.3, "top_k": 20}, {"top_p": 0.8, "min_p": 0.02}, {"repetition_penalty": 1.3}]
)
def test_sampling_follows_its_seed(options, device):
    target, head = MAKERS["bigram"]
    model = target().to(device)
    fastspec.patch(model, eagle3=head(model).to(device), backend="triton")
    inputs, emitted = moved(prompts(5, 8), device), []
    for _ in range(2):
        torch.manual_seed(3)
        emitted.append(model.generate(**inputs, do_sample=True, max_new_tokens=6, assistant=SMALL, **options).tolist())
    assert emitted[0] == emitted[1]


def test_the_backend_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model()
    with pytest.raises(Unsupported, match="CUDA"):
        fastspec.patch(model, backend="triton")
    assert "generate" not in vars(model)


def test_the_backend_is_refused_in_generic_mode():
    model = tiny_model("gpt2")
    with pytest.raises(Unsupported, match=r"generic mode|CUDA"):
        fastspec.patch(model, backend="triton")
    assert "generate" not in vars(model)


@ON_CUDA
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_packed_weights_are_views_and_are_undone(family, device):
    model = tiny_model(family).to(device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = moved(prompts(4, 9), device)
    plain = model(**inputs).logits
    fastspec.patch(model)
    attn = model.model.layers[0].self_attn
    assert attn.k_proj.weight.untyped_storage().data_ptr() == attn.q_proj.weight.untyped_storage().data_ptr()
    assert torch.equal(model(**inputs).logits, plain)
    fastspec.unpatch(model)
    assert attn.k_proj.weight.untyped_storage().data_ptr() != attn.q_proj.weight.untyped_storage().data_ptr()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model(**inputs).logits, plain)


@ON_CUDA
def test_a_deep_copy_of_a_packed_model_has_weights_of_its_own(device):
    model = tiny_model().to(device)
    inputs, options = moved(prompts(4, 9), device), {"do_sample": False, "max_new_tokens": 12}
    expected = model.generate(**inputs, **options).tolist()
    fastspec.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin.generate(**inputs, **options, assistant="autoregressive").tolist() == expected
    fastspec.unpatch(twin)
    assert twin.generate(**inputs, **options).tolist() == expected


@ON_CUDA
def test_captured_rounds_are_shared_by_later_calls_and_freed(device):
    target, head = MAKERS["random"]
    model = target().to(device)
    options = {"do_sample": False, "max_new_tokens": 30}
    lengths = [(3, 9), (17, 2), (5, 5)]
    expected = [model.generate(**moved(prompts(*each), device), **options).tolist() for each in lengths]
    fastspec.patch(model, eagle3=head(model).to(device))
    session = session_of(model)
    for _ in range(2):
        emitted = [
            model.generate(**moved(prompts(*each), device), **options, assistant=TREE).tolist() for each in lengths
        ]
        assert emitted == expected
    assert len(session.engines.held) == 1 and fastspec.report(model).last.replays == fastspec.report(model).last.rounds
    for size in range(2, 8):
        model.generate(**moved(prompts(*[4] * size), device), **options, assistant=TREE)
    assert len(session.engines.held) == 4
    fastspec.unpatch(model)
    assert not session.engines.held


@ON_CUDA
def test_a_text_that_outgrows_its_buffers_is_captured_anew(device):
    target, head = MAKERS["bigram"]
    model = target().to(device)
    inputs = moved(prompts(1000, 1015), device)
    model.config.max_position_embeddings = 4096
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": 1000}
    expected = model.generate(**inputs, **options).tolist()
    fastspec.patch(model, eagle3=head(model).to(device))
    for _ in range(2):
        assert model.generate(**inputs, **options, assistant=TREE).tolist() == expected


@ON_CUDA
def test_a_hook_set_after_the_patch_is_honoured(device):
    model = tiny_model().to(device)
    inputs, options = moved(prompts(4, 9), device), {"do_sample": False, "max_new_tokens": 20}
    fastspec.patch(model)
    model.generate(**inputs, **options, assistant="autoregressive")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0.5)
    expected = model.generate(**inputs, **options).tolist()
    assert model.generate(**inputs, **options, assistant="autoregressive").tolist() == expected


@ON_CUDA
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"renormalize_logits": True},
        {"remove_invalid_values": True},
        {"suppress_tokens": [7, 8]},
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_processor_runs_in_captured_rounds(options, device):
    """Drawn with nearly all mass on one token, captured rounds say what the plain rounds of the torch backend say."""
    target, head = MAKERS["bigram"]
    inputs = moved(prompts(5, 8), device)
    emitted = []
    for backend in ("torch", "triton"):
        model = target().to(device)
        with torch.no_grad():
            model.lm_head.weight.mul_(8.0)
        with fastspec.patched(model, eagle3=head(model).to(device), backend=backend):
            for name in (TREE, "autoregressive", "nasd"):
                torch.manual_seed(0)
                emitted.append(
                    model.generate(**inputs, do_sample=True, max_new_tokens=20, assistant=name, **options).tolist()
                )
    assert emitted[:3] == emitted[3:]


@ON_CUDA
@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
def test_static_trees_are_captured(drafts, device):
    model = MAKERS["bigram"][0]().to(device)
    inputs = moved(prompts(5, 8), device)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=20).tolist()
    fastspec.patch(model, eagle=seer1(model).to(device))
    config = fastspec.Eagle1(drafts=drafts)
    assert model.generate(**inputs, do_sample=False, max_new_tokens=20, assistant=config).tolist() == expected
    assert fastspec.report(model).last.replays > 0
    torch.manual_seed(1)
    model.generate(**inputs, do_sample=True, max_new_tokens=20, assistant=config)
    assert fastspec.report(model).last.replays > 0


@EVERYWHERE
@pytest.mark.parametrize(
    ("count", "vocab", "candidates"), [(17, 50, 4097), pytest.param(64, 200, 16384, marks=pytest.mark.slow)]
)
def test_wide_trees_are_ranked_by_the_kernels(device, count, vocab, candidates):
    """More than 16 children of a node, and more than 4,096 candidates: no reference runs under the kernels' names."""
    from fastspec.kernels.drafting import reference
    from fastspec.patches.backends import triton_ops

    ops, generator = triton_ops(), torch.Generator().manual_seed(0)
    logits, d2t = (
        torch.randn(1, 2, vocab, generator=generator).to(device),
        torch.zeros(vocab, dtype=torch.long, device=device),
    )
    scores = torch.zeros(1, 2, device=device)
    above = torch.full((1, candidates), -1, device=device)
    half = candidates // 2
    above[:, half : 2 * half] = torch.arange(half, device=device)  # the second half lies below the first
    flat, depths = (
        -torch.rand(1, candidates, generator=generator).to(device),
        torch.ones(candidates, dtype=torch.long, device=device),
    )
    flat[:, half : 2 * half] += flat[:, :half].clone()
    inputs = flat, above + 1, above, depths, above[:, 0] + 1, 256
    expanded, built = reference.topk_expand(logits, None, scores, count, d2t), reference.tree_build(*inputs)
    assert [op.__module__.rpartition(".")[2] for op in (ops.topk_expand, ops.tree_build)] == [
        "topk_expand",
        "tree_build",
    ]
    got = ops.topk_expand(logits, None, scores, count, d2t)
    assert all(torch.equal(got[place], expanded[place]) for place in (1, 3)) and got[2].shape == (1, count)
    torch.testing.assert_close(got[0], expanded[0], rtol=0, atol=2**-20 * vocab)
    assert all(torch.equal(a, b) for a, b in zip(ops.tree_build(*inputs), built, strict=True))


def test_an_op_without_a_kernel_is_not_counted_as_one():
    from collections import Counter

    from fastspec.patches.backends import TORCH, counted

    logits, names = torch.randn(1, 2, 50), Counter()
    ops, plain = counted(triton_ops(), names), counted(TORCH, names)
    ops.topk_logprobs(logits, 3)
    ops.topk_expand(logits, None, torch.zeros(1, 2), 3, torch.zeros(50, dtype=torch.long))
    assert names == {"topk_logprobs (torch)": 1, "topk_expand": 1}
    plain.topk_logprobs(logits, 3)
    assert names["topk_logprobs"] == 1  # in the torch backend everything is torch's


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"total_tokens": 8, "depth": 1, "top_k": 65}, "top_k=65"),
        ({"total_tokens": 8, "depth": 200, "top_k": 10}, "20010 candidates"),
    ],
)
def test_a_tree_that_the_kernels_cannot_grow_is_refused_by_name(tree, words):
    model = tiny_model(num_hidden_layers=3)
    fastspec.patch(model, eagle3=tiny_head(model), backend="triton")
    inputs, options = prompts(3), {"do_sample": False, "max_new_tokens": 2}
    with pytest.raises(Unsupported, match=rf'{words}.*backend="torch"'):
        model.generate(**inputs, **options, assistant=fastspec.Eagle3(**tree))
    fastspec.unpatch(model)
    fastspec.patch(model, eagle3=tiny_head(model), backend="torch")
    assert model.generate(**inputs, **options, assistant=fastspec.Eagle3(**tree)).shape[1] == 5


def test_auto_takes_the_kernels_where_they_were_measured(monkeypatch):
    from fastspec.patches import backends

    cases = (
        ((9, 0), True, "triton"),
        ((9, 0), False, "torch"),
        ((8, 0), True, "triton"),
        ((12, 0), True, "triton"),
        ((7, 5), True, "torch"),
    )
    for capability, adapted, name in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert backends.choose_backend("auto", torch.device("cuda"), adapted).name == name
