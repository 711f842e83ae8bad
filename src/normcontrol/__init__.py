"""Weight norm control (Loshchilov, 2023): hold the norm of the weights instead of decaying them."""

from normcontrol import predict, recipes
from normcontrol.adamwn import AdamWN
from normcontrol.average import reproject_
from normcontrol.control import NormControl
from normcontrol.policy import param_groups
from normcontrol.record import NormTrace
from normcontrol.schedule import Schedule, constant, cosine, eta_times, linear, lr_times, piecewise, trace
from normcontrol.sets import Reading

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
