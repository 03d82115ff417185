"""Where the code that a model wrote runs: in bubblewrap, nsjail or util-linux's unshare where one works on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache

from fastspec.errors import Unsupported

PROTECTION = {
    "bubblewrap": "no network, the files read-only and the home directory hidden, no process but its own",
    "nsjail": "no network, the files read-only, no process but its own",
    "unshare": "no network, no process but its own; it can read and write what this user can",
    "none": "no sandbox: it can read and write what this user can, and reach the network",
}
"""Sandbox -> what it keeps code from, beside the limits of time, memory, processes and file sizes that hold everywhere; the best first."""
PROGRAMS = {"bubblewrap": "bwrap", "nsjail": "nsjail", "unshare": "unshare"}


def sandbox(wanted: str = "auto") -> str:
    """The sandbox to use: `wanted`, or for "auto" the best that works here. Raises `Unsupported` for one that does not work."""
    if wanted not in ("auto", *PROTECTION):
        raise Unsupported(f"sandbox={wanted!r}; accepted are 'auto', {', '.join(map(repr, PROTECTION))}")
    if wanted == "auto":
        return next(kind for kind in PROTECTION if not trouble(kind))
    if trouble(wanted):
        raise Unsupported(f"sandbox={wanted!r} does not work on this machine: {trouble(wanted)}")
    return wanted


def command(kind: str) -> list[str]:
    """What is put before the command that runs in a sandbox."""
    home = os.path.realpath(os.path.expanduser("~"))
    if kind == "bubblewrap":
        hidden = [each for each in ("/tmp", "/run", home) if os.path.isdir(each) and each != "/"]
        needed = sorted({os.path.realpath(each) for each in (sys.prefix, sys.base_prefix)})
        return [
            "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev",
            "--proc", "/proc", *(part for each in hidden for part in ("--tmpfs", each)),
            *(part for each in needed for part in ("--ro-bind", each, each)), "--chdir", "/tmp",
        ]  # fmt: skip
    if kind == "nsjail":
        return [
            "nsjail", "-Mo", "--really_quiet", "--chroot", "/", "--tmpfsmount", "/tmp", "--tmpfsmount", "/run", "--cwd", "/tmp",
            "--env", "PATH", "--disable_rlimits", "--",
        ]  # fmt: skip
    if kind == "unshare":
        return ["unshare", "--user", "--map-root-user", "--pid", "--net", "--ipc", "--mount-proc", "--fork", "--kill-child"]
    return []


@lru_cache(maxsize=8)
def trouble(kind: str) -> str:
    """Why a sandbox does not work on this machine; "" where it does."""
    if kind == "none":
        return ""
    program = PROGRAMS[kind]
    if shutil.which(program) is None:
        return f"there is no {program} in PATH"
    try:
        done = subprocess.run(
            [*command(kind), sys.executable, "-I", "-c", "pass"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} could not be run: {error}"
    said = done.stderr.decode(errors="replace").strip()[:300]
    return "" if done.returncode == 0 else f"{program} ended with status {done.returncode}: {said}"
