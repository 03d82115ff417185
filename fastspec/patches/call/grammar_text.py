"""Grammars in llguidance's language, and a check of one in a process of its own, without torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from fastspec.distribution import install_command
from fastspec.errors import Unsupported

FORMS = ("json_schema", "regex", "choice", "ebnf")
BLANKS = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
"""Blanks between two tokens of JSON: a model may fill an answer with them where any number is allowed."""
PATIENCE = 1, 30
"""Seconds that a grammar may take to compile: the processor's, and all that pass."""
MEMORY = 4 << 30
"""Bytes of addresses that it may take."""
CHECK = "from fastspec.patches.call.grammar_text import main; main()"


def library() -> Any:
    """The package llguidance. Raises Unsupported where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise Unsupported(
            f"a grammar needs llguidance, which is not installed: {install_command('structured')}"
        ) from error
    return llguidance


def text_of(form: str, value: Any) -> str:
    """A grammar of one of `FORMS` in llguidance's language. Raises Unsupported for what is none."""
    matcher = library().LLMatcher
    try:
        if form == "json_schema":
            made = matcher.grammar_from_json_schema(value, overrides=BLANKS)
        elif form == "choice":
            if isinstance(value, str) or not value or not all(isinstance(each, str) and each for each in value):
                raise ValueError("it must be a list of texts, none of them empty")
            made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        else:
            made = library().grammar_from(form, value)
    except Exception as error:  # of any kind: the library is not Python's
        raise refusal(form, str(error)) from error
    return str(made)


def refusal(form: str, error: str) -> Unsupported:
    """The error of a grammar that cannot be compiled."""
    return Unsupported(f"{form} cannot be compiled: {' '.join(error.split())[:400]}")


def check(form: str, value: Any) -> None:
    """Compile a grammar in another process, which is ended where that takes too long or too much memory: some get past
    the library's own bounds. Raises Unsupported for one that cannot be compiled."""
    library()
    command, given = [sys.executable, "-c", CHECK], json.dumps([form, value]).encode()
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    options: dict[str, Any] = {"capture_output": True, "env": os.environ | paths, "timeout": PATIENCE[1]}
    try:
        done = subprocess.run(command, input=given, **options)
    except subprocess.TimeoutExpired as error:
        raise refusal(form, f"it takes more than {PATIENCE[1]} seconds") from error
    if done.returncode < 0:
        raise refusal(form, f"it takes more than {PATIENCE[0]} second or {MEMORY >> 30} GiB")
    said = done.stderr if done.returncode else done.stdout
    if said:
        raise refusal(form, said.decode(errors="replace")[-400:])


def main() -> None:
    """Compile the grammar of standard input, and write what is wrong with it."""
    import resource

    form, value = json.load(sys.stdin)
    matcher = library().LLMatcher
    seconds = int(time.process_time()) + 1 + PATIENCE[0]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        sys.stdout.write(matcher.validate_grammar(text_of(form, value)))
    except Unsupported as error:
        sys.stdout.write(str(error.__cause__))
