"""Lightning's Trainer and Fabric: norms that are reached and logged, resumes, two processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from processes import run
from small import MATRICES, SmallModel, loss_at, total_norm
from tracked import charts, scalars

pytest.importorskip("lightning")

from lightning import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from normcontrol import AdamWN, NormControl, linear
from normcontrol.integrations.lightning import NormCallback
from normcontrol.watch.trackers import controller, values

STEPS = 8
CPU = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class Learner(LightningModule):
    """The small model with a scheduler, and the norms after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SmallModel()
        self.norms: list[float] = []

    def training_step(self, batch, index):
        # The data depend on the step alone, because a resumed Trainer starts the epoch's batches
        # again, unless the loader saves its position.
        loss = loss_at(self.model, 2 * self.global_step + self.global_rank)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        opt = AdamWN(
            self.named_parameters(), lr=1e-2, ratio=linear(1, 1.5, steps=steps / 2), rate=0.5
        )
        lr = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": lr, "interval": "step"}}

    def on_train_batch_end(self, *_):
        self.norms.append(values(self.optimizers())["norm/global"])

    def matrices(self):
        return [p for name, p in self.model.named_parameters() if name in MATRICES]


def fit(
    folder: Path,
    resume: Path | None = None,
    devices: int = 1,
    learner: LightningModule | None = None,
    **more,
) -> LightningModule:
    """Train with a checkpoint after every four steps, and return the module."""
    checkpoints = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    chosen = {
        "max_steps": STEPS,
        "logger": False,
        "callbacks": [checkpoints, NormCallback()],
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that the data loader has few workers
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            **chosen,
        )
        learner = learner or Learner()
        trainer.fit(
            learner, torch.utils.data.DataLoader(torch.arange(64), shuffle=False), ckpt_path=resume
        )
    return learner


def test_trainer_reaches_the_target_logs_it_and_resumes_bit_for_bit(tmp_path):
    before = total_norm(Learner().matrices())
    logger = TensorBoardLogger(tmp_path, name="", version="board")
    whole = fit(tmp_path, logger=[logger, CSVLogger(tmp_path, name="", version="csv")])
    norm = total_norm(whole.matrices())
    assert norm == pytest.approx(1.5 * before, rel=0.03)

    drawn = scalars(tmp_path / "board")
    assert [value for _, value in drawn["norm/global"]] == pytest.approx(whole.norms)
    assert drawn["norm/global"][-1][1] == pytest.approx(norm)
    assert drawn["norm/global/target"][-1][1] == pytest.approx(1.5 * before)
    assert charts(tmp_path / "board") == {"norm/global": ["^norm/global$", "^norm/global/target$"]}
    assert "norm/global/target" in (tmp_path / "csv/metrics.csv").read_text().splitlines()[0]

    again = fit(tmp_path / "again", resume=tmp_path / "step=4.ckpt")
    assert again.norms == whole.norms[4:]
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_gradient_accumulation_and_clipping(tmp_path):
    learner = fit(tmp_path, max_steps=3, accumulate_grad_batches=4, gradient_clip_val=0.5)
    assert len(learner.norms) == 12
    assert int(learner.optimizers().param_groups[0]["control"]["step"]) == 3


def test_several_optimizers_are_logged_under_their_index(tmp_path):
    class Two(Learner):
        automatic_optimization = False

        def configure_optimizers(self):
            first = NormControl(torch.optim.SGD(self.model.up.parameters(), lr=0.1), ratio=1.0)
            return first, AdamWN(self.model.down.parameters(), lr=0.1)

        def training_step(self, batch, index):
            loss_at(self.model, int(batch[0])).backward()
            for opt in self.optimizers():
                opt.step()
                opt.zero_grad()

        def on_train_batch_end(self, *_):
            pass

    learner = fit(tmp_path, learner=Two(), max_steps=2)
    assert {"optimizer 0/norm/global", "optimizer 1/norm/global/target"} <= set(
        learner.trainer.callback_metrics
    )


def test_an_optimizer_without_control_is_an_error(tmp_path):
    class WithAdamW(Learner):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(
        TypeError,
        match=r"but configure_optimizers returned AdamW\. Return one of these two, or remove the callback",
    ):
        fit(tmp_path, learner=WithAdamW())


def with_fabric(folder: str, resume: bool, devices: int) -> list[float]:
    """Train eight steps with Fabric and save after four, or resume from that checkpoint. Returns
    the norm after each step."""
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    model = SmallModel()
    opt = AdamWN(model.named_parameters(), lr=1e-2, ratio=linear(1, 1.5, steps=4), rate=0.5)
    model, opt = fabric.setup(model, opt)
    state, norms = {"model": model, "opt": opt, "step": 0}, []
    if resume:
        fabric.load(Path(folder, "checkpoint.pt"), state)
    for step in range(state["step"], STEPS):
        fabric.backward(loss_at(model, 2 * step + fabric.global_rank))
        opt.step()
        opt.zero_grad()
        norms.append(values(opt)["norm/global"])
        state["step"] = step + 1
        if step == 3 and not resume:
            fabric.save(Path(folder, "checkpoint.pt"), state)
    assert type(controller(opt)) is AdamWN
    return norms


def test_fabric_resumes_bit_for_bit(tmp_path):
    whole = with_fabric(str(tmp_path), False, 1)
    assert len(whole) == STEPS
    assert with_fabric(str(tmp_path), True, 1) == whole[4:]


def norms_of_fit(folder: str, resume: bool) -> list[float]:
    return fit(
        Path(folder), Path(folder, "step=4.ckpt") if resume else None, devices=2, strategy="ddp"
    ).norms


def fabric_on_two(folder: str, resume: bool) -> list[float]:
    return with_fabric(folder, resume, 2)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [norms_of_fit, fabric_on_two])
def test_two_processes_have_the_same_norm_and_resume(loop, tmp_path):
    one, two = run(loop, 2, str(tmp_path), False, **CPU)
    assert one == two
    assert len(one) == STEPS
    assert run(loop, 2, str(tmp_path), True, **CPU) == [one[4:], one[4:]]


class Unfreezing(BaseFinetuning):
    """Trains one layer from the second epoch on, in a group of its own."""

    def freeze_before_training(self, learner):
        self.freeze(learner.model.up)

    def finetune_function(self, learner, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(learner.model.up, optimizer, lr=1e-3)


class Beginner(Learner):
    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return AdamWN(trained, lr=1e-2, ratio=linear(1, 1.5, steps=STEPS), rate=0.5)


def test_a_run_that_unfreezes_layers_is_resumed(tmp_path):
    """The callback stores the groups in its own state, which torch.load reads as plain data."""

    def run_of(epochs, checkpoint=None):
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(max_epochs=epochs, callbacks=[Unfreezing()], accelerator="cpu", **options)
        trainer.fit(Beginner(), [0] * 4, ckpt_path=checkpoint)
        return trainer

    first = run_of(2)
    first.save_checkpoint(tmp_path / "2.ckpt")
    second = run_of(3, tmp_path / "2.ckpt")
    groups, again = (trainer.optimizers[0].param_groups for trainer in (first, second))
    assert [g["control"].reference.tolist() for g in again] == [
        g["control"].reference.tolist() for g in groups
    ]
    assert [int(g["control"].step) for g in again] == [12, 12]
