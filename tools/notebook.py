"""Run a notebook from top to bottom in one process, and store its outputs, without Jupyter.

``python tools/notebook.py docs/tutorial.ipynb`` writes the printed text and the figures of every
cell back into the file. The tests call :func:`run`, and the documentation site :func:`markdown`.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    return json.loads(path.read_text())["cells"]


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def run(
    path: Path, replace: tuple[str, str] = ("", "")
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Run all code cells in order, with a text in them replaced by another one.

    Return the outputs of each cell, and the variables at the end.
    """
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    codes = [source(c).replace(*replace) for c in cells(path) if c["cell_type"] == "code"]
    return [run_cell(code, names) for code in codes], names


def run_cell(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell. Return what it printed, the value of its last line, and its figures."""
    import matplotlib.pyplot as plt

    plt.close("all")  # figures that were open before belong to no cell
    tree, value, printed = ast.parse(code), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if value is not None:
        printed.write(f"{value!r}\n")
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def store(path: Path) -> None:
    """Run a notebook and write its outputs into the file."""
    notebook = json.loads(path.read_text())
    outputs, _ = run(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, found) in enumerate(zip(code, outputs, strict=True), 1):
        cell["outputs"], cell["execution_count"] = found, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def markdown(path: Path) -> str:
    """Return a notebook as a page, with its stored outputs."""
    parts = []
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![A figure](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(Path(name))
