"""Studies are opened by name, from a file, and from their folders, each of which contains one study."""

from __future__ import annotations

import json

import pytest

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.opening import begin, load
from normcontrol.lab.study.cells import Study
from normcontrol.lab.study.runner import Runner


def test_an_unknown_study_is_refused(tmp_path, study):
    with pytest.raises(LabError, match=r"There is no study 'claim'. Did you mean claims\?"):
        load("claim")
    with pytest.raises(LabError, match=r"has no function 'decay'. Did you mean decays\?"):
        load(study[:-1])
    with pytest.raises(LabError, match=r"There is no file 'nowhere.py'"):
        load("nowhere.py:f")
    assert isinstance(load(study), Study)


def test_two_studies_do_not_mix(study, tmp_path, config, capsys):
    out = tmp_path / "out"
    begin(out, study, "tiny").save()
    with pytest.raises(
        LabError, match="contains another study: its scale was 'tiny' and is 'small' now"
    ):
        begin(out, study, "small")
    with pytest.raises(LabError, match="contains another study: its study was "):
        begin(out, study.replace("decays", "spoiled"), "tiny")


def test_other_data_under_the_same_name_is_refused_and_the_same_data_elsewhere_is_not(
    study, tmp_path, corpus
):
    out = tmp_path / "out"
    Runner(begin(out, study, "tiny", str(corpus)), device="cpu", only=("seed=0",)).run()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    ledger = begin(out, study, "tiny", str(moved))
    cell = ledger.cells(ledger.results())[0]
    assert ledger.results().of(cell) is not None
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["splits"]["val"] = manifest["splits"]["train"]
    del manifest["sha256"]  # changed on purpose
    (moved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LabError, match="the same study on other data"):
        begin(out, study, "tiny", str(moved))
