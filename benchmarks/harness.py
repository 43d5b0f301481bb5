"""Times pieces of code against each other: in turns, in one process, so that what slows the machine slows all of them.

A *case* is a dict of phases in order, as ``{"forward": ..., "backward": ...}``. Every round runs every case once, in an
order that is shuffled anew; a ratio of two cases is taken round by round, and medians and quartiles come last.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch

Phase = Callable[[], object]
Case = Mapping[str, Phase]
Seconds = dict[str, dict[str, list[float]]]
"""Case, phase, one number a round."""
ClockName = Literal["thread", "wall"]


class Quartiles(NamedTuple):
    """What is said of a row of numbers."""

    q1: float
    median: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.q1:.3f}, {self.q3:.3f}]"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles, interpolated between neighbours; the first and last value are the 0 % and 100 % points.

    >>> quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    Quartiles(q1=2.0, median=3.0, q3=4.0)
    """
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def divided(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round, one number over the other.

    >>> divided([2.0, 3.0], [1.0, 2.0])
    [2.0, 1.5]
    """
    return [a / b for a, b in zip(above, below, strict=True)]


def total(phases: Mapping[str, Sequence[float]]) -> list[float]:
    """Round by round, the sum over phases.

    >>> total({"forward": [1.0, 2.0], "backward": [2.0, 4.0]})
    [3.0, 6.0]
    """
    return [sum(round_) for round_ in zip(*phases.values(), strict=True)]


class Clock(Protocol):
    """Runs phases one after the other and returns the seconds of each."""

    name: str

    def __call__(self, phases: Sequence[Phase]) -> list[float]: ...


class CpuClock:
    """CPU time of this thread (``thread``), which other processes do not disturb, or the time on the wall (``wall``).

    Thread time is for one thread only: what torch's other threads do is not in it.

    >>> clock = CpuClock("wall")
    >>> [seconds > 0 for seconds in clock([lambda: sum(range(1000))])]
    [True]
    """

    def __init__(self, name: ClockName) -> None:
        if name == "thread" and torch.get_num_threads() > 1:
            raise ValueError("thread time counts one thread only; take --threads 1 or --clock wall")
        self.name = name
        self.read = time.thread_time if name == "thread" else time.perf_counter

    def __call__(self, phases: Sequence[Phase]) -> list[float]:
        marks = [self.read()]
        for phase in phases:
            phase()
            marks.append(self.read())
        return [after - before for before, after in pairwise(marks)]


class CudaClock:
    """Time between events on the GPU's stream.

    With ``ahead`` the GPU first waits about that many milliseconds (at 2 GHz), so that the host has queued everything
    before the first event and the time is that of the kernels alone; before that the level-2 cache is overwritten.
    Without it, what the host does too slowly counts too, as in a training step.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self.name = "cuda events, kernels alone" if ahead else "cuda events"
        self.cycles = int(ahead * 2e6)
        self.cache = torch.empty(256 * 2**20 if ahead else 0, dtype=torch.int8, device="cuda")

    def __call__(self, phases: Sequence[Phase]) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]
        torch.cuda.synchronize()
        if self.cycles:
            self.cache.zero_()
            torch.cuda._sleep(self.cycles)
        events[0].record()
        for phase, event in zip(phases, events[1:], strict=True):
            phase()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def interleave(
    cases: Mapping[str, Case],
    clock: Clock,
    *,
    rounds: int,
    warm_up: int = 2,
    least_seconds: float = 0.0,
    seed: int = 0,
    note: Callable[[str], object] = lambda line: None,
) -> Seconds:
    """Runs all cases in turns.

    Args:
        cases: by name.
        clock: what is measured.
        rounds: samples of each case.
        warm_up: calls of each case before the first round; compilation happens there.
        least_seconds: a case that is faster is called several times a round, and the mean counts.
        seed: of the order of the cases in each round.
        note: is told which case is warming up.

    >>> seconds = interleave({"a": {"all": lambda: None}}, CpuClock("wall"), rounds=3)
    >>> len(seconds["a"]["all"])
    3
    """
    repeats = {}
    for name, case in cases.items():
        note(name)
        for _ in range(warm_up):
            once = sum(clock(list(case.values())))
        repeats[name] = max(1, math.ceil(least_seconds / max(once, 1e-9))) if warm_up and least_seconds else 1
    seconds: Seconds = {name: {phase: [] for phase in case} for name, case in cases.items()}
    order, dice = list(cases), random.Random(seed)
    for _ in range(rounds):
        dice.shuffle(order)
        with _no_collection():
            for name in order:
                samples = [clock(list(cases[name].values())) for _ in range(repeats[name])]
                for phase, values in zip(cases[name], zip(*samples, strict=True), strict=True):
                    seconds[name][phase].append(statistics.fmean(values))
    return seconds


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage is collected before a round, never during it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
