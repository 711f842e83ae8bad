"""Hooks for MkDocs, so that the same pages work in a checkout and on the documentation site.

The pages link to the README and to source files. On the site, the README is the front page, and
every file that a page links to becomes a page that shows it; no link is broken or leaves the site.
The reference page is made from the list of public names in this file, and the tutorial from its
notebook. Used by mkdocs.yml.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import notebook  # the hooks of MkDocs are not in a package

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
HIGHLIGHT = {".py": "python", ".json": "json", ".toml": "toml", ".txt": "text", ".yml": "yaml"}
MODULES = {
    "Optimizers": [
        "normcontrol.AdamWN",
        "normcontrol.NormControl",
        "normcontrol.Reading",
        "normcontrol.param_groups",
    ],
    "Schedules": [
        f"normcontrol.{n}"
        for n in [
            "Schedule",
            "constant",
            "linear",
            "paper_ratio",
            "cosine",
            "piecewise",
            "trace",
            "lr_times",
            "eta_times",
            "lr_squared_times",
            "sqrt_lr_times",
            "every",
        ]
    ],
    "Record, replay, average": ["normcontrol.NormTrace", "normcontrol.reproject_"],
    "Scale once": ["normcontrol.set_norm_"],
    "Prediction, recipes, published methods": [
        "normcontrol.predict",
        "normcontrol.recipes",
        "normcontrol.methods",
    ],
    "Laws": ["normcontrol.law"],
    "Emerging-Optimizers": ["normcontrol.integrations.emerging_optimizers.NormControlHook"],
    "JAX": [
        f"normcontrol.optax.{n}"
        for n in ["control_norm", "adamwn", "norms", "NormControlState", "Reading"]
    ],
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/: front page, changelog, reference, linked files."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "changes.md", content=(ROOT / "CHANGELOG.md").read_text()))
    files.append(File.generated(config, "reference.md", content=reference()))
    tutorial = notebook.markdown(ROOT / "docs/tutorial.ipynb")
    files.append(File.generated(config, "tutorial.md", content=tutorial))
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in linked(page)} - {"README.md", "CHANGELOG.md"}
    for name in sorted(names):
        files.append(File.generated(config, f"source/{name}.md", content=shown(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the links of a page by links to the pages of the site, and keep each number and its
    interval on one line."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    here = posixpath.dirname(page.file.src_uri)
    if here == "results":
        page.meta["hide"] = ["navigation"]  # these pages are not in it, and their tables are wide
    folder = ROOT if page.file.src_uri in ("index.md", "changes.md") else ROOT / "docs" / here

    def moved(link: re.Match[str]) -> str:
        target = link[2]
        if re.match(r"\w+:", target):
            return link[0]
        return f"{link[1]}{posixpath.relpath(place(folder, target), here)}{link[3] or ''}{link[4]}"

    return LINK.sub(moved, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def place(folder: Path, target: str) -> str:
    """The page of the site that shows a file of the checkout."""
    path = (folder / target).resolve().relative_to(ROOT).as_posix()
    fixed = {
        "README.md": "index.md",
        "docs/README.md": "index.md",
        "docs": "index.md",
        "CHANGELOG.md": "changes.md",
        "docs/tutorial.ipynb": "tutorial.md",
    }
    if path in fixed:
        return fixed[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def linked(page: Path) -> set[str]:
    """The files outside docs/ that a page links to."""
    found = set()
    for link in LINK.finditer(page.read_text()):
        file = (page.parent / link[2]).resolve()
        if (
            not re.match(r"\w+:", link[2])
            and file.is_file()
            and (not file.is_relative_to(ROOT / "docs") or file.suffix == ".py")
        ):
            found.add(file.relative_to(ROOT).as_posix())
    return found


def shown(name: str) -> str:
    """A page that shows a source file."""
    path = ROOT / name
    return f"# {name}\n\n````{HIGHLIGHT.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def reference() -> str:
    """The reference page, which mkdocstrings fills from the docstrings."""
    parts = [
        "# API from the source",
        "Generated from the docstrings. [API by example](api.md) is a shorter introduction.",
    ]
    for heading, names in MODULES.items():
        parts += [f"## {heading}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"
