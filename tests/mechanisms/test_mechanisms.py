"""The optional mechanisms: which settings they refuse, and how a size's function is checked.

What they compute is tested with the methods that use them, in tests/methods.
"""

from __future__ import annotations

import pytest
import torch
from definitions import gradients, weights
from torch import nn

from normcontrol import AdamWN, NormControl, lr_times
from normcontrol.mechanisms import start
from normcontrol.mechanisms.size import Statistic
from normcontrol.schedule import every


def sgd(dtype: torch.dtype = torch.float64) -> torch.optim.SGD:
    return torch.optim.SGD(weights(dtype), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamWN(weights(), start=-1), "start=-1 is not known"),
        (
            lambda: AdamWN(weights(), norm=1.0, start=5),
            "start=5 takes the norm of that step as the reference",
        ),
        (lambda: NormControl(sgd(), size="area"), "size='area' is not known"),
        (lambda: NormControl(sgd(), size="spectral"), "size='spectral' belongs to a single matrix"),
        (lambda: NormControl(sgd(), size=lambda p: p.abs().max()), "has no initial value"),
        (lambda: NormControl(sgd(), cautious=True, order="before"), "needs order='after'"),
        (
            lambda: NormControl(sgd(torch.bfloat16), relative_step=0.1),
            "bf16 and fp16 cannot represent",
        ),
    ],
)
def test_invalid_settings_are_refused_with_a_sentence(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("size", ["spectral", "spectral-exact"])
def test_a_singular_value_of_what_is_no_real_matrix_is_refused(size):
    settings = {"size": size, "scope": "tensor", "ratio": 1.0, "controlled": True}
    for other, found in (
        (torch.ones(3), r"has shape \(3,\)"),
        (torch.ones(2, 2, dtype=torch.complex64), "is complex"),
    ):
        groups = [{"params": weights()}, {"params": [nn.Parameter(other)]}]
        with pytest.raises(
            ValueError,
            match=f"size='{size}' is the largest .* real matrix, but group1.tensor0 {found}. Leave",
        ):
            NormControl(torch.optim.SGD(groups, lr=0.1), **settings)


def test_cautious_control_of_complex_weights_is_refused():
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    sentence = r"cautious=True compares the signs .* but group0\.tensor0 is complex\. Leave it out"
    with pytest.raises(ValueError, match=sentence):
        NormControl(torch.optim.SGD([p], lr=0.1), cautious=True)
    opt = NormControl(torch.optim.SGD([p], lr=0.1))
    opt.param_groups[0]["control"]["cautious"] = True
    with pytest.raises(ValueError, match=sentence):
        opt.step()


def test_a_statistic_must_fit_the_parts():
    opt = NormControl(sgd(), norm=1.0, scope="row", size=lambda p: torch.ones(5))
    opt.param_groups[0]["params"][0].grad = torch.ones(6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="gave 5 numbers for a tensor of shape"):
        opt.step()
    assert isinstance(opt.param_groups[0]["control"]["size"], Statistic)


@pytest.mark.parametrize("wrong", [None, "a", torch.ones((), dtype=torch.complex64)])
def test_a_statistic_that_is_no_real_number_is_refused(wrong):
    opt = NormControl(sgd(), norm=1.0, size=lambda p: wrong)
    opt.param_groups[0]["params"][0].grad = torch.ones(6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"of shape \(6, 4\): return a real number for each of"):
        opt.step()


def test_a_statistic_must_be_given_again_when_resuming():
    state = NormControl(sgd(), norm=1.0, scope="row", size=lambda p: torch.ones(1)).state_dict()
    without = NormControl(sgd(), norm=1.0, scope="row")
    with pytest.raises(ValueError, match="a function cannot be stored"):
        without.load_state_dict(state)


def test_adamwn_takes_the_mechanisms_of_a_group_as_normcontrol_does():
    ours, theirs = weights(), weights()
    settings = {"ratio": 0.0, "rate": lr_times(0.1), "cautious": True}
    first = AdamWN([{"params": ours, **settings}], lr=1e-2)
    second = NormControl(torch.optim.Adam([{"params": theirs, **settings}], lr=1e-2))
    for step in range(5):
        for p, q, grad in zip(ours, theirs, gradients(step, ours), strict=True):
            p.grad, q.grad = grad, grad.clone()
        first.step()
        second.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("law", ["proportional", "projection", "upper", "band(0.5)"])
def test_no_law_acts_before_its_start_or_between_the_steps_of_every(law, fused):
    for settings in ({"start": 3, "ratio": 0.5}, {"rate": every(4), "ratio": 0.5}):
        p = nn.Parameter(torch.eye(4))
        opt = AdamWN([p], lr=0.0, law=law, fused=fused, **{"rate": 1.0, **settings})
        for _ in range(3):
            p.grad = torch.ones_like(p)
            opt.step()
            assert torch.equal(p, torch.eye(4))
        p.grad = torch.ones_like(p)
        opt.step()
        assert p.detach().norm().item() == pytest.approx(0.5 * 2)


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_an_inflection_starts_control_in_every_scope(scope):
    p = nn.Parameter(torch.eye(4))
    opt = NormControl(
        torch.optim.SGD([p], lr=1.0), ratio=1.0, rate=1.0, start="inflection", scope=scope
    )
    for step in range(1, 1001):
        p.grad = -p.detach() * min(1.0, 200 / step) * 1e-3  # the norm grows ever more slowly
        opt.step()
    grown = p.detach().norm().item()
    p.grad = -0.1 * p.detach()
    opt.step()
    assert grown > 2.0
    assert p.detach().norm().item() == pytest.approx(grown)


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
@pytest.mark.parametrize("start", [3, "inflection"])
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_tensor_that_is_frozen_when_control_starts_keeps_the_norm_it_has_then(
    scope, start, first, monkeypatch
):
    """Every element grows by 0.1 in every step that trains it. The inflection is at step 3."""
    monkeypatch.setattr("normcontrol.mechanisms.start.SAMPLED_EVERY", 1)
    p, q = nn.Parameter(torch.full((2, 2), first)), nn.Parameter(torch.ones(2, 2))
    sgd = torch.optim.SGD([p, q], lr=0.1)
    opt = NormControl(sgd, ratio=1.0, rate=1.0, start=start, scope=scope)
    for step in range(1, 7):
        p.requires_grad_(step not in (3, 4, 5))
        for w in (p, q):
            w.grad = -torch.ones(2, 2) if w.requires_grad and step <= 3 else None
        opt.step()
    assert p.flatten().tolist() == [pytest.approx(first + 0.2)] * 4
    assert q.flatten().tolist() == [pytest.approx(1.3)] * 4


@pytest.mark.parametrize("scope", ["global", "row"])
def test_a_resumed_run_keeps_the_reference_of_its_start(scope):
    """Ones grow by a tenth in every step, and control starts after the second: at 1.2."""

    def step(opt: NormControl) -> None:
        opt.param_groups[0]["params"][0].grad = -torch.ones(2, 2)
        opt.step()

    def make(value: float) -> NormControl:
        sgd = torch.optim.SGD([nn.Parameter(torch.full((2, 2), value))], lr=0.1)
        return NormControl(sgd, ratio=1.0, rate=1.0, start=2, scope=scope)

    first = make(1.0)
    for _ in range(3):
        step(first)
    second = make(7.0)
    second.param_groups[0]["params"][0].data.copy_(first.param_groups[0]["params"][0])
    second.load_state_dict(first.state_dict())
    step(second)
    assert second.param_groups[0]["params"][0].tolist() == [[pytest.approx(1.2)] * 2] * 2


@pytest.mark.parametrize("law", ["integral", "upper"])
def test_freezing_one_tensor_leaves_the_memory_of_the_others(law):
    """CPR's multipliers and the flags of an inflection belong to their tensors."""
    params = [nn.Parameter(torch.eye(3)) for _ in range(3)]
    start = 0 if law == "integral" else "inflection"
    sgd = torch.optim.SGD(params, lr=0.1)
    opt = NormControl(sgd, ratio=1.0, rate=1.0, law=law, start=start, scope="tensor")

    def step(times: int) -> None:
        for _ in range(times):
            for i, p in enumerate(params):
                p.grad = -(i + 1) * p.detach() * 1e-2
            opt.step()

    step(1)
    before = opt.state_dict()["param_groups"][0]["control"]["memory"].clone()
    params[1].requires_grad_(False)
    step(1)
    frozen = opt.state_dict()["param_groups"][0]["control"]["memory"].clone()
    assert torch.equal(frozen[:, 1], before[:, 1])
    assert before[:, [0, 2]].any(0).all()
    assert not torch.equal(frozen[:, 0], before[:, 0])
    params[1].requires_grad_(True)
    step(1)
    after = opt.state_dict()["param_groups"][0]["control"]["memory"]
    assert not torch.equal(after[:, 1], before[:, 1])
    assert (after[:, 0] >= frozen[:, 0]).any()


def test_a_skipped_step_is_not_sampled_again_by_an_inflection(monkeypatch):
    """GradScaler skips the call after a sample. The step is not counted, so its number is that of
    the sample; a second sample there would see no growth and start."""
    monkeypatch.setattr(start, "SAMPLED_EVERY", 2)
    for skips in (False, True):
        p = nn.Parameter(torch.eye(4))
        sgd = torch.optim.SGD([p], lr=1.0, fused=True)  # GradScaler tells it of an overflow
        opt = NormControl(sgd, ratio=1.0, rate=1.0, start="inflection")
        for step in range(1, 9):
            p.grad = -0.2 * p.detach()  # the norm grows ever faster: no inflection
            opt.step()
            if skips and step == 6:
                p.grad = torch.zeros_like(p)
                opt.found_inf = torch.ones(())
                opt.step()
                del opt.found_inf
        control = opt.param_groups[0]["control"]
        assert int(control["step"]) == 8
        assert not control["memory"][-1].any()
        assert p.detach().norm().item() == pytest.approx(2 * 1.2**8)


@pytest.mark.parametrize("start", [2, "inflection"])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_weights_that_start_at_zero_may_have_a_reference_of_a_later_step(scope, start):
    """As LAWN and CPR with a warm start have it, of models with layers that start at zero."""
    p = torch.nn.Parameter(torch.zeros(3, 4))
    sgd = torch.optim.SGD([p], lr=1.0)
    opt = NormControl(sgd, ratio=1.0, rate=1.0, scope=scope, start=start)
    for _ in range(4):
        p.grad = -torch.ones_like(p)
        opt.step()
    opt.load_state_dict(opt.state_dict())
    kept = 2.0 if start == 2 else 4.0  # the inflection has not come
    assert torch.allclose(p, torch.full_like(p, kept))
    with pytest.raises(ValueError, match="initial norm of zero"):  # no step would have a length
        NormControl(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 4))], lr=1.0),
            **{"ratio": 1.0, "scope": scope, "start": start, "relative_step": 0.1},
        )
