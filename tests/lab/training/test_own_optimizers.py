"""An optimizer may be in a file of the user's own, and may be given arguments behind its name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from normcontrol.lab.errors import LabError
from normcontrol.lab.report import study_page
from normcontrol.lab.studies.challenge import parse_arm, settings_of
from normcontrol.lab.studies.opening import begin, open_folder
from normcontrol.lab.study import runner, verdict
from normcontrol.lab.study.cells import Data, grid, identity
from normcontrol.lab.study.replay import replay
from normcontrol.lab.study.worker import Job, run_cell
from normcontrol.lab.training.checkpoint import latest, load
from normcontrol.lab.training.config import Config, Model
from normcontrol.lab.training.loop import train
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizer_names import known_name
from normcontrol.lab.training.optimizers import build
from normcontrol.lab.training.options import check_used, unused

SHAPE = Config(Model(layers=1, heads=1, width=8, context=4))

SIGN = """
import torch
from torch.optim import SGD, AdamW

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.sign(), alpha=-group["lr"])

def both(model, lr, betas, weight_decay, slower=0.1):
    inside = list(model.matrices())
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [SGD(inside, lr, weight_decay=weight_decay), AdamW(rest, lr * slower, betas)]

def forgets(model, lr):
    return SGD(model.matrices(), lr)

def twice(model, lr):
    return [SGD(model.parameters(), lr), SGD(model.matrices(), lr)]

def nothing(params, lr):
    return None

def broken(params, lr):
    return SGD(params, lr, no_such_thing=1)

def anything(params, lr, **more):
    return SGD(params, lr, **more)

def without_lr(params):
    return SGD(params, 0.1)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SIGN)
    return str(tmp_path / "mine.py")


def made(optimizer, **changes):
    config = SHAPE.with_(optimizer=optimizer, **changes)
    check_used(config, changes)
    return build(config, GPT.initialised(config.model, 64))


def test_it_gets_the_settings_of_the_run_and_its_arguments(mine):
    (opt,) = made(f"{mine}:SignSGD(momentum=0.5)", lr=0.02, weight_decay=0.3)
    matrices, rest = opt.param_groups
    assert type(opt).__name__ == "SignSGD"
    assert [group["weight_decay"] for group in (matrices, rest)] == [0.3, 0.0]
    assert [group["lr"] for group in (matrices, rest)] == [0.02, 0.02]
    assert [group["momentum"] for group in (matrices, rest)] == [0.5, 0.5]
    assert {p.dim() for p in matrices["params"]} == {2}


def test_one_that_takes_the_model_makes_its_own_groups(mine):
    sgd, adam = made(f"{mine}:both(slower=0.25)", lr=0.02, betas=(0.8, 0.9), weight_decay=0.3)
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["weight_decay"]) == (0.02, 0.3)
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]) == (0.005, (0.8, 0.9))


def test_groups_keep_their_share_of_the_learning_rate(mine, config, tmp_path):
    run = config.with_(optimizer=f"{mine}:both(slower=0.25)", lr=1e-3, min_lr=0.5)
    assert train(run, tmp_path / "run")
    state = load(latest(tmp_path / "run/checkpoints"))
    rates = [group["lr"] for one in state["optimizers"] for group in one["param_groups"]]
    assert rates == pytest.approx([5e-4, 1.25e-4])


def test_its_norm_is_controlled_at_a_target(mine, config, tmp_path):
    run = config.with_(optimizer=f"{mine}:SignSGD", lr=1e-3, gain=0.6, rate=1.0)
    assert train(run, tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["gain"] for x in lines if "gain" in x] == pytest.approx([0.6] * 12, rel=1e-5)
    (opt,) = made(f"{mine}:SignSGD", ratio=2.0, ramp=0)
    assert all(group["weight_decay"] == 0 for group in opt.param_groups)


