"""Faults of the disk: for every kind of file that the laboratory writes, a changed byte, a write that
fails and a kill at that moment. Each ends with a sentence or with the same result, never with a
traceback or another result.

The kinds of files are found by running the commands, not listed here. The slow tests do the same for
every file of every command, at more moments and with more errors.
"""

from __future__ import annotations

import random
import re
import shutil
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import laboratory
import pytest
from laboratory import ERRORS, KILL, OF_OTHERS, SCENES, Fault, Moments, Scene, killed, kind, written

STOPS = {
    "data": Fault("journal.json", KILL, "renamed", nth=2),
    "run": Fault("step-#.pt", KILL, "renamed", nth=2),
    "study": Fault("step-#.pt", ERRORS[0], "rename", nth=5, once=True),
}
"""How commands are stopped on the way: by a kill, or by an error during the second cell of a
study."""


@dataclass
class Laboratory:
    """All commands, run to their ends and, in another folder, stopped on the way."""

    done: Path
    stopped: Path
    outcomes: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    """For each scene, how often each kind of file was opened, written and renamed."""
    too_early: list[Path] = field(default_factory=list)
    """Files that were renamed before they were on the disk."""
    not_synced: list[Path] = field(default_factory=list)
    """Files that were not on the disk when the command had ended."""

    def files(self, every: bool) -> list[tuple[Scene, Path]]:
        """A file of every kind, in the first scene that writes it, done and stopped; or every file
        of every scene."""
        found: dict[Any, tuple[Scene, Path]] = {}
        for lab in (self.done, self.stopped):
            for scene in SCENES:
                for path in written(lab, scene):
                    key = path if every else (lab, kind(path))
                    if found.setdefault(key, (scene, path))[0] is scene:
                        found[key] = scene, path
        return list(found.values())

    def new(self, to: Path, scene: Scene) -> Path:
        """A laboratory in which a scene has not begun."""
        return laboratory.copy(self.done, to, *(["data"] if scene.name != "data" else []))

    def copied(self, to: Path, scene: Scene, path: Path) -> tuple[Path, Path]:
        """A laboratory in which a scene is done or stopped as in that of the file, and the copy of
        the file."""
        lab = self.done if path.is_relative_to(self.done) else self.stopped
        copy = self.new(to, scene)
        shutil.copytree(lab / scene.name, copy / scene.name)
        return copy, copy / path.relative_to(lab)

    def faults(self, scene: Scene, every: bool) -> list[tuple[str, str, int]]:
        """Kinds, moments and numbers at which a fault can hit a scene: one moment for each kind
        that no scene before it writes, or all of them."""
        seen = {key: n for key, n in self.moments[scene.name].items() if key[0] != "mine.py"}
        if every:
            return [(*key, nth) for key, n in seen.items() for nth in {1, n}]
        before = {name for s in SCENES[: SCENES.index(scene)] for name, _ in self.moments[s.name]}
        chosen = {}
        for number, ((name, moment), count) in enumerate(seen.items()):
            if name not in before and (name not in chosen or number % 3 == 0):
                chosen[name] = (name, moment, (count + 1) // 2)
        return list(chosen.values())


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Laboratory:
    folder = tmp_path_factory.mktemp("faults")
    made = Laboratory(laboratory.start(folder / "done"), folder / "stopped")
    for scene in SCENES:
        moments = Moments()
        with moments.injected():
            said = scene.run(made.done)  # and not what reads its files
        made.moments[scene.name] = moments.seen
        made.too_early += moments.too_early
        made.not_synced += [
            path for path in written(made.done, scene) if path.stat().st_ino not in moments.synced
        ]
        made.outcomes[scene.name] = scene.result(made.done, said)
        assert made.outcomes[scene.name] is not None, scene.name
    for scene in SCENES:
        if scene.name not in STOPS:
            continue
        stopped = made.new(folder / scene.name, scene)
        fault = copy(STOPS[scene.name])  # it counts; the laboratory may be made again
        if fault.error == KILL:
            assert killed(scene, stopped, fault)
        else:
            with fault.injected():
                assert scene.run(stopped).refused
        made.stopped.mkdir(exist_ok=True)
        (stopped / scene.name).rename(made.stopped / scene.name)
    return made


def test_the_commands_write_every_kind_of_file(lab):
    """The laboratory of these tests is a real one: it contains what the docs say that is stored."""
    kinds = {kind(path) for _, path in lab.files(every=True)}
    assert kinds >= {"config.json", "step-#.pt", "metrics.jsonl", "journal.json", "train-#.bin"}
    assert kinds >= {"study.json", "#.jsonl", "seconds.json", "not-finite.pt", "index.html"}


def test_copies_of_the_laboratory_end_as_the_original(lab, tmp_path):
    """Otherwise the tests of damaged copies would show nothing."""
    pairs = {
        (scene.name, path.is_relative_to(lab.done)): (scene, path)
        for scene, path in lab.files(True)
    }
    for number, (scene, path) in enumerate(pairs.values()):
        made, _ = lab.copied(tmp_path / str(number), scene, path)
        assert scene.outcome(made) == lab.outcomes[scene.name], scene.name


def places(content: bytes, count: int, chance: random.Random) -> set[int]:
    """Bytes to change: random ones, in JSON a random one and the first digits of numbers, after
    which it is still valid, with other values."""
    numbers = [found.end() - 1 for found in re.finditer(rb"[:,[]\s*-?\d", content)]
    anywhere = {chance.randrange(len(content)) for _ in range(1 if numbers else count)}
    return anywhere | set(chance.sample(numbers, min(count, len(numbers))))


def changed_bytes(lab, tmp_path, files: list[tuple[Scene, Path]], count: int) -> list[str]:
    """Change single bytes of files, and return what had another result."""
    wrong, chance = [], random.Random(0)
    for number, (scene, path) in enumerate(files):
        content = path.read_bytes()
        for place in places(content, count, chance) if content else []:
            made, file = lab.copied(tmp_path / f"{number}-{place}", scene, path)
            changed = bytearray(content)
            changed[place] = ord("7") if changed[place] in b"01234568" else changed[place] ^ 1
            file.write_bytes(changed)
            if scene.outcome(made) not in (None, lab.outcomes[scene.name]):
                wrong.append(f"{file}, byte {place}: {changed[max(place - 20, 0) : place + 20]}")
    return wrong


def test_a_changed_byte_gives_a_sentence_or_the_same_result(lab, tmp_path):
    assert changed_bytes(lab, tmp_path, lab.files(every=False), count=1) == []


def failed_writes(lab, tmp_path, every: bool) -> list[str]:
    """Let writes fail, then give the command again; return where that did not help."""
    wrong, number = [], 0
    for scene in SCENES:
        for name, moment, nth in lab.faults(scene, every):
            error = ERRORS[number % len(ERRORS)]
            where = f"{scene.name}, {name}, {moment} {nth}, error {error}"
            number += 1
            made, fault = lab.new(tmp_path / str(number), scene), Fault(name, error, moment, nth)
            with fault.injected():
                said = scene.run(made)
            assert fault.happened, where
            if not said.refused or "Traceback" in said.err + said.out:
                wrong.append(f"{where}: {said}")
            elif scene.outcome(made) != lab.outcomes[scene.name]:
                wrong.append(f"{where}: it cannot be continued: {scene.run(made)}")
    return wrong


def test_a_write_that_fails_gives_a_sentence_and_the_same_command_continues(lab, tmp_path):
    assert failed_writes(lab, tmp_path, every=False) == []


def kills(lab, tmp_path, every: bool) -> list[str]:
    """Kill commands while they write, then give them again; return where that did not help."""
    wrong, number = [], 0
    for scene in SCENES:
        for name, moment, nth in lab.faults(scene, every):
            number += 1
            made = lab.new(tmp_path / str(number), scene)
            assert killed(scene, made, Fault(name, KILL, moment, nth))
            if scene.outcome(made) != lab.outcomes[scene.name]:
                wrong.append(f"{scene.name}, {name}, {moment} {nth}: {scene.run(made)}")
    return wrong


def test_a_command_that_is_killed_while_it_writes_continues(lab, tmp_path):
    assert kills(lab, tmp_path, every=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_changed_byte_in_any_file(lab, tmp_path, scene):
    files = [(found, path) for found, path in lab.files(every=True) if found is scene]
    assert files
    assert changed_bytes(lab, tmp_path, files, count=20) == []


@pytest.mark.slow
def test_a_write_that_fails_at_any_moment(lab, tmp_path):
    assert failed_writes(lab, tmp_path, every=True) == []


@pytest.mark.slow
def test_a_kill_at_any_moment(lab, tmp_path):
    assert kills(lab, tmp_path, every=True) == []


def test_all_files_of_our_own_go_through_the_one_place_that_writes(lab):
    """Faults are injected where files are opened to be written, so every file must come by there."""
    reached = {name for seen in lab.moments.values() for name, _ in seen}
    kinds = {kind(path) for scene in SCENES for path in written(lab.done, scene)}
    assert kinds - reached <= OF_OTHERS


def test_every_file_is_on_the_disk_before_it_is_renamed_and_when_the_command_ends(lab):
    assert lab.too_early == []
    assert {kind(path) for path in lab.not_synced} - OF_OTHERS == {".lock"}  # which stays empty
