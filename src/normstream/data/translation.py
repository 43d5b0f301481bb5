"""Pairs of texts as training samples of translation.

Every text ends with end-of-text, the decoder starts with it too (as fairseq's starts with ``</s>``), and it fills what
padding covers: so begin, end and padding are one token, which every tokenizer has.

Shape suffixes: B pairs, S source positions, T target positions.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tyro.conf import arg

from normstream.checks import check_types
from normstream.data.batches import split_rows, to_device
from normstream.data.documents import Document, hash_documents, held_out
from normstream.data.libreoffice_help import help_pairs
from normstream.data.numbers_de import number_pairs
from normstream.data.packing import IGNORE
from normstream.data.parallel_texts import Texts, read_parallel_texts
from normstream.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe

N_NUMBERS = 20_000
"""Pairs of the source numbers, unless ``n_pairs`` says otherwise."""


@dataclass(frozen=True)
class DecodingConfig:
    """How translations are searched for that are compared with the references.

    Raises ValueError for a value out of range.

    >>> DecodingConfig().beam_size
    4
    """

    beam_size: int = 4
    """Hypotheses kept at a time; 1 takes the likeliest token each time."""
    length_penalty: float = 0.6
    """The a of ((5 + n) / 6)^a, which the log-probability of n tokens is divided by (arXiv 1609.08144)."""
    n_pairs: int = 500
    """Validation pairs to translate after the last step, spread evenly; all if there are fewer."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("beam_size", "n_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"decoding.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.length_penalty < float("inf"):
            raise ValueError(f"decoding.length_penalty must be a number of at least 0, got {self.length_penalty}")


@dataclass(frozen=True)
class TranslationConfig:
    """The pairs, their tokenizer and the split; ``load_translation`` makes a ``TranslationData`` of it.

    Raises ValueError for a value out of range.

    >>> TranslationConfig(direction="de-en").languages
    ('de', 'en')
    """

    source: Annotated[str, arg(aliases=("--data",))] = "numbers"
    """numbers (English and German number words, generated; extra [translation]), libreoffice (its help in English and
    German, Debian packages), hf:NAME or hf:NAME:CONFIG (extra [hf]), or the path of a .tsv, a .jsonl, or what two files
    PATH.en and PATH.de start with."""
    direction: str = "en-de"
    """Codes of source and target language; files and data sets name their columns so."""
    tokenizer: str = "bpe:512"
    """bytes, bpe:N (byte-level BPE with N tokens, trained on both languages of the training split), or the path of a
    tokenizer.json; both languages share it."""
    max_len: int = 64
    """Most tokens of a text, end-of-text included; longer pairs are left out, with a warning."""
    n_pairs: int | None = None
    """Pairs to generate, or to read at most; None means 20,000 or all."""
    validation_fraction: float = 0.05
    """The part of the pairs that is held out, chosen by the source text."""
    seed: int = 0
    """Of generated pairs."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    """How validation pairs are translated after training."""

    def __post_init__(self) -> None:
        check_types(self)
        codes = self.direction.split("-")
        if len(set(codes)) != 2 or not all(re.fullmatch(r"\w+", code) for code in codes) or len(codes) != 2:
            raise ValueError(f"direction must be two codes of languages such as en-de, got {self.direction!r}")
        if self.source in ("numbers", "libreoffice") and set(codes) != {"en", "de"}:
            raise ValueError(f"source {self.source} has direction en-de or de-en, got {self.direction!r}")
        if self.max_len < 2:
            raise ValueError(f"max_len must be at least 2, a token and end-of-text, got {self.max_len}")
        if self.n_pairs is not None and self.n_pairs < 2:
            raise ValueError(f"n_pairs must be at least 2, one for each split, or None, got {self.n_pairs}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def languages(self) -> Texts:
        """The codes of source and target."""
        source, target = self.direction.split("-")
        return source, target


@dataclass(frozen=True)
class TranslationBatch:
    """Pairs of one optimizer step, filled up to the longest of them.

    >>> batch = PairedTokens([Pair("a", "b", np.array([1]), np.array([2, 3]))], eot=9).batch([0])
    >>> batch.source_BS, batch.inputs_BT, batch.targets_BT
    (tensor([[1, 9]]), tensor([[9, 2, 3]]), tensor([[2, 3, 9]]))
    """

    source_BS: Int[Tensor, "batch source"]
    """Source tokens and end-of-text."""
    inputs_BT: Int[Tensor, "batch target"]
    """Begin and the target's tokens."""
    targets_BT: Int[Tensor, "batch target"]
    """The target's tokens and end-of-text; -100 at padding."""
    padding_BS: Bool[Tensor, "batch source"]
    """True where the source is filled up."""

    @property
    def n_targets(self) -> int:
        """How many targets count."""
        return int((self.targets_BT >= 0).sum())

    def split(self, parts: int) -> Iterator["TranslationBatch"]:
        """The batch cut into equal micro-batches along its first axis."""
        return split_rows(self, parts)

    def to(self, device: torch.device | str) -> "TranslationBatch":
        """The same batch on another device."""
        return to_device(self, device)


