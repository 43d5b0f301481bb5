"""Runs in processes of their own that die, fail, or are left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normstream.data import DataConfig
from normstream.lab.workers import side_by_side
from normstream.models import DecoderConfig
from normstream.training import TrainConfig, config_to_yaml

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")
SCRIPT = Path(__file__).with_name("left_behind.py")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return TrainConfig(
        model=DecoderConfig(dim=16, n_layers=1, n_heads=2, ffn_dim=16, max_seq_len=16),
        data=DataConfig(source=str(tmp_path / "text.txt"), seq_len=16, validation_fraction=0.2),
        steps=4, batch_size=4, eval_every=4, eval_batches=2, checkpoint_every=100_000, device="cpu",
    )  # fmt: skip


def ends_of(steps: Iterator[Any], seen: Callable[[int, Any], None]) -> tuple[dict[int, Any], BaseException]:
    """How each run ended and what was raised in the end; ``seen`` is called at every start and end."""
    ends: dict[int, Any] = {}
    try:
        for index, status in steps:
            seen(index, status)
            if status is not None:
                ends[index] = status
    except Exception as error:
        return ends, error
    raise AssertionError("nothing was raised")


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def steps_done(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size > 0


def process_of(folder: Path) -> int:
    return int((folder / ".lock").read_text())


def test_a_process_that_dies_takes_only_its_own_run_along(config, tmp_path):
    endless = replace(config, steps=10_000_000)
    runs = [(0, endless, tmp_path / "a"), (1, config, tmp_path / "b"), (2, config, tmp_path / "c")]

    def kill_the_first(index: int, status: Any) -> None:
        if index == 0 and status is None:
            until(lambda: steps_done(tmp_path / "a"))
            os.kill(process_of(tmp_path / "a"), signal.SIGKILL)

    ends, error = ends_of(side_by_side(runs, config, jobs=1), kill_the_first)
    assert isinstance(error, ChildProcessError)
    assert "the process of 1 of the runs died; give the same command and --resume" in str(error)
    assert ends.pop(0) == {
        "status": "interrupted",
        "cause": "its process was killed by SIGKILL, perhaps for lack of memory: try fewer jobs",
    }
    assert ends == {1: {}, 2: {}}
    assert (tmp_path / "c" / "result.json").is_file()


def test_an_error_in_a_run_lets_the_others_save(config, tmp_path):
    endless = replace(config, steps=10_000_000)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "of somebody else").touch()
    # the run with the error comes after one that ends when the endless one is well under way
    runs = [(0, endless, tmp_path / "a"), (1, replace(config, steps=300), tmp_path / "c"), (2, config, tmp_path / "b")]

    def wait_for_the_first(index: int, status: Any) -> None:
        if index == 1 and status is not None:
            until(lambda: steps_done(tmp_path / "a"))

    ends, error = ends_of(side_by_side(runs, config, jobs=2), wait_for_the_first)
    assert isinstance(error, ValueError)
    assert "b has no config.yaml, so it is no run folder" in str(error)
    assert ends == {0: {"status": "interrupted"}, 1: {}, 2: {"status": "interrupted"}}
    assert list((tmp_path / "a" / "checkpoints").glob("step_*"))
    assert "run_folder.py" in "".join(error.__notes__), "where in the other process it happened"


def test_no_process_outlives_the_first_one(config, tmp_path):
    """It is killed without a chance to stop the others; each notices, saves its checkpoint and ends."""
    (tmp_path / "config.yaml").write_text(config_to_yaml(replace(config, steps=10_000_000)))
    folders = [tmp_path / "a", tmp_path / "b"]
    first = subprocess.Popen([sys.executable, SCRIPT, tmp_path / "config.yaml", *folders])
    until(lambda: all(map(steps_done, folders)))
    first.kill()
    first.wait()
    until(lambda: all(list((folder / "checkpoints").glob("step_*")) for folder in folders))
    until(lambda: not any(Path(f"/proc/{process_of(folder)}").exists() for folder in folders))
