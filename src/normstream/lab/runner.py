"""Doing the runs of a comparison: one after another in this process, or several at a time in processes of their own."""

import gc
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from normstream.data import Data, DataConfig, load_data
from normstream.training.config import TrainConfig
from normstream.training.loop import OnRow, train
from normstream.training.signals import Interrupted, StopSignals

OUT_OF_MEMORY = (
    "out of memory: lower batch_size, data.seq_len, model.dim or model.n_layers, "
    "raise grad_accumulation (the update stays the same), or set activation_checkpointing"
)
POLL_SECONDS = 0.5


class AllInterrupted(Interrupted):
    """Raised after a signal has stopped every run that was in progress.

    >>> from signal import SIGTERM
    >>> str(AllInterrupted(SIGTERM))
    'stopped by SIGTERM; every run in progress saved a checkpoint'
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, 0, Path())

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}; every run in progress saved a checkpoint"


def run_one(config: TrainConfig, folder: Path, data: Data, on_row: OnRow | None = None) -> dict[str, Any]:
    """Start a run or go on with it; return what its folder cannot say."""
    try:
        # An interrupted run goes on bit for bit, a folder that does not exist yet starts one.
        train(config, folder, resume=True, data=data, on_row=on_row)
        return {}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"status": "out_of_memory", "cause": OUT_OF_MEMORY}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on the CPU or an accelerator.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    message = str(error)
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in message or "out of memory" in message


def side_by_side(
    runs: Sequence[tuple[int, TrainConfig, Path]], data: DataConfig, jobs: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Do runs in ``jobs`` processes that share this one's threads evenly; yield each run's number and status.

    A signal that stops this process stops the others too: each saves its checkpoint, their runs are yielded as
    interrupted, and then ``Interrupted`` is raised. Any other error in a worker process is raised here.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    waiting = iter(runs)
    futures: dict[Future[dict[str, Any]], int] = {}
    with StopSignals() as stop, ProcessPoolExecutor(jobs, context, _prepare, (threads, data)) as pool:
        stopped = False
        while True:
            for index, config, folder in itertools.islice(waiting, 0 if stopped else jobs - len(futures)):
                futures[pool.submit(_work, config, folder)] = index
            if not futures:
                break
            done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            if stop.received is not None and not stopped:
                stopped = True
                for worker in multiprocessing.active_children():
                    worker.terminate()
            for future in done:
                yield futures.pop(future), future.result()
        if stop.received is not None:
            raise AllInterrupted(stop.received)


_data: Data | None = None


def _prepare(threads: int, config: DataConfig) -> None:
    global _data
    torch.set_num_threads(threads)
    _data = load_data(config)


def _work(config: TrainConfig, folder: Path) -> dict[str, Any]:
    assert _data is not None
    try:
        return run_one(config, folder, _data)
    except Interrupted:
        return {"status": "interrupted"}
