"""NormControl around every optimizer of torch, transformers, schedulefree, torchao and
pytorch_optimizer that can be built: it works, or it is refused with a sentence. docs/optimizers.md
has the table."""

import io
import warnings
from pathlib import Path

import pytest
import torch
from optimizer_table import PACKAGES, REFUSED, STILL, cases, table
from small import SmallModel, loss_at, matrices, total_norm

from normcontrol import NormControl, linear

every_package = pytest.mark.parametrize(
    ("package", "quick"),
    [
        *((package, package == "pytorch_optimizer") for package in PACKAGES),
        pytest.param("pytorch_optimizer", False, marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def _quietly_in_eager_mode():
    """torchao compiles its own step, which takes a minute and is not needed for these tests."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*stores weights in its state")
        yield


def failures(package, quick, check):
    """What a check says about the optimizers of a package that are not refused: by name, and
    nothing about those that pass."""
    pytest.importorskip(PACKAGES[package])
    found = {}
    for case in cases(package, quick):
        if case.name not in REFUSED:
            try:
                said = check(case)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                found[case.full_name] = said
    return found


def trained(case, steps, model=None, opt=None, start=0, settings=None, **given):
    model = model or SmallModel()
    if opt is None:
        opt = case.make(model, **given)
        opt = opt if settings is None else NormControl(opt, **settings)
    for t in range(start, steps):
        case.step(model, opt, t)
    return model, opt


def controlled(case, model):
    return [model.embed.weight] if case.name == "SparseAdam" else matrices(model)


def equal(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@every_package
def test_at_rate_zero_it_makes_the_steps_of_the_optimizer(package, quick):
    def check(case):
        bare, _ = trained(case, 6)
        with_control, _ = trained(case, 6, settings={"ratio": 2.0, "rate": 0.0})
        if equal(bare, SmallModel()) and case.name not in ("AdaShift", "SaRA"):  # they start later
            return "moves no weights"
        return not equal(bare, with_control) and "differs"

    assert failures(package, quick, check) == {}


@every_package
def test_the_first_step_is_the_optimizers_times_a_factor_that_reaches_the_target(package, quick):
    def check(case):
        bare, _ = trained(case, 1)
        scaled, _ = trained(case, 1, settings={"ratio": 1.2, "rate": 1.0, "scope": "tensor"})
        for p, q, first in zip(
            *(controlled(case, model) for model in (bare, scaled, SmallModel())), strict=True
        ):
            factor = 1.2 * total_norm([first]) / total_norm([p])
            if not torch.allclose(q, factor * p, rtol=1e-5, atol=1e-7):
                return "is not the bare step times a factor"

    assert failures(package, quick, check) == {}


@every_package
def test_no_step_undoes_the_control(package, quick):
    """With a learning rate of nearly zero the norm obeys the law of control alone: norm' = (1 - k)
    norm + k target. What the optimizer does to the norm without control is taken into account."""

    def check(case):
        given = STILL.get(case.name, {"lr": 1e-10})
        (model, opt), (twin, bare) = (
            trained(case, 0, settings=settings, **given)
            for settings in ({"ratio": 2.0, "rate": 0.1, "scope": "tensor"}, None)
        )
        first = [total_norm([p]) for p in controlled(case, SmallModel())]
        expected, last = list(first), list(first)
        for t in range(12):
            case.step(model, opt, t)
            case.step(twin, bare, t)
            now = [total_norm([p]) for p in controlled(case, twin)]
            moved = [e * n / m for e, n, m in zip(expected, now, last, strict=True)]
            expected = [0.9 * m + 0.1 * 2.0 * f for m, f in zip(moved, first, strict=True)]
            last = now
        found = [total_norm([p]) for p in controlled(case, model)]
        return found != pytest.approx(expected, rel=0.02) and f"{found}, not {expected}"

    assert failures(package, quick, check) == {}


@every_package
def test_training_follows_the_target_and_resumes_in_the_same_bits(package, quick):
    settings = {"ratio": linear(1.0, 1.5, steps=8), "rate": 1.0, "scope": "tensor"}

    def check(case):
        whole, _ = trained(case, 10, settings=settings)
        half, opt = trained(case, 5, settings=settings)
        file = io.BytesIO()
        torch.save({"model": half.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        model = SmallModel(seed=1)
        model.load_state_dict(saved["model"])
        opt = NormControl(case.make(model), scope="tensor")
        opt.load_state_dict(saved["opt"])
        trained(case, 10, model=model, opt=opt, start=5)
        for p, first in zip(controlled(case, whole), controlled(case, SmallModel()), strict=True):
            if total_norm([p]) != pytest.approx(1.5 * total_norm([first]), rel=1e-6):
                return "is not on target"
        return not equal(whole, model) and "resumes differently"

    assert failures(package, quick, check) == {}


@every_package
def test_an_optimizer_that_undoes_the_control_is_refused(package, quick):
    pytest.importorskip(PACKAGES[package])
    for case in cases(package, quick):
        if case.name in REFUSED:
            optimizer = case.make(SmallModel())
            with pytest.raises((ValueError, TypeError), match=REFUSED[case.name]):
                NormControl(optimizer)


def test_adafactor_chooses_its_own_learning_rate():
    """Its defaults: lr=None, and ``relative_step``, which is a setting of control too."""
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    models = [SmallModel(), SmallModel()]
    bare, inner = (adafactor(model.parameters()) for model in models)
    opt = NormControl(inner, ratio=2.0, rate=0.0)
    for t in range(5):
        for model, o in zip(models, (bare, opt), strict=True):
            o.zero_grad()
            loss_at(model, t).backward()
            o.step()
    assert equal(*models)
    assert not equal(models[0], SmallModel())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_shows_what_was_tested(package):
    """It is written by ``python tests/optimizer_table.py``, with the versions of the constraints."""
    pytest.importorskip(PACKAGES[package])
    page = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text()
    head, rest = table(package).split("\n", 1)
    if head not in page:
        pytest.skip(f"the page is about another version of {package}")
    assert rest in page
