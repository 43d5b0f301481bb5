"""Triton kernels without a GPU: what they compute, in Triton's interpreter, and what they compile to for an H200."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":  # on Linux the tests' environment has it
    pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from normstream.ops.triton_backward import backward
from normstream.ops.triton_forward import forward
from normstream.ops.triton_junction import options, tile

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment: str) -> None:
    """Runs ``triton_cases.py`` in a process of its own: Triton decides when it is imported whether it interprets."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed, done.stdout
    assert int(passed[1]) > 100


def test_kernels_in_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kernels_on_a_gpu() -> None:
    run_cases()


def compiled(kernel: Any, arguments: dict[str, Any], dim: int) -> Any:
    """A kernel as it runs on an H200; arguments: a type, such as ``*bf16``, or the value of a constant."""
    size = tile(dim)
    arguments = arguments | {"DIM": dim, "ROWS": size.rows, "BLOCK": size.block}
    values = {name: arguments.get(name) for name in kernel.arg_names}
    signature = {name: value if isinstance(value, str) else "constexpr" for name, value in values.items()}
    constants = {name: value for name, value in values.items() if not isinstance(value, str)}
    aligned = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options(size.warps)).asm


def stack(cubin: bytes, folder: Path) -> int:
    """Bytes of a thread's numbers for which the registers did not suffice."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1])


@pytest.mark.skipif(knobs.runtime.interpret, reason="kernels are interpreted in this process, not compiled")
@pytest.mark.parametrize("dim", [1000, 2048, 4096])
def test_siamese_kernels_on_an_h200_move_16_bytes_at_once_and_keep_rows_in_registers(
    dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    streams = ("update", "x", "y", "x_out", "y_out", "z", "raw_x", "dz", "dx_out", "dy_out", "saved_x", "saved_y")
    numbers = ("scale", "read_scale", "alpha", "second", "eps_out", "eps_x", "eps_y", "eps_in")
    given = dict.fromkeys((*streams, "d_update", "d_x", "d_y"), "*bf16") | dict.fromkeys(numbers, "fp32")
    given |= dict.fromkeys(("x_gain", "y_gain", "in_gain", "stats", "partials"), "*fp32")
    given |= {"n_rows": "i32", "OUT": 0, "X": 1, "Y": 1, "IN": 1, "TWO": True, "N_PARAMETERS": 3, "STAGES": 2}

    once = compiled(forward, given, dim)
    back = compiled(backward, given | {"update": None}, dim)
    assert (once["ptx"].count("ld.global.v4"), once["ptx"].count("st.global.v4")) == (
        3 + 3 * 2,
        4,
    )  # three gains, float32
    assert back["ptx"].count("cp.async.cg.shared.global") == 2 * 5  # two rows of dz, dx', dy', h and y'
    assert [stack(code["cubin"], tmp_path) for code in (once, back)] == [0, 0]
