"""Every published method against a plain implementation of its definition, written from the
formulas alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from normcontrol import AdamWN, NormControl, methods
from normcontrol.mechanisms.size import Statistic
from normcontrol.methods import METHODS, hidden

LR, BETAS, EPS = 0.02, (0.9, 0.95), 1e-8
SHAPES = ((6, 4), (3, 7))


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * 0.5) for shape in SHAPES
    ]


def gradients(step: int, like: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in like]


class PlainAdam:
    """Adam's direction u, from Kingma and Ba."""

    def __init__(self, like: list[Tensor]) -> None:
        self.m, self.v, self.t = (
            [torch.zeros_like(w) for w in like],
            [torch.zeros_like(w) for w in like],
            0,
        )

    def __call__(self, grads: list[Tensor]) -> list[Tensor]:
        self.t += 1
        found = []
        for i, g in enumerate(grads):
            self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * g
            self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * g * g
            found.append(
                self.m[i]
                / (1 - BETAS[0] ** self.t)
                / ((self.v[i] / (1 - BETAS[1] ** self.t)).sqrt() + EPS)
            )
        return found


def lr_at(step: int) -> float:
    return LR * (0.2 + 0.8 * math.cos(step / 40))


def ours(opt, steps: int, params: list[nn.Parameter], lr=lr_at) -> list[Tensor]:
    for step in range(1, steps + 1):
        for group in opt.param_groups:
            group["lr"] = lr(step)
        for p, g in zip(params, gradients(step, params), strict=True):
            p.grad = g
        opt.step()
    return [p.detach() for p in params]


def close(found: list[Tensor], wanted: list[Tensor], within: float = 1e-6) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= within * b.norm(), ((a - b).norm() / b.norm()).item()


def rows(w: Tensor) -> Tensor:
    return w.norm(dim=1, keepdim=True)


STEPS = 50
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def defined(rule, steps: int = STEPS, direction=PlainAdam) -> list[Tensor]:
    """Weights after steps of ``rule(w, u, lr, i, step)``, which returns a tensor's new value."""
    ws = [w.detach().clone() for w in weights()]
    adam = direction(ws)
    for step in range(1, steps + 1):
        us = adam(gradients(step, ws))
        ws = [rule(w, u, lr_at(step), i, step) for i, (w, u) in enumerate(zip(ws, us, strict=True))]
    return ws


class Plain:
    """SGD's direction: the gradient."""

    def __init__(self, like):
        pass

    def __call__(self, grads):
        return grads


ADAM = {"lr": LR, "betas": BETAS, "eps": EPS}
INITIAL = [w.detach().clone() for w in weights()]


def test_hanson_and_pratt_decay():
    params = weights()
    opt = methods.hanson_pratt(params, lr=LR, weight_decay=0.03)
    close(
        ours(opt, STEPS, params),
        defined(lambda w, u, lr, i, t: (1 - 0.03) * w - lr * u, direction=Plain),
    )


def test_adamw_in_both_conventions():
    params = weights()
    close(
        ours(methods.adamw(params, weight_decay=0.3, **ADAM), STEPS, params),
        defined(lambda w, u, lr, i, t: w - lr * u - lr * 0.3 * w),
    )
    params = weights()
    opt = methods.adamw_decoupled(params, weight_decay=0.01, **ADAM)
    close(ours(opt, STEPS, params), defined(lambda w, u, lr, i, t: w - lr * u - lr / LR * 0.01 * w))


def test_adam_with_l2_regularisation():
    class Coupled(PlainAdam):
        def __call__(self, grads):
            return super().__call__([g + 0.2 * w for g, w in zip(grads, self.ws, strict=True)])

    kept = []

    class WithWeights(Coupled):
        def __init__(self, like):
            super().__init__(like)
            self.ws = like
            kept.append(self)

    def rule(w, u, lr, i, t):
        kept[0].ws = [*kept[0].ws[:i], w - lr * u, *kept[0].ws[i + 1 :]]
        return w - lr * u

    params = weights()
    close(
        ours(methods.adam_l2(params, weight_decay=0.2, **ADAM), STEPS, params),
        defined(rule, direction=WithWeights),
    )


def test_adamc():
    params = weights()
    opt = methods.adamc(params, weight_decay=0.5, lr_max=0.02, **ADAM)
    close(
        ours(opt, STEPS, params),
        defined(lambda w, u, lr, i, t: w - lr * u - 0.5 * lr**2 / 0.02 * w),
    )


