r"""Published ways to control the size of weights, each as a setting of one controller.

Every function builds an optimizer from what any optimizer takes: parameters, named parameters, or
groups. Matrices are controlled, unless a group says otherwise; :func:`hidden` makes the two groups
of methods that leave embeddings and head alone. In the rules, rho is the norm of the weights that
share one, tau its target, and u the optimizer's direction.

>>> model = torch.nn.Linear(8, 8)
>>> opt = cpr(model.parameters(), lr=1e-3, kappa=1.0)
>>> opt = METHODS["max-norm"].build(model.parameters(), lr=0.1, norm=3.0)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import ParamsT

from normcontrol.adamwn import AdamWN
from normcontrol.control import NormControl
from normcontrol.schedule import Value, eta_times, every, lr_squared_times, lr_times, sqrt_lr_times

Betas = tuple[float, float]
BETAS: Betas = (0.9, 0.999)


@dataclass(frozen=True)
class Method:
    """A row of the table: what a method holds, and how."""

    name: str
    build: Callable[..., Any]
    scope: str
    target: str
    law: str
    reference: str
    hidden: bool = False
    """Whether its authors leave embeddings and heads alone."""

    def __call__(self, params: Any, **settings: Any) -> list[Optimizer]:
        """The method's optimizers, given those of the settings that it knows."""
        takes = inspect.signature(self.build).parameters
        known = set(takes) | ({"eps", "fused", "foreach"} if "adam" in takes else set())
        built = self.build(
            params, **{key: value for key, value in settings.items() if key in known}
        )
        return built if isinstance(built, list) else [built]


METHODS: dict[str, Method] = {}


def method(
    name: str, *, scope: str, target: str, law: str, reference: str, hidden: bool = False
) -> Callable[[Any], Any]:
    def keep(build: Any) -> Any:
        METHODS[name] = Method(name, build, scope, target, law, reference, hidden)
        return build

    return keep


def find(name: str) -> Method:
    """A method by its name, however it is capitalised.

    >>> find("cpr-ki0").name
    'CPR-kI0'
    """
    known = {key.lower(): found for key, found in METHODS.items()}
    if name.lower() in known:
        return known[name.lower()]
    told_of = [
        m.name
        for m in METHODS.values()
        if len(name) > 3 and name.lower() in (m.build.__doc__ or "").lower()
    ]
    near = told_of or [
        known[key].name for key in difflib.get_close_matches(name.lower(), known, 3, 0.5)
    ]
    advice = f"Do you mean {' or '.join(near)}?" if near else f"Known are {', '.join(METHODS)}."
    raise ValueError(f"There is no method {name!r}. {advice}")


OUTSIDE = ("embed", "wte", "wpe", "head", "output", "classifier", "router")
"""Parts of the names of tensors that are not within the network: embeddings, heads, routers."""


def hidden(
    model: nn.Module, is_hidden: Callable[[str, Tensor], bool] | None = None
) -> list[dict[str, Any]]:
    """Two groups: the matrices within a network, which are controlled, and everything else, which
    is not.

    Embeddings are known by their modules, heads and routers by their names; say yourself which are
    hidden if yours have others.

    >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "fc": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9)})
    >>> [[name for name, _ in group["params"]] for group in hidden(model)]
    [['fc.weight'], ['wte.weight', 'fc.bias', 'lm_head.weight', 'lm_head.bias']]
    """
    embeddings = {
        p
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for p in module.parameters()
    }

    def rule(name: str, p: Tensor) -> bool:
        return (
            p.dim() >= 2
            and p not in embeddings
            and not any(part in name.lower() for part in OUTSIDE)
        )

    chosen = is_hidden or rule
    inside = [(name, p) for name, p in model.named_parameters() if chosen(name, p)]
    outside = [(name, p) for name, p in model.named_parameters() if not chosen(name, p)]
    if not inside:
        raise ValueError(
            "No matrix of the model counts as hidden: say which do, with is_hidden=lambda name, p: "
            "..."
        )
    return [
        {"params": inside, "controlled": True},
        *([{"params": outside, "controlled": False}] if outside else []),
    ]


# Decay: the target is zero, and methods differ in the rate.


