"""Headless Chromium (Debian's package), controlled by the DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root in a container; all pages are local
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    def __init__(self, browser: _Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def size(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 640,
        )

    def open(self, address: str) -> None:
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def leave(self) -> None:
        self._call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")

    def go(self, address: str) -> None:
        self.run(f"location.hash = {json.dumps(address)}")
        self.until(f"location.hash === {json.dumps(address)}")
        self.settle()

    def settle(self) -> None:
        self.until("!document.querySelector('main[aria-busy]')")
        self.run("new Promise((done) => setTimeout(done, 120))")

    def run(self, code: str) -> Any:
        """Return the value of an expression or promise. Raises AssertionError with what it
        threw."""
        result = self._call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str, limit_s: float = 30.0) -> None:
        end_s = time.monotonic() + limit_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end_s, f"not so after {limit_s} s: {condition}"
            time.sleep(0.05)

    def text(self, selector: str = "main") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13, "ArrowRight": 39}.get(key, 0)
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session, self._event)

    def _event(self, method: str, reply: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = reply["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and reply["type"] in ("error", "warning"):
            self.problems.append(str(reply["args"]))
        elif method == "Log.entryAdded" and reply["entry"]["level"] in ("error", "warning"):
            entry = reply["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(reply["request"]["url"])


class _Browser:
    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._rest = b""

    def call(self, method: str, parameters: Any, session: str | None, event: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + ANSWER_S
        while True:
            reply = self._next(end_s)
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                result: dict[str, Any] = reply["result"]
                return result
            if event is not None and "method" in reply:
                event(reply["method"], reply["params"])

    def _next(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0, end_s - time.monotonic()))
            assert ready, f"the browser did not answer within {ANSWER_S} s"
            piece = os.read(self._back, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        reply: dict[str, Any] = json.loads(message)
        return reply


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    program = executable()
    assert program is not None, "there is no Chromium: ask `found` first"
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    words = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    script = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *words],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(from_us)
    os.close(to_us)
    try:
        browser = _Browser(to_browser, from_browser)
        target = browser.call("Target.createTarget", {"url": "about:blank"}, None, None)
        expected = {"targetId": target["targetId"], "flatten": True}
        session = browser.call("Target.attachToTarget", expected, None, None)["sessionId"]
        yield Page(browser, session)
        browser.call("Browser.close", {}, None, None)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
