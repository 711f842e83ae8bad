"""Norm control as a weight-update hook of NVIDIA's Emerging-Optimizers.

Their optimizers call a hook around the update of every weight: ``pre_weight_update_inplace(p,
update)`` before it, and ``post_weight_update_inplace(p, state)`` after it. :class:`NormControlHook`
has these two methods, and controls the norm of each tensor in them. The package is not imported:
the hook is a structural protocol. Where you construct the optimizer yourself,
``NormControl(Muon(...))`` does the same with fewer words, and can share norms between tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normcontrol.control import NormControl
from normcontrol.groups.members import controlled_params
from normcontrol.groups.settings import USE_UPDATES
from normcontrol.groups.state import settings_of
from normcontrol.scope import parse_scope


class Given(Optimizer):
    """An optimizer whose step is the update that another one has made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.updated: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Set the weight to its updated value, if it was set back to the value before."""
        if self.updated is not None:
            self.param_groups[0]["params"][0].copy_(self.updated)


class NormControlHook:
    """Controls the norm of every weight that an optimizer of Emerging-Optimizers updates.

    Args:
        params: the parameters, named parameters or groups that the optimizer is given too.
        settings: those of :class:`normcontrol.NormControl`. ``scope`` is "tensor" by default, and
            may be "row", "col" or a tuple of axes: the hook is called for one tensor at a time.

    The initial norms are measured at construction. The package does not save the state of hooks:
    save :meth:`state_dict` with your checkpoint if the target is a ratio or a schedule.

    >>> model = torch.nn.Linear(4, 4)
    >>> hook = NormControlHook(model.parameters(), gain=0.5, rate=1.0)
    >>> state = hook.pre_weight_update_inplace(model.weight, update=torch.zeros(4, 4))
    >>> hook.post_weight_update_inplace(model.weight, state)
    >>> round(model.weight.norm().item(), 4)  # a gain of 0.5, and 4 rows
    1.0
    """

    def __init__(self, params: Iterable[Any], *, scope: Any = "tensor", **settings: Any) -> None:
        if parse_scope(scope).joint:
            raise ValueError(
                f"scope={scope!r} is a norm of several tensors, but a hook is called for one at a "
                "time. Use scope='tensor', or wrap the optimizer: NormControl(Muon(...))."
            )
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"NormControlHook got a {type(params).__name__}, which is no list of tensors. Give "
                "the parameters of the model: NormControlHook(model.parameters())."
            )
        groups = NormControl(Given(params), scope=scope, **settings).param_groups
        self.known = {p for group in groups for p in group["params"]}
        """All parameters."""
        self.controls: dict[Tensor, NormControl] = {}
        """A controller for each tensor, with its step count and its initial norm."""
        for index, group in enumerate(groups):
            own = {name: x for name, x in settings_of(group).items() if x is not None}
            own["controlled"] = True
            for name, p in controlled_params(group, index):
                self.controls[p] = NormControl(Given([(name, p)]), **own)

    def pre_weight_update_inplace(self, p: Tensor, update: Tensor) -> Tensor | None:
        """Called before the update of a weight. Returns its value where that is needed later."""
        if p not in self.known:
            raise ValueError(
                f"The hook was called for a tensor of shape {tuple(p.shape)} that it was not given."
                " Construct it with the parameters of the optimizer."
            )
        control = self.controls.get(p)
        if control is None:
            return None
        s = control.sets[0]
        if s.order == "before":
            control.step()
            return None
        is_first = control.clock.calls == 0  # the initial norm is measured at the first step
        return p.detach().clone() if is_first or s.mechanisms & USE_UPDATES else None

    @torch.no_grad()
    def post_weight_update_inplace(self, p: Tensor, pre_update_state: Tensor | None) -> None:
        """Called after the update of a weight."""
        control = self.controls.get(p)
        if control is None or control.sets[0].order == "before":
            return
        given: Any = control.optimizer
        if pre_update_state is not None:
            given.updated = p.detach().clone()
            p.copy_(pre_update_state)
        control.step()
        given.updated = None

    def norms(self) -> dict[str, Any]:
        """Return the readings of all tensors, as :meth:`normcontrol.NormControl.norms` does."""
        return {
            name: r for control in self.controls.values() for name, r in control.norms().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the step counts and initial norms, as plain data."""
        return {"controls": [control.state_dict() for control in self.controls.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, for the same parameters in the same order."""
        if not isinstance(state, Mapping) or "controls" not in state:
            raise ValueError(
                f"load_state_dict got a {type(state).__name__} that state_dict of a hook did not "
                "return. Give what hook.state_dict() returned, and not the whole checkpoint or the "
                "state of the optimizer."
            )
        given = state["controls"]
        if len(given) != len(self.controls):
            raise ValueError(
                f"The state is of {len(given)} tensors, but {len(self.controls)} are controlled. "
                "Construct the hook as it was when the state was saved."
            )
        for control, saved in zip(self.controls.values(), given, strict=True):
            control.load_state_dict(saved)
