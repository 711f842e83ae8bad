"""The training loop, from top to bottom: data in, weights and metrics out.

Everything that a run depends on is in its config; what the loop writes is enough to go on from any
moment at which it may be stopped, and to end in the same bits.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normcontrol.lab.data import batches as data
from normcontrol.lab.errors import LabError
from normcontrol.lab.training import checkpoint, parallel
from normcontrol.lab.training import optimizers as optim
from normcontrol.lab.training.config import Config, check
from normcontrol.lab.training.device import (
    Stopwatch,
    attention,
    choose,
    memory_advice,
    peak_flops,
    precision,
)
from normcontrol.lab.training.loss import IGNORED
from normcontrol.lab.training.metrics import Log
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.parallel import World
from normcontrol.lab.training.run_folder import (
    CHECKPOINTS,
    begin,
    check_same,
    describe_run,
    held,
    keep_tokenizer,
    write_config,
    write_environment,
)
from normcontrol.lab.training.telemetry import Telemetry, effective_decay
from normcontrol.lab.training.warm import Warm
from normcontrol.scope import SCOPES, join, measure

PATIENCE = 5
"""Steps in a row with a loss or gradient that is not finite, after which a run stops."""


@dataclass(frozen=True)
class Status:
    """What there is to show after a step."""

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
    """Train as ``config`` says in the run folder ``out``; True when finished, False when stopped
    and saved before that.

    Runs that are given the same ``warm`` use one compiled model, if its shape is the same.
    """
    check(config)
    world = parallel.join(config.run.device)
    device = choose(config.run.device, world.local_rank)
    dtype = precision(config.run.precision, device)
    optim.known_name(config.optim.optimizer)
    if resume:
        check_same(out, config)
    elif world.first:
        begin(out, config)
    world.wait()
    lock = held(out) if world.first else contextlib.nullcontext()
    with lock, memory_advice(config), attention(device), interruptible() as interrupted:
        return _train(
            config,
            out,
            world,
            device,
            dtype,
            display,
            interrupted,
            cache or out.parent / "data",
            warm or Warm(),
        )


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
) -> bool:
    # Data: every process reads the same shards and takes its own rows of each batch.
    dataset = _prepared_once(config, world, cache)
    rows = config.data.tokens_per_step // config.model.context
    mine, micro = world.share(rows, config.data.micro_batch)
    batches = data.Batches(dataset.train, config.model.context, rows, config.data.data_seed)
    held_out = data.validation(dataset.val, config.model.context)
    others = [data.load_validation(given, dataset) for given in config.data.also_validate]

    # Model: initialised on the CPU, then scaled, moved, and spread. The ratio is of the norm before
    # it was scaled.
    model = GPT.initialised(config.model, data.padded(dataset.vocab))
    initial_norm = weight_norm(model)
    scaled = config.model.init_scale
    if config.model.init_gain is not None:
        scaled = optim.gain_norm(config.model.init_gain, model.matrices()) / initial_norm
    if scaled != 1:
        torch._foreach_mul_([p.data for p in model.matrices()], scaled)
    model = warm.place(model, device) if world.size == 1 else model.to(device)
    parallel.shard(model, world, config.run.parallel, dtype, device)
    optimizers = optim.build(config, model, scaled)

    # Resume: weights, optimizer and position from the newest checkpoint; metrics cut back to it.
    first, skipped, logged = 1, 0, 0
    newest = checkpoint.latest(out / CHECKPOINTS)
    if newest is not None:
        state = checkpoint.load(newest)
        if state["data"] != dataset.digest:
            raise LabError(
                f"The data in {dataset.folder} is not what {out} was trained on: its digest "
                "differs. Bring the old data back."
            )
        parallel.load_state(model, optimizers, state)
        first, skipped, logged = state["step"] + 1, state["skipped"], state["logged"]
        del state
    log = Log(out, config, writes=world.first, keep=logged, first=first)
    if world.first:
        write_config(out, config)
        write_environment(out, describe_run(device, world.size, dataset))
        keep_tokenizer(dataset.folder, out)

    # How it is computed: fp32 weights, bf16 autocast where the device is good at it, compiled on
    # GPUs.
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
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
                "logged": log.size(),
                "data": dataset.digest,
                "config": config.flat(),
            }
            checkpoint.save(out / CHECKPOINTS, step, {**about, **state})
        world.wait()

    def evaluate_on(windows: list[data.Tokens]) -> float:
        return evaluate(network, windows, micro, world, device, autocast)

    steps = config.run.steps
    if first == 1:
        log.write(
            0,
            val_loss=evaluate_on(held_out),
            ratio=weight_norm(model, world) / initial_norm,
            **telemetry.norms(),
        )
    feed = data.feed(
        batches, mine, micro, device, range(first - 1, steps)
    )  # batches count from 0, steps from 1
    accumulation = (mine.stop - mine.start) // micro
    bad: deque[dict[str, Any]] = deque(maxlen=PATIENCE)
    watch, val_loss = Stopwatch(), None
    early = steps_early(optimizers, device)
    network.train()

    for step in range(first, steps + 1):
        lr = optim.lr_at(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

        loss = torch.zeros((), device=device)
        for i in range(accumulation):
            x, y = next(feed)
            if config.model.dropout:
                _seed_dropout(config, step, i, world)
            with parallel.last_only(network, last=i == accumulation - 1):
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
        seen: dict[str, float] = {}  # what a step that is evaluated did to the weights

        # The one wait for the device in a step: is this one to be applied? By now the next batch is
        # on its way, and if the optimizers can read the answer on the device, so is the step
        # itself.
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
            bad.append({"step": step, "loss": float(loss), "grad_norm": float(grad_norm)})
            log.write(step, loss=float(loss), grad_norm=float(grad_norm), skipped=skipped)
        del before
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        watch.tokens += config.data.tokens_per_step
        if len(bad) == PATIENCE:
            _give_up(out, bad, batches, world)

        if step % config.run.log_every == 0 or last:
            ratio, speed = weight_norm(model, world) / initial_norm, watch.lap()
            mfu = speed * flops / peak / world.size if peak else None
            target = optim.target_ratio(config.optim, step, model.matrices(), initial_norm)
            aim = (
                {} if target is None else {"ratio/target": target}
            )  # trackers draw the ratio against it
            if not bad:
                log.write(
                    step, loss=float(loss), grad_norm=float(grad_norm), lr=lr, ratio=ratio, **aim
                )
            log.time(step, tokens_per_second=speed, mfu="unknown" if mfu is None else mfu)
            display(Status(step, steps, float(loss), ratio, target, val_loss, speed, mfu))
        if evaluates:
            val_loss = evaluate_on(held_out)
            elsewhere = {
                f"val_loss_{name}": evaluate_on(data.validation(t, config.model.context))
                for name, t, _ in others
                if last
            }
            log.write(step, val_loss=val_loss, **elsewhere, **seen)
            watch = Stopwatch()
        stop = world.any(interrupted(), device)
        every = config.run.checkpoint_every
        if (every and (step % every == 0 or last)) or (stop and not last):
            save(step)
            watch = Stopwatch()
        if stop and not last:
            log.close()
            return False

    log.close()
    return True


def steps_early(optimizers: list[Optimizer], device: torch.device) -> bool:
    """Whether steps can be on their way before it is known that they are to be applied: on a GPU,
    which would have to wait for the host otherwise, by optimizers that know GradScaler's flag."""
    return device.type == "cuda" and all(
        getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
    )


