"""From a ``DataConfig`` to packed training and validation tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from normstream.data.config import DataConfig
from normstream.data.documents import Document, hash_documents, held_out, split_documents
from normstream.data.packing import PackedTokens, pack
from normstream.data.shards import SHARD_SUFFIXES, read_shard
from normstream.data.sources import BUILT_IN, HF_PREFIX, read_documents, source_files
from normstream.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe

SCAN_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class Data:
    """A corpus ready for training: its tokenizer, and both splits packed.

    >>> path = getfixture("tmp_path") / "text.txt"
    >>> path.write_text("to be or not to be " * 20)
    380
    >>> data = load_data(DataConfig(source=str(path), seq_len=8))
    >>> len(data.train), len(data.validation), data.vocab_size
    (45, 2, 257)
    """

    config: DataConfig
    """What it was made from."""
    tokenizer: Tokenizer
    """Its encode and decode go with the tokens below."""
    corpus_hash: str
    """SHA-256 over the documents and the side of the split that each is on."""
    train: PackedTokens
    """The training split."""
    validation: PackedTokens
    """The held-out split."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids, end-of-text included."""
        return self.tokenizer.vocab_size


def load_data(config: DataConfig) -> Data:
    """Reads, splits, tokenizes and packs the corpus.

    Raises ValueError if the source or tokenizer is unknown or unreadable, if a shard was made by another tokenizer, or
    if a split is shorter than one sequence of seq_len + 1 tokens; ImportError if the source needs an extra that is not
    installed.

    >>> path = getfixture("tmp_path") / "short.txt"
    >>> path.write_text("short")
    5
    >>> load_data(DataConfig(source=str(path)))
    Traceback (most recent call last):
    ValueError: the corpus is too short: ... 5 training tokens and 2 validation tokens, ... needs 129 of each ...
    """
    size = bpe_size(config.tokenizer)
    tokenizer = None if size else load_tokenizer(config.tokenizer)  # a wrong name is found before a long read
    if shards := _shard_files(config.source):
        if tokenizer is None:
            raise ValueError(f"{config.source} is tokenized already: give its tokenizer, not {config.tokenizer!r}")
        halves = _split_shards(shards, tokenizer, config.validation_fraction)
        train, validation = (_packed(tokens, _count_bytes(tokens, tokenizer), config, tokenizer) for tokens in halves)
        corpus_hash = _hash_tokens(*halves)
    else:
        documents = split_documents(read_documents(config), config.validation_fraction)
        tokenizer = tokenizer or train_bpe([document.data for document in documents[0]], size)
        train, validation = _pack_documents(documents, config, tokenizer)
        corpus_hash = hash_documents(*documents)
    if len(train) == 0 or len(validation) == 0:
        raise ValueError(
            f"the corpus is too short: {config.source} gives {len(train.tokens)} training tokens and "
            f"{len(validation.tokens)} validation tokens, and one sequence needs {config.seq_len + 1} of each "
            "(seq_len + 1): give more text, a smaller seq_len or another validation_fraction"
        )
    return Data(config, tokenizer, corpus_hash, train, validation)


def load_whole(config: DataConfig, tokenizer: Tokenizer) -> PackedTokens:
    """The whole source as one stream, to evaluate a model on; ``config.tokenizer`` and the split are not used.

    Raises the errors of ``load_data``.

    >>> path = getfixture("tmp_path") / "text.txt"
    >>> path.write_text("to be or not to be " * 20)
    380
    >>> len(load_whole(DataConfig(source=str(path)), load_tokenizer("bytes")).tokens)
    381
    """
    if shards := _shard_files(config.source):
        tokens = _join([_read_checked(path, tokenizer) for _, path in shards])
        packed = _packed(tokens, _count_bytes(tokens, tokenizer), config, tokenizer)
    else:
        (packed,) = _pack_documents([read_documents(config)], config, tokenizer)
    if len(packed) == 0:
        raise ValueError(
            f"the text is too short: {config.source} gives {len(packed.tokens)} tokens, and one sequence needs "
            f"{config.seq_len + 1} (seq_len + 1): give more text or a smaller seq_len"
        )
    return packed


