"""Documents, and the rule that decides which of them are held out for validation.

A document is held out by a hash of its key (its path, its title, or for rows its text), so that the same documents are
held out on every machine, whatever else the corpus holds, and two equal rows never end up on both sides.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

UTF8_CONTINUATION = range(0x80, 0xC0)


@dataclass(frozen=True)
class Document:
    """One text as raw bytes, UTF-8 as a rule, and the key that decides its side of the split.

    >>> Document("greeting.txt", b"hello").key
    'greeting.txt'
    """

    key: str
    data: bytes


def key_bytes(key: str) -> bytes:
    """The bytes of a key; a file name that is not UTF-8 keeps its own."""
    return key.encode("utf-8", "surrogateescape")


def split_score(key: str) -> float:
    """A number in [0, 1) that depends on the key alone: the first 8 bytes of its SHA-256.

    >>> split_score("abc.py") == split_score("abc.py")
    True
    """
    return int.from_bytes(hashlib.sha256(key_bytes(key)).digest()[:8], "big") / 2**64


def held_out(keys: Iterable[str], fraction: float) -> set[str]:
    """The keys whose score is below ``fraction``; the one with the lowest score if there is none.

    >>> held_out(["a", "b"], 1e-9)
    {'b'}
    """
    scores = {key: split_score(key) for key in keys}
    chosen = {key for key, score in scores.items() if score < fraction}
    return chosen or {min(scores, key=scores.__getitem__)}


def split_documents(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, each in the order given.

    Where all documents share one key there is nothing to choose from: each gives its tail to validation, cut between
    two characters.

    >>> split_documents([Document("one.txt", b"0123456789")], 0.2)
    ([Document(key='one.txt', data=b'01234567')], [Document(key='one.txt', data=b'89')])
    """
    keys = {document.key for document in documents}
    if len(keys) < 2:
        halves = [_cut(document, fraction) for document in documents]
        return [head for head, _ in halves], [tail for _, tail in halves]
    validation = held_out(keys, fraction)
    return (
        [document for document in documents if document.key not in validation],
        [document for document in documents if document.key in validation],
    )


def _cut(document: Document, fraction: float) -> tuple[Document, Document]:
    data = document.data
    cut = int(len(data) * (1 - fraction))
    while 0 < cut < len(data) and data[cut] in UTF8_CONTINUATION:
        cut -= 1
    return Document(document.key, data[:cut]), Document(document.key, data[cut:])


def hash_documents(train: list[Document], validation: list[Document]) -> str:
    """SHA-256, in hexadecimal, over every document and the side it is on; the tokenizer plays no part.

    >>> hash_documents([Document("a", b"x")], []) == hash_documents([], [Document("a", b"x")])
    False
    """
    digest = hashlib.sha256()
    for side, documents in (("train", train), ("validation", validation)):
        for document in documents:
            # The lengths make the stream unambiguous: no other corpus feeds the hash the same bytes.
            key = key_bytes(document.key)
            digest.update(f"{side} {len(key)} {len(document.data)}\n".encode() + key)
            digest.update(document.data)
    return digest.hexdigest()
