"""The reader: encodings, line ends, broken input, tables, globs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.data import files
from stages.errors import DataError


def rows_of(path, data: bytes):
    path.write_bytes(data)
    return list(files.rows(str(path)))


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "1"}\n{"a": "2"}\n',
        b'\xef\xbb\xbf{"a": "1"}\n{"a": "2"}',
        b'{"a": "1"}\r\n{"a": "2"}\r\n',
        b'{"a": "1"}\n{"a": "2"}\n\n \n\n',
        b'[{"a": "1"},\n {"a": "2"}]\n',
        b'\n[\n{"a": "1"}\n,{"a":\n "2"}\n]',
    ],
)
def test_the_same_rows_however_the_file_is_laid_out(tmp_path, data):
    rows = rows_of(tmp_path / "f.jsonl", data)
    assert [row.fields for row in rows] == [{"a": "1"}, {"a": "2"}]


def test_rows_know_their_lines(tmp_path):
    rows = rows_of(tmp_path / "f.jsonl", b'{"a": 1}\n\n{"a": 2}\n')
    assert [row.origin for row in rows] == [f"{tmp_path}/f.jsonl:1", f"{tmp_path}/f.jsonl:3"]


def test_elements_of_an_array_know_their_lines(tmp_path):
    rows = rows_of(tmp_path / "f.json", b'[{"a": 1},\n\n{"a":\n2},\n{"a": 3}]')
    assert [row.origin.rpartition(":")[2] for row in rows] == ["1", "3", "5"]


def test_unusual_separators_stay_inside_their_strings(tmp_path):
    text = "one\u2028two\u0085three\x0b"
    data = json.dumps({"a": text}, ensure_ascii=False).encode() + b"\n"
    assert [row.fields for row in rows_of(tmp_path / "f.jsonl", data)] == [{"a": text}]


def test_text_lines_are_texts(tmp_path):
    rows = rows_of(tmp_path / "f.txt", "hé\u2028llo\r\n\nb\n".encode())
    assert [row.fields["text"] for row in rows] == ["hé\u2028llo", "b"]


def test_compressed_files_are_read(tmp_path):
    data = gzip.compress(b'{"a": 1}\n')
    assert rows_of(tmp_path / "f.jsonl.gz", data)[0].fields == {"a": 1}


def test_csv_cells_may_hold_quotes_and_line_feeds(tmp_path):
    rows = rows_of(tmp_path / "f.csv", b'\xef\xbb\xbfa,b\n"x\n\ny","say ""hi"""\n1,2\n')
    assert [row.fields for row in rows] == [
        {"a": "x\n\ny", "b": 'say "hi"'},
        {"a": "1", "b": "2"},
    ]
    assert [row.origin.rpartition(":")[2] for row in rows] == ["2", "5"]


def test_spaces_around_the_names_of_a_csv_header_are_no_part_of_them(tmp_path):
    rows = rows_of(tmp_path / "f.csv", b"prompt, response ,,\nhi, there,,\n")
    assert rows[0].fields == {"prompt": "hi", "response": " there", "": ""}


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(DataError, match="two columns are called 'a'") as caught:
        list(files.rows(str(path)))
    assert caught.value.where == str(path)


