"""The studies by name. Each is a function that returns cells; `normcontrol study NAME` runs it."""

from __future__ import annotations

from normcontrol.lab.studies import claims, family, paper, transfer
from normcontrol.lab.study.cells import Study

STUDIES: dict[str, Study] = {
    study.name: study for study in (claims.STUDY, family.STUDY, transfer.STUDY, *paper.STUDIES)
}
