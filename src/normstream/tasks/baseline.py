"""The loss of a model that ignores its input and knows only how frequent each answer is."""

import numpy as np


def token_counts(tokens: np.ndarray, vocab_size: int, chunk: int = 1 << 22) -> np.ndarray:
    """How often each token id occurs, counted in chunks so that a corpus on disk stays there.

    >>> token_counts(np.array([1, 1, 0], dtype=np.uint16), vocab_size=3).tolist()
    [1, 2, 0]
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), chunk):
        counts += np.bincount(tokens[start : start + chunk], minlength=vocab_size)
    return counts


def unigram_loss(train_counts: np.ndarray, targets: np.ndarray) -> float:
    """``-sum over targets of log p(target)`` divided by their number, p from training counts plus one.

    >>> round(unigram_loss(np.array([3, 3]), np.array([0, 1, 1])), 4)
    0.6931
    """
    counts = train_counts.astype(np.float64) + 1
    return float(-np.log(counts / counts.sum())[targets].mean())
