"""Building the C++ library when it is first needed, and what happens where it cannot be built."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from row_program import Case, case_of, derive, incoming_of, plain_of

from normstream.junctions import set_backend
from normstream.ops import build, calls, cpu, status

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts as compilers")
QUICK = 'exec g++ "$@" -O0'
"""A compiler that takes two seconds instead of ten."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder, and a process that has not looked for the library yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    cpu.available.cache_clear()
    cpu._library.cache_clear()
    yield
    cpu.available.cache_clear()
    cpu._library.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a shell script the compiler."""

    def make(text: str) -> Path:
        script = tmp_path / "c++"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


def falls_back(words: str) -> None:
    """One warning with those words, however many junctions run, and the plain code's numbers; never an error."""
    case: Case = case_of("siamese", 2)
    incoming, before = incoming_of(case), calls.copy()
    with pytest.warns(UserWarning, match=f"(?s)junctions run unfused.*{words}") as warned:
        runs = [derive(case, incoming) for _ in range(3)]
    assert len(warned) == 1
    assert calls == before
    for run in runs:
        for a, b in zip(run, derive(plain_of(case), incoming), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert "compiled" not in status()["cpp"]
    set_backend(case.junction, "cpp")
    with pytest.raises(ValueError, match="cpp"):
        case.junction(case.state, case.update)
    assert not list(folder().glob("*")) if folder().is_dir() else True


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    falls_back(r"neither g\+\+ nor clang\+\+")


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    falls_back("nothing")


BROKEN = {
    "always fails": "echo broken >&2; exit 1",
    "fails on the source": '[ "$1" = --version ] && exit 0; echo "error: no such flag" >&2; exit 1',
    "writes nothing": "exit 0",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler(kind: str, compiler: Callable[[str], Path]) -> None:
    compiler(BROKEN[kind])
    falls_back("error: no such flag" if kind == "fails on the source" else "")


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu.available()  # built in a temporary folder


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose user has no name, Path.home raises RuntimeError."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert build.cache_folder() is None
    assert cpu.available()


def test_a_compiler_with_arguments(compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in CXX="ccache g++"."""
    monkeypatch.setenv("CXX", f"{compiler(QUICK)} -Wall")
    assert cpu.available()


def folder() -> Path:
    path = build.cache_folder()
    assert path is not None
    return path


CHILD = """
import torch
from normstream.ops import calls
from normstream import placements
torch.manual_seed(0)
first = placements.get("siamese").junctions(8, 1)[0]
z = first((), torch.ones(1, 1, 8))[1]
assert calls["cpp junction"] == 1, calls
print(z.sum().item())
"""


def test_two_processes_that_build_at_once(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    """Both have the library; afterwards there is one, nothing is left beside it, and nobody builds it again."""
    log = tmp_path / "log"
    compiler(f'[ "$1" = --version ] || {{ echo >> {log}; sleep 1; }}\n{QUICK}')
    command = [sys.executable, "-W", "error", "-c", CHILD]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [float(child.communicate()[0]) for child in children] == pytest.approx([8.0] * 2, rel=1e-4)
    assert [child.returncode for child in children] == [0, 0]
    (library,) = folder().iterdir()
    assert library.suffix == ".so"
    n_built = len(log.read_text())
    assert n_built in (1, 2)
    assert cpu.available()
    with build.library() as again:
        assert again == library
    assert len(log.read_text()) == n_built


def name_of_library() -> str:
    with build.library() as path:
        return path.name


def test_the_library_is_named_after_what_it_depends_on(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another source, compiler or processor is another library."""
    compiler('[ "$1" = --version ] && { echo one; exit; }\nfor last; do true; done; : > "$last"')
    built = {name_of_library()}
    compiler('[ "$1" = --version ] && { echo two; exit; }\nfor last; do true; done; : > "$last"')
    built.add(name_of_library())
    monkeypatch.setattr(build, "_processor", lambda: "flags: none")
    built.add(name_of_library())
    source = tmp_path / "other.cpp"
    source.write_text("// nothing")
    monkeypatch.setattr(build, "SOURCE", source)
    built.add(name_of_library())
    assert len(built) == len(list(folder().iterdir())) == 4


def test_a_damaged_library(compiler: Callable[[str], Path]) -> None:
    """What is in the cache folder may be anything: then the plain code runs."""
    compiler('[ "$1" = --version ] && exit 0\nfor last; do true; done; echo damaged > "$last"')
    with build.library():
        pass
    with pytest.warns(UserWarning, match="(?s)junctions run unfused"):
        assert not cpu.available()