def test_parquet_rows_are_read(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"a": [[{"b": 1}], []]}), path)
    assert [row.fields for row in files.rows(str(path))] == [{"a": [{"b": 1}]}, {"a": []}]


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("name", "data", "line", "what"),
    [
        ("f.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}\n', 2, "broken JSON"),
        ("f.jsonl", b'{"a": 1}\n{"a": 1} {"a": 2}\n', 2, "more text follows"),
        ("f.jsonl", b'{"a": 1}\n"text"\n', 2, "must be an object"),
        ("f.jsonl", b'{"a": 1}\n[{"a": 1}]\n', 2, "must be an object"),
        ("f.jsonl", b'{"a": "\xff"}\n', 1, "byte 8 of the line"),
        ("f.jsonl", '{"a": "é"}\n'.encode("utf-16"), 1, "not UTF-8"),
        ("f.jsonl", b'{"a": NaN}\n', 1, "not a finite number"),
        ("f.jsonl", b'{"a": 1e999}\n', 1, "not a finite number"),
        ("f.jsonl", b'{"a": -Infinity}\n', 1, "not a finite number"),
        ("f.jsonl", b'{"a": "x\ny"}\n', 1, "broken JSON"),
        ("f.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", 1, "whole number of more than 4300 digits"),
        ("f.json", b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]", 2, "of more than 4300 digits"),
        ("f.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 1}\n', 2, "the key 'a' is given twice"),
        ("f.jsonl", b'{"a": [{"b": {"c": 1, "c": 2}}]}\n', 1, "the key 'c' is given twice"),
        ("f.json", b'[{"a": 1},\n{"a": 2, "a": 3}]', 2, "the key 'a' is given twice"),
        ("f.jsonl", DEEP, 1, "too deeply nested"),
        ("f.json", b'[{"a": 1},\n{"a": 2}\n{"a": 3}]', 2, "comma"),
        ("f.json", b'[{"a": 1},\n{"a": 2}', 2, "comma or the closing bracket"),
        ("f.json", b'[{"a": 1},\n3]', 2, "must be an object"),
        ("f.json", b'[{"a": 1}]\n{"a": 2}', 2, "follows the closing bracket"),
        ("f.csv", b"a,b\n1,2\n1\n", 3, "1 cells where the header has 2"),
        ("f.csv", b'a,b\n1,"2\n', 2, "broken CSV"),
        ("f.csv", b"a,b, a\n1,2,3\n", 1, "two columns are called 'a'"),
        ("f.tsv", b"a\ta\n1\t2\n", 1, "two columns are called 'a'"),
    ],
)
def test_broken_input_is_named_with_its_line(tmp_path, name, data, line, what):
    with pytest.raises(DataError, match=what) as caught:
        rows_of(tmp_path / name, data)
    assert caught.value.where == f"{tmp_path / name}:{line}"
    assert caught.value.do


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("f.jsonl", b"", "no record"),
        ("f.jsonl", b"\n \n", "no record"),
        ("f.json", b"[]", "no record"),
        ("f.txt", b"\xef\xbb\xbf\n", "no record"),
        ("f.csv", b"a,b\n", "no record"),
        ("f.jsonl.gz", b"not compressed", "damaged"),
        ("f.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "damaged"),
        ("f.csv.gz", b"not compressed", "damaged"),
        ("f.parquet", b"PAR1", "Parquet"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, data, what):
    with pytest.raises(DataError, match=what) as caught:
        rows_of(tmp_path / name, data)
    assert caught.value.where == str(tmp_path / name)


def test_files_are_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "f.jsonl").write_bytes('{"a": "é"}\n'.encode())
    code = "from stages.data import files; print(ascii(list(files.rows('f.jsonl'))[0].fields['a']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONPATH": str(files.__file__).split("/stages")[0],
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "'\\xe9'"


def test_globs_and_lists_name_files_once_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    found = files.find([f"{tmp_path}/b.jsonl", f"{tmp_path}/?.jsonl", f"{tmp_path}/odd[1].jsonl"])
    assert [name.rpartition("/")[2] for name in found] == ["b.jsonl", "a.jsonl", "odd[1].jsonl"]


@pytest.mark.parametrize("source", ["missing.jsonl", "missing-*.jsonl", []])
def test_a_missing_file_is_an_error(source):
    with pytest.raises(DataError) as caught:
        files.find(source)
    assert caught.value.exit_code == 3


def test_a_folder_is_no_data_file(tmp_path):
    with pytest.raises(DataError, match="folder"):
        files.find(str(tmp_path))
