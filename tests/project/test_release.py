"""What belongs to a release: one version everywhere, a workflow that runs our commands, and files
that can be opened without running code."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

import normcontrol
from normcontrol.lab.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release

    return release


@pytest.fixture
def tree(tmp_path):
    """A small project that could be released."""
    for folder in ("src/normcontrol", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/normcontrol/__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.3 (2026-01-01)\n\n## 1.2.2\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\ndate-released: 2026-01-01\n")
    (tmp_path / "README.md").write_text("pip install '.[jax]'\npip install normcontrol-1.2.3.whl\n")
    return tmp_path


def test_a_project_whose_versions_agree_has_no_problems(release, tree):
    assert release.problems(tree) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("src/normcontrol/__init__.py", '__version__ = "1.2.3.dev0"\n', "a release has the form"),
        ("CHANGELOG.md", "# Changes\n\n## 1.2.2\n", "has no heading '## 1.2.3'"),
        ("CHANGELOG.md", "## 1.2.3 (unreleased)\n", "put the date in place of 'unreleased'"),
        ("CITATION.cff", "version: 1.2.2\n", "is of version '1.2.2', but __version__ is '1.2.3'"),
        ("CITATION.cff", "version: 1.2.3\ndate-released: 2025-12-31\n", "dated '2025-12-31', but"),
        ("README.md", "pip install normcontrol-1.2.2.whl\n", "README.md names version '1.2.2'"),
        ("README.md", "  version = {1.2.2},\n", "README.md names version '1.2.2'"),
        ("docs/start.md", "pip install 'normcontrol[jax]'\n", "docs/start.md says 'pip install"),
        ("README.md", "pip install normcontrol\n", "it is on no index"),
    ],
)
def test_what_does_not_agree_is_named(release, tree, file, text, message):
    (tree / file).write_text(text)
    assert any(message in problem for problem in release.problems(tree))


def test_this_project_cites_its_own_version(release):
    assert f"\nversion: {normcontrol.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert [found for found in release.problems() if "CHANGELOG" not in found] == []


def test_the_workflow_runs_our_commands_on_the_versions_that_we_test(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from versions import MATRIX

    listed = re.search(r"python: \[(.*)\]", WORKFLOW)[1]
    assert re.findall(r'"([\d.]+)"', listed) == [python for python, _ in MATRIX]
    commands = re.findall(r"- run: (.*)", WORKFLOW)
    assert commands == [
        ".ci/run",
        "python tools/versions.py --only ${{ matrix.python }}",
        "make release-check",
    ]
    last = WORKFLOW.split("release-check:")[1]  # red until the changelog is dated, so not at a push
    assert "if: github.ref_type == 'tag' || github.event_name == 'workflow_dispatch'" in last
    assert shutil.which(str(ROOT / ".ci/run"))
    makefile = (ROOT / "Makefile").read_text()
    assert "\nrelease-check:" in makefile
    checks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in ("ruff check", "ruff format", "mypy"):
        assert f"$(BIN)/{tool}" in makefile
        assert f".venv/bin/{tool}" in checks


def test_links_of_the_pages_for_contributors_lead_somewhere():
    for page in ("CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"):
        for link in re.findall(r"\]\(([^):#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(link).exists(), (page, link)


def test_every_command_that_a_page_names_exists():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("submissions/*/*.md")]
    named = {
        (command, page.name)
        for page in pages
        for command in re.findall(r"(?:`|console\n)normcontrol ([a-z]+)", page.read_text())
    }
    assert len(named) > 20
    assert {(command, page) for command, page in named if command not in COMMANDS} == set()


def calls(path: Path):
    """The calls in a file, as the text of what is called, and the call itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_file_that_is_opened_can_run_code():
    """What SECURITY.md promises: nothing is unpickled or evaluated. The one thing that is run is a
    Python file that is named as the study or optimizer of a user."""
    runners = [
        path.name
        for path in (ROOT / "src").rglob("*.py")
        for name, _ in calls(path)
        if name == "exec" or name.endswith("exec_module")
    ]
    assert runners == ["own_files.py"]
    for path in (ROOT / "src").rglob("*.py"):
        for name, node in calls(path):
            assert name not in ("eval", "pickle.load", "pickle.loads"), path
            if name.endswith("torch.load"):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("weights_only") == "True", path
            if name in ("np.load", "numpy.load"):
                assert "allow_pickle" not in {k.arg for k in node.keywords}, path
