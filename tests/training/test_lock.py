import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normstream.data import Data
from normstream.training import TrainConfig, train
from normstream.training.lock import FolderLock

Make = Callable[..., TrainConfig]
HOLDER = """
import sys, time
from pathlib import Path
from normstream.training.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_lock_names_the_holder_and_writes_nothing(tmp_path: Path):
    with FolderLock(tmp_path / "run"):
        before = (tmp_path / "run" / ".lock").read_bytes()
        assert int(before) == os.getpid()
        with pytest.raises(ValueError, match=f"run is in use by process {os.getpid()};"), FolderLock(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / ".lock").read_bytes() == before
    with FolderLock(tmp_path / "run"):
        pass


def test_killed_process_frees_its_lock(config: Make, data: Data, tmp_path: Path):
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for resume in (False, True):
            with pytest.raises(ValueError, match=f"run is in use by process {holder.pid};"):
                train(config(), run, data=data, resume=resume)
        assert [path.name for path in run.iterdir()] == [".lock"]
        holder.kill()
        holder.wait()
    assert train(config(steps=1), run, data=data).steps == 1


def test_run_holds_its_lock(config: Make, data: Data, tmp_path: Path):
    def on_row(row: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="in use by process"):
            train(config(), tmp_path / "run", data=data, resume=True)

    assert train(config(steps=2), tmp_path / "run", data=data, on_row=on_row).steps == 2


def test_folder_that_another_process_began_meanwhile(
    config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both have found no folder; the one that gets its lock second finds the first one's run."""
    run, enter = tmp_path / "run", FolderLock.__enter__

    def late(self: FolderLock) -> FolderLock:
        monkeypatch.undo()
        train(config(steps=1), run, data=data)
        return enter(self)

    monkeypatch.setattr(FolderLock, "__enter__", late)
    with pytest.raises(ValueError, match="exists already"):
        train(config(steps=2), run, data=data)
    assert json.loads((run / "result.json").read_text())["steps"] == 1
