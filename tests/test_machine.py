"""What is known about the machine, and the settings of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normstream import machine

LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
FAULTS = """
import resource
import torch

def faults():
    x, before = torch.ones(2**24), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        x = x * 1.5
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

import normstream
from normstream import machine
faults()
as_it_is = faults()
said = machine.tune_allocator()
faults()
print(as_it_is, faults(), said, sep=",")
"""


@LINUX
def test_hyper_threads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "cgroup_quota", lambda: float("inf"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 7})
    monkeypatch.setattr(machine, "_siblings", {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 7: "3,7"}.__getitem__)
    assert machine.physical_cores() == 3
    monkeypatch.setattr(machine, "cgroup_quota", lambda: 2)
    assert machine.physical_cores() == 2


def test_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert machine.physical_cores() == torch.get_num_threads()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu.max": "nonsense"}, float("inf")),
    ],
)
def test_quota_of_a_container(files: dict[str, str], cores: float, tmp_path: Path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert machine.cgroup_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("cores", "before", "variables", "after"),
    [
        (4, 8, {}, 4),
        (4, 2, {}, 2),
        (4, 8, {"OMP_NUM_THREADS": "8"}, 8),
        (4, 8, {"MKL_NUM_THREADS": "8"}, 8),
        (4, 8, {"OMP_NUM_THREADS": ""}, 4),
    ],
)
def test_threads(cores: int, before: int, variables: dict[str, str], after: int, monkeypatch: pytest.MonkeyPatch):
    """No more than cores, unless the user says so; a lower number stays."""
    threads = [before]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "physical_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert machine.use_physical_cores() == after


def test_freed_memory_stays_once_the_allocator_is_tuned_and_not_before():
    """Every output of 64 MiB is mapped anew, 16,384 pages, until then; an import changes nothing."""
    if reason := machine.why_not_tuned():
        pytest.skip(reason)
    result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    as_it_is, tuned, said = result.stdout.strip().split(",")
    assert int(as_it_is) > 20 * 16_000
    assert int(tuned) < 4 * 16_384  # at most a few blocks are new to the heap
    assert said == machine.TUNED


def no_name(name: str) -> str:
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "jemalloc is preloaded"),
        ({"MALLOC_MMAP_MAX_": "5"}, "set by MALLOC_MMAP_MAX_"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, "set by GLIBC_TUNABLES"),
    ],
)
def test_an_allocator_that_the_user_chose_is_left_alone(
    variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36", raising=False)
    monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2}, raising=False)
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert machine.why_not_tuned() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.tune_allocator().startswith(reason)


@pytest.mark.parametrize("system", ["musl", "macOS", "Windows"])
def test_no_glibc(system: str, monkeypatch: pytest.MonkeyPatch):
    if system == "Windows":
        monkeypatch.delattr(os, "confstr_names", raising=False)
        monkeypatch.delattr(os, "confstr", raising=False)
    elif system == "macOS":
        monkeypatch.setattr(os, "confstr_names", {"CS_PATH": 1})
    else:
        monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2}, raising=False)
        monkeypatch.setattr(os, "confstr", no_name, raising=False)
    assert machine.tune_allocator() == "not glibc: left as it is"


def test_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, line in (("my-cxx", "mine 1.2.3"), ("g++", "g++ (Made up) 12.2.0"), ("clang++", "clang 18")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.compiler() == f"{tmp_path / 'g++'}, g++ (Made up) 12.2.0"
    monkeypatch.setenv("CXX", "my-cxx")
    assert machine.compiler() == "my-cxx, mine 1.2.3"
    monkeypatch.setenv("CXX", "my-cxx -Wall")
    assert machine.compiler() == "my-cxx -Wall, mine 1.2.3"
    monkeypatch.setenv("CXX", "not-there")
    assert machine.compiler() is None
    monkeypatch.delenv("CXX")
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    assert machine.compiler() == f"{tmp_path / 'clang++'}, clang 18"
    (tmp_path / "clang++").unlink()
    assert machine.compiler() is None


def test_what_compilation_lacks(monkeypatch: pytest.MonkeyPatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("torch._dynamo.eval_frame.is_dynamo_supported", lambda: True)
    monkeypatch.setattr(machine, "compiler", lambda: None)
    monkeypatch.setattr(machine, "triton_version", lambda: None)
    assert machine.why_no_compile(cpu) == "no C++ compiler"
    assert machine.why_no_compile(gpu) == "triton is missing"
    monkeypatch.setattr(machine, "compiler", lambda: "g++")
    monkeypatch.setattr(machine, "triton_version", lambda: "3.9.0")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: "/no/such/folder")
    assert machine.why_no_compile(gpu) is None
    assert "Python.h is missing" in str(machine.why_no_compile(cpu))
    monkeypatch.setattr("torch._dynamo.eval_frame.is_dynamo_supported", lambda: False)
    assert machine.why_no_compile(gpu) == "torch does not support it with this Python"
