"""Tasks of lm-eval that need no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ROWS = [
    {"q": "What is 2+2?", "label": 0},
    {"q": "Name the capital of France.", "label": 1},
    {"q": "What colour is the sky?", "label": 2},
    {"q": "Count: one, two, three, four,", "label": 3},
]
SHARED = {"test_split": "test", "doc_to_text": "Question: {{q}}\nAnswer:"}


def task(name: str, rows: Sequence[dict[str, Any]] = ROWS, **over: Any) -> Any:
    """A task of four documents, or others, without the network."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={"task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(list(rows))}, **SHARED, **over}
    )


def answered(rows: Sequence[dict[str, Any]] = ROWS, tokens: int = 24) -> Any:
    return task(
        "answered",
        rows,
        output_type="generate_until",
        doc_to_target="{{label}}",
        metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n\n", "Question:", "2017-01-01 2"], "max_gen_toks": tokens, "do_sample": False},
    )


def evaluated(model: Any, tokenizer: Any, tasks: list[Any], batch: int) -> Any:
    """What lm-eval makes of tasks: the answers and the scores, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    found = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch), tasks=tasks, bootstrap_iters=0
    )
    emitted = {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}
    return emitted, {
        name: {key: value for key, value in row.items() if "," in key} for name, row in found["results"].items()
    }
