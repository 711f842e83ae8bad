"""An optimizer around another optimizer, whose groups, state and attributes are its own too.

This file knows nothing about norms. It only makes a wrapper look like the optimizer inside it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from inspect import ismethod
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])

HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)
"""The events for which torch keeps hooks on an optimizer."""

EXCHANGES = {
    "*ScheduleFree*": ("train", "eval"),
    "SPlus": ("train", "eval"),
    "Lookahead": ("backup_and_load_cache", "clear_and_load_backup"),
}
"""Methods that exchange the weights for averaged ones and back, for an evaluation, by the name of
the optimizer's class."""


def not_compiled(function: F) -> F:
    """Keep torch.compile out of a function, as torch does it for its own optimizers, with its type.

    The compiler cannot follow the construction of an optimizer that has its groups from another
    one: a compiled function that constructs it calls the constructor as it is. The public
    ``torch.compiler.disable`` does the same, but imports the compiler when a function is
    decorated, which takes as long as importing torch; this one does when the function is called.
    """
    return cast(F, torch._disable_dynamo(function))  # type: ignore[attr-defined]


def not_compiled_before(version: str) -> Callable[[F], F]:
    """Keep the compilers of earlier versions of torch out of a function; later ones trace it."""
    return not_compiled if torch.__version__ < version else lambda function: function


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
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise TypeError(
                f"{type(optimizer).__name__} has no param_groups or no state, so its weights are "
                f"not known. Put {type(self).__name__} around the optimizer inside it, if it has "
                "one."
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

    @not_compiled
    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups as plain data. Hooks run before and after."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self.pack()
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit. Hooks run before and after."""
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"load_state_dict got a {type(state_dict).__name__}, and a state is a dict. Give "
                "what opt.state_dict() returned; torch.load reads it from a file."
            )
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.unpack(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def pack(self) -> dict[str, Any]:
        """Return what :meth:`state_dict` returns, without hooks."""
        return self.optimizer.state_dict()

    def unpack(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`load_state_dict` loads, without hooks."""
        self.optimizer.load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the hooks, as torch does.

        A learning rate scheduler writes a ``step`` that belongs to this very object; the copy has
        that of its class.
        """
        left = ("step", "_opt_called")
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in left and not k.startswith("_optimizer_")
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does it."""
        # Not every optimizer that has a method of its own takes the argument.
        self.optimizer.zero_grad() if set_to_none else self.optimizer.zero_grad(set_to_none=False)

    def __getattr__(self, name: str) -> Any:
        # The wrapped optimizer's own methods, such as schedule-free's train and eval. Private
        # names, and what GradScaler sets, are not looked up there.
        own = ("optimizer", "grad_scale", "found_inf", *type(self).__annotations__)
        if name.startswith("_") or name in own:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.optimizer, name)
        return guarded(self.optimizer, name, found) if ismethod(found) else found


def guarded(optimizer: Optimizer, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of an optimizer; if it moves the weights, a call of it is an error."""
    classes = [c.__name__ for c in type(optimizer).__mro__]
    for pattern, names in EXCHANGES.items():
        if name in names and any(fnmatchcase(c, pattern) for c in classes):
            return method

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = marks(optimizer)
        result = method(*args, **kwargs)
        if marks(optimizer) != before:
            raise RuntimeError(
                f"{type(optimizer).__name__}.{name}() moved the weights past the wrapper, which "
                "controls them in step() alone. Call step() instead, with a closure if the "
                "optimizer takes one. The weights have been moved: load them again."
            )
        return result

    return call


@torch.no_grad()
def marks(optimizer: Optimizer) -> list[tuple[int, str]]:
    """Return numbers that change when the weights do, for every tensor of an optimizer.

    A change through ``p.data`` does not change the version of a tensor; the norm shows it.
    """
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        shard = p.to_local() if hasattr(p, "to_local") else p
        has_norm = shard.is_floating_point() or shard.is_complex()
        found.append((p._version, str(shard.norm().item()) if has_norm else ""))
    return found
