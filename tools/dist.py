"""Try the built distributions as a user would: each installed alone in a clean environment, and put
to use there.

``python tools/dist.py dist/*``; ``make dist`` builds them and runs this.
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
assert "site-packages" in home.parts, f"imported from {home}, not from what was installed"
assert importlib.metadata.version("normcontrol") == normcontrol.__version__
assert importlib.resources.files("normcontrol").joinpath("py.typed").is_file(), "py.typed is missing: its types would not be seen"
unasked = {"jax", "matplotlib", "tyro", "pyarrow"} & set(sys.modules)
assert not unasked, f"importing the library imports {unasked}"

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
    raise AssertionError("jax is installed here, so this is no clean environment")
print("normcontrol", normcontrol.__version__, "with torch", torch.__version__, "on Python", sys.version.split()[0])
"""


def try_out(distribution: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin/python")
        # torch's pinned CPU build; nothing but what the distribution itself asks for beside it.
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(ROOT / "constraints.txt"),
            str(distribution),
        ]
        subprocess.run(install, check=True)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, "-W", "ignore", "-c", SMOKE], check=True, cwd=folder, env=env)
        command = subprocess.run(
            [str(Path(folder) / "bin/normcontrol"), "train"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
        )
        assert "pip install 'normcontrol[lab]'" in command.stderr, (
            f"the command without its extra should say what it needs: {command.stderr}"
        )
        print(f"{distribution.name}: installs, trains, and is typed")


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit("Give the files of dist/: python tools/dist.py dist/*")
    for given in sys.argv[1:]:
        try_out(Path(given).resolve())
