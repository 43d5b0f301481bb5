"""OpenMP's threads that wait for each other, on a machine that others use too.

After its part of an operation a thread of GNU's OpenMP spins for some milliseconds, because the next operation mostly
comes sooner. Where other processes are at work on the same cores that is fatal: the thread that is waited for gets no
core while another one spins on it, and a step takes many times as long. Threads that fall asleep at once are then far
better; on a machine of one's own they are far worse, if operations are small.

libgomp decides by itself: it spins 300,000 times, but only 100 times while there are more OpenMP threads than
processors (its manual, GOMP_SPINCOUNT). A second team of threads that does nothing makes it so while it is there.
"""

import os
import sys
import threading

import torch

MOSTLY_RUNNING = 0.8
"""Part of their time in which the threads of a process that is alone have a processor: spinning counts."""
BETTER = 0.9
"""A change stays if updates take less than this part of the time that they took before."""
WARM_UPDATES, WINDOW_UPDATES, WINDOW_SECONDS = 3, 2, 0.5
"""Updates that are left out at first, and the least that is measured before something is decided."""
PATIENCE_SECONDS, PATIENCE_WINDOWS = 30.0, 20.0
"""How long a decision holds at least, in seconds and in measurements."""


class SpinControl:
    """Lets OpenMP's threads sleep instead of spin as long as updates are faster so; results do not depend on it.

    Where threads lack processors it lets them sleep, and keeps that if the next updates are faster. From time to time
    it tries spinning again.

    Args:
        threads: threads that work on an update; with 1 there is nothing to do, see ``spinning_threads``.

    >>> control = SpinControl(threads=2)
    >>> control.note(wall=0.1, cpu=0.2)
    >>> control.sleeps
    False
    >>> control.close()
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.team: IdleTeam | None = None
        self._updates, self._wall, self._cpu = -WARM_UPDATES, 0.0, 0.0
        self._before: float | None = None
        self._patience = 0.0

    @property
    def sleeps(self) -> bool:
        """Whether threads sleep now."""
        return self.team is not None

    def note(self, wall: float, cpu: float) -> None:
        """Takes the seconds of an update, of the clock and of all threads together."""
        self._updates += 1
        if self.threads == 1 or self._updates <= 0:
            return
        self._wall, self._cpu = self._wall + wall, self._cpu + cpu
        if self._updates >= WINDOW_UPDATES and self._wall >= WINDOW_SECONDS:
            self._decide(self._wall / self._updates, self._cpu / (self._wall * self.threads))
            self._updates, self._wall, self._cpu = 0, 0.0, 0.0

    def close(self) -> None:
        """Lets threads spin again."""
        if self.sleeps:
            self._switch()

    def _decide(self, seconds: float, running: float) -> None:
        """Goes on with what has just been tried or goes back, or tries the other way."""
        if self._before is not None:
            if seconds > BETTER * self._before:
                self._switch()
            self._before, self._patience = None, max(PATIENCE_SECONDS, PATIENCE_WINDOWS * self._wall)
        elif self._patience > 0:
            self._patience -= self._wall
        elif self.sleeps or running < MOSTLY_RUNNING:
            self._before = seconds
            self._switch()

    def _switch(self) -> None:
        if self.team is None:
            self.team = IdleTeam()
        else:
            self.team.close()
            self.team = None


class IdleTeam:
    """A thread that has OpenMP threads of its own and does nothing with them.

    >>> IdleTeam().close()
    """

    def __init__(self) -> None:
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="idle OpenMP team", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _hold(self) -> None:
        try:
            torch.ones(2**20).add_(1)  # so large that it is shared out
        finally:
            self._ready.set()
        self._end.wait()

    def close(self) -> None:
        """Ends the thread, and with it its team."""
        self._end.set()
        self._thread.join()


def spinning_threads(device: torch.device) -> int:
    """The threads that ``SpinControl`` is to look after: torch's, but 1 where it has no effect or the user decides.

    >>> spinning_threads(torch.device("cuda"))
    1
    """
    decided = os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT")
    gnu = sys.platform == "linux" and torch.backends.openmp.is_available()
    threads = torch.get_num_threads()
    if not gnu or device.type != "cpu" or decided:
        return 1
    with_idle_team = 2 * threads - 1  # both teams have the main thread's place once
    return threads if with_idle_team > len(os.sched_getaffinity(0)) else 1