@method(
    "Hanson-Pratt", scope="global", target="0", law="k = decay", reference="Hanson & Pratt 1988"
)
def hanson_pratt(
    params: ParamsT, lr: float = 0.1, weight_decay: float = 1e-4, momentum: float = 0.0
) -> NormControl:
    r"""Weight decay with SGD: :math:`\theta \leftarrow (1 - \lambda)\theta - \alpha g` (Hanson and
    Pratt, 1988)."""
    return NormControl(SGD(params, lr, momentum), ratio=0.0, rate=weight_decay, order="before")


@method(
    "AdamW-13a",
    scope="global",
    target="0",
    law="k = lr * decay",
    reference="Loshchilov & Hutter 2019 (torch)",
)
def adamw(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> AdamWN:
    r"""AdamW as torch has it, line 13.a of Algorithm 1: :math:`\theta \leftarrow \theta - \alpha_t
    \lambda \theta`."""
    return AdamWN(params, lr, betas, ratio=0.0, rate=lr_times(weight_decay), order="before", **adam)


@method(
    "AdamW-13b",
    scope="global",
    target="0",
    law="k = lr / lr_0 * decay",
    reference="Loshchilov & Hutter 2019",
)
def adamw_decoupled(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 1e-4, **adam: Any
) -> AdamWN:
    r"""AdamW as in its paper, line 13.b: :math:`\theta \leftarrow \theta - \eta_t \lambda \theta`,
    :math:`\eta_t = \alpha_t / \alpha_0`."""
    return AdamWN(
        params, lr, betas, ratio=0.0, rate=eta_times(weight_decay), order="before", **adam
    )


@method(
    "AdamC",
    scope="global",
    target="0",
    law="k = decay * lr^2 / lr_max",
    reference="Defazio 2025, arXiv:2506.02285",
)
def adamc(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = BETAS,
    weight_decay: float = 0.1,
    lr_max: float | None = None,
    **adam: Any,
) -> AdamWN:
    r"""AdamC: :math:`\theta \leftarrow \theta - \lambda (\alpha_t^2 / \alpha_{max}) \theta`, which
    holds the norm of weights that are followed by normalisation still while the learning rate
    falls. ``lr_max`` is the peak of the schedule."""
    return AdamWN(
        params,
        lr,
        betas,
        ratio=0.0,
        rate=lr_squared_times(weight_decay, lr_max or lr),
        order="before",
        **adam,
    )


@method(
    "cautious",
    scope="element",
    target="0",
    law="k = lr * decay, if the step agrees",
    reference="Chen et al. 2025, arXiv:2510.12402",
)
def cautious(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> NormControl:
    r"""Cautious weight decay: :math:`\theta \leftarrow \theta - \alpha_t (u + \lambda\, [u \theta
    \geq 0]\, \theta)`: only weights that the step moves towards zero decay."""
    return NormControl(
        Adam(params, lr, betas, **adam), ratio=0.0, rate=lr_times(weight_decay), cautious=True
    )


@method(
    "Adam-L2",
    scope="element",
    target="none",
    law="none: decay in the gradient",
    reference="Loshchilov & Hutter 2019 (foil)",
)
def adam_l2(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 1e-4, **adam: Any
) -> Adam:
    r"""L2 regularisation: :math:`g \leftarrow g + \lambda \theta` before Adam divides by its root
    mean square. Not a control of the norm, and here for comparison: it is torch's own Adam."""
    return Adam(params, lr, betas, weight_decay=weight_decay, **adam)


# Targets: the norm is held at a value.


@method(
    "AdamWN",
    scope="global",
    target="r_t * rho_0",
    law="k = 0.01",
    reference="Loshchilov 2023, arXiv:2311.11446",
)
def adamwn(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Betas = BETAS,
    ratio: Value | None = None,
    rate: Value = 1e-2,
    scope: Any = "global",
    **adam: Any,
) -> AdamWN:
    r"""Weight norm control, line 13.c: :math:`\theta \leftarrow \theta - k_t (1 - r_t \|\theta_0\|
    / \|\theta\|) \theta`."""
    return AdamWN(params, lr, betas, ratio=ratio, rate=rate, scope=scope, **adam)


@method(
    "max-norm",
    scope="row",
    target="at most c",
    law="upper, k = 1",
    reference="Srivastava et al. 2014",
)
def max_norm(
    params: ParamsT, lr: float = 0.1, norm: float = 3.0, momentum: float = 0.0
) -> NormControl:
    r"""Max-norm: every unit's incoming weights :math:`w \leftarrow w \min(1, c / \rho)` after each
    step (Srivastava et al., 2014)."""
    return NormControl(SGD(params, lr, momentum), norm=norm, law="upper", rate=1.0, scope="row")


@method(
    "MinMaxNorm", scope="axis", target="[low, high]", law="band, k = rate", reference="Keras 2017"
)
def min_max_norm(
    params: ParamsT,
    lr: float = 1e-3,
    low: float = 0.0,
    high: float = 1.0,
    rate: float = 1.0,
    scope: Any = "row",
    betas: Betas = BETAS,
    **adam: Any,
) -> NormControl:
    r"""Keras' MinMaxNorm: :math:`\rho \leftarrow (1 - k) \rho + k\, \mathrm{clip}(\rho, low,
    high)`. The same law before the paper, for a band. Keras' Dense kernels are transposed: their
    ``axis=0`` is our ``scope="row"``."""
    return NormControl(
        Adam(params, lr, betas, **adam),
        norm=high,
        law=f"band({low / high!r})",
        rate=rate,
        scope=scope,
    )


@method(
    "NaP",
    scope="tensor",
    target="rho_0",
    law="k = 1 at every n-th step",
    reference="Lyle et al. 2024, arXiv:2407.01800",
)
def nap(params: ParamsT, lr: float = 1e-3, n: int = 1, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""Normalize-and-Project, its projection: at every n-th step :math:`\theta_l \leftarrow
    \theta_l\, \rho_{l,0} / \rho_l`. Its normalisation layers are the model's affair."""
    return AdamWN(params, lr, betas, ratio=1.0, rate=every(n), scope="tensor", **adam)


@method(
    "LAWN",
    scope="tensor",
    target="rho at the switch",
    law="free, then k = 1",
    reference="Gupta et al. 2021, arXiv:2108.05839",
)
def lawn(
    params: ParamsT, lr: float = 1e-3, switch: int = 1000, betas: Betas = BETAS, **adam: Any
) -> AdamWN:
    r"""LAWN: free for ``switch`` steps, then every layer's norm is held at what it was:
    :math:`\theta_l \leftarrow \theta_l\, \rho_{l,s} / \rho_l`."""
    return AdamWN(params, lr, betas, ratio=1.0, rate=1.0, scope="tensor", start=switch, **adam)


@method(
    "nGPT",
    scope="row or col",
    target="1",
    law="projection",
    reference="nGPT 2024, arXiv:2410.01131",
)
def ngpt(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, scope: Any = "row", **adam: Any
) -> AdamWN:
    r"""nGPT's weights: :math:`w \leftarrow w / \|w\|` for every row (input projections) or column
    (output projections, ``scope="col"`` in their group) after each step. Its architecture is
    another matter."""
    return AdamWN(params, lr, betas, norm=1.0, law="projection", scope=scope, **adam)


@method(
    "EDM2",
    scope="row",
    target="rms 1",
    law="projection",
    reference="Karras et al. 2024, arXiv:2312.02696",
)
def edm2(params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""EDM2's forced weight normalisation: every output's weights :math:`w \leftarrow w \sqrt{n} /
    \|w\|`. EDM2 does it at the beginning of each forward pass, this at the end of each step: the
    weights that gradients are taken at are the same from the second on."""
    return AdamWN(params, lr, betas, rms=1.0, law="projection", scope="row", **adam)


@method(
    "weight-norm",
    scope="row",
    target="rho_0 of directions",
    law="projection",
    reference="Salimans 2016, arXiv:1602.07868",
)
def weight_normalised(
    model: nn.Module, lr: float = 1e-3, betas: Betas = BETAS, **adam: Any
) -> AdamWN:
    r"""Weight normalisation, :math:`w = g\, v / \|v\|`, through torch's own parametrisation of
    every linear and convolutional layer, with the norm of the directions v held: it grows
    otherwise, and the step that they are turned by shrinks."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            "Weight normalisation changes how a model computes its weights, so it needs the "
            f"model, not {type(model).__name__}."
        )
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not hasattr(
            module, "parametrizations"
        ):
            weight_norm(module)
    named = list(model.named_parameters())
    directions = [
        (name, p) for name, p in named if name.endswith("parametrizations.weight.original1")
    ]
    rest = [
        (name, p) for name, p in named if not name.endswith("parametrizations.weight.original1")
    ]
    groups = [{"params": directions, "controlled": True}, {"params": rest, "controlled": False}]
    return AdamWN(groups, lr, betas, ratio=1.0, law="projection", scope="row", **adam)


# A bound with memory: constrained parameter regularisation.


def _cpr(name: str, target: str) -> Callable[[Any], Any]:
    return method(
        name,
        scope="tensor",
        target=target,
        law="integral",
        reference="Franke et al. 2023, arXiv:2311.09058",
        hidden=True,
    )


@_cpr("CPR-kI0", "at most sqrt(k) * rho_0")
def cpr(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, kappa: float = 1.0, **adam: Any
) -> AdamWN:
    r"""CPR with a bound that depends on the initial weights, kI0: :math:`\kappa = k R(\theta_0)`, R
    the sum of squares, per tensor::

        lambda <- max(0, lambda + (R - kappa) / n);  theta <- (1 - 2 lambda) theta

    Leave embeddings out, as its authors do: ``cpr(hidden(model), ...)``."""
    return AdamWN(
        params, lr, betas, ratio=kappa**0.5, law="integral", rate=1.0, scope="tensor", **adam
    )


@_cpr("CPR-uniform", "at most rms")
def cpr_uniform(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, mean_square: float = 1e-3, **adam: Any
) -> AdamWN:
    r"""CPR with one bound for all: :math:`\kappa = n` times a constant mean square."""
    return AdamWN(
        params, lr, betas, rms=mean_square**0.5, law="integral", rate=1.0, scope="tensor", **adam
    )


@_cpr("CPR-WS", "at most rho at step s")
def cpr_warm_start(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, start: int = 1000, **adam: Any
) -> AdamWN:
    r"""CPR with a warm start, Kappa-IS in the paper on weight norm control: no bound until step s,
    then :math:`\kappa = R(\theta_s)`. Its authors take twice the learning rate's warm-up for s."""
    return AdamWN(
        params, lr, betas, ratio=1.0, law="integral", rate=1.0, scope="tensor", start=start, **adam
    )


@_cpr("CPR-IP", "at most rho at inflection")
def cpr_inflection(params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, **adam: Any) -> AdamWN:
    r"""CPR from the inflection point: :math:`\kappa = R` of the first step at which the second
    difference of R, of a running mean seen every 200 steps, is negative."""
    return AdamWN(
        params,
        lr,
        betas,
        ratio=1.0,
        law="integral",
        rate=1.0,
        scope="tensor",
        start="inflection",
        **adam,
    )


# Steps of a given angle on a sphere.


@method(
    "AdamH",
    scope="tensor",
    target="rho_0",
    law="projection, steps lr * rho_0",
    reference="Wen et al. 2026, arXiv:2606.16899",
    hidden=True,
)
def adamh(
    params: ParamsT, lr: float = 1e-2, betas: Betas = BETAS, relative: float = 1.0, **adam: Any
) -> NormControl:
    r"""Hyperball with Adam: :math:`W \leftarrow R\, \mathrm{unit}(W - \alpha_t R\,
    \mathrm{unit}(u))`, :math:`R = \|W_0\|_F`. It is meant for hidden matrices,
    ``adamh(hidden(model), ...)``; the others get plain Adam with the learning rate of their group.
    Where that is to be the same for all groups, ``relative`` is how many times longer a step of
    hidden matrices is."""
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=1.0,
        law="projection",
        scope="tensor",
        relative_step=lr_times(relative),
    )


@method(
    "MuonH",
    scope="tensor",
    target="rho_0",
    law="projection, steps lr * rho_0",
    reference="Wen et al. 2026, arXiv:2606.16899",
    hidden=True,
)
def muonh(
    groups: list[dict[str, Any]],
    lr: float = 1e-2,
    momentum: float = 0.95,
    adam_lr: float = 1e-3,
    betas: Betas = BETAS,
    relative: float = 1.0,
) -> list[Optimizer]:
    r"""Hyperball with Muon for the controlled groups, which must be matrices, and Adam for the
    others: ``muonh(hidden(model))``. Step both. ``relative`` is as in :func:`adamh`."""
    controlled: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        if not isinstance(group, dict) or "controlled" not in group:
            raise TypeError(
                "MuonH takes the groups that hidden(model) makes, so that it knows which tensors "
                "go to Muon: muonh(hidden(model))."
            )
        (controlled if group["controlled"] else rest).append(group)
    for name, p in (_named(item) for group in controlled for item in group["params"]):
        if p.dim() != 2:
            raise ValueError(
                f"MuonH holds matrices, but {name} has shape {tuple(p.shape)}. Leave it to Adam "
                "with controlled=False."
            )
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(
            f"MuonH is built on torch.optim.Muon, which torch {torch.__version__} does not have "
            "yet. Use torch 2.9 or later."
        )
    muon = torch.optim.Muon(controlled, lr=lr, weight_decay=0.0, momentum=momentum)
    held = NormControl(
        muon, ratio=1.0, law="projection", scope="tensor", relative_step=lr_times(relative)
    )
    return [held, *([Adam(rest, adam_lr, betas)] if rest else [])]


@method(
    "rotational",
    scope="row",
    target="rho_0",
    law="projection, steps of one angle",
    reference="Kosson et al. 2023, arXiv:2305.17212",
)
def rotational(
    params: ParamsT, lr: float = 1e-3, betas: Betas = BETAS, weight_decay: float = 0.1, **adam: Any
) -> NormControl:
    r"""Rotational AdamW: every row keeps its norm and turns by the angle that AdamW settles at,
    :math:`\|\Delta w\| / \|w\| = \sqrt{2 \alpha_t \lambda (1 - \beta_1) / (1 + \beta_1)}`."""
    turn = sqrt_lr_times(2 * weight_decay * (1 - betas[0]) / (1 + betas[0]))
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=1.0,
        law="projection",
        scope="row",
        relative_step=turn,
    )


# Other sizes than the norm.


@method(
    "spectral",
    scope="tensor",
    target="sigma_0",
    law="projection or upper",
    reference="spectral norm, held or capped",
)
def spectral(
    params: ParamsT,
    lr: float = 1e-3,
    ratio: Value = 1.0,
    cap: bool = False,
    betas: Betas = BETAS,
    **adam: Any,
) -> NormControl:
    r"""The largest singular value held at, or capped to, a ratio of the initial one: :math:`W
    \leftarrow W \tau / \sigma_1(W)`. It is computed anew at every step, which costs a decomposition
    of every matrix."""
    law = "upper" if cap else "projection"
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=ratio,
        rate=1.0,
        law=law,
        scope="tensor",
        size="spectral",
    )


@method(
    "QK-Clip",
    scope="head",
    target="logits at most t",
    law="upper, k = 1",
    reference="Kimi K2, 2025, arXiv:2507.20534",
)
def qk_clip(
    params: ParamsT,
    largest_logits: Callable[[Tensor], Tensor],
    lr: float = 1e-3,
    threshold: float = 100.0,
    betas: Betas = BETAS,
    **adam: Any,
) -> NormControl:
    r"""QK-Clip: where a head's largest logit S is above t, :math:`W_q, W_k \leftarrow W \sqrt{t /
    S}` for that head.

    ``params`` controls the query and key projections alone, a head being consecutive rows;
    ``largest_logits(p)`` gives the largest logit that each head of p has seen since the last
    step."""

    def size(p: Tensor) -> Tensor:
        logits = torch.as_tensor(largest_logits(p), device=p.device).double().flatten()
        return logits.clamp(min=0).sqrt().repeat_interleave(p.shape[0] // logits.numel())

    return NormControl(
        Adam(params, lr, betas, **adam),
        norm=threshold**0.5,
        law="upper",
        rate=1.0,
        scope="row",
        size=size,
    )


def _named(item: Any) -> tuple[str, Tensor]:
    return item if isinstance(item, tuple) else ("a tensor", item)
