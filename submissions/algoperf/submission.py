"""AdamWN as a submission to MLCommons AlgoPerf: warm-up and cosine, norm control, no weight decay.

The submission is the five functions of its API, for PyTorch. Own GPU kernels are barred there, so
the step is torch's foreach implementation: ``foreach=True``. ``README.md`` says how to run it.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.nn as dist_nn
from algoperf import spec
from algoperf.pytorch_utils import pytorch_setup

from normcontrol import AdamWN, linear

USE_DDP = pytorch_setup()[0]

BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_silu": 512,
    "imagenet_resnet_gelu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}
"""The global batch sizes of the benchmark's own baselines."""


def get_batch_size(workload_name: str) -> int:
    if workload_name not in BATCH_SIZES:
        raise ValueError(
            f"There is no batch size for the workload {workload_name!r}: add it to BATCH_SIZES."
        )
    return BATCH_SIZES[workload_name]


def init_optimizer_state(
    workload: spec.Workload,
    model_params: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    rng: spec.RandomState,
) -> spec.OptimizerState:
    """AdamWN and the schedule of its learning rate."""
    h, steps = hyperparameters, workload.step_hint
    warmup = max(round(h.warmup_factor * steps), 1)
    optimizer = AdamWN(
        model_params.parameters(),
        lr=h.learning_rate,
        betas=(1.0 - h.one_minus_beta1, h.beta2),
        foreach=True,
        ratio=linear(1.0, h.norm_ratio, steps=warmup),
        rate=min(h.norm_rate_times_steps / steps, 1.0),
    )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return (1 + math.cos(math.pi * done)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "scheduler": scheduler}


def update_params(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    batch: dict[str, spec.Tensor],
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
    train_state: dict[str, Any] | None = None,
) -> spec.UpdateReturn:
    """One step."""
    model, optimizer = current_param_container, optimizer_state["optimizer"]
    model.train()
    optimizer.zero_grad()
    logits, new_model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        dropout_rate=getattr(hyperparameters, "dropout_rate", 0.0),
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=logits,
        mask_batch=batch.get("weights"),
        label_smoothing=getattr(hyperparameters, "label_smoothing", 0.0),
    )
    total, examples = losses["summed"], losses["n_valid_examples"]
    if USE_DDP:  # the mean over the examples of all devices
        total, examples = dist_nn.all_reduce(total), dist_nn.all_reduce(examples)
    loss = total / examples
    loss.backward()
    clip = getattr(hyperparameters, "grad_clip", None)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=clip)
    optimizer.step()
    optimizer_state["scheduler"].step()
    if workload.metrics_logger is not None and (global_step <= 10 or global_step % 500 == 0):
        norm = optimizer.norms()["global"]
        metrics = {"loss": loss.item(), "norm_ratio": norm.ratio.item()}
        workload.metrics_logger.append_scalar_metrics(metrics, global_step)
    return optimizer_state, current_param_container, new_model_state


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
) -> spec.UpdateReturn:
    """The trained weights are those that are evaluated."""
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, spec.Tensor]],
    optimizer_state: spec.OptimizerState,
    current_param_container: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    global_step: int,
    rng: spec.RandomState,
) -> dict[str, spec.Tensor]:
    """The next batch."""
    return next(input_queue)
