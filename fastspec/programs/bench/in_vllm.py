"""vLLM's answers to a bench's prompts, in a process and an environment of its own: `python in_vllm.py JOB OUT`.

JOB is a JSON object: `options` of `vllm.LLM`, `batches` of prompts as token ids, `max_new_tokens` of each batch, `ends`
(end tokens), `exact_length` (answers go on after end tokens), `unbiased` (biases are set to 0: a random router's would
send every token to the same experts), and for every batch so many untimed calls (`warmup`) and timed ones (`runs`). The
first line of OUT holds the `version`, every other one a timed call: `batch`, `call`, `tokens`, `seconds`, `drafts` (how
often any were made, summed over the rows), `accepted`, `accepted_at` (by position). Only vLLM and Python's own library
are imported here.
"""

import json
import os
import sys
import time

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main(job_path: str, out_path: str) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    counts = "speculative_config" in job["options"]
    engine = vllm.LLM(**job["options"], disable_log_stats=not counts)
    if job["unbiased"]:
        engine.apply_model(without_biases)
    exact = job["exact_length"]
    with open(out_path, "w", encoding="utf-8") as out:
        print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
        for number, (batch, new) in enumerate(zip(job["batches"], job["max_new_tokens"], strict=True)):
            settings = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=new,
                min_tokens=new if exact else 0,
                ignore_eos=exact,
                stop_token_ids=[] if exact else job["ends"],
                detokenize=False,
            )
            prompts = [{"prompt_token_ids": ids} for ids in batch]
            for call in range(-job["warmup"], job["runs"]):
                before, start = drafted(engine) if counts else {}, time.perf_counter()
                done = engine.generate(prompts, settings, use_tqdm=False)
                seconds = time.perf_counter() - start
                tokens = [list(each.outputs[0].token_ids) for each in done]
                drafts = drafted(engine, before) if counts else {"drafts": 0, "accepted": 0, "accepted_at": []}
                answer = {"call": call, "batch": number, "tokens": tokens, "seconds": seconds, **drafts}
                if call >= 0:
                    print(json.dumps(answer), file=out, flush=True)


def without_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


def drafted(engine, before=None):
    """Counts of drafts that the engine has made since it began, or since others were counted."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    at = list(found[f"{ACCEPTED}_per_pos"].values)
    before = before or {"drafts": 0, "accepted": 0, "accepted_at": [0] * len(at)}
    return {
        "drafts": found[DRAFTS].value - before["drafts"],
        "accepted": found[ACCEPTED].value - before["accepted"],
        "accepted_at": [later - sooner for sooner, later in zip(before["accepted_at"], at, strict=True)],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
