"""The report page of 100 runs with 2,000 points each, in a headless chromium: its size, and when it
is drawn.

python benchmarks/report_page.py [--runs 100] [--points 2000] [--screenshot FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))
from browser import MISSING, start
from fakes import big


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--screenshot", type=Path)
    asked = parser.parse_args()
    if MISSING:
        sys.exit(f"This benchmark needs {MISSING}, which is not installed.")
    drawn = []
    with tempfile.TemporaryDirectory() as folder:
        page = big(asked.runs, asked.points).write(Path(folder) / "page.html")
        size = page.stat().st_size
        for _ in range(5):
            with start() as browser, browser.open(page) as opened:
                drawn.append(int(opened.page.evaluate("document.body.dataset.drawn")))
                if asked.screenshot:
                    opened.page.screenshot(path=asked.screenshot)
    took = statistics.median(drawn)
    print(
        f"{asked.runs} runs x {asked.points} points: {size / 1e6:.2f} MB (at most 8), drawn after "
        f"{took} ms (at most 2000)"
    )


if __name__ == "__main__":
    main()
