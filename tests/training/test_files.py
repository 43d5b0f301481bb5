import errno
import os
from pathlib import Path

import pytest

from normstream.training.files import write_text


def test_full_disk_names_the_file_and_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.yaml"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write: No space left on device \(make room.*config\.yaml") as raised:
        write_text(path, "new")
    assert raised.value.errno == errno.ENOSPC
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("config.yaml", "old")]
