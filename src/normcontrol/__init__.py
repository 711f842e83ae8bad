"""Weight norm control (Loshchilov, 2023): control the norm of the weights instead of decaying them.

The public names. A name is imported when it is first used, so that the command ``normcontrol`` can
answer ``--help`` without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normcontrol import law as law
    from normcontrol import methods as methods
    from normcontrol import predict as predict
    from normcontrol.adamwn import AdamWN as AdamWN
    from normcontrol.control import NormControl as NormControl
    from normcontrol.groups.members import param_groups as param_groups
    from normcontrol.groups.readings import Reading as Reading
    from normcontrol.predict import recipes as recipes
    from normcontrol.schedule import Schedule as Schedule
    from normcontrol.schedule import constant as constant
    from normcontrol.schedule import cosine as cosine
    from normcontrol.schedule import eta_times as eta_times
    from normcontrol.schedule import every as every
    from normcontrol.schedule import linear as linear
    from normcontrol.schedule import lr_squared_times as lr_squared_times
    from normcontrol.schedule import lr_times as lr_times
    from normcontrol.schedule import paper_ratio as paper_ratio
    from normcontrol.schedule import piecewise as piecewise
    from normcontrol.schedule import sqrt_lr_times as sqrt_lr_times
    from normcontrol.schedule import trace as trace
    from normcontrol.set_norm import set_norm_ as set_norm_
    from normcontrol.watch.average import reproject_ as reproject_
    from normcontrol.watch.trace import NormTrace as NormTrace

__version__ = "0.2.0"

__all__ = [
    "AdamWN",
    "NormControl",
    "NormTrace",
    "Reading",
    "Schedule",
    "constant",
    "cosine",
    "eta_times",
    "every",
    "law",
    "linear",
    "lr_squared_times",
    "lr_times",
    "methods",
    "paper_ratio",
    "param_groups",
    "piecewise",
    "predict",
    "recipes",
    "reproject_",
    "set_norm_",
    "sqrt_lr_times",
    "trace",
]

_MODULES = {
    "law": "law",
    "methods": "methods",
    "predict": "predict",
    "recipes": "predict.recipes",
}
_HOMES = {
    "AdamWN": "adamwn",
    "NormControl": "control",
    "NormTrace": "watch.trace",
    "Reading": "groups.readings",
    "param_groups": "groups.members",
    "reproject_": "watch.average",
    "set_norm_": "set_norm",
}
"""The modules of the other public names, as far as that is not ``schedule``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'schedule')}")
        value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
