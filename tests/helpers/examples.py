"""How many examples property tests draw, and which: the profiles of hypothesis, by the command that loads them."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings

OF = 100
PROFILES: dict[str, dict[str, Any]] = {
    "fast": {
        "max_examples": OF // 5,
        "derandomize": True,
        "deadline": None,
    },  # `make test`: the same examples for the same code
    "deep": {"max_examples": 5 * OF, "deadline": None},  # `make test-slow` and `make test-gpu`: others each time
    "mutants": {
        "max_examples": OF,
        "phases": [Phase.explicit, Phase.generate],
        "database": None,
    },  # not shrunk: to fail is enough
}
"""name -> settings; of what `examples(n)` names, max_examples is the percentage that is drawn."""


def register() -> None:
    """Make the profiles known to `--hypothesis-profile`, and "fast" the one without it."""
    for name, row in PROFILES.items():
        settings.register_profile(name, **row)
    settings.load_profile("fast")


def examples(count: int, **options: Any) -> settings:
    """Settings of `count` drawn examples, times the profile's share, one at the least, without a deadline."""
    return settings(max_examples=-(-count * settings().max_examples // OF), deadline=None, **options)
