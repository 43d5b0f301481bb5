"""The metrics of a run: one JSON object a line, flushed line by line, so that a reader can follow a running one.

============ ====================================================================================================
kind         other keys
============ ====================================================================================================
train        step (from 1, after that update), loss, lr, grad_norm (before clipping), tokens (seen so far),
             tokens_per_second; with a z-loss also z_loss; with experts also balance_loss and router_z_loss, where
             their coefficients are not 0; with QK-Clip also max_logit and clipped_heads; with fp16
             also loss_scale and skipped (updates skipped so far)
layers       step, grad_norm: {embedding, layers: [L], head or null}, rms: {stream: [L + 1]} before layer 0 and
             after each layer; with QK-Clip also max_logit: [L][H]; with experts also experts: {load: [M][E], the
             share of each expert in the tokens of its layer, dropped: [M], the share beyond capacity}, M such layers
eval         step, loss, and the metrics of the task (accuracy ...) that cost little
event        step, event, cause
============ ====================================================================================================

A number that is not finite is written as null, since JSON has none; an event row then gives the cause.
"""

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends rows to a file.

    Args:
        path: the file.
        offset: length in bytes to cut the file to before appending; rows after it belong to updates that are lost.

    Raises:
        ValueError: if the file is shorter than ``offset``.
        OSError: with the file's name, if a row cannot be written.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close)
        size = self._file.tell()
        if size < offset:
            self._file.close()
            raise ValueError(f"{path} has {size} bytes but the checkpoint was saved after {offset}: rows are missing")
        self._file.truncate(offset)
        self._file.seek(offset)

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row."""
        line = json.dumps(finite(row), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"cannot write metrics: {error.strerror}", str(self.path)) from error

    def sync(self) -> int:
        """Forces all rows to the disk and returns the length of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def finite(value: Any) -> Any:
    """The value with every number that is not finite, at any depth, replaced by None.

    >>> finite({"loss": float("nan"), "rms": {"x": [1.0, float("inf")]}})
    {'loss': None, 'rms': {'x': [1.0, None]}}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics file, or those of one kind; a last line that is cut off (by a kill) is left out.

    Raises ValueError that names the file, and the line, if it is missing or any other line is no row.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"cannot read metrics from {path}: {error.strerror}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{path}, line {number}: not a row of metrics, which is a JSON object with a kind")
        rows.append(row)
    return [row for row in rows if kind is None or row["kind"] == kind]
