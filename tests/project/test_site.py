"""The documentation site builds strictly, and every link in it leads to a page of it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import normcontrol

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_link_leads_to_a_page(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 20
    for page in pages:
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"\w+:", target):
                assert (page.parent / unquote(target)).resolve().exists(), (
                    f"{page.relative_to(site)} links to {target}"
                )


def test_a_number_and_its_interval_stay_on_one_line(site):
    page = (site / "results/index.html").read_text()
    assert page.count("\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}") > 30
    assert " ± " not in page


def test_pages_load_nothing_from_other_sites(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'(?:<script[^>]* src|<img[^>]* src|<link rel="stylesheet" href)="(https?:[^"]+)',
            page.read_text(),
        )
        assert fetched == [], page


def test_the_reference_has_every_public_name_with_its_docstring(site):
    page = (site / "reference/index.html").read_text()
    for name in normcontrol.__all__:
        assert re.search(rf'id="normcontrol\.{name}"', page), name
    assert "AdamW with weight norm control in place of weight decay" in page
    assert ":class:<code>" not in page  # it may stand in the source that is shown


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        as_markdown = importlib.import_module("docstrings").as_markdown
    finally:
        sys.path.pop(0)
    assert (
        as_markdown("See :class:`A`.\n\n>>> 1 + 1\n2\n\nThe end.")
        == "See `A`.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThe end."
    )
