"""What is not a text is refused with the file, the line and what stands there."""

from __future__ import annotations

import codecs
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normcontrol.lab.cli.main import main
from normcontrol.lab.data import corpus, tokenizer
from normcontrol.lab.errors import LabError


def read(path, column="text"):
    return [piece.text for piece, _ in corpus.source(str(path), column).pieces()]


def message(path, column="text"):
    with pytest.raises(LabError) as error:
        read(path, column)
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("null", "null"),
        ("3", "3 (int)"),
        ("2.5", "2.5 (float)"),
        ("true", "True (bool)"),
        ('["a", "b"]', "['a', 'b'] (list)"),
        ('{"a": 1}', "{'a': 1} (dict)"),
    ],
)
def test_a_value_in_jsonl_that_is_no_text(tmp_path, value, given):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "ok"}}\n\n{{"text": {value}}}\n')
    assert message(path) == (
        f"{path}, line 3, has {given} under 'text', where a text is needed. Give another key or "
        "column as --column, or remove it."
    )


@pytest.mark.parametrize("line", ["[1]", "3", '"text"', "null", "{", "[" * 100_000])
def test_a_line_in_jsonl_that_is_no_object(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "ok"}}\n{line}\n')
    assert f"{path}, line 2, is not a JSON object with the text under 'text'" in message(path)


@pytest.mark.parametrize("code", [0xD800, 0xDCFF])
def test_half_of_a_surrogate_pair(tmp_path, code, capsys):
    path = tmp_path / "a.jsonl"
    lines = ({"text": text} for text in ("\U0001f600", "ok " + chr(code)))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sentence = f"{path}, line 2, has the lone surrogate U+{code:04X} at character 3, which is"
    assert sentence in message(path)
    for name in ("bytes", "bpe:300"):
        out = str(tmp_path / name.replace(":", ""))
        assert main(["prepare", str(path), "--out", out, "--tokenizer", name]) == 1
        assert sentence in capsys.readouterr().err
    path.write_text(json.dumps({"text": "\U0001f600"}))  # the escapes of a whole pair
    assert read(path) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("column", "row", "given"),
    [
        (pa.array([1, 2]), 1, "1 (int)"),
        (pa.array(["ok", None]), 2, "null"),
        (pa.array([["a"], ["b"]]), 1, "['a'] (list)"),
        (pa.array([b"ok", b"ok"]), 1, "b'ok' (bytes)"),
    ],
)
def test_a_column_of_parquet_that_is_no_text(tmp_path, column, row, given):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": column}), path)
    said = message(path, "n")
    assert f"{path}, row {row}, has {given} under 'n', where a text is needed." in said


def test_rows_of_parquet_are_counted_over_its_batches(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["ok"] * 300 + [None]}), path)
    assert f"{path}, row 301, has null" in message(path)
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), path)
    assert read(path) == ["a", "b", "a"]


def test_bytes_in_parquet_that_are_no_utf_8(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array([b"ok", b"caf\xe9"])
    column = pa.StringArray.from_buffers(2, *texts.buffers()[1:])
    pq.write_table(pa.table({"text": column}), path)
    assert f"{path}, row 2, is not UTF-8 at its byte 3" in message(path)


def test_parquet_whose_pages_are_damaged(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["text"] * 1000}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    assert f"{path} cannot be read after row 0 (" in message(path)


@pytest.mark.parametrize("name", ["bpe:²", "bpe:-1", "bpe:", "bpe:1e3"])
def test_a_size_that_is_no_number_is_no_tokenizer(name):
    with pytest.raises(LabError, match="There is no tokenizer"):
        tokenizer.make(name, ())


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, ending):
    """Editors and shells on Windows put one before a file in UTF-8."""
    path = tmp_path / f"a.{ending}"
    text = '{"text": "first"}' if ending == "jsonl" else "first"
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == ["first"]


def test_bytes_in_a_text_that_are_no_utf_8_are_counted_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "a.txt"
    for before in (b"abc", codecs.BOM_UTF8, b""):
        path.write_bytes(before + b"abc\xf6")
        assert f"byte {len(before) + 3} is 0xf6" in message(path)
