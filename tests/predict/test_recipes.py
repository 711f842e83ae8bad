"""Tests of conversions between methods: the quantity that a recipe makes equal is equal in the
predictions and, for AdamWN and AdamC, in a training run."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small import SmallModel
from torch import nn
from torch.nn import functional as F

from normcontrol import AdamWN, NormControl, NormTrace, linear, lr_times, predict, recipes, trace
from normcontrol.groups.classes import TensorClass, classes_of

CLASSES = [
    TensorClass("embedding", 2000, 0.02, hidden=False),
    TensorClass("up", 5000, 0.02),
    TensorClass("down", 5000, 0.004),
]
STEPS = 4000


def lr(t: int) -> float:
    return 2e-3 * min(t / 200, 0.55 + 0.45 * math.cos(math.pi * t / STEPS))


LRS = [lr(t) for t in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def plan():
    return predict.adamw(CLASSES, LRS, 0.3, constants=0.9)


def updates(prediction, classes=None):
    """lr divided by the rms before every step, over some classes together, from the squares of the
    prediction."""
    chosen = [c for c in prediction.classes if classes is None or c.weights.name in classes]
    count = sum(c.weights.count for c in chosen)
    return [
        x / math.sqrt(sum(c.weights.count * float(c.squares[t]) for c in chosen) / count)
        for t, x in enumerate(LRS)
    ]


def test_adamwn_with_equal_norm_or_equal_updates(plan):
    norm, update = recipes.adamwn(plan), recipes.adamwn(plan, equal="update")
    assert norm.settings["ratio"] == linear(1.0, plan.ratio, steps=200)
    assert "the joint norm at the end" in norm.equates
    curve = update.settings["ratio"]
    assert isinstance(curve, trace)
    assert [curve(t) for t in (0, 1000, STEPS)] == pytest.approx(
        [plan.ratios[t] for t in (0, 1000, STEPS)]
    )
    assert "size of every update" in update.equates
    AdamWN([nn.Parameter(torch.ones(2, 2))], lr=1e-3, **norm.settings)  # accepts the settings


def test_adamc_with_equal_norm_ends_at_the_same_norm(plan):
    decay = recipes.adamc(plan).settings["weight_decay"]
    assert predict.adamc(CLASSES, LRS, decay, constants=0.9).ratio == pytest.approx(
        plan.ratio, rel=1e-6
    )
    assert decay > 0.3 * 1.3  # since it decays less towards the end


def test_adamc_with_equal_updates_has_the_same_mean_square_of_them(plan):
    recipe = recipes.adamc(plan, equal="update")
    other = predict.adamc(CLASSES, LRS, recipe.settings["weight_decay"], constants=0.9)
    ours, theirs = (math.sqrt(sum(u * u for u in updates(x))) for x in (other, plan))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert "root mean square over the run" in recipe.equates


def test_recipes_use_a_c_that_depends_on_the_learning_rate():
    constants = {c.name: predict.Constant(0.9, 0.5, 1.5, exponent=0.85, lr=5e-3) for c in CLASSES}
    plan = predict.adamw(CLASSES, LRS, 0.3, constants=constants)
    assert plan.ratio != pytest.approx(
        predict.adamw(CLASSES, LRS, 0.3, constants=0.9).ratio, rel=0.05
    )
    norm, update = (
        predict.adamc(
            CLASSES, LRS, recipes.adamc(plan, equal).settings["weight_decay"], constants=constants
        )
        for equal in ("norm", "update")
    )
    assert norm.ratio == pytest.approx(plan.ratio, rel=1e-6)
    ours, theirs = (math.sqrt(sum(u * u for u in updates(x))) for x in (update, plan))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_adamh_with_equal_updates_has_the_relative_updates_of_the_hidden_matrices(plan):
    recipe = recipes.adamh(plan, beta1=0.9)
    wanted = [math.sqrt(0.1 / 1.9) * u for u in updates(plan, ("up", "down"))]
    given = recipe.settings["lr"]
    assert [given(t) for t in (1, 2000, STEPS)] == pytest.approx(
        [wanted[t - 1] for t in (1, 2000, STEPS)], rel=0.01
    )
    assert set(recipe.settings) == {"lr"}
    scaled = recipes.adamh(plan, equal="norm").settings["init_scale"]
    start, end = (
        math.sqrt(sum(c.weights.count * x(c) ** 2 for c in plan.classes[1:]))
        for x in (lambda c: c.weights.rms, lambda c: c.rms)
    )
    assert scaled == pytest.approx(end / start)


def test_at_equilibrium_the_learning_rate_of_adamh_is_that_of_kosson():
    settled = predict.adamw([TensorClass("a", 1, 0.05)], 1e-3, 0.2, steps=30_000)
    given = recipes.adamh(settled).settings["lr"]
    assert given(30_000) == pytest.approx(math.sqrt(2 * 1e-3 * 0.2 * 0.1 / 1.9), rel=1e-3)


def test_updates_of_adam_on_noise_have_the_stated_size():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(60, 60))
    adam = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.999))
    for _ in range(200):
        weight.grad = torch.randn(60, 60, generator=generator)
        before = weight.detach().clone()
        adam.step()
    assert (weight.detach() - before).square().mean().sqrt().item() / 1e-3 == pytest.approx(
        recipes.update_size(0.9), rel=0.05
    )


def test_converting_back_gives_the_original_decay(plan):
    same = {"steps": STEPS, "constants": 0.9}
    from_adamwn = recipes.adamw(CLASSES, LRS, ratio=recipes.adamwn(plan).settings["ratio"], **same)
    assert from_adamwn.settings["weight_decay"] == pytest.approx(0.3, rel=1e-6)
    from_adamc = recipes.adamw(
        CLASSES, LRS, adamc_decay=recipes.adamc(plan).settings["weight_decay"], **same
    )
    assert from_adamc.settings["weight_decay"] == pytest.approx(0.3, rel=1e-6)
    hidden = predict.adamw(CLASSES[1:], LRS, 0.3, constants=0.9)
    at_end = recipes.adamh(hidden).settings["lr"](STEPS)
    peak = at_end * max(LRS) / LRS[-1]  # of a schedule with the shape of AdamW's
    back = recipes.adamw(CLASSES, LRS, adamh_lr=peak, **same)
    assert back.settings["weight_decay"] == pytest.approx(0.3, rel=0.01)
    assert "for the hidden matrices together" in back.equates


@pytest.mark.parametrize("ratio", [lambda step: 1.0 + step / 3000, "linear(1, 2, steps=3000)"])
def test_a_ratio_may_be_given_as_for_adamwn(ratio):
    same = {"steps": 3000, "constants": 1.0}
    as_number = recipes.adamw(CLASSES, 1e-3, ratio=2.0, **same)
    assert recipes.adamw(CLASSES, 1e-3, ratio=ratio, **same) == as_number


@pytest.mark.parametrize("convert", [recipes.adamwn, recipes.adamc, recipes.adamh])
def test_a_model_in_place_of_a_prediction_is_refused(convert):
    sentence = (
        r"A recipe converts a prediction, but got a SmallModel. Give what predict.adamw\(.*\)"
    )
    with pytest.raises(TypeError, match=sentence):
        convert(SmallModel())


def test_a_recipe_has_the_doubts_of_its_prediction():
    with pytest.warns(UserWarning, match="tied to the head"):
        short = predict.adamw(SmallModel(), 1e-2, 0.1, steps=100)
    assert all(
        recipes_of(short).doubts == short.doubts
        for recipes_of in (recipes.adamwn, recipes.adamc, recipes.adamh)
    )
    assert "DOUBTFUL" in str(recipes.adamwn(short))
    with pytest.warns(UserWarning, match="tied to the head"):
        back = recipes.adamw(SmallModel(), 1e-2, steps=100, ratio=1.02)
    assert "embed.weight is an embedding tied" in back.doubts[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda plan: recipes.adamwn(plan, equal="loss"),
            r"equal='loss' is not known. Give 'norm' \(the final norm\) or 'update'",
        ),
        (
            lambda plan: recipes.adamw(CLASSES, LRS),
            r"0 of ratio=, adamc_decay= and adamh_lr= were given",
        ),
        (
            lambda plan: recipes.adamw(CLASSES, LRS, ratio=2.0, adamh_lr=0.1),
            r"2 of ratio=, adamc_decay= and adamh_lr= were given",
        ),
        (lambda plan: recipes.adamw(CLASSES, LRS, ratio=50.0), r"No decay gives a ratio of 50"),
        (
            lambda plan: recipes.adamw(CLASSES, LRS, adamh_lr=0.0),
            r"adamh_lr=0.0: it is the relative size of an update",
        ),
        (lambda plan: recipes.adamh(plan, beta1=1.0), r"beta1=1.0: it must be in \[0, 1\)"),
        (
            lambda plan: recipes.adamh(predict.adamw(CLASSES[:1], LRS, 0.3)),
            r"no hidden matrices, which AdamH would control",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(plan, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(plan)


# Training runs of a small language model with normalised layers


TEXT = torch.tensor(
    list(
        "".join(
            f"the square of {i} is {i * i}, and its cube {i**3}\n" for i in range(4000)
        ).encode()
    )
)
PEAK, LENGTH = 5e-3, 500


class Net(nn.Module):
    """Predicts the next byte from the last four: three normalised layers, whose norms are compared,
    and a head that is not regularised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 16).requires_grad_(False)
        self.hidden = nn.ModuleList(
            [
                nn.Linear(64, 32, bias=False),
                nn.Linear(32, 32, bias=False),
                nn.Linear(32, 32, bias=False),
            ]
        )
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, x):
        x = self.embed(x).flatten(1)
        for layer in self.hidden:
            x = F.gelu(F.layer_norm(layer(x), (32,)))
        return self.head(x)


