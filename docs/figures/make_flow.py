"""Draw docs/figures/flow.png: what a step does, and the files that do it."""

from pathlib import Path

import matplotlib.pyplot as plt

BLUE, GREY = "#1f6fb2", "#888888"
BOXES = [
    ("sets", "groups/sets.py", GREY, "weights"),
    ("step", "steppers/", GREY, "own update"),
    ("measure", "steppers/", BLUE, r"$\|\theta_t\|$"),
    ("target", "target.py\nschedule.py", BLUE, r"$r_t\,\|\theta_0\|$"),
    ("law", "law.py", BLUE, r"$1-k_t\,(1-$target$/$norm$)$"),
    ("multiply", "steppers/", BLUE, r"scale $\cdot\,\theta_t$"),
    ("norms()\nreport()", "groups/\nwatch/", GREY, ""),
]
PITCH, WIDTH = 1.75, 1.46


def main() -> None:
    figure, ax = plt.subplots(figsize=(10.5, 3))
    for i, (what, where, colour, formula) in enumerate(BOXES):
        left, middle = i * PITCH, i * PITCH + WIDTH / 2
        box = plt.Rectangle((left, 0), WIDTH, 1.1, facecolor="white", edgecolor=colour, lw=2)
        ax.add_patch(box)
        ax.text(middle, 0.75, what, ha="center", va="center", weight="bold", size=10)
        ax.text(middle, 0.25, where, ha="center", va="center", color="#555555", size=8.5)
        ax.text(middle, -0.32, formula, ha="center", color=colour, size=9.5)
        if i:
            arrow = {"arrowstyle": "->", "lw": 1.5}
            ax.annotate("", (left, 0.55), (left - PITCH + WIDTH, 0.55), arrowprops=arrow)
    bar = {"arrowstyle": "|-|", "color": BLUE, "mutation_scale": 3}
    ax.annotate("", (5 * PITCH + WIDTH, 1.35), (2 * PITCH, 1.35), arrowprops=bar)
    middle = (7 * PITCH + WIDTH) / 2
    words = "control_ in control.py: the only place that scales weights"
    ax.text(middle, 1.5, words, ha="center", color=BLUE)
    ax.set(xlim=(-0.1, 6 * PITCH + WIDTH + 0.1), ylim=(-0.5, 1.75))
    ax.axis("off")
    figure.savefig(Path(__file__).parent / "flow.png", dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    main()
