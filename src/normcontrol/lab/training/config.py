"""The config of a run as typed dataclasses, the checks of a config, and the presets.

The command line is generated from these dataclasses: each field is a flag, its type says which
values it can have, and the text below it is the help of the flag. A run folder stores the whole
config as JSON. This file may not import torch, and it knows nothing of how a config is carried out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from normcontrol.lab.errors import LabError, nearest
from normcontrol.lab.files import read_json, write_json
from normcontrol.lab.own_files import without_folder
from normcontrol.lab.ranges import (
    Average,
    Count,
    CountOrNone,
    Fraction,
    NotNegative,
    Positive,
    PositiveFraction,
    Probability,
    Seed,
    Shrinkage,
    check_fields,
)


@dataclass(frozen=True)
class Model:
    """The network: GPT-2, as nanoGPT builds it."""

    layers: Count = 12
    """Number of transformer blocks."""
    heads: Count = 12
    """Number of attention heads. The width must be divisible by it."""
    width: Count = 768
    """Width of the residual stream."""
    context: Count = 1024
    """Length of an input sequence, in tokens."""
    bias: bool = False
    """Use biases in linear layers and LayerNorms."""
    dropout: Probability = 0.0
    """Probability with which an activation is dropped in training."""
    bf16_stream: bool = False
    """If the model computes in bf16, add up the outputs of its blocks in bf16 too, instead of fp32:
    faster, and less exact. nanoGPT adds them in fp32."""
    init_seed: Seed = 0
    """Seed of the initial weights."""
    init_scale: Positive = 1.0
    """Multiply the initial weight matrices by this. Ratios still refer to the norm without it."""
    init_gain: Positive | None = None
    """Gain of the initial weights: all matrices are multiplied by one factor, so that their joint
    norm is this times the square root of the number of their rows. GPT-2's own initial weights are
    made for a width of 768 and more."""
    dropout_seed: Seed = 0
    """Seed of dropout."""


@dataclass(frozen=True)
class Data:
    """The training data, and the size of a batch."""

    data: str = "python"
    """A folder made by `normcontrol prepare`, a folder with nanoGPT's train.bin and val.bin, or
    "python": the sources and docs of the standard library of the running Python."""
    tokenizer: str = "bpe:1024"
    """For "python" only: "gpt2", "bytes", or "bpe:SIZE" to train one on the corpus."""
    data_seed: Seed = 0
    """Seed of the order of the data. Runs with the same seed get the same batch at the same step,
    whatever else differs."""
    unique_tokens: CountOrNone = 0
    """Train on this many tokens of the training split alone, again and again, or 0 for all of
    it. They are drawn once with the data seed, as windows of the context's length."""
    tokens_per_step: Count = 491_520
    """Number of tokens in a batch, over all processes."""
    micro_batch: Count = 16
    """Number of sequences that a process computes at a time. Only memory and speed depend on it."""
    also_validate: tuple[str, ...] = ()
    """Other data to validate on after the last step: folders like those for --data. A folder with
    val.bin alone is enough."""


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning rate, and the control of the norm."""

    optimizer: str = "AdamWN"
    """Name of the optimizer: AdamWN, another method of `normcontrol methods`, any optimizer of
    torch.optim, or path/to/file.py:NAME for one of your own. Arguments may follow:
    "SGD(momentum=0.9)"."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    min_lr: Fraction = 0.1
    """Final learning rate, as a fraction of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: a cosine down to the final rate, or constant and then linear
    down to it (wsd)."""
    warmup: CountOrNone = 2000
    """Number of steps in which the learning rate grows from zero to its peak."""
    decay: PositiveFraction = 0.2
    """wsd only: the fraction of all steps in which the learning rate falls."""
    betas: tuple[Average, Average] = (0.9, 0.95)
    """Adam's betas, for optimizers that have them."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices. Not used if the norm is controlled: then nothing is decayed."""
    clip: NotNegative = 1.0
    """Largest norm of the gradient, or 0 for no clipping."""
    ratio: NotNegative | None = None
    """Target norm of the matrices, as a multiple of their initial norm (r_t). Works with every
    optimizer. Without ratio and gain, AdamWN holds the gain that the weights start from
    (init_gain); without that, it uses the paper's ratio of 2."""
    gain: Positive | None = None
    """Control the norm of the matrices at this times the square root of the number of their rows,
    from the first step and without a ramp. Exclusive with ratio."""
    hidden_only: bool = False
    """Control the matrices inside the blocks alone. Embeddings and head are then neither controlled
    nor decayed. Needs AdamWN."""
    ratio_start: NotNegative = 1.0
    """Ratio at the start of the ramp."""
    ramp: CountOrNone = 2500
    """Number of steps in which the ratio grows from ratio_start to ratio, or 0 for no ramp."""
    growth: Literal["ramp", "walk"] = "ramp"
    """How the ratio grows: in a straight line (ramp), or from 1 over the whole run, as the norm of
    AdamW grows until decay acts (walk)."""
    rate: Fraction = 1e-2
    """Fraction of the distance to its target that the norm moves at each step (k_t)."""
    scope: Literal["global", "group", "tensor", "row", "col"] = "global"
    """Which weights share a controlled norm."""
    norm_layers: bool = False
    """Control the scales of LayerNorms too, as in the paper's appendix. AdamWN only."""
    replay: tuple[Shrinkage, ...] = ()
    """AdamW-replay only: by which fraction the matrices shrink in a step, at steps that are spread
    evenly over the run, the last one included. In between it is interpolated."""
    path: tuple[NotNegative, ...] = ()
    """AdamWN-follow only: the ratios that the norm follows, at steps that are spread in the same
    way."""


