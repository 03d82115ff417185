"""Time per round on models of full size with random weights, beside transformers' own decoding in the same run.

The time of a pass does not depend on the values of the weights; tokens per second do, and are not measured here: they
are the acceptance length that a head reaches on real text, over the time of a round. `round_ms` is the median over
`--calls` calls, each of which gives the mean of its rounds, and `round_ms_quantiles` their 20, 50 and 80 % quantiles.
The floor is the time of reading once, at the measured bandwidth, the weights that a round must read (`read_bytes`) and
what its layers can see of the text before (`kept_bytes`; older rows have none of it). A drafter's own weights are not
in it; a round reads them once a level (`drafter_read_bytes`). `experts_read` is the mean number of experts that a round
of the fast kernels chooses in a layer after 2,048 tokens. After FILLED tokens transformers' cache is a random one.

    python benchmarks/full_size.py --shapes llama-8b --prefix 2048 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import device_here, free_memory, milliseconds, parser_of, place, timed, tree_of, write
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import fastspec
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.generation.heads.rounded_linear import RoundedLinear
from fastspec.models import SMOLLM2, source_of
from fastspec.patches.assistants.mtp import new_mtp
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.cache import CACHE
from fastspec.patches.hf.config_fields import delta_shape, layer_shapes, recurrent_layers
from fastspec.patches.hf.gptq_awq import GPTQ_V2, PackedLinear
from fastspec.patches.hf.limits import layer_spans
from fastspec.patches.hf.packed_loading import TENSORS, PackedExperts
from fastspec.patches.hf.parallel import local_part
from fastspec.patches.session import session_of
from fastspec.programs.bench.report import quantiles

SHAPES: dict[str, tuple[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
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


def config_of(name: str) -> Any:
    """The configuration of a shape; no token ends a text of it."""
    kind, sizes = SHAPES[name]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **sizes, max_position_embeddings=131072, **ends)


def fill(model: torch.nn.Module) -> None:
    """Random matrices, biases of 0 and other vectors of 1."""
    for name, parameter in ((name, local_part(each)) for name, each in model.named_parameters()):
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def of_linear(make: Callable[[torch.nn.Linear], torch.nn.Module]) -> Callable[[Any], None]:
    """A change of a model: every linear layer of its decoder layers is exchanged for what is made of it."""

    def change(model: Any) -> None:
        for parent in list(model.model.layers.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is torch.nn.Linear:
                    setattr(parent, name, make(layer))

    return change


@of_linear
def as_fp8(layer: torch.nn.Linear) -> torch.nn.Module:
    """A layer as fine-grained FP8 checkpoints have it: e4m3 in blocks of 128 x 128."""
    made = FP8Linear(layer.in_features, layer.out_features, (128, 128), has_bias=layer.bias is not None)
    made = made.to(layer.weight.device).requires_grad_(False)
    made.weight.copy_((layer.weight * 2**11).clamp(-448, 448))
    made.weight_scale_inv.fill_(2**-11)
    made.bias = layer.bias
    return made


def as_int8(model: Any) -> None:
    """Decoder layers as torchao's int8, a scale for each line."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model.layers, Int8WeightOnlyConfig())


@of_linear
def as_nf4(layer: torch.nn.Linear) -> torch.nn.Module:
    """A layer as bitsandbytes' nf4 with nested scales."""
    import bitsandbytes

    sizes = layer.in_features, layer.out_features, layer.bias is not None
    made = bitsandbytes.nn.Linear4bit(*sizes, layer.weight.dtype, True, "nf4")
    made.weight = bitsandbytes.nn.Params4bit(layer.weight, False, quant_type="nf4", compress_statistics=True)
    made.bias = layer.bias
    return made.to(layer.weight.device)


