"""The optimizers of other packages that are tested under NormControl: how each is made, what its
step needs, and which are refused. ``python tests/optimizer_table.py`` prints the table of
docs/optimizers.md, for ``make test`` to compare."""

from __future__ import annotations

import importlib
import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import torch
from small import SmallModel, loss_at

from normcontrol.steppers.stored_weights import StoredWeights

PACKAGES = {
    "torch": "torch.optim",
    "transformers": "transformers.optimization",
    "schedulefree": "schedulefree",
    "torchao": "torchao.optim",
    "pytorch_optimizer": "pytorch_optimizer",
}

SUMS = "computes the weights anew at every step, from sums of gradients since the first step"
REFUSED = {
    **dict.fromkeys(("DAdaptAdaGrad", "DAdaptSGD", "FTRL", "MADGRAD"), SUMS),
    "TRAC": "computes the weights anew at every step, from those of the first step",
    "Nero": "sets the norm of the weights itself at every step",
    "SafeFP16Optimizer": "has no param_groups",
}
"""The refused ones, and a part of the sentence."""

NOT_TESTED = {
    "torchao.CPUOffloadOptimizer": "needs CUDA",
    "transformers.LayerWiseDummyOptimizer": "makes no steps",
    "pytorch_optimizer.LOMO": "makes its steps in the backward pass",
    "pytorch_optimizer.AdaLOMO": "makes its steps in the backward pass",
    "pytorch_optimizer.DeMo": "needs einops and several processes",
    "pytorch_optimizer.DistributedMuon": "needs several processes",
    "pytorch_optimizer.GSAM": "needs a scheduler of its own",
    "pytorch_optimizer.LoRARite": "is for pairs of LoRA matrices",
    "pytorch_optimizer.BSAM": "moves no weights without weight decay",
}

SAM = ("SAM", "FriendlySAM", "LookSAM", "WSAM")
SECOND_ORDER = ("AdaHessian", "SophiaH")
CLOSURE = ("LBFGS", *SAM)
STILL = {"AliG": {"max_lr": 1e-10}}
"""What nearly stops an optimizer that takes no ``lr``."""

QUICK = ("AdaFactor", "AdamP", "EmoNavi", "FTRL", "Lion", "Lookahead", "Magma", "MADGRAD", "MARS")
QUICK += ("Nero", "Prodigy", "Ranger", "SAM", "SafeFP16Optimizer", "ScheduleFreeWrapper", "SOAP")
"""Those of pytorch_optimizer that are tested every time; all of them are in the slow tests."""


def adam(params, **given):
    return torch.optim.AdamW(params, **{"lr": 1e-2, "weight_decay": 0.0, **given})


def around_adam(cls, params, **given):
    return cls(adam(params, **given))


def around_sgd(cls, params, **given):
    return cls(params, torch.optim.SGD, **{"lr": 1e-2, **given})


def matrices_and_rest(cls, params, **given):
    groups = [
        {"params": [p for p in params if (p.dim() >= 2) == is_matrix], "use_muon": is_matrix}
        for is_matrix in (True, False)
    ]
    return cls(groups, weight_decay=0.0, **given)


def matrices_alone(cls, params, **given):
    return cls([p for p in params if p.dim() >= 2], weight_decay=0.0, **given)


def default(cls, params, **given):
    """Its defaults, without decay."""
    takes = inspect.signature(cls.__init__).parameters
    settings = {"weight_decay": 0.0, "num_iterations": 100, "block_size": 32, **given}
    keep = {name: value for name, value in settings.items() if name in takes}
    if cls.__module__.startswith("pytorch_optimizer"):
        keep.pop("block_size", None)
    if cls.__module__.startswith("schedulefree"):
        keep.setdefault("lr", 1e-2)
    return cls(params, **keep)


