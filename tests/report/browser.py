"""Headless Chromium for tests of pages, driven by the DevTools protocol over two pipes: no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)

_PATIENCE_S = 90.0


def find_chromium() -> str | None:
    """The browser's path: `$INVDIST_CHROMIUM`, or the first of the usual names; None if there is none."""
    chosen = os.environ.get("INVDIST_CHROMIUM")
    return shutil.which(chosen) if chosen else next((path for path in map(shutil.which, _NAMES) if path), None)


class Browser:
    """A browser with a fresh profile that can reach no host. Use as a context manager."""

    def __init__(self) -> None:
        program = find_chromium()
        if program is None:
            raise FileNotFoundError("no Chromium found: install it, or name it in $INVDIST_CHROMIUM")
        self._profile = tempfile.mkdtemp(prefix="invdist-browser-")
        to_child, self._out = _pipe()
        self._in, from_child = _pipe()
        null = os.open(os.devnull, os.O_RDWR)
        places = [(null, 0), (null, 1), (null, 2), (to_child, 3), (from_child, 4)]
        self._pid = os.posix_spawn(
            program,
            [program, *_FLAGS, f"--user-data-dir={self._profile}"],
            os.environ | {"TMPDIR": self._profile},  # it is killed at the end: its files go with the profile
            file_actions=[(os.POSIX_SPAWN_DUP2, source, place) for source, place in places],
            setpgroup=0,
        )
        for handle in (to_child, from_child, null):
            os.close(handle)
        self._received = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str, width: int = 1400, height: int = 1000, *, dark: bool = False, phone: bool = False) -> Page:
        """Opens a page of the given size in CSS pixels and waits until it has loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        page.call("Emulation.setDeviceMetricsOverride", size)
        page.call("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.call("Page.navigate", {"url": url})
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def call(self, method: str, options: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Sends one command and returns its result; events that arrive meanwhile are kept in `events`."""
        self._next += 1
        command: dict[str, Any] = {"id": self._next, "method": method, "params": options or {}}
        if session:
            command["sessionId"] = session
        message = json.dumps(command).encode() + b"\0"
        while message:
            message = message[os.write(self._out, message) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError(f"{find_chromium()} {'ended' if ready else 'did not answer'}")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends a DevTools command to this page."""
        return self._browser.call(method, options, self._session)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details.get("text"))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {seconds:g} s: {condition}; problems: {self.problems}")
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of the whole page, from top to end."""
        picture = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(picture["data"]))

    @property
    def problems(self) -> list[str]:
        """Uncaught exceptions, console errors and warnings, and what the browser itself complained about."""
        found = []
        for event in self._events():
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(details["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(json.dumps(details["args"]))
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Every URL this page asked for, its own first."""
        found = (event for event in self._events() if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in found]

    def _events(self) -> list[dict[str, Any]]:
        self.evaluate("0")
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


def _pipe() -> tuple[int, int]:
    """A pipe with descriptors above 10, because the browser gets its own ends as 3 and 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
