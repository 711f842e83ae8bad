"""The commands ``study``, ``verdict`` and ``report``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from fakes import FakeLedger, record

from normcontrol.lab.cli.challenge import refuse_failures
from normcontrol.lab.cli.main import main
from normcontrol.lab.cli.study import summary
from normcontrol.lab.errors import LabError
from normcontrol.lab.study.cells import Study, grid
from normcontrol.lab.study.runner import Outcome
from normcontrol.lab.training.config import Config


def test_under_torchrun_a_study_is_refused(study, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["study", study]) == 1
    assert (
        "A study gives each run one process, and torchrun started several"
        in capsys.readouterr().err
    )


def test_the_commands_verdict_and_report(config, tmp_path, capsys):
    (tmp_path / "s.py").write_text(
        "from normcontrol.lab.training.config import Config\nfrom normcontrol.lab.study.cells "
        "import grid\nfrom pathlib import Path\n"
        "def study(scale, done):\n"
        f"    base = Config.load(Path({str(tmp_path / 'c.json')!r}))\n"
        "    arms = grid('AdamW', base, lr=[1e-2], seeds=[0, 1])\n"
        "    return arms + grid('AdamWN', base.with_(optimizer='AdamWN'), lr=[1e-2], seeds=[0, "
        "1])\n"
    )
    config.save(tmp_path / "c.json")
    out = str(tmp_path / "out")
    assert main(["study", str(tmp_path / "s.py"), "--out", out, "--device", "cpu"]) == 0
    assert main(["verdict", out]) == 0
    said = capsys.readouterr().out
    assert "n = 2 paired seeds" in said
    assert "minus baseline" in said
    assert main(["report", out]) == 0
    assert f"The page is {out}/index.html." in capsys.readouterr().out
    assert main(["verdict", str(tmp_path / "nowhere")]) == 1
    assert "contains no study: there is no study.json in it" in capsys.readouterr().err
    (tmp_path / "nowhere").mkdir()
    config.save(tmp_path / "nowhere" / "config.json")
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is a single run, and a verdict or a page is about" in capsys.readouterr().err


def test_study_and_verdict_need_few_packages(study, tmp_path):
    """Machines with GPUs often have torch and numpy, and tyro is easily added."""
    code = f"""
import sys
for name in ("rich", "matplotlib", "tiktoken", "tokenizers", "huggingface_hub", "pyarrow"):
    sys.modules[name] = None
import subprocess
import sys

from normcontrol.lab.cli.main import main
out = {str(tmp_path / "out")!r}
assert main(["study", {study!r}, "--out", out, "--device", "cpu", "--only", "seed=0"]) == 0
sys.exit(main(["verdict", out]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "AdamW weight_decay=" in done.stdout


def test_the_end_of_a_study_counts_its_cells(tmp_path, capsys):
    for done, said in ((1, "The only cell is finished, in "), (2, "All 2 cells are finished, in ")):
        assert summary(Outcome(done, 0), tmp_path) == 0
        assert capsys.readouterr().out.startswith(said)


def test_the_error_of_a_run_is_a_sentence_of_its_own(tmp_path):
    """Errors of torch end without a full stop."""
    cell = grid("AdamW", Config())[0]
    failed = replace(record(cell, 3.0), status="failed", error="RuntimeError: no memory")
    ledger = FakeLedger(Study("s", lambda scale, done: [cell]), lambda cell: failed)
    with pytest.raises(LabError, match=r"no memory\. The same command goes on"):
        refuse_failures(ledger)
