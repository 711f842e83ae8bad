"""Tests the built distributions: installs each in a clean environment, and trains with it there.

``python tools/dist.py dist/*``. ``make dist`` builds the distributions and runs this.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

SMOKE = """
import importlib.metadata, importlib.resources, pathlib, sys
import torch, normcontrol

home = pathlib.Path(normcontrol.__file__)
assert "site-packages" in home.parts, f"imported from {home}, not from the installed package"
assert importlib.metadata.version("normcontrol") == normcontrol.__version__
typed = importlib.resources.files("normcontrol").joinpath("py.typed")
assert typed.is_file(), "py.typed is missing: type checkers would ignore the annotations"
extras = {"jax", "matplotlib", "tyro", "pyarrow"} & set(sys.modules)
assert not extras, f"importing the library imports {extras}"

model = torch.nn.Linear(8, 8)
before = model.weight.norm().item()
opt = normcontrol.AdamWN(model.parameters(), ratio=2.0, rate=1.0)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    opt.step()
assert abs(model.weight.norm().item() / before - 2) < 1e-5
try:
    import normcontrol.optax
except ImportError as error:
    assert "pip install 'normcontrol[jax]'" in str(error), error
else:
    raise AssertionError("jax is installed, so this is not a clean environment")
versions = normcontrol.__version__, torch.__version__, sys.version.split()[0]
print("normcontrol %s with torch %s on Python %s" % versions)
"""


def outside() -> dict[str, str]:
    """Return the environment variables without the path to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def install(distribution: Path, folder: str) -> str:
    """Install a distribution into a new environment, and return the path of its Python."""
    venv.create(folder, with_pip=True)
    python = str(Path(folder) / "bin/python")
    # The constraints select the CPU build of torch. Only the declared dependencies are added.
    options = ["--quiet", "--constraint", str(ROOT / "constraints.txt")]
    command = [python, "-m", "pip", "install", *options, str(distribution)]
    subprocess.run(command, check=True, env=outside())
    return python


def check(distribution: Path) -> None:
    """Install one distribution, run the script above, and run the command without its extra."""
    with tempfile.TemporaryDirectory() as folder:
        python, env = install(distribution, folder), outside()
        subprocess.run([python, "-W", "ignore", "-c", SMOKE], check=True, cwd=folder, env=env)
        command = subprocess.run(
            [str(Path(folder) / "bin/normcontrol"), "train"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
        )
        assert "pip install 'normcontrol[lab]'" in command.stderr, (
            f"without its extra, the command should name the extra: {command.stderr}"
        )
        print(f"{distribution.name}: installs, trains, and has type annotations")


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit("Give the files of dist/: python tools/dist.py dist/*")
    for given in sys.argv[1:]:
        check(Path(given).resolve())
