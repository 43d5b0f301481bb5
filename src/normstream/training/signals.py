"""Stopping in order: SIGTERM, Ctrl-C and a closed terminal let the running update finish, then a checkpoint is saved.

A process that is stopped this way exits with 128 + the signal's number: 143 after SIGTERM, 130 after Ctrl-C, 129 after
SIGHUP, which Windows lacks and nohup switches off. A second Ctrl-C stops at once, without a checkpoint.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(SystemExit):
    """Raised by ``train`` after it has saved a checkpoint because of a signal; uncaught, it ends the process with
    status 128 + the signal's number.

    >>> Interrupted(signal.SIGTERM, step=7, checkpoint=Path("checkpoints/step_00000007")).code
    143
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        super().__init__(128 + number)
        self.signal, self.step, self.checkpoint = signal.Signals(number), step, checkpoint

    def __str__(self) -> str:
        return f"stopped by {self.signal.name} after step {self.step}; saved {self.checkpoint}"


class StopSignals:
    """While entered, notes SIGTERM, SIGINT and SIGHUP in ``received`` instead of dying; only the main thread can.

    >>> with StopSignals() as stop:
    ...     stop.received is None
    True
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


def _signals() -> list[signal.Signals]:
    found = [signal.SIGTERM, signal.SIGINT]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
