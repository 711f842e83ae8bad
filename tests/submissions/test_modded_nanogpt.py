"""The sections for modded-nanogpt's optimizer track: the optimizer is ours, and they fit a script."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from normcontrol import AdamWN, linear

FOLDER = Path(__file__).parents[2] / "submissions/modded_nanogpt"


def loaded(name: str):
    found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Model(nn.Module):
    """The parameters of the track's model, small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"fc": nn.Linear(4, 8), "proj": nn.Linear(8, 4)}) for _ in range(2)
        )
        self.proj = nn.Linear(4, 7)
        self.norm = nn.Module()
        self.norm.gains = nn.Parameter(torch.ones(4))


def step(opts, params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    for opt in opts:
        opt.step()


@pytest.mark.parametrize("ramp", [0, 5])
def test_its_optimizer_gives_the_weights_of_normcontrol(ramp):
    shapes = ((4, 3), (2, 5))
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-10, "rate": 0.1}
    first = loaded("optimizer").AdamWN(ours, **settings, ratio=1.5, ramp=ramp)
    ratio = linear(1.0, 1.5, steps=ramp) if ramp else 1.5
    second = AdamWN(theirs, **settings, ratio=ratio)
    for seed in range(30):
        step([first], ours, seed)
        step([second], theirs, seed)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


SCRIPT = """import torch
from torch.optim import AdamW

########################################
#              Optimizer               #
########################################

class Muon: pass

########################################
#                Setup                 #
########################################

def run(model, take):
    for _ in range(1):

        ########################################
        #       Init & Optim Hyperparams       #
        ########################################

        train_steps = 1
        optimizers = [Muon()]

        ########################################
        #        Training and Validation       #
        ########################################

        for step in range(train_steps + 1):
            if step == take:
                return optimizers
            set_hparams(step)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            for opt in optimizers:
                opt.step()
"""


def test_the_made_script_is_whole_and_trains_every_parameter_once():
    script = loaded("make_script").replaced(SCRIPT)
    assert "Muon" not in script
    assert "import normcontrol" not in script
    assert "from normcontrol" not in script
    names: dict = {"__name__": "script"}
    exec(script, names)
    model = Model()
    optimizers = names["run"](model, 300)
    hidden = [p for p in model.blocks.parameters() if p.ndim >= 2]
    group = optimizers[1].param_groups[0]
    assert len(group["params"]) == len(hidden) == 4
    norm = torch.cat([p.detach().flatten() for p in hidden]).norm()
    assert (norm / group["initial_norm"]).item() == pytest.approx(1.8, rel=0.05)
    assert group["lr"] == pytest.approx(0.0015)  # after the warm-up, before the cool-down


def test_a_script_with_other_sections_is_refused():
    with pytest.raises(SystemExit, match="has 0 sections 'Optimizer', but one was expected"):
        loaded("make_script").replaced(SCRIPT.replace("Optimizer ", "Methods   "))