@of_linear
def as_gptq(layer: torch.nn.Linear) -> torch.nn.Module:
    """A layer as GPTQ checkpoints of 4 bits have it: random codes in groups of 128, the middle for zero."""
    (lines, depth), device, dtype = layer.weight.shape, layer.weight.device, layer.weight.dtype
    words = torch.randint(-(2**31), 2**31, (depth // 8, lines), dtype=torch.int32, device=device)
    middle = torch.full((-(-depth // 128), lines // 8), 0x88888888 - 2**32, device=device).int()
    scales = torch.full((-(-depth // 128), lines), 0.02 / 4.6, dtype=dtype, device=device)
    return PackedLinear(GPTQ_V2, 4, 128, depth, lines, {"qweight": words, "qzeros": middle, "scales": scales})


def as_mxfp4(model: Any) -> None:
    """Experts as gpt-oss' checkpoints have them: random codes, the power of 2 of every group the same."""
    for name, experts in list(model.named_modules()):
        if type(experts) is GptOssExperts:
            made = PackedExperts(experts)
            for key in TENSORS:
                low, high = (0, 256) if key.endswith("blocks") else (120, 121)
                held = torch.randint(low, high, getattr(made, key).shape, dtype=torch.uint8, device=model.device)
                setattr(made, key, torch.nn.Parameter(held, requires_grad=False))
            model.set_submodule(name, made)


STORED = {"dense": lambda model: None, "fp8": as_fp8, "int8": as_int8, "nf4": as_nf4, "gptq": as_gptq}
STORED["mxfp4"] = as_mxfp4
"""Weights of the decoder layers, as quantisers store them."""


def make_empty(name: str, dtype: torch.dtype) -> Any:
    """A model of a shape without weights, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """A model of a shape with random weights and biases of 0; no token ends it. The embeddings of a mixture are large,
    so that routers spread tokens over the experts as trained ones do."""
    model = made_whole(make_empty(name, dtype), device)
    if routers_of(model):
        model.get_input_embeddings().weight.normal_(0.0, EMBEDDED)
    return model


def made_whole(model: Any, device: Any) -> Any:
    """A model on the meta device with random weights and biases of 0 on another; no token ends it."""
    model = model.to_empty(device=device).eval().requires_grad_(False)
    fill(model)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def wide_tokenizer(size: int) -> Any:
    """SmolLM2's tokenizer, with words that no text has for all tokens up to so many."""
    source, packed = source_of(SMOLLM2)
    own = AutoTokenizer.from_pretrained(source, **packed)
    state = json.loads(own.backend_tokenizer.to_str())
    state["model"]["vocab"] |= {f"\u0120<{index}>": index for index in range(len(own), size)}
    roles = {name: value for name, value in own.special_tokens_map.items() if isinstance(value, str)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **roles)
    made.chat_template = own.chat_template
    return made


@contextmanager
def saved_shape(name: str) -> Iterator[str]:
    """Folder with the configuration of a shape, and one in it, `tokenizer`, for servers that draw random weights: in
    the same one transformers takes another tokenizer by the model's type."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_empty(name, torch.bfloat16)
        model.config.architectures = [type(model).__name__]  # which vLLM chooses its class by
        model.config.save_pretrained(folder)
        wide_tokenizer(model.config.vocab_size).save_pretrained(f"{folder}/tokenizer")
        yield folder


def head_config(config: Any, draft_vocab: int, **more: Any) -> HeadConfig:
    """That of a head of the published EAGLE-3 shape: one layer of the target's sizes, three taps, a vocabulary of its
    own."""
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes = {name: getattr(config, name) for name in same}
    sizes["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes |= {"draft_vocab_size": min(draft_vocab, config.vocab_size), "target_hidden_size": config.hidden_size}
    sizes["taps"] = (2, config.num_hidden_layers // 2, config.num_hidden_layers - 3)
    return HeadConfig(**sizes | {"max_position_embeddings": 131072} | more)


def make_head(model: Any, draft_vocab: int) -> EagleHead:
    """A head of the published EAGLE-3 shape with random weights."""
    head = EagleHead(head_config(model.config, draft_vocab)).to(model.device, model.dtype).requires_grad_(False)
    fill(head)
    return head


def make_heads(model: Any, names: Sequence[str], draft_vocab: int) -> dict[str, Any]:
    """Heads with random weights of the assistants of these names that have one; "mtp" is a copy of the model's last
    layer with full attention, and drafts with rows of its LM head."""
    made = {"eagle3": lambda: make_head(model, draft_vocab), "mtp": lambda: new_mtp(model)}
    return {name: make() for name, make in made.items() if name in names}


def head_bytes(model: Any, name: str) -> int:
    """Bytes of the weights of the head of an assistant, as it reads them, all experts of a mixture's among them; and of
    its target's LM head what it has drafted with."""
    session = session_of(model)
    assert session is not None
    bound = session.resources[name]
    borrower = bound if bound.derived.narrowed is None else bound.derived.narrowed[1]
    read = [bound.module, *([] if bound.binding.lm_head is None else [borrower.readout()])]
    found = [each for module in read for each in module.parameters()]
    found += [each for module in read for name, each in module.named_buffers() if name != "d2t"]
    found += [each.scales for module in read for each in module.modules() if isinstance(each, RoundedLinear)]
    return sum(each.nbytes for each in found)


def read_bandwidth(device: str) -> float:
    """Bytes per second of a sum over 4 GiB, the fastest of 10; 0 off CUDA."""
    if device != "cuda":
        return 0.0
    block = torch.empty(2**30, dtype=torch.float32, device=device).fill_(1.0)
    return block.numel() * 4e3 / min(milliseconds(block.sum, 12)[2:])


def filled_cache(model: Any, rows: int, length: int) -> DynamicCache:
    """A cache as a text of so many tokens leaves it: keys and values are random, recurrent states those of its first
    tokens."""
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
    routers, found = routers_of(model), list[int]()
    if not routers:
        return None

    def count(router: Any, given: Any, out: Any) -> None:
        found.append(len(out[-1].unique()))

    handles = [router.register_forward_hook(count) for router in routers]
    some = ids[:, : FILLED // 2]
    options = {"do_sample": False, "attention_mask": torch.ones_like(some), "max_new_tokens": 8}
    model.generate(some, assistant=assistant, **options)
    for handle in handles:
        handle.remove()
    return statistics.mean(found[-len(routers) * fastspec.report(model).last.rounds :])


def read_bytes(model: Any, experts: float | None) -> int:
    """Bytes of weights that a pass must read: each once, and of the experts of a layer so many."""
    whole = {id(weight) for weight in read_parameters(model)}
    total = 0
    for name, weight in model.named_parameters():
        if id(weight) in whole:
            share = experts / weight.shape[0] if experts is not None and ".experts." in name else 1
            codes = getattr(weight, "qdata", None)  # torchao's tensors count the bytes of what they stand for
            total += round((weight.nbytes if codes is None else codes.nbytes + weight.scale.nbytes) * share)
    return total


def kept_bytes(model: Any, text: int, batch: int) -> int:
    """Bytes of what the layers have kept of a text of so many tokens before and can see of it: keys and values of the
    whole of it or of a window, or a recurrent state and its convolution's inputs."""
    config, total = model.config.get_text_config(), 0
    spans, recurrents = layer_spans(model), recurrent_layers(config)
    for (heads, key, value), span, recurrent in zip(layer_shapes(config), spans, recurrents, strict=True):
        if recurrent:
            shape = delta_shape(config)
            total += 4 * shape.value_heads * shape.key_size * shape.value_size
            total += shape.width * shape.channels * model.dtype.itemsize
        else:
            total += heads * (key + value) * min(text, text if span is None else span.size) * model.dtype.itemsize
    return batch * total


def capture_cost(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, float]:
    """Host seconds of the first runs and the captures of a short call that finds nothing captured."""
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
    fused = isinstance(assistant, fastspec.Eagle3) and assistant.fused
    drafter = None if assistant == "autoregressive" else "fused" if fused else "kernels"
    row = {**round_times(walls), "nodes": 1 + last.drafted // last.row_rounds}
    row |= {"prefill_ms": round(1e3 * last.phases["prefill"], 2), "peak_mib": round(peak / 2**20, 1)}
    row |= {"replay_ms": replay, "acceptance_length": round(last.acceptance_length, 3), "rounds": last.rounds}
    row |= {"kernels": fastspec.report(model).backend, "first_call_s": made[0], "capture_s": made[-1]}
    if calls > 1:
        with fastspec.profile(model) as profile:
            model.generate(ids, max_new_tokens=min(tokens, 40), **options)
        del profile.rounds[:2]  # compiled and captured
        row["parts_ms"] = {name: [round(ms, 4) for ms in profile.quantiles(name)] for name in profile.parts}
    return row | {"drafter": drafter}


def replay_ms(model: Any) -> float | None:
    """Milliseconds of the last call's captured round, replayed back to back; None where rounds are not one graph."""
    session = session_of(model)
    engines = {} if session is None else session.engines.held
    graph = next(reversed(engines.values())).graph if engines else None
    return None if graph is None else round(statistics.median(milliseconds(graph.replay, 50)), 4)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def shape_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of rounds of shapes."""
    parser = parser_of(doc)
    parser.add_argument("--shapes", default="llama-8b", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--prefix", type=numbers, default=[2048], help="tokens before; several with commas between")
    parser.add_argument("--batch", type=numbers, default=[1], help="rows; several with commas between")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed calls; 1 leaves out second capture and parts")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--head-bits", type=numbers, default=[16], help="of the head's weights: 16,8 times both")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sums", default="fast", help="fast, exact (`patch(exact=True)`), with commas")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = shape_parser(__doc__)
    parser.add_argument("--peers", default="sdpa", help="of sdpa, static-compile, none")
    parser.add_argument("--methods", default="autoregressive,eagle3")
    parser.add_argument("--drafter", default="auto", choices=FUSED, help="fused: one launch for the draft phase")
    parser.add_argument("--weights", default="dense", help=f"as stored: {', '.join(STORED)}, with commas")
    parser.add_argument("--tree", default="60,7,10", help="nodes, depth and children of a round with a head")
    args = parser.parse_args(arguments)
    device, _ = device_here()
    bandwidth = read_bandwidth(device)
    shared = place(device, args.dtype) | {"read_gb_per_s": round(bandwidth / 1e9, 1)}
    shown = ("shape", "weights", "prefix", "batch", "method", "head_bits")
    shown += ("round_ms", "replay_ms", "floor_ms", "parts_ms")

    def tell(model: Any, row: dict[str, Any]) -> None:
        read, kept = read_bytes(model, row["experts_read"]), kept_bytes(model, row["prefix"], row["batch"])
        row = shared | row | {"read_bytes": read, "kept_bytes": kept}
        if bandwidth:
            row["floor_ms"] = round(1e3 * (read + kept) / bandwidth, 4)
            row["floor_share"] = round(row["floor_ms"] / row["round_ms"], 3)
        write(args.out, row, shown)

    def measure(model: Any, heads: dict[str, Any], base: dict[str, Any]) -> None:
        """The rows of one model behind one length of text, in one number of rows."""
        free_memory()  # what a model before has left
        ids = torch.randint(10, model.config.vocab_size, (base["batch"], base["prefix"]), device=device)
        read = dict[str, float | None]()
        for sums, method, bits in product(args.sums.split(","), args.methods.split(","), args.head_bits):
            if method == "autoregressive" and bits != args.head_bits[0]:  # it has no head
                continue
            options = {"exact": sums == "exact", "stored": base["weights"] != "dense", "head_bits": bits}
            with fastspec.patched(model, backend=args.backend, **heads, **options):
                tree = tree_of(args.tree, method, fused=FUSED[args.drafter])
                assistant = tree if method in heads and device == "cuda" else method
                found = ours(model, ids, assistant, args.tokens, args.calls)
                size = head_bytes(model, method) if method in heads else 0
                if sums == "fast":  # hooks are no part of exact rounds
                    read[method] = experts_read(model, ids, assistant)
                row = base | {"method": method, "sums": sums, "experts_read": read.get(method)}
                row |= {"head_bits": bits if size else None, "head_bytes": size}
                tell(model, row | {"drafter_read_bytes": (tree.depth + 1) * size} | found)
        with fastspec.patched(model, backend=args.backend):
            touched = {"experts_read": experts_read(model, ids, "autoregressive") if args.peers != "none" else None}
        ways = [("sdpa", "transformers", min(args.tokens, 24), {})]  # the next one leaves a compiled forward behind
        ways += [("static-compile", "static-compile", args.tokens, {"cache_implementation": "static"})]
        for name, method, tokens, options in ways:
            if name in args.peers:
                found = peer(model, ids, tokens, args.calls, **options)
                tell(model, base | {"method": method} | touched | found)

    for name, stored in product(args.shapes.split(","), args.weights.split(",")):
        torch.manual_seed(0)
        model = make_model(name, device, getattr(torch, args.dtype))
        STORED[stored](model)
        heads = make_heads(model, args.methods.split(","), args.draft_vocab)
        weights = sum(p.numel() * p.element_size() for p in read_parameters(model))
        for prefix, batch in product(args.prefix, args.batch):
            base = {"shape": name, "weights": stored, "weight_bytes": weights, "prefix": prefix, "batch": batch}
            measure(model, heads, base)
        del model, heads


if __name__ == "__main__":
    main()