@dataclass(frozen=True)
class adamc_rate(lr_times):
    """The rate of AdamC by its definition, ``factor * lr_t^2 / max(lr)``."""

    def at(self, step: Any, group: dict[str, Any]) -> Any:
        return self.factor * group["lr"] ** 2 / PEAK


def rate_at(t: int) -> float:
    return PEAK * min(1, t / 20) * (0.55 + 0.45 * math.cos(math.pi * t / LENGTH))


def learn(make):
    """Train, and return the trace of every 20th step, and the effective decay of every step if the
    norm is controlled."""
    model, decays = Net(), []
    opt = make(model)
    norms = NormTrace(opt, every=20, angles=True)
    for t in range(1, LENGTH + 1):
        for group in opt.param_groups:
            group["lr"] = rate_at(t)
        at = torch.randint(len(TEXT) - 5, (8,), generator=torch.Generator().manual_seed(t))
        x = torch.stack([TEXT[i : i + 5] for i in at])
        opt.zero_grad()
        F.cross_entropy(model(x[:, :4]), x[:, 4]).backward()
        opt.step()
        if isinstance(opt, NormControl):
            decays.append(opt.norms()["global"].decay(rate_at(t)).item())
    return norms, decays


def groups(model, decay, **control):
    hidden, head = list(model.hidden.named_parameters()), list(model.head.named_parameters())
    return [
        {"params": hidden, "weight_decay": decay, **control},
        {"params": head, "weight_decay": 0.0},
    ]


