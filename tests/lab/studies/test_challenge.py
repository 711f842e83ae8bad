"""The challenge: paired arms, the baseline's norm as the target, and a report that says no more
than it knows."""

from __future__ import annotations

import json
import re

import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.errors import LabError
from normcontrol.lab.report import challenge as report
from normcontrol.lab.studies import challenge
from normcontrol.lab.study import statistics as stats
from normcontrol.lab.training import metrics


def flags(config):
    kept = (
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
        for key in (*kept, "eval_every", "log_every", "checkpoint_every")
    ]
    return [word for pair in pairs for word in pair]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return tmp_path_factory.mktemp("challenge")


@pytest.fixture
def finished(config, done, capsys):
    """A challenge of four arms and two seeds, run once for all tests here."""
    if not (done / "out" / "index.html").exists():
        arms = ["adamwn", "scaled", "adamc", "adamw:weight_decay=0.5"]
        assert (
            main(
                [
                    "challenge",
                    "--out",
                    str(done / "out"),
                    "--seeds",
                    "2",
                    "--arms",
                    *arms,
                    *flags(config.with_(steps=30, rate=0.5)),
                ]
            )
            == 0
        )
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
        held = [
            line["ratio"]
            for line in metrics.read(finished / f"arms/adamwn/seed-{seed}")
            if "ratio" in line
        ]
        assert held[-1] == pytest.approx(ended, rel=0.03)
        scaled = metrics.read(finished / f"arms/adamw-from-scaled-weights/seed-{seed}")
        assert scaled[0]["ratio"] == pytest.approx(ended, abs=1e-5)


def test_the_report_is_a_table_a_picture_and_one_self_contained_page(finished, done):
    said = (done / "said").read_text()
    assert "minus baseline" in said
    assert "n = 2 paired seeds" in said
    assert f"The page with the four panels is {finished / 'index.html'}." in said
    assert (finished / "panels.png").read_bytes().startswith(b"\x89PNG")
    assert (finished / "panels.pdf").read_bytes().startswith(b"%PDF")
    page = (finished / "index.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://""", page)
    for arm in ("AdamW", "AdamWN", "AdamW from scaled weights", "AdamC", "AdamW weight_decay=0.5"):
        assert arm in page
    results = json.loads((finished / "results.json").read_text())
    assert [len(entry["val_loss"]) for entry in results] == [2] * 5


def test_the_same_command_again_trains_nothing_again(finished, config, capsys):
    before = (finished / "arms/adamwn/seed-1/timing.jsonl").read_bytes()
    arms = ["adamwn", "scaled", "adamc", "adamw:weight_decay=0.5"]
    assert (
        main(
            [
                "challenge",
                "--out",
                str(finished),
                "--seeds",
                "2",
                "--arms",
                *arms,
                *flags(config.with_(steps=30, rate=0.5)),
            ]
        )
        == 0
    )
    assert (finished / "arms/adamwn/seed-1/timing.jsonl").read_bytes() == before


def test_another_challenge_in_the_same_folder_is_refused(finished, config, capsys):
    assert (
        main(["challenge", "--out", str(finished), *flags(config.with_(steps=31, rate=0.5))]) == 1
    )
    assert "holds another challenge: steps was 30 and is 31 now" in capsys.readouterr().err


def test_arms_are_parsed_with_their_changes():
    arm = challenge.parse_arm("adamwn:ratio=2.4,scope=tensor,ramp=10")
    assert arm.name == "AdamWN ratio=2.4, scope=tensor, ramp=10"
    assert arm.changes == {"optimizer": "AdamWN", "ratio": 2.4, "scope": "tensor", "ramp": 10}
    assert challenge.parse_arm("muon").changes["optimizer"] == "Muon"


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
        ("adamwn:scope=tensr", "scope='tensr' is not a choice. Did you mean tensor"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(text, sentence):
    with pytest.raises(LabError) as refusal:
        challenge.parse_arm(text)
    assert sentence in str(refusal.value)


def test_one_pair_is_called_an_illustration_and_several_shown_or_not(tmp_path):
    def result(name, losses):
        folders = []
        for i, loss in enumerate(losses):
            folder = tmp_path / f"{name}-{len(losses)}-{i}-{loss}"
            folder.mkdir(exist_ok=True)
            (folder / "metrics.jsonl").write_text(
                json.dumps({"step": 1, "val_loss": loss, "ratio": 2.0}) + "\n"
            )
            folders.append(folder)
        return challenge.Result(challenge.Arm(name), [], folders)

    assert "an illustration and not evidence" in report.verdict(
        [result("A", [3.0]), result("B", [2.9])]
    )
    three = result("A", [3.0, 3.1, 3.2])
    assert "is shown" in report.verdict([three, result("B", [2.9, 3.0, 3.1001])])
    assert "is not shown" in report.verdict([three, result("C", [2.9, 3.2, 3.2])])


def test_the_interval_is_students():
    d = stats.paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert d.half == pytest.approx(4.303 / 3**0.5)
    assert len(stats.T975) == 30
    assert stats.paired([1.0], [0.5]).half is None
