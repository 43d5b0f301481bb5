"""When OpenMP's threads are let sleep: decisions on a made-up machine, and that nothing but time depends on them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normstream.data import Data
from normstream.training import TrainConfig, loop, read_metrics, spinning, train
from normstream.training.spinning import SpinControl, spinning_threads

Make = Callable[..., TrainConfig]


class Machine:
    """Two threads; an update takes so long by whether they sleep and whether another process is at work."""

    def __init__(self, spinning_alone: float, sleeping_alone: float, spinning: float, sleeping: float) -> None:
        self.seconds = {
            (False, False): spinning_alone,
            (True, False): sleeping_alone,
            (False, True): spinning,
            (True, True): sleeping,
        }
        self.control = SpinControl(threads=2)

    def slept(self, updates: int, busy: bool) -> list[bool]:
        """Whether threads slept during each of the updates."""
        found = []
        for _ in range(updates):
            sleeps = self.control.sleeps
            found.append(sleeps)
            wall = self.seconds[sleeps, busy]
            self.control.note(wall, cpu=wall * (1.0 if busy else 1.2 if sleeps else 1.9))
        return found


@pytest.fixture(autouse=True)
def teams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to teams, which are none here."""
    events: list[str] = []

    class Team:
        def __init__(self) -> None:
            events.append("open")

        def close(self) -> None:
            events.append("close")

    monkeypatch.setattr(spinning, "IdleTeam", Team)
    return events


def test_alone_nothing_is_tried(teams: list[str]):
    assert not any(Machine(0.1, 0.25, 2.0, 0.2).slept(5000, busy=False))
    assert not teams


def test_one_thread_has_nobody_to_wait_for(teams: list[str]):
    control = SpinControl(threads=1)
    for _ in range(100):
        control.note(1.0, 0.5)
    assert not teams


def test_another_process_comes_and_goes(teams: list[str]):
    machine = Machine(0.1, 0.25, 2.0, 0.2)
    assert not any(machine.slept(20, busy=False))
    first = machine.slept(400, busy=True)
    assert first.index(True) <= 10
    assert sum(first) > 380  # spinning is tried again, and is far slower
    assert teams[:3] == ["open", "close", "open"]
    last = machine.slept(1000, busy=False)
    assert not any(last[300:])
    assert teams.count("open") == teams.count("close")


def test_sleep_that_does_not_help_ends(teams: list[str]):
    machine = Machine(1.0, 1.0, 1.0, 0.95)
    slept = machine.slept(200, busy=True)
    assert 0 < sum(slept) < 20
    assert teams == ["open", "close"] * (len(teams) // 2)


def test_the_first_updates_do_not_count():
    machine = Machine(1.0, 1.0, 1.0, 0.1)
    assert not any(machine.slept(5, busy=True))
    assert machine.slept(1, busy=True) == [True]


def test_close_lets_them_spin_again(teams: list[str]):
    machine = Machine(1.0, 1.0, 1.0, 0.1)
    machine.slept(10, busy=True)
    assert machine.control.sleeps
    machine.control.close()
    machine.control.close()
    assert teams == ["open", "close"]


def test_runs_do_not_depend_on_it(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # real teams
    train(config(dropout=0.1), tmp_path / "plain", data=data)
    for name, value in {"WINDOW_SECONDS": 0.0, "PATIENCE_SECONDS": 0.0, "MOSTLY_RUNNING": 100.0}.items():
        monkeypatch.setattr(spinning, name, value)
    monkeypatch.setattr(loop, "spinning_threads", lambda device: 2)
    seen: list[bool] = []

    def on_row(row: dict[str, Any]) -> None:
        seen.append("idle OpenMP team" in [thread.name for thread in threading.enumerate()])

    train(config(dropout=0.1), tmp_path / "sleeping", data=data, on_row=on_row)
    assert any(seen)
    assert not all(seen)
    one, two = (read_metrics(tmp_path / run / "metrics.jsonl", "train") for run in ("plain", "sleeping"))
    assert [row["loss"] for row in one] == [row["loss"] for row in two]
    assert "idle OpenMP team" not in [thread.name for thread in threading.enumerate()]


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(spinning.sys, "platform", "linux")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    cpu = torch.device("cpu")
    assert spinning_threads(cpu) == 6
    assert spinning_threads(torch.device("cuda")) == 1
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "1000")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert spinning_threads(cpu) == 1
    monkeypatch.setattr(spinning.sys, "platform", "darwin")
    assert spinning_threads(cpu) == 1
