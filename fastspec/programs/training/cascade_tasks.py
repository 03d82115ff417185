"""lm-eval's tasks for a cascade, which ask the questions and judge every stage's answers.

lm-eval's `evaluate` runs with a language model that records what it is asked, and then with one that answers what was
recorded. Needs the extra "eval". Tasks that run a model's code need lm-eval's own switches: HF_ALLOW_CODE_EVAL=1 in the
environment, and `unsafe`, its `--confirm_run_unsafe_code`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from fastspec.cascade.records import Record
from fastspec.errors import Unsupported
from fastspec.programs.training.cascade_answers import Item

FEWSHOT_SEED = 1234
"""lm-eval's own, of `simple_evaluate`."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names for the longest answer, the first that is there counts."""
WITHOUT_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
"""Generation arguments that say nothing about a greedy answer."""


class _Asked(Exception):
    """Ends lm-eval's run once the requests are known and nothing is answered yet."""


class _Recorded(LM):
    """Language model for lm-eval that keeps what it is asked and answers with `texts`, by the item's name, if any."""

    def __init__(self, tokenizer: Any, texts: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.tokenizer, self.texts = tokenizer, texts
        self.asked: dict[tuple[str, int], Item] = {}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        items = list(map(_item, requests))
        self.asked = {(each.task_name, each.doc_id): item for each, item in zip(requests, items, strict=True)}
        if self.texts is None:
            raise _Asked
        return [self.texts[item.name] for item in items]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise Unsupported(
            f"lm-eval {requests[0].task_name}: the task compares likelihoods of given texts, and a stage writes its "
            "answer: choose a task of output_type generate_until, such as mmlu_generative"
        )

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )


class Tasks:
    """Tasks by name, of lm-eval or of the YAML files in a folder; `most` documents of each.

    `metrics` choose what counts as right, as lm-eval prints it: "exact_match,flexible-extract", or the metric alone.
    Without any, the first metric of a task's first filter counts. `tokenizer` writes prompts in its chat template where
    it has one, few-shot examples as turns. Raises Unsupported for unknown names, and for what lm-eval refuses.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Any,
        *,
        include: Path | None = None,
        most: int | None = None,
        metrics: Sequence[str] = (),
        unsafe: bool = False,
    ) -> None:
        self.tokenizer, self.most, self.metrics, self.unsafe = tokenizer, most, tuple(metrics), unsafe
        if include is not None and not include.is_dir():
            raise Unsupported(f"{include}: no such folder of task files")
        manager = TaskManager(include_path=include)
        unknown = [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
        if unknown:
            raise Unsupported(
                f"lm-eval {lm_eval.__version__} has no task {', '.join(unknown)}: `lm-eval ls tasks` lists its own, "
                "and --include-path names a folder with files of yours"
            )
        try:
            self.loaded = manager.load(list(names))
        except (OSError, ValueError) as error:
            raise Unsupported(f"lm-eval cannot load {', '.join(names)}: {error}") from error
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(FEWSHOT_SEED)

    def items(self) -> list[Item]:
        """Every document as its task asks it. Raises Unsupported for tasks that compare likelihoods, for several
        answers to a document, for sampling, and for generation arguments that are not known."""
        asking = _Recorded(self.tokenizer)
        try:
            with suppress(_Asked):
                self._run(asking)
        except ValueError as error:
            raise Unsupported(f"lm-eval: {error} (here: --confirm-run-unsafe-code)") from error
        return list(asking.asked.values())

    def judge(self, answers: Sequence[Record]) -> dict[tuple[str, str], tuple[float, str]]:
        """(item, stage) -> how right its answer is in [0, 1], and what said so."""
        found: dict[tuple[str, str], tuple[float, str]] = {}
        for stage in dict.fromkeys(record.stage for record in answers):
            texts = {record.item: record.answer for record in answers if record.stage == stage}
            answering = _Recorded(self.tokenizer, texts)
            for task, samples in self._run(answering)["samples"].items():
                metric, chosen = self._metric(task, samples)
                for sample in (each for each in samples if each["filter"] == chosen):
                    value = sample[metric]
                    if not isinstance(value, (bool, int, float)) or not 0 <= value <= 1:
                        raise Unsupported(
                            f"lm-eval {task}: {metric},{chosen} of an answer is {value!r}, and must be a number in [0, "
                            "1]: choose another, --metric"
                        )
                    item = answering.asked[task, sample["doc_id"]]
                    found[item.name, stage] = float(value), f"lm-eval {task} ({metric},{chosen})"
        return found

    def _run(self, model: _Recorded) -> Any:
        templated = self.tokenizer.chat_template is not None
        return lm_eval.evaluate(
            model,
            self.loaded,
            limit=self.most,
            bootstrap_iters=0,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
            confirm_run_unsafe_code=self.unsafe,
        )

    def _metric(self, task: str, samples: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        pairs = list(dict.fromkeys((metric, each["filter"]) for each in samples for metric in each["metrics"]))
        wanted = [pair for name in self.metrics for pair in pairs if name in (pair[0], ",".join(pair))]
        if self.metrics and not wanted:
            known = " ".join(map(",".join, pairs))
            raise Unsupported(f"lm-eval {task} has no metric {' '.join(self.metrics)}; it has {known}")
        metric, chosen = (wanted or pairs)[0]
        if self.loaded["tasks"][task].higher_is_better().get(metric) is False:
            raise Unsupported(f"lm-eval {task}: a lower {metric} is better; choose another metric, --metric")
        return metric, chosen


def _item(request: Instance) -> Item:
    """A request as an item. Its name holds a hash of the prompt: an answer to another wording is another item's."""
    prompt, options = request.args
    until = options.get("until") or ()
    limit = next((int(options[name]) for name in LIMITS if options.get(name) is not None), None)
    unknown = sorted(set(options) - {"until", "do_sample", *LIMITS, *WITHOUT_SAMPLING})
    refused = ""
    if request.repeats != 1:
        refused = f"`repeats` asks for {request.repeats} answers to a document, and every stage gives one, greedily"
    elif options.get("do_sample", float(options.get("temperature") or 0) > 0):
        refused = "generation_kwargs ask for sampled answers, and stages answer greedily: set do_sample: false"
    elif unknown:
        refused = f"generation_kwargs {', '.join(unknown)} cannot be honoured: leave them out in a file of yours"
    if refused:
        raise Unsupported(f"lm-eval {request.task_name}: {refused}")
    name = f"{request.task_name}-{request.doc_id}-{sha256(prompt.encode()).hexdigest()[:8]}"
    stops = (until,) if isinstance(until, str) else tuple(until)
    return Item(name, str(request.task_name), prompt, until=tuple(filter(None, stops)), limit=limit, task=True)
