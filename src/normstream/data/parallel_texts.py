"""Texts and their translations, from files and from Hugging Face.

================================== ================================================================================
path or name                       pairs
================================== ================================================================================
``FILE.tsv``                       the two columns of each line, named by the codes in the first line; without such a
                                   line the source comes first
``FILE.jsonl``                     objects with a column for each language, named by its code, or with a column
                                   ``translation`` that holds such an object
``PATH``, with PATH.en, PATH.de    two files whose lines belong together, named by the codes
``hf:NAME``, ``hf:NAME:CONFIG``    rows with a column ``translation``, as WMT and IWSLT have (extra [hf])
================================== ================================================================================
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from normstream.data.extras import import_extra

HF_PREFIX = "hf:"
Texts = tuple[str, str]
"""Source and target."""


def read_parallel_texts(source: str, languages: Texts) -> Iterator[Texts]:
    """The pairs of a file, two files or a Hugging Face data set, in order; see above.

    Args:
        source: a path, what two paths start with, or ``hf:NAME`` or ``hf:NAME:CONFIG``.
        languages: the codes of source and target.

    Raises ValueError for a file that is not there or not of this form, ImportError if an extra is missing.

    >>> path = getfixture("tmp_path") / "pairs.tsv"
    >>> path.write_text("one\\teins\\n")
    9
    >>> list(read_parallel_texts(str(path), ("en", "de")))
    [('one', 'eins')]
    """
    path = Path(source).expanduser()
    if source.startswith(HF_PREFIX):
        return _read_hf(source, languages)
    if path.suffix.lower() == ".tsv" and path.is_file():
        return _read_tsv(path, languages)
    if path.suffix.lower() == ".jsonl" and path.is_file():
        rows = (_json_row(line, f"{path}, line {number}") for number, line in _lines(path) if line.strip())
        return (_pair_of(row, languages, str(path)) for row in rows)
    files = [path.with_name(f"{path.name}.{code}") for code in languages] if path.name else []
    if not files or not all(file.is_file() for file in files):
        names = " and ".join(file.name for file in files) or "PATH.en and PATH.de"
        raise ValueError(
            f"no pairs of texts in {source!r}; expected numbers, libreoffice, hf:NAME, the path of a .tsv or .jsonl "
            f"file, or a path that two files start with ({names})"
        )
    return _read_two(*files)


def _read_tsv(path: Path, languages: Texts) -> Iterator[Texts]:
    swapped = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(f"{path}, line {number}: expected 2 columns with a tab between them, got {len(columns)}")
        first, second = columns
        if number == 1 and {first, second} == set(languages):
            swapped = first != languages[0]
        else:
            yield (second, first) if swapped else (first, second)


def _read_two(source: Path, target: Path) -> Iterator[Texts]:
    sources, targets = ([line for _, line in _lines(path)] for path in (source, target))
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines and {target} {len(targets)}; the lines of both must belong together"
        )
    yield from zip(sources, targets, strict=True)


def _read_hf(source: str, languages: Texts) -> Iterator[Texts]:
    name, _, subset = source.removeprefix(HF_PREFIX).partition(":")
    if not name:
        raise ValueError(f"source {source!r} names no data set; expected hf:NAME or hf:NAME:CONFIG, as hf:wmt14:de-en")
    datasets = import_extra("datasets", "hf")
    try:
        for number, row in enumerate(datasets.load_dataset(name, subset or None, split="train", streaming=True), 1):
            yield _pair_of(row, languages, f"{source}, row {number}")
    except OSError as error:
        raise ValueError(f"cannot read data set {name!r}: {error}") from error


def _pair_of(row: Any, languages: Texts, where: str) -> Texts:
    texts = row.get("translation", row)
    found = texts if isinstance(texts, dict) else {}
    if missing := [code for code in languages if not isinstance(found.get(code), str)]:
        raise ValueError(
            f"{where}: no text in column {missing[0]!r}; columns: {', '.join(found) or 'none'}; "
            "the direction names the columns, as en-de does en and de"
        )
    return found[languages[0]], found[languages[1]]


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got a {type(row).__name__}")
    return row


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """The lines of a UTF-8 file, numbered from 1; only line feeds end them, as other programs count."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    return enumerate((line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")), 1)
