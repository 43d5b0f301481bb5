import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normstream.data import Data
from normstream.training import Interrupted, TrainConfig, config_to_yaml, list_checkpoints, train

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")


def hang_up(row: dict[str, Any]) -> None:
    if row["step"] == 2:
        signal.raise_signal(signal.SIGHUP)


def test_closed_terminal_saves_a_checkpoint(config: Callable[..., TrainConfig], data: Data, tmp_path: Path):
    with pytest.raises(Interrupted) as stopped:
        train(config(), tmp_path / "run", data=data, on_row=hang_up)
    assert stopped.value.code == 129
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000002"]


def test_nohup_goes_on(config: Callable[..., TrainConfig], data: Data, tmp_path: Path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(config(), tmp_path / "run", data=data, on_row=hang_up).steps == 12
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_second_hang_up_changes_nothing(config: Callable[..., TrainConfig], data: Data, tmp_path: Path):
    def twice(row: dict[str, Any]) -> None:
        hang_up(row)
        hang_up(row)

    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", data=data, on_row=twice)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000002"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads and fork; the child execs at once
def test_command_in_a_terminal_that_is_closed(config: Callable[..., TrainConfig], tmp_path: Path):
    """The live table can then no longer be drawn; the exit status is 129 all the same."""
    import pty

    (tmp_path / "config.yaml").write_text(config_to_yaml(config(steps=100_000, eval_every=100_000)))
    run = tmp_path / "run"
    code = "from normstream.cli import main; main()"
    process, terminal = pty.fork()
    if process == 0:
        arguments = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(run)]
        os.execve(sys.executable, [sys.executable, "-c", code, *arguments], os.environ | {"TERM": "xterm"})
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 5:
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    assert len(list_checkpoints(run / "checkpoints")) >= 1
