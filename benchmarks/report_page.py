"""Measures the report page of 100 runs with 2,000 points each: its size, and the time until a
headless chromium has drawn it.

    python benchmarks/report_page.py [--runs 100] [--points 2000] [--screenshot FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab" / "report"))
from browser import CHROMIUM, Browser
from test_page import big


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--screenshot", type=Path)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("This benchmark needs chromium, which is not installed.")
    drawn = []
    with tempfile.TemporaryDirectory() as folder:
        page = big(arguments.runs, arguments.points).write(Path(folder) / "page.html")
        size = page.stat().st_size
        for _ in range(5):
            with Browser() as browser:
                browser.open(page)
                drawn.append(int(browser.js("document.body.dataset.drawn")))
                if arguments.screenshot:
                    browser.screenshot(arguments.screenshot)
    milliseconds = statistics.median(drawn)
    print(
        f"{arguments.runs} runs x {arguments.points} points: {size / 1e6:.2f} MB (at most 8), "
        f"drawn after {milliseconds} ms (at most 2000)"
    )


if __name__ == "__main__":
    main()
