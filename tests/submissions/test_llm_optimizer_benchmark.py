"""The patch of EPFL's benchmark, on stubs of the two files that it changes."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

PATH = Path(__file__).parents[2] / "submissions/llm_optimizer_benchmark/apply.py"
MAIN = """def optimizer(args, group_specs):
    if args.opt == "adamw":
        opt = "AdamW"
    elif args.opt == "soap":
        opt = "SOAP"
    return opt
"""
BASE = """def parse(parser):
    parser.add_argument(
        "--opt",
        default="adamw",
        choices=[
            "adamw",
            "soap",
        ],
    )
    parser.add_argument("--batch_size", default=50, type=int)
"""


@pytest.fixture
def apply():
    found = importlib.util.spec_from_file_location("apply", PATH)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "src/config").mkdir(parents=True)
    (tmp_path / "src/main.py").write_text(MAIN)
    (tmp_path / "src/config/base.py").write_text(BASE)
    return tmp_path


def test_the_patched_files_have_the_optimizer_and_its_flags(apply, checkout):
    texts = {path.name: text for path, text in apply.edited(checkout).items()}
    assert (checkout / "src/main.py").read_text() == MAIN  # nothing is written before all fits
    names: dict = {}
    exec(texts["base.py"], names)
    exec(texts["main.py"], names)
    parser = argparse.ArgumentParser()
    names["parse"](parser)
    given = parser.parse_args(["--opt", "adamwn", "--norm_ratio", "1.5"])
    args = SimpleNamespace(
        **vars(given), lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, warmup_steps=10
    )
    matrix, vector = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}]
    opt = names["optimizer"](args, groups)
    control = [group["control"] for group in opt.param_groups]
    assert [c["controlled"] for c in control] == [True, False]
    assert (control[0]["ratio"].end, control[0]["ratio"].steps, control[0]["rate"]) == (
        1.5,
        10,
        0.01,
    )
    assert names["optimizer"](SimpleNamespace(opt="soap"), []) == "SOAP"


def test_what_does_not_fit_is_refused(apply, checkout):
    with pytest.raises(SystemExit, match="does not exist: give a checkout"):
        apply.edited(checkout / "src")
    for path, text in apply.edited(checkout).items():
        path.write_text(text)
    with pytest.raises(SystemExit, match="has AdamWN already"):
        apply.edited(checkout)
    (checkout / "src/main.py").write_text("nothing\n")
    with pytest.raises(SystemExit, match="0 times, but one was expected"):
        apply.edited(checkout)
