"""The table of commands: what is imported when, and what is said when a package is missing."""

import subprocess
import sys

import pytest

from normcontrol import __version__
from normcontrol.lab.cli.main import COMMANDS, main
from normcontrol.lab.errors import LabError


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


SLOW = {
    *("torch", "numpy", "matplotlib", "plotly", "pandas", "tensorboard"),
    *("tiktoken", "tokenizers", "huggingface_hub", "pyarrow", "rich"),
}
"""Packages that take long to import."""

CALL = """
import sys
from normcontrol.lab.__main__ import main
sys.argv = ["normcontrol", *{words!r}]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
print("LOADED", *(name for name in sys.modules if "." not in name))
sys.exit(status)
"""


def loaded(done):
    """The packages that a process had imported at its end."""
    return set(done.stdout.partition("LOADED")[2].split())


def test_help_imports_none_of_the_packages():
    done = python(CALL.format(words=["--help"]))
    assert done.returncode == 0, done.stderr
    assert "normcontrol COMMAND --help explains each flag" in done.stdout
    assert not loaded(done) & {*SLOW, "tyro"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_no_package_that_takes_long(command):
    done = python(CALL.format(words=[command, "--help"]))
    assert done.returncode == 0, done.stderr
    assert f"usage: normcontrol {command}" in done.stdout
    assert not loaded(done) & SLOW


@pytest.mark.parametrize("command", ["train", "study"])
def test_a_missing_package_is_named_in_a_sentence(command):
    done = python("import sys\nsys.modules['tyro'] = None\n" + CALL.format(words=[command]))
    assert done.returncode == 1
    assert done.stderr == (
        "normcontrol: The laboratory needs tyro, which is not installed: pip install "
        "'normcontrol[lab]'.\n"
    )


def test_every_command_is_listed(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and about in shown for name, about in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"normcontrol {__version__}\n"


@pytest.mark.parametrize(
    "words", [["--preset", "gpt2"], ["--preset=gpt2"], ["--steps=3", "--preset", "gpt2"]]
)
def test_defaults_come_from_the_preset_wherever_it_stands(words, capsys):
    with pytest.raises(SystemExit):
        main(["schedule", *words, "--help"])
    shown = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert "--width INT Width of the residual stream. (default: 768)" in shown


@pytest.mark.parametrize(
    ("command", "help"),
    [
        (
            "train",
            "speed may be given too, and --data or --optimizer if their files were moved. (",
        ),
        ("train", "so that their joint norm is this times the square root of the number of their"),
        ("prepare", '"python" for the standard library, "openwebtext", or hf:OWNER/NAME@REVISION'),
        ("challenge", "AdamW started from weights scaled to that norm; adamc: AdamC; or any opt"),
    ],
)
def test_the_help_of_a_flag_is_broken_at_the_width_of_the_terminal_alone(
    command, help, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert help in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["challenge", "--arms", "adamwn", "--arms", "adamc"], "--arms is given 2 times"),
        (["study", "claims", "--only=lr", "--only", "seed=1"], "--only is given 2 times"),
        (["train", "--also-validate", "a", "--also_validate", "b"], "--also-validate is given 2"),
        (["train", "--out", ""], "--out is empty"),
        (["train", "--resume="], "--resume is empty"),
        (["prepare", "texts", "--out", ""], "--out is empty"),
    ],
)
def test_what_would_be_dropped_or_taken_for_the_working_directory_is_refused(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "challenge"])
def test_no_flag_is_needed(command, monkeypatch, capsys):
    monkeypatch.setattr(f"normcontrol.lab.cli.{command}.parse", refused)
    assert main([command]) == 1
    assert capsys.readouterr().err == "normcontrol: It was read.\n"


def refused(*args):
    raise LabError("It was read.")


def test_of_a_flag_with_one_value_the_last_one_counts(tmp_path, monkeypatch, capsys):
    """A script may put flags after those that it always gives."""
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "9", "--warmup", "2", "--warmup", "3", "--betas", "0", "0", "--betas"]
    assert main(["schedule", *words, "0.5", "0.5"]) == 0
    assert "\n3     0.004 " in capsys.readouterr().out
