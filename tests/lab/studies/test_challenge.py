"""The challenge: a study of paired arms with the baseline's norm as their target. Its report claims
no more than its runs show."""

from __future__ import annotations

import errno
import json
import re
import signal

import pytest
from fakes import FakeLedger, record
from fork_server import Python

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import challenge
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.study import worker
from normcontrol.lab.study.verdict import judge
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.sample import load

ARMS = ["adamwn", "scaled", "adamc", "adamw:weight_decay=0.2"]


def flags(config):
    settings = (
        "layers",
        "heads",
        "width",
        "context",
        "data",
        "tokens_per_step",
        "micro_batch",
        "lr",
        "warmup",
        "ramp",
        "rate",
        "steps",
    )
    pairs = [
        (f"--{key.replace('_', '-')}", str(config.flat()[key]))
        for key in (*settings, "eval_every", "log_every", "checkpoint_every")
    ]
    return [word for pair in pairs for word in pair]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return tmp_path_factory.mktemp("challenge")


def command(config, out, *more):
    return ["challenge", "--out", str(out), *flags(config.with_(steps=30, rate=0.5)), *more]


@pytest.fixture
def finished(config, done, capsys):
    """A challenge of four arms and two seeds, run once for all tests in this file."""
    if not (done / "out" / "index.html").exists():
        assert main(command(config, done / "out", "--seeds", "2", "--arms", *ARMS)) == 0
        (done / "said").write_text(capsys.readouterr().out)
    return done / "out"


def test_every_arm_of_a_seed_starts_from_the_same_weights_and_sees_the_same_batches(finished):
    for seed in (0, 1):
        runs = {
            name: metrics.read(finished / "arms" / name / f"seed-{seed}")
            for name in ("adamw", "adamwn", "adamc")
        }
        first = {name: (lines[0]["val_loss"], lines[1]["loss"]) for name, lines in runs.items()}
        assert len(set(first.values())) == 1
    assert (
        metrics.read(finished / "arms/adamw/seed-0")[1]
        != metrics.read(finished / "arms/adamw/seed-1")[1]
    )


def test_adamwn_is_scheduled_to_the_ratio_that_adamw_ended_with(finished):
    for seed in (0, 1):
        ended = [
            line["ratio"]
            for line in metrics.read(finished / f"arms/adamw/seed-{seed}")
            if "ratio" in line
        ][-1]
        config = json.loads((finished / f"arms/adamwn/seed-{seed}/config.json").read_text())
        assert config["optim"]["ratio"] == ended
        reached = [
            line["ratio"]
            for line in metrics.read(finished / f"arms/adamwn/seed-{seed}")
            if "ratio" in line
        ]
        assert reached[-1] == pytest.approx(ended, rel=0.03)
        scaled = metrics.read(finished / f"arms/adamw-from-scaled-weights/seed-{seed}")
        assert scaled[0]["ratio"] == pytest.approx(ended, abs=1e-5)