def test_arguments_reach_the_optimizers_of_torch_and_the_published_methods():
    (sgd,) = made("sgd(momentum=0.9, nesterov=True)", weight_decay=0.2)
    assert [g["momentum"] for g in sgd.param_groups] == [0.9, 0.9]
    assert [g["nesterov"] for g in sgd.param_groups] == [True, True]
    assert [g["weight_decay"] for g in sgd.param_groups] == [0.2, 0.0]
    (bound,) = made("AdamWN(law='upper', eps=1e-6)")
    assert {g["control"]["law"] for g in bound.param_groups} == {"upper"}
    assert {g["eps"] for g in bound.param_groups} == {1e-6}
    for name in ("AdamW", "AdamC"):
        (several,) = made(f"{name}(foreach=True)")
        assert {(g["foreach"], g["fused"]) for g in several.param_groups} == {(True, None)}
    muon, adamw = made("Muon(ns_steps=3)")
    assert muon.param_groups[0]["ns_steps"] == 3
    assert "ns_steps" not in adamw.param_groups[0]
    (late,) = made("LAWN(switch=7)")
    assert {g["control"]["start"] for g in late.param_groups if g["control"]["controlled"]} == {7}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "nowhere.py:SignSGD",
            r"There is no file '.*nowhere.py' with an optimizer. Give it as path",
        ),
        ("mine.py:Sign", r"mine.py has no optimizer 'Sign'. Did you mean SignSGD\?"),
        ("mine.py", r"mine.py is to be followed by a name, file.py:NAME. Known are .*SignSGD"),
        ("mine.py:SignSGD(momentun=0.9)", r"SignSGD has no such argument. Did you mean momentum\?"),
        (
            "mine.py:SignSGD(lr=0.1)",
            r"cannot have lr in its parentheses: the run sets it. Give --lr",
        ),
        ("mine.py:anything(lr=0.1)", r"cannot have lr in its parentheses: the run sets it"),
        ("mine.py:SignSGD(0.9)", r"has an argument without a name: 0.9. Give each as key=value"),
        ("mine.py:SignSGD(momentum=1/2)", r"momentum=1 / 2 is computed. Give a number, a text"),
        ("mine.py:SignSGD(momentum=)", r"cannot be read. The arguments are key=value"),
        ("mine.py:SignSGD(momentum=0.9", r"cannot be read: it is a name, and arguments in paren"),
        ("mine.py:without_lr", r"mine.py:without_lr has no argument lr, through which"),
        (
            "mine.py:nothing",
            r"mine.py:nothing returned None, where an optimizer of torch is needed",
        ),
        ("mine.py:broken", r"mine.py, line \d+: TypeError: .*no_such_thing.* the optimizer's own"),
        ("mine.py:forgets", r"has \S+ 0 times in the groups of its optimizers, and each weight"),
        ("mine.py:twice", r"has \S+ 2 times in the groups of its optimizers, and each weight"),
        ("AdamWN(gain=0.8)", r"gain in its parentheses: the run sets it. Give --gain"),
        ("CPR-kI0(kappa=2.0)", r"kappa in its parentheses: the run sets it. Give --ratio"),
        ("SGD(momentum='much')", r"SGD\(momentum='much'\) does not accept these settings. '<' not"),
        ("AdamW-sqrt(eps=0.1)", r"AdamW-sqrt has no such argument. It takes none"),
        ("AdamC(momentum=0.9)", r"AdamC has no such argument"),
        ("SGDD(momentum=0.9)", r"There is no optimizer 'SGDD'. Did you mean SGD"),
    ],
)
def test_what_cannot_be_is_a_sentence(mine, tmp_path, given, said):
    with pytest.raises(LabError, match=said):
        made(f"{tmp_path}/{given}" if ".py" in given else given)


def test_one_that_takes_the_model_cannot_be_given_a_target(mine):
    config = SHAPE.with_(optimizer=f"{mine}:both", gain=0.8)
    assert "takes no gain" in unused(config, ["gain"])["gain"]
    with pytest.raises(LabError, match="both takes no gain"):
        check_used(config)


