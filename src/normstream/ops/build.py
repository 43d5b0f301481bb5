"""Compiling ``junction.cpp`` when it is first needed, and keeping the result in the user's cache folder."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("junction.cpp")
HEADER = SOURCE.with_name("rows.h")
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)


@contextmanager
def library() -> Iterator[Path]:
    """The compiled library, compiled now unless that has been done; a damaged one is compiled anew.

    Where the cache folder cannot be written to, the library is only there while the context is open.

    Raises:
        OSError: without a compiler, or if it fails; the message says what it said.
    """
    problems = []
    for compiler in compilers():
        try:
            name = f"junction-{_key(compiler)}.so"
            with tempfile.TemporaryDirectory() as temporary:
                folder = cache_folder() or Path(temporary)
                if not _loads(folder / name):
                    _compile(compiler, folder / name)
                yield folder / name
            return
        except CompilerError as error:
            problems.append(str(error))
    missing = "there is no C++ compiler: neither g++ nor clang++ is on the PATH, and CXX is not set"
    raise OSError("; ".join(problems) or missing)


class CompilerError(Exception):
    """A compiler is not there, or fails.

    >>> raise CompilerError("g++ failed")
    Traceback (most recent call last):
    normstream.ops.build.CompilerError: g++ failed
    """


def compilers() -> list[list[str]]:
    """The commands to try: that of ``CXX``, which may have arguments, or else g++ and clang++.

    >>> len(compilers()) < 3
    True
    """
    if given := shlex.split(os.environ.get("CXX", "")):
        return [given]
    return [[path] for path in map(shutil.which, ("g++", "clang++")) if path is not None]


def version(compiler: list[str]) -> str:
    """What a compiler says of itself.

    Raises:
        CompilerError: if it does not run.
    """
    return _run([*compiler, "--version"])


def cache_folder() -> Path | None:
    """Where compiled libraries are kept, normstream in ``XDG_CACHE_HOME`` or ``~/.cache``; None if it is read-only.

    >>> str(cache_folder() or "normstream")[-10:]
    'normstream'
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normstream"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _key(compiler: list[str]) -> str:
    """A name for all that the result depends on."""
    key = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes())
    key.update(repr((FLAGS, version(compiler), platform.machine(), _processor())).encode())
    return key.hexdigest()[:16]


def _loads(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def _compile(compiler: list[str], target: Path) -> None:
    """Compiles under another name first, so that the library is there as a whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        _run([*compiler, *FLAGS, str(SOURCE), "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> str:
    """What a command says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CompilerError(f"{shlex.join(command)} does not run: {error}") from error
    if done.returncode:
        raise CompilerError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _processor() -> str:
    """What tells processors apart that need different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
