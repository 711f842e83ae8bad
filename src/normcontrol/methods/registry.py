"""The registry of published methods: a table with a row for each, and how to find a row by name.

A method is a function that constructs an optimizer, and the decorator :func:`method` adds it to
:data:`METHODS`. This file knows nothing about any method in particular.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

Betas = tuple[float, float]
BETAS: Betas = (0.9, 0.999)
"""Adam's default betas, for all methods that are built on Adam."""


@dataclass(frozen=True)
class Method:
    """A row of the table: what a method controls, towards which target, and by which law."""

    name: str
    build: Callable[..., Any]
    """Constructs the optimizer, or a list of optimizers."""
    scope: str
    target: str
    law: str
    reference: str
    """The publication."""
    hidden: bool = False
    """True if the authors apply the method to hidden matrices only, not to embeddings and heads."""

    @property
    def takes_model(self) -> bool:
        """True if the method changes the model, so that it takes that in place of parameters."""
        return next(iter(inspect.signature(self.build).parameters)) == "model"

    @property
    def settings(self) -> set[str]:
        """The names of its settings, with those that it passes on to Adam."""
        _, *takes = inspect.signature(self.build).parameters
        return {"eps", "fused", "foreach", *takes} - {"adam"} if "adam" in takes else set(takes)

    def __call__(self, params: Any, **settings: Any) -> list[Optimizer]:
        """Construct the method's optimizers. Settings that the method does not have are ignored."""
        takes = self.settings
        built = self.build(
            params, **{key: value for key, value in settings.items() if key in takes}
        )
        return built if isinstance(built, list) else [built]


METHODS: dict[str, Method] = {}
"""All methods by name, in the order of the table in the documentation."""


def method(
    name: str, *, scope: str, target: str, law: str, reference: str, hidden: bool = False
) -> Callable[[Any], Any]:
    """Return a decorator that adds a function to :data:`METHODS` under this name.

    The function constructs an optimizer. Its docstring states the exact rule. The other arguments
    are the row's columns, see :class:`Method`.
    """

    def register(build: Any) -> Any:
        METHODS[name] = Method(name, build, scope, target, law, reference, hidden)
        return build

    return register


def find(name: str) -> Method:
    """Return the method with this name. Upper and lower case are the same.

    >>> find("cpr-ki0").name
    'CPR-kI0'
    """
    known = {key.lower(): found for key, found in METHODS.items()}
    if name.lower() in known:
        return known[name.lower()]
    mentions = [
        m.name
        for m in METHODS.values()
        if len(name) > 3 and name.lower() in (m.build.__doc__ or "").lower()
    ]
    near = mentions or [
        known[key].name for key in difflib.get_close_matches(name.lower(), known, 3, 0.5)
    ]
    advice = (
        f"Do you mean {' or '.join(near)}?"
        if near
        else f"The known methods are {', '.join(METHODS)}."
    )
    raise ValueError(f"There is no method {name!r}. {advice}")
