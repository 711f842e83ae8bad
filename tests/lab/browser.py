"""A page in a real browser: the system's chromium, driven by playwright.

``chromium-headless-shell`` is the same browser without windows, and takes a third of the time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMANDS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chrome",
)
CHROMIUM = next(filter(None, map(shutil.which, COMMANDS)), None)
MISSING = ", ".join(
    name
    for name, found in (
        ("chromium", CHROMIUM),
        ("the package playwright", importlib.util.find_spec("playwright")),
    )
    if not found
)
"""A sentence that says what is needed and not installed."""


@dataclass
class Opened:
    """A page that is open. ``said`` collects the exceptions, errors, warnings and requests that it
    causes."""

    page: Any
    said: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("console", self._message)
        self.page.on("request", self._request)

    def seconds_to_draw(self) -> float:
        """The processor time that it takes to load the page again, whatever else the machine does."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable")

        def spent() -> float:
            measured = session.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in measured if m["name"] == "ThreadTime")

        before = spent()
        self.page.reload()
        return spent() - before

    def _message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.said.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "about:")):
            self.said.append(f"fetched {request.url}")


@dataclass
class Browser:
    """A browser that opens pages."""

    chromium: Any

    @contextlib.contextmanager
    def open(
        self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False
    ) -> Iterator[Opened]:
        """A page in a window of this size, on a system in dark or light mode."""
        context = self.chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            is_mobile=width < 600,
        )
        with context:
            opened = Opened(context.new_page())
            opened.listen()
            opened.page.goto(path.resolve().as_uri())
            yield opened


@contextlib.contextmanager
def start() -> Iterator[Browser]:
    """Start the browser."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        with chromium:
            yield Browser(chromium)
