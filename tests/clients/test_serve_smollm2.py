"""`fastspec serve` with a real model and its head, beside `generate` of the unpatched one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers.clients import MARKS, QUESTIONS
from helpers.serve import NAME, served

pytestmark = MARKS


def test_smollm2_answers_as_generate_does_with_stop_strings_and_in_streams(pair, tokenizer):
    plain, model = pair
    stop = [".", "?"]

    def alone(question: str, **options: Any) -> str:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        new = plain.generate(ids, max_new_tokens=32, do_sample=False, tokenizer=tokenizer, **options)[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    with served(model, rows=4, max_length=200, assistant="eagle3", tokenizer=tokenizer) as server:
        client = server.client()

        def ask(question: str, stop: list[str] | None, stream: bool) -> str:
            answer = client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": question}],
                max_tokens=32,
                temperature=0,
                stop=stop,
                stream=stream,
            )
            if not stream:
                return answer.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

        asked = [
            (question, stops, stream) for question in QUESTIONS for stops in (None, stop) for stream in (False, True)
        ]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda each: ask(*each), asked))
        for emitted, (question, stops, _) in zip(got, asked, strict=True):
            wanted = alone(question, **({} if stops is None else {"stop_strings": stops}))
            assert emitted == min((wanted.split(each)[0] for each in stops or ()), key=len, default=wanted)
        assert server.metric("fastspec_acceptance_length") > 1.5
