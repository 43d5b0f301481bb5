"""Tokens of many documents in a row, cut into samples of one length.

Shape suffixes: B samples, T tokens (``seq_len``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from normstream.data.batches import split_rows, to_device
from normstream.data.shards import token_dtype

IGNORE = -100
"""The target that no loss counts: torch's ``ignore_index``."""


@dataclass(frozen=True)
class Batch:
    """Samples of one optimizer step: int64 tensors of shape (B, T).

    A target is -100 where it belongs to another document than its input. ``documents_BT`` counts the documents within
    a sample; equal numbers may attend to each other, and None lets all do. ``positions_BT`` is None where positions
    count from the start of the sample.

    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> Batch(tokens[:, :-1], tokens[:, 1:]).to("cpu").targets_BT
    tensor([[2, 3]])
    """

    inputs_BT: Int[Tensor, "batch seq_len"]
    targets_BT: Int[Tensor, "batch seq_len"]
    documents_BT: Int[Tensor, "batch seq_len"] | None = None
    positions_BT: Int[Tensor, "batch seq_len"] | None = None

    @property
    def n_targets(self) -> int:
        """How many targets count."""
        return int((self.targets_BT >= 0).sum())

    def split(self, parts: int) -> Iterator["Batch"]:
        """The batch cut into equal micro-batches along its first axis.

        >>> tokens = torch.arange(8).view(4, 2)
        >>> [micro.inputs_BT.tolist() for micro in Batch(tokens, tokens).split(2)]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        """
        return split_rows(self, parts)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return to_device(self, device)


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Documents packed one after another, each closed by end-of-text; sample i is tokens[i*T : (i+1)*T + 1].

    The first T tokens of a sample are inputs and the last T targets, so every token but the first is predicted once,
    and the tail too short for a sample is left out.

    >>> packed = PackedTokens(np.array([5, 6, 9, 7, 9]), seq_len=2, eot=9, n_bytes=3)
    >>> len(packed), packed.sample(1).inputs_BT
    (2, tensor([[9, 7]]))
    """

    tokens: np.ndarray
    """1-D, any integer type, in memory or mapped from a file."""
    seq_len: int
    """T."""
    eot: int
    """The id of end-of-text."""
    n_bytes: int
    """Bytes of text that the tokens stand for; end-of-text stands for none."""
    cross_document_attention: bool = False
    """As in ``DataConfig``."""
    positions_per_document: bool = False
    """As in ``DataConfig``."""

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def tokens_per_sample(self) -> float:
        """T."""
        return self.seq_len

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token, end-of-text counted among the tokens.

        bits per byte = mean loss in nats / (ln 2 * bytes_per_token)
        """
        return self.n_bytes / len(self.tokens)

    def sample(self, index: int) -> Batch:
        """Sample number ``index`` as a batch of one."""
        return self.batch([index])

    def batch(self, samples: Sequence[int] | np.ndarray) -> Batch:
        """The samples with these numbers, in this order.

        Raises IndexError for a number outside [0, len).
        """
        starts = np.asarray(samples, np.int64)
        if starts.size and not (starts.min() >= 0 and starts.max() < len(self)):
            raise IndexError(f"sample numbers must lie in [0, {len(self)}), got {starts.min()} to {starts.max()}")
        window = np.arange(self.seq_len + 1)
        tokens = np.asarray(self.tokens[starts[:, None] * self.seq_len + window]).astype(np.int64)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
        closes = inputs == self.eot
        opens = np.zeros_like(closes)  # True where a document starts, the first of the sample excepted
        opens[:, 1:] = closes[:, :-1]
        documents = positions = None
        if not self.cross_document_attention:
            targets[closes] = IGNORE
            documents = torch.from_numpy(np.cumsum(opens, axis=1))
        if self.positions_per_document:
            at = window[:-1]
            positions = torch.from_numpy(at - np.maximum.accumulate(np.where(opens, at, 0), axis=1))
        return Batch(torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(targets), documents, positions)


def pack(documents: Sequence[np.ndarray], vocab_size: int, eot: int) -> np.ndarray:
    """All documents in one 1-D array of uint16 or uint32, each followed by end-of-text.

    >>> pack([np.array([1, 2]), np.array([3])], vocab_size=10, eot=9).tolist()
    [1, 2, 9, 3, 9]
    """
    tokens = np.full(sum(len(document) + 1 for document in documents), eot, token_dtype(vocab_size))
    start = 0
    for document in documents:
        tokens[start : start + len(document)] = document
        start += len(document) + 1
    return tokens
