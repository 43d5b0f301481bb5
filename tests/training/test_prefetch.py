import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normstream.data import Batch, Data, Loader
from normstream.training import Interrupted, TrainConfig, list_checkpoints, read_metrics, train
from normstream.training.prefetch import Prefetcher, pinned

Make = Callable[..., TrainConfig]


class Slow(Loader):
    """Notes what is asked for; a batch is made when it is let through."""

    def __init__(self, data: Data) -> None:
        super().__init__(data.train, 4, seed=0)
        self.asked: list[int] = []
        self.through = threading.Semaphore(0)

    def batch(self, step: int, *rest: int) -> Batch:
        self.asked.append(step)
        assert self.through.acquire(timeout=30)
        return super().batch(step, *rest)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    assert not threads()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 5])
def test_the_order_is_the_loaders(ahead: int, first: int, data: Data):
    loader = Loader(data.train, 4, seed=0)
    prefetcher = Prefetcher(loader, range(first, 9), ahead=ahead)
    for step in range(first, 9):
        batch, expected = prefetcher.batch(step), loader.batch(step)
        assert torch.equal(batch.inputs_BT, expected.inputs_BT)
        assert torch.equal(batch.targets_BT, expected.targets_BT)
    prefetcher.close()


def test_so_many_are_prepared_and_no_more(data: Data):
    loader = Slow(data)
    prefetcher = Prefetcher(loader, range(9), ahead=2)
    loader.through.release(9)
    prefetcher.batch(0)
    until(lambda: len(loader.asked) == 3)
    time.sleep(0.05)
    assert loader.asked == [0, 1, 2]
    prefetcher.batch(1)
    until(lambda: len(loader.asked) == 4)
    prefetcher.close()


def test_one_is_made_while_another_is_used(data: Data):
    loader = Slow(data)
    prefetcher = Prefetcher(loader, range(9), ahead=1)
    loader.through.release()
    prefetcher.batch(0)
    until(lambda: loader.asked == [0, 1])  # nobody has asked for it yet
    loader.through.release(2)
    prefetcher.batch(1)
    prefetcher.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def broken(loader: Loader, step: int, *rest: int) -> Batch:
    if step == 7:
        raise OSError(5, "Input/output error", "shard_0.npy")
    return loader.data.batch(loader.samples(step))


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_comes_where_its_batch_is_needed(
    prefetch: int, config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Loader, "batch", broken)
    with pytest.raises(OSError, match="Input/output error"):
        train(config(prefetch=prefetch), tmp_path / "run", data=data)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == list(range(1, 8))
    monkeypatch.undo()
    assert train(config(prefetch=prefetch), tmp_path / "run", data=data, resume=True).steps == 12


def test_runs_do_not_depend_on_it(config: Make, data: Data, tmp_path: Path):
    losses = []
    for prefetch in (0, 1, 5):
        train(config(prefetch=prefetch, dropout=0.1), tmp_path / str(prefetch), data=data)
        rows = read_metrics(tmp_path / str(prefetch) / "metrics.jsonl", "train")
        losses.append([row["loss"] for row in rows])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_thread_ends_with_the_run(error: type[BaseException], config: Make, data: Data, tmp_path: Path):
    def on_row(row: dict[str, Any]) -> None:
        assert threads() == ["batches_0"]
        if row["step"] == 3:
            raise error

    with pytest.raises(error):
        train(config(), tmp_path / "run", data=data, on_row=on_row)


def test_a_signal_while_a_batch_is_waited_for(
    config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def slow(loader: Loader, step: int, *rest: int) -> Batch:
        if step == 3:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(0.3)
        return loader.data.batch(loader.samples(step))

    monkeypatch.setattr(Loader, "batch", slow)
    with pytest.raises(Interrupted) as stopped:
        train(config(prefetch=1), tmp_path / "run", data=data)
    assert stopped.value.step in (3, 4)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        f"step_{stopped.value.step:08d}"
    ]


def test_batches_for_a_gpu_are_pinned(data: Data, monkeypatch: pytest.MonkeyPatch):
    copies: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: copies.append(self) or self.clone())
    batch = Loader(data.train, 4, seed=0).batch(0)
    copy = pinned(batch)
    assert batch.documents_BT is not None
    assert [id(tensor) for tensor in copies] == [id(batch.inputs_BT), id(batch.targets_BT), id(batch.documents_BT)]
    assert torch.equal(copy.inputs_BT, batch.inputs_BT)
    assert copy.positions_BT is None
