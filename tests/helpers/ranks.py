"""Processes that hold tiny models together by transformers' tensor parallelism, over gloo: what each made of the
same calls."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count as count_from
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)
from transformers.distributed import DistributedConfig
from transformers.integrations.finegrained_fp8 import FP8Linear

import fastspec
from fastspec.generation.decoder_layer import joint, unpack
from fastspec.generation.drafters import head_program as head_cut
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.kernels.linear.reference import experts
from fastspec.kernels.parallel import reference
from fastspec.patches.assistants import mtp as own_layers
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.hf.compat import local_part
from fastspec.patches.hf.layer_weights import pack_model
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.session import session_of
from helpers.captured import stand_in
from helpers.cascade import trained
from helpers.generate import TREE, bigram, prompts, seer, seer1
from helpers.models import tiny_head, tiny_model
from helpers.vision import prompts_with_images

SMALL = {"num_hidden_layers": 3}
"""A recurrent family's layers alternate: both kinds. With key heads for two processes."""
SEEING = "qwen2_5_vl"
OWN_LAYER = " with its MTP layer"
SIZE = 2
"""How many processes there are; `join` and `of_size` set it."""
GREEDY = {"max_new_tokens": 6, "do_sample": False}
DRAWN = {"max_new_tokens": 6, "do_sample": True, "temperature": 0.8, "top_k": 30}


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    """Marks of a test over so many GPUs: where there are fewer, or transformers is too old, it is skipped."""
    old = Version(transformers.__version__) < Version("5.21")
    return [
        pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"fewer than {count} CUDA devices"),
        pytest.mark.skipif(old, reason="tensor parallelism needs transformers 5.21"),
    ]


COUNTS = [pytest.param(count, marks=[pytest.mark.gpu, *on_gpus(count)], id=f"{count}gpus") for count in (2, 4)]
"""How many GPUs hold a model together in a test."""
HERE = "cpu"
"""The device of the inputs, heads and models that are whole, "cpu" or "cuda"; `join` and `of_size` set it."""


def sizes() -> dict[str, int]:
    """Sizes of a model whose key heads the processes divide, with experts whose parts torch's grouped product takes: of
    32 bytes."""
    if SIZE == 2:
        return {"num_hidden_layers": 2}
    heads = {"num_attention_heads": max(4, SIZE), "num_key_value_heads": SIZE}
    return {**SMALL, **heads, "moe_intermediate_size": 8 * max(6, SIZE)}


def here(made: Any) -> Any:
    """Inputs, a head or a model on this process's device."""
    return {name: each.to(HERE) for name, each in made.items()} if isinstance(made, dict) else made.to(HERE)


def given(*lengths: int, **options: Any) -> dict[str, Tensor]:
    return here(prompts(*lengths, **options))


def small_head(model: Any) -> Any:
    return here(tiny_head(model, copy_lm_head=False))


def small_model() -> Any:
    return here(tiny_model("llama", 1, num_hidden_layers=1))


def first() -> bool:
    """Whether this is the first of the processes, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def why(call: Callable[[], Any]) -> str:
    """What a call that is refused says."""
    try:
        call()
    except fastspec.FastSpecError as error:
        return str(error)
    return "nothing"


def at_call(number: int, act: Callable[[], Any], run: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """`run`, before whose call of this number something else is done; `calls` grows with each."""

    def counted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return run(*given)

    return counted


def planted() -> None:
    raise ArithmeticError("planted")


def end_or_fail(how: str) -> None:
    """End this process, or fail in it alone."""
    if how == "ends":
        os._exit(0)
    raise MemoryError("only here")


class Taken:
    """A streamer, which the first process alone may have."""

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"

    def end(self) -> None:
        """Nothing is kept."""


Loader = Callable[[str], Any]


class Even(LogitsProcessor):
    """A processor that fastspec does not know: it decodes in lockstep."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (torch.arange(scores.shape[-1], device=scores.device) % 2 == 0)


class Other(LogitsProcessor):
    """A processor that says something else in every process."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(
            -1, torch.tensor([10 if first() else 11], device=scores.device), 0.0
        )


class After(StoppingCriteria):
    """A criterion that looks at more than the text: it stops a process after 5 calls, or 6."""

    def __init__(self) -> None:
        self.left = 5 if first() else 6

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left < 0, device=input_ids.device)


def family(load: Loader, kind: str) -> list[Any]:
    """A family's greedy calls, without drafts and with a tree, and what it says of its mode."""
    model = load(kind)
    with fastspec.patched(model, eagle3=small_head(model)):
        made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in ("autoregressive", TREE)]
        return [*made, fastspec.report(model).mode]


