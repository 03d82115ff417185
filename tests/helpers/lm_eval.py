"""Tasks of lm-eval that need no network."""

from __future__ import annotations

from typing import Any

ROWS = [
    {"q": "What is 2+2?", "label": 0},
    {"q": "Name the capital of France.", "label": 1},
    {"q": "What colour is the sky?", "label": 2},
    {"q": "Count: one, two, three, four,", "label": 3},
]
SHARED = {"test_split": "test", "doc_to_text": "Question: {{q}}\nAnswer:"}


def task(name: str, **over: Any) -> Any:
    """A task of four documents, without the network."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={"task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(ROWS)}, **SHARED, **over}
    )


def answered() -> Any:
    return task(
        "answered",
        output_type="generate_until",
        doc_to_target="{{label}}",
        metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n\n", "Question:", "2017-01-01 2"], "max_gen_toks": 24, "do_sample": False},
    )
