"""Labelled texts and pairs of texts as padded sequences of tokens, each with its class.

A sequence is ``eot text eot`` or ``eot text eot pair eot``, eot being the tokenizer's end-of-text: the first one is
where a class is read off, the others close the texts.

Shape suffixes: B samples, T tokens of the longest of them.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tyro.conf import arg

from normstream.checks import check_types
from normstream.data.batches import split_rows, to_device
from normstream.data.documents import held_out
from normstream.data.labelled_files import HF_PREFIX, Columns, Example, read_examples, read_hf_examples
from normstream.data.paraphrases import paraphrases
from normstream.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe
from normstream.names import nearest

GENERATED = "paraphrases"
N_GENERATED = 20_000
FEWEST_TOKENS = 5
"""A sequence with one token of each text."""


@dataclass(frozen=True)
class TextPairConfig:
    """Labelled texts or pairs of texts, and how they become sequences; ``load_pairs`` makes ``PairData`` of it.

    Raises ValueError for a number out of range.

    >>> TextPairConfig(seq_len=64).source
    'paraphrases'
    """

    source: Annotated[str, arg(aliases=("--data",))] = GENERATED
    """paraphrases (20000 generated pairs of sentences that say the same or not), hf:NAME or hf:NAME:CONFIG (extra
    [hf]), or the path of a .tsv, .txt, .csv or .jsonl file whose first line names the columns."""
    validation: str | None = None
    """The held-out examples, as a file of the same kind; None means the data set's validation split, or else a part of
    the source."""
    validation_fraction: float = 0.05
    """The part of the examples that is held out where there is nothing else to evaluate on."""
    text_column: str = "text"
    """The column of the text, or of the first text of a pair."""
    pair_column: str | None = None
    """The column of the second text; None means text_pair if there is such a column."""
    label_column: str = "label"
    """The column of the class."""
    tokenizer: str = "bytes"
    """bytes (256 bytes and end-of-text), bpe:N (byte-level BPE with N tokens, trained on the training split), or the
    path of a tokenizer.json."""
    seq_len: int = 128
    """Most tokens of a sample; the longer one of two texts loses its end first."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.seq_len < FEWEST_TOKENS:
            raise ValueError(f"seq_len must be at least {FEWEST_TOKENS}, got {self.seq_len}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")

    @property
    def columns(self) -> Columns:
        """Which column has what."""
        return Columns(self.text_column, self.pair_column, self.label_column)


@dataclass(frozen=True)
class PairBatch:
    """Padded sequences and their classes.

    >>> tokens, padding = torch.tensor([[9, 1, 9]]), torch.tensor([[False, False, False]])
    >>> PairBatch(tokens, padding, torch.zeros_like(tokens), torch.tensor([1])).n_targets
    1
    """

    tokens_BT: Int[Tensor, "B T"]
    padding_BT: Bool[Tensor, "B T"]
    """True at padding."""
    types_BT: Int[Tensor, "B T"]
    """0 up to the end of the first text, 1 from there on."""
    labels_B: Int[Tensor, " B"]
    """Numbers of the classes."""

    @property
    def n_targets(self) -> int:
        """One for each sample."""
        return len(self.labels_B)

    def split(self, parts: int) -> Iterator["PairBatch"]:
        """The batch cut into equal micro-batches along its first axis."""
        return split_rows(self, parts)

    def to(self, device: torch.device | str) -> "PairBatch":
        """The same batch on another device."""
        return to_device(self, device)


@dataclass(frozen=True, eq=False)
class PairSamples:
    """One split: the sequences, how much of each is the first text with what surrounds it, and the classes.

    >>> samples = PairSamples([np.array([9, 1, 9, 2, 9]), np.array([9, 1, 9])], [3, 3], [0, 1], eot=9)
    >>> samples.batch([0, 1]).padding_BT.sum(1), samples.tokens_per_sample
    (tensor([0, 2]), 4.0)
    """

    sequences: list[np.ndarray]
    """Token ids of each sample, 1-D."""
    n_first: list[int]
    """Tokens of each sample that are of type 0."""
    labels: list[int]
    """Number of each sample's class."""
    eot: int
    """The id of end-of-text, which also fills the padding."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self)

    @property
    def tokens_per_sample(self) -> float:
        """The mean length of the sequences, without padding."""
        return sum(map(len, self.sequences)) / max(1, len(self))

    def batch(self, samples: Sequence[int] | np.ndarray) -> PairBatch:
        """The samples with these numbers, in this order, padded to the longest of them.

        Raises IndexError for a number outside [0, len).
        """
        numbers = [int(number) for number in samples]
        if numbers and not (min(numbers) >= 0 and max(numbers) < len(self)):
            raise IndexError(f"sample numbers must lie in [0, {len(self)}), got {min(numbers)} to {max(numbers)}")
        lengths = np.array([len(self.sequences[number]) for number in numbers])
        places = np.arange(lengths.max(initial=0))
        tokens = np.full((len(numbers), len(places)), self.eot, np.int64)
        for row, number in enumerate(numbers):
            tokens[row, : lengths[row]] = self.sequences[number]
        padding = places >= lengths[:, None]
        of_pair = (places >= np.array([self.n_first[number] for number in numbers])[:, None]) & ~padding
        labels = np.array([self.labels[number] for number in numbers], np.int64)
        return PairBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(padding),
            torch.from_numpy(of_pair.astype(np.int64)),
            torch.from_numpy(labels),
        )


@dataclass(frozen=True, eq=False)
class PairData:
    """Both splits, tokenized, with the names of the classes.

    >>> data = load_pairs(TextPairConfig())
    >>> data.classes, len(data.train) + len(data.validation)
    (('0', '1'), 20000)
    """

    config: TextPairConfig
    """What it was made from."""
    tokenizer: Tokenizer
    """What made the token ids."""
    corpus_hash: str
    """SHA-256 over the examples and the side of the split that each is on."""
    classes: tuple[str, ...]
    """Names of the classes: in the order of numbers if they are whole numbers, else of the alphabet."""
    train: PairSamples
    """The training split."""
    validation: PairSamples
    """The held-out split."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids; the last one is the mask of the masked language model that a run may start from."""
        return self.tokenizer.vocab_size + 1