def test_arguments_of_any_name_are_passed_on_where_any_are_taken(mine):
    (opt,) = made(f"{mine}:anything(momentum=0.3, dampening=0.2)")
    assert (opt.defaults["momentum"], opt.defaults["dampening"]) == (0.3, 0.2)


def test_the_name_has_no_folder(mine):
    assert known_name(f"{mine}:SignSGD(momentum=0.5)") == "mine.py:SignSGD"
    (cell,) = grid("sign", SHAPE, optimizer=[f"{mine}:SignSGD(momentum=0.5)"])
    assert cell.trial == "optimizer=mine.py:SignSGD(momentum=0.5)"


def test_a_run_is_known_by_the_text_of_the_file_and_not_by_its_folder():
    one, other = (SHAPE.with_(optimizer=f"{at}mine.py:SignSGD") for at in ("", "/else/where/"))
    assert identity(one, Data("d", optimizer="x")) == identity(other, Data("d", optimizer="x"))
    assert identity(one, Data("d", optimizer="x")) != identity(one, Data("d", optimizer="y"))
    plain = SHAPE.with_(optimizer="SGD")
    assert identity(plain, Data("d")) != identity(one, Data("d"))


@pytest.fixture
def stopped(mine, config, tmp_path):
    """A run that was stopped after eight of twelve steps, and what it would have ended with."""
    run = config.with_(optimizer=f"{mine}:SignSGD", lr=1e-3)
    assert train(run, tmp_path / "whole")
    assert train(run, tmp_path / "run")
    latest(tmp_path / "run/checkpoints").unlink()
    return run


def test_a_run_goes_on_with_the_same_file_in_another_folder(stopped, tmp_path):
    (tmp_path / "plans").mkdir()
    shutil.move(tmp_path / "mine.py", tmp_path / "plans/mine.py")
    moved = stopped.with_(optimizer=f"{tmp_path}/plans/mine.py:SignSGD")
    assert train(moved, tmp_path / "run", resume=True)
    ends = [load(latest(tmp_path / name / "checkpoints"))["model"] for name in ("whole", "run")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_run_does_not_go_on_with_a_changed_file(stopped, mine, tmp_path):
    (tmp_path / "mine.py").write_text(SIGN.replace("sign()", "tanh()"))
    with pytest.raises(LabError, match=r"mine.py is not what .*run was trained with: its text has"):
        train(stopped, tmp_path / "run", resume=True)


STUDY = """
from pathlib import Path
from normcontrol.lab.training.config import Config
from normcontrol.lab.study.cells import grid

BASE = Config.load(Path(__file__).with_name("base.json")).with_(checkpoint_every=0, steps=6)

def study(scale, done):
    sign = BASE.with_(optimizer="mine.py:SignSGD", lr=1e-3)
    cells = grid("sign", sign, gain=[0.6, 0.7]) + grid("AdamW", BASE)
    return cells if done.done(cells) else cells[:2] + grid("AdamW", BASE)
"""


def test_a_study_compares_it_and_runs_it_anew_when_its_file_has_changed(
    mine, config, tmp_path, monkeypatch, quick_workers
):
    (tmp_path / "plan.py").write_text(STUDY)
    config.save(tmp_path / "base.json")
    monkeypatch.chdir(tmp_path)

    def run(**options):
        return runner.Runner(
            begin(tmp_path / "out", "plan.py", "tiny"), device="cpu", **options
        ).run()

    assert (run(workers=2).done, run().left) == (3, 0)
    ledger = open_folder(tmp_path / "out")
    records = list(ledger.results().values())
    own = [record for record in records if "mine" in record.config["optimizer"]]
    assert [record.config["optimizer"] for record in own] == ["mine.py:SignSGD"] * 2
    assert own[0].environment["optimizer"]["text"] == SIGN
    assert {row.arm for row in verdict.judge(ledger).rows} == {"sign", "AdamW"}
    assert all(found.same for found in replay(ledger, "cpu", ("sign",)))
    monkeypatch.chdir("/")  # its file is found beside the study's folder
    assert len([c for c in ledger.cells(ledger.results()) if ledger.results().of(c)]) == 3

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SIGN.replace("sign()", "tanh()"))
    assert run(only=("sign",)).done == 2
    assert len(open_folder(tmp_path / "out").results()) == 5