def _packed(tokens: np.ndarray, n_bytes: int, config: DataConfig, tokenizer: Tokenizer) -> PackedTokens:
    return PackedTokens(
        tokens,
        config.seq_len,
        tokenizer.eot,
        n_bytes,
        cross_document_attention=config.cross_document_attention,
        positions_per_document=config.positions_per_document,
    )


def _pack_documents(splits: Sequence[list[Document]], config: DataConfig, tokenizer: Tokenizer) -> list[PackedTokens]:
    texts = [[document.data for document in documents] for documents in splits]
    encoded = iter(tokenizer.encode_documents([text for split in texts for text in split]))
    return [
        _packed(
            pack(list(islice(encoded, len(split))), tokenizer.vocab_size, tokenizer.eot),
            sum(map(len, split)),
            config,
            tokenizer,
        )
        for split in texts
    ]


def _shard_files(source: str) -> list[tuple[str, Path]]:
    if source in BUILT_IN or source.startswith(HF_PREFIX):
        return []
    files = source_files(source)
    shards = [(key, path) for key, path in files if path.suffix.lower() in SHARD_SUFFIXES]
    if shards and len(shards) < len(files):
        other = next(key for key, path in files if path.suffix.lower() not in SHARD_SUFFIXES)
        raise ValueError(f"the folder {source} mixes token shards ({shards[0][0]}) with other files ({other})")
    return shards


def _split_shards(
    files: list[tuple[str, Path]], tokenizer: Tokenizer, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Splits several shards by file name; of a single one, the last documents are held out."""
    shards = {key: _read_checked(path, tokenizer) for key, path in files}
    if len(shards) > 1:
        validation = held_out(shards, fraction)
        return (
            _join([tokens for key, tokens in shards.items() if key not in validation]),
            _join([tokens for key, tokens in shards.items() if key in validation]),
        )
    (tokens,) = shards.values()
    cut = int(len(tokens) * (1 - fraction))
    start = max(0, cut - SCAN_TOKENS)
    ends = np.flatnonzero(tokens[start:cut] == tokenizer.eot)
    if ends.size:
        cut = start + int(ends[-1]) + 1
    return tokens[:cut], tokens[cut:]


def _join(shards: list[np.ndarray]) -> np.ndarray:
    return shards[0] if len(shards) == 1 else np.concatenate(shards or [np.empty(0, np.uint16)])


def _read_checked(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    shard = read_shard(path)
    if shard.vocab_size is not None and (shard.vocab_size, shard.eot) != (tokenizer.vocab_size, tokenizer.eot):
        raise ValueError(
            f"{path} was made by another tokenizer: its vocab_size is {shard.vocab_size} and its end-of-text "
            f"{shard.eot}, those of tokenizer {tokenizer.name!r} are {tokenizer.vocab_size} and {tokenizer.eot}"
        )
    for chunk in _chunks(shard.tokens):
        if chunk.min() < 0 or chunk.max() >= tokenizer.vocab_size:
            raise ValueError(
                f"{path} holds token ids from {chunk.min()} to {chunk.max()}, but tokenizer {tokenizer.name!r} has "
                f"vocab_size {tokenizer.vocab_size}: give the tokenizer.json that made it"
            )
    return shard.tokens


def _count_bytes(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    lengths = tokenizer.byte_lengths()
    return int(sum(lengths[chunk].sum() for chunk in _chunks(tokens)))


def _hash_tokens(train: np.ndarray, validation: np.ndarray) -> str:
    digest = hashlib.sha256()
    for side, tokens in (("train", train), ("validation", validation)):
        digest.update(f"{side} {len(tokens)} tokens\n".encode())
        for chunk in _chunks(tokens):
            digest.update(chunk.astype("<u4").data)
    return digest.hexdigest()


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of a mapped file, so that it is never in memory as a whole."""
    return (tokens[start : start + SCAN_TOKENS] for start in range(0, len(tokens), SCAN_TOKENS))
