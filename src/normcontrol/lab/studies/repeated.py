"""The study ``repeated``: AdamW and AdamWN as in ``search``, on a text that is seen ten times.

At 45 M and 124 M weights AdamWN with a constant target ended below AdamW, and those runs go through
their text more than once; those of ``search`` do not, and there it ended above. Here both are tuned
again, by the same search, on as little text as makes ten rounds. The runs with text seen once are
those of ``search``: the same cells, so that their records may be copied. The plan is in
docs/repeated.md.
"""

from __future__ import annotations

from normcontrol.lab.errors import LabError
from normcontrol.lab.studies import settle
from normcontrol.lab.studies.horizon import gains
from normcontrol.lab.studies.search import USUAL, Protocol, level, lower, searched
from normcontrol.lab.studies.settled import ADAMW, ADAMWN
from normcontrol.lab.study.cells import Cell, Study
from normcontrol.lab.study.claims import Claim
from normcontrol.lab.study.records import Results

ARMS = (ADAMW, ADAMWN)
ROUNDS = 10
BASE = settle.BASES["tiny"]

REPEATED = Protocol(
    decays=(0.06, 0.1, 0.17, 0.3, 0.56, 1.0, 1.8, 3.2, 5.6),
    unique_tokens=BASE.run.steps * BASE.data.tokens_per_step // ROUNDS,
)
"""The seeds of the test are those of ``search``, so that the runs of a seed are paired. AdamW may
need more decay here than there."""


def cells(scale: str, done: Results) -> list[Cell]:
    """The cells that can be named by now."""
    return of_both(scale, done, REPEATED, USUAL)


def of_both(scale: str, done: Results, again: Protocol, once: Protocol) -> list[Cell]:
    """The cells of both texts; those of the test seed by seed, the repeated text first."""
    if scale != "tiny":
        raise LabError(f"There is no plan for the scale {scale}: the model is for a CPU, tiny.")
    found = [
        cell
        for protocol in (again, once)
        for arm in ARMS
        for cell in searched(scale, arm, done, protocol)
    ]
    return sorted(found, key=lambda cell: cell.seed if cell.part == "test" else 0)


def gains_from_repetition(again: Protocol, once: Protocol) -> Claim:
    says = f"{ADAMWN} gains on {ADAMW} from text seen once to {again.condition}."
    return gains("gains from repetition", says, once, again, ADAMWN)


STUDY = Study(
    "repeated",
    cells,
    "AdamW and AdamWN tuned and tested as in the study search, on a text that is seen ten times.",
    REPEATED.name(ADAMW),
    (
        lower("lower", REPEATED.name(ADAMW), REPEATED.name(ADAMWN)),
        level("level", REPEATED.name(ADAMW), REPEATED.name(ADAMWN)),
        gains_from_repetition(REPEATED, USUAL),
    ),
)
