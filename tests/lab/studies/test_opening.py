"""Studies are opened by name, from a file, and from their folders, each of which contains one study."""

from __future__ import annotations

import json
import sys

import pytest

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.opening import begin, load, open_folder
from normcontrol.lab.study.cells import Study
from normcontrol.lab.study.runner import Runner


def test_an_unknown_study_is_refused(tmp_path, study):
    with pytest.raises(LabError, match=r"There is no study 'claim'. Did you mean claims\?"):
        load("claim")
    with pytest.raises(
        LabError, match=r"has no function and no Study 'decay'. Did you mean decays\?"
    ):
        load(study[:-1])
    with pytest.raises(LabError, match=r"There is no file 'nowhere.py'"):
        load("nowhere.py:f")
    assert isinstance(load(study), Study)


def own(tmp_path, text):
    """A study file with this text after its imports."""
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\n"
        "from normcontrol.lab.study.cells import Study, grid\n" + text
    )
    return str(tmp_path / "own.py")


def test_a_file_of_the_users_own_may_define_dataclasses(tmp_path):
    text = "from dataclasses import dataclass\n@dataclass\nclass Plan:\n    steps: int = 1\n"
    study = load(own(tmp_path, f"{text}def study(scale, done):\n    return [Plan().steps]\n"))
    assert study.cells("tiny", None) == [1]


def test_the_studies_of_a_file_are_among_its_names(tmp_path):
    path = own(tmp_path, "rates = Study('rates', lambda scale, done: [])\n")
    with pytest.raises(LabError, match=r"no Study 'rate'. Did you mean rates\?"):
        load(f"{path}:rate")


@pytest.mark.parametrize("returned", ["None", "3", "'lr'", "[1, 2]", "[]"])
def test_a_study_that_returns_no_cells_is_refused(tmp_path, returned):
    path = own(tmp_path, f"def study(scale, done):\n    return {returned}\n")
    ledger = begin(tmp_path / "out", path, "tiny")
    with pytest.raises(LabError, match=r"returned .+, where a list of cells is needed"):
        ledger.cells(ledger.results())


def test_two_runs_of_one_name_are_refused(tmp_path):
    """A verdict knows runs by their names, and would leave one of them out."""
    text = (
        "from normcontrol.lab.training.config import Config\n"
        "def study(scale, done):\n    base = Config()\n    return "
    )
    ledger = begin(
        tmp_path / "out",
        own(tmp_path, f"{text}grid('A', base) + grid('A', base.with_(warmup=9))\n"),
        "tiny",
    )
    with pytest.raises(LabError, match=r"two runs named 'A seed=0', with warmup=2000 and warmup=9"):
        ledger.cells(ledger.results())
    same = own(tmp_path, f"{text}grid('A', base, part='one') + grid('A', base, part='two')\n")
    ledger = begin(tmp_path / "out", same, "tiny")
    assert len(ledger.cells(ledger.results())) == 2  # one run, in two parts


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def study(scale, done):\n    return [1][2]\n", "own.py, line 4: IndexError: list index"),
        ("def study(scale):\n    return []\n", "own.py: TypeError: study() takes 1 positional"),
        ("def study(:\n", "own.py, line 3: SyntaxError: "),
        ("import nowhere_at_all\n", "own.py, line 3: ModuleNotFoundError: No module named"),
        ("def study(scale, done):\n    yield {}['x']\n", "own.py, line 4: KeyError: 'x'"),
        ("def each(scale, done):\n    1 / 0\nstudy = Study('s', each)\n", "own.py, line 4: Zero"),
    ],
)
def test_an_error_in_a_file_of_the_users_own_is_a_sentence_with_its_line(tmp_path, text, said):
    path = own(tmp_path, text)
    with pytest.raises(LabError) as error:
        load(path).cells("tiny", None)
    assert said in str(error.value)
    assert "an error of the study's own file" in str(error.value)


def test_the_file_of_a_study_is_found_from_another_folder(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "results" / "decays"
    begin(out, "mine.py:decays", "tiny").save()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_folder(out).study.name == "mine-decays"
    (tmp_path / "mine.py").rename(tmp_path / "elsewhere" / "moved.py")
    with pytest.raises(LabError, match=r"There is no file 'mine.py' .+ needs it.* from the folder"):
        open_folder(out)


def test_a_file_of_the_users_own_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_own.py").write_text("RATES = [0.1]\n")
    (tmp_path / "statistics.py").write_text("")  # hides nothing from others
    path = own(
        tmp_path, "import statistics, neighbour_of_own as n\ndef study(s, d): return n.RATES"
    )
    assert load(path).cells("tiny", None) == [0.1]
    assert sys.path[-1] == str(tmp_path)


def test_a_study_of_the_users_own_is_the_same_by_any_path(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    begin(out, "mine.py:decays", "tiny").save()
    for name in ("./mine.py:decays", study):
        assert begin(out, name, "tiny").name == name
    (tmp_path / "plans").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "plans" / "mine.py")
    assert begin(out, "plans/mine.py:decays", "tiny").name == "plans/mine.py:decays"
