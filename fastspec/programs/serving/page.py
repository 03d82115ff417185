"""The page at `/`: one file, whose script and style run by their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

NAME = "page.html"


def read_page() -> tuple[str, dict[str, str]]:
    """(the page, its headers)."""
    text = files("fastspec.programs.serving").joinpath(NAME).read_bytes().decode()
    return text, {
        "Content-Security-Policy": policy_of(text),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def policy_of(text: str) -> str:
    """The Content-Security-Policy of a page: its own script and style run and nothing else, it asks its own server
    alone, and makes no element of a text."""
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(text, "script"),
        "style-src": _hashes(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(text: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [hashlib.sha256(each.encode()).digest() for each in found]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
