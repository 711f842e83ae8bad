"""A headless chromium, driven through its own debugging pipe: no driver and no package between the
tests and the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


# Chromium reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in a browser. ``said`` collects exceptions, errors and warnings that the page
    causes."""

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        assert CHROMIUM
        self.profile = tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True
        )  # its helpers may still be writing
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile.name}",
        ]

        words = [
            sys.executable,
            "-c",
            LAUNCH,
            str(to_read),
            str(to_write),
            CHROMIUM,
            *flags,
            "about:blank",
        ]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            words, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet
        )
        os.close(to_read)
        os.close(to_write)
        self.number, self.buffer, self.session, self.said, self.events = 0, b"", None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read_end)
        os.close(self.write_end)
        self.profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            block = os.read(self.read_end, 1 << 20)
            if not block:
                raise RuntimeError("chromium went away")
            self.buffer += block
        line, _, self.buffer = self.buffer.partition(b"\0")
        event = json.loads(line)
        method, params = event.get("method"), event.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.said.append(
                params["exceptionDetails"].get("exception", {}).get("description", str(params))
            )
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.said.append(str(params["args"]))
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("file:", "data:", "about:")
        ):
            self.said.append(f"fetched {params['request']['url']}")
        return event

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._receive()

    def js(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0, clicks: int = 0) -> None:
        button = "left" if kind != "mouseMoved" or buttons else "none"
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=buttons,
            clickCount=clicks,
        )

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))
