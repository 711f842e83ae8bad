"""timm: importing this adds ``adamwn`` to its optimizers, for ``create_optimizer_v2`` and
``train.py --opt adamwn``.

timm makes the groups: with a weight decay (whatever its value), what it would decay is controlled.
"""

from __future__ import annotations

from normcontrol.adamwn import AdamWN
from normcontrol.integrations import require

require("timm", "1.0.12", "other packages can register optimizers since then")

from timm.optim import OptimInfo  # noqa: E402
from timm.optim._optim_factory import default_registry  # noqa: E402

default_registry.register(
    OptimInfo(
        name="adamwn",
        opt_class=AdamWN,
        description="AdamW with weight norm control in place of weight decay",
        has_betas=True,
    )
)
