"""What ``torch.optim.AdamW`` does, AdamWN does: complex weights, derivatives, tensors as settings."""

import pytest
import torch
from contract_cases import IMPLEMENTATIONS, Run, both
from torch.nn import Parameter

from normcontrol import AdamWN


@both
@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
@pytest.mark.parametrize("flags", [{}, {"amsgrad": True}, {"weight_decay": 0.5, "maximize": True}])
def test_complex_parameters_are_pairs_of_real_ones(cls, implementation, flags):
    generator = torch.Generator().manual_seed(0)
    whole = Parameter(torch.randn(4, 3, generator=generator, dtype=torch.complex64))
    pair = Parameter(torch.view_as_real(whole.detach()).clone())
    run = [cls([p], lr=0.1, **IMPLEMENTATIONS[implementation], **flags) for p in (whole, pair)]
    for _ in range(20):
        for p, opt in zip((whole, pair), run, strict=True):
            opt.zero_grad()
            (p - 3).abs().square().sum().backward() if p is whole else (
                p - torch.tensor([3.0, 0.0])
            ).square().sum().backward()
            opt.step()
    assert torch.allclose(torch.view_as_real(whole.detach()), pair, rtol=1e-5)


@both
@pytest.mark.parametrize("flags", [{}, {"maximize": True}, {"weight_decay": 0.1}])
def test_differentiable_steps_have_the_right_derivative(cls, flags):
    """With an absolute target, since a ratio's reference is a constant that numerical
    differentiation would vary."""
    control = {"norm": 2.0, "rate": 0.3} if cls is AdamWN else {}

    def after_two_steps(w, grad):
        w = w.clone()
        opt = cls([w], lr=0.1, differentiable=True, **flags, **control)
        for factor in (1.0, 0.5):
            w.grad = grad * factor
            opt.step()
        return w

    generator = torch.Generator().manual_seed(0)
    w, grad = (
        torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    try:
        assert torch.autograd.gradcheck(after_two_steps, (w, grad))
    except RuntimeError:
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):
            raise
        pytest.skip(
            f"torch {torch.__version__} does not differentiate two steps of its own AdamW either"
        )


@both
@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_a_learning_rate_in_a_tensor_is_the_same_as_a_number(cls, implementation):
    runs = [
        Run(cls, {"lr": lr, **IMPLEMENTATIONS[implementation]})
        for lr in (2.0**-6, torch.tensor(2.0**-6))
    ]
    for run in runs:
        run.step(10)
    for a, b in zip(runs[0].weights(), runs[1].weights(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


@both
def test_betas_in_tensors_are_the_same_as_numbers(cls):
    betas = (0.5, 0.75)
    runs = [
        Run(cls, {"betas": b, "foreach": False}) for b in (betas, tuple(map(torch.tensor, betas)))
    ]
    for run in runs:
        run.step(10)
    for a, b in zip(runs[0].weights(), runs[1].weights(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


@both
@pytest.mark.parametrize("foreach", [False, True])
def test_a_default_dtype_of_float64_works(cls, foreach):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        run = Run(cls, {"foreach": foreach})
        run.step(3)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.isfinite(w).all() for w in run.weights())
