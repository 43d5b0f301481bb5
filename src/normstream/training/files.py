"""Writing that leaves either the old file or the whole new one, also when the power fails in between."""

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders; it journals their entries
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name, then puts it in place at once.

    Raises OSError that names the file, and leaves it as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            advice = "make room there, or make it writable, and try again"
            raise OSError(error.errno, f"cannot write: {error.strerror} ({advice})", str(path)) from error
        raise


def write_json(path: Path, values: dict[str, Any]) -> None:
    """``write_text`` of strict JSON (no NaN)."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError that names the file if it is cut off or not JSON."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"cannot read {path}: expected a JSON object")
    return values