def stored(load: Loader, kind: str) -> list[Any]:
    """A model in FP8, by blocks and with one scale, whose weights are multiplied as stored; without drafts and with a
    tree."""
    model = load(kind)
    for name, layer in list(model.model.layers.named_modules()):
        if type(layer) is torch.nn.Linear:
            model.model.layers.set_submodule(name, in_fp8(layer, None if "down" in name else 8))
    with fastspec.patched(model, eagle3=small_head(model), stored=True):
        made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in ("autoregressive", TREE)]
        report = fastspec.report(model)
    assert not report.own_forward, report.own_forward
    assert report.kernels["stored_linears"]
    return [*made, report.stored]


def in_fp8(layer: torch.nn.Linear, size: int | None) -> FP8Linear:
    """The layer in FP8 with a scale for each block, or for all, cut as it is by transformers' own style."""
    block = None if size is None else (size, size)
    made = FP8Linear(layer.in_features, layer.out_features, block_size=block, has_bias=layer.bias is not None)
    weight: Any = layer.weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    generator = torch.Generator().manual_seed(layer.in_features)
    made.weight.data = (whole.detach() * 50).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = (torch.rand(made.weight_scale_inv.shape, generator=generator) + 0.5) / 50
    made.bias = layer.bias
    forward = layer.__dict__.get("forward")
    if forward is not None:
        held = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
        style, mesh = held["self"].cell_contents, held["mesh"].cell_contents
        for name in ("weight", "weight_scale_inv")[: 1 if size is None else 2]:
            style.shard_param(made, name, mesh)
        style.install_forward(made, mesh)
    return made


def drafted(load: Loader, kind: str) -> list[Any]:
    """Drafts that are accepted, and heads that read the target's embedding and its LM head."""
    del kind
    model, whole = load("bigram"), here(bigram(**sizes()))
    with fastspec.patched(model, eagle3=here(seer(whole)), eagle=here(seer1(whole)), speculative=whole):
        assistants = "eagle3", "eagle", fastspec.Speculative(gamma=3), "nasd"
        made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in assistants]
        assert all(call.acceptance_length > 1.5 for call in fastspec.report(model).calls[:3])
        return made


def own_layer(load: Loader, kind: str) -> list[Any]:
    """The MTP layer of a model's files, which every process has whole."""
    model = load(f"{kind}{OWN_LAYER}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_layers, "PROBE_TOKENS", 64)
        with fastspec.patched(model, mtp=True):
            made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in ("autoregressive", "mtp")]
            assert fastspec.report(model).last.acceptance_length > 1.3
            return [*made, fastspec.report(model).last.rounds]


def cut_heads(load: Loader, kind: str) -> list[Any]:
    """Heads that the processes have together, of which each draft is accepted that a whole one's is; the weights of one
    change."""
    del kind
    model, whole = load("bigram"), bigram(**sizes())
    head, made = seer(whole), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_cut, "LEAST_BYTES", 0)
        if HERE == "cpu":
            stand_in(patch)
        with fastspec.patched(model, eagle3=here(head), eagle=here(seer1(whole))):
            for each in (
                "eagle3",
                TREE,
                "eagle",
                fastspec.Eagle1(drafts="sampled"),
                fastspec.ContinuousBatch("eagle3", rows=1),
            ):
                torch.manual_seed(5)
                drawn = isinstance(each, fastspec.Eagle1)
                made += [
                    model.generate(**given(5, 9), **(DRAWN if drawn else GREEDY), assistant=each) for _ in range(2)
                ]
                made += [fastspec.report(model).last.acceptance_length]
            mine = session_of(model).resources["eagle3"].module
            assert (head_cut.cut_over(mine, group_of(model)) is not None) == dist.is_initialized()
            mine.lm_head.weight.copy_(mine.lm_head.weight.roll(1, 0))  # it drafts badly now
            made += [
                model.generate(**given(5, 9), **GREEDY, assistant="eagle3"),
                fastspec.report(model).last.acceptance_length,
            ]
        small = tiny_head(model, copy_lm_head=False, num_attention_heads=2, num_key_value_heads=1)
        assert head_cut.cut_over(small, group_of(model)) is None
    return made