@dataclass(frozen=True)
class Run:
    """The length of the run, the device, and what is logged and saved."""

    steps: Count = 100_000
    """Number of optimizer steps."""
    log_every: Count = 10
    """Number of steps between lines of training loss and norm in metrics.jsonl."""
    eval_every: Count = 1000
    """Number of steps between evaluations on the whole validation split."""
    checkpoint_every: CountOrNone = 1000
    """Number of steps between checkpoints. One is also written at the end, and on Ctrl-C. 0: on
    Ctrl-C only."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"...; "auto" uses a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes under autocast with fp32 weights. "auto" uses it on GPUs with bf16 units."""
    compile: bool = True
    """torch.compile the model. On a CPU it is never compiled: that would take longer than a tiny
    run."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: replicate the model (ddp) or shard it (fsdp)."""
    tensorboard: bool = False
    """Also write TensorBoard's event files into the run folder."""
    wandb: str = ""
    """Also log to this Weights & Biases project."""


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)

    def flat(self) -> dict[str, Any]:
        """All fields of all sections by name. Names are unique."""
        parts = (self.model, self.data, self.optim, self.run)
        return {key: value for part in parts for key, value in vars(part).items()}

    def with_(self, **changes: Any) -> Config:
        """A copy with some fields changed, by name. Values become :func:`plain`.

        >>> Config().with_(lr=2e-3, layers=6).optim.lr
        0.002
        """
        by_part: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            if key not in PART_OF:
                raise LabError(f"{key!r} is not a setting of a run. {nearest(key, PART_OF)}")
            own = by_part.setdefault(PART_OF[key], {})
            own[key] = plain(value)
        parts = {part: replace(getattr(self, part), **own) for part, own in by_part.items()}
        return replace(self, **parts)

    def save(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a config that :meth:`save` wrote. Unknown keys are an error that names them."""
        if not path.exists():
            raise LabError(
                f"{path.parent} contains no run: there is no {path.name} in it. Give the folder of "
                "a run."
            )
        stored = read_json(path)
        if not all(isinstance(part, dict) for part in stored.values()):
            raise LabError(f"{path} is not the config of a run. Restore it from a copy.")
        return cls().with_(
            **{key: value for part in stored.values() for key, value in part.items()}
        )


def plain(value: Any) -> Any:
    """A value as JSON can store it: numbers of Python in place of those of numpy and torch, and
    tuples in place of lists.

    >>> plain([1, 2])
    (1, 2)
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


PART_OF = {key: part for part, own in vars(Config()).items() for key in vars(own)}
"""The section of each field of a config."""


def check(config: Config) -> None:
    """Raise :class:`LabError` if the config cannot be run, before any work is done."""
    check_fields(config)
    m, d, o, r = config.model, config.data, config.optim, config.run
    if m.width % m.heads:
        raise LabError(
            f"width={m.width} is not divisible by heads={m.heads}: all heads have the same width. "
            "Change one of them."
        )
    _check_gains(m, o)
    if d.tokens_per_step % m.context:
        below = max(d.tokens_per_step // m.context, 1) * m.context
        raise LabError(
            f"tokens_per_step={d.tokens_per_step} is not divisible by context={m.context}: a batch "
            f"consists of whole sequences. Use {below} or {below + m.context}."
        )
    if o.warmup >= r.steps:
        raise LabError(
            f"warmup={o.warmup} is not less than steps={r.steps}: the learning rate would never "
            f"reach its peak. Use a shorter warm-up, {max(r.steps // 20, 1)} for example."
        )
    if o.schedule == "wsd" and o.min_lr < 1 and o.warmup + o.decay * r.steps > r.steps + 1:
        longest = math.floor(1000 * (1 - o.warmup / r.steps) + 1e-6) / 1000
        raise LabError(
            f"warmup={o.warmup} and decay={o.decay} overlap in steps={r.steps}: the learning rate "
            "would jump down at the end of the warm-up, before it has reached its peak. Use a "
            f"shorter warm-up, or a decay of {longest}."
        )


def _check_gains(m: Model, o: Optim) -> None:
    """Refuse a gain together with another target, or for what has none."""
    if o.gain is not None and o.ratio is not None:
        raise LabError(
            f"gain={o.gain} and ratio={o.ratio} are two targets for the same norm. Give one of "
            "them."
        )
    if o.norm_layers and (o.gain is not None or (o.ratio is None and m.init_gain is not None)):
        raise LabError(
            "norm_layers controls the scales of LayerNorms too, which are vectors and have no "
            "gain. Give a ratio as the target, or omit norm_layers."
        )
    if o.hidden_only and o.norm_layers:
        raise LabError(
            "hidden_only controls the matrices inside the blocks alone, and norm_layers the scales "
            "of LayerNorms too. Give one of them."
        )


TINY = Config(
    Model(layers=4, heads=4, width=128, context=128, init_gain=0.8),
    Data(tokens_per_step=1024, micro_batch=16),
    Optim(lr=4e-3, warmup=25, weight_decay=0.5, ramp=25, rate=0.1),
    Run(steps=500, log_every=5, eval_every=50, checkpoint_every=250),
)
SMALL = Config(
    Model(layers=6, heads=8, width=512, context=512, init_gain=0.8),
    Data(tokenizer="gpt2", tokens_per_step=65_536, micro_batch=128),
    Optim(lr=2e-3, warmup=60, weight_decay=0.5, ramp=75, rate=0.1),
    Run(steps=1500, eval_every=100, checkpoint_every=500),
)
GPT2 = Config(Model(), Data(tokenizer="gpt2", micro_batch=64, tokens_per_step=491_520))

PRESETS: dict[str, Config] = {
    "tiny": TINY,
    "small": SMALL,
    "gpt2": GPT2,
    "medium": GPT2.with_(layers=24, heads=16, width=1024, micro_batch=32),
    "large": GPT2.with_(layers=36, heads=20, width=1280, micro_batch=16),
    "xl": GPT2.with_(layers=48, heads=25, width=1600, micro_batch=8),
}


def preset(name: str) -> Config:
    """A preset by name.

    >>> preset("gpt2").model.width
    768
    """
    if name not in PRESETS:
        raise LabError(f"There is no preset {name!r}. {nearest(name, PRESETS)}")
    return PRESETS[name]


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, as {name: (old, new)}. An optimizer in a user's file
    is the same in any folder."""
    then, now = old.flat(), new.flat()
    for flat in (then, now):
        flat["optimizer"] = without_folder(flat["optimizer"])
    return {key: (then[key], now[key]) for key in then if then[key] != now[key]}


def field_type(name: str) -> Any:
    """The declared type of a field. It is used to parse values that are given as text."""
    for part in (Model, Data, Optim, Run):
        hints = get_type_hints(part)
        if name in hints:
            return hints[name]
    raise LabError(f"{name!r} is not a setting of a run. {nearest(name, Config().flat())}")
