"""A long prompt on a model of full size: seconds of the prefill, peak memory, and the round after it.

    python benchmarks/long_prompt.py --shape llama-8b --prompts 8192 32768 131008 --out rows.jsonl

Weights are random. After a call on the shortest prompt, which compiles, every length has three calls: a first, one for
the time of a round in which nothing is captured any more, and one whose prefill finds its graphs (`prefill_again_s`).
transformers' own generate answers prompts of up to --peer-most tokens in the same run. `peak_mib` is beside the
weights; `keys_and_values_mib` is what the layers can see of the text at its end. `--parts 512 1024 2048` measures all
of it with prompts that are read in parts of so many tokens, or of 512 where layers have windows; by default those that
fastspec takes of one row. The rows say which (`part`).
"""

from __future__ import annotations

from typing import Any

import torch
from common import device_here, parser_of, place, timed, write
from full_size import SHAPES, kept_bytes, make_head, make_model

import fastspec
from fastspec.generation import target


def call(model: Any, prompt: int, tokens: int, assistant: str | None) -> dict[str, Any]:
    """One call on a random prompt: its seconds and its peak of allocated memory above what was there before it."""
    ids = torch.randint(10, model.config.vocab_size, (1, prompt), device=model.device)
    cuda = model.device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
    options |= {} if assistant is None else {"assistant": assistant}
    seconds = timed(lambda: model.generate(ids, **options))
    row: dict[str, Any] = {"prompt": prompt, "method": assistant or "transformers", "new_tokens": tokens}
    row |= {"seconds": round(seconds, 3)}
    if cuda:
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    if assistant is not None:
        last = fastspec.report(model).last
        rounds = sum(spent for name, spent in last.phases.items() if name != "prefill")
        row |= {"prefill_s": round(last.phases["prefill"], 3), "rounds": last.rounds}
        row |= {"round_ms": round(1e3 * rounds / last.rounds, 3)}
    return row | {"keys_and_values_mib": round(kept_bytes(model, prompt + tokens, 1) / 2**20)}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[8192, 32768, 131008])
    parser.add_argument("--tokens", type=int, default=24)
    methods = ["autoregressive", "eagle3"]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument("--peer-most", type=int, default=32768, help="longest prompt of transformers; 0: none")
    parser.add_argument("--parts", nargs="+", type=int, help="tokens of a prompt that are read at once")
    args = parser.parse_args(arguments)
    device, dtype = device_here()
    torch.manual_seed(0)
    model = make_model(args.shape, device, dtype)
    weights = round(sum(parameter.nbytes for parameter in model.parameters()) / 2**20)
    shared = {"shape": args.shape, "weights_mib": weights, **place(device, dtype)}
    prompts = sorted(args.prompts)
    asked = [prompt for prompt in prompts if prompt <= args.peer_most]
    for prompt in asked[:1]:
        call(model, prompt, args.tokens, None)  # compiles
    for row in (call(model, prompt, args.tokens, None) for prompt in asked):
        write(args.out, shared | row, list(row))
    head = make_head(model, 32000)
    narrow = target.NARROW
    for part in args.parts or [target.widest_part(1, captures=device == "cuda")]:
        target.NARROW, target.WIDE = min(part, narrow) if device == "cuda" else part, part
        with fastspec.patched(model, eagle3=head):
            for method in args.methods:
                call(model, prompts[0], args.tokens, method)
                for prompt in prompts:
                    row, again, last = (call(model, prompt, args.tokens, method) for _ in range(3))
                    row |= {"part": part, "prefill_again_s": last["prefill_s"], "round_ms": again["round_ms"]}
                    write(args.out, shared | row, list(row))


if __name__ == "__main__":
    main()
