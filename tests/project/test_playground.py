"""The playground page: the same numbers as the library, in a real browser, without network."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from normcontrol import AdamWN, linear, predict
from normcontrol.groups.classes import TensorClass
from normcontrol.law import LAWS, Integral, law_of

PAGE = Path(__file__).parents[2] / "docs/playground.html"
SETTINGS = {
    "lr": 2e-3,
    "decay": 0.3,
    "ratio": 1.7,
    "rate": 0.02,
    "law": "proportional",
    "steps": 200,
    "warmup": 50,
    "floor": 0.1,
    "ramp": 80,
    "rms": 0.03,
    "constant": 0.9,
}


@pytest.fixture
def opened(browser):
    with browser.open(PAGE) as opened:
        yield opened


@pytest.fixture(scope="module")
def left_alone(browser):
    """The page for tests that only ask its functions."""
    with browser.open(PAGE) as opened:
        yield opened


def lr_at(step: int, s: dict) -> float:
    """The learning rate of nanoGPT, with another floor."""
    if step < s["warmup"]:
        return s["lr"] * step / s["warmup"]
    done = (step - s["warmup"]) / (s["steps"] - s["warmup"])
    return s["lr"] * (s["floor"] + (1 - s["floor"]) * (1 + math.cos(math.pi * done)) / 2)


def simulated(opened, s: dict) -> dict[str, list[float]]:
    curves = opened.page.evaluate(
        "s => Object.fromEntries(Object.entries(simulate(s)).map(([k, v]) => [k, Array.from(v)]))",
        s,
    )
    return {name: [math.nan if v is None else v for v in values] for name, values in curves.items()}


@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_the_norm_under_adamw_is_that_of_the_prediction(left_alone, decay):
    s = {**SETTINGS, "decay": decay}
    rates = [lr_at(step, s) for step in range(1, s["steps"] + 1)]
    weights = [TensorClass("matrices", 1000, s["rms"])]
    predicted = predict.adamw(weights, rates, decay, constants=s["constant"])
    found = simulated(left_alone, s)["adamw"]
    assert found == pytest.approx(list(predicted.ratios), rel=1e-9)


@pytest.mark.parametrize("law", [*LAWS, "band(0.5)", "integral"])
@pytest.mark.parametrize("ratio", [1.7, 0.6])
def test_the_norm_under_control_is_that_of_the_law_in_python(left_alone, law, ratio):
    s = {**SETTINGS, "law": law, "ratio": ratio, "rate": 1.0 if law == "integral" else 0.02}
    memory = Integral(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    apply = law_of(law) or memory
    target = linear(1.0, ratio, steps=s["ramp"])
    norm, expected = torch.tensor([s["rms"]], dtype=torch.float64), [1.0]
    for step in range(1, s["steps"] + 1):
        norm = (norm**2 + s["constant"] * lr_at(step, s) ** 2).sqrt()
        norm = norm * apply(norm, torch.tensor([target(step) * s["rms"]]).double(), s["rate"]).abs()
        expected.append(norm.item() / s["rms"])
    found = simulated(left_alone, s)
    assert found["control"] == pytest.approx(expected, rel=1e-6)
    assert found["target"] == pytest.approx([target(step) for step in range(s["steps"] + 1)])


def test_the_papers_run_ends_near_the_norm_that_the_paper_measured(opened):
    opened.page.locator("#presets button").first.click()
    assert float(opened.page.locator("#end-adamw").text_content()) == pytest.approx(2.427, abs=2e-3)


def test_it_loads_without_errors_and_without_requests(opened):
    assert opened.said == []
    text = PAGE.read_text()
    assert not re.search(r"""(src|href)=["']|https?://|@import|url\(""", text)
    assert "default-src 'none'" in text
    assert opened.page.locator("path.line").count() == 5


def test_sliders_work_by_keyboard_and_change_curves_numbers_code_and_address(opened):
    page = opened.page
    page.locator("#presets button").first.click()

    def seen():
        curves = page.locator("path.line").evaluate_all(
            "found => found.map(p => p.getAttribute('d'))"
        )
        return curves, page.locator("#end-adamwn").text_content(), page.url

    before = seen()
    slider = page.locator("#ratio")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    after = seen()
    assert before[0][0] != after[0][0]  # the target's curve
    assert before[1:] != after[1:]
    ratio = float(slider.get_attribute("aria-valuetext"))
    assert ratio == pytest.approx(2.4 - 6 * 0.05)
    for name in ("lr", "decay", "rate", "steps"):
        value = page.evaluate("name => state[name]", name)
        page.locator(f"#{name}").press("ArrowRight")
        assert page.evaluate("name => state[name]", name) > value
        page.locator(f"#{name}").press("ArrowLeft")
    assert float(after[1]) == pytest.approx(ratio, rel=0.01)
    page.locator("#law").select_option("upper")
    code = page.locator("#code").text_content()
    model = torch.nn.Linear(4, 4)
    opt = eval(code.splitlines()[1], {"AdamWN": AdamWN, "linear": linear, "model": model})
    control = opt.param_groups[0]["control"]
    assert (control["law"], control["ratio"]) == ("upper", linear(1.0, ratio, steps=2500))
    chart = page.locator("#norms")
    chart.focus()
    page.keyboard.press("Home")
    assert page.locator("#read").text_content().startswith("Step 0: AdamW 1.0000, AdamWN 1.0000")
    assert opened.said == []


def test_a_link_shows_the_same_curves_and_nonsense_in_it_is_ignored(opened):
    page = opened.page
    page.goto(PAGE.resolve().as_uri() + "#lr=0.0005&steps=300&law=nonsense&decay=x&rate=-1&b=2")
    page.reload()
    state = page.evaluate("state")
    assert (state["lr"], state["steps"]) == (0.0005, 300)
    assert (state["law"], state["decay"], state["rate"]) == ("proportional", 0.1, 0.01)
    assert opened.said == []


def test_it_fits_a_phone_and_follows_dark_mode(browser):
    background = "getComputedStyle(document.body).backgroundColor"
    colours = []
    for dark in (False, True):
        with browser.open(PAGE, 375, 812, dark=dark) as opened:
            page = opened.page
            assert page.evaluate("document.documentElement.scrollWidth") <= 375
            page.locator("#rate").scroll_into_view_if_needed()
            chart, slider = (page.locator(i).bounding_box() for i in ("#norms", "#rate"))
            assert 0 <= chart["y"] < slider["y"] < 812  # the chart stays while a slider moves
            colours.append(page.evaluate(background))
            page.locator("#theme").evaluate("button => button.click()")
            colours.append(page.evaluate(background))
            assert opened.said == []
    assert colours == [*colours[:2], *colours[1::-1]]
    assert colours[0] != colours[1]