def calls(load: Loader, kind: str) -> list[Any]:
    """Calls of every other kind; random numbers differ between processes before them."""
    del kind
    model = load("llama")
    made, inputs = [], given(5, 9, 7)
    with fastspec.patched(model, eagle3=small_head(model), speculative=small_model()):
        torch.manual_seed(7 if first() else 8)
        run = partial(model.generate, **inputs)
        made += [run(**DRAWN, assistant=each) for each in ("autoregressive", "eagle3", "speculative", "nasd")]
        made += [run(**DRAWN, repetition_penalty=1.2, assistant="eagle3")]
        made += [run(**DRAWN, logits_processor=LogitsProcessorList([Even()]), assistant="eagle3")]
        made += [
            run(**GREEDY, assistant=fastspec.ContinuousBatch(each, rows=2)) for each in ("eagle3", "autoregressive")
        ]
        made += [run(**GREEDY, assistant=fastspec.Speculative(early_exit=2))]
        made += [run(**GREEDY, stopping_criteria=[After()], assistant="eagle3")]
        made += [run(**GREEDY, streamer=Taken() if first() else None, assistant="eagle3")]
        made += [run(**GREEDY, max_time=1000.0, assistant="eagle3")]
        made += [run(**GREEDY, assistant=fastspec.Eagle3(total_tokens="auto"))]
        out = run(**GREEDY, return_dict_in_generate=True, output_scores=True, assistant="eagle3")
        again = torch.cat((out.sequences, torch.full((3, 1), 11, device=HERE)), 1)
        emitted = torch.ones(3, again.shape[1] - inputs["input_ids"].shape[1], dtype=torch.long, device=HERE)
        mask = torch.cat((inputs["attention_mask"], emitted), 1)
        made += [torch.stack(out.scores).argmax(-1)]
        made += [model.generate(again, attention_mask=mask, **{CACHE: kept_cache(out)}, **GREEDY, assistant="eagle3")]
    return made


def staged(load: Loader, kind: str) -> list[Any]:
    """A cascade of a model that one process holds and of two that all hold together."""
    del kind
    model, names = load("llama"), ("small", "middle", "large")
    below = [
        fastspec.Stage(each, name=name) for each, name in zip((small_model(), load("bigram")), names, strict=False)
    ]
    settings = {"stages": below, "label": "large", "predictor": trained(names), "costs": [1.0, 2.0, 4.0]}
    adaptive = fastspec.Cascade(**settings, price=20.0)
    with fastspec.patched(model, cascade=adaptive):
        run, made = partial(model.generate, **given(5, 9, 7)), []
        for each in (adaptive, replace(adaptive, price=1.0), replace(adaptive, price=1e6)):
            made += [run(**GREEDY, assistant=each)]
            visits = [each.visits for each in fastspec.report(model).last.explanations]
            made += [[(each.name, each.outcome, each.kept_tokens) for each in row] for row in visits]
        torch.manual_seed(7 if first() else 8)
        made += [run(**DRAWN, assistant=adaptive)]
        streamed = {"streamer": Taken() if first() else None}
        made += [model.generate(**given(5), **GREEDY, **streamed, assistant=adaptive)]
        measured = run(**GREEDY, assistant=replace(adaptive, costs=None))  # by times, of the first process alone
        if dist.is_initialized():
            found: list[Any] = [None] * SIZE
            dist.all_gather_object(found, measured.tolist())
            assert all(each == found[0] for each in found)
            refused = (
                ({"streamer": streamed["streamer"], "assistant": adaptive}, "takes one row"),
                ({"assistant": replace(adaptive, price=1.0 if first() else 2.0)}, "different arguments"),
            )
            for more, why in refused:
                with pytest.raises(fastspec.errors.Unsupported, match=why):
                    run(**GREEDY, **more)
    for mode in ("token", "lossless"):
        going = fastspec.Cascade(stages=below[:1], label="large", mode=mode)
        with fastspec.patched(model, cascade=going):
            made += [model.generate(**given(5, 9), **GREEDY, assistant="cascade")]
    return made


def sized(load: Loader, kind: str) -> list[Any]:
    """Rounds whose sizes every process chooses alike, though their clocks differ, and which none of them waits for."""
    del kind
    model, whole, made, taken = load("bigram"), here(bigram(**sizes())), [], []
    seconds, count = count_from(1), TreeSizes.count

    def watched(sizes: TreeSizes, size: int, *more: Any) -> None:
        taken.append(size)
        count(sizes, size, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeSizes, "count", watched)
        clock = SimpleNamespace(perf_counter=lambda: next(seconds) * (0.001 if first() else 0.1 * (1 + len(taken) % 7)))
        patch.setattr("fastspec.generation.engine.engine.time", clock)
        with fastspec.patched(model, eagle3=here(seer(whole))):
            for _ in range(3):
                auto = fastspec.Eagle3(total_tokens="auto")
                made += [model.generate(**given(5, 9), **{**GREEDY, "max_new_tokens": 60}, assistant=auto)]
                if dist.is_initialized():
                    found: list[Any] = [None] * SIZE
                    dist.all_gather_object(found, (taken, fastspec.report(model).trees[auto, 2]))
                    assert all(each == found[0] for each in found) and found[0][0], found
    return made


