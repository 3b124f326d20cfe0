"""A headless Chromium, driven over its DevTools protocol through a pipe: nothing but the browser itself is needed.

Source: https://chromedevtools.github.io/devtools-protocol/. With `--remote-debugging-pipe` the browser reads messages from its
file descriptor 3 and writes to 4, each a JSON text that ends with a zero byte.
"""

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE_S = 300.0
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-default-apps --disable-extensions --disable-dev-shm-usage "
    "--remote-debugging-pipe"
)
_KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}


class Browser:
    """One tab. asked: the addresses that it requested; troubles: what its console said of errors and violations."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self.asked: list[str] = []
        self.troubles: list[str] = []
        self._to, self._from = os.fdopen(write_to, "wb", 0), os.fdopen(read_from, "rb", 0)
        self._ids = itertools.count(1)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command to the tab."""
        return self._call(method, params, self._session)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression holds in the page."""
        waited = threading.Event()
        for _ in range(int(_PATIENCE_S / 0.05)):
            if self.value(f"Boolean({expression})"):
                return
            waited.wait(0.05)
        raise AssertionError(f"{expression} never came to hold; the page shows: {self.value('document.body.innerText')}")

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key."""
        code, number, text = _KEYS[key]
        told = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def shape(self, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size and its colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Keep what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._to.write(json.dumps(message).encode() + b"\0")
        answer = self._answers.get(timeout=_PATIENCE_S)
        assert answer["id"] == number, "commands are answered one by one"
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while data := self._from.read(1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for one in messages:
                self._take(json.loads(one))

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self._answers.put(message)
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Log.entryAdded":
                self.troubles.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(params["exceptionDetails"]))


@contextmanager
def browsing(directory: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in `directory`, until the context ends."""
    assert CHROMIUM is not None, "there is no Chromium"
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    # The shell gives the ends of the pipes the numbers that the browser knows.
    command = f'exec "$0" "$@" 3<&{their_read} 4>&{their_write}'
    arguments = [CHROMIUM, *_QUIET.split(), f"--user-data-dir={directory}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", command, *arguments],
        pass_fds=(their_read, their_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        yield Browser(our_write, our_read)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)
