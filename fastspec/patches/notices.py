"""Lines on stderr that say what a call waits for."""

from __future__ import annotations

import os
import sys

from transformers.utils import logging

SETTING = "FASTSPEC_QUIET"


def notice(line: str) -> None:
    """Print a line, unless the environment's FASTSPEC_QUIET is set, or transformers' verbosity is "error" or less."""
    if os.environ.get(SETTING, "") in ("", "0") and logging.get_verbosity() <= logging.WARNING:
        print(f"fastspec: {line}", file=sys.stderr, flush=True)
