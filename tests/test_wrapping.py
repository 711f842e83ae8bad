"""NormControl around optimizers of torch and of other packages: the norm law holds, and a resumed
run ends in the same bits."""

import copy
import io

import pytest
import torch
from small import SmallModel, loss_at, matrices, total_norm

from normcontrol import NormControl, linear

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")


@pytest.fixture(autouse=True)
def _torchao_in_eager_mode():
    """torchao compiles its own step, which takes a minute and is not needed for these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def muon(params):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon yet")
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2, weight_decay=0.0)


def eight_bit_adamw(params):
    low_bit = pytest.importorskip("torchao.optim")
    return low_bit.AdamW8bit(params, lr=1e-2, weight_decay=0.0, block_size=32)


MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Muon": muon,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=3),
    "AdamWScheduleFree": lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2),
    "Lion": lambda params: pytorch_optimizer.Lion(params, lr=1e-3, weight_decay=0.0),
    "ADOPT": lambda params: pytorch_optimizer.ADOPT(params, lr=1e-2, weight_decay=0.0),
    "AdamW8bit": eight_bit_adamw,
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def step(model, opt, t):
    def closure():
        opt.zero_grad()
        loss = loss_at(model, t)
        loss.backward()
        return loss

    if isinstance(getattr(opt, "optimizer", opt), torch.optim.LBFGS):
        return opt.step(closure)
    closure()
    return opt.step()


def trained(make, steps, one_batch=False, **settings):
    model = SmallModel()
    opt = NormControl(make(list(model.parameters())), **settings)
    if hasattr(opt.optimizer, "train"):
        opt.train()
    for t in range(steps):
        step(model, opt, 0 if one_batch else t)
    return model, opt


@every_optimizer
def test_the_norm_law_holds_around_every_optimizer(make):
    """A twin without control makes the same step from the same weights and ends at ``norm``. Then
    norm' = (1 - k) norm + k target."""
    model, opt = trained(make, 3, ratio=1.3, rate=0.25)
    first = total_norm(matrices(SmallModel()))
    twin = SmallModel()
    bare = make(list(twin.parameters()))
    bare.load_state_dict(copy.deepcopy(opt.optimizer.state_dict()))  # or they share the momentum
    if hasattr(bare, "train"):
        bare.train()
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    step(twin, bare, 3)
    step(model, opt, 3)
    expected = 0.75 * total_norm(matrices(twin)) + 0.25 * 1.3 * first
    assert total_norm(matrices(model)) == pytest.approx(expected, rel=1e-6)
    assert opt.norms()["global"].norm.item() == pytest.approx(expected, rel=1e-6)


@every_optimizer
def test_training_ends_at_the_target(make):
    model, opt = trained(make, 40, one_batch=True, ratio=1.2, rate=1.0, scope="tensor")
    for p, q in zip(matrices(model), matrices(SmallModel()), strict=True):
        assert total_norm([p]) == pytest.approx(1.2 * total_norm([q]), rel=1e-6)
    assert loss_at(model, 0) < loss_at(SmallModel(), 0)
    assert "around" in opt.report()


@every_optimizer
def test_resuming_is_bit_exact(make):
    settings = {"ratio": linear(1.0, 1.5, steps=8), "rate": 0.1}
    whole, _ = trained(make, 10, **settings)
    half, opt = trained(make, 5, **settings)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)  # 8-bit states are subclasses of tensors
    model = SmallModel(seed=1)
    model.load_state_dict(saved["model"])
    opt = NormControl(make(list(model.parameters())))
    opt.load_state_dict(saved["opt"])
    if hasattr(opt.optimizer, "train"):
        opt.train()
    for t in range(5, 10):
        step(model, opt, t)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "AdamW8bit"])
def test_the_state_is_plain_data(name):
    _, opt = trained(MAKERS[name], 2, ratio=linear(1.0, 2.0, steps=5))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_order_before_is_refused_for_an_optimizer_that_calls_its_closure_itself():
    with pytest.raises(
        ValueError,
        match=r"order='before' scales the weights between the closure and the step, but LBFGS calls its",
    ):
        NormControl(torch.optim.LBFGS(SmallModel().parameters()), order="before")


def test_the_methods_of_the_wrapped_optimizer_can_be_called():
    _, opt = trained(MAKERS["AdamWScheduleFree"], 1, ratio=1.0)
    opt.eval()
    assert opt.param_groups[0]["train_mode"] is False