def test_the_report_is_a_table_a_picture_and_one_self_contained_page(finished, done):
    said = (done / "said").read_text()
    assert "minus baseline" in said
    assert "n = 2 paired seeds" in said
    assert f"The page with the four panels is {finished / 'index.html'}." in said
    assert (finished / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert (finished / "figures.pdf").read_bytes().startswith(b"%PDF")
    page = (finished / "index.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://""", page)
    for arm in ("AdamW", "AdamWN", "AdamW from scaled weights", "AdamC", "AdamW weight_decay=0.2"):
        assert arm in page
    verdict = judge(open_folder(finished))
    assert [row.trial.seeds for row in verdict.rows] == [[0, 1]] * 5
    assert verdict.sentences()[0] in said


def test_it_is_a_study_that_can_be_judged_and_replayed(finished, capsys):
    ledger = open_folder(finished)
    records = ledger.results()
    assert len(records) == 10
    for cell in ledger.cells(records):
        folder = ledger.run_folder("", cell)
        assert records.of(cell).final["val_loss"] == metrics.read(folder)[-1]["val_loss"]
    assert main(["verdict", str(finished)]) == 0
    assert "n = 2 paired seeds" in capsys.readouterr().out
    only = ["--only", "AdamWN seed=1", "--device", "cpu"]
    assert main(["study", "--replay", str(finished), *only]) == 0
    assert "AdamWN seed=1: the same, bit for bit" in capsys.readouterr().out


def test_the_runs_are_kept_with_their_checkpoints(finished):
    model, _ = load(finished / "arms/adamwn/seed-1", "cpu")
    assert model.config.width == 32


def test_the_same_command_again_trains_nothing_again(finished, config, capsys, quick_figures):
    before = (finished / "arms/adamwn/seed-1/timing.jsonl").read_bytes()
    assert main(command(config, finished, "--seeds", "2", "--arms", *ARMS)) == 0
    assert (finished / "arms/adamwn/seed-1/timing.jsonl").read_bytes() == before


def test_arms_and_seeds_can_be_added_to_a_challenge(config, tmp_path, capsys, quick_figures):
    assert main(command(config, tmp_path / "out")) == 0
    before = (tmp_path / "out/arms/adamw/seed-0/timing.jsonl").read_bytes()
    more = ["--seeds", "2", "--arms", "adamwn", "adamc", "--checkpoint-every", "15"]
    assert main(command(config, tmp_path / "out", *more)) == 0
    assert [len(row.trial.seeds) for row in judge(open_folder(tmp_path / "out")).rows] == [2] * 3
    assert (tmp_path / "out/arms/adamw/seed-0/timing.jsonl").read_bytes() == before


def test_another_challenge_in_the_same_folder_is_refused(finished, config, capsys):
    assert (
        main(["challenge", "--out", str(finished), *flags(config.with_(steps=31, rate=0.5))]) == 1
    )
    assert "contains another challenge: steps was 30 and is 31 now" in capsys.readouterr().err


def test_a_study_in_the_same_folder_is_refused(finished, study, capsys):
    assert main(["study", study, "--out", str(finished)]) == 1
    assert "contains another study: its study was 'challenge'" in capsys.readouterr().err
    assert main(["study", "challenge"]) == 1
    assert "A challenge is run by a command of its own" in capsys.readouterr().err


def test_ctrl_c_saves_and_the_same_command_continues(config, tmp_path, capsys, quick_figures):
    out, longer = tmp_path / "out", flags(config.with_(steps=120, eval_every=120))
    asked = ["challenge", "--out", str(out), *longer, "--device", "cpu"]
    process = Python("-m", "normcontrol.lab", *asked)
    process.wait_for(lambda: len(metrics.read(out / "arms/adamw/seed-0")) >= 5)
    process.signal(signal.SIGINT)
    ended = process.end()
    assert ended.status == 130
    assert "Stopped, and saved. To continue, give the same command again." in ended.out
    stopped = metrics.read(out / "arms/adamw/seed-0")
    assert main(asked) == 0
    whole = tmp_path / "whole"
    assert main(["challenge", "--out", str(whole), *longer, "--device", "cpu"]) == 0
    for arm in ("adamw", "adamwn"):
        lines = metrics.read(out / f"arms/{arm}/seed-0")
        assert lines == metrics.read(whole / f"arms/{arm}/seed-0")
    assert metrics.read(out / "arms/adamw/seed-0")[: len(stopped)] == stopped


def test_what_cannot_be_run_is_refused_before_anything_is_run(config, tmp_path, capsys):
    assert main(command(config, tmp_path / "out", "--arms", "adamwn:heads=3")) == 1
    assert "width=32 is not divisible by heads=3" in capsys.readouterr().err
    assert main(command(config, tmp_path / "out", "--seeds", "0")) == 1
    assert "seeds=0: it must be 1 or more." in capsys.readouterr().err
    assert main(command(config, tmp_path / "out", "--arms", "adamc", "adamc")) == 1
    assert "each must differ from the others" in capsys.readouterr().err
    for more, sentence in (
        (["--arms", "adamwn:steps=6"], "'AdamWN steps=6' could not be compared with the others"),
        (["--arms", "adamc:rate=0.2"], "rate=0.2 would have no effect: AdamC takes no rate"),
        (["--arms", "adamw:init_seed=1"], "cannot have init_seed of its own"),
        (["--ratio", "2"], "ratio=2.0 would have no effect: every arm has its own"),
        (["--optimizer", "SGD"], "every arm has its own. Use --arms instead, as in --arms SGD."),
        (["--arms", "adamwn:optimizer=SGD"], "names two optimizers. Give one, as in --arms SGD."),
        (["--arms", "adamc"], "ramp=3 would have no effect"),  # no arm controls a norm
        (["--arms", "adamwn:clip=nan"], "clip=nan: it must be 0 or more and finite."),
    ):
        assert main(command(config, tmp_path / "out", *more)) == 1
        assert sentence in capsys.readouterr().err
    settings = challenge.settings_of(config.with_(norm_layers=True), ["adamwn"], 1)
    challenge.check_settings(settings, ["norm_layers"])  # AdamWN uses it
    arms = [
        arm.cell(config.with_(norm_layers=True), 0, 2.0) for arm in challenge.all_arms(["adamwn"])
    ]
    assert [cell.config.optim.norm_layers for cell in arms] == [False, True]
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_an_error_and_is_tried_again(
    config, tmp_path, capsys, monkeypatch, quick_figures
):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker, "train", full)
    assert main(command(config, tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert "1 of 1 runs failed. AdamW seed=0: No space left on device. Free some space" in said
    monkeypatch.undo()
    assert main(command(config, tmp_path / "out")) == 0


def test_without_a_norm_of_the_baseline_there_is_no_challenge(
    config, tmp_path, capsys, monkeypatch
):
    def nan(*args, **options):
        raise LabError("The loss or gradient was not finite in 5 steps in a row")

    monkeypatch.setattr(worker, "train", nan)
    assert main(command(config, tmp_path / "out")) == 1
    assert "The loss or gradient was not finite" in capsys.readouterr().err


def test_arms_are_parsed_with_their_changes():
    arm = challenge.parse_arm("adamwn:ratio=2.4,scope=tensor,ramp=10")
    assert arm.name == "AdamWN ratio=2.4, scope=tensor, ramp=10"
    changes = {"optimizer": "AdamWN", "ratio": 2.4, "gain": None, "scope": "tensor", "ramp": 10}
    assert arm.changes == changes
    assert challenge.parse_arm("muon").changes["optimizer"] == "Muon"
    changes = {"optimizer": "AdamWN", "ratio": None, "gain": 0.8}
    assert challenge.parse_arm("adamwn:gain=0.8").changes == changes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adamnw", "There is no arm 'adamnw'. Did you mean AdamW or adamwn"),
        (
            "adamw:weight_dekay=1",
            "'weight_dekay' is not a setting of a run. Did you mean weight_decay",
        ),
        ("adamw:lr=fast", "lr='fast' is not a number"),
        ("adamw:lr", "'lr' has no value"),
        ("adamw:lr=1e-3,lr=2e-3", "has two values for lr. Give one of them."),
        ("adamwn:scope=tensr", "scope='tensr' is not a choice. Did you mean tensor"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(text, sentence):
    with pytest.raises(LabError) as refusal:
        challenge.parse_arm(text)
    assert sentence in str(refusal.value)


def verdict_on(losses, arms=("adamwn",)):
    """The verdict on a challenge whose arms ended at these losses, by name and seed."""
    seeds = len(next(iter(losses.values())))
    study = challenge.study(challenge.settings_of(Config(), arms, seeds))
    return judge(FakeLedger(study, lambda cell: record(cell, losses[cell.arm][cell.seed])))


def test_one_pair_is_called_an_illustration_and_several_shown_or_not():
    (one,) = verdict_on({"AdamW": [3.0], "AdamWN": [2.9]}).sentences()
    assert "an illustration and not evidence" in one
    adamw = [3.0, 3.1, 3.2]
    assert "is shown" in verdict_on({"AdamW": adamw, "AdamWN": [2.9, 3.0, 3.1001]}).sentences()[0]
    assert "is not shown" in verdict_on({"AdamW": adamw, "AdamWN": [2.9, 3.2, 3.2]}).sentences()[0]


def test_the_control_that_could_explain_a_difference_is_named_beside_it():
    losses = {"AdamW": [3.0], "AdamWN": [2.9], "AdamW from scaled weights": [2.8]}
    (sentence,) = verdict_on(losses, ("adamwn", "scaled")).sentences()
    assert "AdamW that only started from weights of that norm ended at 2.8000." in sentence


def test_a_verdict_on_several_arms_is_in_short_sentences():
    losses = {"AdamW": [3.0, 3.1], "AdamWN": [2.9, 3.1], "AdamW from scaled weights": [2.8, 3.1]}
    (said,) = verdict_on(losses, ("adamwn", "scaled")).sentences()
    assert max(len(sentence.split()) for sentence in said.split(". ")) < 40


def test_a_run_that_diverged_is_said_and_not_compared():
    verdict = verdict_on({"AdamW": [3.0, 3.1], "AdamWN": [2.9, float("inf")]})
    assert verdict.sentences() == ["AdamWN diverged in 1 of 2 runs, so that nothing is compared."]
    assert verdict.table()[1][1:4] == ["2", "diverged", "-"]


def test_a_challenge_that_was_stopped_compares_no_means_over_different_seeds():
    losses = {"AdamW": [3.0, 3.4], "AdamWN": [2.9], "AdamWN gain=0.8": [2.95, 3.3]}
    settings = challenge.settings_of(Config(), ("adamwn", "adamwn:gain=0.8"), 2)

    def outcome(cell):
        known = losses[cell.arm]
        return record(cell, known[cell.seed]) if cell.seed < len(known) else None

    verdict = judge(FakeLedger(challenge.study(settings), outcome))
    (said,) = verdict.sentences()
    assert said.startswith("AdamW ended at a validation loss of 3.0000 ")
    assert "and AdamWN at 2.9000, 0.1000 lower" in said
    assert "nothing was measured first, ended at 3.1250 in seeds 0, 1." in said
    assert [row[:3] for row in verdict.table()] == [
        ["AdamW", "2", "3.2000"],
        ["AdamWN", "1", "2.9000"],
        ["AdamWN gain=0.8", "2", "3.1250"],
    ]
    assert "over n seeds" in verdict.study.story.note


def test_a_control_that_diverged_is_said():
    losses = {"AdamW": [3.0], "AdamWN": [2.9], "AdamW from scaled weights": [float("inf")]}
    (sentence,) = verdict_on(losses, ("adamwn", "scaled")).sentences()
    assert "AdamW from scaled weights diverged in 1 of 1 runs." in sentence
    assert "inf" not in sentence
