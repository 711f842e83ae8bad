"""The one place that writes files: completely or not at all, on the disk before the rename, with
checksums and locks. Nothing else in the laboratory writes files."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normcontrol.lab import files
from normcontrol.lab.errors import Busy, LabError, explain

LAB = Path(files.__file__).parent

WRITERS = {
    *("write_text", "write_bytes", "touch", "tofile", "savefig", "truncate", "mkstemp"),
    *("copy2", "copyfile", "copytree", "symlink_to", "hardlink_to", "rename", "renames"),
    *("torch.save", "np.save", "np.savez", "os.open", "os.replace", "json.dump", "shutil.move"),
}
"""Functions and methods that write or rename files."""

ALLOWED = {
    ("cli/main.py", "os.open"),  # /dev/null
    ("report/figure_files.py", "savefig"),  # into memory
    ("study/worker.py", "rename"),  # a folder
}


def writers(path: Path) -> list[str]:
    """What a file calls to write files, besides what it imports from files.py."""
    tree, found = ast.parse(path.read_text()), []
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "normcontrol.lab.files"
        for alias in node.names
    }
    drafts = {
        ast.unparse(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and "replacing(" in ast.unparse(block.items[0])
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node) in drafts:
            continue
        full = ast.unparse(node.func)
        name = full.rpartition(".")[2]
        mode = next(
            (a.value for a in node.args if isinstance(a, ast.Constant) and name == "open"), "r"
        )
        opens = isinstance(mode, str) and len(mode) < 4 and set(mode) & set("wax+")
        if opens or (full not in imported and {full, name} & WRITERS):
            found.append(full if full in WRITERS else name)
    return found


def test_nothing_else_in_the_laboratory_writes_files():
    found = {
        (path.relative_to(LAB).as_posix(), name)
        for path in LAB.rglob("*.py")
        if path != Path(files.__file__)
        for name in writers(path)
    }
    assert found == ALLOWED


def test_a_writer_that_is_not_allowed_is_found(tmp_path):
    lines = [
        "from normcontrol.lab.files import truncate, write_text, replacing",
        "truncate(p, 3); write_text(p, x); p.open('rb'); open(p); text.replace('a', 'w')",
        "with replacing(p) as file:\n    torch.save(x, file)",
        "p.write_text(x); p.open('ab'); open(p, 'w'); torch.save(x, p); os.truncate(p, 0)",
    ]
    (tmp_path / "a.py").write_text("\n".join(lines))
    assert writers(tmp_path / "a.py") == ["write_text", "open", "open", "torch.save", "truncate"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match=r"a.json: No space left on device. Free some space"):
        files.write_json(path, {"a": 2})
    assert list(tmp_path.iterdir()) == [path]
    assert files.read_json(path) == {"a": 1}


def test_a_real_full_disk_is_a_sentence():
    """/dev/full takes no byte."""
    with pytest.raises(LabError, match=r"/dev/full: No space left on device. Free some space"):
        files.append(Path("/dev/full"), b"x")


def test_a_file_where_a_folder_is_needed_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="A file is where a folder is needed"):
        files.write_text(tmp_path / "file" / "inside", "x")


def test_a_json_file_contains_its_checksum_and_may_do_without(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": [1, 2.5], "b": "x"})
    text = path.read_text()
    path.write_text(text.replace("2.5", "3.5"))
    with pytest.raises(LabError, match=r"a.json was changed after it was written"):
        files.read_json(path)
    path.write_text(text.replace("\n", " "))
    assert files.read_json(path, "a") == {"a": [1, 2.5], "b": "x"}
    path.write_text('{"a": 7}')
    assert files.read_json(path) == {"a": 7}
    with pytest.raises(LabError, match=r"a.json has no 'b'"):
        files.read_json(path, "a", "b")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"", b"[" * 100_000])
def test_what_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(LabError, match=r"a.json is not readable as JSON"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(LabError, match=r"b.json: No such file or directory. It was moved"):
        files.read_json(tmp_path / "b.json")


def test_a_lock_is_exclusive_or_shared_and_is_released(tmp_path):
    path = tmp_path / ".lock"
    with files.locked(path, "It is held."):
        for shared in (False, True):
            with (
                pytest.raises(Busy, match="It is held"),
                files.locked(path, "It is held.", shared=shared),
            ):
                pass
    two = (files.locked(path, "", shared=True) for _ in range(2))
    with next(two), next(two), pytest.raises(Busy), files.locked(path, ""):
        pass
    with files.locked(path, ""):
        pass


def test_a_lock_of_a_killed_process_blocks_nothing(tmp_path):
    hold = "import sys, time; from pathlib import Path; from normcontrol.lab.files import locked\n"
    hold += f"with locked(Path({str(tmp_path / '.lock')!r}), ''):\n print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(Busy), files.locked(tmp_path / ".lock", "held"):
        pass
    process.kill()
    process.wait()
    with files.locked(tmp_path / ".lock", "held"):
        assert (tmp_path / ".lock").read_bytes() == b""


def test_a_file_system_without_locks_is_used_without_them(tmp_path, monkeypatch):
    import fcntl

    def none(file, kind):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with files.locked(tmp_path / ".lock", "held"):
        pass


def test_a_system_without_locks_is_used_without_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with files.locked(tmp_path / ".lock", "held"):
        pass


def test_a_new_folder_of_work_that_failed_is_deleted_unless_the_work_had_begun(tmp_path):
    def work(folder: Path, *names: str) -> None:
        with files.claimed(folder, "held", ("begun",)):
            for name in names:
                (folder / name).write_text("")
            raise LabError("It failed.")

    for names, kept in ((("other",), False), (("begun",), True)):
        with pytest.raises(LabError, match="It failed"):
            work(tmp_path / "work", *names)
        assert (tmp_path / "work").exists() is kept
    (tmp_path / "own").mkdir()  # a folder of the user
    with pytest.raises(LabError, match="It failed"):
        work(tmp_path / "own", "other")
    assert (tmp_path / "own" / "other").exists()


def test_every_error_of_the_system_is_a_sentence_with_advice():
    for number in errno.errorcode:
        said = explain(OSError(number, os.strerror(number), "some/file"))
        assert said.startswith(f"some/file: {os.strerror(number)}. ")
        assert said.endswith(".")
    assert explain(OSError("a cable was pulled")).startswith("a cable was pulled. Check")
