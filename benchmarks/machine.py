"""What the figures were measured on: the machine, its versions, and how fast it copies and multiplies."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Case
from normstream.machine import physical_cores

PACKAGES = ("torch", "triton", "numpy", "transformers", "x-transformers", "litgpt", "liger-kernel", "quack-kernels")
ROOT = Path(__file__).parent.parent


def machine(device: torch.device) -> dict[str, Any]:
    """Facts about the machine that explain a figure; what a system does not tell is left out.

    >>> machine(torch.device("cpu"))["cores"] > 0
    True
    """
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": physical_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "caches": caches(),
    }
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        facts["huge pages"] = re.sub(r".*\[(\w+)\].*", r"\1", pages.read_text().strip())
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory in GiB"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory in GiB": round(gpu.total_memory / 2**30),
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts


def machine_class(device: torch.device) -> str:
    """Machines whose figures may stand in one table: part of a result's file name.

    >>> machine_class(torch.device("cpu")).startswith("cpu-")
    True
    """
    if device.type == "cuda":
        return "cuda-" + _slug(torch.cuda.get_device_properties(device).name)
    return f"cpu-{_slug(torch.backends.cpu.get_cpu_capability())}-{physical_cores()}-cores"


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working tree, with a plus if tracked files differ from it; empty outside of a clone."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_model() -> str:
    """The processor's own name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def caches() -> dict[str, str]:
    """The sizes of the first core's data caches by level.

    >>> all(level.startswith("L") for level in caches())
    True
    """
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() != "Instruction":
                sizes["L" + (index / "level").read_text().strip()] = (index / "size").read_text().strip()
        except OSError:
            continue
    return sizes


def copy_cases(like: Tensor) -> dict[str, Case]:
    """Copies of a tensor of this size and dtype into memory that is already there, by torch and by numpy's memcpy.

    The rate of a copy counts the bytes that are read and those that are written.

    >>> list(copy_cases(torch.ones(2)))
    ['copy by torch', 'copy by numpy']
    """
    source, target = like.detach().clone(), torch.zeros_like(like)
    cases: dict[str, Case] = {"copy by torch": {"copy": lambda: target.copy_(source)}}
    if like.device.type == "cpu":
        from_numpy, to_numpy = (t.view(torch.uint8).numpy() for t in (source.flatten(), target.flatten()))
        cases["copy by numpy"] = {"copy": lambda: np.copyto(to_numpy, from_numpy)}
    return cases


def gemm_cases(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Case]:
    """Products of two square matrices, whose best rate stands for what the machine can multiply in this dtype.

    >>> list(gemm_cases((8,), torch.float32, torch.device("cpu")))
    ['product of 8']
    """
    cases: dict[str, Case] = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=dtype)
        cases[f"product of {size}"] = {"product": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}
    return cases


def _git(*arguments: str) -> str:
    result = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