def test_a_file_that_changes_while_a_study_runs_is_noticed(mine, config, tmp_path, monkeypatch):
    (tmp_path / "plan.py").write_text(STUDY)
    config.save(tmp_path / "base.json")
    monkeypatch.chdir(tmp_path)

    def changes(cell, record, done, wanted):
        (tmp_path / "mine.py").write_text(SIGN.replace("sign()", "tanh()"))

    ledger = begin(tmp_path / "out", "plan.py", "tiny")
    outcome = runner.Runner(ledger, device="cpu", only=("sign",), finished=changes).run()
    assert outcome.stopped == "the file of an optimizer was changed"
    (record,) = open_folder(tmp_path / "out").results().values()
    assert record.environment["optimizer"]["text"] == SIGN


def test_a_worker_refuses_a_file_that_is_not_the_one_of_its_cell(mine, config, tmp_path):
    run = config.with_(optimizer=f"{mine}:SignSGD", lr=1e-3)
    job = Job("id", "cell", run, tmp_path / "work", tmp_path / "data", optimizer="other")
    record = run_cell(job)
    assert record.status == "failed"
    assert "mine.py was changed after the study had begun" in record.error


def test_an_arm_of_a_challenge_may_be_one(mine):
    arm = parse_arm(f"{mine}:SignSGD(momentum=0.5):lr=0.002,gain=0.8")
    assert arm.name == "mine.py:SignSGD(momentum=0.5) lr=0.002, gain=0.8"
    assert arm.changes["optimizer"] == f"{mine}:SignSGD(momentum=0.5)"
    assert (arm.changes["lr"], arm.changes["gain"], arm.changes["ratio"]) == (0.002, 0.8, None)
    assert parse_arm("sgd(momentum=0.9)").changes["optimizer"] == "SGD(momentum=0.9)"
    bounded = parse_arm("adamwn(law='upper')")
    assert bounded.changes["ratio"] == parse_arm("adamwn").changes["ratio"]
    assert bounded.changes["optimizer"] == "AdamWN(law='upper')"
    with pytest.raises(LabError, match=r"should be NAME:key=value"):
        parse_arm("sgd(momentum=0.9)lr=0.1")


def test_a_challenge_with_one_is_read_from_any_folder_and_runs_a_changed_file_anew(
    mine, config, tmp_path, monkeypatch, quick_figures
):
    out = tmp_path / "runs/challenge"
    settings = settings_of(config.with_(steps=4, warmup=1), ["mine.py:SignSGD:lr=0.001"], 1)
    monkeypatch.chdir(tmp_path)
    assert (
        runner.Runner(begin(out, "challenge", "", settings=settings), device="cpu").run().done == 2
    )
    monkeypatch.chdir("/")
    assert [row.arm for row in verdict.judge(open_folder(out)).rows][1:] == [
        "mine.py:SignSGD lr=0.001"
    ]
    page = study_page.write(open_folder(out), out).read_text()
    assert "optimizer mine.py:SignSGD" in page
    assert str(tmp_path) not in page
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SIGN.replace("sign()", "tanh()"))
    again = begin(out, "challenge", "", settings=settings)
    assert runner.Runner(again, device="cpu").run().failed == {}
    losses = [
        record.final["val_loss"]
        for record in open_folder(out).results().values()
        if "mine" in record.config["optimizer"]
    ]
    assert len(set(losses)) == 2
    assert (out / "arms/mine.py-signsgd-lr=0.001/seed-0-earlier-1").exists()
