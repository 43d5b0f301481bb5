"""Showing a comparison while it runs: a table that redraws itself, or plain lines where there is no terminal."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from normstream.lab.scores import score
from normstream.lab.style import duration, label, number, rate, short
from normstream.tasks import Metric
from normstream.training.run_folder import RunResult
from normstream.training.spikes import SpikeCounter

STYLES = {"finished": "green", "running": "bold", "pending": "dim", "interrupted": "yellow", "out_of_memory": "red"}


@dataclass
class RunState:
    """What is known about one run while the comparison goes on."""

    placement: str
    lr: float
    seed: int
    steps: int
    status: str = "pending"
    step: int = 0
    loss: float | None = None
    best: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    metric: Metric | None = None  # the task's first one
    score: float | None = None
    spikes: int = 0
    outcome: str = ""
    seconds_per_step: float | None = None
    counter: SpikeCounter = field(default_factory=SpikeCounter)
    began: tuple[float, int] | None = None  # clock and step at the first row since the start or resume

    @property
    def name(self) -> str:
        return f"{label(self.placement)} lr {rate(self.lr)} seed {self.seed}"

    def take(self, row: dict[str, Any], now: float) -> None:
        """Take in one row of metrics."""
        if row["kind"] == "train":
            self.step, self.loss, self.grad_norm = row["step"], row["loss"], row["grad_norm"]
            self.tokens_per_second = row["tokens_per_second"]
            if row["loss"] is not None:
                self.spikes += self.counter.update(row["loss"])
            if self.began is None:
                self.began = (now, self.step)
            elif self.step > self.began[1]:
                self.seconds_per_step = (now - self.began[0]) / (self.step - self.began[1])
        elif row["kind"] == "eval" and row["loss"] is not None:
            self.best = row["loss"] if self.best is None else min(self.best, row["loss"])
            self.measured(row)
        elif row["kind"] == "event" and row["event"] == "diverged":
            self.outcome = "diverged"

    def measured(self, metrics: dict[str, Any]) -> None:
        """Take the first metric, if it is among these."""
        if self.metric is not None and metrics.get(self.metric.name) is not None:
            self.score = metrics[self.metric.name]

    def said_score(self) -> str:
        """The first metric in words; empty if there is none, or it is not known yet."""
        return "" if self.metric is None or self.score is None else f"{self.metric.title} {score(self.score)}"

    def close(self, entry: dict[str, Any]) -> None:
        """Take over what the summary says about the run."""
        self.status = entry["status"]
        if self.status == "finished":
            self.step, self.loss, self.best = entry["steps"], entry["train_loss"], entry["best_val_loss"]
            self.spikes, self.tokens_per_second = entry["spikes"], entry["tokens_per_second"]
            self.grad_norm = entry["curve"]["grad_norm"][-1]
            self.measured(entry["metrics"])
            self.outcome = "diverged" if entry["diverged"] else "collapsed" if entry["collapsed"] else ""
            self.seconds_per_step = entry["seconds"] / max(1, entry["steps"])


def remaining(states: Sequence[RunState], state: RunState) -> float | None:
    """Estimate the seconds that a run still needs, from its own pace or that of the runs most like it."""
    if state.status in ("finished", "out_of_memory"):
        return 0.0
    own = [state.seconds_per_step] if state.seconds_per_step else []
    alike = [s.seconds_per_step for s in states if s.placement == state.placement and s.seconds_per_step]
    paces = own or alike or [s.seconds_per_step for s in states if s.seconds_per_step]
    return (state.steps - state.step) * sum(paces) / len(paces) if paces else None


def remaining_in_all(states: Sequence[RunState], jobs: int = 1) -> float | None:
    """Estimate the seconds until the last run has finished, so many at a time; None while nothing is known."""
    parts = [remaining(states, state) for state in states]
    known = [part for part in parts if part is not None]
    return sum(known) / jobs if len(known) == len(parts) else None


class PlainLines:
    """A line when a run starts, at each evaluation and when it ends.

    >>> lines = PlainLines([RunState("pre", 0.01, 0, steps=2)], print=print)
    >>> with lines:
    ...     lines.start(0)
    [1/1] Pre-Norm lr 0.01 seed 0: starts, 2 steps
    """

    def __init__(
        self,
        states: Sequence[RunState],
        print: Callable[[str], Any],
        clock: Callable[[], float] = time.perf_counter,
        jobs: int = 1,
    ) -> None:
        self.states, self.print, self.clock, self.jobs = states, print, clock, jobs
        self.current = 0

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for state in self.states:
            if error is not None and state.status == "running":
                state.status = "interrupted"

    def say(self, text: str) -> None:
        """Print a line about the current run."""
        self.print(f"[{self.current + 1}/{len(self.states)}] {self.states[self.current].name}: {text}")

    def start(self, index: int) -> None:
        """Say that a run starts."""
        self.current = index
        self.states[index].status = "running"
        self.say(f"starts, {self.states[index].steps} steps")

    def row(self, row: dict[str, Any]) -> None:
        """Take in one row of metrics; the first one of a run that was not started before starts it."""
        state = self.states[self.current]
        if state.status == "pending":
            self.start(self.current)
        state.take(row, self.clock())
        if row["kind"] == "eval":
            in_all = duration(remaining_in_all(self.states, self.jobs))
            words = [
                f"step {state.step}/{state.steps}, loss {number(state.loss)}, validation {number(row['loss'])}",
                state.said_score(),
                f"gradient norm {short(state.grad_norm)}, {short(state.tokens_per_second)} tokens/s",
                f"left {duration(remaining(self.states, state))}, in all {in_all}",
            ]
            self.say(", ".join(filter(None, words)))

    def end(self, entry: dict[str, Any], index: int) -> None:
        """Say how a run ended."""
        self.current = index
        state = self.states[index]
        state.close(entry)
        best = f"best validation loss {number(state.best)}"
        words = [state.status.replace("_", " "), state.outcome, best, state.said_score()]
        if self.jobs > 1:
            words.append(f"left in all {duration(remaining_in_all(self.states, self.jobs))}")
        self.say(", ".join(filter(None, words)) + (f"; {entry['cause']}" if entry["cause"] else ""))

    def finish(self, result: RunResult) -> None:
        """Say how a run that belongs to no comparison ended; the gradient norm stays that of its last row."""
        curve = {"grad_norm": [self.states[self.current].grad_norm]}
        self.end(asdict(result) | {"status": "finished", "curve": curve}, self.current)


class LiveTable(PlainLines):
    """One table with a line for each run, redrawn at most four times a second."""

    def __init__(
        self,
        states: Sequence[RunState],
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        jobs: int = 1,
    ) -> None:
        super().__init__(states, console.print, clock, jobs)
        self.console = console
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render, transient=False)

    def __enter__(self) -> "LiveTable":
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """The table says it."""

    def render(self) -> Group:
        """Draw the table; with many runs only those around the current one, so that it fits the screen."""
        room = max(5, self.console.height - 6)
        first = max(0, min(self.current - room // 2, len(self.states) - room))
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("placement", "status"):
            table.add_column(name, no_wrap=True)
        metric = self.states[0].metric
        measured = () if metric is None else (metric.title,)
        for name in ("lr", "seed", "step", "loss", "best val", *measured, "grad norm", "tok/s", "left", "spikes"):
            table.add_column(name, justify="right", no_wrap=True)
        for state in self.states[first : first + room]:
            table.add_row(
                *cells(state, remaining(self.states, state)), style="red" if state.outcome else STYLES[state.status]
            )
        done = sum(state.status == "finished" for state in self.states)
        left = duration(remaining_in_all(self.states, self.jobs))
        return Group(table, Text(f"{done} of {len(self.states)} runs finished, {left} left", style="dim"))


def cells(state: RunState, left: float | None) -> Iterable[str]:
    """The cells of a run in the live table."""
    return (
        label(state.placement),
        state.outcome or state.status.replace("_", " "),
        rate(state.lr),
        str(state.seed),
        f"{state.step}/{state.steps}",
        number(state.loss),
        number(state.best),
        *(() if state.metric is None else (score(state.score),)),
        short(state.grad_norm),
        "-" if state.tokens_per_second is None else f"{state.tokens_per_second:.0f}",
        duration(left) if state.status in ("running", "pending") else "-",
        str(state.spikes),
    )


def display(states: Sequence[RunState], console: Console, jobs: int = 1) -> PlainLines:
    """A live table on a terminal, plain lines elsewhere."""
    if console.is_terminal:
        return LiveTable(states, console, jobs=jobs)
    return PlainLines(states, partial(say, console), jobs=jobs)


def say(console: Console, text: str) -> None:
    """Print plain text: a path or a number is not decorated, and a path is not broken into lines."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
