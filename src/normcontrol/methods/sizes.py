r"""Methods that control another size than the norm: the spectral norm, or attention logits.

Each function states the exact rule of a method and constructs its optimizer, as settings of
``NormControl`` with ``size``. The laws are those of the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from normcontrol.control import NormControl
from normcontrol.methods.registry import BETAS, Betas, method
from normcontrol.schedule import Value


@method(
    "spectral",
    scope="tensor",
    target="sigma_0",
    law="projection or upper",
    reference="spectral norm, constant or bounded",
)
def spectral(
    params: ParamsT,
    lr: float = 1e-3,
    ratio: Value = 1.0,
    cap: bool = False,
    betas: Betas = BETAS,
    exact: bool = False,
    **adam: Any,
) -> NormControl:
    r"""Keep the largest singular value at a ratio of its initial value: :math:`W \leftarrow W \tau
    / \sigma_1(W)`.

    With ``cap=True`` the ratio is an upper bound. Power iteration estimates the singular value from
    step to step: the estimate is never above the exact value, and in practice less than 1 % below
    it. With ``exact=True`` every matrix is decomposed at every step.
    """
    law = "upper" if cap else "projection"
    return NormControl(
        Adam(params, lr, betas, **adam),
        ratio=ratio,
        rate=1.0,
        law=law,
        scope="tensor",
        size="spectral-exact" if exact else "spectral",
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
    r"""QK-Clip: if the largest logit S of a head is above t, :math:`W_q, W_k \leftarrow W \sqrt{t /
    S}` for that head.

    Args:
        params: groups in which only the query and key projections are controlled. A head is a block
            of consecutive rows.
        largest_logits: a function of a parameter that returns, for each of its heads, the largest
            logit since the last step.
        lr: the learning rate.
        threshold: t.
        betas: Adam's betas.
        adam: other arguments of Adam.
    """

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
