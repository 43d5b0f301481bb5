"""The order in which samples are seen: a pure function of the seed and the global sample number."""

import functools
from typing import Any

import numpy as np

from normstream.data.batches import Samples


class Loader:
    """Batches of shuffled samples, any of which can be asked for at any time.

    The run's global order is one permutation of all samples per epoch, one epoch after another; a batch may cross from
    one into the next. Step s takes ``world_size * batch_size`` consecutive samples of it and rank r the r-th
    ``batch_size`` of these, so the order does not depend on the number of ranks, and a run resumes at any step.

    Raises ValueError if there is no sample, batch_size is not positive or seed is negative.

    >>> from normstream.data import PackedTokens
    >>> packed = PackedTokens(np.arange(41), seq_len=10, eot=99, n_bytes=41)
    >>> loader = Loader(packed, batch_size=2, seed=0)
    >>> sorted(loader.samples(step=0).tolist() + loader.samples(step=1).tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, data: Samples, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"the seed of the data order must not be negative, got {seed}")
        if len(data) == 0:
            raise ValueError(f"no sample to load: the data, of size {data.size}, holds less than one; give more of it")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        # A batch at the border of two epochs needs both.
        self._order = functools.lru_cache(maxsize=2)(functools.partial(epoch_order, len(data), seed))

    def samples(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The sample numbers of one rank's batch at one step (both from 0), int64, shape (batch_size,)."""
        if step < 0 or not 0 <= rank < world_size:
            raise ValueError(f"expected step >= 0 and 0 <= rank < world_size, got {step}, {rank}, {world_size}")
        first = (step * world_size + rank) * self.batch_size
        epochs, places = np.divmod(np.arange(first, first + self.batch_size), len(self.data))
        if epochs[0] == epochs[-1]:
            return self._order(int(epochs[0]))[places]
        return np.array([self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Any:
        """The batch of one rank at one step, both counted from 0."""
        return self.data.batch(self.samples(step, rank, world_size))


def epoch_order(n_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n_samples), int64: the ranks of the raw output of Philox keyed by (seed, epoch).

    numpy promises that raw output for all its versions, as it does not for ``Generator.permutation``.

    >>> sorted(epoch_order(4, seed=0, epoch=7).tolist())
    [0, 1, 2, 3]
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(n_samples)
    return np.argsort(raw, kind="stable")
