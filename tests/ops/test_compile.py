"""Fused junctions inside ``torch.compile``, in a process where annotations are not checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("compile_cases.py")


def test_compiled_junctions() -> None:
    options = [
        "-q",
        "-o",
        "addopts=--import-mode=importlib --strict-markers",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed, done.stdout
    assert int(passed[1]) >= 12