@dataclass(frozen=True, eq=False)
class Pair:
    """A source and its translation, and the tokens of both without end-of-text.

    >>> Pair("one", "eins", np.array([1]), np.array([2])).target
    'eins'
    """

    source: str
    target: str
    source_tokens: np.ndarray
    target_tokens: np.ndarray


class PairedTokens:
    """One split of pairs.

    Args:
        pairs: in the order of their numbers.
        eot: the id of end-of-text.

    >>> pairs = PairedTokens([Pair("one", "eins", np.array([1]), np.array([2, 3]))], eot=9)
    >>> pairs.size, pairs.tokens_per_sample
    (1, 5.0)
    """

    def __init__(self, pairs: Sequence[Pair], eot: int) -> None:
        self.pairs, self.eot = pairs, eot

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def size(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of source and target tokens of a pair, both end-of-texts included."""
        total = sum(len(pair.source_tokens) + len(pair.target_tokens) + 2 for pair in self.pairs)
        return total / max(1, len(self.pairs))

    def target_tokens(self) -> np.ndarray:
        """All target tokens in a row, each target's end-of-text included; int64."""
        return np.concatenate([np.append(pair.target_tokens, self.eot) for pair in self.pairs]).astype(np.int64)

    def batch(self, samples: Sequence[int] | np.ndarray) -> TranslationBatch:
        """The pairs with these numbers, in this order.

        Raises IndexError for a number outside [0, len).
        """
        numbers = np.asarray(samples, np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"sample numbers must lie in [0, {len(self)}), got {numbers.min()} to {numbers.max()}")
        pairs = [self.pairs[number] for number in numbers]
        source, padding = pad_rows([pair.source_tokens for pair in pairs], self.eot)
        targets, target_padding = pad_rows([pair.target_tokens for pair in pairs], self.eot)
        inputs = targets.roll(1, dims=1)
        inputs[:, 0] = self.eot
        return TranslationBatch(source, inputs, targets.masked_fill(target_padding, IGNORE), padding)


def pad_rows(rows: Sequence[np.ndarray], eot: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, each with end-of-text behind it and filled up with it, and True where it is filled up.

    >>> pad_rows([np.array([1, 2]), np.array([3])], eot=9)
    (tensor([[1, 2, 9],
             [3, 9, 9]]), tensor([[False, False, False],
             [False, False,  True]]))
    """
    lengths = torch.tensor([len(row) + 1 for row in rows], dtype=torch.int64)
    width = int(lengths.max()) if rows else 0
    tokens = torch.full((len(rows), width), eot, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.from_numpy(np.asarray(row, np.int64))
    return tokens, torch.arange(width) >= lengths[:, None]


@dataclass(frozen=True, eq=False)
class TranslationData:
    """Both splits of a set of pairs, and their tokenizer.

    >>> path = getfixture("tmp_path") / "pairs.tsv"
    >>> _ = path.write_text("one\\teins\\ntwo\\tzwei\\nthree\\tdrei\\n", encoding="utf-8")
    >>> data = load_translation(TranslationConfig(source=str(path), tokenizer="bytes", validation_fraction=0.3))
    >>> data.train.size + data.validation.size, data.vocab_size
    (3, 257)
    """

    config: TranslationConfig
    """What it was made from."""
    tokenizer: Tokenizer
    """Of both languages."""
    corpus_hash: str
    """SHA-256 over the pairs and the side of the split that each is on; the tokenizer plays no part."""
    train: PairedTokens
    """The training split."""
    validation: PairedTokens
    """The held-out split."""
    n_too_long: int
    """Pairs left out because a text has more than ``max_len`` tokens."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids, end-of-text included."""
        return self.tokenizer.vocab_size


def load_translation(config: TranslationConfig) -> TranslationData:
    """Reads or generates the pairs, splits them by source text and tokenizes them.

    White space is collapsed, and pairs with an empty text are left out. A pair is held out by the hash of its source
    text, so that no source is on both sides (see ``normstream.data.documents``).

    Raises ValueError if the source is unknown, unreadable or not installed, or if a split is empty; ImportError for a
    missing extra. Warns if pairs are left out as too long.
    """
    size = bpe_size(config.tokenizer)
    tokenizer = None if size else load_tokenizer(config.tokenizer)  # a wrong name is found before a long read
    texts = [pair for pair in map(_collapsed, islice(_read(config), config.n_pairs)) if all(pair)]
    validation = held_out((source for source, _ in texts), config.validation_fraction) if texts else set()
    splits = [[pair for pair in texts if (pair[0] in validation) == side] for side in (False, True)]
    tokenizer = tokenizer or train_bpe([text.encode() for pair in splits[0] for text in pair], size)
    whole = [_tokenized(split, tokenizer) for split in splits]
    kept = [[pair for pair in split if _longest(pair) < config.max_len] for split in whole]
    n_too_long = len(texts) - sum(map(len, kept))
    if not all(kept):
        raise ValueError(
            f"too few pairs: {config.source} has {len(texts)}, of which {n_too_long} are longer than max_len "
            f"{config.max_len}, and {len(kept[0])} are left for training and {len(kept[1])} for validation; give more "
            "of them, a larger max_len or another validation_fraction"
        )
    if n_too_long:
        warnings.warn(
            f"{n_too_long} of {len(texts)} pairs are left out: a text has more than {config.max_len} tokens (max_len)",
            stacklevel=2,
        )
    documents = ([Document(source, target.encode()) for source, target in split] for split in splits)
    train, held = (PairedTokens(split, tokenizer.eot) for split in kept)
    return TranslationData(config, tokenizer, hash_documents(*documents), train, held, n_too_long)


def _read(config: TranslationConfig) -> Iterator[Texts]:
    if config.source not in ("numbers", "libreoffice"):
        return iter(read_parallel_texts(config.source, config.languages))
    if config.source == "numbers":
        pairs = number_pairs(N_NUMBERS if config.n_pairs is None else config.n_pairs, config.seed)
    else:
        pairs = help_pairs()
    return iter(pairs if config.direction == "en-de" else [(german, english) for english, german in pairs])


def _collapsed(pair: Texts) -> Texts:
    source, target = (" ".join(text.split()) for text in pair)
    return source, target


def _tokenized(split: Sequence[Texts], tokenizer: Tokenizer) -> list[Pair]:
    sources, targets = (tokenizer.encode_documents([pair[side].encode() for pair in split]) for side in (0, 1))
    return [Pair(*texts, *tokens) for texts, *tokens in zip(split, sources, targets, strict=True)]


def _longest(pair: Pair) -> int:
    return max(len(pair.source_tokens), len(pair.target_tokens))
