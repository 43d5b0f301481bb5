import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normstream.data import Data
from normstream.training import Interrupted, TrainConfig, list_checkpoints, train

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
