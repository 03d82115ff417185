"""`fastspec generate`: a file of prompts answered into another file, in an open batch; interrupted runs go on."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.devices import use_device
from fastspec.errors import FastSpecError, Unsupported
from fastspec.files import parse_json
from fastspec.patches.cascade.open_batch import CascadeFuture
from fastspec.patches.hf.ends import end_tokens
from fastspec.programs.texts import encode, first_turn, read_jsonl

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where nothing keeps two runs of a command apart
    fcntl = None  # type: ignore[assignment]

AHEAD = 4
"""Prompts per row that are handed to the batch before their turn."""
BEGINS = b'{"line": '
"""Every line of answers."""


@dataclass(frozen=True, slots=True)
class Task:
    """Line of a prompt file: its number from 1, the conversation or plain text, and its `id`."""

    line: int
    prompt: str | list[dict[str, Any]]
    id: str | int | None


def settings_of(
    name: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    cascade: fastspec.Cascade | None = None,
) -> dict[str, Any]:
    """Settings that answers depend on, as their lines hold them; greedy ones on neither top-p nor seed."""
    drawn = {"temperature": temperature, "top_p": top_p, "seed": seed} if temperature else {"temperature": 0.0}
    held = {} if cascade is None else {"cascade": _settings_of_cascade(cascade)}
    return {"model": name, "max_new_tokens": max_new_tokens, **drawn, "chat": chat, **held}


def _settings_of_cascade(config: fastspec.Cascade) -> dict[str, Any]:
    stages = {stage.label: str(stage.model) for stage in config.stages}
    if config.mode != "adaptive":
        return {"stages": stages, "mode": config.mode, "rule": config.rule, "alpha": config.alpha}
    held = {name: getattr(config, name) for name in ("label", "price", "costs", "thresholds", "risk")}
    told = {name: value for name, value in held.items() if value is not None}
    return {"stages": stages, "predictor": str(config.predictor), **told}


@dataclass(frozen=True, slots=True)
class Done:
    """Answers that were there before a run, those that it wrote, and prompts that failed."""

    before: int
    written: int
    failed: int


def read_tasks(path: str | Path) -> Iterator[Task]:
    """The lines of a jsonl file with `prompt` (text), `messages` (a conversation) or `turns` (the first is asked).
    Raises Unsupported for a file or a line that is not of this form."""
    for number, row in read_jsonl(path):
        messages, name, text = row.get("messages"), row.get("id"), first_turn(row)
        fits = isinstance(text, str)
        if messages is not None:
            talk = messages if isinstance(messages, list) else []
            fits = bool(talk) and all(isinstance(each, dict) and "role" in each for each in talk)
        if not fits:
            raise Unsupported(f'{path}, line {number}: not a row with "prompt", "messages" or "turns"')
        yield Task(number, text if messages is None else messages, name if isinstance(name, (str, int)) else None)


def read_answered(path: Path, mend: bool = False) -> dict[int, tuple[Any, Any]]:
    """Line number -> (prompt, settings) of the answers in a file. A last line that a stopped run left unfinished does
    not count, and with `mend` is cut off the file, unless another of the run's processes has written since. Raises
    Unsupported for a file that holds anything else."""
    if not path.exists():
        return {}
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    cut, found = whole[len(kept) :], {}
    foreign = "no answer of fastspec generate: name another --out, or remove the file"
    for number, line in enumerate(kept.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            held, prompt, settings, failed = row["line"], row["prompt"], row["settings"], "error" in row
        except (ValueError, KeyError, TypeError) as error:
            raise Unsupported(f"{path}, line {number} is {foreign}") from error
        if not failed:
            found[held] = prompt, settings
    if cut and cut[: len(BEGINS)] != BEGINS[: len(cut)]:
        raise Unsupported(f"{path} ends in what is {foreign}")
    if cut and mend:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size == len(whole):
                file.truncate(len(kept))
    return found


def read_left(
    prompts: str | Path, out: Path, settings: dict[str, Any], share: tuple[int, int] = (0, 1), mend: bool = False
) -> tuple[int, list[Task]]:
    """(number of lines in a process's share, those that `out` does not answer yet); `mend` as in `read_answered`.
    Raises Unsupported for files of another form or no prompts, other prompts or settings, and an `out` that cannot be
    written."""
    place, fits = (out, out.is_file()) if out.exists() else (out.parent, out.parent.is_dir())
    if not fits or not os.access(place, os.W_OK):
        raise Unsupported(f"{out} cannot be written: name a file in a folder that is there")
    tasks, answered = list(read_tasks(prompts)), read_answered(out, mend)
    if not tasks:
        raise Unsupported(f"there are no prompts in {prompts}")
    for task in tasks:
        if task.line not in answered:
            continue
        prompt, asked = answered[task.line]
        was = f"another prompt in line {task.line} of {prompts}" if prompt != task.prompt else ""
        if not was and asked != settings:
            was = f"line {task.line} by other settings, {json.dumps(asked)}, and now they are {json.dumps(settings)}"
        if was:
            raise Unsupported(f"{out} answers {was}: name another --out, or remove the file")
    mine = tasks[share[0] :: share[1]]
    return len(mine), [task for task in mine if task.line not in answered]


@contextmanager
def only_run(out: Path, rank: int) -> Iterator[None]:
    """Context manager that locks `out` against other runs, in the first of a run's processes. Raises Unsupported where
    another run has it; warns where the file system keeps no locks."""
    if fcntl is None or rank > 0:
        yield
        return
    file = os.open(out, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unsupported(f"another run answers into {out}: wait for it, stop it, or name another --out") from error
        except OSError as error:
            warnings.warn(
                f"{out} cannot be locked ({error}): two runs at once would answer every line twice", stacklevel=3
            )
        yield
    finally:
        os.close(file)


class Answers:
    """Writer of answers as they come, each appended in one piece: several processes may share the file."""

    def __init__(
        self, path: Path, tokenizer: Any, settings: dict[str, Any], ends: frozenset[int], tell: Callable[[int], None]
    ) -> None:
        self.tokenizer, self.settings, self.ends, self.tell = tokenizer, settings, ends, tell
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.lock = threading.Lock()
        self.written = self.failed = 0
        self.broken: OSError | None = None

    def answered(self, task: Task, count: int, limit: int, future: Future[Any]) -> None:
        """Write the answer to a task of `count` prompt tokens, or what went wrong."""
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.add(task, {"error": str(error)})
            return
        tokens = future.result()[0, count:].tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        cut, by = len(tokens) >= limit and tokens[-1] not in self.ends, {}
        if isinstance(future, CascadeFuture) and future.explanation is not None:
            visit = future.explanation.visits[-1]  # whose own tokens the limit counts
            cut, by = visit.cut, {"stage": visit.name}
        self.add(task, {"text": text, "tokens": len(tokens), "finish": "length" if cut else "stop", **by})

    def add(self, task: Task, more: dict[str, Any]) -> None:
        """Write a line; none behind one that could not be written, which `broken` tells."""
        named = {} if task.id is None else {"id": task.id}
        row = {"line": task.line, **named, "prompt": task.prompt, **more, "settings": self.settings}
        try:
            line = f"{json.dumps(row, ensure_ascii=False)}\n".encode()
        except UnicodeEncodeError:  # half of a character, which JSON may name and UTF-8 has no place for
            line = f"{json.dumps(row)}\n".encode()
        with self.lock:
            if self.broken is not None:
                return
            try:
                while line:
                    line = line[os.write(self.file, line) :]
            except OSError as error:
                self.broken = error
                return
            self.failed += "error" in more
            self.written += "error" not in more
            done = self.failed + self.written
        self.tell(done)

    def close(self) -> None:
        os.close(self.file)


def answer_file(
    model: Any,
    tokenizer: Any,
    prompts: str | Path,
    out: str | Path,
    settings: dict[str, Any],
    *,
    assistant: Any,
    rows: int,
    max_length: int | None = None,
    share: tuple[int, int] = (0, 1),
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Done:
    """Answer every line of `prompts` that `out` does not answer yet by `settings`, in an open batch of `rows` rows.

    A line of `out` has `line`, `id` where there is one, `prompt`, `text`, `tokens` and `finish` ("stop" or "length"),
    or `error`, and `settings`; with the assistant "cascade" the `stage` that answered. They come as answers are done.
    Above temperature 0 line n is sampled by seed + n. share (r, n): this process answers every n-th of the lines, from
    the r-th on. `tell(done, of)` is called after every answer. Raises Unsupported as `read_left` and `only_run` do.
    """
    out, limit, seed = Path(out), settings["max_new_tokens"], settings.get("seed", 0)
    # greedy: the defaults, which stand for "not given"
    sampling: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    if settings["temperature"]:
        sampling = {"do_sample": True, "top_k": 0} | {name: settings[name] for name in ("temperature", "top_p")}
    sampling["max_new_tokens"] = limit
    read_left(prompts, out, settings, share)  # what is wrong is told before a file is made
    with only_run(out, share[0]):
        mine, left = read_left(prompts, out, settings, share, mend=True)
        room, ends = threading.Semaphore(AHEAD * rows), end_tokens(model.generation_config)
        with (
            closing(Answers(out, tokenizer, settings, ends, lambda done: tell(done, len(left)))) as answers,
            fastspec.continuous(model, assistant, rows=rows, max_length=max_length, prefill_chunk=None) as batch,
        ):
            for task in left:
                room.acquire()
                if answers.broken is not None:
                    batch.close(cancel=True)
                    break
                try:
                    ids = encode(tokenizer, task.prompt, chat=settings["chat"])["input_ids"]
                except Exception as error:  # of any kind: a template raises what it likes
                    answers.add(task, {"error": f"{type(error).__name__}: {error}"})
                    room.release()
                    continue
                try:
                    future = batch.submit(ids, seed=seed + task.line, **sampling)
                except (FastSpecError, ValueError) as error:
                    answers.add(task, {"error": str(error)})
                    room.release()
                    if not batch.alive:
                        raise
                    continue
                future.add_done_callback(partial(answers.answered, task, ids.shape[1], limit))
                future.add_done_callback(lambda _: room.release())
    if answers.broken is not None:
        raise Unsupported(
            f"{out} could not be written: {answers.broken}; the same command asks what is missing"
        ) from answers.broken
    return Done(mine - len(left), answers.written, answers.failed)


def follow_file(model: Any, assistant: Any, rows: int, max_length: int | None) -> None:
    """`answer_file` in another process than the first of those that hold the model together: run its rounds."""
    fastspec.continuous(model, assistant, rows=rows, max_length=max_length, prefill_chunk=None).close()


def share_of_process() -> tuple[int, int]:
    """(rank, number of processes) as `accelerate launch` and `torchrun` tell their processes; (0, 1) without them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def own_device() -> str:
    """The device of this process: the GPU of its local rank, which becomes the current one, or the CPU."""
    return use_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
