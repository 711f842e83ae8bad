"""One typed config for everything a run depends on, and the presets.

The command line is made from these dataclasses: a field is a flag, and the text under it is its
help. A run folder stores the whole config as JSON, which is all that a resume needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from normcontrol.lab.errors import LabError, nearest


@dataclass(frozen=True)
class Model:
    """The network: GPT-2, as nanoGPT builds it."""

    layers: int = 12
    """Transformer blocks."""
    heads: int = 12
    """Attention heads; the width must be divisible by them."""
    width: int = 768
    """Width of the residual stream."""
    context: int = 1024
    """Tokens that the model sees at once."""
    bias: bool = False
    """Biases in linear layers and LayerNorms."""
    dropout: float = 0.0
    """Share of activations dropped in training."""
    init_seed: int = 0
    """Seed of the initial weights."""
    init_scale: float = 1.0
    """Multiply the initial weight matrices by this. Ratios are still of the norm without it."""
    init_gain: float | None = None
    """Multiply the initial weight matrices by one factor, so that their joint norm is this times
    the square root of the number of their rows. Ratios are still of the norm without it. Exclusive
    with init_scale."""
    dropout_seed: int = 0
    """Seed of dropout."""


@dataclass(frozen=True)
class Data:
    """What it is trained on, and how much of it at a step."""

    data: str = "python"
    """A folder made by `normcontrol prepare`, a folder with nanoGPT's train.bin and val.bin, or
    "python": the standard library of the Python that runs, its sources and docs."""
    tokenizer: str = "bpe:1024"
    """For "python" only: "gpt2", "bytes", or "bpe:SIZE" to train one on the corpus."""
    data_seed: int = 0
    """Seed of the order of the data. Runs with the same seed see the same batch at the same step,
    whatever else differs."""
    tokens_per_step: int = 491_520
    """Tokens in a batch, over all processes."""
    micro_batch: int = 16
    """Sequences that one process computes at a time. Only memory and speed depend on it."""
    also_validate: tuple[str, ...] = ()
    """Other data to validate on after the last step: folders like those for --data, of which
    val.bin alone is enough."""


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning rate, and the control of the norm."""

    optimizer: str = "AdamWN"
    """AdamWN, any other method of `normcontrol methods`, or any optimizer of torch.optim, by
    name."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 0.1
    """Final learning rate, as a share of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: along a cosine to the final rate, or stable and then straight down to it
    (wsd)."""
    warmup: int = 2000
    """Steps over which the learning rate grows from zero to its peak."""
    decay: float = 0.2
    """wsd only: the share of all steps that the final descent takes."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's betas, for optimizers that have them."""
    weight_decay: float = 0.1
    """Decay of matrices. Where the norm is controlled, nothing is decayed and this is not used."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for none."""
    ratio: float | None = None
    """Hold the norm of the matrices at this multiple of their initial norm (r_t); works with every
    optimizer. AdamWN's default is 2."""
    gain: float | None = None
    """Control the norm of the matrices at this times the square root of the number of their rows,
    from the first step and without a ramp. Exclusive with ratio."""
    hidden_only: bool = False
    """Control the matrices inside the blocks alone. Embeddings and head are then neither controlled
    nor decayed. Needs AdamWN."""
    ratio_start: float = 1.0
    """The ratio that the ramp starts from."""
    ramp: int = 2500
    """Steps over which the ratio grows from its start; 0 for none."""
    rate: float = 1e-2
    """How much of the way to its target the norm goes at each step (k_t)."""
    scope: Literal["global", "group", "tensor", "row", "col"] = "global"
    """Which weights share a controlled norm."""
    norm_layers: bool = False
    """Control the gains of LayerNorms too, as the paper's appendix did. AdamWN only."""


@dataclass(frozen=True)
class Run:
    """How long, on what, and what is written down."""

    steps: int = 100_000
    """Steps of the optimizer."""
    log_every: int = 10
    """Steps between lines of training loss and norm in metrics.jsonl."""
    eval_every: int = 1000
    """Steps between evaluations over the whole validation split."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end, and on Ctrl-C. 0: on Ctrl-C
    only."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"...; "auto" takes a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 computes under autocast over fp32 weights; "auto" takes it where the device is fast at
    it."""
    compile: bool = True
    """torch.compile the model. On CPU it is never compiled: that would take longer than a tiny
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
        """All fields by their own names, which are unique."""
        return {
            key: value for part in dataclasses.asdict(self).values() for key, value in part.items()
        }

    def with_(self, **changes: Any) -> Config:
        """A copy with some fields changed, by their own names.

        >>> Config().with_(lr=2e-3, layers=6).optim.lr
        0.002
        """
        for key in changes:
            if key not in self.flat():
                raise LabError(f"{key!r} is not a setting of a run. {nearest(key, self.flat())}")
        parts = {}
        for f in dataclasses.fields(self):
            part = getattr(self, f.name)
            own = {g.name: changes[g.name] for g in dataclasses.fields(part) if g.name in changes}
            parts[f.name] = replace(part, **own)
        return Config(**parts)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a config that :meth:`save` wrote; keys this version does not know are refused by
        name."""
        try:
            stored = json.loads(path.read_text())
        except FileNotFoundError:
            raise LabError(
                f"{path.parent} holds no run: there is no {path.name} in it. Give the folder of a "
                "run."
            ) from None
        except ValueError as error:
            raise LabError(
                f"{path} is not readable as JSON ({error}): restore it from a copy, or start a new "
                "run."
            ) from None
        flat = {
            key: tuple(value) if isinstance(value, list) else value
            for part in stored.values()
            for key, value in part.items()
        }
        return cls().with_(**flat)


