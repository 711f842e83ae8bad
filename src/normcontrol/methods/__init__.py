"""Published methods that control the size of weights, each as settings of the same controller.

Every function takes what a torch optimizer takes (parameters, named parameters, or groups) and
returns an optimizer. Matrices are controlled unless a group says otherwise. :func:`hidden` makes
the groups for methods that leave embeddings and heads alone. The files sort the methods by what
they do; none of them contains arithmetic of its own.

>>> import torch
>>> model = torch.nn.Linear(8, 8)
>>> opt = cpr(model.parameters(), lr=1e-3, kappa=1.0)
>>> opt = METHODS["max-norm"].build(model.parameters(), lr=0.1, norm=3.0)
"""

# The order of these imports is the order of METHODS, and of the table in the documentation.
# isort: off
from normcontrol.methods.registry import BETAS, METHODS, Betas, Method, find, method
from normcontrol.methods.hidden_matrices import OUTSIDE, hidden
from normcontrol.methods.decay import (
    adam_l2,
    adamc,
    adamw,
    adamw_decoupled,
    adamw_lr_squared,
    cautious,
    hanson_pratt,
)
from normcontrol.methods.targets import (
    adamwn,
    edm2,
    lawn,
    max_norm,
    min_max_norm,
    nap,
    ngpt,
)
from normcontrol.methods.reparametrised import muown, weight_normalised
from normcontrol.methods.constrained import cpr, cpr_inflection, cpr_uniform, cpr_warm_start
from normcontrol.methods.sphere import adamh, muonh, rotational
from normcontrol.methods.steps import radial_brake, relative_update, update_floor
from normcontrol.methods.sizes import qk_clip, spectral
# isort: on

__all__ = [
    "BETAS",
    "METHODS",
    "OUTSIDE",
    "Betas",
    "Method",
    "adam_l2",
    "adamc",
    "adamh",
    "adamw",
    "adamw_decoupled",
    "adamw_lr_squared",
    "adamwn",
    "cautious",
    "cpr",
    "cpr_inflection",
    "cpr_uniform",
    "cpr_warm_start",
    "edm2",
    "find",
    "hanson_pratt",
    "hidden",
    "lawn",
    "max_norm",
    "method",
    "min_max_norm",
    "muonh",
    "muown",
    "nap",
    "ngpt",
    "qk_clip",
    "radial_brake",
    "relative_update",
    "rotational",
    "spectral",
    "update_floor",
    "weight_normalised",
]
