"""The report page in a real browser: it loads in silence, answers to the mouse, and fits a
phone."""

from __future__ import annotations

import math
import re

import pytest
from browser import CHROMIUM, Browser
from fakes import FakeLedger, record

from normcontrol.lab.cli.main import main
from normcontrol.lab.report import study as study_report
from normcontrol.lab.report.page import Page, Run
from normcontrol.lab.studies import STUDIES
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.training.config import Config

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, which is not installed here"
)


def three_arms(scale, done):
    base = Config().with_(steps=1000)
    arms = grid("AdamW", base.with_(optimizer="AdamW"), lr=[1e-3, 2e-3], seeds=[0, 1])
    arms += grid("AdamWN", base, ratio=[1.5, 2.0], seeds=[0, 1]) + grid(
        "AdamC </script><b>", base.with_(optimizer="AdamC"), seeds=[0, 1]
    )
    return arms


def outcome(cell):
    if cell.label == "AdamWN ratio=1.5 seed=1":
        return record(cell, math.inf)
    return record(
        cell,
        3 + 0.1 * len(cell.arm) / 7 + 100 * cell.config.optim.lr + 0.01 * cell.seed,
        owt=4.0,
        points=21,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    return study_report.write(FakeLedger(Study("three", three_arms, "About it."), outcome), out)


def test_the_page_and_its_figures_are_files_of_their_own(page):
    text = page.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://""", text)
    assert (page.parent / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert (page.parent / "figures.pdf").read_bytes().startswith(b"%PDF")
    assert 'download="figures.pdf"' in text


PIXELS = "Array.from(document.querySelectorAll('canvas')).map(c => c.toDataURL())"
ROW = "Array.from(document.querySelectorAll('#runs tbody tr')).map(r => r.cells[%d].textContent)"


@needs_browser
def test_it_loads_without_a_word_and_without_a_request(page):
    with Browser() as browser:
        browser.open(page)
        assert browser.said == []
        assert browser.js("document.querySelectorAll('canvas').length") == 4
        assert "three, tiny" in browser.js("document.body.innerText")
        assert (
            browser.js("document.querySelectorAll('b').length") == 0
        )  # a name is text, whatever is in it


@needs_browser
def test_toggling_an_arm_changes_every_panel_and_back(page):
    with Browser() as browser:
        browser.open(page)
        before = browser.js(PIXELS)
        browser.js("document.querySelectorAll('#legend button')[1].click()")
        assert (
            browser.js(
                "document.querySelectorAll('#legend button')[1].getAttribute('aria-pressed')"
            )
            == "false"
        )
        without = browser.js(PIXELS)
        assert all(a != b for a, b in zip(before, without, strict=True))
        browser.js("document.querySelectorAll('#legend button')[1].click()")
        assert browser.js(PIXELS) == before
        browser.js("document.querySelector('#every').click()")
        assert browser.js(PIXELS) != before
        assert browser.said == []


@needs_browser
def test_pointing_at_a_curve_names_it_and_dragging_zooms(page):
    with Browser(1280, 1600) as browser:
        browser.open(page)
        box = browser.js(
            "(b => [b.left, b.top, b.width, "
            "b.height])(document.querySelectorAll('canvas')[1].getBoundingClientRect())"
        )
        browser.js("panels[1].canvas.scrollIntoView(); 1")
        box = browser.js(
            "(b => [b.left, b.top, b.width, b.height])(panels[1].canvas.getBoundingClientRect())"
        )
        x, y = browser.js(
            "(l => [panels[1].px(l.x[20]), panels[1].py(l.y[20])])(panels[1].lines[0])"
        )
        browser.mouse("mouseMoved", box[0] + x - 1, box[1] + y - 1)
        assert re.search(
            r"AdamW.* seed=\d: [\d.]+ at step 1000", browser.js("panels[1].tip.textContent")
        )
        before = browser.js("panels[1].r")
        browser.mouse("mousePressed", box[0] + 200, box[1] + 60, 1, 1)
        browser.mouse("mouseMoved", box[0] + 300, box[1] + 160, 1)
        browser.mouse("mouseReleased", box[0] + 300, box[1] + 160, 0, 1)
        after = browser.js("panels[1].r")
        assert before["x0"] < after["x0"] < after["x1"] < before["x1"]
        assert before["y0"] < after["y0"] < after["y1"] < before["y1"]
        for clicks in (1, 2):
            browser.mouse("mousePressed", box[0] + 200, box[1] + 60, 1, clicks)
            browser.mouse("mouseReleased", box[0] + 200, box[1] + 60, 0, clicks)
        assert browser.js("panels[1].r") == before
        assert browser.said == []


@needs_browser
def test_tables_sort_and_every_config_is_a_click_away(page):
    with Browser() as browser:
        browser.open(page)
        browser.js("document.querySelectorAll('#runs th')[4].click()")
        losses = browser.js(ROW % 4)
        numbers = [float(text) for text in losses if text != "-"]
        assert numbers == sorted(numbers)
        browser.js("document.querySelectorAll('#runs th')[4].click()")
        assert [float(text) for text in browser.js(ROW % 4) if text != "-"] == numbers[::-1]
        browser.js("document.querySelector('button[data-run=\"3\"]').click()")
        assert browser.js("document.querySelector('#config').open")
        text = browser.js("document.querySelector('#config pre').textContent")
        assert '"lr": 0.002' in text
        assert '"init_seed": 1' in text
        assert "diverged" in browser.js(ROW % 3)


@needs_browser
def test_dark_and_light_follow_the_reader_and_a_phone_needs_no_sideways_scroll(page):
    colours = []
    for dark in (False, True):
        with Browser(390, 844, dark=dark) as browser:
            browser.open(page)
            assert browser.js("document.documentElement.scrollWidth") <= 390
            colours.append(browser.js("getComputedStyle(document.body).backgroundColor"))
            browser.js("document.querySelector('#theme').click()")
            colours.append(browser.js("getComputedStyle(document.body).backgroundColor"))
            assert browser.said == []
    light, dark_by_hand, dark, light_by_hand = colours
    assert (light, dark) == (light_by_hand, dark_by_hand)
    assert light != dark


@needs_browser
def test_a_hundred_long_runs_fit_in_eight_megabytes_and_are_drawn_in_two_seconds(tmp_path):
    page = big(100, 2000).write(tmp_path / "big.html")
    assert page.stat().st_size < 8e6
    with Browser() as browser:
        browser.open(page)
        assert browser.said == []
        assert int(browser.js("document.body.dataset.drawn")) < 2000


def big(runs: int, points: int) -> Page:
    """Runs with a point at every step, in all curves."""
    steps = list(range(points))
    made = []
    for i in range(runs):
        values = [4 + math.exp(-s / 200) + 0.01 * math.sin(s * (i + 1)) for s in steps]
        made.append(
            Run(
                f"arm {i % 8}",
                f"trial {i}",
                0,
                Config().flat(),
                dict.fromkeys(("loss", "val_loss", "ratio"), (steps, values)),
                {},
            )
        )
    return Page("Large", [], made)


def test_a_study_without_runs_has_a_page_and_figure_1_its_schedules(tmp_path):
    page = study_report.write(FakeLedger(STUDIES["figure1"], lambda cell: None), tmp_path)
    assert "Nothing was run yet." in page.read_text()
    assert (tmp_path / "figures.png").exists()


def test_the_commands_verdict_and_report(config, tmp_path, capsys):
    (tmp_path / "s.py").write_text(
        "from normcontrol.lab.training.config import Config\nfrom normcontrol.lab.study.cells "
        "import grid\nfrom pathlib import Path\n"
        "def study(scale, done):\n"
        f"    base = Config.load(Path({str(tmp_path / 'c.json')!r}))\n"
        "    arms = grid('AdamW', base, lr=[1e-2], seeds=[0, 1])\n"
        "    return arms + grid('AdamWN', base.with_(optimizer='AdamWN'), lr=[1e-2], seeds=[0, "
        "1])\n"
    )
    config.save(tmp_path / "c.json")
    out = str(tmp_path / "out")
    assert main(["study", str(tmp_path / "s.py"), "--out", out, "--device", "cpu"]) == 0
    assert main(["verdict", out]) == 0
    said = capsys.readouterr().out
    assert "n = 2 paired seeds" in said
    assert "minus baseline" in said
    assert main(["report", out]) == 0
    assert f"The page is {out}/index.html." in capsys.readouterr().out
    assert main(["verdict", str(tmp_path / "nowhere")]) == 1
    assert "holds no study: there is no study.json in it" in capsys.readouterr().err
