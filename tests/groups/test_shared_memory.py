"""Parameters that share memory: the same weights count once, and views that overlap are refused."""

import pytest
import torch
from small import total_norm
from torch.nn import Parameter

from normcontrol import AdamWN, NormControl
from normcontrol.weights.memory import overlaps

PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def trained(**options) -> list[torch.Tensor]:
    """A few steps of a matrix under two names, and of another one."""
    generator = torch.Generator().manual_seed(0)
    matrix, other = (Parameter(torch.randn(n, 6, generator=generator)) for n in (4, 5))
    params = [matrix, Parameter(matrix.detach()), other]
    opt = AdamWN(params, lr=0.01, ratio=1.5, rate=0.1, **options)
    for _ in range(10):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    assert opt.norms()["global"].norm.item() == pytest.approx(total_norm([matrix, other]), rel=1e-6)
    return [matrix.detach(), other.detach()]


def test_weights_with_two_names_count_once_on_every_path():
    one, *rest = (trained(**options) for options in PATHS.values())
    for other in rest:
        assert all(torch.allclose(p, q, rtol=1e-5) for p, q in zip(one, other, strict=True))


MEMORY = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("other", "shape"),
    [
        (MEMORY.t(), r"\(6, 4\)"),
        (MEMORY.view(6, 4), r"\(6, 4\)"),
        (MEMORY[1:], r"\(3, 6\)"),
        (MEMORY[:, 2:4], r"\(4, 2\)"),
        (MEMORY[0], r"\(6,\)"),
        (MEMORY.view(torch.bfloat16)[0], r"\(12,\)"),
    ],
    ids=["transposed", "reshaped", "rows", "columns", "a vector", "another dtype"],
)
@pytest.mark.parametrize("controlled", ["the first", "the second", "neither"])
def test_views_that_overlap_are_refused_by_name(other, shape, controlled):
    groups = [
        {"params": [("whole", Parameter(MEMORY))], "controlled": controlled == "the first"},
        {"params": [("part", Parameter(other))], "controlled": controlled == "the second"},
        {"params": [("rest", Parameter(torch.ones(2, 2)))], "controlled": True},
    ]
    if controlled == "neither":
        NormControl(torch.optim.SGD(groups, lr=0.1))
        return
    with pytest.raises(
        ValueError,
        match=rf"whole of shape \(4, 6\) and part of shape {shape} are different views of the same",
    ):
        NormControl(torch.optim.SGD(groups, lr=0.1))


def edit(opt: AdamWN) -> None:
    opt.param_groups[0]["control"]["rate"] = 0.5
    opt.step()


EVENTS = {
    "edit": edit,
    "load": lambda opt: opt.load_state_dict(opt.state_dict()),
    "add": lambda opt: opt.add_param_group({"params": [Parameter(torch.ones(3, 3))]}),
}


@pytest.mark.parametrize("tied", [True, False], ids=["untied", "tied"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_weights_that_are_tied_or_untied_after_the_first_step_are_refused_at_an_event(tied, event):
    """The error was one of torch, about the sizes of a split. A step alone does not notice it."""
    p, q = Parameter(torch.randn(4, 4)), Parameter(torch.randn(4, 4))
    opt = AdamWN([p, q], lr=0.0, norm=2.0, rate=1.0)
    q.data = p.data if tied else q.data  # before the first step it is noticed
    opt.step()
    assert opt.norms()["global"].norm.item() == pytest.approx(total_norm([p] if tied else [p, q]))
    q.data = q.data.clone() if tied else p.data
    with pytest.raises(ValueError, match=r"norms to control now: .* Tie weights before the first"):
        event(opt)


def test_a_group_that_overlaps_another_is_refused_when_it_is_added():
    opt = AdamWN([("whole", Parameter(MEMORY))])
    with pytest.raises(ValueError, match=r"whole .* and row .* are different views"):
        opt.add_param_group({"params": [("row", Parameter(MEMORY[:1]))]})
    assert len(opt.param_groups) == 1


def test_parts_of_one_memory_are_tensors_of_their_own():
    columns = [Parameter(part) for part in MEMORY.split(2, dim=1)]
    flat = torch.ones(10)
    pieces = [Parameter(flat[:4].view(2, 2)), Parameter(flat[4:].view(2, 3))]
    opt = AdamWN(columns + pieces)
    assert len(opt.sets[0].params) == 5
    assert opt.norms()["global"].norm.item() == pytest.approx(total_norm([MEMORY, flat]))


def test_tensors_without_memory_share_none():
    empty, row = torch.zeros(0, 3), torch.zeros(1, 4)
    meta = [torch.zeros(2, 2, device="meta") for _ in range(2)]
    sparse = torch.eye(2).to_sparse()
    assert overlaps([empty, empty, *meta, sparse, sparse]) == []
    assert overlaps([row, row.as_strided((1, 4), (7, 1))]) == [(0, 1)]
