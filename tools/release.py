"""What a release needs, checked: ``make release-check``.

The version is the same everywhere and in the changelog, the wheel and the sdist install and train
in clean environments, the examples of the README run from the wheel, and the wheel is valid on
every declared Python that is at hand. There it is installed without torch, which ``make
test-versions`` tests. ``make release-check`` builds the distributions and the documentation before.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dist import check, install, outside
from versions import interpreter

ROOT = Path(__file__).parents[1]
EXAMPLES = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

WITHOUT_TORCH = """
import compileall, importlib.metadata, importlib.util, pathlib, sys
found = pathlib.Path(importlib.util.find_spec("normcontrol").origin)
assert "site-packages" in found.parts, found
assert compileall.compile_dir(found.parent, quiet=1, force=True), "some files do not compile"
import normcontrol
assert importlib.metadata.version("normcontrol") == normcontrol.__version__
assert "torch" not in sys.modules
"""


def problems(root: Path = ROOT) -> list[str]:
    """Return what does not agree about the version, as sentences."""
    found = []
    version = _first(r'__version__ = "(.*)"', root / "src/normcontrol/__init__.py")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"__version__ is {version!r}: a release has the form 1.2.3.")
    heading = _first(rf"^## ({re.escape(version)}\b.*)$", root / "CHANGELOG.md")
    if not heading:
        found.append(f"CHANGELOG.md has no heading '## {version}'.")
    elif "unreleased" in heading.lower():
        found.append(f"CHANGELOG.md says '{heading}': put the date in place of 'unreleased'.")
    cited = _first(r"^version: (.*)$", root / "CITATION.cff")
    if cited != version:
        found.append(f"CITATION.cff is of version {cited!r}, but __version__ is {version!r}.")
    dated = _first(r"^date-released: (.*)$", root / "CITATION.cff")
    released = re.search(r"\d{4}-\d\d-\d\d", heading)
    if released and dated != released[0]:
        found.append(
            f"CITATION.cff is dated {dated!r}, but CHANGELOG.md says '{heading}': both have the "
            "day of the release."
        )
    named = r"normcontrol-(\d+\.\d+\.\d+)|^ *version *= \{(.*)\}"
    for names in re.findall(named, (root / "README.md").read_text(), re.M):
        if (other := "".join(names)) != version:
            found.append(f"README.md names version {other!r}, but __version__ is {version!r}.")
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    for page in pages:
        if re.search(r"pip install '?normcontrol(?![^\n]*(whl|git\+))", page.read_text()):
            found.append(
                f"{page.relative_to(root)} says 'pip install normcontrol': it is on no index. "
                "Write '.[extra]', a wheel, or git+URL."
            )
    return found


def _first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(), re.M)
    return found[1] if found else ""


def check_readme(wheel: Path) -> None:
    """Run the examples of the README in order, with the wheel and nothing else."""
    examples = "\n".join(EXAMPLES.findall((ROOT / "README.md").read_text()))
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, folder)
        script = Path(folder) / "readme.py"
        script.write_text(examples)
        subprocess.run(
            [python, "-W", "ignore", str(script)],
            check=True,
            cwd=folder,
            env=outside(),
            stdout=subprocess.DEVNULL,
        )
    print("The examples of the README run from the wheel")


def check_other_pythons(wheel: Path) -> None:
    """Install the wheel on every declared Python that is at hand, and compile it there."""
    project = (ROOT / "pyproject.toml").read_text()
    for version in re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project):
        try:
            python = interpreter(version)
        except SystemExit as missing:
            print(f"Python {version}: not checked. {missing}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([python, "-m", "venv", folder], check=True)
            run = str(Path(folder) / "bin/python")
            command = [run, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
            subprocess.run(command, check=True, env=outside())
            subprocess.run([run, "-c", WITHOUT_TORCH], check=True, cwd=folder, env=outside())
        print(f"Python {version}: the wheel installs, and every file compiles")


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:]]
    wheels = [path for path in given if path.suffix == ".whl"]
    if len(wheels) != 1:
        raise SystemExit("Give the files of dist/, with one wheel: python tools/release.py dist/*")
    for path in given:
        check(path)
    check_readme(wheels[0])
    check_other_pythons(wheels[0])
    left = problems()
    print(*left, sep="\n")
    sys.exit(bool(left))