def test_adamwn_is_the_joint_norm():
    params = weights()
    found = ours(methods.adamwn(params, ratio=1.5, rate=0.05, **ADAM), STEPS, params)
    ws = [w.clone() for w in INITIAL]
    adam, start = PlainAdam(ws), math.sqrt(sum(float(w.square().sum()) for w in ws))
    for step in range(1, STEPS + 1):
        ws = [w - lr_at(step) * u for w, u in zip(ws, adam(gradients(step, ws)), strict=True)]
        norm = math.sqrt(sum(float(w.square().sum()) for w in ws))
        ws = [w - 0.05 * (1 - 1.5 * start / norm) * w for w in ws]
    close(found, ws)


def test_max_norm():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * (1.2 / rows(w)).clamp(max=1)

    close(
        ours(methods.max_norm(params, lr=LR, norm=1.2), STEPS, params),
        defined(rule, direction=Plain),
    )


def test_min_max_norm():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * ((1 - 0.3) * rows(w) + 0.3 * rows(w).clamp(0.8, 1.1)) / rows(w)

    opt = methods.min_max_norm(params, lr=LR, betas=BETAS, low=0.8, high=1.1, rate=0.3)
    close(ours(opt, STEPS, params), defined(rule))


def test_normalize_and_project():
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        return w * INITIAL[i].norm() / w.norm() if t % 7 == 0 else w

    close(ours(methods.nap(params, n=7, **ADAM), STEPS, params), defined(rule))


def test_lawn():
    params, held = weights(), {}

    def rule(w, u, lr, i, t):
        w = w - lr * u
        if t == 20:
            held[i] = w.norm()
        return w * held[i] / w.norm() if t > 20 else w

    close(ours(methods.lawn(params, switch=20, **ADAM), STEPS, params), defined(rule))


def test_ngpt_and_edm2():
    params = weights()
    close(
        ours(methods.ngpt(params, **ADAM), STEPS, params),
        defined(lambda w, u, lr, i, t: (w - lr * u) / rows(w - lr * u)),
    )
    params = weights()
    columns = defined(lambda w, u, lr, i, t: (w - lr * u) / (w - lr * u).norm(dim=0, keepdim=True))
    close(ours(methods.ngpt(params, scope="col", **ADAM), STEPS, params), columns)
    params = weights()
    unit = defined(lambda w, u, lr, i, t: (w - lr * u) / rows(w - lr * u) * math.sqrt(w.shape[1]))
    close(ours(methods.edm2(params, **ADAM), STEPS, params), unit)


def cpr(kappa_of) -> list[Tensor]:
    """lambda <- max(0, lambda + (R - kappa) / n); theta <- theta (1 - 2 lambda), with no learning
    rate."""
    multiplier = [0.0, 0.0]

    def rule(w, u, lr, i, t):
        w = w - lr * u
        square = float(w.square().sum())
        kappa = kappa_of(i, t, square)
        multiplier[i] = (
            max(0.0, multiplier[i] + (square - kappa) / w.numel()) if math.isfinite(kappa) else 0.0
        )
        return w * (1 - 2 * multiplier[i])

    return defined(rule)


def test_cpr_dependent_on_the_initial_weights():
    params = weights()
    wanted = cpr(lambda i, t, square: 1.1 * float(INITIAL[i].square().sum()))
    close(ours(methods.cpr(params, kappa=1.1, **ADAM), STEPS, params), wanted)


def test_cpr_uniform():
    params = weights()
    opt = methods.cpr_uniform(params, mean_square=0.3, **ADAM)
    close(ours(opt, STEPS, params), cpr(lambda i, t, square: 0.3 * INITIAL[i].numel()))


def test_cpr_with_a_warm_start():
    params, kappa = weights(), {}

    def bound(i, t, square):
        if t == 15:
            kappa[i] = square
        return kappa[i] if t >= 15 else math.inf

    close(ours(methods.cpr_warm_start(params, start=15, **ADAM), STEPS, params), cpr(bound))


def test_cpr_from_the_inflection_point(monkeypatch):
    """Sampled every 4 steps here, or the test would take 600."""
    from normcontrol.mechanisms import start

    monkeypatch.setattr(start, "SAMPLED_EVERY", 4)
    kappa, mean, samples, begun = {}, {}, {0: [], 1: []}, {}

    def bound(i, t, square):
        mean[i] = square if t == 1 else 0.9 * mean[i] + 0.1 * square
        if t % 4 == 0:
            samples[i].append(mean[i])
            s = samples[i]
            if i not in kappa and len(s) >= 3 and (s[-1] - s[-2]) - (s[-2] - s[-3]) < 0:
                kappa[i], begun[i] = square, t
        return kappa[i] if i in kappa and t > begun[i] else math.inf

    params = weights()
    wanted = cpr(bound)
    assert 12 <= min(begun.values()) <= max(begun.values()) < STEPS, begun  # or nothing was tested
    close(ours(methods.cpr_inflection(params, **ADAM), STEPS, params), wanted)


