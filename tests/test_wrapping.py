"""NormControl around optimizers of torch and of other packages: the norm law holds, and a resumed
run ends in the same bits."""

import copy
import io

import pytest
import torch
from small import SmallModel, loss_at, matrices, total_norm
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from normcontrol import AdamWN, NormControl, eta_times, linear, lr_times

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


class Moving(torch.optim.SGD):
    """An optimizer with more methods than a step."""

    def perturb(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(0.1)

    def perturb_data(self):
        for p in self.param_groups[0]["params"]:
            p.data.add_(0.1)

    def largest(self, *, of):
        return max(p.abs().max().item() for p in self.param_groups[of]["params"])


def moving():
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    return NormControl(Moving([p], lr=0.1), ratio=1.0)


@pytest.mark.parametrize("method", ["perturb", "perturb_data"])
def test_a_method_that_moves_the_weights_past_the_control_is_refused(method):
    opt = moving()
    assert hasattr(opt, method)
    with pytest.raises(
        RuntimeError, match=rf"Moving\.{method}\(\) moved the weights past .*Call step\(\) instead"
    ):
        getattr(opt, method)()


def test_other_methods_are_called_as_they_are():
    assert moving().largest(of=0) == 1.0
    with pytest.raises(AttributeError, match="has no attribute 'smallest'"):
        _ = moving().smallest


def sam(params, **settings):
    return NormControl(pytorch_optimizer.SAM(params, torch.optim.SGD, lr=0.1), **settings)


def test_sam_is_controlled_in_its_step_and_refused_in_its_halves():
    model = SmallModel()
    opt = sam(model.parameters(), ratio=1.5, rate=1.0)

    def closure():
        opt.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        return loss

    closure()
    opt.step(closure)
    assert total_norm(matrices(model)) == pytest.approx(1.5 * total_norm(matrices(SmallModel())))
    closure()
    with pytest.raises(RuntimeError, match=r"SAM\.first_step\(\) moved the weights"):
        opt.first_step(zero_grad=True)


def test_order_before_is_refused_for_sam():
    with pytest.raises(ValueError, match=r"order='before' .* SAM calls its closure itself"):
        sam(SmallModel().parameters(), order="before")


class Reads(torch.optim.SGD):
    """An optimizer that uses the value of the loss, and calls its closure ``calls`` times."""

    calls = 1

    def step(self, closure=None, bs=1):
        self.loss, self.bs = None, bs
        for _ in range(self.calls if closure is not None else 0):
            with torch.enable_grad():
                self.loss = closure()
        super().step()
        return self.loss


def with_closure(opt, p):
    def closure():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    return opt.step(closure)


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_optimizer_gets_the_loss_in_both_orders(order):
    p = torch.nn.Parameter(torch.ones(3, 3))
    opt = NormControl(Reads([p], lr=0.0, momentum=0.5), ratio=1.0, order=order)
    opt.param_groups[0]["lr"] = 0.1
    assert with_closure(opt, p).item() == opt.optimizer.loss.item() == 9.0


def test_a_closure_that_is_called_twice_is_refused_with_order_before():
    p = torch.nn.Parameter(torch.ones(3, 3))
    inner = Reads([p], lr=0.1)
    inner.calls = 2
    with pytest.raises(RuntimeError, match=r"calls the closure several times .*Use order='after'"):
        with_closure(NormControl(inner, ratio=1.0, order="before"), p)


def test_step_passes_arguments_on():
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    opt = NormControl(Reads([p], lr=0.1), ratio=1.0)
    opt.step(bs=512)
    assert opt.optimizer.bs == 512
    opt.step()
    assert opt.optimizer.bs == 1
    with pytest.raises(
        TypeError, match=r"step\(\) was given size, but Reads\.step does not .*Leave it out"
    ):
        opt.step(size=3)


def test_the_gradients_are_reset_by_the_wrapped_optimizer():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            self.was_reset = True

    opt = NormControl(Own([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1))
    opt.zero_grad()
    assert opt.optimizer.was_reset


def without_rate(**settings):
    """An optimizer that chooses its learning rate itself."""
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    inner = Moving([p], lr=0.1)
    inner.step = lambda: p.data.sub_(0.1 * p.grad)
    inner.param_groups[0]["lr"] = None
    return NormControl(inner, **settings), p


def test_the_learning_rate_may_be_none():
    opt, p = without_rate(ratio=1.5, rate=1.0)
    opt.step()
    assert total_norm([p]) == pytest.approx(4.5)


def test_an_optimizer_is_not_wrapped_twice():
    """The settings of the first controller held in place of those of the second."""
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    NormControl(sgd, ratio=1.0)
    sentence = r"Group 0 is under norm control already \(ratio=1.0, .*remove them first: group.pop"
    with pytest.raises(ValueError, match=sentence):
        NormControl(sgd, ratio=2.0)
    for group in sgd.param_groups:
        group.pop("control")
    assert NormControl(sgd, ratio=2.0).norms()["global"].target == 6


@pytest.mark.parametrize("saved", ["with control", "without"])
def test_after_the_wrapped_optimizer_has_loaded_a_plain_state_ours_can_be_loaded(saved):
    """It is what the error says to do."""
    p = nn.Parameter(torch.ones(3, 3))
    sgd = torch.optim.SGD([p], lr=0.1)
    plain = copy.deepcopy(sgd.state_dict())
    opt = NormControl(sgd, ratio=linear(1, 2, steps=2), rate=1.0)
    p.grad = torch.zeros_like(p)
    opt.step()
    controlled = copy.deepcopy(opt.state_dict())
    sgd.load_state_dict(plain)
    with pytest.raises(ValueError, match="Load the state into this optimizer instead"):
        opt.step()
    if saved == "without":
        with pytest.warns(UserWarning, match="no reference norms"):
            opt.load_state_dict(plain)
    else:
        opt.load_state_dict(controlled)
    opt.step()
    # The second step of the ramp; or the first one, from the norm of 4.5 that the weights had.
    assert total_norm([p]) == pytest.approx({"with control": 6.0, "without": 6.75}[saved])


def test_an_optimizer_that_loaded_a_state_of_norm_control_is_not_wrapped():
    """The saved settings held in place of the new ones, and the schedules started again."""
    p = nn.Parameter(torch.ones(3, 3))
    saved = NormControl(torch.optim.SGD([p], lr=0.1), ratio=linear(1, 2, steps=9)).state_dict()
    sgd = torch.optim.SGD([p], lr=0.1)
    sgd.load_state_dict(saved)
    sentence = (
        r"Group 0 contains a saved state of norm control, .*Construct NormControl first.* and load "
        r"the state into that, or remove it first: group.pop\('control'\)"
    )
    with pytest.raises(ValueError, match=sentence):
        NormControl(sgd, ratio=3.0)
    sgd.param_groups[0].pop("control")
    opt = NormControl(sgd, ratio=3.0)
    assert opt.norms()["global"].target == 9
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["control"]["ratio"] == linear(1, 2, steps=9)


def test_what_follows_several_learning_rates_is_named():
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": [p], "lr": i + 0.1} for i, p in enumerate(params)])
    opt = NormControl(sgd, relative_step=lr_times(1.0))
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"relative_step=lr_times\(factor=1.0\) follows .* have d"):
        opt.step()


@pytest.mark.parametrize("rate", [lr_times(0.1), eta_times(0.1)])
def test_no_rate_follows_a_learning_rate_that_is_none(rate):
    opt, _ = without_rate(ratio=1.5, rate=rate)
    with pytest.raises(ValueError, match=r"follows the learning rate, but the group has lr=None"):
        opt.step()


def test_sparse_gradients_are_not_clipped():
    embedding = torch.nn.Embedding(9, 4, sparse=True)
    opt = AdamWN(embedding.parameters(), max_grad_norm=1.0)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"max_grad_norm was given, but a gradient is sparse"):
        opt.step()


