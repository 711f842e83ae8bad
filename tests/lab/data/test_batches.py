"""Tests of loading data and of batches: a batch is a pure function of (data seed, step), and
damaged or missing data is refused with the name of the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from normcontrol.lab.data.batches import Batches, Dataset, feed, load, validation
from normcontrol.lab.errors import LabError
from normcontrol.lab.files import sha256
from normcontrol.lab.training.parallel import World

TOKENS = [np.arange(1000, dtype=np.uint16), np.arange(1000, 1500, dtype=np.uint16)]


def batches(seed: int = 0, rows: int = 8) -> Batches:
    return Batches(TOKENS, context=16, rows=rows, seed=seed)


def test_targets_are_the_tokens_after_the_inputs():
    x, y = batches()(0, slice(0, 8))
    assert torch.equal(x + 1, y)
    assert x.shape == (8, 16)


def test_a_batch_depends_only_on_seed_and_step():
    in_order = batches()
    seen = [in_order(step, slice(0, 8))[0] for step in range(30)]
    assert torch.equal(batches()(17, slice(0, 8))[0], seen[17])
    assert not torch.equal(seen[17], seen[18])
    assert not torch.equal(batches(seed=1)(17, slice(0, 8))[0], seen[17])


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_processes_and_micro_batches_together_get_the_rows_of_the_batch(processes, micro):
    rows = []
    for rank in range(processes):
        mine, size = World(rank, processes).share(8, micro)
        rows += [x for x, _ in feed(batches(), mine, size, torch.device("cpu"), range(3, 4))]
    assert torch.equal(torch.cat(rows), batches()(3, slice(0, 8))[0])


def test_unique_tokens_are_the_same_windows_in_every_epoch():
    few = Batches(TOKENS, context=16, rows=1, seed=0, unique_tokens=100)
    epochs = [
        [tuple(few(step, slice(0, 1))[0][0].tolist()) for step in range(6 * epoch, 6 * epoch + 6)]
        for epoch in range(4)
    ]
    assert {frozenset(windows) for windows in epochs} == {frozenset(epochs[0])}
    assert len(set(epochs[0])) == few.windows == 6  # 96 tokens, as many whole windows as fit
    assert epochs[0] != epochs[1]
    other = Batches(TOKENS, context=16, rows=1, seed=1, unique_tokens=100)
    assert tuple(other(0, slice(0, 1))[0][0].tolist()) not in epochs[0]


@pytest.mark.parametrize("tokens", [15, 92 * 16])
def test_unique_tokens_that_the_text_does_not_have_are_refused(tokens):
    with pytest.raises(LabError, match=r"has 91 windows of 16 tokens\. Give 16 to 1456, or 0 to"):
        Batches(TOKENS, context=16, rows=1, seed=0, unique_tokens=tokens)


def test_an_epoch_goes_through_every_window_once():
    whole = batches(rows=1)
    starts = [int(whole(step, slice(0, 1))[0][0, 0]) for step in range(whole.windows)]
    assert len(set(starts)) == whole.windows
    assert {start % 16 for start in starts if start < 1000} == {
        starts[0] % 16 if starts[0] < 1000 else (starts[0] - 1000) % 16
    }
    second = [
        int(whole(step, slice(0, 1))[0][0, 0]) for step in range(whole.windows, 2 * whole.windows)
    ]
    assert second != starts


def test_validation_is_the_whole_split_in_fixed_windows():
    windows = validation(TOKENS, 16)
    assert [int(w[0]) for w in windows[:3]] == [0, 16, 32]
    assert len(windows) == (1000 - 1) // 16 + (500 - 1) // 16
    assert all(len(w) == 17 for w in windows)


def test_a_validation_split_shorter_than_the_context_is_refused():
    with pytest.raises(
        LabError,
        match=r"The validation split has 16 tokens, but one context of 16 and the token after it are needed",
    ):
        validation([np.arange(16)], 16)
    with pytest.raises(
        LabError, match=r"has 32 tokens, but two contexts of 16 and the token after them are"
    ):
        Batches([np.arange(32)], 16, 1, 0)


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(
        LabError, match=r"A batch of 8 sequences cannot be divided equally among 3 processes"
    ):
        World(0, 3).share(8, 1)
    with pytest.raises(
        LabError,
        match=r"micro_batch=5 does not divide the 8 sequences that a process has in a step. Use --micro-batch 4",
    ):
        World().share(8, 5)


def test_a_micro_batch_larger_than_the_batch_is_reduced_to_the_batch():
    assert World(1, 2).share(8, 64) == (slice(4, 8), 4)


@pytest.fixture
def copied(corpus, tmp_path):
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def dataset_in(folder) -> Dataset:
    return load(str(folder), "bytes", folder)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_shard_that_fails_its_checksum_is_named(copied, damage):
    dataset_in(copied)
    path = copied / "train-00000.bin"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[1000] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-2])
    with pytest.raises(
        LabError,
        match=r"The shard .*train-00000.bin was changed after it was written: its checksum differs",
    ):
        dataset_in(copied)


def test_a_missing_shard_is_named(copied):
    (copied / "val-00000.bin").unlink()
    with pytest.raises(
        LabError, match=r"The shard .*val-00000.bin is missing, though manifest.json lists it"
    ):
        dataset_in(copied)


def change_manifest(folder, change):
    """Change a manifest on purpose: without its checksum, as a manifest of an earlier version."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256", None)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_token_ids_outside_the_vocabulary_are_refused(copied):
    path = copied / "val-00000.bin"
    np.full(1000, 300, "<u2").tofile(path)
    entry = {"file": path.name, "tokens": 1000, "sha256": sha256(path), "max": 300}
    change_manifest(copied, lambda m: m["splits"]["val"].update(shards=[entry], tokens=1000))
    with pytest.raises(LabError, match=r"contains the token id 300, outside the vocabulary of 257"):
        dataset_in(copied)


