"""Tests of ``norms()`` and ``report()``: they show what the last step measured, without another pass
over the weights and without waiting for the device."""

from __future__ import annotations

import math
import traceback

import pytest
import torch
from small import SmallModel, matrices, total_norm, train
from torch.utils._python_dispatch import TorchDispatchMode

from normcontrol import AdamWN, NormControl, linear, param_groups, trace
from normcontrol.watch.trackers import values


def trained(steps=5, **settings):
    model = SmallModel()
    opt = AdamWN(model.named_parameters(), lr=1e-2, **settings)
    train(model, opt, range(steps))
    return model, opt


def memory_of(model):
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


class Watch(TorchDispatchMode):
    """Records the memory that operations touch, and every value that is read by the host and depends
    on ``weights``: on a GPU the host would wait for it. Values that do not depend on the weights may
    be read."""

    def __init__(self, weights=()):
        super().__init__()
        self.clear()
        self.dependent = {id(t): t for t in weights}

    def clear(self):
        self.touched, self.read = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
            for x in ((args, kwargs), out)
        )
        self.touched.update(t.untyped_storage().data_ptr() for t in given)
        if any(id(t) in self.dependent for t in given):
            # In-place operations on lists return None: then all arguments count as results.
            self.dependent.update((id(t), t) for t in (given if out is None else made))
            if "_local_scalar_dense" in str(func):
                self.read.append("".join(traceback.format_stack(limit=8)))
        return out


@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row", "col"])
def test_norms_are_those_of_the_current_weights(scope):
    model, opt = trained(scope=scope, ratio=linear(1.0, 2.0, steps=10), rate=0.3)
    readings = opt.norms()
    if scope in ("global", "group"):
        assert list(readings) == ["global" if scope == "global" else "group 0"]
        (reading,) = readings.values()
        assert reading.norm.item() == pytest.approx(total_norm(matrices(model)), rel=1e-6)
        assert reading.ratio.item() == pytest.approx(
            total_norm(matrices(model)) / total_norm(matrices(SmallModel())), rel=1e-6
        )
        assert reading.target.item() == pytest.approx(
            1.5 * total_norm(matrices(SmallModel())), rel=1e-6
        )
        return
    assert list(readings) == ["embed.weight", "up.weight", "down.weight"]
    for name, reading in readings.items():
        p, p0 = (
            model.get_parameter(name).detach().double(),
            SmallModel().get_parameter(name).detach().double(),
        )
        now, first = (
            (w.norm() if scope == "tensor" else w.norm(dim=1 if scope == "row" else 0))
            for w in (p, p0)
        )
        assert torch.allclose(reading.norm, now, rtol=1e-6)
        assert torch.allclose(reading.target, 1.5 * first, rtol=1e-6)
        assert torch.allclose(reading.ratio, now / first, rtol=1e-6)
        assert reading.scale.shape == now.shape


def test_before_the_first_step_norms_are_the_initial_ones():
    model = SmallModel()
    reading = AdamWN(model.parameters(), norm=7.0).norms()["global"]
    assert reading.norm.item() == pytest.approx(total_norm(matrices(model)), rel=1e-7)
    assert (reading.target.item(), reading.ratio.item(), reading.scale.item()) == (7.0, 1.0, 1.0)


@pytest.mark.parametrize("scope", ["global", "tensor", "row"])
def test_norms_read_no_weights_and_do_not_wait_for_the_device(scope):
    model = SmallModel()
    with Watch(model.parameters()) as watch:
        opt = AdamWN(model.named_parameters(), lr=1e-2, scope=scope)
        train(model, opt, range(5))
        watch.clear()
        readings = opt.norms()
    assert watch.touched.isdisjoint(memory_of(model))
    assert not watch.read
    assert all(
        isinstance(value, torch.Tensor) for reading in readings.values() for value in reading
    )


def test_a_report_reads_no_weights():
    model, opt = trained()
    with Watch() as watch:
        opt.report()
    assert watch.touched.isdisjoint(memory_of(model))
    with Watch() as watch:
        opt.step()
    assert watch.touched >= memory_of(model), "a step touches the weights, and the watch detects it"


@pytest.mark.parametrize("scope", ["global", "group", "tensor", "row"])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_reads_nothing_from_the_device(scope, order, dtype):
    """The host reads no value that depends on the weights, so that it never waits for a GPU. The
    folded step of a CPU may read values, because there is nothing to wait for, and so may a set on
    a CPU, which is told here to compute as on a GPU. The kernels for a GPU are tested on a GPU."""
    model = SmallModel(dtype)
    with Watch(model.parameters()) as watch:
        opt = AdamWN(
            model.parameters(),
            ratio=linear(1.0, 2.0, steps=3),
            rate=trace([0.1, 0.2] * 50),
            scope=scope,
            order=order,
            fused=True,
        )
        train(model, opt, range(2))
        for s in opt.sets:
            s.may_be_on_host = False
        watch.clear()
        opt.step()
    waited = [stack for stack in watch.read if "steppers/folded.py" not in stack]
    assert not waited, "\n".join(waited)
    watch.clear()
    with watch:
        opt.norms()[next(iter(opt.norms()))].norm.sum().item()
    assert len(watch.read) == 1, "this line reads one value, and the watch detects it"


