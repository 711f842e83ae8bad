"""Writes docs/results.md and its figures from the records under results/.

For every study the page has the verdict, the table, the outcome of each claim, the figure, the
command and the machine. All these numbers come from the records. ``INTRODUCTION`` is the text that
is written by hand: a summary, and what a reader has to know about the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from normcontrol.lab.report import panels
from normcontrol.lab.report.study_page import curve, drawn
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.study.ledger import STUDY, Ledger
from normcontrol.lab.study.records import Record
from normcontrol.lab.study.verdict import judge

ROOT = Path(__file__).parents[1]
FIGURES = "figures/results"

INTRODUCTION = """# Results

What the [studies](studies.md) under `results/` showed, negative results included. `python docs/make_results.py` writes this page from
their records. `normcontrol report results/STUDY` makes a page for one study, with curves to zoom into and the settings of every run.

**In three sentences.**

- **Shown:** the norm is the one that you set, at any learning rate, and the loss depends on the model: with both tuned and started alike,
  AdamWN ends [below AdamW at 45 M weights](settle.md#what-the-confirmation-showed), and with a target that rises
  [level with it at 0.94 M](larger.md), and [above it](search.md#a-target-that-rises-the-study-rise) or
  [level](longer.md#once-more-with-longer-warm-ups-the-study-growth) at 0.17 M.
- **Not shown:** that control itself lowers the loss, because at 0.17 M weights AdamWN whose target is AdamW's final norm
  [ends at AdamW's loss](search.md#the-random-walk-once-more-the-study-walk), and AdamW with a decay recorded from AdamWN
  [at AdamWN's](settle.md#why-the-study-causes).
- **What it would take:** the paper's Figure 3, GPT-2 124M at 2.884 against 2.902, which is about 24 hours a run there at 572,000 tokens a
  second on an H200, and of which we have [one seed on 200 M tokens](settle.md#what-one-seed-of-gpt2-shows), with no arm tuned.

AdamWN and AdamW in the studies since `settle`, without `horizon`, which `growth` repeated. The arms of a study share their start: a gain of
0.8, or in `gpt2` GPT-2's own. Below zero AdamWN is lower. A claim that is tested together with others needs more than an interval without
zero.

**In more detail.** With four settings of every method tuned by 48 trials each (0.17 M weights, 20 new seeds), AdamWN with a constant target
ended [0.026 ± 0.008 *above* AdamW](search.md) and 0.020 ± 0.007 above AdamC; with a target that rises, as the paper's does, 0.012 ± 0.009
above AdamW. [With more steps](longer.md#once-more-with-longer-warm-ups-the-study-growth) that difference falls, from 0.019 ± 0.005 with 200
steps to level within 0.01 with 1,800 (+0.001 ± 0.007; 40 new seeds, both tuned for each length). It does not go on to a lead: with
[5,400 steps](longer.md#nine-times-the-steps-the-study-longest), that AdamWN is lower is refuted (+0.0133 ± 0.0103, 30 new seeds, 17 and 18
trials). That a gain of 0.8 suits other settings better than a tuned decay is [refuted](transfer.md) there (0.0075 ± 0.0056 *above* AdamW on
average over 14 settings).

The paper's protocol, AdamWN at AdamW's own norm, without any tuning (0.17 M weights): AdamWN that follows a norm
[recorded](search.md#the-path-of-the-norm-the-study-follow) in a run of AdamW with another seed is level with AdamW, -0.0003 ± 0.0015:
supported. So is AdamWN whose norm only ends where AdamW's did and [gets there](search.md#how-the-norm-gets-there-the-study-shape) as a
random walk, -0.0032 ± 0.0019; that it is lower was asked [once more](search.md#the-random-walk-once-more-the-study-walk) with forty new
seeds, and is not shown, -0.0000 ± 0.0016. A norm that is set at once ends 0.0321 ± 0.0068 above a straight line: how the norm gets there
matters. So what a search over 48 trials found for AdamWN, 0.0116 above AdamW, was not the best that it can do.

Why AdamWN ends where it does ([causes](settle.md#why-the-study-causes), 0.17 M weights, 20 new seeds, two claims, both supported). Feedback
does not matter: AdamW whose decay replays the one that the control amounted to in a run with *another* seed ended at the same loss, -0.0001
± 0.0022. A free norm is better: AdamW with AdamWN's steps relative to the weights, and a decay in place of the control, ended 0.0068 ±
0.0022 below AdamWN. So what the control is worth at this size is a schedule of the decay that you do not have to know beforehand, and the
norm that you asked for.

Of the claims about weight norm control, two of `claims` are decided, both on a model of 0.17 M weights over five seeds; below are those of
the other studies. Supported: under AdamWN the final norm does not depend on the learning rate (by 0.6 % at most), while AdamW's does.
Refuted: the law of the steady offset with one constant (the tied embedding is a likely reason, see [predictions](predict.md)). That AdamWN
has a lower loss than AdamW is supported where only learning rates were tuned (`family-tiny`), and *not shown* where decay and ratio were
tuned too.

From GPT-2's own start: on the small model, AdamWN ends 0.099 ± 0.061 below AdamW when both are tuned, but AdamW's best decay is the lowest
one tried: at decays of 0.3 and below its loss hardly depends on the decay. AdamW that only *starts* from scaled weights is neither shown to
differ from AdamWN (AdamWN +0.010 ± 0.026) nor shown to be level with it within 0.01. The lead over AdamC, 0.110 ± 0.082, is shown by
itself, but not among the claims that are tested together; and AdamC started from unscaled weights, so whether its schedule of the decay
explains anything beyond the start is not known. One norm for all matrices ended 0.122 ± 0.023 below a norm for each tensor, which had one
trial against twelve. With LayerNorm controlled too the loss was 0.113 ± 0.065 higher, but the best of its three ratios is the lowest, so
lower ones may be better. A controller ten times as slow ended 0.059 ± 0.054 higher: whether by more than the paper gained is not shown.
Whether the best decay depends on the horizon is not known, because the best decay is at an edge.

On a model of 45 M weights no claim of `claims` is decided. With settings chosen by one of three seeds, two are left for the test, and an
interval from two pairs is wide. AdamWN ended below AdamW in every pair of seeds, by 0.069 ± 0.086 against the decay that did best in the
test. On another text AdamW's decay was not tuned: in seed 0, AdamWN's lead there is 0.065 over a decay of 0.3 and 0.039 over a decay of 1.
AdamWN ended below AdamW from scaled weights by 0.060 ± 0.091 at one decay, and by 0.021 in the single seed of a larger decay, which was
better for that control. The quotient of AdamWN's final norms over learning rates was at most 1.002 there, in one seed. Chance matters at
this scale: with a decay of 0.1, the best in the first seed, the losses of AdamW's seeds are far apart from step 125 on, and with 0.3 they
are not.

Settings carried over to other conditions ([transfer](transfer.md)). On a model of 0.17 M weights, five seeds, all runs of the plan: that a
gain of 0.8 has a smaller regret than a decay tuned at the base is refuted, in the worst case (+0.0077 ± 0.0012), on average (+0.0075 ±
0.0056) and for the learning rate, the horizon, the batch and the depth; for the width nothing is shown. On a model of 18 M weights, three
seeds, no claim is decided. At four times the learning rate a gain of 0.8 ended higher than AdamW in each of three seeds, by 0.10 on
average; with three times the steps it ended 0.021 ± 0.009 below AdamW and 0.048 ± 0.009 below AdamW with the timescale rule, and at four
times and half of the width 0.025 ± 0.018 and 0.020 ± 0.009 below AdamW, lower in each of three seeds. AdamC, tuned once as well, has the
lowest regret in most conditions. Without the seed that chose AdamW's decay, two are left for the test, too few to show any of it. "No
tuning" is not shown at either size: the tuning chose 0.8, so both arms are the same runs.

With the right controls ([settle](settle.md), 45 M weights, all arms from the same start, tuned alike, fresh seeds): no claim is decided
there. AdamWN ended below AdamW by 0.0142 ± 0.0134 in eight seeds, which is shown by itself, but not among the claims that are tested
together. AdamC and AdamWN differ by 0.0011 ± 0.0178, and AdamW that replays the decay of AdamWN's run with another seed, without feedback,
ended 0.0064 ± 0.0193 below AdamWN: whether they are level within 0.01 is not shown. A
[confirmation](settle.md#the-confirmation-the-study-confirm) of the first of these with the two settings that were chosen, twelve new seeds
and no other claim: AdamWN ended below AdamW by 0.0129 ± 0.0088, in every pair. That is shown.

The same at 0.17 M weights ([settle](settle.md#results-at-tiny), all 97 runs of the plan): one norm for all matrices is better than one for
each tensor, by 0.110 ± 0.029, both tuned. That is shown; no other claim is. AdamWN ended 0.0144 ± 0.0074 above AdamC, which by itself
refutes that it is lower, and 0.0151 ± 0.0156 above AdamW, in eight seeds. The replay without feedback differs from it by 0.0007 ± 0.0059,
level by itself. Neither holds among the claims that are tested together. AdamW with its relative steps ended 0.0081 ± 0.0029 below it; no
claim was planned that it is lower, and whether they are level is not shown. k = 1 ended 0.0039 ± 0.0036 below k = 0.1, level by itself.

Everything tuned ([search](search.md), 0.17 M weights): learning rate, decay or gain, warm-up and final learning rate, 48 trials for each
arm, twenty new seeds. That AdamWN with a constant target is lower than AdamW or level with it is refuted: it ends 0.0264 ± 0.0078 above. So
is the same about AdamC (0.0203 ± 0.0068 above) and about AdamW whose decay follows the root of the learning rate (0.0216 ± 0.0068 above,
level refuted). One norm for all matrices is better than one for each tensor, by 0.1164 ± 0.0112: supported. Hidden matrices alone are not
shown to differ from all of them. With a target that [rises](search.md#a-target-that-rises-the-study-rise) over the first half of the steps
(a study of its own, planned with these results in view), AdamWN is lower than with a constant one: supported, by 0.0148 ± 0.0066. That it
is lower than AdamW is refuted: it ends 0.0116 ± 0.0088 above. The end of the rise was tuned to a ratio of 1.95, close to the paper's 2.
With both tuned again for [other lengths](longer.md#shorter-and-longer-runs-the-study-horizon) the difference to AdamW is +0.0186 ± 0.0100
with a third of the steps and -0.0010 ± 0.0079 with three times the steps: a change of -0.0196 ± 0.0107, which is not shown by our rules,
because the best warm-up of the short runs is the longest that was tried.
[Once more](longer.md#once-more-with-longer-warm-ups-the-study-growth), with longer warm-ups, forty new seeds and two claims: from +0.0195 ±
0.0048 with 200 steps to +0.0014 ± 0.0067 with 1,800, a change of -0.0181 ± 0.0083. Both are supported: that AdamWN gains on AdamW with more
steps, and that with 1,800 steps the two are level within 0.01.

What the paper says in passing ([remarks](longer.md#what-the-paper-says-in-passing-the-study-remarks), 0.17 M weights, the rising target,
everything else tuned, twenty new seeds). Supported: rates of 0.01 and 1 change the loss by less than 0.018 (-0.0061 ± 0.0059 and +0.0013 ±
0.0048); control of LayerNorm too is worse (by 0.0269 ± 0.0071, 48 trials for each); with three times the steps another decay than the best
one before is better (by 0.0226 ± 0.0061). Not shown: that the same is not true of the target. A ratio of 3.8 ended 0.0434 ± 0.0109 below
the one that was best before; it is the highest that was tried. [Once more](longer.md#a-target-that-is-kept-the-study-kept), with higher
ones and new seeds, it is refuted: 3.8 ended 0.0343 ± 0.0073 below, inside the list. So the best target depends on the number of steps, as
the best decay does.

A model between ([larger](larger.md), 0.94 M weights, tuned as in `settle`, twenty new seeds). That AdamWN with a constant target is lower
than AdamW is refuted: it ends 0.0108 ± 0.0066 above. With a target that rises the two are level within 0.01, -0.0015 ± 0.0049: supported.
That it is lower is not shown.

More steps ([budget](budget.md), 0.17 M weights, the settings that `settle` chose): that AdamWN reaches with half of the steps what AdamW
reaches with all of them is refuted (it ends 0.079 ± 0.038 above); that it is slower first and better later, and that the gap grows, are not
shown. With four times the steps it ended 0.149 ± 0.041 below AdamW with the same decay and within the noise of AdamW whose decay was
divided by four (+0.017 ± 0.034; no claim was planned about that).

Other optimizers ([optimizers](settle.md#what-other-optimizers-showed), 0.17 M weights, tuned alike, five fresh seeds): Muon whose hidden
matrices are held at a norm ended 0.0231 ± 0.0154 below Muon with its own decay. That is shown on this text, and on a second one it is not
(+0.0066 ± 0.0354). [Once more](settle.md#muon-once-more-the-study-muon) on the first text, with the two settings, twenty new seeds and no
other claim: 0.0307 ± 0.0106 below. That is shown, and it does not take the control: Muon with a decay of 0.28 at the higher learning rate,
which the tuning had not tried, ended 0.0439 ± 0.0157 below Muon under control (ten of the seeds, added with the result in view). That
AdamWN has a lower loss than AdamW with the paper's line 13.b is refuted on the first text (+0.0368 ± 0.0209).

How to read the tables: a difference pairs runs that share initial weights and the order of the data, ± is half of its 95 % interval, and
*pairs* is their number. The setting of an arm is chosen by some seeds (the first third of those that all its trials have, at least one) and
tested by the others, so that the luck of a choice is not counted as a result. *Shown* means that zero is outside the interval, and that the
two arms were tuned alike: no best value at the edge of its grid, and numbers of trials within a factor of 1.5. The claims of a study are
tested together, with p-values corrected by Holm for all of them; that two arms are level means that two one-sided tests show it for a margin. *Not
shown* means that with these runs neither the claim nor its contrary can be told from noise or from unequal tuning; the reason is in the
table. A result at one scale need not hold at another: these are small models and short runs.

The records of AdamWN that were made on a CPU before version 0.2 (in `claims-tiny`, `family-tiny` and `figure2-tiny` to `figure4-tiny`)
come from a fused step that carried errors below one unit in the last place over to the next step, which it [no longer
does](performance.md): of four cells of `claims-tiny` replayed since then, those of AdamW and AdamC gave the same bits, and those of AdamWN
differed by -1.5e-07 (lr=0.003 ratio=5 seed=0) and by -1.3e-04 (constant learning rate, lr=0.003 rate=0.02 seed=0) in validation loss.

The `seconds` in some records cannot be those of whole runs: in `claims-small` five of 1,500 steps have 13 to 49 s, where others need at
least 72 s (AdamWN lr=0.002 ratio=2 seed=2, lr=0.001 ratio=1.3 seed=0; AdamW lr=0.004 weight_decay=0.3 and 1, seed=0; AdamW from scaled
weights lr=0.002 weight_decay=0.1 seed=2), and in `claims-tiny` two of 1,000 steps have 8 and 12 s, where others need at least 29 s (AdamW and
AdamW from scaled weights, lr=0.003 weight_decay=0.09 seed=3). A run that was stopped and continued would look like this if only its last
part was timed; the records do not say. Their curves have all steps. Runs side by side have longer ones. Compare no speeds by `seconds`.

The rules that refute a claim were written before the runs of `small`. These decisions were made when results were known:

- How claims are decided (all of "How to read the tables": other seeds for the test, no edges, trials within a factor of 1.5, Holm) was
  made stricter after the runs of all studies. It took away the outcome "supported" from eight claims: from "tuned" and "norm and
  learning rate" at `small`, and from "tuned", "not AdamC", "same freedom", "one norm", "LayerNorm" and, by construction, "no tuning".
  With it came the margin of 0.01 and the claim "only the start", intervals for the two claims that had compared means with a threshold,
  the comparison of the controls with AdamWN at the same learning rate, and the four claims of `family`.
- After that, every other arm of `claims` is tuned with as many trials as AdamWN has at its learning rate. Four of these runs were made at
  `tiny` (one of AdamW from scaled weights, one of AdamC, two of AdamWN from scaled weights); the others are listed as not run yet.
- The ranges of `claims` were chosen after pilot runs on the same data, which are not among the results.
- At `small`: the order of the parts, and one more trial where a best value is at the edge, after the first three runs of AdamW; that the
  second best of either arm gets all seeds, after the results had differed more between seeds than between decays.
- At both scales: that decays of the controls are tried beyond an edge and the best of them gets all seeds, and that no claim is supported
  against an arm of which a trial with fewer seeds did better, after that had happened to AdamW from scaled weights.
- At `tiny`: the learning rates of `claims` were moved from 3e-3, 8e-3 and 20e-3 to 1e-3, 3e-3 and 8e-3 after `family` had found every
  method best at 3e-3, the lowest. The rule about the horizon was changed after it had refuted the claim from best decays at the edge of
  those tried, where nothing can be concluded (lower decays were then added, and as many ratios). Offsets were averaged over seeds when
  there were five. One norm and one for each tensor were compared at the same ratio after another ratio had become AdamWN's best.
- Every claim of a plan counts in Holm's correction, also one that could not be tested: after verdicts of `settle` at `tiny` had depended on when it
  stopped. Beside that study, no outcome changed.
- `transfer`: that a tuning which chooses 0.8 itself shows nothing about "no tuning", after it had done so and the claim was supported by
  construction.
- `family` at `small` makes 500 steps, a third of the scale's own, so that each method could have three learning rates.
"""

OVERVIEW = (
    ("growth-tiny", "better with more steps", "0.17 M", "200", "rises", "48 trials each"),
    ("settle-tiny", "lower", "0.17 M", "600", "constant", "6 and 7 trials"),
    ("search-tiny", "lower", "0.17 M", "600", "constant", "48 trials each"),
    ("rise-tiny", "lower", "0.17 M", "600", "rises", "48 trials each"),
    ("follow-tiny", "level", "0.17 M", "600", "the norm of an AdamW run", "AdamW's settings"),
    ("walk-tiny", "lower", "0.17 M", "600", "AdamW's end, as a random walk", "AdamW's settings"),
    ("growth-tiny", "level in long runs", "0.17 M", "1,800", "rises", "48 trials each"),
    ("longest-tiny", "lower in the longest runs", "0.17 M", "5,400", "rises", "18 and 17 trials"),
    ("larger-tiny", "lower", "0.94 M", "600", "constant", "6 trials each"),
    ("larger-tiny", "level, rising", "0.94 M", "600", "rises", "6 trials each"),
    ("settle-small", "lower", "45 M", "800", "constant", "6 trials each"),
    ("confirm-small", "lower", "45 M", "800", "constant", "as settle chose"),
    ("gpt2-small", "the paper's target", "124 M", "3,050", "ratio 2", "nothing"),
    ("gpt2-small", "gain", "124 M", "3,050", "gain 0.8", "nothing"),
)
"""Comparisons of AdamWN with AdamW: study and claim, and what the records do not say in few words:
the number of weights, the steps, the target, what was tuned."""

NOTHING = "\nNothing has been run yet: start with `normcontrol study claims --scale tiny`.\n"


def folders(results: Path) -> list[Path]:
    return sorted(path.parent for path in results.glob(f"*/{STUDY}"))


def text(results: Path) -> str:
    """The whole page."""
    found = folders(results)
    summary, details = INTRODUCTION.split("**In more detail.**")
    known = {folder.name for folder in found}
    compared = overview(results) if {row[0] for row in OVERVIEW} <= known else ""
    parts = [
        summary + compared + "\n**In more detail.**" + details,
        *("\n".join(section(open_folder(folder))) for folder in found),
    ]
    return "\n".join(parts if found else [INTRODUCTION + NOTHING])


def overview(results: Path) -> str:
    """AdamWN minus AdamW, study by study."""
    headings = ["weights", "steps", "target", "tuned", "AdamWN minus AdamW", "seeds", "claim"]
    rows = []
    for folder, name, *about in OVERVIEW:
        findings = judge(open_folder(results / folder)).findings
        (finding,) = (found for claim, found in findings if claim.name == name)
        numbers = re.search(r"([+-]\d\.\d+(?: ± \d\.\d+)?).*n = (\d+)", finding.text())
        assert numbers is not None
        says = f"[{folder}](#{folder}), {name}: {finding.outcome}"
        rows.append((*about, *numbers.groups(), says))
    return table(headings, rows)


def section(ledger: Ledger) -> Iterator[str]:
    verdict = judge(ledger)
    yield f"## {ledger.out.name}\n"
    yield f"{ledger.study.about}\n"
    yield "".join(f"**{sentence}**\n\n" for sentence in verdict.sentences())
    if verdict.rows:
        yield f"![The four panels of {ledger.out.name}]({FIGURES}/{ledger.out.name}.png)\n"
        yield table(verdict.headings(), verdict.table())
    if verdict.findings:
        yield "### Claims\n"
        rows = [(says, f"**{outcome}**", *rest) for says, outcome, *rest in verdict.claims()]
        yield table(("claim", "outcome", "numbers", "refuted if"), rows)
    if verdict.study.published:
        yield table(("published", "paper", "here"), verdict.published())
        yield f"What differs here: {verdict.study.differs.get(ledger.scale, '')}.\n"
    if verdict.flags:
        yield "What weakens it:\n"
        yield "".join(
            f"- {flag.replace(str(ledger.out.parent) + '/', '')}\n" for flag in verdict.flags
        )
    trials = [trial for row in verdict.rows for trial in row.choice.trials]
    yield from provenance(record for trial in trials for record in trial.records)


def provenance(records: Iterable[Record]) -> Iterator[str]:
    """By which commands, on which machine."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        e = record.environment
        command = re.sub(
            " --(limit-minutes|only)( [^-]\\S*)+", "", " ".join(e["command"])
        )  # how much of it at a time
        seen.setdefault((e["device"], e["packages"]["torch"]), {})[command] = None
    for (device, torch), commands in seen.items():
        lines = "\n".join(commands)
        yield f"Run on {device} with torch {torch} by\n\n```console\n{lines}\n```\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


def main() -> None:
    page = ROOT / "docs" / "results.md"
    page.write_text(text(ROOT / "results"), encoding="utf-8")
    print(page.relative_to(ROOT))
    for folder in folders(ROOT / "results"):
        trials = drawn(judge(open_folder(folder)))
        if trials:
            path = ROOT / "docs" / FIGURES / f"{folder.name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            panels.draw([curve(trial) for trial in trials], path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
