"""Headless Chromium over its debugging pipe: open a page, ask it things, and hear what it requested and complained of.

The pipe is two file descriptors with JSON messages that end in a zero byte, so nothing but Chromium is needed.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATH = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
        if (path := shutil.which(name))
    ),
    None,
)
_PATIENCE = 120.0  # seconds for one answer; a busy machine needs ten, a hung browser has forever


class Browser:
    """A running Chromium; a context manager that ends it."""

    def __init__(self, profile: Path) -> None:
        assert PATH is not None
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--window-size=1200,900", "--hide-scrollbars"]
        flags += ["--no-sandbox", "--remote-debugging-pipe"]  # no sandbox: containers run it as root
        ends = [os.pipe(), os.pipe()]
        # Chromium reads 3 and writes 4, so its ends must lie out of the way of both.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (ends[0][0], ends[1][1])]

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [PATH, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
        )
        for fd in (*theirs, ends[0][0], ends[1][1]):
            os.close(fd)
        self._out, self._in = ends[0][1], ends[1][0]
        self._unread = b""
        self._number = 0
        self.tabs: dict[str, Tab] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, page: Path) -> Tab:
        """A tab with the page, from its first byte under observation."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self.tabs[session] = Tab(self, session)
        for domain in ("Network", "Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", {"url": page.as_uri()})
        return tab

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """The result of one command; raises RuntimeError with what Chromium says."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        until = time.monotonic() + _PATIENCE
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            if answer.get("sessionId") in self.tabs:
                self.tabs[answer["sessionId"]].hear(answer["method"], answer["params"])

    def _receive(self, until: float) -> Any:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium gave no answer in {_PATIENCE} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError(f"Chromium ended with {self._process.wait()}")
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


class Tab:
    """One page: `requests` are the addresses it asked for but itself and what lies in it, `complaints` what
    Chromium logged of it: uncaught errors, and what the policy refused."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Takes note of an event."""
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if params["type"] != "Document" and not url.startswith(("data:", "blob:")):
                self.requests.append(url)
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """The result of a command to this page."""
        return self._browser.call(method, params, self._session)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, waited for when it is a promise."""
        answer = self.call(
            "Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True}
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description"))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true in the page."""
        until = time.monotonic() + _PATIENCE
        while not self.ask(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"still not: {condition}; {self.complaints}")
            time.sleep(0.05)

    def resize(self, width: int) -> None:
        """Make the screen so wide, and 900 pixels high."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Prefer "dark" or "light"."""
        self.call(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )

    def drawn(self) -> None:
        """Until the chart stands."""
        self.wait("document.readyState === 'complete' && !!document.querySelector('#chart[data-drawn]')")

    def press(self, text: str) -> None:
        """Types characters where the focus is, key by key."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", {"type": "keyDown", "key": letter, "text": letter})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": letter})

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of the first element that matches."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", event)


def overlaps(chart: str) -> str:
    """Asks for the pairs that lie over each other of a chart's names in the legend, and the plot itself."""
    return f"""(() => {{
          const chart = document.getElementById({chart!r});
          const parts = ['.legend button', '.plot'].flatMap((s) => [...chart.querySelectorAll(s)]);
          const boxes = parts.map((e) => [e.textContent || String(e.className), e.getBoundingClientRect()]);
          return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
            .filter(([_, q]) => p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom)
            .map(([b]) => [a, b]));
        }})()"""
