"""Add ``--opt adamwn`` to a checkout of EPFL's LLM-optimizer benchmark.

``python apply.py CHECKOUT`` inserts a branch of eleven lines into ``src/main.py``, and a choice and
two flags into ``src/config/base.py``. It changes nothing if a place is not found, or if it was
applied before.
"""

import sys
from pathlib import Path

BRANCH = """    elif args.opt == "adamwn":
        from normcontrol import AdamWN, linear

        opt = AdamWN(  # the groups that AdamW would decay are controlled
            group_specs,
            lr=args.lr,
            betas=(args.beta1, args.beta2),
            weight_decay=args.weight_decay,
            ratio=linear(1.0, args.norm_ratio, steps=max(args.warmup_steps, 1)),
            rate=args.norm_rate,
        )
"""
CHOICE = '            "adamwn",\n'
FLAGS = """    parser.add_argument("--norm_ratio", default=2.0, type=float)
    parser.add_argument("--norm_rate", default=1e-2, type=float)
"""

EDITS = [
    ("src/main.py", '    elif args.opt == "soap":\n', BRANCH),
    ("src/config/base.py", '            "soap",\n', CHOICE),
    ("src/config/base.py", '    parser.add_argument("--batch_size"', FLAGS),
]
"""File, the line before which something is inserted, and what is inserted."""


def edited(root: Path) -> dict[Path, str]:
    """Return the new texts of the files, or raise an error that says what does not fit."""
    texts: dict[Path, str] = {}
    for name, before, added in EDITS:
        path = root / name
        if not path.is_file():
            raise SystemExit(f"{path} does not exist: give a checkout of the benchmark.")
        text = texts.get(path, path.read_text())
        if "adamwn" in path.read_text():
            raise SystemExit(f"{path} has AdamWN already: nothing was changed.")
        if text.count(before) != 1:
            raise SystemExit(
                f"{path} has the line {before.strip()!r} {text.count(before)} times, but one was "
                "expected: the benchmark has changed. Insert the lines by hand; README.md has them."
            )
        texts[path] = text.replace(before, added + before)
    return texts


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Give the folder of a checkout: python apply.py CHECKOUT")
    for path, text in edited(Path(sys.argv[1])).items():
        path.write_text(text)
        print(f"changed {path}")
