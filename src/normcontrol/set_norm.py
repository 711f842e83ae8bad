"""Multiply weights to a target norm once, before training with any optimizer.

It is one call of the controller's four lines, with a law that goes to the target at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from normcontrol.control import NormControl, control_
from normcontrol.distributed.layouts import ShardError
from normcontrol.groups.members import CONTROL, Controlled, marks_of_decay, members_of
from normcontrol.groups.outputs import split_by_outputs
from normcontrol.groups.settings import Group
from normcontrol.groups.state import state_of
from normcontrol.law import projection
from normcontrol.schedule import Value
from normcontrol.scope import parse_scope
from normcontrol.target import TARGETS


@torch.no_grad()
def set_norm_(
    params: nn.Module | Tensor | Iterable[Any],
    *,
    gain: Value | None = None,
    norm: Value | None = None,
    rms: Value | None = None,
    ratio: Value | None = None,
    scope: Any = "global",
    controlled: Controlled = "matrices",
    outputs: Any = None,
) -> None:
    """Multiply weights so that their norm is the target, in place.

    Call it before training, with any optimizer. DTensors may be sharded. A model that is sharded in
    another way is an error, where that can be recognised. Weights whose norm is on target to the
    precision of their dtype are not changed, so a second call with the same absolute target changes
    nothing. A ``ratio`` refers to the current norm, so every call with it multiplies again.

    Args:
        params: a model, its parameters (named or not), one of them, or parameter groups. In a
            model, weights that are stored transposed are recognised by their modules, and weights
            that are computed from others, as by ``torch.nn.utils.parametrizations``, are refused.
            Groups are not changed. A group that has a target of its own gets that one, except for
            the groups of an optimizer under norm control, which get the target given here.
        gain, norm, rms, ratio: the target, see :class:`NormControl`. A ratio refers to the current
            norm. A schedule stands for its value at step 0, before training.
        scope: which weights share a norm, and so a factor.
        controlled: which tensors.
        outputs: for a gain, the axes that count outputs, if not the first one.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    >>> set_norm_(model, gain=0.8)
    >>> joint = torch.cat([p.flatten() for p in model.parameters() if p.dim() > 1]).norm()
    >>> round(joint.item(), 5), round(0.8 * (32 + 4) ** 0.5, 5)
    (4.8, 4.8)
    """
    if gain is norm is rms is ratio is None:
        raise ValueError("set_norm_ needs a target: give one of gain=, norm=, rms= and ratio=.")
    computed: dict[int, str] = {}
    if isinstance(params, nn.Module):
        computed = computed_weights(params)
        params = split_by_outputs([{"params": list(params.named_parameters())}], params)
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise TypeError(
            f"set_norm_ got a {type(params).__name__}, which is neither a model nor a list of "
            "tensors or groups. Give the model, such as set_norm_(model, gain=0.8), or its "
            "parameters."
        )
    params = [params] if isinstance(params, Tensor) else list(params)
    if params and isinstance(params[0], dict):
        params = own_groups(params)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Nothing is controlled")  # refuse() says it
            still = NormControl(
                Still(params),
                gain=gain,
                norm=norm,
                rms=rms,
                ratio=ratio,
                scope=scope,
                controlled=controlled,
                outputs=outputs,
            )
        refuse(still, computed)
    except ShardError as error:
        raise ValueError(f"{error.fact} {WHOLE}") from None
    for s in still.sets:
        # The factor and every product are rounded once.
        s.law = OnTarget(2 * max(torch.finfo(p.dtype).eps for p in s.params))
        if s.shards is not None:
            still.stepper.sum_over_ranks([s])
        s.choose_goal(still.clock)
        control_(s, still.stepper)


WHOLE = "Call set_norm_ before the model is sharded, or use FSDP2, whose DTensors are understood."


def own_groups(groups: list[Group]) -> list[Group]:
    """Return new groups, with what tells the tensors of these and how they share norms.

    Where some groups decay and others do not, those that decay are controlled, as by AdamWN.
    """
    found = []
    for group, mark in zip(groups, marks_of_decay(groups), strict=True):
        if isinstance(group["params"], Iterator):  # it can be read once: the caller needs it too
            group["params"] = list(group["params"])
        control = {name: group[CONTROL][name] for name in SHARES} if CONTROL in group else {}
        own = {name: group[name] for name in (*LISTS, *SHARES, *TARGETS) if name in group}
        found.append(({} if mark == "matrices" else {"controlled": mark}) | own | control)
    return found


LISTS, SHARES = ("params", "param_names"), ("controlled", "outputs", "scope")
"""The keys of a group that are its tensors, and those that say which of them share a norm."""


class Still(Optimizer):
    """An optimizer that moves nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class OnTarget:
    """A law: go to the target at once, and stay there if the norm is on target to a tolerance."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def __call__(self, norm: Tensor, target: Tensor, rate: Any) -> Tensor:
        scale = projection(norm, target)
        return torch.where((scale - 1).abs() <= self.tolerance, 1.0, scale)


def computed_weights(model: nn.Module) -> dict[int, str]:
    """Return the weights that a model computes, by the ids of the parameters that they depend on.

    They are those of ``torch.nn.utils.parametrize``, and of the hooks that weight normalisation,
    spectral normalisation and pruning had before and still have.
    """
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        sources: dict[str, list[nn.Parameter]] = {
            name: [own[key] for key in keys]
            for name in vars(module)
            for keys in ([f"{name}_orig"], [f"{name}_g", f"{name}_v"])
            if isinstance(getattr(module, name), Tensor) and own.keys() >= {*keys}
        }
        if is_parametrized(module):
            lists: Any = module.parametrizations
            sources |= {name: list(parts.parameters()) for name, parts in lists.items()}
        for name, tensors in sources.items():
            found |= dict.fromkeys(map(id, tensors), f"{path}.{name}".removeprefix("."))
    return found


def refuse(still: NormControl, computed: Mapping[int, str]) -> None:
    """Refuse tensors whose norm cannot be set. ``computed`` is of :func:`computed_weights`."""
    for group, (names, tensors) in zip(
        still.param_groups, members_of(still.param_groups), strict=True
    ):
        sizes = parse_scope(state_of(group)["scope"]).sizes(tensors)
        norms = state_of(group).reference.split(sizes)
        for name, p, parts in zip(names, tensors, norms, strict=True):
            if id(p) in computed:
                raise ValueError(
                    f"The model computes {computed[id(p)]} from {name}, as by a parametrization, "
                    "so that the norm of the one is not that of the other. Call set_norm_ before "
                    "the parametrization is added, or leave the tensor out with controlled=. To "
                    "set the norm of what is stored, give param_groups(model, {}), not the model."
                )
            if not p.requires_grad:
                raise ValueError(
                    f"{name} is frozen (requires_grad=False), so its norm would not be set. "
                    "Unfreeze it first, or leave it out with controlled=."
                )
            if not bool(torch.isfinite(parts).all()):
                raise ValueError(
                    f"{name} has weights that are NaN or infinite: no factor brings it to a "
                    "target. Initialise it again, or leave it out with controlled=."
                )
            if not bool((parts > 0).all()):
                raise ValueError(
                    f"{name} is zero, in whole or in a part that has a norm of its own: no factor "
                    "brings it to a target. Initialise it first, or leave it out with controlled=."
                )
    if not still.sets:
        raise ValueError(
            "set_norm_ has nothing to set: no tensor that was given has two or more dimensions or "
            "is selected by controlled=. Give such tensors, or controlled=True for all of them."
        )
