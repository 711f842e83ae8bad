"""A small laboratory for tests of faults: commands that write every kind of file there is, what
they result in, and faults that hit the writing of one kind of file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fakes import blank_figures

from normcontrol.lab.cli.main import main
from normcontrol.lab.data import batches, prepare, tokenizer
from normcontrol.lab.errors import LabError
from normcontrol.lab.studies.opening import open_folder
from normcontrol.lab.training import checkpoint

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

SMALL = {
    **{"layers": 1, "heads": 2, "width": 16, "context": 16, "tokens-per-step": 64, "lr": 1e-2},
    **{"micro-batch": 4, "warmup": 2, "rate": 0.1, "steps": 6, "log-every": 1},
    **{"eval-every": 3, "checkpoint-every": 2, "device": "cpu"},
}


@dataclass
class Said:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """True if it ended with a sentence."""
        return self.status == 1 and bool(re.search(r"\w.*\.", self.err + self.out))


def call(*words: Any) -> Said:
    """Call the command. Anything that it raises is a fault of the laboratory."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return Said(status, out.getvalue(), err.getvalue())


def flags(**changes: Any) -> list[str]:
    settings = {**SMALL, **changes}
    return [str(word) for key, value in settings.items() for word in (f"--{key}", value)]


@dataclass(frozen=True)
class Scene:
    """A command that writes into one folder. Called again, it continues or does nothing. It is
    called in the folder of the laboratory, with relative paths, so that a copy can be continued."""

    name: str
    command: Callable[[Path], Said]
    read: Callable[[Path], Any]
    """What was computed, read from the files. It may raise :class:`LabError`."""
    ends: int = 0
    """The exit status of the undisturbed command."""

    def run(self, lab: Path) -> Said:
        with _inside(lab):
            return self.command(Path())

    def outcome(self, lab: Path) -> Any:
        """Run the command, and return what it results in, or None if it ended with a sentence."""
        return self.result(lab, self.run(lab))

    def result(self, lab: Path, said: Said) -> Any:
        """Return what the command has resulted in, or None if it ended with a sentence."""
        if said.status != self.ends:
            assert said.refused, said
            return None
        try:
            with _inside(lab):
                return self.read(Path())
        except LabError:
            return None


