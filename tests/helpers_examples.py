"""How many examples expensive property tests draw: few in `make test`, several times as many in `make test-slow` and `make test-gpu`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

TIMES = int(os.environ.get("FASTSPEC_EXAMPLES", "1"))


def examples(count: int, **options: Any) -> settings:
    """Settings of `count` drawn examples, times what the environment variable FASTSPEC_EXAMPLES says, without a deadline."""
    return settings(max_examples=count * TIMES, deadline=None, **options)
