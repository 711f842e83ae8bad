"""Layouts whose pieces are plain tensors: refused where it can be seen that the norm of a piece
would be taken for the norm of the whole, as FSDP1, ZeRO and ZeroRedundancyOptimizer would otherwise
have it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from normcontrol.distributed.sharding import Spread, is_dtensor
from normcontrol.scope import Scope

PIECES = {
    "_fsdp_flattened": "FSDP1's flat parameters",
    "tensor_model_parallel": "a tensor that Megatron splits",
}
"""What layouts with plain tensors mark their pieces with."""


def check_recognised(
    names: Sequence[str],
    params: Sequence[Tensor],
    scope: Scope,
    spread: Spread,
    was: Tensor | None = None,
) -> None:
    """Refuse weights that can be seen to be pieces whose norm would be taken for the norm of the
    whole.

    ``was`` are the reference norms that were captured before, of which there is one a part.
    """
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    if alone:
        return
    how = "Give the process group that shares the norm, norm_group=dist.group.WORLD for one"
    if spread.told is None:
        for mark, kind in PIECES.items():
            piece = next(
                (name for name, p in zip(names, params, strict=True) if getattr(p, mark, False)),
                None,
            )
            if piece is not None:
                raise ValueError(
                    f"{piece} is this rank's piece of {kind}, and its norm is not that of the "
                    f"whole. {how}."
                )
        if _inside_zero_redundancy():
            raise ValueError(
                "ZeroRedundancyOptimizer gives each rank's optimizer some of the tensors only, "
                f"and their norm is not that of all. {how}, "
                "or put NormControl around the ZeroRedundancyOptimizer."
            )
        if (
            was is not None
            and len(was) != sum(scope.sizes(params))
            and not any(map(is_dtensor, params))
        ):
            raise ValueError(
                f"The optimizer was constructed with {len(was)} norms to hold in a group, and now "
                f"finds {sum(scope.sizes(params))}: its "
                f"tensors were replaced, as ZeRO replaces them by this rank's pieces. {how}; with "
                "flat pieces, also controlled=True."
            )
    elif not scope.joint:
        flat = next(
            (
                name
                for name, p in zip(names, params, strict=True)
                if p.dim() < 2 or getattr(p, "_fsdp_flattened", False)
            ),
            None,
        )
        if flat is not None:
            raise ValueError(
                f"scope={scope.name!r} needs whole tensors, but under norm_group {flat} is flat, "
                "as the pieces of FSDP1 and ZeRO are, in "
                "which tensors and rows cannot be told apart. Use scope='global' or 'group', or "
                "FSDP2, whose DTensors know what they are."
            )


def _inside_zero_redundancy() -> bool:
    """Whether ZeroRedundancyOptimizer is constructing this: it leaves no other trace that a rank's
    tensors are not all."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame: Any = sys._getframe() if module is not None else None
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), module.ZeroRedundancyOptimizer):  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False
