"""Converts the settings of a run of one size to those of another size, by published rules. It may
not know anything about a model but its width.

Each rule is applied to one quantity, and each sentence of ``why`` names its source. None of the
rules is shown by the runs of this project: ``docs/transfer.md`` has what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from normcontrol.predict.learning_rates import is_finite
from normcontrol.predict.recipe import Recipe


@dataclass(frozen=True)
class Size:
    """The size of a training run.

    Attributes:
        width: the width of the hidden layers.
        batch: the number of tokens in a step.
        tokens: the number of tokens in the whole run.
    """

    width: float
    batch: float
    tokens: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not (is_finite(value) and value > 0):
                raise ValueError(
                    f"{f.name}={value!r}: it must be finite and above 0. Give the {f.name} of the "
                    "run as a number."
                )
        if self.tokens < self.batch:
            raise ValueError(
                f"tokens={self.tokens:g} is less than batch={self.batch:g}: the run would be "
                "shorter than one step. Give both in the same unit, such as tokens."
            )

    @property
    def steps(self) -> float:
        """The number of steps, ``tokens / batch``."""
        return self.tokens / self.batch


def transfer(
    source: Size,
    target: Size,
    *,
    lr: float,
    weight_decay: float | None = None,
    gain: float | None = None,
    hidden_lr: float | None = None,
    hidden_weight_decay: float | None = None,
) -> Recipe:
    """Settings for a run of the size ``target``, from those of a run of the size ``source``.

    The learning rate is multiplied by the square root of the factor of the batch. Then either the
    decay of AdamW is chosen so that ``lr * weight_decay * steps`` stays the same, or the gain of
    AdamWN is kept. ``why`` says which rule gives each setting, with its source. The settings are
    arguments of this function too: ``transfer(b, a, **recipe.settings)`` goes back.

    Args:
        source, target: the sizes of the two runs.
        lr: the peak learning rate of the source.
        weight_decay: its weight decay, for AdamW.
        gain: its target norm as a gain, for AdamWN.
        hidden_lr: the learning rate of its hidden matrices, for a model in muP: it is then made
            proportional to 1 / width. Default: hidden matrices have no learning rate of their own.
        hidden_weight_decay: their weight decay. Default: ``weight_decay``.

    >>> base = Size(width=256, batch=65_536, tokens=52_428_800)
    >>> longer = Size(width=256, batch=65_536, tokens=4 * 52_428_800)
    >>> print(transfer(base, longer, lr=2e-3, weight_decay=0.3))
    AdamW(lr=0.002, weight_decay=0.075)
    equal: lr * weight_decay * steps, 0.48
    why: lr is kept at x4 the tokens: no rule is applied. ...
    why: weight_decay x0.25: it keeps lr * weight_decay * steps, ...
    """
    given = {
        "lr": lr,
        "weight_decay": weight_decay,
        "gain": gain,
        "hidden_lr": hidden_lr,
        "hidden_weight_decay": hidden_weight_decay,
    }
    _check(given)
    width, batch, tokens, steps = (
        getattr(target, name) / getattr(source, name)
        for name in ("width", "batch", "tokens", "steps")
    )
    factors = {"lr": math.sqrt(batch)}
    if hidden_lr is not None:
        factors["hidden_lr"] = factors["lr"] / width
        if weight_decay is not None and hidden_weight_decay is None:
            given["hidden_weight_decay"] = weight_decay
    if gain is not None:
        factors["gain"] = 1.0
    else:
        factors |= {
            key.replace("lr", "weight_decay"): 1 / (factor * steps)
            for key, factor in factors.items()
        }
    settings: dict[str, Any] = {key: given[key] * factors[key] for key in factors}  # type: ignore[operator]
    why = (
        *_of_batch(batch),
        *_of_tokens(tokens),
        *_of_width(width, hidden_lr is not None),
        *_of_regularisation(factors),
    )
    if gain is not None:
        return Recipe("AdamWN", settings, f"the gain, {gain:.4g}", why=why)
    products = {
        f"{prefix}lr * {prefix}weight_decay": settings[f"{prefix}lr"]
        * settings[f"{prefix}weight_decay"]
        for prefix in ("", "hidden_")
        if f"{prefix}lr" in settings
    }
    for name, product in products.items():
        if product > 1:
            raise ValueError(
                f"{name} would be {product:.4g} in a run of {target.steps:,.0f} steps: more than "
                "all of the weights in one step. Give more tokens or a smaller batch."
            )
    equal = ", ".join(f"{name} * steps, {x * target.steps:.4g}" for name, x in products.items())
    return Recipe("AdamW", settings, equal, why=why)


def _check(given: dict[str, float | None]) -> None:
    decay, gain = given["weight_decay"], given["gain"]
    if (decay is None) == (gain is None):
        raise ValueError(
            f"weight_decay={decay} and gain={gain}: give exactly one of them, the decay of AdamW "
            "or the gain of AdamWN."
        )
    if given["hidden_weight_decay"] is not None and (gain is not None or not given["hidden_lr"]):
        raise ValueError(
            f"hidden_weight_decay={given['hidden_weight_decay']} is for AdamW with a learning rate "
            "of its own for hidden matrices. Give weight_decay and hidden_lr too, or leave it out."
        )
    for name, value in given.items():
        if value is not None and not (is_finite(value) and value > 0):
            raise ValueError(
                f"{name}={value!r}: it must be finite and above 0. Give such a number."
            )


GAIN = (
    "gain is kept: the question of this project's study transfer. That this is better than keeping "
    "a decay is refuted there on a GPT of 0.17 M weights, and not shown on one of 18 M. At four "
    "times the learning rate AdamWN at gain 0.8 ended higher than AdamW on both (docs/transfer.md)"
)
"""Why the gain is kept."""


def _of_batch(factor: float) -> list[str]:
    if factor == 1:
        return []
    return [
        f"lr x{math.sqrt(factor):.4g}, the square root of the batch's x{factor:.4g}: the rule of "
        "Adam where the noise of gradients dominates, that is, for batches that are not too large "
        "(Malladi et al., arXiv 2205.10287, who change 1 - beta1 and 1 - beta2 in proportion to "
        "the batch too; betas are not changed here). Not shown here: the study transfer kept lr "
        "at other batches"
    ]


def _of_tokens(factor: float) -> list[str]:
    if factor == 1:
        return []
    return [
        f"lr is kept at x{factor:.4g} the tokens: no rule is applied. Lower learning rates are "
        "reported to be better in longer runs, such as tokens^-0.32 where the norm is kept "
        "(HyperP, arXiv 2603.28743). Not shown here"
    ]


def _of_width(factor: float, mup: bool) -> list[str]:
    if factor == 1:
        return []
    if mup:
        return [
            f"hidden_lr / {factor:.4g}, the factor of the width: muP's rule for Adam, 1 / width "
            "for hidden matrices, while embeddings and vectors keep their learning rate (Yang et "
            "al., arXiv 2203.03466). It applies to models whose initial weights and outputs are "
            "scaled as muP demands. Not shown here"
        ]
    return [
        f"lr is kept at x{factor:.4g} the width: no rule is applied. For a model in muP give "
        "hidden_lr, which is then divided by the factor of the width (Yang et al., arXiv "
        "2203.03466). Not shown here: the study transfer kept lr at half to four times its width"
    ]


def _of_regularisation(factors: dict[str, float]) -> list[str]:
    if "gain" in factors:
        return [GAIN]
    changed = [
        f"{key} x{factor:.4g}"
        for key, factor in factors.items()
        if key.endswith("weight_decay") and factor != 1
    ]
    if not changed:
        return []
    return [
        f"{', '.join(changed)}: it keeps lr * weight_decay * steps, so that the weights stay an "
        "average over the same fraction of the run (Wang & Aitchison, arXiv 2405.13698). Not shown "
        "here: no claim of the study transfer compares this rule with a decay that is kept; its "
        "loss was lower in some conditions and higher in others (docs/transfer.md)"
    ]