@contextlib.contextmanager
def _inside(lab: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(lab)
    try:
        yield
    finally:
        os.chdir(before)


def _prepare(lab: Path) -> Said:
    if (lab / "data" / "manifest.json").exists():
        return Said(0, "", "")
    with _small_tasks():
        return call(
            *("prepare", lab / "text.jsonl", "--out", lab / "data", "--tokenizer", "bpe:270"),
            *("--val-fraction", 0.1, "--shard-tokens", 4000),
        )


@contextlib.contextmanager
def _small_tasks() -> Iterator[None]:
    """A journal is written after every task, and a task is small."""
    task, clock = prepare.TASK, prepare.time.monotonic
    prepare.TASK, prepare.time.monotonic = 2000, iter(range(0, 10**6, 6)).__next__
    try:
        yield
    finally:
        prepare.TASK, prepare.time.monotonic = task, clock


def _data(lab: Path) -> Any:
    dataset = batches.load(str(lab / "data"), "bytes", lab)
    words = tokenizer.stored(dataset.tokenizer, dataset.folder, dataset.tokenizer_sha256)
    tokens = [shard.tolist() for shard in (*dataset.train, *dataset.val)]
    texts = [words.decode([token]) for token in range(words.size)]
    return dataset.digest, words.encode("the square of 7").tolist(), texts, tokens


def _train(name: str, **changes: Any) -> Callable[[Path], Said]:
    def run(lab: Path) -> Said:
        out = lab / name
        if (out / "config.json").exists():
            return call("train", "--resume", out)
        given = flags(data=lab / "data", **changes)
        return call("train", "--out", out, "--tensorboard", *given)

    return run


def _trained(out: Path) -> Any:
    """The weights, metrics and text of a run."""
    state = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    said = call("sample", out, "--tokens", 4, "--temperature", 0, "--device", "cpu")
    if said.status:
        raise LabError(said.err)
    weights = b"".join(value.contiguous().numpy().tobytes() for value in state["model"].values())
    digest = hashlib.sha256(weights).hexdigest()
    return state["step"], digest, (out / "metrics.jsonl").read_bytes(), said.out


STUDY = """
from normcontrol.lab.study.cells import grid
from normcontrol.lab.training.config import Config

def lrs(scale, done):
    base = Config().with_(ramp=3, **{settings})
    return grid("AdamW", base.with_(data={data!r}), lr=[1e-2, 2e-2])
"""


def _study(lab: Path) -> Said:
    settings = {key.replace("-", "_"): value for key, value in SMALL.items()}
    (lab / "mine.py").write_text(STUDY.format(settings=settings, data=str(lab / "data")))
    return call("study", f"{lab / 'mine.py'}:lrs", "--out", lab / "study", "--device", "cpu")


def _records(out: Path) -> Any:
    """The records of a study, and its verdict."""
    results = open_folder(out).results()
    if results.problems:
        raise LabError(results.problems[0])
    said = call("verdict", out)
    if said.status:
        raise LabError(said.err)
    return {id: (r.status, r.final, r.curves) for id, r in results.items()}, said.out


def _challenge(lab: Path) -> Said:
    with blank_figures():
        return call("challenge", "--out", lab / "challenge", *flags(data=lab / "data", ramp=3))


def _schedule(lab: Path) -> Said:
    with blank_figures():
        return call("schedule", "--out", lab / "schedule" / "schedule.png")


def _challenged(lab: Path) -> Any:
    """The records and the verdict, which come from ``records/`` alone, and the runs of the arms.

    A challenge that is done does not read the runs that it keeps: `train --resume` reads the
    metrics of a run (and `sample` its checkpoint), so it is given before they are compared.
    """
    records, arms = _records(lab / "challenge"), []
    for run in ("adamw", "adamwn"):
        out = lab / "challenge" / "arms" / run / "seed-0"
        said = call("train", "--resume", out)
        if said.status:
            raise LabError(said.err)
        arms.append(_trained(out))
    return records, arms


SCENES = [
    Scene("data", _prepare, _data),
    Scene("run", _train("run"), lambda lab: _trained(lab / "run")),
    Scene("diverged", _train("diverged", lr=1e30), lambda lab: True, ends=1),
    Scene("study", _study, lambda lab: _records(lab / "study")),
    Scene("challenge", _challenge, _challenged),
    Scene(
        "schedule",
        _schedule,
        lambda lab: (lab / "schedule" / "schedule.png").exists(),
    ),
]


def written(lab: Path, scene: Scene) -> list[Path]:
    """The files of a scene."""
    return sorted(path for path in (lab / scene.name).rglob("*") if path.is_file())


def kind(path: Path) -> str:
    """The kind of a file: its name without what differs from file to file. A temporary file has
    the kind of what it becomes.

    >>> kind(Path("checkpoints/step-00000500-3f9a6d2c3f9a6d2c.pt"))
    'step-#.pt'
    >>> kind(Path("config.json.0a1b2c3d.tmp"))
    'config.json'
    """
    name = re.sub(r"^(step-\d+)\.tmp$", r"\1.pt", path.name)
    name = re.sub(r"\.[0-9a-f]{8}\.tmp$", "", name)
    if "tfevents" in name:
        return "events"
    name = re.sub(r"^[0-9a-f]{16}\b", "#", re.sub(r"-[0-9a-f]{16}\b", "", name))
    return re.sub(r"\d+", "#", name)


OF_OTHERS = {"events"}
"""Kinds of files that another library writes, with code of its own."""

KILL = -1


class Fault:
    """Lets the writing of a kind of file fail, and from then on all writing, as on a full disk.

    Args:
        hit: the kind of file.
        error: the number of the error, or KILL to end the process there, as if it were killed.
        moment: "open", "write", "rename" (just before it) or "renamed" (just after it).
        nth: the number of the opening, write or rename of such a file that fails.
        once: fail once only.
    """

    def __init__(self, hit: str, error: int, moment: str, nth: int = 1, once: bool = False) -> None:
        self.hit, self.error, self.moment, self.left, self.once = hit, error, moment, nth, once

    @property
    def happened(self) -> bool:
        return self.left == 0

    def at(self, moment: str, path: Path) -> None:
        """Called at every moment of the writing of every file."""
        if self.happened and not self.once:
            self._fail(path)
        if not self.happened and (moment, kind(path)) == (self.moment, self.hit):
            self.left -= 1
            if self.left == 0:
                self._fail(path)

    def _fail(self, path: Path) -> None:
        if self.error == KILL:
            os._exit(9)
        raise OSError(self.error, os.strerror(self.error), str(path))

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        opens, replaces = Path.open, os.replace

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return opens(path, mode, *args, **options)
            self.at("open", path)
            return _Failing(opens(path, mode, *args, **options), self, path)

        def replaced(source: Any, to: Any) -> None:
            self.at("rename", Path(to))
            replaces(source, to)
            self.at("renamed", Path(to))

        Path.open, os.replace = opened, replaced
        try:
            yield
        finally:
            Path.open, os.replace = opens, replaces


class Moments(Fault):
    """No fault: it counts the moments at which one could happen, and sees which files are on the
    disk when they are renamed."""

    def __init__(self) -> None:
        super().__init__("", 0, "")
        self.seen: dict[tuple[str, str], int] = {}
        self.synced: set[int] = set()
        self.too_early: list[Path] = []

    def at(self, moment: str, path: Path) -> None:
        self.seen[kind(path), moment] = self.seen.get((kind(path), moment), 0) + 1
        if moment == "renamed" and path.stat().st_ino not in self.synced:
            self.too_early.append(path)

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        fsync = os.fsync

        def synced(file: int) -> None:
            fsync(file)
            self.synced.add(os.fstat(file).st_ino)

        os.fsync = synced
        try:
            with super().injected():
                yield
        finally:
            os.fsync = fsync


class _Failing:
    """An open file whose writes may fail."""

    def __init__(self, file: Any, fault: Fault, path: Path) -> None:
        self._file, self._fault, self._path = file, fault, path

    def write(self, block: Any) -> int:
        self._fault.at("write", self._path)
        return self._file.write(block)

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def killed(scene: Scene, lab: Path, fault: Fault) -> bool:
    """Run a scene in a child process that the fault kills; False if it ended before. Nothing is
    cleaned up: no ``finally`` runs."""
    assert torch.get_num_threads() == 1, "a process with threads cannot be forked"
    child = os.fork()
    if child == 0:
        signal.alarm(600)  # rather than wait for ever
        try:
            with fault.injected():
                scene.run(lab)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    return status == 9


def start(lab: Path) -> Path:
    """The text that everything begins with."""
    lab.mkdir(parents=True)
    texts = (
        "".join(f"the square of {i} is {i * i}\n" for i in range(n, n + 40)) for n in range(12)
    )
    (lab / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return lab


def copy(lab: Path, to: Path, *names: str) -> Path:
    """A new laboratory with copies of some of the folders of another one."""
    start(to)
    for name in names:
        shutil.copytree(lab / name, to / name)
    return to


ERRORS = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO]
