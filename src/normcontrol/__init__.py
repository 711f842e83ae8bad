"""Weight norm control (Loshchilov, 2023): hold the norm of the weights instead of decaying them."""

from normcontrol import predict
from normcontrol.adamwn import AdamWN
from normcontrol.control import NormControl
from normcontrol.groups.members import param_groups
from normcontrol.groups.readings import Reading
from normcontrol.predict import recipes
from normcontrol.schedule import (
    Schedule,
    constant,
    cosine,
    eta_times,
    linear,
    lr_times,
    piecewise,
    trace,
)
from normcontrol.watch.average import reproject_
from normcontrol.watch.trace import NormTrace

__version__ = "0.1.0"

__all__ = [
    "AdamWN",
    "NormControl",
    "NormTrace",
    "Reading",
    "Schedule",
    "constant",
    "cosine",
    "eta_times",
    "linear",
    "lr_times",
    "param_groups",
    "piecewise",
    "predict",
    "recipes",
    "reproject_",
    "trace",
]
