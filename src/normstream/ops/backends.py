"""Which code runs a fused junction: C++ on a CPU, Triton on a GPU, or nothing, and why."""

import functools
import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from normstream.names import check_choice
from normstream.ops import cpu
from normstream.ops.form import MOST_COLUMNS_IN_TRITON

Backend = Literal["auto", "plain", "cpp", "triton"]


@torch.compiler.assume_constant_result
def backend_for(device: str, dim: int, wanted: Backend) -> bool:
    """Whether a fused junction of that width runs on a kind of device, with ``wanted`` as the user's wish.

    Raises:
        ValueError: for an unknown name, or one that cannot be had on this device.

    >>> backend_for("cpu", 8, "plain")
    False
    """
    check_choice("backend", wanted, Backend)
    if wanted == "plain" or device not in ("cpu", "cuda"):
        return False
    name = cpu_backend() if device == "cpu" else "triton"
    there = cpu.available() if name == "cpp" else triton_available()
    if wanted != "auto" and (wanted != name or not there):
        raise ValueError(f"the backend {wanted} cannot run on {device} here; {status()[wanted]}; take auto or plain")
    return there and (name == "cpp" or dim <= MOST_COLUMNS_IN_TRITON)


def cpu_backend() -> Literal["cpp", "triton"]:
    """What runs on a CPU: C++, or with ``TRITON_INTERPRET=1`` in the environment Triton's interpreter."""
    return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "cpp"


@functools.cache
def triton_available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@functools.cache
def module_of(backend: str) -> ModuleType:
    """The module with ``junction`` and ``junction_backward``; Triton is imported here, and only when it is used."""
    return import_module({"cpp": "normstream.ops.cpu", "triton": "normstream.ops.triton_junction"}[backend])


def status() -> dict[str, str]:
    """What is there for fused junctions, and what is missing.

    >>> list(status())
    ['cpp', 'triton']
    """
    reason = cpu.why_missing()
    cpp = "compiled for the CPU" if reason is None else f"missing: {reason}"
    if not triton_available():
        triton = "Triton is not installed"
    elif torch.cuda.is_available():
        triton = "runs on the GPU"
    else:
        triton = "installed, but there is no GPU (TRITON_INTERPRET=1 runs it, slowly, on the CPU)"
    return {"cpp": cpp, "triton": triton}
