"""Time per round on models of full size with random weights, beside transformers' own decoding in the same run.

The time of a pass does not depend on the values of the weights; what a model says does, so no tokens per second are measured here: they
are the acceptance length that a head reaches on real text, over the time of a round. `round_ms` is the median over `--calls` calls, each
of which gives the mean of its rounds, and `round_ms_quantiles` their 20, 50 and 80 % quantiles. The floor is the time of reading once, at
the measured bandwidth, the weights that a round must read (`read_bytes`) and what its layers can see of the text before (`kept_bytes`:
keys, values, recurrent states). Of a mixture of experts a round must read those that its tokens choose: `experts_read` is their mean number
a layer, counted in rounds of the model's own modules behind the first 2,048 tokens. Token embeddings of mixtures are large, so that tokens
differ, and choose different experts: with small ones the 60 nodes of a round chose 11 of 128. A drafter's own weights are not in the floor;
a round reads them once a level (`drafter_read_bytes`). Rows of versions without `kept_bytes` have floors of weights alone.

Behind more than FILLED tokens transformers goes on from a cache of random keys and values, so that no row waits for its prefill.

    python benchmarks/full_size.py --shapes llama-8b --prefix 2048 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import fastspec
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.cache_names import CACHE
from fastspec.patches.hf.compat import delta_shape, layer_shapes, recurrent_layers
from fastspec.patches.hf.spans import layer_spans
from fastspec.patches.session import session_of
from fastspec.programs.bench.device import versions
from fastspec.programs.bench.report import quantiles

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
    "mistral-7b-w1024": ("mistral", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                                     "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 1024}),
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
FILLED = 4096
EMBEDDED = 16.0
"""Standard deviation of a mixture's embeddings; a layer adds about 1."""


def routers_of(model: Any) -> list[torch.nn.Module]:
    """The routers of a mixture of experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """A model of a shape with random weights; no token ends it.

    Biases are 0, and the embeddings of a mixture are large beside what layers add: so tokens stay unlike one another through all layers
    and routers spread them over the experts, as trained ones do. Otherwise some layers send nearly all tokens to the same few."""
    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=131072, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    for tensor, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(0.0 if tensor.endswith("bias") else 1.0)
    if routers_of(model):
        model.get_input_embeddings().weight.normal_(0.0, EMBEDDED)
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


def filled_cache(model: Any, rows: int, length: int) -> DynamicCache:
    """A cache as a text of so many tokens leaves it: keys and values are random, recurrent states those of its first tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.full((rows, 8), 10, device=model.device), **{CACHE: cache}, logits_to_keep=1)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            kept = length if not hasattr(layer, "cumulative_length") else min(length, layer.sliding_window - 1)
            sizes = ((rows, each.shape[1], kept, each.shape[3]) for each in (layer.keys, layer.values))
            layer.keys, layer.values = (torch.randn(size, dtype=model.dtype, device=model.device) for size in sizes)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length
    return cache


def peer(model: Any, ids: torch.Tensor, tokens: int, calls: int = CALLS, **options: Any) -> dict[str, Any]:
    """Milliseconds a token of transformers' generate, the prefill taken off by calls of one token."""
    fills = ids.shape[1] > FILLED and "cache_implementation" not in options
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}

    def seconds(new: int) -> float:
        past = {CACHE: filled_cache(model, len(ids), ids.shape[1] - 1)} if fills else {}
        return timed(lambda: model.generate(ids, max_new_tokens=new, **options, **past))

    seconds(tokens)
    wholes = [seconds(tokens) for _ in range(calls)]
    first = statistics.median(seconds(1) for _ in range(calls))
    return {**round_times([1e3 * (whole - first) / (tokens - 1) for whole in wholes]), "nodes": 1}


def round_times(found: list[float]) -> dict[str, Any]:
    """The columns of a round's milliseconds, from those of each call."""
    return {"round_ms": round(statistics.median(found), 4), "round_ms_quantiles": quantiles(found)}


