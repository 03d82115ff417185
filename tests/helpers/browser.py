"""Headless Chromium, driven by chromedriver's HTTP interface (W3C WebDriver), which needs no package."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 300.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1180,760"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The name that the standard gives to a reference to an element."""
KEYS = {"ENTER": "\ue007", "ESCAPE": "\ue00c", "RIGHT": "\ue014", "LEFT": "\ue012", "TAB": "\ue004"}


class ScriptError(Exception):
    """What the driver says went wrong."""


class Browser:
    """A session of a browser."""

    def __init__(self, driver: str, folder: Path) -> None:
        self.driver = driver
        wanted = {
            "goog:chromeOptions": {"args": [*FLAGS, f"--user-data-dir={folder}"]},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.driver + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise ScriptError(json.loads(error.read())["value"]["message"]) from None

    def open(self, url: str) -> None:
        """Show a page, which is loaded when this returns."""
        self._ask("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *given: Any) -> Any:
        """What a script returns, whose arguments are `arguments`."""
        return self._ask("POST", f"{self.session}/execute/sync", {"script": script, "args": list(given)})

    def wait(self, script: str, *given: Any) -> Any:
        """What an expression is as soon as it is true."""
        end = time.monotonic() + SECONDS
        while True:
            found = self.run(f"return {script}", *given)
            if found:
                return found
            if time.monotonic() >= end:
                raise AssertionError(f"{script} is {found!r} after {SECONDS:g} seconds: {self.run(TEXT)[-2000:]}")
            time.sleep(0.05)

    def _element(self, css: str) -> str:
        found = self._ask("POST", f"{self.session}/element", {"using": "css selector", "value": css})
        return f"{self.session}/element/{found[ELEMENT]}"

    def click(self, css: str) -> None:
        """Click where an element is seen."""
        self._ask("POST", f"{self._element(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        """Press keys in an element."""
        self._ask("POST", f"{self._element(css)}/value", {"text": text})

    def clear(self, css: str) -> None:
        """Empty a field."""
        self._ask("POST", f"{self._element(css)}/clear", {})

    def tool(self, command: str, **given: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": given})

    def log(self) -> list[str]:
        """What the console was told since this was asked last: errors of scripts, and what the policy refused."""
        return [entry["message"] for entry in self._ask("POST", f"{self.session}/se/log", {"type": "browser"})]

    def picture(
        self, path: Path, scheme: str = "light", width: int = 1180, height: int = 760, phone: bool = False
    ) -> None:
        """Write a PNG of the page in a colour scheme."""
        self.look(scheme, width, height, phone)
        path.write_bytes(base64.b64decode(self.tool("Page.captureScreenshot", format="png")["data"]))

    def look(self, scheme: str, width: int = 1180, height: int = 760, phone: bool = False) -> None:
        """Show pages in a colour scheme and size."""
        self.tool("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.tool("Emulation.setDeviceMetricsOverride", **size)

    def close(self) -> None:
        """End the session."""
        self._ask("DELETE", self.session)


TEXT = "return document.body.innerText"


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in a folder; skips where there is none."""
    command = shutil.which("chromedriver")
    if command is None or shutil.which("chromium") is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    process = subprocess.Popen([command, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        lines = (re.search(r"on port (\d+)\.", line) for line in process.stdout)
        port = next(found[1] for found in lines if found and found[1] != "0")
        browser = Browser(f"http://127.0.0.1:{port}", folder)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(SECONDS)
