import io
from contextlib import suppress

import pytest
from rich.console import Console

from normstream.lab.live import LiveTable, PlainLines, RunState, display, remaining, remaining_in_all
from normstream.training import RunResult

FINISHED = {
    "status": "finished", "steps": 10, "train_loss": 2.5, "best_val_loss": 2.4, "spikes": 1, "tokens_per_second": 900.0,
    "curve": {"grad_norm": [3.0]}, "diverged": False, "collapsed": False, "seconds": 20.0, "cause": None,
    "metrics": {},
}  # fmt: skip

RESULT = RunResult(
    steps=10, train_loss=2.5, val_loss=2.4, best_val_loss=2.4, diverged=False, diverged_step=None, cause=None,
    collapsed=True, baseline_loss=2.4, metrics={"accuracy": 50.0},
    spikes=0, skipped=0, tokens_per_second=900.0, seconds=20.0, parameters=1,
    non_embedding_parameters=1,
)  # fmt: skip


def train_row(step: int, loss: float | None = 3.0) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "grad_norm": 0.5, "tokens_per_second": 1234.5}


def two_states() -> list[RunState]:
    return [RunState("pre", 0.002, 0, steps=10), RunState("siamese", 0.002, 0, steps=10)]


def test_time_left_follows_the_pace():
    first, second = states = two_states()
    assert remaining_in_all(states) is None
    first.status = "running"
    first.take(train_row(1), now=100.0)
    first.take(train_row(3), now=104.0)  # 2 s a step
    assert remaining(states, first) == pytest.approx(14.0)
    assert remaining(states, second) == pytest.approx(20.0)
    assert remaining_in_all(states) == pytest.approx(34.0)
    first.close(FINISHED)
    assert remaining_in_all(states) == pytest.approx(20.0)  # 10 steps at 20 s / 10 steps


def test_a_resumed_run_measures_only_its_new_steps():
    state = RunState("pre", 0.002, 0, steps=100)
    state.take(train_row(91), now=0.0)
    state.take(train_row(96), now=5.0)
    assert remaining([state], state) == pytest.approx(4.0)


def test_best_ignores_losses_that_are_not_finite():
    state = RunState("pre", 0.002, 0, steps=10)
    for loss in (2.5, 2.3, None, 2.4):
        state.take({"kind": "eval", "step": 1, "loss": loss}, now=0.0)
    assert state.best == 2.3


def test_divergence_is_shown():
    state = RunState("pre", 0.002, 0, steps=10)
    state.take(train_row(1, loss=None), now=0.0)
    state.take({"kind": "event", "step": 1, "event": "diverged", "cause": "training loss is nan"}, now=0.0)
    assert state.outcome == "diverged"


def test_plain_lines():
    said: list[str] = []
    times = iter(range(0, 100, 2))
    lines = PlainLines(two_states(), said.append, clock=lambda: float(next(times)))
    with lines:
        lines.start(0)
        lines.row(train_row(1))
        lines.row(train_row(2))
        lines.row({"kind": "eval", "step": 2, "loss": 2.75})
        lines.end(FINISHED, 0)
    assert said == [
        "[1/2] Pre-Norm lr 0.002 seed 0: starts, 10 steps",
        "[1/2] Pre-Norm lr 0.002 seed 0: step 2/10, loss 3.000, validation 2.750, gradient norm 0.5, 1234 tokens/s, "
        "left 16s, in all 36s",
        "[1/2] Pre-Norm lr 0.002 seed 0: finished, best validation loss 2.400",
    ]


@pytest.mark.parametrize("steps_now", [[], [9, 10]])
def test_a_single_run(steps_now):
    """A run outside of a comparison is said to start with its first row; one that had ended before has no row."""
    said: list[str] = []
    state = RunState("pre", 0.002, 0, steps=10)
    with PlainLines([state], said.append) as show:
        assert said == []
        for step in steps_now:
            show.row(train_row(step))
        show.finish(RESULT)
    assert (state.step, state.status, state.outcome) == (10, "finished", "collapsed")
    assert state.grad_norm == (0.5 if steps_now else None)
    assert said == ["[1/1] Pre-Norm lr 0.002 seed 0: starts, 10 steps"] * bool(steps_now) + [
        "[1/1] Pre-Norm lr 0.002 seed 0: finished, collapsed, best validation loss 2.400"
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_is_broken_off(terminal):
    states = two_states()
    show = display(states, Console(file=io.StringIO(), force_terminal=terminal))
    with suppress(KeyboardInterrupt), show:
        show.row(train_row(1))
        raise KeyboardInterrupt
    assert [state.status for state in states] == ["interrupted", "pending"]


def test_chooses_by_terminal():
    assert type(display(two_states(), Console(file=io.StringIO()))) is PlainLines
    assert type(display(two_states(), Console(file=io.StringIO(), force_terminal=True))) is LiveTable


def test_table_shows_every_column():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, height=30)
    states = two_states()
    with display(states, console) as show:
        show.start(0)
        show.row(train_row(4, loss=2.875))
        show.row({"kind": "eval", "step": 4, "loss": 2.625})
        show.end(FINISHED | {"diverged": True}, 0)
        show.start(1)
    text = written.getvalue()
    for word in (
        "Pre-Norm",
        "SiameseNorm",
        "best val",
        "grad norm",
        "tok/s",
        "spikes",
        "diverged",
        "1 of 2 runs finished",
    ):
        assert word in text


def test_table_of_many_runs_keeps_the_current_one_in_sight():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=20)
    states = [RunState("pre", 0.002, seed, steps=10) for seed in range(100)]
    table = LiveTable(states, console)
    table.start(70)
    with console.capture() as captured:
        console.print(table.render())
    assert len(captured.get().splitlines()) <= 20
    assert "running" in captured.get()