def test_a_state_dict_without_groups_is_refused():
    opt = NormControl(torch.optim.SGD(SmallModel().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"The state has no param_groups .*opt\.state_dict\(\)"):
        opt.load_state_dict(SmallModel().state_dict())


def test_a_whole_checkpoint_or_its_path_is_no_state():
    model = SmallModel()
    opt = NormControl(torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoint = {"model": model.state_dict(), "opt": opt.state_dict(), "step": 3}
    with pytest.raises(ValueError, match=r"no param_groups \(its keys are model, opt, step\)"):
        opt.load_state_dict(checkpoint)
    with pytest.raises(TypeError, match=r"load_state_dict got a str, and a state is a dict\. Give"):
        opt.load_state_dict("checkpoint.pt")


def test_an_optimizer_with_several_states_inside_is_refused():
    class Two(torch.optim.SGD):
        def state_dict(self):
            return {"one": super().state_dict(), "two": super().state_dict()}

    opt = NormControl(Two(SmallModel().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"has 2 lists of param_groups.*around each optimizer"):
        opt.state_dict()


def test_a_hook_on_all_optimizers_may_be_removed_within_a_step():
    calls = []
    handle = register_optimizer_step_pre_hook(lambda *given: calls.append(None))
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    opt = NormControl(torch.optim.SGD([p], lr=0.1), ratio=1.0)
    opt.optimizer.register_step_pre_hook(lambda *given: handle.remove())
    opt.step()
    opt.step()
    assert len(calls) == 1


def test_a_copy_under_a_scheduler_steps_its_own_weights():
    """A scheduler writes a ``step`` into the optimizer that belongs to that very object."""
    model = torch.nn.Linear(4, 4)
    opt = AdamWN(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.StepLR(opt, 10)
    copied, other = copy.deepcopy((model, opt))
    restored = torch.load(_saved(opt), weights_only=False)
    for mine in (other, restored):
        (weight, *_) = mine.param_groups[0]["params"]
        before, original = weight.detach().clone(), model.weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        mine.step()
        assert not torch.equal(weight, before)
        assert torch.equal(model.weight, original)
    assert other.param_groups[0]["params"][0] is copied.weight


def _saved(opt):
    buffer = io.BytesIO()
    torch.save(opt, buffer)
    buffer.seek(0)
    return buffer


def test_a_state_that_the_wrapped_optimizer_loads_is_taken_over():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    inner = torch.optim.SGD([weight], lr=0.5)
    opt = NormControl(inner, ratio=1.0, rate=lr_times(1.0))
    weight.grad = torch.zeros_like(weight)
    opt.step()
    saved = copy.deepcopy(inner.state_dict())
    opt.step()
    inner.load_state_dict(saved)
    assert opt.norms()["global"].norm.item() == 4.0
    inner.param_groups[0]["lr"] = 0.25  # of the new group
    weight.data *= 2
    opt.step()
    assert weight.norm().item() == 7.0  # a quarter of the way from 8 to 4
    assert int(opt.state_dict()["param_groups"][0]["control"]["step"]) == opt.clock.calls == 2


def test_a_state_without_control_is_not_loaded_into_the_wrapped_optimizer():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    inner = torch.optim.SGD([weight], lr=0.5)
    without = inner.state_dict()
    opt = NormControl(inner, ratio=1.0)
    weight.grad = torch.zeros_like(weight)
    opt.step()
    inner.load_state_dict(without)
    with pytest.raises(ValueError, match="Load the state into this optimizer instead"):
        opt.step()
