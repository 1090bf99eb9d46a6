"""A headless Chromium, driven through the DevTools protocol over a pair of pipes: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Where browsers of this kind are found.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Without these a fresh browser asks its makers' servers for news.
_QUIET = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE_S = 120.0


def find() -> str | None:
    """Return the browser's path, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. `events` has what it told, in order, as (method, parameters)."""

    def __init__(self, to: int, source: int) -> None:
        self._to, self._from, self._rest, self._id = to, source, b"", 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self._next()).get("id") != self._id:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Show a file in a window of this width and wait until it is loaded; forgets earlier events."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._next()
        # What a page asks for late is asked for within a moment.
        self.evaluate("new Promise(done => setTimeout(done, 200))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Return what the page logged, threw or was refused."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [f"{method}: {params}" for method, params in self.events if method in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for, the page's own among them."""
        return [p["request"]["url"] for method, p in self.events if method == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        """Write the whole page to a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {_PATIENCE_S:.0f} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise ConnectionError("the browser ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


@contextlib.contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Start a browser with an empty profile; it ends with the block."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    theirs, mine = os.pipe(), os.pipe()
    # The browser reads from descriptor 3 and writes to 4. Copies out of the way first, since these may be either.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (theirs[0], mine[1]))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *_QUIET, *sandbox, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs[0], mine[1], reads, writes):
            os.close(fd)
        try:
            yield Browser(theirs[1], mine[0])
        finally:
            os.close(theirs[1])
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(mine[0])
