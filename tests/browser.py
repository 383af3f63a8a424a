"""A headless Chromium, driven over its DevTools pipe with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_TOLD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
_PATIENCE = 60.0


class Browser:
    """One tab of a browser of its own, whose profile and log lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        # Chromium reads its descriptor 3 and writes 4; those above 20 are in nobody's way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (child_read, child_write)]
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        self._pid = os.posix_spawn(
            PROGRAM,
            [PROGRAM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
            setpgroup=0,
        )
        for end in (child_read, child_write, log, *ends):
            os.close(end)
        self._buffer = b""
        self._calls = 0
        self._events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._calls:
            self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path) -> None:
        """Loads a file and waits until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not self._heard("Page.loadEventFired"):
            self._events.append(self._receive())

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Presses and releases the mouse on the first element that matches, scrolled into view."""
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center', inline: 'center'});"
            "const box = found.getBoundingClientRect();"
            "return [box.x + Math.min(box.width / 2, 200), box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replaces what is in an input by `text`."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Makes the window as large as this, in CSS pixels; below 500 it is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def prefer(self, scheme: str) -> None:
        """Makes the user's preference "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[dict[str, Any]]:
        """Everything that was written to the console or thrown since the page was opened."""
        return [event for event in self._events if event.get("method") in _TOLD]

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        return [event["params"]["request"]["url"] for event in self._heard_all("requestWillBeSent")]

    def close(self) -> None:
        """Ends the browser; kills it if it does not end."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.05)
        os.close(self._write)
        os.close(self._read)

    def _heard(self, method: str) -> bool:
        return any(event.get("method") == method for event in self._events)

    def _heard_all(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("method") == f"Network.{name}"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise AssertionError("the browser ended" if ready else "the browser hangs")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
