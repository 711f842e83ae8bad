"""Finished AdamW runs of the laboratory, for ``benchmarks/predict.py``: which are read, their
initial weights by class, and their measured norms. It may not know what is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from normcontrol import set_norm_
from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.lab.data.batches import padded
from normcontrol.lab.files import read_json
from normcontrol.lab.study.records import Record, read, read_all, summarise
from normcontrol.lab.training import metrics
from normcontrol.lab.training.config import Config
from normcontrol.lab.training.model import GPT
from normcontrol.lab.training.optimizers import lr_at
from normcontrol.lab.training.run_folder import CONFIG, ENVIRONMENT
from normcontrol.lab.training.telemetry import PREFIX
from normcontrol.predict.calibration import ALL
from normcontrol.predict.random_walk import decays, walk
from normcontrol.watch.trace import EXPONENTS, ClassTrace

TIED = ("wte.weight",)
"""Embeddings that are also the output head. They have to be named, because the laboratory's model
has no head module that shares their weight."""


def finished(folder: Path, config: Config) -> bool:
    """True if the folder holds a run with exactly this config that has made its last step."""
    if not (folder / CONFIG).exists():
        return False
    lines = metrics.read(folder)
    done = bool(lines) and lines[-1]["step"] == config.run.steps and "val_loss" in lines[-1]
    return done and Config.load(folder / CONFIG) == config


def records(path: Path) -> list[Record]:
    """The records of finished AdamW runs: of a run folder, of the folder of a study (one seed of
    each setting, the longest runs first), or of one cell of a study."""
    if (path / CONFIG).exists():
        config = Config.load(path / CONFIG)
        if not finished(path, config):
            raise SystemExit(f"{path} is not finished, so its final norm is not known.")
        found = [
            summarise(str(path), config, read_json(path / ENVIRONMENT), metrics.read(path), 0.0)
        ]
    else:
        every = read_all(path)[0] if path.is_dir() else [read(path)]
        found = [record for record in every if record.good]
        if path.is_dir():  # in a study, runs with a scaled start are controls
            found = [record for record in found if record.config["init_scale"] == 1]
    kept = [
        r for r in found if r.config["optimizer"].lower() == "adamw" and r.config["ratio"] is None
    ]
    if not kept:
        raise SystemExit(
            f"{path} holds no finished run of AdamW, and this benchmark predicts no other method. "
            "Give a folder with one."
        )
    first = min(r.config["init_seed"] for r in kept)
    return sorted(
        (r for r in kept if r.config["init_seed"] == first),
        key=lambda r: (-r.config["steps"], -r.config["lr"], -r.config["weight_decay"]),
    )


class Run:
    """A finished AdamW run: its config, its initial weights by class, and its measured norms."""

    def __init__(self, record: Record) -> None:
        self.config = Config().with_(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in record.config.items()}
        )
        self.lrs = [lr_at(self.config, step) for step in range(1, self.config.run.steps + 1)]
        self.decay = self.config.optim.weight_decay
        self.classes = self._classes(record.environment["data"]["vocab"])
        # Records contain ratios to the norm before init_scale.
        scale, (steps, ratios) = self.config.model.init_scale, record.curves["ratio"]
        self.ratios = {step: ratio / scale for step, ratio in zip(steps, ratios, strict=True)}
        self.norms: dict[int, dict[str, float]] = {}  # by step and class
        for key, (steps, values) in record.curves.items():
            if key.startswith(PREFIX):
                for step, value in zip(steps, values, strict=True):
                    self.norms.setdefault(step, {})[key[len(PREFIX) :]] = value

    def _classes(self, vocab: int) -> list[TensorClass]:
        """The classes of the initial weights."""
        model = GPT(self.config.model, padded(vocab))
        model.initialise(self.config.model.init_seed)
        if self.config.model.init_gain is not None:
            set_norm_(model, gain=self.config.model.init_gain)
        torch._foreach_mul_([p.data for p in model.matrices()], self.config.model.init_scale)
        return classes_of(model, TIED)

    @property
    def tied(self) -> Sequence[str]:
        """Which classes of :meth:`trace` are tied embeddings."""
        return TIED if self.norms else ()

    def trace(self) -> dict[str, ClassTrace]:
        """The run as :func:`predict.calibrate` expects it: by class, or all weights as one class if
        the metrics contain no norms of classes."""
        kept, noise = self.walk(0.0)
        if self.norms:
            steps, counts = sorted(self.norms), {c.name: c.count for c in self.classes}
            norms = {name: [self.norms[s][name] for s in steps] for name in counts}
        else:
            steps, counts = sorted(self.ratios), {ALL: sum(c.count for c in self.classes)}
            start = math.sqrt(sum(c.count * c.rms**2 for c in self.classes))
            norms = {ALL: [start * self.ratios[s] for s in steps]}
        # One constant for all weights has no law: it would be neither that of matrices nor that of
        # the embedding.
        powers = {f"{p:g}": self.walk(p)[1] for p in EXPONENTS if self.norms}
        return {
            n: ClassTrace(
                counts[n],
                norms[n],
                [kept[s] for s in steps],
                [noise[s] for s in steps],
                {p: [sums[s] for s in steps] for p, sums in powers.items()},
            )
            for n in counts
        }

    @cache  # noqa: B019 - a benchmark keeps its runs until it ends
    def walk(self, exponent: float) -> tuple[list[float], list[float]]:
        """What decay left, and the sum of ``lr^(2 - exponent)``, at every step."""
        kept, noise = walk(self.lrs, decays("AdamW", self.lrs, self.decay), exponent)
        return kept.tolist(), noise.tolist()
