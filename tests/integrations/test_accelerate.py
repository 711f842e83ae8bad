"""Accelerate with AdamWN on two processes: DDP and FSDP2 give the norms of one process, and resume."""

from __future__ import annotations

import pytest
import torch
from processes import run

pytest.importorskip("transformers")

from small_llama import batches, make_model

from normcontrol import AdamWN, linear
from normcontrol.watch.trackers import controller, values

CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def accelerated(kind: str, folder: str, resume: bool) -> list[float]:
    """Train six steps with Accelerate and save after three, or resume from that checkpoint. Returns
    the norm after each step."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    if kind == "fsdp":
        from fsdp_on_cpus import use_fsdp_on_cpus

        use_fsdp_on_cpus(
            FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        )
    model = make_model()
    opt = AdamWN(model.named_parameters(), lr=1e-2, ratio=linear(1, 1.5, steps=4), rate=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=6)
    loader = DataLoader(batches(48), batch_size=2 if accelerator.num_processes == 2 else 4)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    if resume:
        accelerator.load_state(folder)
    norms = []
    for batch in accelerator.skip_first_batches(loader, 6) if resume else loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            opt.step()
            opt.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            norms.append(values(opt)["norm/global"])
            if len(norms) == 3 and not resume:
                accelerator.save_state(folder)
    assert type(controller(opt).param_groups[0]["params"][0].data).__name__ == (
        "DTensor" if kind == "fsdp" else "Tensor"
    )
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_accelerate_on_two_processes_gives_the_norms_of_one_and_resumes(kind, tmp_path):
    def norms(ranks: int, to: str, resume: bool = False) -> list[float]:
        one, *others = run(
            accelerated, ranks, kind if ranks > 1 else "ddp", str(tmp_path / to), resume, **CPU
        )
        assert all(other == one for other in others)
        return one

    alone, two = norms(1, "one"), norms(2, "two")
    assert len(alone) == 6
    assert two == pytest.approx(alone, rel=1e-5)
    assert norms(2, "two", resume=True) == two[3:]
