"""Make a self-contained training script for modded-nanogpt's optimizer track, with AdamWN.

``python make_script.py CHECKOUT OUT.py`` takes the baseline's script from a checkout and replaces
two of its sections, as the rules allow: the optimizer by ``optimizer.py``, and initialisation and
hyperparameters by ``hyperparameters.py``. Data, batch size and architecture stay as they are.
"""

import ast
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = "records/track_3_optimization/train_gpt_simple.py"
SECTIONS = {"Optimizer": "optimizer.py", "Init & Optim Hyperparams": "hyperparameters.py"}
"""The headings of the sections that are replaced, and the files that replace them."""


def replaced(script: str) -> str:
    """Return the script with both sections replaced."""
    for heading, file in SECTIONS.items():
        script = with_section(script, heading, (HERE / file).read_text())
    ast.parse(script)
    return script


def with_section(script: str, heading: str, body: str) -> str:
    """Return the script with another body of the section that has this heading.

    A heading is a line between two lines of hash signs; a section ends before the next heading.
    """
    lines = script.splitlines()
    rules = [i for i, line in enumerate(lines) if set(line.strip()) == {"#"} and len(line) > 20]
    tops = [i for i in rules if i + 2 in rules]
    found = [i for i in tops if lines[i + 1].strip("# ") == heading]
    if len(found) != 1:
        raise SystemExit(
            f"The script has {len(found)} sections {heading!r}, but one was expected: the "
            "benchmark has changed. Replace the section by hand."
        )
    end = next((i for i in tops if i > found[0]), len(lines))
    indent = lines[found[0]][: len(lines[found[0]]) - len(lines[found[0]].lstrip())]
    new = textwrap.indent(body, indent).rstrip().splitlines()
    return "\n".join([*lines[: found[0] + 3], "", *new, "", "", *lines[end:]]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(
            "Give a checkout and the file to write: python make_script.py CHECKOUT OUT.py"
        )
    baseline = Path(sys.argv[1]) / SCRIPT
    if not baseline.is_file():
        raise SystemExit(f"{baseline} does not exist: give a checkout of modded-nanogpt.")
    Path(sys.argv[2]).write_text(replaced(baseline.read_text()))
