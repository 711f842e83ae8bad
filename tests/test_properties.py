"""Any settings, on any path, with any sequence of events between the steps, against Algorithm 1 in
NumPy: save and load, freeze and thaw, edits that autograd does not see, new groups, overflows, NaN."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, here
from stepwise import LR, Stepwise, Weight
from torch import nn

from normcontrol import AdamWN, NormControl

SHAPES = [(3, 4), (2, 2, 2), (5, 1)]
PATHS = {
    "for-loop": (torch.float64, {"foreach": False}),
    "foreach": (torch.float64, {"foreach": True}),
    "folded": (torch.float32, {"fused": True}),
    "around AdamW": (torch.float64, None),
    "around fused AdamW": (torch.float64, {"fused": True}),
}
KERNELS = (torch.float32, {})
"""AdamWN in Triton kernels: on a GPU, or under the interpreter in a process of its own."""

cases = st.fixed_dictionaries(
    {
        "scope": st.sampled_from(["global", "group", "tensor", "row"]),
        "law": st.sampled_from(
            ["proportional", "upper", "lower", "projection", "band(0.5)", "integral"]
        ),
        "order": st.sampled_from(["after", "before"]),
        "target": st.sampled_from(
            [
                ("ratio", 1.5),
                ("ratio", 0.5),
                ("norm", 2.0),
                ("rms", 0.7),
                ("gain", 0.8),
                ("hold", 1.0),
            ]
        ),
        "rate": st.sampled_from([0.0, 0.1, 1.0]),
        "start": st.sampled_from([0, 0, 2]),
    }
)
EVENTS = st.one_of(
    st.just(("step",)),
    st.just(("save and load",)),
    st.tuples(st.sampled_from(["freeze", "thaw"]), st.integers(0, 2)),
    st.tuples(st.just("edit"), st.integers(0, 2), st.sampled_from([0.5, 3.0])),
    st.just(("add a group",)),
    st.just(("overflow",)),
    st.just(("copy",)),
    st.tuples(st.just("NaN"), st.integers(0, 2)),
)


LEARN_NOTHING_FROM_NAN = example(
    case={
        **{"scope": "global", "law": "integral", "order": "after", "target": ("norm", 2.0)},
        **{"rate": 1.0, "start": 0},
    },
    events=[("step",), ("NaN", 0), ("step",), ("overflow",), ("step",)],
)
NOTICE_EDITS = example(
    case={
        **{"scope": "global", "law": "proportional", "order": "before", "target": ("norm", 2.0)},
        **{"rate": 1.0, "start": 0},
    },
    events=[("step",), ("edit", 0, 3.0), ("step",), ("add a group",), ("step",)],
)
FREEZE_BEFORE_THE_START = example(
    case={
        **{"scope": "tensor", "law": "proportional", "order": "after", "target": ("ratio", 1.5)},
        **{"rate": 1.0, "start": 2},
    },
    events=[("step",), ("freeze", 0), ("step",), ("edit", 0, 3.0), ("thaw", 0), ("step",)],
)


def gradients(shapes, t) -> list[np.ndarray]:
    random = np.random.default_rng(t)
    return [random.standard_normal(shape) for shape in shapes]


def whole(p: torch.Tensor) -> np.ndarray:
    return p.detach().double().cpu().numpy().copy()


class Run:
    """One optimizer of the library beside the reference; both see the same events."""

    def __init__(self, path: str, case: dict) -> None:
        self.dtype, self.how = PATHS.get(path, KERNELS)
        self.device = "cpu" if path in PATHS else DEVICE
        self.around = path.startswith("around")
        kind, value = case["target"]
        if case["start"] and kind != "ratio":
            kind, value = "ratio", 1.5
        self.settings = {
            kind: value,
            "outputs": 0,
            **{k: v for k, v in case.items() if k != "target"},
        }
        first = gradients(SHAPES, 1000)
        self.params = [nn.Parameter(self.tensor(w)) for w in first]
        weights = [Weight(whole(p), 0) for p in self.params]
        names = ("scope", "law", "order", "rate", "start")
        self.twin = Stepwise(weights, *(case[n] for n in names[:3]), kind, value, case["rate"],
                             case["start"])  # fmt: skip
        self.sizes = [len(self.params)]
        self.opt = self.optimizer(self.params)
        self.t = 0

    def optimizer(self, params: list[nn.Parameter]) -> NormControl:
        groups, done = [], 0
        for size in self.sizes:
            groups.append({"params": params[done : done + size]})
            done += size
        if not self.around:
            return AdamWN(groups, LR, **(self.how or {}), **self.settings)
        adam = torch.optim.AdamW(groups, LR, weight_decay=0.0, **(self.how or {}))
        return NormControl(adam, **self.settings)

    def tensor(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def grads(self) -> list[np.ndarray]:
        self.t += 1
        return gradients([p.shape for p in self.params], self.t)

    def give(self, grads: list[np.ndarray]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = self.tensor(g) if p.requires_grad else None

    def step(self) -> None:
        grads = self.grads()
        self.give(grads)
        self.opt.step()
        self.twin.step(grads)

    def save_and_load(self) -> None:
        file = io.BytesIO()
        torch.save(self.opt.state_dict(), file)
        file.seek(0)
        self.params = [
            nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in self.params
        ]
        self.opt = self.optimizer(self.params)
        self.opt.load_state_dict(torch.load(file, weights_only=True))

    def copy(self) -> None:
        self.params, self.opt = copy.deepcopy((self.params, self.opt))

    def freeze(self, i: int) -> None:
        self.params[i].requires_grad_(False)
        self.twin.freeze(self.twin.weights[i])

    def thaw(self, i: int) -> None:
        self.params[i].requires_grad_(True)
        self.twin.weights[i].frozen = False

    def edit(self, i: int, factor: float) -> None:
        self.params[i].data.mul_(factor)  # autograd's version counter does not see it
        self.twin.weights[i].theta *= factor

    def add_a_group(self) -> None:
        if len(self.sizes) == 3:
            return
        p = nn.Parameter(self.tensor(gradients([(2, 3)], 77)[0]))
        self.params.append(p)
        self.twin.add(Weight(whole(p), len(self.sizes)))
        self.sizes.append(1)
        self.opt.add_param_group({"params": [p]})

    def overflow(self) -> None:
        """As GradScaler: it calls a fused optimizer with ``found_inf``, and others not at all."""
        if not self.opt._step_supports_amp_scaling:
            return
        self.give([np.full_like(g, np.inf) for g in self.grads()])
        self.opt.grad_scale, self.opt.found_inf = torch.ones(2, device=self.device)
        self.opt.step()
        del self.opt.grad_scale, self.opt.found_inf
        self.twin.begin()

    def nan(self, i: int) -> None:
        """A gradient of NaN, and a user who then restores the weight and Adam's state."""
        before = copy.deepcopy((self.params[i].detach(), self.twin.weights[i]))
        grads = self.grads()
        grads[i][:] = np.nan
        self.give(grads)
        self.opt.step()
        self.twin.step(grads)
        self.check()
        w = self.twin.weights[i]
        if w.frozen:
            return
        with torch.no_grad():
            self.params[i].copy_(before[0])
        w.theta[:] = before[1].theta
        state = self.opt.state[self.params[i]]
        for name, value in (("exp_avg", w.m), ("exp_avg_sq", w.v)):
            state[name].zero_()
            value[:] = 0

    def check(self) -> None:
        tolerance = 1e-7 if self.dtype == torch.float64 else 3e-4
        for p, w in zip(self.params, self.twin.weights, strict=True):
            ours = whole(p)
            assert np.array_equal(np.isfinite(ours), np.isfinite(w.theta))
            if np.isfinite(w.theta).all():
                assert np.linalg.norm(ours - w.theta) <= tolerance * np.linalg.norm(w.theta) + 1e-12
        for reading in self.opt.norms().values():
            assert bool((reading.norm >= 0).all() | ~torch.isfinite(reading.norm).all())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases, events=st.lists(EVENTS, min_size=3, max_size=10))
@LEARN_NOTHING_FROM_NAN
@NOTICE_EDITS
@FREEZE_BEFORE_THE_START
def test_any_settings_and_events_give_algorithm_1(path, case, events):
    happen(path, case, events)


@here
@pytest.mark.cuda
@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases, events=st.lists(EVENTS, min_size=3, max_size=8))
@LEARN_NOTHING_FROM_NAN
@NOTICE_EDITS
@FREEZE_BEFORE_THE_START
def test_any_settings_and_events_give_algorithm_1_in_kernels(case, events):
    happen("kernels", case, events)


def happen(path, case, events) -> None:
    run = Run(path, case)
    for name, *arguments in [*events, ("step",)]:
        method = {"NaN": "nan"}.get(name, name.replace(" ", "_"))
        getattr(run, method)(*arguments)
        run.check()