def experts_read(model: Any, ids: torch.Tensor, assistant: Any) -> float | None:
    """The mean number of a layer's experts that the tokens of a round choose; None of a model without experts.

    Hooks on its routers count them, behind which rounds run the model's own modules."""
    routers = routers_of(model)
    found: list[int] = []
    handles = [router.register_forward_hook(lambda _, __, out: found.append(len(out[-1].unique()))) for router in routers]
    if routers:
        some = ids[:, :FILLED // 2]
        model.generate(some, do_sample=False, attention_mask=torch.ones_like(some), assistant=assistant, max_new_tokens=8)
    for handle in handles:
        handle.remove()
    rounds = found[-len(routers) * fastspec.report(model).last.rounds :] if routers else []
    return statistics.mean(rounds) if rounds else None


def read_bytes(model: Any, experts: float | None) -> int:
    """Bytes of weights that a pass must read: each once, and of the experts of a layer so many."""
    whole = {id(weight) for weight in read_parameters(model)}
    total = 0
    for name, weight in model.named_parameters():
        if id(weight) in whole:
            share = experts / weight.shape[0] if experts is not None and ".experts." in name else 1
            total += round(weight.nbytes * share)
    return total


def kept_bytes(model: Any, text: int, batch: int) -> int:
    """Bytes of what the layers have kept of a text of so many tokens before and can see of it: keys and values of the whole of it or of a
    window, or a recurrent state and its convolution's inputs."""
    config, total = model.config.get_text_config(), 0
    spans, recurrents = layer_spans(model), recurrent_layers(config)
    for (heads, key, value), span, recurrent in zip(layer_shapes(config), spans, recurrents, strict=True):
        if recurrent:
            shape = delta_shape(config)
            total += 4 * shape.value_heads * shape.key_size * shape.value_size + shape.width * shape.channels * model.dtype.itemsize
        else:
            total += heads * (key + value) * min(text, text if span is None else span.size) * model.dtype.itemsize
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


def ours(model: Any, ids: torch.Tensor, assistant: Any, tokens: int, calls: int = CALLS) -> dict[str, Any]:
    """A round of an assistant: wall clock over a call, the median part by part, and the replay of its graph alone."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "assistant": assistant}
    made = [capture_cost(model, ids, options) for _ in range(2 if calls > 1 else 1)]
    if calls > 1:
        model.generate(ids, max_new_tokens=tokens, **options)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    walls = []
    for _ in range(calls):
        model.generate(ids, max_new_tokens=tokens, **options)
        last = fastspec.report(model).last
        walls.append(1e3 * (last.seconds - last.phases["prefill"]) / last.rounds)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    replay = replay_ms(model)
    with fastspec.profile(model) as profile:
        model.generate(ids, max_new_tokens=min(tokens, 40), **options)
    del profile.rounds[:2]  # compiled and captured
    parts = {name: [round(value, 4) for value in profile.quantiles(name)] for name in profile.parts}
    return {
        **round_times(walls), "nodes": 1 + last.drafted // last.row_rounds, "parts_ms": parts,
        "prefill_ms": round(1e3 * last.phases["prefill"], 2), "peak_mib": round(peak / 2**20, 1), "replay_ms": replay,
        "acceptance_length": round(last.acceptance_length, 3), "rounds": last.rounds, "kernels": fastspec.report(model).backend,
        "first_call_s": made[0], "capture_s": made[-1],
        "drafter": None if assistant == "autoregressive" else "fused" if last.fused else "kernels",
    }  # fmt: skip


def replay_ms(model: Any) -> float | None:
    """Milliseconds of the last call's captured round, replayed back to back; None where rounds are not one graph."""
    session = session_of(model)
    engines = {} if session is None else session.engines.held
    graph = next(reversed(engines.values())).graph if engines else None
    if graph is None:
        return None
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(51)]
    for event in starts:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in pairwise(starts)), 4)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--prefix", type=numbers, default=[2048], help="tokens before; several with commas between")
    parser.add_argument("--batch", type=numbers, default=[1], help="rows; several with commas between")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls; 1 also leaves out the second capture")
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
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "dtype": args.dtype,
        "read_gb_per_s": round(bandwidth / 1e9, 1), **versions(),
    }  # fmt: skip

    def write(model: Any, row: dict[str, Any]) -> None:
        read, kept = read_bytes(model, row["experts_read"]), kept_bytes(model, row["prefix"], row["batch"])
        row = shared | row | {"read_bytes": read, "kept_bytes": kept}
        if bandwidth:
            row["floor_ms"] = round(1e3 * (read + kept) / bandwidth, 4)
            row["floor_share"] = round(row["floor_ms"] / row["round_ms"], 3)
        shown = {name: row.get(name) for name in ("round_ms", "replay_ms", "floor_ms", "parts_ms")}
        print(row["shape"], row["prefix"], row["batch"], row["method"], json.dumps(shown), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def measure(model: Any, head: EagleHead, base: dict[str, Any]) -> None:
        """The rows of one model behind one length of text, in one number of rows."""
        ids = torch.randint(10, model.config.vocab_size, (base["batch"], base["prefix"]), device=device)
        head_bytes = sum(p.numel() * p.element_size() for p in head.parameters())
        tree = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60, fused=FUSED[args.drafter])
        with fastspec.patched(model, eagle3=head, backend=args.backend):
            for method in args.methods.split(","):
                assistant = tree if method == "eagle3" and device == "cuda" else method
                plain = method == "autoregressive"
                found = ours(model, ids, assistant, args.tokens, args.calls)
                drafts = {"head_bytes": 0 if plain else head_bytes, "drafter_read_bytes": 0 if plain else (tree.depth + 1) * head_bytes}
                touched = experts_read(model, ids, assistant)
                write(model, base | {"method": method, "experts_read": touched} | drafts | found)
            touched = experts_read(model, ids, "autoregressive") if args.peers != "none" else None
        if "sdpa" in args.peers:
            write(model, base | {"method": "transformers", "experts_read": touched} | peer(model, ids, min(args.tokens, 24), args.calls))
        if "static-compile" in args.peers:  # last: it leaves a compiled forward behind
            found = peer(model, ids, args.tokens, args.calls, cache_implementation="static")
            write(model, base | {"method": "static-compile", "experts_read": touched} | found)

    for name in args.shapes.split(","):
        torch.manual_seed(0)
        model = make_model(name, device, getattr(torch, args.dtype))
        head = make_head(model, args.draft_vocab)
        weights = sum(p.numel() * p.element_size() for p in read_parameters(model))
        for prefix, batch in product(args.prefix, args.batch):
            measure(model, head, {"shape": name, "weight_bytes": weights, "prefix": prefix, "batch": batch})
            if device == "cuda":
                torch.cuda.empty_cache()
        del model, head


if __name__ == "__main__":
    main()
