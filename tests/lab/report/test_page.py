"""The page of a study in a real browser: it loads without errors, reacts to the mouse, and fits the
screen of a phone."""

from __future__ import annotations

import math
import re

import pytest
from fakes import FakeLedger, big, record

from normcontrol.lab.report import study_page
from normcontrol.lab.studies import STUDIES, challenge
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.training.config import Config


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
    return study_page.write(FakeLedger(Study("three", three_arms, "About it."), outcome), out)


def test_the_page_and_its_figures_are_files_of_their_own(page):
    text = page.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://""", text)
    assert (page.parent / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert (page.parent / "figures.pdf").read_bytes().startswith(b"%PDF")
    assert 'download="figures.pdf"' in text


PIXELS = "Array.from(document.querySelectorAll('canvas')).map(c => c.toDataURL())"
POINT = "(l => [panels[1].px(l.x[20]), panels[1].py(l.y[20])])(panels[1].lines[0])"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def test_it_loads_without_errors_and_without_requests(browser, page):
    with browser.open(page) as opened:
        assert opened.said == []
        assert opened.page.locator("canvas").count() == 4
        assert "three, tiny" in opened.page.locator("body").inner_text()
        assert opened.page.locator("b").count() == 0  # a name is text, whatever is in it


def test_toggling_an_arm_changes_every_panel_and_back(browser, page):
    with browser.open(page) as opened:
        before = opened.page.evaluate(PIXELS)
        arm = opened.page.locator("#legend button").nth(1)
        arm.click()
        assert arm.get_attribute("aria-pressed") == "false"
        without = opened.page.evaluate(PIXELS)
        assert all(a != b for a, b in zip(before, without, strict=True))
        arm.click()
        assert opened.page.evaluate(PIXELS) == before
        opened.page.locator("#every").click()
        assert opened.page.evaluate(PIXELS) != before
        assert opened.said == []


def test_the_norms_are_shown_as_gains_on_request(browser, page):
    with browser.open(page) as opened:
        last = "(l => l.y[l.y.length - 1])(panels[3].lines[0])"
        before, ratio = opened.page.evaluate(PIXELS), opened.page.evaluate(last)
        button, caption = opened.page.locator("#gains"), opened.page.locator("figcaption").nth(3)
        button.click()
        assert opened.page.evaluate(last) == pytest.approx(0.5 * ratio)
        assert caption.text_content().startswith("gain")
        now = opened.page.evaluate(PIXELS)
        assert now[3] != before[3]
        assert now[:3] == before[:3]
        button.click()
        assert opened.page.evaluate(PIXELS) == before
        assert opened.said == []


def test_pointing_at_a_curve_names_it_and_dragging_zooms(browser, page):
    with browser.open(page, 1280, 1600) as opened:
        shown, canvas = opened.page, opened.page.locator("canvas").nth(1)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = shown.evaluate(POINT)
        shown.mouse.move(box["x"] + x - 1, box["y"] + y - 1)
        tip = shown.locator(".tip").nth(1).text_content()
        assert re.search(r"AdamW.* seed=\d: [\d.]+ at step 1000", tip)
        before = shown.evaluate("panels[1].r")
        shown.mouse.move(box["x"] + 200, box["y"] + 60)
        shown.mouse.down()
        shown.mouse.move(box["x"] + 300, box["y"] + 160)
        shown.mouse.up()
        after = shown.evaluate("panels[1].r")
        assert before["x0"] < after["x0"] < after["x1"] < before["x1"]
        assert before["y0"] < after["y0"] < after["y1"] < before["y1"]
        canvas.dblclick(position={"x": 200, "y": 60})
        assert shown.evaluate("panels[1].r") == before
        assert opened.said == []


LABELS = """() => {
    const found = [], fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const width = this.measureText(text).width;
        found.push([this.textAlign, text, this.textAlign === "right" ? x - width : x - width / 2]);
        fill.call(this, text, x, y);
    };
    panels[2].zoom = null; draw(panels[2]);
    panels[1].zoom = { x0: 999990, x1: 999996, y0: 3.00004, y1: 3.00016 }; draw(panels[1]);
    return found;
}"""
"""Draws a panel of small differences and one that is zoomed in, and returns the texts with their
alignment (those of the vertical axis are aligned right) and their left ends."""


def test_the_labels_of_an_axis_are_whole_and_differ_from_each_other(browser, tmp_path):
    def cells(scale, done):
        adamw = Config().with_(optimizer="AdamW", steps=1_000_000)
        return grid("AdamW", adamw) + grid("AdamWN", Config().with_(steps=1_000_000))

    def of(cell):
        return record(cell, 3.0 - 0.0001 * (cell.arm == "AdamWN"))

    with browser.open(study_page.write(FakeLedger(Study("s", cells), of), tmp_path)) as opened:
        labels = opened.page.evaluate(LABELS)
        assert opened.said == []
    heights = [text for align, text, _ in labels if align == "right"]
    across = [text for align, text, _ in labels if align == "center"]
    small, zoomed = heights[: heights.index("0") + 1], heights[heights.index("0") + 1 :]
    assert small == ["-0.0001", "-0.00008", "-0.00006", "-0.00004", "-0.00002", "0"]
    assert zoomed == ["3.00005", "3.0001", "3.00015"]
    assert "999.991k" in across
    assert min(left for _, _, left in labels) >= 0


@pytest.mark.parametrize("seeds", [3, 4])
def test_of_many_seeds_the_mean_is_drawn(browser, tmp_path, seeds):
    def cells(scale, done):
        adamw = Config().with_(optimizer="AdamW")
        return grid("AdamW", adamw, seeds=range(seeds)) + grid("AdamWN", Config(), seeds=[0])

    def of(cell):
        return record(cell, 3 + 0.1 * cell.seed, ratio=2.0 + 0.1 * cell.seed)

    with browser.open(study_page.write(FakeLedger(Study("s", cells), of), tmp_path)) as opened:
        last = "(panel => means(panel).AdamW && means(panel).AdamW.y.at(-1))"
        drawn = [opened.page.evaluate(f"{last}(panels[{i}])") for i in (1, 3)]
        note = "Thick: the mean of an arm's seeds." in opened.page.locator("body").inner_text()
        assert opened.page.evaluate("Object.keys(means(panels[1]))") == ["AdamW"] * (seeds > 3)
        opened.page.locator("#gains").click()
        gain = opened.page.evaluate(f"{last}(panels[3])")
        assert opened.said == []
    if seeds == 3:
        assert (*drawn, gain, note) == (None, None, None, False)
    else:
        assert (*drawn, gain) == pytest.approx((3.15, 2.15, 0.5 * 2.15))
        assert note


def test_a_setting_with_another_value_for_each_seed_is_given_as_a_range(tmp_path):
    ratios = (2.0, 2.5)
    settings = challenge.settings_of(Config(), ("adamwn:lr=0.01",), 2)
    ledger = FakeLedger(
        challenge.study(settings), lambda cell: record(cell, 3.0, ratio=ratios[cell.seed])
    )
    table = next(t for t in study_page.tables(judge(ledger)) if t.title == "What each arm changes")
    assert table.rows[1][1] == "optimizer AdamWN, lr 0.01, ratio 2 to 2.5, by seed"


def test_tables_sort_and_every_config_is_a_click_away(browser, page):
    with browser.open(page) as opened:
        shown = opened.page

        def column(number):
            return shown.locator(f"#runs tbody td:nth-child({number})").all_text_contents()

        loss = shown.locator("#runs th").nth(4)
        loss.click()
        numbers = [float(text) for text in column(5) if text != "-"]
        assert numbers == sorted(numbers)
        loss.click()
        assert [float(text) for text in column(5) if text != "-"] == numbers[::-1]
        shown.locator('button[data-run="3"]').click()
        assert shown.locator("#config").is_visible()
        text = shown.locator("#config pre").text_content()
        assert '"lr": 0.002' in text
        assert '"init_seed": 1' in text
        assert "diverged" in column(4)


def test_dark_and_light_follow_the_reader_and_a_phone_needs_no_sideways_scroll(browser, page):
    colours = []
    for dark in (False, True):
        with browser.open(page, 390, 844, dark=dark) as opened:
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
            colours.append(opened.page.evaluate(BACKGROUND))
            opened.page.locator("#theme").click()
            colours.append(opened.page.evaluate(BACKGROUND))
            assert opened.said == []
    light, dark_by_hand, dark, light_by_hand = colours
    assert (light, dark) == (light_by_hand, dark_by_hand)
    assert light != dark


def test_a_hundred_long_runs_fit_in_eight_megabytes_and_are_drawn_in_two_seconds(browser, tmp_path):
    page = big(100, 2000).write(tmp_path / "big.html")
    assert page.stat().st_size < 8e6
    with browser.open(page) as opened:
        assert opened.said == []
        assert any(opened.seconds_to_draw() < 2 for _ in range(3))  # other programs slow it down


def test_a_study_without_runs_has_a_page_and_figure_1_its_schedules(tmp_path):
    page = study_page.write(FakeLedger(STUDIES["figure1"], lambda cell: None), tmp_path)
    assert "Nothing was run yet." in page.read_text()
    assert (tmp_path / "figures.png").exists()
