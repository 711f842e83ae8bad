"""The studies by name, as data: each is a function that returns cells. They use the engine in
``normcontrol.lab.study``, which does not know them."""

from __future__ import annotations

from normcontrol.lab.studies import (
    budget,
    catchup,
    causes,
    claims,
    confirm,
    family,
    follow,
    gpt2,
    growth,
    horizon,
    kept,
    larger,
    longest,
    matched,
    muon,
    optimizers,
    paper,
    predicted,
    remarks,
    repeated,
    rise,
    rounds,
    search,
    settle,
    shape,
    transfer,
    tuned_walk,
    walk,
)
from normcontrol.lab.study.cells import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        claims.STUDY,
        family.STUDY,
        transfer.STUDY,
        settle.STUDY,
        confirm.STUDY,
        larger.STUDY,
        matched.STUDY,
        causes.STUDY,
        gpt2.STUDY,
        budget.STUDY,
        optimizers.STUDY,
        muon.STUDY,
        search.STUDY,
        rise.STUDY,
        follow.STUDY,
        shape.STUDY,
        walk.STUDY,
        tuned_walk.STUDY,
        horizon.STUDY,
        growth.STUDY,
        longest.STUDY,
        catchup.STUDY,
        predicted.STUDY,
        remarks.STUDY,
        kept.STUDY,
        repeated.STUDY,
        rounds.STUDY,
        *paper.STUDIES,
    )
}
