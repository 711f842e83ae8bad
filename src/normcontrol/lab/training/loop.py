"""The training loop: it trains a model as its config says, and writes metrics and checkpoints.

A run depends on nothing but its config. A run that is stopped at any moment can be resumed from the
files in its folder, and ends in the same bits. This file may not know about studies or commands.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol import set_norm_
from normcontrol.distributed.ranks import local
from normcontrol.lab import seeds
from normcontrol.lab.data import batches
from normcontrol.lab.training import checkpoint, parallel
from normcontrol.lab.training.config import Config, check
from normcontrol.lab.training.device import (
    Stopwatch,
    check_stream,
    choose,
    fast_kernels,
    memory_advice,
    peak_flops,
    precision,
)
from normcontrol.lab.training.loss import IGNORED
from normcontrol.lab.training.metrics import NOTHING, Log, Mark
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.not_finite import BadSteps
from normcontrol.lab.training.optimizer_names import file_of, located
from normcontrol.lab.training.optimizers import build, lr_at, target_at
from normcontrol.lab.training.options import check_used
from normcontrol.lab.training.parallel import World
from normcontrol.lab.training.run_folder import (
    CHECKPOINTS,
    check_checkpoint,
    check_data,
    check_optimizer,
    check_same,
    describe_run,
    keep_tokenizer,
    opened,
    same_threads,
    write_config,
    write_environment,
)
from normcontrol.lab.training.signals import interruptible
from normcontrol.lab.training.telemetry import Telemetry, effective_decay
from normcontrol.lab.training.warm import Warm
from normcontrol.scope import SCOPES
from normcontrol.weights.passes import measure


@dataclass(frozen=True)
class Status:
    """The state of a run after a step, for the display."""

    step: int
    steps: int
    loss: float
    ratio: float
    target: float | None
    val_loss: float | None
    tokens_per_second: float
    mfu: float | None


Display = Callable[[Status], None]


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    display: Display = lambda status: None,
    cache: Path | None = None,
    warm: Warm | None = None,
) -> bool:
    """Train as ``config`` says.

    Args:
        config: the config of the run.
        out: the run folder.
        resume: continue the run in the folder. If False, the folder must not contain a run.
        display: called at every step that is logged.
        cache: folder for the prepared embedded corpus. Default: ``data`` beside the run folder.
        warm: compiled models of earlier runs in this process, to be used again.

    Returns:
        True if the run is finished, False if it was interrupted and a checkpoint was saved.
    """
    check(config)
    config = config.with_(optimizer=located(config.optim.optimizer, out))
    world = parallel.join(config.run.device)
    device = choose(config.run.device, world.local_rank)
    dtype = precision(config.run.precision, device)
    check_stream(config, dtype)
    check_used(config)
    if resume:
        check_same(out, config)
    cache, warm = cache or out.parent / "data", warm or Warm()
    with contextlib.ExitStack() as stack:
        if world.first:
            stack.enter_context(opened(out, resume))
        stack.enter_context(memory_advice(config))
        stack.enter_context(fast_kernels(device))
        interrupted = stack.enter_context(interruptible())
        stack.enter_context(same_threads(out, device))
        return _train(config, out, world, device, dtype, display, interrupted, cache, warm, stack)


def _train(
    config: Config,
    out: Path,
    world: World,
    device: torch.device,
    dtype: torch.dtype | None,
    display: Display,
    interrupted: Callable[[], bool],
    cache: Path,
    warm: Warm,
    stack: contextlib.ExitStack,
) -> bool:
    """The whole run in one function, to be read from top to bottom."""
    # Data: every process reads the same shards and takes its own rows of each batch.
    dataset = _load_data(config, world, cache)
    check_data(out, dataset)
    check_optimizer(out, file_of(config))
    rows = config.data.tokens_per_step // config.model.context
    mine, micro = world.share(rows, config.data.micro_batch)
    train_batches = batches.Batches(
        dataset.train,
        config.model.context,
        rows,
        config.data.data_seed,
        config.data.unique_tokens,
    )
    val_windows = batches.validation(dataset.val, config.model.context)
    others = [batches.load_validation(given, dataset) for given in config.data.also_validate]

    # Model: initialised on the CPU, then moved to the device and sharded. Ratios refer to the norm
    # before init_scale.
    model = GPT.initialised(config.model, batches.padded(dataset.vocab))
    if config.model.init_gain is not None:
        set_norm_(model, gain=config.model.init_gain)
    initial_norm = weight_norm(model)
    initial_gain = initial_norm / math.sqrt(sum(p.shape[0] for p in model.matrices()))
    if config.model.init_scale != 1:
        torch._foreach_mul_([p.data for p in model.matrices()], config.model.init_scale)
    model = warm.place(model, device) if world.size == 1 else model.to(device)
    parallel.shard(model, world, config.run.parallel, dtype, device)
    optimizers = build(config, model)
    # The learning rate of each group, relative to that of the run: 1, but for a user's own.
    shares = [[group["lr"] / config.optim.lr for group in opt.param_groups] for opt in optimizers]

    # Resume: load weights, optimizers and step from the newest checkpoint, and truncate the metrics
    # to their size at that checkpoint.
    first, skipped, logged, bad = 1, 0, NOTHING, BadSteps()
    newest = checkpoint.latest(out / CHECKPOINTS)
    if newest is not None:
        state = checkpoint.load(newest)
        check_checkpoint(out, config, dataset, state)
        parallel.load_state(model, optimizers, state)
        first, skipped = state["step"] + 1, state["skipped"]
        bad.load(state.get("bad", ()))
        logged = Mark(state["logged"], state.get("logged_sha256"))
        del state
    log = stack.enter_context(Log(out, config, writes=world.first, keep=logged, first=first))
    if world.first:
        environment = describe_run(device, world.size, dataset, file_of(config))
        write_environment(out, environment, first)
        keep_tokenizer(dataset.folder, out)

    # Computation: fp32 weights, bf16 autocast if chosen, and compiled on GPUs.
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    compiled: Any = warm.compiled(model) if config.run.compile and device.type == "cuda" else model
    network = parallel.replicate(compiled, world, config.run.parallel, device)
    flops, peak = model.flops_per_token(), peak_flops(device)
    telemetry = Telemetry(model, world)

    def save(step: int) -> None:
        state = parallel.state_of(model, optimizers)
        if world.first:
            about = {
                "step": step,
                "skipped": skipped,
                "bad": bad.state(),
                **vars(log.mark()),
                "data": dataset.digest,
                "config": config.flat(),
            }
            checkpoint.save(out / CHECKPOINTS, step, {**about, **state})
        world.wait()

    def evaluate_on(windows: list[batches.Tokens]) -> float:
        return evaluate(network, windows, micro, world, device, autocast)

    steps = config.run.steps
    if first == 1:
        log.write(
            0,
            val_loss=evaluate_on(val_windows),
            ratio=weight_norm(model, world) / initial_norm,
            **telemetry.norms(),
        )
    if world.first:
        write_config(out, config)
    # Batches count from 0, steps from 1.
    feed = batches.feed(train_batches, mine, micro, device, range(first - 1, steps))
    accumulation = (mine.stop - mine.start) // micro
    watch, val_loss = Stopwatch(), None
    early = steps_early(optimizers, device)
    network.train()

    for step in range(first, steps + 1):
        lr = lr_at(config, step)
        for optimizer, its in zip(optimizers, shares, strict=True):
            for group, share in zip(optimizer.param_groups, its, strict=True):
                group["lr"] = share * lr

        loss = torch.zeros((), device=device)
        for i in range(accumulation):
            x, y = next(feed)
            if config.model.dropout:
                _seed_dropout(config, step, i, world)
            with parallel.gradient_sync(network, last=i == accumulation - 1):
                with autocast:
                    part = network(x, y) / accumulation
                part.backward()
            loss += part.detach()
        loss = world.mean(loss)
        grad_norm = parallel.whole(
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip or math.inf)
        )

        last = step == steps
        evaluates = step % config.run.eval_every == 0 or last
        seen: dict[str, float] = {}  # measurements of the weights around an evaluated step

        # The host waits for the device here and only here: it reads whether the loss and the
        # gradient are finite. The next batch is already being loaded. If the optimizers can read
        # the flag on the device, the step is already launched.
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        before = telemetry.copy() if evaluates else []
        if early:
            step_where(finite, optimizers)
        if bool(finite):
            if not early:
                for optimizer in optimizers:
                    optimizer.step()
            if evaluates:
                seen = {
                    **telemetry.norms(),
                    "angle": telemetry.angle(before),
                    **effective_decay(optimizers, lr),
                }
            bad.clear()
        else:
            skipped += 1
            bad.add(step, float(loss), float(grad_norm))
            log.write(step, loss=float(loss), grad_norm=float(grad_norm), skipped=skipped)
        del before
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        watch.tokens += config.data.tokens_per_step
        bad.check(out, train_batches, world)

        logs = step % config.run.log_every == 0 or last
        if logs:
            ratio, speed = weight_norm(model, world) / initial_norm, watch.lap()
            gain = ratio * initial_gain
            mfu = speed * flops / peak / world.size if peak else None
            target = target_at(config, step, initial_gain)
            # Trackers draw a value and its target in one chart.
            aim = {} if target is None else {"ratio/target": target}
            if not evaluates:  # an evaluation writes it too
                aim |= effective_decay(optimizers, lr)
            if not bad:
                seen_now = {"loss": float(loss), "grad_norm": float(grad_norm), "lr": lr}
                log.write(step, **seen_now, ratio=ratio, gain=gain, **aim)
            log.time(step, tokens_per_second=speed, mfu="unknown" if mfu is None else mfu)
        if evaluates:
            val_loss = evaluate_on(val_windows)
            other_losses = {
                f"val_loss_{name}": evaluate_on(batches.validation(t, config.model.context))
                for name, t, _ in others
                if last
            }
            log.write(step, val_loss=val_loss, **other_losses, **seen)
            watch = Stopwatch()
        if logs:
            display(Status(step, steps, float(loss), ratio, target, val_loss, speed, mfu))
        stop = world.any(interrupted(), device)
        every = config.run.checkpoint_every
        if (every and (step % every == 0 or last)) or (stop and not last):
            save(step)
            watch = Stopwatch()
        if stop and not last:
            return False
    return True


def steps_early(optimizers: list[Optimizer], device: torch.device) -> bool:
    """True if a step can be launched before the host knows whether the loss is finite: on a GPU,
    which would otherwise wait for the host, with optimizers that support the ``found_inf`` flag of
    GradScaler."""
    return device.type == "cuda" and all(
        getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
    )


def step_where(finite: Tensor, optimizers: list[Optimizer]) -> None:
    """Launch a step of the optimizers that has an effect only if ``finite``, a flag on the device,
    is true. The flag is passed as ``found_inf``, as GradScaler does."""
    for optimizer in optimizers:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def weight_norm(model: GPT, world: World | None = None) -> float:
    """The joint norm of all matrices, over all processes: of the weights that nanoGPT decays and
    the paper controls."""
    scope = SCOPES["global"]
    norm = scope.join(measure([local(p) for p in model.matrices()], scope))
    return (
        math.sqrt(float(world.total(norm.square())))
        if world and parallel.is_sharded(model)
        else float(norm)
    )


@torch.no_grad()
def evaluate(
    network: nn.Module,
    windows: list[batches.Tokens],
    micro: int,
    world: World,
    device: torch.device,
    autocast: Any,
) -> float:
    """The mean loss over all windows, divided among the processes."""
    network.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(windows), micro * world.size):
        # A sharded model needs all processes in every round, so a process without windows computes
        # one that is not counted. Every batch is filled up to the same shape with rows whose
        # targets are ignored: another shape would be compiled again.
        mine = windows[start + world.rank * micro : start + (world.rank + 1) * micro]
        rows = mine or windows[:1]
        tokens = batches.stack(rows + rows[:1] * (micro - len(rows))).to(device)
        targets = tokens[:, 1:].clone()
        targets[len(rows) :] = IGNORED
        with autocast:
            loss = network(tokens[:, :-1], targets)
        total += torch.stack(
            [loss.double() * len(mine), torch.tensor(len(mine), dtype=torch.float64, device=device)]
        )
    network.train()
    parallel.reshard(network)
    summed, count = world.total(total).tolist()
    return summed / count


def _load_data(config: Config, world: World, cache: Path) -> batches.Dataset:
    """Load the data. If it has to be prepared first, one process does so and the others wait."""
    if world.first:
        dataset = batches.load(config.data.data, config.data.tokenizer, cache)
    world.wait()
    return dataset if world.first else batches.load(config.data.data, config.data.tokenizer, cache)


def _seed_dropout(config: Config, step: int, micro: int, world: World) -> None:
    """Seed dropout with (seed, step, micro-batch, process), so that a checkpoint need not store the
    state of the random number generator."""
    torch.manual_seed(seeds.mixed(config.model.dropout_seed, step, micro, world.rank))
