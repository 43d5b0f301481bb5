"""From text to tokens: plain bytes, a byte-level BPE trained here, or a ``tokenizer.json``."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from normstream.data.shards import token_dtype
from normstream.names import nearest

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
MIN_BPE = 257


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    >>> tokenizer: Tokenizer = ByteTokenizer()
    >>> tokenizer.eot < tokenizer.vocab_size
    True
    """

    name: str
    vocab_size: int
    eot: int

    def encode(self, text: str) -> list[int]:
        """Tokens of the text, without end-of-text; a special token's name inside the text is plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens; end-of-text is left out, and bytes that are not UTF-8 become U+FFFD."""
        ...

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each document, without end-of-text, as uint16 or uint32."""
        ...

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each token id stands for; 0 for end-of-text. Shape (vocab_size,)."""
        ...

    def to_json(self) -> str | None:
        """The content of a tokenizer.json that gives this tokenizer back; None for bytes, which needs no file."""
        ...


class ByteTokenizer:
    """A token is a byte: ids 0 to 255, and 256 for end-of-text.

    >>> ByteTokenizer().encode("hi")
    [104, 105]
    """

    name = "bytes"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8).astype(np.uint16) for document in documents]

    def byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0])

    def to_json(self) -> None:
        return None


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library, as read from a ``tokenizer.json`` or trained by ``train_bpe``.

    Raises ValueError if it has no end-of-text token of a name in ``END_OF_TEXT_NAMES``.

    >>> tokenizer = train_bpe([b"low lower lowest"] * 9, 260)
    >>> tokenizer.decode(tokenizer.encode("slow"))
    'slow'
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str) -> None:
        found = [tokenizer.token_to_id(token) for token in END_OF_TEXT_NAMES]
        eot = next((token for token in found if token is not None), None)
        if eot is None:
            raise ValueError(f"tokenizer {name} has no end-of-text token; looked for {', '.join(END_OF_TEXT_NAMES)}")
        self.name, self.eot = name, eot
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        # Files often ask for one model's sequence length; and a text that mentions <|endoftext|> does not end there.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens if token != self.eot], skip_special_tokens=False)

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        texts = decode_documents(documents)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = set(pre_tokenizers.ByteLevel.alphabet())
        for piece, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            # In a byte-level vocabulary one character stands for one byte.
            whole = token not in added and byte_level.issuperset(piece)
            lengths[token] = len(piece) if whole else len(piece.replace("\u2581", " ").encode())
        lengths[self.eot] = 0
        return lengths

    def to_json(self) -> str:
        return self._tokenizer.to_str()


def decode_documents(documents: Sequence[bytes]) -> list[str]:
    """The documents as text; warns once if some are not UTF-8, whose wrong bytes become U+FFFD.

    >>> decode_documents([b"hello"])
    ['hello']
    """
    texts, wrong = [], 0
    for document in documents:
        try:
            texts.append(document.decode())
        except UnicodeDecodeError:
            texts.append(document.decode(errors="replace"))
            wrong += 1
    if wrong:
        warnings.warn(
            f"{wrong} of {len(documents)} documents are not valid UTF-8: their wrong bytes are read as U+FFFD "
            "(tokenizer 'bytes' reads them as they are)",
            stacklevel=2,
        )
    return texts


def train_bpe(documents: Sequence[bytes], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; bytes as in GPT-2) with at most vocab_size tokens.

    End-of-text and the 256 bytes come first, so any text can be encoded; a small text may not have enough pairs for
    all the merges asked for. The same documents give the same tokenizer.

    >>> train_bpe([b"aaaa bbbb"] * 5, 258).vocab_size
    258
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.decode(errors="replace") for document in documents), trainer)
    return FileTokenizer(tokenizer, f"bpe:{vocab_size}")


def bpe_size(spec: str) -> int:
    """N of ``bpe:N``; 0 for another kind of tokenizer.

    Raises ValueError if N is no integer of at least 257 (256 bytes and end-of-text).

    >>> bpe_size("bpe:4096")
    4096
    """
    kind, colon, size = spec.partition(":")
    if kind != "bpe":
        return 0
    if not colon or not size.isdecimal() or int(size) < MIN_BPE:
        raise ValueError(f"tokenizer {spec!r}: expected bpe:N with N at least {MIN_BPE}, such as bpe:4096")
    return int(size)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer ``bytes``, or the one in the ``tokenizer.json`` at this path.

    Raises ValueError for an unknown name, with the nearest known one, and for a file that cannot be read.

    >>> load_tokenizer("bytes").vocab_size
    257
    """
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(spec)
    if not path.is_file():
        what = f"no tokenizer file {spec}" if path.suffix == ".json" else f"unknown tokenizer {spec!r}"
        raise ValueError(f"{what}; {nearest(spec, ['bytes', 'bpe:N', 'path/to/tokenizer.json'])}")
    try:
        library = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{spec} is not a readable tokenizer.json: {error}") from error
    return FileTokenizer(library, spec)