def test_cpr_ends_with_its_constraint_satisfied_and_forgets_an_inactive_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = methods.cpr(model.parameters(), lr=1e-2, kappa=1.5)
    x = torch.randn(256, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() * 3
    for _ in range(400):
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    first, second = opt.norms().values()
    for reading in (first, second):
        assert reading.norm <= reading.target * 1.01
    loose = methods.cpr([nn.Parameter(torch.ones(4, 4))], lr=1e-3, kappa=100.0)
    loose.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    loose.step()
    assert loose.param_groups[0]["memory"][0].item() == 0
    assert loose.norms()["group0.tensor0"].scale == 1


def test_adamh_turns_every_matrix_by_the_learning_rate():
    params = weights()

    def rule(w, u, lr, i, t):
        radius = INITIAL[i].norm()
        moved = w - lr * radius * u / u.norm()
        return radius * moved / moved.norm()

    close(ours(methods.adamh(params, **ADAM), STEPS, params), defined(rule))


@needs_muon
def test_muonh():
    """Against torch's own Muon, whose direction is what it does to weights at rest."""
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "fc": nn.Linear(4, 6)})
    held, adam = methods.muonh(hidden(model), lr=0.05)
    w, radius = model["fc"].weight.detach().clone(), model["fc"].weight.detach().norm()
    twin = nn.Parameter(torch.zeros_like(w))
    muon = torch.optim.Muon([twin], lr=0.05, weight_decay=0.0, momentum=0.95)
    before = model["wte"].weight.detach().clone()
    for step in range(20):
        grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step))
        start = twin.detach().clone()
        twin.grad = grad.clone()
        muon.step()
        u = start - twin.detach()
        moved = w - 0.05 * radius * u / u.norm()
        w = radius * moved / moved.norm()
        model["fc"].weight.grad = grad.clone()
        model["wte"].weight.grad = torch.ones(5, 4)
        held.step()
        adam.step()
    close([model["fc"].weight.detach()], [w], 1e-5)
    assert not torch.equal(model["wte"].weight, before)
    assert list(held.norms()) == ["fc.weight"]


def test_rotational_adamw():
    params = weights()

    def rule(w, u, lr, i, t):
        radius = rows(INITIAL[i])
        turn = math.sqrt(2 * lr * 0.4 * (1 - BETAS[0]) / (1 + BETAS[0]))
        moved = w - turn * radius * u / rows(u)
        return radius * moved / rows(moved)

    close(ours(methods.rotational(params, weight_decay=0.4, **ADAM), STEPS, params), defined(rule))


@pytest.mark.parametrize("cap", [False, True])
def test_spectral_norm_held_and_capped(cap):
    params = weights()

    def rule(w, u, lr, i, t):
        w = w - lr * u
        factor = 0.9 * torch.linalg.svdvals(INITIAL[i])[0] / torch.linalg.svdvals(w)[0]
        return w * (factor.clamp(max=1) if cap else factor)

    close(ours(methods.spectral(params, ratio=0.9, cap=cap, **ADAM), STEPS, params), defined(rule))


def test_qk_clip_scales_the_heads_whose_logits_are_too_large():
    params = weights()[:1]  # 6 rows: 3 heads of 2
    logits = torch.tensor([50.0, 150.0, 400.0])
    opt = methods.qk_clip(params, lambda p: logits, threshold=100.0, lr=0.0)
    before = params[0].detach().clone()
    params[0].grad = torch.zeros_like(before)
    params[0].grad[0, 0] = 1.0  # all zeros with no learning rate would be a dry run
    opt.step()
    factor = (100.0 / logits).clamp(max=1).sqrt().repeat_interleave(2)[:, None]
    close([params[0].detach()], [before * factor])


def test_cautious_decay():
    params = weights()
    wanted = defined(lambda w, u, lr, i, t: w - lr * (u + 0.3 * (u * w >= 0) * w))
    close(ours(methods.cautious(params, weight_decay=0.3, **ADAM), STEPS, params), wanted)


def test_weight_normalisation_holds_the_norms_of_directions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    x = torch.randn(32, 4)
    opt = methods.weight_normalised(model, lr=1e-2)
    assert torch.allclose(model(x), twin(x), atol=1e-6)
    directions = [m.parametrizations.weight.original1 for m in (model[0], model[2])]
    before = [rows(v.detach()).clone() for v in directions]
    for _ in range(20):
        opt.zero_grad()
        (model(x) - 1).square().mean().backward()
        opt.step()
    for v, norm in zip(directions, before, strict=True):
        assert torch.allclose(rows(v.detach()), norm, rtol=1e-6)
    assert not torch.allclose(model[0].weight, twin[0].weight, atol=1e-2)


