"""An optimizer around another optimizer, whose groups, state and attributes are its own too.

This file knows nothing about norms. It only makes a wrapper look like the optimizer inside it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)
"""The events for which torch keeps hooks on an optimizer."""


class Wrapper(Optimizer):
    """An optimizer that composes another one; there is no second copy of groups and state."""

    optimizer: Optimizer
    """The wrapped optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{type(self).__name__} wraps a torch.optim.Optimizer, but got "
                f"{type(optimizer).__name__}. Construct the optimizer first: "
                f"{type(self).__name__}(torch.optim.SGD(model.parameters(), lr=0.1)). In JAX, put "
                "normcontrol.optax.control_norm last in the chain."
            )
        if isinstance(optimizer, Wrapper):
            raise TypeError(
                "The optimizer is under norm control already; give its settings there, by group if "
                "necessary."
            )
        self.optimizer = optimizer
        # What Optimizer.__init__ creates beside groups and state, which are the wrapped one's.
        for event in HOOKS:
            setattr(self, f"_optimizer_{event}_hooks", OrderedDict())
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the hooks, as torch does."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_optimizer_")}

    def __getattr__(self, name: str) -> Any:
        # The wrapped optimizer's own methods, such as schedule-free's train and eval. Private
        # names, and what GradScaler sets, are not looked up there.
        own = ("optimizer", "grad_scale", "found_inf", *type(self).__annotations__)
        if name.startswith("_") or name in own:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optimizer, name)