def test_the_effective_decay_is_the_decay_with_the_same_scale():
    model = SmallModel()
    opt = AdamWN(model.parameters(), lr=0.01, ratio=0.5, rate=0.1)
    train(model, opt, range(3))
    reading = opt.norms()["global"]
    assert reading.decay(0.01).item() == pytest.approx((1 - reading.scale.item()) / 0.01)
    assert (1 - 0.01 * reading.decay(0.01)).item() == pytest.approx(reading.scale.item())
    assert opt.norms()["global"].decay(0.01) > 0


def test_the_report_is_a_table_of_the_controlled_tensors():
    model = SmallModel()
    groups = param_groups(model, {"embed.*": {"scope": "tensor", "ratio": 1.0}})
    opt = AdamWN(groups, ratio=linear(1.0, 2.0, steps=10), rate=0.5)
    train(model, opt, range(5))
    lines = opt.report().splitlines()
    assert lines[0] == "AdamWN: 3 of 8 tensors controlled, 344 weights, step 5"
    assert (
        "scope global, ratio linear(start=1.0, end=2.0, steps=10), rate 0.5, law proportional, "
        "after the step" in lines
    )
    assert "scope tensor, ratio 1.0, rate 0.5, law proportional, after the step" in lines
    (whole,) = (line.split() for line in lines if line.startswith("all of them"))
    two = [model.up.weight, model.down.weight]
    assert whole[3:] == [
        f"{total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4g}",
        f"{total_norm(two):.4g}",
        f"{total_norm(two) / math.sqrt(16 + 8):.4f}",
        f"{total_norm(two) / total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4f}",
        f"{1.5 * total_norm([SmallModel().up.weight, SmallModel().down.weight]):.4g}",
    ]
    (embed,) = (line.split() for line in lines if line.startswith("embed.weight"))
    assert embed[1] == "11x8"
    assert embed[3] == f"{total_norm([model.embed.weight]):.4g}"


def test_a_report_shows_the_settings_of_its_numbers_while_an_edit_is_pending():
    """Saving the state had removed the kind of target that the report looked up."""
    model = SmallModel()
    opt = AdamWN(model.parameters(), ratio=1.5, rate=0.5)
    opt.param_groups[0]["control"].update(norm=2.0, rate=0.1)
    opt.state_dict()
    assert "scope global, ratio 1.5, rate 0.5, law proportional, after the step" in opt.report()
    train(model, opt, range(1))
    assert "scope global, norm 2.0, rate 0.1, law proportional, after the step" in opt.report()


def test_the_report_of_a_wrapped_optimizer_names_it():
    opt = NormControl(torch.optim.SGD(SmallModel().parameters(), lr=0.1))
    assert opt.report().startswith("NormControl around SGD: 3 of 8 tensors")


@pytest.mark.parametrize("scope", ["global", "row"])
def test_norms_of_weights_that_are_scaled_cautiously_are_those_before_the_scaling(scope):
    """Half of the weights are scaled, so that the norm after it is known to another pass alone."""
    p = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    settings = {"ratio": 0.0, "rate": 0.5, "cautious": True, "scope": scope}
    opt = NormControl(torch.optim.SGD([("p", p)], lr=1.0), **settings)
    p.grad = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    opt.step()
    moved = torch.tensor([[2.0, 5.0], [5.0, 9.0]], dtype=torch.float64)
    expected = moved.norm(dim=1) if scope == "row" else moved.norm()
    (reading,) = opt.norms().values()
    torch.testing.assert_close(reading.norm, expected, rtol=1e-6, atol=0)
    assert reading.scale.tolist() == ([0.5, 0.5] if scope == "row" else 0.5)
    assert torch.equal(p.detach(), torch.tensor([[0.5, 5.0], [2.0, 9.0]]))
    logged = values(opt)
    assert next(iter(logged.values())) == pytest.approx(moved.norm().item())
    assert "cautious (the norm is that before the scaling)" in opt.report()
    (row,) = (line.split() for line in opt.report().splitlines() if line.startswith("p "))
    assert row[3] == f"{moved.norm().item():.4g}"


def test_tensors_of_the_same_name_have_names_of_their_own():
    """Two models in one optimizer: no reading may hide another, or its target."""
    models = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    for size, model in zip((1.0, 2.0, 4.0), models, strict=True):
        torch.nn.init.constant_(model.weight, size)
    pair = [*models[0].named_parameters(), *models[1].named_parameters()]
    groups = [{"params": pair}, {"params": list(models[2].named_parameters())}]
    opt = NormControl(torch.optim.SGD(groups, lr=0.0), ratio=1.5, scope="tensor")
    names = ["weight, group 0, tensor 0", "weight, group 0, tensor 1", "weight, group 1"]
    assert [(name, r.target.item()) for name, r in opt.norms().items()] == [
        *zip(names, (3.0, 6.0, 12.0), strict=True)
    ]
    rows = [line for line in opt.report().splitlines() if line.startswith("weight")]
    found = [(row.split("  ")[0], float(row.split()[-1])) for row in rows]
    assert found == [*zip(names, (3.0, 6.0, 12.0), strict=True)]
    assert len(values(opt)) == 9


def test_the_report_names_the_implementation_that_a_loaded_state_brought():
    """A state contains ``fused``, as torch's does, and the one that is loaded replaces ours."""
    model = SmallModel()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, range(2))
    opt = AdamWN(model.parameters(), fused=True)
    assert "the step runs in torch's fused implementation" in opt.report()
    with pytest.warns(UserWarning, match="no reference norms"):
        opt.load_state_dict(adamw.state_dict())
    assert "the step runs in torch's default implementation" in opt.report()
    opt.param_groups[0]["fused"] = True
    assert "the step runs in torch's fused implementation" in opt.report()