def test_every_method_is_in_the_table_and_steps():
    for name, method in METHODS.items():
        if name == "MuonH" and not hasattr(torch.optim, "Muon"):
            continue
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = model if name == "weight-norm" else hidden(model)
        for opt in method(
            groups, lr=1e-2, weight_decay=0.1, largest_logits=lambda p: torch.ones(2)
        ):
            for group in opt.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            opt.step()
        assert method.build.__doc__, name
        assert all(p.isfinite().all() for p in model.parameters()), name


@pytest.mark.parametrize(
    "name",
    ["CPR-WS", "CPR-IP", "CPR-kI0", "AdamH", "LAWN", "rotational", "cautious", "spectral", "NaP"],
)
def test_resuming_gives_the_same_bits(name, tmp_path):
    def make() -> tuple[list[nn.Parameter], NormControl]:
        params = weights(torch.float32)
        return params, METHODS[name](params, lr=LR, betas=BETAS, start=10, switch=10, n=3)[0]

    params, opt = make()
    ours(opt, 30, params)
    torch.save([opt.state_dict(), [p.detach() for p in params]], tmp_path / "half.pt")
    whole = ours(opt, 30, params)
    params, opt = make()
    state, values = torch.load(tmp_path / "half.pt", weights_only=True)
    opt.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)
    for found, wanted in zip(ours(opt, 30, params), whole, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.find("hyperbola"), "There is no method 'hyperbola'"),
        (lambda: methods.find("cpr-ki"), "Do you mean CPR-kI0"),
        (
            lambda: methods.muonh([{"params": [nn.Parameter(torch.ones(3))], "controlled": True}]),
            "MuonH controls matrices, but a tensor has",
        ),
        (lambda: methods.muonh(nn.Linear(2, 2).parameters()), r"muonh\(hidden\(model\)\)"),
        (lambda: hidden(nn.Embedding(4, 4)), "No matrix of the model counts as hidden"),
        (lambda: methods.weight_normalised(nn.Linear(2, 2).parameters()), "it needs the model"),
        (lambda: methods.nap(weights(), n=0), "every got n=0"),
        (lambda: AdamWN(weights(), start=-1), "start=-1 is not known"),
        (
            lambda: AdamWN(weights(), norm=1.0, start=5),
            "start=5 takes the norm of that moment as the reference",
        ),
        (
            lambda: NormControl(torch.optim.SGD(weights(), lr=0.1), size="area"),
            "size='area' is not known",
        ),
        (
            lambda: NormControl(torch.optim.SGD(weights(), lr=0.1), size="spectral"),
            "size='spectral' is a matrix's own",
        ),
        (
            lambda: NormControl(torch.optim.SGD(weights(), lr=0.1), size=lambda p: p.abs().max()),
            "has no initial value",
        ),
        (
            lambda: NormControl(torch.optim.SGD(weights(), lr=0.1), cautious=True, order="before"),
            "needs order='after'",
        ),
        (
            lambda: NormControl(
                torch.optim.SGD(weights(torch.bfloat16), lr=0.1), relative_step=0.1
            ),
            "bf16 and fp16 cannot hold",
        ),
        (lambda: AdamWN([{"params": weights(), "cautious": True}]), "AdamWN makes its own step"),
    ],
)
def test_bad_input_gets_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_statistic_must_fit_the_parts():
    opt = NormControl(
        torch.optim.SGD(weights(), lr=0.1), norm=1.0, scope="row", size=lambda p: torch.ones(5)
    )
    opt.param_groups[0]["params"][0].grad = torch.ones(6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="gave 5 numbers for a tensor of shape"):
        opt.step()
    state = opt.state_dict()
    plain = NormControl(torch.optim.SGD(weights(), lr=0.1), norm=1.0, scope="row")
    with pytest.raises(ValueError, match="a function cannot be stored"):
        plain.load_state_dict(state)
    assert isinstance(opt.param_groups[0]["size"], Statistic)


def test_min_max_norm_is_keras_own(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    theirs = keras.constraints.MinMaxNorm(min_value=0.8, max_value=1.1, rate=0.3, axis=1)
    params = weights(torch.float32)[:1]
    opt = methods.min_max_norm(params, lr=LR, low=0.8, high=1.1, rate=0.3)
    adam = torch.optim.Adam([twin := nn.Parameter(params[0].detach().clone())], lr=LR)
    for step in range(1, 20):
        (grad,) = gradients(step, params)
        with torch.no_grad():
            twin.copy_(
                params[0]
            )  # step by step: Keras divides by the norm plus 1e-7, which would add up
        twin.grad, params[0].grad = grad.clone(), grad.clone()
        adam.step()
        opt.step()
        close([params[0].detach()], [torch.as_tensor(theirs(twin.detach()))])


def test_the_documented_table_is_the_real_one():
    from methods_table import PAGE, PLACE, table

    assert PLACE.search(PAGE.read_text()).group() == table()
