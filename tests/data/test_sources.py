"""Every kind of source on hand-made files, and every way in which one can be wrong."""

import ast
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normstream.data import DataConfig
from normstream.data.documents import hash_documents, split_documents
from normstream.data.sources import read_documents, read_stdlib


def texts(source: Path | str, **options: Any) -> list[bytes]:
    return [document.data for document in read_documents(DataConfig(source=str(source), **options))]


def test_stdlib_is_the_interpreters_own_source() -> None:
    documents = {document.key: document.data for document in read_stdlib()}
    assert documents["json/decoder.py"] == Path(str(sys.modules["json.decoder"].__file__)).read_bytes()
    assert list(documents) == sorted(documents)
    assert ast.get_docstring(ast.parse(documents["this.py"])) is None  # whole and parseable
    tops = {key.split("/")[0].removesuffix(".py") for key in documents}
    assert tops <= sys.stdlib_module_names
    assert not tops & {"test", "encodings", "site-packages"}
    assert not [key for key in documents if "/test/" in key or "/tests/" in key]
    assert 5e6 < sum(map(len, documents.values())) < 3e7


def test_stdlib_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr(sysconfig, "get_path", lambda name, root=root: str(root))
        with pytest.raises(ValueError, match=r"this Python has no library sources in .*give another source"):
            list(read_stdlib())


def test_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo \xff")
    assert texts(tmp_path / "a.txt") == [b"one\r\n\r\ntwo \xff"]


def test_folder_is_a_document_per_file_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.txt", ".git/config", "a/.hidden", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    documents = read_documents(DataConfig(source=str(tmp_path)))
    assert [document.data for document in documents] == [b"a/b/c.txt", b"a/z.md", b"b.txt", b"row"]
    assert [document.key for document in documents[:3]] == ["a/b/c.txt", "a/z.md", "b.txt"]


def test_jsonl_is_a_document_per_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one\\ntwo", "text": 1}\n\n{"body": "caf\\u00e9"}\r\n{"body": ""}', "utf-8")
    assert texts(path, text_column="body") == [b"one\ntwo", b"caf\xc3\xa9"]


def test_upper_case_suffix_is_the_same_format(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text('{"text": "one"}')
    assert texts(tmp_path / "A.JSONL") == [b"one"]


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    for name in (b"a\xff.txt", b"b.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(name.hex())
    train, validation = split_documents(list(read_documents(DataConfig(source=str(tmp_path)))), 0.5)
    assert sorted(document.data for document in train + validation) == [b"61ff2e747874", b"622e747874"]
    assert len(hash_documents(train, validation)) == 64


def test_deeply_nested_json_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        texts(path)


def test_equal_rows_have_equal_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(["x", "y", "x"])))
    first, second, third = [document.key for document in read_documents(DataConfig(source=str(path)))]
    assert first == third != second


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"body": "a", "id": 3}', "line 2: no column 'text'; columns: body, id; choose one with text_column"),
        ("[1]", "line 2: no column 'text'; columns: none, it is a list"),
        ('{"text": null}', "line 2: expected text in column 'text', got NoneType"),
        ('{"text": ', "line 2: not valid JSON"),
        ('{"text": "\xff"}', "line 2: not valid JSON"),
    ],
)
def test_bad_jsonl_row(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + row.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        texts(path)


def test_lone_surrogate_stays_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}')
    assert texts(tmp_path / "a.jsonl") == [b"\xed\xa0\x80"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "caf\u00e9"], "id": [1, 2]}), path)
    assert texts(path) == [b"one", b"caf\xc3\xa9"]
    with pytest.raises(ValueError, match=r"a.parquet: no column 'body'; columns: text, id"):
        texts(path, text_column="body")
    with pytest.raises(ValueError, match=r"a.parquet: row 1: expected text in column 'id', got int"):
        texts(path, text_column="id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet: "):
        texts(path)


@pytest.mark.parametrize(("module", "extra"), [("pyarrow.parquet", "parquet"), ("datasets", "hf")])
def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=re.escape(f"this needs {module}: pip install 'normstream[{extra}]'")):
        texts("hf:some/name" if extra == "hf" else tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("stdlb", "unknown source 'stdlb'; did you mean 'stdlib'?"),
        ("Books", "unknown source 'Books'; did you mean 'books'?"),
        ("nowhere/corpus.txt", "no file or folder nowhere/corpus.txt"),
        ("corpus.txt", "no file or folder corpus.txt"),
        ("hf:", "names no data set"),
    ],
)
def test_unknown_source(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        texts(source)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(ValueError, match="holds no files"):
        texts(tmp_path)


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(ValueError, match=r"a.png is not a text file \(it holds zero bytes\)"):
        texts(tmp_path)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("secret")

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ValueError, match=r"cannot read .*a.txt: Permission denied"):
        texts(tmp_path / "a.txt")


def test_hf_reads_a_local_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(5)))
    assert texts(f"hf:{tmp_path}") == [f"row {i}".encode() for i in range(5)]
    with pytest.raises(ValueError, match="row 1: no column 'body'; columns: text"):
        texts(f"hf:{tmp_path}", text_column="body")
    with pytest.raises(ValueError, match="cannot read data set"):
        texts(f"hf:{tmp_path / 'nowhere'}")


def test_hf_streams_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls, served = [], []

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, str]]:
        calls.append((args, options))
        for number in range(1000):
            served.append(number)
            yield {"text": f"{number:09d}"}  # 10 tokens with end-of-text

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(texts("hf:owner/name:subset", max_bytes=45)) == 4
    assert calls == [(("owner/name", "subset"), {"split": "train", "streaming": True})]
    assert len(served) == 5
    texts("hf:owner/name", max_bytes=10)
    assert calls[1][0] == ("owner/name", None)
