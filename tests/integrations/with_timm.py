"""Checks with timm that run in a separate process: its groups, scheduler, checkpoints, averages.

``python tests/integrations/with_timm.py`` runs every check and prints which passed and which
failed. timm imports torchvision, whose Linux builds on PyPI need a CUDA build of torch. With a CPU
build, torchvision only lacks its compiled operators; installed in the project's environment, it
would break every library that imports torchvision if it is found. Both are therefore installed in a
folder of their own, and the operators that torchvision expects are declared here, but never called.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(1, str(Path(sys.prefix) / "timm"))
try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

import timm
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import ModelEmaV3

import normcontrol.integrations.timm  # noqa: F401
from normcontrol import AdamWN, linear, lr_times, reproject_

EXAMPLE = Path(__file__).parents[2] / "examples/timm_classifier.py"
PAGE = Path(__file__).parents[2] / "docs/timm.md"


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=4,
    )


def train(model, optimizer, steps=range(10)) -> None:
    for step in steps:
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
        optimizer.step()


def norm_of(tensors) -> float:
    return torch.stack([t.detach().norm() for t in tensors]).norm().item()


def controlled(optimizer) -> set[int]:
    return {id(p) for s in optimizer.sets for p in s.params}


def check_adamwn_by_name_controls_what_timm_would_decay() -> None:
    model = vit()
    optimizer = create_optimizer_v2(
        model, opt="adamwn", lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95), ratio=1.0
    )
    adamw = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    decayed = {
        id(p) for group in adamw.param_groups if group["weight_decay"] for p in group["params"]
    }
    assert type(optimizer) is AdamWN
    assert controlled(optimizer) == decayed
    # It has three dimensions, but the model lists it in no_weight_decay().
    assert id(model.pos_embed) not in decayed
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def check_without_a_decay_the_matrices_are_controlled() -> None:
    model = vit()
    optimizer = create_optimizer_v2(model, opt="adamwn", lr=1e-3, ratio=1.0)
    assert controlled(optimizer) == {id(p) for p in model.parameters() if p.dim() >= 2}


def check_layer_decay_keeps_one_norm_over_all_layers() -> None:
    model = vit()
    optimizer = create_optimizer_v2(
        model, opt="adamwn", lr=1e-2, weight_decay=0.05, layer_decay=0.7, ratio=2.0, rate=1.0
    )
    assert len(optimizer.param_groups) > 4
    assert {"lr_scale"} <= set(optimizer.param_groups[0])
    members = [
        p
        for group in optimizer.param_groups
        if group["control"]["controlled"]
        for p in group["params"]
    ]
    before = norm_of(members)
    train(model, optimizer)
    assert abs(norm_of(members) / before - 2) < 1e-5
    assert set(optimizer.norms()) == {"global"}


def check_a_rate_that_follows_different_learning_rates_is_refused() -> None:
    model = vit()
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.7)
    for group in groups:
        group["lr"] = 1e-3 * group["lr_scale"]
    optimizer = AdamWN(groups, lr=1e-3, ratio=1.0, rate=lr_times(0.1))
    with pytest.raises(
        ValueError, match="the groups that share the global norm have different ones"
    ):
        train(model, optimizer)


def check_an_average_is_scaled_to_the_target() -> None:
    model = vit()
    optimizer = create_optimizer_v2(
        model, opt="adamwn", lr=1e-2, weight_decay=0.05, ratio=linear(1, 2, steps=5), rate=1.0
    )
    average = ModelEmaV3(model, decay=0.5)
    for step in range(10):
        train(model, optimizer, [step])
        average.update(model)
    reproject_(average.module, model, optimizer)
    names = {name for name, p in model.named_parameters() if id(p) in controlled(optimizer)}
    members = [p for name, p in average.module.named_parameters() if name in names]
    assert abs(norm_of(members) / optimizer.norms()["global"].target.item() - 1) < 1e-5


def check_the_example_runs_and_resumes() -> None:
    def lines(*args: str) -> list[str]:
        sys.argv = [str(EXAMPLE), *args]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return printed.getvalue().splitlines()

    with tempfile.TemporaryDirectory() as folder:
        report, *whole = lines("--out", folder)
        assert report.startswith("AdamWN: 10 of ")
        assert len(whole) == 4
        assert float(whole[-1].split("loss ")[1].split(",")[0]) < 0.2
        resumed = lines("--out", folder, "--resume", f"{folder}/checkpoint-1.pth.tar")
    assert resumed[1:] == whole[2:]


def check_the_examples_of_the_page() -> None:
    namespace: dict = {}
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 2
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(block, namespace)


def main() -> None:
    checks = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}
    failed = 0
    for name, check in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="AdamWN does not decay")
                check()
            print(f"passed {name}")
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
