"""Hugging Face: AdamWN for Trainer and its relatives (TRL), and its norms in whatever Trainer
reports to.

Accelerate alone needs nothing of this: ``accelerator.prepare`` takes an AdamWN as it is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

import normcontrol
from normcontrol.groups.members import members_of
from normcontrol.integrations import require
from normcontrol.target import TARGETS
from normcontrol.warn import warn_once
from normcontrol.watch.trackers import layout, values

require("transformers", "4.47", "Trainer takes optimizer_cls_and_kwargs since then")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

if TYPE_CHECKING:
    from normcontrol.groups.settings import Group

ZERO_AT_START = re.compile(r"\.lora_B\b|\.lora_embedding_A\b")
"""What PEFT's adapters start at zero, by name."""


def adamwn(
    args: TrainingArguments, model: nn.Module | None = None, **settings: Any
) -> tuple[type, dict[str, Any]]:
    """AdamWN for ``Trainer(optimizer_cls_and_kwargs=...)``, with the learning rate, betas and
    epsilon of ``args``.

    Trainer makes the groups. With a weight decay in ``args`` (whatever its value), what Trainer
    would decay is controlled; with its default of 0, tensors with two or more dimensions.

    Args: args: the training arguments. model: the model as Trainer gets it, for readable names;
        adapters of PEFT need it. settings: those of :class:`normcontrol.AdamWN`. The default here
        is ``ratio=1.0``, which keeps the norm that the loaded
            weights have, as fine-tuning wants it; to train from scratch, ``ratio=linear(1, 2,
            steps=...)`` is the paper's.
    """
    if not args.weight_decay:
        warn_once(
            "Trainer without decay",
            "TrainingArguments has weight_decay=0, which marks nothing: AdamWN controls the "
            "tensors with two or more dimensions. Any other "
            "value makes it control exactly what Trainer would decay; the value itself is not "
            "used.",
        )
    if not any(name in settings for name in TARGETS):
        settings["ratio"] = 1.0
    adam = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    return AdamWN, {**adam, "named": model, **settings}


class AdamWN(normcontrol.AdamWN):
    """:class:`normcontrol.AdamWN` as Trainer constructs it: from groups without names, which
    ``named`` has."""

    def __init__(self, params: Any, *, named: nn.Module | None = None, **settings: Any) -> None:
        groups = [dict(group) for group in params]
        super().__init__(groups if named is None else _with_names(groups, named), **settings)
        if named is None:
            self._refuse_zeros()

    def _refuse_zeros(self) -> None:
        """A tensor that starts at zero may be an adapter's, which only its name can tell."""
        for group, (_, params) in zip(
            self.param_groups, members_of(self.param_groups), strict=True
        ):
            zeros = (
                [
                    p
                    for p, norm in zip(params, group["control"].reference, strict=False)
                    if norm == 0
                ]
                if group["scope"] == "global"
                else []
            )
            if zeros:
                raise ValueError(
                    f"{len(zeros)} of the {len(params)} tensors to be controlled are zero at the "
                    "start (the first has the shape "
                    f"{tuple(zeros[0].shape)}), as LoRA's B are. Under a joint norm they could "
                    "only grow as fast as the others shrink. "
                    "Give the model, so that such adapters are known by name and left alone: "
                    "adamwn(args, model)."
                )


def _with_names(groups: list[Group], model: nn.Module) -> list[Group]:
    """The groups with names in them, and adapters that start at zero in groups of their own, which
    are left alone."""
    names = {id(p): name for name, p in model.named_parameters()}
    unknown = sum(id(p) not in names for group in groups for p in group["params"])
    if unknown:
        raise ValueError(
            f"The optimizer got {unknown} parameters that are not in the model given to "
            "adamwn(args, model). Give the model that Trainer "
            "trains: with PEFT, wrap it with get_peft_model first and give the result to both."
        )
    free = [
        (names[id(p)], p)
        for group in groups
        for p in group["params"]
        if ZERO_AT_START.search(names[id(p)])
    ]
    made = [
        _group(
            group, [(n, p) for p in group["params"] if not ZERO_AT_START.search(n := names[id(p)])]
        )
        for group in groups
    ]
    if free:
        warn_once(
            "adapters that start at zero",
            f"{free[0][0]} and {len(free) - 1} more are left alone: adapters start them at zero, "
            "so there is no initial norm to hold a "
            "ratio to. What is controlled is the other factor. To bound both, give AdamWN groups "
            "of your own, with an absolute rms= for "
            "these.",
        )
        made.append({**_group(groups[0], free), "controlled": False})
    return made


def _group(group: Group, named: list[tuple[str, Any]]) -> Group:
    """The names as torch keeps them: it takes none out of a group without tensors, as Trainer makes
    them for adapters."""
    return {**group, "params": [p for _, p in named], "param_names": [name for name, _ in named]}


class NormCallback(TrainerCallback):
    """Adds the norms to what Trainer logs. :func:`log_norms` puts it where every reporter sees
    them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._laid_out = False

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if optimizer is None or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        norms = values(optimizer)  # on every rank: under sharding this may be a joint effort
        logs.update(norms)
        state.log_history[-1].update(norms)
        writer = next(
            (
                w
                for c in self.trainer.callback_handler.callbacks
                if (w := getattr(c, "tb_writer", None)) is not None
            ),
            None,
        )
        if writer is not None and not self._laid_out:
            writer.add_custom_scalars(
                layout("train/" + name for name in norms)
            )  # as Trainer calls them there
            self._laid_out = True


def log_norms(trainer: Trainer) -> None:
    """Log the norms and their targets with the loss, wherever ``report_to`` says, on the console
    and in ``log_history``.

    Trainer calls its reporters before any callback that it is given, so this one goes to the front.
    """
    trainer.callback_handler.callbacks.insert(0, NormCallback(trainer))
