"""Doing several runs of a comparison at a time, in processes of their own."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from normstream.lab.runner import run_one
from normstream.tasks import get_task
from normstream.training.config import TrainConfig
from normstream.training.signals import Interrupted, StopSignals

POLL_SECONDS = 0.5
Job = tuple[int, TrainConfig, Path]
Status = dict[str, Any]


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


def side_by_side(runs: Sequence[Job], base: TrainConfig, jobs: int) -> Generator[tuple[int, Status | None], None, None]:
    """Do runs in ``jobs`` processes that share this one's threads evenly; yield a run's number when it starts, with
    None, and when it ends, with its status.

    Raises, when no run is in progress any more:
        Interrupted: after a signal; each run in progress saved its checkpoint and was yielded as interrupted.
        Exception: the first error in a run; the others were stopped as by a signal.
        ChildProcessError: if processes died; their runs were yielded as interrupted, and the others went on.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = list(reversed(runs))
    failure: BaseException | None = None
    dead = 0
    with StopSignals() as stop, _ended_afterwards() as workers:
        workers.extend(Worker(threads, base) for _ in range(min(jobs, len(runs))))
        while True:
            for number, worker in enumerate(workers):
                if failure is not None:
                    worker.process.terminate()
                elif waiting and worker.job is None:
                    workers[number] = worker if worker.process.is_alive() else Worker(threads, base)
                    yield workers[number].start(waiting.pop()), None
            busy = [worker for worker in workers if worker.job is not None]
            if not busy:
                break
            ready = wait([worker.connection for worker in busy], timeout=POLL_SECONDS)
            if stop.received is not None and failure is None:
                failure = AllInterrupted(stop.received)
            for worker in (worker for worker in busy if worker.connection in ready):
                index, answer = worker.answer()
                if isinstance(answer, Exception):
                    failure, answer = failure or answer, {"status": "interrupted"}
                elif answer is None and failure is None:
                    dead += 1
                    answer = {"status": "interrupted", "cause": worker.cause_of_death()}
                yield index, {"status": "interrupted"} if answer is None else answer
    if failure is not None:
        raise failure
    if dead:
        raise ChildProcessError(f"the process of {dead} of the runs died; give the same command and --resume to go on")


class Worker:
    """A process that does one run after another, and ends when this one does."""

    def __init__(self, threads: int, base: TrainConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.job: Job | None = None
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, threads, base))
        with _signals_of_the_terminal_blocked():
            self.process.start()
        other.close()

    def start(self, job: Job) -> int:
        """Hand over a run; return its number."""
        self.job = job
        with suppress(OSError):  # it has just died, which its answer will tell
            self.connection.send(job[1:])
        return job[0]

    def answer(self) -> tuple[int, Status | Exception | None]:
        """Return the number of the run that has ended, with its status or error; None if the process has died."""
        assert self.job is not None
        index, self.job = self.job[0], None
        try:
            return index, self.connection.recv()
        except (EOFError, OSError):
            return index, None

    def cause_of_death(self) -> str:
        """Say what ended the process."""
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with exit status {code}"
        hint = ", perhaps for lack of memory: try fewer jobs" if code == -9 else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"

    def stop(self) -> None:
        """Wait for the process to end; a run in progress saves its checkpoint first."""
        self.connection.close()
        while self.process.is_alive():
            self.process.terminate()
            self.process.join(POLL_SECONDS)


@contextmanager
def _ended_afterwards() -> Iterator[list[Worker]]:
    """A list whose processes have ended afterwards: in order, or after a second Ctrl-C at once."""
    workers: list[Worker] = []
    try:
        yield workers
    except KeyboardInterrupt:
        for worker in workers:
            worker.process.kill()
        raise
    finally:
        for worker in workers:
            worker.stop()


@contextmanager
def _signals_of_the_terminal_blocked() -> Iterator[None]:
    """Ctrl-C and a closed terminal reach all processes; those that start here leave them to the first one."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, threads: int, base: TrainConfig) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        try:
            data = get_task(base.task).load(base.data)
        except Exception as error:
            connection.send(error)
            return
        while True:
            run, folder = connection.recv()
            # The run notes the first SIGTERM and then restores this: no later one cuts its checkpoint short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                answer: Status | Exception = run_one(run, folder, data)
            except Interrupted:
                answer = {"status": "interrupted"}
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            connection.send(answer)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while True:  # a run may not be listening yet
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(POLL_SECONDS)