MAKERS: dict[str, Callable] = {
    **dict.fromkeys(
        ("Lookahead", "OrthoGrad", "TRAC", "ScheduleFreeWrapper", "PCGrad", "SafeFP16Optimizer"),
        around_adam,
    ),
    **dict.fromkeys(SAM, around_sgd),
    "WSAM": lambda cls, params, **given: cls(
        params[0].model, params, torch.optim.SGD, **{"lr": 1e-2, **given}
    ),
    **dict.fromkeys(("AdaGO", "AdaMuon", "NorMuon", "MuonClip"), matrices_and_rest),
    "pytorch_optimizer.Muon": lambda cls, params, **given: matrices_and_rest(
        cls, params, adamw_wd=0.0, **given
    ),
    "torch.Muon": matrices_alone,
    "SpectralSphere": matrices_alone,
    "AdamMini": lambda cls, params, **given: cls(params[0].model, weight_decay=0.0, **given),
    "Magma": lambda cls, params, **given: cls(params, weight_decay=0.0, **given),
    "transformers.Adafactor": lambda cls, params, **given: cls(
        params, **{"lr": 1e-2, "scale_parameter": False, "relative_step": False, **given}
    ),
    **{
        name: lambda cls, params, **given: cls(params, use_shadow=True, weight_decay=0.0, **given)
        for name in ("EmoNavi", "EmoFact", "EmoLynx")
    },
}
"""How optimizers are made that need more than parameters."""


@dataclass(frozen=True)
class Case:
    """One optimizer."""

    package: str
    cls: type = field(repr=False)

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"

    def make(self, model, **given) -> Any:
        torch.manual_seed(0)
        params = list(model.parameters())
        if self.name == "SparseAdam":
            params = [model.embed.weight]
        params[0].model = model
        maker = MAKERS.get(self.full_name) or MAKERS.get(self.name) or default
        optimizer = maker(self.cls, params, **given)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def step(self, model, optimizer, t: int) -> None:
        """One step; whatever it draws at random depends on the number of the step alone."""
        torch.manual_seed(t)
        random.seed(t)
        np.random.seed(t)  # Kron of pytorch_optimizer draws from it

        def closure():
            optimizer.zero_grad()
            loss = loss_at(model, t)
            loss.backward(create_graph=self.name in SECOND_ORDER)
            if self.name == "SparseAdam":
                model.embed.weight.grad = model.embed.weight.grad.to_sparse(1)
            return loss

        loss = closure()
        if self.name == "AliG":
            optimizer.step(lambda: float(loss))
        elif self.name in CLOSURE or self.name.endswith("Closure"):
            optimizer.step(closure)
        else:
            optimizer.step()


def optimizers(package: str) -> list[type]:
    """All optimizers of a package."""
    module = importlib.import_module(PACKAGES[package])
    found = [value for name, value in vars(module).items() if not name.startswith("_")]
    return [
        value
        for value in sorted((f for f in found if inspect.isclass(f)), key=lambda c: c.__name__)
        if issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]


def cases(package: str, quick: bool = False) -> list[Case]:
    """The optimizers of a package that are tested."""
    found = [Case(package, cls) for cls in optimizers(package)]
    found = [case for case in found if case.full_name not in NOT_TESTED]
    return [case for case in found if not quick or case.name in QUICK]


def by_reason(names: dict[str, str]) -> str:
    """Names with their reasons, each reason once."""
    found: dict[str, list[str]] = {}
    for name, why in names.items():
        found.setdefault(why, []).append(name.split(".")[-1])
    return "; ".join(f"{', '.join(some)} ({why})" for why, some in found.items())


def table(package: str) -> str:
    """The part of the page about a package."""
    tested = cases(package)
    works = [case for case in tested if case.name not in REFUSED]
    stores = [case for case in works if StoredWeights(case.make(SmallModel())).keys]
    left_out = {n: why for n, why in NOT_TESTED.items() if n.startswith(f"{package}.")}
    refused = {case.name: REFUSED[case.name] for case in tested if case.name in REFUSED}
    lines = {
        f"Works ({len(works) - len(stores)})": ", ".join(
            case.name for case in works if case not in stores
        ),
        f"Works, and the weights in its state are scaled too ({len(stores)})": ", ".join(
            case.name for case in stores
        ),
        f"Refused ({len(refused)})": by_reason(refused),
        f"Not tested ({len(left_out)})": by_reason(left_out),
    }
    version = metadata.version(package).split("+")[0]
    points = [
        textwrap.fill(f"- {head}: {names}.", 120, subsequent_indent="  ")
        for head, names in lines.items()
        if names
    ]
    return "\n".join([f"**{package} {version}**", "", *points])


if __name__ == "__main__":
    print("\n\n".join(table(package) for package in PACKAGES))
