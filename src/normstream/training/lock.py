"""One process at a time in a folder."""

import os
import sys
from pathlib import Path
from types import TracebackType

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1024, os.SEEK_SET)  # behind the process id: nobody else can read a locked byte
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """While entered, nobody else can enter a lock of the same folder; the folder is made if it is not there.

    The file ``.lock`` in it holds the process id and stays there. The lock itself belongs to the operating system,
    which frees it when the process ends, however it ends.

    Raises ValueError that names the process that holds the lock.

    >>> folder = getfixture("tmp_path") / "run"
    >>> with FolderLock(folder):
    ...     (folder / ".lock").exists()
    True
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = -1

    def __enter__(self) -> "FolderLock":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._descriptor)
        except (BlockingIOError, PermissionError):  # the second is what Windows says
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            owner = os.read(self._descriptor, 16).decode().strip()
            os.close(self._descriptor)
            raise ValueError(
                f"{self.folder} is in use by process {owner}; let it end, or stop it, or choose another folder"
            ) from None
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, f"{os.getpid():<10}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