def narrow(load: Loader, kind: str) -> list[Any]:
    """What is joined of logits, by the kind of call: one token of each where only the likeliest ones are read."""
    del kind
    model, inputs, made = load("llama"), given(5, 9), []
    joined: set[str] = set()

    def spy(name: str) -> Callable[..., Tensor]:
        def run(*given: Any) -> Tensor:
            joined.add(name)
            return getattr(reference, name)(*given)

        return run

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, all_gather=spy("all_gather"), likeliest=spy("likeliest"), captures=False)
        with fastspec.patched(model, eagle3=small_head(model), speculative=small_model()):
            torch.manual_seed(7)
            for assistant, more in (
                *(
                    (each, {})
                    for each in (
                        "autoregressive",
                        "eagle3",
                        "speculative",
                        "nasd",
                        fastspec.ContinuousBatch("eagle3", rows=1),
                    )
                ),
                ("eagle3", {"do_sample": True}),
                ("eagle3", {"return_dict_in_generate": True, "output_logits": True}),
                ("eagle3", {"repetition_penalty": 1.2}),
                ("eagle3", {"min_new_tokens": 3}),
            ):
                joined.clear()
                out = model.generate(**inputs, **GREEDY | more, assistant=assistant)
                made += [out if isinstance(out, Tensor) else out.sequences]
                whole = more or assistant == "nasd"
                wanted = {"all_gather" if whole else "likeliest"} if dist.is_initialized() else set()
                assert joined == wanted, (assistant, more, joined)
    return made


def captured(load: Loader, kind: str) -> list[Any]:
    """Rounds that are replayed as on CUDA, one launched before the one in front is read, in engines that the second
    call finds again."""
    del kind
    model, made, inputs = load("bigram"), [], given(5, 9, 7)
    options = {"max_new_tokens": 16, "eos_token_id": None}
    with pytest.MonkeyPatch.context() as patch:
        if HERE == "cpu":
            stand_in(patch)
        with fastspec.patched(model, eagle3=here(seer(bigram(**sizes()))), speculative=here(bigram(**sizes()))):
            for each in ("autoregressive", "eagle3", "nasd", "speculative", fastspec.ContinuousBatch("eagle3", rows=2)):
                made += [model.generate(**inputs, **options, do_sample=False, assistant=each) for _ in range(2)]
            torch.manual_seed(7 if first() else 8)
            made += [
                model.generate(**inputs, **options, do_sample=True, temperature=0.8, assistant="eagle3")
                for _ in range(2)
            ]
            report = fastspec.report(model)
            assert report.backend == ("stand-in" if HERE == "cpu" else "triton") and all(
                call.replays > 1 for call in report.calls[:4]
            )
    return made


def mixed(load: Loader, kind: str) -> list[Any]:
    """Captured rounds of a mixture of experts by the op; of cut ones, one sum a layer for the experts and whatever is
    added to them."""
    model = load(kind)
    with pytest.MonkeyPatch.context() as patch:
        if HERE == "cpu":
            stand_in(patch, experts=experts)
        with fastspec.patched(model, eagle3=small_head(model)):
            made = [
                model.generate(**given(5, 9), **GREEDY, assistant=each)
                for each in ("autoregressive", TREE, "autoregressive")
            ]
            assert all(call.replays > 1 for call in fastspec.report(model).calls)
        if HERE != "cpu":
            return made
        stand_in(patch, experts=experts, captures=False)
        with fastspec.patched(model):
            made += [model.generate(**given(5, 9), **GREEDY, assistant="autoregressive")]
            report, layers = fastspec.report(model), SMALL["num_hidden_layers"]
        summed = 1 if kind == "gemma4_experts" else 0  # its embedding scales what it looks up
        sums = (layers * (2 + summed) + summed) * (1 + report.last.rounds)
        assert report.kernels["experts"] and report.kernels.get("all_reduce (torch)", 0) == (
            sums if dist.is_initialized() else 0
        )
        return made


