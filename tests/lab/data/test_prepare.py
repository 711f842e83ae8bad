"""Tests of the way from text to shards: sources of text, tokenizers, and preparations that are
stopped and continued."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.data import corpus, prepare, tokenizer
from normcontrol.lab.errors import Busy, LabError
from normcontrol.lab.files import claimed

DOCUMENTS = [f"Document {i}, with Zürich and 北京 in it.\n" * (i % 7 + 1) for i in range(50)]


def tokens(folder, split="train"):
    manifest = json.loads((folder / "manifest.json").read_text())
    return np.concatenate(
        [
            np.fromfile(folder / s["file"], manifest["dtype"])
            for s in manifest["splits"][split]["shards"]
        ]
    )


def prepared(source, out, name="bytes", **options):
    return prepare.prepare(corpus.source(str(source)), out, name, val_fraction=0.1, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(text)
    return tmp_path


def test_texts_jsonl_and_parquet_become_the_same_tokens(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "all.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "all.parquet")
    made = [
        prepared(folder / name, folder / f"out-{name}")
        for name in ("texts", "all.jsonl", "all.parquet")
    ]
    for split in ("train", "val"):
        first, *others = [tokens(out, split) for out in made]
        assert all(np.array_equal(first, other) for other in others)


def test_every_tenth_document_is_for_validation_and_each_ends_with_the_end_of_document(folder):
    out = prepared(folder / "texts", folder / "out")
    text = tokenizer.Bytes().decode(tokens(out, "val"))
    assert text == "".join(DOCUMENTS[9::10])
    assert int((tokens(out, "val") == 256).sum()) == 5
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["split"].startswith("every 10th document")
    assert manifest["documents"] == 50


def test_a_stopped_preparation_is_continued_and_ends_in_the_same_bytes(folder, monkeypatch):
    monkeypatch.setattr(prepare, "TASK", 200)
    # With this clock the journal is written at every second task.
    monkeypatch.setattr(prepare.time, "monotonic", iter(range(0, 10**6, 3)).__next__)
    whole = prepared(folder / "texts", folder / "whole", shard_tokens=1000)

    for stop in (5, 9, 14):
        calls = []

        def interrupt(read, total, made, calls=calls, stop=stop):
            calls.append(made)
            if len(calls) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepared(folder / "texts", folder / "stopped", shard_tokens=1000, progress=interrupt)
        assert (folder / "stopped" / "journal.json").exists()
    assert len(list((folder / "stopped").glob("train-*.bin"))) > 2
    prepared(folder / "texts", folder / "stopped", shard_tokens=1000)
    assert sorted(p.name for p in whole.iterdir()) == sorted(
        p.name for p in (folder / "stopped").iterdir()
    )
    for path in whole.iterdir():
        assert path.read_bytes() == (folder / "stopped" / path.name).read_bytes()


def test_another_preparation_is_not_continued(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "TASK", 200)
    monkeypatch.setattr(prepare.time, "monotonic", iter(range(0, 10**6, 10)).__next__)
    calls = []
    with pytest.raises(KeyboardInterrupt):
        prepared(
            folder / "texts",
            folder / "out",
            progress=lambda *_: calls.append(1) if len(calls) < 5 else interrupt(),
        )
    with pytest.raises(
        LabError,
        match=r"contains another, incomplete preparation: shard was 100000000 and is 1000 now",
    ):
        prepared(folder / "texts", folder / "out", shard_tokens=1000)


def test_an_unfinished_shard_that_was_changed_is_not_continued(folder, monkeypatch):
    def interrupt(read, total, made):
        if made > 2000:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "TASK", 200)
    monkeypatch.setattr(prepare.time, "monotonic", iter(range(0, 10**6, 10)).__next__)
    with pytest.raises(KeyboardInterrupt):
        prepared(folder / "texts", folder / "out", progress=interrupt)
    (part,) = (folder / "out").glob("train-*.part")
    content = part.read_bytes()
    for damage in (b"\1" + content[1:], content[:10], None):
        part.unlink() if damage is None else part.write_bytes(damage)
        with pytest.raises(LabError, match=r"The unfinished shard .* was changed or deleted"):
            prepared(folder / "texts", folder / "out")
    part.write_bytes(content)
    prepared(folder / "texts", folder / "out")


def test_two_processes_do_not_prepare_the_same_data(folder):
    out = folder / "out"
    with claimed(out, "", ()), pytest.raises(Busy, match="Another process is preparing data in"):
        prepared(folder / "texts", out)
    prepared(folder / "texts", out)
    prepared(folder / "texts", out, wait=True)  # what another process has made is used


def test_a_preparation_that_could_not_start_leaves_no_folder(folder):
    with pytest.raises(LabError, match="There is no tokenizer"):
        prepared(folder / "texts", folder / "out", "word")
    assert not (folder / "out").exists()


def test_a_trained_tokenizer_that_was_changed_is_refused(folder):
    out = prepared(folder / "texts", folder / "out", "bpe:270")
    digest = json.loads((out / "manifest.json").read_text())["tokenizer_sha256"]
    tokenizer.stored("bpe:270", out, digest)
    path = out / "tokenizer.json"
    path.write_text(path.read_text().replace('"version": "1.0"', '"version": "1.1"'))
    with pytest.raises(LabError, match=r"tokenizer.json was changed .* \(its checksum differs\)"):
        tokenizer.stored("bpe:270", out, digest)
    path.write_text("{")
    with pytest.raises(LabError, match=r"tokenizer.json was changed after it was written"):
        tokenizer.stored("bpe:270", out)


def test_a_finished_folder_is_not_overwritten(folder):
    prepared(folder / "texts", folder / "out")
    with pytest.raises(LabError, match="already contains prepared data"):
        prepared(folder / "texts", folder / "out")


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["Unix", "Windows"])
def test_cutting_a_long_document_does_not_change_its_tokens(tmp_path, monkeypatch, end):
    monkeypatch.setattr(corpus, "PIECE", 500)
    text = "def f(x):\n    return x  \n\n\n\tindented 'quotes' and ends  \n  \nnext\n" * 200
    text = text.replace("\n", end)
    encoder = tokenizer.Trained.train([text], 300)
    (tmp_path / "long.py").write_bytes(text.encode())
    pieces = [piece for piece, _ in corpus.source(str(tmp_path / "long.py")).pieces()]
    assert len(pieces) > 10
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == text
    for each in [encoder, *gpt2()]:
        assert (
            np.concatenate([each.encode(piece.text) for piece in pieces]).tolist()
            == each.encode(text).tolist()
        )


def gpt2():
    try:
        return [tokenizer.GPT2()]
    except LabError:
        return []


@pytest.mark.parametrize(
    "make", [tokenizer.Bytes, lambda: tokenizer.Trained.train(DOCUMENTS, 400), tokenizer.GPT2]
)
def test_tokenizers_decode_what_they_encoded(make, tmp_path):
    try:
        encoder = make()
    except LabError as error:
        pytest.skip(str(error))
    for text in DOCUMENTS[:5]:
        ids = encoder.encode(text)
        assert encoder.decode(ids.tolist()) == text
        assert int(ids.max()) < encoder.size
        assert encoder.end not in ids
    encoder.save(tmp_path)
    assert (
        tokenizer.stored(encoder.name, tmp_path).encode("some text").tolist()
        == encoder.encode("some text").tolist()
    )


@pytest.mark.parametrize("made", [0, 1])
def test_the_text_of_the_end_of_document_in_a_document_is_text(made, tmp_path):
    encoder = tokenizer.Trained.train(DOCUMENTS, 400)
    encoder.save(tmp_path)
    encoder = (encoder, tokenizer.stored(encoder.name, tmp_path))[made]
    text = "a <|endoftext|> b"
    assert encoder.end not in encoder.encode(text)
    assert encoder.decode(encoder.encode(text).tolist()) == text


def test_gpt2s_tokens_are_those_of_encode_ordinary():
    encoder = (gpt2() or pytest.skip("tiktoken cannot load GPT-2's BPE"))[0]
    text = "A text with <|endoftext|> in it, and  spaces\n\n" + DOCUMENTS[3]
    assert encoder.encode(text).tolist() == encoder.bpe.encode_ordinary(text)


def test_the_embedded_corpus_is_megabytes_of_source():
    source = corpus.embedded()
    assert source.size > 5e6
    assert any(path.name == "argparse.py" for path in source.files)


def message(run):
    with pytest.raises(LabError) as error:
        run()
    return str(error.value)


def test_sources_that_cannot_be_read_are_refused_with_the_reason(tmp_path):
    assert "There is no file or folder" in message(lambda: corpus.source(str(tmp_path / "nothing")))
    (tmp_path / "folder").mkdir()
    assert "There is no text in the folder" in message(
        lambda: corpus.source(str(tmp_path / "folder"))
    )
    (tmp_path / "empty.txt").touch()
    assert f"{tmp_path / 'empty.txt'} is empty" in message(
        lambda: corpus.source(str(tmp_path / "empty.txt"))
    )
    os.mkfifo(tmp_path / "pipe.txt")
    assert f"{tmp_path / 'pipe.txt'} is a pipe or a device, and the text is read more than" in (
        message(lambda: corpus.source(str(tmp_path / "pipe.txt")))
    )
    (tmp_path / "picture.jpg").write_bytes(b"x")
    assert "ends in '.jpg', but only files that end in .txt" in message(
        lambda: corpus.source(str(tmp_path / "picture.jpg"))
    )


def test_undecodable_bytes_are_refused_with_their_position(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"ok\n" * 500_000 + b"caf\xe9 and more\n")
    assert f"{path} is not UTF-8: byte 1,500,003 is 0xe9" in message(
        lambda: prepared(path, tmp_path / "out")
    )
    cut = "é".encode()[:1]
    path.write_bytes(b"ok\n" * 10 + cut)
    assert "byte 30 is 0xc3" in message(lambda: prepared(path, tmp_path / "out2"))


def test_jsonl_and_parquet_without_the_column_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"content": "not ok"}\n')
    assert "a.jsonl, line 2, is not a JSON object with the text under 'text'" in message(
        lambda: prepared(tmp_path / "a.jsonl", tmp_path / "o1")
    )
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    assert "has the columns content, and none named 'text'" in message(
        lambda: prepared(tmp_path / "a.parquet", tmp_path / "o2")
    )
    (tmp_path / "b.parquet").write_bytes(b"no")
    assert "b.parquet is not a parquet file" in message(
        lambda: prepared(tmp_path / "b.parquet", tmp_path / "o3")
    )


def test_too_few_documents_to_validate_on_are_refused(tmp_path):
    (tmp_path / "one.txt").write_text("just one\n")
    assert (
        "has one document, and training and validation need one each. A document is divided"
        in message(lambda: prepared(tmp_path / "one.txt", tmp_path / "out"))
    )
    # Line breaks alone are not enough: it says which ones count.
    (tmp_path / "two.txt").write_text("a paragraph in one line\n\n" * 10_000)
    assert "at a line break without a blank line or other white space beside it" in message(
        lambda: prepared(tmp_path / "two.txt", tmp_path / "out")
    )


@pytest.mark.parametrize("documents", [2, 3, 7, 61, 87, 99])
def test_the_fraction_that_is_advised_for_few_documents_is_enough(tmp_path, capsys, documents):
    (tmp_path / "few.jsonl").write_text('{"text": "words"}\n' * documents)
    words = ["prepare", str(tmp_path / "few.jsonl"), "--out", str(tmp_path / "out")]
    words += ["--tokenizer", "bytes"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"has {documents} documents, and one of every 100 is for validation" in said
    advised = said.partition("Raise ")[2].partition(" or more")[0]
    assert main([*words, *advised.replace(" to", "").split()]) == 0


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--shard-tokens=0", "shard_tokens=0: it must be 1 or more."),
        ("--val-fraction=nan", "val_fraction=nan: it must be above 0 and at most 0.5, since it is"),
        ("--val-fraction=0.6", "val_fraction=0.6: it must be above 0 and at most 0.5, since it is"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, capsys, flag, sentence):
    (tmp_path / "one.txt").write_text("just one\n")
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "one.txt"), "--out", str(out), flag]) == 1
    assert sentence in capsys.readouterr().err
    key, _, value = flag[2:].replace("-", "_").partition("=")
    options = {
        "val_fraction": 0.5,
        key: float(value) if "." in value or value == "nan" else int(value),
    }
    text = corpus.source(str(tmp_path / "one.txt"))
    assert sentence in message(lambda: prepare.prepare(text, out, "bytes", **options))
    assert not out.exists()


def test_an_unknown_tokenizer_is_refused_with_the_nearest_name(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("just one\n")
    assert (
        main(
            [
                "prepare",
                str(tmp_path / "one.txt"),
                "--out",
                str(tmp_path / "out"),
                "--tokenizer",
                "gpt-2",
            ]
        )
        == 1
    )
    assert "There is no tokenizer 'gpt-2'. Did you mean gpt2?" in capsys.readouterr().err


class Hub:
    """A fake Hugging Face hub with one dataset."""

    def __init__(self, files):
        self.files = files

    def dataset_info(self, name, revision=None):
        if name not in ("owner/texts", "Skylion007/openwebtext"):
            raise ConnectionError("no route")
        siblings = [type("File", (), {"rfilename": f}) for f in ("README.md", *self.files)]
        return type("Info", (), {"sha": revision or "c0ffee", "siblings": siblings})


def test_a_hugging_face_dataset_is_read_from_its_parquet_files_at_a_revision(tmp_path, monkeypatch):
    import huggingface_hub
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "train-0.parquet")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(["train-0.parquet"]))
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda name, file, repo_type, revision: str(tmp_path / file),
    )
    out = prepare.prepare(
        corpus.source("hf:owner/texts@abc123"), tmp_path / "out", "bytes", val_fraction=0.1
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"] == "hf:owner/texts@abc123"
    assert manifest["documents"] == 50
    assert corpus.source("hf:owner/texts").name == "hf:owner/texts@c0ffee"
    assert corpus.source("openwebtext").name == corpus.OPENWEBTEXT  # with its revision
    assert "could not be fetched (ConnectionError: no route). Check the network" in message(
        lambda: corpus.source("hf:owner/missing")
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub([]))
    assert "has no parquet files" in message(lambda: corpus.source("hf:owner/texts"))
