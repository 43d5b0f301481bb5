"""Stopping in order: SIGTERM, Ctrl-C and a closed terminal let the running update finish, then a checkpoint is saved.

A process that is stopped this way exits with 128 + the signal's number: 143 after SIGTERM, 130 after Ctrl-C, 129 after
SIGHUP, which Windows lacks and nohup switches off. A second Ctrl-C stops at once, without a checkpoint; a second
SIGHUP, which a closing shell may well send, changes nothing.
"""

import os
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
        self._terminals: list[int] = []

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
            for number in _signals():
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if signal.Signals(number).name == "SIGHUP":
            self._leave_closed_terminals()
        else:
            self._restore()

    def _leave_closed_terminals(self) -> None:
        """Sends what would be written to a terminal that is gone to nowhere: the error would hide the exit status."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


def _signals() -> list[signal.Signals]:
    found = [signal.SIGTERM, signal.SIGINT]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