def step_where(finite: Tensor, optimizers: list[Optimizer]) -> None:
    """A step of the optimizers if ``finite`` says so on the device. They are told as GradScaler
    would tell them."""
    for optimizer in optimizers:
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def weight_norm(model: GPT, world: World | None = None) -> float:
    """The norm of all matrices together, over all processes: what nanoGPT decays and the paper
    controls."""
    scope = SCOPES["global"]
    norm = join(measure([parallel.local(p) for p in model.matrices()], scope), scope)
    return (
        math.sqrt(float(world.total(norm.square())))
        if world and parallel.is_sharded(model)
        else float(norm)
    )


@torch.no_grad()
def evaluate(
    network: nn.Module,
    windows: list[data.Tokens],
    micro: int,
    world: World,
    device: torch.device,
    autocast: Any,
) -> float:
    """The mean loss over the whole validation split, the processes taking turns through it."""
    network.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(windows), micro * world.size):
        # Every process computes in every round, if need be with no rows that count: sharded models
        # gather in step. Every batch is full, the last one with rows whose targets are ignored:
        # another shape would be compiled anew.
        mine = windows[start + world.rank * micro : start + (world.rank + 1) * micro]
        rows = mine or windows[:1]
        tokens = data.stack(rows + rows[:1] * (micro - len(rows))).to(device)
        targets = tokens[:, 1:].clone()
        targets[len(rows) :] = IGNORED
        with autocast:
            loss = network(tokens[:, :-1], targets)
        total += torch.stack(
            [loss.double() * len(mine), torch.tensor(len(mine), dtype=torch.float64, device=device)]
        )
    network.train()
    parallel.settle(network)
    summed, count = world.total(total).tolist()
    return summed / count


def _prepared_once(config: Config, world: World, cache: Path) -> data.Dataset:
    """The data; if it has to be made first, one process makes it and the others wait."""
    if world.first:
        dataset = data.load(config.data.data, config.data.tokenizer, cache)
    world.wait()
    return dataset if world.first else data.load(config.data.data, config.data.tokenizer, cache)


def _seed_dropout(config: Config, step: int, micro: int, world: World) -> None:
    """Dropout as a function of (seed, step, micro-batch, process): nothing to save, nothing to
    restore."""
    torch.manual_seed(hash((config.model.dropout_seed, step, micro, world.rank)) % (1 << 63))


def _give_up(out: Path, bad: deque[dict[str, Any]], batches: data.Batches, world: World) -> None:
    """Stop a run that has lost its way, and leave what is needed to see why."""
    path = out / "not-finite.pt"
    if world.first:
        record = [
            {
                **entry,
                "tokens": batches(entry["step"] - 1, slice(0, batches.rows))[0].to(torch.int32),
            }
            for entry in bad
        ]
        torch.save(record, path)
    raise LabError(
        f"The loss or gradient was not finite in {len(bad)} steps in a row, {bad[0]['step']} to "
        f"{bad[-1]['step']}. None of them was "
        f"applied. Their losses and batches are in {path}; a lower --lr, or a longer --warmup, is "
        "the usual remedy."
    )


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C (or SIGTERM) ask for an orderly end, and the second one force it."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before: dict[int, Any] = {}
    try:
        before |= {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever is, handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
