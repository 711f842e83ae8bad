"""The configs that studies start from at each scale, and the rule that shrinks an experiment of the
paper to fewer steps. They do not depend on any particular study."""

from __future__ import annotations

import math

from normcontrol.lab.training.config import Config, preset

PAPER = preset("gpt2").with_(
    lr=1e-3,
    min_lr=0.1,
    warmup=2000,
    weight_decay=0.1,
    ramp=2500,
    rate=1e-2,
    eval_every=1000,
    log_every=100,
)
"""nanoGPT's settings with those of the paper: batches of 491,520 tokens."""

TINY = preset("tiny").with_(
    layers=2, width=64, context=64, steps=1000, warmup=40, ramp=50, init_gain=None
)
"""Smaller than the preset, because a study has many runs, and with more steps, because decay and
control need steps to take effect. Studies start as the paper does, unless they say otherwise."""


def base(scale: str) -> Config:
    """The config that a scale starts from. Runs of a minute write no checkpoints, and curves have
    about a hundred points."""
    if scale == "tiny":
        return TINY.with_(checkpoint_every=0, log_every=10, eval_every=100)
    if scale == "small":
        small = preset("small").with_(init_gain=None)
        return small.with_(checkpoint_every=0, log_every=15, eval_every=125)
    return PAPER


def shrunk(config: Config, by: float, into: Config) -> Config:
    """An experiment of the paper in ``1/by`` of its steps, with the model, the batch and the logs
    of ``into``, and the paper's initial weights.

    ``lr * weight_decay * steps`` and ``lr / weight_decay`` stay the same, so that decay and noise
    balance at the same norm after the same share of the run. The rate is multiplied by ``by``;
    warm-up and ramp are divided by it.

    >>> small = shrunk(PAPER.with_(steps=50_000), 100, preset("tiny"))
    >>> o = small.optim
    >>> small.run.steps, round(o.lr, 6), round(o.weight_decay, 6), o.rate, o.warmup, o.ramp
    (500, 0.01, 1.0, 1.0, 20, 25)
    """
    o, steps = config.optim, round(config.run.steps / by)
    return into.with_(
        **{
            key: getattr(o, key)
            for key in (
                "optimizer",
                "min_lr",
                "schedule",
                "betas",
                "clip",
                "ratio",
                "ratio_start",
                "scope",
                "norm_layers",
            )
        },
        init_gain=config.model.init_gain,
        steps=steps,
        lr=o.lr * math.sqrt(by),
        weight_decay=o.weight_decay * math.sqrt(by),
        rate=min(o.rate * by, 1.0),
        warmup=round(o.warmup / by),
        ramp=round(o.ramp / by),
    )
