"""timm: importing this module adds ``adamwn`` to timm's registry of optimizers.

It is then available to ``create_optimizer_v2`` and ``train.py --opt adamwn``. timm makes the
parameter groups: with any weight decay other than 0, the tensors that timm would decay are
controlled.
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
