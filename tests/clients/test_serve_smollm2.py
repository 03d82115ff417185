"""`fastspec serve` with a real model and its head, beside `generate` of the unpatched one."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.timeout(1800)
def test_the_example_of_a_cascade_is_made_evaluated_explained_and_served(tmp_path: Path) -> None:
    """SmolLM2 and a copy of it with fewer layers, by the commands of docs/guide/cascade.md."""
    example = Path(__file__).parents[2] / "examples" / "cascade.py"
    done = subprocess.run(
        [sys.executable, str(example), "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predictor written to" in done.stdout and "large alone:" in done.stdout
    assert "stage 0, small: " in done.stdout and "stage 1, large: " in done.stdout
    counts = dict(
        line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("fastspec_stage_requests")
    )
    assert counts['fastspec_stage_requests_total{outcome="answered",stage="large"}'] == "1.0", counts
    assert "; small: sent on, P(acceptable) 0." in done.stdout
