"""What this machine offers to a training run, and the two settings of the process that use it.

*Threads.* A thread for each physical core is what matrix products want: a second one on the same core adds nothing and
waits at every barrier, and so does a thread that a container's quota stops.

*Allocator.* glibc returns every large block to the system when it is freed, and whatever is free at the end of its
heap, so that each output of an operation is mapped and zeroed page by page again. It can be told to keep its memory.
"""

import ctypes
import math
import os
import shlex
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from normstream.ops import build

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Names of mallopt's parameters, from glibc's malloc.h."""
OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
TUNED = "glibc keeps freed memory"


def physical_cores() -> int:
    """Cores that this process may run on, at least 1: two hyper-threads of a core count once, and a quota counts.

    Known on Linux; elsewhere it is torch's own number of threads.

    >>> physical_cores() >= 1
    True
    """
    if not hasattr(os, "sched_getaffinity"):
        return torch.get_num_threads()
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, int(min(len(cores), cgroup_quota())))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores a container's quota allows, rounded up; infinity without one.

    >>> cgroup_quota(Path("no/such/folder"))
    inf
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = (float(word) for name in names for word in (root / name).read_text().split())
        except (OSError, ValueError):  # ValueError: the quota is the word max
            continue
        if quota > 0:
            return math.ceil(quota / period)
    return math.inf


def use_physical_cores() -> int:
    """Lowers torch's threads to the physical cores, where OMP_NUM_THREADS and MKL_NUM_THREADS do not say how many.

    A number that is lower already stays. Returns the number of threads.
    """
    if not os.environ.get("OMP_NUM_THREADS") and not os.environ.get("MKL_NUM_THREADS"):
        cores = physical_cores()
        if torch.get_num_threads() > cores:
            torch.set_num_threads(cores)
    return torch.get_num_threads()


def tune_allocator() -> str:
    """Makes glibc's malloc keep what is freed: no block is mapped on its own, and the heap never shrinks.

    The setting holds for the whole process and until it ends, and so does the memory: its peak does not grow, but
    what the peak took is not given back. Returns what was done, or why nothing was.
    """
    if (reason := why_not_tuned()) is not None:
        return reason
    mallopt = ctypes.CDLL(None).mallopt
    done = mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return TUNED if done else "glibc refused the settings"


def why_not_tuned() -> str | None:
    """Why ``tune_allocator`` has nothing to do here, None if it has."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    except (AttributeError, OSError, ValueError):  # Windows has no confstr, musl no such name
        libc = None
    if not (libc or "").startswith("glibc"):
        return "not glibc: left as it is"
    loaded = os.environ.get("LD_PRELOAD", "")
    if other := next((name for name in OTHER_ALLOCATORS if name in loaded), None):
        return f"{other} is preloaded: left as it is"
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    given = [name for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_") if name in os.environ]
    if given or "glibc.malloc" in tunables:
        return f"set by {', '.join(given) or 'GLIBC_TUNABLES'}: left as it is"
    return None


def compiler() -> str | None:
    """Command and version of the first C++ compiler that runs: CXX, or else g++ or clang++; None without one."""
    for command in build.compilers():
        with suppress(build.CompilerError):
            said = build.version(command)
            return f"{shlex.join(command)}, {said.splitlines()[0] if said else 'of unknown version'}"
    return None


def triton_version() -> str | None:
    """The version of triton (of torch's own build or any other), None if there is none."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def why_no_compile(device: torch.device) -> str | None:
    """What torch.compile lacks to compile for a device, None if nothing is known to be missing."""
    import torch._dynamo.eval_frame as dynamo  # takes a second

    if not dynamo.is_dynamo_supported():
        return "torch does not support it with this Python"
    if device.type == "cuda":
        return None if triton_version() else "triton is missing"
    if compiler() is None:
        return "no C++ compiler"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"{header} is missing (Debian: python3-dev)"


def _siblings(cpu: int) -> str:
    """The hyper-threads of a processor's core, as Linux writes them; the processor alone where it does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
