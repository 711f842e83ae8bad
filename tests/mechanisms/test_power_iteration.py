"""The largest singular value by power iteration: the stated error, and what is stored."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import nn

from normcontrol import NormControl
from normcontrol.mechanisms.power_iteration import PowerIteration


def svdvals(p: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(p.detach().flatten(1).double())


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (8, 3, 5, 5)])
def test_the_error_is_within_the_stated_bound(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape) / 5
    matrix.flatten(1)[:, 0] += 2  # a first singular value that stands out
    iteration, angle, worst = PowerIteration([matrix]), 0.0, 0.0
    for _ in range(200):
        before = matrix.clone()
        matrix += 0.01 * torch.randn(shape)
        s1, s2 = svdvals(matrix)[:2].tolist()
        d = svdvals(matrix - before)[0].item() / s1
        turn, q = d / (1 - s2 / s1 - d), (s2 / s1) ** 2
        angle = max(angle, turn / (1 - q))
        error = 1 - iteration([matrix]).item() / s1
        assert angle < 0.5
        assert -1e-6 < error < angle**2 / 2
        worst = max(worst, error)
    assert worst > 1e-7  # it is not exact: the bound was tested


def test_an_unchanged_matrix_is_measured_better_at_every_step():
    torch.manual_seed(0)
    matrix, other = torch.randn(2, 12, 9)
    iteration = PowerIteration([other])  # a vector that belongs to other weights
    errors = [1 - iteration([matrix]).item() / svdvals(matrix)[0].item() for _ in range(60)]
    assert errors[0] > 1e-2
    assert abs(errors[-1]) < 1e-6
    assert all(b <= a + 1e-6 for a, b in pairwise(errors))


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_matrix_of_zeros_or_nan_does_not_spoil_the_vector(bad):
    torch.manual_seed(0)
    matrix = torch.randn(6, 5)
    iteration = PowerIteration([matrix])
    iteration([torch.full((6, 5), bad)])
    for _ in range(100):
        found = iteration([matrix]).item()
    assert found == pytest.approx(svdvals(matrix)[0].item(), rel=1e-5)


def make(size="spectral", **settings) -> tuple[list[nn.Parameter], NormControl]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(6, 4, 3))]
    sgd = torch.optim.SGD(params, lr=0.01)
    return params, NormControl(sgd, size=size, scope="tensor", **settings)


def run(params: list[nn.Parameter], opt: NormControl, steps: range) -> None:
    for seed in steps:
        torch.manual_seed(seed)
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()


def test_a_step_decomposes_no_matrix_unless_it_is_asked_for(monkeypatch):
    (params, opt), (exact_params, exact) = make(ratio=1.5, rate=0.1), make("spectral-exact")
    run(params, opt, range(2))
    run(exact_params, exact, range(2))
    calls: list[str] = []
    for name in ("svd", "svdvals", "matrix_norm"):
        function = getattr(torch.linalg, name)
        monkeypatch.setattr(
            torch.linalg,
            name,
            lambda *a, function=function, name=name, **k: (calls.append(name), function(*a, **k))[
                1
            ],
        )
    run(params, opt, range(2, 4))
    assert calls == []
    run(exact_params, exact, range(2, 4))
    assert calls == ["matrix_norm"] * 4


def test_both_ways_reach_the_same_target():
    for size in ("spectral", "spectral-exact"):
        params, opt = make(size, ratio=1.5, rate=0.5)
        initial = [svdvals(p)[0] for p in params]
        run(params, opt, range(40))
        for p, s0, reading in zip(params, initial, opt.norms().values(), strict=True):
            assert (svdvals(p)[0] / s0).item() == pytest.approx(1.5, rel=5e-3)
            assert reading.norm.item() == pytest.approx(svdvals(p)[0].item(), rel=5e-3)


@pytest.mark.parametrize("how", ["checkpoint", "copy"])
def test_a_resumed_run_ends_in_the_same_bits(how):
    whole, once = make(rate=0.3)
    run(whole, once, range(12))
    params, opt = make(rate=0.3)
    run(params, opt, range(6))
    if how == "copy":
        opt = copy.deepcopy(opt)
        params = opt.param_groups[0]["params"]
    else:
        buffer = io.BytesIO()
        torch.save({"weights": params, "opt": opt.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        params, opt = make(rate=0.3)
        with torch.no_grad():
            for p, q in zip(params, saved["weights"], strict=True):
                p.copy_(q)
        opt.load_state_dict(saved["opt"])
    run(params, opt, range(6, 12))
    assert all(torch.equal(p, q) for p, q in zip(whole, params, strict=True))


def test_reading_norms_does_not_move_the_vectors():
    _, opt = make()
    vectors = opt.param_groups[0]["control"]["vectors"].clone()
    opt.norms()
    opt.report()
    assert torch.equal(vectors, opt.param_groups[0]["control"]["vectors"])


def test_weights_that_are_loaded_before_the_first_step_are_measured_anew():
    params, opt = make(ratio=1.0, rate=1.0)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in params:
            p.copy_(torch.randn_like(p))
    initial = [svdvals(p)[0].item() for p in params]
    for p in params:
        p.grad = torch.full_like(p, 1e-9)
    opt.step()
    found = [reading.norm.item() for reading in opt.norms().values()]
    assert found == pytest.approx(initial, rel=1e-6)


def test_a_matrix_that_is_unfrozen_for_another_one_is_measured_anew():
    """Their vectors have the same length, and one does not follow the other matrix."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(6, 4))
    sgd = torch.optim.SGD([first, second.requires_grad_(False)], lr=1e-9)
    opt = NormControl(sgd, ratio=1.0, rate=1.0, size="spectral", scope="tensor")
    first.grad = second.grad = None
    opt.step()
    first.requires_grad_(False)
    second.requires_grad_(True)
    before = svdvals(second)[0].item()
    opt.step()
    assert svdvals(second)[0].item() == pytest.approx(before, rel=1e-5)
