"""Labelled texts and pairs of texts from files and Hugging Face data sets.

One sample is a row with columns: .tsv and .txt files have them separated by tabs and no quotes (GLUE), .csv files are
as spreadsheets write them, .jsonl files have one object a line. The first line of a table names its columns.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normstream.data.extras import import_extra
from normstream.names import nearest

HF_PREFIX = "hf:"
TABS = (".tsv", ".txt")
SUFFIXES = (*TABS, ".csv", ".jsonl")


@dataclass(frozen=True)
class Example:
    """A text or a pair of texts, and the name of its class.

    >>> Example("1", "it rains", "rain falls").pair
    'rain falls'
    """

    label: str
    text: str
    pair: str | None = None


@dataclass(frozen=True)
class Columns:
    """Which column has what.

    >>> Columns().text
    'text'
    """

    text: str = "text"
    """The text, or the first of a pair."""
    pair: str | None = None
    """The second text; None means the column text_pair if there is one."""
    label: str = "label"
    """The class."""

    def find(self, known: Iterable[str], where: str) -> "Columns":
        """The same with ``pair`` decided; ValueError with the nearest name for a column that is not there."""
        known = list(known)
        pair = "text_pair" if self.pair is None and "text_pair" in known else self.pair
        for option, name in (("text_column", self.text), ("pair_column", pair), ("label_column", self.label)):
            if name is not None and name not in known:
                raise ValueError(f"{where} has no column {name!r}; {nearest(name, known)}; choose one with {option}")
        return Columns(self.text, pair, self.label)


def read_examples(source: str, columns: Columns) -> list[Example]:
    """The examples of one file, in order.

    Raises ValueError for a file that is not there, is of another kind, empty or not UTF-8, for an unknown column, and
    for a row without label or text.

    >>> path = getfixture("tmp_path") / "pairs.tsv"
    >>> path.write_text("label\\ttext\\ttext_pair\\n1\\tit rains\\train falls\\n")
    43
    >>> read_examples(str(path), Columns())
    [Example(label='1', text='it rains', pair='rain falls')]
    """
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file():
        raise ValueError(f"no file {source}; give paraphrases, hf:NAME:CONFIG or a file ({', '.join(SUFFIXES)})")
    if suffix not in SUFFIXES:
        raise ValueError(f"{source}: expected a file of one of the kinds {', '.join(SUFFIXES)}, got {suffix or 'none'}")
    text = _read_text(path)
    rows = _jsonl_rows(text, source) if suffix == ".jsonl" else _table_rows(text, source, tabs=suffix in TABS)
    examples = list(_examples(rows, columns, source))
    if not examples:
        raise ValueError(f"{source} has no examples; give a file with at least two classes")
    return examples


def read_hf_examples(source: str, columns: Columns, split: str) -> list[Example] | None:
    """The examples of a split of ``hf:NAME`` or ``hf:NAME:CONFIG``, None if there is no such split.

    Classes are named by their numbers. Raises ImportError without the extra [hf], ValueError if the data set or a
    column is not found.

    >>> read_hf_examples("hf:", Columns(), "train")
    Traceback (most recent call last):
    ValueError: source 'hf:' names no data set; expected hf:NAME or hf:NAME:CONFIG
    """
    name, _, subset = source.removeprefix(HF_PREFIX).partition(":")
    if not name:
        raise ValueError(f"source {source!r} names no data set; expected hf:NAME or hf:NAME:CONFIG")
    datasets = import_extra("datasets", "hf")
    try:
        splits = datasets.load_dataset(name, subset or None)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read data set {name!r}: {error}") from error
    if split not in splits:
        return None
    rows = ((f"row {number}", row) for number, row in enumerate(splits[split], 1))
    return list(_examples(rows, columns, f"{source}, {split}"))


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): convert it, for example with iconv") from error
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def _table_rows(text: str, source: str, *, tabs: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row with the name of its line; tables with tabs have no quotes, whose pairs need not match."""
    kind: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    reader = csv.reader(io.StringIO(text, newline=""), **kind)
    try:
        header = next(reader)
        for fields in reader:
            if not fields:
                continue
            where = f"line {reader.line_num}"
            if len(fields) != len(header):
                raise ValueError(
                    f"{source}, {where}: {len(fields)} fields, expected {len(header)} as in the first line"
                )
            yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num}: {error}") from error


def _jsonl_rows(text: str, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{source}, line {number}: expected an object with columns, got {type(row).__name__}")
        yield f"line {number}", row


def _examples(rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Columns, source: str) -> Iterator[Example]:
    for line, row in rows:
        where = f"{source}, {line}"
        found = columns.find(row, where)
        pair = None if found.pair is None else _text(row[found.pair], found.pair, where)
        yield Example(_label(row[found.label], where), _text(row[found.text], found.text, where), pair)


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text in column {column!r}, got {type(value).__name__}")
    return value


def _label(value: Any, where: str) -> str:
    if value is None or value == "" or value == -1:
        raise ValueError(f"{where}: the label is missing; remove the row or name its class")
    if not isinstance(value, int | str):
        raise ValueError(f"{where}: expected a class as text or whole number, got {value!r}")
    return str(value)