def load_pairs(config: TextPairConfig) -> PairData:
    """Reads, splits and tokenizes the examples.

    Raises ValueError for a source, column or tokenizer that is not there, a file that is empty or not UTF-8, a missing
    label, a single class, and for a class that only the held-out examples have; ImportError if the source needs an
    extra that is not installed.

    >>> load_pairs(TextPairConfig(source="paraphases"))
    Traceback (most recent call last):
    ValueError: unknown source 'paraphases'; did you mean 'paraphrases'? Known: ...
    """
    size = bpe_size(config.tokenizer)
    tokenizer = None if size else load_tokenizer(config.tokenizer)  # a wrong name is found before a long read
    splits = _read_splits(config)
    classes = _classes(*splits, config)
    tokenizer = tokenizer or train_bpe([text.encode() for example in splits[0] for text in _texts(example)], size)
    train, validation = (_samples(split, classes, tokenizer, config.seq_len) for split in splits)
    return PairData(config, tokenizer, _hash(*splits), classes, train, validation)


def _read_splits(config: TextPairConfig) -> tuple[list[Example], list[Example]]:
    """The examples to train on and those held out."""
    held = None
    if config.source == GENERATED:
        examples = paraphrases(N_GENERATED)
    elif config.source.startswith(HF_PREFIX):
        examples = read_hf_examples(config.source, config.columns, "train")
        held = read_hf_examples(config.source, config.columns, "validation")
        if not examples:
            raise ValueError(f"{config.source} has no training examples; give another data set")
    else:
        _check_source(config.source)
        examples = read_examples(config.source, config.columns)
    if config.validation is not None:
        held = read_examples(config.validation, config.columns)
    if held is not None:
        return examples, held
    keys = ["\n".join(_texts(example)) for example in examples]
    chosen = held_out(keys, config.validation_fraction)
    sides = {False: [], True: []}
    for key, example in zip(keys, examples, strict=True):
        sides[key in chosen].append(example)
    return sides[False], sides[True]


def _check_source(source: str) -> None:
    if "." not in source and "/" not in source:
        raise ValueError(f"unknown source {source!r}; {nearest(source, [GENERATED, 'hf:NAME:CONFIG', 'path/to/file'])}")


def _classes(train: list[Example], validation: list[Example], config: TextPairConfig) -> tuple[str, ...]:
    names = {example.label for example in train}
    if len(names) < 2:
        raise ValueError(
            f"{config.source}: all {len(train)} training examples have label {', '.join(names) or 'none'}; expected "
            "two classes or more: give another file or another label_column"
        )
    if unknown := sorted({example.label for example in validation} - names):
        raise ValueError(
            f"the held-out examples have the label {unknown[0]!r}, which no training example has; "
            f"{nearest(unknown[0], sorted(names))}"
        )
    are_numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int if are_numbers else None))


def _samples(examples: list[Example], classes: tuple[str, ...], tokenizer: Tokenizer, seq_len: int) -> PairSamples:
    texts = [text.encode() for example in examples for text in _texts(example)]
    encoded = iter(tokenizer.encode_documents(texts))
    sequences, n_first = [], []
    for example in examples:
        first, second = next(encoded), None if example.pair is None else next(encoded)
        sequence, length = join_texts(first, second, tokenizer.eot, seq_len)
        sequences.append(sequence)
        n_first.append(length)
    return PairSamples(sequences, n_first, [classes.index(example.label) for example in examples], tokenizer.eot)


def join_texts(first: np.ndarray, second: np.ndarray | None, eot: int, seq_len: int) -> tuple[np.ndarray, int]:
    """``eot first eot`` or ``eot first eot second eot`` in at most ``seq_len`` tokens; and how many are of type 0.

    >>> sequence, n_first = join_texts(np.array([1, 2, 3, 4]), np.array([5]), eot=9, seq_len=6)
    >>> sequence.tolist(), n_first
    ([9, 1, 2, 9, 5, 9], 4)
    """
    if second is None:
        first = first[: seq_len - 2]
        return np.concatenate([[eot], first, [eot]]), len(first) + 2
    room = seq_len - 3
    n_second = min(len(second), max(room - len(first), room // 2))
    first = first[: room - n_second]
    return np.concatenate([[eot], first, [eot], second[:n_second], [eot]]), len(first) + 2


def _texts(example: Example) -> tuple[str, ...]:
    return (example.text,) if example.pair is None else (example.text, example.pair)


def _hash(train: list[Example], validation: list[Example]) -> str:
    digest = hashlib.sha256()
    for side, examples in (("train", train), ("validation", validation)):
        for example in examples:
            line = json.dumps([side, example.label, example.text, example.pair])
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()
