"""Time per round on models of full size with random weights, beside transformers' own decoding in the same run.

The time of a pass does not depend on the values of the weights; what a model says does, so no tokens per second are measured here: they
are the acceptance length that a head reaches on real text, over the time of a round. `round_ms` is the median over CALLS calls, each of
which gives the mean of its rounds, and `round_ms_quantiles` their 20, 50 and 80 % quantiles. The floor is the time of reading once, at the
measured bandwidth, the weights that a round must read (`read_bytes`) and what its layers can see of the text before (`kept_bytes`: keys,
values, recurrent states); a drafter's own are not counted. Rows of versions without `kept_bytes` have floors of weights alone.

    python benchmarks/full_size.py --shapes llama-8b --prefix 2048 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fastspec
from fastspec.bench.device import versions
from fastspec.bench.report import quantiles
from fastspec.generation.drafters.eagle.head import EagleHead, HeadConfig
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.compat import delta_shape, layer_count, layer_shapes, recurrent_layers
from fastspec.patches.hf.limits import layer_spans
from fastspec.patches.session import session_of

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                           "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5}),
    "llama-70b": ("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5}),
    "qwen3-8b": ("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6}),
    "mixtral-8x7b": ("mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                                 "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
                                 "sliding_window": None}),
    "qwen2-1.5b": ("qwen2", {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
                             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "use_sliding_window": False}),
    "mistral-7b-v0.1": ("mistral", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                                    "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096}),
    "gemma3-12b": ("gemma3_text", {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
                                   "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
                                   "query_pre_attn_scalar": 256}),
    "gpt-oss-20b": ("gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
                                "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32,
                                "num_experts_per_tok": 4, "sliding_window": 128}),
    "qwen3-30b-a3b": ("qwen3_moe", {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                                    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
                                    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    "qwen3.5-9b": ("qwen3_5_text", {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
                                    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
                                    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    "smollm2-135m": ("llama", {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                               "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}),
    "tiny": ("llama", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 512}),
}  # fmt: skip
"""name -> (model_type, sizes of its published configuration)."""
FUSED = {"auto": None, "fused": True, "kernels": False}
"""--drafter -> whether a draft phase is one launch."""
CALLS = 5


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """A model of a shape with random weights; no token ends it."""
    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=131072, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    model.tie_weights()
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_head(model: Any, draft_vocab: int) -> EagleHead:
    """A head of the published EAGLE-3 shape: one layer of the target's sizes, three taps, a vocabulary of its own."""
    c = model.config
    taps = (2, c.num_hidden_layers // 2, c.num_hidden_layers - 3)
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    head = EagleHead(
        HeadConfig(
            hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads, head_dim=size, vocab_size=c.vocab_size,
            draft_vocab_size=min(draft_vocab, c.vocab_size), target_hidden_size=c.hidden_size, taps=taps, max_position_embeddings=131072,
        )
    ).to(model.device, model.dtype).requires_grad_(False)  # fmt: skip
    for parameter in head.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return head


def read_bandwidth(device: str) -> float:
    """Bytes per second of a sum over 4 GiB, the fastest of 10; 0 off CUDA."""
    if device != "cuda":
        return 0.0
    block = torch.empty(2**30, dtype=torch.float32, device=device).fill_(1.0)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        block.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return block.numel() * 4 / min(times[2:])


def timed(run: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peer(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> dict[str, Any]:
    """Milliseconds a token of transformers' generate, the prefill taken off by calls of one token."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    model.generate(ids, max_new_tokens=tokens, **options)
    wholes = [timed(lambda: model.generate(ids, max_new_tokens=tokens, **options)) for _ in range(CALLS)]
    first = statistics.median(timed(lambda: model.generate(ids, max_new_tokens=1, **options)) for _ in range(CALLS))
    return {**round_times([1e3 * (whole - first) / (tokens - 1) for whole in wholes]), "nodes": 1}


def round_times(found: list[float]) -> dict[str, Any]:
    """The columns of a round's milliseconds, from those of each call."""
    return {"round_ms": round(statistics.median(found), 4), "round_ms_quantiles": quantiles(found)}


def read_bytes(model: Any, tokens: int) -> int:
    """Bytes of weights that a pass over so many tokens must read: each once, and of a mixture of experts those that the tokens touch where
    each token's `num_experts_per_tok` are any of them: on average, of the `n` experts, n - n * (1 - per token / n)^tokens."""
    whole = {id(weight) for weight in read_parameters(model)}
    total = 0
    for name, weight in model.named_parameters():
        if id(weight) in whole:
            experts = weight.shape[0] if ".experts." in name and weight.dim() == 3 else 1
            touched = 1.0 if experts == 1 else experts * (1 - (1 - model.config.num_experts_per_tok / experts) ** tokens)
            total += round(weight.nbytes / experts * touched)
    return total


def kept_bytes(model: Any, text: int, batch: int) -> int:
    """Bytes of what the layers have kept of a text of so many tokens before and can see of it: keys and values of the whole of it or of a
    window, or a recurrent state and its convolution's inputs."""
    config, total = model.config.get_text_config(), 0
    layers = layer_count(config)
    for (heads, size), span, recurrent in zip(layer_shapes(config), layer_spans(config, layers), recurrent_layers(config), strict=True):
        if recurrent:
            shape = delta_shape(config)
            total += 4 * shape.value_heads * shape.key_size * shape.value_size + shape.width * shape.channels * model.dtype.itemsize
        else:
            total += 2 * heads * size * min(text, text if span is None else span.size) * model.dtype.itemsize
    return batch * total


def capture_cost(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, float]:
    """Host seconds of the first runs and the captures of a short call that finds nothing captured; its kernels are compiled the first time
    and on disk or in memory from then on."""
    session = session_of(model)
    assert session is not None
    session.engines.clear()
    model.generate(ids, max_new_tokens=24, **options)  # three rounds at the least
    last = fastspec.report(model).last
    return {"first_runs": round(last.first_run_seconds, 3), "captures": round(last.capture_seconds, 3)}


def ours(model: Any, ids: torch.Tensor, assistant: Any, tokens: int) -> dict[str, Any]:
    """A round of an assistant: wall clock over a call, the median part by part, and the replay of its graph alone."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "assistant": assistant}
    made = [capture_cost(model, ids, options) for _ in range(2)]
    model.generate(ids, max_new_tokens=tokens, **options)
    walls = []
    for _ in range(CALLS):
        model.generate(ids, max_new_tokens=tokens, **options)
        last = fastspec.report(model).last
        walls.append(1e3 * (last.seconds - last.phases["prefill"]) / last.rounds)
    with fastspec.profile(model) as profile:
        model.generate(ids, max_new_tokens=min(tokens, 40), **options)
    del profile.rounds[:2]  # compiled and captured
    parts = {name: [round(value, 4) for value in profile.quantiles(name)] for name in profile.parts}
    row = {
        **round_times(walls), "nodes": 1 + last.drafted // last.row_rounds, "parts_ms": parts,
        "prefill_ms": round(1e3 * last.phases["prefill"], 2),
        "acceptance_length": round(last.acceptance_length, 3), "rounds": last.rounds, "kernels": fastspec.report(model).backend,
        "first_call_s": made[0], "capture_s": made[1],
        "drafter": None if assistant == "autoregressive" else "fused" if last.fused else "kernels",
    }  # fmt: skip
    model.generate(ids, max_new_tokens=8, **options)
    session = session_of(model)
    engines = {} if session is None else session.engines.held
    graph = next(reversed(engines.values())).graph if engines else None
    if graph is not None:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(51)]
        for event in starts:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        row["replay_ms"] = round(statistics.median(a.elapsed_time(b) for a, b in pairwise(starts)), 4)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peers", default="sdpa", help="of sdpa, static-compile, none")
    parser.add_argument("--methods", default="autoregressive,eagle3")
    parser.add_argument("--drafter", default="auto", choices=FUSED, help="one launch for the draft phase, or one per step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidth = read_bandwidth(device)
    shared = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "dtype": args.dtype, "batch": args.batch,
        "prefix": args.prefix, "read_gb_per_s": round(bandwidth / 1e9, 1), **versions(),
    }  # fmt: skip

    def write(model: Any, row: dict[str, Any]) -> None:
        read, kept = read_bytes(model, args.batch * row["nodes"]), kept_bytes(model, args.prefix, args.batch)
        row = shared | row | {"read_bytes": read, "kept_bytes": kept}
        if bandwidth:
            row["floor_ms"] = round(1e3 * (read + kept) / bandwidth, 4)
            row["floor_share"] = round(row["floor_ms"] / row["round_ms"], 3)
        shown = {name: row.get(name) for name in ("round_ms", "replay_ms", "floor_ms", "parts_ms")}
        print(row["shape"], row["method"], json.dumps(shown), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    for name in args.shapes.split(","):
        torch.manual_seed(0)
        model = make_model(name, device, getattr(torch, args.dtype))
        ids = torch.randint(10, model.config.vocab_size, (args.batch, args.prefix), device=device)
        base = {"shape": name, "weight_bytes": sum(p.numel() * p.element_size() for p in read_parameters(model))}
        if "sdpa" in args.peers:
            write(model, base | {"method": "transformers"} | peer(model, ids, min(args.tokens, 24)))
        head = make_head(model, args.draft_vocab)
        head_bytes = sum(p.numel() * p.element_size() for p in head.parameters())
        with fastspec.patched(model, eagle3=head, backend=args.backend):
            for method in args.methods.split(","):
                tree = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60, fused=FUSED[args.drafter])
                assistant = tree if method == "eagle3" and device == "cuda" else method
                drafts = 0 if method == "autoregressive" else head_bytes
                write(model, base | {"method": method, "head_bytes": drafts} | ours(model, ids, assistant, args.tokens))
        if "static-compile" in args.peers:  # last: it leaves a compiled forward behind
            write(model, base | {"method": "static-compile"} | peer(model, ids, args.tokens, cache_implementation="static"))
        del model, head
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
