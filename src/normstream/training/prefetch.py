"""Preparing batches while an update runs."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from normstream.data import Loader
from normstream.data.batches import pinned


class Prefetcher:
    """The batches of a run's steps in order, of which a thread prepares some before they are asked for.

    The thread does nothing but ask the loader, whose batches depend on the step alone, so the order is the loader's.
    An error while a batch is made is raised where that batch is asked for. Batches for a GPU are put into pinned
    memory, from which they are copied without waiting.

    Args:
        loader: where batches come from.
        steps: the steps whose batches will be asked for, in this order, from 0.
        ahead: how many batches are prepared or ready at a time; with 0 there is no thread.
        pinned: whether the batches are for a GPU.

    >>> import numpy as np
    >>> from normstream.data import PackedTokens
    >>> loader = Loader(PackedTokens(np.arange(41), seq_len=10, eot=99, n_bytes=41), batch_size=2, seed=0)
    >>> prefetcher = Prefetcher(loader, range(3), ahead=2)
    >>> [prefetcher.batch(step).inputs_BT.shape for step in range(3)]
    [torch.Size([2, 10]), torch.Size([2, 10]), torch.Size([2, 10])]
    >>> prefetcher.close()
    """

    def __init__(self, loader: Loader, steps: range, *, ahead: int, pinned: bool = False) -> None:
        self.loader, self.ahead, self.pinned = loader, ahead, pinned
        self._steps: Iterator[int] = iter(steps)
        self._ready: dict[int, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches") if ahead else None

    def batch(self, step: int) -> Any:
        """The batch of the next step; asking for it lets the thread prepare one more."""
        if self._pool is None:
            return self._make(step)
        self._fill()
        future = self._ready.pop(step)
        self._fill()
        return future.result()

    def close(self) -> None:
        """Ends the thread after the batch that it is at."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        assert self._pool is not None
        while len(self._ready) < self.ahead and (step := next(self._steps, None)) is not None:
            self._ready[step] = self._pool.submit(self._make, step)

    def _make(self, step: int) -> Any:
        batch = self.loader.batch(step)
        return pinned(batch) if self.pinned else batch