def check(config: Config) -> None:
    """Refuse what cannot be run, before anything is spent on it."""
    m, d, o, r = config.model, config.data, config.optim, config.run
    if m.width % m.heads:
        raise LabError(
            f"width={m.width} is not divisible by heads={m.heads}: each head takes an equal share. "
            "Change one of them."
        )
    for name in (
        "layers",
        "heads",
        "width",
        "context",
        "tokens_per_step",
        "micro_batch",
        "steps",
        "log_every",
        "eval_every",
    ):
        if config.flat()[name] < 1:
            raise LabError(f"{name}={config.flat()[name]}: it must be 1 or more.")
    if r.checkpoint_every < 0:
        raise LabError(
            f"checkpoint_every={r.checkpoint_every}: it must be 1 or more, or 0 for none."
        )
    for name in ("lr", "init_scale"):
        if not config.flat()[name] > 0:
            raise LabError(f"{name}={config.flat()[name]}: it must be above 0.")
    _check_gains(m, o)
    if d.tokens_per_step % m.context:
        below = max(d.tokens_per_step // m.context, 1) * m.context
        raise LabError(
            f"tokens_per_step={d.tokens_per_step} is not divisible by context={m.context}: a batch "
            "is whole sequences. "
            f"Use {below} or {below + m.context}."
        )
    if o.warmup >= r.steps:
        raise LabError(
            f"warmup={o.warmup} leaves nothing of steps={r.steps}: use a shorter warm-up, "
            f"{max(r.steps // 20, 1)} for example."
        )
    if o.schedule == "wsd" and not 0 < o.decay <= 1:
        raise LabError(
            f"decay={o.decay}: it is the share of the steps that wsd's final descent takes. Give a "
            "number in (0, 1]."
        )


def _check_gains(m: Model, o: Optim) -> None:
    """Refuse a gain that is not a positive number, or that goes with another target or start."""
    for name, value in (("gain", o.gain), ("init_gain", m.init_gain)):
        if value is not None and not 0 < value < math.inf:
            raise LabError(f"{name}={value}: it must be above 0 and finite.")
    if m.init_gain is not None and m.init_scale != 1:
        raise LabError(
            f"init_gain={m.init_gain} and init_scale={m.init_scale} both set the norm of the "
            "initial weights. Give one of them."
        )
    if o.gain is not None and o.ratio is not None:
        raise LabError(
            f"gain={o.gain} and ratio={o.ratio} are two targets for the same norm. Give one of "
            "them."
        )
    if o.gain is not None and (o.scope != "global" or o.norm_layers):
        raise LabError(
            "gain is the target of the joint norm of the matrices: it needs scope=global, and "
            "norm_layers off."
        )
    if o.hidden_only and (o.optimizer.lower() != "adamwn" or o.norm_layers):
        raise LabError("hidden_only needs optimizer=AdamWN, and norm_layers off.")


TINY = Config(
    Model(layers=4, heads=4, width=128, context=128),
    Data(tokens_per_step=1024, micro_batch=16),
    Optim(lr=4e-3, warmup=25, weight_decay=0.5, ramp=25, rate=0.1),
    Run(steps=500, log_every=5, eval_every=50, checkpoint_every=250),
)
SMALL = Config(
    Model(layers=6, heads=8, width=512, context=512),
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
    """The fields in which two configs differ: name to (old, new)."""
    then, now = old.flat(), new.flat()
    return {key: (then[key], now[key]) for key in then if then[key] != now[key]}


def field_type(name: str) -> Any:
    """The declared type of a field, for reading values given as text."""
    for part in (Model, Data, Optim, Run):
        hints = get_type_hints(part)
        if name in hints:
            return hints[name]
    raise LabError(f"{name!r} is not a setting of a run. {nearest(name, Config().flat())}")