def packed(load: Loader, kind: str) -> list[Any]:
    """Weights that read one input laid together, as on CUDA, and apart again: what lies here of them, and the model's
    own answers."""
    del kind
    model, told = load("llama"), []
    attn, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    groups = (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)
    moved = pack_model(model)
    told += [joint([local_part(each.weight) for each in group]) is not None for group in groups]
    with fastspec.patched(model):
        told += [model.generate(**given(5, 9), **GREEDY, assistant="autoregressive")]
        report = fastspec.report(model)
        passes = (1 + report.last.rounds) if dist.is_initialized() else 0
        told += [
            report.kernels.get("all_reduce", 0) == 2 * SMALL["num_hidden_layers"] * passes,
            report.kernels.get("look_up", 0) == passes,
        ]
    told += [model.generate(**given(5, 9), **GREEDY)]
    for each in moved:
        unpack(each)
    told += [joint([local_part(each.weight) for each in group]) is None for group in groups]
    return [*told, model.generate(**given(5, 9), **GREEDY)]


def in_step(load: Loader, kind: str) -> list[Any]:
    """Weights that FSDP2 shares out: each process decodes prompts of its own, in rounds of its own number. What a
    process cannot compare with the others' it compares here."""
    del load, kind
    model, rank = here(bigram(**sizes())), dist.get_rank() if dist.is_initialized() else 0
    inputs = given(5, 9, seed=rank)
    expected = model.generate(**inputs, **GREEDY)
    if dist.is_initialized():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    with fastspec.patched(model, eagle3=here(seer(bigram(**sizes())))):
        for each in ("eagle3", "nasd", "autoregressive"):
            assert torch.equal(model.generate(**inputs, **GREEDY, assistant=each), expected), each
        report = fastspec.report(model)
        return [report.calls[0].acceptance_length > 1.5, dict(report.unassisted)]


def seen(load: Loader, kind: str) -> list[Any]:
    """A vision-language model's prompts, of tokens alone and with images."""
    del kind
    model = load(SEEING)
    with fastspec.patched(model):
        inputs = given(5, 9), prompts_with_images(model, ((2, 3), (4, 1)))
        made = [
            model.generate(**each, **GREEDY, assistant=name) for each in inputs for name in ("autoregressive", "nasd")
        ]
        return [*made, fastspec.report(model).mode]


def hooked(load: Loader, kind: str) -> list[Any]:
    """A hook on an embedding that is cut has its say in every pass."""
    del kind
    model, asked = load("llama"), []
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: asked.append(1) or -out)
    with fastspec.patched(model):
        made = [model.generate(**given(5, 9), **GREEDY, assistant=each) for each in ("autoregressive", "nasd")]
    assert len(asked) > 2
    return made


def whole(folder: Path) -> Loader:
    """Loads models whole."""
    return lambda name: here(_kind(name).from_pretrained(folder / name, dtype=torch.float32).eval())


def cut(folder: Path) -> Loader:
    """Loads models over the processes."""
    config = DistributedConfig(tp_size=SIZE, tp_plan="auto")
    return lambda name: (
        _kind(name).from_pretrained(folder / name, dtype=torch.float32, distributed_config=config).eval()
    )


def _kind(name: str) -> Any:
    return AutoModelForImageTextToText if name == SEEING else AutoModelForCausalLM


def folders(factory: pytest.TempPathFactory, save: Callable[[Path], object]) -> Callable[[int], Path]:
    """Folders with the models for so many processes, each saved once."""

    @cache
    def made(count: int) -> Path:
        folder = factory.mktemp("ranks")
        with of_size(count):
            save(folder)
        return folder

    return made


@contextmanager
def of_size(size: int, device: str = "cpu") -> Iterator[None]:
    """Models and inputs are those of so many processes on a device, in this process too."""
    global HERE, SIZE
    before = HERE, SIZE
    HERE, SIZE = device, size
    try:
        yield
    finally:
        HERE, SIZE = before


def on_cpu(result: Any) -> Any:
    """A result as it is compared, on the CPU."""
    return result.cpu() if isinstance(result, Tensor) else result


def join(rank: int, folder: Path, device: str = "cpu", size: int = SIZE) -> None:
    """Make this process one of `size`, which meet in a folder. On "cuda" each has a GPU of its own."""
    global HERE, SIZE
    HERE, SIZE = device, size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), SIZE)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE, timeout=datetime.timedelta(seconds=300))


def work(rank: int, folder: Path, run: Callable[[Loader, str], Any], kind: str) -> None:
    """One of two processes that run a case which ends them."""
    join(rank, folder)
    run(cut(folder), kind)