def test_a_manifest_that_was_changed_is_refused(copied):
    text = (copied / "manifest.json").read_text()
    (copied / "manifest.json").write_text(text.replace('"vocab": 257', '"vocab": 258'))
    with pytest.raises(LabError, match=r"manifest.json was changed after it was written"):
        dataset_in(copied)


def first_shard(**fields):
    return lambda manifest: manifest["splits"]["train"]["shards"][0].update(fields)


def both_counts(tokens):
    def change(manifest):
        first_shard(tokens=tokens)(manifest)
        manifest["splits"]["train"]["tokens"] = tokens

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), "its format is 2, and this version reads 1"),
        (lambda m: m.update(dtype="uint32"), "bytes, and manifest.json says .* tokens of uint32"),
        (lambda m: m.update(dtype="float64"), "dtype='float64'; known are uint16, uint32"),
        (lambda m: m.update(vocab=258), "tokenizer='bytes' with vocab=258"),
        (lambda m: m.update(tokenizer="gpt3"), "tokenizer='gpt3' with vocab=257"),
        (lambda m: m["splits"]["val"].update(tokens=1), "tokens=1 of val, and its shards have"),
        (lambda m: m["splits"].pop("val"), "it has no 'val'"),
        (first_shard(tokens="many"), "tokens='many' of a shard"),
        (first_shard(file="../train-00000.bin"), "is not in its folder"),
        (first_shard(sha256="0" * 64), "its checksum differs"),
        (first_shard(max=3), "The largest token id in .* is 256, and manifest.json says 3"),
        (both_counts(1000), "bytes, and manifest.json says 1000 tokens of uint16, which are 2000"),
        (lambda m: m.pop("dtype"), "manifest.json has no 'dtype'"),
    ],
)
def test_every_field_of_a_manifest_is_checked_against_the_shards(copied, change, message):
    change_manifest(copied, lambda manifest: None)
    dataset_in(copied)  # the checksum may be missing
    change_manifest(copied, change)
    with pytest.raises(LabError, match=message):
        dataset_in(copied)


def test_train_bin_and_val_bin_of_nanogpt_are_used_unchanged(tmp_path):
    np.arange(5000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(500, dtype="<u2").tofile(tmp_path / "val.bin")
    dataset = dataset_in(tmp_path)
    assert (dataset.tokenizer, dataset.vocab) == ("gpt2", 50257)
    assert dataset.train[0][4999] == 4999
    np.full(500, 50300, dtype="<u2").tofile(tmp_path / "val.bin")
    with pytest.raises(
        LabError, match=r"val.bin contains the token id 50300, outside the vocabulary of 50257"
    ):
        dataset_in(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(LabError, match=r"val.bin has 3 bytes: uint16 ids need an even number"):
        dataset_in(tmp_path)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"is not prepared data: there is no manifest.json in it"):
        dataset_in(tmp_path)


def test_a_file_given_as_data_is_told_from_a_folder(tmp_path):
    (tmp_path / "some text.txt").write_text("text")
    with pytest.raises(LabError) as error:
        dataset_in(tmp_path / "some text.txt")
    assert f"prepare '{tmp_path / 'some text.txt'}' --out FOLDER`" in str(error.value)
