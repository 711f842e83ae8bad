"""Hugging Face: AdamWN for Trainer and its subclasses (TRL), and the norms in Trainer's logs.

Accelerate needs no integration: give an AdamWN to ``accelerator.prepare``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

import normcontrol
from normcontrol.groups.members import members_of
from normcontrol.groups.outputs import split_by_outputs
from normcontrol.integrations import require
from normcontrol.target import TARGETS
from normcontrol.warn import warn_once
from normcontrol.watch.trackers import layout, values

require("transformers", "4.47", "Trainer takes optimizer_cls_and_kwargs since then")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

if TYPE_CHECKING:
    from normcontrol.groups.settings import Group

ZERO_AT_START = re.compile(r"\.lora_B\b|\.lora_embedding_A\b")
"""The names of tensors that PEFT initialises to zero."""


def adamwn(
    args: TrainingArguments, model: nn.Module | None = None, **settings: Any
) -> tuple[type, dict[str, Any]]:
    """Return AdamWN for ``Trainer(optimizer_cls_and_kwargs=...)``.

    Trainer makes the parameter groups. With any weight decay other than 0 in ``args``, the tensors
    that Trainer would decay are controlled. With 0, the default, tensors with two or more
    dimensions are.

    Args:
        args: the training arguments. Learning rate, betas and epsilon are taken from them.
        model: the model that Trainer trains, for readable names. It is required for PEFT's
            adapters, and for a gain.
        settings: the settings of :class:`normcontrol.AdamWN`. The default target is ``ratio=1.0``,
            which keeps the norm of the loaded weights, as is usual in fine-tuning. To train from
            scratch, ``gain=0.8`` or the paper's ``ratio=linear(1, 2, steps=...)``.
    """
    for name, given, kind in (
        ("args", args, TrainingArguments),
        ("model", model, (nn.Module, type(None))),
    ):
        if not isinstance(given, kind):
            what = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
            raise TypeError(
                f"adamwn got {what} as {name}: give the TrainingArguments and the model that "
                "Trainer gets, adamwn(args, model), and settings by name."
            )
    if not args.weight_decay:
        warn_once(
            "Trainer without decay",
            "TrainingArguments has weight_decay=0, which marks nothing: AdamWN controls the "
            "tensors with two or more dimensions. With any other value it controls exactly the "
            "tensors that Trainer would decay; the value itself is not used.",
        )
    if all(settings.get(name) is None for name in TARGETS):
        settings["ratio"] = 1.0
    counting = [name for name in ("gain", "hold") if settings.get(name) is not None]
    if counting and model is None and settings.get("outputs") is None:
        raise ValueError(
            f"{counting[0]}={settings[counting[0]]!r} counts the outputs of every matrix, but the "
            "layer Conv1D, which GPT-2 has, stores them in the second axis, and the shape does not "
            "show it. Give the model, so that such layers are recognised: adamwn(args, model, "
            "...). For a model without them outputs=0 will do."
        )
    adam = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    return AdamWN, {**adam, "named": model, **settings}


class AdamWN(normcontrol.AdamWN):
    """:class:`normcontrol.AdamWN` with the constructor that Trainer needs.

    Trainer gives groups without names. ``named`` is the model that the names are taken from.
    """

    def __init__(self, params: Any, *, named: nn.Module | None = None, **settings: Any) -> None:
        groups = [dict(group) for group in params]
        super().__init__(groups if named is None else _with_names(groups, named), **settings)
        if named is None:
            self._refuse_zeros(
                "Give the model, so that such adapters are recognised by name and left alone: "
                "adamwn(args, model)."
            )
        elif hasattr(named, "peft_config"):
            self._refuse_zeros(
                "Of PEFT's adapters, only LoRA's are recognised. Leave others alone by a part of "
                "their names: adamwn(args, model, controlled=lambda name, p: 'lora_E' not in name)."
            )

    def _refuse_zeros(self, advice: str) -> None:
        """Raise an error if a tensor under a joint norm is zero. It may belong to an adapter, which
        can only be recognised by its name."""
        for group, (names, params) in zip(
            self.param_groups, members_of(self.param_groups), strict=True
        ):
            if group["control"]["scope"] != "global":
                continue
            reference = group["control"].reference
            zeros = [i for i in range(min(len(params), len(reference))) if reference[i] == 0]
            if zeros:
                raise ValueError(
                    f"{len(zeros)} of the {len(params)} tensors to be controlled are zero at the "
                    f"start (the first, {names[zeros[0]]}, has the shape "
                    f"{tuple(params[zeros[0]].shape)}), as LoRA's B are. Under a joint norm they "
                    f"could only grow as fast as the others shrink. {advice}"
                )


def _with_names(groups: list[Group], model: nn.Module) -> list[Group]:
    """Add names to the groups. Adapters that start at zero go to a group that is not controlled."""
    names = {id(p): name for name, p in model.named_parameters()}
    unknown = sum(id(p) not in names for group in groups for p in group["params"])
    if unknown:
        raise ValueError(
            f"The optimizer got {unknown} parameters that are not in the model given to "
            "adamwn(args, model). Give the model that Trainer trains: with PEFT, wrap it with "
            "get_peft_model first, and give the result to both."
        )
    named, zeros = [], []
    for group in groups:
        pairs = [(names[id(p)], p) for p in group["params"]]
        zeros += [pair for pair in pairs if ZERO_AT_START.search(pair[0])]
        named.append(_group(group, [pair for pair in pairs if not ZERO_AT_START.search(pair[0])]))
    if zeros:
        warn_once(
            "adapters that start at zero",
            f"{zeros[0][0]} and {len(zeros) - 1} more are not controlled: adapters start them at "
            "zero, so there is no initial norm that a ratio could refer to. The other factor of "
            "each adapter is controlled. To bound both, give AdamWN groups of your own, with an "
            "absolute rms= for these.",
        )
        named.append({**_group(groups[0], zeros), "controlled": False})
    return split_by_outputs(named, model)


def _group(group: Group, named: list[tuple[str, Any]]) -> Group:
    """Return the group with these tensors, and their names in ``param_names``.

    torch itself would take names out of (name, tensor) pairs, but not from a group without tensors,
    and Trainer makes such groups for adapters.
    """
    return {**group, "params": [p for _, p in named], "param_names": [name for name, _ in named]}


class NormCallback(TrainerCallback):
    """Adds the norms to what Trainer logs. Use :func:`log_norms` to install it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._has_charts = False

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
        norms = values(optimizer)  # on every rank: under sharding this may be a collective call
        logs.update(norms)
        state.log_history[-1].update(norms)
        if not self._has_charts and (writer := self._tensorboard()) is not None:
            # Trainer adds this prefix to the names that it writes to TensorBoard.
            writer.add_custom_scalars(layout("train/" + name for name in norms))
            self._has_charts = True

    def _tensorboard(self) -> Any:
        """The writer of Trainer's own TensorBoard callback, or None."""
        callbacks = self.trainer.callback_handler.callbacks
        writers = (getattr(callback, "tb_writer", None) for callback in callbacks)
        return next((writer for writer in writers if writer is not None), None)


def log_norms(trainer: Trainer) -> None:
    """Log the norms and their targets together with the loss: to all of ``report_to``, to the
    console, and to ``log_history``.

    Trainer's reporters run before any callback that is added to it, so this one is put first.
    """
    trainer.callback_handler.callbacks.insert(0, NormCallback(trainer))