def test_the_learning_rate_of_adamh_is_the_angle_of_the_steps_of_adamw():
    weights = classes_of(Net().hidden)
    adamw, _ = learn(lambda m: torch.optim.AdamW(groups(m, 0.1), betas=(0.9, 0.95)))
    plan = predict.adamw(weights, rate_at, 0.1, steps=LENGTH, constants=predict.calibrate(adamw))
    lrs = [recipes.adamh(plan).settings["lr"](t) for t in adamw.steps[1:]]
    assert lrs[0] > 8 * lrs[-1]  # a constant would not do
    quotients = [a / b for a, b in zip(lrs, adamw.angles, strict=True)]
    assert sum(quotients) / len(quotients) == pytest.approx(1.0, abs=0.15)
    assert max(max(quotients), 1 / min(quotients)) < 1.5  # single steps differ by chance


@pytest.mark.slow
def test_adamwn_at_a_constant_ratio_is_adamc_at_the_predicted_decay():
    weights = classes_of(Net().hidden)
    adamw, _ = learn(lambda m: torch.optim.AdamW(groups(m, 0.1), betas=(0.9, 0.95)))
    constants = predict.calibrate(adamw)
    count = sum(c.count for c in weights)
    mean = sum(c.count * constants[c.name].value for c in weights) / count
    square = sum(c.count * c.rms**2 for c in weights) / count
    decay = mean * PEAK / (2 * square)  # lambda_t = C lr_t / (2 rms^2), at the peak
    assert decay == pytest.approx(
        predict.decay_for(weights, 1.0, rate_at, steps=LENGTH, constants=constants, method="AdamC"),
        rel=0.05,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adamwn, decays = learn(
            lambda m: AdamWN(groups(m, 0.1), betas=(0.9, 0.95), ratio=1.0, rate=0.1)
        )

    def adamc_(m):
        base = torch.optim.AdamW(groups(m, 0.0), betas=(0.9, 0.95), weight_decay=0.0)
        base.param_groups[1]["controlled"] = False
        return NormControl(base, ratio=0.0, rate=adamc_rate(decay), order="before")

    adamc, _ = learn(adamc_)
    free, _ = learn(lambda m: torch.optim.AdamW(groups(m, 1e-12), betas=(0.9, 0.95)))
    assert adamc.ratios == pytest.approx(adamwn.ratios, rel=0.025)  # the same trajectory
    assert free.ratios[-1] > 1.1  # without regularisation the weights grow
    # The effective decay of AdamWN is that of AdamC: lambda_t * lr_t is proportional to lr_t^2, while
    # the steps are large.
    for steps in (range(50, 200), range(200, 350)):
        own = sum(decays[t] * rate_at(t + 1) for t in steps) / sum(
            rate_at(t + 1) ** 2 / PEAK for t in steps
        )
        assert own == pytest.approx(decay, rel=0.2)
