"""Where documents come from: the standard library, files and folders, and Hugging Face data sets."""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normstream.data.books import read_books
from normstream.data.config import DataConfig
from normstream.data.documents import Document
from normstream.data.extras import import_extra
from normstream.names import nearest

HF_PREFIX = "hf:"
BUILT_IN = ("stdlib", "books")
TEST_FOLDERS = {"test", "tests", "idle_test"}
SKIPPED_PACKAGES = {"encodings", "pydoc_data", "test"}
"""Tables of characters; one generated file larger than all that is held out; tests, larger than all the rest."""


def read_documents(config: DataConfig) -> list[Document]:
    """The documents of ``config.source`` that are not empty, always in the same order.

    Raises ValueError if the source is unknown or unreadable, ImportError if it needs an extra that is not installed.

    >>> (getfixture("tmp_path") / "a.txt").write_text("hello")
    5
    >>> read_documents(DataConfig(source=str(getfixture("tmp_path"))))
    [Document(key='a.txt', data=b'hello')]
    """
    if config.source == "stdlib":
        documents = read_stdlib()
    elif config.source == "books":
        documents = read_books()
    elif config.source.startswith(HF_PREFIX):
        documents = read_hf(config)
    else:
        files = source_files(config.source)
        documents = (document for key, path in files for document in read_file(path, key, config.text_column))
    return [document for document in documents if document.data]


def read_stdlib() -> Iterator[Document]:
    """The ``.py`` files of the running interpreter's standard library, a document each, without its tests.

    Raises ValueError if the interpreter came without sources.

    >>> "json/decoder.py" in [document.key for document in read_stdlib()]
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    packages = sys.stdlib_module_names - SKIPPED_PACKAGES  # hence no site-packages, nor what a distribution adds
    tops = [path for path in root.iterdir() if path.name.removesuffix(".py") in packages] if root.is_dir() else []
    files = [path for top in tops for path in (top.rglob("*.py") if top.is_dir() else [top]) if path.suffix == ".py"]
    keys = {path.relative_to(root).as_posix(): path for path in files}
    if not keys:
        raise ValueError(f"this Python has no library sources in {root}; give another source, such as a text file")
    for key in sorted(keys):
        if TEST_FOLDERS.isdisjoint(key.split("/")):
            yield Document(key, _read_bytes(keys[key]))


def source_files(source: str) -> list[tuple[str, Path]]:
    """The file at this path, or all files below this folder, sorted, with their keys; hidden ones are left out.

    Raises ValueError if there is no such path, with the nearest known source, and if the folder is empty.

    >>> source_files("stdlb")
    Traceback (most recent call last):
    ValueError: unknown source 'stdlb'; did you mean 'stdlib'? Known: stdlib, books, hf:NAME, path/to/file-or-folder
    """
    if not source:
        raise ValueError("the source is empty; give stdlib, books, hf:NAME or a path ('.' is the current folder)")
    root = Path(source).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        looks_like_path = len(root.parts) > 1 or root.suffix
        what = f"no file or folder {source}" if looks_like_path else f"unknown source {source!r}"
        raise ValueError(f"{what}; {nearest(source, [*BUILT_IN, 'hf:NAME', 'path/to/file-or-folder'])}")
    files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    visible = [key for key in files if not any(part.startswith(".") for part in key.parts)]
    if not visible:
        raise ValueError(f"the folder {source} holds no files")
    return sorted((key.as_posix(), files[key]) for key in visible)


def read_file(path: Path, key: str, text_column: str) -> Iterator[Document]:
    """The documents of one file: the rows of ``.jsonl`` and ``.parquet``, the whole of any other.

    Raises ValueError if the file cannot be read, is not text, or a row lacks the column.

    >>> path = getfixture("tmp_path") / "a.jsonl"
    >>> path.write_text('{"text": "one"}')
    15
    >>> [document.data for document in read_file(path, path.name, "text")]
    [b'one']
    """
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from _read_jsonl(path, text_column)
    elif suffix == ".parquet":
        yield from _read_parquet(path, text_column)
    else:
        data = _read_bytes(path)
        if b"\0" in data[:8192]:
            raise ValueError(f"{path} is not a text file (it holds zero bytes); remove it or convert it to UTF-8")
        yield Document(key, data)


def read_hf(config: DataConfig) -> Iterator[Document]:
    """The ``train`` split of a Hugging Face data set, streamed up to ``config.max_bytes`` bytes.

    Raises ImportError without the extra [hf], ValueError if the data set or the column is not found.

    >>> config = DataConfig(source="hf:")
    >>> next(read_hf(config))
    Traceback (most recent call last):
    ValueError: source 'hf:' names no data set; expected hf:NAME or hf:NAME:CONFIG
    """
    name, _, subset = config.source.removeprefix(HF_PREFIX).partition(":")
    if not name:
        raise ValueError(f"source {config.source!r} names no data set; expected hf:NAME or hf:NAME:CONFIG")
    datasets = import_extra("datasets", "hf")
    try:
        rows = iter(datasets.load_dataset(name, subset or None, split="train", streaming=True))
        room = config.max_bytes
        for number, row in enumerate(rows, 1):
            document = _row_document(row, config.text_column, f"{config.source}, row {number}")
            room -= len(document.data) + 1
            if room < 0:
                return
            yield document
    except OSError as error:
        raise ValueError(f"cannot read data set {name!r}: {error}") from error


def _read_jsonl(path: Path, column: str) -> Iterator[Document]:
    for number, line in enumerate(_read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
        yield _row_document(row, column, f"{path}, line {number}")


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    parquet = import_extra("pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise ValueError(f"no column {column!r}; columns: {', '.join(file.schema_arrow.names)}")
            texts = (text for batch in file.iter_batches(columns=[column]) for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, 1):
                yield _row_document({column: text}, column, f"row {number}")
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise ValueError(f"{path}: {error}") from error


def _row_document(row: Any, column: str, where: str) -> Document:
    if not isinstance(row, dict) or column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
        raise ValueError(f"{where}: no column {column!r}; columns: {columns}; choose one with text_column")
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text in column {column!r}, got {type(text).__name__}")
    # A lone surrogate, which JSON can spell, gives bytes that are not UTF-8; each tokenizer has its rule for these.
    data = text.encode("utf-8", "surrogatepass")
    return Document(hashlib.sha256(data).hexdigest(), data)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
