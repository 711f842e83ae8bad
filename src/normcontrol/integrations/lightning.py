"""Lightning: a callback that logs the norms to the Trainer's loggers.

The optimizer needs no integration: return an AdamWN from ``configure_optimizers``, or give it to
``fabric.setup``. Fabric has no callback for logs: use
``fabric.log_dict(normcontrol.watch.trackers.values(optimizer))``.
"""

from __future__ import annotations

from typing import Any

from normcontrol.control import NormControl
from normcontrol.integrations import require
from normcontrol.watch.trackers import layout, tensors

require("lightning", "2.0", "lightning.pytorch exists since then")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402


class NormCallback(Callback):
    """Logs the norm, target and ratio of all controlled weights whenever the Trainer logs.

    In TensorBoard, the page "Custom scalars" shows each norm together with its target.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(isinstance(optimizer, NormControl) for optimizer in trainer.optimizers):
            given = ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "none"
            raise TypeError(
                "NormCallback logs the norms of an AdamWN or a NormControl, but "
                f"configure_optimizers returned {given}. Return one of these two, or remove the "
                "callback."
            )
        charts = layout(self._norms(trainer))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(charts)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log_dict(self._norms(trainer), on_step=True, on_epoch=False, batch_size=1)

    def _norms(self, trainer: Trainer) -> dict[str, Any]:
        """The tensors to log, by name. With several optimizers, each name begins with the
        optimizer's index."""
        controlled = [
            (i, optimizer)
            for i, optimizer in enumerate(trainer.optimizers)
            if isinstance(optimizer, NormControl)
        ]
        if len(controlled) == 1:
            return tensors(controlled[0][1])
        return {
            f"optimizer {i}/{name}": norm
            for i, optimizer in controlled
            for name, norm in tensors(optimizer).items()
        }
