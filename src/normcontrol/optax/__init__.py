"""Weight norm control for JAX: a gradient transformation for optax chains, and AdamWN made with it.

The same method as for torch; the four lines are in ``control.py``. Everything is a pure function of
arrays, so that ``jit``, sharding and checkpoints need no code of their own. From the torch side it
uses scopes, names of targets, warnings and the checks of numbers only. Needs the extra ``jax``.
"""

try:
    import jax  # noqa: F401
    import optax
except ImportError as missing:
    raise ImportError(
        f"normcontrol.optax needs jax and optax, and {missing.name} is not installed: pip install "
        "'normcontrol[jax]'."
    ) from missing

if tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 5):
    raise ImportError(
        "normcontrol.optax is tested with optax 0.2.5 and newer, but this is "
        f"{optax.__version__}: pip install -U optax."
    )

from normcontrol.optax.adam import adamwn
from normcontrol.optax.control import NormControlState, control_norm
from normcontrol.optax.laws import LAWS, proportional
from normcontrol.optax.readings import Reading, norms
from normcontrol.optax.rounding import DROPPED_BITS
from normcontrol.optax.selection import Mask
from normcontrol.optax.settings import Value, paper_ratio

__all__ = [
    "DROPPED_BITS",
    "LAWS",
    "Mask",
    "NormControlState",
    "Reading",
    "Value",
    "adamwn",
    "control_norm",
    "norms",
    "paper_ratio",
    "proportional",
]
