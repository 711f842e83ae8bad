"""Names of arms are text, whatever is in them: on the page, in its figures and downloads."""

from __future__ import annotations

import math
import re

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.report import study_page
from normcontrol.lab.report.page import Page, Run
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.training.config import Config

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")  # the font has not all of them

NAMES = [
    "<!--<script>",
    "</script><b>bold</b>",
    "\"'`&amp;&<>",
    "__proto__",
    "_underscore $x^{ \\u003c \\n",
    "日本 ü 😀 \u202e\u2028",
    "\x00\x1b[31m\n\udcff",
    "</title></style></textarea>-->",
    "a_name_of_" + "many_words_" * 20,
]
SHOWN = {
    "日本 ü 😀 \u202e\u2028": r"日本 ü 😀 \u202e\u2028",
    "\x00\x1b[31m\n\udcff": r"\x00\x1b[31m\n\udcff",
}
"""How names with characters that cannot be shown are shown. All others are shown as they are."""

SEED = 2**63 + 1  # a number that a script cannot represent


def arms(scale, done):
    base = Config().with_(steps=1000)
    return [
        cell
        for i, name in enumerate(NAMES)
        for cell in grid(name, base.with_(lr=1e-3 * (i + 1)), seeds=[SEED, SEED + 1])
    ]


def outcome(cell):
    return record(cell, 3.0 + 100 * cell.config.optim.lr + (cell.seed - SEED), points=21)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    return study_page.write(FakeLedger(Study(NAMES[0], arms, NAMES[1], NAMES[0]), outcome), out)


def test_every_name_is_shown_as_it_is(browser, page):
    with browser.open(page) as opened:
        assert opened.said == []
        shown = opened.page
        assert shown.locator("b").count() == 0
        assert shown.locator("script").count() == 2
        assert shown.locator("canvas").count() == 4
        names = [SHOWN.get(name, name) for name in NAMES]
        assert shown.locator("#legend button").all_text_contents() == names
        cells = shown.locator("#runs tbody td:nth-child(1)").all_text_contents()
        assert list(dict.fromkeys(cells)) == names
        assert shown.title().startswith(NAMES[0])
        shown.locator('button[data-run="1"]').click()
        assert shown.locator("#config h2").text_content() == f"{NAMES[0]} seed={SEED + 1}"
        assert f'"init_seed": "{SEED + 1}"' in shown.locator("#config pre").text_content()


def test_a_long_name_is_broken_and_a_phone_needs_no_sideways_scroll(browser, page):
    with browser.open(page, 390, 844) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_runs_are_compared_with_the_baseline_of_their_own_seed(browser, page):
    """Both seeds are the same number for a script. The losses of the two differ by one."""
    with browser.open(page) as opened:
        last = "panels[2].lines.map(line => line.y[line.y.length - 1])"
        for i, difference in enumerate(opened.page.evaluate(last)):
            assert difference == pytest.approx(0.1 * (i // 2), abs=1e-5)


def test_numbers_that_are_not_finite_and_names_of_downloads_do_not_break_the_page(
    browser, tmp_path
):
    curves = {"val_loss": ([0, 1], [math.nan, math.inf])}
    run = Run("arm", "", 0, {"ratio": math.inf, "lr": math.nan}, curves, {"val_loss": math.nan})
    names = ['"><script>x()</script>.png', "a'b c&amp;.pdf"]
    page = Page("Title", [], [run], downloads=dict.fromkeys(names, b"x")).write(tmp_path / "p.html")
    with browser.open(page) as opened:
        assert opened.said == []
        links = opened.page.locator("a[download]")
        assert links.all_text_contents() == names
        assert [link.get_attribute("download") for link in links.all()] == names
        opened.page.locator('button[data-run="0"]').click()
        assert '"ratio": "inf"' in opened.page.locator("#config pre").text_content()


def test_the_figures_have_every_name(page):
    from matplotlib.figure import Figure

    from normcontrol.lab.report import panels

    assert (page.parent / "figures.png").read_bytes().startswith(b"\x89PNG")
    drawn = []
    original = Figure.legend

    def legend(self, *args, **options):
        drawn.append(original(self, *args, **options))
        return drawn[-1]

    measured = {key: {0: 1.0} for key in panels.MEASURED}
    curves = [panels.Curve(name, {0: measured}, None) for name in NAMES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "legend", legend)
        panels.draw(curves, page.parent / "other.png")
    texts = [re.sub(r"\s", "", text.get_text()) for text in drawn[0].get_texts()]
    assert texts == [re.sub(r"\s", "", SHOWN.get(name, name)) for name in NAMES]
